"""What a plan may ask about a computer (`Machine`), and the answers for this one."""

import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec

from edgespec.machine import memory
from edgespec.machine.disk import USUAL, Reading, file_system, recall_reading
from edgespec.machine.system import compute_cores, moves_pages

PACKAGES = ("llama_cpp", "mlx_lm", "torch")  # of the built-in engines


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU at one moment; sizes in bytes.

    Attributes:
        name: by which its engine knows it.
        shared: True if it computes in the machine's memory.
        free: memory that no program uses.
        used: memory that this program uses.
        limit: memory that it can use; 0: not known.
        memory_speed, operations: as of a `Machine`.
        link_speed: bytes per second from the machine's memory; 0: not known.
        pools: it was tried here that it computes experts in pools in the machine's memory, as `scripts/check-mac` does.
    """

    name: str
    shared: bool
    free: int
    used: int = 0
    limit: int = 0
    memory_speed: float = 0.0
    operations: float = 0.0
    link_speed: float = 0.0
    pools: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """All that a plan may ask about a computer, at one moment; sizes in bytes.

    Attributes:
        platform: as `sys.platform`.
        architecture: as `platform.machine()`.
        cores: processors that compute best, of those that this process may use: without a Mac's efficiency cores.
        memory: all of it.
        free: memory that this process may use, also what it has now.
        used: memory that it has now and no file backs; 0: not known.
        moves_pages: pages can be moved to another address (Linux 5.7 and later).
        gpus: as `Engine.gpus` found them.
        disk: how the model's disk is read.
        file_system: of the model's disk, such as "ext4"; "": not known.
        packages: of `PACKAGES`, those that are installed.
        memory_speed: bytes per second in which passes read weights; 0: not known.
        operations: floating-point operations per second in products with 4-bit weights; 0: not known.
    """

    platform: str
    architecture: str = ""
    cores: int
    memory: int
    free: int
    used: int = 0
    moves_pages: bool = False
    gpus: tuple[Gpu, ...] = ()
    disk: Reading = USUAL
    file_system: str = ""
    packages: tuple[str, ...] = PACKAGES
    memory_speed: float = 0.0
    operations: float = 0.0


def this_machine(path: str | None = None, gpus: Sequence[Gpu] = ()) -> Machine:
    """Look at this computer.

    Args:
        path: of the model that is planned for.
        gpus: as its engine found them.
    """
    mac, used = sys.platform == "darwin", memory.private_memory()
    return Machine(
        platform=sys.platform,
        architecture=platform.machine(),
        cores=compute_cores(),
        memory=memory.all_memory(),
        free=memory.available_memory() + used,
        used=used,
        moves_pages=moves_pages(),
        gpus=tuple(replace(gpu, shared=gpu.shared or mac) for gpu in gpus),
        disk=recall_reading(path) if path else USUAL,
        file_system=file_system(path) if path else "",
        packages=tuple(name for name in PACKAGES if find_spec(name)),
    )
