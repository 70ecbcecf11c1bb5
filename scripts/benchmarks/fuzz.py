"""Random requests to random models: is every text that of plain decoding of the same request, alone in a model?

A case is data: a model, how it is loaded, and rounds of calls that are made at once. It is a function of a seed and a
number. Where the model claims a row class, each token must be equal; elsewhere a difference must be a tie.
"""

import asyncio
import ctypes
import faulthandler
import multiprocessing
import os
import random
import re
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from time import monotonic, process_time, sleep
from traceback import format_exception
from typing import Any
from unittest.mock import patch

import numpy as np

from edgespec.errors import Closed, EdgespecError, ModelError, NoRoom
from edgespec.loop.grammar import json_object, json_schema, regex
from edgespec.loop.sampling import MOST_BIAS
from edgespec.loop.stats import GenerationStats
from edgespec.loop.step import LogProbs
from edgespec.loop.text import user_messages
from edgespec.machine.memory import parse_size
from edgespec.measure.lossless import explain, first_divergence
from edgespec.model import Model, load
from edgespec.planners.choice import with_draft
from edgespec.planners.none import NonePlanner
from edgespec.scheduler import drive
from edgespec.scheduler.disk_cache import DiskCache
from edgespec.scheduler.events import GenerationResult
from edgespec.scheduler.requests import Request

FIRST = " first layer"  # ends the name of a draft
LEAST = "least"  # memory: what the error of a smaller limit names
MIB = 1 << 20
ATTEMPTS = 5
SECONDS_TO_END = 60  # of a process that has sent what it found
LITTLE = 0.1  # seconds of processor time: as good as nothing
HANGS, PATIENCE = 99, 15  # exit code of a process that hangs; times as long as it may compute nothing
TYPES = {  # of weights: llama_ftype in llama.h, of those that need no importance matrix
    "F32": 0, "F16": 1, "BF16": 32, "Q8_0": 7, "Q4_0": 2, "Q4_1": 3, "Q5_0": 8, "Q5_1": 9, "Q2_K": 10, "Q3_K_M": 12,
    "Q4_K_M": 15, "Q5_K_M": 17, "Q6_K": 18, "IQ4_NL": 25, "IQ4_XS": 30, "MXFP4": 38,
}  # fmt: skip
DENSE, DEEP = ("llama", "qwen2"), "deep"  # a llama with more layers, which can be streamed
WINDOWED = ("gemma2", "gemma3", "cohere2", "gpt-oss")
MIXTURES = ("mixtral", "qwen3 moe")
HYBRIDS = ("lfm2", "granitehybrid", "falcon-h1", "qwen3next", "qwen35", "nemotron_h", "mamba2")
FAMILIES = (*DENSE * 4, *[DEEP] * 3, *WINDOWED, *MIXTURES * 2, *HYBRIDS)
CACHES = (
    "f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_1", "iq4_nl", "f16/q8_0", "q8_0/f16", "f32/f16", "q8_0/q4_0",
)  # fmt: skip
WITH_DRAFT = ("auto", "auto", "specexec", "specexec", "chain", "pearl", "specbranch", "sssd", "none")
WITHOUT = ("auto", "sssd", "lookahead", "none")
WATCHED = ("generate", "chat", "leave")  # calls whose log-probabilities can be compared
WORDS = "the lighthouse keeper wrote down weather every morning and evening he read it out 12 7 cat.\n"


@dataclass(frozen=True)
class Call:
    """
    Attributes:
        how: a method of `Model`; "leave": a stream, after `count` tokens; "save", "load" and "forget" of the scheduler;
            "close" after `count` milliseconds.
        options: of the method, and log_probs of `Request`, whose bits are compared.
        count: branches, tokens, or milliseconds.
    """

    how: str = "generate"
    prompt: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    count: int = 1

    @property
    def seeded(self) -> Mapping[str, Any]:
        """The options with a seed: without one each call draws another."""
        return {"seed": 0, **self.options}


@dataclass(frozen=True)
class Case:
    """
    Attributes:
        target: a path, or a made-up model: family, and type of its weights.
        draft: the same; "": none.
        options: of `edgespec.load`; `memory` may be `LEAST`, and `disk` keeps sessions on disk.
        rounds: calls that are made at once, round after round.
    """

    target: str
    draft: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    rounds: Sequence[Sequence[Call]] = ()


