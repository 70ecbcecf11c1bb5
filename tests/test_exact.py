"""Finding shapes of passes that agree to the bit, with an engine whose switches are known."""

import re
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from alone import Generation, before_passes
from conftest import Run
from reference.backend import ReferenceBackend, random_model

from edgespec.errors import UsageError
from edgespec.loading import exact, row_classes
from edgespec.loading.exact import apply_row_class, choose, choose_way, exactness_line, note_on_budget, notes_on_padding
from edgespec.loading.row_classes import TriedClass, comb, probe
from edgespec.loop.backend import Capabilities, Logits, Work
from edgespec.loop.engines import Computing, Engine, LoadOptions, LoadPlan
from edgespec.loop.passes import check_batch, most_nodes, prefill
from edgespec.loop.sampling import SamplingParams
from edgespec.loop.shapes import ALWAYS, BatchInvariance, RowClass, also_wanted
from edgespec.loop.stats import GenerationStats
from edgespec.machine import measurements
from edgespec.planners.none import NonePlanner
from edgespec.planners.sssd import SssdPlanner

LIMITS = Capabilities(1000, 512, 200, 200, logit_tolerance=1.0)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose rows cost little: hundreds of passes are tried. Each depends on all tokens of its path."""

    def evaluate(model, token, position, past, state):
        x = model.embedding[token].copy()
        if position:
            x += 0.5 * past[-1].reshape(-1)[: len(x)]
        cell = np.zeros(past.shape[1:])
        cell.reshape(-1)[: len(x)] = x
        return x, cell, state

    monkeypatch.setattr("reference.backend.evaluate", evaluate)


class Shifted:
    """Logits that are off by the same for all rows of a pass."""

    def __init__(self, logits: Logits, shift: float) -> None:
        self._logits, self._shift = logits, np.float32(shift)

    def row(self, node: int) -> np.ndarray:
        return self._logits.row(node) + self._shift

    def state(self, node: int) -> np.ndarray:
        return self._logits.state(node)


class Switching(ReferenceBackend):
    """Rounds by how many rows a pass has, with switches at some numbers, and otherwise as it is told."""

    def __init__(
        self, switches: Sequence[int] = (), *, gaps_from: int = 999, copies_from: int = 999, **limits: int
    ) -> None:
        super().__init__(random_model(0), **{"context_length": 300, "max_nodes": 140, "max_leaves": 140} | limits)
        self._switches, self._gaps_from, self._copies_from = switches, gaps_from, copies_from

    def forward(self, batch: Sequence[Work]) -> list[Logits]:
        found = super().forward(batch)
        rows = sum(len(work.token_ids) for work in batch)
        tokens, parents = batch[0].token_ids, batch[0].parents
        shift = float(sum(rows >= switch for switch in self._switches))
        if rows >= self._gaps_from and (np.diff(parents) != 1).any():
            shift += 0.5
        if rows >= self._copies_from and rows > 1 and (tokens == tokens[0]).all():
            shift += 0.25
        return [Shifted(logits, shift) for logits in found]  # type: ignore[misc]


class Together(ReferenceBackend):
    """Rows are taken four at a time, and those that are left over one by one, by another kernel."""

    def __init__(self) -> None:
        super().__init__(random_model(0), context_length=300, max_nodes=140, max_leaves=140)

    def forward(self, batch: Sequence[Work]) -> list[Logits]:
        found = super().forward(batch)
        rows = sum(len(work.token_ids) for work in batch)
        return [Left(logits, rows - rows % 4) for logits in found]  # type: ignore[misc]


class Left(Shifted):
    """Logits of rows from `first` on are off."""

    def __init__(self, logits: Logits, first: int) -> None:
        super().__init__(logits, 0.5)
        self._first = first

    def row(self, node: int) -> np.ndarray:
        return super().row(node) if node >= self._first else self._logits.row(node)


class Beginning(ReferenceBackend):
    """What is read from a text's beginning is masked by another kernel."""

    def __init__(self) -> None:
        super().__init__(random_model(0), context_length=300, max_nodes=140, max_leaves=140)

    def forward(self, batch: Sequence[Work]) -> list[Logits]:
        shift = 0.0 if batch[0].session.token_ids else 0.5
        return [Shifted(logits, shift) for logits in super().forward(batch)]  # type: ignore[misc]


