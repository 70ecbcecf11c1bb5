"""Engines: their interface, load options, and the list of built-in ones."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, Protocol, Self, runtime_checkable

from edgespec.errors import (
    MissingPackage,
    ModelError,
    UsageError,
    check_flag,
    check_text,
    check_texts,
    check_whole,
    no_such,
)
from edgespec.loop.backend import Backend, Vocab

# Name -> module with an `engine`; others are in the entry-point group edgespec.backends.
BUILT_IN = {
    "llamacpp": "edgespec.backends.llamacpp.engine",
    "mlx": "edgespec.backends.mlx.engine",
    "torch": "edgespec.backends.torch.engine",
}
# Optional fields of `LoadOptions`, in the order in which messages name them.
ENGINE_OPTIONS = (
    "threads", "gpu_layers", "memory", "kv_type", "device", "dtype", "gpu_memory", "lenders", "keep_packed",
)  # fmt: skip

Computing = Mapping[str, str | int | None]  # `Backend.computing`
Progress = Callable[[int, int], None]  # called with (bytes read, bytes in all)


class Machine(Protocol):
    """A computer for which an engine plans: see `machine/this_machine.py`; sizes are in bytes."""

    @property
    def platform(self) -> str:
        """As `sys.platform`."""

    @property
    def architecture(self) -> str:
        """As `platform.machine()`."""

    @property
    def cores(self) -> int:
        """Processors to compute with."""

    @property
    def free(self) -> int:
        """Memory that this process may use, also what it has now."""

    @property
    def used(self) -> int:
        """Memory that it has now, without a file behind it."""

    @property
    def moves_pages(self) -> bool:
        """True if pages of memory can be moved."""

    @property
    def gpus(self) -> Sequence[Any]:
        """As `Engine.gpus` found them."""

    @property
    def disk(self) -> Any:
        """The way to read the model's disk, a `machine.disk.Reading`."""

    @property
    def file_system(self) -> str:
        """Of the model's disk, such as "ext4"; "": not known."""

    @property
    def packages(self) -> Sequence[str]:
        """Import names of the engines' packages that are installed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """Options of a model that is loaded; None: the engine chooses.

    Attributes:
        context_length: most tokens of one sequence; 0: as many as the model was trained for.
        budget: most draft tokens of one pass.
        widest: where weights are streamed, the engine may plan for this many instead, if that costs little memory.
        sessions: of sequences at work at once.
        kept: sessions that may be open besides, where all share cells, to keep tokens for later prompts.
        repack: weights may be repacked at load, which changes kernels. It depends on nothing that only drafting needs.
        exact: wanted row class, as for `edgespec.load`.
        backend: the engine's name.
        threads: compute threads.
        gpu_layers: layers on the GPU, of which the output matrix is one; -1: all.
        gpu_memory: bytes of GPU memory that this program may take, or "10G".
        memory: bytes of this machine's memory that the program and `draft_files` may take, or "12G".
        kv_type: type of keys and values in the cache, or of each, such as "f16/q8_0".
        device: name of the device to compute on.
        dtype: type of the weights.
        keep_packed: keep layers that are quantised at load for the next start.
        lenders: addresses HOST:PORT of machines that run `edgespec lend`.
        draft_files: paths of models that will be loaded with the same options and stay in memory.
        resident: all weights stay in memory, where another model's plan has left room for them.
        in_order: a session's cells lie in the order of its tokens, which a draft does not need.
        share: part of a context that each further session adds to the cells of all sessions.
        own_head: the head in the model's own file is loaded, too, and stays in memory; see `LoadsHeads`.
        own_layers: some of the model's own layers will draft; whole layers are streamed then.
        approximate: the approximate method, as for `edgespec.load`.
        ahead: the draft goes on while the target runs, because the user or the planner wants it.
        mixed: the draft's logits change what is sampled, so that it has a row class, and two sessions for each.
        remember: which experts were used most is kept for the next start.
    """

    context_length: int = 4096
    budget: int = 64
    widest: int = 0
    sessions: int = 1
    kept: int = 0
    repack: bool = True
    exact: str | None = None
    backend: str | None = None
    threads: int | None = None
    gpu_layers: int | None = None
    gpu_memory: int | str | None = None
    memory: int | str | None = None
    kv_type: str | None = None
    device: str | None = None
    dtype: str | None = None
    keep_packed: bool | None = None
    lenders: tuple[str, ...] = ()
    draft_files: tuple[str, ...] = ()
    resident: bool = False
    in_order: bool = True
    share: float | None = None
    own_head: bool = False
    own_layers: bool = False
    approximate: str | None = None
    ahead: bool = False
    mixed: bool = False
    remember: bool = True

    def __post_init__(self) -> None:
        """
        Raises:
            UsageError: an option has a wrong type, or a number is out of range.
        """
        for name, low, high in _RANGES:
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, check_whole(name, value, low, high))
        for name in ("memory", "gpu_memory"):
            if not isinstance(value := getattr(self, name), str | None):
                object.__setattr__(self, name, check_whole(name, value, 1))
        for name in ("exact", "kv_type", "device", "dtype"):
            if (value := getattr(self, name)) is not None:
                check_text(name, value)
        if self.keep_packed is not None:
            check_flag("keep_packed", self.keep_packed)
        object.__setattr__(self, "lenders", check_texts("lenders", self.lenders))

    @property
    def draft_sessions(self) -> int:
        """Sessions of a draft for each of the target."""
        return 2 if self.mixed else 1

    def for_draft(self) -> Self:
        """Options of a draft, which stays in memory, and uses the GPU unless `gpu_layers` is 0."""
        gpu_layers = 0 if self.gpu_layers == 0 else None
        return replace(
            self, exact=self.exact if self.mixed else "off", widest=0, memory=None, gpu_memory=None,
            gpu_layers=gpu_layers, lenders=(), draft_files=(), resident=True, in_order=self.mixed, own_head=False,
            sessions=self.sessions * self.draft_sessions, kept=0, approximate=None,
        )  # fmt: skip


MOST_CONTEXT = 2**24
_RANGES = (
    ("context_length", 0, MOST_CONTEXT), ("budget", 1, 2**15), ("threads", 1, 1024), ("gpu_layers", -1, None),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class LoadPlan:
    """A model that an engine would load.

    Attributes:
        path: path of the model.
        options: as given.
        build: `Backend.build`.
        ways: `Backend.computing` of each way to compute, the best first; all but the last need a row class.
        fills_memory: there is no room for a probe model when it is loaded.
        weights: a `weights.plan.Plan` of what stays in memory; None: all weights do, or the engine makes none.
        notes: lines for the user on what stays in memory; None: only the loaded model has them.
    """

    path: str
    options: LoadOptions
    build: str = ""
    ways: Sequence[Computing] = ({},)
    fills_memory: bool = False
    weights: Any = None
    notes: Sequence[str] | None = None


@runtime_checkable
class TellsPlan(Protocol):
    """
    Attributes:
        plan: a `weights.plan.Plan` of what stays in memory; None: all weights do.
    """

    plan: Any


@runtime_checkable
class ReadsExperts(Protocol):
    """
    Attributes:
        mixture: has `memory`, a `weights.expert_memory.ExpertMemory`; None: not only chosen experts are read.
    """

    mixture: Any


class Engine(Protocol):
    """Loads models.

    Attributes:
        supported: fields of `LoadOptions` that it uses, of `ENGINE_OPTIONS`, "draft_files" and "own_layers".
    """

    supported: frozenset[str] = frozenset()

    def gpus(self, device: str | None) -> Sequence[Any]:
        """
        Returns:
            GPUs that it can use now, each a `machine.this_machine.Gpu`; only `device` of `LoadOptions` is measured.
        """
        return ()

    def plan(self, path: str, options: LoadOptions, machine: Machine) -> LoadPlan:
        """Plan for a machine, and ask nothing else of the system; nothing large is read.

        Raises:
            ModelError: the model cannot be loaded.
            UsageError: an option is out of range, or the memory too little.
        """
        return LoadPlan(path=path, options=options)

    def load(self, plan: Any, way: Computing | None = None, progress: Progress | None = None) -> Backend:
        """Load a model; errors as for `plan`.

        Args:
            plan: recent result of `plan`: other programs take memory, too.
            way: one of `plan.ways`; None: the last.
            progress: may be called with (bytes read, bytes in all) of the weights that stay in memory.
        """
        ...

    def memory_of(self, plan: Any) -> int:
        """
        Returns:
            Bytes of this machine's memory that a planned model takes with its drafts, besides those of the program; 0:
            that is not known before it is loaded.
        """
        return 0

    def load_vocab(self, path: str) -> Vocab:
        """Load only the tokenizer.

        Raises:
            ModelError: it cannot be read.
        """
        ...

    def probe_copy(self, path: str, computing: Computing) -> AbstractContextManager[str] | None:
        """The file of probe models, deleted at the end; None: this engine makes none. Else as for `probe_model`."""
        return None

    def probe_model(
        self, path: str, computing: Computing, *, watched: bool = False, copy: str | None = None
    ) -> AbstractContextManager[Backend, bool | None]:
        """
        Args:
            path: path of the whole model.
            computing: `Backend.computing` of the whole model.
            watched: `Logits.state` of a row also tells products that later operations round, which takes time.
            copy: of `probe_copy`, from which the model that is watched is loaded before the other; None: of its own.

        Returns:
            A small model that computes as the one at `path`, freed at the end.

        Raises:
            ModelError: on entering the `with`, if it cannot be made.
        """
        raise ModelError(f"{path}: this engine makes no probe model of it")


@runtime_checkable
class LoadsHeads(Protocol):
    """An engine that can draft with a head (`planners/drafting.py`), or with own layers: an optional feature."""

    def has_head(self, path: str) -> bool:
        """
        Returns:
            True if the file or folder is a head, or a model with a head of its own that this engine can load.

        Raises:
            ModelError: it cannot be read, or its head cannot be used, which the line explains.
        """
        ...

    def load_head(self, target: Backend, path: str, options: LoadOptions) -> Backend:
        """Load a head; from then on the target's logits are `GivesStates`.

        Args:
            target: loaded by this engine, with `own_head` if `path` is its own, and without open sessions.
            path: of the head, or of the target.
            options: as `LoadOptions.for_draft`; with `own_layers` those draft, and no logits give states.

        Returns:
            The draft with the target's vocabulary; `Capabilities.one_thread` is true, and `head` of a head. It is
            closed before its target.

        Raises:
            ModelError: it does not fit the target, or the engine lacks what it needs.
        """
        ...


def find_engine(name: str) -> Engine:
    """
    Returns:
        A built-in engine, or one from the entry-point group edgespec.backends.

    Raises:
        UsageError: there is no such engine.
        MissingPackage: it is not installed.
    """
    known = dict(BUILT_IN)
    if name not in known:  # looking through all installed packages takes a while
        known |= {point.name: point.value for point in entry_points(group="edgespec.backends")}
    if name not in known:
        raise no_such("backend", name, sorted(known))
    engine: Engine = import_module(known[name]).engine
    return engine


def load_at_once(engine: Engine, path: str, machine: Machine, **options: Any) -> Any:
    """Plan and load.

    Args:
        engine: of the model.
        path: of the model.
        machine: this one.
        options: fields of `LoadOptions`; `exact` is "off" by default.

    Raises:
        EdgespecError: as for `Engine.plan` and `Engine.load`.
    """
    return engine.load(engine.plan(path, LoadOptions(**{"exact": "off"} | options), machine))


def load_vocab(name: str, path: str) -> Vocab:
    """Load only the tokenizer; errors as for `Engine.load_vocab` and `find_engine`."""
    return find_engine(name).load_vocab(path)


def check_supported(names: Sequence[str], options: LoadOptions) -> None:
    """Refuse options that none of these engines supports.

    Raises:
        UsageError: names the option and the engines' own options.
    """
    supported = frozenset[str]().union(*(find_engine(name).supported for name in names))
    for option in ENGINE_OPTIONS:
        value = getattr(options, option)
        if not (value is None or value is False or value == ()) and option not in supported:
            engines = " and ".join(dict.fromkeys(names))
            others = ", ".join(name for name in ENGINE_OPTIONS if name in supported) or "none"
            raise UsageError(f"the backend {engines} has no option {option!r}; its options: {others}")


def choose_backend(folder: bool, machine: Machine, asked: str | None = None) -> str:
    """
    Returns:
        `asked`, else the built-in engine for a model file, or for a model folder.

    Raises:
        MissingPackage: no engine for folders is installed.
        UsageError: `asked` is no text.
    """
    return installed_backends(folder, machine)[0] if asked is None else check_text("backend", asked)


def installed_backends(folder: bool, machine: Machine) -> list[str]:
    """
    Returns:
        Built-in engines for model files or folders that are installed, the preferred one first.

    Raises:
        MissingPackage: no engine for folders is installed.
    """
    if not folder:
        return ["llamacpp"]
    engines = [("torch", "torch"), ("mlx", "mlx_lm")]
    if (machine.platform, machine.architecture) == ("darwin", "arm64"):
        engines.reverse()
    installed = [name for name, package in engines if package in machine.packages]
    if not installed:
        name, package = engines[0]
        raise MissingPackage(package.replace("_", "-"), name, "running a model folder")
    return installed
