"""Speculative text on llama.cpp: plain text, but where rounding may decide. And the backend's own behaviour.

Targets are a small made-up model, with 4-bit and with 32-bit weights, and now and then SmolLM2. Drafts are the target
itself and worse copies: how often they are right makes trees, commits and caches differ, not what they write.
"""

import gc
import os
import platform
import sys
import time
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from random import Random
from threading import Event

import numpy as np
import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

from alone import Generation
from auto_planners import auto_planner
from conftest import Q2_K, once, quantised
from edgespec.backends.llamacpp.engine import load

from edgespec.errors import ContextFull, ModelError
from edgespec.lab.lookahead import LookaheadPlanner
from edgespec.lab.pearl import PearlPlanner
from edgespec.lab.specbranch import SpecBranchPlanner
from edgespec.loop.passes import prefill
from edgespec.loop.sampling import SamplingParams
from edgespec.loop.stats import GenerationStats
from edgespec.measure.lossless import explain, replay
from edgespec.planners.ahead import AheadPlanner
from edgespec.planners.auto import new_auto_state
from edgespec.planners.chain import ChainPlanner
from edgespec.planners.none import NonePlanner
from edgespec.planners.specexec import SpecExecPlanner
from edgespec.planners.sssd import SssdPlanner
from edgespec.scheduler.events import Ended
from edgespec.scheduler.requests import Request
from edgespec.scheduler.scheduler import Scheduler

PROMPTS = ["The three most important rivers of Europe are", "def is_prime(n):\n    ", "Once upon a time, a fox"]
SAMPLINGS = [
    SamplingParams(),
    SamplingParams(temperature=0.7, top_p=0.9, seed=1),
    SamplingParams(temperature=1.0, seed=2),
]
# One thread: several that wait for each other on a busy machine crawl.
OPTIONS = {"context_length": 256, "threads": 1, "budget": 16}


@contextmanager
def loaded(path, **options):
    with closing(load(str(path), **OPTIONS | options)) as backend:
        yield backend


@pytest.fixture(scope="module")
def target(small_q4):
    with loaded(small_q4) as backend:
        yield backend


@pytest.fixture(scope="module")
def float_target(small):
    with loaded(small) as backend:
        yield backend


@pytest.fixture(scope="module", params=["itself", "rough", "damaged"])
def draft(request, small, small_q4, small_q2k, smollm2_folder):
    """Always right, mostly right, mostly wrong."""
    match request.param:
        case "itself":
            path = small_q4
        case "rough":
            path = small_q2k
        case "damaged":
            path = once(smollm2_folder / "small-damaged.gguf", lambda new: quantised(small, new, Q2_K, (1,)))
    with loaded(path) as backend:
        yield backend


def write(target, planner, prompt, sampling, count):
    session, stats, output = target.open(), GenerationStats(), []
    generation = Generation(target, session, planner, prompt, sampling, max_tokens=count, budget=16, stats=stats)
    for round_ in generation.steps():
        output += round_.tokens
    session.close()
    assert stats.tokens == len(output) == sum(stats.tokens_by_source.values())
    return output, stats


PLAIN: dict[object, list[int]] = {}  # it does not depend on the draft, so once is enough


def plain_text(target, prompt, sampling, count):
    key = target, tuple(prompt), sampling.seed, count
    if key not in PLAIN:
        PLAIN[key], _ = write(target, NonePlanner(), prompt, sampling, count)
        assert replay(target, prompt, PLAIN[key], sampling) == []  # plain decoding can be repeated to the bit
    return PLAIN[key]


def check_lossless(target, planner, sampling, count, prompts=PROMPTS[:2]):
    """Every token is what plain decoding samples after the same text, or ties with it."""
    # Q4_1 kernels on x86 treat every token of a pass alike, and the backend keeps cells in plain decoding's order.
    exact = target.in_order and target.capabilities.logit_tolerance > 1 and platform.machine() == "x86_64"
    for text in prompts:
        prompt = target.vocab.encode(text, add_bos=True, parse_special=False)
        plain = plain_text(target, prompt, sampling, count)
        output, _ = write(target, planner, prompt, sampling, count)
        assert output == plain or not exact, f"{planner.name}, {text!r}, {sampling}: not equal to the bit"
        found = explain(target, prompt, plain, output, sampling)
        if found is not None:  # what follows can only be checked along the other text
            bad = [
                divergence for divergence in (found, *replay(target, prompt, output, sampling)) if not divergence.tie
            ]
            assert not bad, f"{planner.name}, {text!r}, {sampling}: " + "; ".join(map(str, bad))
    planner.close()


by_temperature = pytest.mark.parametrize("sampling", SAMPLINGS, ids=["T=0", "T=0.7", "T=1"])


@pytest.mark.covering(1)
@by_temperature
def test_trees(target, draft, sampling):
    check_lossless(target, SpecExecPlanner(draft, depth=8, beam=4), sampling, 24)


@pytest.fixture(scope="module")
def usual_draft(small_q2k):
    """Mostly right, and loaded as drafts are: nodes may stay below a commit."""
    with loaded(small_q2k, in_order=False) as backend:
        yield backend


