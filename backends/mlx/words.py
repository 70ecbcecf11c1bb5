"""Arrays of words, which threads fill without MLX; weights are views of them."""

from collections.abc import Sequence
from math import prod
from typing import Any

import mlx.core as mx
import numpy as np

NUMBER = 16  # bytes; alignment that kernels need
WORD = 8  # bytes


def new_words(size: int) -> Any:
    """At least `size` bytes, in words of 8, since an axis of an array is shorter than 2**31."""
    array = mx.zeros(-(-size // WORD), mx.uint64)
    mx.eval(array)
    return array


def weight(words: Any, start: int, dtype: Any, shape: Sequence[int]) -> Any:
    """A weight that begins at byte `start` of `words`, as a view."""
    count, skip = prod(shape), start % WORD // dtype.size
    part = words[start // WORD : -(-(start + count * dtype.size) // WORD)]
    if shape and start % WORD == count // shape[0] * dtype.size % WORD == 0:
        return part.reshape(shape[0], -1).view(dtype).reshape(shape)  # no axis has all numbers of a pool
    return part.view(dtype)[skip : skip + count].reshape(shape)


def address(array: Any) -> int:
    return int(np.asarray(memoryview(array)).ctypes.data)
