"""Linear layers in NF4, a 4-bit format (QLoRA, arXiv 2305.14314).

bitsandbytes needs no compiler, and its plain tensors can be views of a streaming buffer; torchao's int4 tensors cannot.
"""

import logging
from typing import Any

import torch

from edgespec.errors import MissingPackage, ModelError

from .offload import aligned

try:
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # hides recommendations of other packages
    import bitsandbytes
    from bitsandbytes.functional import QuantState, quantize_4bit
except ImportError as error:
    raise MissingPackage("bitsandbytes", "nf4", "4-bit weights (nf4)") from error

GROUP = 64  # weights that share a scale


class NF4Linear(torch.nn.Module):  # type: ignore[misc]
    """y = x W^T + b, with W [out, in] in 4.5 bits a weight.

    Attributes:
        codes: 4 bits a weight, uint8 [out * in / 2, 1].
        scales: float32 [out * in / GROUP].
        levels: the values of codes, float32 [16].
        bias: b [out], or None.
    """

    def __init__(self, linear: Any) -> None:
        super().__init__()
        weight = linear.weight.detach()
        codes, state = quantize_4bit(weight.contiguous(), quant_type="nf4", blocksize=GROUP)
        self._shape = weight.shape
        self.register_buffer("codes", codes)
        self.register_buffer("scales", state.absmax)
        self.register_buffer("levels", state.code)
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach())

    def forward(self, x: Any) -> Any:
        """[..., in] -> [..., out]."""
        state = QuantState(
            absmax=self.scales, shape=self._shape, code=self.levels, blocksize=GROUP, quant_type="nf4", dtype=x.dtype
        )
        return bitsandbytes.matmul_4bit(x, self.codes.t(), quant_state=state, bias=self.bias)


def quantised_bytes(layer: Any) -> int:
    """Bytes of a layer's block after `quantise`."""
    total = 0
    for module in layer.modules():
        if isinstance(module, torch.nn.Linear):
            count, bias = module.weight.numel(), module.bias
            sizes = [-(-count // 2), 4 * -(-count // GROUP), 4 * 16, 0 if bias is None else bias.nbytes]
        else:
            tensors = [*module._parameters.values(), *module._buffers.values()]
            sizes = [tensor.nbytes for tensor in tensors if tensor is not None]
        total += sum(map(aligned, sizes))
    return total


def quantise(layer: Any) -> None:
    """Replace the linear modules of a decoder layer by `NF4Linear`.

    Raises:
        ModelError: the layer has fused experts, which are no linear modules.
    """
    for module in list(layer.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, torch.nn.Linear):
                setattr(module, name, NF4Linear(child))
    wide = [name for name, parameter in layer.named_parameters() if parameter.ndim > 2]
    if wide:
        raise ModelError(
            f"nf4 is for linear layers, but the experts' weights are fused ({wide[0]}): use a 16-bit dtype"
        )
