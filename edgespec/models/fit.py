"""The named models on this machine: sizes, memory, disk, and bytes that every pass would read."""

from dataclasses import dataclass
from pathlib import Path

from edgespec.errors import EdgespecError
from edgespec.machine.files import weight_files
from edgespec.models.registry import Entry, local_path

RUNTIME = 1_500_000_000  # most bytes of the program, its buffers, and keys and values of 4,096 tokens: an assumption
PROGRAM = 300_000_000  # the part of these that does not grow with the model
KEPT = 4 << 30  # bytes of a machine's memory for its system and other programs, at most half of it: an assumption
MEMORY_SPEED, DISK_SPEED = 20e9, 2e9  # bytes per second of a usual laptop's processor and disk: assumptions
LEAST = 1 / 16  # share of a target that must be in memory: some layers and the output


@dataclass(frozen=True, slots=True)
class Fit:
    """One model on this machine; sizes in bytes, 0 where a size is not known.

    Attributes:
        entry: from models.yaml.
        target, draft: their weights.
        missing: still to be fetched.
        streamed: read by every pass; an upper bound for mixtures of experts.
        verdict: the result, for the user.
        cannot_run: the memory or the disk is too small.
        tokens_per_second: of plain decoding, a lower bound for mixtures of experts; 0 if it cannot run.
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


def fit(entry: Entry, memory: int, disk: int, disk_speed: float = DISK_SPEED) -> Fit:
    """Estimate how a model runs here.

    Args:
        entry: from models.yaml.
        memory: bytes that may be used.
        disk: bytes that are free where models are kept.
        disk_speed: bytes per second.
    """
    (target, have), (draft, have_draft) = (_size(entry, source) for source in (entry.target, entry.draft))
    missing = (0 if have else target) + (0 if have_draft else draft)
    runtime = min(RUNTIME, PROGRAM + target // 4)
    over = target + draft + runtime - memory
    streamed = 0 if over <= 0 else min(over, target)
    cannot_run = bool(target) and (missing > disk or draft + runtime + target * LEAST > memory)
    if not target:
        verdict = "cannot be fetched" if entry.target.startswith("shape:") else "size not known"
    elif missing > disk:
        verdict = f"too large for the disk: {disk / 1e9:.0f} GB are free"
    elif cannot_run:
        verdict = "too little memory"
    elif streamed:
        verdict = f"streams about {streamed / 1e9:.1f} GB per pass"
    else:
        verdict = "stays in memory"
    seconds = max(streamed / disk_speed, target / MEMORY_SPEED)  # layers are read ahead of the computation
    speed = 0.0 if cannot_run or not target else 1 / seconds
    return Fit(entry, target, draft, missing, streamed, verdict, cannot_run, speed)


def _size(entry: Entry, source: str | None) -> tuple[int, bool]:
    if source is None:
        return 0, True
    try:
        path = Path(local_path(source, fetch=False))
        files = [file for file in path.glob("*") if file.is_file()] if path.is_dir() else weight_files(path)
        return sum(file.stat().st_size for file in files), True
    except (EdgespecError, OSError):
        facts = entry.files.get(source)
        return (facts.bytes if facts else 0), False
