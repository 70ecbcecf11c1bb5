"""Puts passes together: the next part of a prompt, the nodes of a tree, the prefix that a session can reuse."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np
from numpy.typing import ArrayLike, NDArray

from edgespec.errors import ContextFull
from edgespec.loop.backend import Backend, Capabilities, Logits, Session, Work
from edgespec.loop.engines import ReadsExperts
from edgespec.loop.shapes import RowClass
from edgespec.loop.tree import DraftTree, FloatArray, Proposal, depths, is_leaf, ranked

NO_NODES = np.zeros(0, np.intp)
TOO_LONG = "prompt is too long"  # Anthropic's words
FIRST_SLICE = 64  # tokens that `common_prefix` compares first: most prefixes are short or whole


@dataclass(frozen=True, slots=True)
class Proposed:
    """One sequence's proposal, before it is cut to the rows that its pass has left.

    Attributes:
        nodes: [m] nodes that pay and fit, best first, the root left out.
        started: `perf_counter()` when proposing began.
        draft_seconds: seconds of its draft passes.
    """

    tree: DraftTree
    nodes: NDArray[np.intp]
    started: float
    draft_seconds: float

    @property
    def log_probs(self) -> FloatArray:
        """Log-probabilities of `nodes`, [m], falling."""
        return self.tree.log_probs[self.nodes]


@dataclass(frozen=True, slots=True)
class Pass:
    """One sequence's part of a forward.

    Attributes:
        tree: the tree to be verified; None: a part of the prompt.
        started: as in `Proposed`.
        draft_seconds: as in `Proposed`.
        plain: as in `Step`.
        rows: as in `Step`.
    """

    work: Work
    tree: DraftTree | None = None
    started: float = 0.0
    draft_seconds: float = 0.0
    plain: bool = False
    rows: int = 0


@dataclass(frozen=True, slots=True)
class Ran:
    """About a pass of the target.

    Attributes:
        began: `perf_counter()` then.
        seconds: of the pass.
        wait_seconds: as in `Step`.
        sequences: that shared it.
        experts: different ones of a layer that it has chosen; 0: they were not counted.
    """

    began: float = 0.0
    seconds: float = 0.0
    wait_seconds: float = 0.0
    sequences: int = 1
    experts: float = 0.0


UNTIMED = Ran()


def run(target: Backend, works: Sequence[Work]) -> tuple[list[Logits], Ran]:
    """Make a pass of the target; errors as for `Backend.forward`."""
    mixture = target.mixture if isinstance(target, ReadsExperts) else None
    wanted = mixture.memory.wanted if mixture else 0
    began, waited = perf_counter(), target.wait_seconds
    logits = target.forward(works)
    seconds = perf_counter() - began
    experts = (mixture.memory.wanted - wanted) / len(mixture.memory.layers) if mixture else 0.0
    return logits, Ran(began, seconds, target.wait_seconds - waited, len(works), experts)


def rows_of(parents: ArrayLike, unread: int) -> int:
    """
    Args:
        parents: of a tree.
        unread: number of unread tokens that each path begins with.

    Returns:
        Rows of a pass over the tree as paths.
    """
    return int(np.count_nonzero(is_leaf(parents))) * (unread + 1 + int(depths(parents).max()))


def fitting(proposal: Proposal, budget: int, max_leaves: int) -> NDArray[np.intp]:
    """
    Returns:
        Nodes of the proposal that pay and fit: [m], at most `budget`, best first, the root left out.
    """
    if proposal.nodes is not None:
        return proposal.nodes[:budget]
    if len(proposal.tree) == 1:
        return NO_NODES
    return ranked(proposal.tree.parents, proposal.tree.log_probs, budget, max_leaves)


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Number of leading tokens that are equal; slices are compared, since a loop over a long prompt takes long."""
    if type(left) is not type(right):
        left, right = list(left), list(right)
    shorter = min(len(left), len(right))
    start, end = 0, min(FIRST_SLICE, shorter)
    while left[start:end] == right[start:end]:
        if end == shorter:
            return shorter
        start, end = end, min(2 * end, shorter)
    while end - start > 1:
        middle = (start + end) // 2
        if left[start:middle] == right[start:middle]:
            start = middle
        else:
            end = middle
    return start


