"""The first token is sampled from the logits of the prompt's last row, which needs no pass of its own."""

from dataclasses import dataclass

import numpy as np
import pytest
from alone import written
from edgespec.backends.common.row_logits import RowLogits
from edgespec.backends.llamacpp.cells import Rows
from reference.backend import ReferenceBackend, random_model
from test_scheduler import CONTEXT, DRAFT, LONG, MODEL, PROMPTS, Reader, planners, run

from edgespec.loop.backend import Backend
from edgespec.loop.passes import prefill
from edgespec.loop.sampling import Noise, SamplingParams, sample
from edgespec.loop.shapes import BatchInvariance, RowClass
from edgespec.loop.stats import GenerationStats
from edgespec.measure.lossless import replay
from edgespec.planners.none import NonePlanner
from edgespec.scheduler import drive
from edgespec.scheduler.events import Wrote
from edgespec.scheduler.requests import Request
from edgespec.scheduler.scheduler import Scheduler
from edgespec.scheduler.targets.coordinator import Targets
from edgespec.scheduler.targets.places import threads
from edgespec.scheduler.targets.proposer import DraftProposer
from edgespec.scheduler.targets.verifier import describe

PLANNERS = ["none", "sssd", "specexec", "auto"]
RECURRENT = random_model(1, vocab_size=48, sharpness=3.0, recurrent=True)
CLASSES = {
    "narrow": BatchInvariance("narrow", RowClass(1, 7), RowClass(16, 60)),
    "short": BatchInvariance("narrow", RowClass(1, 7), RowClass(32, 60), RowClass(8, 31)),
    "blocks": BatchInvariance("narrow", RowClass(1, 7), RowClass(1, 32), blocks=True),
}


class Apart(ReferenceBackend):
    """Prompts round so differently that another token is best. Notes the number of prompts of each pass."""

    def __init__(self, exact="narrow", sessions=3, model=MODEL):
        super().__init__(model, context_length=CONTEXT, max_nodes=60, sessions=sessions)
        self.passes = []
        if exact:
            self.keep_to(CLASSES[exact])

    def forward(self, batch):
        found = super().forward(batch)
        self.passes.append(sum(work.prompt for work in batch))
        return [
            RowLogits({node: np.roll(row, 7) for node, row in logits.rows.items()}) if work.prompt else logits
            for work, logits in zip(batch, found, strict=True)
        ]


def ask(scheduler, prompt, temperature=0.7, seed=1, max_tokens=8, **more):
    reader = Reader(scheduler, prompt, temperature, seed, max_tokens, **more)
    run(scheduler)
    assert reader.ended.error is None
    return reader


def right(key, text, exact="narrow", model=MODEL):
    """The text is what plain decoding writes after a fresh prompt, and its first token is of the prompt's class."""
    prompt, temperature, seed, count = key
    backend, sampling = Apart(exact, model=model), SamplingParams(temperature=temperature, seed=seed)
    logits, node = prefill(backend, backend.open(), PROMPTS[prompt], want_last=True)
    first = sample(logits.row(node), len(PROMPTS[prompt]), sampling, Noise(seed, 48))
    whole = len(text) == count or text[-1] == backend.vocab.eos_id
    return whole and text[0] == first and replay(backend, PROMPTS[prompt], text, sampling) == []


