"""Several targets on llama.cpp: processes with a real model write what one writes."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from edgespec.errors import UsageError
from edgespec.loading.targets import check_targets, share_of
from edgespec.loop.engines import LoadOptions
from edgespec.machine.this_machine import this_machine

Run = Callable[..., tuple[int, str, str]]


def test_two_processes_write_the_text_of_one(smollm2_tiny_f32: Path, run: Run) -> None:
    model, found = str(smollm2_tiny_f32), []
    common = ["run", model, "Say hello.", "--json", "-n", "16", "--seed", "3", "-t", "0.9"]
    for options in (["--planner", "none"], ["--draft", model, "--targets", "2", "--threads", "1"]):
        code, out, err = run(*common, *options)
        assert code == 0, err
        found.append(json.loads(out))
    plain, several = found
    assert several["tokens"] == plain["tokens"]
    assert several["stats"]["planner"] == "dsi"
    assert several["stats"]["backend"] == "2 x llamacpp"


def test_no_session_is_kept_in_a_file(smollm2_tiny_f32: Path, run: Run, tmp_path: Path) -> None:
    model = str(smollm2_tiny_f32)
    code, _, error = run("run", model, "Hello", "--draft", model, "--targets", "2", "--resume", str(tmp_path / "x"))
    assert code == 2
    assert "--resume does not go with --targets" in error


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"draft": None}, "--draft"),
        ({"count": 0}, "targets is 0"),
        ({"cluster": "tls://head:8786"}, "not both"),
        ({"planner": "specexec"}, "auto and chain"),
        ({"parallel": 2}, "parallel"),
        ({"options": {"datastore": "notes.store"}}, "datastore"),
        ({"options": {"lenders": ["127.0.0.1:50052"]}}, "lenders"),
    ],
)
def test_what_does_not_go_together_is_refused(given: dict[str, object], message: str) -> None:
    usual = {"count": 2, "cluster": None, "draft": "small.gguf", "planner": "auto", "parallel": 1, "options": {}}
    check_targets(**usual)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=message):
        check_targets(**usual | given)  # type: ignore[arg-type]


def test_copies_on_a_mac_leave_out_efficiency_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    mac = replace(this_machine(), cores=10)
    monkeypatch.setattr("edgespec.loading.targets.this_machine", lambda: mac)
    assert share_of(2, LoadOptions(), folder=True, taken=1).threads == 5


def test_processes_share_memory_and_threads() -> None:
    given = LoadOptions(memory="6G", threads=3, budget=5)
    for folder in (False, True):
        assert share_of(2, given, folder=folder, taken=2 << 30) == replace(given, memory=2 << 30)
    with pytest.raises(UsageError, match=r"memory is 6\.00 GiB, but the draft takes 7\.00 GiB"):
        share_of(2, given, folder=False, taken=7 << 30)
    assert share_of(64, LoadOptions(), folder=True, taken=1) == LoadOptions(threads=1)