@dataclass(slots=True)
class Prefill:
    """Makes tokens the committed tokens of a session: `work`, then `read` or `commit`, while some are `unread`.

    Attributes:
        backend: the session's backend.
        session: any session; its uncommitted nodes are dropped.
        token_ids: the tokens wanted; a prefix that the session holds is kept.
        want_last: the last token's logits are wanted.
        retries: how often all may be read again after ContextFull, since an emptied session may have room, if its cells
            were moved and could not be continued.
    """

    backend: Backend
    session: Session
    token_ids: Sequence[int]
    want_last: bool = False
    retries: int = 1

    @property
    def unread(self) -> int:
        """Number of tokens that are not committed yet."""
        return max(0, len(self.token_ids) - len(self.session.token_ids))

    def resume(self) -> int:
        """Keep the prefix that can be continued; passes of other sequences may shorten it.

        Returns:
            Number of tokens kept.
        """
        start = start_of(self.backend.capabilities, self.session, self.token_ids, want_last=self.want_last)
        self.session.rewind(start)
        return start

    def work(self, most: int | None = None) -> Work:
        """
        Args:
            most: most tokens, without effect for a short prompt or with `blocks`; default: as many as a pass takes.

        Returns:
            The next part.
        """
        limits, session, start = self.backend.capabilities, self.session, self.resume()
        exact = limits.exact
        if short := is_short(limits, len(self.token_ids)):
            end = len(self.token_ids)
        elif exact and exact.blocks:
            end = start - start % exact.prompts.most + exact.prompts.most
        else:
            fits = min(limits.max_nodes, exact.prompts.most if exact else limits.max_nodes) - session.unread_committed
            end = start + (fits if most is None else min(fits, most))
        piece = np.asarray(self.token_ids[start:end], np.int32)
        nodes = np.arange(len(piece), dtype=np.int32)
        wanted = nodes[-1:] if self.want_last and end >= len(self.token_ids) else nodes[:0]
        return Work(session, piece, nodes - 1, wanted, prompt=True, short=short)

    def read(self, work: Work, saw: Callable[[Work, Logits], None] | None = None) -> Logits | None:
        """Make a pass over a part, and commit it.

        Args:
            work: the part.
            saw: called after the pass, before the commit.

        Returns:
            None: the session was emptied, and all must be read again.

        Raises:
            ContextFull: the tokens do not fit.
        """
        try:
            [logits] = self.backend.forward([work])
        except ContextFull:
            if not self.may_begin_again():
                raise
            self.session.rewind(0)
            return None
        if saw:
            saw(work, logits)
        self.commit(work)
        return logits

    def commit(self, work: Work) -> None:
        """Commit a part after its pass."""
        self.session.commit(list(range(len(work.token_ids))))

    def may_begin_again(self) -> bool:
        """Use one retry, for which the caller empties the session.

        Returns:
            False: none is left, or the tokens would not fit into an empty session either.
        """
        limit = self.backend.capabilities.context_length
        if self.retries == 0 or not self.session.token_ids or len(self.token_ids) > limit:
            return False
        self.retries -= 1
        return True


@dataclass(slots=True)
class Following(Prefill):
    """Reads a prompt in the row class of prompts, and the output after it in that of trees, as a target does.

    Attributes:
        prompt_length: number of the first tokens that are read as a prompt.
    """

    prompt_length: int = 0

    def resume(self) -> int:
        """As `Prefill.resume`; output stays, too."""
        kept = min(common_prefix(self.session.token_ids, self.token_ids), len(self.token_ids) - self.want_last)
        unread = self.session.unread_committed
        if most_nodes(self.backend.capabilities, unread) < 1:  # more than a pass takes are read in parts
            kept = min(kept, len(self.session.token_ids) - unread)
        if kept < self.prompt_length:
            kept = self._of_prompt().resume()
        self.session.rewind(kept)
        return kept

    def work(self, most: int | None = None) -> Work:
        """As `Prefill.work`; `most` is for the prompt."""
        start = self.resume()
        if start < self.prompt_length:
            return self._of_prompt().work(most)
        rows = most_nodes(self.backend.capabilities, self.session.unread_committed)
        piece = np.asarray(self.token_ids[start : start + rows], np.int32)
        nodes = np.arange(len(piece), dtype=np.int32)
        return Work(self.session, piece, nodes - 1, nodes[-1:])  # a tree's pass always has logits

    def _of_prompt(self) -> Prefill:
        prompt = self.token_ids[: self.prompt_length]
        return Prefill(self.backend, self.session, prompt, self.want_last and len(self.token_ids) <= self.prompt_length)


