"""A frozen target's states over texts, its embeddings and its output matrix."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from edgespec.backends.torch.loading import decoder_layers, load_model
from edgespec.backends.torch.logits import KeptInputs

from edgespec.errors import ModelError
from edgespec.models.convert.folder_from_gguf import check_space
from edgespec.models.heads import default_layers
from heads.answers import Sample

STORED = torch.bfloat16


@dataclass(slots=True)
class Target:
    """
    Attributes:
        model: of transformers, on the device.
        layers: whose inputs a head reads.
        device: where it computes.
    """

    model: Any
    layers: Sequence[int]
    device: Any

    @property
    def config(self) -> Any:
        return self.model.config.get_text_config()

    @property
    def embeddings(self) -> Any:
        return self.model.get_input_embeddings().weight.detach()

    @property
    def output(self) -> Any:
        return self.model.get_output_embeddings().weight.detach()


def load_target(folder: Path, layers: Sequence[int] | None, device: Any) -> Target:
    """
    Raises:
        ModelError: the folder cannot be loaded, or its model has no such layers.
    """
    model = load_model(folder, "float32")
    model.set_attn_implementation("sdpa")
    count = len(decoder_layers(model))
    chosen = list(layers or default_layers(count))
    if min(chosen) < 0 or max(chosen) >= count:
        raise ModelError(f"{folder}: has {count} layers, so a head cannot read the inputs of {chosen}")
    if has_fast_products(device):  # the states that layers add to stay in float32
        for module in decoder_layers(model).modules():
            if isinstance(module, torch.nn.Linear):
                module.to(STORED)
    return Target(model.to(device), chosen, device)


def computing(device: Any) -> Any:
    return torch.autocast(device.type, STORED, enabled=has_fast_products(device))


def has_fast_products(device: Any) -> bool:
    """The device multiplies in 16 bits much faster than in 32."""
    return device.type != "cpu" or bool(torch.cpu.get_capabilities().get("avx512_bf16"))


def record(target: Target, samples: Sequence[Sample], path: Path, progress: Callable[[int, int], None]) -> None:
    """Write the states of the samples that `path` lacks, one after the other.

    A token's row: the inputs of the layers, and the normed state before the output matrix.

    Raises:
        EdgespecError: the disk has no room.
    """
    width = (len(target.layers) + 1) * target.config.hidden_size
    total, done, rows = sum(len(sample.token_ids) for sample in samples), 0, 0
    kept = path.stat().st_size // (width * STORED.itemsize) if path.exists() else 0
    check_space(path, (total - kept) * width * STORED.itemsize)
    with path.open("ab") as file, torch.inference_mode(), computing(target.device):
        for sample in samples:
            rows += len(sample.token_ids)
            if rows <= kept:
                done = rows
                continue
            file.truncate(done * width * STORED.itemsize)  # of a sample that a stopped run did not end
            states = _states(target, sample.token_ids).to(STORED).cpu()
            states.view(torch.uint8).numpy().tofile(file)
            file.flush()
            done = rows
            progress(done, total)


def _states(target: Target, token_ids: Sequence[int]) -> Any:
    layers, ids = decoder_layers(target.model), torch.tensor([list(token_ids)], device=target.device)
    kept = KeptInputs([layers[layer] for layer in target.layers])
    try:
        last = target.model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
    finally:
        kept.close()
    return torch.cat([*kept.parts, last[0]], -1)


def read_states(path: Path, samples: Sequence[Sample], width: int) -> list[Any]:
    """The recorded rows of each sample, mapped into memory."""
    rows = sum(len(sample.token_ids) for sample in samples)
    states = torch.from_file(str(path), shared=False, size=rows * width, dtype=STORED).view(rows, width)
    return list(states.split([len(sample.token_ids) for sample in samples]))
