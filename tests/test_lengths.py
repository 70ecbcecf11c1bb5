"""Short texts first: lengths foretold from past prompts, nobody waiting for ever, and the order really kept."""

import json

import pytest
from edgespec.backends.reference.backend import ReferenceBackend, random_model

from benchmarks.order import Recorded, compare, read_answers, simulate, words_of
from edgespec.errors import UsageError
from edgespec.loop.sampling import SamplingParams
from edgespec.planners.none import NonePlanner
from edgespec.scheduler.lengths import LATEST, Lengths, urgency
from edgespec.scheduler.requests import Ended, Request
from edgespec.scheduler.scheduler import Scheduler

SHORT, LONG = [5, 9, 11, 13], [5, 20, 21, 22]  # prompts; 5 is in all of them


def test_lengths_are_those_of_prompts_alike():
    lengths = Lengths()
    assert lengths.foretell(SHORT, most=30) == 30  # nothing is known
    for i in range(20):
        lengths.learn([*SHORT, 100 + i], 10)
        lengths.learn([*LONG, 200 + i], 400)
    short, long = lengths.foretell([*SHORT, 7]), lengths.foretell([*LONG, 7])
    assert 8 < short < 20
    assert 250 < long < 500
    assert short < lengths.foretell([5, 300, 301]) < long  # nothing alike: the mean of all
    assert lengths.foretell([*LONG, 7], most=50) == 50


def test_only_the_latest_prompts_are_remembered():
    lengths = Lengths()
    for _ in range(50):
        lengths.learn(SHORT, 10)
    for i in range(LATEST):
        lengths.learn([30 + i % 7, 40 + i % 5], 500)
    assert lengths.foretell(SHORT) > 400
    assert not any(lengths._often[word] for word in SHORT)


def test_whoever_waits_rises():
    assert urgency(0, 1) == urgency(0, 100)
    assert urgency(10, 1) > urgency(10, 100)
    assert urgency(2000, 100) > urgency(10, 1)


def finished(first_come, warm=True):
    """In which order short and long texts end, with one place."""
    target = ReferenceBackend(random_model(1, vocab_size=48), sessions=1, context_length=200)
    target.model.unembedding[1] = 0
    scheduler, ended = Scheduler(target, [NonePlanner()], budget=1, first_come=first_come), []

    def ask(name, prompt, tokens):
        request = Request(prompt, SamplingParams(), 150)
        request = Request(prompt, SamplingParams(), tokens) if name == "past" else request

        def emit(event):
            if isinstance(event, Ended):
                ended.append(name)

        return scheduler.submit(request, emit)

    for _ in range(8 if warm else 0):
        ask("past", SHORT, 2)
        ask("past", LONG, 60)
    while scheduler.waiting or scheduler.active:
        scheduler.step()
    ended.clear()
    for name, prompt in [("long", LONG), ("long", LONG), ("short", SHORT), ("short", SHORT)]:
        ask(name, prompt, 150)
    while scheduler.waiting or scheduler.active:
        scheduler.step()
    scheduler.close()
    return ended


def test_the_scheduler_writes_short_texts_first():
    assert finished(first_come=False) == ["short", "short", "long", "long"]
    assert finished(first_come=True) == ["long", "long", "short", "short"]


def test_the_simulation_serves_everybody_once():
    asked = [Recorded(SHORT if i % 3 else LONG, 5 if i % 3 else 200) for i in range(90)]
    arrivals = [float(i) for i in range(90)]
    times = {order: simulate(asked, arrivals, 2, order) for order in ("first come", "known, ageing")}
    for seconds in times.values():
        assert all(took >= one.tokens for took, one in zip(seconds, asked, strict=True))
        busy = sum(one.tokens for one in asked)
        assert max(a + b for a, b in zip(arrivals, seconds, strict=True)) >= busy / 2
    assert sum(times["known, ageing"]) < sum(times["first come"])
    found = compare(asked, 2, 0.95, 1.0, seed=1)
    assert found["foretold, ageing"][0] < found["first come"][0]
    # One place, worked out by hand: b waits for a; c comes when a ends and would be quick, but is not known yet.
    three = [Recorded([1], 10), Recorded([2], 20), Recorded([3], 1)]
    assert simulate(three, [0.0, 1.0, 2.0], 1, "first come") == [10, 29, 29]
    assert simulate(three, [0.0, 1.0, 2.0], 1, "known, ageing") == [10, 30, 9]


def test_answers_are_read(tmp_path):
    path = tmp_path / "answers.json"
    path.write_text(json.dumps([{"instruction": "Say hello.", "output": "Hello, you!"}]))
    (one,) = read_answers(path)
    assert one == Recorded(words_of("say hello ."), 4)
    path.write_text('{"a": 1}')
    with pytest.raises(UsageError, match=r"answers\.json"):
        read_answers(path)
