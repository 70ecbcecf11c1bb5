"""A draft for whose sake the target is read from disk: loaded if that is predicted to be faster, else left out."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgespec import model
from edgespec.errors import NoRoom
from edgespec.loading import draft_or_memory
from edgespec.loading.draft_or_memory import CLOSE, LONG, Learn, Speeds, Ways, measured, open_pair, predict, timed
from edgespec.loading.exact import COLD
from edgespec.loading.pair import PairPlan, close_all, open_backends
from edgespec.loading.row_classes import TriedClass
from edgespec.loop.engines import LoadOptions, LoadPlan
from edgespec.machine import measurements as remembered
from edgespec.models.registry import find_model
from edgespec.planners.auto import AutoState
from edgespec.weights.plan import Extent, Layer, Plan, Pool

GB, LAYERS = 10**9, 20


def plan(streamed: float, total: float = 1.1) -> Plan:
    """Of a target of `total` GB, of which each pass reads `streamed`."""
    size = int(streamed * GB) // LAYERS
    parts = tuple(Layer(i, (Extent(0, i * size, (i + 1) * size),)) for i in range(LAYERS)) if size else ()
    pinned = (Extent(0, LAYERS * size, int(total * GB)),)
    return Plan(memory=2 * GB, needed=GB, pinned=pinned, streamed=parts, cached=(), slots=2, layers=LAYERS)


def groups(one: float, eight: float) -> list[TriedClass]:
    """Row classes where passes over one row and over eight rows take these seconds."""
    return [
        TriedClass(least, least, trees=True, row_independent=True, seconds=seconds / COLD / LAYERS)
        for least, seconds in ((1, one), (8, eight))
    ]


@pytest.mark.parametrize(
    ("streamed", "alone", "passes", "disk", "agreement", "better"),
    [
        (0.56, 0.0, (0.11, 0.35), 1.6, 0.7, "plain"),  # the 1.5B and its 0.5B in 1.39 GiB: measured 4.85 and 8.6
        (0.36, 0.0, (0.11, 0.35), 1.6, 0.7, "plain"),
        (0.11, 0.0, (0.11, 0.35), 1.6, 0.7, "close"),  # it is read while the target computes
        (0.56, 0.0, (0.01, 0.03), 6.0, 0.7, "plain"),
        (0.56, 0.5, (0.11, 0.35), 0.5, 0.7, "drafted"),  # both read
        (0.56, 0.5, (0.11, 0.35), 0.5, 0.05, "close"),
        (1.0, 0.25, (0.11, 0.35), 0.5, 0.2, "plain"),
        (0.12, 0.0, (0.11, 0.12), 1.6, 0.9, "drafted"),  # rows cost little
    ],
)
def test_the_better_way_is_known_before_anything_is_loaded(
    streamed: float, alone: float, passes: tuple[float, float], disk: float, agreement: float, better: str
) -> None:
    without = plan(alone) if alone else None
    found = predict(plan(streamed), without, int(0.49 * GB), groups(*passes), disk * GB, agreement)
    assert found.plain == pytest.approx(1 / max(passes[0], alone / disk), rel=0.01)
    assert found.are_known
    assert ("close" if found.are_close else "drafted" if found.drafted > found.plain else "plain") == better


class Loaded:
    """Models that were "loaded"."""

    def __init__(self) -> None:
        self.notes = list[str]()
        self.open = True

    def close(self) -> None:
        self.open = False


class Machine:
    """Where a pair is planned and loaded; nothing is read.

    Attributes:
        loads: for each, whether it was with the draft.
        planned: the same of plans.
        too_little: plans that the memory is too little for: with the draft, or without it.
        no_plans: the engine says only when it loads whether there is room, as PyTorch.
    """

    no_plans = False

    def __init__(self, folder: Path, streamed: float, alone: float) -> None:
        self.paths = [str(folder / name) for name in ("target", "draft")]
        for path in self.paths:
            Path(path).write_bytes(b"1")
        self.weights = {True: plan(streamed), False: plan(alone) if alone else None}
        self.loads, self.planned, self.models = list[bool](), list[bool](), list[Loaded]()
        self.too_little = set[bool]()

    def plan(self, entry: Any, draft: str | None, models_file: Any, options: LoadOptions, *, say: Any) -> PairPlan:
        self.planned.append(draft is not None)
        if not self.no_plans:
            self.check(draft is not None)
        paths = self.paths if draft else self.paths[:1]
        made = LoadPlan(path=paths[0], options=options, weights=self.weights[draft is not None])
        return PairPlan(["none"] * len(paths), paths, options, None if self.no_plans else made)

    def check(self, drafted: bool) -> None:
        if drafted in self.too_little:
            raise NoRoom("1 GB are too little")

    def load(self, pair: PairPlan, **options: Any) -> list[Loaded]:
        assert not any(one.open for one in self.models)
        self.loads.append(len(pair.paths) > 1)
        self.check(len(pair.paths) > 1)
        self.models = [Loaded() for _ in pair.paths]
        return self.models


Start = Callable[..., tuple[list[Loaded], Learn]]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Load a pair as `edgespec.load` does.

    Args:
        machine: where.
        predicted: speeds with the draft and without it; None: unknown.
        tried: the same, if passes are timed.
        busy: other programs compute.
        untimed: so that row classes have no times.
    """
    monkeypatch.delenv(remembered.OFF, raising=False)
    monkeypatch.setattr(remembered, "folder", lambda: tmp_path / "measured")

    def started(
        machine: Machine, predicted: tuple[float, float] | None, tried: tuple[float, float] = (0.0, 0.0), *,
        busy: bool = False, leave_out: bool = True, remember: bool = True, untimed: bool = False,
    ) -> tuple[list[Loaded], Learn]:  # fmt: skip
        close_all(machine.models)  # of the run before
        monkeypatch.setattr(draft_or_memory, "plan_pair", machine.plan)
        monkeypatch.setattr(draft_or_memory, "load_pair", machine.load)
        monkeypatch.setattr(draft_or_memory, "machine_is_busy", lambda: busy)
        classes = groups(0.0, 0.0) if untimed else groups(0.1, 0.3) if predicted else []
        monkeypatch.setattr(draft_or_memory, "find", lambda *args, **options: classes)
        monkeypatch.setattr(draft_or_memory, "predict", lambda *args: Speeds(*(predicted or ())))
        monkeypatch.setattr(draft_or_memory, "measure_disk", lambda files, plan: 1e9)
        monkeypatch.setattr(draft_or_memory, "timed", lambda backends, agreement: tried[len(backends) == 1])
        return open_pair(
            None, "draft", None, LoadOptions(), leave_out=leave_out, remember=remember, say=lambda line: None
        )  # fmt: skip

    return started


