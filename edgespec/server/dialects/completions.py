"""OpenAI's dialect of raw texts: /v1/completions."""

from collections.abc import Sequence
from typing import Any, ClassVar

from edgespec.loop.backend import Vocab
from edgespec.loop.step import LogProbs
from edgespec.loop.text import TextStream
from edgespec.scheduler.events import Chunk
from edgespec.server.answers import Answer, Answers
from edgespec.server.conversation import Prompt, Question
from edgespec.server.dialects.dialect import Dialect
from edgespec.server.dialects.openai import ChoicesBody, ChoicesWriter
from edgespec.server.errors import refuse_if
from edgespec.server.gap import Gap
from edgespec.server.service import Service
from edgespec.server.wire import Listed

MOST_PROMPTS = 16


class CompletionBody(ChoicesBody):
    prompt: str | Listed[str] | Listed[int] | Listed[Listed[int]]
    max_tokens: int | None = 16  # OpenAI's default
    logprobs: int | None = None
    echo: bool = False
    suffix: str | None = None
    best_of: int | None = None


def question_of(body: CompletionBody) -> Question:
    refuse_if(body.echo or (body.best_of or 1) > body.n, "echo and best_of are not supported")
    body.edgespec.check("trace", "plain", "regex", "lark")
    is_given = "max_tokens" in body.model_fields_set or body.n_predict is None
    prompts = several(body.prompt)
    if body.suffix:
        refuse_if(not all(isinstance(one, str) for one in prompts), "with a suffix a prompt must be a text", "prompt")
        prompts = [Gap(one, body.suffix) for one in prompts if isinstance(one, str)]
    refuse_if(
        not 1 <= len(prompts) <= MOST_PROMPTS,
        f"there are {len(prompts)} prompts, but from 1 to {MOST_PROMPTS} may be given at once",
        "prompt",
    )
    most = body.max_tokens if is_given else body.n_predict
    return body.question(body.logprobs, "logprobs", prompts=prompts, max_tokens=most)


def several(given: Any) -> Sequence[Prompt]:
    """Texts of which one or several are given, each a string or token ids."""
    return [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else given


class CompletionWriter(ChoicesWriter):
    prefix, kind, chunk_kind = "cmpl-", "text_completion", "text_completion"
    empty: ClassVar = {"text": "", "logprobs": None}
    last: ClassVar = empty

    def start(self, service: Service, answers: Answers) -> None:
        super().start(service, answers)
        self._offsets = {id(answer): Offsets(self._vocab) for answer in answers.all}

    def choice(self, answer: Answer) -> dict[str, Any]:
        return {"text": answer.text, "logprobs": self._log_probs(answer, answer.chunks)}

    def delta(self, answer: Answer, chunks: Sequence[Chunk]) -> dict[str, Any]:
        text = "".join(piece for piece in answer.new if isinstance(piece, str))
        return {"text": text, "logprobs": self._log_probs(answer, chunks)}

    def _log_probs(self, answer: Answer, chunks: Sequence[Chunk]) -> dict[str, Any] | None:
        told = [(c.token_id, c.log_probs) for c in chunks if c.token_id is not None and c.log_probs]
        if not told:
            return None
        return {
            "tokens": [name_of(self._vocab, token) for token, _ in told],
            "token_logprobs": [log_probs.log_prob for _, log_probs in told],
            "top_logprobs": [self._best(token, log_probs) for token, log_probs in told],
            "text_offset": [self._offsets[id(answer)].next(token) for token, _ in told],
        }

    def _best(self, sampled: int, log_probs: LogProbs) -> dict[str, float]:
        """The best tokens, and the sampled one."""
        found, told = dict[str, float](), dict(log_probs.best)
        for token, value in (told | {sampled: log_probs.log_prob}).items():
            name = name_of(self._vocab, token)
            found[f"token_id:{token}" if name in found else name] = value
        return found


class Offsets:
    """Where in an answer's text its tokens begin, in characters; called with one after the other."""

    def __init__(self, vocab: Vocab) -> None:
        self._text, self._length = TextStream(vocab), 0

    def next(self, token: int) -> int:
        offset = self._length
        self._length += len(self._text.push(token))
        return offset


def name_of(vocab: Vocab, token: int) -> str:
    """A token's text; of parts of a character their bytes, as OpenAI writes them."""
    data = vocab.token_bytes(token)
    try:
        return data.decode() or vocab.token_text(token)
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


COMPLETION = Dialect(CompletionBody, question_of, CompletionWriter)
