"""Rooms and floors: the table in docs/reference/rooms.md is the only list of rooms; imports go down it only."""

import ast
import inspect
import subprocess
import sys
import textwrap
from functools import cache
from pathlib import Path

import pytest

import edgespec
import edgespec.lab
from edgespec.planners.choice import PLANNERS
from edgespec.scheduler.scheduler import Scheduler
from pictures.rooms import floors as table

ROOT = Path(__file__).parent.parent
MOST_ROOMS, MOST_FLOORS = 13, 8
NO_ROOMS = {"__init__.py", "__main__.py", "__pycache__", "py.typed", "machines.yaml", "models.yaml"}
HEAVY = [
    "distributed", "gguf", "huggingface_hub", "jinja2", "llama_cpp", "llguidance", "matplotlib", "ml_dtypes", "mlx",
    "prompt_toolkit", "pydivsufsort", "safetensors", "starlette", "tokenizers", "torch", "transformers", "uvicorn",
]  # fmt: skip


def floors() -> dict[str, int]:
    """Room -> floor."""
    return {room.removesuffix("/").removesuffix(".py"): floor for floor, rooms, _ in table() for room in rooms}


@cache
def nodes(path: Path) -> list[ast.AST]:
    """Of the syntax tree of a file."""
    return [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]


@cache
def modules() -> dict[str, set[str]]:
    """Every module of the package -> the package's modules that it imports, wherever in the file."""
    files = {}
    for folder, package in ((ROOT / "edgespec", "edgespec"), (ROOT / "backends", "edgespec.backends")):
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            files[".".join((package, *parts)).removesuffix(".__init__")] = path
    return {name: {known for known in imported(path, name) if known in files} for name, path in files.items()}


def imported(path: Path, module: str) -> set[str]:
    """Modules that a file imports; of `from a import b` both a and a.b, since b may be a module."""
    found = set[str]()
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join([*package.split(".")[: len(package.split(".")) + 1 - node.level], node.module or ""])
            origin = base.rstrip(".") if node.level else str(node.module)
            found |= {origin, *(f"{origin}.{alias.name}" for alias in node.names)}
    return found


def room_of(module: str) -> str:
    """`edgespec.loop.tree` -> `loop`; "" for the package itself and for `python -m edgespec`."""
    name = (*module.split("."), "")[1]
    return "" if name == "__main__" else name


def test_the_table_lists_every_room() -> None:
    there = {path.stem for path in (ROOT / "edgespec").iterdir() if path.name not in NO_ROOMS} | {"backends"}
    assert set(floors()) == there
    assert len(there - {"backends"}) <= MOST_ROOMS
    assert sorted(set(floors().values())) == list(range(1, max(floors().values()) + 1))
    assert max(floors().values()) <= MOST_FLOORS


def test_imports_go_down() -> None:
    floor = floors()
    for name, found in modules().items():
        room = room_of(name)
        for other in found:
            if room and room_of(other) not in ("", room):
                assert floor[room_of(other)] < floor[room], f"{name} imports {other}"


