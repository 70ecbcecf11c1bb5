"""Tables of tensors of real models, made of their published configs."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from edgespec.errors import ModelError, UsageError
from edgespec.models.gguf_header import own_values
from edgespec.models.registry import BUILT_IN, read_models
from edgespec.models.shapes import file_of, table

MODELS = read_models(BUILT_IN)
FILES = {source: facts for entry in MODELS for source, facts in entry.files.items() if facts.bytes and facts.shape}
# Their publishers chose the types of tensors one by one, or `shapes.py` does not know the architecture.
WITHOUT_SHAPES = {"qwen3.6-35b-a3b", "gemma-4-e2b", "gemma-4-e4b", "gemma-4-26b-a4b", "glm-4.7-flash"}
OTHERS: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "published_shapes.yaml").read_text("utf-8"))
TOKENIZERS = 16 << 20  # bytes, at most, of tokens and merges in a header
SMALL = OTHERS["llama-3.1-8b"]


@pytest.mark.parametrize("source", FILES)
def test_every_file_of_the_catalogue_has_a_shape_of_its_size(source: str) -> None:
    rows = table(FILES[source].shape)
    left = FILES[source].bytes - rows[-1].start - rows[-1].size
    assert 0 < left < TOKENIZERS
    assert all(later.start >= row.start + row.size for row, later in pairwise(rows))


def test_the_other_models_are_known() -> None:
    assert {entry.name for entry in MODELS if not all(facts.shape for facts in entry.files.values())} == WITHOUT_SHAPES


@pytest.mark.parametrize("name", OTHERS)
def test_the_engine_takes_the_table_for_that_of_a_file(name: str) -> None:
    """llama.cpp compares every tensor with what the header says."""
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    from edgespec.backends.llamacpp.ggml.files import all_tensors, llama_cpp, load_header

    with file_of(OTHERS[name]) as path:
        llama_cpp.llama_model_free(load_header(path))
        found = [(tensor.name, tensor.size) for tensor in all_tensors(path)]
        assert found == [(row.name, row.size) for row in table(OTHERS[name])]
        assert own_values(path)["embedding_length"] == OTHERS[name]["embedding_length"]
        assert Path(path).stat().st_blocks * 512 < 1 << 20
    assert not Path(path).exists()


@pytest.mark.parametrize(
    ("shape", "error", "line"),
    [
        ({}, UsageError, "there is no architecture 'None'"),
        (SMALL | {"architecture": "llamma"}, UsageError, "did you mean llama?"),
        (SMALL | {"type": "Q9"}, UsageError, "there is no type 'Q9'"),
        (SMALL | {"type": ["Q8_0"]}, UsageError, "there is no type"),
        (SMALL | {"types": ["Q8_0"]}, UsageError, "types of the shape is .* but must be a mapping"),
        (SMALL | {"types": {"token_embd": "Q9"}}, UsageError, "there is no type 'Q9'"),
        (SMALL | {"block_count": "32"}, UsageError, "block_count of the shape is '32', but must be a whole number"),
        (SMALL | {"block_count": 2**31}, UsageError, "must be a whole number from 1 to 512"),
        (SMALL | {"attention.head_count": 0}, UsageError, "head_count of the shape is 0, but must be a whole number"),
        (SMALL | {"attention.head_count": [32]}, UsageError, "must be a whole number from 1 to 4294967295"),
        (SMALL | {"attention.head_count_kv": "8"}, UsageError, "head_count_kv of the shape is '8', but must be"),
        (SMALL | {"attention.sliding_window_pattern": []}, UsageError, r"pattern of the shape is \[\], but must be"),
        (SMALL | {"embedding_length": 4096.5}, UsageError, "embedding_length of the shape is 4096.5, but must be"),
        (SMALL | {"rope.dimension_count": -1}, UsageError, "dimension_count of the shape is -1, but must be"),
        (SMALL | {"context_length": None}, UsageError, "context_length of the shape is None, but must be"),
        (SMALL | {"vocab_size": 2**32 - 1, "embedding_length": 2**32 - 1}, UsageError, "the shape is that of a file"),
        ({key: value for key, value in SMALL.items() if key != "vocab_size"}, ModelError, "does not state vocab_size"),
    ],
)
def test_a_shape_that_is_not_complete(shape: Any, error: type[Exception], line: str) -> None:
    with pytest.raises(error, match=line) as caught:
        table(shape)
    assert "\n" not in str(caught.value)
