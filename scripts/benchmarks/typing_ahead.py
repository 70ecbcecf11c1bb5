"""What reading along gains: prompts are typed at a person's speed, and the first word of the answer is waited for."""

import json
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from threading import Thread
from typing import Any

from edgespec.model import Model

TELL = 0.15  # seconds between two drafts that a client sends, as the page does
WAYS = ("Enter only", "read along", "read along, pause")


@dataclass(frozen=True, slots=True)
class Typed:
    """Seconds from Enter to the first token of one prompt's answer, in each of `WAYS`, and whether texts are equal."""

    seconds: Sequence[float]
    same: bool


@contextmanager
def served(model: Model) -> Iterator[int]:
    """The port of a server for it."""
    import uvicorn

    from edgespec.server.app import make_app
    from edgespec.server.service import Service

    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(uvicorn.Config(make_app(Service(model, "model")), log_level="warning", lifespan="on"))
        thread = Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            while not server.started:
                time.sleep(0.01)
            yield listening.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()


def replay(port: int, model: Model, text: str, *, speed: float, pause: float, max_tokens: int, seed: int) -> Typed:
    """Type a text in each way, every time with a cache that knows nothing of it.

    Args:
        port: of the server.
        model: that it serves.
        text: the prompt.
        speed: characters a second.
        pause: seconds between the last character and Enter, where there is a pause.
        max_tokens: of the answer.
        seed: of the answer.
    """
    seconds, answers = list[float](), list[str]()
    for way in WAYS:
        model.scheduler.forget()
        if way != WAYS[0]:
            for end in range(round(speed * TELL) or 1, len(text), round(speed * TELL) or 1):
                started = time.perf_counter()
                ask(port, "PUT", "/edgespec/draft-prompt", body(text[:end], max_tokens, seed))
                time.sleep(max(0.0, TELL - (time.perf_counter() - started)))
        if way == WAYS[2]:
            ask(port, "PUT", "/edgespec/draft-prompt", {**body(text, max_tokens, seed), "pause": True})
            time.sleep(pause)
        started = time.perf_counter()
        first, answer = stream(port, body(text, max_tokens, seed), started)
        seconds.append(first)
        answers.append(answer)
    return Typed(seconds, len(set(answers)) == 1)


def body(text: str, max_tokens: int, seed: int) -> dict[str, Any]:
    """A chat request."""
    return {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": max_tokens,
        "seed": seed,
        "temperature": 0.7,
        "stream": True,
    }


def ask(port: int, method: str, path: str, sent: dict[str, Any]) -> bytes:
    """A request that is answered at once."""
    with closing_connection(port) as connection:
        connection.request(method, path, json.dumps(sent), {"Content-Type": "application/json"})
        return connection.getresponse().read()


def stream(port: int, sent: dict[str, Any], started: float) -> tuple[float, str]:
    """Seconds to the first words, and all of them."""
    with closing_connection(port) as connection:
        connection.request("POST", "/v1/chat/completions", json.dumps(sent), {"Content-Type": "application/json"})
        answer, first, text = connection.getresponse(), 0.0, ""
        for line in answer:
            if line.startswith(b"data: {"):
                choices = json.loads(line[6:])["choices"]
                text += choices[0]["delta"].get("content") or "" if choices else ""
                first = first or (time.perf_counter() - started if text else 0.0)
        return first, text


@contextmanager
def closing_connection(port: int) -> Iterator[HTTPConnection]:
    """A connection to the server."""
    connection = HTTPConnection("127.0.0.1", port, timeout=600)
    try:
        yield connection
    finally:
        connection.close()
