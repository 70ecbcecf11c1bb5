"""Which session a text gets, and what stays in the others.

Sessions that are idle keep their texts. Where all take cells from one pool, those that were used least lately give way
to texts that come; with a `Shelf` they are saved first.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from edgespec.backend import Capabilities, Session, common_prefix
from edgespec.generate import Generation
from edgespec.jobs import Job, Request
from edgespec.planners import Planner
from edgespec.shelf import Shelf

WORTH_SHARING = 64  # tokens by which another session's text must be the better start, to be forked
RESERVED = 1024  # tokens of an answer that have room when its text begins; more take what is left


@dataclass(slots=True)
class Slot:
    """A session of the target and what guesses for it."""

    session: Session
    planner: Planner
    job: Job | None = None
    generation: Generation | None = None
    used: int = 0  # when it was last given to a job: a number that grows
    passed: int = 0  # the pass that it last took part in
    again: int = 0  # times that its prompt is read once more, since the cache had to be put in order
    source: "Slot | None" = None  # whose session its own was forked from, and how many tokens of it: they share cells
    forked: int = 0
    looked_at: bool = False  # whether its text, since it is idle, was considered for the shelf


def slot_for(source: Slot, shared: int, idle: list[Slot]) -> Slot:
    """The idle slot for a prompt that begins with so many of the source's tokens."""
    empty = [slot for slot in idle if not slot.session.token_ids]
    held = len(source.session.token_ids)
    if source.job is None and 2 * shared >= held and (held < shared + WORTH_SHARING or not empty):
        return source
    slot = min(empty or [slot for slot in idle if slot is not source] or idle, key=lambda slot: slot.used)
    if slot is not source and shared >= WORTH_SHARING:
        slot.session.close()
        slot.session = source.session.fork()
        slot.source, slot.forked = source, shared
    return slot


def taken(slot: Slot) -> int:
    """Cells that the slot's text takes, but for those that it shares."""
    text = slot.session.token_ids
    shared = min(slot.forked, common_prefix(text, slot.source.session.token_ids)) if slot.source else 0
    return len(text) - shared + shared % WORTH_SHARING


def has_room(limits: Capabilities, slots: Sequence[Slot], request: Request, shared: int) -> bool:
    """Whether the pool has cells for a text, besides those that are being read or written, which have so many of it."""
    active = [_reserved(limits, slot) for slot in slots if slot.job]
    return limits.cells is None or not active or sum(active) + _needed(limits, request) - shared <= limits.cells


def make_room(limits: Capabilities, slots: Sequence[Slot], shelf: Shelf | None) -> None:
    """Have idle texts give way to what is reserved for others."""
    while limits.cells is not None and sum(_reserved(limits, slot) for slot in slots) > limits.cells:
        if (slot := oldest_idle(slots)) is None:
            return
        forget(slot, shelf)


def is_overfull(limits: Capabilities, slots: Sequence[Slot]) -> bool:
    """Whether there are more tokens than cells in the pool, those aside that a pass needs."""
    return limits.cells is not None and sum(map(taken, slots)) > limits.cells


def oldest_idle(slots: Sequence[Slot]) -> Slot | None:
    """The idle slot with a text that was used least lately."""
    idle = [slot for slot in slots if slot.job is None and slot.session.token_ids]
    return min(idle, key=lambda slot: slot.used, default=None)


def use_shelf(shelf: Shelf, slot: Slot, slots: Sequence[Slot], prompt: Sequence[int], shared: int) -> None:
    """Save what the slot will lose, and load what the shelf has of a prompt, if it is more than what is shared."""
    text = slot.session.token_ids
    if slot.session.kept(len(text)) - common_prefix(text, prompt) >= shelf.least:
        shelf.put(slot.session)
    path, on_disk = shelf.best(prompt)
    if path and on_disk >= shared + shelf.least:
        slot.source = None
        while not shelf.load(path, slot.session) and (other := oldest_idle(slots)):
            forget(other, shelf)


def forget(slot: Slot, shelf: Shelf | None) -> None:
    """An idle slot loses its text, which is saved first."""
    if shelf:
        shelf.put(slot.session)
    slot.session.rewind(0)


def save_one(slots: Sequence[Slot], shelf: Shelf) -> bool:
    """Save an idle slot's text; whether there may be more to save."""
    for slot in slots:
        if slot.job is None and slot.session.token_ids and not slot.looked_at:
            slot.looked_at = True
            shelf.put(slot.session)
            return True
    return False


def _needed(limits: Capabilities, request: Request) -> int:
    return min(len(request.prompt_ids) + min(request.max_tokens, RESERVED), limits.context_length)


def _reserved(limits: Capabilities, slot: Slot) -> int:
    held, new = len(slot.session.token_ids), taken(slot)
    return max(held, _needed(limits, slot.job.request)) - held + new if slot.job else new
