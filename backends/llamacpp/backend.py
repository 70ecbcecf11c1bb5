"""GGUF models on llama.cpp, through llama-cpp-python's low-level API.

Trees need no kernel of their own. llama.cpp tags every cell of its key-value cache with the ids of
the sequences it belongs to, and a token attends to the cells that carry its own id at smaller
positions. So:

    one sequence id     one path from the start of the text to a leaf of the tree
    a node              one cell, tagged with the ids of all leaves below it
    growing a tree      a first child takes over its parent's id; every further child gets a free id,
                        after the cells of its ancestors were tagged with it (no copy, no recompute)
    commit              the ids of one path stay, all others are removed: nothing moves

All ids of a session carry the committed text, so starting a tree costs nothing.

A model larger than memory is streamed: `memory.py`.
"""

import ctypes
import hashlib
import os
import sys
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from edgespec.backend import Capabilities, Logits, Work
from edgespec.errors import ContextFull, ModelError, UsageError
from edgespec.sampling import Float32Array, IdArray, Scores, top_of_rows
from edgespec.weights.machine import parse_size
from edgespec.weights.ring import Streamer, mappings

from .files import (
    FILE_TYPE_BF16,
    FILE_TYPE_F16,
    FILE_TYPE_F32,
    last_log,
    llama_cpp,
    load_model,
    metadata,
    parts,
)
from .memory import LLAMA_MAX_SEQ, MIN_NODES, ContextSize, LayerWatch, is_plenty, plan_memory, start_streaming

# Most a logit moves with the shape of its pass and with the order of cells in the cache, by general.file_type. Kernels
# for quantised and for 16-bit weights round the activations, too, so one flipped bit grows from layer to layer.
# Measured with SmolLM2 as the largest difference over a vocabulary: Q4_1 1.31, BF16 0.43, F16 0.18, and F32, whose
# cache has 32 bits, 6e-5; but 1.6e-3 in a small Gemma 3, since llama.cpp looks GELU up in a table of 16 bits.
TOLERANCE_QUANTISED = 1.5
TOLERANCES = {FILE_TYPE_F32: 0.01, FILE_TYPE_F16: 0.3, FILE_TYPE_BF16: 0.8}


class LlamaVocab:
    """See `edgespec.backend.Vocab`."""

    def __init__(self, model: Any) -> None:
        self._vocab = llama_cpp.llama_model_get_vocab(model)
        self.size: int = llama_cpp.llama_vocab_n_tokens(self._vocab)
        bos, eos = llama_cpp.llama_vocab_bos(self._vocab), llama_cpp.llama_vocab_eos(self._vocab)
        self.bos_id: int | None = bos if bos >= 0 else None
        self.eos_id: int | None = eos if eos >= 0 else None
        self.eog_ids = frozenset(i for i in range(self.size) if llama_cpp.llama_vocab_is_eog(self._vocab, i))
        template = llama_cpp.llama_model_chat_template(model, None)
        self.chat_template: str | None = template.decode("utf-8") if template else None
        self._pieces: dict[int, bytes] = {}

    def encode(self, text: str, *, add_bos: bool, parse_special: bool) -> list[int]:
        data = text.encode("utf-8")
        room = len(data) + 8
        buffer = (llama_cpp.llama_token * room)()
        count = llama_cpp.llama_tokenize(self._vocab, data, len(data), buffer, room, add_bos, parse_special)
        if count < 0:
            raise ModelError(f"the tokenizer cannot encode a text of {len(data)} bytes")
        return buffer[:count]

    def token_bytes(self, token_id: int) -> bytes:
        piece = self._pieces.get(token_id)
        if piece is None:
            buffer = ctypes.create_string_buffer(64)
            count = llama_cpp.llama_token_to_piece(self._vocab, token_id, buffer, len(buffer), 0, False)
            if count < 0:
                buffer = ctypes.create_string_buffer(-count)
                count = llama_cpp.llama_token_to_piece(self._vocab, token_id, buffer, len(buffer), 0, False)
            piece = self._pieces[token_id] = buffer.raw[:count]
        return piece

    def token_text(self, token_id: int) -> str:
        text: bytes = llama_cpp.llama_vocab_get_text(self._vocab, token_id)
        return text.decode("utf-8", "replace")

    @cached_property
    def fingerprint(self) -> str:
        texts = (llama_cpp.llama_vocab_get_text(self._vocab, i) for i in range(self.size))
        return hashlib.sha256(b"\0".join(texts)).hexdigest()


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a work's nodes go in its session."""

    work: Work
    first: int  # number of the first new node
    positions: list[int]  # of all uncommitted nodes, the new ones included
    below: list[list[int]]  # for each new node the ids of the leaves below it
    tips: dict[int, int]  # id -> the last node on its path
    sources: dict[int, int]  # id -> the old node it continues
    order: list[int]  # the new nodes in the order of their cells


