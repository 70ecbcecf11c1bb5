"""Embeddings in OpenAI's dialect, /v1/embeddings, and in Ollama's, /api/embed and its older form /api/embeddings."""

import asyncio
from abc import abstractmethod
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import monotonic_ns
from typing import Any, Literal

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from edgespec.errors import must_be
from edgespec.loop.pooling import POOLINGS
from edgespec.loop.sampling import Float32Array
from edgespec.server.conversation import Prompt
from edgespec.server.dialects.completions import several
from edgespec.server.errors import refuse_if
from edgespec.server.models import Models
from edgespec.server.service import Service
from edgespec.server.wire import Checked, Listed, Named, answer_whole, json_of, parsed_body

MOST_INPUTS = 2048


class EmbeddingFields(Checked, Named):
    """
    Attributes:
        pooling: as for `Model.embed`.
    """

    pooling: str | None = None
    dimensions: int | None = None
    truncate: bool = False

    @property
    @abstractmethod
    def inputs(self) -> Sequence[Prompt]:
        """The texts; raises Refused."""


class OpenAIEmbeddingsBody(EmbeddingFields):
    input: str | Listed[str] | Listed[int] | Listed[Listed[int]]
    encoding_format: Literal["float", "base64"] = "float"

    @property
    def inputs(self) -> Sequence[Prompt]:
        refuse_if(not self.input, "input is empty: give at least one text", "input")
        return several(self.input)


class EmbedBody(EmbeddingFields):
    input: str | Listed[str] = ""
    truncate: bool = True

    @property
    def inputs(self) -> Sequence[Prompt]:
        return several(self.input) if self.input else []


class PromptBody(EmbedBody):
    prompt: str = ""

    @property
    def inputs(self) -> Sequence[Prompt]:
        return [self.prompt] if self.prompt else []


Told = Callable[[Any, str, Sequence[Float32Array], int, int], Mapping[str, Any]]


def openai_told(body: OpenAIEmbeddingsBody, name: str, found: Sequence[Float32Array], tokens: int, ns: int) -> Any:
    def told(vector: Float32Array) -> Any:
        is_text = body.encoding_format == "base64"
        return b64encode(vector.astype("<f4").tobytes()).decode() if is_text else vector.tolist()

    data = [{"object": "embedding", "index": i, "embedding": told(vector)} for i, vector in enumerate(found)]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": body.model or name, "usage": usage}


def ollama_told(body: EmbedBody, name: str, found: Sequence[Float32Array], tokens: int, ns: int) -> Any:
    vectors = [vector.tolist() for vector in found]
    counts = {"total_duration": ns, "load_duration": 0, "prompt_eval_count": tokens}
    return {"model": body.model or name, "embeddings": vectors, **counts}


def prompt_told(body: PromptBody, name: str, found: Sequence[Float32Array], tokens: int, ns: int) -> Any:
    return {"embedding": found[0].tolist() if found else []}


async def answer(kind: type[EmbeddingFields], told: Told, http: HttpRequest) -> Response:
    models: Models = http.app.state.models
    begun = monotonic_ns()
    body, size = await models.read(http, partial(_read, kind))
    async with models.service(body.model) as service:
        with service.admitted():
            prompts = await models.readers.read(size, partial(_encoded, service, body))
            return await _answered(http, service, body, prompts, told, begun)


async def _answered(
    http: HttpRequest, service: Service, body: EmbeddingFields, prompts: Sequence[list[int]], told: Told, begun: int
) -> Response:
    texts = list[str]()

    async def embed() -> None:
        """One text after the other: the client may leave, and others take turns."""
        loop, found = asyncio.get_running_loop(), list[Float32Array]()
        for ids in prompts:
            work = partial(service.model.embed, [ids], pooling=body.pooling)
            found.extend(await loop.run_in_executor(service.embedding, work))
            width, wanted = len(found[0]), body.dimensions
            says = f"dimensions is {wanted}, but this model's vectors have {width}, which are not shortened here"
            refuse_if(wanted not in (None, width), says, "dimensions")
        tokens, took = sum(map(len, prompts)), monotonic_ns() - begun
        answer = partial(told, body, service.name, found, tokens, took)
        texts.append(await loop.run_in_executor(service.embedding, lambda: json_of(answer())))

    return await answer_whole(http, embed(), lambda: texts[0])


def _read(kind: type[EmbeddingFields], data: bytearray) -> EmbeddingFields:
    """Raises Refused or UsageError."""
    body = parsed_body(data, kind)
    if body.pooling not in (None, *POOLINGS):
        raise must_be("pooling", body.pooling, f"one of {', '.join(POOLINGS)}")
    says = f"there are {len(body.inputs)} inputs, but at most {MOST_INPUTS} may be given"
    refuse_if(len(body.inputs) > MOST_INPUTS, says, "input")
    return body


def _encoded(service: Service, body: EmbeddingFields) -> list[list[int]]:
    """The tokens of its texts; raises Refused or UsageError."""
    target, found = service.model.target, list[list[int]]()
    most = target.capabilities.context_length - 1
    for i, one in enumerate(body.inputs):
        if body.truncate and isinstance(one, str):
            ids = service.encode(one[: most * target.vocab.longest])[:most]
        else:
            ids = service.encode(one)
        refuse_if(not ids, f"input.{i} is empty: give at least one word", "input")
        found.append(ids)
    return found


OPENAI = partial(answer, OpenAIEmbeddingsBody, openai_told)
EMBED = partial(answer, EmbedBody, ollama_told)
PROMPT = partial(answer, PromptBody, prompt_told)