@dataclass
class Found:
    """
    Attributes:
        exact: the row class that the model claims; "": none.
        wrong: what is wrong, by kind and as a line.
        refused: why the model was not loaded, or "".
    """

    exact: str = ""
    texts: int = 0
    ties: int = 0
    wrong: list[tuple[str, str]] = field(default_factory=list)
    refused: str = ""


@dataclass
class Text:
    """What a call gave; of a branch also its number."""

    call: Call
    number: int = 0
    result: GenerationResult = field(default_factory=GenerationResult)
    log_probs: list[LogProbs | None] = field(default_factory=list)
    error: Exception | None = None


# Drawing.


def draw(seed: int, number: int, model: str = "", draft: str = "", questions: Sequence[str] = ()) -> Case:
    """Case `number` of a seed.

    Args:
        seed: of the whole run.
        number: of the case.
        model: a real model for the target; "": made up ones.
        draft: a draft for it.
        questions: prompts begin as these do; (): they are made of a few words.
    """
    chance = random.Random(f"{seed} {number}")
    family, kind = chance.choice(FAMILIES), chance.choice(list(TYPES))
    target = model or f"{family} {kind}"
    if not model and chance.random() < 0.6:
        draft = f"{family} {chance.choice(list(TYPES))}{chance.choice(('', FIRST)) if family in DENSE else ''}"
    elif chance.random() < 0.3:
        draft = ""
    options = _options(chance, bool(draft), small=not model)
    if not model and family in HYBRIDS and options["exact"] != "off":
        options["exact"] = None  # there is no other
    if family == DEEP and chance.random() < 0.8:
        options["memory"] = LEAST
    options = {name: value for name, value in options.items() if value is not None}
    return Case(target, draft, options, _rounds(chance, options["context_length"], questions, small=not model))


def _options(chance: random.Random, drafts: bool, *, small: bool) -> dict[str, Any]:
    def some(share: float, values: Sequence[Any]) -> Any:
        return chance.choice(values) if chance.random() < share else None

    planner = chance.choice(WITH_DRAFT if drafts else WITHOUT)
    drafts = drafts and bool(with_draft([planner]))
    return {
        "planner": planner,
        "context_length": chance.choice((200, 400, 700, 1100)) if small else chance.choice((700, 1500)),
        "threads": chance.choice((1, 2, 2, 3)),
        "parallel": chance.choice((1, 1, 2, 3, 4, 5, 6)),
        "exact": some(0.6, ("narrow", "narrow", "wide", "wide", "any", "off")),
        "kv_type": some(0.6, CACHES),
        "budget": some(0.6, (1, 2, 3, 4, 6, 8, 16, 30, 62, 100)),
        "memory": some(0.25, (LEAST,)),
        "disk": some(0.1, (True,)),
        "ahead": some(0.1, (True,)) if drafts else None,
        "tau": some(0.1, (0.3, 2.0)) if drafts else None,
    }


def _rounds(chance: random.Random, room: int, questions: Sequence[str], *, small: bool) -> Sequence[Sequence[Call]]:
    words, texts = WORDS.split(" "), list[str]()
    for length in (chance.choice((3, 20, 63, 64, 65, 150, 400, 520, 600)) for _ in range(3)):
        text = chance.choice(questions) if questions else ""
        while len(text) < length * (1 if small else 4):
            text += f"{chance.choice(words)} "
        texts.append(text[: min(length, room - 20) * (1 if small else 4)])

    def call() -> Call:
        whole = chance.choice(texts)
        prompt = whole[: chance.choice((len(whole), len(whole), chance.randrange(len(whole) + 1)))]
        prompt += chance.choice(("", "", " ".join(chance.choices(words, k=3))))
        how = chance.choice(("generate",) * 6 + ("chat",) * 2 + ("leave",) * 2 + ("branch", "astream"))
        counts = (1, 2, 3, 5) if how in ("leave", "branch") else (1,)
        return Call(how, prompt, _asked(chance, how, small=small), chance.choice(counts))

    most = 6 if small else 3
    rounds = [[call() for _ in range(chance.choice((1, 1, 2, 3, most)))] for _ in range(chance.choice((1, 2, 3)))]
    for one in rounds:
        if chance.random() < 0.25:
            one.append(Call(chance.choice(("save", "load", "forget"))))
    if chance.random() < 0.1:
        rounds[-1].append(Call("close", count=chance.choice((1, 20, 200))))
    return rounds


