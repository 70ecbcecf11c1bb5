"""A request's tools, and which of them may or must be called."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from secrets import token_hex
from typing import Any

from edgespec.errors import UsageError, shown
from edgespec.server.errors import Refused, refuse_if
from edgespec.server.schema import Schema, levels, resolve, strict_json

MOST_TOOLS = 128
MOST_TOOL_VALUES = 2**16  # of all tools, in JSON
NONE = "tool_choice names {}, which is none of the tools"
CALLED = ("function", "custom")  # types of tools that the client runs and names
Parameters = Mapping[str, Schema]


@dataclass(frozen=True, slots=True)
class Call:
    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{token_hex(12)}")


def replayed(name: Any, arguments: Any, id_: Any, where: str) -> Call:
    """A call that a client sends back, with arguments as JSON or as an object.

    Raises:
        Refused: it has no name.
    """
    refuse_if(not isinstance(name, str) or not name, f"{where}: a call has no name", where)
    known = arguments if isinstance(arguments, str) else json.dumps({} if arguments is None else arguments)
    return Call(name, known, id_ if isinstance(id_, str) else "")


CLOSED = {"additionalProperties": False}
FREE_TEXT = "input"  # the argument of a tool that takes a text instead of arguments


def of_free_text(custom: Mapping[str, Any]) -> dict[str, Any]:
    """A custom tool as a function; what its text must be is told to the model, but not enforced."""
    form, description = custom.get("format"), custom.get("description")
    grammar = form.get("grammar", form) if isinstance(form, dict) else None
    if isinstance(grammar, dict) and isinstance(grammar.get("definition"), str):
        rule = f"Its {FREE_TEXT} is by this {grammar.get('syntax')} grammar:\n\n{grammar['definition']}"
        description = f"{description or ''}\n\n{rule}".strip()
    text = {"type": "string", "description": "the whole text"}
    parameters = {"type": "object", "properties": {FREE_TEXT: text}, "required": [FREE_TEXT]} | CLOSED
    return {"name": custom.get("name"), "description": description, "parameters": parameters}


def free_text(call: Call) -> str:
    """The text that a custom tool is called with; else all arguments as JSON."""
    text = strict_json(call.arguments).get(FREE_TEXT)
    return text if isinstance(text, str) else call.arguments


def without_nulls(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if value is not None}


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

    @property
    def shown(self) -> dict[str, Any]:
        """For the chat template, with the members that templates read without asking."""
        function, parameters = without_nulls(self.function), without_nulls(self.function.get("parameters") or {})
        if "type" not in parameters:
            parameters = {"type": "object", **parameters}
        if "description" not in function:
            function = {"name": self.name, "description": "", **function}
        properties = parameters.get("properties") or {}
        parameters["properties"] = {name: one if isinstance(one, dict) else {} for name, one in properties.items()}
        return {"type": "function", "function": {**function, "parameters": parameters}}


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


def flat(namespace: Any, name: Any) -> Any:
    """The name of a function by a tool's namespace and name."""
    if not isinstance(namespace, str) or not isinstance(name, str) or not namespace:
        return name
    return namespace + ("" if namespace.endswith("_") else "__") + name


def choose_tools(
    functions: Sequence[Mapping[str, Any]],
    choice: Any,
    *,
    parallel: bool,
    nested: bool = False,
    own: Collection[str] = (),
) -> Tools | None:
    """The tools of a request; None: it has none, or forbids calls.

    Args:
        functions: name, description and parameters (a JSON schema) of each.
        choice: auto, none or required. Or an object: the only function that may be called, once; or, of type
            allowed_tools, a mode and the tools that the model is shown.
        parallel: an answer may make several calls.
        nested: what such an object tells is in a member with the name of its type.
        own: types besides `CALLED` that name a function.

    Raises:
        Refused: the request contradicts itself.
    """
    mode, name = choice or "auto", None
    if isinstance(choice, dict):
        kind = choice.get("type", "function")
        refuse_if(
            kind not in (*CALLED, *own, "allowed_tools"),
            f"tool_choice: type {shown(kind)} cannot be had here; there are function, custom and allowed_tools",
            "tool_choice",
        )
        told = choice.get(kind) if nested else choice
        if kind == "allowed_tools":
            mode, functions = _allowed(functions, told)
        elif not isinstance(told, dict):
            raise Refused(400, f"tool_choice.{kind} is {shown(told)}, but must be an object", param="tool_choice")
        else:
            mode, name = "auto", kind if kind in own else flat(told.get("namespace"), str(told.get("name")))
    refuse_if(
        not functions and (mode == "required" or name is not None),
        "tool_choice asks for a call, but there is no tool of type function",
        "tool_choice",
    )
    if not functions or mode == "none":
        return None
    _check_number(functions, "tools")
    refuse_if(
        (values := sum(map(len, levels(functions)))) > MOST_TOOL_VALUES,
        f"the tools have {values} values in all, but at most {MOST_TOOL_VALUES} may be given",
        "tools",
    )
    for function in functions:
        check_function(function)
    refuse_if(
        mode not in ("auto", "required"),
        f"tool_choice is {shown(mode)}, but must be auto, none, required or a function",
        "tool_choice",
    )
    tools = [Tool(function) for function in functions]
    named = [tool for tool in tools if name in (None, tool.name)]
    refuse_if(not named, NONE.format(shown(name)), "tool_choice")
    return Tools(tools, named if mode == "required" or name is not None else (), parallel and name is None)


def _allowed(functions: Sequence[Mapping[str, Any]], choice: Any) -> tuple[Any, list[Mapping[str, Any]]]:
    """The mode of a choice of type allowed_tools, and the functions that it leaves; raises Refused."""
    mode: Any = choice.get("mode") if isinstance(choice, dict) else None
    tools: Any = choice.get("tools") if isinstance(choice, dict) else None
    refuse_if(
        mode not in ("auto", "required") or not isinstance(tools, list) or not all(isinstance(t, dict) for t in tools),
        "tool_choice: allowed_tools needs a mode, auto or required, and a list of tools",
        "tool_choice",
    )
    _check_number(functions, "tools")
    _check_number(tools, "tool_choice")
    inner = [next((tool[kind] for kind in CALLED if isinstance(tool.get(kind), dict)), tool) for tool in tools]
    names = [flat(tool.get("namespace"), tool.get("name", tool.get("type"))) for tool in inner]
    known = [function.get("name") for function in functions]
    for name in names:
        refuse_if(name not in known, NONE.format(shown(name)), "tool_choice")
    return mode, [function for function in functions if function.get("name") in names]


def _check_number(found: Sequence[Any], where: str) -> None:
    refuse_if(len(found) > MOST_TOOLS, f"there are {len(found)} tools, but at most {MOST_TOOLS} may be given", where)


def check_function(function: Mapping[str, Any]) -> None:
    """Raises Refused."""
    name, about, parameters = (function.get(member) for member in ("name", "description", "parameters"))
    refuse_if(not isinstance(name, str) or not name, "tools: a function has no name", "tools")
    says = f"tools: the description of {shown(name)} is {shown(about)}, but must be a text"
    refuse_if(not isinstance(about or "", str), says, "tools")
    is_object = isinstance(parameters or {}, dict) and isinstance((parameters or {}).get("properties") or {}, dict)
    says = f"tools: the parameters of {shown(name)} must be the JSON schema of an object"
    refuse_if(not is_object, says, "tools")
