"""What doctor makes of its measurements."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgespec.errors import NoRoom, UsageError
from edgespec.loading.draft_or_memory import Speeds
from edgespec.loading.pair import remembered_paces
from edgespec.loop.engines import find_engine
from edgespec.machine import measurements as remembered
from edgespec.measure import doctor
from edgespec.measure.doctor import Diagnosis, Pass, as_dict, diagnose
from edgespec.measure.report import learned_line, report
from edgespec.planners.auto import AutoState
from edgespec.weights.plan import Extent, Layer, Plan, Pool

GB = 10**9


def diagnosis(plan: Plan | None, *passes: Pass) -> Diagnosis:
    return Diagnosis(
        engine="llamacpp", target="big.gguf", file_size=40 * GB, file_system="ext4", memory=24 << 30, draft_size=0,
        plan=plan, disk=2.0 * GB, passes=passes,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("seconds", "waited", "predicted"),
    [(9.3, 6.3, 9.0), (9.3, 0.1, 9.2), (30.0, 0.0, 30.0)],
    ids=["the disk limits it", "both alike", "computing limits it"],
)
def test_a_pass_reads_while_it_computes(seconds: float, waited: float, predicted: float) -> None:
    layers = tuple(Layer(i, (Extent(0, i * 2 * GB, i * 2 * GB + GB),)) for i in range(18))
    found = diagnosis(Plan(24 << 30, GB, (), layers, (), 2, 20), Pass(1, 1.0, 0.0), Pass(65, seconds, waited))
    lines = report(found).splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("pass, 65 nodes"))
    assert f" {seconds:.2f} s; " in lines[at]
    assert lines[at + 1].split() == (
        f"predicted {predicted:.2f} s: {seconds - waited:.2f} s of computing, 9.00 s of reading".split()
    )
    assert as_dict(found)["passes"][1]["predicted"] == pytest.approx(predicted)


def test_nothing_is_predicted_where_nothing_is_streamed() -> None:
    assert "predicted" not in report(diagnosis(None, Pass(1, 1.0, 0.0), Pass(65, 2.0, 0.0)))


def test_a_mixture_says_what_its_passes_read() -> None:
    experts = (Extent(0, 0, 10 * GB),)
    plan = Plan(24 << 30, GB, (), (), experts, 0, 20, experts=16, pools=(Pool((0, 1), 12),), pool_bytes=4 << 30)
    one, many = Pass(1, 0.5, 0.3, experts=2.0, hits=0.5, read=GB // 2), Pass(7, 2.0, 1.0, 9.0, 0.4, 4 * GB)
    text = " ".join(report(diagnosis(plan, one, many)).split())
    assert "experts 9.31 GiB; 6 of 16 experts of each layer in 4.00 GiB; others are read as they are chosen" in text
    assert "experts 9.0 of a layer, 4.5 times those of one token; 40 % were in memory, 3.73 GiB read" in text
    assert "predicted 2.00 s: 1.00 s of computing, 2.00 s of reading" in text


@pytest.mark.parametrize(
    ("seconds", "draft", "says"),
    [
        ((0.0115, 0.018, 0.54), 0, "none about 87, sssd about 89, auto about 89"),  # in memory
        ((0.0115, 0.1, 0.54), 0, "none about 87, sssd about 16, auto about 87"),
        ((2.0, 2.1, 2.5), 0, "none about 0.50, sssd about 0.80, auto about 0.80"),  # streamed
        ((2.0, 2.1, 2.5), 1.0, "none about 0.50, sssd about 0.80, specexec about 2.0, auto about 2.0"),
        ((2.0, 2.1, 2.5), 40.0, "none about 0.50, sssd about 0.80, specexec about 0.23, auto about 0.80"),
    ],
)
def test_each_planner_is_predicted_with_the_tree_that_pays_most(
    seconds: tuple[float, ...], draft: float, says: str
) -> None:
    passes = [Pass(nodes, time, 0.0) for nodes, time in zip((1, 8, 65), seconds, strict=True)]
    found = replace(diagnosis(None, *passes), draft_size=1 if draft else 0, draft_seconds=draft)
    assert next(line for line in report(found).splitlines() if line.startswith("tokens/s")).split(maxsplit=1)[1] == says
    assert replace(found, passes=passes[:1]).tokens_per_second == {"none": pytest.approx(1 / seconds[0])}


def test_a_head_is_predicted_by_the_tokens_of_a_measured_head() -> None:
    passes = [Pass(nodes, seconds, 0.0) for nodes, seconds in ((1, 2.0), (8, 2.1), (65, 2.5))]
    found = replace(diagnosis(None, *passes), draft_size=1, draft_seconds=1.0, by_head=True)
    says = "specexec about 0.73 (computed, with the tokens per pass of another model's head), auto about 0.80"
    assert says in report(found)


def test_what_limits_a_pass_is_what_its_parts_say() -> None:
    layers = (Layer(0, (Extent(0, 0, GB),)),)
    found = diagnosis(Plan(24 << 30, GB, (), layers, (), 2, 20), Pass(1, 3.0, 0.0), Pass(65, 3.0, 2.0))
    text = " ".join(report(found).split())
    assert "pass, 1 token 3.00 s; computing limits it predicted 3.00 s: 3.00 s of computing, 0.50 s of reading" in text
    assert "pass, 65 nodes 3.00 s; disk limits it predicted 1.00 s" in text


def test_an_engine_that_streams_without_a_plan_of_bytes() -> None:
    """PyTorch's layers: what is streamed stands in its note."""
    streams = replace(diagnosis(None, Pass(1, 1.0, 0.0), Pass(65, 2.0, 0.0)), engine="torch", streams=True)
    assert "layers are streamed: see the note" in report(streams)
    assert "nothing is streamed" in report(replace(streams, streams=False))


