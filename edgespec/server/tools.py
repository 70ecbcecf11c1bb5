"""The tools of a request: which may be called, in which form the model writes calls, and how answers are read."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from edgespec.loop.backend import Vocab
from edgespec.loop.grammar import Grammar
from edgespec.server.call_formats import Form, begins_inside, form_of, shown_ids, thinking_of
from edgespec.server.channels import ANALYSIS, FINAL, MARKERS, Channels, Reader, comes_in_channels
from edgespec.server.constrained import after_thought, call_grammar
from edgespec.server.errors import Refused
from edgespec.server.parse_output import Regions, types_of

MOST_TOOLS = 128


@dataclass(frozen=True, slots=True)
class Tools:
    """What an answer may call."""

    functions: Sequence[dict[str, Any]]  # {"type": "function", "function": {"name", "description", "parameters"}}
    form: Form  # how the model writes calls
    required: Grammar | None = None  # the answer is a call, in this form


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
    return Tools(kept, form, call_grammar(vocab, form, named) if forced else None)


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
        self._channels = comes_in_channels(vocab)
        self._thinking = ANALYSIS if self._channels else thinking_of(vocab)
        self._types = types_of(tool["function"] for tool in tools.functions) if tools else {}
        self._inside = self._thinking is not None and begins_inside(vocab, prompt_ids, self._thinking)
        markers = list(self._thinking or ())
        markers += [*self._form.open, self._form.close, *self._form.inner] if self._form else []
        markers += MARKERS if self._channels else ()
        self.shown = shown_ids(vocab, [marker for marker in markers if marker])
        self._vocab, self._required = vocab, tools.required if tools else None

    def regions(self) -> Reader:
        """For one answer."""
        if self._channels:
            return Channels(self._form)
        return Regions(self._form, self._thinking, inside=self._inside, types=self._types)

    def grammar(self, grammar: Grammar | None) -> Grammar | None:
        """The grammar of an answer that may begin with a thought."""
        if grammar is None or self._thinking is None:
            return grammar
        opening = FINAL if self._channels and grammar is not self._required else ""
        return after_thought(self._vocab, grammar, self._thinking, self._inside, opening)


def replayed(name: Any, arguments: Any, id_: Any = None) -> dict[str, Any]:
    """An earlier call as templates want it: with arguments as an object, if they are one."""
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments or "{}")
    known = {"id": id_} if isinstance(id_, str) and id_ else {}
    return {"type": "function", **known, "function": {"name": str(name), "arguments": arguments}}
