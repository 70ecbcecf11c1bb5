"""Any page in a browser can reach a local server, so Host, Origin, type of the body, and key are checked.

The Host must be one that no attacker's name server can answer for. Bodies must be JSON, which no page can send to
another origin unasked. Ollama's interface takes them without a type, since its clients send none; there the Origin
alone, which every browser sends with a body, keeps pages out.
"""

import asyncio
import hmac
import re
from collections.abc import Callable, Collection
from hashlib import sha256
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgespec.errors import must_be
from edgespec.server.errors import Refused, refusal

PUBLIC = ("/", "/health")  # without a key: the page itself has no secret
PUBLIC_FOLDER = "/static/"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
SAFETY = [
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
]
LOCAL = "localhost"  # the only name that no system asks a name server for: macOS does for *.localhost
ORIGIN = re.compile(r"(\*|null|[a-z][a-z0-9+.-]*://[^/?#\s]*)/?", re.IGNORECASE)
BEARER = re.compile(r"^bearer\s+", re.IGNORECASE)
UNTYPED = ("", "application/x-www-form-urlencoded")  # what Ollama's clients say of their JSON; the second is curl's
OLLAMA = "/api/"  # its paths
NAME = re.compile(r"[\w-]+(\.[\w-]+)*\.?", re.ASCII)

SENDER = "edgespec.sender"  # of a request, in its scope


def sender_of(key: str) -> str:
    """The sender that a key stands for: the same after a restart, but not the key itself."""
    return sha256(f"edgespec sender {key}".encode()).hexdigest()[:16]


def _pattern(origin: str) -> str:
    """A regular expression of an allowed origin, as browsers send it. Raises UsageError."""
    found = ORIGIN.fullmatch(origin)
    if not found:
        raise must_be("--allow-origin", origin, "like https://chat.example, app://obsidian.md, app://* or *")
    text = found[1].lower()
    for scheme, port in (("http://", ":80"), ("https://", ":443")):  # which no browser sends
        text = text.removesuffix(port) if text.startswith(scheme) else text
    return ".*".join(map(re.escape, text.split("*")))


class Guard:
    """The outermost layer, which also answers where the server's end cuts a request off."""

    def __init__(
        self,
        app: ASGIApp,
        error_body: Callable[[Refused, str], dict[str, Any]],
        *,
        keys: Collection[str] = (),
        hosts: Collection[str] = (),
        origins: Collection[str] = (),
        count: Callable[[str, int], None] = lambda path, status: None,
    ) -> None:
        """
        Args:
            app: the layers within.
            error_body: an error in the dialect of a path.
            keys: the request must have one of them; empty: it needs none.
            hosts: allowed names besides addresses and localhost.
            origins: of allowed pages, besides this server's own; * stands for any text.
            count: called with path and status of each answer of `app`.

        Raises:
            UsageError: one of `hosts` is no name, or one of `origins` no origin.
        """
        for host in hosts:
            if not NAME.fullmatch(host):
                raise must_be("--allow-host", host, "a name such as box.lan, without a port")
        self._app = app
        self._error_body = error_body
        several = len(set(keys)) > 1
        self._senders = {key.encode(): sender_of(key) if several else "" for key in keys}
        self._hosts = {LOCAL} | {host.lower().rstrip(".") for host in hosts}
        self.origins = re.compile(f"(?i:{'|'.join(map(_pattern, origins)) or '(?!)'})")
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        refused = self.refused(scope)
        if refused:
            await self._answer(refused, scope, receive, send)
            return
        scope[SENDER] = self._sender(Headers(scope=scope)) or ""
        begun = False

        async def counted(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                self._count(scope["path"], message["status"])
                message = {**message, "headers": [*message["headers"], *SAFETY]}
            await send(message)

        try:
            await self._app(scope, receive, counted)
        except asyncio.CancelledError as error:  # by the server, when its time is over
            if not begun:
                await self._answer(refusal(error), scope, receive, counted)

    async def _answer(self, refused: Refused, scope: Scope, receive: Receive, send: Send) -> None:
        body = self._error_body(refused, scope["path"])
        await JSONResponse(body, refused.status, headers=refused.headers)(scope, receive, send)

    def refused(self, scope: Scope) -> Refused | None:
        """The refusal; None: the request may pass."""
        headers = Headers(scope=scope)
        host = headers.getlist("host")
        if len(host) != 1 or not self._known(host[0]):
            return Refused(403, f"this server does not answer for the host {', '.join(host)!r}; see --allow-host")
        for origin in headers.getlist("origin"):
            if origin != f"{scope['scheme']}://{host[0]}" and not self.origins.fullmatch(origin):
                return Refused(403, f"pages of {origin!r} may not use this server; see --allow-origin")
        if "origin" not in headers and "cross-site" in headers.getlist("sec-fetch-site"):
            return Refused(403, "another site's page may not use this server")
        if scope["method"] in ("POST", "PUT", "PATCH"):
            kind = ", ".join(headers.getlist("content-type")).partition(";")[0].strip().lower()
            if kind != "application/json" and not (scope["path"].startswith(OLLAMA) and kind in UNTYPED):
                return Refused(415, f"the body must be application/json, not {kind or 'without a type'!r}")
            if (coding := headers.get("content-encoding", "identity")).lower() != "identity":
                return Refused(415, f"the body is sent as {coding!r}, which is not read here: send it as it is")
        public = scope["path"] in PUBLIC or scope["path"].startswith(PUBLIC_FOLDER)
        if self._senders and not public and self._sender(headers) is None:
            return Refused(401, "a key is missing or wrong: send Authorization: Bearer KEY or x-api-key: KEY")
        return None

    def _known(self, host: str) -> bool:
        try:
            parts = urlsplit(f"//{host}")
            name, _ = (parts.hostname or "").rstrip("."), parts.port
        except ValueError:
            return False
        if not name or parts.username is not None or parts.path or parts.query or parts.fragment:
            return False
        try:
            ip_address(name)
            return True
        except ValueError:
            return name in self._hosts

    def _sender(self, headers: Headers) -> str | None:
        """Who sends a request, by its key; "" where there are not several; None: it has none."""
        sent = [BEARER.sub("", value).strip() for value in headers.getlist("authorization")]
        sent += headers.getlist("x-api-key")
        found: str | None = None
        for value in sent:  # all of them: the time does not tell which key is right
            for key, sender in self._senders.items():
                if hmac.compare_digest(value.encode("latin-1", "replace"), key):
                    found = sender
        return found
