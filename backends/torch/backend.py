"""Model folders (config.json and safetensors) on PyTorch, with transformers' model classes.

The classes do everything but attention, which they let be replaced (`AttentionInterface`; serving engines use it,
too). All works' nodes run as one row of tokens, so weights are read once a pass. Inside a layer, `tree_attention`
writes each work's keys and values into its session's cache and attends there:

    cells 0 … length - 1        the committed text, in order
    cells from length on        the uncommitted nodes, in the order they were given
    mask                        a node sees the committed text, its ancestors and itself, by position in windows
    commit                      the accepted nodes' cells are gathered behind the committed text; nothing else moves

Positions (length + depth) are given explicitly, so every kind of rotary embedding works. Weights larger than the
GPU's memory are streamed through it: `offload.py`. 4-bit weights: `nf4.py`.
"""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track

from edgespec.backend import Capabilities, Logits, Vocab, Work
from edgespec.errors import ContextFull, EdgespecError, MissingPackage, ModelError, UsageError
from edgespec.sampling import Float32Array, IdArray, Scores, top_of_rows
from edgespec.weights.machine import format_size, parse_size

try:
    import torch
    import transformers
    from torch.nn.functional import scaled_dot_product_attention

    from ..hf_vocab import LOCAL, check_folder, first_line, load_vocab, read_config
except ImportError as error:
    raise MissingPackage("torch and transformers", "torch", "running model folders on PyTorch") from error

from .offload import (
    BUFFERS,
    Block,
    CopyEngine,
    CudaCopies,
    Streamer,
    block_bytes,
    count_resident,
    streamed_layers,
)

__all__ = ["TorchBackend", "load", "load_vocab"]

ATTENTION = "edgespec_tree"
MIN_NODES = 512  # prompts are read in chunks of this size
MIN_NODES_ON_GPU = 2048  # … and of this where every chunk may cost all weights a trip to the GPU
WORKSPACE = 2**29  # bytes a CUDA context, its libraries and the allocator's gaps take
MASK_ALIGNMENT = 16  # elements; CUDA's memory-efficient kernel copies masks whose rows start elsewhere

# Most a logit moves with the shape of its pass. Measured on a CPU with SmolLM2 (135M) as the largest difference over a
# vocabulary, chains of 1 to 33 tokens and 40-node trees: float32 6.3e-5, float16 0.11, bfloat16 0.75, nf4 0.84.
TOLERANCE = {"float32": 2e-3, "float16": 0.3, "bfloat16": 1.5}
NF4 = "nf4"
FULL, SLIDING = "full_attention", "sliding_attention"  # what transformers calls the kinds of layers


@dataclass(frozen=True, slots=True)
class Part:
    """One work's share of a pass."""

    rows: slice  # of the pass
    cells: Any  # the session's cache [layers, 2, key heads, cells, d]
    length: int  # committed tokens
    first: int  # uncommitted nodes that were there before
    masks: dict[int | None, tuple[int, Any]]  # window -> first cell it can reach, mask [n, cells from there] or None


