"""A long text gives its place to a short one, waits in a file, and goes on: its tokens are those of plain decoding."""

import tempfile

import pytest
from test_pool import pooled
from test_scheduler import Reader, alone, backend, planners, run

from edgespec.errors import SessionFileError
from edgespec.loading.exact import apply_row_class
from edgespec.loop.generate import Generation
from edgespec.loop.sampling import SamplingParams
from edgespec.loop.stats import GenerationStats
from edgespec.planners.none import NonePlanner
from edgespec.planners.sssd import SssdPlanner
from edgespec.scheduler.requests import Ended, Request, Wrote
from edgespec.scheduler.scheduler import Scheduler


def fewest_left(handle):
    return handle.request.max_tokens - handle.stats.tokens


@pytest.fixture
def files(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return lambda: list(tmp_path.iterdir())


def interrupted(scheduler, temperature=0.7):
    """A long request, and a short one that comes when some tokens are there."""
    long = Reader(scheduler, 4, temperature, 3, 40)
    while len(long.tokens) < 12:
        scheduler.step()
    short = Reader(scheduler, 2, temperature, 4, 5)
    while not short.ended:
        scheduler.step()
    return long, short


@pytest.mark.parametrize("name", ["none", "sssd", "specexec", "auto"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_short_request_need_not_wait_for_a_long_one(name, temperature, files):
    scheduler = Scheduler(backend(sessions=1), planners(name, 1), budget=6, order=fewest_left, park=True)
    long, short = interrupted(scheduler, temperature)
    assert not long.ended
    assert len(files()) == 1
    passes = scheduler.counts.passes
    run(scheduler)
    for reader in (long, short):
        reader.check()
    assert scheduler.counts.decoded == 45  # nothing was generated twice
    assert scheduler.counts.passes - passes < 40
    assert scheduler.counts.prompt_tokens == sum(one.stats.prompt_tokens for one in (long, short))
    assert not files()
    scheduler.close()


def test_a_request_with_more_left_waits(files):
    scheduler = Scheduler(backend(sessions=1), planners("none", 1), budget=1, order=fewest_left, park=True)
    first = Reader(scheduler, 4, 0.0, 0, 10)
    scheduler.step()
    second = Reader(scheduler, 2, 0.0, 0, 20)
    while not second.tokens:
        scheduler.step()
        assert not files()
    assert first.ended
    scheduler.close()


@pytest.mark.parametrize("cells", [300, None])
def test_long_requests_also_give_up_their_cells(cells, files):
    target = pooled(cells)
    scheduler = Scheduler(target, planners("specexec", 3), budget=6, order=fewest_left, park=True)
    readers = [Reader(scheduler, prompt, 0.7, prompt, 60) for prompt in (4, 2)]
    while min(len(reader.tokens) for reader in readers) < 5:
        scheduler.step()
    readers += [Reader(scheduler, prompt, 0.7, 9, most) for prompt, most in ((3, 30), (6, 9), (4, 5))]
    most = 0
    while not all(reader.ended for reader in readers[2:]):
        scheduler.step()
        most = max(most, len(files()))
    run(scheduler)
    for reader in readers:
        reader.check()
    assert most == 2
    assert not files()
    scheduler.close()
    assert target.open_sessions == 0


@pytest.mark.parametrize("way", ["cancel", "close"])
def test_a_parked_text_that_ends_leaves_no_file(way, files):
    scheduler = Scheduler(backend(sessions=1), planners("sssd", 1), budget=6, order=fewest_left, park=True)
    long, _ = interrupted(scheduler)
    assert files()
    if way == "cancel":
        long.handle.cancel()
        scheduler.step()
    else:
        scheduler.close()
    assert long.ended.error is not None
    assert long.tokens == alone(*long.key)[: len(long.tokens)]
    assert not files()
    scheduler.close()


def test_a_damaged_file_costs_time_but_no_token(files):
    scheduler = Scheduler(backend(sessions=1), planners("specexec", 1), budget=6, order=fewest_left, park=True)
    long, short = interrupted(scheduler)
    (long.handle.parked.path).write_bytes(b"nothing")
    run(scheduler)
    for reader in (long, short):
        reader.check()
    assert not files()
    scheduler.close()


def test_a_disk_that_is_full_stops_no_text(files, monkeypatch):
    scheduler = Scheduler(backend(sessions=1), planners("none", 1), budget=1, order=fewest_left, park=True)

    def full(path, note=None):
        raise SessionFileError("No space left on device")

    monkeypatch.setattr(scheduler.pool.lanes[0].session, "save", full)
    long, short = interrupted(scheduler)
    assert long.ended
    for reader in (long, short):
        reader.check()
    assert not files()
    scheduler.close()


@pytest.mark.parametrize("kind", ["gemma3", "lfm2", "mamba2", "qwen35", "mixtral"])
def test_what_an_engine_saved_goes_on_to_the_bit(kind, tmp_path, files):
    """Layers with a window, recurrent ones, and mixtures of experts."""
    engine = pytest.importorskip("edgespec.backends.llamacpp.engine")
    pytest.importorskip("gguf")
    from hybrid_files import write_hybrid
    from mixture_files import write_mixture
    from window_files import write_windowed

    write = {"gemma3": write_windowed, "mixtral": write_mixture}.get(kind, write_hybrid)
    path = str(write(tmp_path / "tiny.gguf", kind))
    target = engine.load(path, context_length=256, threads=1, budget=16)
    apply_row_class(target, path)
    target.vocab.eog_ids = frozenset()
    prompt = [*range(5, 25), *range(5, 17)]
    asked = [Request(prompt, SamplingParams(temperature=0.7, seed=1), 40), Request([9, 8, 7], SamplingParams(), 5)]
    expected = []
    for request in asked:
        session = target.open()
        generation = Generation(
            target, session, NonePlanner(), request.prompt_ids, request.sampling, max_tokens=request.max_tokens,
            budget=0, stats=GenerationStats(),
        )  # fmt: skip
        expected.append([token for step in generation.steps() for token in step.tokens])
        session.close()
    planner = SssdPlanner() if target.capabilities.exact else NonePlanner()
    scheduler = Scheduler(target, [planner], budget=6, order=fewest_left, park=True)
    events = [], []
    scheduler.submit(asked[0], events[0].append)
    while scheduler.counts.decoded < 15:
        scheduler.step()
    scheduler.submit(asked[1], events[1].append)
    while not any(isinstance(event, Ended) for event in events[1]):
        scheduler.step()
    assert [path.name for path in files()] != ["tiny.gguf"]
    run(scheduler)
    found = [[chunk.token_id for event in one if isinstance(event, Wrote) for chunk in event.chunks] for one in events]
    assert found == expected
    assert scheduler.counts.decoded == 45
    scheduler.close()
    target.close()
