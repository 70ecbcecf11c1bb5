"""Several targets write what one writes alone: to the bit, whatever is slow, late, or dies."""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dsi_models import PROMPT, SIZE, Recorded, Slow, SlowSpec, plain_text
from reference.backend import ReferenceBackend, perturbed, random_model

from edgespec.errors import Closed, EdgespecError, MissingPackage, UsageError
from edgespec.loop.backend import Logits, Work
from edgespec.loop.sampling import SamplingParams
from edgespec.loop.shapes import BatchInvariance, RowClass
from edgespec.loop.stats import GenerationStats
from edgespec.scheduler import drive
from edgespec.scheduler.events import Event, Wrote
from edgespec.scheduler.requests import Request
from edgespec.scheduler.targets.coordinator import Targets
from edgespec.scheduler.targets.places import Cluster, Place, check_address, processes, threads
from edgespec.scheduler.targets.proposer import DraftProposer
from edgespec.scheduler.targets.verifier import Task, Verifier, close_own, describe, stop_up_to, verify

TEMPERATURES = (0.0, 0.7, 1.0)


def plain(sampling: SamplingParams, prompt: Sequence[int] = PROMPT, count: int = 40, model: int = 1) -> list[int]:
    """What plain decoding writes."""
    return plain_text(SlowSpec(model=model).open(), prompt, sampling, count)


@contextmanager
def targets(spec: SlowSpec, places: list[Place], proposer: Any, lookahead: int | None = None) -> Iterator[Targets]:
    target = SlowSpec(model=spec.model).open()
    described = threads(1)[0].executor.submit(describe, SlowSpec(model=spec.model)).result()
    made = Targets(target.vocab, described, spec, places, proposer, lookahead=lookahead, stop_ids=frozenset())
    try:
        yield made
    finally:
        made.close()


def write(
    made: Targets, sampling: SamplingParams, prompt: Sequence[int] = PROMPT, count: int = 40
) -> tuple[list[int], GenerationStats]:
    stats = GenerationStats()
    events = drive.events(made, Request(list(prompt), sampling, count), stats)
    return [chunk.token_id for event in events for chunk in drive.chunks_in(event)], stats


@pytest.mark.covering(1)
@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("right", [0.0, 0.8, 1.0])
def test_texts_are_those_of_one_target(temperature: float, right: float) -> None:
    sampling = SamplingParams(temperature=temperature, seed=3)
    expected = plain(sampling)
    with targets(SlowSpec(0.002, jitter=0.01), threads(3), Recorded([*PROMPT, *expected], right, 0.0005)) as made:
        text, stats = write(made, sampling)
    assert text == expected
    assert stats.tokens == sum(stats.tokens_by_source.values()) == 40
    assert stats.finish_reason == "length"
    assert (stats.passes == stats.gained) == (right == 0)


@pytest.mark.covering(1)
@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("lookahead", [1, 4])
def test_a_draft_model_guesses(temperature: float, lookahead: int) -> None:
    sampling = SamplingParams(temperature=temperature, seed=8)
    draft = ReferenceBackend(perturbed(random_model(1, vocab_size=SIZE), 0.05, 1), context_length=256)
    with targets(SlowSpec(0.01), threads(2), DraftProposer(Slow(draft, 0.0005), SIZE), lookahead) as made:
        for seed in (8, 9):  # the second begins where copies and draft still hold the first
            sampling = SamplingParams(temperature=temperature, seed=seed)
            text, stats = write(made, sampling)
            assert text == plain(sampling)
            assert stats.tokens_by_source["draft"] > 0


def test_the_machine_stays_awake_while_a_text_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    awake = list[bool]()
    monkeypatch.setattr("edgespec.scheduler.targets.coordinator.stay_awake", lambda: awake.append(True))
    with targets(SlowSpec(0.0), threads(1), Recorded([], 1.0)) as made:
        write(made, SamplingParams())
    assert len(awake) > 1


def test_a_second_text_may_have_another_prompt() -> None:
    long = [0, *np.random.default_rng(0).integers(2, SIZE, 90).tolist()]  # all copies read it at once
    with targets(SlowSpec(0.002), threads(3), Recorded([], 1.0)) as made:
        for prompt in (PROMPT, long, [*long[:70], 7], PROMPT[:2]):
            assert write(made, SamplingParams(), prompt)[0] == plain(SamplingParams(), prompt)


def test_a_text_that_is_left_does_not_disturb_the_next() -> None:
    sampling = SamplingParams(temperature=1.0, seed=2)
    expected = plain(sampling)
    with targets(SlowSpec(0.01, jitter=0.02), threads(3), Recorded([*PROMPT, *expected], 0.7)) as made:
        for _ in range(3):
            events = drive.events(made, Request(PROMPT, SamplingParams(seed=5), 40))
            assert any(isinstance(event, Wrote) for event in events)
            events.close()
        assert write(made, sampling)[0] == expected


