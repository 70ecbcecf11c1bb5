"""Plan and load in one call."""

from collections.abc import Callable
from typing import Any

from edgespec.loop.engines import Engine, LoadOptions
from edgespec.machine.this_machine import this_machine


def loader(engine: Engine) -> Callable[..., Any]:
    """
    Returns:
        A function of a path and fields of `LoadOptions` as keywords; `exact` is "off" unless given.
    """

    def load(path: str, **options: Any) -> Any:
        return engine.load(engine.plan(path, LoadOptions(**{"exact": "off"} | options), this_machine()))

    return load
