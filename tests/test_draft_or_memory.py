"""A draft for which the target would have to be streamed: left out if that is predicted to be faster."""

from pathlib import Path
from typing import Any

import pytest

from edgespec.loading import draft_or_memory
from edgespec.loading.pair import close_all, open_backends
from edgespec.loading.timed_pass import Pass
from edgespec.loop.engines import LoadOptions
from edgespec.models.registry import Entry, find_model

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")


@pytest.fixture
def forced_out(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """Drafts with which models were loaded; every draft takes the room of weights."""
    opened = list[str | None]()

    def open_them(entry: Entry, draft: str | None, *others: Any, **options: Any) -> list[Any]:
        opened.append(draft)
        return open_backends(entry, draft, *others, **options)

    monkeypatch.setattr(draft_or_memory, "open_backends", open_them)
    monkeypatch.setattr(draft_or_memory, "bytes_forced_out", lambda target: 1)
    return opened


def opened(model: Path, **options: Any) -> tuple[int, str]:
    """How many models were loaded, and what was said."""
    backends = draft_or_memory.open_pair(
        find_model(str(model)), str(model), None, LoadOptions(context_length=256, budget=4), say=lambda line: None,
        **{"leave_out": True, "remember": False} | options,
    )  # fmt: skip
    try:
        return len(backends), "\n".join(backends[0].notes)
    finally:
        close_all(backends)


def passes(monkeypatch: pytest.MonkeyPatch, *seconds: float) -> None:
    """What passes take: of the target with the draft, of the draft, of the target alone."""
    found = iter(seconds)
    monkeypatch.setattr(draft_or_memory, "time_pass", lambda backend, nodes: Pass(nodes, next(found), 0.0))


def test_the_slower_way_is_not_taken(
    forced_out: list[str | None], smollm2_tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes(monkeypatch, 0.34, 0.04, 0.12)
    count, said = opened(smollm2_tiny)
    assert count == 1
    assert forced_out == [str(smollm2_tiny), None]
    assert "the draft is left out" in said
    assert "without it 8.3" in said


def test_a_draft_that_is_worth_its_memory_stays(
    forced_out: list[str | None], smollm2_tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes(monkeypatch, 1.5, 0.05, 1.0)
    assert opened(smollm2_tiny) == (2, "")
    assert forced_out == [str(smollm2_tiny), None, str(smollm2_tiny)]


@pytest.mark.parametrize(("alone", "models"), [(0.12, 1), (5.0, 2)])
def test_it_is_found_out_once(
    forced_out: list[str | None], smollm2_tiny: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, alone: float,
    models: int,
) -> None:  # fmt: skip
    monkeypatch.delenv("EDGESPEC_NO_MEMORY_OF_COSTS", raising=False)
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    passes(monkeypatch, 0.34, 0.04, alone)
    for _ in range(2):  # the second time nothing is timed
        assert opened(smollm2_tiny, remember=True)[0] == models


def test_who_asks_for_the_draft_gets_it(forced_out: list[str | None], smollm2_tiny: Path) -> None:
    assert opened(smollm2_tiny, leave_out=False) == (2, "")
    assert forced_out == [str(smollm2_tiny)]


def test_passes_are_timed(smollm2_tiny: Path) -> None:
    backends = open_backends(find_model(str(smollm2_tiny)), None, None, LoadOptions(context_length=256, budget=4))
    assert draft_or_memory.predicted_speed(*2 * backends) > 0
    close_all(backends)
