"""A small copy of a model that computes alike."""

import ctypes
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

from conftest import quantised
from edgespec.backends.llamacpp.ggml.files import read_tensors
from edgespec.backends.llamacpp.memory import probe_model as module
from edgespec.backends.llamacpp.memory.probe_model import kinds, probe_file
from gguf_files import gguf

from edgespec.errors import ModelError
from edgespec.machine import disk
from edgespec.weights.plan import Tensor


def tensor(layer: int, name: str, size: int) -> Tensor:
    return Tensor(f"blk.{layer}.{name}", 0, 0, size)


def test_one_layer_of_each_kind() -> None:
    """Kinds differ by the sizes of weights, or by which weights there are."""
    layers = [[("a", 10), ("b", 20)], [("b", 20), ("a", 10)], [("a", 10), ("b", 30)], [("a", 10)], [("a", 10)]]
    tensors = [tensor(i, *one) for i, layer in enumerate(layers) for one in layer]
    assert kinds([*tensors, Tensor("output.weight", 0, 0, 5)]) == [0, 2, 3]
    assert kinds([tensor(i, "a", 1) for i in range(5)]) == [0, 1]  # two at least
    assert kinds([tensor(0, "a", 1)]) == [0]


def test_layers_of_equal_size_and_other_types_are_of_other_kinds(tmp_path: Path) -> None:
    """Types select kernels: Q4_0 and IQ4_NL have one size, F16 and BF16 another."""
    writer, rows = gguf.GGUFWriter(tmp_path / "mixed.gguf", "llama"), np.zeros((4, 256), np.float32)
    for layer, kind in enumerate(("Q4_0", "Q4_0", "IQ4_NL", "F16", "BF16")):
        number = gguf.GGMLQuantizationType[kind]
        halves = rows.astype(np.float16) if kind == "F16" else gguf.quants.quantize(rows, number.BF16)
        data = gguf.quants.quantize(rows, number.Q4_0) if "4" in kind else halves
        writer.add_tensor(f"blk.{layer}.attn_q.weight", data, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensors = read_tensors(str(tmp_path / "mixed.gguf"))
    assert {tensor.size for tensor in tensors[:3]} == {4 * 256 // 32 * 18}
    assert kinds(tensors) == [0, 2, 3, 4]


def test_the_copy_is_small_and_goes(smollm2: Path) -> None:
    with probe_file(str(smollm2)) as path:
        copied = {one.name for one in read_tensors(path)}
        whole = {one.name for one in read_tensors(str(smollm2))}
        assert copied < whole
        assert "token_embd.weight" in copied
        assert Path(path).stat().st_size < smollm2.stat().st_size / 2
    assert not Path(path).exists()


def test_a_model_of_one_kind_and_two_layers_is_its_own(smollm2: Path, tmp_path: Path) -> None:
    small = quantised(smollm2, tmp_path / "small.gguf", 3, tuple(range(2, 30)))
    with probe_file(str(small)) as path:
        assert path == str(small)
    assert small.exists()


def test_no_room(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "HEADROOM", 1 << 60)
    with pytest.raises(ModelError, match="no disk has room for"), probe_file(str(smollm2)):
        pass


def test_memory_is_no_place_for_it(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "file_system", lambda place: "tmpfs")
    with pytest.raises(ModelError, match="no disk has room for"), probe_file(str(smollm2)):
        pass


def test_a_copy_that_cannot_be_made(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.llama_cpp, "llama_model_quantize", lambda *arguments: ctypes.c_int(1).value)
    with pytest.raises(ModelError, match="no probe model of it can be made"), probe_file(str(smollm2)):
        pass
