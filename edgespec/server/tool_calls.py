"""A request's tools, and which of them may or must be called."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from secrets import token_hex
from typing import Any

from edgespec.errors import UsageError, shown
from edgespec.server.errors import Refused
from edgespec.server.schema import Schema, levels, resolve

MOST_TOOLS = 128
MOST_TOOL_VALUES = 2**16  # of all tools, in JSON
Parameters = Mapping[str, Schema]


@dataclass(frozen=True, slots=True)
class Call:
    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{token_hex(12)}")


def replayed(name: Any, arguments: Any, id_: Any) -> Call:
    """A call that a client sends back, with arguments as JSON or as an object."""
    known = arguments if isinstance(arguments, str) else json.dumps({} if arguments is None else arguments)
    return Call(str(name), known, id_ if isinstance(id_, str) else "")


@dataclass(frozen=True)
class Tool:
    function: Mapping[str, Any]  # name, description, parameters: for the chat template

    @property
    def name(self) -> str:
        return str(self.function["name"])

    @cached_property
    def schema(self) -> Schema:
        """Raises UsageError."""
        return resolve(self.function.get("parameters") or {}, self.name, strict=self.function.get("strict") is True)


@dataclass(frozen=True)
class Tools:
    all: Sequence[Tool]
    required: Sequence[Tool] = ()  # the answer must call one of them; empty: it need not
    parallel: bool = True  # an answer may make several calls

    @cached_property
    def parameters(self) -> Parameters:
        """Of all tools; parameters that are no schema may be anything."""
        found = dict[str, Schema]()
        for tool in self.all:
            try:
                found[tool.name] = tool.schema
            except UsageError:
                found[tool.name] = Schema.anything()
        return found


def choose_tools(
    functions: Sequence[Mapping[str, Any]], mode: str, name: str | None, *, parallel: bool
) -> Tools | None:
    """The tools of a request; None: it has none, or forbids calls.

    Args:
        functions: name, description and parameters (a JSON schema) of each.
        mode: auto, none or required.
        name: the only function that may be called, once.
        parallel: an answer may make several calls.

    Raises:
        Refused: the request contradicts itself.
    """
    if not functions and (mode == "required" or name is not None):
        says = "tool_choice asks for a call, but there is no tool of type function"
        raise Refused(400, says, param="tool_choice")
    if not functions or mode == "none":
        return None
    _check_number(functions, "tools")
    if (values := sum(map(len, levels(functions)))) > MOST_TOOL_VALUES:
        raise Refused(
            400, f"the tools have {values} values in all, but at most {MOST_TOOL_VALUES} may be given", param="tools"
        )
    if not all(isinstance(function.get("name"), str) and function["name"] for function in functions):
        raise Refused(400, "tools: a function has no name", param="tools")
    if mode not in ("auto", "required"):
        says = f"tool_choice is {shown(mode)}, but must be auto, none, required or a function"
        raise Refused(400, says, param="tool_choice")
    tools = [Tool(function) for function in functions]
    named = [tool for tool in tools if name in (None, tool.name)]
    if not named:
        raise Refused(400, f"tool_choice names {shown(name)}, which is none of the tools", param="tool_choice")
    return Tools(tools, named if mode == "required" or name is not None else (), parallel and name is None)


def _check_number(found: Sequence[Any], where: str) -> None:
    if len(found) > MOST_TOOLS:
        raise Refused(400, f"there are {len(found)} tools, but at most {MOST_TOOLS} may be given", param=where)


def choose_allowed(functions: Sequence[Mapping[str, Any]], choice: Any, *, parallel: bool) -> Tools | None:
    """The tools that a `tool_choice` of type allowed_tools leaves; others are not shown to the model.

    Args:
        functions: as for `choose_tools`.
        choice: its mode, and its tools in the form of either dialect.

    Raises:
        Refused: the request contradicts itself.
    """
    mode, tools = (choice.get("mode"), choice.get("tools")) if isinstance(choice, dict) else (None, None)
    if mode not in ("auto", "required") or not isinstance(tools, list) or not all(isinstance(t, dict) for t in tools):
        says = "tool_choice: allowed_tools needs a mode, auto or required, and a list of tools"
        raise Refused(400, says, param="tool_choice")
    _check_number(functions, "tools")
    _check_number(tools, "tool_choice")
    functional = [tool for tool in tools if tool.get("type", "function") == "function"]
    inner = [tool["function"] if isinstance(tool.get("function"), dict) else tool for tool in functional]
    names, known = [tool.get("name") for tool in inner], [function.get("name") for function in functions]
    if missing := [name for name in names if name not in known]:
        raise Refused(400, f"tool_choice names {shown(missing[0])}, which is none of the tools", param="tool_choice")
    left = [function for function in functions if function.get("name") in names]
    return choose_tools(left, mode, None, parallel=parallel)


def refused_choice(kind: Any) -> Refused:
    says = f"tool_choice: type {shown(kind)} cannot be had here; there are function and allowed_tools"
    return Refused(400, says, param="tool_choice")
