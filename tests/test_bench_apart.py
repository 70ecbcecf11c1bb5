"""`simulate-dsi apart`: target and draft at once, on shared processors and on processors of their own."""

import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks import apart
from benchmarks.apart import Task, compare, run
from edgespec.errors import EdgespecError, UsageError

bound = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs two processors, and Linux"
)


def table(tasks: list[Task], monkeypatch: pytest.MonkeyPatch, wrong: bool = False) -> str:
    """Of a machine with four processors, where a draft at once gains on its own processors only."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda who: {0, 1, 4, 5}, raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", lambda who, on: None, raising=False)

    def measured(task: Task) -> list[dict[str, Any]]:
        tasks.append(task)
        gains = task.at_once and task.target_on != task.draft_on
        one = {"tokens": 10, "seconds": 1.0 if gains else 2.0, "token_ids": [1, 3 if gains and wrong else 2]}
        return [one] * len(task.prompts)

    monkeypatch.setattr(apart, "run", measured)
    return compare("t", "d", ["a", "b"], max_tokens=8, temperature=0.0, rounds=3, say=lambda line: None)


def test_one_after_the_other_has_all_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = list[Task]()
    lines = table(tasks, monkeypatch).splitlines()
    every = [0, 1, 4, 5]
    assert [(task.at_once, task.target_on, task.draft_on) for task in tasks[:3]] == [
        (False, every, every), (True, every, every), (True, [4, 5], [0, 1]),
    ]  # fmt: skip
    assert [task.prompts for task in tasks[::3]] == [["a"], ["b"]]  # and no part without prompts
    cells = {row[1]: row[2:] for line in lines if len(row := [cell.strip() for cell in line.split("│")]) > 2}
    assert cells["one after the other"][1:3] == ["5.00", "–"]
    assert cells["at once, shared"][1:3] == ["5.00", "1.000 (1.000 to 1.000)"]
    assert cells["at once, apart"][1:3] == ["10.00", "2.000 (2.000 to 2.000)"]


def test_texts_that_differ_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EdgespecError, match="the texts differ"):
        table([], monkeypatch, wrong=True)


def test_one_processor_is_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda who: {0}, raising=False)
    with pytest.raises(UsageError, match="two processors"):
        compare("t", "d", ["a"], max_tokens=8, temperature=0.0, rounds=1, say=lambda line: None)


@bound
def test_two_processes_write_the_same_text(smollm2_tiny: Path, smollm2_tiny_q2k: Path) -> None:
    first, second, *_ = sorted(os.sched_getaffinity(0))
    common = {"prompts": ["Say hello."], "max_tokens": 12, "temperature": 0.7}
    pair = str(smollm2_tiny), str(smollm2_tiny_q2k)
    (serial,) = run(Task(*pair, at_once=False, target_on=[first], draft_on=[first], **common))
    (at_once,) = run(Task(*pair, at_once=True, target_on=[first], draft_on=[second], **common))
    assert serial["token_ids"] == at_once["token_ids"]
    assert 0 < at_once["tokens"] < len(at_once["token_ids"]) <= 12


@bound
def test_what_a_measurement_fails_with_is_one_line() -> None:
    task = Task("no.gguf", "no.gguf", False, [0], sorted(os.sched_getaffinity(0))[:1], ["a"], 4, 0.0)
    with pytest.raises(EdgespecError, match=r"no\.gguf") as caught:
        run(task)
    assert "\n" not in str(caught.value)
    assert "Error" not in str(caught.value)
