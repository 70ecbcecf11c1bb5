"""States of a text's tokens, from a second context of a loaded model, made when they are first asked for."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from edgespec.errors import ModelError, NoRoom, UsageError
from edgespec.loop.sampling import Float32Array
from edgespec.machine.memory import format_size
from edgespec.machine.this_machine import this_machine

from .batch import Batch
from .cells import Rows
from .context import ContextSize, make_context, settle_attention
from .ggml.files import forget_log, last_log, llama_cpp, loaded_tensors
from .memory.gpu import find_gpus
from .memory.planning import rehearse, weights_here

# Tokens of a pass. llama.cpp pools only texts of one pass itself, and in such a context it gives the logits of every
# token: of a whole text they would take gigabytes.
ROWS = 128
NAMES = {
    llama_cpp.LLAMA_POOLING_TYPE_MEAN: "mean",
    llama_cpp.LLAMA_POOLING_TYPE_CLS: "cls",
    llama_cpp.LLAMA_POOLING_TYPE_LAST: "last",
}


def memory_left(path: str, gpu_layers: int, most: int | None) -> int:
    """
    Args:
        path: of a loaded model.
        gpu_layers: its layers on GPUs.
        most: bytes that the program may take with the model's weights; None: all that are free.

    Returns:
        The bytes that are left.
    """
    machine = this_machine(path, find_gpus())
    left = machine.free - machine.used
    if most is not None:
        here = weights_here(loaded_tensors(path), gpu_layers, machine.gpus)  # a file's pages are in no one's `used`
        left = min(left, most - machine.used - here)
    return max(0, left)


def pooling_of(context: Any) -> str:
    """As of `edgespec.loop.backend.Embeds`."""
    return NAMES.get(llama_cpp.llama_pooling_type(context), "")


class Embedder:
    def __init__(self, backend: Any) -> None:
        """
        Args:
            backend: a `LlamaBackend`.

        Raises:
            UsageError: weights are read in every pass.
            NoRoom: there is too little memory.
        """
        path, model, computing, plan = backend.path, backend.model, backend.computing, backend.plan
        if plan and (plan.streamed or plan.pools or plan.device_pools):
            raise UsageError("embeddings need all weights in memory, but this model's are streamed from disk")
        size = ContextSize(backend.capabilities.context_length, 0, 1, ROWS, computing["kv_type"], embeds=True)
        left = memory_left(path, computing["gpu_layers"], backend.most_memory)
        _, [buffers] = rehearse(path, [size], left)
        if buffers.total > left:
            needed = format_size(buffers.total, up=True)
            raise NoRoom(f"embeddings need {needed} of memory, but {format_size(left)} are free")
        params = size.params(model)
        params.n_threads = params.n_threads_batch = computing["threads"]
        params.op_offload = "op_offload" not in computing
        if params.op_offload and "device" in computing:
            settle_attention(path, model, size, params)
        self.context = make_context(path, model, size, params)
        self._width = int(llama_cpp.llama_model_n_embd_out(model))
        self._batch = Batch(ROWS)

    def states(self, token_ids: Sequence[int], start: int) -> Float32Array:
        """See `edgespec.loop.backend.Embeds.embed`."""
        if start == 0:
            llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)
        count = len(token_ids)
        every = list(range(count))
        self._batch.fill(Rows(list(token_ids), [start + i for i in every], [[0]] * count, every))
        forget_log()
        status = llama_cpp.llama_decode(self.context, self._batch.struct)
        llama_cpp.llama_synchronize(self.context)
        if status != 0:
            raise ModelError(f"llama.cpp could not evaluate {count} tokens (code {status}): {last_log()}")
        return np.ctypeslib.as_array(llama_cpp.llama_get_embeddings(self.context), (count, self._width)).copy()