@pytest.mark.parametrize("name", PLANNERS)
def test_the_pass_that_ends_a_prompt_gives_the_first_token(name):
    target = Apart()
    scheduler = Scheduler(target, planners(name, 3), budget=6)
    reader = ask(scheduler, 2, max_tokens=1)
    assert (target.passes, len(reader.tokens), reader.stats.passes) == ([1], 1, 0)
    assert (reader.stats.finish_reason, reader.stats.summary()[:22]) == ("length", "1 tokens, 0.0 tokens/s")
    [event] = [event for event in reader.events if isinstance(event, Wrote)]
    assert (event.step.tree.token_ids.tolist(), event.step.path) == (PROMPTS[2][-1:], [0])
    scheduler.close()


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", PLANNERS)
@pytest.mark.parametrize("model", [MODEL, RECURRENT], ids=["", "recurrent"])
def test_the_same_question_again_needs_no_pass_over_the_prompt(name, model):
    target = Apart(None, model=model)
    scheduler = Scheduler(target, planners(name, 3), budget=6)
    ask(scheduler, 4)
    target.passes.clear()
    again = ask(scheduler, 4, seed=2, max_tokens=1)
    assert (again.stats.cached_tokens, target.passes) == (len(LONG), [])
    choices = [Reader(scheduler, 4, 0.7, seed) for seed in range(3)]
    run(scheduler)
    assert sum(target.passes) == 0
    for reader in (again, *choices):
        assert right(reader.key, reader.tokens, None, model)
    scheduler.close()


@pytest.mark.covering(1)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("name", PLANNERS)
@pytest.mark.parametrize("exact", CLASSES)
def test_the_text_does_not_depend_on_what_was_cached(exact, name, temperature, tmp_path):
    """Fresh, asked again, forked, shorter and longer than what is held, and loaded, where the row is read again."""
    for prompt in (1, 2, 4):
        scheduler = Scheduler(Apart(exact), planners(name, 3), budget=6)
        seen = [ask(scheduler, prompt, temperature) for _ in range(2)]
        other = Reader(scheduler, prompt, temperature, max_tokens=30)
        while not other.tokens:
            scheduler.step()
        seen += [ask(scheduler, prompt, temperature), other]
        scheduler.save(tmp_path / "kept")
        scheduler.close()
        scheduler = Scheduler(Apart(exact), planners(name, 3), budget=6)
        scheduler.load(tmp_path / "kept")
        seen += [ask(scheduler, one, temperature) for one in (prompt, 5, prompt)]
        scheduler.forget()
        seen.append(ask(scheduler, prompt, temperature))
        scheduler.close()
        texts = {(reader.key, *reader.tokens) for reader in seen}
        assert len(texts) == len({reader.key for reader in seen})
        assert all(right(key, text, exact) for key, *text in texts)


@dataclass(frozen=True)
class ApartSpec:
    def open(self) -> Backend:
        return Apart(sessions=1)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_several_targets_write_the_same_first_token(temperature):
    draft = DraftProposer(ReferenceBackend(DRAFT, context_length=CONTEXT), 48)
    described = threads(1)[0].executor.submit(describe, ApartSpec()).result()
    made = Targets(Apart().vocab, described, ApartSpec(), threads(2), draft, lookahead=2)
    for _ in range(2):
        for prompt in (2, 4):
            stats, sampling = GenerationStats(), SamplingParams(temperature=temperature, seed=1)
            events = drive.events(made, Request(PROMPTS[prompt], sampling, 12), stats)
            text = [chunk.token_id for event in events for chunk in drive.chunks_in(event)]
            assert right((prompt, temperature, 1, 12), text)
            assert stats.gained == len(text) - 1 >= stats.passes
    made.close()


def test_a_session_without_the_row_reads_it_again():
    """As in `edgespec bench`, whose generations share a session: the last row is read in a prompt's class."""
    target = Apart(sessions=1)
    session = target.open()
    texts = [written(target, NonePlanner(), LONG, session=session, max_tokens=6)[0] for _ in range(2)]
    assert texts[0] == texts[1]
    assert sum(target.passes) == 4  # three, and one of a row


def test_the_last_row_of_a_prompt_does_not_pay_for_the_rows_of_its_class():
    """The output matrix of a big vocabulary takes as long as some layers."""
    rows = Rows([*range(9)], [*range(9)], [[0]] * 9, [8])
    rows.fill(RowClass(16, 60), RowClass(1, 7), 1)
    assert (len(rows.tokens), rows.wanted) == (16, [8])
    rows.fill(RowClass(16, 60), RowClass(4, 60, 4), 1)
    assert rows.wanted == [8, 13, 14, 15]
