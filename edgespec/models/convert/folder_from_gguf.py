"""A GGUF as the folder that transformers and mlx-lm load: config.json, tokenizer files, safetensors.

Tensors are read, dequantised and written one after the other, so memory stays near one output file and the largest
tensor.
"""

import glob
import json
import os
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import EdgespecError, ModelError, UsageError, failing_as, installed, named
from edgespec.loop.engines import load_vocab
from edgespec.loop.sampling import Float32Array
from edgespec.machine.files import part_names
from edgespec.models.convert.gguf_tokenizer import build_tokenizer, tokenizer_config
from edgespec.models.convert.layer_files import write_layer_files
from edgespec.models.download import Progress
from edgespec.models.gguf_header import check_header, check_model, damaged
from edgespec.models.gguf_model import (
    ROPE_FACTORS,
    Shapes,
    find_family,
    folder_names,
    folder_tensors,
    model_config,
)

DTYPES = {"float32": 4, "float16": 2, "bfloat16": 2}  # bytes a weight
USUAL_DTYPE = "bfloat16"
FLOATS = {"F32", "F16", "BF16"}  # types of weights that may be quantised
MLX_BITS = (2, 3, 4, 5, 6, 8)
SHARD_BYTES = 2 * 10**9
CHUNK = 2**22  # weights dequantised at once


@dataclass(frozen=True, slots=True)
class Converted:
    """
    Attributes:
        path: the folder.
        model_type: as in its config.json.
        bytes: of its weights on disk.
    """

    path: Path
    model_type: str
    bytes: int


def convert(
    source: str | Path,
    out: str | Path,
    *,
    dtype: str = USUAL_DTYPE,
    bits: int | None = None,
    to_mlx: bool = False,
    requantise: bool = True,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress | None = None,
) -> Converted:
    """Turn a GGUF into the folder `out`, which appears only when it is complete.

    Args:
        source: a GGUF file; of a split GGUF, any part.
        out: must not exist yet.
        dtype: type of the weights: float32 (exactly the GGUF's values), float16 or bfloat16.
        bits: quantise the result with mlx-lm to 2, 3, 4, 5, 6 or 8 bits; only mlx-lm can load it then.
        to_mlx: as MLX streams it: every layer in a file of its own, on whole pages, experts stacked by mlx-lm.
        requantise: with `bits`, allow weights that are quantised already.
        shard_bytes: most bytes of weights in a file, unless a single tensor is larger.
        progress: called with (phase, bytes done, bytes in all; 0 if unknown).

    Raises:
        UsageError: `out` exists, its parent does not, or the dtype or the number of bits is not one of these.
        ModelError: the file is damaged, or of a kind that cannot be converted.
        MissingPackage: gguf, safetensors, tokenizers, ml_dtypes or (for `bits`) mlx-lm is not installed.
        EdgespecError: the folder cannot be written.
    """
    source, out = Path(source), Path(out)
    _check(out, dtype, bits)
    report = progress or (lambda phase, done, total: None)
    report("reading the header", 0, 0)
    gguf = read_gguf(source)
    if bits and not requantise:
        check_floats(gguf.path, {str(tensor.tensor_type.name) for tensor in gguf.tensors})
    factors = next((_values(tensor, str(gguf.path)) for tensor in gguf.tensors if tensor.name == ROPE_FACTORS), None)
    shapes: Shapes = {tensor.name: tuple(tensor.shape[::-1].tolist()) for tensor in gguf.tensors}
    with named(str(gguf.path)):
        config = model_config(gguf.metadata, shapes, factors)
        names = folder_names(gguf.metadata, shapes, config["num_hidden_layers"])
    vocab = load_vocab("llamacpp", str(gguf.path))
    with named(str(gguf.path)):
        tokenizer = build_tokenizer(gguf.metadata, vocab)
    tokens = _token_ids(gguf.metadata, vocab.eog_ids)
    total = DTYPES[dtype] * sum(tensor.n_elements for tensor in gguf.tensors if tensor.name in names)
    by_mlx = (bits + 1) / 8 / DTYPES[dtype] if bits else float(to_mlx)  # with a bit for scales, in parts of `total`
    check_space(out, int(total * (1 + by_mlx)))

    with appearing(out, "folder") as folder:
        folder.mkdir()
        _write_json(folder / "config.json", config | tokens | {"torch_dtype": dtype})
        _write_json(folder / "generation_config.json", tokens | {"eos_token_id": sorted(vocab.eog_ids)})
        tokenizer.save(str(folder / "tokenizer.json"))
        _write_json(
            folder / "tokenizer_config.json", tokenizer_config(gguf.metadata, config["max_position_embeddings"])
        )
        pieces = _pieces(gguf, names, config, dtype)
        write_safetensors(folder, pieces, int(total), shard_bytes, lambda done: report("weights", done, int(total)))
        if bits:
            report("quantising", 0, 0)
        if bits or (to_mlx and any("experts" in key for key in config)):
            _write_by_mlx(folder, bits)
        if to_mlx:
            write_layer_files(folder, lambda done, total: report("layers to pages", done, total))
    written = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    return Converted(out, config["model_type"], written)


