"""Methods that gain nothing on one machine, or are approximate: docs/systems.md. All else works without this folder."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgespec.lab.scaling import ScaleResult as ScaleResult
    from edgespec.lab.scaling import scale as scale
    from edgespec.lab.thoughts import search as search
    from edgespec.lab.tool_cache import ToolCache as ToolCache

_MODULES = {"ScaleResult": "scaling", "ToolCache": "tool_cache", "scale": "scaling", "search": "thoughts"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'edgespec.lab' has no attribute {name!r}")
    return getattr(import_module(f"edgespec.lab.{_MODULES[name]}"), name)