class Late:
    """A place whose answers come long after they are known, some of them."""

    def __init__(self, inner: Place, every: int, seconds: float) -> None:
        self._inner, self._every, self._seconds, self._count = inner, every, seconds, 0
        self.executor = self  # type: ignore[assignment]

    def submit(self, *arguments: object) -> Future[object]:
        from threading import Timer

        self._count += 1
        done: Future[object] = Future()
        wait = self._seconds if self._count % self._every == 0 else 0.0

        def pass_on(inner: Future[object]) -> None:
            Timer(wait, lambda: done.set_result(inner.result())).start()

        self._inner.executor.submit(*arguments).add_done_callback(pass_on)  # type: ignore[arg-type]
        return done

    def stop(self, owner: str, number: int) -> None:
        pass  # and it never listens

    def renew(self) -> None:
        pass

    def close(self) -> None:
        self._inner.close()


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_late_answers_change_nothing(temperature: float) -> None:
    sampling = SamplingParams(temperature=temperature, seed=4)
    expected = plain(sampling)
    places: list[Place] = [Late(place, every, 0.1) for place, every in zip(threads(3), (2, 3, 5), strict=True)]  # type: ignore[misc]
    with targets(SlowSpec(0.002), places, Recorded([*PROMPT, *expected], 0.8, 0.001)) as made:
        assert write(made, sampling)[0] == expected


def test_another_copy_is_asked_when_one_is_silent() -> None:
    expected = plain(SamplingParams())
    first, second = threads(2)
    silent = Late(first, 4, 30.0)
    with targets(SlowSpec(0.002), [second, silent], Recorded([], 1.0)) as made:  # type: ignore[list-item]
        assert write(made, SamplingParams())[0] == expected
        assert silent._count == 4  # nobody waited for that one


def test_workers_are_killed(tmp_path: Path) -> None:
    sampling = SamplingParams(temperature=0.7, seed=6)
    expected = plain(sampling)
    spec = SlowSpec(0.01, dies=4, folder=str(tmp_path))
    with targets(spec, processes(2), Recorded([*PROMPT, *expected], 0.8, 0.002)) as made:
        assert write(made, sampling)[0] == expected
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.exhaustive
def test_workers_of_a_cluster_are_killed(tmp_path: Path, dask: list[Place]) -> None:
    sampling = SamplingParams(temperature=0.7, seed=6)
    expected = plain(sampling)
    spec = SlowSpec(0.02, dies=4, folder=str(tmp_path))
    with targets(spec, dask, Recorded([*PROMPT, *expected], 0.8, 0.002)) as made:
        assert write(made, sampling)[0] == expected
    assert list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def dask() -> Iterator[list[Place]]:
    distributed = pytest.importorskip("distributed", reason="needs distributed: pip install 'edgespec[cluster]'")
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, host="127.0.0.1", dashboard_address=None, memory_limit=None,
        env={"PYTHONPATH": str(Path(__file__).parent)},
    ) as local:  # fmt: skip
        cluster = Cluster(local.scheduler_address)
        yield cluster.places
        cluster.close()


def test_copies_that_cannot_work_are_one_error() -> None:
    with (
        targets(SlowSpec(fails="no room for the model"), threads(2), Recorded([], 1.0)) as made,
        pytest.raises(EdgespecError, match="no copy of the target does its tasks: no room for the model"),
    ):
        write(made, SamplingParams())


def test_a_draft_that_fails_is_an_error() -> None:
    class Failing(Recorded):
        def after(self, token_ids: Sequence[int]) -> Iterator[int]:
            raise EdgespecError("the draft is broken")

    with (
        targets(SlowSpec(0.05), threads(2), Failing([], 1.0)) as made,
        pytest.raises(EdgespecError, match="the draft is broken"),
    ):
        write(made, SamplingParams())


def test_a_draft_that_fails_after_a_text_has_ended_is_no_error_of_the_next() -> None:
    left = threading.Event()

    class FailsOnce(Recorded):
        def after(self, token_ids: Sequence[int]) -> Iterator[int]:
            if not left.is_set():
                assert left.wait(20)
                raise EdgespecError("the draft is broken")
            return super().after(token_ids)

    expected = plain(SamplingParams())
    with targets(SlowSpec(), threads(2), FailsOnce([*PROMPT, *expected], 1.0)) as made:
        assert write(made, SamplingParams(), count=3)[0] == expected[:3]
        left.set()
        assert write(made, SamplingParams())[0] == expected


def test_stopped_passes_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """With guesses that are all wrong, passes over them end when that is known."""
    ended = list[bool]()
    forward = Slow.forward

    def watched(self: Slow, batch: Sequence[object]) -> object:
        try:
            found = forward(self, batch)  # type: ignore[arg-type]
        except BaseException:
            ended.append(False)
            raise
        ended.append(True)
        return found

    monkeypatch.setattr(Slow, "forward", watched)
    expected = plain(SamplingParams(), count=8)
    ended.clear()
    with targets(SlowSpec(0.05), threads(3), Recorded([*PROMPT, *expected], 0.0, 0.01), lookahead=1) as made:
        assert write(made, SamplingParams(), count=8)[0] == expected
    assert False in ended


