"""What is refused, and how each dialect says so."""

from dataclasses import dataclass
from typing import Any

from edgespec.errors import Closed, ContextFull, EdgespecError, UsageError

TYPES = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
TYPES |= {413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error"}  # Anthropic's names


@dataclass
class Refused(Exception):
    """A request that gets no text."""

    status: int
    message: str
    code: str | None = None  # OpenAI's
    param: str | None = None  # the field that is wrong


def refusal(error: BaseException) -> Refused:
    """What a client is told of an error."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, ContextFull):
        return Refused(400, str(error), "context_length_exceeded", "messages")
    if isinstance(error, UsageError):
        return Refused(400, str(error))
    if isinstance(error, UnicodeEncodeError):
        return Refused(400, "the text has half a surrogate pair, which no UTF-8 text can have")
    if isinstance(error, Closed):
        return Refused(503, "the server is stopping")
    if isinstance(error, EdgespecError):
        return Refused(500, str(error))
    return Refused(500, f"an error in the server: {type(error).__name__}")


def error_body(refused: Refused, path: str) -> dict[str, Any]:
    """JSON of an error, in the dialect of the path asked for."""
    kind = TYPES.get(refused.status, "api_error" if refused.status >= 500 else "invalid_request_error")
    if path.startswith("/v1/messages"):
        return {"type": "error", "error": {"type": kind, "message": refused.message}}
    error = {"message": refused.message, "type": kind, "param": refused.param, "code": refused.code}
    return {"error": error}
