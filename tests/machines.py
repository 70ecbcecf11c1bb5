"""Machines as data: memory that is free where a browser is open, and what Metal and drivers report."""

from dataclasses import replace

from edgespec.machine.this_machine import Gpu, Machine

GIB = 1 << 30


def mac(memory: int, free: float, limit: float, cores: int = 8) -> Machine:
    """A Mac; `limit` is Metal's recommendedMaxWorkingSetSize: two thirds, from 36 GB on three quarters."""
    metal = Gpu("Metal", True, int(limit * GIB), 0, int(limit * GIB))
    return Machine(
        platform="darwin", architecture="arm64", cores=cores, memory=memory * GIB,
        free=int(free * GIB), used=GIB // 4, gpus=(metal,),
    )  # fmt: skip


def pc(memory: int, free: float, *cards: float, cores: int = 8) -> Machine:
    gpus = tuple(Gpu(f"CUDA{i}", False, int((card - 0.4) * GIB), 0, int(card * GIB)) for i, card in enumerate(cards))
    return Machine(
        platform="linux", architecture="x86_64", cores=cores, memory=memory * GIB,
        free=int(free * GIB), used=GIB // 4, moves_pages=True, gpus=gpus,
    )  # fmt: skip


MACHINES = {
    "macbook-8": mac(8, 4, 5.3, 4),
    "macbook-16": mac(16, 9, 10.7, 4),
    "macbook-24": mac(24, 15, 16),
    "macbook-24 with a browser": mac(24, 9, 16),
    "macbook-32": mac(32, 24, 21.3),
    "macbook-32 with a browser": mac(32, 15, 21.3),
    "macbook-36": mac(36, 32, 27),
    "studio-64": mac(64, 56, 48, 12),
    "studio-192": mac(192, 180, 144, 16),
    "laptop-16": pc(16, 11),
    "laptop-32": pc(32, 26),
    "desktop-32 with 12": pc(32, 27, 12),
    "desktop-64 with 24": pc(64, 58, 24),
    "desktop-64 with 2 x 24": pc(64, 58, 24, 24),
    "windows-32 with 8": replace(pc(32, 26, 8), platform="win32", moves_pages=False),
}
