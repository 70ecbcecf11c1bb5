"""A draft model or head: its session follows the sequence, and its logits give the children of nodes."""

from collections.abc import Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray

from edgespec.loop.backend import Backend, GivesStates, Logits, TakesStates, Work
from edgespec.loop.draft_passes import DraftSteps, Passed, Wanted, read_part
from edgespec.loop.pass_times import Curve, PassTimes
from edgespec.loop.passes import Following, Prefill, prefill
from edgespec.loop.planner import Context
from edgespec.loop.same_vocab import lacks
from edgespec.loop.sampling import Float32Array, IdArray, Scores, adjust
from edgespec.loop.tree import DraftTree

# For Qwen2.5-Coder 0.5B and 1.5B: best of 0.7, 1.0 and 1.4 (greedy), of 0.7, 1.0 and 1.3 (sampling: docs/measured.md).
TAU_GREEDY, TAU_SAMPLING = 0.7, 1.0
BATCHES = 16  # passes over which `Drafter.mean_batch` fades
CATCH_UP = 64  # most generated tokens that one `propose` reads


class Drafter:
    """A session of a draft, with counts since `begin`.

    Attributes:
        seconds: of draft passes.
        passes: number of draft passes.
        last: seconds of the last pass.
        evaluated: nodes in the session.
        mean_batch: mean number of sequences that shared a pass; earlier passes fade.
        pass_cost: pass times.
    """

    def __init__(self, draft: Backend, cost: PassTimes | None) -> None:
        self.draft = draft
        self.evaluated, self.seconds, self.passes, self.last = 0, 0.0, 0, 0.0
        self.mean_batch, self._last_batch = 1.0, 1  # `_last_batch`: sequences that shared the last pass
        self.pass_cost = PassTimes() if cost is None else cost
        self.session = draft.open()
        self._prompt_length = 0
        self._prefill = Prefill(draft, self.session, [])

    def begin(self, prompt_ids: Sequence[int]) -> None:
        """Keep the prefix of the prompt that the session holds."""
        self._prompt_length = len(prompt_ids)
        self._prefill = self._reader(prompt_ids)
        self._prefill.resume()
        self.evaluated, self.seconds, self.passes = 0, 0.0, 0

    def _reader(self, token_ids: Sequence[int], *, want_last: bool = False) -> Prefill:
        """Reads all as a prompt; a draft with a row class of prompts could not keep output that it read so."""
        exact = self.draft.capabilities.exact
        if exact is None or exact.is_one_class:
            return Prefill(self.draft, self.session, token_ids, want_last)
        return Following(self.draft, self.session, token_ids, want_last, prompt_length=self._prompt_length)

    def unread(self, token_ids: Sequence[int]) -> Prefill | None:
        """As for `Planner`: the prompt, or generated tokens if they are too many for `propose`."""
        known, length = len(self.session.token_ids), len(token_ids)
        enough = known + (CATCH_UP if known >= self._prompt_length - 1 else 0)
        if (
            length - 1 <= enough
            or length >= self.draft.capabilities.context_length
            or lacks(self.draft.vocab, token_ids)
        ):
            return None
        self._prefill.token_ids = token_ids[:-1]
        return self._prefill

    @property
    def cost(self) -> Curve | None:
        cost = self.pass_cost.at(len(self.session.token_ids))
        return cost.shared(self._last_batch) if cost else None

    def most_depth(self, context: Context) -> int:
        """As for `Planner`, by the output's end and the draft's context; 0 after a token that the draft lacks."""
        if context.noise.size > self.draft.vocab.size and lacks(self.draft.vocab, context.token_ids):
            return 0
        return min(context.max_depth, self.draft.capabilities.context_length - len(context.token_ids))

    def reading(self, token_ids: Sequence[int]) -> DraftSteps[tuple[Logits, int]]:
        """Yields passes over unread tokens. Returns: logits of the last pass, and the last token's node in them."""
        reading, self.evaluated = self._reader(token_ids, want_last=True), 0
        while True:
            if part := (yield from read_part(reading)):
                work, passed = part
                self._took(work, passed)
                if not reading.unread:
                    return passed.logits, len(work.token_ids) - 1

    def evaluating(self, token_ids: IdArray, parents: IdArray) -> DraftSteps[tuple[Logits, IdArray]]:
        """Yields a pass over new nodes; `parents` are nodes of the session, or -1. Returns: logits, and these nodes."""
        nodes = np.arange(self.evaluated, self.evaluated + len(token_ids))
        tokens, above, wanted = (array.astype(np.int32) for array in (token_ids, parents, nodes))
        work = Work(self.session, tokens, above, wanted)
        passed = yield Wanted(self.draft, work)
        self.evaluated += len(nodes)
        self._took(work, passed)
        return passed.logits, nodes

    def _took(self, work: Work, passed: Passed) -> None:
        self.last, self.passes, self._last_batch = passed.seconds, self.passes + 1, passed.sequences
        self.mean_batch += (passed.sequences - self.mean_batch) / BATCHES
        self.seconds += passed.seconds * len(work.token_ids) / passed.nodes
        self.pass_cost.add(passed.nodes, passed.seconds, len(self.session.token_ids))

    def commit(self, path: Sequence[int]) -> None:
        self.session.commit(path)
        self.evaluated = 0

    def saw(self, start: int, nodes: Sequence[int], logits: Logits, *, prompt: bool = False) -> None:
        """The target has evaluated these nodes, whose tokens stand at `start` and after it."""

    def close(self) -> None:
        self.session.close()