def depth_first(parents: list[int], first: int) -> list[int]:
    """New nodes so that the path of first children comes first: planners name the likeliest child first.

    Args:
        parents: of the new nodes; numbers below `first` are old nodes.
        first: number of the first new node.
    """
    children: dict[int, list[int]] = {}
    tops = list[int]()
    for node, parent in enumerate(parents):
        (children.setdefault(parent - first, []) if parent >= first else tops).append(node)
    order, stack = list[int](), tops[::-1]
    while stack:
        node = stack.pop()
        order.append(node)
        stack.extend(reversed(children.get(node, [])))
    return order


class LlamaSession:
    """See `edgespec.backend.Session`."""

    def __init__(self, backend: "LlamaBackend", ids: list[int]) -> None:
        self.token_ids: list[int] = []
        self._backend = backend
        self._memory = backend.memory
        self._ids = ids  # this session's sequence ids
        self._tagged = 1  # how many of them carry the committed text; the rest are tagged when first needed
        self._held = 0  # how many committed tokens have a cell
        self._forget_nodes()

    def _forget_nodes(self) -> None:
        self._tokens: list[int] = []  # by node, since the last commit
        self._positions: list[int] = []
        self._cells: list[int] = []  # the how-manieth cell since the last commit
        self._seqs: list[int] = []  # one id whose path runs through the node
        self._tips: dict[int, int] = {}  # id -> the last node on its path

    def place(self, work: Work) -> "Placement":
        """Find new nodes their places. Changes nothing.

        Raises:
            ContextFull: a position lies beyond the context.
            ValueError: more nodes or leaves than the capabilities allow, or a parent that does not exist.
        """
        first, count, parents = len(self._tokens), len(work.token_ids), work.parents.tolist()
        limits, length = self._backend.capabilities, len(self.token_ids)
        if first + count > limits.max_nodes:
            raise ValueError(f"{first + count} uncommitted nodes; this backend holds {limits.max_nodes}")
        if any(not -1 <= parent < first + i for i, parent in enumerate(parents)):
            raise ValueError(f"parents must come before their children: {parents}")
        positions = self._positions.copy()
        for parent in parents:
            positions.append(positions[parent] + 1 if parent >= 0 else length)
        if max(positions) >= limits.context_length:
            raise ContextFull(f"position {max(positions)} lies beyond the context of {limits.context_length} tokens")
        below: list[list[int]] = [[] for _ in range(count)]
        has_child = {parent - first for parent in parents}
        leaves = [i for i in range(count) if i not in has_child]
        tips, sources = dict(self._tips), dict[int, int]()
        free = (seq for seq in self._ids if seq not in tips)
        for leaf in leaves:
            path = [leaf]
            while parents[path[-1]] >= first:
                path.append(parents[path[-1]] - first)
            old = parents[path[-1]]  # evaluated earlier, or -1
            seq = self._seqs[old] if old >= 0 else -1
            if old < 0 or tips.get(seq) != old:
                seq = next(free, -1)
                if seq < 0:
                    raise ValueError(f"more than {limits.max_leaves} leaves; this backend holds no more")
                if old >= 0:
                    sources[seq] = old
            tips[seq] = first + leaf
            for node in path:
                below[node].append(seq)
        return Placement(work, first, positions, below, tips, sources, depth_first(parents, first))

    def add(self, placement: "Placement") -> tuple[list[int], list[int], list[list[int]]]:
        """Take the nodes in: tag the cells of the nodes they continue.

        Returns:
            Tokens, positions and sequence ids of the cells to fill, in their order: first committed tokens that have
            no cell any more, then the nodes.
        """
        positions, first, order = placement.positions, placement.first, placement.order
        self._tag(max(placement.tips) - self._ids[0] + 1)
        for seq, old in placement.sources.items():
            llama_cpp.llama_memory_seq_cp(self._memory, self._seqs[old], seq, self._held, positions[old] + 1)
        lost = self.token_ids[self._held :]
        tokens = lost + placement.work.token_ids[order].tolist()
        places = [*range(self._held, len(self.token_ids)), *(positions[first + i] for i in order)]
        ids = [list(placement.tips)] * len(lost) + [placement.below[i] for i in order]
        self._tokens.extend(placement.work.token_ids.tolist())
        self._positions = positions
        self._seqs.extend(ids[0] for ids in placement.below)
        cell_of = {node: first + i for i, node in enumerate(order)}
        self._cells.extend(cell_of[i] for i in range(len(order)))
        self._tips = placement.tips
        return tokens, places, ids

    def evaluated(self) -> None:
        """The pass is over: what had lost its cell has one again, and every id gets it."""
        if self._held < len(self.token_ids):
            source = next(iter(self._tips))
            for seq in self._ids[: self._tagged]:
                if seq not in self._tips:
                    llama_cpp.llama_memory_seq_cp(self._memory, source, seq, self._held, len(self.token_ids))
            self._held = len(self.token_ids)

    def give_up(self) -> None:
        """The pass failed: forget its cells and all nodes."""
        for seq in self._ids[: self._tagged]:
            llama_cpp.llama_memory_seq_rm(self._memory, seq, self._held, -1)
        self._forget_nodes()

    def _tag(self, count: int) -> None:
        for seq in self._ids[self._tagged : count]:
            llama_cpp.llama_memory_seq_cp(self._memory, self._ids[0], seq, 0, self._held)
        self._tagged = max(self._tagged, count)

    def commit(self, path: Sequence[int]) -> None:
        length, kept = len(self.token_ids), len(path)
        if self._backend.in_order:
            # Cells behind a gap would be out of order once the gap is filled again: give them up.
            kept = next((i for i, node in enumerate(path) if self._cells[node] != i), len(path))
        keep = self._seqs[path[kept - 1]] if kept else -1
        for seq in self._tips:
            llama_cpp.llama_memory_seq_rm(self._memory, seq, length + kept if seq == keep else length, -1)
        if kept:
            for seq in self._ids[: self._tagged]:
                if seq != keep:
                    llama_cpp.llama_memory_seq_cp(self._memory, keep, seq, length, length + kept)
            self._held = length + kept
        self.token_ids.extend(self._tokens[node] for node in path)
        self._forget_nodes()

    def rewind(self, length: int) -> None:
        for seq in self._ids[: self._tagged]:
            llama_cpp.llama_memory_seq_rm(self._memory, seq, length, -1)
        self._held = min(self._held, length)
        del self.token_ids[length:]
        self._forget_nodes()

    def fork(self) -> "LlamaSession":
        other = self._backend.open()
        llama_cpp.llama_memory_seq_cp(self._memory, self._ids[0], other._ids[0], 0, self._held)
        other.token_ids, other._held = self.token_ids.copy(), self._held
        return other

    @property
    def lost(self) -> int:
        """Committed tokens whose cells were given up; the next pass reads them again."""
        return len(self.token_ids) - self._held

    def close(self) -> None:
        if self._ids and self._backend.memory is not None:
            self.rewind(0)
            self._backend.release(self._ids)
        self._ids = []


