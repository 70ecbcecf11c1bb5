"""A sequence from its request to its end, and the slot that it has meanwhile.

WAITING  in the queue, without a slot
READING  its prompt, in a slot
WRITING  tokens of its own
DONE     its reader knows the end; the slot is free
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from edgespec.errors import EdgespecError
from edgespec.loop.backend import Logits, Session, Vocab
from edgespec.loop.generate import Generation
from edgespec.loop.passes import Pass, Prefill, Ran, common_prefix
from edgespec.loop.planner import Planner
from edgespec.loop.sampling import Float32Array
from edgespec.loop.shapes import whole_tiles
from edgespec.loop.stats import GenerationStats
from edgespec.loop.step import Step
from edgespec.loop.text import TextStream
from edgespec.scheduler.events import Chunk, Ended, Event, Reading, Wrote, chunks_of
from edgespec.scheduler.requests import Request


class State(Enum):
    """In this order; a restart leads back to WAITING."""

    WAITING = "waiting"
    READING = "reading"
    WRITING = "writing"
    DONE = "done"


def never() -> bool:
    return False


@dataclass(slots=True, eq=False)
class Slot:
    """A session with its planner. An idle one keeps its tokens for the next prompt that begins with them.

    Attributes:
        planner: None: another slot has it, and this one only keeps tokens until it gets one.
        seq: the sequence that has it; None: it is idle.
        is_broken: no new session could be opened after an error.
        used: serial number of the last sequence that it was assigned to, or of its loading.
        source: the slot with which it shares its first `forked` cells.
        looked_at: `save_one` has considered its tokens.
        last_row: the last prompt that was read to its end, and the logits of its last row.
        sender: of the requests that its tokens come from.
    """

    session: Session
    planner: Planner | None = None
    seq: "Seq | None" = None
    is_broken: bool = False
    used: int = 0
    source: "Slot | None" = None
    forked: int = 0
    looked_at: bool = False
    last_row: tuple[list[int], Float32Array] | None = None
    sender: str = ""

    @property
    def draft(self) -> Session | None:
        return self.planner.draft_session if self.planner else None

    def forget_drafts(self) -> None:
        """Have its planner, if it has one, start without what it knows of earlier texts."""
        if self.planner:
            self.planner.begin([0])

    @property
    def taken(self) -> int:
        """Cells of its tokens, without shared ones."""
        tokens, first = self.session.token_ids, self.forked
        shared = common_prefix(tokens[:first], self.source.session.token_ids[:first]) if self.source else 0
        return len(tokens) - whole_tiles(shared)


@dataclass(slots=True, eq=False)
class Seq:
    """Any thread may call `cancel`, only the scheduler all else.

    Attributes:
        idle_limit: see `Scheduler.submit`.
        is_full: see `Scheduler.submit`.
        slot: the one that it has.
        generation: its tokens; None: it has no slot, or could not begin.
        passed: serial number of the last pass that it had a part in.
        waited: tokens that other prompts' chunks had while it waited for one.

    Raises:
        UsageError: a stop string is empty.
    """

    request: Request
    emit: Callable[[Event], None]
    stats: GenerationStats
    vocab: Vocab
    when_cancelled: Callable[[], None]
    idle_limit: int | None = None
    is_full: Callable[[], bool] = never
    state: State = State.WAITING
    cancelled: bool = False
    ended: Ended | None = None
    slot: Slot | None = None
    generation: Generation | None = None
    passed: int = 0
    waited: int = 0
    text: TextStream = field(init=False)
    _told: list[int] = field(default_factory=list)  # tokens that the reader has
    _repeated: int = 0  # number of these decoded since the last restart
    _rest: str = ""

    def __post_init__(self) -> None:
        self.text = self._new_text()

    def _new_text(self) -> TextStream:
        return TextStream(self.vocab, self.request.stop, self.request.shown)

    # Its state, for the scheduler.

    @property
    def is_idle_work(self) -> bool:
        return self.idle_limit is not None

    @property
    def is_active(self) -> bool:
        return self.state in (State.READING, State.WRITING) and not self.is_idle_work

    @property
    def is_held(self) -> bool:
        """Its reader is behind."""
        return not self.cancelled and self.is_full()

    @property
    def has_work(self) -> bool:
        reads = self.state is State.READING or self.draft_prompt is not None
        return self.cancelled or reads or not self.is_prefetched

    @property
    def is_prefetched(self) -> bool:
        return self.idle_limit is not None and self.stats.tokens >= self.idle_limit

    @property
    def repeats(self) -> bool:
        return self._repeated < len(self._told)

    @property
    def draft_prompt(self) -> Prefill | None:
        return self.generation.draft_prompt if self.generation else None

    @property
    def unread(self) -> int:
        """Tokens of its prompt that the target or the draft has still to read."""
        parts = [self.generation.prompt, self.draft_prompt] if self.generation else []
        return sum(part.unread for part in parts if part)

    @property
    def may_write(self) -> bool:
        return self.state is State.WRITING and self.draft_prompt is None

    @property
    def has_ended(self) -> bool:
        finished = self.generation is not None and self.generation.finished
        return bool(self.ended or self.text.stopped or finished)

    @property
    def unread_committed(self) -> int:
        """As for `Session`."""
        return self.slot.session.unread_committed if self.slot else 0

    @property
    def age(self) -> int:
        """Serial number of its slot's assignment."""
        return self.slot.used if self.slot else 0

    # Changes of its state.

    def cancel(self, *, useful: bool = False) -> None:
        """Stop after the pass under way, or within it if no other sequence is in it; safe to call twice.

        Args:
            useful: another sequence needs what the pass computes, so the pass goes on.
        """
        if not self.cancelled:
            self.cancelled = True
            if not useful:
                self.when_cancelled()

    def wait_again(self) -> None:
        """Begin again: the same tokens will follow, and `write` reports only new ones."""
        self.state, self.text, self._repeated = State.WAITING, self._new_text(), 0
        self.stats.reset()

    def accept(self, pass_: Pass, logits: Logits, ran: Ran) -> list[Chunk]:
        """Commit and report the accepted tokens of a pass, or its part of the prompt.

        Returns:
            The new chunks.
        """
        assert self.generation
        if pass_.tree is None:
            return self.report_read(self.generation.accept_prompt(pass_, logits, ran))
        return self.write(self.generation.accept(pass_, logits, ran))

    def report_read(self, first: Step | None) -> list[Chunk]:
        """Report how much of the prompt is read, and at its end the first token."""
        assert self.generation
        assert self.slot
        prompt, row = self.request.prompt_ids, self.generation.last_row
        self.tell(Reading(len(self.slot.session.token_ids), len(prompt)))
        if first is None or row is None:
            return []
        self.slot.last_row, self.state = (prompt, row), State.WRITING
        return self.write(first)

    def write(self, step: Step) -> list[Chunk]:
        """Report those tokens of a step that the reader does not have.

        Raises:
            EdgespecError: after a restart other tokens came; without a row class, rounding may change them.
        """
        chunks = chunks_of(step, self.text, self.stats)
        known = self._told[self._repeated : self._repeated + len(chunks)]
        if [chunk.token_id for chunk in chunks[: len(known)]] != known:
            raise EdgespecError("the request was interrupted and cannot be continued")
        self._repeated += len(known)
        new = chunks[len(known) :]
        if new:
            self.tell(Wrote(new, step), [token for chunk in new if (token := chunk.token_id) is not None])
        return new

    def give_up(self) -> None:
        """Drop its last proposal."""
        if self.generation:
            self.generation.give_up()

    def cut_short(self) -> None:
        self._rest = self.text.finish()
        self.stats.finish_reason = "stop" if self.text.stopped else "length"

    def end(self, error: Exception | None) -> None:
        self.ended = self.ended or Ended(error, self._rest)
        if error is not None:
            self.stats.finish_reason = "interrupted"
        self.state = State.DONE

    def tell_end(self) -> None:
        assert self.ended
        self.tell(self.ended)

    def tell(self, event: Event, tokens: Sequence[int] = ()) -> None:
        """Pass an event, which reports `tokens`, to the reader; if it fails, the sequence is cancelled."""
        try:
            self.emit(event)
            self._told.extend(tokens)
            self._repeated += len(tokens)
        except Exception:
            self.cancel()
