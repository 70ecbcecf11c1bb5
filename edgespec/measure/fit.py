"""The named models on a machine: their sizes, what is still to be fetched, and how each would run by `predict`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from edgespec.errors import EdgespecError, ModelError, UsageError
from edgespec.machine.described import with_measured
from edgespec.machine.files import weight_files
from edgespec.machine.this_machine import Machine
from edgespec.measure.predictor import Elsewhere, machine_here, predict
from edgespec.models.registry import Entry, local_path
from edgespec.models.shapes import table
from edgespec.weights.plan import SAFETY

# Where only a size is known: most bytes besides weights, and the part of these that does not grow with the model.
RUNTIME, PROGRAM = 1_500_000_000, 300_000_000


@dataclass(frozen=True, slots=True)
class Fit:
    """One model on a machine; sizes in bytes, 0 where a size is not known.

    Attributes:
        entry: from models.yaml.
        target, draft: their files.
        missing: still to be fetched.
        streamed: read by every pass; of a model whose plan is not known, what memory cannot hold.
        verdict: the result, for the user.
        cannot_run: the memory or the disk is too small.
        tokens_per_second: of plain decoding; 0 if it cannot run or is not known.
    """

    entry: Entry
    target: int
    draft: int
    missing: int
    streamed: int
    verdict: str
    cannot_run: bool = False
    tokens_per_second: float = 0.0

    @property
    def order(self) -> tuple[int, int]:
        if not self.target:
            return 2, 0
        if self.cannot_run:
            return 3, self.target
        return (1, self.streamed) if self.streamed else (0, -self.target)


def fit(entry: Entry, machine: Machine, disk: int | None = None) -> Fit:
    """
    Args:
        entry: from models.yaml.
        machine: with its speeds.
        disk: bytes that are free where models are kept; None: not known.
    """
    (target, have), (draft, have_draft) = (_size(entry, source) for source in (entry.target, entry.draft))
    speed = 0.0
    try:
        found = _predicted(entry, machine)
        first, target = found.found[0], target or found.size
        streamed, cannot_run = int(first.streamed + first.chosen), bool(first.cannot_run)
        verdict = f"reads {streamed / 1e9:.1f} GB per pass" if streamed else "stays in memory"
        verdict += f"; speed not known: {first.lacks}" if first.unknown else ""
        speed = first.tokens_per_second.get("none", 0.0)
    except (EdgespecError, OSError) as error:  # the other models are listed all the same
        room, needed = int(machine.free * (1 - SAFETY)), draft + min(RUNTIME, PROGRAM + target // 4)
        streamed, cannot_run = max(0, min(target, target + needed - room)), bool(target) and needed > room
        why = "its shape is not known" if isinstance(error, ModelError) and not (have and have_draft) else str(error)
        fits = f"{streamed / 1e9:.1f} GB larger than memory" if streamed else "fits into memory"
        verdict = f"{fits if target else 'size not known'}; speed not known: {why}"
    missing = (0 if have else target) + (0 if have_draft else draft)
    if cannot_run:
        verdict = "too little memory"
    if disk is not None and missing > disk:
        verdict, cannot_run, speed = f"too large for the disk: {disk / 1e9:.0f} GB are free", True, 0.0
    verdict += "; cannot be fetched" if entry.target.startswith("shape:") else ""
    return Fit(entry, target, draft, missing, streamed, verdict, cannot_run, speed)


def _predicted(entry: Entry, machine: Machine) -> Elsewhere:
    """
    Raises:
        EdgespecError: it cannot be predicted; or only its shape is known: such models are many, and llama.cpp takes
            seconds for the buffers of some.
    """
    if entry.target.startswith("shape:"):
        raise UsageError(f"edgespec doctor {entry.name} --machine NAME computes it")
    return predict(entry, machine, "")


def measured_here(entries: Sequence[Entry], folder: Path) -> Machine:
    """This machine; speeds that are neither kept nor known of its chip are measured, which takes a second.

    Args:
        entries: the largest file of these that is here lies on the disk to measure.
        folder: where models are kept, if none is here.
    """
    sources = {source for entry in entries for source in (entry.target, entry.draft) if source}
    files = [file for source in sources for file in _files(source)]
    path = str(max(files, key=lambda file: file.stat().st_size, default=folder))
    return with_measured(machine_here(path), path)


def with_memory(machine: Machine, memory: int, free: int) -> Machine:
    """A copy with another memory, of which a GPU that shares it has the same part."""
    part = memory / machine.memory
    gpus = [
        replace(gpu, free=int(gpu.free * part), limit=int(gpu.limit * part)) if gpu.shared else gpu
        for gpu in machine.gpus
    ]
    return replace(machine, memory=memory, free=free, used=0, gpus=tuple(gpus))


def _size(entry: Entry, source: str | None) -> tuple[int, bool]:
    if source is None:
        return 0, True
    if files := _files(source):
        return sum(file.stat().st_size for file in files), True
    facts = entry.files.get(source)
    if facts and source.startswith("shape:"):
        return sum(one.size for one in table(facts.shape)), False
    return (facts.bytes if facts else 0), False


def _files(source: str) -> list[Path]:
    """Files of a source that is here."""
    try:
        path = Path(local_path(source, fetch=False))
        files = path.glob("*") if path.is_dir() else weight_files(path)
        return [file for file in files if file.is_file()]
    except (EdgespecError, OSError):
        return []