class LlamaLogits:
    """See `edgespec.backend.Logits`: views of llama.cpp's output buffer."""

    def __init__(self, context: Any, size: int, batch_index: dict[int, int]) -> None:
        self._context = context
        self._size = size
        self._batch_index = batch_index  # node -> index in the batch

    def _view(self, node: int) -> Float32Array:
        pointer = llama_cpp.llama_get_logits_ith(self._context, self._batch_index[node])
        return np.ctypeslib.as_array(pointer, (self._size,))

    def row(self, node: int) -> Float32Array:
        return self._view(node).copy()

    def top(
        self, nodes: Sequence[int], k: int, temperature: float, noise: Sequence[Float32Array | None]
    ) -> tuple[list[IdArray], list[Scores]]:
        return top_of_rows(map(self._view, nodes), k, temperature, noise)


class LlamaBackend:
    """See `edgespec.backend.Backend`. One model with one context; make it with `load`."""

    name = "llamacpp"

    def __init__(
        self,
        model: Any,
        context: Any,
        capabilities: Capabilities,
        sessions: int,
        in_order: bool,
        watch: LayerWatch | None = None,
    ) -> None:
        self.vocab = LlamaVocab(model)
        self.capabilities = capabilities
        self.in_order = in_order
        self.notes: list[str] = []
        self._watch = watch
        self.memory: Any = llama_cpp.llama_get_memory(context)
        self._model = model
        self._context = context
        share = capabilities.max_leaves
        self._free_ids = [list(range(i * share, (i + 1) * share)) for i in range(sessions)]
        # The batch: llama.cpp's struct of arrays over numpy memory that is filled without a Python loop.
        nodes = capabilities.max_nodes * (1 + sessions)  # each session may have lost so many cells
        self._tokens = np.zeros(nodes, np.int32)
        self._positions = np.zeros(nodes, np.int32)
        self._id_counts = np.zeros(nodes, np.int32)
        self._id_pointers = np.zeros(nodes, np.uintp)
        self._wanted = np.zeros(nodes, np.int8)
        self._batch = llama_cpp.llama_batch()
        fields: list[tuple[str, NDArray[Any], Any]] = [
            ("token", self._tokens, llama_cpp.llama_token),
            ("pos", self._positions, llama_cpp.llama_pos),
            ("n_seq_id", self._id_counts, ctypes.c_int32),
            ("seq_id", self._id_pointers, ctypes.POINTER(llama_cpp.llama_seq_id)),
            ("logits", self._wanted, ctypes.c_int8),
        ]
        for name, array, kind in fields:
            setattr(self._batch, name, ctypes.cast(array.ctypes.data, ctypes.POINTER(kind)))

    def open(self) -> LlamaSession:
        if not self._free_ids:
            raise UsageError("all sessions of this model are open: load it with a larger `sessions`")
        return LlamaSession(self, self._free_ids.pop(0))

    def release(self, ids: list[int]) -> None:
        """A session has given its sequence ids back."""
        self._free_ids.append(ids)

    @property
    def streamer(self) -> Streamer | None:
        """What streams the weights, if they are streamed."""
        return self._watch.streamer if self._watch else None

    @property
    def wait_seconds(self) -> float:
        return self._watch.streamer.wait_seconds if self._watch else 0.0

    def forward(self, batch: Sequence[Work]) -> list[Logits]:
        sizes = [len(work.token_ids) for work in batch]
        limits, total = self.capabilities, sum(sizes)
        if total > limits.max_nodes:
            raise ValueError(f"{total} nodes in one forward; this backend takes {limits.max_nodes}")
        if sum(len(work.wanted) for work in batch) > limits.max_wanted:
            raise ValueError(f"more than {limits.max_wanted} wanted nodes in one forward")
        sessions = [cast(LlamaSession, work.session) for work in batch]
        # All works find room before the first is taken in: a refused batch changes nothing.
        placements = [session.place(work) for session, work in zip(sessions, batch, strict=True)]
        logits: list[Logits] = []
        tokens, positions, ids, wanted = list[int](), list[int](), list[list[int]](), list[int]()
        for session, placement in zip(sessions, placements, strict=True):
            start = len(tokens) + session.lost
            cells = session.add(placement)
            tokens += cells[0]
            positions += cells[1]
            ids += cells[2]
            index = {placement.first + node: start + i for i, node in enumerate(placement.order)}
            logits.append(LlamaLogits(self._context, self.vocab.size, index))
            wanted.extend(index[node] for node in placement.work.wanted.tolist())
        total = len(tokens)
        self._tokens[:total] = tokens
        self._positions[:total] = positions
        self._wanted[:total] = 0
        self._wanted[wanted] = 1
        counts = np.fromiter(map(len, ids), np.int32, total)
        flat = np.fromiter(chain.from_iterable(ids), np.int32, int(counts.sum()))
        self._id_counts[:total] = counts
        self._id_pointers[:total] = flat.ctypes.data + 4 * (np.cumsum(counts, dtype=np.uintp) - counts)
        self._batch.n_tokens = total
        try:
            self._decode(total)
        except BaseException:
            for session in sessions:
                session.give_up()
            raise
        for session in sessions:
            session.evaluated()
        return logits

    def _decode(self, total: int) -> None:
        watch = self._watch
        if watch:
            watch.begin()
        with watch.signals_held() if watch else nullcontext():
            status = llama_cpp.llama_decode(self._context, self._batch)
            llama_cpp.llama_synchronize(self._context)
            if watch:
                watch.streamer.finish()
        if watch and watch.error is not None:
            raise watch.error
        if status != 0:
            raise ModelError(f"llama.cpp could not evaluate {total} tokens (code {status}): {last_log()}")

    def close(self) -> None:
        if self._context is not None:
            self.memory = None
            llama_cpp.llama_free(self._context)
            if self._watch:
                self._watch.streamer.close()
            llama_cpp.llama_model_free(self._model)
            self._context = self._model = None


