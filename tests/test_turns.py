"""Admission: requests are served as they came, and what is only prepared after them."""

from reference.backend import ReferenceBackend, random_model

from edgespec.loop.sampling import SamplingParams
from edgespec.loop.stats import GenerationStats
from edgespec.planners.none import NonePlanner
from edgespec.scheduler.events import Ended
from edgespec.scheduler.queue import Queue
from edgespec.scheduler.requests import Request
from edgespec.scheduler.scheduler import Scheduler
from edgespec.scheduler.sequence import Seq

ENGINE = ReferenceBackend(random_model(1, vocab_size=48), sessions=1, context_length=200)
ENGINE.vocab.eog_ids = frozenset()  # texts are as long as they may be


def seq(idle_limit=None):
    request = Request([5], SamplingParams(), 4)
    return Seq(request, lambda event: None, GenerationStats(), ENGINE.vocab, lambda: None, idle_limit)


def test_what_is_only_prepared_comes_last():
    queue, held, wanted = Queue(), seq(idle_limit=8), seq()
    queue.put(held)
    queue.put(wanted)
    assert queue.in_order() == [wanted, held]


def test_requests_are_served_as_they_came():
    scheduler, ended = Scheduler(ENGINE, [NonePlanner()], budget=1), []
    for tokens in (30, 20, 4, 3):

        def emit(event, tokens=tokens):
            if isinstance(event, Ended):
                ended.append(tokens)

        scheduler.submit(Request([5, 9, tokens], SamplingParams(), tokens), emit)
    while scheduler.waiting or scheduler.active:
        scheduler.step()
    scheduler.close()
    assert ended == [30, 20, 4, 3]
