"""Seconds of passes with streamed weights, of a model of a given shape with random weights, behind a text.

They are compared with max(compute, bytes / bandwidth); computation is measured on a few resident layers, and
extrapolated to all of them.
"""

import copy
import gc
import math
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter, sleep
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import torch
import transformers
from edgespec.backends.torch import loading
from edgespec.backends.torch.attention import ATTENTION
from edgespec.backends.torch.backend import MIN_NODES_ON_GPU, assemble
from edgespec.backends.torch.loading import (
    MIN_NODES,
    NF4,
    PLAIN,
    Form,
    cache_shape,
    decoder_layers,
    look_at,
    nf4_form,
    work_bytes,
)
from edgespec.backends.torch.offload import (
    BUFFERS,
    CopyEngine,
    CudaCopies,
    block_bytes,
    page_aligned,
    pin_memory,
    unpin_memory,
)

from benchmarks.steps import Tell
from benchmarks.to_try import GPU, Seen, answers, equal_sizes, row_classes, seen_with
from edgespec.errors import UsageError
from edgespec.loading.row_classes import tokens
from edgespec.loading.timed_pass import time_pass
from edgespec.loop.backend import Backend, Capabilities, Session, Vocab, Work
from edgespec.loop.passes import prefill
from edgespec.loop.shapes import TILE
from edgespec.loop.tree import IntArray, path_to
from edgespec.machine.memory import format_size
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
TEXT = 4000  # committed tokens before trees
ROOM = 64  # tokens of trees' levels, and of accepted paths
PASSES = 3
HOST_SHARE = 0.75
WIDE, WIDE_TREES = 512, "512 draft tokens"  # nodes, and the question about them
ONE = {"num_hidden_layers": 1}
FEW = (1, 2)  # layers of the two models whose difference is the cost of a layer

Copies = Callable[[Any, int], CopyEngine]


class NoVocab:
    def __init__(self, size: int) -> None:
        self.size = size


def random_model(shape: dict[str, Any], dtype: str, device: Any, *, own: bool = False) -> Any:
    """A model of equal layers, which share their weights in host memory unless each has its `own`."""
    kind = torch.bfloat16 if dtype == NF4 else getattr(torch, dtype)
    config = transformers.LlamaConfig(**shape, attn_implementation=ATTENTION, dtype=kind)
    small = copy.deepcopy(config)
    small.num_hidden_layers = 1
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(small, dtype=kind)
    model = model.to("cpu").eval().requires_grad_(False)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # not to be rounded to 16 bits
    if dtype == NF4:
        for layer in decoder_layers(model):
            nf4_form(device).make(layer)
    layer = model.model.layers[0]
    for i in range(1, config.num_hidden_layers):
        model.model.layers.append(_copy(layer, i, own))
    model.config.num_hidden_layers = config.num_hidden_layers
    return model


def _copy(layer: Any, index: int, own: bool) -> Any:
    shared = {} if own else {id(tensor): tensor for tensor in [*layer.parameters(), *layer.buffers()]}
    other = copy.deepcopy(layer, shared)
    other.self_attn.layer_idx = index
    return other


