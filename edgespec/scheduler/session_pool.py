"""Sessions of the target with their planners: assignment, sharing, and eviction.

An idle session keeps its tokens for the next prompt that begins with them. If all sessions take cells from one pool,
the least recently used idle ones are emptied for new requests, and a `DiskCache` saves them first. There may be more
sessions than planners, which go to those that are at work.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from edgespec.errors import ContextFull, EdgespecError, UsageError
from edgespec.loop.backend import Backend, Capabilities
from edgespec.loop.generate import Generation
from edgespec.loop.passes import common_prefix, most_nodes, start_of
from edgespec.loop.planner import Planner
from edgespec.loop.sampling import Float32Array
from edgespec.loop.session_files import draft_file, has, load_draft_session
from edgespec.loop.shapes import whole_tiles
from edgespec.scheduler.disk_cache import DiskCache
from edgespec.scheduler.events import Chunk
from edgespec.scheduler.sequence import Seq, Slot

WORTH_SHARING = 8  # tokens of a prompt that a fork must spare; a chat template has 24
WORTH_KEEPING = 64  # tokens of an idle session: a request that would drop as many gets another session
RESERVED = 1024  # most tokens of an answer for which cells are reserved
PROMPT_RETRIES = 3
FREE = 8  # one in FREE cells stays free of idle tokens, so that cells are seldom put in order


class SessionPool:
    """All sessions of the target, for one thread at a time."""

    def __init__(self, target: Backend, planners: Sequence[Planner]) -> None:
        self.disk_cache: DiskCache | None = None
        kept = [None] * target.capabilities.kept
        self.slots = [Slot(target.open(), planner) for planner in [*planners, *kept]]
        self.seqs = list[Seq]()  # those that have slots
        # Idle tokens slow the passes of others, so more sessions than planners hold tokens only where texts come back.
        self._keeps = 0  # how many more
        self._dropped = deque[tuple[str, list[int]]](maxlen=2 * len(self.slots))  # sender and tokens
        self._target = target
        self._requests = self._passes = 0

    @property
    def limits(self) -> Capabilities:
        return self._target.capabilities

    @property
    def active(self) -> int:
        return sum(seq.is_active for seq in self.seqs)

    @property
    def idle(self) -> list[Slot]:
        return [slot for slot in self.slots if slot.seq is None]

    @property
    def has_planner(self) -> bool:
        """A planner is idle, so that a sequence can be assigned."""
        return any(slot.planner for slot in self.idle)

    @property
    def with_work(self) -> list[Seq]:
        return [seq for seq in self.seqs if seq.is_active] or [seq for seq in self.seqs if seq.has_work]

    @property
    def tokens(self) -> int:
        return sum(len(slot.session.token_ids) for slot in self.slots)

    def most_held(self, prompt: Sequence[int], sender: str = "") -> int:
        """Most tokens of a prompt's beginning that a session or a file of the disk cache has for its sender."""
        on_disk = self.disk_cache.best(prompt, sender)[1] if self.disk_cache else 0
        return max(self._most_in_memory(prompt, sender), on_disk)

    def has_room(self, seq: Seq) -> bool:
        reserved = [self._reserved(slot) for slot in self.slots if slot.seq]
        if self.limits.cells is None or not reserved:
            return True
        source, shared = self._best(seq.request.prompt_ids, seq.request.sender)
        shares = source.seq and shared >= WORTH_SHARING
        common = whole_tiles(shared) if shares else 0
        return sum(reserved) + self._needed(seq) - common <= self.limits.cells

    def assign(self, seq: Seq) -> None:
        """Give a sequence the idle slot that loses least; `begin` comes next."""
        self._notice_return(seq.request.prompt_ids, seq.request.sender)
        slot = self._idle_for(seq.request.prompt_ids, seq.request.sender)
        if slot.planner is None:
            self._give_planner(slot, seq.request.prompt_ids, seq.request.sender)
        self._requests += 1
        slot.seq, slot.used, slot.looked_at = seq, self._requests, False
        seq.slot = slot
        self.seqs.append(seq)

    def begin(self, seq: Seq, budget: int) -> list[Chunk]:
        """Begin the assigned sequence, with at most `budget` draft tokens a pass.

        Returns:
            As `Seq.accept`.

        Raises:
            Exception: what the engine, the planner or the disk cache raises; the sequence cannot begin then.
        """
        slot, request = seq.slot, seq.request
        assert slot
        assert slot.planner
        self._give(slot, request.sender)
        self.prepare(slot, request.prompt_ids)
        seq.generation = Generation(
            self._target, slot.session, slot.planner, request.prompt_ids, request.sampling,
            max_tokens=request.max_tokens, budget=0 if request.plain else budget, stats=seq.stats,
            log_probs=request.log_probs, grammar=request.grammar.start() if request.grammar else None,
            hint_texts=request.hint_texts, last_row=self._last_row(request.prompt_ids, slot.sender),
        )  # fmt: skip
        seq.stats.approximate = slot.planner.approximate or self.limits.approximate
        seq.generation.prompt.retries = PROMPT_RETRIES
        first = seq.generation.begin()
        while (cells := self.limits.cells) is not None:
            in_use = sum(one.seq is not None or bool(one.session.token_ids) for one in self.slots)
            more = in_use + self.limits.kept - len(self.slots)
            fits = sum(map(self._reserved, self.slots)) <= cells - (cells // FREE if more > 0 else 0)
            if (fits and more <= self._keeps) or not self.evict_oldest():
                break
        return seq.report_read(first)

    def _notice_return(self, prompt: Sequence[int], sender: str) -> None:
        """Keep one session more from now on if one that was dropped would have spared more than those there are."""
        back = max((common_prefix(tokens, prompt) for whose, tokens in self._dropped if whose == sender), default=0)
        if back - self._most_in_memory(prompt, sender) >= WORTH_KEEPING:
            self._keeps = min(self._keeps + 1, self.limits.kept)

    def _give_planner(self, slot: Slot, prompt: Sequence[int], sender: str) -> None:
        """Give an idle slot the idle planner whose draft has read most of a prompt, or that was used first."""

        def worth(other: Slot) -> tuple[int, int]:
            read = other.draft.token_ids if other.draft and other.sender == sender else ()
            return common_prefix(read, prompt), -other.used

        other = max((one for one in self.idle if one.planner), key=worth)
        slot.planner, other.planner = other.planner, None
        if other.sender != sender:
            slot.forget_drafts()

    def _give(self, slot: Slot, sender: str) -> None:
        """Let a slot serve a sender: what it holds of another one may not even spare time."""
        if slot.sender != sender:
            self.evict(slot)
            slot.forget_drafts()
            slot.sender, slot.last_row = sender, None

    def prepare(self, slot: Slot, prompt: Sequence[int]) -> None:
        """Have the slot's session begin with about as much of a prompt as is kept anywhere; no pass is made.

        It keeps its own tokens, or gets a fork of another session, or a file of the disk cache. What it held is saved
        first if that is long enough.
        """
        cache, sender = self.disk_cache, slot.sender
        in_memory = self._most_in_memory(prompt, sender) if cache else 0
        source, start = self._start(slot, prompt)
        forks = source is not slot
        held, common = slot.session.token_ids, common_prefix(slot.session.token_ids, prompt)
        if cache and slot.session.reusable_prefix(len(held)) - (0 if forks else common) >= cache.least:
            cache.put(slot.session, slot.draft, sender)
        self._hand_over_shared(slot, 0 if forks else start)
        if forks:
            slot.session.close()
            slot.session = source.session.fork()
            slot.source, slot.forked = source, start
        path, on_disk = cache.best(prompt, sender) if cache else (None, 0)
        if cache and path and on_disk >= in_memory + cache.least:
            self._hand_over_shared(slot, 0)
            while not cache.load(path, slot.session, slot.draft) and self.evict_oldest():
                pass

    def count_pass(self, seqs: Iterable[Seq]) -> None:
        for seq in seqs:
            self._passes += 1
            seq.passed = self._passes

    def release(self, seq: Seq) -> None:
        """Take a sequence's slot from it."""
        with suppress(Exception):  # the planner may be what failed
            seq.give_up()
        if seq.slot:
            seq.slot.seq = None
            self.seqs.remove(seq)
        seq.slot = seq.generation = None

    @property
    def stranded(self) -> list[Seq]:
        """Sequences with which no pass can go on, because that of another has lost their cells."""
        most = most_nodes(self.limits, 0)
        return [seq for seq in self.seqs if seq.may_write and seq.unread_committed >= most]

    def renew(self, slot: Slot) -> None:
        """Give an idle slot a new session: the old one is in an unknown state."""
        slot.is_broken = True
        self._hand_over_shared(slot, 0)
        with suppress(Exception):  # `mend` tries again, or the next request in this session fails
            slot.session.close()
            slot.session = self._target.open()
            slot.forget_drafts()
            slot.is_broken = False

    def mend(self) -> None:
        for slot in self.slots:
            if slot.is_broken and slot.seq is None:
                self.renew(slot)

    @property
    def is_overfull(self) -> bool:
        return self.limits.cells is not None and sum(slot.taken for slot in self.slots) > self.limits.cells

    def empty(self, slot: Slot) -> None:
        self._hand_over_shared(slot, 0)
        slot.session.rewind(0)

    def evict(self, slot: Slot) -> None:
        """Save a session to the disk cache, if there is one, and empty it."""
        if self.disk_cache:
            self.disk_cache.put(slot.session, slot.draft, slot.sender)
        if self.limits.kept:
            self._dropped.append((slot.sender, list(slot.session.token_ids)))
        self.empty(slot)

    def evict_oldest(self) -> bool:
        """Evict the tokens of the least recently used idle slot.

        Returns:
            False: no idle slot has tokens.
        """
        idle = [slot for slot in self.idle if slot.session.token_ids]
        if oldest := min(idle, key=lambda slot: slot.used, default=None):
            self.evict(oldest)
        return oldest is not None

    def empty_idle(self) -> None:
        for slot in self.idle:
            self.empty(slot)
            slot.forget_drafts()

    def save_one(self) -> bool:
        for slot in self.idle if self.disk_cache else ():
            if slot.session.token_ids and not (slot.is_broken or slot.looked_at):
                slot.looked_at = True
                if self.disk_cache:
                    self.disk_cache.put(slot.session, slot.draft, slot.sender)
                return True
        return False

    def save_latest(self, path: str | Path, note: Any) -> None:
        """Save the session that was used last, and a note, unless the file has both.

        Raises:
            SessionFileError: the file cannot be written.
        """
        last = max(self.slots, key=lambda slot: slot.used)
        if not (known := has(path, self._target, last.session.token_ids, note)):
            last.session.save(path, note)
        if last.draft and not (known and has(draft_file(path), None, last.draft.token_ids, None)):
            last.draft.save(draft_file(path))

    def load(self, path: str | Path) -> Any:
        """Load a file into an idle session, which counts as used now.

        Returns:
            Its note.

        Raises:
            SessionFileError, ContextFull: as `Session.load`.
            UsageError: no session is idle.
        """
        slot = min((slot for slot in self.idle if slot.planner), key=lambda slot: slot.used, default=None)
        if slot is None:
            raise UsageError("all sessions of this model are in use: load the file when a request has ended")
        self._give(slot, "")
        self._hand_over_shared(slot, 0)
        try:
            note = self._load(slot, path)
        except EdgespecError:  # the session is right, but may be empty
            raise
        except Exception:
            self.renew(slot)
            raise
        self._requests += 1
        slot.used = self._requests
        return note

    def _load(self, slot: Slot, path: str | Path) -> Any:
        """Load a file, also of the draft, into a slot's sessions; idle sessions make room. Errors as for `load`."""
        while True:
            try:
                note = slot.session.load(path)
                break
            except ContextFull:
                if not self.evict_oldest():
                    raise
        load_draft_session(path, slot.draft)
        return note

    def close(self) -> None:
        while self.save_one():
            pass
        for slot in self.slots:
            if slot.planner:
                slot.planner.close()
            slot.session.close()
        self.slots.clear()

    def _most_in_memory(self, prompt: Sequence[int], sender: str) -> int:
        held = (slot.session.token_ids for slot in self.slots if slot.sender == sender)
        return max((common_prefix(tokens, prompt) for tokens in held), default=0)

    def _idle_for(self, prompt: Sequence[int], sender: str) -> Slot:
        """The idle slot whose session begins as the prompt, unless it would lose much else; or the one used first."""
        source, start = self._best(prompt, sender)
        empty = [slot for slot in self.idle if not slot.session.token_ids]
        held, shared = len(source.session.token_ids), common_prefix(source.session.token_ids, prompt)
        if start and source.seq is None and 2 * shared >= held and (held < shared + WORTH_KEEPING or not empty):
            return source
        others = [slot for slot in self.idle if slot is not source or not start]
        return min(empty or others or self.idle, key=lambda slot: slot.used)

    def _start(self, slot: Slot, prompt: Sequence[int]) -> tuple[Slot, int]:
        """The slot to start from, itself unless another is clearly better, and the tokens that its session spares."""
        source, most = self._best(prompt, slot.sender)
        shares = self.limits.cells is not None and source.seq is not None  # `has_room` counts on it
        own = 0 if shares else self._kept_of(slot, prompt, slot.sender)
        return (source, most) if most - own >= WORTH_SHARING else (slot, own)

    def _best(self, prompt: Sequence[int], sender: str) -> tuple[Slot, int]:
        """
        Returns:
            The slot whose session spares most tokens of a prompt, and their number; of equal ones a busy, short one.
        """

        def worth(slot: Slot) -> tuple[int, bool, int]:
            return starts[slot], slot.seq is not None, -len(slot.session.token_ids)

        starts = {slot: self._kept_of(slot, prompt, sender) for slot in self.slots}
        best = max(self.slots, key=worth)
        return best, starts[best]

    def _kept_of(self, slot: Slot, prompt: Sequence[int], sender: str) -> int:
        """Number of the prompt's first tokens that its session spares to a sender."""
        if slot.sender != sender:
            return 0
        return start_of(self.limits, slot.session, prompt, want_last=self._last_row(prompt, sender) is None)

    def _last_row(self, prompt: Sequence[int], sender: str) -> Float32Array | None:
        """Logits of the prompt's last row if a session has read it; they depend on nothing else."""
        known = (slot.last_row for slot in self.slots if slot.last_row and slot.sender == sender)
        return next((row for other, row in known if other == prompt), None)

    def _hand_over_shared(self, slot: Slot, kept: int) -> None:
        """Count the shared cells in the longest fork from now on; called before the slot is truncated.

        Args:
            slot: a slot whose cells others share.
            kept: tokens that stay.
        """
        forks = [other for other in self.slots if other.source is slot and other.forked]
        heir = max(forks, key=lambda other: other.forked, default=None)
        if heir and heir.forked > kept:
            for other in forks:
                other.source = heir
            heir.source, slot.source = slot.source, heir
            heir.forked, slot.forked = min(heir.forked, slot.forked), heir.forked
        slot.forked = min(slot.forked, kept)

    def _needed(self, seq: Seq) -> int:
        request = seq.request
        return min(len(request.prompt_ids) + min(request.max_tokens, RESERVED), self.limits.context_length)

    def _reserved(self, slot: Slot) -> int:
        """Cells that it takes, shared ones left out, and that its request may still take."""
        held, new = len(slot.session.token_ids), slot.taken
        return max(held, self._needed(slot.seq)) - held + new if slot.seq else new
