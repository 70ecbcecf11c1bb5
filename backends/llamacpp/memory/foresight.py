"""Predicts what a layer's router will choose, before its layer is computed, so that experts can be read meanwhile.

A router is shown what the layer before it gave to its own experts: from layer to layer this changes little.
"""

import ctypes
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from edgespec.loop.sampling import Float32Array
from edgespec.weights.expert_memory import ROWS_SHOWN, most_predicted

from ..ggml.ggml_tensor import GgmlTensor, Operation, numbers_of, root_of

F32 = 0  # ggml_type
BIASES = {  # name of a sum; where probabilities are weights of chosen experts only, their name hides that of the logits
    "ffn_moe_logits_biased": "bias",
    "ffn_moe_probs": "bias",
    "ffn_moe_probs_biased": "bias_of_probabilities",
}


@dataclass(frozen=True, slots=True)
class Router:
    """
    Attributes:
        weight: [experts, width].
        bias: [experts] of the logits.
        softmax: probabilities are that of the logits; else their sigmoids.
        bias_of_probabilities: [experts]; None: they choose as the logits do.
    """

    weight: Float32Array
    bias: Float32Array | float = 0.0
    softmax: bool = False
    bias_of_probabilities: Float32Array | None = None

    def best(self, inputs: Float32Array, used: int) -> list[int]:
        """
        Args:
            inputs: [rows, width].
            used: experts that a token uses.

        Returns:
            Experts that the rows are most likely to choose, each once.
        """
        # Not by BLAS, whose threads would take the processor from those that compute.
        scores = np.einsum("ij,kj->ik", inputs[:ROWS_SHOWN], self.weight) + self.bias
        if self.bias_of_probabilities is not None:
            if self.softmax:
                scores = np.exp(scores - scores.max(axis=1, keepdims=True))
                scores /= scores.sum(axis=1, keepdims=True)
            else:
                scores = 1 / (1 + np.exp(-scores))
            scores += self.bias_of_probabilities
        count = most_predicted(used)
        found: list[int] = np.unique(np.argpartition(-scores, count - 1, axis=1)[:, :count]).tolist()
        return found


def find_routers(operations: Iterable[Operation], inputs: Mapping[int, int]) -> dict[int, Router]:
    """
    Args:
        operations: of a pass.
        inputs: index of a layer -> address of what its experts read.

    Returns:
        By index of the layer, routers that read the same as the experts.
    """
    found = dict[int, Router]()
    for operation in operations:
        name, _, layer = operation.name.decode(errors="replace").rpartition("-")
        index = int(layer) if layer.isdigit() else -1
        if name == "ffn_moe_logits" and inputs.get(index) == root_of(operation.sources[1]):
            if (weight := floats(operation.sources[0])) is not None:
                found[index] = Router(weight)
        elif index in found and name in BIASES and operation.op == b"ADD":
            if (bias := floats(operation.sources[1])) is None:
                del found[index]
            else:
                found[index] = replace(found[index], **{BIASES[name]: bias[0]})
        elif index in found and name == "ffn_moe_probs":
            found[index] = replace(found[index], softmax=operation.op == b"SOFT_MAX")
    return found


def floats(address: int) -> Float32Array | None:
    """
    Returns:
        A tensor's numbers as rows, a copy if a device has them; None: they are of another type, or have gaps.
    """
    tensor = GgmlTensor.from_address(address)
    width, rows = tensor.ne[0], tensor.ne[1] * tensor.ne[2] * tensor.ne[3]
    if tensor.type != F32 or tensor.nb[0] != 4 or tensor.nb[1] != 4 * width or tensor.nb[2] != 4 * width * tensor.ne[1]:
        return None
    return numbers_of(address, ctypes.c_float, rows * width).reshape(rows, width)
