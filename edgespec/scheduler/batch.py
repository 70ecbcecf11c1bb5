"""One pass put together: the draft trees of several sequences, and a chunk of a prompt."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from statistics import fmean
from time import perf_counter

from edgespec.loop.backend import Capabilities, Work
from edgespec.loop.draft_passes import run_shared
from edgespec.loop.pass_times import PassTimes
from edgespec.loop.passes import most_nodes
from edgespec.loop.tree import DraftTree, best_nodes
from edgespec.planners.cost import split
from edgespec.planners.path_cost import rows_added
from edgespec.scheduler.prompt_chunks import PromptChunks, can_share_passes
from edgespec.scheduler.session_pool import Lane

TIMES_FAIR = 2  # a sequence may draft this multiple of its share of a pass: predictable ones use what others leave

Batch = list[tuple[Lane, Work]]
Failed = list[tuple[Lane, Exception]]  # sequences whose trees could not be planned


def choose(lanes: Sequence[Lane], limits: Capabilities, *, read_last: bool) -> tuple[list[Lane], Lane | None]:
    """Sequences to decode in the next pass, and one whose prompt is read.

    If prompts and trees cannot share a pass, they alternate. `read_last`: the last pass read a prompt.
    """
    lanes = sorted(lanes, key=lambda lane: lane.used)
    reading, writing = [lane for lane in lanes if lane.unread], [lane for lane in lanes if not lane.unread]
    shared = can_share_passes(limits)
    if reading and (shared or not writing or not read_last):
        return writing if shared else [], reading[0]
    return writing, None


def plan(
    writing: Sequence[Lane],
    reader: Lane | None,
    lanes: Sequence[Lane],
    limits: Capabilities,
    times: PassTimes | None,
    chunks: PromptChunks,
) -> tuple[Batch, Failed]:
    """Works of one pass.

    Args:
        writing: sequences to decode, as many as fit.
        reader: a sequence whose prompt is read; its chunk is the last work.
        lanes: all, for which see `plan_trees`.
        limits: of the target.
        times: of its passes; None: trees take all the room of a pass.
        chunks: sizes of prompts' chunks.
    """
    prompt = reader.generation if reader else None
    room = most_nodes(limits, 0)
    if prompt:
        room -= chunks.rows(prompt, room)
    batch, failed = plan_trees(writing, lanes, limits, room, times, single=reader is None)
    if reader and prompt:
        taken = sum(len(work.token_ids) + work.session.unread_committed for _, work in batch)
        gone = [lane for lane, _ in failed]
        single = not any(lane.generation and not lane.unread for lane in lanes if lane not in gone)
        batch.append((reader, chunks.next(prompt, limits, taken, single=single)))
    return batch, failed


def plan_trees(
    writing: Sequence[Lane],
    lanes: Sequence[Lane],
    limits: Capabilities,
    room: int,
    times: PassTimes | None,
    *,
    single: bool,
) -> tuple[Batch, Failed]:
    """Trees of the sequences that have waited longest, as many as `room` rows hold, cut to their best nodes.

    Of `lanes`, all others lose their trees, which take cells of the draft. `single`: the pass has no prompt.
    """
    group = in_turn(writing, room)
    room -= sum(1 + lane.session.unread_committed for lane in group)
    for lane in lanes if len(lanes) > 1 else ():
        if lane.generation and lane not in group:
            lane.generation.give_up()
    fair = -(-TIMES_FAIR * room // len(group)) if len(group) > 1 else room
    most = None if single and len(group) == 1 else min(room, fair)
    started = perf_counter()
    planned = run_shared([lane.generation.planning(most, len(group)) for lane in group if lane.generation])
    seconds = perf_counter() - started
    failed = [(lane, tree) for lane, tree in zip(group, planned, strict=True) if isinstance(tree, Exception)]
    trees = [(lane, tree) for lane, tree in zip(group, planned, strict=True) if not isinstance(tree, Exception)]
    if len(trees) > 1:
        trees = cut(trees, limits, room, times, seconds)
    return [(lane, lane.generation.work(tree)) for lane, tree in trees if lane.generation], failed


def in_turn(writing: Sequence[Lane], room: int) -> list[Lane]:
    """The sequences that have waited longest, as many as have room for their roots."""
    group = list[Lane]()
    for lane in sorted(writing, key=lambda lane: lane.passed):
        room -= 1 + lane.session.unread_committed
        if room < 0:
            break
        group.append(lane)
    return group


def cut(
    trees: Sequence[tuple[Lane, DraftTree]], limits: Capabilities, room: int, times: PassTimes | None, seconds: float
) -> list[tuple[Lane, DraftTree]]:
    """Trees cut so that the pass is expected to gain most tokens per second; `seconds` were spent on planning."""
    length = fmean(len(lane.session.token_ids) for lane, _ in trees)
    curve = times.at(round(length)) if times else None
    added = roots = None
    if limits.paths:
        heads = [lane.session.unread_committed for lane, _ in trees]
        added = [rows_added(tree, head) for (_, tree), head in zip(trees, heads, strict=True)]
        roots = len(heads) + sum(heads)
    sizes = split([tree.log_probs[1:] for _, tree in trees], room, seconds, curve, added, roots)
    leaves = limits.leaves(len(trees))
    return [(lane, best_nodes(tree, size, leaves)) for (lane, tree), size in zip(trees, sizes, strict=True)]


def learn(batch: Batch, seconds: float, limits: Capabilities, times: PassTimes | None, chunks: PromptChunks) -> None:
    """Add the time of a pass to what is known of passes."""
    nodes, trees = sum(len(work.token_ids) for _, work in batch), [work for _, work in batch if not work.prompt]
    has_prompt = len(trees) < len(batch)
    chunks.learn(nodes, seconds, prompt=has_prompt)
    # The planner learns of a pass over one tree. Rows predict no time if trees are evaluated path by path.
    if times and len(batch) > 1 and not (has_prompt or limits.paths):
        times.add(nodes, seconds, round(fmean(len(work.session.token_ids) for work in trees)))


def while_target_runs(batch: Batch) -> AbstractContextManager[None]:
    """Within it the target makes this pass. The draft of a sequence that has the pass to itself may go on."""
    lane, work = batch[0]
    return lane.generation.beside() if lane.generation and len(batch) == 1 and not work.prompt else nullcontext()