def test_a_stop_ends_its_own_task_and_no_other() -> None:
    spec, expected = SlowSpec(), plain(SamplingParams())

    def task(number: int) -> Task:
        text, guesses = np.array(PROMPT, np.int32), np.array(expected[:4], np.int32)
        return Task("stops", number, text, len(PROMPT), guesses, SamplingParams())

    try:
        assert verify(spec, task(1)) == expected[:5]
        stop_up_to("stops", 4)
        assert verify(spec, task(3)) is verify(spec, task(4)) is None
        assert verify(spec, task(5)) == expected[:5]
    finally:
        close_own()


def test_a_stop_ends_guesses_and_no_later_ones() -> None:
    draft = ReferenceBackend(random_model(1, vocab_size=SIZE), context_length=256)
    proposer, expected = DraftProposer(draft, SIZE), plain(SamplingParams())
    proposer.begin(PROMPT, SamplingParams())
    guesses = proposer.after(PROMPT)
    assert next(guesses) == expected[0]
    proposer.stop()
    assert list(guesses) == []
    proposer.stop()
    assert [next(guesses) for guesses in [proposer.after(PROMPT)]] == expected[:1]
    proposer.close()


def test_a_text_is_left_while_it_is_written() -> None:
    """By `drive.events_of`, as everywhere else; closing ends what is under way, too."""
    expected = plain(SamplingParams())
    with targets(SlowSpec(0.005), threads(2), Recorded([*PROMPT, *expected], 0.8)) as made:
        stats = GenerationStats()
        with closing(drive.events(made, Request(PROMPT, SamplingParams(), 40), stats)) as events:
            assert any(isinstance(event, Wrote) for event in events)
        made.thread.join(5)
        assert stats.finish_reason == "interrupted"
        found = drive.events(made, Request(PROMPT, SamplingParams(), 40))
        assert [chunk.token_id for event in found if isinstance(event, Wrote) for chunk in event.chunks] == expected
        left = drive.events(made, Request(PROMPT, SamplingParams(), 40))
        assert any(isinstance(event, Wrote) for event in left)
        made.close()
        assert not made.thread.is_alive()


def test_a_prompt_that_is_left_before_its_turn_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = list[int]()
    forward = Slow.forward

    def watched(self: Slow, batch: Sequence[Work]) -> list[Logits]:
        passes.append(len(batch[0].token_ids))
        return forward(self, batch)

    monkeypatch.setattr(Slow, "forward", watched)
    with targets(SlowSpec(), threads(3), Recorded([], 1.0)) as made:
        with made._turn:  # as another text has it
            left = made.submit(Request(PROMPT * 20, SamplingParams(), 40), lambda event: None)
            left.cancel()
        made.thread.join(5)
    assert left.stats.finish_reason == "interrupted"
    assert passes == []


def test_guesses_beyond_a_pass_are_judged_in_several() -> None:
    """As narrow passes have it."""
    target = ReferenceBackend(random_model(1, vocab_size=SIZE), context_length=256)
    target.keep_to(BatchInvariance("narrow", RowClass(1, 3), RowClass(1, 64)))
    verifier, expected = Verifier(target), plain(SamplingParams())

    def verified(known: int, guesses: list[int]) -> list[int]:
        text = np.array(PROMPT + expected[:known], np.int32)
        task = Task("me", 1, text, len(PROMPT), np.array(guesses, np.int32), SamplingParams())
        verifier.read(task)
        return verifier.verify(task)

    assert verified(0, expected[:7]) == expected[:8]
    assert verified(20, expected[20:25]) == expected[20:26]  # it lacks twelve
    wrong = [(token + 1) % SIZE for token in expected]
    for right in range(7):
        assert verified(5, expected[5 : 5 + right] + wrong[5 + right : 12]) == expected[5 : 6 + right]


@pytest.mark.parametrize("address", ["tcp://192.168.1.7:8786", "tls://head", "http://127.0.0.1:80", "head:8786", ""])
def test_clusters_that_anybody_can_enter_are_refused(address: str) -> None:
    with pytest.raises(UsageError, match="--cluster"):
        check_address(address)


@pytest.mark.parametrize(
    "address", ["tls://head:8786", "tcp://127.0.0.1:8786", "tcp://[::1]:8786", "tcp://localhost:1"]
)
def test_others_are_not(address: str) -> None:
    check_address(address)


def test_errors_survive_the_way_between_processes() -> None:
    import pickle

    error = MissingPackage("distributed", "cluster", "targets on other machines")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_log_probabilities_are_refused() -> None:
    request = Request(PROMPT, SamplingParams(), 4, log_probs=0)
    with targets(SlowSpec(), threads(1), Recorded([], 1.0)) as made, pytest.raises(UsageError, match="several targets"):
        next(drive.events(made, request))


def test_a_request_that_a_close_ends_says_so_and_no_other_is_taken() -> None:
    request, events = Request(PROMPT, SamplingParams(), 40), list[Event]()
    with targets(SlowSpec(0.01), threads(2), Recorded([], 1.0)) as made:
        begun = drive.events(made, request)
        while not isinstance(next(begun), Wrote):
            pass
        made.close()
        with pytest.raises(Closed):
            list(map(drive.chunks_in, begun))
        with pytest.raises(Closed):
            made.submit(request, events.append)
    assert not events
