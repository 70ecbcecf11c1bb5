"""A small copy of a model that computes alike."""

import ctypes
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

from conftest import Run, quantised
from edgespec.backends.llamacpp.engine import engine
from edgespec.backends.llamacpp.ggml.files import read_tensors
from edgespec.backends.llamacpp.memory import probe_model as module
from edgespec.backends.llamacpp.memory.probe_model import kinds, probe_file
from gguf_files import gguf, small_llama
from gguf_writer import finish

from edgespec.errors import ModelError
from edgespec.loading import row_classes
from edgespec.machine import disk
from edgespec.weights.plan import Tensor, layer_of


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
    finish(writer)
    tensors = read_tensors(str(tmp_path / "mixed.gguf"))
    assert {tensor.size for tensor in tensors[:3]} == {4 * 256 // 32 * 18}
    assert kinds(tensors) == [0, 2, 3, 4]


def test_the_copy_is_small_and_goes(smollm2: Path) -> None:
    with probe_file(str(smollm2), {}) as path:
        copied = {one.name for one in read_tensors(path)}
        whole = {one.name for one in read_tensors(str(smollm2))}
        assert copied < whole
        assert "token_embd.weight" in copied
        assert Path(path).stat().st_size < smollm2.stat().st_size / 2
    assert not Path(path).exists()


def test_one_copy_is_written_for_both_trials(smollm2_tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of bits and that of times."""
    really, made, tried = module.llama_cpp.llama_model_quantize, list[bool](), list[bool]()
    monkeypatch.setattr(module.llama_cpp, "llama_model_quantize", lambda *given: made.append(True) or really(*given))
    monkeypatch.setattr(row_classes, "probe", lambda backend: tried.append(backend.watch is not None) or [])
    monkeypatch.setattr(row_classes, "timed", lambda backend, found: tried.append(backend.watch is not None) or found)
    computing = {"threads": 1, "gpu_layers": 0, "kv_type": "f16"}
    assert row_classes.find("llamacpp", "a", computing, str(smollm2_tiny), remember=False, say=print) == []
    assert (len(made), tried) == (1, [True, False])


@pytest.mark.skipif(sys.platform != "linux", reason="a file without a name is Linux's")
def test_nothing_stays_of_it_if_the_process_is_killed_while_it_is_made(
    smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    really, seen = module.llama_cpp.llama_model_quantize, list[Path]()

    def look(*arguments):
        done = really(*arguments)
        seen.extend(tmp_path.iterdir())
        return done

    monkeypatch.setattr(module.llama_cpp, "llama_model_quantize", look)
    with probe_file(str(smollm2), {}) as path:
        assert read_tensors(path)
    assert not seen


@pytest.mark.skipif(sys.platform == "win32", reason="Windows keeps the name of a mapped file")
def test_a_mac_removes_its_name_once_it_is_loaded(
    smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(disk, "sys", SimpleNamespace(platform="darwin"))
    with probe_file(str(smollm2), {}) as path:
        assert list(tmp_path.iterdir()) == [Path(path)]
    assert not list(tmp_path.iterdir())
    with engine.probe_model(str(smollm2), {"threads": 1, "gpu_layers": 0, "kv_type": "f16"}) as backend:
        assert not list(tmp_path.iterdir())
        backend.open().close()


def test_layers_on_a_gpu_and_others_are_of_different_kinds(smollm2: Path) -> None:
    """The copy has layers of each kind on both, and as much of it on the GPU."""
    mixed = [tensor(i, "a", 10 + (i >= 4)) for i in range(8)]
    assert module.chosen_layers(mixed, 3) == ([0, 4, 6, 7], 3)
    assert module.chosen_layers(mixed, 0) == (kinds(mixed), 0)
    assert module.chosen_layers(mixed, -1) == (kinds(mixed), -1)
    computing = {"threads": 1, "gpu_layers": 9, "kv_type": "f16", "device": "Metal", "kept_off": r"^(?!blk\.)"}
    options = module.probe_options(str(smollm2), computing)
    with probe_file(str(smollm2), computing) as path:
        copied = {layer_of(one) for one in read_tensors(path)} - {-1}
    assert len(copied) == 2 + options.gpu_layers - 1
    assert 2 <= options.gpu_layers < 9
    assert options.device is None


def test_many_kinds_of_layers_need_few_of_them() -> None:
    """Types vary from weight to weight: two layers show both types of all."""
    mixed = [Tensor(f"blk.{i}.{j}", 0, 0, 10, i >> j & 1) for i in range(64) for j in range(6)]
    assert len(kinds(mixed)) == 2


def test_a_model_of_too_many_kinds_of_layers_is_not_copied_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "all_tensors", lambda path: [tensor(i, "a", i) for i in range(40)])
    monkeypatch.setattr(module, "own_values", lambda path: {})
    with pytest.raises(ModelError, match="has layers of 40 kinds, too many"), probe_file("model.gguf", {}):
        pass


def test_a_model_of_one_kind_and_two_layers_is_its_own(smollm2: Path, tmp_path: Path) -> None:
    small = quantised(smollm2, tmp_path / "small.gguf", 3, tuple(range(2, 30)))
    with probe_file(str(small), {}) as path:
        assert path == str(small)
    assert small.exists()


def test_no_room(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "HEADROOM", 1 << 60)
    with pytest.raises(ModelError, match="no disk has room for"), probe_file(str(smollm2), {}):
        pass


def test_memory_is_no_place_for_it(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "file_system", lambda place: "tmpfs")
    with pytest.raises(ModelError, match="no disk has room for"), probe_file(str(smollm2), {}):
        pass


def test_a_copy_that_cannot_be_made(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.llama_cpp, "llama_model_quantize", lambda *arguments: ctypes.c_int(1).value)
    with pytest.raises(ModelError, match="no probe model of it can be made"), probe_file(str(smollm2), {}):
        pass


@pytest.mark.parametrize("full", ["no temporary folder", "no more files"])
def test_a_model_runs_where_no_temporary_file_can_be_made(
    full: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(small_llama(tmp_path / "tiny.gguf", layers=4))
    with monkeypatch.context() as patch:
        if full == "no temporary folder":  # as where the disk is full: Python makes a file to find one
            patch.setattr(disk, "gettempdir", Mock(side_effect=FileNotFoundError(2, "No usable temporary directory")))
        else:
            failing = Mock(side_effect=OSError(122, "Disk quota exceeded"))
            patch.setattr(disk, "TemporaryFile", failing)
            patch.setattr(disk, "NamedTemporaryFile", failing)
        code, _, errors = run("run", path, "a", "-n", "2")
        assert code == 0, errors


def test_where_no_copy_can_be_made_a_context_of_one_token_is_refused_by_a_line(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "HEADROOM", 1 << 60)
    code, _, errors = run("run", str(small_llama(tmp_path / "tiny.gguf", layers=4)), "a", "--ctx", "1")
    assert code == 1
    assert "maximum context length is 1 tokens" in errors
