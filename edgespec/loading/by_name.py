"""Plan and load in one call, by the engine's name."""

from typing import Any

from edgespec.loop.backend import Backend
from edgespec.loop.engines import LoadOptions, find_engine
from edgespec.machine.this_machine import this_machine


def load_backend(name: str, path: str, **options: Any) -> Backend:
    """Load a model on this machine.

    Args:
        name: of the engine.
        path: of the model.
        options: fields of `LoadOptions`; `exact` is "off" by default.

    Raises:
        EdgespecError: as for `find_engine`, `Engine.plan` and `Engine.load`.
    """
    engine = find_engine(name)
    return engine.load(engine.plan(path, LoadOptions(**{"exact": "off"} | options), this_machine()))
