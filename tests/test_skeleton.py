"""Skeletons of mixtures: dense weights first, experts in a hole; kept in the cache, and gone with their models."""

import os
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
pytest.importorskip("gguf", reason="gguf is not installed: pip install 'edgespec[convert]'")

import mapped_device
from edgespec.backends.llamacpp.backend import LlamaBackend
from edgespec.backends.llamacpp.engine import engine, load
from edgespec.backends.llamacpp.ggml import skeleton as skeleton_module
from edgespec.backends.llamacpp.ggml.files import all_tensors, read_tensors
from edgespec.backends.llamacpp.ggml.skeleton import skeleton, skeleton_tensors
from edgespec.backends.llamacpp.memory import planning
from edgespec.backends.llamacpp.memory.planning import find_expert_layers
from mixture_files import EXPERTS, KINDS, LAYERS, mixtures, write_mixture
from test_mixture_llamacpp import logits_of

from edgespec.errors import ModelError
from edgespec.loop.engines import LoadOptions
from edgespec.machine.files import size_on_disk
from edgespec.machine.this_machine import Gpu, this_machine
from edgespec.models.gguf_header import header_values
from edgespec.weights import experts
from edgespec.weights.expert_memory import ExpertMemory
from edgespec.weights.experts import ExpertLayer
from edgespec.weights.plan import Pool, Tensor, divide, spans