def copy_rate(device: Any, size: int, *, pin: bool, repeats: int = 5, copies: Copies | None = None) -> float:
    """
    Args:
        device: where to.
        size: bytes of a block of host memory.
        pin: the block is pinned.
        repeats: number of runs.

        copies: makes a copy engine, which copies in pieces; None: one copy.

    Returns:
        Bytes per second of the best run; 0: memory cannot be pinned.
    """
    host, target, seconds = page_aligned(size).fill_(1), torch.empty(size, dtype=torch.uint8, device=device), []
    if pin and not pin_memory(host, device):
        return 0.0
    engine = copies(device, 1) if copies else None
    for _ in range(repeats):
        started = perf_counter()
        if engine:
            engine.fill(0, target, host)
        else:
            target.copy_(host, non_blocking=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(perf_counter() - started)
    if engine:
        engine.close()
    if pin:
        unpin_memory(host, device)
    return size / min(seconds)


def fitting_layers(shape: dict[str, Any], layer_bytes: int, host_bytes: int) -> int:
    return int(max(2, min(shape["num_hidden_layers"], host_bytes * HOST_SHARE // layer_bytes)))


def memory_for(shape: dict[str, Any], dtype: str, sizes: Sequence[int], resident: int) -> int:
    """Bytes of a device on which `resident` layers stay, if there are more."""
    device = torch.device("cpu")
    model, (context, nodes) = random_model(shape | ONE, dtype, device), _limits(device, sizes)
    work = work_bytes(model, Capabilities(context, nodes, nodes, nodes, 0.0), max(TILE, max(sizes) + 1))
    caches = cache_bytes(model, device, sizes) * shape["num_hidden_layers"]
    return int(caches + work + (resident + BUFFERS) * block_bytes(model.model.layers[0]))


def cache_bytes(model: Any, device: Any, sizes: Sequence[int]) -> int:
    _, *rest = cache_shape(model.config, sum(_limits(device, sizes)))
    return int(math.prod(rest) * model.dtype.itemsize)


def _limits(device: Any, sizes: Sequence[int]) -> tuple[int, int]:
    return TEXT + ROOM + max(sizes), max(MIN_NODES_ON_GPU if device.type == "cuda" else MIN_NODES, max(sizes) + 1)


def form_of(dtype: str, device: Any) -> Form:
    return nf4_form(device) if dtype == NF4 else PLAIN


def look(device: Any) -> Gpu | None:
    free(device)  # else what has made a model counts as used
    return look_at(str(device)) if device.type == "cuda" else None


def free(device: Any) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def measure(
    tell: Tell,
    shape: dict[str, Any],
    dtype: str,
    device: Any,
    memory: int,
    sizes: Sequence[int],
    *,
    host_bytes: int,
    deadline: float = float("inf"),
    copies: Copies = CudaCopies,
) -> None:
    """
    Args:
        tell: called with the figures of each size, and of all.
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
    context, _ = _limits(device, sizes)
    options: dict[str, Any] = {"context_length": context, "budget": max(sizes), "sessions": 1}
    vocab = cast(Vocab, NoVocab(shape["vocab_size"]))
    costs = layer_costs(shape, dtype, device, sizes, vocab, copies, options)
    small = random_model(shape | ONE, dtype, device)
    layer = block_bytes(small.model.layers[0])
    del small
    free(device)
    layers = fitting_layers(shape, layer, host_bytes)
    pin = device.type == "cuda"
    rate = copy_rate(device, layer, pin=pin) or copy_rate(device, layer, pin=False)
    model = random_model(shape | {"num_hidden_layers": layers}, dtype, device)
    backend = assemble(model, vocab, device, memory=memory, gpu=look(device), copies=copies, **options)
    streamed = sum(len(one.blocks) for one in backend.streamers)
    rows, session, copying = list[dict[str, float]](), open_text(backend), streamed * layer / rate
    for nodes in sizes:
        one, more = costs[nodes]
        seconds, computing = time_trees(backend, session, nodes), one + (layers - 1) * more
        ratio = seconds / max(computing, copying)
        rows.append({"nodes": nodes, "seconds": seconds, "compute_seconds": computing, "copy_seconds": copying})
        rows[-1]["ratio"] = ratio
        shown = f"computation {computing:.3f}, copies {copying:.3f}; {ratio:.2f} of the larger"
        tell(f"{nodes} nodes", rows[-1], f"{nodes} nodes: {seconds:.3f} s ({shown})")
        if perf_counter() > deadline:
            break
    session.close()
    backend.close()
    del model, backend
    free(device)
    about = {
        "dtype": dtype, "layers": layers, "full_layers": shape["num_hidden_layers"], "streamed_layers": streamed,
        "layer_bytes": layer, "streamed_bytes": streamed * layer, "bandwidth": rate, "rows": rows,
    }  # fmt: skip
    bytes_of_pass = f"{format_size(streamed * layer)} a pass at {rate / 1e9:.1f} GB/s"
    tell("all", about, f"{streamed} of {layers} layers are streamed: {bytes_of_pass}")
    took = {row["nodes"]: row["seconds"] for row in rows}
    if streamed and {1, WIDE} <= took.keys():
        seen = {WIDE_TREES: Seen(took[WIDE] / took[1], f"{took[WIDE] / took[1]:.2f} ({dtype})")}
        [(asked, found, means)] = answers({WIDE_TREES: GPU[WIDE_TREES]}, {}, seen)
        tell(WIDE_TREES, [found, means], f"{asked}: {found}; {means}")


def tree_of(nodes: int) -> IntArray:
    """Parents of a tree's nodes, the root first: its depth grows as the logarithm of its nodes."""
    parents = np.arange(-1, nodes - 1) * np.random.default_rng(0).uniform(0.3, 0.9, nodes)
    return np.array([-1, *parents[1:]], np.int32)


def open_text(backend: Backend) -> Session:
    """A session of `TEXT` tokens."""
    session = backend.open()
    prefill(backend, session, tokens(backend, TEXT, seed=9))
    return session


def time_trees(backend: Backend, session: Session, nodes: int, *, passes: int = PASSES, grows: bool = True) -> float:
    """
    Args:
        backend: the session's.
        session: has `TEXT` tokens or less, and gets them back.
        nodes: of the tree.
        passes: number of passes; the first one does not count.
        grows: some nodes are committed after a pass, so that no two passes have the same length.

    Returns:
        Seconds of the quickest pass.
    """
    parents, length, seconds = tree_of(nodes), len(session.token_ids), []
    for seed in range(passes):
        ids, every = np.array(tokens(backend, nodes, seed), np.int32), np.arange(nodes, dtype=np.int32)
        work = Work(session, ids, parents, every)
        started = perf_counter()
        backend.forward([work])
        seconds.append(perf_counter() - started)
        session.commit(path_to(parents, nodes // 2)[:3] if grows else [])
    session.rewind(length)
    return min(seconds[1:])


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
        backend = assemble(model, vocab, device, memory=None, gpu=look(device), copies=copies, **options)
        if backend.streamers:
            raise UsageError(f"too little of the GPU's memory is free to measure computation on {count} layers")
        session = open_text(backend)
        few.append({nodes: time_trees(backend, session, nodes) for nodes in sizes})
        session.close()
        backend.close()
        del model, backend
        free(device)
    (first, one), (second, two) = zip(FEW, few, strict=True)
    more = {nodes: max(0.0, two[nodes] - one[nodes]) / (second - first) for nodes in sizes}
    return {nodes: (one[nodes] - (first - 1) * more[nodes], more[nodes]) for nodes in sizes}


def measures(device: Any, copies: Copies) -> dict[str, Callable[[], Seen]]:
    """Measures for the questions of `to_try.GPU`.

    Args:
        device: where models compute.
        copies: as for `measure`.
    """
    load = partial(make, device, copies)
    found = {
        "pinned memory": lambda: compare_pinned(device),
        "more buffers": lambda: compare_buffers(device, copies),
        "capped scores": lambda: peak_of_capped(device, copies),
        "equal sizes": lambda: seen_with(load, equal_sizes),
    }
    if torch.cuda.device_count() > 1:
        found["two GPUs"] = lambda: compare_split(device, copies)
    return found | {"row classes": lambda: seen_with(load, row_classes)}  # takes the longest time


SMALL = {
    "vocab_size": 1024, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 12,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 4096,
}  # fmt: skip


SMALLER = {  # on a processor
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "head_dim": 16,
}


def small_shape(device: Any) -> dict[str, Any]:
    return SMALL | (SMALLER if device.type == "cpu" else {})


def make(device: Any, copies: Copies, model: Any = None, **options: Any) -> Any:
    model = model or random_model(small_shape(device), "bfloat16", device)
    options = {"context_length": 1024, "budget": 64, "sessions": 1, "memory": None, "gpu": look(device)} | options
    return assemble(model, cast(Vocab, NoVocab(model.config.vocab_size)), device, copies=copies, **options)


def _with_own_layers(config: Any) -> Any:
    """As `random_model`, whose layers are one."""
    config._attn_implementation = ATTENTION
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    return model.to(torch.bfloat16).eval().requires_grad_(False)


def compare_pinned(device: Any, size: int = 256 << 20) -> Seen:
    pin = device.type == "cuda"
    pinned, pageable = pin and copy_rate(device, size, pin=True), copy_rate(device, size, pin=False)
    text = f"{pinned / 1e9:.1f} and {pageable / 1e9:.1f} GB/s" if pinned else "CUDA refuses to pin memory"
    return Seen(pinned / pageable, text)


def compare_buffers(device: Any, copies: Copies) -> Seen:
    """Passes after a pause in which buffers are filled, with few layers on the device."""
    found = []
    for most in (BUFFERS, loading.MOST_BUFFERS):
        with patch.object(loading, "MOST_BUFFERS", most):
            backend = make(device, copies, gpu_layers=2)
        session, seconds = backend.open(), []
        one = Work(session, np.array([5], np.int32), np.array([-1], np.int32), np.array([0], np.int32))
        for _ in range(6):
            sleep(0.1)
            started = perf_counter()
            backend.forward([one])
            seconds.append(perf_counter() - started)
            session.commit([])
        backend.close()
        found.append(min(seconds))
    return Seen(found[0] / found[1], f"{1000 * found[0]:.2f} and {1000 * found[1]:.2f} ms")


def most_memory(device: Any, reset: bool = False) -> int:
    """Most bytes that tensors have taken since the last reset; 0: not known."""
    if device.type != "cuda":
        return 0
    if reset:
        torch.cuda.reset_peak_memory_stats(device)
    return int(torch.cuda.max_memory_allocated(device))


def peak_of_capped(device: Any, copies: Copies) -> Seen:
    model = _with_own_layers(transformers.Gemma2Config(**small_shape(device), attn_logit_softcapping=50.0))
    backend = make(device, copies, model)
    limits, session = backend.capabilities, backend.open()
    planned = work_bytes(model, limits, 65) + session.cells.nbytes
    planned += sum(tensor.nbytes for tensor in decoder_layers(model).parameters())
    most_memory(device, reset=True)
    nodes = np.arange(min(limits.max_nodes, limits.context_length), dtype=np.int32)
    backend.forward([Work(session, nodes % 1000, nodes - 1, nodes[-1:])])
    most = most_memory(device)
    backend.close()
    return Seen(most / planned, f"{format_size(most)} and {format_size(planned)}")


def compare_split(device: Any, copies: Copies) -> Seen:
    """Passes of a model on one GPU, and with half of its layers on another."""
    seconds, rows = [], []
    other = look_at(f"cuda:{int(device.index == 0)}")
    for away in (0, small_shape(device)["num_hidden_layers"] // 2):
        with patch.object(loading, "layers_by_device", lambda sizes, *_, away=away: [len(sizes) - away, away]):
            model = _with_own_layers(transformers.LlamaConfig(**small_shape(device)))
            backend = make(device, copies, model, others=[other])
        session, nodes = backend.open(), np.arange(4, dtype=np.int32)
        logits = backend.forward([Work(session, nodes + 5, nodes - 1, nodes)])[0]
        rows.append(np.stack([logits.row(node) for node in range(4)]))
        session.close()
        seconds.append(time_pass(backend, 64).seconds)
        backend.close()
    ratio, wrong = seconds[1] / seconds[0], int((rows[0] != rows[1]).sum())
    return Seen(ratio, f"{ratio:.2f}; {wrong} of {rows[0].size} logits differ")