@dataclass(slots=True)
class Probe:
    """Takes a cache's place in the pass that `load` makes to see what the layers do: one token, which sees itself."""

    heads: dict[int, tuple[int, int]] = field(default_factory=dict)  # layer -> key heads, d
    windows: dict[int, int | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Tree:
    """What `tree_attention` needs to know of a pass."""

    parts: tuple[Part, ...]
    windows: tuple[int | None, ...]  # by layer


def tree_attention(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    *,
    tree: "Tree | Probe",
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Any, None]:
    """Attention in the place of transformers' own.

    Args:
        module: the layer's attention module.
        query: [1, heads, n, d], positions applied; n nodes of all works.
        key: [1, key heads, n, d].
        value: [1, key heads, n, d].
        attention_mask: not used.
        tree: the pass.
        scaling: of the scores; default: 1 / sqrt(d).
        softcap: scores become softcap * tanh(score / softcap) (Gemma 2).
        sliding_window: only a `Probe` reads it.
        options: what else a model class passes on.

    Returns:
        [1, n, heads, d], and no weights.
    """
    if isinstance(tree, Probe):
        return _probe(module, query, key, value, tree, sliding_window, options)
    out = torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format)  # [1, n, heads, d]
    layer = module.layer_idx
    for part in tree.parts:
        keys, values = part.cells[layer]
        start = part.length + part.first
        end = start + part.rows.stop - part.rows.start
        keys[:, start:end] = key[0, :, part.rows]
        values[:, start:end] = value[0, :, part.rows]
        low, mask = part.masks[tree.windows[layer]]
        attend = scaled_dot_product_attention if softcap is None else _capped(softcap)
        # The query heads that share a key head form a batch: keys and values are repeated by a stride of 0, not copied.
        shared = query[0, :, part.rows].unflatten(0, (len(keys), -1))
        k, v = (cells[:, None, low:end].expand(-1, shared.shape[1], -1, -1) for cells in (keys, values))
        found = attend(shared, k, v, attn_mask=mask, scale=scaling, is_causal=mask is None and end - start > 1)
        out[0, part.rows] = found.flatten(0, 1).transpose(0, 1)
    return out, None


def _capped(softcap: float) -> Any:
    """Attention with capped scores, by its definition: there is no kernel for it."""

    def attend(query: Any, key: Any, value: Any, attn_mask: Any, scale: float | None, is_causal: bool) -> Any:
        scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
        scores = torch.tanh(scores / softcap) * softcap
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril().log()
        if attn_mask is not None:
            scores = scores + attn_mask
        return torch.softmax(scores, -1, dtype=torch.float32).to(value.dtype) @ value

    return attend


