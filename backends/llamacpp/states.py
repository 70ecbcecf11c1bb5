"""States of a pass's rows: functions that llama.cpp exports, but keeps out of its interface (src/llama-ext.h).

Rows are those of the batch, whatever parts llama.cpp computes it in.
"""

import ctypes
from collections.abc import Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np

from edgespec.errors import ModelError
from edgespec.loop.sampling import Float32Array

from .ggml.files import llama_cpp

SINCE = "0.3.36"  # llama-cpp-python
# Architectures whose states NEXTN are of all rows, so that the last layer is not computed for wanted rows only. Row
# classes are probed accordingly. Other states change no bit: ggml-cpu fuses a norm with its weights only.
WHOLE_LAST_LAYER = ("deepseek2", "glm4moe", "mimo2")
LAST_LAYER = "last_layer"  # in `Backend.computing`
NEXTN = -1  # in place of a layer: what heads of the model's own file start from
_FLOATS, _CONTEXT = ctypes.POINTER(ctypes.c_float), ctypes.c_void_p
# Name -> its parameters as C++ mangles them (on Linux and macOS), its result, its parameters.
_FUNCTIONS: dict[str, tuple[str, Any, list[Any]]] = {
    "llama_set_embeddings_nextn": ("P13llama_contextbb", None, [_CONTEXT, ctypes.c_bool, ctypes.c_bool]),
    "llama_get_embeddings_nextn": ("P13llama_context", _FLOATS, [_CONTEXT]),
    "llama_set_embeddings_layer_inp": ("P13llama_contextjb", None, [_CONTEXT, ctypes.c_uint32, ctypes.c_bool]),
    "llama_get_embeddings_layer_inp": ("P13llama_contextj", _FLOATS, [_CONTEXT, ctypes.c_uint32]),
    "llama_set_nextn_layer_offset": ("P13llama_contexti", None, [_CONTEXT, ctypes.c_int32]),
    "llama_model_target_layer_ids": ("PK11llama_model", ctypes.POINTER(ctypes.c_int32), [ctypes.c_void_p]),
}


@cache
def functions() -> Any:
    """
    Raises:
        ModelError: the installed llama.cpp lacks some.
    """
    library, found = llama_cpp.llama_cpp._lib, SimpleNamespace()
    missing = []
    for name, (mangled, result, parameters) in _FUNCTIONS.items():
        names = (name, f"_Z{len(name)}{name}{mangled}")
        function = next((getattr(library, one) for one in names if hasattr(library, one)), None)
        if function is None:
            missing.append(name)
            continue
        function.restype, function.argtypes = result, parameters
        setattr(found, name, function)
    if missing:
        raise ModelError(
            f"drafting with a head needs {', '.join(missing)} of llama.cpp, which llama-cpp-python "
            f"{llama_cpp.__version__} lacks: {SINCE} has it"
        )
    return found


def states_of(model: Any, context: Any, layers: Sequence[int]) -> "RowStates":
    """States of a target; arguments as for `RowStates`."""
    size = llama_cpp.llama_model_n_embd_out if NEXTN in layers else llama_cpp.llama_model_n_embd
    return RowStates(context, int(size(model)), layers)


class RowStates:
    """Keeps states in a context's passes, from now on."""

    def __init__(self, context: Any, width: int, layers: Sequence[int], *, masked: bool = False) -> None:
        """
        Args:
            context: llama.cpp's.
            width: of each state.
            layers: whose inputs are kept, or NEXTN.
            masked: as for llama_set_embeddings_nextn.
        """
        self._context, self._width, self._layers = context, width, layers
        self._keep(True, masked)

    def _keep(self, on: bool, masked: bool) -> None:
        for layer in self._layers:
            if layer == NEXTN:
                functions().llama_set_embeddings_nextn(self._context, on, masked)
            else:
                functions().llama_set_embeddings_layer_inp(self._context, layer, on)

    def close(self) -> None:
        self._keep(False, False)

    @property
    def size(self) -> int:
        """Numbers of a row."""
        return self._width * len(self._layers)

    def rows(self, rows: Sequence[int]) -> Float32Array:
        """Copies for some rows of the last pass, [n, size], layer after layer."""
        found = np.empty((len(rows), len(self._layers), self._width), np.float32)
        start, size = found.ctypes.data, self._width * found.itemsize
        for i, layer in enumerate(self._layers if rows else ()):
            if layer == NEXTN:
                pointer = functions().llama_get_embeddings_nextn(self._context)
            else:
                pointer = functions().llama_get_embeddings_layer_inp(self._context, layer)
            states = ctypes.addressof(pointer.contents)
            for j, row in enumerate(rows):  # for one row, as in plain decoding, half the time of numpy's indexing
                ctypes.memmove(start + (j * len(self._layers) + i) * size, states + row * size, size)
        return found.reshape(len(rows), self.size)