def groups(backend: ReferenceBackend) -> list[tuple[int, int, bool, bool]]:
    return [(group.least, group.most, group.trees, group.row_independent) for group in probe(backend)]


def group(least: int, most: int, *, trees: bool = True, independent: bool = True, seconds: float = 1.0) -> TriedClass:
    return TriedClass(least, most, trees, independent, seconds)


def test_switches_are_found() -> None:
    assert groups(Switching()) == [(1, 128, True, True)]
    assert groups(Switching([2, 8, 64])) == [
        (1, 1, True, True),
        (2, 7, True, True),
        (8, 63, True, True),
        (64, 128, True, True),
    ]
    assert groups(Switching([64], gaps_from=64)) == [(1, 63, True, True), (64, 128, False, True)]
    assert groups(Switching([8], copies_from=8)) == [(1, 7, True, True), (8, 128, True, False)]


def test_what_an_engine_adds_up_by_cell_is_no_class_though_trying_shows_no_difference() -> None:
    """Rounding hides it in the passes that are tried, and not in others."""
    backend = Switching()
    backend.capabilities = replace(backend.capabilities, by_cell=((1, 1), (64, 128)))
    assert groups(backend) == [(1, 1, False, True), (2, 63, True, True), (64, 128, False, True)]
    assert chosen(probe(backend)).trees == RowClass(2, 63)
    backend.capabilities = replace(backend.capabilities, by_cell=ALWAYS)
    assert probe(backend) == []


class Mixing(ReferenceBackend):
    """Rows of a pass with several sequences are off."""

    def forward(self, batch: Sequence[Work]) -> list[Logits]:
        return [Shifted(logits, 0.5 * (len(batch) > 1)) for logits in super().forward(batch)]  # type: ignore[misc]


def test_rows_that_another_sequence_changes_are_no_class() -> None:
    sizes = {"context_length": 300, "max_nodes": 140, "max_leaves": 140}
    (found,) = probe(Mixing(random_model(0), sessions=2, **sizes))
    assert not found.row_independent
    (found,) = probe(Mixing(random_model(0), sessions=1, **sizes))  # where that cannot be tried
    assert found.row_independent


def test_kernels_that_take_four_rows_together() -> None:
    """Few rows agree, and multiples of four do; 16 and 17 rows do not, though their first 16 are alike."""
    found = probe(Together())
    assert [(group.least, group.most, group.step) for group in found] == [(1, 3, 1), (4, 128, 4)]
    assert all(group.trees and group.row_independent for group in found)
    assert choose(found, LIMITS, None) == BatchInvariance("narrow", RowClass(1, 3), RowClass(4, 128, 4))
    limits = replace(LIMITS, max_nodes=150, max_wanted=70)
    assert choose(found, limits, "wide") == BatchInvariance("wide", RowClass(4, 68, 4), RowClass(4, 68, 4))
    assert "1 to 3, 4 to 128 in multiples of 4" in exactness_line(found, None)


def test_a_switch_at_the_largest_passes_is_none_of_these() -> None:
    assert groups(Switching([128])) == [(1, 65, True, True), (128, 128, True, True)]


@pytest.mark.parametrize(("switch", "most"), [(129, 128), (200, 128), (300, 256), (512, 256), (513, 512)])
def test_a_class_reaches_no_further_than_was_tried(switch: int, most: int) -> None:
    """Else prompts that are cut at other tokens would have other bits."""
    found = probe(Switching([switch], context_length=1200, max_nodes=1100))
    assert [(group.least, group.most) for group in found] == [(1, most)]
    assert chosen(found, replace(LIMITS, max_nodes=4096)).prompts.most == min(most, 200)


