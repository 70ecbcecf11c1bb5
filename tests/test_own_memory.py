"""Layers that are streamed to slots of this program's own, as on a Mac: the same numbers, to the bit."""

import ctypes
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock, patch

import numpy as np
import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

import mapped_device
from edgespec.backends.common import loader
from edgespec.backends.llamacpp.backend import LlamaBackend
from edgespec.backends.llamacpp.ggml.files import ggml_base
from edgespec.backends.llamacpp.ggml.ggml_tensor import GgmlTensor
from edgespec.backends.llamacpp.memory import own_memory
from edgespec.backends.llamacpp.memory.own_memory import OwnMemory
from test_offload_llamacpp import (
    _steady_memory,
    fresh,
    last_row,
    left_behind,
    linux_only,
    load_streamed,
    same_rows,
    test_a_pass_of_several_graphs,
    test_a_read_error_is_one_model_error_until_the_disk_is_back,
    test_an_error_in_the_middle_of_a_pass,
    test_an_interrupted_pass_ends_within_a_layer,
    test_every_streamed_byte_is_read_once_in_a_pass,
    test_graphs_unlike_the_first,
    test_several_sessions_in_one_pass,
    test_texts_are_the_same,
    tiny,
    tiny_resident,
    tiny_streamed,
)

from edgespec.errors import ModelError
from edgespec.machine.this_machine import this_machine
from edgespec.weights import direct_io
from edgespec.weights.direct_io import ALIGNED
from edgespec.weights.plan import Extent, Layer, Plan, Tensor

__all__ = [
    "_steady_memory",
    "fresh",
    "test_a_pass_of_several_graphs",
    "test_a_read_error_is_one_model_error_until_the_disk_is_back",
    "test_an_error_in_the_middle_of_a_pass",
    "test_an_interrupted_pass_ends_within_a_layer",
    "test_every_streamed_byte_is_read_once_in_a_pass",
    "test_graphs_unlike_the_first",
    "test_several_sessions_in_one_pass",
    "test_texts_are_the_same",
    "tiny",
    "tiny_resident",
    "tiny_streamed",
]


@pytest.fixture(autouse=True, scope="module")
def _on_a_mac() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "this_machine", lambda *given: replace(this_machine(*given), platform="darwin"))
        yield


@pytest.fixture
def store_here() -> type[OwnMemory]:
    return OwnMemory


def test_passes_of_any_size_are_the_same_to_the_bit(smollm2_tiny: Path) -> None:
    """In 4 bits, with an embedding that is the output, too."""

    def rows(backend: LlamaBackend) -> list[np.ndarray]:
        assert backend.streamer is None or isinstance(backend.streamer._store, OwnMemory)
        return [last_row(backend, list(range(5, 5 + count))) for count in (1, 4, 33, 128, 1)]

    same_rows(smollm2_tiny, rows, repack=False)


def test_weights_lie_in_this_memory_and_slots(fresh: LlamaBackend, tiny_resident: LlamaBackend) -> None:
    """Numbers come from there: with other bytes in a slot they are others."""
    store, expected = fresh.streamer._store, last_row(tiny_resident, [5])
    show = store.show

    def broken(slot: int, layer: Layer) -> None:
        ctypes.memset(store._slots + slot * store._slot_size, 0, layer.size)
        show(slot, layer)

    np.testing.assert_array_equal(last_row(fresh, [5]), expected)
    store.show = broken
    for _ in range(2):
        wrong = last_row(fresh, [5])
    assert (wrong != expected).any()
    places = [place[1] for place in store._moving[fresh.streamer.plan.streamed[0].index]]
    assert len(set(places)) == len(places) > 1


