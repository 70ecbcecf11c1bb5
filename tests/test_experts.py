"""Which experts stay in memory: slots, replacement, overflow, and what that takes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.loop.pass_times import distinct
from edgespec.weights.experts import (
    ExpertLayer,
    Residents,
    find_experts,
    memory_of,
    most_slots,
    overflows,
    pool_size,
)
from edgespec.weights.plan import Tensor

MIB = 1 << 20


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


def test_what_is_missing_is_read_once() -> None:
    residents = Residents(8, 3)
    assert residents.place([5, 2]) == [(5, 0), (2, 1)]
    assert residents.place([2, 5]) == []
    assert residents.slots_of([[5, 2], [2, 5]]).tolist() == [[0, 1], [1, 0]]
    assert residents.slots_of([0]).tolist() == [-1]


def test_the_least_used_goes() -> None:
    residents = Residents(8, 2, fading=1.0)
    residents.place([0])
    residents.place([0])
    residents.place([1])
    assert residents.place([2]) == [(2, 1)]  # 1 was used once, 0 twice
    assert residents.slots_of([0, 1, 2]).tolist() == [0, -1, 1]


def test_the_one_used_last_stays_where_the_past_fades() -> None:
    residents = Residents(8, 2, fading=0.5)
    for expert in (0, 0, 1):
        residents.place([expert])
    assert residents.place([2]) == [(2, 0)]  # though 0 was used twice


def test_what_is_wanted_now_stays() -> None:
    residents = Residents(8, 2, fading=1.0)
    residents.place([0, 1])
    for _ in range(5):
        residents.place([1])
    assert residents.place([0, 2]) == [(2, 1)]  # 1 was used most, but 0 is needed in this pass
    assert residents.slots_of([0, 2]).tolist() == [0, 1]


def test_more_than_there_are_slots_go_to_the_overflow() -> None:
    residents = Residents(8, 2)
    residents.place([3, 4])
    assert residents.place([1, 3, 6, 7]) == [(1, 2), (6, 3), (7, 4)]
    assert residents.overflowing
    residents.leave_overflow()
    assert residents.slots_of(range(8)).tolist() == [-1, -1, -1, 0, 1, -1, -1, -1]
    assert not residents.overflowing


def test_prompts_do_not_count() -> None:
    residents = Residents(4, 1)
    residents.place([2])
    residents.place(range(4), score=False)
    assert residents.scores.argmax() == 2


def test_what_could_not_be_read_is_missing() -> None:
    residents = Residents(4, 2)
    residents.place([0, 1])
    residents.forget(0)
    assert residents.place([0, 1]) == [(0, 0)]


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 12),
    st.integers(0, 12),
    st.lists(st.sets(st.integers(0, 11), min_size=1), max_size=30),
    st.floats(0, 1),
)
def test_every_wanted_expert_has_a_slot_of_its_own(
    count: int, slots: int, passes: list[set[int]], fading: float
) -> None:
    residents, memory = Residents(count, min(slots, count), fading), dict[int, int]()
    for wanted in ([expert for expert in some if expert < count] for some in passes):
        if not wanted:
            continue
        for expert, slot in residents.place(wanted):
            memory[slot] = expert
        found = residents.slots_of(wanted).tolist()
        assert len(set(found)) == len(wanted) <= count
        assert max(found) < count  # an engine takes no more numbers than there are experts
        assert [memory[slot] for slot in found] == wanted
        residents.leave_overflow()
        memory = {slot: expert for slot, expert in memory.items() if slot < residents.slots}


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


def test_memory_grows_with_slots_and_is_never_too_small() -> None:
    layers = [layer(0), layer(1, start=7 * MIB + 13)]
    sizes = [memory_of(layers, slots) for slots in range(9)]
    assert sizes[0] == 3 * 26 * MIB  # all experts of one layer, whole huge pages
    assert sizes == sorted(sizes)
    for slots in range(9):
        assert most_slots(layers, sizes[slots]) >= slots
        for one in layers:
            for i, block in enumerate(overflows(layers, slots)):
                skew = one.tensors[i].start % 4096
                assert pool_size(one, i, slots) >= (skew + slots * one.expert_size(i) if slots else 0)
                assert pool_size(one, i, slots) + block >= skew + one.tensors[i].size
    assert most_slots(layers, sizes[0] - 1) == -1


def test_distinct_experts() -> None:
    assert distinct(1, 16, 2) == pytest.approx(2)
    many = distinct(np.array([1, 2, 8, 64, 1000]), 128, 8)
    assert np.all(np.diff(many) > 0)
    assert many[-1] == pytest.approx(128)
    assert distinct(2, 64, 4) / 4 == pytest.approx(1.74, abs=0.05)  # GLM-4.7-Flash, in ml-explore/mlx-lm#1485
