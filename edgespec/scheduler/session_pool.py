"""Which session a text gets, and what stays in the others.

Sessions that are idle keep their texts. Where all take cells from one pool, those that were used least lately give way
to texts that come; with a `Shelf` they are saved first.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec.loop.backend import Capabilities, Session
from edgespec.loop.generate import Generation
from edgespec.loop.passes import common_prefix, start_of
from edgespec.loop.planner import Drafts, Planner
from edgespec.loop.session_files import beside, has, load_beside
from edgespec.loop.shapes import TILE
from edgespec.scheduler.disk_cache import Shelf
from edgespec.scheduler.requests import Job, Request

WORTH_SHARING = 8  # tokens by which another session's text must be the better start: a chat's fixed first words are 24
WORTH_KEEPING = 64  # tokens that an idle session loses, for which another slot is taken
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

    @property
    def draft(self) -> Session | None:
        """The draft's session, if a draft guesses."""
        return self.planner.draft_session if isinstance(self.planner, Drafts) else None


def most_shared(slots: Sequence[Slot], prompt: Sequence[int]) -> int:
    """Tokens that a prompt begins with and some text, too."""
    return max(common_prefix(slot.session.token_ids, prompt) for slot in slots)


def slot_for(limits: Capabilities, prompt: Sequence[int], slots: Sequence[Slot]) -> Slot:
    """The idle slot for a prompt."""
    source, start = _best_of(limits, prompt[:-1], slots)
    idle = [slot for slot in slots if slot.job is None]
    empty = [slot for slot in idle if not slot.session.token_ids]
    held, shared = len(source.session.token_ids), common_prefix(source.session.token_ids, prompt)
    if start and source.job is None and 2 * shared >= held and (held < shared + WORTH_KEEPING or not empty):
        return source
    others = [slot for slot in idle if slot is not source or not start]
    return min(empty or others or idle, key=lambda slot: slot.used)


def prepare(
    limits: Capabilities,
    slot: Slot,
    prompt: Sequence[int],
    slots: Sequence[Slot],
    shelf: Shelf | None,
) -> None:
    """Have the slot's session start from the best that there is: its own text, another's, or one on the shelf.

    What it loses by that is saved first.
    """
    in_memory = most_shared(slots, prompt) if shelf else 0
    source, start = _best_start(limits, slot, prompt[:-1], slots)
    forks = source is not slot
    held, common = slot.session.token_ids, common_prefix(slot.session.token_ids, prompt[:-1])
    if shelf and slot.session.reusable_prefix(len(held)) - (0 if forks else common) >= shelf.least:
        shelf.put(slot.session, slot.draft)
    pass_on(slot, slots, 0 if forks else start)
    if forks:
        slot.session.close()
        slot.session = source.session.fork()
        slot.source, slot.forked = source, start
    path, on_disk = shelf.best(prompt) if shelf else (None, 0)
    if shelf and path and on_disk >= in_memory + shelf.least:
        pass_on(slot, slots, 0)
        slot.source = None
        while not shelf.load(path, slot.session, slot.draft) and (other := oldest_idle(slots)):
            forget(other, slots, shelf)


def _best_start(limits: Capabilities, slot: Slot, read: Sequence[int], slots: Sequence[Slot]) -> tuple[Slot, int]:
    """The slot to start from, this one unless another is clearly better, and how many tokens need not be read then."""
    source, most = _best_of(limits, read, slots)
    shares = limits.cells is not None and source.job is not None  # `has_room` counts on it
    own = 0 if shares else start_of(limits, slot.session, read)
    return (source, most) if most - own >= WORTH_SHARING else (slot, own)


def _best_of(limits: Capabilities, read: Sequence[int], slots: Sequence[Slot]) -> tuple[Slot, int]:
    """The slot whose session need not read most of these tokens, and how many; of equal ones what costs least to fork.

    A text that begins alike is of no use where its cells were computed in another class.
    """
    starts = [start_of(limits, slot.session, read) for slot in slots]

    def worth(number: int) -> tuple[int, bool, int]:
        slot = slots[number]
        return starts[number], slot.job is not None, -len(slot.session.token_ids)

    best = max(range(len(slots)), key=worth)
    return slots[best], starts[best]


