"""Which experts stay in memory: pools, slots, replacement, and what that takes."""

import math
from dataclasses import replace
from statistics import median

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from routes import SLOTS, read_routes, shares

from edgespec.loop.pass_times import choices, distinct
from edgespec.weights.experts import (
    MOST_SLOTS,
    ExpertLayer,
    Residents,
    find_experts,
    memory_of,
    most_pools,
    most_slots,
    pool_size,
    pools_of,
)
from edgespec.weights.plan import Extent, Pool, Tensor

MIB = 1 << 20
KINDS = ("weight", "bias")


def layer(index: int, count: int = 8, size: int = 3 * MIB, start: int = 100) -> ExpertLayer:
    names = ("gate", "up", "down")
    return ExpertLayer(
        index,
        count,
        tuple(
            Tensor(f"blk.{index}.ffn_{name}_exps.weight", 0, start + i * count * size, count * size)
            for i, name in enumerate(names)
        ),
    )


def place(residents: Residents, wanted: list[int], row: int = 0, *, use: bool = True) -> list[tuple[int, int]]:
    """As a pass does."""
    if use:
        residents.use(row, wanted)
    return residents.place(row, wanted)


def held(residents: Residents, row: int) -> list[int]:
    """The layer's experts that lie in memory."""
    return [expert for expert, slot in enumerate(residents.slots_of(row).tolist()) if slot >= 0]


def test_what_is_missing_is_read_once() -> None:
    residents = Residents(2, 8, 8)
    assert place(residents, [5, 2], 1) == [(5, 0), (2, 1)]
    assert place(residents, [2, 5], 1) == []
    assert residents.slots_of(1).tolist() == [-1, -1, 1, -1, -1, 0, -1, -1]
    assert set(residents.slots_of(0)) == {-1}


@pytest.mark.parametrize(("fading", "goes"), [(1.0, 2), (0.5, 0)])
def test_the_least_used_goes_or_the_one_that_was_used_longest_ago(fading: float, goes: int) -> None:
    residents = Residents(1, 3, 2, fading)
    for expert in (0, 0, 2):
        place(residents, [expert])
    place(residents, [1])
    assert set(held(residents, 0)) == {0, 1, 2} - {goes}


def test_layers_of_a_pool_have_the_slots_that_they_use() -> None:
    residents = Residents(2, 4, 4)
    for _ in range(3):
        place(residents, [0, 1, 2], 1)
        place(residents, [3], 0)
    assert (held(residents, 0), held(residents, 1)) == ([3], [0, 1, 2])
    place(residents, [1], 0)
    assert (held(residents, 0), held(residents, 1)) == ([1], [0, 1, 2])  # expert 3 of the first has faded
    place(residents, [2], 0)
    assert (held(residents, 0), held(residents, 1)) == ([2], [0, 1, 2])


def test_a_prompt_counts_by_its_last_tokens() -> None:
    residents, counted = Residents(1, 6, 6), Residents(1, 6, 6)
    chosen = [[0, 1], [0, 2], [3, 2]]
    residents.use_in_turn(0, chosen)
    for one in chosen:
        counted.use(0, one)
    assert np.allclose(residents.scores, counted.scores)
    residents.use_in_turn(0, [[4, 5]] * 1000)
    assert residents.scores[0, :4].max() < 0.01
    assert residents.scores[0, 4] == pytest.approx(10, abs=0.02)


def test_what_could_not_be_read_is_missing() -> None:
    residents = Residents(1, 4, 4)
    place(residents, [0, 1])
    residents.forget(0, 0)
    residents.forget(0, 3)
    assert place(residents, [0, 1]) == [(0, 0)]


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 12),
    st.integers(1, 3),
    st.integers(0, 24),
    st.lists(st.tuples(st.integers(0, 2), st.sets(st.integers(0, 11), min_size=1)), max_size=30),
    st.floats(0, 1),
)
def test_every_wanted_expert_has_a_slot_of_its_own(
    count: int, rows: int, more: int, passes: list[tuple[int, set[int]]], fading: float
) -> None:
    residents, memory = Residents(rows, count, count + more, fading), dict[int, tuple[int, int]]()
    for row, some in passes:
        wanted = [expert for expert in some if expert < count]
        if row < rows and wanted:
            memory |= {slot: (row, expert) for expert, slot in place(residents, wanted, row)}
            slots = residents.slots_of(row)[wanted].tolist()
            assert len(set(slots)) == len(wanted)
            assert [memory[slot] for slot in slots] == [(row, expert) for expert in wanted]
            for other in range(rows):
                for expert in held(residents, other):
                    assert memory[int(residents.slots_of(other)[expert])] == (other, expert)


def test_experts_are_found() -> None:
    tensors = [*layer(0).tensors, *layer(1).tensors, Tensor("blk.0.attn_q.weight", 0, 0, 100)]
    found = find_experts(tensors[::-1], 8)
    assert [one.index for one in found] == [0, 1]
    assert [tensor.name for tensor in found[1].tensors] == [
        "blk.1.ffn_gate_exps.weight",
        "blk.1.ffn_up_exps.weight",
        "blk.1.ffn_down_exps.weight",
    ]
    assert found[0].bytes_each == 9 * MIB


@pytest.mark.parametrize("count", [0, 7])
def test_experts_that_are_not_as_said(count: int) -> None:
    assert find_experts(layer(0).tensors, count) == []