def test_prompts_are_read_in_the_largest_passes_that_were_tried() -> None:
    found = [group(1, 7), group(8, 63), group(64, 512)]
    assert chosen(found, replace(LIMITS, max_nodes=4096)).prompts == RowClass(64, 512)


def test_passes_are_padded_to_multiples() -> None:
    shape = RowClass(8, 60, step=4)
    assert [shape.rows(count) for count in (1, 8, 9, 12, 57)] == [8, 8, 12, 12, 60]
    assert [RowClass(2, 7).rows(count) for count in (1, 2, 5)] == [2, 2, 5]
    assert also_wanted([0], 12, shape) == [5, 6, 7, 8, 9, 10, 11]
    assert also_wanted(range(9), 12, shape) == [9, 10, 11]
    assert also_wanted([], 12, shape) == []


def test_where_gaps_matter_nothing_is_found() -> None:
    found = probe(Switching([8], gaps_from=2))
    assert found == []
    assert choose(found, LIMITS, None) is None
    assert "what stands between its ancestors" in exactness_line(found, None)
    with pytest.raises(UsageError, match="--exact wide: here a node's logits depend on what stands between"):
        choose(found, LIMITS, "wide")


def test_where_it_matters_where_a_pass_begins_nothing_is_found() -> None:
    """A kept prefix would change bits, though passes of all sizes agree."""
    found = probe(Beginning())
    assert found == []
    assert "where its pass begins" in exactness_line(found, None)


def test_an_engine_that_is_known_to_add_up_gaps_is_not_tried(tmp_path) -> None:
    backend = Switching()
    backend.capabilities = replace(LIMITS, by_cell=ALWAYS)
    apply_row_class(backend, "nowhere", say=lambda what: pytest.fail(what))
    assert backend.capabilities.exact is None
    with pytest.raises(UsageError, match="what stands between its ancestors"):
        apply_row_class(backend, "nowhere", "narrow")


def test_a_comb_has_gaps_and_a_path() -> None:
    nodes, parents, path = comb(range(10, 30), 8)
    assert [nodes[node] for node in path] == list(range(10, 10 + len(path)))
    assert [parents[node] for node in path] == [-1, *path[:-1]]
    assert path != list(range(len(path)))
    assert len(nodes) == len(parents) == 8


def chosen(found: list[TriedClass], limits: Capabilities = LIMITS, asked: str | None = None) -> Any:
    return choose(found, limits, asked)


LLAMA = [group(1, 1), group(2, 7), group(8, 63, seconds=2.0), group(64, 512, trees=False)]


@pytest.mark.parametrize(
    ("asked", "streams", "name", "trees", "prompts"),  # short prompts: 8 to 63
    [
        (None, False, "narrow", (2, 7), (64, 512)),
        (None, True, "wide", (8, 63), (64, 512)),
        ("narrow", True, "narrow", (2, 7), (64, 512)),
        ("wide", False, "wide", (8, 63), (64, 512)),
    ],
)
def test_the_choice(
    asked: str | None, streams: bool, name: str, trees: tuple[int, int], prompts: tuple[int, int]
) -> None:
    limits = Capabilities(1000, 512, 200, 200, logit_tolerance=1.0, streams=streams)
    assert choose(LLAMA, limits, asked) == BatchInvariance(name, RowClass(*trees), RowClass(*prompts), RowClass(8, 63))
    assert choose(LLAMA, limits, "off") is None


def test_prompts_are_read_in_a_class_whose_rows_can_be_wanted() -> None:
    """More of them than an engine takes would end the process."""
    found = [group(1, 17), group(32, 65), group(128, 512)]
    for most, prompts in ((128, (128, 512)), (127, (32, 65)), (64, (32, 65)), (31, (1, 17))):
        assert chosen(found, replace(LIMITS, max_wanted=most), "narrow").prompts == RowClass(*prompts)


