"""N-gram indices: of a sequence that grows, and of hint texts, from which its draft tokens may be copied."""

from collections.abc import Sequence
from typing import TypeAlias

from edgespec.loop.passes import common_prefix
from edgespec.loop.tree import Source

END = -1  # in continuations: the document ends here
LONGEST_INPUT = 6  # longest match looked for, in tokens


class NgramIndex:
    """Occurrences of each run of 0 to `longest` tokens in a growing list. The run of 0 tokens is everywhere."""

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self.text: list[int] = [END]  # the tokens, then one END
        self._after: dict[tuple[int, ...], list[int]] = {}  # run -> where the tokens that followed it are
        self._changing = False  # or an exception, such as KeyboardInterrupt, has ended a change

    def __len__(self) -> int:
        return len(self.text) - 1

    def become(self, tokens: Sequence[int]) -> None:
        """Index these tokens instead, keeping what both begin with."""
        if self._changing:
            self.text, self._after = [END], {}
        shared = common_prefix(self.text[:-1], tokens)
        self.rewind(shared)
        self.extend(tokens[shared:])

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        self._changing = True
        text, after = self.text, self._after
        for token in tokens:
            end = len(text) - 1
            for length in range(min(self.longest, end) + 1):
                after.setdefault(tuple(text[end - length : end]), []).append(end)
            text[end] = token
            text.append(END)
        self._changing = False

    def rewind(self, length: int) -> None:
        """Keep the first `length` tokens."""
        self._changing = True
        for end in range(len(self) - 1, length - 1, -1):
            for run in range(min(self.longest, end) + 1):
                key = tuple(self.text[end - run : end])
                self._after[key].pop()
                if not self._after[key]:
                    del self._after[key]
        self.text[length:] = [END]
        self._changing = False

    def matches(self, count: int) -> list[tuple[int, list[int]]]:
        """Earlier occurrences of the last tokens, longest run first.

        Returns:
            (length of the run, where the tokens that followed it are: at most the last `count`), without the
            lengths that have the same occurrences as a longer one.
        """
        return self.matches_of(self.text[max(0, len(self) - self.longest) : -1], count)

    def matches_of(self, end: Sequence[int], count: int) -> list[tuple[int, list[int]]]:
        """As `matches`, for the end of another text."""
        found = list[tuple[int, list[int]]]()
        known = 0
        for length in range(min(self.longest, len(end)), -1, -1):
            places = self._after.get(tuple(end[len(end) - length :]), [])
            if len(places) > known:
                known = len(places)
                found.append((length, places[-count:]))
        return found


Hint: TypeAlias = tuple[Source, NgramIndex]  # the index of a text, and the source that its copies have


class HintTexts:
    """Texts shared by the sequences of one request: a predicted answer, and what each sequence has generated.

    Each begins with the last tokens of the prompt, so that the first tokens of an answer match it.
    """

    def __init__(self, prompt_ids: Sequence[int], prediction: Sequence[int] = ()) -> None:
        """
        Args:
            prompt_ids: the prompt of all the sequences.
            prediction: tokens of a predicted answer; empty: there is none.
        """
        self._head = list(prompt_ids[-LONGEST_INPUT:])
        self._predicted = [(Source.PREDICTION, self._index(prediction))] if prediction else []
        self._generated = list[NgramIndex]()
        self.prediction = len(prediction)  # tokens

    def __eq__(self, other: object) -> bool:
        """True if prompt and prediction are equal."""
        return isinstance(other, HintTexts) and self._given == other._given

    @property
    def _given(self) -> tuple[list[int], list[list[int]]]:
        return self._head, [index.text for _, index in self._predicted]

    def _index(self, tokens: Sequence[int]) -> NgramIndex:
        index = NgramIndex(LONGEST_INPUT)
        index.extend([*self._head, *tokens])
        return index

    def join(self) -> int:
        """Add a sequence; its number."""
        self._generated.append(self._index(()))
        return len(self._generated) - 1

    def extend(self, number: int, tokens: Sequence[int]) -> None:
        """A sequence has grown."""
        self._generated[number].extend(tokens)

    def hints(self, number: int) -> list[Hint]:
        """Hints for one sequence: the prediction and its siblings."""
        siblings = [(Source.INPUT, index) for i, index in enumerate(self._generated) if i != number]
        return [*self._predicted, *siblings]
