"""Seconds of passes with streamed weights, of a model of a given shape with random weights.

They are compared with max(compute, bytes / bandwidth); computation is measured on a few resident layers, and
extrapolated to all of them.
"""

import copy
import gc
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, cast

import torch
import transformers
from edgespec.backends.torch.attention import ATTENTION
from edgespec.backends.torch.backend import MIN_NODES, MIN_NODES_ON_GPU, assemble
from edgespec.backends.torch.disk import STAGING
from edgespec.backends.torch.loading import NF4, Host, cache_shape, decoder_layers, look_at, nf4_form, work_bytes
from edgespec.backends.torch.offload import BUFFERS, Block, CopyEngine, CudaCopies, block_bytes

from edgespec.errors import UsageError
from edgespec.loading.timed_pass import time_pass
from edgespec.loop.backend import Capabilities, Vocab
from edgespec.machine.memory import disk_bandwidth
from edgespec.machine.this_machine import Gpu

# Llama 3 70B (arXiv 2407.21783, table 3).
LLAMA_70B = {
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
}
CONTEXT = 512  # tokens that the cache holds besides the nodes
HOST_SHARE = 0.75
DISK_LAYERS = 8  # of a 70 B in 16 bits they are 14 GB
ONE = {"num_hidden_layers": 1}
FEW = (1, 2)  # layers of the two models whose difference is the cost of a layer

Copies = Callable[[Any, int], CopyEngine]


@dataclass(frozen=True, slots=True)
class Row:
    """
    Attributes:
        seconds: of a pass.
        compute_seconds: of the same pass without copies.
        copy_seconds: bytes / bandwidth.
        disk_seconds: bytes from disk / the disk's speed.
    """

    nodes: int
    seconds: float
    compute_seconds: float
    copy_seconds: float
    disk_seconds: float = 0.0

    @property
    def ratio(self) -> float:
        return self.seconds / max(self.compute_seconds, self.copy_seconds, self.disk_seconds)


@dataclass(frozen=True, slots=True)
class Report:
    """
    Attributes:
        streamed_bytes: of a pass.
        bandwidth: host to device, bytes per second.
        from_disk: number of layers that are read from disk.
        disk: bytes per second.
        costs: nodes -> seconds of one layer, of one more.
    """

    dtype: str
    layers: int
    full_layers: int
    streamed_layers: int
    layer_bytes: int
    streamed_bytes: int
    bandwidth: float
    rows: list[Row]
    from_disk: int = 0
    disk: float = 0.0
    costs: dict[int, tuple[float, float]] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"rows": [asdict(row) | {"ratio": row.ratio} for row in self.rows]}


class NoVocab:
    def __init__(self, size: int) -> None:
        self.size = size


def random_model(shape: dict[str, Any], dtype: str, device: Any) -> Any:
    kind = torch.bfloat16 if dtype == NF4 else getattr(torch, dtype)
    config = transformers.LlamaConfig(**shape, attn_implementation=ATTENTION, dtype=kind)
    small = copy.deepcopy(config)
    small.num_hidden_layers = 1
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.LlamaForCausalLM(small).to(kind)
    model = model.to("cpu").eval().requires_grad_(False)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # not to be rounded to 16 bits
    if dtype == NF4:
        for layer in decoder_layers(model):
            nf4_form(device).make(layer)
    layer = model.model.layers[0]
    for i in range(1, config.num_hidden_layers):
        model.model.layers.append(_alias(layer, i))
    model.config.num_hidden_layers = config.num_hidden_layers
    return model


def _alias(layer: Any, index: int) -> Any:
    shared = {id(tensor): tensor for tensor in [*layer.parameters(), *layer.buffers()]}
    other = copy.deepcopy(layer, shared)
    other.self_attn.layer_idx = index
    return other


