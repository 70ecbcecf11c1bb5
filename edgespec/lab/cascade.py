"""Speculative cascades (arXiv 2405.19261): texts that lie between the target's and the draft's. Approximate.

A token is sampled, with the noise of its position, from

    pi = q * [v in A] + q(not in A) * p       A = {v : p1(v) >= (1 - alpha) * max p1}       (the rule Token-V3)

p and q are the target's and the draft's distributions after temperature, top-k, top-p and min-p. p1 is the target's
distribution before these four. Grammar, bias and penalties act on all three. At T = 0, p and q are single tokens: pi
is the draft's token if it is in A, else the target's.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ContextFull
from edgespec.loading.approximate import Approximate
from edgespec.loop.backend import Backend, Logits, Session, Work
from edgespec.loop.draft_passes import DraftSteps, Passed, Wanted, read_part, run_one
from edgespec.loop.grammar import Constraint
from edgespec.loop.passes import Following, Prefill, most_nodes
from edgespec.loop.planner import Context, Planner, PlannerStats
from edgespec.loop.same_vocab import lacks
from edgespec.loop.sampling import Float32Array, SamplingParams, Scores, adjust, distribution
from edgespec.loop.step import Step
from edgespec.loop.tree import DraftTree, Proposal

AT_ONCE = 8  # most rows of a draft pass: the last sampled token, and the draft tokens most likely to follow it
LIKELY = 0.2  # least probability of such a draft token


def mixture(p: Float32Array, q: Float32Array, alpha: float, sampling: SamplingParams) -> Scores:
    """pi, [V], of adjusted logits of the target and the draft."""
    with np.errstate(divide="ignore"):
        allowed: NDArray[np.bool_] = p >= p.max() + np.log1p(-alpha)
    found = distribution(q, sampling)
    left = found.sum(where=~allowed)
    found *= allowed
    return found + left * distribution(p, sampling) if left else found


class CascadePlanner(Planner):
    """Proposes what another planner does, and changes what is sampled.

    A session of its own reads each token that was sampled from, in passes of the row classes of prompt and output, so
    that a row of q depends on the text alone. `propose` reads the last token, and likely ones after it, in passes that
    sequences share; `mix` reads what is missing. Where the draft's context ends, tokens are sampled from p.
    """

    def __init__(self, planner: Planner, draft: Backend, alpha: float) -> None:
        """
        Args:
            planner: proposes the trees; its draft does not run ahead.
            draft: the draft model, with room for another session.
            alpha: above 0.
        """
        self.name, self.depth, self.approximate = planner.name, planner.depth, f"cascade {alpha:.12g}"
        self._planner, self._draft, self._alpha = planner, draft, alpha
        self._session = draft.open()
        self._prompt: Sequence[int] = ()
        self._passes, self._seconds, self._mixing = 0, 0.0, 0.0
        self._forget()

    def _forget(self) -> None:
        self._tree: DraftTree | None = None
        self._node: int | None = 0  # of the proposed tree, with the last sampled token; None: no node has it
        self._chain, self._used = list[int](), 0  # tokens of the last draft pass, rows of it that were sampled from
        self._rows = list[Float32Array]()

    @property
    def stats(self) -> PlannerStats:
        known = self._planner.stats
        passes, seconds = known.draft_passes + self._passes, known.draft_seconds + self._seconds
        return replace(known, draft_passes=passes, draft_seconds=seconds, mixing_seconds=self._mixing)

    @property
    def draft_session(self) -> Session | None:
        return self._planner.draft_session

    def begin(self, prompt_ids: Sequence[int]) -> None:
        self._planner.begin(prompt_ids)
        self._forget()
        self._prompt, self._passes, self._seconds, self._mixing = prompt_ids, 0, 0.0, 0.0
        Prefill(self._draft, self._session, prompt_ids[:-1]).resume()

    def unread(self, token_ids: Sequence[int]) -> Prefill | None:
        """Of the planner's own session; the other one reads where it is sampled from."""
        return self._planner.unread(token_ids)

    def most_depth(self, context: Context) -> int:
        return self._planner.most_depth(context)

    def propose(self, context: Context, budget: int) -> DraftSteps[Proposal]:
        proposal = yield from self._planner.propose(context, budget)
        self._tree = proposal.tree
        if self._can_read(context.token_ids, (), context.noise.size):
            with suppress(ContextFull):  # the pass had no room: `mix` reads what is missing
                yield from self._reading(context.token_ids)
        return proposal

    def paying(self, tree: DraftTree, context: Context, budget: int) -> NDArray[np.intp]:
        return self._planner.paying(tree, context, budget)

    def during(self, nodes: int) -> AbstractContextManager[None]:
        return self._planner.during(nodes)

    def mix(
        self, row: Float32Array, sampling: SamplingParams, token_ids: Sequence[int], accepted: Sequence[int],
        grammar: Constraint | None,
    ) -> tuple[Float32Array, SamplingParams]:  # fmt: skip
        if not self._can_read(token_ids, accepted, len(row)):
            return row, sampling
        own = np.full(len(row), -np.inf, np.float32)  # the two output matrices may be padded to other sizes
        read = self._row(token_ids, accepted)[: len(row)]
        own[: len(read)] = read
        own = grammar.masked(own) if grammar else own
        output = [*token_ids[len(self._prompt) :], *accepted] if sampling.has_penalties else ()
        p, q = (adjust(logits, sampling, self._prompt, output) for logits in (row, own))
        pi, log_pi = mixture(p, q, self._alpha, sampling), np.full(len(row), -np.inf, np.float32)
        np.log(pi, out=log_pi, where=pi > 0, casting="same_kind")
        return log_pi, SamplingParams(temperature=1.0 if sampling.temperature else 0.0)

    def _can_read(self, token_ids: Sequence[int], accepted: Sequence[int], vocab_size: int) -> bool:
        """Return whether the draft can read these: its context may be too short, or its vocabulary too small.

        Args:
            token_ids: committed.
            accepted: after them.
            vocab_size: of the target.
        """
        if len(token_ids) + len(accepted) > self._draft.capabilities.context_length:
            return False
        vocab = self._draft.vocab
        return vocab_size <= vocab.size or not (lacks(vocab, token_ids) or lacks(vocab, accepted))

    def _row(self, token_ids: Sequence[int], accepted: Sequence[int]) -> Float32Array:
        """The draft's logits after these tokens."""
        token = accepted[-1] if accepted else token_ids[-1]
        if accepted and self._node is not None:
            self._node = self._child(self._node, token)
        if self._chain[self._used : self._used + 1] != [token]:
            self._read([*token_ids, *accepted])
        self._used += 1
        return self._rows[self._used - 1]

    def _read(self, tokens: Sequence[int]) -> None:
        """Read what `propose` has not read."""
        before = self._seconds
        try:
            run_one(self._reading(tokens))
        except ContextFull:
            self._planner.give_up()  # the nodes of its tree leave their cells
            run_one(self._reading(tokens))
        self._mixing += self._seconds - before

    def _child(self, node: int, token: int | None = None) -> int | None:
        """The child with a token, or the most probable one if it is likely."""
        if self._tree is None:
            return None
        below = self._tree.parents == node
        children = np.flatnonzero(below if token is None else below & (self._tree.token_ids == token))
        if len(children) == 0:
            return None
        log_probs = self._tree.log_probs
        best = int(children[np.argmax(log_probs[children])])
        if token is None and lacks(self._draft.vocab, [int(self._tree.token_ids[best])]):
            return None
        return best if token is not None or log_probs[best] - log_probs[node] > np.log(LIKELY) else None

    def _reading(self, tokens: Sequence[int]) -> DraftSteps[None]:
        """Commit what was sampled from, and read the last token, with draft tokens that are likely to follow."""
        self._commit()
        reading = Following(self._draft, self._session, tokens[:-1], prompt_length=len(self._prompt) - 1)
        while reading.unread:
            if part := (yield from read_part(reading)):
                self._count(*part)
        limits = self._draft.capabilities
        room = min(most_nodes(limits, self._session.unread_committed), limits.context_length - len(tokens) + 1)
        chain, node = [tokens[-1]], self._node
        while len(chain) < min(AT_ONCE, room) and node is not None and (node := self._child(node)) is not None:
            assert self._tree
            chain.append(int(self._tree.token_ids[node]))
        nodes = np.arange(len(chain), dtype=np.int32)
        work = Work(self._session, np.array(chain, np.int32), nodes - 1, nodes)
        read = yield Wanted(self._draft, work)
        self._chain, self._rows = chain, [read.logits.row(row) for row in range(len(chain))]
        self._count(work, read)

    def _count(self, work: Work, passed: Passed) -> None:
        self._passes += 1
        self._seconds += passed.seconds * len(work.token_ids) / passed.nodes

    def _commit(self) -> None:
        if self._chain:  # also if no row of it was used: its nodes go
            self._session.commit(list(range(self._used)))
        self._chain, self._used = [], 0

    def saw_prompt(self, start: int, count: int, logits: Logits) -> None:
        self._planner.saw_prompt(start, count, logits)

    def result(self, step: Step, logits: Logits | None) -> None:
        self._commit()
        self._forget()
        self._planner.result(step, logits)

    def give_up(self) -> None:
        self._commit()
        self._forget()
        self._planner.give_up()

    def close(self) -> None:
        self._session.close()
        self._planner.close()


class Cascade(Approximate):
    name, usual, right, mixed = "cascade", 0.5, "from 0 to 1", True

    @staticmethod
    def is_right(value: float) -> bool:
        return 0 <= value <= 1

    def planner(self, planner: Planner, draft: Backend) -> Planner:
        return CascadePlanner(planner, draft, self.value)


METHOD = Cascade