class Resting(AheadPlanner):
    """Goes on from pass to pass alone, not while the target works."""

    def during(self, nodes):
        return nullcontext()


@pytest.mark.covering(1)
@by_temperature
@pytest.mark.parametrize("kind", [Resting, AheadPlanner, PearlPlanner, SpecBranchPlanner])
def test_searches_that_go_on(target, usual_draft, sampling, kind):
    """From pass to pass, and while the target works."""
    planner = kind(usual_draft, depth=8, beam=4)
    check_lossless(target, planner, sampling, 24)


def test_a_text_that_is_called_off_leaves_the_draft_as_it_was(target, usual_draft):
    """At any moment, beside the target's pass: the next text's first draft pass is not ended in its place."""
    prompt = target.vocab.encode(PROMPTS[0], add_bos=True, parse_special=False)
    plain = plain_text(target, prompt, SAMPLINGS[0], 24)
    planner, draw = AheadPlanner(usual_draft, depth=8, beam=4), Random(1)
    scheduler = Scheduler(target, [planner], budget=16)
    scheduler.start()
    try:
        for turn in range(8):
            tokens, ended = [], Event()

            def tell(event, tokens=tokens, ended=ended):
                tokens += [chunk.token_id for chunk in getattr(event, "chunks", ())]
                if isinstance(event, Ended):
                    ended.set()

            job = scheduler.submit(Request(prompt, SAMPLINGS[0], 24), tell)
            if turn % 2 == 0:
                time.sleep(draw.random() * 0.2)
                job.cancel()
            assert ended.wait(60)
            assert tokens == (plain if turn % 2 else plain[: len(tokens)])
    finally:
        scheduler.close()


@pytest.mark.covering(1)
@by_temperature
def test_chains(target, draft, sampling):
    check_lossless(target, ChainPlanner(draft, depth=6), sampling, 32, PROMPTS[1:2])


@pytest.mark.covering(1)
@by_temperature
@pytest.mark.parametrize("kind", [SssdPlanner, LookaheadPlanner])
def test_copies(target, sampling, kind):
    check_lossless(target, kind(), sampling, 32)


@pytest.mark.covering(1)
@by_temperature
@pytest.mark.parametrize("streams", [False, True])
def test_what_pays(target, draft, sampling, streams):
    """What is guessed follows from how long passes take here, the text does not."""
    pace = new_auto_state(streams)
    check_lossless(
        target, auto_planner("auto", pace, SssdPlanner(), SpecExecPlanner(draft, cost=pace.draft)), sampling, 24
    )


@pytest.mark.exhaustive
@by_temperature
def test_the_whole_model(smollm2, smollm2_q2k, sampling):
    """Thirty layers round more often, and write sense: drafts are right in other places."""
    with loaded(smollm2) as target, loaded(smollm2_q2k) as draft:
        check_lossless(target, SpecExecPlanner(draft, depth=6, beam=2), sampling, 24, PROMPTS[1:2])


def test_cells_out_of_order_are_a_matter_of_rounding(small_q4, small_q2k):
    """Without `in_order` the cache fills the gaps that rejected branches leave: other rounding, no other text."""
    with loaded(small_q4, in_order=False) as loose, loaded(small_q2k) as draft:
        check_lossless(loose, SpecExecPlanner(draft, depth=8, beam=4), SAMPLINGS[2], 24, PROMPTS[:1])


@by_temperature
def test_float_weights(float_target, target, sampling):
    """Float kernels hardly round, so next to nothing passes for a tie. The quantised model drafts."""
    assert float_target.capabilities.logit_tolerance <= 0.01
    check_lossless(float_target, SpecExecPlanner(target, depth=8, beam=4), sampling, 24)


@pytest.mark.covering(1)
@by_temperature
@pytest.mark.parametrize("weights", ["4 bits", "32 bits"])
def test_a_cache_of_8_bits(weights, small, small_q4, sampling):
    """Text is that of plain decoding with such a cache; the draft's has 8 bits, too."""
    path = small_q4 if weights == "4 bits" else small
    with loaded(path, kv_type="q8_0") as target, loaded(small_q4, kv_type="q8_0") as draft:
        check_lossless(target, SpecExecPlanner(draft, depth=8, beam=4), sampling, 24, PROMPTS[1:2])
        check_lossless(target, SssdPlanner(), sampling, 24, PROMPTS[:1])


@pytest.mark.exhaustive
@by_temperature
def test_the_whole_model_with_a_cache_of_8_bits(smollm2, smollm2_q2k, sampling):
    with loaded(smollm2, kv_type="q8_0") as target, loaded(smollm2_q2k, kv_type="q8_0") as draft:
        check_lossless(target, SpecExecPlanner(draft, depth=8, beam=4), sampling, 24, PROMPTS[1:2])


