"""Admission: requests are served as they came, or by a key that is given; nobody waits for ever."""

import pytest
from edgespec.backends.reference.backend import ReferenceBackend, random_model

import edgespec.scheduler.queue as turns
from edgespec.loop.sampling import SamplingParams
from edgespec.loop.stats import GenerationStats
from edgespec.planners.none import NonePlanner
from edgespec.scheduler.queue import Queue, first_come, shortest_first
from edgespec.scheduler.requests import Ended, Handle, Request
from edgespec.scheduler.scheduler import Scheduler

ENGINE = ReferenceBackend(random_model(1, vocab_size=48), sessions=1, context_length=200)
ENGINE.vocab.eog_ids = frozenset()  # texts are as long as they may be
SHORT, LONG = 4, 60  # tokens


def handle(tokens, since=0.0, idle_limit=None):
    request = Request([5], SamplingParams(), tokens)
    made = Handle(request, lambda event: None, GenerationStats(), ENGINE.vocab, lambda: None, idle_limit)
    made.since = since
    return made


def in_order(handles, order):
    """The order in which a queue lets them in."""
    queue = Queue(order)
    for one in handles:
        queue.put(one)
    return queue.in_order()


class Clock:
    """Time goes by where a test says so."""

    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr(turns, "perf_counter", found)
    return found


@pytest.mark.parametrize("order", [first_come, shortest_first])
def test_what_is_only_prepared_comes_last(order, clock):
    clock.now = 10.0
    held, wanted = handle(SHORT, since=0.0, idle_limit=8), handle(LONG, since=9.0)
    assert in_order([held, wanted], order) == [wanted, held]


def test_shorter_ones_come_first_and_whoever_waits_rises(clock):
    clock.now = 10.0
    long, short = handle(LONG), handle(SHORT)
    assert in_order([long, short], first_come) == [long, short]
    assert in_order([long, short], shortest_first) == [short, long]
    clock.now = 1000.0
    short.since = 995.0
    assert in_order([short, long], shortest_first) == [long, short]
    assert in_order([handle(LONG, since=1000.0), short], shortest_first)[0] is short


def ask(scheduler, name, tokens, ended):
    def emit(event):
        if isinstance(event, Ended):
            ended.append(name)

    return scheduler.submit(Request([5, 9, tokens % 48], SamplingParams(), tokens), emit)


@pytest.mark.parametrize(
    ("order", "expected"),
    [(first_come, ["long", "long", "short", "short"]), (shortest_first, ["short", "short", "long", "long"])],
)
def test_the_scheduler_keeps_the_order(order, expected, clock):
    scheduler, ended = Scheduler(ENGINE, [NonePlanner()], budget=1, order=order), []
    for name, tokens in [("long", LONG), ("long", LONG), ("short", SHORT), ("short", SHORT)]:
        ask(scheduler, name, tokens, ended).since = 0.0
    clock.now = 1.0
    while scheduler.waiting or scheduler.active:
        scheduler.step()
    scheduler.close()
    assert ended == expected


@pytest.mark.parametrize("order", [first_come, shortest_first])
def test_a_long_request_is_served_though_short_ones_keep_coming(order, clock):
    scheduler, ended = Scheduler(ENGINE, [NonePlanner()], budget=1, order=order), []
    ask(scheduler, "first", SHORT, ended).since = 0.0
    scheduler.step()
    ask(scheduler, "long", LONG, ended).since = 0.0
    for _ in range(1000):
        if "long" in ended:
            break
        while scheduler.waiting < 3:
            ask(scheduler, "short", SHORT, ended).since = clock.now
        scheduler.step()
        clock.now += 1.0
    scheduler.close()
    assert "long" in ended
    assert ended.count("short") >= (3 if order is shortest_first else 0)
