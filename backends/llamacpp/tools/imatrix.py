"""Program that makes an importance matrix, as llama.cpp's tools/imatrix: sums of squares of each weight's inputs.

The job: source, out, text (a file), chunks (of 512 tokens); lines to the parent: {done, total} chunks.
"""

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ModelError
from edgespec.machine.system import compute_cores

from ..batch import Batch
from ..cells import Rows
from ..ggml.files import PROCESSOR_ONLY, ggml_base, llama_cpp, load_model
from ..ggml.ggml_tensor import GgmlTensor, is_known, source_addresses
from ..vocab import load_vocab
from .child import Say, serve

TOKENS = 512
LEAST_ROWS = 16
F32, I32 = 0, 26  # ggml_type


class Collector:
    """
    Attributes:
        sums: by weight, of squares of its inputs [experts or heads, columns].
        counts: by weight, number of summed rows [experts or heads].
        error: raised in the callback.
    """

    def __init__(self) -> None:
        self.sums: dict[str, NDArray[np.float64]] = {}
        self.counts: dict[str, NDArray[np.float64]] = {}
        self.error: BaseException | None = None
        self.callback = llama_cpp.ggml_backend_sched_eval_callback(self._called)
        self._op = ggml_base().ggml_op_desc
        self._checked = False

    def _called(self, address: int, ask: bool, user_data: int) -> bool:
        try:
            op = self._op(address)
            if op not in (b"MUL_MAT", b"MUL_MAT_ID"):
                return not ask
            if not self._checked:
                if not all(map(is_known, [address, *source_addresses(address)])):
                    raise ModelError(
                        "this version of llama-cpp-python lays tensors out in another way; take --imatrix FILE or none"
                    )
                self._checked = True
            weight, rows, *others = (GgmlTensor.from_address(source) for source in source_addresses(address))
            wanted = weight.name.startswith(b"blk.") and rows.type == F32
            wanted &= op == b"MUL_MAT_ID" or rows.ne[1] >= LEAST_ROWS
            if not ask and wanted:
                name = weight.name.decode()
                if op == b"MUL_MAT_ID":
                    self._experts(name, weight, rows, others[0])
                else:
                    self._matrices(name, weight, rows)
            return wanted or not ask
        except BaseException as error:
            self.error = self.error or error
            return not ask

    def _matrices(self, name: str, weight: GgmlTensor, rows: GgmlTensor) -> None:
        """One matrix, or one for each head, such as attn_k_b; llama.cpp's quantiser wants sums for each."""
        values, count = view(rows), weight.ne[2]  # [n3, n2, rows, columns], where n2 is a multiple of `count`
        squares = np.square(values).sum((0, 2)).reshape(count, -1, values.shape[-1]).sum(1)
        self._add(name, count, np.arange(count), squares, values[..., 0].size // count)

    def _experts(self, name: str, weight: GgmlTensor, rows: GgmlTensor, chosen: GgmlTensor) -> None:
        ids = view(chosen, np.int32)[0, 0]  # [tokens, experts used]
        values = view(rows)[0]  # [tokens, experts used or 1, columns]
        squares = np.broadcast_to(np.square(values), (*ids.shape, values.shape[-1])).reshape(-1, values.shape[-1])
        for expert in np.unique(ids):
            hit = (ids == expert).ravel()
            self._add(name, weight.ne[2], np.array([expert]), squares[hit].sum(0)[None], int(hit.sum()))

    def _add(self, name: str, experts: int, which: NDArray[Any], squares: NDArray[Any], rows: int) -> None:
        if not np.isfinite(squares).all():
            raise ModelError(f"{name}: is multiplied with values that are no numbers")
        sums = self.sums.setdefault(name, np.zeros((experts, squares.shape[1])))
        counts = self.counts.setdefault(name, np.zeros(experts))
        sums[which] += squares
        counts[which] += rows


def view(tensor: GgmlTensor, kind: Any = np.float32) -> NDArray[Any]:
    size = tensor.nb[3] * tensor.ne[3]
    memory = (ctypes.c_char * size).from_address(tensor.data)
    shape, strides = tuple(reversed(tensor.ne)), tuple(reversed(tensor.nb))
    return np.ndarray(shape, kind, memory, strides=strides)


def collect(path: str, token_ids: list[int], say: Say) -> Collector:
    """
    Raises:
        ModelError: llama.cpp cannot evaluate them.
    """
    model = load_model(path, use_extra_bufts=False, **PROCESSOR_ONLY)
    collector = Collector()
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = TOKENS
    params.n_threads = params.n_threads_batch = compute_cores()
    params.cb_eval, params.no_perf = collector.callback, True
    context = llama_cpp.llama_init_from_model(model, params)
    batch, every = Batch(TOKENS), list(range(TOKENS))
    try:
        if not context:
            raise ModelError(f"{path}: no context of {TOKENS} tokens can be made")
        total = len(token_ids) // TOKENS
        for chunk in range(total):
            say({"done": chunk, "total": total})
            llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
            # All are wanted, since the last layer has wanted rows only.
            batch.fill(Rows(token_ids[chunk * TOKENS : (chunk + 1) * TOKENS], every, [[0]] * TOKENS, every))
            if llama_cpp.llama_decode(context, batch.struct) != 0:
                raise ModelError(f"{path}: {TOKENS} tokens cannot be evaluated")
            if collector.error:
                raise collector.error
        say({"done": total, "total": total})
    finally:
        if context:
            llama_cpp.llama_free(context)
        llama_cpp.llama_model_free(model)
    return collector


def write(collector: Collector, out: str, origin: str, chunks: int) -> None:
    from gguf import GGUFWriter

    writer = GGUFWriter(out, "")
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", [origin])
    writer.add_uint32("imatrix.chunk_count", chunks)
    writer.add_uint32("imatrix.chunk_size", TOKENS)
    for name, sums in sorted(collector.sums.items()):
        writer.add_tensor(f"{name}.in_sum2", sums.astype(np.float32))
        writer.add_tensor(f"{name}.counts", collector.counts[name].astype(np.float32)[:, None])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def work(job: dict[str, Any], say: Say) -> None:
    vocab = load_vocab(job["source"])
    text = Path(job["text"]).read_text("utf-8")
    token_ids = vocab.encode(text, add_bos=False, parse_special=True)[: job["chunks"] * TOKENS]
    if len(token_ids) < TOKENS:
        raise ModelError(
            f"{job['text']}: has {len(token_ids)} tokens, but an importance matrix needs at least {TOKENS}"
        )
    collector = collect(job["source"], token_ids, say)
    write(collector, job["out"], Path(job["text"]).name, len(token_ids) // TOKENS)


if __name__ == "__main__":
    serve(work)