@pytest.mark.parametrize(
    ("streamed", "alone", "predicted", "tried", "options", "loads"),
    [
        # Only the better way is loaded.
        (0.56, 0.0, (4.85, 8.6), None, {}, [False]),
        (0.56, 0.0, (8.6, 4.85), None, {}, [True]),
        # What cannot be predicted is tried where the target would fit.
        (0.56, 0.0, None, (5.0, 9.0), {}, [False, True, False]),
        (0.9, 0.5, None, (5.0, 9.0), {}, [True]),
        # Nothing is tried while other programs compute.
        (0.56, 0.0, (8.0, 7.0), None, {"busy": True}, [True]),
        (0.56, 0.0, (7.0, 8.0), None, {"busy": True}, [False]),
        (0.56, 0.0, None, None, {"busy": True}, [False]),
        # A draft that takes no memory of the target is loaded at once, and so is one that was asked for.
        (0.0, 0.0, (1.0, 9.0), None, {}, [True]),
        (0.5, 0.5, (1.0, 9.0), None, {}, [True]),
        (0.56, 0.0, (1.0, 9.0), None, {"leave_out": False}, [True]),
    ],
)
def test_what_is_loaded(
    start: Start, tmp_path: Path, streamed: float, alone: float, predicted: tuple[float, float] | None,
    tried: tuple[float, float] | None, options: dict[str, bool], loads: list[bool],
) -> None:  # fmt: skip
    machine = Machine(tmp_path, streamed, alone)
    backends, learn = start(machine, predicted, tried or (0.0, 0.0), **options)
    assert (machine.loads, len(backends)) == (loads, 1 + loads[-1])
    assert machine.planned[:1] == [True]
    assert len(machine.planned) == 1 or "leave_out" not in options
    learn(run(0.5, 0.1))
    assert bool(remembered.everything()) == (streamed > alone and not options)


