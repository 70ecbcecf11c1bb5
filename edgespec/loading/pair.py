"""Plans and loads a target and its draft; the target gets the memory that the draft leaves."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from edgespec.errors import ModelError, UsageError, check_whole, undone
from edgespec.loading.approximate import find_approximate, needs_a_model
from edgespec.loading.exact import apply_row_class, check_choice, choose_way
from edgespec.loop.backend import Backend
from edgespec.loop.engines import (
    ENGINE_OPTIONS,
    Engine,
    LoadOptions,
    LoadPlan,
    LoadsHeads,
    Progress,
    TellsPlan,
    check_supported,
    choose_backend,
    find_engine,
)
from edgespec.loop.same_vocab import check_same_vocab
from edgespec.machine import measurements
from edgespec.machine.measurements import checked, everything, identity, processor_name, recall
from edgespec.machine.memory import left_of
from edgespec.machine.this_machine import this_machine
from edgespec.models.heads import is_head, refuse_head_folder
from edgespec.models.registry import (
    OWN,
    OWN_HEAD,
    OWN_LAYERS,
    Entry,
    find_draft,
    find_model,
    is_folder,
    local_head,
    local_path,
)
from edgespec.planners.auto import AutoState, Pace

DEFAULT_BUDGET = 64
WIDEST = 1024  # draft tokens of one pass, where weights are streamed and no budget is given
DEFAULT_CONTEXT = 4096


def choose_planner(planner: str | None, entry: Entry) -> str:
    """The planner asked for, else the model's, else auto."""
    return planner if planner is not None else entry.defaults.planner or "auto"


def choose_budget(budget: int | None, entry: Entry) -> int:
    """The budget asked for, else the model's, else the program's.

    Raises:
        UsageError: it is below 1.
    """
    return check_whole("budget", budget if budget is not None else entry.defaults.budget or DEFAULT_BUDGET, 1)


def choose_widest(budget: int | None, entry: Entry) -> int:
    """`LoadOptions.widest`: 0 where a budget is given."""
    return 0 if budget is not None or entry.defaults.budget else WIDEST


def choose_context(context_length: int | None, entry: Entry) -> int:
    known = (context_length, entry.defaults.context_length, DEFAULT_CONTEXT)
    return next(length for length in known if length is not None)


@dataclass(frozen=True, slots=True)
class PairPlan:
    """A target, and perhaps its draft, that would be loaded.

    Attributes:
        names: of their engines.
        paths: of their files or folders.
        options: of the target; without a `backend` the two may have different engines.
        plan: of the target; None: it is planned for the memory that the loaded draft leaves.
    """

    names: Sequence[str]
    paths: Sequence[str]
    options: LoadOptions
    plan: LoadPlan | None = None

    @property
    def at_once(self) -> bool:
        """True: the target is planned before the draft is loaded."""
        engines = {name: find_engine(name) for name in self.names}
        memory_is_known = not self.paths[1:] or "draft_files" in engines[self.names[0]].supported
        return self.head or (len(engines) == 1 and memory_is_known)

    def planned(self) -> "PairPlan":
        engine = find_engine(self.names[0])
        return replace(self, plan=_plan(engine, self.paths[0], self.options)) if self.at_once else self

    @property
    def head(self) -> bool:
        """True: the draft is a head or layers of its target, after which it is loaded."""
        return self.options.own_head or self.options.own_layers or _has_head(self.names, self.paths)


def choose_draft(
    draft: str | None,
    entry: Entry,
    backend: str | None,
    models_file: str | None,
    *,
    heads: bool = True,
    say: Callable[[str], None],
    notes: list[str],
) -> str | None:
    """
    Args:
        draft: as for `edgespec.load`.
        entry: the target.
        backend: as for `edgespec.load`.
        models_file: as for `edgespec.load`.
        heads: a head of the target may draft, though none is named.
        say: as for `edgespec.load`.
        notes: gets a line for the user on a head that cannot be used, unless the model itself cannot be read.

    Returns:
        The draft asked for, else the model's, else the name of a head that its engine can use: of a file that was
        pulled with it, or `OWN_HEAD`; None: there is none.
    """
    draft = draft or entry.draft
    if draft or not heads:
        return draft
    engine = find_engine(choose_backend(is_folder(entry.target), this_machine(), backend))
    if not isinstance(engine, LoadsHeads):
        return None
    path = local_path(entry.target, models_file, say=say)
    try:
        if is_head(path):
            return None
    except ModelError:  # the engine says what is wrong with the file
        return None
    try:
        head = local_head(entry.target)
        return head if head and engine.has_head(head) else OWN_HEAD if engine.has_head(path) else None
    except ModelError as error:
        notes.append(f"the head of the model is not used: {error}")
        return None


