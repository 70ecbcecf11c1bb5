"""Constrained decoding by a JSON schema, a regular expression, or a Lark grammar, with the package llguidance.

The mask depends on earlier tokens only, so drafts change nothing.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import log
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import MissingPackage, ModelError, UsageError
from edgespec.loop.backend import Vocab
from edgespec.loop.sampling import Float32Array
from edgespec.loop.tree import DraftTree, Source, make_tree

MOST_BYTES = 64 * 2**10
SPECIAL = b"\xff"  # begins the names of control tokens
SEEN = 3  # tokens before forced text that are encoded with it: it may begin within a token
SURE = log(0.98)  # log-probability of a token within forced text
LAST = log(0.5)  # log-probability of its last token, which may reach beyond it


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar's source, made by `json_schema`, `regex` or `lark`."""

    kind: str
    text: str


def json_schema(schema: Mapping[str, Any] | str) -> Grammar:
    """JSON by a schema, without free white space, which models may repeat for ever.

    Raises:
        UsageError: it is not a JSON object.
    """
    try:
        found = json.loads(schema) if isinstance(schema, str) else dict(schema)
        text = json.dumps({**found, "x-guidance": {"whitespace_flexible": False}})
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"the JSON schema is not a JSON object: {error}") from error
    return Grammar("json_schema", text)


def json_object() -> Grammar:
    """Any JSON object."""
    return json_schema({"type": "object"})


def regex(pattern: str) -> Grammar:
    """A regular expression that matches the whole answer, in the syntax of Rust's regex crate."""
    return Grammar("regex", pattern)


def lark(rules: str) -> Grammar:
    """A grammar in llguidance's variant of Lark, whose rule `start` is the answer."""
    return Grammar("lark", rules)


class Tokenizer:
    """A vocabulary in the form that llguidance's constructor reads."""

    is_tokenizer_wrapper = True

    def __init__(self, vocab: Vocab) -> None:
        self._vocab = vocab
        self.bos_token_id, self.eos_token_id = vocab.bos_id, vocab.eos_id
        self.tokens = [vocab.token_bytes(i) or SPECIAL + vocab.token_text(i).encode() for i in range(vocab.size)]
        self.special_token_ids = [i for i, token in enumerate(self.tokens) if token[:1] == SPECIAL]

    def __call__(self, text: str | bytes) -> list[int]:
        """Token ids of `text`."""
        known = text if isinstance(text, str) else text.decode("utf-8", "replace")
        return self._vocab.encode(known, add_bos=False, parse_special=False)


class Compiler:
    """Compiles grammars for a vocabulary."""

    def __init__(self, vocab: Vocab) -> None:
        """Args:
            vocab: the target's.

        Raises:
            MissingPackage: llguidance is not installed.
        """
        try:
            import llguidance
        except ImportError as error:
            raise MissingPackage("llguidance", "server", "a grammar") from error
        self._engine: Any = llguidance
        self._vocab = vocab
        tokenizer: Any = Tokenizer(vocab)
        self._tokenizer = llguidance.LLTokenizer(tokenizer, n_vocab=vocab.size, eos_token=sorted(vocab.eog_ids))
        self.compiled = lru_cache(32)(self._compiled)

    def _compiled(self, grammar: Grammar) -> "Compiled":
        """Compile a grammar; callable from any thread.

        Raises:
            UsageError: it is wrong, too long, or needs what llguidance lacks.
        """
        if len(grammar.text.encode("utf-8", "replace")) > MOST_BYTES:
            raise UsageError(f"the grammar is longer than {MOST_BYTES} bytes")
        matcher = self._engine.LLMatcher
        make = {
            "json_schema": matcher.grammar_from_json_schema,
            "regex": matcher.grammar_from_regex,
            "lark": matcher.grammar_from_lark,
        }[grammar.kind]
        try:
            source = make(grammar.text)
            failed, messages = matcher.validate_grammar_with_warnings(source, self._tokenizer)
        except ValueError as error:
            raise UsageError(f"the {grammar.kind} cannot be used: {_line(str(error))}") from error
        if failed:
            raise UsageError(f"the {grammar.kind} cannot be used: {_line(' '.join(messages))}")
        return Compiled(matcher(self._tokenizer, source, log_level=0), self._vocab)


