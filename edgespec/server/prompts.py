"""Turns of a conversation as the messages that a chat template reads."""

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from edgespec.loop.message_forms import Message
from edgespec.server.conversation import Turn
from edgespec.server.schema import strict_json
from edgespec.server.tool_calls import Call

ID_LENGTH = 9  # Mistral's templates insist on it


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