def with_head(names: Sequence[str], paths: Sequence[str], draft: str, options: LoadOptions) -> LoadOptions:
    """Options of a target whose draft is a head, or one of `OWN` by name; other arguments as in `PairPlan`.

    Raises:
        UsageError: the engine cannot draft with it, or the target's own file has none.
        ModelError: as for `LoadsHeads.has_head`.
    """
    engine, own, called = find_engine(names[0]), draft == OWN_HEAD, draft if draft in OWN else paths[1]
    if method := find_approximate(options.approximate):
        raise needs_a_model(method, called)
    if options.ahead:
        raise UsageError(
            f"{called}: drafts from the target's own states, so it cannot go on while the target runs (ahead=True)"
        )
    if draft == OWN_LAYERS:
        if "own_layers" not in engine.supported:
            raise UsageError(
                f"the backend {names[0]} cannot draft with layers of the target (--draft {OWN_LAYERS}); "
                "edgespec convert --drop-layers makes a draft of them"
            )
        return replace(options, own_layers=True)
    if len(set(names)) > 1 or not isinstance(engine, LoadsHeads):
        raise UsageError(f"the backend {names[0]} cannot draft with the head {paths[1]}; use a draft model")
    if not engine.has_head(paths[1]):
        raise UsageError(f"{paths[1]}: has no head of its own; name a draft model instead of --draft {OWN_HEAD}")
    return replace(options, own_head=own, draft_files=() if own else tuple(paths[1:]))


def plan_pair(
    entry: Entry,
    draft: str | None,
    models_file: str | None,
    options: LoadOptions,
    *,
    now: bool = True,
    say: Callable[[str], None] = lambda text: None,
) -> PairPlan:
    """Arguments and errors as for `open_backends`; without `now` it is left to `PairPlan.planned`."""
    check_choice(options.exact)
    sources = [entry.target, *([find_draft(draft, entry, models_file).target] if draft else [])]
    here = this_machine()
    names = [choose_backend(is_folder(source), here, options.backend) for source in sources]
    check_supported(names, options)
    paths = [local_path(source, models_file, say=say) for source in sources]
    refuse_head_folder(paths[0])
    if draft and (draft in OWN or _has_head(names, paths)):
        pair = PairPlan(names, paths, with_head(names, paths, draft, options))
    else:
        if method := find_approximate(options.approximate):
            method.check_engines(names)
        pair = PairPlan(names, paths, options)
        if pair.at_once:
            pair = replace(pair, options=replace(options, draft_files=tuple(paths[1:])))
    return pair.planned() if now else pair


def _has_head(names: Sequence[str], paths: Sequence[str]) -> bool:
    """True if the draft's file is a head; engines of other packages may have other files, and no heads."""
    return bool(paths[1:]) and isinstance(find_engine(names[1]), LoadsHeads) and is_head(paths[1])


def _plan(engine: Engine, path: str, options: LoadOptions) -> LoadPlan:
    return engine.plan(path, options, this_machine(path, engine.gpus(options.device)))


def load_pair(
    pair: PairPlan,
    *,
    remember: bool = True,
    progress: Progress | None = None,
    say: Callable[[str], None],
) -> list[Backend]:
    """Result, arguments and errors as for `open_backends`; `progress` as for `edgespec.load`."""
    options, plan, drafts = pair.options, pair.plan, pair.paths[1:]
    engines, for_draft = [find_engine(name) for name in pair.names], options.for_draft()
    backends: list[Backend] = []
    with undone(partial(close_all, backends)):
        if plan is None:
            backends += [load_draft(engines[1], path, for_draft) for path in drafts]
            if pair.names[0] != pair.names[-1] and options.gpu_memory:
                gpus = this_machine(gpus=engines[1].gpus(options.device)).gpus
                taken = sum(gpu.used for gpu in gpus if not gpu.shared)
                options = replace(options, gpu_memory=left_of("gpu_memory", options.gpu_memory, taken))
            plan = _plan(engines[0], pair.paths[0], options)
        way = choose_way(pair.names[0], plan, remember=remember, say=say)
        backends.insert(0, engines[0].load(plan, way, progress))
        if pair.head:
            assert isinstance(engines[0], LoadsHeads)
            backends.append(engines[0].load_head(backends[0], drafts[0], for_draft))
        if drafts and not backends[1:]:
            for_draft = replace(for_draft, gpu_memory=options.gpu_memory)
            backends.append(load_draft(engines[1], drafts[0], for_draft))
        if drafts:
            check_same_vocab(backends[0].vocab, backends[1].vocab, writes=options.mixed)
            if missing := bytes_forced_out(backends[0]):
                backends[0].notes = [
                    *backends[0].notes,
                    f"with the draft {missing / 1e9:.2f} GB are read in every pass, without it nothing: "
                    "edgespec pair TARGET DRAFT --memory SIZE shows which is faster",
                ]
        if method := find_approximate(options.approximate):
            method.attach(backends[0], backends[1], remember=remember, say=say)
        for backend, path in zip(backends, pair.paths if options.mixed else pair.paths[:1], strict=False):
            apply_row_class(backend, path, options.exact, remember=remember, say=say)
    return backends


