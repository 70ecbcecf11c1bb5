"""From a `Question` to submitted requests: limits, token ids, grammar, parser."""

import asyncio
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from hashlib import sha256
from typing import TypeVar

from edgespec.errors import MissingPackage
from edgespec.loop.grammar import Compiled, json_object
from edgespec.loop.hint_texts import HintTexts
from edgespec.loop.passes import check_room
from edgespec.loop.sampling import SamplingParams
from edgespec.loop.text import TextStream, check_length
from edgespec.machine.process import check_process
from edgespec.model import Model
from edgespec.models.own_sampling import choose_seed
from edgespec.scheduler.requests import Request
from edgespec.scheduler.sequence import Seq
from edgespec.server.answers import Answer, Answers, Emit
from edgespec.server.conversation import UNLIMITED, Conversation, Prompt, Question
from edgespec.server.errors import Refused, refuse_if
from edgespec.server.gap import Gap
from edgespec.server.model_format import ModelFormat
from edgespec.server.stored import StoredResponses
from edgespec.server.typing_ahead import TypingAhead

MOST_CHOICES = 8
MOST_STOPS = 16
MOST_WAITING = 32
PING_SECONDS = 5.0
GRAMMAR_THREADS = 2  # slow grammars hold up only grammars
LONG_BODY = 2**18  # bytes; one thread reads longer bodies, so that shorter ones need not wait for them
SHORT_THREADS = 2
Found = TypeVar("Found")


