"""Memory that a Mac's GPU can hold, for MLX, which can wire the memory of its weights."""

from collections.abc import Sequence

from edgespec.loop.engines import Machine
from edgespec.machine.this_machine import Gpu

WIRED_SHARE = 0.9  # of what a Mac's GPU can hold, for weights; mlx-lm warns at this share
WIRED_FROM = 0.6  # of it: smaller weights stay there without being wired
WIRE = "EDGESPEC_WIRE"  # set to anything: larger weights are wired, with which Macs have panicked (ml-explore/mlx#3186)
CACHE_SHARE = 16  # 1 / CACHE_SHARE of what a GPU can hold is for freed buffers that MLX keeps


def gpu_limit(gpus: Sequence[Gpu]) -> int:
    """Bytes that a Mac's GPU can hold; 0 elsewhere."""
    return sum(gpu.limit for gpu in gpus)


def free_memory(machine: Machine) -> int:
    """Free bytes; on a Mac at most what its GPU can hold."""
    return min(machine.free, int(WIRED_SHARE * gpu_limit(machine.gpus)) or machine.free)
