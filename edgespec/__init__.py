"""Run language models too big for your machine, with exactly the output of the model itself.

    import edgespec

    with edgespec.load("big.gguf", draft="small.gguf") as model:
        print(model.chat("Why is the sky blue?", max_tokens=100).text)
        for chunk in model.stream_chat("Why is it red at sunset?"):
            print(chunk.text, end="", flush=True)

All errors are `EdgespecError`, with a message of one line. More: docs/reference/api.md.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any
from warnings import warn

if TYPE_CHECKING:
    from edgespec.errors import Closed as Closed
    from edgespec.errors import EdgespecError as EdgespecError
    from edgespec.errors import UsageError as UsageError
    from edgespec.loop.grammar import Grammar as Grammar
    from edgespec.loop.grammar import json_object, json_schema, lark, regex
    from edgespec.loop.sampling import SamplingParams as SamplingParams
    from edgespec.loop.stats import GenerationStats as GenerationStats
    from edgespec.loop.tree import Source as Source
    from edgespec.model import Conversation as Conversation
    from edgespec.model import Model, aload, load
    from edgespec.scheduler.events import Chunk as Chunk
    from edgespec.scheduler.events import GenerationResult

__version__ = "1.0.0rc1"

# Names that `help` shows; the others are types of arguments and results.
__all__ = ["GenerationResult", "Model", "aload", "json_object", "json_schema", "lark", "load", "regex"]

# Imported when they are asked for: the program handles Ctrl-C before its many imports (`edgespec/__main__.py`).
_MODULES = {
    "errors": ["Closed", "EdgespecError", "UsageError"],
    "loop.grammar": ["Grammar", "json_object", "json_schema", "lark", "regex"],
    "loop.sampling": ["SamplingParams"],
    "loop.stats": ["GenerationStats"],
    "loop.tree": ["Source"],
    "model": ["Conversation", "Model", "aload", "load"],
    "scheduler.events": ["Chunk", "GenerationResult"],
}
_IN_THE_LAB = ("ScaleResult", "ToolCache", "scale")  # outdated here


def __getattr__(name: str) -> Any:
    if name in _IN_THE_LAB:
        warn(f"edgespec.{name} goes with the next version: use edgespec.lab.{name}", DeprecationWarning, stacklevel=2)
        return getattr(import_module("edgespec.lab"), name)
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"edgespec.{module}"), name)
    raise AttributeError(f"module 'edgespec' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *(name for names in _MODULES.values() for name in names)})