def load(
    path: str,
    *,
    context_length: int = 4096,
    budget: int = 64,
    sessions: int = 1,
    threads: int | None = None,
    gpu_layers: int = 0,
    in_order: bool = True,
    memory: int | str | None = None,
    beside: Sequence[str] = (),
    resident: bool = False,
) -> LlamaBackend:
    """Load a GGUF file. If it does not fit into memory, its weights are streamed.

    Args:
        path: the file; for a split model its first part.
        context_length: most tokens of text in one session; 0 = what the model was trained for.
        budget: largest tree that will be asked for, in nodes without the root.
        sessions: how many sessions may be open at once.
        threads: compute threads; default: one per core (performance cores on a Mac).
        gpu_layers: layers to keep on the GPU; -1 = all.
        in_order: keep a session's cells in the order of its text, as plain decoding does, since llama.cpp's rounding
            depends on it. Committed nodes behind a gap lose their cells then, and the next pass reads them again:
            a few tokens. A draft does without.
        memory: bytes, such as "12G", that this model, what is `beside` it and the program may take; default: what is
            free.
        beside: further model files that will be loaded, with the same options, and stay in memory: the draft.
        resident: do not stream, whatever is free: another model's plan has left room for this one.

    Raises:
        ModelError: the file is missing, not a GGUF, damaged, or of an architecture that cannot hold a tree.
        UsageError: an option is out of range, or the memory too little for the model.
    """
    _check_options(context_length, budget, sessions, threads)
    memory = parse_size(memory) if isinstance(memory, str) else memory
    size = ContextSize(context_length, budget, sessions, MIN_NODES)
    plan, notes = None, list[str]()
    plenty = is_plenty(path, memory, beside)
    if not plenty and not resident:
        plan, size, notes = plan_memory(path, size, memory=memory, beside=beside, gpu_layers=gpu_layers)
    known = {mapping.start for part in parts(path) for mapping in mappings(part)} if plan else set()
    options: dict[str, Any] = {"use_extra_bufts": plenty}  # repacked weights are copies outside the file's mapping
    if plan:
        options["load_mode"] = llama_cpp.LLAMA_LOAD_MODE_MMAP
    model = load_model(path, n_gpu_layers=gpu_layers, **options)
    watch = None
    try:
        if llama_cpp.llama_model_is_recurrent(model) or llama_cpp.llama_model_is_hybrid(model):
            raise ModelError(
                f"{path}: has recurrent layers, whose state cannot branch into a tree; use an attention model"
            )
        if plan:
            watch = LayerWatch(start_streaming(path, plan, known, notes))
        params = size.params(model)
        params.n_threads = params.n_threads_batch = threads or compute_cores()
        if watch and plan and plan.streamed:
            params.cb_eval = watch.callback
        context = llama_cpp.llama_init_from_model(model, params)
        if not context:
            raise ModelError(f"{path}: no memory for a context of {context_length} tokens: {last_log()}")
    except BaseException:
        if watch:
            watch.streamer.close()
        llama_cpp.llama_model_free(model)
        raise
    capabilities = Capabilities(
        context_length=size.context_length or llama_cpp.llama_model_n_ctx_train(model),
        max_nodes=size.max_nodes,
        max_wanted=params.n_outputs_max,
        max_leaves=size.max_leaves,
        logit_tolerance=TOLERANCES.get(metadata(model, "general.file_type"), TOLERANCE_QUANTISED),
        streams=bool(plan and plan.streamed),
    )
    backend = LlamaBackend(model, context, capabilities, sessions, in_order, watch)
    backend.notes = notes
    return backend


def load_vocab(path: str) -> LlamaVocab:
    """Only the tokenizer of a GGUF file; freed with the object. Raises ModelError as `load` does."""
    model = load_model(path, vocab_only=True)
    vocab = LlamaVocab(model)
    weakref.finalize(vocab, llama_cpp.llama_model_free, model)
    return vocab


def _check_options(context_length: int, budget: int, sessions: int, threads: int | None) -> None:
    for name, value, low, high in [
        ("context length", context_length, 0, 2**24),
        ("budget", budget, 1, 2**15),
        ("sessions", sessions, 1, LLAMA_MAX_SEQ),
        ("threads", threads or 1, 1, 1024),
    ]:
        if not low <= value <= high:
            raise UsageError(f"{name} is {value}, but must be from {low} to {high}")


def compute_cores() -> int:
    """Cores worth a compute thread: those this process may use; on a Mac the performance cores."""
    if sys.platform == "darwin":
        size, count = ctypes.c_size_t(4), ctypes.c_int32(0)
        libc = ctypes.CDLL(None)
        if libc.sysctlbyname(b"hw.perflevel0.physicalcpu", ctypes.byref(count), ctypes.byref(size), None, 0) == 0:
            return count.value
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
