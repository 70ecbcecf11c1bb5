"""The Python API: a target, perhaps a draft, and a planner, loaded together."""

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from functools import cached_property
from importlib import import_module
from threading import Lock
from types import TracebackType
from typing import Any, Self, Unpack
from warnings import warn

import numpy as np

from edgespec.errors import (
    Closed,
    UsageError,
    check_call,
    check_flag,
    check_text,
    check_texts,
    check_whole,
    must_be,
)
from edgespec.loading.asked import Asked, asked_for, unknown
from edgespec.loading.draft_or_memory import open_pair
from edgespec.loading.exact import note_on_budget
from edgespec.loading.keywords import GenerateKeywords, LoadKeywords, Path, Progress, RequestKeywords
from edgespec.loading.pair import (
    DEFAULT_BUDGET,
    close_all,
    recall_auto_state,
)
from edgespec.loading.targets import open_targets
from edgespec.loading.timed_pass import time_tiles
from edgespec.loading.where import Where, where
from edgespec.loop.backend import Backend, Embeds
from edgespec.loop.grammar import Compiled, Compiler, Grammar
from edgespec.loop.hint_texts import HintTexts
from edgespec.loop.message_forms import Message
from edgespec.loop.passes import check_room
from edgespec.loop.planner import Planner
from edgespec.loop.pooling import DEFAULT, POOLINGS, pooled
from edgespec.loop.sampling import Float32Array, SamplingParams
from edgespec.loop.stats import GenerationStats
from edgespec.loop.text import CHARACTERS, TextStream, check_length, render_chat, spelled, user_messages
from edgespec.machine.process import check_process, is_here
from edgespec.machine.system import under_rosetta
from edgespec.models.own_sampling import choose_sampling, choose_seed
from edgespec.models.registry import Entry, local_path
from edgespec.planners.auto import AutoState, new_auto_state
from edgespec.scheduler import drive
from edgespec.scheduler.events import Chunk, Ended, Event, GenerationResult
from edgespec.scheduler.requests import Request
from edgespec.scheduler.scheduler import Scheduler
from edgespec.scheduler.targets.coordinator import Targets

MOST_BRANCHES = 1024

Prompt = str | Sequence[Message]


