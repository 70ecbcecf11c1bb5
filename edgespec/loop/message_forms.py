"""Forms of a conversation: what a chat template refuses or drops is said in another way."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import takewhile
from math import inf
from typing import Any

from edgespec.errors import ModelError, UsageError

Message = Mapping[str, Any]  # {"role": "user", "content": "Hi"}
Messages = Sequence[Message]
Tools = Sequence[Message] | None  # functions as JSON schemas
Render = Callable[[Messages, Tools], str]  # raises UsageError or ModelError
Change = Callable[[Messages], list[Message]]
SYSTEM = ("system", "developer")  # roles
# Turns that nobody wrote; some templates refuse empty ones.
BETWEEN = {role: {"role": role, "content": text} for role, text in (("user", "Go on."), ("assistant", "OK."))}
CALL, RESULT = "<tool_call>\n{}\n</tool_call>", "<tool_response>\n{}\n</tool_response>"
SAID = "[Said with this call: {}]\n\n{}"
MARK = re.compile(r"said-([\w-]+)\.")
KINDS = ("string", "number", "integer", "boolean", "array", "object")  # types in JSON schemas
PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}
MARKED_TOOL = {"type": "function", "function": {"name": "said-tool.", "description": "", "parameters": PARAMETERS}}
QUESTION = ({"role": "user", "content": "Hi"},)


def shown_whole(render: Render, messages: Messages, tools: Tools) -> str:
    """Render messages with the fewest of `CHANGES` with which the template shows the most of them.

    Raises:
        UsageError: the template refuses them in every form.
        ModelError: the template is broken.
    """
    alters = any(change(messages) != list(messages) for change in CHANGES)
    chosen = _fewest(render, messages, tools) if alters else []
    try:
        return render(_changed(messages, chosen), tools)
    except (UsageError, ModelError) as error:
        # It may be the arguments of a call that the template cannot show, or the schemas of the tools.
        for more, shown in (([*chosen, calls_as_text], tools), (chosen, tools and list(map(_simple, tools)))):
            with suppress(UsageError, ModelError):
                return render(_changed(messages, more), shown)
        if isinstance(error, UsageError):
            raise
        render(QUESTION, None)  # raises ModelError if it is not the messages or the tools that are wrong
        why = str(error).partition(": ")[2]
        raise UsageError(f"the model's chat template cannot show these messages: {why}") from None


def _simple(tool: Message) -> Message:
    """A tool whose parameters have one type each, and no more than a description and values."""
    function = dict(tool.get("function", tool))
    parameters = function.get("parameters") or PARAMETERS
    properties = dict[str, Any]()
    for name, given in (parameters.get("properties") or {}).items():
        one = given if isinstance(given, Mapping) else {}
        kind, about = one.get("type"), one.get("description")
        types = kind if isinstance(kind, list) else [kind]
        properties[name] = {"type": next((one for one in types if one in KINDS), "string")}
        properties[name] |= {"description": about} if isinstance(about, str) else {}
        properties[name] |= {"enum": one["enum"]} if isinstance(one.get("enum"), list) else {}
    return {**tool, "function": {**function, "parameters": {**parameters, "properties": properties}}}


def _fewest(render: Render, messages: Messages, tools: Tools) -> list[Change]:
    """The changes with which least is missing: the first few of `CHANGES`, without those that do not help."""
    marked, best, least = _marked(messages), list[Change](), inf
    said: Messages = marked
    for number in range(len(CHANGES) + 1):
        some = CHANGES[:number]
        if number and _changed(marked, some) == said:
            continue
        said = _changed(marked, some)
        if (missing := _missing(render, said, tools)) < least or not number:
            best, least = list(some), missing
        if not least:
            break
    for change in reversed(best):
        fewer = [one for one in best if one is not change]
        said = _changed(marked, fewer)
        if said == _changed(marked, best) or _missing(render, said, tools) <= least:
            best = fewer
    return best


def _missing(render: Render, marked: Messages, tools: Tools) -> float:
    """How many marks the template does not show; inf: it refuses the messages."""
    tools = [MARKED_TOOL] if tools else None
    try:
        text = render(marked, tools)
    except (UsageError, ModelError):
        return inf
    return len(set(MARK.findall(json.dumps([marked, tools], default=str))).difference(MARK.findall(text)))


def _marked(messages: Messages) -> list[Message]:
    """The messages with a mark instead of each text and each call's arguments."""
    found = list[Message]()
    for i, message in enumerate(messages):
        marked = dict(message)
        if message.get("content") and isinstance(message["content"], str):
            marked["content"] = f"said-{i}."
        for name in ("reasoning_content", "thinking"):  # templates drop those of earlier turns as they should
            if isinstance(message.get(name), str):
                marked[name] = message[name][:1]
        if calls := calls_of(message):
            marked["tool_calls"] = [
                _with_arguments(call, {"said": f"said-{i}-{number}."}) for number, call in enumerate(calls)
            ]
        found.append(marked)
    return found


