"""Composes one pass: planners propose trees of several sequences, and a prompt gives a chunk."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from statistics import fmean
from time import perf_counter
from typing import Protocol

from edgespec.loop.backend import Backend, Capabilities, Work
from edgespec.loop.draft_passes import run_shared
from edgespec.loop.passes import Pass, Proposed, Ran, most_nodes
from edgespec.planners.auto import AutoState
from edgespec.planners.cost import rows_added, split
from edgespec.scheduler.prompt_chunks import PromptChunks, can_share_passes
from edgespec.scheduler.sequence import Seq, State

BATCH = "batch"  # the account of trees that share passes
TIMES_FAIR = 2  # equal shares of a pass that one sequence's proposal may fill


class Waiter(Protocol):
    """Something for which a pass is made, unless it is cancelled."""

    cancelled: bool


class CurrentPass:
    """The pass under way; takes no lock, since a thread that holds one may end a lost stream as it collects garbage."""

    def __init__(self) -> None:
        self._closed = False
        self._now: tuple[Sequence[Waiter], Backend, int] | None = None  # replaced whole

    @contextmanager
    def of(self, waiters: Sequence[Waiter], model: Backend) -> Iterator[None]:
        """Wrap a pass for these."""
        self._now = waiters, model, model.pass_number
        self.check()
        try:
            yield
        finally:
            self._now = None

    def close(self) -> None:
        self._closed = True
        self.check()

    def check(self) -> None:
        """Interrupt the pass under way if nobody needs it, from any thread."""
        if now := self._now:
            waiters, model, pass_number = now
            if self._closed or all(one.cancelled for one in waiters):
                model.interrupt(pass_number)


@dataclass(slots=True)
class Batch:
    """
    Attributes:
        parts: sequences and their parts of the pass; a chunk of a prompt is the last.
        failed: sequences that an error ends before it.
        began: `perf_counter()` when it was begun.
    """

    parts: list[tuple[Seq, Pass]] = field(default_factory=list)
    failed: list[tuple[Seq, Exception]] = field(default_factory=list)
    began: float = 0.0

    @property
    def seqs(self) -> list[Seq]:
        return [seq for seq, _ in self.parts]

    @contextmanager
    def noting(self, seq: Seq) -> Iterator[None]:
        """Note an error within, which ends this sequence and no other."""
        try:
            yield
        except Exception as error:
            self.failed.append((seq, error))

    def during(self) -> AbstractContextManager[None]:
        """Context of its pass; the draft of a sequence that shares it with no other may go on meanwhile."""
        seq, pass_ = self.parts[0]
        if seq.generation and len(self.parts) == 1 and pass_.tree:
            return seq.generation.during(pass_)
        return nullcontext()


def choose(seqs: Sequence[Seq], limits: Capabilities, *, must_write: bool) -> tuple[list[Seq], Seq | None]:
    """
    Args:
        seqs: those with work.
        limits: of the target.
        must_write: as of `PromptChunks`.

    Returns:
        Sequences to decode in the next pass, and the one to prefill; they take turns if they cannot share a pass.
    """
    seqs = sorted(seqs, key=lambda seq: seq.age)
    reader, writing = next_reader([seq for seq in seqs if seq.state is State.READING]), [s for s in seqs if s.may_write]
    shared = can_share_passes(limits)
    if reader and (shared or not writing or not must_write):
        return writing if shared else [], reader
    return writing, None


def next_reader(reading: Sequence[Seq]) -> Seq | None:
    """The sequence that has least to read; what others read meanwhile counts for one that waits.

    So a short prompt is read before the rest of a long one, and no prompt waits for more tokens than it has.
    """
    return min(reading, key=lambda seq: (seq.unread - seq.waited, seq.age), default=None)


def read_draft(seq: Seq, seqs: Sequence[Seq], chunks: PromptChunks, pass_now: CurrentPass) -> None:
    """Have the draft read one chunk of a sequence.

    Args:
        seq: its draft has something to read.
        seqs: all that have work.
        chunks: sizes of the draft's chunks.
        pass_now: notes the pass.

    Raises:
        Exception: what the pass raises.
    """
    reading, generation = seq.draft_prompt, seq.generation
    assert reading
    assert generation
    work = chunks.next(reading, single=len(seqs) == 1)
    _wait_for(work, seq, [one for one in seqs if one.draft_prompt])
    with pass_now.of([seq], reading.backend):
        seconds = generation.read_draft_part(reading, work)
    if seconds:
        chunks.learn(len(work.token_ids), seconds, prompt=True)


def compose(
    writing: Sequence[Seq],
    reader: Seq | None,
    seqs: Sequence[Seq],
    limits: Capabilities,
    pace: AutoState | None,
    chunks: PromptChunks,
) -> Batch:
    """
    Args:
        writing: sequences to decode, of which as many as fit get a tree.
        reader: a sequence to prefill; its chunk is the last part.
        seqs: all that have slots; those that get no tree drop their draft nodes, which take cells of the draft.
        limits: of the target.
        pace: times of its passes, and accounts of batches; None: trees take all the room of a pass.
        chunks: sizes of prompts' chunks.
    """
    generation = reader.generation if reader else None
    room = most_nodes(limits, 0)
    if generation:
        room -= chunks.rows(generation.prompt, room)
    batch = plan_trees(writing, seqs, limits, room, pace, single=reader is None)
    gone = [seq for seq, _ in batch.failed]
    if reader and generation and reader not in gone:
        taken = sum(len(one.work.token_ids) + one.work.session.unread_committed for _, one in batch.parts)
        single = not any(seq.state is State.WRITING for seq in seqs if seq not in gone)
        with batch.noting(reader):
            chunk = chunks.next(generation.prompt, taken, single=single)
            _wait_for(chunk, reader, [seq for seq in seqs if seq.state is State.READING])
            batch.parts.append((reader, Pass(chunk)))
    return batch


def _wait_for(chunk: Work, reader: Seq, reading: Sequence[Seq]) -> None:
    for seq in reading:
        seq.waited += len(chunk.token_ids) if seq is not reader else 0


def plan_trees(
    writing: Sequence[Seq],
    seqs: Sequence[Seq],
    limits: Capabilities,
    room: int,
    pace: AutoState | None,
    *,
    single: bool,
) -> Batch:
    """
    Args:
        writing: sequences to decode.
        seqs: as for `compose`.
        limits: of the target.
        room: rows of the pass.
        pace: as for `compose`.
        single: the pass has no prompt.

    Returns:
        Trees of the sequences that have waited longest, as many as `room` rows hold, cut to their best nodes.
    """
    group, batch = in_turn(writing, room), Batch(began=perf_counter())
    room -= sum(1 + seq.unread_committed for seq in group)
    for seq in seqs:
        if seq not in group:
            with batch.noting(seq):
                seq.give_up()
    fair = -(-TIMES_FAIR * room // len(group)) if len(group) > 1 else room
    most = None if single and len(group) == 1 else min(room, fair)
    if pace and len(group) > 1 and not pace.batch(len(group)).room(BATCH):
        most = 0
    started = perf_counter()
    proposals = run_shared([seq.generation.propose(most, len(group)) for seq in group if seq.generation])
    seconds = perf_counter() - started
    results = list(zip(group, proposals, strict=True))
    batch.failed += [(seq, one) for seq, one in results if isinstance(one, Exception)]
    found = [(seq, one) for seq, one in results if not isinstance(one, Exception)]
    sizes = best_sizes(found, limits, room, pace, seconds) if len(found) > 1 else [None] * len(found)
    for (seq, one), size in zip(found, sizes, strict=True):
        with batch.noting(seq):
            if seq.generation:
                batch.parts.append((seq, seq.generation.cut(one, size)))
    return batch


def in_turn(writing: Sequence[Seq], room: int) -> list[Seq]:
    group = list[Seq]()
    for seq in sorted(writing, key=lambda seq: seq.passed):
        room -= 1 + seq.unread_committed
        if room < 0:
            break
        group.append(seq)
    return group


def best_sizes(
    found: Sequence[tuple[Seq, Proposed]], limits: Capabilities, room: int, pace: AutoState | None, seconds: float
) -> list[int]:
    """
    Args:
        found: a proposal of each sequence.
        limits: of the target.
        room: rows of the pass besides the roots.
        pace: has the target's pass times; None: trees take all the room of a pass.
        seconds: spent on drafting.

    Returns:
        Number of draft nodes of each tree for most expected tokens per second.
    """
    length = fmean(len(seq.generation.token_ids) - 1 for seq, _ in found if seq.generation)
    times = pace.times(round(length), len(found)) if pace else None
    curve = times.shared(1) if times else None
    added = roots = None
    if limits.paths:
        unread = [seq.unread_committed for seq, _ in found]
        added = [rows_added(one.tree, one.nodes, count) for (_, one), count in zip(found, unread, strict=True)]
        roots = len(unread) + sum(unread)
    return split([one.log_probs for _, one in found], room, seconds, curve, added, roots)


def learn(batch: Batch, ran: Ran, limits: Capabilities, pace: AutoState | None, chunks: PromptChunks) -> None:
    """Learn what a pass takes, before its tokens are committed."""
    works = [one.work for _, one in batch.parts]
    nodes, trees = sum(len(work.token_ids) for work in works), [work for work in works if not work.prompt]
    has_prompt = len(trees) < len(works)
    chunks.learn(nodes, ran.seconds, prompt=has_prompt)
    if pace and ran.experts and len(works) == 1 and not (has_prompt or limits.paths):
        pace.add_experts(nodes, ran.experts)
    # Rows predict no time if trees are evaluated path by path; the planner learns from passes over one tree.
    if pace and len(works) > 1 and not (has_prompt or limits.paths):
        pace.add_pass(nodes, ran.seconds, round(fmean(len(work.session.token_ids) for work in trees)), len(trees))


def account(batch: Batch, ran: Ran, tokens: int, pace: AutoState) -> None:
    """Enter a pass of several trees into the batch's ledger; planners account for passes over one tree.

    Args:
        batch: of which `pace` has learned.
        ran: about its pass.
        tokens: that it gained.
        pace: has the ledgers.
    """
    drafting, pace.learning_seconds = ran.began - batch.began + pace.learning_seconds, 0.0
    count = len(batch.parts)
    if count > 1 and not any(one.work.prompt for _, one in batch.parts):
        way = None if all(one.plain for _, one in batch.parts) else BATCH  # also what is read again after its drafts
        ledger = pace.batch(count)
        drafted = way or ledger.room(BATCH)  # drafting costs time also where no draft token is worth a row
        ledger.add({BATCH: drafting} if drafted else {}, way, ran.seconds, tokens / count)