class BodyReaders:
    """Threads that read bodies, and make token ids of them."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._short = ThreadPoolExecutor(SHORT_THREADS, "edgespec short bodies")
        self._long = ThreadPoolExecutor(1, "edgespec long bodies")

    async def read(self, size: int, work: Callable[[], Found]) -> Found:
        """The result of `work` on a body of `size` bytes, in a thread; within `admitted`.

        Raises:
            OtherProcess: a fork has none of these threads.
        """
        check_process(self._process)
        threads = self._long if size > LONG_BODY else self._short
        return await asyncio.get_running_loop().run_in_executor(threads, work)


@dataclass
class Service:
    model: Model
    name: str
    most_waiting: int = MOST_WAITING
    ping_seconds: float = PING_SECONDS
    stopping: bool = False
    readers: BodyReaders = field(default_factory=BodyReaders)
    stored: StoredResponses = field(default_factory=StoredResponses)

    def __post_init__(self) -> None:
        vocab = self.model.target.vocab
        self.raw_format = ModelFormat(vocab, "")
        length = self.model.target.capabilities.context_length
        self.chat_format = ModelFormat(vocab, vocab.chat_template or "", length)
        self.tool_format = ModelFormat(vocab, vocab.tool_template, length) if vocab.tool_template else self.chat_format
        self.typing_ahead = TypingAhead(self.model)
        self._preparing = 0
        self._grammars = ThreadPoolExecutor(GRAMMAR_THREADS, "edgespec grammars")
        self.embedding = ThreadPoolExecutor(1, "edgespec embeddings")

    def begin(self) -> None:
        """Be ready for requests."""
        with suppress(MissingPackage):
            self.model.compile(json_object())  # llguidance reads the vocabulary once, and nothing else runs meanwhile
        self.model.scheduler.start()

    @property
    def limits(self) -> dict[str, int]:
        """For clients."""
        return {"n_ctx": self.model.target.capabilities.context_length, "n_vocab": self.model.target.vocab.size}

    @cached_property
    def fingerprint(self) -> str:
        """Equal fingerprints, requests and seeds give equal answers."""
        target = self.model.target
        exact = target.capabilities.exact
        about = [self.name, target.name, target.build, str(dict(target.computing)), str(exact)]
        if self.model.approximate:  # then the text depends on the draft, too
            about += [self.model.approximate, *(str(dict(one.identity)) for one in self.model.owned)]
        return "fp_" + sha256("\n".join(about).encode()).hexdigest()[:16]

    def format_of(self, conversation: Conversation | None) -> ModelFormat:
        if not conversation:
            return self.raw_format
        return self.tool_format if conversation.tools else self.chat_format

    async def start(self, question: Question, sender: str, size: int = 0) -> Answers:
        return Answers(await self.prepare(question, sender, size), self.submit, self.ping_seconds)

    async def prepare(self, question: Question, sender: str, size: int = 0) -> list[Answer]:
        """The answers that are to begin: of each prompt each choice; choice i has seed + i.

        Args:
            question: what is asked.
            sender: as of a `Request`.
            size: of its body, in bytes.

        Raises:
            Refused, UsageError, ContextFull: the question cannot be answered.
        """
        self._check(question)
        form, tools = self.format_of(question.conversation), question.tools
        with self.admitted(question.choices * (len(question.prompts) or 1)):
            prompts, sampling = await self.readers.read(size, partial(self._read, question))
            in_thought = form.begins_in_thought(prompts[0][0])
            grammar: Compiled | None = None
            if question.grammar or (tools and tools.required):
                loop = asyncio.get_running_loop()
                grammar = await loop.run_in_executor(self._grammars, self._grammar, question, sender, form, in_thought)
        limit = self.model.target.capabilities.context_length
        most = limit if question.max_tokens is None or question.max_tokens == UNLIMITED else question.max_tokens
        return [
            Answer(
                Request(
                    list(ids), sampling.changed(seed=(sampling.seed + i) % 2**64),
                    min(most, limit - len(ids)), tuple(question.stop), question.log_probs,
                    question.plain, grammar, hint_texts, form.shown(tools), sender=sender,
                ),
                form.parser(tools, in_thought, question.begun, unmarked=question.grammar is None),
                choice=i, single_call=tools is not None and not tools.parallel,
            )
            for ids, hint_texts in prompts
            for i in range(question.choices)
        ]  # fmt: skip

    def _check(self, question: Question) -> None:
        refuse_if(
            not 1 <= question.choices <= MOST_CHOICES,
            f"n is {question.choices}, but must be from 1 to {MOST_CHOICES}",
            "n",
        )
        refuse_if(
            len(question.stop) > MOST_STOPS,
            f"there are {len(question.stop)} stop strings, but at most {MOST_STOPS} may be given",
            "stop",
        )
        refuse_if(
            question.max_tokens is not None and question.max_tokens < 1 and question.max_tokens != UNLIMITED,
            f"max_tokens is {question.max_tokens}, but must be at least 1, or -1 for no limit",
            "max_tokens",
        )
        if question.conversation and question.begun:
            refuse_if(
                question.grammar or (question.tools and question.tools.required),
                "grammars, JSON and required calls are for whole answers: leave out the assistant's last message",
                "messages",
            )
            thinks = self.format_of(question.conversation).thinking and question.conversation.options.get(
                "enable_thinking"
            )
            refuse_if(
                thinks and not question.begun.thought,
                "thinking is on, but the assistant's last message has no thought: leave one of both out",
                "messages",
            )
        TextStream(self.model.target.vocab, question.stop)  # refuses an empty string in `stop`

    def _read(self, question: Question) -> tuple[list[tuple[list[int], HintTexts | None]], SamplingParams]:
        """Token ids and hint texts of each prompt, and options of sampling, in a worker thread."""
        if question.tools:
            question.tools.parameters  # noqa: B018 (it is computed here, not in the server's loop)
        if question.conversation:
            prompts = [self.format_of(question.conversation).prompt_ids(question.conversation)]
        else:
            prompts = [self.encode(prompt) for prompt in question.prompts]
        found = list[tuple[list[int], HintTexts | None]]()
        for ids in prompts:
            refuse_if(not ids, "the prompt is empty: give at least one word", "prompt")
            check_room(self.model.target, len(ids))
            found.append((ids, self.model.hint_texts(ids, question.prediction, question.choices)))
        seed = choose_seed(question.sampling.get("seed")) % 2**64
        return found, replace(self.model.sampling, **{**question.sampling, "seed": seed})

    def encode(self, prompt: Prompt) -> list[int]:
        vocab = self.model.target.vocab
        if isinstance(prompt, str | Gap):
            check_length(vocab, len(prompt), self.model.target.capabilities.context_length)
            if isinstance(prompt, Gap):
                return prompt.ids(vocab)
            return vocab.encode(prompt, add_bos=True, parse_special=True) if prompt else []
        refuse_if(
            any(not 0 <= token < vocab.size for token in prompt),
            f"prompt: token ids must be from 0 to {vocab.size - 1}",
            "prompt",
        )
        return list(prompt)

    def _grammar(self, question: Question, sender: str, form: ModelFormat, in_thought: bool) -> Compiled | None:
        """Compile the grammar, for seconds, in a thread for grammars."""
        wanted = form.grammar(question.grammar, question.tools, in_thought)
        return self.model.compile(replace(wanted, sender=sender)) if wanted else None

    @contextmanager
    def admitted(self, wanted: int = 1) -> Iterator[None]:
        """Count answers from before work is done for them until they are submitted; raises Refused: too many wait."""
        if self.stopping:
            raise Refused(503, "the server is stopping")
        room = self.most_waiting + len(self.model.planners)
        refuse_if(wanted > room, f"{wanted} texts are asked for at once, but at most {room} may be")
        if self.busy() + wanted > room:
            waiting = self.busy() - self.model.scheduler.active
            raise Refused(429, f"{waiting} requests are waiting already: come again in a moment")
        self._preparing += wanted
        try:
            yield
        finally:
            self._preparing -= wanted

    def busy(self) -> int:
        """Answers that are written, wait or are prepared."""
        return self.model.scheduler.active + self.model.scheduler.waiting + self._preparing

    def submit(self, request: Request, emit: Emit) -> Seq:
        """Submit a request, or take over an equal one."""
        return self.typing_ahead.take_over(request, emit) or self.model.scheduler.submit(request, emit)