class HeadDrafter(Drafter):
    """A `Drafter` of a head: a few layers that draft from the states of a target whose logits are `GivesStates`.

    EAGLE-3 (arXiv 2503.01840) and multi-token prediction (DeepSeek-V3, arXiv 2412.19437). Any planner with a draft can
    use one. What it reads has states that `saw` gives, and drafted nodes have the head's own, so that no node is kept.
    """

    _prompt: Sequence[int]

    def begin(self, prompt_ids: Sequence[int]) -> None:
        self._prompt = prompt_ids
        super().begin(prompt_ids)

    def saw(self, start: int, nodes: Sequence[int], logits: Logits, *, prompt: bool = False) -> None:
        cast(TakesStates, self.session).give(start, cast(GivesStates, logits).states(nodes))
        end = start + len(nodes)  # a prompt is read at once, so that few states are kept
        if prompt and end <= self.draft.capabilities.context_length:
            prefill(self.draft, self.session, self._prompt[: end + 1])

    def commit(self, path: Sequence[int]) -> None:
        super().commit([])


class ChildScores:
    """Log q of the children of any node in one step, by the draft's logits z.

    coupled     q = softmax((z + T * gumbel(seed, position)) / tau), with the target's noise
    uncoupled   q = softmax(z / T), or softmax(z / tau) if T = 0
    """

    def __init__(self, context: Context, tau: float | None, coupling: bool) -> None:
        sampling = context.sampling
        if tau is None:
            tau = TAU_GREEDY if sampling.temperature == 0 else TAU_SAMPLING
        self._context = context
        self._coupled = coupling and sampling.temperature > 0
        self._temperature = tau if coupling or sampling.temperature == 0 else sampling.temperature
        additive = sampling.changed(repetition_penalty=1.0)  # bias and additive penalties of this step
        zeros, output = np.zeros(context.noise.size, np.float32), context.token_ids[context.prompt_length :]
        self._offset = adjust(zeros, additive, (), output)
        self._noise: dict[int, Float32Array] = {}  # depth -> T * gumbel + offset

    def children(
        self, logits: Logits, nodes: Sequence[int], depth: Sequence[int], count: int
    ) -> tuple[list[IdArray], list[Scores]]:
        """
        Args:
            logits: of the draft's pass.
            nodes: [m] nodes of the pass.
            depth: [m] their depths in the tree.
            count: number of children of each.

        Returns:
            The best children of each node, and their log q.
        """
        return logits.top(nodes, count, self._temperature, [self._added(d) for d in depth])

    def _added(self, depth: int) -> Float32Array:
        if not self._coupled:
            return self._offset
        added = self._noise.get(depth)
        if added is None:
            position = len(self._context.token_ids) + depth  # of the token that follows a node at this depth
            gumbel = self._context.noise.row(position)
            added = self._noise[depth] = gumbel * np.float32(self._context.sampling.temperature) + self._offset
        return added


def agreed(tree: DraftTree, nodes: NDArray[np.intp], tokens: Sequence[int]) -> tuple[int, int]:
    """
    Args:
        tree: the draft's.
        nodes: nodes of the tree that count: those that would be verified if nodes cost nothing.
        tokens: samples of the target.

    Returns:
        (tokens that were the draft's best child, tokens for which there is a child).
    """
    counts = np.zeros(len(tree), np.bool_)
    counts[nodes] = True
    at, hits, asked = 0, 0, 0
    for token in tokens:
        children = np.flatnonzero((tree.parents == at) & counts)
        if len(children) == 0:
            break
        asked += 1
        hits += int(tree.token_ids[children[np.argmax(tree.log_probs[children])]] == token)
        same = children[tree.token_ids[children] == token]
        if len(same) == 0:
            break
        at = int(same[0])
    return hits, asked