@dataclass(frozen=True, slots=True)
class Gguf:
    """
    Attributes:
        path: of the first part.
        metadata: key -> value.
        fields: key -> gguf.ReaderField, which has the type, too.
        tensors: of all parts, as gguf.ReaderTensor, mapped into memory.
    """

    path: Path
    metadata: dict[str, Any]
    fields: dict[str, Any]
    tensors: list[Any]


def read_gguf(path: Path, *, weights: bool = True) -> Gguf:
    """Read headers; weights stay on disk.

    Args:
        path: of a GGUF, or of a part of one.
        weights: it must have some.

    Raises:
        ModelError: not a GGUF, cut off, or a part is missing.
        MissingPackage: the package gguf is not installed.
    """
    reader = import_gguf("reading weights from a GGUF").GGUFReader
    parts = [path.with_name(name) for name in part_names(path.name)]
    readers, found = [], []
    check_model(parts[0], weights=weights)
    for part in parts:
        check_header(part)
        try:
            readers.append(reader(part))
            found.append({key: field.contents() for key, field in readers[-1].fields.items()})
        except (ValueError, IndexError, KeyError, OverflowError, MemoryError, RecursionError) as error:
            raise damaged(part) from error
    fields = {key: field for key, field in readers[0].fields.items() if not key.startswith("GGUF.")}
    metadata = {key: found[0][key] for key in fields}
    tensors = [tensor for reader in readers for tensor in reader.tensors]
    return Gguf(parts[0], metadata, fields, tensors)


def import_gguf(why: str = "writing a GGUF") -> Any:
    """Raises MissingPackage."""
    return installed("gguf", "convert", why)


def check_floats(path: Path, types: Set[str]) -> None:
    """
    Raises:
        ModelError: tensors are quantised already.
    """
    if quantised := types - FLOATS:
        raise ModelError(
            f"{path}: is quantised already ({', '.join(sorted(quantised))}); what is quantised twice is worse: "
            "take a file of 16 bits, or say --requantise"
        )


def _check(out: Path, dtype: str, bits: int | None) -> None:
    if dtype not in DTYPES:
        raise UsageError(f"dtype is {dtype!r}, but must be one of {', '.join(DTYPES)}")
    if bits is not None and bits not in MLX_BITS:
        raise UsageError(f"bits is {bits}, but must be one of {', '.join(map(str, MLX_BITS))}")
    check_out(out, "folder")
    for package in ("ml_dtypes", "safetensors", "tokenizers"):
        installed(package, "convert", "converting a GGUF")
    if bits:
        installed("mlx-lm", "mlx", "quantising for mlx-lm")


def check_space(out: Path, needed: int) -> None:
    """
    Raises:
        EdgespecError: the disk has no room for `needed` bytes; names both sizes.
    """
    free = shutil.disk_usage(out.absolute().parent).free
    if needed > free:
        raise EdgespecError(f"{out}: needs {needed / 1e9:.1f} GB, but only {free / 1e9:.1f} GB are free")


def check_out(out: Path, kind: str = "file") -> None:
    """
    Raises:
        UsageError: something is there, or no folder for it.
    """
    if kind == "file" and out.is_dir():
        raise UsageError(f"{out}: is a folder; name a file in it, as in {out / 'model.gguf'}")
    if out.exists() or out.is_symlink():
        raise UsageError(f"{out}: exists already; name a {kind} that does not")
    if not out.absolute().parent.is_dir():
        raise UsageError(f"{out.absolute().parent}: there is no such folder")


@contextmanager
def appearing(out: Path, kind: str = "file") -> Iterator[Path]:
    """A name beside `out` for a new file or folder, which gets that name at the end of the `with`."""
    partial = out.absolute().with_name(f".{out.name}.{secrets.token_hex(4)}.partial")
    try:
        with failing_as(EdgespecError, f"{out}: cannot be written"):
            yield partial
            if kind == "file":
                with partial.open("rb+") as file:
                    os.fsync(file.fileno())
            check_out(out, kind)  # once more, after hours of work
            os.rename(partial, out)
    finally:
        for left in partial.parent.glob(f"{glob.escape(partial.name)}*"):
            shutil.rmtree(left) if left.is_dir() else left.unlink(missing_ok=True)


