"""Linear layers in NF4, a 4-bit format (QLoRA, arXiv 2305.14314), quantised here or as bitsandbytes has stored them.

bitsandbytes needs no compiler, and its plain tensors can be views of a streaming buffer; torchao's int4 tensors cannot.
"""

import hashlib
import json
import logging
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.quantizers.quantizers_utils import get_module_from_name, should_convert_module
from transformers.utils.quantization_config import QuantizationConfigMixin

from edgespec.errors import MissingPackage, ModelError, failing_as
from edgespec.machine.files import cache_folder, write_whole
from edgespec.machine.memory import format_size

from .offload import aligned, stored_tensors

try:
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # hides recommendations of other packages
    import bitsandbytes
    from bitsandbytes.functional import QuantState, dequantize_blockwise, quantize_4bit
except ImportError as error:
    raise MissingPackage("bitsandbytes", "nf4", "4-bit weights (nf4)") from error

GROUP = 64  # weights that share a scale
METHOD = "edgespec_nf4"
STATE = "weight.quant_state.bitsandbytes__nf4"
STORED = ("weight", "weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map", STATE)
PARTS = ("weight", "scales", "levels")
NESTED = ("nested_scales", "nested_levels", "nested_offset")
NESTED_GROUP = 256  # scales that share one of their own; bitsandbytes multiplies with no other number
KEPT = "packed"  # in the cache folder
LAYOUT = 1  # version of kept layers


class NF4Linear(torch.nn.Module):  # type: ignore[misc]
    """y = x W^T + b, with W [out, in] in 4.5 bits a weight, or 4.13 with nested scales.

    Attributes:
        weight: 4 bits a weight, uint8 [out * in / 2, 1].
        scales: float32 [out * in / group]; nested ones are codes, uint8.
        levels: the values of codes, float32 [16].
        nested_scales: of the codes of `NESTED_GROUP` scales each, float32, or None.
        nested_levels: the values of these codes, float32 [256], or None.
        nested_offset: that all scales have lost, float32 [], or None.
        bias: b [out], or None.
    """

    def __init__(self, linear: Any) -> None:
        """Replace `linear`, whose 4-bit weights come later."""
        super().__init__()
        self._shape, self._group = linear.weight.shape, GROUP
        codes = torch.empty((-(-linear.weight.numel() // 2), 1), dtype=torch.uint8, device="meta")
        self.register_buffer("weight", codes)
        for name in (*PARTS[1:], *NESTED):
            self.register_buffer(name, None)
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach())

    @classmethod
    def quantised(cls, linear: Any) -> "NF4Linear":
        made = cls(linear)
        made.weight, state = quantize_4bit(linear.weight.detach().contiguous(), quant_type="nf4", blocksize=GROUP)
        made.scales, made.levels = state.absmax, state.code
        return made

    def take(self, stored: dict[str, Any]) -> None:
        """Use what bitsandbytes has stored, by the names `STORED`."""
        about = {name.removeprefix("weight."): tensor for name, tensor in stored.items() if name != "weight"}
        state = QuantState.from_dict(about, device=torch.device("cpu"))
        self._group, scales = state.blocksize, state.absmax
        if state.nested and state.state2.blocksize == NESTED_GROUP:
            nested = state.state2.absmax, state.state2.code, state.offset
            self.nested_scales, self.nested_levels, self.nested_offset = (one.float() for one in nested)
        else:
            scales = dequantize_blockwise(scales, state.state2) + state.offset if state.nested else scales.float()
        self.weight, self.scales, self.levels = stored["weight"].view(torch.uint8), scales, state.code

    def forward(self, x: Any) -> Any:
        """[..., in] -> [..., out]."""
        nested = None
        if self.nested_scales is not None:
            nested = QuantState(
                absmax=self.nested_scales, code=self.nested_levels, blocksize=NESTED_GROUP, dtype=torch.float32
            )
        state = QuantState(
            absmax=self.scales, shape=self._shape, code=self.levels, blocksize=self._group, quant_type="nf4",
            dtype=x.dtype, state2=nested, offset=self.nested_offset,
        )  # fmt: skip
        return bitsandbytes.matmul_4bit(x, self.weight.t(), quant_state=state, bias=self.bias)


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


def linears(layer: Any) -> Iterator[tuple[Any, str, Any, str]]:
    """
    Yields:
        For each linear module: its owner, its name there, the module, and its name in the layer.
    """
    for path, module in list(layer.named_modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, torch.nn.Linear):
                yield module, name, child, f"{path}.{name}".removeprefix(".")


def quantise(layer: Any) -> None:
    """Replace the linear modules of a decoder layer by `NF4Linear`.

    Raises:
        ModelError: the layer has fused experts, which are no linear modules.
    """
    for owner, name, linear, _ in linears(layer):
        setattr(owner, name, NF4Linear.quantised(linear))
    wide = [
        f"{name}.{of}".removeprefix(".")
        for name, module in layer.named_modules()
        if not isinstance(module, torch.nn.Conv1d)
        for of, parameter in module.named_parameters(recurse=False)
        if parameter.ndim > 2
    ]
    if wide:
        raise ModelError(
            f"nf4 is for linear layers, but the experts' weights are fused ({wide[0]}): use a 16-bit dtype"
        )


class KeptLayers:
    """Quantised layers in the cache folder, one file each; the next start need not quantise them.

    Attributes:
        note: for the user.
    """

    def __init__(self, folder: Path, dtype: Any, layers: Sequence[Any]) -> None:
        """
        Args:
            folder: of the model.
            dtype: of its weights.
            layers: not quantised.

        Raises:
            ModelError: the disk has no room for them.
        """
        files = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in folder.glob("*.safetensors")]
        about = json.dumps([LAYOUT, str(folder.resolve()), str(dtype), sorted(files)])
        name = f"{folder.resolve().name}-{hashlib.sha256(about.encode()).hexdigest()[:16]}"
        self._folder = cache_folder() / KEPT / name
        self._numbers = {id(layer): number for number, layer in enumerate(layers)}
        sizes = [quantised_bytes(layer) for layer in layers]
        wanted = sum(size for layer, size in zip(layers, sizes, strict=True) if not self._file(layer).is_file())
        with failing_as(ModelError, f"{self._folder}: cannot be written"):
            self._folder.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self._folder).free
        if wanted > free:
            raise ModelError(
                f"{self._folder}: --keep-packed writes {format_size(wanted, up=True)} of layers there, but only "
                f"{format_size(free)} are free"
            )
        self.note = f"{format_size(sum(sizes))} of 4-bit layers are kept in {self._folder} (--keep-packed)"

    def _file(self, layer: Any) -> Path:
        return self._folder / f"layer-{self._numbers[id(layer)]:05}.safetensors"

    def take(self, layer: Any) -> bool:
        """
        Returns:
            True if the layer has been replaced by the one that is kept.
        """
        try:
            found = load_file(self._file(layer))
        except (OSError, SafetensorError):
            return False
        made = [(owner, name, path, NF4Linear(linear)) for owner, name, linear, path in linears(layer)]
        if found.keys() != {f"{path}.{one}" for *_, path, _ in made for one in PARTS} or any(
            found[f"{path}.weight"].shape != kept.weight.shape for *_, path, kept in made
        ):
            return False  # another version of transformers has other modules
        for owner, name, path, kept in made:
            kept.weight, kept.scales, kept.levels = (found[f"{path}.{one}"] for one in PARTS)
            setattr(owner, name, kept)
        return True

    def keep(self, layer: Any) -> None:
        """
        Raises:
            ModelError: it cannot be written.
        """
        quantised = [path for path, module in layer.named_modules() if isinstance(module, NF4Linear)]
        tensors = {
            f"{prefix}{name}": store[name]
            for prefix, store, name, _ in stored_tensors(layer)
            if prefix[:-1] in quantised and name != "bias"
        }
        with failing_as(ModelError, f"{self._file(layer)}: cannot be written"):
            write_whole(self._file(layer), save(tensors))


