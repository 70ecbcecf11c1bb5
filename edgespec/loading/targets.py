"""Load several copies of a target, in processes of this machine or of a cluster, and one draft for all."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import BrokenExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, cast

from edgespec.errors import ModelError, UsageError, check_whole
from edgespec.loading.pair import open_backends, open_draft
from edgespec.loop.backend import Backend, Capabilities, Placed, Vocab
from edgespec.loop.engines import LoadOptions, choose_backend, load_vocab
from edgespec.loop.same_vocab import check_same_vocab
from edgespec.machine.files import weight_files
from edgespec.machine.memory import left_of
from edgespec.machine.this_machine import this_machine
from edgespec.models.registry import Entry, find_model, is_folder, local_path
from edgespec.scheduler.targets.coordinator import Targets
from edgespec.scheduler.targets.places import Cluster, Place, processes
from edgespec.scheduler.targets.proposer import DraftProposer
from edgespec.scheduler.targets.verifier import Described, describe
from edgespec.weights.plan import SAFETY

MOST_TARGETS = 64
PLANNERS = ("auto", "chain")


@dataclass(frozen=True)
class ModelSpec:
    model: str
    models_file: str | None
    options: LoadOptions
    remember: bool

    def open(self) -> Backend:
        entry = find_model(self.model, self.models_file)
        return open_backends(entry, None, self.models_file, self.options, remember=self.remember)[0]


@dataclass(frozen=True, slots=True)
class TargetStandIn:
    """What is asked of a target here, answered for the copies in other processes."""

    vocab: Vocab
    name: str
    capabilities: Capabilities
    placed: Placed
    notes: Sequence[str]

    def close(self) -> None: ...


def check_targets(
    count: int | None, cluster: str | None, draft: str | None, planner: str, parallel: int, options: Mapping[str, Any]
) -> None:
    """Raises UsageError for what does not go with several targets."""
    if count is not None and cluster is not None:
        raise UsageError("give --targets or --cluster, not both: a cluster has as many targets as workers")
    if count is not None:
        check_whole("targets", count, 1, MOST_TARGETS)
    if not draft:
        raise UsageError(
            "several targets need a draft model, which proposes for all of them: give one with --draft (draft=…)"
        )
    if planner not in PLANNERS:
        raise UsageError(f"several targets go with the planners {' and '.join(PLANNERS)}, not {planner}")
    if parallel != 1:
        raise UsageError("several targets write one text at a time: parallel must be 1")
    for name, value in options.items():
        if value is not None and name not in ("tau", "coupling"):
            raise UsageError(f"several targets have no option {name!r}; they take tau and coupling")


def open_targets(
    model: str,
    entry: Entry,
    draft: str,
    models_file: str | None,
    options: LoadOptions,
    *,
    count: int | None,
    cluster: str | None,
    remember: bool,
    say: Callable[[str], None],
    **drafting: Any,
) -> tuple[Backend, Targets]:
    """Load copies in `count` processes of this machine, or in all workers of a cluster, and the draft in this program.

    Args:
        model: what the user calls the target.
        entry: of the target.
        draft: a name, path or source.
        models_file: as for `edgespec.load`.
        options: of the target and, where they suit it, of the draft.
        count: of processes.
        cluster: the address of a Dask scheduler, instead.
        remember: as for `edgespec.load`.
        say: as for `edgespec.load`.
        drafting: options of `DraftProposer`.

    Returns:
        A stand-in for the target, for `Model`, and the targets.

    Raises:
        EdgespecError: anything that is wrong, as one line.
    """
    if count:
        files = weight_files(local_path(find_model(draft, models_file).target, models_file, say=say))
        taken = sum(file.stat().st_size for file in files if file.exists())
        options = share_of(count, options, folder=is_folder(entry.target), taken=taken)
    spec = ModelSpec(model, models_file, options, remember)
    with ExitStack() as undo:
        backend = open_draft(draft, models_file, options)
        undo.callback(backend.close)
        name = choose_backend(is_folder(entry.target), this_machine(), options.backend)
        vocab = load_vocab(name, local_path(entry.target, models_file, weights=False))
        check_same_vocab(vocab, backend.vocab)
        places = processes(count) if count else []
        if cluster:
            joined = Cluster(cluster)
            undo.callback(joined.close)
            places = joined.places
        for place in places:
            undo.callback(place.close)
        say(f"loading {len(places)} copies of {model}")
        described = _describe(spec, places)
        targets = Targets(
            vocab,
            described[0],
            spec,
            places,
            DraftProposer(backend, vocab.size, **drafting),
            most_draft_tokens=options.budget,
        )
        targets.at_close = undo.pop_all().close
    one, notes = described[0], list(described[0].notes)
    if len({_computing(one) for one in described}) > 1:
        notes.append(
            "the copies do not compute alike: where two tokens score within rounding, the output depends on the copy"
        )
    placed = one.placed or Placed(one.capabilities.layers)
    return cast(Backend, TargetStandIn(vocab, one.name, one.capabilities, placed, notes)), targets


def share_of(count: int, options: LoadOptions, *, folder: bool, taken: int) -> LoadOptions:
    """
    Args:
        count: of copies.
        options: of all together.
        folder: the target is one, whose engine may know no memory.
        taken: bytes of the draft.

    Returns:
        The options of one copy.

    Raises:
        UsageError: the draft leaves no memory.
    """
    machine = this_machine()
    options = replace(options, threads=options.threads or max(1, machine.cores // count))
    if folder and options.memory is None:
        return options
    left = machine.free - machine.used  # what this program holds is no child's
    memory = int(left * (1 - SAFETY)) if options.memory is None else options.memory
    return replace(options, memory=left_of("memory", memory, taken) // count)


def _describe(spec: ModelSpec, places: Sequence[Place]) -> list[Described]:
    try:
        first = places[0].executor.submit(describe, spec).result()
        return [first, *(one.result() for one in [place.executor.submit(describe, spec) for place in places[1:]])]
    except BrokenExecutor as error:
        raise ModelError("a target's process ended while it loaded the model: is there memory for all?") from error


def _computing(one: Described) -> tuple[Any, ...]:
    return one.name, one.build, one.capabilities.exact, dict(one.computing).get("kv_type")
