"""The ASGI application: routes, the page, and the checks and errors around them."""

from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from edgespec.errors import EdgespecError
from edgespec.server.access import OLLAMA, Guard
from edgespec.server.dialects import embeddings, ollama, openai, tokens
from edgespec.server.dialects import messages as anthropic
from edgespec.server.dialects.chat import CHAT
from edgespec.server.dialects.completions import COMPLETION
from edgespec.server.dialects.draft_prompt import typed_prompt
from edgespec.server.dialects.responses import RESPONSES, stored_items, stored_response
from edgespec.server.errors import Refused, refusal
from edgespec.server.metrics import metrics
from edgespec.server.models import Models, Served
from edgespec.server.service import Service

STATIC = Path(__file__).parent / "static"
ASK_AGAIN = {"Cache-Control": "no-cache"}  # files of two versions never meet in a browser
ERRORS: tuple[type[Exception], ...] = (Refused, EdgespecError, UnicodeEncodeError, Exception)


class Static(StaticFiles):
    def file_response(self, *args: Any, **more: Any) -> Response:
        answer = super().file_response(*args, **more)
        answer.headers.update(ASK_AGAIN)
        return answer


def make_app(
    models: Models | Service, *, keys: Collection[str] = (), hosts: Collection[str] = (), origins: Collection[str] = ()
) -> ASGIApp:
    """The ASGI application.

    Args:
        models: that are served; a `Service` is the only one, and the caller closes its model.
        keys: as for `Guard`.
        hosts: as for `Guard`.
        origins: as for `Guard`.
    """
    models = Models.of(models) if isinstance(models, Service) else models
    app = _starlette(
        [
            Route("/v1/chat/completions", CHAT.answer, methods=["POST"]),
            Route("/v1/completions", COMPLETION.answer, methods=["POST"]),
            Route("/v1/messages", anthropic.MESSAGES.answer, methods=["POST"]),
            Route("/v1/messages/count_tokens", anthropic.count_tokens, methods=["POST"]),
            Route("/v1/responses", RESPONSES.answer, methods=["POST"]),
            Route("/v1/responses/{name}", stored_response, methods=["GET", "DELETE"]),
            Route("/v1/responses/{name}/input_items", stored_items),
            Route("/v1/embeddings", embeddings.OPENAI, methods=["POST"]),
            Route("/v1/models", list_models),
            Route("/v1/models/{name:path}", show_model),
            Route("/api/chat", ollama.CHAT.answer, methods=["POST"]),
            Route("/api/generate", ollama.GENERATE.answer, methods=["POST"]),
            Route("/api/embed", embeddings.EMBED, methods=["POST"]),
            Route("/api/embeddings", embeddings.PROMPT, methods=["POST"]),
            Route("/api/show", ollama.show, methods=["POST"]),
            Route("/api/tags", ollama.tags),
            Route("/api/ps", ollama.running),
            Route("/api/version", ollama.version),
            *(Route(f"/api/{name}", ollama.refuse, methods=["POST"]) for name in ("pull", "push", "create", "copy")),
            Route("/api/delete", ollama.refuse, methods=["DELETE"]),
            Route("/tokenize", tokens.tokenize, methods=["POST"]),
            Route("/detokenize", tokens.detokenize, methods=["POST"]),
            Route("/props", tokens.props),
            Route("/edgespec/draft-prompt", typed_prompt, methods=["PUT"]),
            Route("/health", health),
            Route("/metrics", show_metrics),
        ],
        lifespan=_lifespan,
    )
    app.state.models = models
    paths = {route.path for route in app.routes if isinstance(route, Route) and "{" not in route.path}

    def count(path: str, status: int) -> None:
        models.answered[path if path in paths else "other", status] += 1

    return _guarded(app, keys=keys, hosts=hosts, origins=origins, count=count)


def make_loading_app(**guard: Collection[str]) -> ASGIApp:
    """The ASGI application while there is no model: the page, and 503 for all else; `guard` as for `make_app`."""
    return _guarded(_starlette([Mount("/", _refuse_while_loading)]), **guard)


