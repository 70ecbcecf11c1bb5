"""Calls of tools in an answer, in the form that Qwen, Hermes and their relatives write:

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

What does not parse is content: a history with it must not fail for ever.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from secrets import token_hex
from typing import Any

from edgespec.backend import Vocab
from edgespec.errors import UsageError
from edgespec.grammar import Grammar, lark
from edgespec.server.errors import Refused
from edgespec.text import overlap

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MOST_TOOLS = 128


@dataclass(frozen=True, slots=True)
class Call:
    """One call."""

    name: str
    arguments: str  # JSON
    id: str = field(default_factory=lambda: f"call_{token_hex(12)}")


@dataclass(frozen=True, slots=True)
class Tools:
    """What an answer may call."""

    functions: Sequence[dict[str, Any]]  # {"type": "function", "function": {"name", "description", "parameters"}}
    required: Grammar | None = None  # the answer is a call, in this form


def can_call(vocab: Vocab) -> bool:
    """Whether the model's template shows tools, and its calls can be seen in its text."""
    template = vocab.chat_template or ""
    seen = b"".join(map(vocab.token_bytes, vocab.encode(OPEN, add_bos=False, parse_special=True)))
    return "tools" in template and OPEN in template and seen.decode("utf-8", "replace").strip() == OPEN


def choose_tools(vocab: Vocab, functions: Sequence[Mapping[str, Any]], mode: str, name: str | None) -> Tools | None:
    """The tools of a request; None: there are none, or none may be called.

    Args:
        vocab: the model's.
        functions: name, description and parameters (a JSON schema) of each.
        mode: auto, none or required.
        name: the only one that may be called.

    Raises:
        Refused, UsageError: they cannot be used.
    """
    if not functions or mode == "none":
        return None
    if len(functions) > MOST_TOOLS:
        raise Refused(400, f"there are {len(functions)} tools, but at most {MOST_TOOLS} may be given", param="tools")
    for function in functions:
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise Refused(400, "tools: a function has no name", param="tools")
    if mode not in ("auto", "required"):
        raise Refused(
            400, f"tool_choice is {mode!r}, but must be auto, none, required or a function", param="tool_choice"
        )
    if not can_call(vocab):
        raise Refused(400, "tools: this model's calls are not known here; leave tools out, or set tool_choice to none")
    named = [function for function in functions if name in (None, function["name"])]
    if not named:
        raise Refused(400, f"tool_choice names {name!r}, which is none of the tools", param="tool_choice")
    kept = [{"type": "function", "function": dict(function)} for function in functions]
    return Tools(kept, call_grammar(named) if mode == "required" or name is not None else None)


def call_grammar(functions: Sequence[Mapping[str, Any]]) -> Grammar:
    """Texts that are one call of one of them. Raises UsageError: the parameters are no JSON."""
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": function["name"]},
                "arguments": function.get("parameters") or {"type": "object"},
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for function in functions
    ]
    # With a space behind commas and colons, as templates show it.
    guidance = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    try:
        schema = json.dumps({"anyOf": calls, "x-guidance": guidance})
    except (TypeError, ValueError) as error:
        raise UsageError(f"tools: the parameters are no JSON: {error}") from error
    return lark(f'start: "{OPEN}\\n" call "\\n{CLOSE}"\ncall: %json {schema}')


class Regions:
    """Cuts a growing text into content and calls."""

    def __init__(self, calling: bool) -> None:
        """`calling`: look for calls; else everything is content."""
        self._calling = calling
        self._held = ""
        self._inside = False

    def push(self, text: str) -> list[str | Call]:
        """What became certain."""
        if not self._calling:
            return [text] if text else []
        self._held += text
        found = list[str | Call]()
        while True:
            marker = CLOSE if self._inside else OPEN
            before, seen, after = self._held.partition(marker)
            if not seen:
                break
            found += [call_of(before)] if self._inside else [before.rstrip()]
            self._inside, self._held = not self._inside, after.lstrip("\n") if self._inside else after
        if not self._inside:  # space before a call is not content
            sure = len(self._held[: len(self._held) - overlap(self._held, OPEN)].rstrip())
            found.append(self._held[:sure])
            self._held = self._held[sure:]
        return [piece for piece in found if piece]

    def finish(self) -> list[str | Call]:
        """What was held back when the text ended: a call that is cut is content."""
        text = (OPEN if self._inside else "") + self._held
        self._held, self._inside = "", False
        return [text] if text else []


def call_of(text: str) -> str | Call:
    """The call between two markers, or the text with them if it is none."""
    try:
        found = json.loads(text)
        arguments = found.get("arguments", {})
        if isinstance(found["name"], str) and isinstance(arguments, dict):
            return Call(found["name"], json.dumps(arguments, ensure_ascii=False))
    except (ValueError, KeyError, AttributeError, RecursionError):
        pass
    return f"{OPEN}{text}{CLOSE}"


def replayed(name: Any, arguments: Any) -> dict[str, Any]:
    """An earlier call as templates want it: with arguments as an object, if they are one."""
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments or "{}")
    return {"type": "function", "function": {"name": str(name), "arguments": arguments}}
