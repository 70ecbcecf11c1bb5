"""Answers as a list of choices, whole or streamed: what OpenAI's chat and completions have in common."""

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, ClassVar

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from edgespec.loop.backend import Vocab
from edgespec.scheduler.requests import Chunk, Ended, Wrote
from edgespec.server.answers import Answer, Answers
from edgespec.server.dialects.openai import OpenAIBody, error_event, finish_reason, usage
from edgespec.server.service import Service
from edgespec.server.speculative_calls import SpeculativeCalls
from edgespec.server.wire import Event, Lenient, answer_whole, new_id, server_sent

MOST_LOG_PROBS = 20


class StreamOptions(Lenient):
    """What a stream also tells."""

    include_usage: bool = False


class ChoicesBody(OpenAIBody):
    """A request for choices."""

    stop: str | list[str] | None = None
    n: int = 1
    stream_options: StreamOptions | None = None

    @property
    def stops(self) -> Sequence[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or ()


class Shape:
    """How a choice looks."""

    prefix: ClassVar[str]  # of ids
    whole: ClassVar[str]  # kind of a whole answer
    part: ClassVar[str]  # kind of a chunk
    first: ClassVar[Mapping[str, Any] | None] = None  # part of the first chunk; None: there is no such chunk
    last: ClassVar[Mapping[str, Any]]  # part of the chunk with the reason of the end

    def __init__(self, vocab: Vocab) -> None:
        self._vocab = vocab

    def choice(self, answer: Answer) -> dict[str, Any]:
        """An answer that is done."""
        raise NotImplementedError

    def delta(self, answer: Answer, chunks: Sequence[Chunk]) -> dict[str, Any]:
        """What a pass has added."""
        raise NotImplementedError


async def respond(http: HttpRequest, service: Service, body: ChoicesBody, answers: Answers, shape: Shape) -> Response:
    """Whole or streamed, as the request says."""
    head = {
        "id": new_id(shape.prefix),
        "object": shape.part if body.stream else shape.whole,
        "created": int(time.time()),
        "model": body.model or service.name,
        "system_fingerprint": service.fingerprint,
    }
    if body.stream:
        return server_sent(_stream(head, body, answers, shape, service.model.target.vocab), error_event)

    def whole() -> dict[str, Any]:
        choices = [
            {"index": i, **shape.choice(one), "finish_reason": finish_reason(one)} for i, one in enumerate(answers.all)
        ]
        return {**head, "choices": choices, "usage": usage(answers), "edgespec": answers.account}

    return await answer_whole(http, answers.whole(), whole)


async def _stream(
    head: Mapping[str, Any], body: ChoicesBody, answers: Answers, shape: Shape, vocab: Vocab
) -> AsyncIterator[Event]:
    def chunk(index: int, part: Mapping[str, Any], reason: str | None = None) -> tuple[None, dict[str, Any]]:
        return None, {**head, "choices": [{"index": index, **part, "finish_reason": reason}]}

    for i in range(len(answers.all)):
        if shape.first is not None:
            yield chunk(i, shape.first)
    ahead = [SpeculativeCalls(one, vocab) for one in answers.all]
    async for found in answers.events():
        if found is None:
            yield None, None
            continue
        index, event = found
        one = answers.all[index]
        for told in ahead[index].after(event):
            yield None, {**head, "choices": [], "edgespec": {"speculative_tool_call": {"choice": index, **told}}}
        if isinstance(event, Wrote):
            trace = {"edgespec": traced(event, one, vocab)} if body.edgespec.trace == "passes" else {}
            if one.new or trace or event.chunks[0].log_probs:
                yield None, chunk(index, shape.delta(one, event.chunks))[1] | trace
        elif isinstance(event, Ended):
            if one.new:  # what might have become a call
                yield chunk(index, shape.delta(one, ()))
            yield chunk(index, shape.last, finish_reason(one))
    if body.stream_options and body.stream_options.include_usage:
        yield None, {**head, "choices": [], "usage": usage(answers), "edgespec": answers.account}
    yield None, "[DONE]"


def named(vocab: Vocab, token: int) -> str:
    """What a token adds to the text, or its name if that is nothing."""
    return vocab.token_bytes(token).decode("utf-8", "replace") or vocab.token_text(token)


def traced(event: Wrote, answer: Answer, vocab: Vocab) -> dict[str, Any]:
    """What a pass has drafted and accepted, for the page."""
    tree, stats = event.round.tree, answer.stats
    return {
        "tokens": [{"text": part.text, "source": part.source.name.lower()} for part in event.chunks],
        "pass": {
            "token_ids": tree.token_ids.tolist(),
            "texts": [named(vocab, token) for token in tree.token_ids.tolist()],
            "parents": tree.parents.tolist(),
            "log_probs": [round(value, 3) for value in tree.log_probs.tolist()],
            "sources": tree.source.tolist(),
            "path": event.round.path,
        },
        "seconds": {
            "prefill": stats.prefill_seconds,
            "draft": stats.draft_seconds,
            "wait": stats.wait_seconds,
            "target": stats.target_seconds,
            "plan": stats.plan_seconds,
        },
    }