def open_backends(
    entry: Entry,
    draft: str | None,
    models_file: str | None,
    options: LoadOptions,
    *,
    remember: bool = True,
    say: Callable[[str], None] = lambda text: None,
) -> list[Backend]:
    """Load [target] or [target, draft] with one vocabulary; the target gets the memory that the draft leaves.

    Args:
        entry: the target.
        draft: a name, path or source.
        models_file: as for `edgespec.load`.
        options: of the target; without a `backend` the two may have different engines.
        remember: as for `edgespec.load`.
        say: as for `edgespec.load`.

    Raises:
        EdgespecError: anything that is wrong, as one line.
    """
    pair = plan_pair(entry, draft, models_file, options, say=say)
    return load_pair(pair, remember=remember, say=say)


def load_draft(engine: Engine, path: str, options: LoadOptions) -> Backend:
    return engine.load(_plan(engine, path, options))


def bytes_forced_out(target: Backend) -> int:
    plan = target.plan if isinstance(target, TellsPlan) else None
    return plan.streamed_bytes if plan is not None and plan.fits_without_draft else 0


def open_draft(draft: str, models_file: str | None, options: LoadOptions) -> Backend:
    """Load the draft of a target that other processes load. Arguments and errors: see `open_backends`."""
    source = find_model(draft, models_file).target
    here = replace(options.for_draft(), gpu_layers=options.gpu_layers, gpu_memory=options.gpu_memory)
    name = choose_backend(is_folder(source), this_machine(), options.backend)
    return load_draft(find_engine(name), local_path(source, models_file), here)


def close_all(backends: Sequence[Backend]) -> None:
    for backend in reversed(backends):  # a head before its target
        backend.close()


def _about_pace(target: str, draft: str | None) -> dict[str, str]:
    """What all keys of remembered pass times of these models have; None: of a target with any draft or none."""
    about = {"kind": "pace", "machine": processor_name(), "target": identity(target)}
    return about if draft is None else about | {"draft": identity(draft) if draft else ""}


def remembered_paces(target: str, draft: str | None = None) -> list[dict[str, Any]]:
    """What `recall_auto_state` has kept of these models, the latest first, as of `measurements.everything`.

    Args:
        target: its path.
        draft: its path; None: with any draft, and without one.
    """
    about = _about_pace(target, draft)
    known = [one for one in everything() if about.items() <= one["about"].items()]
    return [one | {"value": pace.model_dump()} for one in known if (pace := checked(one["value"], Pace))]


def recall_auto_state(
    pace: AutoState, sources: Sequence[str], target: Backend, options: LoadOptions, learn: Callable[[AutoState], None]
) -> Callable[[], None]:
    """Begin with what earlier runs measured.

    Args:
        pace: begins with it.
        sources: of the models.
        target: the loaded target.
        options: with which it was loaded.
        learn: called with `pace` when it is kept.

    Returns:
        A function that keeps `pace` for the next run.
    """
    given = {name: getattr(options, name) for name in ("backend", *ENGINE_OPTIONS)}
    path, *drafts = (local_path(source, fetch=False) for source in sources)
    about: dict[str, Any] = {
        **_about_pace(path, drafts[0] if drafts else ""),
        "engine": target.name, "streams": target.capabilities.streams,
        "exact": str(target.capabilities.exact or ""),
        "experts": str(target.capabilities.experts),
        **given | {"lenders": ",".join(options.lenders)} | ({"own_layers": True} if options.own_layers else {}),
    }  # fmt: skip
    known = recall(about, Pace)
    passes = known.passes if known else 0
    if known:
        pace.recall(known)

    def keep_it() -> None:
        if pace.target.measured:  # else the date of what is known would become that of this run
            measurements.remember(about, pace.as_dict() | {"passes": passes + pace.target.measured})
            learn(pace)

    return keep_it
