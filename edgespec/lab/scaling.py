"""Texts of one prompt that a draft writes in chunks, of which the target rewrites some: ATTS (arXiv 2509.15148).

A chunk's score is its perplexity under the target: exp of the mean of -log p(token | the tokens before it). Its p-value
is the share of the latest scores, its own among them, that are at least as high. A chunk whose p-value is at most
`reject` is rejected, and the target writes another from the same place. Were scores exchangeable, at most this share
would be rejected on average. They are not: first chunks score higher than later ones, and are rejected more often. All
this says nothing about the answers.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from inspect import signature
from math import exp
from statistics import fmean
from typing import Any

import numpy as np

from edgespec.errors import (
    ContextFull,
    UsageError,
    check_call,
    check_number,
    check_text,
    check_whole,
    must_be,
    no_such,
)
from edgespec.lab.thoughts import best_first
from edgespec.loop.backend import Capabilities, Work
from edgespec.loop.hint_texts import HintTexts
from edgespec.loop.passes import Prefill, check_room, common_prefix, run
from edgespec.loop.same_vocab import check_same_vocab
from edgespec.loop.sampling import SamplingParams, log_sum_exp
from edgespec.loop.shapes import whole_tiles
from edgespec.loop.stats import GenerationStats
from edgespec.model import MOST_BRANCHES, Model, Prompt, seeded
from edgespec.scheduler import drive
from edgespec.scheduler.events import GenerationResult
from edgespec.scheduler.prompt_chunks import can_share_passes
from edgespec.scheduler.requests import PassCounter, Request
from edgespec.scheduler.scheduler import Call, Scheduler
from edgespec.scheduler.sequence import Slot
from edgespec.scheduler.session_pool import SessionPool

LARGEST = 700.0  # exp of more is too large for a float


@dataclass(slots=True, repr=False)
class ScaleResult(GenerationResult):
    """The text that `scale` chose, with all others.

    Attributes:
        samples: all texts, of seed, seed + 1, and so on; their `stats` count the passes for perplexities, too.
        answers: of each text; None: it has none.
        votes: number of texts with each answer, most first.
        chunks: number of the draft's chunks whose perplexity the target computed.
        rejected: share of them that the target wrote again.
        passes: of the target, over the prompt and for perplexities, too.
        calibration: the latest perplexities of chunks.
    """

    samples: list[GenerationResult] = field(default_factory=list)
    answers: list[str | None] = field(default_factory=list)
    votes: dict[str, int] = field(default_factory=dict)
    chunks: int = 0
    rejected: float = 0.0
    passes: int = 0
    calibration: list[float] = field(default_factory=list)

    def __repr__(self) -> str:
        about = f"{self.rejected:.0%} of {self.chunks} chunks rejected, {self.passes} passes"
        return f"<ScaleResult {self.text!r}: votes {self.votes}, {about}, {self.stats.approximate}>"


@dataclass(slots=True)
class Sample:
    """One text: `request` as a whole, and what is written of it."""

    request: Request
    token_ids: list[int] = field(default_factory=list)
    stats: GenerationStats = field(default_factory=GenerationStats)

    @property
    def so_far(self) -> list[int]:
        return [*self.request.prompt_ids, *self.token_ids]

    @property
    def left(self) -> int:
        """Most tokens that may follow."""
        return 0 if self.stats.finish_reason == "stop" else self.request.max_tokens - len(self.token_ids)

    def next(self, chunk: int, rejected: Sequence[int] = ()) -> Request:
        """The request for a chunk; the target may copy draft tokens from the one that it rejected."""
        prompt = self.so_far
        hints = HintTexts(prompt, rejected) if rejected else None
        return replace(self.request, prompt_ids=prompt, max_tokens=min(chunk, self.left), hint_texts=hints)

    def add(self, drafted: GenerationResult, written: GenerationResult | None, scoring: PassCounter) -> None:
        """Add a chunk; `scoring` has the passes of all texts for scores of this round."""
        chosen, stats = written or drafted, self.stats
        token_ids, part = chosen.token_ids, chosen.stats
        self.token_ids += token_ids
        stats.planner, stats.backend, stats.exact = part.planner, part.backend, part.exact
        stats.seed, stats.finish_reason = part.seed, part.finish_reason
        stats.tokens, stats.prompt_tokens = len(self.token_ids), len(self.request.prompt_ids)
        stats.tokens_by_source["target" if written else "draft"] += len(token_ids)
        stats.drafted += len(drafted.token_ids)
        stats.draft_seconds += drafted.stats.prefill_seconds + drafted.stats.seconds
        stats.passes += scoring.passes
        stats.target_seconds += scoring.seconds
        if written:
            stats.passes += part.passes
            stats.target_seconds += part.prefill_seconds + part.seconds


@dataclass(slots=True)
class Calibration:
    """The latest `size` scores, or all of the latest round if these are more."""

    size: int
    scores: list[float] = field(default_factory=list)

    def p_values(self, found: Sequence[float]) -> list[float]:
        """Enter the scores of one round; each is compared with earlier ones and with the others of its round."""
        self.scores = [*self.scores, *found][-max(self.size, len(found)) :]
        return [sum(other >= one for other in self.scores) / len(self.scores) for one in found]


@dataclass(slots=True)
class Scaled:
    """Texts of one prompt, and the numbers of the draft's chunks that were scored and rejected."""

    samples: list[Sample]
    scored: int = 0
    rejected: int = 0


