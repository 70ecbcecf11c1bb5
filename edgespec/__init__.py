"""Run language models too big for your machine, with exactly the text they would write alone."""

from edgespec.errors import EdgespecError
from edgespec.grammar import Grammar, json_object, json_schema, lark, regex
from edgespec.jobs import Chunk
from edgespec.model import GenerationResult, Model, load
from edgespec.sampling import SamplingParams
from edgespec.stats import GenerationStats
from edgespec.tree import Source

__version__ = "0.1.0"

__all__ = [
    "Chunk",
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
