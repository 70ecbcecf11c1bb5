"""GGUF files made of others by llama.cpp, in other processes: quantised, or with fewer layers.

Errors are found before anything is written, and a file appears under its name only when it is complete.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from edgespec import __version__
from edgespec.errors import ModelError, UsageError
from edgespec.machine.files import part_names, read_text
from edgespec.models.convert.calibration import calibration_text
from edgespec.models.convert.folder_from_gguf import appearing, check_floats, check_out, check_space, import_gguf
from edgespec.models.download import Progress
from edgespec.models.gguf_header import (
    MOST_LAYERS,
    check_header,
    check_model,
    is_gguf,
    own_header,
    own_values,
    whole_number,
)
from edgespec.models.heads import head_layers

CHUNKS = 64  # of 512 tokens, that an importance matrix is computed from
NOT_OF_FILES = ("Q8_1", "Q8_K", "I8", "I16", "I32", "I64", "F64")  # types that ggml_quantize_chunk cannot write
NEED_MATRIX = ("IQ3_XS", "IQ3_XXS", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ2_M", "IQ1_S", "IQ1_M", "Q2_K_S")  # files
NEED_MATRIX_AS_TENSORS = ("IQ3_XXS", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ1_S", "IQ1_M")
BITS = {  # per weight of whole files: llama.cpp's tools/quantize/README.md, for Llama 3.1 8B
    "IQ2_M": 2.93, "IQ3_XXS": 3.25, "Q3_K_M": 4.0, "IQ4_XS": 4.46, "Q4_0": 4.66, "Q4_K_S": 4.67, "Q4_K_M": 4.89,
    "Q5_K_M": 5.7, "Q6_K": 6.56, "Q8_0": 8.5, "F16": 16.0, "BF16": 16.0,
}  # fmt: skip
PATTERNED = ("attention.sliding_window", "attention.sliding_window_pattern", "leading_dense_block_count", "ssm.")


@dataclass(frozen=True, slots=True)
class Recipe:
    """
    Attributes:
        type: llama.cpp's name of a quantisation, such as Q4_K_M; "": weights stay as they are.
        types: (regular expression of tensors' names, type); the first match counts.
        imatrix: none, auto, a matrix file, or a text file to compute one from; "": auto where a type needs it.
        drop: numbers of layers to leave out.
        why: for the user.
    """

    type: str = ""
    types: tuple[tuple[str, str], ...] = ()
    imatrix: str = ""
    drop: tuple[int, ...] = ()
    why: str = ""

    @property
    def needs_matrix(self) -> str:
        """The first type that llama.cpp quantises by an importance matrix only; "": there is none."""
        low = [name for _, name in self.types if name.upper() in NEED_MATRIX_AS_TENSORS]
        return self.type if self.type in NEED_MATRIX else next(iter(low), "")


PURPOSES = {
    "streamed": Recipe(
        "IQ4_XS", (("^output\\.weight$", "q6_K"), ("^token_embd\\.weight$", "q6_K")),
        why="every pass reads the layers, so they get 4.3 bits; output and embeddings stay in memory, with 6.6",
    ),
    "memory": Recipe("Q4_K_M", why="the usual balance of speed and quality where all weights stay in memory"),
    "draft": Recipe(
        "Q4_0", imatrix="auto",
        why="the fastest kernels on most processors; an importance matrix wins back what 4 plain bits lose",
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Written:
    """
    Attributes:
        bytes: of the weights.
        file_bytes: of the file; 0 in a rehearsal.
    """

    bytes: int
    file_bytes: int


def merge(purpose: str | None, given: Recipe) -> Recipe:
    base = PURPOSES[purpose] if purpose else Recipe()
    return Recipe(
        given.type or base.type, given.types + base.types, given.imatrix or base.imatrix, given.drop, base.why
    )


def parse_layers(text: str) -> tuple[int, ...]:
    """
    Args:
        text: such as "14-21" or "3,7,10-12".

    Raises:
        UsageError: it is not.
    """
    layers = set[int]()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
        if last < first:
            raise UsageError(f"layers are {text!r}, but must be such as 14-21 or 3,7,10-12")
        if last >= MOST_LAYERS:
            raise UsageError(f"layers are {text!r}, but no model has a layer {last}")
        layers |= set(range(first, last + 1))
    return tuple(sorted(layers))


def check_names(recipe: Recipe) -> None:
    """
    Raises:
        UsageError: a type, pattern or file of the recipe does not exist, or it has nothing to do.
    """
    types = _types()
    if recipe.type and recipe.type not in types["files"]:
        raise UsageError(f"there is no type {recipe.type!r}; there are: {', '.join(types['files'])}")
    for pattern, name in recipe.types:
        if name.lower() not in (known.lower() for known in types["tensors"]):
            raise UsageError(f"there is no type {name!r} of a tensor; there are: {', '.join(types['tensors'])}")
        try:
            re.compile(pattern)
        except re.error as error:
            raise UsageError(f"{pattern!r} is not a regular expression: {error}") from error
    if not recipe.type and not recipe.drop:
        raise UsageError("nothing to do: say --quant, --for or --drop-layers")
    if recipe.imatrix == "none" and recipe.needs_matrix:
        raise UsageError(
            f"{recipe.needs_matrix} is garbage without an importance matrix: say --imatrix auto, or a file"
        )
    if recipe.imatrix not in ("", "none", "auto") and not Path(recipe.imatrix).is_file():
        raise UsageError(f"{recipe.imatrix}: there is no such file; --imatrix takes auto, none, a matrix or a text")


def check_tensors(path: Path, tensors: Mapping[str, str], recipe: Recipe, requantise: bool) -> None:
    """
    Args:
        path: of the GGUF, for messages.
        tensors: name -> type.
        recipe: to check.
        requantise: allow tensors that are quantised already.

    Raises:
        UsageError: no tensor has a name that the recipe gives.
        ModelError: the file is quantised already.
    """
    for pattern, name in recipe.types:
        known = any(re.search(pattern, tensor) for tensor in tensors)
        # Tied models have no output.weight.
        if not known and (pattern, name) not in PURPOSES["streamed"].types:
            raise UsageError(f"no tensor's name matches {pattern!r}; one of them is {list(tensors)[-1]}")
    if recipe.type and not requantise:
        check_floats(path, set(tensors.values()))


def check_drop(path: Path, drop: Sequence[int]) -> None:
    """
    Raises:
        UsageError: there is no such layer, or none would be left.
        ModelError: the file is damaged, or its layers are not alike, so each must keep its number.
    """
    if not drop:
        return
    values, lists = own_header(str(path))
    layers = whole_number(str(path), values, "block_count", 1, MOST_LAYERS)
    check_layers(path, drop, layers)
    patterned = [key for key, value in values.items() if value and key.startswith(PATTERNED)]
    if unlike := [*patterned, *(key for key, length in lists.items() if length == layers)]:
        raise ModelError(
            f"{path}: its layers are not alike ({unlike[0]}), so none can be left out: others would change places"
        )


def check_layers(path: Path, drop: Sequence[int], layers: int) -> None:
    """
    Raises:
        UsageError: `drop` names a layer that a model of `layers` layers does not have, or all of them.
    """
    if drop[-1] >= layers:
        raise UsageError(f"layer {drop[-1]} is to be left out, but {path} has the layers 0 to {layers - 1}")
    if len(drop) >= layers:
        raise UsageError(f"all {layers} layers are to be left out; keep at least one")


def quantise(
    source: Path, out: Path, recipe: Recipe, *, requantise: bool = False, rehearse: bool = False,
    progress: Progress | None = None,
) -> Written:  # fmt: skip
    """Make a GGUF of a GGUF.

    Args:
        source: of a split one, any part.
        out: must not exist.
        recipe: types of the new weights, and layers to leave out.
        requantise: allow weights that are quantised already.
        rehearse: only find the size.
        progress: called with the phase, the steps done and in all.

    Raises:
        UsageError: `out` exists, or there is no such type or layer.
        ModelError: it cannot be made of this file.
        EdgespecError: the disk has no room, or cannot be written.
    """
    report = progress or (lambda what, done, total: None)
    check_names(recipe)
    check_out(out)
    path = source.with_name(part_names(source.name)[0])
    check_model(path)
    for part in part_names(source.name):
        check_header(path.with_name(part))
    check_drop(path, recipe.drop)
    matrix = recipe.imatrix or ("auto" if recipe.needs_matrix else "none")
    job: dict[str, Any] = {
        "source": str(path), "out": "", "type": recipe.type, "types": _spare_heads(path, recipe), "drop": recipe.drop,
        "requantise": requantise, "notes": {"general.quantized_by": f"edgespec {__version__}"}, "rehearse": True,
        "imatrix": "" if matrix == "none" else "unknown",
    }  # fmt: skip
    found = _child("quantise", job, lambda line: None)
    check_tensors(path, found["tensors"], recipe, requantise)
    size = found["bytes"]
    if rehearse:
        return Written(size, 0)
    check_space(out, size)
    with appearing(out) as partial:
        if matrix != "none":
            job["imatrix"], origin = _matrix(path, matrix, partial, report)
            job["notes"] |= {"quantize.imatrix.file": origin}
        job |= {"out": str(partial), "rehearse": False}
        made = _child("quantise", job, lambda line: report("quantising", line["done"], line["total"]))["bytes"]
    return Written(made, out.stat().st_size)


def _spare_heads(path: Path, recipe: Recipe) -> list[tuple[str, str]]:
    """The recipe's types of tensors; a head gets q6_K in place of types that need a matrix, since none is of heads."""
    if not recipe.needs_matrix or not (heads := head_layers(str(path))):
        return list(recipe.types)
    layers = int(own_values(str(path)).get("block_count", heads))
    kept = [layer for layer in range(layers) if layer not in recipe.drop]  # llama.cpp numbers them anew
    spared, types = [i for i, layer in enumerate(kept) if layer >= layers - heads], list[tuple[str, str]]()
    for pattern, name in recipe.types:
        if name.upper() in NEED_MATRIX_AS_TENSORS:
            types += [(rf"^(?=blk\.{i}\.).*(?:{pattern})", "q6_K") for i in spared]
        types.append((pattern, name))
    return types + [(rf"^blk\.{i}\.", "q6_K") for i in spared if recipe.type in NEED_MATRIX]


def _matrix(source: Path, asked: str, partial: Path, report: Progress) -> tuple[str, str]:
    if asked != "auto" and is_gguf(asked):
        return asked, Path(asked).name
    own_text, out = partial.with_name(f"{partial.name}.txt"), partial.with_name(f"{partial.name}.imatrix")
    text = own_text if asked == "auto" else Path(asked)
    if asked == "auto":
        text.write_text(calibration_text(str(source)), encoding="utf-8")
        origin = "computed from Python's documentation and library"
    else:
        try:
            read_text(text, UsageError)
        except UsageError as error:
            raise UsageError(f"{error}; an importance matrix must be a GGUF, or computed from text") from error
        origin = f"computed from {text.name}"
    job = {"source": str(source), "out": str(out), "text": str(text), "remove": [str(own_text)], "chunks": CHUNKS}
    _child("imatrix", job, lambda line: report("importance matrix", line["done"], line["total"]))
    return str(out), origin


def _child(module: str, job: Mapping[str, Any], progress: Any) -> dict[str, Any]:
    """
    Raises:
        ModelError: the child process failed, with its message.
    """
    command = [sys.executable, "-P", "-m", f"edgespec.backends.llamacpp.tools.{module}", json.dumps(job)]
    environment = os.environ | {"GGML_NO_BACKTRACE": "1"}  # a debugger that ggml starts may never end
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    line: dict[str, Any] = {"error": "it gave no reason"}
    with subprocess.Popen(command, env=environment, text=True, **pipes) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            for text in process.stdout:
                line = json.loads(text)
                if "done" in line:
                    progress(line)
        except BaseException:
            process.stdin.close()  # the child then removes its files and ends
            process.wait(10)
            raise
        process.stdin.close()
    if process.returncode or "error" in line:
        why, named = line.get("error", "it ended early"), f"{job['source']}: "
        raise ModelError(why if why.startswith(named) else named + why)
    return line


@cache
def _types() -> dict[str, list[str]]:
    gguf = import_gguf()
    files = [kind.name.removeprefix("MOSTLY_").removeprefix("ALL_") for kind in gguf.LlamaFileType]
    tensors = [kind.name for kind in gguf.GGMLQuantizationType if kind.name not in NOT_OF_FILES]
    return {"files": sorted(set(files) - {"GUESSED"}), "tensors": tensors}
