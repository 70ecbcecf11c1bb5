"""What may be imported when: the core stays light, dependencies point one way."""

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
HEAVY = ["llama_cpp", "torch", "mlx", "transformers", "pydivsufsort", "prompt_toolkit", "jinja2", "huggingface_hub"]
HEAVY += [
    "gguf",
    "safetensors",
    "tokenizers",
    "ml_dtypes",
    "starlette",
    "uvicorn",
    "llguidance",
    "distributed",
    "matplotlib",
]


def test_importing_the_package_imports_no_engine() -> None:
    modules = "edgespec, edgespec.cli.commands, edgespec.models.convert.folder_from_gguf"
    script = f"import {modules}, sys; print([name for name in {HEAVY} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert found.strip() == "[]"


def imports(path: Path) -> set[str]:
    names = set[str]()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


def modules() -> dict[str, set[str]]:
    """Every module of the package -> the package's modules it imports, wherever in the file."""
    files = {}
    for folder, package in ((ROOT / "edgespec", "edgespec"), (ROOT / "backends", "edgespec.backends")):
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            files[".".join((package, *parts)).removesuffix(".__init__")] = path
    return {name: {known for known in named(path, name) if known in files} for name, path in files.items()}


def named(path: Path, module: str) -> set[str]:
    """What a file imports, with dots resolved; of `from a import b` both a and a.b, since b may be a module."""
    found = set[str]()
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join([*package.split(".")[: len(package.split(".")) + 1 - node.level], node.module or ""])
            origin = base.rstrip(".") if node.level else str(node.module)
            found |= {origin, *(f"{origin}.{alias.name}" for alias in node.names)}
    return found


def inside(module: str, *rooms: str) -> bool:
    return any(module == f"edgespec.{room}" or module.startswith(f"edgespec.{room}.") for room in rooms)


def test_the_loop_knows_neither_the_rooms_around_it_nor_an_engine() -> None:
    loop = {name: found for name, found in modules().items() if name.count(".") < 2 or inside(name, "planners")}
    rooms = ("backends", "cli", "measure", "models", "planners", "server", "weights")
    loop = {name: found for name, found in loop.items() if name not in {f"edgespec.{room}" for room in rooms}}
    assert len(loop) > 12
    for name, found in loop.items():
        assert not {other for other in found if inside(other, "weights", "measure", "cli", "server", "backends")}, name


def test_backends_know_neither_measuring_nor_the_command_line() -> None:
    backends = {name: found for name, found in modules().items() if inside(name, "backends")}
    assert len(backends) > 8
    for name, found in backends.items():
        assert not {other for other in found if inside(other, "measure", "cli", "server")}, name


def test_only_measuring_names_a_backend() -> None:
    for name, found in modules().items():
        if not inside(name, "backends", "measure"):
            assert not {other for other in found if inside(other, "backends")}, name


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


def test_pure_parts_import_only_numpy_and_each_other() -> None:
    allowed = {"numpy", "numpy.typing", "collections", "collections.abc", "dataclasses", "enum", "math", "typing"}
    pure = {"edgespec.loop.tree", "edgespec.loop.sampling", "edgespec.errors", "edgespec.loop.verify"}
    for name in ("tree", "sampling", "verify", "errors"):
        assert imports(ROOT / "edgespec" / f"{name}.py") <= allowed | pure


def test_planners_know_no_engine_and_no_loop() -> None:
    for path in (ROOT / "edgespec" / "planners").glob("*.py"):
        forbidden = {"ctypes", "torch", "mlx", "llama_cpp", "edgespec.loop.generate", "edgespec.model"}
        assert not imports(path) & forbidden, path


def test_a_missing_engine_is_named_with_its_command() -> None:
    script = (
        "import sys; sys.modules['llama_cpp'] = None\n"
        "from edgespec.loop.backend import load_backend\nfrom edgespec.errors import MissingPackage\n"
        "try: load_backend('llamacpp', 'model.gguf')\nexcept MissingPackage as error: print(error)"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert found.strip().endswith("needs the package 'llama-cpp-python': pip install 'llama-cpp-python'")