def pass_on(slot: Slot, slots: Sequence[Slot], kept: int) -> None:
    """Before all but so many of the slot's tokens go: who shares more of their cells counts them from now on."""
    heirs = [other for other in slots if other.source is slot and other.forked]
    heir = max(heirs, key=lambda other: other.forked, default=None)
    if heir is None or heir.forked <= kept:
        return
    for other in heirs:
        other.source = heir
    heir.source, slot.source = slot.source, heir
    slot.forked, forked = min(heir.forked, kept), slot.forked
    heir.forked = min(heir.forked, forked) if heir.source else 0


def empty(slot: Slot, slots: Sequence[Slot]) -> None:
    """The slot loses its text."""
    pass_on(slot, slots, 0)
    slot.source, slot.forked = None, 0
    slot.session.rewind(0)


def taken(slot: Slot) -> int:
    """Cells that the slot's text takes, but for those that it shares."""
    text = slot.session.token_ids
    shared = min(slot.forked, common_prefix(text, slot.source.session.token_ids)) if slot.source else 0
    return len(text) - shared + shared % TILE


def has_room(limits: Capabilities, slots: Sequence[Slot], request: Request) -> bool:
    """Whether the pool has cells for a text besides those that are read or written, some of whose it may share."""
    active = [_reserved(limits, slot) for slot in slots if slot.job]
    if limits.cells is None or not active:
        return True
    source, shared = _best_of(limits, request.prompt_ids[:-1], slots)
    common = shared - shared % TILE if source.job and shared >= WORTH_SHARING else 0
    return sum(active) + _needed(limits, request) - common <= limits.cells


def make_room(limits: Capabilities, slots: Sequence[Slot], shelf: Shelf | None) -> None:
    """Have idle texts give way to what is reserved for others."""
    while limits.cells is not None and sum(_reserved(limits, slot) for slot in slots) > limits.cells:
        if (slot := oldest_idle(slots)) is None:
            return
        forget(slot, slots, shelf)


def is_overfull(limits: Capabilities, slots: Sequence[Slot]) -> bool:
    """Whether there are more tokens than cells in the pool, those aside that a pass needs."""
    return limits.cells is not None and sum(map(taken, slots)) > limits.cells


def oldest_idle(slots: Sequence[Slot]) -> Slot | None:
    """The idle slot with a text that was used least lately."""
    idle = [slot for slot in slots if slot.job is None and slot.session.token_ids]
    return min(idle, key=lambda slot: slot.used, default=None)


def forget(slot: Slot, slots: Sequence[Slot], shelf: Shelf | None) -> None:
    """An idle slot loses its text, which is saved first."""
    if shelf:
        shelf.put(slot.session, slot.draft)
    empty(slot, slots)


def save_one(slots: Sequence[Slot], shelf: Shelf) -> bool:
    """Save an idle slot's text; whether there may be more to save."""
    for slot in slots:
        if slot.job is None and slot.session.token_ids and not slot.looked_at:
            slot.looked_at = True
            shelf.put(slot.session, slot.draft)
            return True
    return False


def save_latest(slots: Sequence[Slot], path: str | Path, note: Any) -> None:
    """Save the text that was used last, and a note, unless the file has them. Raises SessionFileError."""
    last = max(slots, key=lambda slot: slot.used)
    if not has(path, last.session.token_ids, note):
        last.session.save(path, note)
    if last.draft and not has(beside(path), last.draft.token_ids, None):
        last.draft.save(beside(path))


def load(slots: Sequence[Slot], path: str | Path) -> Any:
    """Have an idle slot start from what was saved; the note. Raises SessionFileError, ContextFull."""
    slot = min((slot for slot in slots if slot.job is None), key=lambda slot: slot.used)
    pass_on(slot, slots, 0)
    slot.source = None
    note = slot.session.load(path)
    load_beside(path, slot.draft)
    return note


def _needed(limits: Capabilities, request: Request) -> int:
    return min(len(request.prompt_ids) + min(request.max_tokens, RESERVED), limits.context_length)


def _reserved(limits: Capabilities, slot: Slot) -> int:
    held, new = len(slot.session.token_ids), taken(slot)
    return max(held, _needed(limits, slot.job.request)) - held + new if slot.job else new
