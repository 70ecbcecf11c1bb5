"""Tensors of a compute graph in llama.cpp's memory, read and changed in place."""

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .files import ggml_base


class GgmlTensor(ctypes.Structure):
    """struct ggml_tensor of ggml.h, as far as it is used here; `is_known` checks it."""

    _fields_ = (
        ("type", ctypes.c_int32),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
        ("op", ctypes.c_int32),
        ("op_params", ctypes.c_int32 * 16),
        ("flags", ctypes.c_int32),
        ("src", ctypes.c_void_p * 10),
        ("view_src", ctypes.c_void_p),
        ("view_offs", ctypes.c_size_t),
        ("data", ctypes.c_void_p),
        ("name", ctypes.c_char * 64),
    )


def is_known(address: int) -> bool:
    """True if this build's tensors are laid out as `GgmlTensor`."""
    base, tensor = ggml_base(), GgmlTensor.from_address(address)
    same = base.ggml_get_name(address) == tensor.name and (base.ggml_get_data(address) or 0) == (tensor.data or 0)
    return bool(same and base.ggml_nelements(address) == np.prod(list(tensor.ne)))


def is_here(address: int) -> bool:
    """True if a tensor lies in the processor's memory."""
    tensor = GgmlTensor.from_address(address)
    buffer = tensor.buffer or (GgmlTensor.from_address(tensor.view_src).buffer if tensor.view_src else None)
    return bool(buffer and ggml_base().ggml_backend_buffer_is_host(buffer))


def numbers_of(address: int, kind: Any, count: int) -> NDArray[Any]:
    """A tensor's first numbers, in its memory, or a copy if a device has them; `kind` as of ctypes."""
    if is_here(address):
        return np.ctypeslib.as_array((kind * count).from_address(GgmlTensor.from_address(address).data))
    found = np.empty(count, kind)
    ggml_base().ggml_backend_tensor_get(address, found.ctypes.data, 0, found.nbytes)
    return found


@dataclass(frozen=True, slots=True)
class Operation:
    """
    Attributes:
        sources: addresses of its operands; 0: none.
        names: theirs.
    """

    name: bytes
    op: bytes
    sources: tuple[int, ...]
    names: tuple[bytes, ...]


def operation_at(address: int) -> Operation:
    tensor = GgmlTensor.from_address(address)
    sources = tuple(source or 0 for source in tensor.src)
    names = tuple(GgmlTensor.from_address(source).name if source else b"" for source in sources)
    return Operation(tensor.name, ggml_base().ggml_op_desc(address), sources, names)


def root_of(address: int) -> int:
    """Address of the tensor that this one is a view of, or its own."""
    return (GgmlTensor.from_address(address).view_src or address) if address else 0


def source_addresses(address: int) -> list[int]:
    return [source for source in GgmlTensor.from_address(address).src if source]


def skip_rows(product: int, numbers: int, rows: int) -> None:
    """Compute only the first rows of the next operation, a product with chosen experts; the others become 0.

    Args:
        product: address of the product.
        numbers: address of the tensor of chosen experts.
        rows: number of rows to compute; the caller must restore `ne[1]` of `numbers`.
    """
    GgmlTensor.from_address(numbers).ne[1] = rows
    found = GgmlTensor.from_address(product)
    ctypes.memset(found.data + rows * found.nb[2], 0, (found.ne[2] - rows) * found.nb[2])
