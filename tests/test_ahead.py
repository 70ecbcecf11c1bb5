"""A draft that goes on while the target works: the text is the same, whatever it finds, and whenever it is stopped."""

import random
import sys
import threading
import time
from concurrent.futures import wait
from dataclasses import replace

import numpy as np
import pytest
from alone import before_passes, served, written
from auto_planners import auto_planner
from reference.backend import ReferenceBackend, perturbed, random_model

import edgespec
from edgespec.errors import Interrupted, ModelError, UsageError
from edgespec.lab.pearl import PearlPlanner
from edgespec.lab.specbranch import SpecBranchPlanner
from edgespec.loop.backend import Work
from edgespec.loop.draft_passes import Wanted
from edgespec.loop.sampling import SamplingParams
from edgespec.loop.step import step_of
from edgespec.loop.tree import Proposal
from edgespec.planners.ahead import AheadChainPlanner, AheadPlanner, DraftThread
from edgespec.planners.auto import AutoPlanner, AutoState
from edgespec.planners.choice import goes_ahead, has_own_processor, make_planner
from edgespec.planners.none import NonePlanner
from edgespec.planners.specexec import SpecExecPlanner
from edgespec.planners.sssd import SssdPlanner
from edgespec.scheduler.events import Ended, Wrote
from edgespec.scheduler.requests import Request
from edgespec.scheduler.scheduler import Scheduler

SIZE, PROMPT = 48, [1, 2, 3]
MODEL = random_model(0, vocab_size=SIZE, sharpness=3.0)
DRAFTS = {"good": perturbed(MODEL, 0.1, 1), "bad": random_model(9, vocab_size=SIZE, sharpness=3.0)}
SAMPLINGS = [SamplingParams(temperature=t, seed=5) for t in (0.0, 0.7, 1.0)]


def backend(model=MODEL, **limits):
    engine = ReferenceBackend(model, context_length=200, **{"max_nodes": 400} | limits)
    engine.vocab.eog_ids = frozenset()  # texts are as long as they may be
    return engine


def wait_for(flag, seconds):
    """Until it is set; a flag of a pass has no `wait`."""
    end = time.perf_counter() + seconds
    while not flag.is_set() and time.perf_counter() < end:
        time.sleep(0.0001)
    return flag.is_set()


def uneven(engine, seed, pause=0.002):
    """The same with passes that take some random time, and can be ended within it."""
    draw = random.Random(seed)
    before_passes(engine, lambda batch: wait_for(engine.stop, draw.random() * pause))
    return engine


def write(planner, sampling, target=None, count=50):
    found = written(target or backend(), planner, PROMPT, sampling, max_tokens=count)
    planner.close()
    return found


def planners(draft, pace, **options):
    """Every planner, going on ahead where it has a draft."""
    pair = {"nice": False} | options
    return {
        "none": NonePlanner,
        "sssd": SssdPlanner,
        "specexec": lambda: AheadPlanner(draft(), depth=6, beam=4, **pair),
        "specbranch": lambda: SpecBranchPlanner(draft(), depth=6, beam=4, **pair),
        "chain": lambda: AheadChainPlanner(draft(), depth=5, **pair),
        "pearl": lambda: PearlPlanner(draft(), depth=5, **pair),
        "auto": lambda: auto_planner(
            "auto", pace, SssdPlanner(), AheadPlanner(draft(), depth=6, cost=pace.draft, **pair), goes_ahead=True
        ),
    }


@pytest.mark.covering(1)
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=lambda sampling: str(sampling.temperature))
@pytest.mark.parametrize("kind", DRAFTS)
@pytest.mark.parametrize("name", planners(None, None))
def test_the_text_is_plain_decodings(name, kind, sampling):
    plain, _ = write(NonePlanner(), sampling, count=30)
    make = planners(lambda: uneven(backend(DRAFTS[kind]), 1), AutoState())[name]
    text, _ = write(make(), sampling, uneven(backend(), 2), count=30)
    assert text == plain


def patient(engine, planner):
    """The same with passes over trees that wait until the draft has nothing more to read."""
    before_passes(engine, lambda batch: planner._thread._task and wait([planner._thread._task], 60))
    return engine


def test_it_finds_something_meanwhile():
    _, serial = write(SpecExecPlanner(backend(DRAFTS["good"], max_nodes=40), depth=6), SAMPLINGS[0], count=20)
    planner = AheadPlanner(backend(DRAFTS["good"], max_nodes=40), depth=6, nice=False)
    _, stats = write(planner, SAMPLINGS[0], patient(backend(), planner), count=20)
    assert serial.hidden_seconds == 0 < stats.hidden_seconds
    assert stats.draft_went_on > serial.draft_went_on
    assert "drafting hidden" in stats.summary()
    assert "drafting hidden" not in serial.summary()
    assert auto_planner("auto", AutoState(), draft=planner, goes_ahead=True).stats == planner.stats


