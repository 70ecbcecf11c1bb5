"""Trees as paths on engines whose cells belong to nodes: lanes, what their tokens see, and which states are kept."""

import numpy as np
import pytest
from edgespec.backends.common.paths import LEAST_STATE_BYTES, MOST_UNREAD, MOST_UNREAD_IN_MEMORY
from edgespec.backends.common.recurrent import Lane, Rectangle, RecurrentStates, most_paths, states_of

from edgespec.loop.backend import Work

TEXT = list(range(100, 110))
PARENTS = [-1, 0, 0, 1]
NODES = [1, 2, 3, 4]


def work(count: int, prompt: bool = False) -> Work:
    none = np.zeros(0, np.int32)
    return Work(None, np.zeros(count, np.int32), none, none, prompt)  # type: ignore[arg-type]


def begun(streams: bool = False, *, held: int = 8) -> RecurrentStates[str]:
    states = RecurrentStates[str](8, streams)
    states.take(Rectangle([Lane(0, None, TEXT[:held], [])], held, 0), ["text"])
    return states


def test_paths_begin_with_what_is_owed():
    states = begun()
    assert states.unread_committed(10) == 2
    lanes = states.lanes(TEXT, NODES, PARENTS, work(4), 100)
    assert lanes == [
        Lane(8, "text", [108, 109, 1, 2, 4], [0, 1, 3]),
        Lane(8, "text", [108, 109, 1, 3], [0, 2]),
    ]


def test_paths_go_on_from_nodes():
    states = begun()
    lanes = states.lanes(TEXT, NODES, PARENTS, work(4), 100)
    states.take(Rectangle(lanes, 5, 0), ["behind 3", "lost"])
    assert states.lanes(TEXT, [*NODES, 5, 6], [*PARENTS, 3, 2], work(2), 100) == [
        Lane(8, "text", [108, 109, 1, 3, 6], [0, 2, 5]),  # it had been filled up, so its state is of no use
        Lane(13, "behind 3", [5], [4]),
    ]


def test_what_was_accepted_goes_on_from_the_deepest_state():
    states = begun()
    states.take(Rectangle(states.lanes(TEXT, [1], [-1], work(1), 100), 3, 0), ["behind 0"])
    states.take(Rectangle(states.lanes(TEXT, [1, 2, 3], [-1, 0, 1], work(2), 100), 2, 1), ["behind 2"])
    states.commit(10, [0, 1], prompt=False)
    assert states.text.kept == {8: "text", 11: "behind 0"}
    assert states.unread_committed(12) == 1
    states.cut(9)
    assert states.text.kept == {8: "text"}


@pytest.mark.parametrize(("streams", "most"), [(False, MOST_UNREAD_IN_MEMORY), (True, MOST_UNREAD)])
def test_too_much_that_is_owed_is_read_before(streams, most):
    text = list(range(40))
    states = begun(streams)
    assert states.unread(text[: 8 + most], 10) is None
    assert states.unread_committed(8 + most) == most
    assert states.unread_committed(9 + most) == 0
    read = []
    while rectangle := states.unread(text, 10):
        assert rectangle.rows.tolist() == []
        read += rectangle.token_ids[0].tolist()
        states.take(rectangle, ["further"])
    assert read == text[8 : 8 + len(read)]
    assert states.unread_committed(40) <= most


def test_a_step_brings_the_state_on():
    states = begun(streams=True, held=4)
    states.take(Rectangle([Lane(4, "text", TEXT[4:8], [])], 4, 0), ["last"])
    lanes = states.lanes(TEXT, [1, 2, 3], [-1, 0, 1], work(3), 100)
    assert lanes == [Lane(8, "last", [108, 109, 1, 2, 3], [0, 1, 2]), Lane(4, "text", TEXT[4:], [])]
    states.take(Rectangle(lanes, 6, 0), ["lost", "now"])
    assert states.text.kept == {4: "text", 8: "last", 10: "now"}
    assert len(states.lanes(TEXT, [1, 2, 3], [-1, 0, 1], work(3), 100)) == 1  # nothing is owed any more


def test_no_step_begins_without_a_state():
    """No state is not zeros to every model, and lanes beside lanes with states would begin with zeros."""
    lanes = begun(streams=True).lanes(TEXT, [1, 2, 3], [-1, 0, 1], work(3), 100)
    assert lanes == [Lane(8, "text", [108, 109, 1, 2, 3], [0, 1, 2])]


def test_only_the_newest_nodes_states_are_kept():
    states = RecurrentStates[int](2, streams=False)
    for node in range(5):
        lanes = states.lanes([], list(range(node + 1)), list(range(-1, node)), work(1), 100)
        assert len(lanes[0].token_ids) == 1
        states.take(Rectangle(lanes, 1, node), [node])
    assert states.lanes([], list(range(6)), [-1, 0, 1, 2, 3, 1], work(1), 100) == [Lane(0, None, [0, 1, 5], [0, 1, 5])]


def test_what_tokens_see():
    """Owed tokens the text as far as themselves; nodes all of it, and their ancestors; padding what is before it."""
    lanes = [Lane(2, "s", [102, 1, 2, 4], [0, 1, 3]), Lane(2, "s", [102, 1, 3], [0, 2])]
    rectangle = Rectangle(lanes, 4, 1)
    assert rectangle.nodes.tolist() == [[-1, 0, 1, 3], [-1, 0, 2, 2]]
    assert rectangle.positions.tolist() == [[2, 3, 4, 5], [2, 3, 4, 4]]
    assert rectangle.rows.tolist() == [2, 6, 3]  # nodes 1 to 3 are new
    assert not rectangle.in_order
    owed, first = [1, 1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0, 0]
    other = [1, 1, 1, 1, 0, 1, 0]
    expected = [owed, first, [1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0, 1], owed, first, other, other]
    assert rectangle.sees(PARENTS, 3, None).astype(int).tolist() == expected
    near = rectangle.sees(PARENTS, 3, 2).astype(int)
    assert near[[0, 3, 6]].tolist() == [[0, 1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 1, 0, 1], [0, 0, 0, 1, 0, 1, 0]]


def test_a_prompt_is_in_order():
    assert Rectangle([Lane(3, "s", [7, 8], [0, 1])], 2, 0).in_order
    assert not Rectangle([Lane(3, "s", [7, 8], [1])], 2, 1).in_order


def test_states_take_a_part_of_the_memory():
    assert most_paths(0, 1, 64, 1) == 8
    assert most_paths(1 << 20, 1, 5, 1) == 5
    for size in (20 << 20, 40 << 20, 500 << 20):
        paths = most_paths(size, 1, 64, 1)
        assert paths == 1 or states_of(paths) * size <= LEAST_STATE_BYTES
        assert states_of(paths + 1) * size > LEAST_STATE_BYTES or paths == 8
    assert most_paths(40 << 20, 16 << 30, 64, 1) == 8  # large weights leave room for more
    assert most_paths(40 << 20, 16 << 30, 64, 4) < 8
