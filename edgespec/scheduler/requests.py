"""Requests: a prompt, and what its output is to be."""

from collections.abc import Sequence
from dataclasses import dataclass

from edgespec.loop.grammar import Compiled
from edgespec.loop.hint_texts import HintTexts
from edgespec.loop.sampling import SamplingParams


@dataclass(slots=True, eq=False)
class PassCounter:
    """Counts passes in which a request with this counter has a part; one counts once, also where several share it."""

    passes: int = 0
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        self.passes, self.seconds = self.passes + 1, self.seconds + seconds


@dataclass(frozen=True, slots=True)
class Request:
    """
    Attributes:
        stop: strings that end the output.
        log_probs: report log-probabilities, also of this number of most probable tokens; None: report none.
        plain: decode without draft tokens.
        grammar: what the output must match.
        hint_texts: texts to copy draft tokens from.
        shown: control tokens whose names are part of the output.
        counter: of its passes.
        sender: only requests of one sender share prefixes.
    """

    prompt_ids: list[int]
    sampling: SamplingParams
    max_tokens: int
    stop: Sequence[str] = ()
    log_probs: int | None = None
    plain: bool = False
    grammar: Compiled | None = None
    hint_texts: HintTexts | None = None
    shown: frozenset[int] = frozenset()
    counter: PassCounter | None = None
    sender: str = ""
