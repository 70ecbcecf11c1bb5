"""Constrained decoding by a JSON schema, a regular expression, or a Lark grammar, with the package llguidance.

The mask depends on earlier tokens only, so drafts change nothing.
"""

import json
import re
from codecs import getincrementaldecoder
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from math import lcm, log
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ModelError, UsageError, check_text, installed, must_be
from edgespec.loop.backend import Vocab
from edgespec.loop.lenient import NOWHERE, followed, is_reference, without
from edgespec.loop.sampling import Float32Array
from edgespec.loop.tree import DraftTree, Source, make_tree

MOST_BYTES = 64 * 2**10
SPECIAL = b"\xff"  # begins the names of control tokens
SEEN = 3  # tokens before forced text that are encoded with it: it may begin within a token
SURE = log(0.98)  # log-probability of a token within forced text
LAST = log(0.5)  # log-probability of its last token, which may reach beyond it
PIECE = 4096  # bytes of forced text that are encoded at a time
FIRST = 512  # characters of forced text whose first token a mask needs
# llguidance computes a state for each remainder, without a limit; zeros at the end and the decimal point are free.
MOST_REMAINDERS = 10_000
MOST_TOGETHER = 8  # regular expressions that one text must match: llguidance's work doubles with each
MULTIPLE = re.compile(r'"multipleOf"\s*:\s*(\d+(?:\.\d+)?)')


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar's source, made by `json_schema`, `regex` or `lark`.

    Attributes:
        sender: what is compiled for one sender spares no other one time.

    Raises:
        UsageError: it is longer than `MOST_BYTES`.
    """

    kind: str
    text: str
    sender: str = ""

    def __post_init__(self) -> None:
        if len(check_text(f"the {self.kind}", self.text).encode("utf-8", "replace")) > MOST_BYTES:
            raise too_long()


def too_long() -> UsageError:
    """The error for a grammar beyond `MOST_BYTES`."""
    return UsageError(f"the grammar is longer than {MOST_BYTES} bytes")


def json_text(value: Any, most: int = MOST_BYTES, error: Exception | None = None) -> str:
    """`value` in JSON. Raises `error`, or that of a grammar, as soon as it has more than `most` characters."""
    parts, room = list[str](), most
    for part in json.JSONEncoder().iterencode(value):
        room -= len(part)
        if room < 0:
            raise error or too_long()
        parts.append(part)
    return "".join(parts)


def json_schema(schema: Mapping[str, Any] | str, *, strict: bool = True) -> Grammar:
    """JSON by a schema, without free white space, which models may repeat for ever.

    Args:
        schema: a JSON object, or its text.
        strict: refuse keywords and formats that cannot be enforced, instead of leaving them out.

    Raises:
        UsageError: it is not a JSON object.
    """
    if not isinstance(schema, str | Mapping):
        raise must_be("the JSON schema", schema, "a mapping, or its JSON text")
    try:
        found = json.loads(schema) if isinstance(schema, str) else dict(schema)
        text = json_text({**found, "x-guidance": {"whitespace_flexible": False, "lenient": not strict}})
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
        """Token ids of the beginning of `text`: a mask needs the first token of forced text."""
        known = text if isinstance(text, str) else text.decode("utf-8", "replace")
        return self._vocab.encode(known[:FIRST], add_bos=False, parse_special=False)


class Compiler:
    """Compiles grammars for a vocabulary."""

    def __init__(self, vocab: Vocab) -> None:
        """Args:
            vocab: the target's.

        Raises:
            MissingPackage: llguidance is not installed.
        """
        self._engine = installed("llguidance", "server", "a grammar")
        self._vocab = vocab
        tokenizer: Any = Tokenizer(vocab)
        self._tokenizer = self._engine.LLTokenizer(tokenizer, n_vocab=vocab.size, eos_token=sorted(vocab.eog_ids))
        self.compiled = lru_cache(32)(self._compiled)

    def _compiled(self, grammar: Grammar) -> "Compiled":
        """Compile a grammar; callable from any thread.

        Raises:
            UsageError: it is wrong, or needs what llguidance lacks; of lenient JSON schemas such keywords are left out.
        """
        try:
            return self._made(grammar)
        except UsageError:
            multiples = not _large_multiples(grammar.text)
            text = without(grammar.text, grammar.kind, self._is_usable, multiples=multiples)
            if text == grammar.text or len(text) > MOST_BYTES:
                raise
        return self._made(replace(grammar, text=text))

    def _is_usable(self, pattern: str) -> bool:
        matcher = self._engine.LLMatcher
        schema = json.dumps({"type": "string", "pattern": pattern})
        return not matcher.validate_grammar(matcher.grammar_from_json_schema(schema))

    def _made(self, grammar: Grammar) -> "Compiled":
        if large := _large_multiples(grammar.text):
            says = f"a least common multiple of more than {MOST_REMAINDERS}, without zeros at its end"
            raise UsageError(f"multipleOf is {_line(large)}: these numbers have {says}")
        _check_together(grammar)
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
        made = matcher(self._tokenizer, source, log_level=0)
        made.compute_ff_bytes()  # its copies remember the text
        return Compiled(made, self._vocab)


def _large_multiples(text: str) -> str:
    """The numbers of `multipleOf`; "": llguidance can take them."""
    found = dict.fromkeys(MULTIPLE.findall(text))
    digits = [one.replace(".", "").strip("0")[:9] for one in found]
    return ", ".join(found) if lcm(*(int(one or 1) for one in digits)) > MOST_REMAINDERS else ""


def _check_together(grammar: Grammar) -> None:
    """Count regular expressions that hold at once: of `allOf` in a schema, of & in Lark's rules."""
    if grammar.kind == "regex":
        return
    if grammar.kind == "lark":
        most = max(line.count("&") for line in re.split(r"\n(?=\S)", grammar.text)) + 1
    else:
        root = json.loads(grammar.text)
        most, waiting = 0, [root]
        while waiting:
            node = waiting.pop()
            waiting += node.values() if isinstance(node, dict) else node if isinstance(node, list) else []
            if isinstance(node, dict) and "allOf" in node:
                most = max(most, _together(root, node, set()))
    if most > MOST_TOGETHER:
        raise UsageError(f"{most} regular expressions must match one text, but at most {MOST_TOGETHER} may")