def bandwidth(device: Any, size: int, repeats: int = 5) -> float:
    """
    Args:
        device: a CUDA device.
        size: bytes of a block.
        repeats: number of runs.

    Returns:
        Bytes per second from pinned host memory to the device, of the best run.
    """
    holder = torch.nn.Module()
    holder.register_buffer("bytes", torch.ones(size, dtype=torch.uint8))
    block = Block(holder, pin=device.type == "cuda")
    target = torch.empty(size, dtype=torch.uint8, device=device)
    seconds = []
    for _ in range(repeats):
        started = perf_counter()
        target.copy_(block.host, non_blocking=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(perf_counter() - started)
    block.close()
    return size / min(seconds)


def fitting_layers(shape: dict[str, Any], layer_bytes: int, host_bytes: int) -> int:
    return int(max(2, min(shape["num_hidden_layers"], host_bytes * HOST_SHARE // layer_bytes)))


def memory_for(shape: dict[str, Any], dtype: str, sizes: Sequence[int], resident: int) -> int:
    """Bytes of a device on which `resident` layers stay, if there are more."""
    device = torch.device("cpu")
    model, (context, nodes) = random_model(shape | ONE, dtype, device), _limits(device, sizes)
    work = work_bytes(model, Capabilities(context, nodes, nodes, nodes, 0.0), max(sizes) + 1)
    caches = cache_bytes(model, device, sizes) * shape["num_hidden_layers"]
    return int(caches + work + (resident + BUFFERS) * block_bytes(model.model.layers[0]))


def cache_bytes(model: Any, device: Any, sizes: Sequence[int]) -> int:
    _, *rest = cache_shape(model.config, sum(_limits(device, sizes)))
    return int(math.prod(rest) * model.dtype.itemsize)


def _limits(device: Any, sizes: Sequence[int]) -> tuple[int, int]:
    return CONTEXT + max(sizes), max(MIN_NODES_ON_GPU if device.type == "cuda" else MIN_NODES, max(sizes) + 1)


def _gpu(device: Any) -> Gpu | None:
    return look_at(str(device)) if device.type == "cuda" else None


def _free(device: Any) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def measure(
    shape: dict[str, Any],
    dtype: str,
    device: Any,
    memory: int,
    sizes: Sequence[int],
    *,
    host_bytes: int,
    deadline: float = float("inf"),
    copies: Copies = CudaCopies,
    known: Report | None = None,
    disk: Path | None = None,
) -> Report:
    """
    Args:
        shape: fields of a LlamaConfig.
        dtype: "bfloat16", "float16", "float32" or "nf4".
        device: where it computes.
        memory: bytes of the device's memory to use.
        sizes: nodes of the passes.
        host_bytes: free host memory; more layers than fit are left out.
        deadline: `perf_counter` time after which no further size is begun.
        copies: makes the copy engine.
        known: what was measured of the same format with all layers in host memory.
        disk: a folder; with `known`, its resident layers are measured with up to DISK_LAYERS that are read from there.

    Raises:
        UsageError: the device's memory is too small.
        ModelError: layers cannot be written.
    """
    options: dict[str, Any] = {"context_length": CONTEXT + max(sizes), "budget": max(sizes), "sessions": 1}
    vocab = cast(Vocab, NoVocab(shape["vocab_size"]))
    costs = known.costs if known else layer_costs(shape, dtype, device, sizes, vocab, copies, options)
    small = random_model(shape | ONE, dtype, device)
    layer, cache = block_bytes(small.model.layers[0]), cache_bytes(small, device, sizes)
    del small
    _free(device)
    layers, host = fitting_layers(shape, layer, host_bytes), None
    if known and disk:
        there = int(shutil.disk_usage(disk).free * HOST_SHARE // layer)
        layers = known.layers - known.streamed_layers + min(DISK_LAYERS, known.streamed_layers, there)
        host = Host(disk, STAGING * layer, 0, apart=True)
        memory -= (known.layers - layers) * cache  # the same number of layers stays
    rate = known.bandwidth if known else bandwidth(device, layer)
    model = random_model(shape | {"num_hidden_layers": layers}, dtype, device)
    backend = assemble(model, vocab, device, memory=memory, gpu=_gpu(device), copies=copies, host=host, **options)
    streamed = len(backend.streamer.blocks) if backend.streamer else 0
    sources = backend.streamer.feeder.sources if backend.streamer and backend.streamer.feeder else []
    speed = disk_bandwidth(sources[0].path, 1.0) if sources else 0.0
    rows = []
    for nodes in sizes:
        seconds = time_pass(backend, nodes).seconds
        one, more = costs[nodes]
        reading = len(sources) * layer / speed if sources else 0.0
        rows.append(Row(nodes, seconds, one + (layers - 1) * more, streamed * layer / rate, reading))
        if perf_counter() > deadline:
            break
    backend.close()
    del model, backend
    _free(device)
    full = shape["num_hidden_layers"]
    return Report(dtype, layers, full, streamed, layer, streamed * layer, rate, rows, len(sources), speed, costs)


def layer_costs(
    shape: dict[str, Any], dtype: str, device: Any, sizes: Sequence[int], vocab: Vocab, copies: Copies,
    options: dict[str, Any],
) -> dict[int, tuple[float, float]]:  # fmt: skip
    """
    Returns:
        Nodes -> seconds of a pass with one resident layer, and of each further layer.

    Raises:
        UsageError: the device's memory is too small.
    """
    few = []
    for count in FEW:
        model = random_model(shape | {"num_hidden_layers": count}, dtype, device)
        backend = assemble(model, vocab, device, memory=None, gpu=_gpu(device), copies=copies, **options)
        if backend.streamer is not None:
            raise UsageError(f"too little of the GPU's memory is free to measure computation on {count} layers")
        few.append({nodes: time_pass(backend, nodes).seconds for nodes in sizes})
        backend.close()
        del model, backend
        _free(device)
    (first, one), (second, two) = zip(FEW, few, strict=True)
    more = {nodes: max(0.0, two[nodes] - one[nodes]) / (second - first) for nodes in sizes}
    return {nodes: (one[nodes] - (first - 1) * more[nodes], more[nodes]) for nodes in sizes}
