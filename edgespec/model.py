"""The Python API: a target, perhaps a draft, and a planner, loaded together.

import edgespec
with edgespec.load("smollm2-135m") as model:
    print(model.chat("Why is the sky blue?", max_tokens=100).text)
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Self

from edgespec.backend import Backend, check_room, check_same_vocab, choose_backend, load_backend, load_options
from edgespec.errors import UsageError
from edgespec.exact import check_choice, settle
from edgespec.generate import generate_tokens
from edgespec.models.own_sampling import choose_sampling
from edgespec.models.registry import Entry, find_model, is_folder, local_path
from edgespec.planners import Planner
from edgespec.planners.choice import USE_DRAFT, check_planner, make_planner
from edgespec.planners.paced import Pace, new_pace
from edgespec.remembered import identity, machine, recall
from edgespec.remembered import remember as keep
from edgespec.sampling import SamplingParams
from edgespec.stats import GenerationStats
from edgespec.text import Message, TextStream, render_chat, user_messages
from edgespec.tree import Source

DEFAULT_BUDGET = 64
WIDE = 16  # guesses, from which on kernels for many tokens are the faster ones: see llamacpp's `load`
DEFAULT_CONTEXT = 4096
FOR_TARGET = ("memory", "gpu_memory")  # the draft is to fit beside it
RESIDENT = {"resident": True, "in_order": False}  # how a draft is loaded

Prompt = str | Sequence[Message]


@dataclass(frozen=True, slots=True)
class Chunk:
    """What became certain with one token."""

    text: str  # may be empty: half a character, or what may become a stop string
    token_id: int
    source: Source  # who guessed the token


@dataclass(slots=True)
class GenerationResult:
    """A finished generation."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    stats: GenerationStats = field(default_factory=GenerationStats)

    @property
    def finish_reason(self) -> str:
        """ "stop", "length", or "interrupted"."""
        return self.stats.finish_reason