def test_layers_of_different_kinds_are_left_alone() -> None:
    assert find_experts([*layer(0).tensors, *layer(1).tensors[:2]], 8) == []


def test_biases_belong_to_their_weights() -> None:
    tensors = [Tensor(f"blk.0.ffn_{part}_exps.{kind}", 0, 0, 800) for part in ("up", "down") for kind in KINDS]
    [found] = find_experts(tensors[::-1], 8)
    assert [tensor.name[10:] for tensor in found.tensors] == [
        "up_exps.weight",
        "up_exps.bias",
        "down_exps.weight",
        "down_exps.bias",
    ]
    assert [found.with_bias(i) for i in (0, 2)] == [[0, 1], [2, 3]]


def test_pools_are_for_layers_of_one_size_and_hold_a_whole_layer() -> None:
    layers = [layer(i, size=(3 + i % 2) * MIB, start=7 * MIB + 13 * i) for i in range(5)]
    assert pools_of(layers, 0) == (Pool((0, 2, 4), 8), Pool((1, 3), 8))
    assert pools_of(layers, 1) == (Pool((0, 2, 4), 24), Pool((1, 3), 16))
    sizes = [memory_of(layers, pools_of(layers, share / 20)) for share in range(21)]
    assert sizes == sorted(sizes)
    for size in sizes:
        assert sizes[0] <= memory_of(layers, most_pools(layers, size)) <= size
    assert most_pools(layers, sizes[0] - 1) == ()
    assert most_pools(layers, 10 * sizes[-1]) == pools_of(layers, 1)
    for pool in pools_of(layers, 0.5):
        for one in (layers[number] for number in pool.layers):
            for i in range(3):
                last = one.skew(i) + one.stride(i) * (pool.slots - 1) + one.expert_size(i)
                assert last <= pool_size(one, i, pool.slots)
                assert one.stride(i) >= one.expert_size(i) + max(layers[number].skew(i) for number in pool.layers)


@pytest.mark.parametrize(("count", "layers", "pools"), [(128, 48, 6), (512, 48, 24), (1500, 3, 2), (8, 4, 1)])
def test_a_pool_has_no_more_slots_than_engines_take(count: int, layers: int, pools: int) -> None:
    found = pools_of([layer(i, count) for i in range(layers)], 1)
    assert len(found) == pools
    assert sorted(number for pool in found for number in pool.layers) == list(range(layers))
    for pool in found:
        assert count <= pool.slots <= most_slots([layer(i, count) for i in range(layers)])
        assert pool.slots <= max(MOST_SLOTS, 2 * count)
        assert pools == 1 or not any(number + 1 in pool.layers for number in pool.layers)  # the next is read meanwhile


def test_a_pool_in_an_array_has_rows_enough_for_each_slot() -> None:
    """Metal's kernel for prompts wants 4; slots have no bytes between them, and experts may lie anywhere."""
    apart = [
        replace(one, places=tuple(tuple((Extent(i, 5 * e, 5 * e + 3 * MIB),) for e in range(8)) for i in range(3)))
        for one in map(layer, range(100))
    ]
    found = pools_of(apart, 1)
    assert 8 * 7 < max(pool.slots for pool in found) <= 8 * 8
    assert sum(pool.slots for pool in found) >= 8 * 100
    assert [(apart[0].stride(i), apart[0].skew(i)) for i in range(3)] == [(3 * MIB, 0)] * 3
    assert apart[7].place(2, 3) == (Extent(2, 15, 15 + 3 * MIB),)
    assert layer(1).place(2, 3) == (Extent(0, 100 + 57 * MIB, 100 + 60 * MIB),)


@pytest.mark.parametrize(
    ("width", "slots"), [(1, (24, 48)), *(pytest.param(width, SLOTS, marks=pytest.mark.exhaustive) for width in (1, 4))]
)
def test_pools_read_less_than_a_pool_for_each_layer_on_real_routes(width: int, slots: tuple[int, ...]) -> None:
    found = [share for route in read_routes().values() for share in shares(route, width, slots)]
    assert median(found) <= 0.95
    assert max(found) <= 1.03


def test_distinct_experts() -> None:
    assert distinct(1, 16, 2) == pytest.approx(2)
    many = distinct(np.array([1, 2, 8, 64, 1000]), 128, 8)
    assert np.all(np.diff(many) > 0)
    assert many[-1] == pytest.approx(128)
    assert distinct(2, 64, 4) / 4 == pytest.approx(1.74, abs=0.05)  # GLM-4.7-Flash, in ml-explore/mlx-lm#1485
    assert distinct(25, 128, 6, 0.63) / 128 == pytest.approx(0.308, abs=0.01)  # Qwen3-30B-A3B: docs/measured.md
    assert distinct(25, 128, 6, 1.0) / 128 == pytest.approx(0.699, abs=0.001)  # tokens that have nothing in common


@pytest.mark.parametrize("power", [0.0, 0.62, 0.8, 1.0])
def test_the_power_is_found_from_the_experts_that_passes_chose(power: float) -> None:
    for count, used, nodes in ((128, 6, 25), (16, 2, 4), (64, 4, 2)):
        share = float(distinct(nodes, count, used, power)) / count
        assert math.log(choices(share, count, used)) / math.log(nodes) == pytest.approx(power, abs=1e-6)
    assert choices(1.0, 8, 8) == 1
    assert choices(1.0, 8, 2) > 50
