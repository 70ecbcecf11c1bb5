"""Turns of a conversation as the messages that a chat template reads, or as texts where it knows no calls."""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from typing import Any

from edgespec.loop.message_forms import CALL, RESULT, Message
from edgespec.server.conversation import Turn
from edgespec.server.schema import strict_json
from edgespec.server.tool_calls import Call, Tools

ID_LENGTH = 9  # Mistral's templates insist on it
# The words are those of Qwen's and Hermes' templates, which many models have read.
INSTRUCTION = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def template_messages(turns: Sequence[Turn], *, names_thinking: bool, numbered: bool) -> Iterator[Message]:
    """Give calls and results ids in the model's form, and results their function's name.

    Args:
        turns: of the conversation.
        names_thinking: the template reads `message.thinking` instead of `message.reasoning_content`.
        numbered: ids are functions.NAME:NUMBER.
    """
    unanswered = OrderedDict[str, list[tuple[str, str]]]()  # the client's id -> (the template's, the function)
    number = 0
    for turn in turns:
        message: dict[str, Any] = {"role": turn.role, "content": turn.text}
        calls = list[dict[str, Any]]()
        for call in turn.calls:
            given = call.id or str(number)
            id_ = f"functions.{call.name}:{number}" if numbered else short_id(given)
            unanswered.setdefault(given, []).append((id_, call.name))
            function = {"name": call.name, "arguments": arguments_of(call)}
            calls.append({"type": "function", "id": id_, "function": function})
            number += 1
        if calls:
            message["tool_calls"] = calls
        if turn.role == "tool":
            given = str(turn.result_of)
            answered = given if given in unanswered else next(iter(unanswered), None)
            message["tool_call_id"] = short_id(given)
            if answered is not None:
                message["tool_call_id"], message["name"] = unanswered[answered].pop(0)
                if not unanswered[answered]:
                    del unanswered[answered]
        if turn.thought is not None and not names_thinking:
            message["reasoning_content"] = turn.thought
        elif turn.thought:
            message["thinking"] = turn.thought
        yield message


def short_id(given: str) -> str:
    return hashlib.sha256(given.encode("utf-8", "replace")).hexdigest()[:ID_LENGTH]


def arguments_of(call: Call) -> dict[str, Any]:
    """Arguments as an object, which many templates insist on; what is none is its only value."""
    found: Any = call.arguments
    with suppress(ValueError, RecursionError):
        found = strict_json(call.arguments or "null")
    return found if isinstance(found, dict) else {} if found is None else {"arguments": found}


def calls_as_text(turns: Sequence[Turn], tools: Tools | None) -> list[Turn]:
    """Turns that any template shows: tools stand in the system message, results are the user's.

    Calls of the last turn stay, since their results are missing.
    """
    found = list[Turn]()
    for is_result, group in groupby(turns, lambda turn: turn.role == "tool"):
        if is_result:
            results = [RESULT.format(turn.text) for turn in group]
            found.append(Turn("user", "\n".join(results)))
            continue
        for turn in group:
            texts = filter(None, [turn.text, *map(call_text, turn.calls)])
            is_over = turn.calls and turn is not turns[-1]
            found.append(replace(turn, text="\n".join(texts), calls=()) if is_over else turn)
    if tools:
        shown = [tool.shown for tool in tools.all]
        listed = [json.dumps(one, ensure_ascii=False) for one in shown]
        about = INSTRUCTION.format(tools="\n".join(listed))
        system = found.pop(0).text if found[0].role == "system" else ""
        found.insert(0, Turn("system", "\n\n".join(filter(None, [system, about]))))
    return found


def call_text(call: Call) -> str:
    name = json.dumps(call.name, ensure_ascii=False)
    return CALL.format(f'{{"name": {name}, "arguments": {call.arguments or "{}"}}}')
