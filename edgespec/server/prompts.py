"""Turns of a conversation as the messages that a chat template reads."""

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from edgespec.loop.text import Message
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
    unanswered = OrderedDict[str, tuple[str, str]]()  # the client's id -> (the template's, the function)
    number = 0
    for turn in turns:
        message: dict[str, Any] = {"role": turn.role, "content": turn.text}
        calls = list[dict[str, Any]]()
        for call in turn.calls:
            given = call.id or str(number)
            id_ = f"functions.{call.name}:{number}" if numbered else hashlib.sha256(given.encode()).hexdigest()
            unanswered[given] = id_ if numbered else id_[:ID_LENGTH], call.name
            function = {"name": call.name, "arguments": arguments_of(call)}
            calls.append({"type": "function", "id": unanswered[given][0], "function": function})
            number += 1
        if calls:
            message["tool_calls"] = calls
        if turn.role == "tool":
            message["tool_call_id"] = turn.result_of
            given = str(turn.result_of)
            answered = given if given in unanswered else next(iter(unanswered), None)
            if answered is not None:
                message["tool_call_id"], message["name"] = unanswered.pop(answered)
        if turn.thought is not None and not names_thinking:
            message["reasoning_content"] = turn.thought
        elif turn.thought:
            message["thinking"] = turn.thought
            if calls:
                message["content"] = ""
        yield message


def arguments_of(call: Call) -> Any:
    """Arguments as an object; invalid JSON stays a string."""
    with suppress(ValueError, RecursionError):
        return strict_json(call.arguments or "{}")
    return call.arguments