def _asked(chance: random.Random, how: str, *, small: bool) -> dict[str, Any]:
    most = (1, 2, 12, 40, 40, 100, None) if small else (1, 8, 24, 24, 48)
    found: dict[str, Any] = {"max_tokens": chance.choice(most)}
    if chance.random() < 0.7:
        found |= {"temperature": chance.choice((0.3, 0.7, 1.0, 1.0, 1.5)), "seed": chance.randrange(100)}
    for name, values in {
        "top_k": (1, 2, 40), "top_p": (0.5, 0.9), "min_p": (0.05,), "repetition_penalty": (1.1, 0.9),
        "presence_penalty": (0.5,), "frequency_penalty": (0.5, -0.5), "logit_bias": ({65: 5.0, 101: -3.0},),
        "stop": ("e", "th", ["a", "\n"]), "prediction": (WORDS, "the the the the"),
        "grammar": (
            json_object(), regex("[a-z ]{1,60}"), regex("(the cat ){1,9}"),
            json_schema({"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
                         "required": ["name", "age"], "additionalProperties": False}),
        ),
    }.items():  # fmt: skip
        if chance.random() < 0.1:
            found[name] = chance.choice(values)
    if how in WATCHED and chance.random() < 0.8:
        found["log_probs"] = chance.choice((0, 3))
    return found


# Models.


def made(name: str, folder: Path) -> Path:
    """The path of a model: a real one's own, or of a made-up one, which is written if it is not there yet."""
    family, _, kind = name.removesuffix(FIRST).rpartition(" ")
    if kind not in TYPES:
        return Path(name)
    path = folder / f"{name.replace(' ', '-')}.gguf"
    if not path.exists():
        whole, new = path.with_suffix(f".{os.getpid()}"), path.with_suffix(f".{os.getpid()}.new")
        _write(whole, family, layers=1 if name.endswith(FIRST) else 2, wide="K" in kind or kind == "IQ4_XS")
        _quantise(whole, new, TYPES[kind])
        whole.unlink()
        new.rename(path)
    return path


def _write(path: Path, family: str, *, layers: int, wide: bool) -> None:
    """`wide`: its matrices have whole blocks of K types. The tests' folder must be on Python's path."""
    import hybrid_files
    import mixture_files
    import window_files
    from gguf_files import small_llama

    if family in (*DENSE, DEEP):
        small_llama(path, 12 if family == DEEP else layers, kind="llama" if family == DEEP else family)
        return
    sizes: dict[str, Any] = {"HEAD": 64}
    if wide:
        of_mixtures = {kind: (name, used, 512) for kind, (name, used, _) in mixture_files.KINDS.items()}
        sizes |= {"WIDTH": 256, "HIDDEN": 512, "INNER": 512, "KINDS": of_mixtures}
    with ExitStack() as stack:
        for module in (hybrid_files, window_files, *([mixture_files] if wide else [])):
            own = {name: size for name, size in sizes.items() if hasattr(module, name)}
            stack.enter_context(patch.dict(vars(module), own))
        if family in HYBRIDS:
            hybrid_files.write_hybrid(path, family)
        elif family in mixture_files.KINDS:
            mixture_files.write_mixture(path, family, bits=32)
        else:
            window_files.write_windowed(path, family)


def _quantise(source: Path, target: Path, kind: int) -> None:
    from edgespec.backends.llamacpp.ggml.files import keep_log, llama_cpp

    keep_log()
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = kind
    if llama_cpp.llama_model_quantize(bytes(source), bytes(target), ctypes.byref(params)):
        raise ModelError(f"{source}: cannot be quantised to {kind}")


# Running.


