"""Short texts first: lengths foretold from past prompts, nobody waiting for ever, and the order really kept."""

from edgespec.backends.reference.backend import ReferenceBackend, random_model

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
