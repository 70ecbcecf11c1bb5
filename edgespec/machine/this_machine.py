import os
import sys
from dataclasses import dataclass

from edgespec.machine.memory import all_memory, available_memory


@dataclass(frozen=True, slots=True)
class Machine:
    """A computer at one moment.

    Attributes:
        platform: as `sys.platform`.
        memory: bytes in all.
        free: bytes that this process may still take.
        processors: that this process may use.
    """

    platform: str
    memory: int
    free: int
    processors: int


def this_machine() -> Machine:
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Machine(sys.platform, all_memory(), available_memory(), own)