__all__ = ["mixtures"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "edgespec" / "skeletons"


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mixture(tmp_path_factory.mktemp("model") / "mixture.gguf", "gpt-oss", bits=32)


def layers_of(path: Path) -> list[ExpertLayer]:
    return find_expert_layers(str(path), all_tensors(str(path)))


def made(path: Path, progress: Any = lambda done, total: None) -> Path:
    return Path(skeleton(str(path), layers_of(path), progress))


def places_in(path: Path) -> list[Tensor]:
    return skeleton_tensors(str(path), layers_of(path), all_tensors(str(path)))


def data(path: str, tensor: Any) -> bytes:
    with open(path, "rb") as file:
        file.seek(tensor.start)
        return file.read(tensor.size)


def test_dense_weights_are_copied_and_experts_take_no_disk(mixture: Path) -> None:
    steps = list[tuple[int, int]]()
    copy = made(mixture, lambda done, total: steps.append((done, total)))
    before = {tensor.name: tensor for tensor in all_tensors(str(mixture))}
    left_out, found = [name for name in before if name.endswith("_exps.weight")], read_tensors(str(copy))
    assert set(found) == set(places_in(mixture))
    assert {tensor.name: (tensor.size, tensor.type) for tensor in found} == {
        tensor.name: (tensor.size, tensor.type) for tensor in before.values()
    }
    for tensor in found:
        wanted = bytes(tensor.size) if tensor.name in left_out else data(str(mixture), before[tensor.name])
        assert data(str(copy), tensor) == wanted
    dense = sum(tensor.size for tensor in found if tensor.name not in left_out)
    assert steps[-1] == (dense, dense)
    assert size_on_disk(copy) < dense + (1 << 20) < mixture.stat().st_size / 2


@pytest.mark.parametrize("gpu_layers", [-1, 2, 3])
def test_a_gpu_maps_its_own_weights_only(mixture: Path, gpu_layers: int) -> None:
    there = divide(places_in(mixture), gpu_layers, [b"_exps.weight"])[1]
    [mapped] = spans(there)
    assert mapped.size < sum(tensor.size for tensor in there) + 32 * len(there)


def test_a_skeleton_is_found_again_until_its_model_changes(mixture: Path, tmp_path: Path) -> None:
    model = write_mixture(tmp_path / "mixture.gguf", "qwen3 moe")
    copy, written = made(model), list[int]()
    assert made(model, lambda done, total: written.append(done)) == copy
    assert written == []
    write_mixture(model, "qwen3 moe", seed=1)
    os.utime(model, ns=(1, 1))
    assert made(model, lambda done, total: written.append(done)) == copy
    assert written
    names = {tensor.name: tensor for tensor in all_tensors(str(model))}
    one = next(tensor for tensor in read_tensors(str(copy)) if tensor.name == "output.weight")
    assert data(str(copy), one) == data(str(model), names["output.weight"])


def test_a_damaged_skeleton_is_written_again(mixture: Path) -> None:
    copy = made(mixture)
    whole = copy.read_bytes()
    copy.write_bytes(whole[:100])
    assert made(mixture).read_bytes() == whole


def test_a_skeleton_goes_with_its_model_and_the_oldest_where_there_are_many(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = [write_mixture(tmp_path / f"{i}.gguf", "mixtral") for i in range(3)]
    copies = [made(model) for model in models]
    models[1].unlink()
    made(models[2])
    assert sorted(folder.iterdir()) == sorted([copies[0], copies[2]])
    os.utime(copies[2], (1, 1))
    monkeypatch.setattr(skeleton_module, "MOST_BYTES", size_on_disk(copies[0]) + 1)
    made(models[0])
    assert list(folder.iterdir()) == [copies[0]]


def test_the_parts_of_a_split_model_become_one_file(mixture: Path, tmp_path: Path) -> None:
    write_mixture(tmp_path / "mixture.gguf", "gpt-oss", bits=32, split=20)
    first = next(tmp_path.glob("mixture-00001-of-*.gguf"))
    copy, whole = made(first), made(mixture)
    assert len({tensor.file for tensor in all_tensors(str(first))}) > 2
    found, other = ({one.name: data(str(path), one) for one in read_tensors(str(path))} for path in (copy, whole))
    assert found == other
    assert not header_values(str(copy), "split.")


def test_where_the_disk_is_full_nothing_is_left(mixture: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(skeleton_module, "disk_usage", lambda place: SimpleNamespace(free=skeleton_module.HEADROOM))
        with pytest.raises(ModelError, match=r"skeletons: has no room for the \d MiB of a skeleton of .*mixture.gguf"):
            made(mixture)

    def full(done: int, total: int) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(ModelError, match=r"mixture-\w+.gguf: cannot be written: No space left on device"):
        made(mixture, full)
    assert list(folder.iterdir()) == []


def test_a_model_that_changes_while_it_is_copied_is_an_error(tmp_path: Path, folder: Path) -> None:
    model = write_mixture(tmp_path / "mixture.gguf", "mixtral")
    with pytest.raises(ModelError, match=r"mixture.gguf: was changed while it was copied: start again"):
        made(model, lambda done, total: os.utime(model, ns=(1, 1)))
    assert list(folder.iterdir()) == []


MIXTURE_OPTIONS: dict[str, Any] = {"context_length": 512, "threads": 2, "budget": 32, "kv_type": "f16"}


@pytest.fixture
def on_a_mac(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Loads a mixture whose experts do not fit, as on a Mac; llama.cpp finds no GPU, and computes here all the same."""
    monkeypatch.setattr("edgespec.machine.memory.private_memory", lambda: 0)

    def most_pools(layers: Sequence[ExpertLayer], room: int) -> tuple[Pool, ...]:
        return (Pool(tuple(range(LAYERS)), EXPERTS + 3, layers[0].device),)

    for module in (experts, planning):
        monkeypatch.setattr(module, "most_pools", most_pools)
    monkeypatch.setattr(planning, "memory_of", lambda layers, pools: 0)
    monkeypatch.setattr(planning, "pool_reserve", lambda room: 0)

    def get(path: Path, gpu_layers: int, tried: bool = False) -> LlamaBackend:
        gpus = (Gpu("MAPPED", True, 1 << 40, pools=tried),)
        machine = replace(this_machine(str(path), gpus), platform="darwin")
        least = planning.ContextSize(512, 32, 1, planning.CHUNKS[0], "f16")
        planner = planning.MemoryPlanner(str(path), LoadOptions(), machine)
        memory = planner.needs([least], gpu_layers, False)[0] + planning.file_size(str(path)) - (300 << 10)
        options = LoadOptions(memory=memory, gpu_layers=gpu_layers, exact="off", **MIXTURE_OPTIONS)
        plan = engine.plan(str(path), options, machine)
        assert plan.weights.pools
        return engine.load(plan)

    return get


@pytest.mark.parametrize("gpu_layers", [-1, 0])
@pytest.mark.parametrize("kind", KINDS)
def test_the_numbers_are_those_of_the_whole_model(
    kind: str, gpu_layers: int, mixtures: Any, on_a_mac: Any, folder: Path
) -> None:
    with closing(load(str(mixtures[kind]), repack=False, **MIXTURE_OPTIONS)) as whole:
        expected = logits_of(whole)
    with closing(on_a_mac(mixtures[kind], gpu_layers)) as backend:
        copies = list(folder.iterdir()) if folder.is_dir() else []
        assert backend.notes[:-1] == [f"weights without experts are mapped from {copy}" for copy in copies]
        assert len(copies) == (gpu_layers != 0)
        for row, right in zip(logits_of(backend), expected, strict=True):
            assert np.array_equal(row, right)
        assert 0 < backend.mixture.memory.hits < backend.mixture.memory.wanted


@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_computes_in_the_pools_to_which_experts_are_read(
    kind: str, mixtures: Any, on_a_mac: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a Mac where that was tried; the GPU is this processor by another name."""
    with closing(load(str(mixtures[kind]), repack=False, **MIXTURE_OPTIONS)) as whole:
        expected = logits_of(whole)
    mapped_device.found(monkeypatch)
    with closing(on_a_mac(mixtures[kind], -1, tried=True)) as backend:
        memory = backend.mixture.memory
        assert (type(memory), len(memory.on_devices)) == (ExpertMemory, LAYERS)
        assert f", those of {LAYERS} layers computed by MAPPED, " in backend.notes[-1]
        for row, right in zip(logits_of(backend), expected, strict=True):
            assert np.array_equal(row, right)
        assert 0 < memory.hits < memory.wanted


def test_experts_in_the_hole_are_never_computed_with(
    mixtures: Any, on_a_mac: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would be zeros; in a whole file they are what the mapped file has."""
    with closing(on_a_mac(mixtures["mixtral"], -1)) as backend:
        backend.mixture._before.clear()  # so the pass does not stop before the experts are used
        with pytest.raises(ModelError, match=r"ffn_moe_\w+-0 would be computed before its experts are chosen"):
            logits_of(backend)
    monkeypatch.setattr("edgespec.backends.llamacpp.memory.mixture.is_known", lambda address: False)
    with pytest.raises(ModelError, match=r"chosen: this build of llama.cpp has another layout of tensors; use --gpu"):
        on_a_mac(mixtures["mixtral"], -1)