@pytest.mark.parametrize(
    ("predicted", "slow", "fast"), [((4.85, 8.6), "4.8", "8.6"), ((0.044, 12.3), "0.044", "12"), ((8.6, 4.85), "", "")]
)
def test_what_was_left_out_is_said(
    start: Start, tmp_path: Path, predicted: tuple[float, float], slow: str, fast: str
) -> None:
    backends, _ = start(Machine(tmp_path, 0.56, 0.0), predicted)
    said = "\n".join(backends[0].notes)
    assert ("the draft is left out" in said) == bool(slow)
    assert (f"about {slow} tokens/s with it, {fast} without" in said) == bool(slow)


@pytest.mark.parametrize("tried", [(7.0, 9.0), (9.0, 7.0)])
@pytest.mark.parametrize("predicted", [(8.0, 7.0), (7.0, 8.0)])
def test_ways_that_are_close_are_both_tried_once(
    start: Start, tmp_path: Path, predicted: tuple[float, float], tried: tuple[float, float]
) -> None:
    machine = Machine(tmp_path, 0.56, 0.0)
    first, better = predicted[0] > predicted[1], tried[0] > tried[1]
    backends, _ = start(machine, predicted, tried)
    assert machine.loads == [first, not first, *([first] if better == first else [])]
    assert len(backends) == 1 + better
    assert all(one.open for one in backends)
    machine.loads.clear()
    backends, _ = start(machine, predicted, tried)
    assert machine.loads == [better]


def mixture(share: float, used: int = 2, experts: int = 16, size: float = 11.2) -> Plan:
    """Of a target with 0.4 GB of other weights, and pools for a share of its experts."""
    cached = (Extent(0, 0, int(size * GB)),)
    pools = (Pool(tuple(range(LAYERS)), int(share * LAYERS * experts)),)
    return replace(plan(0.0, 0.4), cached=cached, experts=experts, used=used, pools=pools)


@pytest.mark.parametrize(
    ("shares", "experts", "disk", "agreement", "better"),
    [
        ((1 / 8, 2 / 8), (16, 2), 1.5, 0.7, "plain"),  # measured: 1.01 and 1.48 tokens/s
        ((1 / 8, 2 / 8), (128, 6), 1.5, 0.7, "plain"),
        ((0.30, 0.31), (128, 6), 0.05, 0.9, "drafted"),  # reading takes longest
        ((0.30, 0.60), (128, 6), 0.05, 0.9, "plain"),
        ((0.30, 0.33), (128, 6), 1.5, 0.1, "plain"),
    ],
)
def test_a_mixtures_draft_takes_the_memory_of_experts(
    shares: tuple[float, float], experts: tuple[int, int], disk: float, agreement: float, better: str
) -> None:
    count, used = experts
    drafted, alone = (mixture(share, used, count) for share in shares)
    found = predict(drafted, alone, int(0.49 * GB), groups(0.27, 1.0)[:1], disk * GB, agreement)
    assert found.are_known
    assert (found.drafted > found.plain) == (better == "drafted")
    assert predict(drafted, None, int(0.49 * GB), groups(0.27, 1.0)[:1], disk * GB, agreement).plain >= found.plain


