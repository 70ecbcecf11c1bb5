"""Guesses for several targets: one token after another, for as long as nobody says that they are wrong."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from edgespec.errors import Interrupted
from edgespec.loop.backend import Backend
from edgespec.loop.planner import Context
from edgespec.loop.sampling import Noise, SamplingParams
from edgespec.planners.drafting import ChildScores, Drafter


class Guesser(Protocol):
    """Where guesses come from. All but `stop` is called by one thread."""

    def begin(self, prompt_ids: Sequence[int], sampling: SamplingParams) -> None:
        """A text starts. Raises ContextFull: it does not fit."""

    def after(self, token_ids: Sequence[int]) -> Iterator[int]:
        """What may follow these tokens, one after the other; ends when it is stopped, or has no more room."""

    def stop(self) -> None:
        """What is being guessed is not wanted any more, the next one included; called by another thread."""

    def close(self) -> None:
        """Free what it took."""


class DraftGuesser:
    """A draft model that is asked for its best token, coupled to the target's noise as in `planners/specexec.py`."""

    def __init__(self, draft: Backend, vocab_size: int, tau: float | None = None, coupling: bool = True) -> None:
        """
        Args:
            draft: loaded for one session; closed with this.
            vocab_size: of the target.
            tau: see `SpecExecPlanner`.
            coupling: see `SpecExecPlanner`.
        """
        self._draft, self._size = draft, vocab_size
        self._tau, self._coupling = tau, coupling
        self._drafter = Drafter(draft, None)
        self._wanted = True  # what is being guessed

    def begin(self, prompt_ids: Sequence[int], sampling: SamplingParams) -> None:
        """Take note of the text; the first guess reads it."""
        self._drafter.begin(prompt_ids, read=False)
        self._prompt_length, self._sampling = len(prompt_ids), sampling
        self._noise = Noise(sampling.seed, self._size)

    def after(self, token_ids: Sequence[int]) -> Iterator[int]:
        """One pass of the draft for each guess."""
        self._wanted, text = True, list(token_ids)
        while self._wanted:
            context = Context(text, self._prompt_length, self._sampling, self._noise, 1, 1)
            if self._drafter.room(context) < 1:
                return
            try:
                logits, node = self._drafter.read(text)
            except Interrupted:  # or guesses were meant that had just ended
                continue
            ids, _ = ChildScores(context, self._tau, self._coupling).children(logits, [node], [0], 1)
            text.append(int(ids[0][0]))
            yield text[-1]

    def stop(self) -> None:
        """End the pass under way early."""
        self._wanted = False
        self._draft.interrupt()

    def close(self) -> None:
        """Free the draft."""
        self._drafter.close()
        self._draft.close()
