"""Conversations as chat templates want them: some name thoughts otherwise, and some check or print the ids of calls."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from edgespec.loop.backend import Vocab
from edgespec.loop.text import Message, render_chat
from edgespec.server.call_formats import form_of

ID_LENGTH = 9  # letters and digits: what Mistral's templates insist on


def prompt_ids(
    vocab: Vocab, messages: Sequence[Message], tools: Sequence[Message] | None, more: Mapping[str, Any] | None = None
) -> list[int]:
    """Token ids of a conversation, ready for the answer. Arguments and errors as for `render_chat`."""
    return render_chat(vocab, list(settled(vocab, messages)), tools, more)


def settled(vocab: Vocab, messages: Sequence[Message]) -> Iterator[Message]:
    """Messages whose calls have ids in the model's form, and whose results have them too, with the function's name."""
    form, renames = form_of(vocab), "message.thinking" in (vocab.chat_template or "")
    counted = form is not None and "{number}" in form.call
    open_calls: dict[str, tuple[str, str]] = {}  # the client's id -> the template's, and the function
    number = 0
    for message in messages:
        calls = list[dict[str, Any]]()
        for call in message.get("tool_calls") or ():
            name, given = call["function"]["name"], str(call.get("id") or number)
            id_ = f"functions.{name}:{number}" if counted else hashlib.sha256(given.encode()).hexdigest()[:ID_LENGTH]
            open_calls[given] = id_, name
            calls.append({**call, "id": id_})
            number += 1
        told = {**message, **({"tool_calls": calls} if calls else {})}
        if message["role"] == "tool":
            given = str(message.get("tool_call_id"))
            answered = given if given in open_calls else next(iter(open_calls), None)  # else in their order
            if answered is not None:
                told["tool_call_id"], told["name"] = open_calls.pop(answered)
        if renames and (thought := told.pop("reasoning_content", None)):
            told["thinking"] = thought
            if calls:  # it refuses both
                told["content"] = ""
        yield told