def prefill(
    backend: Backend,
    session: Session,
    token_ids: Sequence[int],
    *,
    want_last: bool = False,
    progress: Callable[[int, int], None] | None = None,
    saw: Callable[[Work, Logits], None] | None = None,
) -> tuple[Logits, int] | None:
    """Make `token_ids` the session's committed tokens; arguments as for `Prefill`.

    Args:
        progress: called with (tokens done, all tokens) before the first and after every pass.
        saw: as for `Prefill.read`.

    Returns:
        With `want_last`, the logits and the last token's node in them; else None.

    Raises:
        ContextFull: the tokens do not fit.
    """
    reading, last = Prefill(backend, session, token_ids, want_last), None
    reading.resume()
    if progress and reading.unread:
        progress(len(session.token_ids), len(token_ids))
    while reading.unread:
        work = reading.work()
        if (logits := reading.read(work, saw)) is None:
            continue
        last = logits, len(work.token_ids) - 1
        if progress:
            progress(len(session.token_ids), len(token_ids))
    return last if want_last else None


def is_short(limits: Capabilities, length: int) -> bool:
    """True if a prompt of `length` tokens is read in one pass of the row class `BatchInvariance.short`."""
    exact = limits.exact
    return bool(exact and exact.short and length < exact.prompts.least and length <= exact.short.most)


def start_of(limits: Capabilities, session: Session, token_ids: Sequence[int], *, want_last: bool = False) -> int:
    """
    Returns:
        Number of the prompt's first tokens that the session keeps; with `want_last`, the last one is read again.
    """
    shared = min(common_prefix(session.token_ids, token_ids), len(token_ids) - want_last)
    return session.reusable_prefix(shared, short=is_short(limits, len(token_ids)))


def check_batch(batch: Sequence[Work], limits: Capabilities) -> None:
    """Refuse a batch that a backend cannot evaluate in one forward, before any work is done.

    Raises:
        ValueError: too many nodes, wanted nodes or rows, or works of different row classes.
    """
    nodes = sum(len(work.token_ids) for work in batch)
    counts = [
        ("nodes", nodes, limits.max_nodes),
        ("wanted nodes", sum(len(work.wanted) for work in batch), limits.max_wanted),
    ]
    if exact := limits.exact:
        if len({(work.prompt, work.short) for work in batch}) > 1 and not exact.is_one_class:
            raise ValueError("prompts and trees in one forward, or short prompts and others; their passes differ here")
        if exact.blocks and len(batch) > 1 and any(work.prompt for work in batch):
            raise ValueError("a prompt and other works in one forward; here rows depend on each other")
    if shape := shape_of(limits, batch):
        counts.append(("rows", nodes + sum(work.session.unread_committed for work in batch), shape.most))
    for name, count, limit in counts:
        if count > limit:
            raise ValueError(f"{count} {name} in one forward; this backend takes {limit}")


def shape_of(limits: Capabilities, batch: Sequence[Work]) -> RowClass | None:
    """The row class of a pass over these works; None: any shape."""
    exact = limits.exact
    if exact is None:
        return None
    if any(work.short for work in batch):
        return exact.short
    return exact.prompts if any(work.prompt for work in batch) else exact.trees


def most_nodes(limits: Capabilities, unread: int) -> int:
    """Most nodes of a tree, the root included, in a session with `unread` tokens (`Session.unread_committed`)."""
    most = min(limits.max_nodes, limits.max_wanted)
    return min(most, limits.exact.trees.most - unread) if limits.exact else most


def check_room(backend: Backend, prompt_length: int) -> None:
    """Refuse a prompt that leaves no room for a single new token, before any work is done.

    Raises:
        ContextFull: with the numbers.
    """
    limit = backend.capabilities.context_length
    if prompt_length >= limit:
        raise full(f"{prompt_length} tokens > {limit - 1} maximum", limit)


def full(found: str, limit: int) -> ContextFull:
    """The error for a prompt, in Anthropic's and in OpenAI's words: agents that read them shorten the conversation."""
    return ContextFull(
        f"{TOO_LONG}: {found}; this model's maximum context length is {limit} tokens, with the answer: "
        f"shorten the prompt or use a larger context (--ctx, context_length=…)"
    )
