"""The gain of typing ahead: prompts are typed at a person's speed; measured is the time to the answer's first word."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.serving import JSON, closing_connection, stream_chat
from edgespec.model import Model

INTERVAL = 0.15  # seconds between two drafts of a prompt, as the page sends them, and at least a character
WAYS = ("Enter only", "typing ahead", "typing ahead, pause")


@dataclass(frozen=True, slots=True)
class Typed:
    """
    Attributes:
        seconds: from Enter to the first token, for each of `WAYS`.
        unread: tokens of the prompt that were not read before Enter, for each of `WAYS`.
    """

    seconds: Sequence[float]
    unread: Sequence[int]
    same: bool


def replay(port: int, model: Model, text: str, *, speed: float, pause: float, max_tokens: int, seed: int) -> Typed:
    """Type a prompt in each of `WAYS`, each time with an empty cache.

    Args:
        port: of the server.
        model: the model that it serves.
        text: the prompt.
        speed: characters per second.
        pause: seconds between the last character and Enter, for the last way.
        max_tokens: of the answer.
        seed: of the answer.
    """

    def body(content: str) -> dict[str, Any]:
        sampling = {"max_tokens": max_tokens, "seed": seed, "temperature": 0.7}
        return {"messages": [{"role": "user", "content": content}], "stream": True, **sampling}

    def draft(content: str, **more: Any) -> None:
        with closing_connection(port) as connection:
            connection.request("PUT", "/edgespec/draft-prompt", json.dumps(body(content) | more), JSON)
            connection.getresponse().read()

    answers, step = [], round(speed * INTERVAL) or 1
    for way in WAYS:
        model.scheduler.forget()
        if way != WAYS[0]:
            for end in range(step, len(text), step):
                started = time.perf_counter()
                draft(text[:end])
                time.sleep(max(0.0, step / speed - (time.perf_counter() - started)))
        if way == WAYS[2]:
            draft(text, pause=True)
            time.sleep(pause)
        answers.append(stream_chat(port, body(text)))
    same = len({answer.text for answer in answers}) == 1
    return Typed([answer.first for answer in answers], [answer.unread for answer in answers], same)
