"""Calls, results and tools of /v1/responses, which are items of many types."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from edgespec.server.errors import Refused, refuse_if
from edgespec.server.tool_calls import (
    CALLED,
    CLOSED,
    FREE_TEXT,
    Call,
    flat,
    free_text,
    of_free_text,
    replayed,
)

# Of the provider: Codex offers the first with each request beside tools of its own. All deferred tools are shown here.
LEFT_OUT = (
    "web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11", "image_generation",
    "tool_search",
)  # fmt: skip
# Items without text: encrypted, or of what the provider has done without telling a result.
SKIPPED = (
    "compaction", "compaction_trigger", "mcp_list_tools", "mcp_approval_request", "mcp_approval_response",
    "additional_tools", "web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call",
)  # fmt: skip
RESULTS = ("output", "outputs", "results", "result", "error")
STRINGS = {"type": "array", "items": {"type": "string"}}
# Tools that the client runs, and whose schemas OpenAI's models know: the member of a call's item, and the schema.
OWN_TOOLS: dict[str, tuple[str, dict[str, Any]]] = {
    "local_shell": ("action", {
        "description": "Run a command on the user's computer.",
        "parameters": CLOSED | {"type": "object", "required": ["command"], "properties": {
            "command": STRINGS, "timeout_ms": {"type": "integer"}, "working_directory": {"type": "string"},
        }},
    }),
    "shell": ("action", {
        "description": "Run commands in a shell.",
        "parameters": CLOSED | {"type": "object", "required": ["commands"], "properties": {
            "commands": STRINGS, "timeout_ms": {"type": "integer"}, "max_output_length": {"type": "integer"},
        }},
    }),
    "apply_patch": ("operation", {
        "description": "Create, update or delete a file; a diff is in V4A format.",
        "parameters": CLOSED | {"type": "object", "required": ["type", "path"], "properties": {
            "type": {"enum": ["create_file", "update_file", "delete_file"]}, "path": {"type": "string"},
            "diff": {"type": "string"},
        }},
    }),
    "tool_search": ("arguments", {"description": "Search for more tools."}),
}  # fmt: skip
ADDED = {"local_shell": {"type": "exec", "env": {}}}  # to the arguments of a call


@dataclass(frozen=True)
class Offered:
    """A tool of the client as a function.

    Attributes:
        function: for the chat template.
        kind: items of its calls are of type `kind`_call.
        name: in these items.
        namespace: in these items.
    """

    function: Mapping[str, Any]
    kind: str
    name: str
    namespace: str | None = None


def offered_by_all(tools: Sequence[Any] | None, items: Sequence[dict[str, Any]]) -> dict[str, Offered]:
    """The tools that the client runs, also those that it has found or added later, by their functions' names.

    Raises:
        Refused: a tool cannot be had.
    """
    given = list(tools or ())
    for item in items:
        if item.get("type") in ("tool_search_output", "additional_tools") and isinstance(item.get("tools"), list):
            given += item["tools"]
    found = [one for i, tool in enumerate(given) for one in offered(tool, f"tools.{i}")]
    if given and not found and given[0].get("type") != "namespace":
        says = f"tools: {given[0]['type']!r} is run by the provider, and there is no other: leave it out"
        raise Refused(400, says, param="tools")
    return {one.function["name"]: one for one in found}


def offered(tool: Any, where: str, namespace: str | None = None) -> Iterator[Offered]:
    """What a tool, or a namespace of tools, is as functions; raises Refused."""
    kind, name = (str(tool.get("type")), tool.get("name")) if isinstance(tool, dict) else (type(tool).__name__, None)
    refuse_if(
        (kind in CALLED or kind == "namespace") and (not isinstance(name, str) or not name),
        f"{where}: a {kind} has no name",
        "tools",
    )
    if kind in CALLED:
        known = ("name", "description", "parameters", "strict")
        own = of_free_text(tool) if kind == "custom" else {key: tool[key] for key in known if tool.get(key) is not None}
        kind = "custom_tool" if kind == "custom" else kind
        yield Offered({**own, "name": flat(namespace, name)}, kind, str(name), namespace)
    elif kind == "namespace" and namespace is None and isinstance(tool.get("tools"), list):
        inner = [one for i, some in enumerate(tool["tools"]) for one in offered(some, f"{where}.tools.{i}", name)]
        about = tool.get("description")
        for i, one in enumerate(inner):  # the first tells what they have in common
            first = not i and isinstance(about, str)
            texts = filter(None, (f"{name}: {about}" if first else None, one.function.get("description")))
            yield replace(one, function={**one.function, "description": "\n\n".join(texts)})
    elif is_own(tool, kind):
        given = {key: tool[key] for key in ("description", "parameters") if tool.get(key) is not None}
        yield Offered({"name": kind, **OWN_TOOLS[kind][1], **given}, kind, kind)
    elif kind not in LEFT_OUT:
        raise Refused(400, f"{where}: a tool of type {kind!r} cannot be had here: leave it out", param="tools")


def is_own(tool: Any, kind: str) -> bool:
    """The client runs the tool itself."""
    place = tool.get("environment") if isinstance(tool, dict) else None
    in_container = isinstance(place, dict) and place.get("type") != "local"
    return kind in OWN_TOOLS and not in_container and (kind != "tool_search" or tool.get("execution") == "client")


def call_of(item: Mapping[str, Any], where: str) -> Call | None:
    """The call that an item is; None: it is none, or one of `SKIPPED`. Raises Refused."""
    kind, name, result = str(item.get("type")), item.get("name"), result_in(item)
    own = kind.removesuffix("_call")
    if kind in ("function_call", "mcp_call"):
        given = item.get("arguments")
    elif kind == "custom_tool_call":
        given = {FREE_TEXT: item.get("input")}
    elif kind.endswith("_call") and own in OWN_TOOLS:
        name, given = own, item.get(OWN_TOOLS[own][0])
    elif (kind.endswith("_call") and (kind not in SKIPPED or result is not None)) or kind == "program":
        about = ("type", "id", "call_id", "status", "fingerprint", *RESULTS)
        name, given = own, {key: value for key, value in item.items() if key not in about and value is not None}
    else:
        return None
    return replayed(flat(item.get("namespace"), name), given, item.get("call_id") or item.get("id"), where)


def result_in(item: Mapping[str, Any]) -> Any:
    """The result that an item has; None: it has none."""
    kind = str(item.get("type"))
    if kind == "tool_search_output" and isinstance(item.get("tools"), list):
        return "\n".join(one.function["name"] for tool in item["tools"] for one in offered(tool, "tools"))
    if not kind.endswith(("_output", "_call")) or kind in ("function_call", "custom_tool_call"):
        return None
    found = next((item[name] for name in RESULTS if item.get(name) is not None), None)
    if kind == "image_generation_call" and found is not None:
        return [{"type": "image"}]
    return str(item.get("status") or "") if found is None and kind.endswith("_output") else found


def call_item(call: Call, tool: Offered | None, status: str = "completed") -> dict[str, Any]:
    kind, is_done = tool.kind if tool else "function", status == "completed"
    code = "fc" if kind == "function" else "".join(word[0] for word in f"{kind}_call".split("_"))
    item = {"type": f"{kind}_call", "id": f"{code}_{call.id.removeprefix('call_')}", "call_id": call.id}
    if kind in OWN_TOOLS:
        given = json.loads(call.arguments) if is_done else {}
        place = {"execution": "client"} if kind == "tool_search" else {}
        return {**item, **place, OWN_TOOLS[kind][0]: {**ADDED.get(kind, {}), **given}, "status": status}
    item |= {"name": tool.name if tool else call.name} | (
        {"namespace": tool.namespace} if tool and tool.namespace else {}
    )
    if kind == "function":
        return {**item, "arguments": "" if status == "in_progress" else call.arguments, "status": status}
    return {**item, FREE_TEXT: free_text(call) if is_done else "", "status": status}
