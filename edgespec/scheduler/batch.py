"""Composes one pass: the draft trees of several sequences, and a chunk of a prompt."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from statistics import fmean
from time import perf_counter

from edgespec.loop.backend import Capabilities
from edgespec.loop.draft_passes import run_shared
from edgespec.loop.passes import Pass, Proposed, most_nodes
from edgespec.planners.auto import AutoState
from edgespec.planners.cost import split
from edgespec.planners.path_cost import rows_added
from edgespec.scheduler.prompt_chunks import PromptChunks, can_share_passes
from edgespec.scheduler.requests import CurrentPass
from edgespec.scheduler.session_pool import Lane

BATCH = "batch"  # the account of trees that share passes
TIMES_FAIR = 2  # equal shares of a pass that one sequence's proposal may fill

Batch = list[tuple[Lane, Pass]]
Failed = list[tuple[Lane, Exception]]


def choose(lanes: Sequence[Lane], limits: Capabilities, *, read_last: bool) -> tuple[list[Lane], Lane | None]:
    """
    Args:
        lanes: those with work.
        limits: of the target.
        read_last: the last pass had a chunk of a prompt.

    Returns:
        Sequences to decode in the next pass, and the one to prefill; they alternate if they cannot share a pass.
    """
    lanes = sorted(lanes, key=lambda lane: lane.used)
    reading, writing = [lane for lane in lanes if lane.unread], [lane for lane in lanes if lane.may_write]
    shared = can_share_passes(limits)
    if reading and (shared or not writing or not read_last):
        return writing if shared else [], reading[0]
    return writing, None


def read_draft(lane: Lane, chunks: PromptChunks, pass_now: CurrentPass, *, single: bool) -> None:
    """Have the draft read one chunk of a sequence.

    Args:
        lane: its draft has something to read.
        chunks: sizes of the draft's chunks.
        pass_now: notes the pass.
        single: no other sequence has work.

    Raises:
        Exception: what the pass raises.
    """
    reading, generation = lane.draft_prompt, lane.generation
    assert reading
    assert generation
    work = chunks.next(reading, single=single)
    with pass_now.of([lane.handle] if lane.handle else [], reading.backend):
        seconds = generation.read_draft_part(reading, work)
    if seconds:
        chunks.learn(len(work.token_ids), seconds, prompt=True)


@contextmanager
def noting(failed: Failed, lane: Lane) -> Iterator[None]:
    """Have an error within end this lane's request alone."""
    try:
        yield
    except Exception as error:
        failed.append((lane, error))


def plan(
    writing: Sequence[Lane],
    reader: Lane | None,
    lanes: Sequence[Lane],
    limits: Capabilities,
    pace: AutoState | None,
    chunks: PromptChunks,
) -> tuple[Batch, Failed]:
    """
    Args:
        writing: sequences to decode, of which as many as fit get a tree.
        reader: a sequence to prefill; its chunk is the last part.
        lanes: all; those that get no tree drop their draft nodes, which take cells of the draft.
        limits: of the target.
        pace: times of its passes, and accounts of batches; None: trees take all the room of a pass.
        chunks: sizes of prompts' chunks.
    """
    generation = reader.generation if reader else None
    room = most_nodes(limits, 0)
    if generation:
        room -= chunks.rows(generation.prompt, room)
    batch, failed = plan_trees(writing, lanes, limits, room, pace, single=reader is None)
    gone = [lane for lane, _ in failed]
    if reader and generation and reader not in gone:
        taken = sum(len(one.work.token_ids) + one.work.session.unread_committed for _, one in batch)
        single = not any(lane.generation and not lane.unread for lane in lanes if lane not in gone)
        with noting(failed, reader):
            batch.append((reader, generation.prompt_pass(chunks.next(generation.prompt, taken, single=single))))
    return batch, failed


