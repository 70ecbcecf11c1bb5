"""What passes take on kinds of devices: medians of published points in machines.yaml, each with its source."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from statistics import median
from typing import Any

import numpy as np

from edgespec.errors import UsageError
from edgespec.machine.described import BUILT_IN
from edgespec.machine.files import read_yaml

PROCESSOR = "the processor"
# A device's name begins so; else its kind is metal.
KINDS = {"CUDA": "cuda", "cuda": "cuda", "ROCm": "rocm", "Vulkan": "vulkan", PROCESSOR: "processor"}


@dataclass(frozen=True, slots=True)
class Pace:
    """
    Attributes:
        share: of the published bandwidth that reading reaches.
        experts: share of this speed, and of that of decoding, at which experts are read.
        layer, mixture: seconds that a layer takes besides, without experts and with them.
        rows: (rows, bits), rising: a pass over so many rows takes as long as if each weight outside experts had so many
            bits more; (): not known.
        decoded: weights a second that a core decodes for each row, by type; others take no longer than to be read.
    """

    share: float = 1.0
    experts: float = 1.0
    layer: float = 0.0
    mixture: float = 0.0
    rows: Sequence[tuple[int, float]] = ()
    decoded: Mapping[str, float] = field(default_factory=dict)

    def bytes_more(self, rows: int) -> float:
        """Of each weight outside experts; beyond the last size that is known, in proportion."""
        if not self.rows:
            return 0.0
        sizes, bits = zip((1, 0.0), *self.rows, strict=True)
        return float(np.interp(rows, sizes, bits) * max(1.0, rows / sizes[-1])) / 8


LEVEL = Pace()  # of a bus


@cache
def _known() -> dict[str, Any]:
    found: dict[str, Any] = read_yaml(BUILT_IN, UsageError, ours=True)[0]
    return found


@cache
def pace(device: str, engine: str, without: str = "") -> Pace:
    """
    Args:
        device: its name.
        engine: its name.
        without: a source that does not count, as it is compared with.
    """
    kind = next((kind for start, kind in KINDS.items() if device.startswith(start)), "metal")
    engine = engine if kind == "metal" else "llamacpp"  # of PyTorch no point is known
    points = [one for one in _known()["passes"] if one["device"] == kind and one["source"] != without]
    share, experts, layer, mixture = (
        median([one[key] for one in points if key in one and one["engine"] == engine] or [usual])
        for key, usual in (
            ("share", _known()["shares"].get(kind, 1.0)),
            ("experts", 1.0),
            ("layer", 0.0),
            ("mixture", 0.0),
        )
    )
    rows, decoded = (_medians([one[key] for one in points if key in one]) for key in ("rows", "decoded"))
    bits = np.array([*rows.values()])
    # Sources have different sizes; more rows never take less time.
    rising = (np.maximum.accumulate(bits) + np.minimum.accumulate(bits[::-1])[::-1]) / 2
    return Pace(share, experts, layer, mixture, tuple(zip(rows, rising.tolist(), strict=True)), decoded)


def _medians(points: Sequence[Mapping[Any, float]]) -> dict[Any, float]:
    return {key: median(one[key] for one in points if key in one) for key in sorted(set().union(*points))}
