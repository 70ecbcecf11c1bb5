"""Errors as HTTP answers: what a request is refused with, and the status of any error."""

from asyncio import CancelledError
from dataclasses import dataclass

from edgespec.errors import Closed, ContextFull, EdgespecError, UsageError
from edgespec.loop.passes import TOO_LONG

KINDS = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
KINDS |= {413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error"}


MOST_SAID = 1000  # characters of a message


@dataclass
class Refused(Exception):
    status: int
    message: str
    code: str | None = None
    param: str | None = None

    def __post_init__(self) -> None:
        if len(self.message) > MOST_SAID:  # it quotes what was sent
            self.message = f"{self.message[:MOST_SAID]}…"

    @property
    def kind(self) -> str:
        return KINDS.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")

    @property
    def headers(self) -> dict[str, str]:
        return {"Retry-After": "5"} if self.status in (429, 503) else {}


def refuse_if(wrong: object, says: str, param: str | None = None) -> None:
    """Raise Refused, with status 400, if something is wrong."""
    if wrong:
        raise Refused(400, says, param=param)


def refusal(error: BaseException) -> Refused:
    if isinstance(error, Refused):
        return error
    if isinstance(error, ContextFull):
        says = str(error) if str(error).startswith(TOO_LONG) else f"{TOO_LONG} for the room that is left: {error}"
        return Refused(400, says, "context_length_exceeded", "messages")
    if isinstance(error, UsageError):
        return Refused(400, str(error))
    if isinstance(error, UnicodeEncodeError):
        return Refused(400, "the text has half a surrogate pair, which no UTF-8 text can have")
    if isinstance(error, Closed | CancelledError):  # the server's end cancels what goes on for too long
        return Refused(503, "the server is stopping")
    if isinstance(error, EdgespecError):
        return Refused(500, str(error))
    return Refused(500, f"an error in the server: {type(error).__name__}")
