"""Shared passes on llama.cpp: texts are equal to the bit to those written alone, whatever happens to the cache.

All cells are one pool that does not hold all texts; texts go to the disk and come back.
"""

import numpy as np
import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

from conftest import made_up
from edgespec.backends.llamacpp import cells
from edgespec.backends.llamacpp.engine import load

from edgespec.errors import ModelError
from edgespec.loading.exact import apply_row_class
from edgespec.loop.sampling import SamplingParams
from edgespec.planners.none import NonePlanner
from edgespec.planners.sssd import SssdPlanner
from edgespec.scheduler.disk_cache import DiskCache
from edgespec.scheduler.events import Wrote
from edgespec.scheduler.requests import Request
from edgespec.scheduler.scheduler import Scheduler

TEXT = "The lighthouse keeper wrote down the weather every morning, and every evening he read it out. " * 20
PROMPTS = [TEXT[:40], TEXT[:900], f"{TEXT[:700]}Or not.", TEXT[30:1000], f"{TEXT[:1200]}He did."]


@pytest.mark.parametrize(("asked", "kept"), [("narrow", 3), ("wide", 0)])
def test_texts_together_are_texts_alone(asked, kept, smollm2, smollm2_folder, tmp_path):
    path = made_up(smollm2, smollm2_folder)
    options = {"context_length": 512, "budget": 16, "sessions": 4, "kept": kept}
    target = load(str(path), threads=2, exact=asked, share=0.25, **options)
    shelf, loaded = None, list[bool]()

    class Counting(DiskCache):
        def load(self, path, session, draft=None):
            loaded.append(super().load(path, session, draft) and bool(session.token_ids))
            return loaded[-1]

    try:
        apply_row_class(target, str(path), asked)
        shelf = Counting(tmp_path, target, 1 << 30, least=32, say=pytest.fail)
        ids = [target.vocab.encode(prompt, add_bos=True, parse_special=False) for prompt in PROMPTS]
        asks = [Request(ids[i % 5], SamplingParams(temperature=1.0, seed=i), 8 + 2 * i) for i in range(9)]

        def write(slots, planner, cache):
            """All texts, with so many at once; between passes the cache is put in order now and then."""
            scheduler, found = Scheduler(target, [planner() for _ in range(slots)], budget=16), [[] for _ in asks]
            generator, jobs = np.random.default_rng(slots), []
            scheduler.pool.disk_cache = shelf if cache else None
            try:
                for i, ask in enumerate(asks):
                    jobs.append(scheduler.submit(ask, found[i].append))
                    if i == 4:
                        scheduler.submit(asks[3], lambda event: None).cancel()
                    for _ in range(int(generator.integers(0, 6)) if cache else 10**6):
                        if not (scheduler.waiting or scheduler.active):
                            break
                        scheduler.step()
                    if cache and i % 2:
                        for slot in scheduler.pool.idle:
                            scheduler.pool.evict(slot)
                    if cache and i % 3 == 2:
                        target.cells.put_in_order([slot.session for slot in scheduler.pool.slots])
                    if not cache:
                        for slot in scheduler.pool.slots:
                            slot.session.rewind(0)
                while scheduler.waiting or scheduler.active:
                    scheduler.step()
                works = scheduler.counts.works / scheduler.counts.passes
            finally:
                scheduler.close()
            return [[c.token_id for e in events if isinstance(e, Wrote) for c in e.chunks] for events in found], works

        alone, _ = write(1, NonePlanner, cache=False)
        together, works = write(4, SssdPlanner, cache=True)
        assert works > 1.2
        assert together == alone
        assert list(tmp_path.glob("*.kept"))
        assert write(4, SssdPlanner, cache=True)[0] == alone  # as after a restart
        assert sum(loaded) >= 2
    finally:
        target.close()


@pytest.mark.parametrize("error", [ValueError, MemoryError])
def test_a_text_whose_cells_are_lost_begins_again(error, smollm2, smollm2_folder, monkeypatch):
    """They are lost in the pass of another text; nothing else waits for them."""
    path = made_up(smollm2, smollm2_folder)
    target, failed = load(str(path), context_length=512, budget=16, sessions=3, threads=2, exact="narrow"), list[int]()
    apply_row_class(target, str(path), "narrow")
    scheduler, inner = Scheduler(target, [NonePlanner() for _ in range(3)], budget=16), cells.read_parts
    asks = [
        Request(target.vocab.encode(prompt, add_bos=True, parse_special=False), SamplingParams(temperature=1.0), 20)
        for prompt in (TEXT[:300], TEXT[30:400])
    ]

    def submit(ask):
        events.append([])
        scheduler.submit(ask, events[-1].append)

    def written(found):
        return [chunk.token_id for event in found if isinstance(event, Wrote) for chunk in event.chunks]

    def run():
        for _ in range(300):
            if scheduler.waiting or scheduler.active:
                scheduler.step()

    def broken(file, stop):
        if not failed:
            failed.append(stop)
            raise error
        return inner(file, stop)

    try:
        events = []
        submit(asks[0])
        run()
        submit(asks[0])
        while len(written(events[1])) < 3:
            scheduler.step()
        monkeypatch.setattr(cells, "read_parts", broken)
        target.cells.uncertain = True  # so cells are put in order
        submit(asks[1])
        run()
        assert failed
        assert isinstance(events[2][-1].error, (ModelError, MemoryError))
        assert written(events[1]) == written(events[0])
    finally:
        scheduler.close()
        target.close()
