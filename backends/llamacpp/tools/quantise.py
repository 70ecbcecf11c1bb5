"""llama.cpp's quantiser as a program: it reports only in its log, cannot be stopped, and writes in place.

The job, a JSON object:

    source, out     files
    type            of llama_ftype, or "" to copy
    types           [regular expression, ggml type] for each exception
    drop            layers
    imatrix         a file from `imatrix.py`, or "unknown" for a rehearsal
    notes           keys and strings for the header
    requantise      allow quantised sources
    rehearse        write no file

Lines to the parent: {tensor, done, total}; at the end {bytes: of all tensors in the file, with padding,
tensors: {name: old type}}.
"""

import ctypes
import os
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from edgespec.errors import ModelError, UsageError
from edgespec.loop.sampling import Float32Array
from edgespec.models.gguf_header import check_header

from ..ggml.files import check_whole, ggml_base, llama_cpp
from .child import Say, serve

FTYPES = {
    name.removeprefix("LLAMA_FTYPE_").removeprefix("MOSTLY_").removeprefix("ALL_"): getattr(llama_cpp, name)
    for name in dir(llama_cpp)
    if name.startswith(("LLAMA_FTYPE_MOSTLY_", "LLAMA_FTYPE_ALL_"))
}
ALIGNMENT = 32
# "[   1/ 272]  token_embd.weight  - [  576, 49152,     1,     1], type =   bf16, size =    54.00 MiB ->    28.69 MiB"
LINE = re.compile(r"\[ *(\d+)/ *(\d+)\] +(\S+) +- \[([\d, ]+)\], type = +(\w+), ")
NEW_TYPE = re.compile(r"(?:MiB \(|converting to )(\w+)")


def ggml_types() -> dict[str, int]:
    """Number of each, by its name in lower case."""
    found = {i: ggml_base().ggml_type_name(i) for i in range(llama_cpp.GGML_TYPE_COUNT)}
    return {text.decode().lower(): i for i, text in found.items() if text and text != b"NONE"}


class _Log:
    def __init__(self, say: Say) -> None:
        self.bytes = 0
        self.tensors: dict[str, str] = {}
        self.complaints: list[str] = []
        self._say, self._text = say, ""
        self._shape, self._type = list[int](), ""
        self._types = ggml_types()

    def take(self, level: int, text: bytes, user_data: Any) -> None:
        if level == 4:  # GGML_LOG_LEVEL_ERROR
            self.complaints += [
                line for line in text.decode("utf-8", "replace").strip().split("\n") if line.strip("= ")
            ]
        self._text += text.decode("utf-8", "replace")
        *lines, self._text = self._text.split("\n")
        for line in lines:
            self._line(line)
        if match := LINE.match(self._text):
            self._say({"tensor": match[3], "done": int(match[1]) - 1, "total": int(match[2])})

    def _line(self, line: str) -> None:
        if match := LINE.match(line):  # other messages may stand before the rest of the line
            self.tensors[match[3]] = match[5].upper()
            self._shape, self._type = [int(number) for number in match[4].split(",")], match[5]
        if new := NEW_TYPE.search(line):
            self._type = new[1]
        if " MiB" in line and self._shape:
            size = ggml_base().ggml_row_size(self._types[self._type.lower()], self._shape[0]) * int(
                np.prod(self._shape[1:])
            )
            self.bytes += -(-size // ALIGNMENT) * ALIGNMENT
            self._shape = []

    def reason(self) -> str:
        found = next((line for line in self.complaints), "llama.cpp gave no reason")
        return re.sub(r"^.*?: (failed to quantize: )?", "", found).strip(" -")


def read_imatrix(path: str) -> dict[str, Float32Array]:
    """
    Returns:
        Mean squares of each weight's inputs, by name: [experts * columns].

    Raises:
        ModelError: not an importance matrix in a GGUF.
    """
    from gguf import GGUFReader

    check_header(path)
    try:
        tensors = {tensor.name: tensor.data for tensor in GGUFReader(path).tensors}
        names = [name.removesuffix(".in_sum2") for name in tensors if name.endswith(".in_sum2")]
        found = {}
        for name in names:
            sums = np.asarray(tensors[f"{name}.in_sum2"], np.float32)
            counts = np.asarray(tensors[f"{name}.counts"], np.float32).reshape(-1, 1)
            experts = sums.reshape(len(counts), -1)
            found[name] = np.where(counts > 0, experts / np.maximum(counts, 1), 1).astype(np.float32).ravel()
    except (ValueError, IndexError, KeyError, OSError) as error:
        raise ModelError(f"{path}: is not an importance matrix in a GGUF, or is cut off") from error
    if not found:
        raise ModelError(f"{path}: is a GGUF without an importance matrix")
    return found


def parameters(job: Mapping[str, Any], keep: list[Any]) -> Any:
    """llama.cpp's parameters for a job, valid as long as `keep`, which gets the memory they point to."""
    params = llama_cpp.llama_model_quantize_default_params()
    params.dry_run, params.allow_requantize = job["rehearse"], job["requantise"]
    if job["type"]:
        params.ftype = FTYPES[job["type"]]
    else:
        params.only_copy = True
    if job["drop"]:
        params.prune_layers = (ctypes.c_int32 * (len(job["drop"]) + 1))(*job["drop"], -1)
    if job["types"]:
        types = ggml_types()
        rows = (llama_cpp.llama_model_tensor_override * (len(job["types"]) + 1))()
        for row, (pattern, type_) in zip(rows, job["types"], strict=False):
            row.pattern, row.type = pattern.encode(), types[type_.lower()]
        params.tt_overrides = rows
        keep.append(rows)
    if job["imatrix"]:
        unknown = job["imatrix"] == "unknown"
        matrix = {"none": np.zeros(1, np.float32)} if unknown else read_imatrix(job["imatrix"])
        entries = (llama_cpp.llama_model_imatrix_data * (len(matrix) + 1))()
        for entry, (name, values) in zip(entries, matrix.items(), strict=False):
            entry.name, entry.size = name.encode(), values.size
            entry.data = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        params.imatrix = entries
        keep += [entries, matrix]
    notes = (llama_cpp.llama_model_kv_override * (len(job["notes"]) + 1))()
    for note, (key, text) in zip(notes, job["notes"].items(), strict=False):
        note.tag, note.key = llama_cpp.LLAMA_KV_OVERRIDE_TYPE_STR, key.encode()
        note.value.val_str = text.encode()[:127].decode("utf-8", "ignore").encode()
    params.kv_overrides = notes
    keep.append(notes)
    return params


def work(job: dict[str, Any], say: Say) -> None:
    """
    Raises:
        ModelError: the source is cut off, or llama.cpp refused.
        UsageError: the type is unknown.
    """
    if job["type"] and job["type"] not in FTYPES:
        raise UsageError(f"there is no type {job['type']!r}; there are: {', '.join(sorted(FTYPES))}")
    check_whole(job["source"])
    log, keep = _Log(say), list[Any]()
    callback = llama_cpp.llama_log_callback(log.take)
    llama_cpp.llama_log_set(callback, ctypes.c_void_p(0))
    params = parameters(job, keep)
    source, out = os.fsencode(job["source"]), os.fsencode(job["out"] or os.devnull)
    status = llama_cpp.llama_model_quantize(source, out, ctypes.byref(params))
    del keep
    if status != 0:
        reason = log.reason()  # of C++'s streams, which only write
        failed = "the result cannot be written: is there room on its disk, and in your quota?"
        raise ModelError(failed if "iostream" in reason else reason)
    say({"bytes": log.bytes, "tensors": log.tensors})


if __name__ == "__main__":
    serve(work)