def write(
    target: Scheduler,
    draft: Scheduler,
    requests: Sequence[Request],
    chunk: int,
    reject: float,
    calibration: Calibration,
    counter: PassCounter,
    progress: Callable[[int, int], None] | None = None,
) -> Scaled:
    """
    Args:
        target: scores chunks, and writes the rejected ones.
        draft: writes chunks.
        requests: a text each, of one prompt.
        chunk: tokens.
        reject: largest p-value of a chunk that is rejected.
        calibration: scores of earlier chunks; gets the new ones.
        counter: of the target's passes.
        progress: called after every round with (tokens written, most tokens).
    """
    done, most = Scaled([Sample(request) for request in requests]), sum(request.max_tokens for request in requests)
    while writing := [sample for sample in done.samples if sample.left > 0]:
        drafted = drive.results_of(draft, [sample.next(chunk) for sample in writing])
        texts = [(sample.so_far, one.token_ids) for sample, one in zip(writing, drafted, strict=True)]
        before = replace(counter)
        p_values = calibration.p_values(perplexities(target, requests[0].prompt_ids, texts, counter))
        scoring = PassCounter(counter.passes - before.passes, counter.seconds - before.seconds)
        rejected = [number for number, p_value in enumerate(p_values) if p_value <= reject]
        asked = [writing[number].next(chunk, drafted[number].token_ids) for number in rejected]
        again = drive.results_of(target, [replace(one, counter=counter) for one in asked])
        written = dict(zip(rejected, again, strict=True))
        for number, sample in enumerate(writing):
            sample.add(drafted[number], written.get(number), scoring)
        done.scored, done.rejected = done.scored + len(writing), done.rejected + len(rejected)
        if progress:
            progress(most - sum(sample.left for sample in done.samples), most)
    return done


@dataclass(slots=True)
class ScoredText:
    """
    Attributes:
        given: number of its first tokens, which are not scored.
        losses: -log p of the scored tokens, by position: a part may be read again.
    """

    token_ids: Sequence[int]
    given: int
    losses: dict[int, float] = field(default_factory=dict)

    @property
    def first(self) -> int:
        """Position of the first token whose logits are needed: those of the last given one score the next."""
        return self.given - 1

    @property
    def perplexity(self) -> float:
        return exp(min(fmean(self.losses.values()), LARGEST))


Part = tuple[Slot, Prefill, ScoredText]