@contextmanager
def loaded(case: Case, folder: Path) -> Iterator[Model]:
    """The model of a case; as `LEAST` memory it gets what the error of a smaller limit names."""
    options = {name: value for name, value in case.options.items() if name != "disk"}
    if least := options.get("memory") == LEAST:
        options["memory"] = 1
    path, draft = made(case.target, folder), made(case.draft, folder) if case.draft else None
    for attempt in range(ATTEMPTS):
        try:
            model = load(path, draft=draft, **options)
            break
        except NoRoom as error:
            named = re.search(r"at least ([\d.]+ \w+)", str(error))
            if not (least and named) or attempt == ATTEMPTS - 1:
                raise
            options["memory"] = parse_size(named[1]) + MIB * attempt
    with model:
        yield model


def check(case: Case, folder: Path, enough: str = "") -> Found:
    """Run a case in this process, and compare its texts.

    Args:
        case: what to run.
        folder: for made-up models and sessions.
        enough: a kind of defect after which no more texts are compared.
    """
    found = Found()
    try:
        with TemporaryDirectory(dir=folder) as scratch, loaded(case, folder) as model:
            if case.options.get("disk"):
                model.scheduler.pool.disk_cache = DiskCache(f"{scratch}/disk", model.target, 64 * MIB, least=8)
            exact, computing = model.target.capabilities.exact, dict(model.target.computing)
            found.exact = exact.name if exact else ""
            texts = [text for calls in case.rounds for text in _at_once(model, calls, f"{scratch}/saved")]
        for text in texts:
            found.texts += 1
            with _plain(case, folder, found.exact, computing) as alone:
                _compare(text, alone, found)
            if enough in (kind for kind, _ in found.wrong):
                break
    except EdgespecError as error:
        if found.texts:
            found.wrong.append(("plain", f"plain decoding in row class {found.exact or 'none'}: {error!r}"))
        found.refused = "" if found.texts else f"{type(error).__name__}: {error}"
    except Exception as error:
        found.wrong.append((type(error).__name__, "".join(format_exception(error)[-4:])))
    return found


def _at_once(model: Model, calls: Sequence[Call], saved: str = "") -> list[Text]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return list(chain.from_iterable(pool.map(lambda call: _made_call(model, call, saved), calls)))


def _made_call(model: Model, call: Call, saved: str = "") -> list[Text]:
    if call.how in ("save", "load", "forget", "close"):
        with suppress(EdgespecError):  # there is no session yet, or the model was closed
            if call.how == "close":
                sleep(call.count / 1000)
                model.close()
            else:
                getattr(model.scheduler, call.how)(*([] if call.how == "forget" else [saved]))
        return []
    text = Text(call)
    try:
        if call.how == "branch":
            results = model.branch(call.prompt, call.count, **call.seeded)
        elif call.how == "astream":
            results = [asyncio.run(_awaited(model, call))]
        else:
            results = [text.result]
            with closing(_chunks(model, call, text.result.stats)) as chunks:
                for chunk in chunks:
                    text.result.add(chunk)
                    text.log_probs.append(chunk.log_probs)
                    if call.how == "leave" and len(text.result.token_ids) >= call.count:
                        break
    except Exception as error:
        return [replace(text, error=error)]
    return [replace(text, number=number, result=result) for number, result in enumerate(results)]


async def _awaited(model: Model, call: Call) -> GenerationResult:
    result = GenerationResult()
    async for chunk in model.astream(call.prompt, stats=result.stats, **call.seeded):
        result.add(chunk)
    return result


def _chunks(model: Model, call: Call, stats: GenerationStats) -> Any:
    options = dict(call.seeded)
    log_probs = options.pop("log_probs", None)
    if log_probs is None:
        return (model.stream_chat if call.how == "chat" else model.stream)(call.prompt, stats=stats, **options)
    return drive.chunks(model.scheduler, replace(_request(model, call), log_probs=log_probs), stats, None)


def _request(model: Model, call: Call) -> Request:
    options = {name: value for name, value in call.seeded.items() if name != "log_probs"}
    chats = call.how == "chat" and call.prompt
    return model.request(user_messages(call.prompt, model.system) if chats else call.prompt, **options)


@contextmanager
def _plain(case: Case, folder: Path, exact: str, computing: Mapping[str, Any]) -> Iterator[Model]:
    """A model with the same row class and kernels that decodes plainly."""
    kept = {name: case.options[name] for name in ("context_length", "threads", "kv_type") if name in case.options}
    simple = replace(case, draft="", options=kept | {"planner": "none", "exact": exact or "off"})
    with loaded(simple, folder) as model:
        if dict(model.target.computing) == dict(computing):
            yield model
            return
    # Kernels follow from other options, too: all stay, but for the planner.
    options = dict(case.options) | {"parallel": 1, "exact": exact or "off"}
    with loaded(replace(case, options=options), folder) as model:
        model.scheduler.close()
        with Model(model.target, NonePlanner()) as alone:
            yield alone