def plan_trees(
    writing: Sequence[Lane],
    lanes: Sequence[Lane],
    limits: Capabilities,
    room: int,
    pace: AutoState | None,
    *,
    single: bool,
) -> tuple[Batch, Failed]:
    """
    Args:
        writing: sequences to decode.
        lanes: as for `plan`.
        limits: of the target.
        room: rows of the pass.
        pace: as for `plan`.
        single: the pass has no prompt.

    Returns:
        Trees of the sequences that have waited longest, as many as `room` rows hold, cut to their best nodes.
    """
    group, batch, failed = in_turn(writing, room), Batch(), Failed()
    room -= sum(1 + lane.session.unread_committed for lane in group)
    for lane in lanes if len(lanes) > 1 else ():
        if lane not in group:
            with noting(failed, lane):
                lane.give_up()
    fair = -(-TIMES_FAIR * room // len(group)) if len(group) > 1 else room
    most = None if single and len(group) == 1 else min(room, fair)
    if pace and len(group) > 1 and not pace.batch(len(group)).room(BATCH):
        most = 0
    started = perf_counter()
    proposals = run_shared([lane.generation.propose(most, len(group)) for lane in group if lane.generation])
    seconds = perf_counter() - started
    results = list(zip(group, proposals, strict=True))
    failed += [(lane, one) for lane, one in results if isinstance(one, Exception)]
    found = [(lane, one) for lane, one in results if not isinstance(one, Exception)]
    sizes = best_sizes(found, limits, room, pace, seconds) if len(found) > 1 else [None] * len(found)
    for (lane, one), size in zip(found, sizes, strict=True):
        with noting(failed, lane):
            if lane.generation:
                batch.append((lane, lane.generation.cut(one, size)))
    return batch, failed


def in_turn(writing: Sequence[Lane], room: int) -> list[Lane]:
    group = list[Lane]()
    for lane in sorted(writing, key=lambda lane: lane.passed):
        room -= 1 + lane.session.unread_committed
        if room < 0:
            break
        group.append(lane)
    return group


def best_sizes(
    found: Sequence[tuple[Lane, Proposed]], limits: Capabilities, room: int, pace: AutoState | None, seconds: float
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
    length = fmean(len(lane.session.token_ids) for lane, _ in found)
    times = pace.times(round(length), len(found)) if pace else None
    curve = times.shared(1) if times else None
    added = roots = None
    if limits.paths:
        unread = [lane.session.unread_committed for lane, _ in found]
        added = [rows_added(one.tree, one.nodes, count) for (_, one), count in zip(found, unread, strict=True)]
        roots = len(unread) + sum(unread)
    return split([one.log_probs for _, one in found], room, seconds, curve, added, roots)


def learn(batch: Batch, seconds: float, limits: Capabilities, pace: AutoState | None, chunks: PromptChunks) -> None:
    works = [one.work for _, one in batch]
    nodes, trees = sum(len(work.token_ids) for work in works), [work for work in works if not work.prompt]
    has_prompt = len(trees) < len(batch)
    chunks.learn(nodes, seconds, prompt=has_prompt)
    # Rows predict no time if trees are evaluated path by path; the planner learns from passes over one tree.
    if pace and len(batch) > 1 and not (has_prompt or limits.paths):
        pace.add_pass(nodes, seconds, round(fmean(len(work.session.token_ids) for work in trees)), len(trees))


def account(batch: Batch, drafting: float, seconds: float, tokens: int, pace: AutoState) -> None:
    """Enter a pass of several trees into the batch's ledger; planners account for passes over one tree.

    Args:
        batch: the pass, of which `pace` has learned.
        drafting: seconds before it.
        seconds: of it.
        tokens: that it gained.
        pace: has the ledgers.
    """
    works = [one.work for _, one in batch]
    drafting, pace.learning_seconds = drafting + pace.learning_seconds, 0.0
    if len(batch) > 1 and not any(work.prompt for work in works):
        way = None if all(one.plain for _, one in batch) else BATCH  # also what is read again after its draft tokens
        ledger = pace.batch(len(batch))
        drafted = way or ledger.room(BATCH)  # drafting costs time also where no draft token is worth a row
        ledger.add({BATCH: drafting} if drafted else {}, way, seconds, tokens / len(batch))


def while_target_runs(batch: Batch) -> AbstractContextManager[None]:
    lane, pass_ = batch[0]
    if lane.generation and len(batch) == 1 and pass_.tree:
        return lane.generation.while_target_runs(pass_)
    return nullcontext()