def perplexities(
    scheduler: Scheduler,
    prompt_ids: Sequence[int],
    texts: Sequence[tuple[Sequence[int], Sequence[int]]],
    counter: PassCounter,
) -> list[float]:
    """
    Args:
        scheduler: of the model whose perplexity it is; its row class has no `blocks`.
        prompt_ids: with which all texts begin.
        texts: (the tokens before, the tokens that are scored).
        counter: of the passes.

    Returns:
        The perplexity of each text's scored tokens, found in passes that the texts share.

    Raises:
        ContextFull: a text does not fit, though no other request holds cells.
    """
    found = [ScoredText([*before, *scored], len(before)) for before, scored in texts]
    left = found
    while left:

        def read(call: Call[int], left: Sequence[ScoredText] = left) -> int:
            pool = call.pool
            group = left[: max(1, _fitting(pool, left))]
            slots = _slots(pool, group)
            if pool.most_held(prompt_ids) < len(prompt_ids):
                # The other sessions fork, so what they hold need not take cells.
                for slot in slots[1:]:
                    pool.evict(slot)
                _read(scheduler, call, slots[:1], [ScoredText(prompt_ids, len(prompt_ids))], counter)
            _read(scheduler, call, slots, group, counter)
            return len(group)

        left = left[_with_room_for(scheduler, left[0], counter, read) :]
    return [text.perplexity for text in found]


def _with_room_for(
    scheduler: Scheduler, text: ScoredText, counter: PassCounter, read: Callable[[Call[int]], int]
) -> int:
    """Call `read` between two steps, with an idle session and cells for a text; other requests go on until it has them.

    To wait, a request takes its turn in the queue and gets a session, which it gives up here; `close` ends it.

    Returns:
        What `read` returns.
    """
    before, most = list(text.token_ids[: text.given]), len(text.token_ids) - text.first
    claim = Request(before, SamplingParams(), most, plain=True, counter=counter)

    def read_at_once(call: Call[int]) -> int:
        return read(call) if _fitting(call.pool, [text]) else 0

    def take_over(call: Call[int]) -> int:
        seq = next((one for one in call.pool.seqs if one.request is claim), None)
        if seq is None:  # it has ended since
            return 0
        call.pool.release(seq)
        return read(call)

    while True:
        if count := scheduler.call(read_at_once):
            return count
        with closing(drive.events(scheduler, claim)) as events:
            drive.chunks_in(next(events))
            if count := scheduler.call(take_over):
                return count


def _fitting(pool: SessionPool, texts: Sequence[ScoredText]) -> int:
    """Number of the first texts that the idle sessions hold at once; beside no other request at least one."""
    cells, count, taken = pool.limits.cells, 0, sum(len(slot.session.token_ids) for slot in pool.slots if slot.seq)
    for text in texts[: sum(slot.planner is not None for slot in pool.idle)]:
        taken += len(text.token_ids)
        if (count or pool.seqs) and cells is not None and taken > cells:
            break
        count += 1
    return count


def _slots(pool: SessionPool, texts: Sequence[ScoredText]) -> list[Slot]:
    """An idle session for each text, the one that holds most of it; others make room."""
    free, found = pool.idle, list[Slot]()
    for text in texts:
        found.append(max(free, key=lambda slot: common_prefix(slot.session.token_ids, text.token_ids)))
        free.remove(found[-1])
    needed = sum(len(text.token_ids) for text in texts) + sum(
        len(slot.session.token_ids) for slot in pool.slots if slot.seq
    )
    for slot in free:
        if (
            pool.limits.cells is not None
            and needed + sum(len(one.session.token_ids) for one in free) > pool.limits.cells
        ):
            pool.evict(slot)
    return found


def _read(
    scheduler: Scheduler, call: Call[int], slots: Sequence[Slot], texts: Sequence[ScoredText], counter: PassCounter
) -> None:
    """Read texts into sessions, and find the losses of their scored tokens."""
    try:
        _read_texts(scheduler, call, slots, texts, counter)
    except Exception:
        for slot in slots:
            call.pool.renew(slot)
        scheduler.check_open()  # a pass that `close` has interrupted
        raise