def _changed(messages: Messages, changes: Sequence[Change]) -> Messages:
    """The changes in the order in which one may need what another has made."""
    for change in (*reversed(CHANGES), alternating):
        messages = change(messages) if change in changes else messages
    return messages


def calls_of(message: Message) -> list[Any]:
    """Of the assistant; none if they are not as OpenAI writes them."""
    calls = message.get("tool_calls")
    return calls if isinstance(calls, list) and all(isinstance(_function(call), Mapping) for call in calls) else []


def _function(call: Any) -> Any:
    return call.get("function") if isinstance(call, Mapping) else None


def _with_arguments(call: Message, arguments: Any) -> Message:
    return {**call, "function": {**call["function"], "arguments": arguments}}


def neighbours_joined(messages: Messages) -> list[Message]:
    """Neighbours of one role are one turn, and the assistant's empty turns are left out."""
    found, texts = list[Message](), dict[int, list[str]]()
    for message in messages:
        if message.get("role") == "assistant" and _is_said(message) and not message["content"]:
            continue
        if found and _is_said(message) and _is_said(found[-1]) and found[-1]["role"] == message["role"]:
            texts.setdefault(len(found) - 1, [found[-1]["content"]]).append(message["content"])
            found[-1] = {**message, **found[-1]}
        else:
            found.append(message)
    for at, joined in texts.items():
        found[at] = {**found[at], "content": _joined(*joined)}
    return found


def alternating(messages: Messages) -> list[Message]:
    """The user's turns and the assistant's alternate, and the user begins; calls and their results do not count."""
    found, last = list[Message](), -1  # the last turn that counts
    for message in neighbours_joined(messages):
        role, counts = message.get("role"), _is_said(message)
        is_double = counts and last >= 0 and found[last]["role"] == role
        if is_double and role == "assistant":
            found.insert(last + 1, BETWEEN["user"])
        elif is_double or (last < 0 and role == "assistant"):
            found.append(BETWEEN["assistant" if is_double else "user"])
            last = len(found) - 1
        found.append(message)
        last = len(found) - 1 if counts else last
    return found


def _is_said(message: Message) -> bool:
    return message.get("role") in BETWEEN and isinstance(message.get("content"), str) and not calls_of(message)


def later_systems_joined(messages: Messages) -> list[Message]:
    """The first message alone may be the system's."""
    return _systems_joined(messages, 1)


def systems_joined(messages: Messages) -> list[Message]:
    """No message is the system's."""
    return _systems_joined(messages, 0)


def _systems_joined(messages: Messages, kept: int) -> list[Message]:
    """Messages whose system messages, but those among the first `kept` messages, are parts of their neighbours.

    Many templates know system messages at the beginning only. The message before takes the text, so that the rendered
    beginning of a conversation stays as it was. If the assistant wrote that one, the message after takes it.
    """
    found = list[tuple[Message, list[str]]]()  # with the texts of those that take some
    waiting = list[str]()
    for number, message in enumerate(messages):
        takes = _takes_text(message)
        if number >= kept and takes and message["role"] in SYSTEM:
            texts = found[-1][1] if found and _takes_text(found[-1][0]) else waiting
            texts.append(message["content"])
            continue
        if waiting and not takes:
            found.append(({"role": "user"}, waiting))
            waiting = []
        found.append((message, [*waiting, message["content"]] if takes else []))
        waiting = []
    found += [({"role": "user"}, waiting)] if waiting else []
    return [{**message, "content": _joined(*texts)} if texts else message for message, texts in found]


