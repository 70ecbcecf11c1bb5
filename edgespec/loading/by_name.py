"""Load one model with an engine that is given by name."""

from typing import Any

from edgespec.loop.backend import Backend
from edgespec.loop.engines import find_engine, load_at_once
from edgespec.machine.this_machine import this_machine


def load_backend(name: str, path: str, **options: Any) -> Backend:
    """`load_at_once` on this machine, by the engine's name."""
    engine = find_engine(name)
    backend: Backend = load_at_once(engine, path, this_machine(path, engine.gpus(options.get("device"))), **options)
    return backend
