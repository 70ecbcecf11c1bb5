"""llama.cpp's dialect of tokens: /tokenize, /detokenize and /props."""

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from edgespec import __version__
from edgespec.errors import must_be
from edgespec.loop.backend import Vocab
from edgespec.loop.text import spelled
from edgespec.server.models import Models
from edgespec.server.service import Service
from edgespec.server.wire import Listed, Named, json_of, parsed_body


class TextBody(Named):
    content: str | list[Any]  # texts and token ids
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class TokensBody(Named):
    tokens: Listed[int]


async def tokenize(http: HttpRequest) -> Response:
    return await _answered(http, TextBody, _tokens)


async def detokenize(http: HttpRequest) -> Response:
    return await _answered(http, TokensBody, _text)


async def _answered(http: HttpRequest, kind: type[Named], work: Callable[[Vocab, Any], dict[str, Any]]) -> Response:
    models: Models = http.app.state.models
    body, size = await models.read(http, partial(parsed_body, kind=kind))
    async with models.service(body.model) as service:
        with service.admitted():
            vocab = service.model.target.vocab
            found = await models.readers.read(size, lambda: json_of(work(vocab, body)))
    return Response(found, media_type="application/json")


def _tokens(vocab: Vocab, body: TextBody) -> dict[str, Any]:
    parts, found = [body.content] if isinstance(body.content, str) else body.content, list[int]()
    for i, one in enumerate(parts):
        if isinstance(one, str):
            found += vocab.encode(one, add_bos=body.add_special and i == 0, parse_special=body.parse_special)
        elif isinstance(one, int) and 0 <= one < vocab.size:
            found.append(one)
        else:
            raise must_be(f"content.{i}", one, f"a text or a token id from 0 to {vocab.size - 1}")
    return {"tokens": [piece(vocab, token) for token in found] if body.with_pieces else found}


def piece(vocab: Vocab, token: int) -> dict[str, Any]:
    """A token with its text; of parts of a character its bytes."""
    data = spelled(vocab, [token])
    try:
        return {"id": token, "piece": data.decode()}
    except UnicodeDecodeError:
        return {"id": token, "piece": list(data)}


def _text(vocab: Vocab, body: TokensBody) -> dict[str, str]:
    return {"content": spelled(vocab, body.tokens).decode("utf-8", "replace")}


async def props(http: HttpRequest) -> Response:
    models: Models = http.app.state.models
    async with models.service(http.query_params.get("model", "")) as service:
        return JSONResponse(_props(service))


def _props(service: Service) -> dict[str, Any]:
    model, vocab = service.model, service.model.target.vocab
    settings = {"n_ctx": model.target.capabilities.context_length, "params": asdict(model.sampling)}
    known = {"bos_token": vocab.bos_id, "eos_token": vocab.eos_id}
    return {
        "default_generation_settings": settings,
        "total_slots": len(model.planners),
        "model_alias": service.name,
        "modalities": {"vision": False, "audio": False},
        "chat_template": vocab.chat_template or "",
        "chat_template_tool_use": vocab.tool_template or "",
        "build_info": f"edgespec {__version__}",
        **{name: "" if token is None else vocab.token_text(token) for name, token in known.items()},
    }
