"""OpenAI's dialect of raw texts: /v1/completions."""

from collections.abc import Sequence
from typing import Any, ClassVar

from edgespec.scheduler.requests import Chunk
from edgespec.server.answers import Answer
from edgespec.server.conversation import Question
from edgespec.server.dialects.dialect import Dialect
from edgespec.server.dialects.openai import ChoicesBody, ChoicesWriter, check_log_probs, error_body, named
from edgespec.server.errors import Refused

MOST_PROMPTS = 16


class CompletionBody(ChoicesBody):
    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int | None = 16  # OpenAI's default
    logprobs: int | None = None
    echo: bool = False
    suffix: str | None = None
    best_of: int | None = None


def question_of(body: CompletionBody) -> Question:
    if body.echo or body.suffix or (body.best_of or 1) > body.n:
        raise Refused(400, "echo, suffix and best_of are not supported")
    check_log_probs("logprobs", body.logprobs)
    given: Any = body.prompt
    prompts = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else given
    if not 1 <= len(prompts) <= MOST_PROMPTS:
        says = f"there are {len(prompts)} prompts, but from 1 to {MOST_PROMPTS} may be given at once"
        raise Refused(400, says, param="prompt")
    return Question(
        body.sampling, prompts=prompts, max_tokens=body.max_tokens, stop=body.stops(), choices=body.n,
        log_probs=body.logprobs, plain=body.edgespec.plain, grammar=body.grammar(),
    )  # fmt: skip


class CompletionWriter(ChoicesWriter):
    prefix, kind, chunk_kind = "cmpl-", "text_completion", "text_completion"
    last: ClassVar = {"text": "", "logprobs": None}

    def choice(self, answer: Answer) -> dict[str, Any]:
        return {"text": answer.text, "logprobs": self._log_probs(answer.chunks)}

    def delta(self, answer: Answer, chunks: Sequence[Chunk]) -> dict[str, Any]:
        text = "".join(piece for piece in answer.new if isinstance(piece, str))
        return {"text": text, "logprobs": self._log_probs(chunks)}

    def _log_probs(self, chunks: Sequence[Chunk]) -> dict[str, Any] | None:
        told = [(c.token_id, c.log_probs) for c in chunks if c.token_id is not None and c.log_probs]
        if not told:
            return None
        return {
            "tokens": [named(self._vocab, token) for token, _ in told],
            "token_logprobs": [log_probs.log_prob for _, log_probs in told],
            "top_logprobs": [{named(self._vocab, i): value for i, value in log_probs.best} for _, log_probs in told],
            "text_offset": [],
        }


COMPLETION = Dialect(CompletionBody, question_of, CompletionWriter, error_body, error_name=None)
