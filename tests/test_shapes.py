"""Tables of tensors of real models, made of their published configs."""

import math
from collections import Counter
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
# Their publishers chose the types of tensors one by one.
CHOSEN = ("qwen3.6-35b-a3b", "gemma-4-26b-a4b", "glm-4.7-flash", "gemma-4-e2b", "gemma-4-e4b")
OWN_TYPES = {entry.target for entry in MODELS if entry.name in CHOSEN}
TARGETS = {entry.name: entry.files[entry.target].shape for entry in MODELS if entry.target in entry.files}
# Billions of weights, as published: all, and those that a token uses.
MIXTURES = {
    "gpt-oss-20b": (21, 3.6), "gpt-oss-120b": (117, 5.1), "qwen3-coder-30b-a3b": (30.53, 3.3),
    "qwen3-30b-a3b-2507": (30.53, 3.3), "qwen3-next-80b-a3b": (80, 3), "qwen3.5-35b-a3b": (35, 3.46),
    "qwen3.6-35b-a3b": (35, 3), "qwen3.5-122b-a10b": (122, 10), "qwen3.8-flash-next": (176.9, 6),
    "qwen3-235b-a22b": (235, 22), "qwen3-coder-480b-a35b": (480, 35), "glm-4.5-air": (106, 12),
    "glm-4.6": (357, 32), "glm-4.7-flash": (30, 3), "glm-5.3-flash": (321.3, 18), "minimax-m2": (230, 10),
    "deepseek-v3.2": (671, 37), "deepseek-v4-flash": (284, 13),
    "kimi-k2": (1000, 32), "llama-4-scout": (109, 17), "gemma-4-26b-a4b": (25.2, 3.8),
    "nemotron-3-nano-30b-a3b": (31.6, 3.2),
}  # fmt: skip
# Tensors of published files, by llama.cpp's logs in ggml-org/llama.cpp#14939, #14795, #14642 and #23269,
# kyuz0/amd-strix-halo-toolboxes#41, and ikawrakow/ik_llama.cpp#1772.
COUNTED = {
    "glm-4.5-air": 803, "qwen3-235b-a22b": 1131, "kimi-k2": 1096, "qwen3.6-35b-a3b": 753, "minimax-m2": 809,
    "gemma-4-26b-a4b": 658,
}  # fmt: skip
NGRAMS = "per_layer_token_embd.weight"  # of which a token uses a few rows
OTHERS: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "published_shapes.yaml").read_text("utf-8"))
OTHERS |= {name: TARGETS[name] for name in (*MIXTURES, *CHOSEN)}
TOKENIZERS = 16 << 20  # bytes, at most, of tokens and merges in a header
SMALL = OTHERS["llama-3.1-8b"]


@pytest.mark.parametrize("source", FILES)
def test_every_file_of_the_catalogue_has_a_shape_of_its_size(source: str) -> None:
    rows = table(FILES[source].shape)
    left = FILES[source].bytes - rows[-1].start - rows[-1].size
    assert 0 < left < (FILES[source].bytes / 20 if source in OWN_TYPES else TOKENIZERS)
    assert all(later.start >= row.start + row.size for row, later in pairwise(rows))


def test_every_model_has_a_shape() -> None:
    assert not [entry.name for entry in MODELS if not all(facts.shape for facts in entry.files.values())]


def test_all_mixtures_of_the_catalogue_are_compared_with_what_their_publishers_say() -> None:
    assert {name for name, shape in TARGETS.items() if shape.get("expert_count")} == MIXTURES.keys()


@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_has_the_weights_that_its_publisher_counts(name: str) -> None:
    """Publishers count the head, the embedding and the output, or do not, and round to what is written."""
    shape, (total, active) = TARGETS[name], MIXTURES[name]
    share = shape["expert_used_count"] / shape["expert_count"]
    head = f"blk.{shape['block_count'] - shape.get('nextn_predict_layers', 0)}."
    whole = {row.name: math.prod(row.sizes) / 1e9 for row in table(shape)}
    trunk = {name: size for name, size in whole.items() if not name.startswith(head)}
    assert pytest.approx(total, rel=0.03) in (sum(trunk.values()), sum(whole.values()))
    least, most = (
        sum(size * (share if "_exps." in name else 1) for name, size in sizes.items() if name not in without)
        for sizes, without in ((trunk, ("token_embd.weight", "output.weight", NGRAMS)), (whole, (NGRAMS,)))
    )
    rounding = max(0.03 * active, 0.5 if active == int(active) else 0)
    assert least - rounding < active < most + rounding


def test_a_mixture_has_as_many_tensors_as_its_published_file() -> None:
    assert {name: len(table(TARGETS[name])) for name in COUNTED} == COUNTED


def test_queries_and_keys_of_the_larger_glm_have_norms_and_those_of_the_smaller_none() -> None:
    found = {
        name: {row.name.rpartition("blk.3.")[2] for row in table(TARGETS[name])} for name in ("glm-4.6", "glm-4.5-air")
    }
    norms = {"attn_q_norm.weight", "attn_k_norm.weight"}
    assert (norms & found["glm-4.6"], norms & found["glm-4.5-air"]) == (norms, set())


def test_convolutions_of_recurrent_layers_are_not_quantised() -> None:
    rows = [row for row in table(TARGETS["qwen3-next-80b-a3b"]) if "ssm_conv1d" in row.name]
    assert {row.type for row in rows} == {"F32"}
    assert len(rows) == 36  # of 48 layers, every fourth is attention


def test_narrow_experts_have_the_types_that_a_published_file_has() -> None:
    """Rows of 704 are no multiple of 256: github.com/scrya-com/rotorquant/issues/9, which prints 15.63 GiB, too."""
    rows = table(TARGETS["gemma-4-26b-a4b"])
    assert Counter(row.type for row in rows) == {"F32": 392, "Q5_0": 32, "Q8_0": 28, "Q4_K": 192, "Q6_K": 14}
    assert (rows[-1].start + rows[-1].size) / 2**30 == pytest.approx(15.63, abs=0.005)


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
        (SMALL | {"feed_forward_length": 0}, UsageError, "ffn_down.weight has the sizes .0, 4096., but"),
        (OTHERS["kimi-k2"] | {"rope.dimension_count": 192}, UsageError, "attn_k_b.weight has the sizes .0, 512, 64."),
        (SMALL | {"vocab_size": 2**32 - 1, "embedding_length": 2**32 - 1}, UsageError, "the shape is that of a file"),
        ({key: value for key, value in SMALL.items() if key != "vocab_size"}, ModelError, "does not state vocab_size"),
    ],
)
def test_a_shape_that_is_not_complete(shape: Any, error: type[Exception], line: str) -> None:
    with pytest.raises(error, match=line) as caught:
        table(shape)
    assert "\n" not in str(caught.value)
