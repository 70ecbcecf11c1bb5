"""Measurements are kept from run to run, and losing them does no harm."""

import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from reference.backend import random_model

from edgespec.loading.pair import remembered_paces
from edgespec.machine import measurements as remembered
from edgespec.measure.report import learned_line
from edgespec.model import Model, load
from edgespec.planners.auto import Pace

FOLDERS = ("HOME", "XDG_CACHE_HOME", "LOCALAPPDATA")  # where a system looks for the user's cache


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(remembered.OFF, raising=False)
    monkeypatch.setattr(remembered, "folder", lambda: tmp_path / "measured")
    return tmp_path / "measured"


def test_what_was_remembered_is_recalled_for_the_same_thing_only(place: Path) -> None:
    remembered.remember({"kind": "passes", "file": "a"}, [1, 2.5])
    assert remembered.recall({"file": "a", "kind": "passes"}, Any) == [1, 2.5]
    assert remembered.recall({"kind": "passes", "file": "b"}, Any) is None
    remembered.remember({"kind": "passes", "file": "a"}, {"new": True})
    assert remembered.recall({"kind": "passes", "file": "a"}, Any) == {"new": True}
    assert len(remembered.everything()) == 1


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '{"version": 1, "about": [], "value": 1}',
        '{"version": 0, "about": {}, "value": 1}',
        '{"version": 1}',
        "\0\xff",
        9999 * "[",
        '{"version": 1, "about": {"kind": "passes"}, "value": [1, NaN]}',
        '{"version": 1, "about": {"kind": "passes"}, "value": {"seconds": -Infinity}}',
        '{"version": 1, "about": {"kind": "passes"}, "value": 1e999}',
    ],
)
def test_a_broken_file_counts_as_not_there(place: Path, content: str) -> None:
    about = {"kind": "passes"}
    remembered.remember(about, 1)
    (file,) = place.iterdir()
    file.write_text(content, "utf-8")
    assert remembered.recall(about, Any) is None
    assert remembered.everything() == []
    remembered.remember(about, 2)
    assert remembered.recall(about, Any) == 2


def test_a_hash_that_meets_another_thing_is_not_believed(place: Path) -> None:
    about = {"kind": "passes"}
    remembered.remember(about, 1)
    (file,) = place.iterdir()
    file.write_text(json.dumps({"version": remembered.VERSION, "about": {"kind": "other"}, "value": 1}), "utf-8")
    assert remembered.recall(about, Any) is None


@pytest.mark.parametrize(
    ("days", "words"), [(0, "from today"), (-1, "from today"), (1, "1 day old"), (3.5, "3 days old"), (None, "")]
)
def test_a_measurement_says_how_old_it_is(place: Path, days: float | None, words: str) -> None:
    remembered.remember({"kind": "passes"}, 1)
    (file,) = place.iterdir()
    content = json.loads(file.read_text("utf-8"))
    written = datetime.fromisoformat(content["date"])
    assert abs(datetime.now(UTC) - written) < timedelta(hours=1)
    content["date"] = "yesterday" if days is None else (written - timedelta(days=days)).isoformat()
    file.write_text(json.dumps(content), "utf-8")
    (found,) = remembered.everything()
    assert remembered.age(found) == words
    del content["date"]
    assert remembered.age(content) == ""


def test_a_run_without_a_pass_makes_nothing_younger(place: Path, tmp_path: Path) -> None:
    model = str(tmp_path / "tiny.npz")
    random_model(2, vocab_size=258).save(model)

    def loaded() -> Model:
        return load(model, backend="reference", planner="sssd")

    with loaded() as one:
        one.generate("aaaa", max_tokens=8)
    (file,) = place.glob("*.json")
    old = json.dumps(json.loads(file.read_text("utf-8")) | {"date": "2020-01-01T00:00:00+00:00"})
    file.write_text(old, "utf-8")
    with loaded():
        pass
    assert file.read_text("utf-8") == old
    (found,) = remembered.everything()
    assert " days old" in learned_line(found)


@pytest.mark.parametrize(
    "odd",
    [
        [],
        {"target": [[1e300, 1, 1.0]]},
        {"target": [[10**12, 1, 1.0]]},
        {"draft": [[0, 1, -1.0]]},
        {"ledgers": {"one": {}}},
        {"ledgers": {"1": {"plain": 1.0, "distance": True, "saved": 0.0, "accounts": {}}}},
        {"agreement": [1.0]},
        {"worth": 10**400},
        {"passes": "many"},
    ],
    ids=str,
)
def test_of_an_odd_pace_nothing_is_recalled(place: Path, tmp_path: Path, odd: Any) -> None:
    model = str(tmp_path / "tiny.npz")
    random_model(2, vocab_size=258).save(model)
    with load(model, backend="reference", planner="sssd") as one:
        one.generate("aaaa", max_tokens=8)
    (file,) = place.glob("*.json")
    kept = json.loads(file.read_text("utf-8"))
    kept["value"] = kept["value"] | odd if isinstance(odd, dict) else odd
    file.write_text(json.dumps(kept), "utf-8")
    with load(model, backend="reference", planner="sssd"):
        pass
    assert remembered_paces(model) == []
    assert remembered.recall(kept["about"], Pace) is None


def test_the_oldest_go(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembered, "MOST_FILES", 3)
    for i in range(6):
        remembered.remember({"number": i}, i)
        newest = max(place.iterdir(), key=lambda path: path.stat().st_mtime_ns)
        os.utime(newest, (i + 1e9, i + 1e9))
    assert [remembered.recall({"number": i}, Any) for i in range(6)] == [None, None, None, 3, 4, 5]
    assert [found["value"] for found in remembered.everything()] == [5, 4, 3]


def test_where_nothing_can_be_written_nothing_is_remembered(place: Path) -> None:
    place.parent.joinpath("measured").write_text("a file where the folder should be", "utf-8")
    remembered.remember({"kind": "passes"}, 1)
    assert remembered.recall({"kind": "passes"}, Any) is None
    assert remembered.everything() == []


def test_what_cannot_be_written_whole_leaves_nothing(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    assert not remembered.remember({"kind": "passes"}, 1)
    assert list(place.rglob("*.new")) == []


def test_switched_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(remembered.OFF, "1")
    remembered.remember({"kind": "passes"}, 1)
    assert remembered.recall({"kind": "passes"}, Any) is None
    assert remembered.forget() == 0
    assert not list(tmp_path.iterdir())


def test_forgetting(place: Path) -> None:
    assert remembered.forget() == 0
    for i in range(3):
        remembered.remember({"number": i}, i)
    assert remembered.forget() == 3
    assert remembered.everything() == []


def _write_often(folder: str, writer: int) -> None:
    os.environ.update(dict.fromkeys(FOLDERS, folder))
    os.environ.pop(remembered.OFF, None)
    for i in range(50):
        remembered.remember({"kind": "shared"}, [writer, i] * 200)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows replaces no file that another process has open")
def test_several_processes_leave_a_whole_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in FOLDERS:
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.delenv(remembered.OFF, raising=False)
    with ProcessPoolExecutor(3) as pool:
        list(pool.map(_write_often, [str(tmp_path)] * 3, range(3)))
    value = remembered.recall({"kind": "shared"}, Any)
    assert value[:2] * 200 == value
    assert value[1] == 49
    assert not list(tmp_path.rglob("*.new"))
