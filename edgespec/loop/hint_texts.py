"""Where runs of tokens have occurred: in a text that grows, and in texts beside it that may foretell it."""

from collections.abc import Sequence

from edgespec.loop.passes import common_prefix
from edgespec.loop.tree import Source

END = -1  # in continuations: the document ends here
LONGEST_INPUT = 6  # longest match looked for, in tokens


class NgramIndex:
    """Where each run of 0 to `longest` tokens has occurred in a growing text. The run of 0 tokens is everywhere."""

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
        """Append to the text."""
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


Beside = Sequence[tuple[Source, NgramIndex]]


class Family:
    """The texts of one request: a predicted answer may foretell all of them, and each what its siblings write next.

    Every text here begins with the last tokens of the prompt, so that the first guess finds its beginning.
    """

    def __init__(self, prompt_ids: Sequence[int], prediction: Sequence[int] = ()) -> None:
        """
        Args:
            prompt_ids: what all the texts answer.
            prediction: what they may be, as tokens; empty: nothing is known.
        """
        self._head = list(prompt_ids[-LONGEST_INPUT:])
        self._predicted = [(Source.PREDICTION, self._index(prediction))] if prediction else []
        self._written = list[NgramIndex]()
        self.prediction = len(prediction)  # tokens

    def __eq__(self, other: object) -> bool:
        """Whether the same was foretold before anything was written."""
        return isinstance(other, Family) and self._foretold == other._foretold

    @property
    def _foretold(self) -> tuple[list[int], list[list[int]]]:
        return self._head, [index.text for _, index in self._predicted]

    def _index(self, tokens: Sequence[int]) -> NgramIndex:
        index = NgramIndex(LONGEST_INPUT)
        index.extend([*self._head, *tokens])
        return index

    def join(self) -> int:
        """One more text; its number."""
        self._written.append(self._index(()))
        return len(self._written) - 1

    def extend(self, number: int, tokens: Sequence[int]) -> None:
        """A text has grown."""
        self._written[number].extend(tokens)

    def beside(self, number: int) -> Beside:
        """What may foretell a text, besides itself."""
        siblings = [(Source.INPUT, index) for i, index in enumerate(self._written) if i != number]
        return [*self._predicted, *siblings]
