"""How long a text will become, foretold from those that were written for prompts like its own.

The idea of ALISE (arXiv 2410.23537): where more texts are wanted than can be written at once, short ones first lets
people wait less on the whole. No model is trained: a prompt's words are looked up in the latest prompts, rare words
counting more, and the lengths of the nearest texts are averaged, as logarithms. What is foretold decides the order
alone, never the text.
"""

from collections import Counter, deque
from collections.abc import Sequence
from math import exp, inf, log

LATEST = 512  # prompts that are remembered
NEAREST = 12  # of them are asked
WORDS = 256  # a prompt's last tokens: earlier ones are seldom the question
BELIEF = 0.15  # similarity that the mean of all texts counts as
FIRST = 200.0  # tokens that are expected before anything was seen


class Lengths:
    """Learns from finished texts."""

    def __init__(self) -> None:
        self._seen: deque[tuple[frozenset[int], float]] = deque()  # words of a prompt, log of its text's tokens
        self._often = Counter[int]()  # word -> prompts that have it
        self._sum = 0.0  # of the logs

    def learn(self, prompt_ids: Sequence[int], tokens: int) -> None:
        """A text with so many tokens was written."""
        words = frozenset(prompt_ids[-WORDS:])
        self._seen.append((words, log(max(1, tokens))))
        self._often.update(words)
        self._sum += self._seen[-1][1]
        if len(self._seen) > LATEST:
            words, value = self._seen.popleft()
            self._often.subtract(words)
            self._sum -= value

    def foretell(self, prompt_ids: Sequence[int], most: float = inf) -> float:
        """Tokens that the text will have, at most so many."""
        count = len(self._seen)
        if not count:
            return min(most, FIRST)
        seen = [word for word in set(prompt_ids[-WORDS:]) if 0 < self._often[word] <= count / 2]
        weights = {word: log((count + 1) / self._often[word]) ** 2 for word in seen}
        found = sorted(((self._alike(weights, words), value) for words, value in self._seen), reverse=True)[:NEAREST]
        total = BELIEF + sum(alike for alike, _ in found)
        return min(most, exp((BELIEF * self._sum / count + sum(alike * value for alike, value in found)) / total))

    @staticmethod
    def _alike(weights: dict[int, float], words: frozenset[int]) -> float:
        """What two prompts share, and how far they are of one size, from 0 to 1."""
        shared = sum(weight for word, weight in weights.items() if word in words)
        sizes = sorted((len(weights), len(words)))
        return shared / (sum(weights.values()) or 1.0) * sizes[0] / (sizes[1] or 1)


def urgency(waited: float, seconds: float) -> float:
    """Whose turn it is: the highest response ratio next (Brinch Hansen, 1971).

    Short texts come first, but every one rises while it waits, and none waits for ever.

    Args:
        waited: seconds since it was asked for.
        seconds: that writing it is foretold to take.
    """
    return (waited + seconds) / max(seconds, 1e-9)
