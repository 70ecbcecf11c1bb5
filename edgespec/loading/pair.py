"""Loading a target and its draft together, each with the engine, the memory and the options that suit it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from edgespec.errors import UsageError
from edgespec.loading.exact import apply_row_class, check_choice, probe_before_load
from edgespec.loop.backend import Backend
from edgespec.loop.engines import choose_backend, load_backend, load_options
from edgespec.loop.same_vocab import check_same_vocab
from edgespec.machine.measurements import identity, machine, recall
from edgespec.machine.measurements import remember as keep
from edgespec.models.registry import Entry, find_model, is_folder, local_path
from edgespec.planners.auto import AutoState

DEFAULT_BUDGET = 64
WIDE = 16  # guesses, from which on kernels for many tokens are the faster ones: see llamacpp's `load`
DEFAULT_CONTEXT = 4096
FOR_TARGET = ("memory", "gpu_layers", "gpu_memory", "lenders")  # the draft is to fit beside it
FOR_BOTH = ("gpu_memory",)  # … where an engine plans for both: the draft has what the target leaves of it
RESIDENT = {"resident": True, "in_order": False}  # how a draft is loaded


def choose_budget(budget: int | None, entry: Entry) -> int:
    """The budget asked for, else the model's, else the program's.

    Raises:
        UsageError: it is below 1.
    """
    budget = budget if budget is not None else entry.defaults.budget or DEFAULT_BUDGET
    if budget < 1:
        raise UsageError(f"budget is {budget}, but must be at least 1")
    return budget


def choose_context(context_length: int | None, entry: Entry) -> int:
    """The context asked for, else the model's, else the program's."""
    return context_length if context_length is not None else entry.defaults.ctx or DEFAULT_CONTEXT


def open_backends(
    entry: Entry,
    draft: str | None,
    models_file: str | None,
    *,
    context_length: int | None,
    budget: int,
    wide: bool = False,
    sessions: int = 1,
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
        sessions: how many texts may be open at once, in each.
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
        "context_length": choose_context(context_length, entry),
        "budget": budget,
        "wide": wide,
        "sessions": sessions,
    }
    if options.get("gpu_layers") == 0:
        common["gpu_layers"] = 0  # the GPU is not to be used at all; any other number is the target's
    for_target: dict[str, Any] = {name: options.get(name) for name in FOR_TARGET} | {"exact": exact}
    for_target["lenders"] = for_target["lenders"] or ()
    for_target |= {"progress": progress} if progress else {}
    if exact != "off":
        for_target["agrees"] = probe_before_load(names[0], paths[0], exact, keep=remember, say=say)
    # An engine that can plan for both is told; any other finds what a draft loaded before has left.
    together = len(set(names)) == 1 and "beside" in load_options(names[0])
    backends: list[Backend] = []
    try:
        if draft and not together:
            backends.append(_load_with(names[1], paths[1], common | RESIDENT))
            left = getattr(backends[0], "left_of_gpu", None)
            if left and names[0] != names[1] and options.get("gpu_memory"):  # an engine knows its own draft's part
                for_target["gpu_memory"] = left(options["gpu_memory"])
        beside = {"beside": paths[1:]} if together else {}
        backends.insert(0, _load_with(names[0], paths[0], common | for_target | beside))
        if draft and together:
            left = {name: options.get(name) for name in FOR_BOTH}
            backends.append(_load_with(names[1], paths[1], common | left | RESIDENT))
        if draft:
            check_same_vocab(backends[0].vocab, backends[1].vocab)
            if missing := crowding(backends[0]):
                backends[0].notes = [
                    *backends[0].notes,
                    f"with the draft {missing / 1e9:.2f} GB are read in every pass, without it nothing: "
                    "edgespec pair TARGET DRAFT --memory SIZE tells what is quicker",
                ]
        apply_row_class(backends[0], paths[0], exact, keep=remember, say=say)
    except BaseException:
        close_all(backends)
        raise
    return backends


def crowding(target: Backend) -> int:
    """Bytes of the target that are read in every pass, if without its draft none would be; else 0."""
    plan = getattr(target, "plan", None)
    return plan.streamed_bytes if plan is not None and plan.fits_without_draft else 0


def open_draft(
    draft: str,
    models_file: str | None,
    *,
    backend: str | None = None,
    context_length: int | None = None,
    **options: Any,
) -> Backend:
    """Load a draft alone: its target is somewhere else. Arguments and errors as for `open_backends`."""
    source = find_model(draft, models_file).target
    given = {name: value for name, value in options.items() if value is not None} | RESIDENT
    given["context_length"] = context_length if context_length is not None else DEFAULT_CONTEXT
    return _load_with(backend or choose_backend(is_folder(source)), local_path(source), given)


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


def recall_auto_state(
    pace: AutoState, sources: Sequence[str], target: Backend, options: Mapping[str, int | str | None]
) -> Callable[[], None]:
    """Fill in what earlier runs have learned of the same models, loaded alike; returns what keeps it for later ones."""
    about = {
        "kind": "pace", "machine": machine(), "engine": target.name, "streams": target.capabilities.streams,
        "target": identity(local_path(sources[0], fetch=False)),
        "draft": identity(local_path(sources[1], fetch=False)) if sources[1:] else "",
        "exact": str(target.capabilities.exact or ""),
        "experts": str(target.capabilities.experts),
        **options,
    }  # fmt: skip
    try:
        if known := recall(about):
            pace.recall(known)
    except (KeyError, TypeError, ValueError):  # written by another version: learned anew
        pass

    def keep_it() -> None:
        if pace.target.at(0):
            keep(about, pace.as_dict())

    return keep_it
