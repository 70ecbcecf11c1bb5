"""The arguments of `edgespec.load`, checked once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from warnings import warn

from edgespec.errors import (
    UsageError,
    check_call,
    check_flag,
    check_path,
    check_text,
    check_texts,
    check_whole,
    no_such,
)
from edgespec.loading.approximate import Approximate, check_approximate, find_approximate, with_old_names
from edgespec.loading.keywords import LoadKeywords, Path, Progress
from edgespec.loading.pair import choose_budget, choose_context, choose_draft, choose_planner, choose_widest
from edgespec.loading.targets import check_targets
from edgespec.loop.backend import Backend
from edgespec.loop.engines import LoadOptions
from edgespec.loop.planner import Planner
from edgespec.machine.files import read_text
from edgespec.models.registry import OWN_LAYERS, Entry, find_draft, find_model
from edgespec.planners.auto import AutoState
from edgespec.planners.choice import (
    CHECKS,
    check_draft_options,
    check_planner,
    find_method,
    make_planner,
    with_draft,
)

MOST_PARALLEL = 128
KEPT = 8  # idle sessions besides, for agents that take turns

OTHER_NAMES = {  # in other programs -> here
    "ctx": "context_length", "n_ctx": "context_length", "num_ctx": "context_length", "max_model_len": "context_length",
    "model": "target", "model_path": "target", "n": "the method branch", "response_format": "grammar",
    "stream": "the method stream_chat",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """
    Attributes:
        entry: the target.
        draft: the draft to load; None: none.
        planner: its name.
        method: an approximate one.
        fixed: a budget was given, so no tree depends on pass times.
        template: text of a chat template, in place of the target's.
        options: for the engines.
        planner_options: as for `make_planner`.
        notes: for the user.
        kept_as: the options with which measurements are kept; None: `options`.
        say: as for `edgespec.load`, and so are the others.
    """

    entry: Entry
    draft: str | None
    planner: str
    method: Approximate | None
    fixed: bool
    template: str | None
    options: LoadOptions
    planner_options: dict[str, Any]
    notes: list[str]
    say: Callable[[str], None]
    datastore: str | None
    models_file: str | None
    parallel: int
    ahead: bool | None
    targets: int | None
    cluster: str | None
    remember: bool
    progress: Progress | None
    kept_as: LoadOptions | None = None

    def within(self, memory: int) -> "Asked":
        """The same in a part of the memory, with the measurements of the whole."""
        return replace(self, options=replace(self.options, memory=memory), kept_as=self.options)

    @property
    def leaves_out(self) -> bool:
        """A draft may be left out."""
        return self.planner == "auto" and not self.fixed and self.method is None

    @property
    def is_remote(self) -> bool:
        """Several targets verify, in other processes."""
        return self.targets is not None or self.cluster is not None

    def sources(self, backends: Sequence[Backend]) -> list[str]:
        """The files or folders of the loaded models."""
        loaded = self.draft if backends[1:] else None
        return [self.entry.target, *([find_draft(loaded, self.entry, self.models_file).target] if loaded else [])]

    @property
    def about(self) -> LoadOptions:
        """The options with which measurements of the pair are kept."""
        return replace(self.kept_as or self.options, own_layers=self.draft == OWN_LAYERS)

    def planners(self, backends: Sequence[Backend], pace: AutoState | None) -> list[Planner]:
        """One for each request of a batch."""
        ahead = False if self.method else self.ahead
        made = [
            make_planner(
                self.planner, backends, self.datastore, pace,
                sequences=self.parallel, ahead=ahead, **self.planner_options,
            )
            for _ in range(self.parallel)
        ]  # fmt: skip
        return [self.method.planner(one, backends[1]) for one in made] if self.method else made


def asked_for(
    target: Path | Entry,
    *,
    draft: Path | None = None,
    planner: str | None = None,
    budget: int | None = None,
    datastore: Path | None = None,
    context_length: int | None = None,
    chat_template: Path | None = None,
    backend: str | None = None,
    threads: int | None = None,
    gpu_layers: int | None = None,
    memory: int | str | None = None,
    kv_type: str | None = None,
    lenders: str | Sequence[str] | None = None,
    device: str | None = None,
    dtype: str | None = None,
    gpu_memory: int | str | None = None,
    keep_packed: bool | None = None,
    exact: str | None = None,
    parallel: int = 1,
    ahead: bool | None = None,
    targets: int | None = None,
    cluster: str | None = None,
    approximate: str | None = None,
    models_file: Path | None = None,
    remember: bool = True,
    progress: Progress | None = None,
    say: Callable[[str], None] | None = None,
    **planner_options: Any,
) -> Asked:
    """Check the arguments of `edgespec.load`; errors as there."""
    approximate, planner_options = _without_old_names(approximate, planner_options)
    for option in planner_options.keys() - CHECKS:
        raise unknown(option, "target", *LoadKeywords.__annotations__)
    planner_options = {option: value for option, value in planner_options.items() if value is not None}
    files = {"draft": draft, "datastore": datastore, "models_file": models_file, "chat_template": chat_template}
    draft, datastore, models_file, chat_template = (
        check_path(name, value) if value is not None else None for name, value in files.items()
    )
    template = _read_template(chat_template) if chat_template is not None else None
    parallel, remember = check_whole("parallel", parallel, 1, MOST_PARALLEL), check_flag("remember", remember)
    for name, text in (("planner", planner), ("cluster", cluster)):
        check_text(name, text if text is not None else "")
    check_flag("ahead", ahead if ahead is not None else False)
    for name, call in (("progress", progress), ("say", say)):
        check_call(name, call)
    say = say or (lambda text: None)
    entry = target if isinstance(target, Entry) else find_model(check_path("target", target), models_file)
    planner, notes = choose_planner(planner, entry), list[str]()
    method = find_approximate(approximate)
    if method and method.mixed and parallel > MOST_PARALLEL // 2:
        raise UsageError(
            f"parallel is {parallel}; {MOST_PARALLEL // 2} are the most with {method.name}: it needs two sessions each"
        )
    if with_draft([planner]) or method:
        heads = targets is None and cluster is None and method is None
        draft = choose_draft(draft, entry, backend, models_file, heads=heads, say=say, notes=notes)
    check_planner(planner, draft is not None, datastore, planner_options)
    check_approximate(method, draft, [planner], exact, ahead)
    options = LoadOptions(
        context_length=choose_context(context_length, entry), budget=choose_budget(budget, entry),
        widest=choose_widest(budget, entry), sessions=parallel,
        kept=KEPT if parallel > 1 else 0, exact=exact, backend=backend, threads=threads,
        gpu_layers=gpu_layers, memory=memory, kv_type=kv_type, lenders=check_texts("lenders", lenders), device=device,
        dtype=dtype, gpu_memory=gpu_memory, keep_packed=keep_packed,
        ahead=bool(ahead) or find_method(planner).ahead, remember=remember,
        **(method.options if method else {}),
    )  # fmt: skip
    if targets is not None or cluster is not None:
        refused = {
            "datastore": datastore,
            "lenders": lenders or None,
            "ahead": ahead,
            "approximate": approximate if method else None,
        }
        check_targets(targets, cluster, draft, planner, parallel, planner_options | refused)
    else:
        draft = draft if with_draft([planner]) or method else None
        check_draft_options(draft is not None, ahead, planner_options)
    return Asked(
        entry=entry, draft=draft, planner=planner, method=method, fixed=budget is not None, template=template,
        options=options, planner_options=planner_options, notes=notes, say=say, datastore=datastore,
        models_file=models_file, parallel=parallel, ahead=ahead, targets=targets, cluster=cluster, remember=remember,
        progress=progress,
    )  # fmt: skip


def _without_old_names(approximate: str | None, options: dict[str, Any]) -> tuple[str | None, dict[str, Any]]:
    """Translate names of the version before, with a warning for the caller of `edgespec.load`."""
    options = options.copy()
    if options.pop("first_come", None) is not None:
        warn("first_come goes with the next version: requests are always served as they came", stacklevel=4)
    approximate, old = with_old_names(approximate, options)
    if old:
        warn(
            f"{old[0]}= goes with the next version: write approximate={approximate!r}", DeprecationWarning, stacklevel=4
        )
    return approximate, options


def _read_template(path: str) -> str:
    from edgespec.loop.templates import check_template  # Jinja takes a while to import

    try:
        return check_template(read_text(path, UsageError, once=True), path)
    except UsageError as error:
        raise UsageError(f"chat_template {error}") from error


def unknown(name: str, *known: str) -> UsageError:
    """The error for a keyword that a call does not have; `known`: all that some call has."""
    if name in OTHER_NAMES:
        return UsageError(f"there is no argument {name!r}; did you mean {OTHER_NAMES[name]}?")
    if name in known:  # of other methods
        return UsageError(f"this method has no argument {name!r}")
    return no_such("argument", name, dict.fromkeys(known))