@pytest.mark.parametrize(
    ("read", "name"),
    [
        (0.5, "wide"),  # reading takes longer than either: 20 layers of 2 or of 12 ms, twice that from a disk
        (0.46, "wide"),
        (0.4, "narrow"),
        (0.001, "narrow"),  # nearly all is in memory
        (inf, "wide"),
    ],
)
def test_wide_where_weights_are_waited_for_long_enough(read: float, name: str) -> None:
    groups = [group(1, 7, seconds=0.002), group(8, 63, seconds=0.012), group(64, 512, trees=False)]
    limits = Capabilities(1000, 512, 200, 200, logit_tolerance=1.0, streams=True, read_seconds=read, layers=20)
    assert chosen(groups, limits).name == name
    assert chosen([replace(one, seconds=0.0) for one in groups], limits).name == "wide"


def test_wide_costs_nothing() -> None:
    cheap = [*LLAMA[:2], group(8, 63, seconds=1.05), LLAMA[3]]
    assert chosen(cheap).name == "wide"


def test_any_number_of_rows() -> None:
    """As many nodes as the backend takes logits of."""
    assert choose([group(1, 512)], LIMITS, None) == BatchInvariance("any", RowClass(1, 200), RowClass(1, 200))
    assert choose([group(1, 7), group(8, 512)], LIMITS, "wide") == BatchInvariance(
        "wide", RowClass(8, 200), RowClass(8, 200)
    )


def test_a_mixture_has_no_wide_class() -> None:
    """And where rows depend on each other, prompts are read in equal blocks."""
    found = [group(1, 7), group(8, 127, independent=False), group(128, 512)]
    narrow = BatchInvariance("narrow", RowClass(1, 7), RowClass(1, 512), blocks=True)
    assert choose(found, LIMITS, None) == narrow
    with pytest.raises(UsageError, match="only passes of at most 7 rows agree"):
        choose(found, LIMITS, "wide")


def test_blocks_of_a_prompt() -> None:
    """They begin at multiples of their size, whatever is kept, and are read alone."""
    backend = ReferenceBackend(random_model(0), sessions=2, context_length=200)
    backend.keep_to(BatchInvariance("narrow", RowClass(1, 7), RowClass(1, 16), blocks=True))
    seen = before_passes(backend, lambda batch: (len(batch[0].session.token_ids), len(batch[0].token_ids)))
    session, text = backend.open(), [5 + i % 50 for i in range(40)]
    prefill(backend, session, text)
    assert seen == [(0, 16), (16, 16), (32, 8)]
    assert (session.reusable_prefix(40), session.reusable_prefix(32), session.reusable_prefix(31)) == (32, 32, 16)
    prefill(backend, session, [*text, 5, 6])
    assert seen[3:] == [(32, 10)]
    one = np.zeros(1, np.int32)
    works = [Work(backend.open(), one, one - 1, one, prompt=True), Work(session, one, one - 1, one, prompt=True)]
    with pytest.raises(ValueError, match="a prompt and other works in one forward"):
        backend.forward(works)


def test_a_class_without_room_for_a_tree_is_none() -> None:
    assert choose([group(1, 2), group(3, 512, independent=False)], LIMITS, None) is None


def test_what_is_found_is_said() -> None:
    assert exactness_line(LLAMA, choose(LLAMA, LIMITS, None)) == (
        "passes of these numbers of rows agree to the bit: 2 to 7, 8 to 63; used: narrow, at least 2"
    )
    assert "1 to 512" in exactness_line([group(1, 512)], None)
    assert "bit: 1 to 3, 4, 8 to 512 in multiples of 4" in exactness_line(
        [group(1, 3), *(replace(one, step=4) for one in (group(4, 4), group(8, 512)))], None
    )


