"""Layers that are streamed to slots of this program's own, as on a Mac: the same numbers, to the bit."""

import ctypes
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

from edgespec.backends.common import loader
from edgespec.backends.llamacpp.backend import LlamaBackend
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
        ctypes.memset(store._slot(slot), 0, layer.size)
        show(slot, layer)

    store.follow = Mock(wraps=store.follow)
    np.testing.assert_array_equal(last_row(fresh, [5]), expected)
    assert len({call.args for call in store.follow.call_args_list}) > 6 * 10  # every operation
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
    weight, view = GgmlTensor(data=77), GgmlTensor(data=1, view_offs=64)
    view.view_src = ctypes.addressof(weight)
    layer = Layer(3, (Extent(0, 4096, 4096 + 8192),))
    plan = Plan(1 << 30, 0, (), (layer,), (), 1, 4)
    with closing(
        OwnMemory([str(tmp_path / "model")], [tensor], plan, {"blk.3.a": [ctypes.addressof(weight)]})
    ) as store:
        store.show(0, layer)
        assert weight.data == store._slot(0)
        store.follow(ctypes.addressof(view))
        assert view.data == store._slot(0) + 64
        store.hide(0, layer)
        store.follow(ctypes.addressof(view))
        assert (weight.data, view.data) == (77, 77 + 64)
