"""Connections whose clients do nothing, for which uvicorn waits for ever."""

import asyncio
import socket
from time import monotonic
from typing import Any

import uvicorn
from starlette.responses import JSONResponse
from uvicorn.protocols.http.h11_impl import H11Protocol

from edgespec.server.errors import Refused

MOST_CONNECTIONS = 200  # a Mac's programs may have 256 files
HEAD_SECONDS = 60.0  # that a client may take for the head of a request
SLOW_READER = 60.0  # that a client may leave data unread
LAST_SECONDS = 2  # for the last events after the grace, and for the rest of an answer while the server ends
LOOK_SECONDS = 0.1


class OneProtocol(H11Protocol):
    """HTTP/1.1 alone: Java's clients ask for HTTP/2 in every request, and httptools drops such requests' bodies."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MOST_CONNECTIONS:
            refused = Refused(503, f"there are {MOST_CONNECTIONS} connections already: come again in a moment")
            told = {"type": "error", "error": {"type": refused.kind, "message": refused.message}}  # in every dialect
            answer = JSONResponse(told, 503, refused.headers | {"Connection": "close"})
            head = [b"HTTP/1.1 503 Service Unavailable", *(name + b": " + value for name, value in answer.raw_headers)]
            transport.write(b"\r\n".join([*head, b"", bytes(answer.body)]))
            transport.close()

    def _should_upgrade(self) -> bool:
        return False  # H11Protocol does not, either, but logs two lines


class WatchingServer(uvicorn.Server):
    """uvicorn's server, which also leaves clients that do not read, or that send half a head."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._waits: dict[Any, tuple[Any, int, float]] = {}  # connection -> last request, unread bytes, since when

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._look_on()

    def _look_on(self) -> None:
        self.look(monotonic())
        asyncio.get_running_loop().call_later(LOOK_SECONDS, self._look_on)

    def look(self, now: float) -> None:
        """End connections whose clients have done nothing for too long, up to the time `now`; called often."""
        before, self._waits = self._waits, {}
        connection: Any
        for connection in self.server_state.connections:
            transport = connection.transport
            request = connection.cycle
            unread = transport.get_write_buffer_size()
            if not unread and request and not request.response_complete:
                continue  # the client waits for the server
            last, left, since = before.get(connection, (request, unread, now))
            if request is not last or unread < left or (unread and not left):
                since = now
            self._waits[connection] = request, unread, since
            if not unread and now - since >= HEAD_SECONDS:  # uvicorn itself closes what is silent after an answer
                transport.close()
            is_rest = self.should_exit and transport.is_closing()
            if unread and now - since >= (LAST_SECONDS if is_rest else SLOW_READER):
                transport.abort()  # to close it would wait for the client