def pearl_trees(planner, target):
    """The trees of a text, and the draft passes that the target waited for before each."""
    trees, waited, propose = [], [], planner.propose

    def planned(context, budget):
        before = planner.stats.draft_passes
        trees.append((yield from propose(context, budget)).tree)
        waited.append(planner.stats.draft_passes - before)
        return Proposal(trees[-1])

    planner.propose = planned
    _, stats = write(planner, SAMPLINGS[1], patient(target, planner), count=20)
    assert stats.passes == len(trees)
    return trees, waited


def test_with_pearl_the_target_waits_for_the_first_tree_only():
    """After a miss its pass is over the root, and otherwise over what was drafted during the last one."""
    planner = PearlPlanner(backend(perturbed(MODEL, 0.5, 1), max_nodes=40), depth=6, nice=False)
    trees, waited = pearl_trees(planner, backend())
    assert waited[0] > 0
    assert not any(waited[1:])
    assert any(len(tree) == 1 for tree in trees)  # pre-verify
    assert any(len(tree) > 1 for tree in trees[1:])  # post-verify


@pytest.mark.exhaustive
def test_pearl_drafts_as_many_tokens_as_draft_passes_fit_into_a_target_pass():
    planner = PearlPlanner(backend(DRAFTS["good"]), depth=12, nice=False)
    assert planner.length > 1  # nothing is measured
    planner._drafter.last = 0.02
    for seconds, length in ((0.1, 5), (0.011, 1), (0.0, 1)):  # the last pass was shared, so its time says nothing
        planner.result(step_of([1], seconds), None)
        assert planner.length == length
    planner.close()


@pytest.mark.exhaustive
def test_pearls_draft_ends_with_its_length():
    """Also where the target's pass lasts longer than the last one."""

    class Two(PearlPlanner):
        length = 2

    planner = Two(backend(DRAFTS["good"]), depth=12, nice=False)
    trees, _ = pearl_trees(planner, backend())
    assert max(map(len, trees)) == 1 + 2
    assert not planner._thread._task


@pytest.mark.parametrize("sampling", [SAMPLINGS[1], pytest.param(SAMPLINGS[0], marks=pytest.mark.exhaustive)])
def test_stops_and_new_texts_at_any_moment(sampling):
    """Texts are called off at random moments, and others begin with the same draft: all that end are plain's."""
    plain, _ = write(NonePlanner(), sampling, count=30)
    target, draft = uneven(backend(sessions=2), 1), uneven(backend(DRAFTS["good"], sessions=2), 2)
    options = {"depth": 6, "beam": 4, "sequences": 2, "nice": False}
    scheduler, draw, ended = (
        Scheduler(target, [AheadPlanner(draft, **options) for _ in range(2)], budget=12),
        random.Random(3),
        0,
    )
    scheduler.start()
    try:
        for turn in range(40):
            tokens, over = [], threading.Event()

            def tell(event, tokens=tokens, over=over):
                if isinstance(event, Wrote):
                    tokens.extend(chunk.token_id for chunk in event.chunks)
                elif isinstance(event, Ended):
                    over.set()

            job = scheduler.submit(Request(PROMPT, sampling, 30), tell)
            if turn % 4:
                time.sleep(draw.random() * 0.03)
                job.cancel()
            assert over.wait(20)
            assert tokens == plain[: len(tokens)]
            ended += len(tokens) == 30
    finally:
        scheduler.close()
    assert ended >= 10
    assert not any(thread.name.startswith("edgespec ahead") for thread in threading.enumerate())


def test_two_texts_at_once_draft_before_their_passes():
    target = backend(sessions=2, max_leaves=1)  # the draft reads more than is sent: exits, too
    draft = backend(perturbed(MODEL, 0.6, 1), sessions=2)
    made = [AheadPlanner(draft, depth=6, sequences=2, nice=False) for _ in range(2)]
    requests = [Request(PROMPT, sampling, 40) for sampling in SAMPLINGS[:2]]
    found, _, stats = served(Scheduler(target, made, budget=12), requests)
    assert found == [write(NonePlanner(), sampling, count=40)[0] for sampling in SAMPLINGS[:2]]
    assert stats[0].draft_went_on + stats[1].draft_went_on > 0  # searches go on below what was written, though
    assert stats[0].hidden_seconds == stats[1].hidden_seconds == 0


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("kind", "gives_way"), [(AheadPlanner, True), (SpecBranchPlanner, True), (PearlPlanner, False)]
)
def test_pearls_draft_does_not_give_way_to_the_target(kind, gives_way, monkeypatch):
    """On shared processors it would have no draft tokens when the target's pass ends, step after step."""
    lowered = []
    monkeypatch.setattr("edgespec.planners.ahead.lower_priority", lambda: lowered.append(True))
    write(kind(backend(DRAFTS["good"]), depth=6, nice=True), SAMPLINGS[0], count=8)
    assert bool(lowered) == gives_way


def long_pass(seconds):
    """A draft, its thread, and a task of one pass, which takes so long unless it is interrupted."""
    draft, begun = backend(), threading.Event()
    work = Work(draft.open(), np.array([3], np.int32), np.array([-1], np.int32), np.zeros(0))

    def slow(works):
        begun.set()
        wait_for(draft.stop, seconds)

    def steps():
        yield Wanted(draft, work)

    before_passes(draft, slow)
    worker = DraftThread(draft, nice=False)
    return draft, worker, lambda: worker.pass_on(steps()), begun