def _token_ids(metadata: dict[str, Any], eog_ids: frozenset[int]) -> dict[str, int]:
    names = {"bos": "bos", "eos": "eos", "padding": "pad"}
    ids = {new: metadata.get(f"tokenizer.ggml.{old}_token_id") for old, new in names.items()}
    if ids["eos"] is None and eog_ids:
        ids["eos"] = min(eog_ids)
    return {f"{name}_token_id": i for name, i in ids.items() if i is not None}


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _values(tensor: Any, path: str) -> Float32Array:
    from gguf import dequantize

    values: Float32Array = np.empty(tensor.shape[::-1].tolist(), np.float32)
    rows, stored = values.reshape(-1, values.shape[-1]), tensor.data.reshape(-1, tensor.data.shape[-1])
    step = max(1, CHUNK // values.shape[-1])
    try:
        for start in range(0, len(rows), step):
            rows[start : start + step] = dequantize(stored[start : start + step], tensor.tensor_type)
    except NotImplementedError as error:
        raise ModelError(f"{path}: the tensor {tensor.name} has the type {tensor.tensor_type.name}: {error}") from error
    return values


def _pieces(
    gguf: Gguf, names: dict[str, str], config: dict[str, Any], dtype: str
) -> Iterator[tuple[str, NDArray[Any]]]:
    import ml_dtypes

    family = find_family(gguf.metadata)
    type_ = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    for tensor in gguf.tensors:
        if tensor.name not in names:
            continue
        values = _values(tensor, str(gguf.path))
        if dtype == "float16" and max(values.max(), -values.min()) > np.finfo(np.float16).max:
            raise ModelError(f"{gguf.path}: {tensor.name} does not fit into float16; use bfloat16 or float32")
        with named(str(gguf.path)):
            for name, piece in folder_tensors(tensor.name, names[tensor.name], values, family, config):
                # An expert's matrix is copied: as a view, it would keep all the others in memory.
                yield name, piece.astype(type_, copy="{}" in names[tensor.name])
        del values, piece  # before the next tensor is read


def write_safetensors(
    folder: Path,
    tensors: Iterator[tuple[str, NDArray[Any]]],
    total: int,
    shard_bytes: int,
    progress: Callable[[int], None],
) -> None:
    """Write tensors into model.safetensors, or into numbered files of at most `shard_bytes` and their index.

    Args:
        folder: where to.
        tensors: name and values.
        total: bytes of all tensors, for the index.
        shard_bytes: a larger tensor gets a file of its own.
        progress: called with the bytes read so far.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    shards: list[list[str]] = []
    held: dict[str, NDArray[Any]] = {}
    done = 0

    def flush() -> None:
        file = folder / f"shard-{len(shards)}"
        file.touch()
        mode = file.stat().st_mode  # as the user wants files; safetensors would make them private
        try:
            save_file(held, file, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(str(error)) from error
        file.chmod(mode)
        shards.append(list(held))
        held.clear()

    progress(0)
    for name, values in tensors:
        if held and sum(array.nbytes for array in held.values()) + values.nbytes > shard_bytes:
            flush()
        held[name] = values
        done += values.nbytes
        del values  # the next tensor is made while this name would still hold the last one
        if sum(array.nbytes for array in held.values()) >= shard_bytes:
            flush()
        progress(done)
    if held:
        flush()
    if len(shards) == 1:
        (folder / "shard-0").rename(folder / "model.safetensors")
        return
    files = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    for i, file in enumerate(files):
        (folder / f"shard-{i}").rename(folder / file)
    index = {name: file for file, names in zip(files, shards, strict=True) for name in names}
    _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": index})


def _write_by_mlx(folder: Path, bits: int | None) -> None:
    mlx_lm = installed("mlx-lm", "mlx", "stacking experts for mlx-lm")
    written = folder / "by-mlx"
    with redirect_stdout(sys.stderr):  # it reports on standard output
        mlx_lm.convert(str(folder), mlx_path=str(written), quantize=bits is not None, q_bits=bits)
    for file in folder.glob("model*"):
        file.unlink()
    for file in [written / "config.json", *written.glob("model*")]:
        file.replace(folder / file.name)
    shutil.rmtree(written)
