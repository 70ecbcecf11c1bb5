"""Keywords of the Python API with their types: editors complete them, and mypy refuses others."""

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import TypedDict

from edgespec.loop.grammar import Grammar
from edgespec.loop.stats import GenerationStats

Path = str | PathLike[str]
Progress = Callable[[int, int], None]


class LoadKeywords(TypedDict, total=False):
    """Those of `edgespec.load`, which says what they mean."""

    draft: Path | None
    planner: str | None
    budget: int | None
    datastore: Path | None
    context_length: int | None
    chat_template: Path | None
    backend: str | None
    threads: int | None
    gpu_layers: int | None
    memory: int | str | None
    kv_type: str | None
    lenders: str | Sequence[str] | None
    device: str | None
    dtype: str | None
    gpu_memory: int | str | None
    keep_packed: bool | None
    exact: str | None
    parallel: int
    ahead: bool | None
    targets: int | None
    cluster: str | None
    approximate: str | None
    models_file: Path | None
    remember: bool
    progress: Progress | None
    say: Callable[[str], None] | None
    depth: int | None
    beam: int | None
    tau: float | None
    coupling: bool | None
    min_probability: float | None


class RequestKeywords(TypedDict, total=False):
    """Those of every method that generates; None is the default of each but `max_tokens`.

    Attributes:
        max_tokens: most tokens to generate; None: until the end, or until the context is full. Default: 512.
        stop: one string or several that end the output; not part of it.
        grammar: what the output must match: of `edgespec.json_schema`, `json_object`, `regex` or `lark`.
        prediction: likely output, such as a file that is to be edited, from which auto and sssd draft; cut to the
            context's length. It changes no output.
        temperature, top_k and so on: see `SamplingParams`; default: models.yaml's, else the model's own.
        seed: of the random numbers; default: one is drawn, which `stats.seed` reports.
    """

    max_tokens: int | None
    stop: str | Sequence[str] | None
    grammar: Grammar | None
    prediction: str | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    seed: int | None


class GenerateKeywords(RequestKeywords, total=False):
    """Those of methods that generate a single text.

    Attributes:
        stats: filled in while it runs.
        progress: called with (prompt tokens read, prompt tokens in all).
    """

    stats: GenerationStats | None
    progress: Progress | None
