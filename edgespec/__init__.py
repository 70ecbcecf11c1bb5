"""Run language models too big for your machine, with exactly the output of the model itself.

    import edgespec

    with edgespec.load("big.gguf", draft="small.gguf") as model:
        print(model.chat("Why is the sky blue?", max_tokens=100).text)
        for chunk in model.stream_chat("And at sunset?"):
            print(chunk.text, end="", flush=True)

All errors are `EdgespecError`, with a message of one line. More: docs/reference/api.md.
"""

from edgespec.errors import Closed as Closed
from edgespec.errors import EdgespecError as EdgespecError
from edgespec.errors import UsageError as UsageError
from edgespec.loop.grammar import Grammar as Grammar
from edgespec.loop.grammar import json_object, json_schema, lark, regex
from edgespec.loop.sampling import SamplingParams as SamplingParams
from edgespec.loop.stats import GenerationStats as GenerationStats
from edgespec.loop.tree import Source as Source
from edgespec.model import GenerationResult, Model, load
from edgespec.scheduler.requests import Chunk as Chunk

__version__ = "0.1.0"

# Names that `help` shows; the others are types of arguments and results.
__all__ = ["GenerationResult", "Model", "json_object", "json_schema", "lark", "load", "regex"]
