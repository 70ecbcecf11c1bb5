"""What a pass costs when weights are streamed: a random-weight model of a given shape, against what is possible.

No pass can be quicker than its computation, nor than its copies: max(compute, bytes / bandwidth). Computation is
measured without any copying, on a few resident layers of the same model, and extrapolated to all of them.
"""

import copy
import gc
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from time import perf_counter
from typing import Any, cast

import numpy as np
import torch
import transformers

from edgespec.backend import Vocab, Work, prefill
from edgespec.backends.torch.attention import ATTENTION
from edgespec.backends.torch.backend import TorchBackend, assemble
from edgespec.backends.torch.loading import NF4, decoder_layers, nf4_form
from edgespec.backends.torch.offload import Block, CopyEngine, CudaCopies, block_bytes
from edgespec.errors import UsageError

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
CONTEXT = 512  # tokens before the tree
HOST_SHARE = 0.75  # of the free host memory that weights may take
FEW = (1, 2)  # layers of the two models whose difference is the cost of a layer
REPEATS = 3


@dataclass(frozen=True, slots=True)
class Row:
    """One size of pass."""

    nodes: int
    seconds: float  # a pass, median
    compute_seconds: float  # the same without copies
    copy_seconds: float  # bytes / bandwidth

    @property
    def ratio(self) -> float:
        """The pass against the slower of its two parts; 1 is the best there can be."""
        return self.seconds / max(self.compute_seconds, self.copy_seconds)


@dataclass(frozen=True, slots=True)
class Report:
    """One format."""

    dtype: str
    layers: int  # of the model measured
    full_layers: int  # of the shape asked for
    streamed_layers: int
    layer_bytes: int
    streamed_bytes: int  # in a pass
    bandwidth: float  # host to device, bytes a second
    rows: list[Row]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"rows": [asdict(row) | {"ratio": row.ratio} for row in self.rows]}


class NoVocab:
    """The model's tokens have no texts."""

    def __init__(self, size: int) -> None:
        self.size = size


def random_model(shape: dict[str, Any], dtype: str, device: Any) -> Any:
    """A Llama of that shape on the host. All layers share one layer's random weights until they are packed."""
    kind = torch.bfloat16 if dtype == NF4 else getattr(torch, dtype)
    config = transformers.LlamaConfig(**shape, attn_implementation=ATTENTION, dtype=kind)
    small = copy.deepcopy(config)
    small.num_hidden_layers = 1
    torch.manual_seed(0)
    with torch.device(device):  # random numbers are quicker there
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
    """The layer under another number, with the same tensors."""
    shared = {id(tensor): tensor for tensor in [*layer.parameters(), *layer.buffers()]}
    other = copy.deepcopy(layer, shared)
    other.self_attn.layer_idx = index
    return other


def bandwidth(device: Any, size: int, repeats: int = 5) -> float:
    """Bytes a second from pinned host memory to the device, for blocks of `size` bytes: the best of some runs."""
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


def random_tree(nodes: int, size: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Tokens and parents."""
    generator = np.random.default_rng(nodes)
    parents = [int(generator.integers(max(-1, i - 16), i)) for i in range(nodes)]
    return generator.integers(0, size, nodes).astype(np.int32), np.array(parents, np.int32)


def pass_seconds(backend: TorchBackend, sizes: Sequence[int]) -> Iterator[tuple[int, float]]:
    """(nodes, median seconds of a pass) for trees after a text of CONTEXT tokens, all logits wanted."""
    size = backend.vocab.size
    session = backend.open()
    prefill(backend, session, [i % size for i in range(CONTEXT)])
    for nodes in sizes:
        tokens, parents = random_tree(nodes, size)
        wanted, seconds = np.arange(nodes, dtype=np.int32), []
        for _ in range(1 + REPEATS):
            started = perf_counter()
            backend.forward([Work(session, tokens, parents, wanted)])
            seconds.append(perf_counter() - started)
            session.commit([])
        yield nodes, median(seconds[1:])


def fitting_layers(shape: dict[str, Any], layer_bytes: int, host_bytes: int) -> int:
    """How many of the shape's layers the host can hold."""
    return int(max(2, min(shape["num_hidden_layers"], host_bytes * HOST_SHARE // layer_bytes)))


def host_memory() -> int:
    """Free bytes of host memory."""
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _free(device: Any) -> None:
    """Give a closed model's memory back at once: the next one is planned by what is free."""
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
    copies: Callable[[Any, int], CopyEngine] = CudaCopies,
) -> Report:
    """Measure one format.

    Args:
        shape: fields of a LlamaConfig.
        dtype: "bfloat16", "float16", "float32" or "nf4".
        device: where it computes.
        memory: bytes of the device's memory to use.
        sizes: nodes of the passes.
        host_bytes: free host memory; more layers than fit are left out.
        deadline: `perf_counter` time after which no further size is begun.
        copies: makes the copy engine.

    Raises:
        UsageError: the device's memory is too small.
    """
    options: dict[str, Any] = {"context_length": CONTEXT + max(sizes), "budget": max(sizes), "sessions": 1}
    vocab = cast(Vocab, NoVocab(shape["vocab_size"]))
    few = []
    for count in FEW:
        model = random_model(shape | {"num_hidden_layers": count}, dtype, device)
        layer = block_bytes(model.model.layers[0])
        backend = assemble(model, vocab, device, memory=None, copies=copies, **options)
        if backend.streamer is not None:
            raise UsageError(f"too little of the GPU's memory is free to measure computation on {count} layers")
        few.append(dict(pass_seconds(backend, sizes)))
        backend.close()
        del model, backend
        _free(device)
    layers = fitting_layers(shape, layer, host_bytes)
    rate = bandwidth(device, layer)
    model = random_model(shape | {"num_hidden_layers": layers}, dtype, device)
    backend = assemble(model, vocab, device, memory=memory, copies=copies, **options)
    streamed = len(backend.streamer.blocks) if backend.streamer else 0
    rows = []
    for nodes, seconds in pass_seconds(backend, sizes):
        one, more = few[0][nodes], few[1][nodes]
        compute = one + (layers - FEW[0]) * (more - one) / (FEW[1] - FEW[0])
        rows.append(Row(nodes, seconds, compute, streamed * layer / rate))
        if perf_counter() > deadline:
            break
    backend.close()
    del model, backend
    _free(device)
    return Report(dtype, layers, shape["num_hidden_layers"], streamed, layer, streamed * layer, rate, rows)
