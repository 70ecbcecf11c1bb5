"""The tools of a request: which may be called, in which form the model writes calls, and how answers are read."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from edgespec.backend import Vocab
from edgespec.errors import UsageError
from edgespec.grammar import Grammar, lark
from edgespec.server.errors import Refused
from edgespec.server.forms import HERMES, Form, after_thought, begins_inside, form_of, shown_ids, thinking_of
from edgespec.server.regions import Regions, types_of

OPEN, CLOSE = HERMES.open[0], HERMES.close
MOST_TOOLS = 128


@dataclass(frozen=True, slots=True)
class Tools:
    """What an answer may call."""

    functions: Sequence[dict[str, Any]]  # {"type": "function", "function": {"name", "description", "parameters"}}
    form: Form  # how the model writes calls
    required: Grammar | None = None  # the answer is a call, in this form


def can_force(vocab: Vocab, form: Form) -> bool:
    """Whether a grammar can make the model write a call: its markers must be text, not control tokens."""
    return form is HERMES and not shown_ids(vocab, [OPEN, CLOSE])


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
    form = form_of(vocab)
    if form is None:
        raise Refused(400, "tools: this model's calls are not known here; leave tools out, or set tool_choice to none")
    named = [function for function in functions if name in (None, function["name"])]
    if not named:
        raise Refused(400, f"tool_choice names {name!r}, which is none of the tools", param="tool_choice")
    kept = [{"type": "function", "function": dict(function)} for function in functions]
    forced = mode == "required" or name is not None
    if forced and not can_force(vocab, form):
        raise Refused(400, "tool_choice: this model cannot be made to call; leave it at auto", param="tool_choice")
    return Tools(kept, form, call_grammar(named) if forced else None)


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


class Look:
    """How the answers to one prompt are to be read."""

    def __init__(self, vocab: Vocab, prompt_ids: Sequence[int], tools: Tools | None) -> None:
        """
        Args:
            vocab: the model's.
            prompt_ids: what is answered.
            tools: what may be called; None: nothing.
        """
        self._form = tools.form if tools else None
        self._thinking = thinking_of(vocab)
        self._types = types_of(tool["function"] for tool in tools.functions) if tools else {}
        self._inside = self._thinking is not None and begins_inside(vocab, prompt_ids, self._thinking)
        markers = list(self._thinking or ())
        markers += [*self._form.open, self._form.close, *self._form.inner] if self._form else []
        self.shown = shown_ids(vocab, [marker for marker in markers if marker])
        self._free = self._thinking is not None and not shown_ids(vocab, self._thinking)

    def regions(self) -> Regions:
        """For one answer."""
        return Regions(self._form, self._thinking, inside=self._inside, types=self._types)

    def grammar(self, grammar: Grammar | None) -> Grammar | None:
        """The grammar of an answer that may begin with a thought."""
        if grammar is None or self._thinking is None or not self._free:
            return grammar
        return after_thought(grammar, self._thinking, self._inside)


def replayed(name: Any, arguments: Any) -> dict[str, Any]:
    """An earlier call as templates want it: with arguments as an object, if they are one."""
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments or "{}")
    return {"type": "function", "function": {"name": str(name), "arguments": arguments}}