def _starlette(routes: Sequence[BaseRoute], **more: Any) -> Starlette:
    shown = [Route("/", page), Mount("/static", Static(directory=STATIC))]
    handlers = {HTTPException: _no_such_path} | dict.fromkeys(ERRORS, _refuse)
    return Starlette(routes=[*shown, *routes], exception_handlers=handlers, **more)


def _guarded(app: ASGIApp, *, origins: Collection[str] = (), **guard: Any) -> ASGIApp:
    guarded = Guard(app, error_body, origins=origins, **guard)
    if not origins:
        return guarded
    return CORSMiddleware(guarded, allow_origin_regex=guarded.origins.pattern, allow_methods=["*"], allow_headers=["*"])


async def _refuse_while_loading(scope: Scope, receive: Receive, send: Send) -> None:
    raise Refused(503, "the model is loading: come again in a moment")


@asynccontextmanager
async def _lifespan(app: Starlette) -> AsyncIterator[None]:
    models: Models = app.state.models
    for service in models.services.values():
        service.begin()
    yield
    models.stop()
    models.close()


def error_body(refused: Refused, path: str) -> dict[str, Any]:
    if path.startswith(OLLAMA):
        return ollama.error_body(refused)
    is_anthropic = path.startswith("/v1/messages")
    return anthropic.error_body(refused) if is_anthropic else openai.error_body(refused)


async def _refuse(http: HttpRequest, error: Exception) -> Response:
    refused = refusal(error)
    return JSONResponse(error_body(refused, http.url.path), refused.status, headers=refused.headers)


async def _no_such_path(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = "there is no such path" if error.status_code == 404 else error.detail
    refused = Refused(error.status_code, f"{http.method} {http.url.path}: {what}")
    return JSONResponse(error_body(refused, http.url.path), error.status_code, headers=error.headers)


def _card(models: Models, served: Served, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": models.started,
        "owned_by": "edgespec",
        "type": "model",
        "display_name": name,
        "created_at": "1970-01-01T00:00:00Z",
        "meta": served.limits,
    }


async def list_models(http: HttpRequest) -> Response:
    models: Models = http.app.state.models
    cards = [_card(models, one, name) for one in models.all for name in one.names]
    ends = {"has_more": False, "first_id": cards[0]["id"], "last_id": cards[-1]["id"]}
    return JSONResponse({"object": "list", "data": cards, **ends})


async def show_model(http: HttpRequest) -> Response:
    models, name = http.app.state.models, http.path_params["name"]
    return JSONResponse(_card(models, models.named(name), name))


async def health(http: HttpRequest) -> Response:
    """The first model, and if there are others, each."""
    models: Models = http.app.state.models
    found = {"status": "stopping" if models.stopping else "ok", **_state(models.all[0])}
    several = {"memory": models.memory, "taken": models.taken, "models": list(map(_state, models.all))}
    return JSONResponse(found | (several if models.all[1:] else {}))


def _state(served: Served) -> dict[str, Any]:
    if not (service := served.service):
        return {"model": served.name, "loaded": False}
    target, scheduler = service.model.target, service.model.scheduler
    exact = target.capabilities.exact
    return {
        "model": served.name,
        "loaded": True,
        "engine": target.name,
        "where": service.model.where.as_dict(),
        "planner": service.model.planners[0].name,
        "exact": exact.name if exact else None,
        "approximate": service.model.approximate,
        "streams": target.capabilities.streams,
        "context_length": target.capabilities.context_length,
        "parallel": len(service.model.planners),
        "active": scheduler.active,
        "waiting": scheduler.waiting,
    }


async def show_metrics(http: HttpRequest) -> Response:
    return PlainTextResponse(metrics(http.app.state.models), media_type="text/plain; version=0.0.4")


async def page(http: HttpRequest) -> Response:
    return FileResponse(STATIC / "index.html", headers=ASK_AGAIN)
