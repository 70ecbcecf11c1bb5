"""Run language models too big for your machine, with exactly the text they would write alone."""

from edgespec.errors import Closed, EdgespecError
from edgespec.loop.grammar import Grammar, json_object, json_schema, lark, regex
from edgespec.loop.sampling import SamplingParams
from edgespec.loop.stats import GenerationStats
from edgespec.loop.tree import Source
from edgespec.model import GenerationResult, Model, load
from edgespec.scheduler.requests import Chunk

__version__ = "0.1.0"

__all__ = [
    "Chunk",
    "Closed",
    "EdgespecError",
    "GenerationResult",
    "GenerationStats",
    "Grammar",
    "Model",
    "SamplingParams",
    "Source",
    "json_object",
    "json_schema",
    "lark",
    "load",
    "regex",
]