def _together(root: Any, node: Any, seen: set[int]) -> int:
    if not isinstance(node, dict) or id(node) in seen:
        return 0
    seen.add(id(node))
    parts = node.get("allOf")
    inner = [*parts] if isinstance(parts, list) else []
    if is_reference(node):
        with suppress(*NOWHERE):
            inner.append(followed(root, node["$ref"]))
    return sum(name in node for name in ("pattern", "format")) + sum(_together(root, one, seen) for one in inner)


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


@dataclass(frozen=True, slots=True)
class Forced:
    """Text that the grammar forces: `ids` are the tokens of its first `encoded` bytes."""

    text: bytes = b""
    ids: Sequence[int] = ()
    encoded: int = 0

    def after(self, token: int, text: bytes) -> "Forced":
        """The rest that is forced once a token with these bytes was accepted; `NOT_KNOWN` if it was another."""
        if not text or not self.text.startswith(text):
            return NOT_KNOWN
        rest = self.text[len(text) :]
        return Forced(rest, self.ids[1:], self.encoded - len(text)) if token in self.ids[:1] else Forced(rest)


NOT_KNOWN = Forced()


class Constraint:
    """The state of one sequence in its grammar."""

    def __init__(self, matcher: Any, vocab: Vocab) -> None:
        self._matcher = matcher
        self._vocab = vocab
        self._forced = NOT_KNOWN

    def masked(self, logits: Float32Array) -> Float32Array:
        """
        Returns:
            Logits [V] with minus infinity for forbidden tokens.

        Raises:
            UsageError: the grammar has become too large.
        """
        allowed = _bits(self._matcher.compute_bitmask(), len(logits))
        if error := self._matcher.get_error():  # the mask would then allow only the end
            raise UsageError(f"the grammar cannot go on: {_line(str(error))}")
        return np.where(allowed, logits, np.float32(-np.inf))

    def accept(self, token: int) -> None:
        """Append `token` to the sequence."""
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token)
        self._forced = self._forced.after(token, self._vocab.token_bytes(token))

    def prune_and_force(self, tree: DraftTree, token_ids: Sequence[int], most: int) -> DraftTree:
        """Drop forbidden draft tokens, and add those that the grammar forces.

        Args:
            tree: rooted at the last committed token.
            token_ids: all committed tokens.
            most: tokens to add at one node.
        """
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(tree.parents.tolist()):
            children.setdefault(parent, []).append(node)
        # Token, parent, log-probability and source of each node.
        nodes = [(int(tree.token_ids[0]), -1, 0.0, int(tree.source[0]))]
        before = list(token_ids[-SEEN:])
        self._forced = self._completed(self._forced, self._matcher, before, most + len(tree))
        # (old node, its new number, the matcher after it, the last tokens up to it, what is known to be forced)
        stack: list[tuple[int, int, Any, list[int], Forced]] = [(0, 0, self._matcher.deep_copy(), before, self._forced)]

        while stack:
            old, new, matcher, before, forced_text = stack.pop()
            known = {int(tree.token_ids[child]): child for child in children.get(old, [])}
            forced_text = self._completed(forced_text, matcher, before, most)
            forced = forced_text.ids
            placed = {}
            for token, child in known.items():
                if not matcher.is_stopped() and matcher.validate_tokens([token]):
                    behind = matcher.deep_copy()
                    behind.consume_token(token)
                    value, source = float(tree.log_probs[child]), int(tree.source[child])
                    if forced and token == forced[0]:
                        value = max(value, nodes[new][2] + (SURE if len(forced) > 1 else LAST))
                    placed[token] = len(nodes)
                    nodes.append((token, new, min(value, nodes[new][2]), source))
                    rest = forced_text.after(token, self._vocab.token_bytes(token))
                    stack.append((child, placed[token], behind, [*before, token][-SEEN:], rest))
            if forced and forced[0] not in placed:
                at = new
                for i, token in enumerate(forced[:most]):
                    value = nodes[at][2] + (SURE if i + 1 < len(forced) else LAST)
                    nodes.append((token, at, value, int(Source.GRAMMAR)))
                    at = len(nodes) - 1
        return make_tree(*zip(*nodes, strict=True))

    def _completed(self, forced: Forced, matcher: Any, before: Sequence[int], most: int) -> Forced:
        """What is forced, with `most` tokens of it if it is as long."""
        text = forced.text
        if not text and not matcher.is_stopped():
            text = matcher.compute_ff_bytes()
        if not text or len(forced.ids) >= most or (forced.ids and forced.encoded == len(text)):
            return forced
        ids = self._encoded(text[:PIECE], before)
        if len(text) > PIECE:
            ids = ids[:-SEEN]  # they may reach beyond the piece
        ids = ids[: matcher.validate_tokens(ids)] if ids else []
        return Forced(text, ids, sum(len(self._vocab.token_bytes(token)) for token in ids))

    def _encoded(self, text: bytes, before: Sequence[int]) -> list[int]:
        # The tokens are only proposed: the target may write the same text in other tokens.
        head = b"".join(map(self._vocab.token_bytes, before))
        try:
            known = getincrementaldecoder("utf-8")().decode(head + text)  # it may end within a character
            ids = self._vocab.encode(known, add_bos=False, parse_special=False)
        except (UnicodeDecodeError, ModelError):  # it begins within one
            return []
        read, start = b"", 0
        while start < len(ids) and len(read) < len(head):
            read += self._vocab.token_bytes(ids[start])
            start += 1
        return ids[start:] if read == head else []


def _bits(mask: bytes, size: int) -> NDArray[np.bool_]:
    return np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little", count=size).astype(np.bool_)