def test_padding_that_costs_is_said() -> None:
    found = [group(1, 1, seconds=1.0), group(2, 7, seconds=1.5), group(8, 512, seconds=4.0)]
    narrow = choose(found, LIMITS, "narrow")
    assert (
        "padded to 2 rows, so that they agree to the bit, and take 1.5 times as long"
        in notes_on_padding(found, narrow, False)[0]
    )
    assert notes_on_padding(found, narrow, streams=True) == []  # the disk is waited for anyway
    assert notes_on_padding(found, None, streams=False) == []
    assert notes_on_padding([group(1, 7), group(8, 512)], choose([group(1, 7)], LIMITS, None), streams=False) == []


def test_any_is_a_class_that_can_be_asked_for() -> None:
    all_agree = [group(1, 128)]
    assert choose(all_agree, LIMITS, "any") == choose(all_agree, LIMITS, None)
    with pytest.raises(UsageError, match="--exact any: here only passes of at most 7 rows agree"):
        choose([group(1, 7), group(8, 128)], LIMITS, "any")


def test_a_wrong_name() -> None:
    with pytest.raises(UsageError, match="exact is 'both', but must be one of narrow, wide, any, off"):
        choose(LLAMA, LIMITS, "both")


@pytest.fixture
def remembered(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.delenv("EDGESPEC_NO_MEMORY_OF_COSTS")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(row_classes, "_known", {})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "model").write_bytes(b"1")
    return tmp_path / "model"


def settled(path: Path, asked: str | None = None, switches: Sequence[int] = (8,), **options: Any) -> Any:
    """A backend that keeps to its row class; `options`: of it, and of `apply_row_class`."""
    backend = Switching(switches, gaps_from=options.pop("gaps_from", 999))
    backend.capabilities, backend.computing = LIMITS, options.pop("computing", backend.computing)
    apply_row_class(backend, str(path), asked, **options)
    return backend


@pytest.fixture
def few_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is done with the classes does not depend on how many passes were tried."""
    monkeypatch.setattr(row_classes, "SIZES", (1, 2, 7, 8, 9, 64))
    monkeypatch.setattr(row_classes, "LARGER", (128,))


def test_it_is_found_once(remembered: None, few_sizes: None, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = list[str]()
    for another_process, content, options, count in (
        (False, b"1", {}, 1), (False, b"1", {}, 1), (True, b"1", {}, 1), (False, b"22", {}, 2),
        (True, b"22", {"remember": False}, 3),
    ):  # fmt: skip
        if another_process:
            monkeypatch.setattr(row_classes, "_known", {})
        if path.read_bytes() != content:  # another file
            path.write_bytes(content)
        assert settled(path, say=said.append, **options).capabilities.exact.name == "narrow"
        assert len(said) == count


@pytest.fixture(scope="module")
def known_classes(tmp_path_factory):
    """A folder of files of models, each of which is tried once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_classes, "_known", {})
        yield tmp_path_factory.mktemp("models")


@pytest.mark.parametrize(
    ("switches", "gaps_from", "asked", "budget", "most", "lifts"),
    [
        ([8], 999, "narrow", 64, 6, "--exact wide or off"),
        ([8], 999, "narrow", 7, 6, "--exact wide or off"),
        ([8], 999, "narrow", 6, None, ""),  # they fit
        ([8], 999, "wide", 64, None, ""),
        ([8], 999, "wide", 300, None, ""),  # the engine has no more
        ([8], 8, "narrow", 64, 6, "--exact off"),  # trees have no class of many rows
        ([8, 64], 999, "wide", 100, 62, "--exact off"),
        ([8], 999, "off", 300, None, ""),
    ],
)
def test_a_budget_that_the_row_class_caps_is_told_with_what_lifts_it(
    known_classes, switches: list[int], gaps_from: int, asked: str, budget: int, most: int | None, lifts: str
) -> None:
    path = known_classes / f"{switches} {gaps_from}"
    if not path.exists():
        path.write_bytes(b"1")
    backend = settled(path, asked, switches, gaps_from=gaps_from)
    told = "".join(note_on_budget(budget, backend, str(path)))
    assert told.startswith(f"passes have at most {most} draft tokens, not {budget}: ") if most else not told
    assert told.endswith(f"; {lifts} lifts this limit") == bool(most)
    for option in lifts.removeprefix("--exact ").split(" or ") if lifts else ():
        wider = settled(path, option, switches, gaps_from=gaps_from)
        assert most < most_nodes(wider.capabilities, 0) - 1


