"""N-gram indices of a sequence and of its hint texts: both hold tokens that a planner can copy."""

from collections.abc import Sequence
from itertools import islice
from typing import TypeAlias

from edgespec.loop.passes import common_prefix
from edgespec.loop.tree import Source

END = -1  # follows the last token of an index, and of a datastore's document
LONGEST_INPUT = 6  # tokens of the longest match
MOST_SIBLINGS = 16  # outputs that a sequence searches: each takes time in each step


class NgramIndex:
    """Places of each run of 0 to `longest` tokens in a growing list; the run of 0 tokens occurs everywhere.

    Attributes:
        text: the tokens, then one END.
    """

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self.text: list[int] = [END]
        self._after: dict[tuple[int, ...], list[int]] = {}  # run -> positions of the tokens after it
        self._changing = False  # stays True where KeyboardInterrupt ends a change and leaves the index broken

    def __len__(self) -> int:
        return len(self.text) - 1

    def become(self, tokens: Sequence[int]) -> None:
        """Index `tokens` instead of the present ones."""
        if self._changing:
            self.text, self._after = [END], {}
        shared = common_prefix(self.text[:-1], tokens)
        self.rewind(shared)
        self.extend(tokens[shared:])

    def extend(self, tokens: Sequence[int]) -> None:
        """Append `tokens`."""
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
        """
        Returns:
            Earlier occurrences of the last tokens, longest run first: (run length, at most the last `count` positions
            of the tokens after it); no length that has only the occurrences of a longer one.
        """
        return self.matches_of(self.text[max(0, len(self) - self.longest) : -1], count)

    def matches_of(self, end: Sequence[int], count: int) -> list[tuple[int, list[int]]]:
        """
        Returns:
            As for `matches`, of the last tokens of another sequence, `end`.
        """
        found = list[tuple[int, list[int]]]()
        known = 0
        for length in range(min(self.longest, len(end)), -1, -1):
            places = self._after.get(tuple(end[len(end) - length :]), [])
            if len(places) > known:
                known = len(places)
                found.append((length, places[-count:]))
        return found


Hint: TypeAlias = tuple[Source, NgramIndex]  # an index, and the source of tokens that are copied from it


class HintTexts:
    """Hint texts of one request: a predicted answer, and the output of each of its sequences.

    Each of them begins with the prompt's last tokens, so that the first tokens of an answer find a match.
    """

    def __init__(self, prompt_ids: Sequence[int], prediction: Sequence[int] = ()) -> None:
        """Args:
        prompt_ids: the prompt of all sequences.
        prediction: tokens of the predicted answer; empty: none.
        """
        self._head = list(prompt_ids[-LONGEST_INPUT:])
        self._given = self._head, list(prediction)
        self._predicted = [(Source.PREDICTION, self._index(prediction))] if prediction else []
        self._generated = list[NgramIndex]()
        self._wrote: dict[int, None] = {}  # their numbers; the one that joined or wrote last comes last
        self.prediction_length = len(prediction)

    def __eq__(self, other: object) -> bool:
        """Made of the same texts: a prepared request is compared with the one that comes."""
        return isinstance(other, HintTexts) and self._given == other._given

    def _index(self, tokens: Sequence[int]) -> NgramIndex:
        index = NgramIndex(LONGEST_INPUT)
        index.extend([*self._head, *tokens])
        return index

    def join(self) -> int:
        """Add a sequence and return its number."""
        number = len(self._generated)
        self._generated.append(self._index(()))
        self._wrote[number] = None
        return number

    def extend(self, number: int, tokens: Sequence[int]) -> None:
        """Append tokens to the output of sequence `number`."""
        self._generated[number].extend(tokens)
        self._wrote.pop(number, None)
        self._wrote[number] = None

    def hints(self, number: int) -> list[Hint]:
        """Hints for sequence `number`: the prediction, and the output of its siblings that wrote last."""
        last = islice((one for one in reversed(self._wrote) if one != number), MOST_SIBLINGS)
        return [*self._predicted, *((Source.INPUT, self._generated[one]) for one in sorted(last))]