def _read_texts(
    scheduler: Scheduler, call: Call[int], slots: Sequence[Slot], texts: Sequence[ScoredText], counter: PassCounter
) -> None:
    target, pool, parts = scheduler.target, call.pool, list[Part]()
    for slot, text in zip(slots, texts, strict=True):
        slot.looked_at = False
        first = text.first if can_share_passes(target.capabilities) else whole_tiles(text.first)
        # `prepare` finds the session a beginning, as for a prompt up to `first`. That is cut before it: its logits are
        # needed again.
        pool.prepare(slot, text.token_ids[: first + 1])
        Prefill(target, slot.session, text.token_ids[:first]).resume()
        parts.append((slot, Prefill(target, slot.session, text.token_ids), text))
    while unread := [part for part in parts if part[1].unread]:
        scheduler.check_open()
        batch = _plan(unread, target.capabilities)
        try:
            with scheduler.pass_now.of([call], target):
                logits, ran = run(target, works := [work for _, work in batch])
        except ContextFull:
            again = [slot for (slot, reading, _), _ in batch if reading.may_begin_again()]
            if not again:
                raise
            for slot in again:
                pool.empty(slot)
            continue
        scheduler.counts.add_pass(ran, works, [counter])
        for ((_, reading, text), work), rows in zip(batch, logits, strict=True):
            at = len(reading.session.token_ids)
            for node in work.wanted.tolist():
                row, token_id = rows.view(node), text.token_ids[at + node + 1]
                text.losses[at + node + 1] = log_sum_exp(row) - float(row[token_id])
            reading.commit(work)


def _plan(unread: Sequence[Part], limits: Capabilities) -> list[tuple[Part, Work]]:
    """The next pass: of as many texts as it has room for, a piece each."""
    batch, shared, exact = list[tuple[Part, Work]](), can_share_passes(limits), limits.exact
    rows = min(limits.max_nodes, exact.prompts.most) if exact else limits.max_nodes
    wanted = limits.max_wanted
    for part in unread:
        _, reading, text = part
        at, more, whole = reading.resume(), reading.session.unread_committed, len(text.token_ids)
        size = min(rows - more, max(0, text.first - at) + wanted)
        if not shared and batch and at != whole_tiles(at):
            break  # only the first prompt of a pass may go on within a tile: llama.cpp pads the cells before the others
        if not shared and at + size < whole and whole_tiles(at + size) > at:
            size = whole_tiles(at + size) - at
        if size < 1:
            break
        work = reading.work(size)
        if batch and (work.short != batch[0][1].short or len(work.token_ids) > size):
            break
        if work.short and exact and exact.short:
            rows = min(rows, exact.short.most)
        nodes = np.arange(len(work.token_ids), dtype=np.int32)
        asked = nodes[(at + nodes >= text.first) & (at + nodes + 1 < whole)]
        rows, wanted = rows - more - len(nodes), wanted - len(asked)
        batch.append((part, replace(work, wanted=asked)))
    return batch