def test_row_classes_that_cannot_be_are_found_again(
    remembered: None, few_sizes: None, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said, right = list[str](), {"least": 1, "most": 8, "trees": True, "row_independent": True, "seconds": 1.0}
    wrong = [[{"least": 1}], [1], 3, *([right | part] for part in ({"seconds": -1.0}, {"seconds": "1"}, {"least": 9}))]
    for i, value in enumerate([*wrong, [right]]):
        settled(path, say=said.append)
        assert len(said) == i + 1
        (found,) = measurements.everything()
        measurements.remember(found["about"], value)
        monkeypatch.setattr(row_classes, "_known", {})
    settled(path, say=said.append)  # the last can be
    assert len(said) == 7


@pytest.mark.parametrize("busy", [False, True])
def test_times_of_a_busy_machine_tell_nothing(remembered: None, path: Path, monkeypatch, busy: bool) -> None:
    """Passes of all sizes take as long, since all wait for another program: padding would seem to cost nothing."""
    monkeypatch.setattr(row_classes, "_one", lambda backend, session, chain: 0.25)
    monkeypatch.setattr(row_classes, "machine_is_busy", lambda: busy)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    said = list[str]()

    def with_part(got: float) -> ReferenceBackend:
        """`got`: the part of the processors' time that this program had."""
        clock, own = iter([0.0, 1.0]), iter([0.0, 2 * got])
        monkeypatch.setattr(row_classes, "_known", {})  # a process of its own
        monkeypatch.setattr(row_classes, "perf_counter", lambda: next(clock))
        monkeypatch.setattr(row_classes, "process_time", lambda: next(own))
        return settled(path, say=said.append, computing={"threads": 4, "gpu_layers": 0})  # two at a time

    first = with_part(0.5)
    assert first.capabilities.exact.name == "narrow"
    assert "other programs computed" in exactness_line(row_classes._known.popitem()[1], first.capabilities.exact)
    again = with_part(1.0)
    assert len(said) == (1 if busy else 2)
    assert again.capabilities.exact.name == ("narrow" if busy else "wide")  # as it is where padding costs nothing
    assert with_part(0.5).capabilities.exact == again.capabilities.exact
    assert len(said) == (1 if busy else 2)


REPACKED = [group(1, 3, seconds=1.0), replace(group(8, 512, seconds=3.0), step=4)]


@pytest.mark.parametrize(
    ("repacked", "otherwise", "asked", "better"),
    [
        (REPACKED, [group(1, 7, seconds=1.3), group(8, 512)], None, True),
        (REPACKED, [group(1, 7, seconds=1.02), group(8, 512)], None, False),  # as quick, and room for more guesses
        (REPACKED, [group(1, 512, seconds=1.3)], None, False),  # room for any number
        (REPACKED, [group(1, 512, trees=False, seconds=1.0)], "narrow", True),  # otherwise there is none
        ([group(1, 3, trees=False)], [group(1, 7, seconds=9.0)], None, False),
        (REPACKED, [group(1, 7, seconds=1.0), group(8, 512, seconds=4.0)], "wide", True),
        (REPACKED, [group(1, 7, seconds=9.0), group(8, 512, seconds=3.0)], "wide", False),
        (REPACKED[:1], [group(1, 7)], "wide", False),
    ],
)
def test_the_quicker_way_to_compute(
    monkeypatch: pytest.MonkeyPatch, path: Path, repacked: list[TriedClass], otherwise: list[TriedClass],
    asked: str | None, better: bool,
) -> None:  # fmt: skip
    """Both are tried with a small model, once; without another way it is enough that there is a class."""
    tried = list[bool]()

    class FakeEngine(Engine):
        def probe_copy(self, path: str, computing: Computing):
            return nullcontext("copy")

        def probe_model(self, path: str, computing: Computing, *, watched: bool = False, copy: str | None = None):
            assert copy == "copy"
            if watched:
                tried.append("repacked" in computing)
            return nullcontext(repacked if "repacked" in computing else otherwise)

    monkeypatch.setattr(row_classes, "find_engine", lambda name: FakeEngine())
    monkeypatch.setattr(row_classes, "probe", lambda found: found)
    monkeypatch.setattr(row_classes, "timed", lambda backend, found: found)
    monkeypatch.setattr(row_classes, "_known", {})
    ways = ({"repacked": True}, {})
    plan = LoadPlan(path=str(path), options=LoadOptions(exact=asked), build="build", ways=ways)
    for _ in range(2):
        assert choose_way("engine", plan, remember=False) == ways[0 if better else 1]
    least = 32 if asked == "wide" else 3
    needed = any(one.trees and one.most >= least for one in repacked)  # else the other way is taken untried
    assert tried == ([True, False] if needed else [True])
    assert choose_way("engine", replace(plan, options=LoadOptions(exact="off")), remember=False) == {}
    assert len(tried) == 1 + needed


def test_where_loading_fills_the_memory_classes_are_looked_for_before(monkeypatch: pytest.MonkeyPatch) -> None:
    found = list[str]()
    monkeypatch.setattr(exact, "find", lambda engine, *about, **how: found.append(engine) or [])
    plan = LoadPlan(path="model", options=LoadOptions(), build="build", ways=({"threads": 2},))
    for fills_memory, asked in ((False, None), (True, None), (True, "off")):
        way = choose_way("engine", replace(plan, fills_memory=fills_memory, options=LoadOptions(exact=asked)))
        assert way == {"threads": 2}
    assert found == ["engine"]


def test_engines_that_do_not_round_are_left_alone() -> None:
    backend = ReferenceBackend(random_model(0))
    apply_row_class(backend, "nowhere")
    assert backend.capabilities.exact is None


NARROW = BatchInvariance("narrow", RowClass(2, 5), RowClass(7, 20))


def test_short_prompts_have_a_class_of_their_own() -> None:
    """They are read in one pass, and go on from one another; longer ones from longer ones alone."""
    backend = ReferenceBackend(random_model(0), context_length=200)
    backend.keep_to(BatchInvariance("narrow", RowClass(1, 7), RowClass(16, 20), RowClass(4, 12)))
    session = backend.open()
    seen = before_passes(backend, lambda batch: (len(session.token_ids), len(batch[0].token_ids), batch[0].short))
    text = row_classes.tokens(backend, 40, 1)
    for length in (7, 12, 13, 20, 24, 12):
        prefill(backend, session, text[:length])
    assert seen == [
        (0, 7, True), (7, 5, True), (0, 13, False), (13, 7, False), (20, 4, False), (0, 12, True),
    ]  # fmt: skip
    del seen[:]
    for length, want_last in ((12, True), (13, True), (12, True), (13, True)):  # as long as what is read is short
        prefill(backend, session, text[:length], want_last=want_last)
    assert seen == [(11, 1, True), (0, 13, False), (0, 12, True), (0, 13, False)]
    short, long = (Work(session, np.array([1]), np.array([-1]), np.array([0]), prompt=True, short=s) for s in (1, 0))
    with pytest.raises(ValueError, match="short prompts and others"):
        check_batch([short, long], backend.capabilities)


def test_who_wants_the_last_logits_keeps_whole_blocks_too() -> None:
    """All is held: what is read again begins where a block does."""
    backend = ReferenceBackend(random_model(0), context_length=200)
    backend.keep_to(BatchInvariance("narrow", RowClass(1, 7), RowClass(1, 16), blocks=True))
    session, text = backend.open(), row_classes.tokens(backend, 32, 1)
    starts = before_passes(backend, lambda batch: len(batch[0].session.token_ids))
    for _ in range(2):
        prefill(backend, session, text, want_last=True)
    assert starts == [0, 16, 16]


def test_the_loop_keeps_to_the_class() -> None:
    """Trees and prompts have at most as many rows as their class, and the text is the same."""
    texts = []
    for found in (None, NARROW):
        backend = ReferenceBackend(random_model(0), context_length=200)
        if found:
            backend.keep_to(found)
        sizes = before_passes(backend, lambda batch: (batch[0].prompt, sum(len(work.token_ids) for work in batch)))
        prompt = backend.vocab.encode("a b a b a b a b a b a b a b a", add_bos=True, parse_special=False)
        steps = Generation(
            backend, backend.open(), SssdPlanner(), prompt, SamplingParams(), max_tokens=40, budget=30,
            stats=GenerationStats(), stop_ids=frozenset(),
        ).steps()  # fmt: skip
        texts.append([token for step in steps for token in step.tokens])
    assert texts[0] == texts[1]
    assert max(size for prompt, size in sizes if prompt) == 20
    assert 2 <= max(size for prompt, size in sizes if not prompt) <= 5


def test_what_was_written_is_read_again() -> None:
    backend = ReferenceBackend(random_model(0), sessions=2)
    backend.keep_to(NARROW)
    session, stats = backend.open(), GenerationStats()
    rounds = Generation(
        backend, session, NonePlanner(), [5, 6, 7, 8], SamplingParams(), max_tokens=4, budget=1, stats=stats,
        stop_ids=frozenset(),
    ).steps()  # fmt: skip
    written = [token for round_ in rounds for token in round_.tokens]
    held = [5, 6, 7, 8, *written][:-1]
    assert session.token_ids == held
    assert stats.exact == "narrow"
    assert session.reusable_prefix(len(held)) == 4  # the prompt
    assert session.fork().reusable_prefix(len(held)) == 4
    prefill(backend, session, [*held, 9])
    assert session.token_ids == [*held, 9]
    assert session.reusable_prefix(len(held) + 1) == len(held) + 1
    session.rewind(2)
    assert session.reusable_prefix(2) == 2


def test_too_many_rows_are_refused() -> None:
    backend = ReferenceBackend(random_model(0), sessions=2)
    backend.keep_to(NARROW)
    session, other = backend.open(), backend.open()
    nodes = np.arange(6, dtype=np.int32)
    with pytest.raises(ValueError, match="6 rows in one forward; this backend takes 5"):
        backend.forward([Work(session, nodes, nodes - 1, nodes)])
    backend.forward([Work(session, nodes, nodes - 1, nodes, prompt=True)])
    session.rewind(0)
    with pytest.raises(ValueError, match="prompts and trees in one forward"):
        check_batch(
            [
                Work(session, nodes[:1], nodes[:1] - 1, nodes[:1]),
                Work(other, nodes[:1], nodes[:1] - 1, nodes[:1], prompt=True),
            ],
            backend.capabilities,
        )
    assert most_nodes(backend.capabilities, 0) == 5
    assert most_nodes(backend.capabilities, 3) == 2


def test_the_command_line(run: Run, small_q4, tmp_path) -> None:
    """Good and bad values; a bench counts what is equal."""
    status, out, err = run("run", str(small_q4), "hi", "--exact", "never")
    assert (status, out) == (2, "")
    assert err == "edgespec: exact is 'never', but must be one of narrow, wide, any, off\n"
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Count to ten."}\n')
    options = ["--model", str(small_q4), "--planners", "sssd", "-n", "12", "--ctx", "256"]
    status, out, err = run("bench", str(prompts), *options)
    assert status == 0, err
    assert re.search("passes: (narrow|any)", out)  # which depends on the processor
    assert out.count("1 equal") == 2
    assert "ties" not in out
    status, out, err = run("run", str(small_q4), "hi", "--exact", "off", "-n", "4", "--json")
    assert status == 0, err
    assert '"exact": ""' in out