@pytest.mark.parametrize("lost", [True, False])
def test_nobody_waits_for_a_pass_that_is_lost_but_for_one_that_is_wanted(lost):
    draft, worker, task, begun = long_pass(20 if lost else 0.01)
    with worker.doing(task):
        assert begun.wait(20)
    assert worker.join(lost=lost) == lost
    assert not worker._task
    worker.join(lost=True)  # no task is under way, so the next pass is another's
    assert not draft.stop.is_set()
    worker.close()


def test_two_models_at_once_leave_python_s_switches_as_they_were():
    before, workers = sys.getswitchinterval(), [DraftThread(backend(), nice=False) for _ in range(2)]
    running = [worker.doing(lambda: None) for worker in workers]
    for one in running:
        one.__enter__()
    assert sys.getswitchinterval() < before
    for one in running:
        one.__exit__(None, None, None)
    assert sys.getswitchinterval() == before
    for worker in workers:
        worker.close()


def test_a_target_that_fails_ends_the_drafts_pass():
    """Stop: the target's pass ends early, and the draft's with it; the next text finds the draft as it was."""
    target, slow = backend(), backend(DRAFTS["good"])
    begun, forward = threading.Event(), slow.forward
    planner = AheadPlanner(slow, depth=6, nice=False)

    def stuck(batch):
        if threading.current_thread() is threading.main_thread():
            return forward(batch)
        begun.set()
        assert wait_for(slow.stop, 20)  # else this test takes so long, and then fails
        return forward(batch)

    slow.forward = stuck

    def failing(batch):
        if batch[0].prompt:
            return plain(batch)
        assert begun.wait(20)
        raise Interrupted("the pass was interrupted")

    plain, target.forward = target.forward, failing
    with pytest.raises(Interrupted):
        write(planner, SAMPLINGS[0], target)
    assert not planner._thread._task
    slow.forward = forward
    assert write(planner, SAMPLINGS[0])[0] == write(NonePlanner(), SAMPLINGS[0])[0]


@pytest.mark.parametrize(("stops", "told"), [(True, KeyboardInterrupt), (False, ModelError)])
def test_an_error_of_the_draft_is_told_but_does_not_replace_ctrl_c(stops, told):
    target, broken = backend(), backend(DRAFTS["good"])
    failed = threading.Event()

    def fails(batch):
        if threading.current_thread() is not threading.main_thread():
            failed.set()
            raise ModelError("the draft is broken")

    def stopped(batch):
        if not any(work.prompt for work in batch):
            assert failed.wait(20)
            if stops:
                raise KeyboardInterrupt

    before_passes(broken, fails)
    before_passes(target, stopped)
    planner = AheadPlanner(broken, depth=6, nice=False)
    with pytest.raises(told, match=None if stops else "the draft is broken"):
        write(planner, SAMPLINGS[0], target)
    planner.close()


def test_the_default_needs_a_processor_for_the_draft_alone():
    target, draft = backend(), backend(DRAFTS["good"])
    assert not has_own_processor(target, draft)
    for places, own in (((0, 0), False), ((0, -1), True), ((-1, 0), True), ((20, -1), False)):
        for engine, layers in zip((target, draft), places, strict=True):
            engine.computing = {"gpu_layers": layers}
        assert has_own_processor(target, draft) == own
    target.computing, draft.computing = {"device": "cpu"}, {"device": "cuda:0"}
    assert has_own_processor(target, draft)
    for ahead, pace, expected in (
        (None, AutoState(), True),
        (None, None, False),
        (True, None, True),
        (False, AutoState(), False),
    ):
        planner = make_planner("specexec", [target, draft], state=pace, ahead=ahead)
        found = planner._candidates[0].planner if isinstance(planner, AutoPlanner) else planner
        assert isinstance(found, AheadPlanner) == expected
        assert isinstance(planner, AutoPlanner) == (pace is not None)
        planner.close()


@pytest.mark.parametrize(("name", "kind"), [("pearl", PearlPlanner), ("specbranch", SpecBranchPlanner)])
def test_planners_that_work_while_the_target_runs_need_no_option(name, kind):
    for ahead in (None, False):
        planner = make_planner(name, [backend(), backend(DRAFTS["good"])], ahead=ahead)
        assert isinstance(planner, kind)
        assert planner.name == name
        planner.close()


def test_a_draft_bound_to_its_thread_does_not_go_ahead():
    draft = backend()
    draft.capabilities = replace(draft.capabilities, one_thread=True)
    assert not goes_ahead(None, True, draft)
    with pytest.raises(UsageError, match="ahead=True"):
        goes_ahead(True, True, draft)
    with pytest.raises(UsageError, match="cannot go on while the target runs"):
        make_planner("pearl", [backend(), draft])


@pytest.mark.parametrize("planner", [None, "none", "sssd"])
def test_without_a_draft_nothing_goes_on(planner):
    with pytest.raises(UsageError, match="name one with --draft"):
        edgespec.load("model.gguf", planner=planner, ahead=True)
