"""Answers of the server without a server: `completion(model, messages=[…], tools=[…])`."""

import asyncio
import json
from contextlib import suppress
from typing import Any

from edgespec.errors import UsageError, must_be
from edgespec.model import Model
from edgespec.server.dialects.chat import ChatBody, ChatWriter, question_of
from edgespec.server.errors import Refused
from edgespec.server.service import Service
from edgespec.server.wire import parsed_body


def completion(model: Model, **request: Any) -> dict[str, Any]:
    """What `/v1/chat/completions` answers, with the calls of tools that the model makes.

    Args:
        model: loaded.
        request: fields of the body, such as messages, tools, tool_choice and response_format.

    Raises:
        EdgespecError: the request cannot be answered; in asyncio `acompletion` can.
    """
    with suppress(RuntimeError):
        asyncio.get_running_loop()
        raise UsageError("completion would hold up the running event loop: await acompletion")
    return asyncio.run(acompletion(model, **request))


async def acompletion(model: Model, **request: Any) -> dict[str, Any]:
    """As `completion`, for asyncio; cancelling the task ends the request."""
    try:
        data = json.dumps(request).encode()
    except (TypeError, ValueError) as error:
        raise must_be("the request", request, "of values that JSON has") from error
    try:
        body = parsed_body(data, ChatBody)
        if body.stream:
            raise must_be("stream", True, "left out: the answer comes whole")
        model.scheduler.start()
        service = Service(model, "edgespec")
        answers = await service.start(question_of(body), "", len(data))
    except Refused as error:
        raise UsageError(error.message) from error
    try:
        await answers.whole()
        writer = ChatWriter(body, service.name)
        writer.start(service, answers)
        return writer.whole()
    finally:
        answers.cancel()