class Model:
    """A loaded target with its planner. Keeps the last text's cache, so a longer prompt costs only its new part.

    One generation at a time: it is not for use from several threads.
    """

    def __init__(
        self,
        target: Backend,
        planner: Planner,
        *,
        budget: int = DEFAULT_BUDGET,
        sampling: SamplingParams | None = None,
    ) -> None:
        """
        Args:
            target: the model whose text is wanted.
            planner: where guesses come from; it holds the draft.
            budget: most guessed tokens per pass.
            sampling: what `generate` and `chat` use where the call does not say otherwise; default: greedy.
        """
        if budget < 1:
            raise UsageError(f"budget is {budget}, but must be at least 1")
        self.target = target
        self.planner = planner
        self.budget = budget
        self.sampling = sampling or SamplingParams()
        self.system: str | None = None  # the system message models.yaml proposes
        self._session = target.open()
        self._owned: list[Backend] = []
        self._at_close: Callable[[], None] = lambda: None
        self._notes: list[str] = []

    @property
    def notes(self) -> Sequence[str]:
        """What a user should know about how the target was loaded, a line each."""
        return [*self.target.notes, *self._notes]

    def stream(
        self,
        prompt: Prompt,
        *,
        max_tokens: int = 512,
        stop: Sequence[str] = (),
        stats: GenerationStats | None = None,
        progress: Callable[[int, int], None] | None = None,
        **sampling: Any,
    ) -> Iterator[Chunk]:
        """Generate, token by token.

        Args:
            prompt: raw text, or messages for the model's chat template.
            max_tokens: most tokens to generate.
            stop: strings that end the text; not part of it.
            stats: filled in while it runs.
            progress: called with (prompt tokens read, prompt tokens in all).
            sampling: fields of `SamplingParams` to change for this call.

        Raises:
            UsageError: empty prompt, or a value out of range.
            ContextFull: the prompt does not fit into the context.
        """
        params = replace(self.sampling, **_known(sampling))
        if max_tokens < 1:
            raise UsageError(f"max_tokens is {max_tokens}, but must be at least 1")
        prompt_ids = self.encode(prompt)
        check_room(self.target, len(prompt_ids))
        stats = stats if stats is not None else GenerationStats()
        return self._stream(prompt_ids, params, max_tokens, TextStream(self.target.vocab, stop), stats, progress)

    def _stream(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        max_tokens: int,
        text: TextStream,
        stats: GenerationStats,
        progress: Callable[[int, int], None] | None,
    ) -> Iterator[Chunk]:
        rounds = generate_tokens(
            self.target, self._session, self.planner, prompt_ids, params,
            max_tokens=max_tokens, budget=self.budget, stats=stats, progress=progress,
        )  # fmt: skip
        for round_ in rounds:
            for i, (token, source) in enumerate(zip(round_.tokens, round_.sources, strict=True)):
                piece = text.push(token)
                last = text.stopped or (round_.finished and i + 1 == len(round_.tokens))
                if last:
                    piece += text.finish()
                if text.stopped:
                    stats.finish_reason = "stop"
                    stats.drop(round_.sources[i + 1 :])
                yield Chunk(piece, token, source)
                if last:
                    return

    def generate(self, prompt: Prompt, **options: Any) -> GenerationResult:
        """Generate and return everything at once; arguments as for `stream`."""
        result = GenerationResult(stats=options.pop("stats", None) or GenerationStats())
        for chunk in self.stream(prompt, stats=result.stats, **options):
            result.text += chunk.text
            result.token_ids.append(chunk.token_id)
        return result

    def chat(self, messages: Prompt, **options: Any) -> GenerationResult:
        """Answer a user's message, or a conversation, through the model's chat template; arguments as for `stream`."""
        if isinstance(messages, str):
            messages = user_messages(messages, self.system)
        return self.generate(messages, **options)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt: text with the start token, or messages by the chat template.

        Raises:
            UsageError: the prompt is empty, or the model has no chat template.
        """
        if isinstance(prompt, str):
            token_ids = self.target.vocab.encode(prompt, add_bos=True, parse_special=True) if prompt else []
        else:
            token_ids = render_chat(self.target.vocab, prompt) if prompt else []
        if not token_ids:
            raise UsageError("the prompt is empty: give at least one word")
        return token_ids

    def close(self) -> None:
        """Free sessions and models, and remember what passes cost. Safe to call twice."""
        self._at_close()
        self._at_close = lambda: None
        self.planner.close()
        self._session.close()
        close_all(self._owned)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def load(
    target: str,
    *,
    draft: str | None = None,
    planner: str | None = None,
    budget: int | None = None,
    datastore: str | None = None,
    context_length: int | None = None,
    backend: str | None = None,
    threads: int | None = None,
    gpu_layers: int | None = None,
    memory: int | str | None = None,
    kv_type: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
    gpu_memory: int | str | None = None,
    exact: str | None = None,
    models_file: str | None = None,
    remember: bool = True,
    progress: Callable[[int, int], None] | None = None,
    say: Callable[[str], None] = lambda text: None,
    **planner_options: Any,
) -> Model:
    """Load a target and its helpers.

    Where a call says nothing on sampling, models.yaml's word holds, then the model's own, then greedy.

    Args:
        target: a name from models.yaml, the path of a GGUF file or of a model folder, OWNER/REPOSITORY on the hub, or
            a source such as hf:owner/repository/file.gguf.
        draft: the same for the draft model; default: what models.yaml says.
        planner: one of `PLANNERS`; default: what models.yaml says, else auto: in every round what writes fastest.
        budget: most guessed tokens per pass; default: as many as pay on this machine, by what passes turn out to cost,
            and at most the model's budget or 64. With a number it is always that many, and trees do not depend on time
            at all; auto is then specexec with a draft, sssd with a datastore or if weights are streamed, else none.
        datastore: a file made by `edgespec datastore build`, for the planners auto and sssd.
        context_length: most tokens of text; 0 = what the model was trained for.
        backend: the engine of target and draft: llamacpp, mlx, torch, or one that another package brings. Default: for
            files llamacpp; for folders mlx on a Mac with Apple silicon, torch elsewhere, or which of them is there.
        threads: llamacpp, torch: compute threads; default: the engine's choice.
        gpu_layers: llamacpp: layers to keep on the GPU; -1 = all. Default: as many as its memory takes.
        memory: what the program may take of this machine's memory, in bytes or as "12G"; weights that do not fit are
            streamed from disk. Default: what is free, for mlx on a Mac at most what its GPU can hold.
        kv_type: llamacpp: type of keys and values in the cache, of the draft's too, such as "f16" or "q8_0". Text is
            then what plain decoding writes with the same type. Default: f16; for float32 weights f32; for narrow passes
            (`exact`) and at most 4,096 tokens of context q8_0, with which they need no padding.
        device: torch: "cuda", "cuda:1", "mps" or "cpu"; default: the first of these that is there.
        dtype: torch: "float32", "float16", "bfloat16" or "nf4" (4 bits); default: as in the folder.
        gpu_memory: torch: what to use of the GPU's memory, in bytes or as "10G"; layers that do not fit are streamed
            from host memory. Default: what is free.
        exact: passes are kept in shapes that agree to the bit: "narrow" (few guesses), "wide" (many; short passes are
            padded), "off". Default: wide where weights are streamed, else narrow, where the engine has such shapes.
        models_file: a models.yaml to use besides the built-in one.
        remember: what passes cost, and which agree, is kept from run to run, in the user's cache folder.
        progress: llamacpp, mlx: while a model is made ready to be streamed, called with (bytes read, bytes in all) of
            the weights that stay in memory.
        say: told, as a line, what takes some seconds.
        planner_options: passed to the planner, for example depth=16, tau=1.3, coupling=False.

    Raises:
        EdgespecError: anything that is wrong, as one line.
    """
    entry = find_model(target, models_file)
    defaults = entry.defaults
    planner = planner or defaults.planner or "auto"
    draft = (draft or entry.draft) if planner in USE_DRAFT else draft
    check_planner(planner, draft is not None, datastore is not None, planner_options)
    fixed, budget = budget is not None, choose_budget(budget, entry)
    engine: dict[str, Any] = {
        "backend": backend, "threads": threads, "gpu_layers": gpu_layers, "memory": memory, "kv_type": kv_type,
        "device": device, "dtype": dtype, "gpu_memory": gpu_memory,
    }  # fmt: skip
    used = draft if planner in USE_DRAFT else None
    # A fixed budget makes passes wide, but for `auto` with nothing to guess from, which is plain decoding then.
    guesses = bool(used or datastore) if planner == "auto" else planner != "none"
    wide = fixed and budget >= WIDE and guesses
    backends = open_backends(
        entry, used, models_file, context_length=context_length, budget=budget, wide=wide, exact=exact,
        remember=remember, progress=progress, say=say, **engine,
    )  # fmt: skip
    try:
        limits = backends[0].capabilities
        pace = None if fixed else new_pace(limits.streams, limits.experts)
        made = make_planner(planner, backends, datastore, pace, **planner_options)
        sampling, notes = choose_sampling(defaults, local_path(entry.target, fetch=False))
        model = Model(backends[0], made, budget=budget, sampling=sampling)
    except BaseException:
        close_all(backends)
        raise
    model._owned = backends
    shapes = backends[0].capabilities.exact
    if shapes and fixed and guesses and budget >= shapes.trees.most:
        notes.append(
            f"trees have at most {shapes.trees.most - 1} guesses, not {budget}, so that passes agree to the bit "
            f"({shapes.name}); --exact wide or off allows more"
        )
    model._notes = notes
    model.system = defaults.system
    if pace and planner != "none" and remember:
        sources = [entry.target, *([find_model(used, models_file).target] if used else [])]
        model._at_close = recall_pace(pace, sources, backends[0], engine)
    return model


def recall_pace(
    pace: Pace, sources: Sequence[str], target: Backend, options: Mapping[str, int | str | None]
) -> Callable[[], None]:
    """Fill in what earlier runs have learned of the same models, loaded alike; returns what keeps it for later ones."""
    about = {
        "kind": "pace", "machine": machine(), "engine": target.name, "streams": target.capabilities.streams,
        "target": identity(local_path(sources[0], fetch=False)),
        "draft": identity(local_path(sources[1], fetch=False)) if sources[1:] else "",
        "exact": target.capabilities.exact.name if target.capabilities.exact else "",
        "experts": str(target.capabilities.experts),
        **options,
    }  # fmt: skip
    try:
        if known := recall(about):
            pace.recall(known)
    except (KeyError, TypeError, ValueError):  # written by another version: learned anew
        pass
    return lambda: keep(about, pace.as_dict()) if pace.target.at(0) else None


def choose_budget(budget: int | None, entry: Entry) -> int:
    """The budget asked for, else the model's, else the program's.

    Raises:
        UsageError: it is below 1.
    """
    budget = budget if budget is not None else entry.defaults.budget or DEFAULT_BUDGET
    if budget < 1:
        raise UsageError(f"budget is {budget}, but must be at least 1")
    return budget


def open_backends(
    entry: Entry,
    draft: str | None,
    models_file: str | None,
    *,
    context_length: int | None,
    budget: int,
    wide: bool = False,
    backend: str | None = None,
    exact: str | None = None,
    remember: bool = True,
    progress: Callable[[int, int], None] | None = None,
    say: Callable[[str], None] = lambda text: None,
    **options: Any,
) -> list[Backend]:
    """Load a target and, if given, its draft: [target] or [target, draft], checked to share one vocabulary.

    The draft stays in memory; the target gets what the draft leaves.

    Args:
        entry: the target.
        draft: a name, path or source.
        models_file: as for `load`.
        context_length: as for `load`.
        budget: most guessed tokens per pass.
        wide: passes will mostly have many nodes.
        backend: as for `load`; the two may differ only where it is not given.
        exact: as for `load`; it concerns the target.
        remember: as for `load`.
        progress: as for `load`.
        say: as for `load`.
        options: what `load` hands to the engines; None = not given.

    Raises:
        EdgespecError: anything that is wrong, as one line.
    """
    check_choice(exact)
    sources = [entry.target, *([find_model(draft, models_file).target] if draft else [])]
    names = [backend or choose_backend(is_folder(source)) for source in sources]
    check_engine_options(names, options)
    paths = [local_path(source, say=say) for source in sources]
    common = {name: value for name, value in options.items() if value is not None and name not in FOR_TARGET}
    common |= {
        "context_length": context_length if context_length is not None else entry.defaults.ctx or DEFAULT_CONTEXT,
        "budget": budget,
        "wide": wide,
    }
    for_target: dict[str, Any] = {name: options.get(name) for name in FOR_TARGET} | {"exact": exact}
    for_target |= {"progress": progress} if progress else {}
    # An engine that can plan for both is told; any other finds what a draft loaded before has left.
    together = len(set(names)) == 1 and "beside" in load_options(names[0])
    backends: list[Backend] = []
    try:
        if draft and not together:
            backends.append(_load_with(names[1], paths[1], common | RESIDENT))
        beside = {"beside": paths[1:]} if together else {}
        backends.insert(0, _load_with(names[0], paths[0], common | for_target | beside))
        if draft and together:
            backends.append(_load_with(names[1], paths[1], common | RESIDENT))
        if draft:
            check_same_vocab(backends[0].vocab, backends[1].vocab)
        settle(backends[0], paths[0], exact, keep=remember, say=say)
    except BaseException:
        close_all(backends)
        raise
    return backends


def _load_with(name: str, path: str, options: Mapping[str, Any]) -> Backend:
    """Load, with those of the options that the backend has."""
    known = load_options(name)
    return load_backend(name, path, **{option: value for option, value in options.items() if option in known})


def check_engine_options(backends: Sequence[str], options: Mapping[str, Any]) -> None:
    """Refuse an option that was given (is not None) and that none of these backends has.

    Raises:
        UsageError: names the option and the backend, with what it has.
    """
    known = frozenset[str]().union(*map(load_options, backends))
    for option, value in options.items():
        if value is not None and option not in known:
            names = " and ".join(dict.fromkeys(backends))
            others = ", ".join(name for name in options if name in known) or "none"
            raise UsageError(f"the backend {names} has no option {option!r}; its options: {others}")


def close_all(backends: Sequence[Backend]) -> None:
    """Free models."""
    for backend in backends:
        backend.close()


def _known(sampling: dict[str, Any]) -> dict[str, Any]:
    known = SamplingParams.__dataclass_fields__
    for name in sampling:
        if name not in known:
            raise UsageError(f"there is no option {name!r}; sampling has: {', '.join(known)}")
    return sampling
