"""What the engines' `load` functions have in common."""

from collections.abc import Callable
from typing import Any

from edgespec.loop.engines import Engine, load_at_once
from edgespec.machine.this_machine import this_machine


def loader(engine: Engine) -> Callable[..., Any]:
    """A function of a path and fields of `LoadOptions` (`exact` "off" by default) that loads a model here."""

    def load(path: str, **options: Any) -> Any:
        return load_at_once(engine, path, this_machine(path, engine.gpus(options.get("device"))), **options)

    return load


def no_further_positions(length: int, asked: int) -> list[str]:
    """The note on a model that has learned a vector for each position, for fewer than were asked for."""
    return [f"the context is {length}, not {asked}: this model has no further positions"] if length < asked else []