def _compare(text: Text, alone: Model, found: Found) -> None:
    """Make the call again in a model of its own, which decodes plainly, and add what is wrong."""
    call, exact = text.call, alone.target.capabilities.exact
    about = f"{call.how}{f' {text.number}' if text.number else ''}, row class {found.exact or 'none'}"
    if (exact.name if exact else "") != found.exact:
        found.wrong.append(("class", f"{about}: plain decoding has {exact}"))
        return
    if call.how == "branch":
        call = replace(call, how="generate", options={**call.options, "seed": call.seeded["seed"] + text.number})
    [plain] = _made_call(alone, call)
    closed = isinstance(text.error, Closed)
    if not closed and type(text.error) is not type(plain.error):
        says = "".join(format_exception(text.error or plain.error)[-4:])
        found.wrong.append(("error", f"{about}: {'' if text.error else 'of plain decoding only: '}{says}"))
        return
    ids, mine = plain.result.token_ids, text.result.token_ids
    index = first_divergence(ids[: len(mine)] if closed else ids, mine)
    if index is None:
        said = [(one.result.text, one.result.finish_reason) for one in (text, plain)]
        if call.how != "leave" and not closed and said[0] != said[1]:
            found.wrong.append(("text", f"{about}: {said[0]}, but plain decoding has {said[1]}"))
        pairs = enumerate(zip(text.log_probs, plain.log_probs, strict=False))
        other = next((i for i, (one, its) in pairs if one != its), None)
        if found.exact and other is not None:
            values = f"{text.log_probs[other]} and {plain.log_probs[other]}"
            found.wrong.append(("differs", f"{about}: token {other} of {len(ids)} has {values}"))
    elif found.exact:
        found.wrong.append(("differs", f"{about}: token {index} of {len(ids)}"))
    else:
        divergence = _divergence(_request(alone, call), alone, ids, mine, index)
        found.ties += divergence.tie
        if not divergence.tie:
            found.wrong.append(("no tie", f"{about}: {divergence}"))


def _divergence(request: Request, alone: Model, plain: list[int], other: list[int], index: int) -> Any:
    params = request.sampling
    if request.grammar:
        constraint = request.grammar.start()
        for token in plain[:index]:
            constraint.accept(token)
        allowed = np.isfinite(constraint.masked(np.zeros(alone.target.vocab.size, np.float32)))
        forbidden = dict.fromkeys(np.flatnonzero(~allowed).tolist(), -MOST_BIAS / 2)
        params = replace(params, logit_bias={**params.logit_bias, **forbidden})
    alone.scheduler.close()
    return explain(alone.target, request.prompt_ids, plain, other, params)


# In processes of their own: a case may crash or hang.


def in_child(case: Case, folder: Path, seconds: float, enough: str = "") -> Found:
    """As `check`, but a process that crashes or hangs is a defect.

    It hangs if it computes nothing for `seconds`, or takes `PATIENCE` times as long: a busy machine is slow.
    """
    context = multiprocessing.get_context("forkserver")  # a clean process that has imported this module
    context.set_forkserver_preload([__name__, "edgespec.backends.llamacpp.engine"])
    receiver, sender = context.Pipe(duplex=False)
    log = folder / "stderr"
    log.write_bytes(b"")
    child = context.Process(target=_in_child, args=(sender, case, folder, seconds, enough, log), daemon=True)
    child.start()
    sender.close()
    found: Found | None = None
    try:
        if receiver.poll(PATIENCE * seconds):
            with suppress(EOFError):  # it has died
                found = receiver.recv()
            child.join(SECONDS_TO_END)
        code = child.exitcode
    finally:
        child.kill()
        child.join()
        receiver.close()
    if found and code == 0:
        return found
    kind = "hang" if code in (None, HANGS) else signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return Found(wrong=[(kind, log.read_text("utf-8", "replace")[-9000:].strip())])


