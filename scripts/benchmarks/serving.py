"""A server of this package in a thread, and requests to any server on this machine."""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from threading import Thread
from typing import Any

from edgespec.errors import EdgespecError
from edgespec.model import Model

JSON = {"Content-Type": "application/json"}


@dataclass(frozen=True, slots=True)
class Streamed:
    """
    Attributes:
        tokens: number of tokens; 0: the server reported none.
        first: seconds until the first word.
        seconds: until the end.
    """

    text: str
    tokens: int
    first: float
    seconds: float


@contextmanager
def served(model: Model, name: str = "model") -> Iterator[int]:
    from edgespec.server.app import make_app
    from edgespec.server.service import Service

    with running(make_app(Service(model, name))) as port:
        yield port


@contextmanager
def running(app: Any, sock: socket.socket | None = None) -> Iterator[int]:
    """The port of an application in a thread, on a socket of its own or a given one, by the protocol of `serve`."""
    import uvicorn

    from edgespec.server.connections import OneProtocol

    with sock or socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(uvicorn.Config(app, http=OneProtocol, ws="none", lifespan="on", log_level="warning"))
        thread = Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            while not server.started:
                time.sleep(0.01)
            yield listening.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()


@contextmanager
def closing_connection(port: int) -> Iterator[HTTPConnection]:
    connection = HTTPConnection("127.0.0.1", port, timeout=600)
    try:
        yield connection
    finally:
        connection.close()


def stream_chat(port: int, body: dict[str, Any]) -> Streamed:
    """
    Raises:
        EdgespecError: there is no answer.
    """
    started, tokens, text, first = time.perf_counter(), 0, "", 0.0
    sent = json.dumps(body | {"stream": True, "stream_options": {"include_usage": True}})
    try:
        with closing_connection(port) as connection:
            connection.request("POST", "/v1/chat/completions", sent, JSON)
            answer = connection.getresponse()
            if answer.status != 200:
                raise EdgespecError(f"status {answer.status}: {answer.read().decode('utf-8', 'replace')[:200]}")
            for line in answer:
                if not line.startswith(b"data: {"):
                    continue
                data = json.loads(line[6:])
                if "error" in data:
                    raise EdgespecError(f"the answer ended: {str(data['error'])[:200]}")
                if new := "".join(choice["delta"].get("content") or "" for choice in data["choices"]):
                    first = first or time.perf_counter() - started
                    text += new
                if usage := data.get("usage"):
                    tokens = usage["completion_tokens"]
    except (OSError, HTTPException) as error:
        raise EdgespecError(f"127.0.0.1 port {port} does not answer: {error or type(error).__name__}") from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        shown = line.decode("utf-8", "replace").strip()[:200]
        raise EdgespecError(f"127.0.0.1 port {port} answers with what is no part of a chat: {shown}") from error
    return Streamed(text, tokens, first, time.perf_counter() - started)