@pytest.mark.parametrize(
    ("speeds", "says"),
    [
        (Speeds(4.85, 8.6), "with the draft about 4.8 tokens/s, without it about 8.6; auto is without it"),
        (Speeds(6.0, 0.5), "with the draft about 6.0 tokens/s, without it about 0.50; auto is with it"),
        (
            Speeds(1.0, 2.5, timed=False),
            "with the draft at most 1.0 tokens/s, without it at most 2.5; auto is without it",
        ),
        (Speeds(), "the draft takes memory that the target needs; which way is faster is not known"),
    ],
)
def test_a_draft_that_takes_memory_of_its_target_is_predicted_both_ways(speeds: Speeds, says: str) -> None:
    found = replace(diagnosis(None, Pass(1, 1.0, 0.0)), draft_or_memory=speeds)
    assert next(line for line in report(found).splitlines() if line.startswith("draft or")).split("  ")[-1] == says
    assert as_dict(found)["draft_or_memory"] == {
        "drafted": speeds.drafted,
        "plain": speeds.plain,
        "timed": speeds.timed,
    }
    assert "draft or memory" not in report(replace(found, draft_or_memory=None))


def test_a_draft_that_has_no_room_is_left_out(run: Any, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = find_engine("llamacpp")
    planned = engine.plan

    def plan(path: str, options: Any, machine: Any) -> Any:
        if options.draft_files:
            raise NoRoom("1 GB is too little")
        return planned(path, options, machine)

    monkeypatch.setattr(engine, "plan", plan)
    status, out, _ = run("doctor", str(small), "--draft", str(small), "--budget", "8")
    assert status == 0
    assert "the draft is left out: with it 1 GB is too little" in out
    assert "stays in memory" not in out
    assert "specexec" not in out


@pytest.mark.parametrize(("ctx", "sizes"), [(1, ["1 token"]), (5, ["1 token", "5 nodes"])])
def test_passes_are_no_longer_than_the_context(ctx: int, sizes: list[str], run: Any, small: Path) -> None:
    code, shown, _ = run("doctor", str(small), "--ctx", str(ctx), "--backend", "llamacpp", "--exact", "off")
    assert code == 0
    lines = [line for line in shown.splitlines() if line.startswith("pass, ")]
    assert [line.removeprefix("pass, ").split("  ")[0] for line in lines] == sizes


def test_a_head_that_is_not_there_is_refused_before_anything_is_measured(small: Path) -> None:
    said = list[str]()
    with pytest.raises(UsageError, match="has no head of its own"):
        diagnose(str(small), draft="head", say=said.append)
    assert said == []


def test_an_engine_that_refuses_a_model_hides_no_other(run: Any, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "installed_backends", lambda *which: ["mlx", "llamacpp"])  # mlx takes folders
    status, out, err = run("doctor", str(small), "--budget", "8")
    assert status == 0, err
    assert re.findall(r"engine +(\w+)", out) == ["llamacpp", "mlx"]
    assert "this cannot run, because" in out
    assert "use --backend llamacpp" in out
    assert "mlx cannot run it" in out
    monkeypatch.setattr(doctor, "installed_backends", lambda *which: ["mlx"])
    status, out, err = run("doctor", str(small), "--budget", "8")
    assert (status, out) == (1, "")
    assert "Traceback" not in err


def learned() -> dict[str, object]:
    state = AutoState()
    state.target.add(1, 0.1)
    state.target.add(9, 0.3)
    state.draft.add(1, 0.02)
    state.agreement.add(7, 10)
    return {"date": "2020-01-01T00:00:00+00:00", "value": state.as_dict() | {"passes": 41}}


def test_what_is_remembered_has_its_age_and_number() -> None:
    said = learned_line(learned())
    assert said.startswith("target's passes 1: 100 ms, 9: 300 ms; draft's passes 1: 20 ms; draft right in 70 %; ")
    assert said.endswith(" days old, 41 passes")
    assert " passes" in learned_line(learned() | {"date": None})


def test_what_other_machines_measured_is_not_shown(
    tmp_path: Path, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A home folder may be shared."""
    monkeypatch.delenv(remembered.OFF)
    monkeypatch.setattr(remembered, "folder", lambda: tmp_path)
    monkeypatch.setattr(doctor, "_try", lambda found, *about: None)
    about = {"kind": "pace", "target": remembered.identity(str(small))}
    remembered.remember(about | {"machine": "another"}, learned()["value"])
    assert diagnose(str(small)).remembered == []
    remembered.remember(about | {"machine": remembered.processor_name()}, learned()["value"])
    (found,) = diagnose(str(small)).remembered
    assert found["about"]["machine"] == remembered.processor_name()


def test_what_was_measured_streamed_and_in_memory_is_told_apart() -> None:
    both = [learned() | {"about": {"streams": streams}} for streams in (True, False)]
    for listed, said in (
        (both, ["streamed: target", "in memory: target"]),
        (both[:1], ["target"]),
        (both[1:], ["target"]),
    ):
        found = replace(diagnosis(None, Pass(1, 1.0, 0.0)), remembered=listed)
        lines = [line for line in report(found).splitlines() if line.startswith("remembered")]
        assert [re.split(" {2,}|'", line)[1] for line in lines] == said


def test_what_no_run_can_use_is_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(remembered.OFF)
    monkeypatch.setattr(remembered, "folder", lambda: tmp_path / "measured")
    model, value = tmp_path / "model.gguf", learned()["value"]
    model.touch()
    about = {"kind": "pace", "target": remembered.identity(str(model)), "machine": remembered.processor_name()}
    wrong = [value | {"target": rows} for rows in (3, [[0, 1, 0.0]], [[0, 1, float("nan")]])]
    for odd in (None, [], {}, {"target": [], "draft": [], "runs": 3}, *wrong):
        remembered.remember(about, odd)
        assert remembered_paces(str(model)) == []
    remembered.remember(about, value)
    assert learned_line(remembered_paces(str(model))[0]).endswith("from today, 41 passes")
