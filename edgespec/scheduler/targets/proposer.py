"""Proposes draft tokens to several copies of the target."""

from collections.abc import Iterator, Sequence

from edgespec.errors import Interrupted
from edgespec.loop.backend import Backend
from edgespec.loop.draft_passes import run_one
from edgespec.loop.planner import Context
from edgespec.loop.sampling import Noise, SamplingParams
from edgespec.planners.drafting import ChildScores, Drafter


class DraftProposer:
    """A draft model's best tokens, coupled to the target's Gumbel noise as in `planners/specexec.py`.

    One thread calls all but `stop`.
    """

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
        self._wanted = True

    def begin(self, prompt_ids: Sequence[int], sampling: SamplingParams) -> None:
        """Begin a request, which may be too long for the draft."""
        self._drafter.begin(prompt_ids)
        self._prompt_length, self._sampling = len(prompt_ids), sampling
        self._noise = Noise(sampling.seed, self._size)

    def after(self, token_ids: Sequence[int]) -> Iterator[int]:
        """Likely next tokens, one by one, until it is stopped or the context is full."""
        self._wanted, text = True, list(token_ids)
        while self._wanted:
            context = Context(text, self._prompt_length, self._sampling, self._noise, 1, 1)
            if self._drafter.most_depth(context) < 1:
                return
            try:
                logits, node = run_one(self._drafter.reading(text))
            except Interrupted:  # a `stop` may come when one `after` has ended and before the next one's first pass
                continue
            ids, _ = ChildScores(context, self._tau, self._coupling).children(logits, [node], [0], 1)
            text.append(int(ids[0][0]))
            yield text[-1]

    def stop(self) -> None:
        """End the current or the next `after`; another thread calls it."""
        self._wanted = False
        self._draft.interrupt(self._draft.pass_number)

    def close(self) -> None:
        self._drafter.close()
        self._draft.close()