def test_no_module_imports_itself_in_a_circle() -> None:
    graph, done = modules(), set[str]()

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, " imports ".join((*above[above.index(name) :], name))
        if name not in done:
            for other in graph[name] - {name}:
                visit(other, (*above, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_the_page_shows_the_step_that_runs() -> None:
    code = textwrap.dedent(inspect.getsource(Scheduler.step)).strip()
    assert f"```python\n{code}\n```" in (ROOT / "docs/reference/rooms.md").read_text(encoding="utf-8")
    assert len(code.splitlines()) <= 12  # its name, its purpose, and ten lines


def test_nothing_imports_the_lab() -> None:
    """All others load its methods by name (`LAB` in `planners/choice.py`)."""
    for name, found in modules().items():
        if room_of(name) != "lab":
            assert not {other for other in found if room_of(other) == "lab"}, name


def test_all_else_works_without_the_lab() -> None:
    names = sorted(name for name in modules() if room_of(name) not in ("backends", "lab", "server"))
    script = (
        "import sys; sys.modules['edgespec.lab'] = None\n"
        f"from importlib import import_module; [import_module(name) for name in {names}]\n"
        "from edgespec.errors import UsageError; from edgespec.loading.approximate import find_approximate\n"
        "from edgespec.planners.choice import find_method\n"
        "for find, name in ((find_method, 'pearl'), (find_approximate, 'cascade:0.5')):\n"
        "    try: find(name)\n    except UsageError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    planner, method = done.stdout.splitlines()
    assert planner == f"there is no planner 'pearl'; there are: {', '.join(PLANNERS)}"
    assert method == "there is no approximate method 'cascade'; there are: none"


@pytest.mark.parametrize("name", ["ScaleResult", "ToolCache", "scale"])
def test_names_that_are_in_the_lab_now_work_for_one_more_version(name: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"edgespec.{name} goes with the next version: use edgespec.lab.{name}"):
        assert getattr(edgespec, name) is getattr(edgespec.lab, name)


def test_only_measuring_names_an_engine() -> None:
    """All others load engines by name (`loop/engines.py`)."""
    for name, found in modules().items():
        if room_of(name) not in ("backends", "measure"):
            assert not {other for other in found if room_of(other) == "backends"}, name


ASKS = {
    "cpu_count",
    "getloadavg",
    "machine",
    "platform",
    "processor",
    "sched_getaffinity",
    "sysconf",
    "system",
    "uname",
}
MAY_ASK = {
    "edgespec/machine/disk.py", "edgespec/machine/measurements.py",
    "edgespec/machine/memory.py",
    "edgespec/machine/system.py", "edgespec/machine/this_machine.py",
    "backends/llamacpp/ggml/files.py", "backends/llamacpp/ggml/stop.py",  # names of libraries
    "backends/llamacpp/memory/threads.py",  # the load of other programs while a pass computes
}  # fmt: skip


def test_only_the_edge_asks_the_system() -> None:
    """All others get a `Machine`, so a plan for any machine can be made anywhere."""
    asking, measuring = set[str](), set[str]()
    for path in (*(ROOT / "edgespec").rglob("*.py"), *(ROOT / "backends").rglob("*.py")):
        name = str(path.relative_to(ROOT))
        for node in nodes(path):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.attr in ASKS:
                asking |= {name} if node.value.id in ("os", "platform", "sys") else set()
            elif isinstance(node, ast.ImportFrom) and node.module in ("os", "platform", "sys", "psutil"):
                asking |= {name} if ASKS & {alias.name for alias in node.names} else set()
            elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
                called = node.id if isinstance(node, ast.Name) else node.attr
                measuring |= {name} if called in ("all_memory", "available_memory") else set()
    assert asking == MAY_ASK
    assert {name for name in measuring if not name.startswith(("edgespec/machine/", "edgespec/cli/"))} == set()


def test_what_decides_the_text_is_pure() -> None:
    allowed = {"numpy", "numpy.typing", "collections", "collections.abc", "dataclasses", "enum", "math", "typing"}
    allowed |= {"edgespec.errors", "edgespec.loop.tree", "edgespec.loop.sampling"}
    for name in ("tree", "sampling", "verify"):
        path = ROOT / "edgespec" / "loop" / f"{name}.py"
        found = {node.module for node in nodes(path) if isinstance(node, ast.ImportFrom)}
        names = (node.names for node in nodes(path) if isinstance(node, ast.Import))
        assert found | {alias.name for aliases in names for alias in aliases} <= allowed, name


def test_planners_do_not_import_the_loop_itself() -> None:
    found = {name: found for name, found in modules().items() if room_of(name) == "planners"}
    assert len(found) > 5
    for name, others in found.items():
        assert "edgespec.loop.generate" not in others, name


def test_importing_the_package_imports_no_engine() -> None:
    script = (
        "import edgespec, edgespec.cli.commands, edgespec.models.convert.folder_from_gguf, sys\n"
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert found.strip() == "[]"


def test_a_missing_engine_is_named_with_its_command() -> None:
    script = (
        "import sys; sys.modules['llama_cpp'] = None\n"
        "from edgespec.loading.by_name import load_backend\nfrom edgespec.errors import MissingPackage\n"
        "try: load_backend('llamacpp', 'model.gguf')\nexcept MissingPackage as error: print(error)"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert found.strip().endswith("-m pip install llama-cpp-python")
