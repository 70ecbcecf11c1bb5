"""Sessions of the target with their planners: assignment, sharing, and eviction.

An idle session keeps its tokens for the next prompt that begins with them. If all sessions take cells from one pool,
the least recently used idle ones are emptied for new requests, and a `DiskCache` saves them first.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec.errors import ContextFull, EdgespecError, UsageError
from edgespec.loop.backend import Backend, Capabilities, Logits, Session
from edgespec.loop.generate import Generation, Step
from edgespec.loop.passes import Pass, Prefill, common_prefix, most_nodes, start_of
from edgespec.loop.planner import Planner
from edgespec.loop.sampling import Float32Array
from edgespec.loop.session_files import draft_file, has, load_draft_session
from edgespec.loop.shapes import whole_tiles
from edgespec.scheduler.disk_cache import DiskCache
from edgespec.scheduler.requests import Chunk, Handle, Reading, Status

WORTH_SHARING = 8  # tokens of a prompt that a fork must spare; a chat template has 24
WORTH_KEEPING = 64  # tokens of an idle session: a request that would drop as many gets another session
RESERVED = 1024  # most tokens of an answer for which cells are reserved
PROMPT_RETRIES = 3


@dataclass(slots=True, eq=False)
class Lane:
    """A session with its planner, and the request that it serves.

    Attributes:
        handle: the request; None: the session is idle.
        is_broken: no new session could be opened after an error.
        used: serial number of the last request that it was assigned to, or of its loading.
        passed: serial number of the last pass that it had a part in.
        source: the lane with which it shares its first `forked` cells.
        looked_at: `save_one` has considered its tokens.
        last_row: the last prompt that was read to its end, and the logits of its last row.
        sender: of the requests that its tokens come from.
    """

    session: Session
    planner: Planner
    handle: Handle | None = None
    generation: Generation | None = None
    is_broken: bool = False
    used: int = 0
    passed: int = 0
    source: "Lane | None" = None
    forked: int = 0
    looked_at: bool = False
    last_row: tuple[list[int], Float32Array] | None = None
    sender: str = ""

    @property
    def draft(self) -> Session | None:
        return self.planner.draft_session

    @property
    def unread(self) -> int:
        return self.generation.prompt.unread if self.generation else 0

    @property
    def draft_prompt(self) -> Prefill | None:
        return self.generation.draft_prompt if self.generation else None

    @property
    def may_write(self) -> bool:
        return self.generation is not None and not self.unread and self.draft_prompt is None

    @property
    def is_active(self) -> bool:
        return self.handle is not None and self.handle.status in (Status.READING, Status.WRITING)

    @property
    def is_held(self) -> bool:
        """Its reader is behind."""
        return self.handle is not None and not self.handle.cancelled and self.handle.is_full()

    @property
    def has_work(self) -> bool:
        handle = self.handle
        unread = self.unread > 0 or self.draft_prompt is not None
        return handle is not None and (handle.cancelled or unread or not handle.is_prefetched)

    @property
    def taken(self) -> int:
        """Cells of its tokens, without shared ones."""
        tokens, first = self.session.token_ids, self.forked
        shared = common_prefix(tokens[:first], self.source.session.token_ids[:first]) if self.source else 0
        return len(tokens) - whole_tiles(shared)

    def report_read(self, first: Step | None) -> list[Chunk]:
        """Report how much of the prompt is read, and at its end the first token."""
        assert self.handle
        assert self.generation
        prompt, row = self.handle.request.prompt_ids, self.generation.last_row
        self.handle.tell(Reading(len(self.session.token_ids), len(prompt)))
        if first is None or row is None:
            return []
        self.last_row = prompt, row
        return self.handle.write(first)

    @property
    def has_ended(self) -> bool:
        handle, generation = self.handle, self.generation
        stopped = generation is not None and generation.finished
        return handle is not None and bool(handle.ended or handle.text.stopped or stopped)

    def accept(self, pass_: Pass, logits: Logits, *, single: bool) -> list[Chunk]:
        """Commit and report the accepted tokens of a pass, or its part of the prompt.

        Returns:
            The new chunks.
        """
        assert self.handle
        assert self.generation
        if pass_.tree is None:
            return self.report_read(self.generation.accept_prompt(pass_, logits))
        return self.handle.write(self.generation.accept(pass_, logits, single=single))

    def give_up(self) -> None:
        if self.generation:
            self.generation.give_up()


class SessionPool:
    """All sessions of the target, for one thread at a time."""

    def __init__(self, target: Backend, planners: Sequence[Planner]) -> None:
        self.disk_cache: DiskCache | None = None
        self.lanes = [Lane(target.open(), planner) for planner in planners]
        self._target = target
        self._requests = self._passes = 0

    @property
    def limits(self) -> Capabilities:
        return self._target.capabilities

    @property
    def active(self) -> int:
        return sum(lane.is_active for lane in self.lanes)

    @property
    def busy(self) -> list[Lane]:
        return [lane for lane in self.lanes if lane.handle]

    @property
    def idle(self) -> list[Lane]:
        return [lane for lane in self.lanes if lane.handle is None]

    @property
    def with_work(self) -> list[Lane]:
        active = [lane for lane in self.lanes if lane.is_active]
        return active or [lane for lane in self.lanes if lane.has_work]

    @property
    def tokens(self) -> int:
        return sum(len(lane.session.token_ids) for lane in self.lanes)

    def most_held(self, prompt: Sequence[int], sender: str = "") -> int:
        """Most tokens of a prompt's beginning that a session or a file of the disk cache has for its sender."""
        on_disk = self.disk_cache.best(prompt, sender)[1] if self.disk_cache else 0
        return max(self._most_in_memory(prompt, sender), on_disk)

    def has_room(self, handle: Handle) -> bool:
        reserved = [self._reserved(lane) for lane in self.busy]
        if self.limits.cells is None or not reserved:
            return True
        source, shared = self._best(handle.request.prompt_ids, handle.request.sender)
        shares = source.handle and shared >= WORTH_SHARING
        common = whole_tiles(shared) if shares else 0
        return sum(reserved) + self._needed(handle) - common <= self.limits.cells

    def assign(self, handle: Handle) -> Lane:
        """Give a request the idle lane that loses least; `begin` comes next."""
        lane = self._idle_for(handle.request.prompt_ids, handle.request.sender)
        self._requests += 1
        lane.generation, lane.looked_at = None, False
        lane.handle, lane.used = handle, self._requests
        return lane

    def begin(self, lane: Lane, budget: int) -> list[Chunk]:
        """Begin the assigned request, with at most `budget` draft tokens a pass.

        Returns:
            As `Lane.accept`.

        Raises:
            Exception: what the engine, the planner or the disk cache raises; the request cannot begin then.
        """
        handle = lane.handle
        assert handle
        self._give(lane, handle.request.sender)
        request = handle.request
        self.prepare(lane, request.prompt_ids)
        lane.generation = Generation(
            self._target, lane.session, lane.planner, request.prompt_ids, request.sampling,
            max_tokens=request.max_tokens, budget=0 if request.plain else budget, stats=handle.stats,
            log_probs=request.log_probs, grammar=request.grammar.start() if request.grammar else None,
            hint_texts=request.hint_texts, last_row=self._last_row(request.prompt_ids, lane.sender),
        )  # fmt: skip
        handle.stats.approximate = lane.planner.approximate or self.limits.approximate
        lane.generation.prompt.retries = PROMPT_RETRIES
        first = lane.generation.begin()
        while self.limits.cells is not None and sum(map(self._reserved, self.lanes)) > self.limits.cells:
            if not self.evict_oldest():
                break
        return lane.report_read(first)

    def _give(self, lane: Lane, sender: str) -> None:
        """Let a lane serve a sender: what it holds of another one may not even spare time."""
        if lane.sender != sender:
            self.evict(lane)
            lane.planner.begin([0])
            lane.sender, lane.last_row = sender, None

    def prepare(self, lane: Lane, prompt: Sequence[int]) -> None:
        """Have the lane's session begin with about as much of a prompt as is kept anywhere; no pass is made.

        It keeps its own tokens, or gets a fork of another session, or a file of the disk cache. What it held is saved
        first if that is long enough.
        """
        cache, sender = self.disk_cache, lane.sender
        in_memory = self._most_in_memory(prompt, sender) if cache else 0
        source, start = self._start(lane, prompt)
        forks = source is not lane
        held, common = lane.session.token_ids, common_prefix(lane.session.token_ids, prompt)
        if cache and lane.session.reusable_prefix(len(held)) - (0 if forks else common) >= cache.least:
            cache.put(lane.session, lane.draft, sender)
        self._hand_over_shared(lane, 0 if forks else start)
        if forks:
            lane.session.close()
            lane.session = source.session.fork()
            lane.source, lane.forked = source, start
        path, on_disk = cache.best(prompt, sender) if cache else (None, 0)
        if cache and path and on_disk >= in_memory + cache.least:
            self._hand_over_shared(lane, 0)
            while not cache.load(path, lane.session, lane.draft) and self.evict_oldest():
                pass

    def count_pass(self, lanes: Sequence[Lane]) -> None:
        for lane in lanes:
            self._passes += 1
            lane.passed = self._passes

    def release(self, lane: Lane) -> None:
        with suppress(Exception):  # the planner may be what failed
            lane.give_up()
        lane.handle = lane.generation = None

    @property
    def stranded(self) -> list[Lane]:
        """Lanes with whose texts no pass can go on, because the pass of another has lost their cells."""
        most = most_nodes(self.limits, 0)
        return [lane for lane in self.lanes if lane.may_write and lane.session.unread_committed >= most]

    def renew(self, lane: Lane) -> None:
        """Give a lane without a request a new session: the old one is in an unknown state."""
        lane.is_broken, lane.handle, lane.generation = True, None, None
        self._hand_over_shared(lane, 0)
        with suppress(Exception):  # `mend` tries again, or the next request in this session fails
            lane.session.close()
            lane.session = self._target.open()
            lane.planner.begin([0])
            lane.is_broken = False

    def mend(self) -> None:
        for lane in self.lanes:
            if lane.is_broken and lane.handle is None:
                self.renew(lane)

    @property
    def is_overfull(self) -> bool:
        return self.limits.cells is not None and sum(lane.taken for lane in self.lanes) > self.limits.cells

    def empty(self, lane: Lane) -> None:
        self._hand_over_shared(lane, 0)
        lane.session.rewind(0)

    def evict(self, lane: Lane) -> None:
        """Save a session to the disk cache, if there is one, and empty it."""
        if self.disk_cache:
            self.disk_cache.put(lane.session, lane.draft, lane.sender)
        self.empty(lane)

    def evict_oldest(self) -> bool:
        """Evict the tokens of the least recently used idle lane.

        Returns:
            False: no idle lane has tokens.
        """
        idle = [lane for lane in self.idle if lane.session.token_ids]
        if oldest := min(idle, key=lambda lane: lane.used, default=None):
            self.evict(oldest)
        return oldest is not None

    def empty_idle(self) -> None:
        for lane in self.idle:
            self.empty(lane)
            lane.planner.begin([0])

    def save_one(self) -> bool:
        for lane in self.idle if self.disk_cache else ():
            if lane.session.token_ids and not (lane.is_broken or lane.looked_at):
                lane.looked_at = True
                if self.disk_cache:
                    self.disk_cache.put(lane.session, lane.draft, lane.sender)
                return True
        return False

    def save_latest(self, path: str | Path, note: Any) -> None:
        """Save the session that was used last, and a note, unless the file has both.

        Raises:
            SessionFileError: the file cannot be written.
        """
        last = max(self.lanes, key=lambda lane: lane.used)
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
        lane = min(self.idle, key=lambda lane: lane.used, default=None)
        if lane is None:
            raise UsageError("all sessions of this model are in use: load the file when a request has ended")
        self._give(lane, "")
        self._hand_over_shared(lane, 0)
        try:
            note = self._load(lane, path)
        except EdgespecError:  # the session is right, but may be empty
            raise
        except Exception:
            self.renew(lane)
            raise
        self._requests += 1
        lane.used = self._requests
        return note

    def _load(self, lane: Lane, path: str | Path) -> Any:
        """Load a file, also of the draft, into a lane's sessions; idle sessions make room. Errors as for `load`."""
        while True:
            try:
                note = lane.session.load(path)
                break
            except ContextFull:
                if not self.evict_oldest():
                    raise
        load_draft_session(path, lane.draft)
        return note

    def close(self) -> None:
        while self.save_one():
            pass
        for lane in self.lanes:
            lane.planner.close()
            lane.session.close()
        self.lanes.clear()

    def _most_in_memory(self, prompt: Sequence[int], sender: str) -> int:
        held = (lane.session.token_ids for lane in self.lanes if lane.sender == sender)
        return max((common_prefix(tokens, prompt) for tokens in held), default=0)

    def _idle_for(self, prompt: Sequence[int], sender: str) -> Lane:
        """The idle lane whose session begins as the prompt, unless it would lose much else; or the one used first."""
        source, start = self._best(prompt, sender)
        empty = [lane for lane in self.idle if not lane.session.token_ids]
        held, shared = len(source.session.token_ids), common_prefix(source.session.token_ids, prompt)
        if start and source.handle is None and 2 * shared >= held and (held < shared + WORTH_KEEPING or not empty):
            return source
        others = [lane for lane in self.idle if lane is not source or not start]
        return min(empty or others or self.idle, key=lambda lane: lane.used)

    def _start(self, lane: Lane, prompt: Sequence[int]) -> tuple[Lane, int]:
        """The lane to start from, itself unless another is clearly better, and the tokens that its session spares."""
        source, most = self._best(prompt, lane.sender)
        shares = self.limits.cells is not None and source.handle is not None  # `has_room` counts on it
        own = 0 if shares else self._kept_of(lane, prompt, lane.sender)
        return (source, most) if most - own >= WORTH_SHARING else (lane, own)

    def _best(self, prompt: Sequence[int], sender: str) -> tuple[Lane, int]:
        """
        Returns:
            The lane whose session spares most tokens of a prompt, and their number; of equal ones a busy, short one.
        """

        def worth(lane: Lane) -> tuple[int, bool, int]:
            return starts[lane], lane.handle is not None, -len(lane.session.token_ids)

        starts = {lane: self._kept_of(lane, prompt, sender) for lane in self.lanes}
        best = max(self.lanes, key=worth)
        return best, starts[best]

    def _kept_of(self, lane: Lane, prompt: Sequence[int], sender: str) -> int:
        """Number of the prompt's first tokens that its session spares to a sender."""
        if lane.sender != sender:
            return 0
        return start_of(self.limits, lane.session, prompt, want_last=self._last_row(prompt, sender) is None)

    def _last_row(self, prompt: Sequence[int], sender: str) -> Float32Array | None:
        """Logits of the prompt's last row if a session has read it; they depend on nothing else."""
        known = (lane.last_row for lane in self.lanes if lane.last_row and lane.sender == sender)
        return next((row for other, row in known if other == prompt), None)

    def _hand_over_shared(self, lane: Lane, kept: int) -> None:
        """Count the shared cells in the longest fork from now on; called before the lane is truncated.

        Args:
            lane: a lane whose cells others share.
            kept: tokens that stay.
        """
        forks = [other for other in self.lanes if other.source is lane and other.forked]
        heir = max(forks, key=lambda other: other.forked, default=None)
        if heir and heir.forked > kept:
            for other in forks:
                other.source = heir
            heir.source, lane.source = lane.source, heir
            heir.forked, lane.forked = min(heir.forked, lane.forked), heir.forked
        lane.forked = min(lane.forked, kept)

    def _needed(self, handle: Handle) -> int:
        request = handle.request
        return min(len(request.prompt_ids) + min(request.max_tokens, RESERVED), self.limits.context_length)

    def _reserved(self, lane: Lane) -> int:
        """Cells that it takes, shared ones left out, and that its request may still take."""
        held, new = len(lane.session.token_ids), lane.taken
        return max(held, self._needed(lane.handle)) - held + new if lane.handle else new