def test_float32_weights_are_computed_in_float32(float_target):
    """With llama.cpp's default, keys and values in 16 bits, these differ by 5e-4."""
    text, rows = list(range(5, 65)), []
    for size in (1, 60):
        session = float_target.open()
        for end in range(size, len(text), size):
            prefill(float_target, session, text[:end])
        logits, node = prefill(float_target, session, text, want_last=True)
        rows.append(logits.row(node))
        session.close()
    np.testing.assert_allclose(*rows, rtol=0, atol=1e-4)


def test_a_wrong_text_is_noticed(float_target):
    """The check above can fail: another seed's text is no tie."""
    prompt = float_target.vocab.encode(PROMPTS[0], add_bos=True, parse_special=False)
    texts = [
        write(float_target, NonePlanner(), prompt, SamplingParams(temperature=1.0, seed=seed), 12)[0] for seed in (1, 2)
    ]
    found = explain(float_target, prompt, *texts, SamplingParams(temperature=1.0, seed=1))
    assert not found.tie


def test_drafting_with_itself_pays(target, small_q4):
    prompt = target.vocab.encode(PROMPTS[2], add_bos=True, parse_special=False)
    with loaded(small_q4) as draft:
        planner = SpecExecPlanner(draft, depth=8, beam=4, tau=0.3)
        _, stats = write(target, planner, prompt, SamplingParams(temperature=1.0, seed=3), 32)
    assert stats.acceptance_length > 4


def resident_bytes():
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/statm is Linux's")
def test_memory_comes_back(small):
    """The cache alone has 2 * 2 layers * 128 * 4 bytes for each of the 2560 places: 5 MB a load."""

    def once():
        backend = load(str(small), context_length=2048, threads=1)
        session = backend.open()
        prefill(backend, session, list(range(5, 20)))
        backend.close()
        backend.close()
        session.close()

    gc.disable()  # nothing may depend on the collector
    try:
        once()
        once()
        before = resident_bytes()
        for _ in range(18):
            once()
        assert resident_bytes() - before < 40e6
    finally:
        gc.enable()


def test_two_models_at_once(small, small_q2k):
    """One at a time and side by side, they give the same logits."""

    def logits(backend):
        session = backend.open()
        last = prefill(backend, session, [1, 9, 12, 44], want_last=True)
        row = last[0].row(last[1])
        session.close()
        return row

    alone = []
    for path in (small, small_q2k):
        backend = load(str(path), **OPTIONS)
        alone.append(logits(backend))
        backend.close()
    left, right = load(str(small), **OPTIONS), load(str(small_q2k), **OPTIONS)
    together = [logits(left), logits(right)]
    left.close()
    np.testing.assert_array_equal(logits(right), alone[1])  # closing one leaves the other
    right.close()
    np.testing.assert_array_equal(together, alone)
    assert np.abs(alone[0] - alone[1]).max() > 0.1


def test_a_prompt_of_several_batches(small):
    backend = load(str(small), context_length=700, threads=1)
    story = "The lighthouse keeper wrote down the weather every morning and every evening. "
    prompt = backend.vocab.encode(story * 60, add_bos=True, parse_special=False)[:600]
    assert len(prompt) > backend.capabilities.max_nodes
    rows = []
    for size in (backend.capabilities.max_nodes, 97):
        session = backend.open()
        for end in range(size, len(prompt), size):
            prefill(backend, session, prompt[:end])
        last = prefill(backend, session, prompt, want_last=True)
        rows.append(last[0].row(last[1]))
        session.close()
    tolerance = backend.capabilities.logit_tolerance
    backend.close()
    assert rows[0].argmax() == rows[1].argmax()
    assert np.abs(rows[0] - rows[1]).max() <= tolerance


def test_a_prompt_longer_than_the_context(target):
    session, seen = target.open(), []
    prompt = [5] * target.capabilities.context_length
    with pytest.raises(ContextFull, match=r"256 tokens > 255 maximum"):
        next(
            Generation(
                target, session, NonePlanner(), prompt, SamplingParams(), max_tokens=5, budget=1,
                stats=GenerationStats(),
            ).steps(progress=lambda *done: seen.append(done))
        )  # fmt: skip
    assert session.token_ids == []
    assert seen == []
    session.close()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path, good: None, "there is no such file"),
        (lambda path, good: path.mkdir(), "is a folder"),
        (lambda path, good: path.write_bytes(b""), "is not a GGUF file"),
        (lambda path, good: path.write_bytes(b"PK\x03\x04 hello"), "is not a GGUF file"),
        (lambda path, good: path.write_bytes(good.read_bytes()[: good.stat().st_size // 2]), "is cut off: fetch"),
        (lambda path, good: path.write_bytes(good.read_bytes()[:1000]), "is damaged or cut off"),
    ],
    ids=["missing", "folder", "empty", "other", "half", "header"],
)
def test_files_that_cannot_be_loaded(tmp_path, small, make, message):
    path = tmp_path / "model.gguf"
    make(path, small)
    with pytest.raises(ModelError) as caught:
        load(str(path))
    text = str(caught.value)
    assert text.startswith(f"{path}: ")
    assert message in text
    assert not text.endswith((": ", "gave no reason"))
    assert "\n" not in text