class Model:
    """A loaded target with its planners; after `close` every other method raises `Closed`.

    Threads and asyncio tasks may share it. A prompt that continues one of the last sequences costs its new part.
    """

    def __init__(
        self,
        target: Backend,
        planner: Planner | Sequence[Planner],
        *,
        budget: int = DEFAULT_BUDGET,
        sampling: SamplingParams | None = None,
        system: str | None = None,
        pace: AutoState | None = None,
        targets: Targets | None = None,
        notes: Sequence[str] = (),
        owned: Sequence[Backend] = (),
        names: Sequence[str] = (),
        gpu_layers: int | None = None,
        at_close: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            target: the model that generates; loaded for as many sessions as there are planners.
            planner: proposes draft tokens and holds a session of the draft; a list of n: up to n requests are batched.
            budget: most draft tokens per pass of each request.
            sampling: default of `generate` and `chat`, but for its seed: each call has its own. None: greedy.
            system: system message of a `chat` with a single question.
            pace: pass times that the planners measure, by which the scheduler decides how many requests share a pass.
            targets: several targets, which are used instead of a scheduler with `target` and the planners.
            notes: for a user, in addition to the target's.
            owned: engines that `close` closes.
            names: of the target and the draft, for `repr`.
            gpu_layers: as asked for.
            at_close: called once, by the first `close`.
        """
        budget = check_whole("budget", budget, 1)
        self.target = target
        self.planners = [planner] if isinstance(planner, Planner) else list(planner)
        self.budget = budget
        self.sampling = sampling or SamplingParams()
        self.system = system
        self.decoder: drive.Decoder = targets or Scheduler(target, self.planners, budget=budget, pace=pace)
        self._closed, self._process = False, os.getpid()
        self.owned, self._notes, self._names, self._at_close = owned, notes, names, at_close
        self._gpu_layers, self._embedding = gpu_layers, Lock()  # one text after the other

    def __repr__(self) -> str:
        name, draft = [*self._names, "", ""][:2]
        about = [f"draft {draft}" if draft else "no draft"]
        about += [f"planner {self.planners[0].name}"] if self.planners else []
        about += [f"context {self.target.capabilities.context_length}", *(["closed"] if self._closed else [])]
        return f"<Model {name or 'without a name'} on {self.target.name}, {', '.join(about)}>"

    @property
    def scheduler(self) -> Scheduler:
        """
        Raises:
            UsageError: several targets decode.
        """
        if not isinstance(self.decoder, Scheduler):
            raise UsageError("several targets have no sessions: load the target without targets and cluster")
        return self.decoder

    def _check_open(self) -> None:
        """
        Raises:
            Closed: a call of an engine that was freed would end the process.
            OtherProcess: in a fork, an engine's pass would wait for ever.
        """
        check_process(self._process)
        if self._closed:
            raise Closed

    @property
    def notes(self) -> Sequence[str]:
        """Lines for a user on how the target was loaded."""
        return [*self.target.notes, *self._notes]

    def stream(
        self,
        prompt: Prompt,
        *,
        stats: GenerationStats | None = None,
        progress: Progress | None = None,
        **options: Unpack[RequestKeywords],
    ) -> Iterator[Chunk]:
        """Continue the prompt, token by token; `stream_chat` answers.

        Args:
            prompt: raw text, or messages for the model's chat template.
            stats: filled in while it runs.
            progress: called with (prompt tokens prefilled, prompt tokens in all).
            options: see `RequestKeywords`; errors as for `request`.
        """
        _check_reports(stats, progress)
        return drive.chunks(self.decoder, self.request(prompt, **options), stats, progress)

    async def astream(
        self,
        prompt: Prompt,
        *,
        stats: GenerationStats | None = None,
        progress: Progress | None = None,
        **options: Unpack[RequestKeywords],
    ) -> AsyncGenerator[Chunk, None]:
        """As `stream`, for asyncio; cancelling the task ends the request. To leave early: `contextlib.aclosing`."""
        _check_reports(stats, progress)
        request = await asyncio.to_thread(self.request, prompt, **options)  # it tokenises, and compiles a grammar
        loop, events = asyncio.get_running_loop(), asyncio.Queue[Event]()

        def emit(event: Event) -> None:
            loop.call_soon_threadsafe(events.put_nowait, event)

        self.decoder.start()
        seq = self.decoder.submit(request, emit, stats)
        try:
            event: Event | None = None
            while not isinstance(event, Ended):
                event = await events.get()
                for chunk in drive.chunks_in(event, progress):
                    yield chunk
        finally:
            seq.cancel()

    def request(self, prompt: Prompt, **options: Unpack[RequestKeywords]) -> Request:
        """The request that `stream` submits.

        Args:
            prompt: as for `stream`.
            options: see `RequestKeywords`.

        Raises:
            UsageError: empty prompt, an unknown argument, or a value of a wrong type or out of range.
            ContextFull: the prompt does not fit into the context.
            Closed: the model was closed.
        """
        self._check_open()
        given: dict[str, Any] = {**options}
        for name in given.keys() - RequestKeywords.__annotations__:
            raise unknown(name, *GenerateKeywords.__annotations__)
        max_tokens, stops = given.pop("max_tokens", 512), check_texts("stop", given.pop("stop", None))
        grammar, prediction = given.pop("grammar", None), given.pop("prediction", None)
        sampling = {"seed": choose_seed(None)} | {name: value for name, value in given.items() if value is not None}
        params = replace(self.sampling, **sampling)
        if max_tokens is not None:
            max_tokens = check_whole("max_tokens", max_tokens, 1)
        prompt_ids = self._encode(prompt, self.target.capabilities.context_length)
        check_room(self.target, len(prompt_ids))
        compiled = self.compile(grammar) if grammar is not None else None
        hint_texts = self.hint_texts(prompt_ids, prediction)
        TextStream(self.target.vocab, stops)  # refuses an empty string in `stop`
        most = self.target.capabilities.context_length if max_tokens is None else max_tokens
        return Request(prompt_ids, params, most, stops, grammar=compiled, hint_texts=hint_texts)

    def hint_texts(
        self, prompt_ids: Sequence[int], prediction: str | None = None, sequences: int = 1
    ) -> HintTexts | None:
        """
        Args:
            prompt_ids: the prompt.
            prediction: as for `request`.
            sequences: continuations of the prompt, which draft from each other's output.

        Returns:
            Texts from which the sequences copy draft tokens; None without a prediction and with a single sequence.
        """
        self._check_open()
        prediction = "" if prediction is None else check_text("prediction", prediction)
        if not isinstance(prompt_ids, Sequence):
            raise must_be("prompt_ids", prompt_ids, "a list of token ids")
        if check_whole("sequences", sequences, 1) == 1 and not prediction:
            return None
        most = self.target.capabilities.context_length
        prediction = prediction[: most * CHARACTERS]
        return HintTexts(prompt_ids, self.target.vocab.encode(prediction, add_bos=False, parse_special=False)[:most])

    @property
    def where(self) -> Where:
        """Engine, devices and exactness of the target; `line` is for a user."""
        return where(self.target, self._gpu_layers, self.approximate)

    @property
    def approximate(self) -> str:
        """What changes the distribution, such as "cascade 0.5"; "": nothing does."""
        return (self.planners[0].approximate if self.planners else "") or self.target.capabilities.approximate

    def compile(self, grammar: Grammar) -> Compiled:
        """Compile a grammar for this model; the first takes half a second.

        Raises:
            UsageError: it is wrong, or not supported.
            MissingPackage: llguidance is not installed.
        """
        self._check_open()
        if not isinstance(grammar, Grammar):
            raise must_be("grammar", grammar, "made by edgespec.json_schema, json_object, regex or lark")
        return self._compiler.compiled(grammar)

    @cached_property
    def _compiler(self) -> Compiler:
        return Compiler(self.target.vocab)

    def generate(self, prompt: Prompt, **options: Unpack[GenerateKeywords]) -> GenerationResult:
        """Continue the prompt and return everything at once; arguments as for `stream`. `chat` answers."""
        result = _empty_result(options)
        for chunk in self.stream(prompt, **options):
            result.add(chunk)
        return result

    async def agenerate(self, prompt: Prompt, **options: Unpack[GenerateKeywords]) -> GenerationResult:
        """As `generate`, for asyncio; cancelling the task ends the request."""
        result = _empty_result(options)
        async for chunk in self.astream(prompt, **options):
            result.add(chunk)
        return result

    def branch(self, prompt: Prompt, k: int, **options: Unpack[RequestKeywords]) -> list[GenerationResult]:
        """Continue a prompt in `k` sequences: sequence i is what `generate` returns with seed + i.

        The prompt is prefilled once and its cells are shared; a pass serves up to `parallel` (of `load`) sequences,
        which draft from each other's output.

        Args:
            prompt: as for `stream`.
            k: number of sequences; from 1 to 1024.
            options: as for `stream`, but for `stats` and `progress`.

        Raises:
            UsageError, ContextFull: as for `stream`.
        """
        self._check_open()
        k = check_whole("k", k, 1, MOST_BRANCHES)
        first = self.request(prompt, **options)
        hint_texts = self.hint_texts(first.prompt_ids, options.get("prediction"), k)
        return self.answer(seeded(replace(first, hint_texts=hint_texts), k))

    def answer(self, requests: Sequence[Request]) -> list[GenerationResult]:
        """The results of requests, which share passes."""
        self._check_open()
        if not isinstance(requests, Sequence) or not all(isinstance(one, Request) for one in requests):
            raise must_be("requests", requests, "a list of results of the method request")
        return drive.results_of(self.decoder, requests)

    def search(
        self, prompt: Prompt, score: Callable[[list[str]], Sequence[float]], **options: Any
    ) -> list[GenerationResult]:
        """Outdated: `edgespec.lab.search(model, prompt, score, …)`."""
        warn("Model.search goes with the next version: use edgespec.lab.search", DeprecationWarning, stacklevel=2)
        found: list[GenerationResult] = import_module("edgespec.lab").search(self, prompt, score, **options)
        return found

    def chat(self, messages: Prompt, **options: Unpack[GenerateKeywords]) -> GenerationResult:
        """Answer a user's message, or a conversation, through the model's chat template.

        Args:
            messages: the user's text, or messages such as {"role": "user", "content": "Hi"}.
            options: as for `stream`, and errors as there.
        """
        return self.generate(self._conversation(messages), **options)

    async def achat(self, messages: Prompt, **options: Unpack[GenerateKeywords]) -> GenerationResult:
        """As `chat`, for asyncio: see `agenerate`."""
        return await self.agenerate(self._conversation(messages), **options)

    def stream_chat(self, messages: Prompt, **options: Unpack[GenerateKeywords]) -> Iterator[Chunk]:
        """As `chat`, token by token."""
        return self.stream(self._conversation(messages), **options)

    def astream_chat(self, messages: Prompt, **options: Unpack[GenerateKeywords]) -> AsyncGenerator[Chunk, None]:
        """As `stream_chat`, for asyncio: see `astream`."""
        return self.astream(self._conversation(messages), **options)

    def _conversation(self, messages: Prompt) -> Prompt:
        return user_messages(messages, self.system) if isinstance(messages, str) and messages else messages

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt: text with the start token, or messages by the chat template.

        Raises:
            UsageError: the prompt is empty, or the model has no chat template.
        """
        return self._encode(prompt, None)

    def _encode(self, prompt: Prompt, context_length: int | None) -> list[int]:
        """As `encode`; raises ContextFull for a prompt that is certainly too long."""
        self._check_open()
        if not isinstance(prompt, Sequence):
            raise must_be("the prompt", prompt, "a text, or a list of messages like {'role': 'user', 'content': 'Hi'}")
        token_ids = list[int]()
        if isinstance(prompt, str) and prompt:
            text = check_text("the prompt", prompt)
            check_length(self.target.vocab, len(text), context_length)
            token_ids = self.target.vocab.encode(text, add_bos=True, parse_special=True)
        elif prompt:
            token_ids = render_chat(self.target.vocab, prompt, context_length=context_length)
        if not token_ids:
            raise UsageError("the prompt is empty: give at least one word")
        return token_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, without special tokens."""
        self._check_open()
        if not isinstance(token_ids, Sequence):
            raise must_be("token_ids", token_ids, "a list of token ids")
        last = self.target.vocab.size - 1
        text = TextStream(self.target.vocab)
        return "".join(text.push(check_whole("a token id", one, 0, last)) for one in token_ids) + text.finish()

    def tokenize(self, text: str, *, start: bool = False, special: bool = True) -> list[int]:
        """Token ids of any text, as `/tokenize` has them.

        Args:
            text: perhaps "".
            start: put the start token first, if the model wants one.
            special: read the names of control tokens as those tokens.
        """
        self._check_open()
        for name, value in (("start", start), ("special", special)):
            check_flag(name, value)
        return self.target.vocab.encode(check_text("text", text), add_bos=start, parse_special=special)

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, with the names of control tokens; `decode` leaves them out."""
        self._check_open()
        if not isinstance(token_ids, Sequence):
            raise must_be("token_ids", token_ids, "a list of token ids")
        return spelled(self.target.vocab, token_ids).decode("utf-8", "replace")

    def embed(self, texts: str | Sequence[str | Sequence[int]], *, pooling: str | None = None) -> Float32Array:
        """Vectors of length 1, [n, width], for models of llama.cpp; passes are over one text each.

        Args:
            texts: one or several, as strings or token ids.
            pooling: mean, cls (the first token) or last; default: the file's, else mean.

        Raises:
            UsageError: a text is empty, weights are streamed, memory is short, or the engine gives no vectors.
            ContextFull: a text does not fit into the context.
        """
        self._check_open()
        target = self.target
        if not isinstance(target, Embeds):
            raise UsageError("this model gives no embeddings: they are for GGUF files on llama.cpp, without lenders")
        pooling = target.pooling or DEFAULT if pooling is None else pooling
        if not isinstance(pooling, str) or pooling not in POOLINGS:
            raise must_be("pooling", pooling, f"one of {', '.join(POOLINGS)}")
        if not isinstance(texts, Sequence):
            raise must_be("texts", texts, "a text or a list of texts")
        prompts = [self._embedded_ids(one) for one in ([texts] if isinstance(texts, str) else texts)]

        def states(ids: Sequence[int], start: int) -> Float32Array:
            part = ids[start : start + target.embed_rows]
            return self.scheduler.call(lambda call: target.embed(part, start))

        def embedded(ids: Sequence[int]) -> Float32Array:
            return pooled((states(ids, start) for start in range(0, len(ids), target.embed_rows)), pooling)

        with self._embedding:
            return np.array(list(map(embedded, prompts)))

    def _embedded_ids(self, text: str | Sequence[int]) -> list[int]:
        if isinstance(text, str):
            ids = self._encode(text, self.target.capabilities.context_length)
        elif isinstance(text, Sequence):
            ids = [check_whole("a token id", one, 0, self.target.vocab.size - 1) for one in text]
        else:
            raise must_be("a text", text, "a string or a list of token ids")
        if not ids:
            raise UsageError("a text is empty: give at least one word")
        check_room(self.target, len(ids))
        return ids

    def close(self) -> None:
        """Remember the pass times, and free sessions and models; may be called twice. In a fork nothing is freed."""
        self._closed = True
        if not is_here(self._process):
            return
        self.decoder.close()  # first: its thread changes pass times
        at_close, self._at_close = self._at_close, lambda: None
        try:
            at_close()
        finally:
            close_all(self.owned)

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class Conversation:
    """Asks a model one question after the other; only what is new is prefilled.

    An answer that is cut off stays with the text that it has; a question without a word of an answer is dropped.

    Attributes:
        messages: all so far, as for `Model.chat`; may be changed between questions.
    """

    def __init__(self, model: Model, system: str | None = None, messages: Sequence[Message] = ()) -> None:
        """
        Args:
            model: loaded.
            system: the first message; default: the one that models.yaml gives the model, unless there are `messages`.
            messages: how the conversation begins, such as an earlier one's.
        """
        if not isinstance(model, Model):
            raise must_be("model", model, "a result of edgespec.load")
        system = model.system if system is None and not messages else system
        self.model, self.messages = model, list(messages)
        if system is not None:
            self.messages.insert(0, {"role": "system", "content": check_text("system", system)})

    def __repr__(self) -> str:
        return f"<Conversation of {len(self.messages)} messages with {self.model!r}>"

    def ask(self, question: str, **options: Unpack[GenerateKeywords]) -> str:
        """The text of the answer; arguments and errors as for `Model.chat`."""
        return "".join(chunk.text for chunk in self.stream(question, **options))

    def stream(self, question: str, **options: Unpack[GenerateKeywords]) -> Iterator[Chunk]:
        """As `ask`, token by token."""
        with self._answering(question) as texts:
            for chunk in self.model.stream_chat(self.messages, **options):
                texts.append(chunk.text)
                yield chunk

    async def aask(self, question: str, **options: Unpack[GenerateKeywords]) -> str:
        """As `ask`, for asyncio; cancelling the task ends the answer."""
        async with aclosing(self.astream(question, **options)) as chunks:
            return "".join([chunk.text async for chunk in chunks])

    async def astream(self, question: str, **options: Unpack[GenerateKeywords]) -> AsyncGenerator[Chunk, None]:
        """As `stream`, for asyncio: see `Model.astream`."""
        with self._answering(question) as texts:
            async with aclosing(self.model.astream_chat(self.messages, **options)) as chunks:
                async for chunk in chunks:
                    texts.append(chunk.text)
                    yield chunk

    @contextmanager
    def _answering(self, question: str) -> Iterator[list[str]]:
        """Within it the question is the last message, and parts of the answer come; then the answer is a message."""
        self.messages.append({"role": "user", "content": check_text("question", question)})
        texts = list[str]()
        try:
            yield texts
        finally:
            if texts:
                self.messages.append({"role": "assistant", "content": "".join(texts)})
            else:
                self.messages.pop()


def load(target: Path | Entry, **options: Unpack[LoadKeywords]) -> Model:
    """Load a target, perhaps a draft, and planners.

    Sampling parameters that a call does not give are those of models.yaml, else the model's own, else greedy.

    Args:
        target: a name from models.yaml, the path of a GGUF file or of a model folder, OWNER/REPOSITORY on the hub, or a
            source such as hf:owner/repository/file.gguf; or an entry of `models.registry.find_model`.
        draft: the same for the draft model, or "head" or "layers" of the target; default: that of models.yaml.
        planner: a name of `planners.choice.NAMES`; default: that of models.yaml, else auto: the fastest in every step.
        budget: most draft tokens per pass. With a number no tree depends on pass times, and auto is specexec with a
            draft, sssd with a datastore or streamed weights, else none; default: by measured pass times, at most the
            budget of models.yaml or 64; where torch or mlx stream weights, up to 1024.
        datastore: a file made by `edgespec datastore build`, for the planners auto and sssd.
        context_length: most tokens of a sequence; 0 = the length that the model was trained for; default: that of
            models.yaml, else 4096.
        chat_template: a Jinja file, in place of the target's own templates.
        backend: engine of both models: llamacpp, mlx, torch or another package's. Default: llamacpp for files; for
            folders mlx on a Mac with Apple silicon, torch elsewhere, or the installed one.
        threads: llamacpp, torch: compute threads; default: the engine's choice.
        gpu_layers: llamacpp, torch: layers of the target to keep on the GPU, -1 = all; default: what fits `gpu_memory`.
        memory: memory that the program may take, in bytes or as "12G"; weights that do not fit are streamed from disk;
            default: free memory, for mlx on a Mac at most what its GPU can hold.
        kv_type: llamacpp: type of keys and values in both caches, such as "f16" or "q8_0". Output equals plain
            decoding's with the same type; default: f16, for float32 weights f32.
        lenders: llamacpp: addresses "HOST:PORT" of `edgespec lend`, for layers that do not fit here; default: none.
        device: torch: "cuda" (further GPUs hold what the first cannot), "cuda:1", "mps" or "cpu"; default: the first of
            these that is there.
        dtype: torch: "float32", "float16", "bfloat16" or "nf4" (4 bits); default: as in the folder.
        keep_packed: torch: keep layers that are quantised at load (dtype nf4) in the cache folder, for the next start.
        gpu_memory: llamacpp, torch: what both models use of each GPU's memory, in bytes or as "10G". Layers that do
            not fit are computed by the processor (llamacpp), or streamed from host memory (torch); default: what is
            free.
        exact: row class that passes keep to: "narrow" (few draft tokens), "wide" (many; short ones are padded), "any"
            (where all sizes agree), "off"; default: where there are row classes, wide if it takes no longer, or narrow.
        parallel: most requests in a batch. Each has room for a whole context in the cache; with llamacpp and limited
            memory, for a quarter of it and what others leave; default: 1.
        ahead: the draft goes on while the target runs, for one request; with a budget always, else as long as that
            gains time. Default: if it has a processor of its own and no budget is given (docs/reference/planners.md).
        targets: verify in this number of processes, each with a copy of the target (docs/guides/several-machines.md).
            They import the program again: scripts need `if __name__ == "__main__":`.
        cluster: the same on all workers of a Dask scheduler, at "tls://HOST:PORT".
        approximate: NAME or NAME:VALUE, a method whose texts are not the target's own (docs/guides/approximate.md).
        models_file: a models.yaml whose entries come before the user's own and the built-in ones.
        remember: keep pass times, row classes and the experts used most in the user's cache folder; default: True.
        progress: llamacpp, mlx: called with (bytes read, bytes in all) of what stays in memory of a streamed model.
        say: receives a line for each thing that takes some seconds.
        depth, beam, tau, coupling, min_probability: options of a planner with a draft (docs/reference/planners.md).

    Raises:
        EdgespecError: anything that is wrong, as one line.
    """
    return load_asked(asked_for(target, **options))


def load_asked(asked: Asked) -> Model:
    """As `load`, by checked arguments."""
    if asked.is_remote:
        remote, writer = open_targets(
            asked.entry.name, asked.entry, asked.draft or "", asked.models_file, asked.options, count=asked.targets,
            cluster=asked.cluster, remember=asked.remember, say=asked.say, **asked.planner_options,
        )  # fmt: skip
        _use_template(remote, asked.template)
        return Model(remote, [], targets=writer, **_defaults(asked, [remote]))
    backends, learn = open_pair(
        asked.entry, asked.draft, asked.models_file, asked.options,
        leave_out=asked.leaves_out, remember=asked.remember, progress=asked.progress, say=asked.say,
    )  # fmt: skip
    try:
        _use_template(backends[0], asked.template)
        limits, defaults = backends[0].capabilities, _defaults(asked, backends)
        pace = None if asked.fixed else new_auto_state(limits.streams, limits.experts, tiled=limits.tiled)
        keeps = asked.remember and asked.planner != "none" and not asked.method  # it may accept more than exact runs do
        if pace and keeps:
            defaults["at_close"] = recall_auto_state(pace, asked.sources(backends), backends[0], asked.about, learn)
        if pace and asked.planner != "none":
            time_tiles([pace], *backends, say=asked.say)
        return Model(backends[0], asked.planners(backends, pace), pace=pace, owned=backends, **defaults)
    except BaseException:
        close_all(backends)
        raise


async def aload(target: Path | Entry, **options: Unpack[LoadKeywords]) -> Model:
    """As `load`, for asyncio, in a thread, which loads to the end also if the task is cancelled."""
    return await asyncio.to_thread(load, target, **options)


def _use_template(target: Backend, template: str | None) -> None:
    if template is not None:
        target.vocab.chat_template, target.vocab.tool_template = template, None


def seeded(first: Request, count: int, start: int = 0) -> list[Request]:
    """Requests that differ only in the seed, which counts up from the first one's plus `start`."""
    seeds = [(first.sampling.seed + start + i) % 2**64 for i in range(count)]
    return [replace(first, sampling=first.sampling.changed(seed=seed)) for seed in seeds]


def _defaults(asked: Asked, backends: Sequence[Backend]) -> dict[str, Any]:
    """
    Returns:
        Arguments of `Model` that models.yaml, the model's own file and `load` give.
    """
    entry, options = asked.entry, asked.options
    path = local_path(entry.target, fetch=False)
    sampling, notes = choose_sampling(entry.defaults, path)
    if entry.defaults.ctx is not None:
        notes = [*notes, "models.yaml: ctx goes with the next version; write context_length"]
    notes = [*notes, *asked.notes]
    if under_rosetta():
        notes.append(
            "this Python is for Intel, which makes passes slow: make the environment with one for Apple silicon"
        )
    drafts = asked.draft or asked.datastore or asked.planner not in ("auto", "none")
    if asked.fixed and drafts and not asked.is_remote:
        notes += note_on_budget(options.budget, backends[0], path, approximate=asked.method is not None)
    return {
        "sampling": sampling, "system": entry.defaults.system, "notes": notes, "gpu_layers": options.gpu_layers,
        "names": (entry.name, asked.draft or "" if backends[1:] or asked.is_remote else ""),
        "budget": options.budget if asked.is_remote else max(options.budget, backends[0].capabilities.widest),
    }  # fmt: skip


def _empty_result(options: GenerateKeywords) -> GenerationResult:
    """A result that a stream with these options fills."""
    stats = options.get("stats")
    options["stats"] = stats = GenerationStats() if stats is None else stats
    return GenerationResult(stats=stats)


def _check_reports(stats: Any, progress: Any) -> None:
    if not isinstance(stats, GenerationStats | None):
        raise must_be("stats", stats, "a GenerationStats")
    check_call("progress", progress)