@linux_only
@pytest.mark.parametrize("where", ["preload", "open_direct", "own_memory", "is_known"])
def test_a_load_that_fails_leaves_nothing(tiny: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    before = left_behind(tiny, collect=True)
    owner = next(one for one in (own_memory, OwnMemory, direct_io) if hasattr(one, where))
    fails = Mock(side_effect=OSError(12, "Cannot allocate memory")) if where != "is_known" else lambda address: False
    monkeypatch.setattr(owner, where, fails)
    with pytest.raises(ModelError, match="cannot be streamed: "):
        load_streamed(tiny)
    assert left_behind(tiny, collect=True) == before


def test_a_view_of_a_streamed_weight_looks_where_the_weight_is(tmp_path: Path) -> None:
    """As in RWKV and Kimi Linear; graphs are used again, and a slot then has another layer."""
    (tmp_path / "model").write_bytes(bytes(range(256)) * 512)
    tensor = Tensor("blk.3.a", 0, 4096, 8192)
    weight, view, product, other = GgmlTensor(data=77), GgmlTensor(data=1, view_offs=64), GgmlTensor(), GgmlTensor()
    view.view_src = ctypes.addressof(weight)
    product.src[1], other.src[0] = ctypes.addressof(view), ctypes.addressof(product)
    layer = Layer(3, (Extent(0, 4096, 4096 + 8192),))
    plan = Plan(1 << 30, 0, (), (layer,), (), 1, 4)
    found = {"blk.3.a": [ctypes.addressof(weight)]}
    with closing(OwnMemory([str(tmp_path / "model")], [tensor], plan, found)) as store:
        store.show(0, layer)
        assert weight.data == store._slots
        assert [store.layer_used(ctypes.addressof(one)) for one in (view, product, other)] == [3, 3, -1]
        assert view.data == store._slots + 64
        store.hide(0, layer)
        assert store.layer_used(ctypes.addressof(view)) == 3
        assert (weight.data, view.data) == (77, 77 + 64)
        view.view_src = 0  # another graph's operation at the same address
        assert [store.layer_used(ctypes.addressof(one)) for one in (view, product)] == [-1, -1]


def test_a_device_has_its_weights_and_all_slots(tmp_path: Path) -> None:
    """In one buffer of whole pages; the processor's weights lie in front of it."""
    (tmp_path / "model").write_bytes(bytes(range(256)) * 512)
    kinds = [Tensor("blk.0.a", 0, 32, 64), Tensor("blk.1.a", 0, 96, 64), Tensor("blk.1.b", 0, 8192, 8192)]
    made = {tensor.name: GgmlTensor(data=77, buffer=88) for tensor in kinds}
    found = {name: [ctypes.addressof(tensor)] for name, tensor in made.items()}
    layer = Layer(1, (Extent(0, 8192, 16384),))
    plan = Plan(1 << 30, 0, (Extent(0, 0, 8192),), (layer,), (), 2, 2)
    device = mapped_device.device()
    with closing(OwnMemory([str(tmp_path / "model")], kinds, plan, found, {"blk.1.a", "blk.1.b"}, device[0])) as store:
        store.preload((), lambda done, total: None)
        here, there, moving = made.values()
        assert (here.buffer, there.buffer, moving.buffer) == (88, store._buffer, store._buffer)
        for tensor, start in ((here, 32), (there, 96)):
            assert ctypes.string_at(tensor.data, 64) == bytes(range(start, start + 64))
        base = ggml_base().ggml_backend_buffer_get_base(store._buffer)
        assert base % ALIGNED == 0
        assert here.data < base <= there.data < moving.data == store._slots
        store.show(1, layer)
        assert moving.data == store._slots + 8192
        store.hide(1, layer)
        assert moving.data > base  # never the mapped file
        assert store.only_here == {1}
    refuses = patch.object(ggml_base(), "ggml_backend_dev_buffer_from_host_ptr", lambda *given: None)
    with refuses, pytest.raises(OSError, match="the GPU cannot have 0 MiB of memory"):
        OwnMemory([str(tmp_path / "model")], kinds, plan, found, {"blk.1.a", "blk.1.b"}, device[0])


def test_a_device_computes_no_layer_too_early(fresh: LlamaBackend, tiny_resident: LlamaBackend) -> None:
    """Where it cannot wait for a layer that is not read yet, the pass fails; unknown operations are reported."""
    hooks, expected, shows = fresh._hooks, last_row(tiny_resident, [5]), fresh.streamer.shows
    assert len(hooks._last_operations) == 6
    hooks._own.only_here = {3}
    hooks._last_operations = {b"none"}
    fresh.streamer.shows = lambda layer: layer != 3 and shows(layer)
    with pytest.raises(ModelError, match="layer 3 would be computed before it is read: try again"):
        last_row(fresh, [5])
    fresh.streamer.shows = shows
    hooks._known.clear()
    hooks._own.only_here = {*range(6)}
    np.testing.assert_array_equal(last_row(fresh, [5]), expected)


def test_operations_that_use_no_streamed_weight_may_come_anywhere(fresh: LlamaBackend) -> None:
    """GPUs compute operations in another order: views of a layer's cache come before the layer in front ends."""
    hooks, own = fresh._hooks, fresh.streamer._store
    own.only_here = {*range(6)}
    tensors = {layer: own._moving[layer][0][0] for layer in range(6)}
    hooks.begin(prompt=False, rows=1, padding=0)
    gates = {layer: next(iter(names)) for layer, names in ((i, {f"l_out-{i - 1}".encode()}) for i in range(1, 6))}
    for layer in range(6):
        product = GgmlTensor(name=b"Qcur-%d" % layer)
        product.src[0] = ctypes.addressof(tensors[layer])
        names = ([gates[layer], b"cache_v_l%d (view)" % layer] if layer else []) + [b"Kcur-%d" % min(layer + 1, 5)]
        for name in names:
            hooks._known.add(name)
            hooks._asked(name, ctypes.addressof(GgmlTensor(name=name)))
        hooks._known.add(product.name)
        hooks._asked(product.name, ctypes.addressof(product))
        assert fresh.streamer.shows(layer)
    hooks.finish()