def _in_child(sender: Any, case: Case, folder: Path, seconds: float, enough: str, log: Path) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's
    with open(log, "wb") as file:
        os.dup2(file.fileno(), 2)
    faulthandler.enable()
    Thread(target=_watch, args=(seconds,), daemon=True).start()
    sender.send(check(case, folder, enough))


def _watch(seconds: float) -> None:
    used, since = process_time(), monotonic()
    while monotonic() - since < seconds:
        sleep(1)
        if process_time() - used > LITTLE:
            used, since = process_time(), monotonic()
    faulthandler.dump_traceback()
    os._exit(HANGS)


# Shrinking.


def shrunk(case: Case, still: Callable[[Case], bool], seconds: float) -> Case:
    """A simpler case with the same defect.

    Args:
        case: has a defect.
        still: whether another case has it.
        seconds: after which no more is tried.
    """
    end, tried = monotonic() + seconds, {repr(case)}

    def has_it(one: Case) -> bool:
        new = repr(one) not in tried
        tried.add(repr(one))
        return new and monotonic() < end and still(one)

    while found := next(filter(has_it, _simpler(case)), None):
        case = found
    return case


def _simpler(case: Case) -> Iterator[Case]:
    """Fewer calls, then fewer options, then shorter calls; some may be the case itself."""
    yield replace(case, rounds=[[_watched(call) for call in calls] for calls in case.rounds])
    for rounds in _fewer(case.rounds):
        yield replace(case, rounds=rounds)
    for i, calls in enumerate(case.rounds):
        for some in _fewer(calls):
            yield replace(case, rounds=[*case.rounds[:i], some, *case.rounds[i + 1 :]])
    for planner in ("none",) if case.options.get("planner") == "none" else ("none", "sssd"):
        yield replace(case, draft="", options={**case.options, "planner": planner})
    for options in _without_one(case.options, {"planner", "context_length", "threads"}):
        yield replace(case, options=options)
    for i, calls in enumerate(case.rounds):
        for j, call in enumerate(calls):
            for one in _simpler_calls(call):
                yield replace(
                    case, rounds=[*case.rounds[:i], [*calls[:j], one, *calls[j + 1 :]], *case.rounds[i + 1 :]]
                )


def _fewer(items: Sequence[Any]) -> Iterator[Sequence[Any]]:
    half = len(items) // 2
    parts = [items[:half], items[half:], *([*items[:i], *items[i + 1 :]] for i in range(len(items)))]
    return (part for part in parts if part)


def _without_one(options: Mapping[str, Any], kept: set[str]) -> Iterator[dict[str, Any]]:
    for name in sorted(options.keys() - kept):
        yield {other: value for other, value in options.items() if other != name}


def _watched(call: Call) -> Call:
    """Log-probabilities tell where bits differ, long before a token does."""
    return replace(call, options={"log_probs": 3, **call.options}) if call.how in WATCHED else call


def _simpler_calls(call: Call) -> Iterator[Call]:
    yield _watched(replace(call, how="generate", count=1))
    yield replace(call, count=min(call.count, 2))
    for options in _without_one(call.options, {"max_tokens", "log_probs"}):
        yield replace(call, options=options)
    half, most = len(call.prompt) // 2, call.options.get("max_tokens", 1)
    for prompt in filter(None, (call.prompt[:half], call.prompt[half:])):
        yield replace(call, prompt=prompt)
    if most != 1:
        yield replace(call, options={**call.options, "max_tokens": most // 2 if most else 64})


def script(case: Case, about: str) -> str:
    """A program that runs the case and prints what is wrong."""
    here = Path(__file__).resolve().parents[2]
    comment = "".join(f"# {line}\n" for line in about.splitlines())
    rounds = "".join(
        f"    [\n{''.join(f'        {call},{chr(10)}' for call in calls)}    ],\n" for calls in case.rounds
    )
    return f"""{comment}import sys
from pathlib import Path

sys.path[:0] = [{str(here / "scripts")!r}, {str(here / "tests")!r}]
from benchmarks.fuzz import Call, Case, check

from edgespec import Grammar

OPTIONS = {case.options}
ROUNDS = [
{rounds}]
print(check(Case({case.target!r}, {case.draft!r}, OPTIONS, ROUNDS), Path(__file__).parent))
"""