def test_most_experts_are_read_while_the_model_computes() -> None:
    """Those that the router before foresees; a slow disk is all that counts."""

    def seconds(disk: float) -> float:
        return 1 / predict(mixture(0.125), mixture(0.25), GB // 2, groups(0.01, 0.01)[:1], disk).plain

    computing, read = seconds(1e18), 1e3 * seconds(1e3)
    assert seconds(2 * read / computing) == pytest.approx(computing * (1 + 1 / 3 / 2), rel=1e-3)


def test_a_head_costs_what_its_pass_reads_not_what_its_file_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lies in the target's file, with experts of which it uses few; passes of the target read none of it."""
    path, found, options = tmp_path / "target", groups(0.27, 1.0)[:1], LoadOptions()
    path.touch()
    os.truncate(path, 12 * GB)
    monkeypatch.setattr(draft_or_memory, "find", lambda *args, **options: found)
    drafted, alone = mixture(0.30), mixture(0.31)
    pinned = (*drafted.pinned, Extent(1, 0, GB))
    with_head = replace(drafted, pinned=pinned, head_bytes=GB, draft_reads=GB // 20)
    pair, target = (
        PairPlan(["none"] * count, [str(path)] * count, options, LoadPlan(path=str(path), options=options, weights=one))
        for count, one in ((2, with_head), (1, alone))
    )
    speeds = Ways(pair, target, GB, {}).speeds(remember=False, say=lambda line: None, disk=0.05 * GB)
    assert speeds == predict(drafted, alone, GB // 20, found, 0.05 * GB)
    assert speeds.drafted > predict(drafted, alone, 12 * GB, found, 0.05 * GB).drafted


@pytest.mark.parametrize(("predicted", "loads"), [((1.0, 2.0), [False]), ((2.0, 1.0), [True]), ((1.0, 1.1), [False])])
def test_a_mixtures_draft_that_would_lose_is_not_loaded(
    start: Start, tmp_path: Path, predicted: tuple[float, float], loads: list[bool]
) -> None:
    """Nor are both ways tried: passes over empty pools show nothing, and read what no answer uses."""
    machine = Machine(tmp_path, 0.0, 0.0)
    machine.weights = {True: mixture(0.125), False: mixture(0.25)}
    backends, _ = start(machine, predicted)
    assert machine.loads == loads
    said = "".join(backends[0].notes)
    assert ("it takes the memory of 1.40 GB of experts, of which passes would read: about 1." in said) == (not loads[0])


def test_where_no_layer_is_timed_the_disk_decides_of_a_mixture(start: Start, tmp_path: Path) -> None:
    """As while other programs compute: a draft that cost nothing would still lose."""
    machine = Machine(tmp_path, 0.0, 0.0)
    machine.weights = {True: mixture(0.125), False: mixture(0.5)}
    found = predict(machine.weights[True], machine.weights[False], GB // 2, [], GB)
    assert found.drafted < found.plain == pytest.approx(1 / (11.2 * 0.04 * 2 / 16), rel=0.01)
    for predicted, loads in (((1.0, 3.0), False), ((3.0, 1.0), True)):
        backends, _ = start(machine, predicted, untimed=True)
        assert machine.loads[-1] == loads
        assert ("would read: at most 1.0 tokens/s with it" in "".join(backends[0].notes)) == (not loads)


def test_a_draft_that_is_not_used_is_left_out_of_the_next_run(start: Start, tmp_path: Path) -> None:
    """Its memory is the target's then; what a short run says of it does not count."""
    machine = Machine(tmp_path, 0.0, 0.0)
    machine.weights = {True: mixture(0.125), False: mixture(0.25)}
    for passes, step, loads in ((LONG - 1, 9.0, True), (LONG, 0.1, True), (LONG, 9.0, True), (LONG, None, False)):
        backends, learn = start(machine, (2.0, 0.5))
        assert machine.loads[-1] == loads
        pace = run(1.0, step)
        pace.target.measured = passes
        learn(pace)
    assert "an earlier run did not use it; --planner" in backends[0].notes[-1]
    assert remembered.everything()[0]["value"] == [pytest.approx(1.0), pytest.approx(1.0)]
    _, learn = start(machine, (2.0, 1.0))
    learn(run(0.4))  # as with more memory
    assert remembered.everything()[0]["value"] == [pytest.approx(1.0), pytest.approx(2.5)]
    start(machine, (9.0, 1.0))
    assert machine.loads[-1] is False


def test_a_draft_that_a_long_run_never_asked_is_left_out_too(start: Start, tmp_path: Path) -> None:
    machine = Machine(tmp_path, 0.56, 0.0)
    for passes, loads in ((LONG - 1, True), (LONG, True), (1, False)):
        _, learn = start(machine, (9.0, 0.5))
        assert machine.loads[-1] == loads
        pace = run(1.0)
        pace.target.measured = passes
        learn(pace)


def test_a_mixture_whose_experts_would_fit_without_the_draft_is_tried(start: Start, tmp_path: Path) -> None:
    """How many of them a pass reads is known only when it is made."""
    machine = Machine(tmp_path, 0.0, 0.0)
    experts = (Extent(0, 0, GB // 2),)
    machine.weights[True] = replace(plan(0.0), cached=experts, experts=8, pools=(Pool((0,), 6),))
    start(machine, (1.0, 9.0), (9.0, 7.0))
    assert machine.loads == [False, True]
    machine.weights[True] = replace(plan(0.0), cached=experts)  # left to the page cache
    machine.loads.clear()
    start(machine, (1.0, 9.0))
    assert machine.loads == [True]


@pytest.mark.parametrize("no_plans", [False, True])
def test_a_draft_without_which_the_target_would_fit_is_left_out(start: Start, tmp_path: Path, no_plans: bool) -> None:
    machine = Machine(tmp_path, 0.56, 0.3)
    machine.too_little, machine.no_plans = {True}, no_plans
    backends, _ = start(machine, (9.0, 4.0))
    assert machine.loads == [*([True] if no_plans else []), False]
    assert len(backends) == 1
    assert backends[0].notes == ["the draft is left out: with it 1 GB are too little"]
    with pytest.raises(NoRoom, match="1 GB are too little"):
        start(machine, (9.0, 4.0), leave_out=False)
    machine.too_little = {True, False}
    with pytest.raises(NoRoom, match="1 GB are too little"):
        start(machine, (9.0, 4.0))


def run(plain: float, step: float | None = None, right: float = 0.7) -> AutoState:
    """What a run has measured: seconds of plain passes and of the draft's, and how often the draft was right."""
    pace = AutoState()
    for _ in range(4):
        pace.target.add(1, plain)
        pace.target.add(9, 1.2 * plain)
        pace.ledger().add({}, None, plain, 1)
        if step:
            pace.draft.add(1, step)
            pace.agreement.add(1000 * right, 1000)
    return pace


@pytest.mark.parametrize("drafted", [True, False])
def test_a_wrong_prediction_does_not_survive_the_first_run(start: Start, tmp_path: Path, drafted: bool) -> None:
    machine = Machine(tmp_path, 0.56, 0.0)
    predicted = (12.0, 8.0) if drafted else (8.0, 12.0)
    _, learn = start(machine, predicted)
    learn(run(1.0, 0.2) if drafted else run(1.0))  # a few tokens/s at most
    start(machine, predicted)
    assert machine.loads == [drafted, not drafted]


def test_a_file_that_is_gone_at_the_end_of_a_run_is_no_error(start: Start, tmp_path: Path) -> None:
    machine = Machine(tmp_path, 0.56, 0.0)
    _, learn = start(machine, (8.0, 12.0))
    Path(machine.paths[0]).unlink()
    learn(run(1 / 3.0))
    assert remembered.everything()[0]["value"] == [0.0, pytest.approx(3.0)]


def test_a_measurement_that_a_later_run_contradicts_is_forgotten(start: Start, tmp_path: Path) -> None:
    machine = Machine(tmp_path, 0.56, 0.0)
    start(machine, (8.0, 7.0), (9.0, 10.0))
    _, learn = start(machine, (8.0, 7.0))
    learn(run(1 / 10.0 / (CLOSE - 0.01)))  # the same within the error of measurement
    assert remembered.everything()[0]["value"] == [9.0, 10.0]
    learn(run(1 / 3.0))
    assert remembered.everything()[0]["value"] == [0.0, pytest.approx(3.0)]
    machine.loads.clear()
    start(machine, (8.0, 7.0))
    assert machine.loads == [True]


@pytest.mark.parametrize("value", [[9.0], "9, 1", [9.0, "1"], [True, True], [float("nan"), -1.0], {"drafted": 9.0}])
def test_a_damaged_measurement_is_none(start: Start, tmp_path: Path, value: Any) -> None:
    machine = Machine(tmp_path, 0.56, 0.0)
    start(machine, (8.0, 7.0), (9.0, 10.0))
    (found,) = remembered.everything()
    remembered.remember(found["about"], value)
    machine.loads.clear()
    start(machine, (1.0, 9.0))
    assert machine.loads == [False]


def test_the_speed_of_a_run_counts_the_draft_and_how_often_it_is_right() -> None:
    assert measured(run(0.1), drafted=False) == pytest.approx(10)
    assert measured(run(0.1), drafted=True) == 0  # the draft was never asked
    assert 10 < measured(run(0.1, 0.02, 0.5), drafted=True) < measured(run(0.1, 0.01, 0.8), drafted=True)
    assert measured(AutoState(), drafted=False) == 0


def test_a_split_file_counts_with_all_its_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [tmp_path / f"draft-0000{i}-of-00002.gguf" for i in (1, 2)]
    for part, size in zip(parts, (3, 5), strict=True):
        part.write_bytes(bytes(size))
    assert ", 8 bytes, " in (before := remembered.identity(str(parts[0])))
    parts[1].write_bytes(bytes(6))
    assert remembered.identity(str(parts[0])) != before
    sizes, made = list[int](), LoadPlan(path="", options=LoadOptions(), weights=plan(1.0))
    pair = PairPlan(["none"] * 2, ["target", str(parts[0])], LoadOptions(), made)
    monkeypatch.setattr(draft_or_memory, "find", lambda *how, **more: groups(1.0, 2.0))
    monkeypatch.setattr(draft_or_memory, "predict", lambda *how: sizes.append(how[2]) or Speeds())
    Ways(pair, pair, 1, {}).speeds(remember=False, say=lambda line: None, disk=1.0)
    assert sizes == [9]


def test_the_remembered_agreement_counts(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine, seen = Machine(tmp_path, 0.56, 0.0), list[float]()
    start(machine, (1.0, 9.0))
    monkeypatch.setattr(draft_or_memory, "predict", lambda *args: seen.append(args[-1]) or Speeds(1.0, 9.0))
    about = {name: remembered.identity(path) for name, path in zip(("target", "draft"), machine.paths, strict=True)}

    def again() -> float:
        open_pair(None, "draft", None, LoadOptions(), leave_out=True, remember=True, say=lambda line: None)
        close_all(machine.models)
        return seen[-1]

    close_all(machine.models)
    assert again() == 0.7
    about |= {"kind": "pace", "machine": remembered.processor_name()}
    remembered.remember(about, AutoState().as_dict() | {"agreement": [200.0, 1000.0]})
    assert again() == pytest.approx(0.2, abs=0.01)
    remembered.remember(about, AutoState().as_dict() | {"agreement": [200.0]})
    assert again() == 0.7


def test_loaded_models_are_timed(smollm2_tiny: Path) -> None:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    backends = open_backends(find_model(str(smollm2_tiny)), None, None, LoadOptions(context_length=256, budget=4))
    try:
        assert timed(backends, 0.7) > 0
        assert timed(2 * backends, 0.7) > 0
    finally:
        close_all(backends)


def test_a_run_is_learned_from_when_its_model_is_closed(
    smollm2_tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    monkeypatch.delenv(remembered.OFF, raising=False)
    monkeypatch.setattr(remembered, "folder", lambda: tmp_path / "measured")
    seen, name = list[AutoState](), str(smollm2_tiny)
    backends = open_backends(find_model(name), None, None, LoadOptions(context_length=128, budget=4))
    monkeypatch.setattr(model, "open_pair", lambda *args, **options: (backends, seen.append))
    with model.load(name, context_length=128) as loaded:
        loaded.generate("one two one two", max_tokens=8)
        assert seen == []
    assert [measured(pace, drafted=False) > 0 for pace in seen] == [True]
