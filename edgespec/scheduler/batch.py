"""What goes into one pass that several texts share: their trees, and a part of a prompt."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from statistics import fmean
from time import perf_counter

from edgespec.loop.backend import Capabilities, Work
from edgespec.loop.draft_passes import run_shared
from edgespec.loop.generate import Generation
from edgespec.loop.pass_times import PassTimes
from edgespec.loop.passes import most_nodes
from edgespec.loop.shapes import TILE
from edgespec.loop.tree import DraftTree, best_nodes
from edgespec.planners.cost import split
from edgespec.planners.path_cost import rows_added
from edgespec.scheduler.prompt_chunks import PromptPieces
from edgespec.scheduler.session_pool import Slot

TIMES_FAIR = 2  # a text may guess so many times its share of a pass: what others leave, predictable ones take

Batch = list[tuple[Slot, Work]]
Failed = list[tuple[Slot, Exception]]  # slots whose trees could not be planned


def prompts_ride_along(limits: Capabilities) -> bool:
    """Whether parts of prompts and trees may share a pass."""
    exact = limits.exact
    return exact is None or (exact.prompts == exact.trees and not exact.blocks)


def plan(
    writing: Sequence[Slot],
    reader: Slot | None,
    slots: Sequence[Slot],
    limits: Capabilities,
    cost: PassTimes | None,
    pieces: PromptPieces,
) -> tuple[Batch, Failed]:
    """Trees of those who have waited longest, and then the next part of a prompt."""
    part = reader.generation if reader else None
    room = most_nodes(limits, 0)
    if part:
        room -= min(TILE, part.unread, room // 2) + part.session.unread_committed
    batch, failed = plan_trees(writing, slots, limits, room, cost, alone=reader is None)
    if reader and part:
        gone = [slot for slot, _ in failed]
        others = any(slot.generation and not slot.generation.unread for slot in slots if slot not in gone)
        batch.append((reader, plan_part(part, limits, batch, pieces if others else None)))
    return batch, failed


def plan_trees(
    writing: Sequence[Slot],
    slots: Sequence[Slot],
    limits: Capabilities,
    room: int,
    cost: PassTimes | None,
    *,
    alone: bool,
) -> tuple[Batch, Failed]:
    """Trees of those who have waited longest, as many as so many rows hold, and in them their best nodes.

    Of `slots` all others lose their guesses, since these need what their drafts' caches hold.

    Returns:
        The works, and the slots whose trees could not be planned.
    """
    group = list[Slot]()
    for slot in sorted(writing, key=lambda slot: slot.passed):
        if (rows := 1 + slot.session.unread_committed) > room:
            break
        group.append(slot)
        room -= rows
    for slot in slots if len(slots) > 1 else ():
        if slot.generation and slot not in group:
            slot.generation.give_up()
    trees, failed, spent = list[DraftTree](), list[tuple[Slot, Exception]](), perf_counter()
    alone = alone and len(group) == 1
    fair = room if len(group) == 1 else min(room, -(-TIMES_FAIR * room // max(1, len(group))))
    most, texts = None if alone else fair, len(group)
    found = run_shared([slot.generation.planning(most, texts) for slot in group if slot.generation])
    for slot, tree in zip(group.copy(), found, strict=True):
        if isinstance(tree, Exception):
            group.remove(slot)
            failed.append((slot, tree))
        else:
            trees.append(tree)
    spent = perf_counter() - spent
    if len(group) > 1:
        length = fmean(len(slot.session.token_ids) for slot in group)
        curve = cost.at(round(length)) if cost else None
        added = roots = None
        if limits.paths:
            heads = [slot.session.unread_committed for slot in group]
            added, roots = [rows_added(*one) for one in zip(trees, heads, strict=True)], len(heads) + sum(heads)
        sizes = split([tree.log_probs[1:] for tree in trees], room, spent, curve, added, roots)
        leaves = limits.leaves(len(group))
        trees = [best_nodes(tree, size, leaves) for tree, size in zip(trees, sizes, strict=True)]
    batch = [(slot, slot.generation.work(tree)) for slot, tree in zip(group, trees, strict=True) if slot.generation]
    return batch, failed


def beside(batch: Batch) -> AbstractContextManager[None]:
    """Within it the target makes this pass: the draft of a text that has it for itself may go on."""
    slot, work = batch[0]
    return slot.generation.beside() if slot.generation and len(batch) == 1 and not work.prompt else nullcontext()


def plan_part(reading: Generation, limits: Capabilities, batch: Batch, pieces: PromptPieces | None) -> Work:
    """The next part of a prompt, in the room that the trees leave; with `pieces`, so small that they wait a moment."""
    start, session = reading.reads_on_at(), reading.session
    taken = sum(len(work.token_ids) + work.session.unread_committed for _, work in batch)
    room = limits.max_nodes - taken
    if limits.exact:
        room = min(room, limits.exact.prompts.most - taken - session.unread_committed)
    quick = min(room, pieces.quick(taken, limits.max_nodes)) if pieces and not limits.streams else room
    end, whole = start + quick, start + reading.unread
    if end < whole and end - end % TILE > start:
        end -= end % TILE
    if limits.exact and whole - end < limits.exact.prompts.least and whole - start <= room:
        end = whole  # a pass over what is left would be padded
    return reading.prompt_work(end - start)