def _probe(
    module: Any, query: Any, key: Any, value: Any, probe: Probe, window: int | None, options: dict[str, Any]
) -> tuple[Any, None]:
    for name in ("s_aux", "position_bias"):
        if options.get(name) is not None:
            raise ModelError(f"its attention has a term ({name}) that this backend does not compute")
    if key.shape != value.shape:
        raise ModelError(f"its keys and values have different shapes: {list(key.shape)} and {list(value.shape)}")
    probe.heads[module.layer_idx] = key.shape[1], key.shape[3]
    probe.windows[module.layer_idx] = window
    return value.repeat_interleave(query.shape[1] // value.shape[1], 1).transpose(1, 2), None


transformers.AttentionInterface.register(ATTENTION, tree_attention)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a work's nodes go in its session."""

    first: int  # number of the first new node
    positions: list[int]  # of the new nodes
    sees: NDArray[np.bool_]  # [new, first + new]: which nodes each new node sees


class TorchSession:
    """See `edgespec.backend.Session`."""

    def __init__(self, backend: "TorchBackend", cells: Any) -> None:
        self.token_ids: list[int] = []
        self.cells = cells  # [layers, 2, key heads, cells, d]; None when closed
        self._backend = backend
        self._forget_nodes()

    def _forget_nodes(self) -> None:
        self._tokens: list[int] = []  # by node, since the last commit
        self._parents: list[int] = []
        self.positions: list[int] = []
        self._sees: list[NDArray[np.bool_]] = []  # row i: nodes 0 … i and perhaps more

    def place(self, work: Work) -> Placement:
        """Find new nodes their places. Changes nothing.

        Raises:
            ContextFull: a position lies beyond the context.
            ValueError: more nodes than the capabilities allow, or a parent or wanted node that does not exist.
        """
        first, count, parents = len(self._tokens), len(work.token_ids), work.parents.tolist()
        limits, length = self._backend.capabilities, len(self.token_ids)
        if first + count > limits.max_nodes:
            raise ValueError(f"{first + count} uncommitted nodes; this backend holds {limits.max_nodes}")
        if any(not -1 <= parent < first + i for i, parent in enumerate(parents)):
            raise ValueError(f"parents must come before their children: {parents}")
        if any(not first <= node < first + count for node in work.wanted.tolist()):
            raise ValueError(f"wanted {work.wanted.tolist()}: not all among the nodes {first} to {first + count - 1}")
        positions = self.positions.copy()
        for parent in parents:
            positions.append(positions[parent] + 1 if parent >= 0 else length)
        last = max(positions, default=-1)
        if last >= limits.context_length:
            raise ContextFull(f"position {last} lies beyond the context of {limits.context_length} tokens")
        return Placement(first, positions[first:], visible(self._sees, parents))

    def keep(self, work: Work, placement: Placement) -> None:
        """The nodes have been evaluated."""
        self._tokens.extend(work.token_ids.tolist())
        self._parents.extend(work.parents.tolist())
        self.positions.extend(placement.positions)
        self._sees.extend(placement.sees)

    def commit(self, path: Sequence[int]) -> None:
        if [self._parents[node] for node in path] != [-1, *path][: len(path)]:
            raise ValueError(f"nodes {list(path)} are not a chain under the last committed token")
        length = len(self.token_ids)
        moved = next((i for i, node in enumerate(path) if i != node), len(path))  # what comes before lies right already
        if moved < len(path):
            nodes = torch.tensor([length + node for node in path[moved:]], device=self.cells.device)
            with torch.inference_mode():
                self.cells[:, :, :, length + moved : length + len(path)] = self.cells.index_select(3, nodes)
        self.token_ids.extend(self._tokens[node] for node in path)
        self._forget_nodes()

    def rewind(self, length: int) -> None:
        del self.token_ids[length:]
        self._forget_nodes()

    def fork(self) -> "TorchSession":
        other = self._backend.open()
        length = len(self.token_ids)
        with torch.inference_mode():
            other.cells[:, :, :, :length] = self.cells[:, :, :, :length]
        other.token_ids = self.token_ids.copy()
        return other

    def close(self) -> None:
        if self.cells is not None:
            self._backend.release(self.cells)
            self.rewind(0)
        self.cells = None


def visible(sees: Sequence[NDArray[np.bool_]], parents: Sequence[int]) -> NDArray[np.bool_]:
    """Which nodes the next nodes see: their ancestors and themselves.

    Args:
        sees: the same for the nodes before, row by row.
        parents: of the new nodes; numbers from len(sees) on are new nodes.

    Returns:
        [new, all].
    """
    first, count = len(sees), len(parents)
    rows = np.zeros((count, first + count), np.bool_)
    if list(parents[1:]) == list(range(first, first + count - 1)):  # a chain, perhaps a prompt's
        rows[:, first:] = np.tri(count, dtype=np.bool_)
        if count and parents[0] >= 0:
            rows[:, : len(sees[parents[0]])] |= sees[parents[0]]
        return rows
    for i, parent in enumerate(parents):
        if parent >= first:
            rows[i] = rows[parent - first]
        elif parent >= 0:
            rows[i, : len(sees[parent])] = sees[parent]
        rows[i, first + i] = True
    return rows


def build_mask(
    sees: NDArray[np.bool_], positions: Sequence[int], length: int, window: int | None, dtype: Any, device: Any
) -> tuple[int, Any]:
    """The additive mask of a work's nodes.

    Args:
        sees: [n, nodes] which uncommitted nodes each new node sees.
        positions: of all uncommitted nodes; the new ones are the last n.
        length: committed tokens.
        window: how many positions, its own included, a node can look at; None: all.
        dtype: of the scores.
        device: where they are computed.

    Returns:
        The first cell that any node can see, and the mask [n, cells from there on], 0 where a node sees a cell and
        -inf elsewhere; None where nothing is hidden, or only what comes later in a text that starts here.
    """
    count = len(sees)
    new = np.asarray(positions[len(positions) - count :])
    low = max(0, int(new.min()) - window + 1) if window is not None else 0
    low = min(low, length)
    within_text = window is None or int(new.max()) < window
    if within_text and (
        sees.all() or (length == 0 and sees.shape[1] == count and (sees == np.tri(count, dtype=np.bool_)).all())
    ):
        return low, None
    allowed = np.concatenate([np.ones((count, length - low), np.bool_), sees], axis=1)
    if not within_text and window is not None:
        cells = np.concatenate([np.arange(low, length), np.asarray(positions)])
        allowed &= new[:, None] - cells < window
    width = allowed.shape[1]
    mask = torch.zeros((count, -(-width // MASK_ALIGNMENT) * MASK_ALIGNMENT), dtype=dtype, device=device)[:, :width]
    mask.masked_fill_(~torch.from_numpy(allowed).to(device), -torch.inf)
    return low, mask


class TorchLogits:
    """See `edgespec.backend.Logits`: rows that stay on the device."""

    def __init__(self, logits: Any, wanted: Sequence[int]) -> None:
        self._logits = logits  # [wanted, V]
        self._index = {node: i for i, node in enumerate(wanted)}

    def row(self, node: int) -> Float32Array:
        row: Float32Array = self._logits[self._index[node]].to(torch.float32, copy=True).cpu().numpy()
        return row

    def top(
        self, nodes: Sequence[int], k: int, temperature: float, noise: Sequence[Float32Array | None]
    ) -> tuple[list[IdArray], list[Scores]]:
        index = [self._index[node] for node in nodes]
        if self._logits.device.type == "cpu":  # numpy is three times as quick there: 4 ms for 16 rows of 152 k
            return top_of_rows((self._logits[i].float().numpy() for i in index), k, temperature, noise)
        return top_on_device(self._logits, index, k, temperature, noise)


def top_on_device(
    logits: Any, index: Sequence[int], k: int, temperature: float, noise: Sequence[Float32Array | None]
) -> tuple[list[IdArray], list[Scores]]:
    """`edgespec.backend.Logits.top` of the rows `index` of logits [n, V], with one copy to the host."""
    device, size = logits.device, logits.shape[1]
    widths = [size if extra is None else min(len(extra), size) for extra in noise]
    with torch.inference_mode():
        scores = logits.index_select(0, torch.tensor(list(index), device=device)).float()
        arrays = {id(extra): extra for extra in noise if extra is not None}  # one for each depth of a tree
        there = {key: torch.from_numpy(extra).to(device) for key, extra in arrays.items()}
        for row, extra, width in zip(scores, noise, widths, strict=True):
            if extra is not None:
                row[:width] += there[id(extra)][:width]
                row[width:] = -torch.inf
        scores /= temperature
        best = torch.topk(scores, min(k, size))
        log_probs = best.values - torch.logsumexp(scores, 1, keepdim=True)
        both = torch.cat([best.indices.int().view(torch.float32), log_probs], 1).cpu().numpy()
    ids, values = np.split(both, 2, axis=1)
    counts = [min(k, width) for width in widths]
    return (
        [row[:count].astype(np.int64) for row, count in zip(ids.view(np.int32), counts, strict=True)],
        [row[:count].astype(np.float64) for row, count in zip(values, counts, strict=True)],
    )


class TorchBackend:
    """See `edgespec.backend.Backend`. Make it with `load`."""

    name = "torch"

    def __init__(
        self,
        model: Any,
        vocab: Vocab,
        capabilities: Capabilities,
        windows: tuple[int | None, ...],
        caches: list[Any],
        streamer: Streamer | None,
        notes: Sequence[str] = (),
    ) -> None:
        self.vocab: Vocab = vocab
        self.capabilities = capabilities
        self.notes = notes
        self._model = model
        self._windows = windows  # by layer
        self._free = caches  # [layers, 2, key heads, cells, d] for each session that is not open
        self._device, self._dtype = caches[0].device, caches[0].dtype
        self.streamer = streamer  # None: all weights are resident

    def open(self) -> TorchSession:
        if not self._free:
            raise UsageError("all sessions of this model are open: load it with a larger `sessions`")
        return TorchSession(self, self._free.pop())

    def release(self, cells: Any) -> None:
        """A session has given its cache back."""
        self._free.append(cells)

    @property
    def wait_seconds(self) -> float:
        return self.streamer.wait_seconds if self.streamer is not None else 0.0

    def forward(self, batch: Sequence[Work]) -> list[Logits]:
        for name, count, limit in [
            ("nodes", sum(len(work.token_ids) for work in batch), self.capabilities.max_nodes),
            ("wanted nodes", sum(len(work.wanted) for work in batch), self.capabilities.max_wanted),
        ]:
            if count > limit:
                raise ValueError(f"{count} {name} in one forward; this backend takes {limit}")
        sessions = [cast(TorchSession, work.session) for work in batch]
        placements = [session.place(work) for session, work in zip(sessions, batch, strict=True)]
        tokens, positions, wanted, parts = list[int](), list[int](), list[int](), list[Part]()
        for session, work, placement in zip(sessions, batch, placements, strict=True):
            start = len(tokens)
            tokens += work.token_ids.tolist()
            positions += placement.positions
            wanted += [start + node - placement.first for node in work.wanted.tolist()]
            parts.append(self._part(session, placement, slice(start, len(tokens))))
        with torch.inference_mode(), _out_of_memory("a pass"):
            logits = run(self._model, tokens, positions, wanted, Tree(tuple(parts), self._windows), self._device)
        found = list[Logits]()
        for session, work, placement in zip(sessions, batch, placements, strict=True):
            session.keep(work, placement)
            found.append(TorchLogits(logits[: len(work.wanted)], work.wanted.tolist()))
            logits = logits[len(work.wanted) :]
        return found

    def _part(self, session: TorchSession, placement: Placement, rows: slice) -> Part:
        length = len(session.token_ids)
        everywhere = session.positions + placement.positions
        masks = {
            window: build_mask(placement.sees, everywhere, length, window, self._dtype, self._device)
            for window in set(self._windows)
        }
        return Part(rows, session.cells, length, placement.first, masks)

    def close(self) -> None:
        if self.streamer is not None:
            self.streamer.close()
        self._model = self.streamer = None
        self._free = []


def run(
    model: Any,
    token_ids: Sequence[int],
    positions: Sequence[int],
    wanted: Sequence[int],
    tree: Tree | Probe,
    device: Any,
) -> Any:
    """One forward of a transformers model over n tokens; logits [wanted, V] on the device, finished."""
    ids, places, rows = (torch.tensor([list(values)], device=device) for values in (token_ids, positions, wanted))
    logits = model(
        input_ids=ids, position_ids=places, logits_to_keep=rows[0].long(), use_cache=False, tree=tree
    ).logits[0]
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()  # not the whole device: copies for the next pass go on
    elif device.type == "mps":
        torch.mps.synchronize()
    return logits


def load(
    path: str,
    *,
    context_length: int = 4096,
    budget: int = 64,
    sessions: int = 1,
    threads: int | None = None,
    device: str | None = None,
    dtype: str | None = None,
    gpu_memory: str | int | None = None,
    copies: Callable[[Any, int], CopyEngine] | None = None,
) -> TorchBackend:
    """Load a model folder.

    Args:
        path: a folder with config.json, safetensors files and a tokenizer.
        context_length: most tokens of text in one session; 0 = what the model was trained for.
        budget: largest tree that will be asked for, in nodes without the root.
        sessions: how many sessions may be open at once.
        threads: compute threads on the CPU, for all models of the process; default: PyTorch's choice.
        device: "cuda", "cuda:1", "mps" or "cpu"; default: the first of these that is there.
        dtype: "float32", "float16", "bfloat16", or "nf4" for 4-bit linear layers; default: as in the folder.
        gpu_memory: bytes of GPU memory to use, such as "10G", what was loaded before included; layers beyond that are
            streamed from host memory. Default: what is free.
        copies: makes the copy engine for a device and a number of buffers, in the place of CUDA's.

    Raises:
        ModelError: the folder is incomplete, damaged, or of an architecture that cannot hold a tree.
        UsageError: an option is out of range, or the device is not there.
        MissingPackage: nf4 was asked for without bitsandbytes.
    """
    _check_options(context_length, budget, sessions, threads, dtype)
    place = find_device(device)
    if gpu_memory is not None and place.type != "cuda" and copies is None:
        raise UsageError(f"gpu_memory is for GPUs with memory of their own (cuda), but the device is {place.type}")
    memory = parse_size(gpu_memory) if isinstance(gpu_memory, str) else gpu_memory
    if threads:
        torch.set_num_threads(threads)
    vocab = load_vocab(path)
    with _named(path), _out_of_memory("the model"):
        model = load_model(check_folder(path), dtype)
        if dtype == NF4:
            quantise_layers(model, place)
        return assemble(
            model, vocab, place, context_length=context_length, budget=budget, sessions=sessions, memory=memory,
            copies=copies or CudaCopies,
        )  # fmt: skip


def assemble(
    model: Any,
    vocab: Vocab,
    device: Any,
    *,
    context_length: int,
    budget: int,
    sessions: int,
    memory: int | None,
    copies: Callable[[Any, int], CopyEngine] = CudaCopies,
) -> TorchBackend:
    """Place a transformers model that uses `tree_attention` on a device, and make its caches.

    Args:
        model: on the host; emptied layer by layer where it is streamed.
        vocab: its tokenizer.
        device: where it computes.
        context_length: see `load`, as for all others.
        budget: …
        sessions: …
        memory: bytes of the device's memory to use; None: on a GPU what is free, elsewhere no limit.
        copies: makes the copy engine.

    Raises:
        ModelError: it cannot hold a tree.
        UsageError: the memory is too small, or the context too long.
    """
    config = model.config.get_text_config()
    context_length = context_length or config.max_position_embeddings
    _check_rope(config, context_length)
    max_nodes = max(MIN_NODES_ON_GPU if device.type == "cuda" else MIN_NODES, budget + 1)
    capabilities = Capabilities(
        context_length=context_length,
        max_nodes=max_nodes,
        max_wanted=max_nodes,
        max_leaves=max_nodes,
        logit_tolerance=TOLERANCE[str(model.dtype).removeprefix("torch.")],
    )
    shape = cache_shape(config, context_length + max_nodes)
    held = 0
    if device.type == "cuda":
        held = torch.cuda.memory_reserved(device)  # by a draft that was loaded before
        free = torch.cuda.mem_get_info(device)[0] + held
        if memory is not None and memory > free:
            raise UsageError(f"gpu_memory is {format_size(memory)}, but only {format_size(free)} are free")
        memory = memory or free
    streamer, notes = None, list[str]()
    if memory is not None:
        caches = sessions * math.prod(shape) * model.dtype.itemsize
        fixed = held + caches + work_bytes(model, capabilities, budget + 1)
        streamer = place_layers(model, device, memory, fixed, copies)
    if streamer is not None:
        capabilities = replace(capabilities, streams=True)
        size = sum(block.host.numel() for block in streamer.blocks)
        notes.append(
            f"{len(streamer.blocks)} of {config.num_hidden_layers} layers are streamed: {format_size(size)} per pass"
        )
    try:
        model.to(device)
        windows = _inspect(model, shape, device)
        caches = [torch.empty(shape, dtype=model.dtype, device=device) for _ in range(sessions)]
    except BaseException:
        if streamer is not None:
            streamer.close()
        raise
    return TorchBackend(model, vocab, capabilities, windows, caches, streamer, notes)


def find_device(name: str | None) -> Any:
    """The device of that name, or the best there is.

    Raises:
        UsageError: this PyTorch does not see it.
    """
    there = [f"cuda:{i}" for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    there += ["mps"] if torch.backends.mps.is_available() else []
    there += ["cpu"]
    wanted = name or there[0]
    wanted = "cuda:0" if wanted == "cuda" else wanted
    if wanted not in there:
        raise UsageError(f"device {name!r} is not there: this PyTorch ({torch.__version__}) sees {', '.join(there)}")
    return torch.device(wanted)


def load_model(folder: Path, dtype: str | None) -> Any:
    """The model on the CPU, with the attention of this module. Weights whose type stays are mapped, not read.

    Raises:
        ModelError: it cannot be loaded, or cannot hold a tree.
    """
    transformers.logging.set_verbosity_error()
    if not sys.stderr.isatty():
        transformers.logging.disable_progress_bar()
    config = read_config(folder)
    check_config(config)
    if dtype == NF4:
        dtype = "float16" if config.dtype == torch.float16 else "bfloat16"
    try:
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            folder, **LOCAL, dtype=dtype or "auto", attn_implementation=ATTENTION, use_safetensors=True,
            output_loading_info=True,
        )  # fmt: skip
    except Exception as error:  # the library raises nearly every type there is
        raise ModelError(f"cannot be loaded: {first_line(error)}") from error
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise ModelError(f"its safetensors files lack {len(missing)} of the model's tensors, such as {missing[0]}")
    if not model._supports_attention_backend:
        raise ModelError(f"{type(model).__name__} computes attention in its own way, which cannot hold a tree")
    return model.eval().requires_grad_(False)


def check_config(config: Any) -> None:
    """Refuse what is known not to work before anything large is read.

    Raises:
        ModelError: says what it is.
    """
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError("its weights are quantised already; use the original 16-bit folder, with dtype nf4 for 4 bits")
    text = config.get_text_config()
    other = set(getattr(text, "layer_types", None) or ()) - {FULL, SLIDING}
    if other:
        raise ModelError(f"has layers of the kind {', '.join(sorted(other))}, which cannot branch into a tree")


def _check_rope(config: Any, context_length: int) -> None:
    """Some rotary embeddings change for all tokens once one lies beyond the trained length: a tree is no text then."""
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):
        limit = rope.get("original_max_position_embeddings") or config.max_position_embeddings
        if context_length > limit:
            raise UsageError(
                f"the context is {context_length}, but this model's positions change beyond {limit}: use at most that"
            )


def cache_shape(config: Any, cells: int) -> tuple[int, ...]:
    """[layers, 2, key heads, cells, d] of one session's cache."""
    heads = config.num_attention_heads
    d = getattr(config, "head_dim", None) or config.hidden_size // heads
    return config.num_hidden_layers, 2, getattr(config, "num_key_value_heads", None) or heads, cells, d


def decoder_layers(model: Any) -> Any:
    """The layers that can be streamed.

    Raises:
        ModelError: the model keeps them elsewhere.
    """
    layers = getattr(model.get_decoder(), "layers", None)
    if layers is None:
        raise ModelError(f"{type(model).__name__} has no list of layers to stream or to bring to 4 bits")
    return layers


def work_bytes(model: Any, capabilities: Capabilities, wanted: int) -> int:
    """Device memory for all but layers and caches: embeddings, and what the widest pass computes at one time."""
    layers = decoder_layers(model)
    inside = {id(parameter) for parameter in layers.parameters()}
    outside = sum(p.numel() * p.element_size() for p in model.parameters() if id(p) not in inside)
    config, item = model.config.get_text_config(), model.dtype.itemsize
    nodes, cells = capabilities.max_nodes, capabilities.context_length + capabilities.max_nodes
    states = nodes * (3 * getattr(config, "intermediate_size", 0) + 8 * config.hidden_size) * item
    logits = wanted * config.vocab_size * (item + 4)
    masks = 2 * nodes * cells * item
    codes = max((buffer.numel() for buffer in layers.buffers() if buffer.dtype == torch.uint8), default=0)
    return int(outside + states + logits + masks + 2 * codes * item + WORKSPACE)


def place_layers(
    model: Any, device: Any, memory: int, fixed: int, copies: Callable[[Any, int], CopyEngine]
) -> Streamer | None:
    """Empty the layers that do not fit on the device into host memory, and start streaming them.

    Args:
        model: on the host.
        device: where it computes.
        memory: bytes to use there.
        fixed: how many of them are not for layers.
        copies: makes the copy engine.

    Raises:
        UsageError: the memory cannot hold two layers.
    """
    layers = list(decoder_layers(model))
    resident = count_resident(memory, [block_bytes(layer) for layer in layers], fixed)
    streamed = streamed_layers(len(layers), resident)
    if not streamed:
        return None
    console = Console(stderr=True)
    blocks = [
        Block(layers[i], pin=device.type == "cuda")
        for i in track(streamed, "Pinning weights", console=console, transient=True, disable=not console.is_terminal)
    ]
    return Streamer([layers[i] for i in streamed], blocks, device, copies(device, BUFFERS))


def quantise_layers(model: Any, device: Any) -> None:
    """Bring the layers to 4 bits, one at a time on the device, where it is quick."""
    from .nf4 import quantise

    console = Console(stderr=True)
    layers = decoder_layers(model)
    for layer in track(layers, "Quantising", console=console, transient=True, disable=not console.is_terminal):
        layer.to(device)
        quantise(layer)
        layer.to("cpu")


def _inspect(model: Any, shape: tuple[int, ...], device: Any) -> tuple[int | None, ...]:
    """Run one token to see that every layer is attention as `tree_attention` knows it.

    Returns:
        Each layer's window.

    Raises:
        ModelError: says what is different.
    """
    probe, count = Probe(), shape[0]
    try:
        with torch.inference_mode():
            run(model, [0], [0], [0], probe, device)
    except (EdgespecError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a model class that does not hand everything on to attention
        raise ModelError(f"{type(model).__name__} cannot be run on a tree: {first_line(error)}") from error
    if sorted(probe.heads) != list(range(count)):
        raise ModelError(
            f"{len(probe.heads)} of its {count} layers are attention; the others cannot branch into a tree"
        )
    for layer, heads in sorted(probe.heads.items()):
        if heads != (shape[2], shape[4]):
            raise ModelError(f"layer {layer} has keys of shape {heads}, not {(shape[2], shape[4])} as config.json says")
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    if not kinds:
        return tuple(probe.windows[layer] for layer in range(count))
    return tuple(config.sliding_window if kind == SLIDING else None for kind in kinds)


@contextmanager
def _named(path: str) -> Iterator[None]:
    """Put the path before what is wrong with the model."""
    try:
        yield
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error


@contextmanager
def _out_of_memory(what: str) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ModelError(f"no memory on the device for {what}: {first_line(error)}") from error


def _check_options(context_length: int, budget: int, sessions: int, threads: int | None, dtype: str | None) -> None:
    for name, value, low, high in [
        ("context length", context_length, 0, 2**24),
        ("budget", budget, 1, 2**15),
        ("sessions", sessions, 1, 2**10),
        ("threads", threads or 1, 1, 1024),
    ]:
        if not low <= value <= high:
            raise UsageError(f"{name} is {value}, but must be from {low} to {high}")
    if dtype is not None and dtype not in (*TOLERANCE, NF4):
        raise UsageError(f"dtype is {dtype!r}, but must be one of {', '.join((*TOLERANCE, NF4))}")