# transformers' own loader of such folders needs the package accelerate, and copies all weights to memory.


@register_quantization_config(METHOD)
@dataclass
class StoredConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """
    Attributes:
        skipped: names of modules that are not quantised; None: those that transformers leaves alone.
    """

    quant_method: str = METHOD
    skipped: list[str] | None = None


class Unpack(ConversionOps):  # type: ignore[misc]
    def __init__(self, quantizer: Any) -> None:
        self.hf_quantizer = quantizer  # so that transformers changes no type

    def convert(
        self, input_dict: dict[str, Any], model: Any = None, full_layer_name: str = "", **options: Any
    ) -> dict[str, Any]:
        found = {name: value[0] if isinstance(value, list) else value for name, value in input_dict.items()}
        module, _ = get_module_from_name(model, full_layer_name)
        if len(found) == 1 or not isinstance(module, NF4Linear):
            return input_dict
        module.take(found)
        return {"weight": module.weight}


@register_quantizer(METHOD)
class StoredQuantizer(HfQuantizer):  # type: ignore[misc]
    def _process_model_before_weight_loading(self, model: Any, **options: Any) -> None:
        kept = self.get_modules_to_not_convert(model, self.quantization_config.skipped, model._keep_in_fp32_modules)
        for owner, name, linear, path in linears(model):
            if should_convert_module(path, kept):
                setattr(owner, name, NF4Linear(linear))

    def get_weight_conversions(self) -> list[Any]:
        return [WeightConverter(list(STORED), "weight", [Unpack(self)])]

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False