def scale(
    target: Model,
    draft: Model | None,
    prompt: Prompt,
    *,
    samples: int = 8,
    chunk: int = 128,
    reject: float = 0.4,
    answer: str | Callable[[str], str | None] | None = None,
    score: Callable[[list[str]], Sequence[float]] | None = None,
    window: int = 64,
    calibration: Sequence[float] = (),
    max_tokens: int | None = 512,
    temperature: float = 0.7,
    progress: Callable[[int, int], None] | None = None,
    **sampling: Any,
) -> ScaleResult:
    """Choose one of several texts. The draft writes them in chunks, and the target those again that surprise it most.

    This is approximate: with `reject` 0 texts are the draft's, with 1 or without a draft the target's. `reject` bounds
    the mean share of chunks that the target writes, not the quality of answers. Load both with `parallel=samples`.

    Args:
        target: computes the perplexity of each chunk, and writes those that are rejected.
        draft: a model of its own with the target's vocabulary.
        prompt: as for `Model.stream`; so are `max_tokens`, `temperature` and `sampling` (fields of `SamplingParams`).
        samples: number of texts; from 1 to 1024.
        chunk: tokens of a chunk.
        reject: a chunk is rejected if at most this share of the latest perplexities is as high as its own.
        answer: a regular expression, whose last match (its first group) is a text's answer, or a function that finds
            it; the answer of most texts wins. None: `score` alone decides.
        score: a number for each text, by which equal votes are decided. Default: the first, or the least perplexity.
        window: number of latest perplexities, which begin with `calibration` (of an earlier `ScaleResult`).
        progress: called with (tokens written, most tokens) after every round of chunks.
    """
    for name, model in (("target", target), ("draft", target if draft is None else draft)):
        if not isinstance(model, Model):
            raise must_be(name, model, "a model of edgespec.load")
    samples, chunk = check_whole("samples", samples, 1, MOST_BRANCHES), check_whole("chunk", chunk, 1)
    reject = check_number("reject", reject, lambda share: 0 <= share <= 1, "from 0 to 1") if draft else 1.0
    if not isinstance(calibration, Sequence):
        raise must_be("calibration", calibration, "a list of scores")
    known = [check_number("a score in calibration", one, lambda value: value > 0, "above 0") for one in calibration]
    latest, find = Calibration(check_whole("window", window, 1), known), _finder(answer)
    check_call("score", score)
    check_call("progress", progress)
    known_names = dict.fromkeys([*signature(scale).parameters, *SamplingParams.__dataclass_fields__])
    for name in sampling.keys() - known_names:
        raise no_such("argument", name, known_names)
    if not isinstance(target.decoder, Scheduler):
        raise UsageError("several targets give no scores: load the target without targets and cluster")
    exact, both_write = target.target.capabilities.exact, 0 < reject < 1
    if exact and exact.blocks and (both_write or not (find or score)):
        raise UsageError(
            'scores need passes that texts share, which the target\'s row class forbids: load it with exact="off"'
        )
    first = target.request(prompt, max_tokens=max_tokens, temperature=temperature, **sampling)
    params, room = first.sampling, target.target.capabilities.context_length
    if draft:
        check_same_vocab(target.target.vocab, draft.target.vocab, writes=True)
        check_room(draft.target, len(first.prompt_ids))
        room = min(room, draft.target.capabilities.context_length)
    first = replace(first, max_tokens=min(first.max_tokens, room - len(first.prompt_ids)))
    done, counter = Scaled([]), PassCounter()
    if draft and both_write:
        if params.presence_penalty or params.frequency_penalty:
            raise UsageError("presence_penalty and frequency_penalty would count in one chunk only: leave them at 0")
        requests = seeded(first, samples)
        done = write(target.scheduler, draft.scheduler, requests, chunk, reject, latest, counter, progress)
        found = [GenerationResult(target.decode(one.token_ids), one.token_ids, one.stats) for one in done.samples]
    else:
        writer = draft if draft and not reject else target
        hint_texts = writer.hint_texts(first.prompt_ids, None, samples)
        first = replace(first, hint_texts=hint_texts, counter=counter if writer is target else None)
        found = writer.answer(seeded(first, samples))
        if progress:
            progress(samples * first.max_tokens, samples * first.max_tokens)
    answers = [find(one.text) if find else None for one in found]
    for given in answers:
        if not isinstance(given, str | None):
            raise must_be("an answer", given, "a text, or None")
    votes = Counter(given for given in answers if given is not None)
    winners: set[str | None] = {given for given, count in votes.items() if count == max(votes.values())}
    best = [one for one, given in zip(found, answers, strict=True) if given in winners or not winners]
    if score:
        best = best_first(best, score)
    elif not find:
        texts = [(first.prompt_ids, one.token_ids) for one in found]
        losses = perplexities(target.scheduler, first.prompt_ids, texts, counter)
        best = [found[losses.index(min(losses))]]
    models = [*([target] if reject else []), *([draft] if draft and reject < 1 else [])]
    words = dict.fromkeys([*(one.approximate for one in models if one.approximate), f"scale reject {reject:g}"])
    for one in found:
        one.stats.approximate = ", ".join(words)
    return ScaleResult(
        best[0].text, best[0].token_ids, best[0].stats, found, answers, dict(votes.most_common()), done.scored,
        done.rejected / max(1, done.scored), counter.passes, latest.scores,
    )  # fmt: skip


def _finder(answer: str | Callable[[str], str | None] | None) -> Callable[[str], str | None] | None:
    if answer is None or callable(answer):
        return answer
    try:
        pattern = re.compile(check_text("answer", answer))
    except re.error as error:
        raise must_be("answer", answer, f"a regular expression: {error}") from error

    def last(text: str) -> str | None:
        *_, match = [None, *pattern.finditer(text)]
        return match[min(1, pattern.groups)] if match else None

    return last
