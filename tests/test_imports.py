"""What may be imported when: the core stays light, dependencies point one way."""

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
HEAVY = ["llama_cpp", "torch", "mlx", "transformers", "pydivsufsort", "prompt_toolkit", "jinja2", "huggingface_hub"]
HEAVY += ["gguf", "safetensors", "tokenizers", "ml_dtypes"]


def test_importing_the_package_imports_no_engine() -> None:
    modules = "edgespec, edgespec.cli, edgespec.convert"
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


def test_the_core_never_names_a_backend() -> None:
    for path in (ROOT / "edgespec").rglob("*.py"):
        assert not {name for name in imports(path) if name.startswith("edgespec.backends")}, path


def test_pure_parts_import_only_numpy_and_each_other() -> None:
    allowed = {"numpy", "numpy.typing", "collections", "collections.abc", "dataclasses", "enum", "math", "typing"}
    pure = {"edgespec.tree", "edgespec.sampling", "edgespec.errors", "edgespec.verify"}
    for name in ("tree", "sampling", "verify", "errors"):
        assert imports(ROOT / "edgespec" / f"{name}.py") <= allowed | pure


def test_planners_know_no_engine_and_no_loop() -> None:
    for path in (ROOT / "edgespec" / "planners").glob("*.py"):
        forbidden = {"ctypes", "torch", "mlx", "llama_cpp", "edgespec.generate", "edgespec.model", "edgespec.cli"}
        assert not imports(path) & forbidden, path


def test_a_missing_engine_is_named_with_its_command() -> None:
    script = (
        "import sys; sys.modules['llama_cpp'] = None\n"
        "from edgespec.backend import load_backend\nfrom edgespec.errors import MissingPackage\n"
        "try: load_backend('llamacpp', 'model.gguf')\nexcept MissingPackage as error: print(error)"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert found.strip().endswith("needs the package 'llama-cpp-python': pip install 'llama-cpp-python'")