def _takes_text(message: Message) -> bool:
    return message.get("role") in (*SYSTEM, "user", "tool") and isinstance(message.get("content"), str)


def _joined(*texts: str) -> str:
    return "\n\n".join(filter(None, texts))


def texts_before_calls(messages: Messages) -> list[Message]:
    """A text beside calls is a turn of its own."""
    found = list[Message]()
    for message in messages:
        if message.get("content") and calls_of(message):
            found += [{"role": message.get("role"), "content": message["content"]}, {**message, "content": ""}]
        else:
            found.append(message)
    return found


def texts_with_results(messages: Messages) -> list[Message]:
    """A text beside calls is told with the result of the first."""
    found, waiting = list[Message](), ""
    for at, message in enumerate(messages):
        result = messages[at + 1] if at + 1 < len(messages) and messages[at + 1].get("role") == "tool" else {}
        if message.get("content") and calls_of(message) and isinstance(result.get("content"), str):
            message, waiting = {**message, "content": ""}, message["content"]
        elif waiting:
            message, waiting = {**message, "content": SAID.format(waiting, message["content"])}, ""
        found.append(message)
    return found


def single_calls(messages: Messages) -> list[Message]:
    """Each call is a turn of its own, and its result comes next."""
    found, at = list[Message](), 0
    while at < len(messages):
        message, at = messages[at], at + 1
        calls = calls_of(message)
        if len(calls) < 2:
            found.append(message)
            continue
        results = list(takewhile(lambda one: one.get("role") == "tool", messages[at:]))
        at += len(results)
        waiting = dict[str, list[Message]]()
        for result in reversed(results):
            waiting.setdefault(str(result.get("tool_call_id")), []).append(result)
        for call in calls:
            found.append({**message, "tool_calls": [call]})
            message = {"role": message.get("role"), "content": ""}
            if mine := waiting.get(str(call.get("id"))):
                found.append(mine.pop())
        found += [result for rest in waiting.values() for result in reversed(rest)]
    return found


def written_arguments(messages: Messages) -> list[Message]:
    """Arguments of calls as JSON, where a template cannot show an object."""
    found = list[Message]()
    for message in messages:
        calls = [_with_arguments(call, _json(call["function"].get("arguments"))) for call in calls_of(message)]
        found.append({**message, "tool_calls": calls} if calls else message)
    return found


def stray_results_as_text(messages: Messages) -> list[Message]:
    """Results that follow no call are the user's."""
    found, called = list[Message](), 0
    for message in messages:
        is_result = message.get("role") == "tool"
        called = called - 1 if is_result else len(calls_of(message))
        found.append(_result_as_text(message) if is_result and called < 0 else message)
    return found


def calls_as_text(messages: Messages) -> list[Message]:
    """Calls are in the assistant's text, and results that follow each other are one text of the user."""
    found, results = list[Message](), list[str]()
    for message in (*messages, {}):
        if message.get("role") == "tool":
            results.append(_result_as_text(message)["content"])
            continue
        if results:
            found.append({"role": "user", "content": "\n".join(results)})
            results = []
        if calls := calls_of(message):
            texts = [CALL.format(_json(dict(call["function"]))) for call in calls]
            message = {**message, "content": "\n".join(filter(None, [message.get("content"), *texts]))}
            del message["tool_calls"]
        found.append(message)
    return found[:-1]


def _result_as_text(message: Message) -> Message:
    return {"role": "user", "content": RESULT.format(message.get("content") or "")}


def _json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


# Those that change a conversation least come first.
CHANGES: tuple[Change, ...] = (
    neighbours_joined, later_systems_joined, systems_joined, texts_before_calls, single_calls, stray_results_as_text,
    texts_with_results, alternating, written_arguments, calls_as_text,
)  # fmt: skip
