"""GGUFs of any shape with made-up weights, to measure how a model of that size runs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ModelError, UsageError
from edgespec.models.convert.folder_from_gguf import appearing, check_out, check_space, import_gguf, read_gguf

Bytes = NDArray[np.uint8]  # rows of a tensor as they lie in the file
BLOCK, BLOCK_BYTES = 256, 144  # weights and bytes of a block of Q4_K
NOISE = 65521  # number of random blocks, which repeat; a prime, so that hardly two rows are alike
UNUSED = 5  # llama_token_type in llama.h
Q4_K_S = 14  # llama_ftype in llama.h
CONTEXT = 8192
ARCHITECTURE = "llama"


@dataclass(frozen=True, slots=True)
class Shape:
    """
    Attributes:
        vocab: number of tokens, or the tokenizer's, if that is more.
    """

    layers: int = 80
    width: int = 8192
    feed_forward: int = 28672
    heads: int = 64
    kv_heads: int = 8
    vocab: int = 128256

    def check(self) -> None:
        """
        Raises:
            UsageError: no model has this shape.
        """
        for name in ("layers", "width", "feed_forward", "heads", "kv_heads", "vocab"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name.replace('_', ' ')} is {getattr(self, name)}, but must be at least 1")
        if self.width % BLOCK or self.feed_forward % BLOCK:
            raise UsageError(f"width and feed forward must be multiples of {BLOCK}: the block size of Q4_K")
        if self.width % self.heads or self.width // self.heads % 2 or self.heads % self.kv_heads:
            raise UsageError("heads must divide the width into even parts, and kv heads must divide heads")
        if self.width // self.heads * self.kv_heads % 32:
            raise UsageError("keys of all heads must be a multiple of 32 wide: llama.cpp's caches have such blocks")


@dataclass(frozen=True, slots=True)
class Planned:
    """
    Attributes:
        type: a gguf.GGMLQuantizationType.
        shape: the last dimension in bytes.
        size: bytes.
    """

    name: str
    type: Any
    shape: tuple[int, ...]
    make: Callable[[], Bytes]

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))


def write_made_up(out: Path, shape: Shape, tokenizer: Path, progress: Callable[[int, int], None]) -> int:
    """Write a GGUF of this shape: matrices in Q4_K, norms of ones.

    Weights are random, with the spread that keeps a layer's output as large as its input, so logits are finite.

    Args:
        out: must not exist yet; the file appears when it is complete.
        shape: of the model.
        tokenizer: a GGUF whose tokenizer is copied; tokens that mean nothing fill the vocabulary up.
        progress: called with (bytes written, bytes in all) of the weights.

    Returns:
        Bytes of the file.

    Raises:
        UsageError: `out` exists, or no model has such a shape.
        ModelError: `tokenizer` has no tokens, or is damaged.
        EdgespecError: the disk has too little room, or cannot be written.
        MissingPackage: gguf is not installed.
    """
    types = import_gguf().GGMLQuantizationType
    shape.check()
    check_out(out)
    found = read_gguf(tokenizer, weights=False).metadata
    metadata = {key: value for key, value in found.items() if key.startswith("tokenizer.")}
    if not (tokens := metadata.get("tokenizer.ggml.tokens")):
        raise ModelError(f"{tokenizer}: has no tokenizer.ggml.tokens")
    vocab = max(shape.vocab, len(tokens))
    metadata["tokenizer.ggml.tokens"] = tokens + [f"<unused {i}>" for i in range(len(tokens), vocab)]
    kinds = metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
    metadata["tokenizer.ggml.token_type"] = kinds + [UNUSED] * (vocab - len(tokens))
    if scores := metadata.get("tokenizer.ggml.scores"):
        metadata["tokenizer.ggml.scores"] = scores + [0.0] * (vocab - len(tokens))

    blocks = cache(_blocks)
    planned = [
        Planned(name, types.Q4_K, (rows, columns // BLOCK * BLOCK_BYTES), partial(_matrix, rows, columns, blocks))
        if rows
        else Planned(name, types.F32, (4 * columns,), partial(_ones, columns))
        for name, rows, columns in _tensors(shape, vocab)
    ]
    values = _values(shape) | metadata
    return write_planned(out, ARCHITECTURE, planned, lambda writer: add_values(writer, values), progress)


def write_planned(
    out: Path, architecture: str, planned: Sequence[Planned], values: Callable[[Any], None],
    progress: Callable[[int, int], None],
) -> int:  # fmt: skip
    """Write a GGUF of these tensors.

    Args:
        out: must not exist yet; the file appears when it is complete.
        architecture: as the header names it.
        planned: its tensors.
        values: adds all else of the header to a `gguf.GGUFWriter`.
        progress: called with (bytes written, bytes in all) of the weights.

    Returns:
        Bytes of the file.

    Raises:
        EdgespecError: the disk has too little room, or cannot be written.
    """
    done, total = 0, sum(one.size for one in planned)
    check_space(out, total)
    with appearing(out) as partial:
        writer = import_gguf().GGUFWriter(partial, architecture)
        values(writer)
        for one in planned:
            writer.add_tensor_info(one.name, one.shape, np.dtype(np.uint8), one.size, raw_dtype=one.type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for one in planned:
            writer.write_tensor_data(one.make())
            done += one.size
            progress(done, total)
        writer.close()
    return out.stat().st_size


def add_values(writer: Any, values: Mapping[str, Any]) -> None:
    """Add these values to the header of a `gguf.GGUFWriter`; numbers have 32 bits."""
    add = {
        bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string,
        list: writer.add_array,
    }  # fmt: skip
    for key, value in values.items():
        add[type(value)](key, value)


def add_field(writer: Any, key: str, field: Any) -> None:
    """Add a `gguf.ReaderField` of another file to a header, under this key."""
    kind, *more = field.types
    writer.add_key_value(key, field.contents(), kind, more[-1] if more else None)


def _values(shape: Shape) -> dict[str, Any]:
    found = {
        "block_count": shape.layers, "context_length": CONTEXT, "embedding_length": shape.width,
        "feed_forward_length": shape.feed_forward, "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads, "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": shape.width // shape.heads, "rope.freq_base": 500000.0,
    }  # fmt: skip
    about = {"general.name": "made up", "general.file_type": Q4_K_S}
    return about | {f"{ARCHITECTURE}.{key}": value for key, value in found.items()}


def _tensors(shape: Shape, vocab: int) -> Iterator[tuple[str, int, int]]:
    """Names, rows and columns; a vector has no rows."""
    width, keys, inner = shape.width, shape.width // shape.heads * shape.kv_heads, shape.feed_forward
    yield "output.weight", vocab, width
    yield "output_norm.weight", 0, width
    yield "token_embd.weight", vocab, width
    for layer in range(shape.layers):
        for name, rows, columns in (
            ("attn_k", keys, width),
            ("attn_norm", 0, width),
            ("attn_output", width, width),
            ("attn_q", width, width),
            ("attn_v", keys, width),
            ("ffn_down", width, inner),
            ("ffn_gate", inner, width),
            ("ffn_norm", 0, width),
            ("ffn_up", inner, width),
        ):
            yield f"blk.{layer}.{name}.weight", rows, columns


def _ones(count: int) -> Bytes:
    return np.ones(count, np.float32).view(np.uint8)


def _matrix(rows: int, columns: int, blocks: Callable[[int], Bytes]) -> Bytes:
    return np.resize(blocks(columns), (rows * columns // BLOCK, BLOCK_BYTES))


def _blocks(columns: int) -> Bytes:
    """Random blocks of Q4_K for rows of `columns` weights, [NOISE, BLOCK_BYTES].

    A block (block_q4_K in ggml-common.h) has d and dmin in float16, eight scales and eight minima of 6 bits, and 256
    numbers of 4 bits; a weight is d * scale * number - dmin * minimum. Here scales and minima are 32, and dmin is
    7.5 d, so weights lie around zero.
    """
    spread = 32 * np.sqrt((16**2 - 1) / 12)  # of 32 times a number from 0 to 15
    d = np.float16(1 / (spread * np.sqrt(columns)))
    blocks = np.zeros((NOISE, BLOCK_BYTES), np.uint8)
    blocks[:, 0:4] = np.array([d, np.float16(7.5) * d], np.float16).view(np.uint8)
    blocks[:, 4:12] = 32 | (32 >> 4) << 6  # upper two bits of the last four scales and minima
    blocks[:, 12:16] = 0  # and their lower four
    blocks[:, 16:] = np.frombuffer(np.random.default_rng(0).bytes(NOISE * 128), np.uint8).reshape(NOISE, 128)
    return blocks
