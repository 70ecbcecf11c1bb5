"""Check that a draft has the vocabulary of its target."""

from collections.abc import Sequence

from edgespec.errors import VocabMismatch
from edgespec.loop.backend import Vocab

MAX_PADDING = 1024  # most tokens that one vocabulary of a pair may have after the other's last


def lacks(draft: Vocab, token_ids: Sequence[int]) -> bool:
    """Return whether a draft, padded to a smaller size than its target, ends before one of these tokens."""
    return max(token_ids, default=0) >= draft.size


def check_same_vocab(target: Vocab, draft: Vocab, *, writes: bool = False) -> None:
    """Refuse a draft with another vocabulary than the target.

    Unused tokens at the end may differ: families pad them to different sizes (Qwen2.5: 151,936 to 152,064). The target
    verifies what a draft proposes, so control tokens and unused ones may have other names: QwQ has <think> where
    Qwen2.5 has nothing.

    Args:
        target: its tokenizer.
        draft: likewise.
        writes: the draft's tokens become text without the target's choice, so names must be equal.

    Raises:
        VocabMismatch: a token or the size differs; it names which.
    """
    if target.fingerprint == draft.fingerprint:
        return
    common = min(target.size, draft.size)
    for token in range(common):
        left, right = target.token_text(token), draft.token_text(token)
        if left != right and (writes or (target.token_bytes(token) and draft.token_bytes(token))):
            raise VocabMismatch(
                f"the draft has another vocabulary than the target: token {token} is {left!r} in the target and "
                f"{right!r} in the draft (sizes {target.size} and {draft.size}); use a draft of the same model family"
            )
    if abs(target.size - draft.size) > MAX_PADDING:
        raise VocabMismatch(
            f"the draft has another vocabulary than the target: {draft.size} tokens, not {target.size}; "
            f"use a draft of the same model family"
        )