def _line(text: str) -> str:
    return " ".join(text.split())[:300]


@dataclass(frozen=True, slots=True)
class Compiled:
    """A compiled grammar."""

    matcher: Any
    vocab: Vocab

    def start(self) -> "Constraint":
        """The constraint of one sequence."""
        return Constraint(self.matcher.deep_copy(), self.vocab)


class Constraint:
    """The state of one sequence in its grammar."""

    def __init__(self, matcher: Any, vocab: Vocab) -> None:
        self._matcher = matcher
        self._vocab = vocab

    def masked(self, logits: Float32Array) -> Float32Array:
        """Logits [V] with minus infinity for forbidden tokens.

        Raises:
            ModelError: the grammar has become too large.
        """
        allowed = _bits(self._matcher.compute_bitmask(), len(logits))
        if error := self._matcher.get_error():  # the mask would then allow only the end
            raise ModelError(f"the grammar cannot go on: {_line(str(error))}")
        return np.where(allowed, logits, np.float32(-np.inf))

    def accept(self, token: int) -> None:
        """Append `token` to the sequence."""
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token)

    def prune_and_force(self, tree: DraftTree, token_ids: Sequence[int]) -> DraftTree:
        """Drop forbidden draft tokens, and add those that the grammar forces.

        Args:
            tree: rooted at the last committed token.
            token_ids: all committed tokens.
        """
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(tree.parents.tolist()):
            children.setdefault(parent, []).append(node)
        tokens, parents, values, sources = [int(tree.token_ids[0])], [-1], [0.0], [int(tree.source[0])]
        # (old node, its new number, the matcher after it, the last tokens up to it)
        stack: list[tuple[int, int, Any, list[int]]] = [(0, 0, self._matcher.deep_copy(), list(token_ids[-SEEN:]))]

        def add(token: int, parent: int, value: float, source: int) -> int:
            tokens.append(token)
            parents.append(parent)
            values.append(value)
            sources.append(source)
            return len(tokens) - 1

        while stack:
            old, new, matcher, before = stack.pop()
            known = {int(tree.token_ids[child]): child for child in children.get(old, [])}
            forced = self._forced(matcher, before)
            placed = {}
            for token, child in known.items():
                if not matcher.is_stopped() and matcher.validate_tokens([token]):
                    behind = matcher.deep_copy()
                    behind.consume_token(token)
                    value, source = float(tree.log_probs[child]), int(tree.source[child])
                    if forced and token == forced[0]:
                        value = max(value, values[new] + (SURE if len(forced) > 1 else LAST))
                    placed[token] = add(token, new, min(value, values[new]), source)
                    stack.append((child, placed[token], behind, [*before, token][-SEEN:]))
            if forced and forced[0] not in placed:
                at = new
                for i, token in enumerate(forced):
                    at = add(token, at, values[at] + (SURE if i + 1 < len(forced) else LAST), int(Source.GRAMMAR))
        return make_tree(tokens, parents, values, sources)

    def _forced(self, matcher: Any, before: Sequence[int]) -> list[int]:
        # The tokens are only proposed: the target may write the same text in other tokens.
        if matcher.is_stopped() or not (forced := matcher.compute_ff_bytes()):
            return []
        head = b"".join(map(self._vocab.token_bytes, before))
        try:
            ids = self._vocab.encode((head + forced).decode("utf-8"), add_bos=False, parse_special=False)
        except (UnicodeDecodeError, ModelError):  # it begins or ends within a character
            return []
        read, start = b"", 0
        while start < len(ids) and len(read) < len(head):
            read += self._vocab.token_bytes(ids[start])
            start += 1
        found = ids[start:] if read == head else []
        return found[: matcher.validate_tokens(found)] if found else []


def _bits(mask: bytes, size: int) -> NDArray[np.bool_]:
    return np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little", count=size).astype(np.bool_)
