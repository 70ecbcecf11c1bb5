"""The size of a context, and llama.cpp's parameters for it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from edgespec.errors import ModelError, UsageError
from edgespec.loop.shapes import TILE

from ..common.paths import MOST_UNREAD
from ..common.signals import Signals
from .cells import EXTRA_IDS, IN_WINDOWS
from .ggml.files import FILE_TYPE_F32, LLAMA_MAX_SEQ, forget_log, last_log, llama_cpp, load_header, logged, metadata
from .recurrent import ids_of_session, is_recurrent, most_paths

# Types of keys and values in the cache: `kv_cache_types` in llama.cpp's common/arg.cpp, `ggml_type` in ggml.h.
KV_TYPES = {
    "f16": 1, "q8_0": 8, "bf16": 30, "f32": 0, "q5_1": 7, "q5_0": 6, "q4_1": 3, "q4_0": 2, "iq4_nl": 20,
}  # fmt: skip
PLAIN_TYPES = ("f16", "bf16", "f32")
EAGLE3 = b"eagle3"  # general.architecture of heads in files of their own
HEAD_CHUNK = 64  # tokens of a prompt in a head's pass, which gives logits of all rows, if of any


def kv_types(name: str) -> tuple[str, str]:
    keys, _, values = name.partition("/")
    return keys, values or keys


@dataclass(frozen=True, slots=True)
class ContextSize:
    """
    Attributes:
        context_length: tokens of one sequence; 0: as trained.
        budget: largest tree, in nodes without the root.
        sessions: that may be open at once.
        chunk: tokens of a prompt in a pass.
        kv_type: as of `LoadOptions`.
        share: part of the context length for each further session.
        own_ids: sequence ids that each session owns.
        head: True for a head's context: its cache is plain, and a pass gives logits of all rows.
        embeds: True for a context of one sequence, whose passes give states of all rows.
        kept: further sessions that may be open, without nodes of trees.
        each: sessions that one sequence of the target takes (`LoadOptions.draft_sessions`), for messages.
    """

    context_length: int
    budget: int
    sessions: int
    chunk: int
    kv_type: str | None = None
    share: float = 1.0
    own_ids: int = 1
    head: bool = False
    embeds: bool = False
    each: int = 1
    kept: int = 0

    def __post_init__(self) -> None:
        if self.kv_type is not None and not set(kv_types(self.kv_type)) <= KV_TYPES.keys():
            names = ", ".join(KV_TYPES)
            raise UsageError(f"kv_type is {self.kv_type!r}, but must be one of {names}, or two of them as in f16/q8_0")

    @property
    def open(self) -> int:
        return self.sessions + self.kept

    @property
    def max_nodes(self) -> int:
        return max(self.chunk, self.budget + 1)

    @property
    def max_leaves(self) -> int:
        return min(max(self.budget, 32), LLAMA_MAX_SEQ - self.extra_ids - self.own_ids * (self.open - 1))

    @property
    def ids(self) -> int:
        return min(self.max_leaves * self.sessions + self.own_ids * self.kept, LLAMA_MAX_SEQ - self.extra_ids)

    @property
    def extra_ids(self) -> int:
        return EXTRA_IDS + self.own_ids - 1

    def of(self, model: Any) -> "ContextSize":
        """A copy with the `own_ids` that the model needs.

        Raises:
            UsageError: there are too few sequence ids for `sessions`.
        """
        if is_recurrent(model) and not self.head:
            return replace(self, kept=0)  # each would have cells and states of its own
        if not llama_cpp.llama_model_n_swa(model):
            return self
        most = (LLAMA_MAX_SEQ - EXTRA_IDS) // (2 * IN_WINDOWS)
        if self.sessions > most:
            raise UsageError(
                f"{self.sessions // self.each} texts at once are too many: a layer has a sliding window, "
                f"so take {most // self.each}"
            )
        return replace(self, own_ids=IN_WINDOWS, kept=min(self.kept, most - self.sessions))

    def length(self, model: Any) -> int:
        return self.context_length or int(llama_cpp.llama_model_n_ctx_train(model))

    def tokens(self, model: Any) -> int:
        """Most tokens of all sequences together."""
        length = self.length(model)
        return length + int(self.share * length) * (self.sessions - 1)

    def kv_type_in(self, model: Any) -> str:
        return self.kv_type or ("f32" if metadata(model, "general.file_type") == FILE_TYPE_F32 else "f16")

    def params(self, model: Any, target: Any = None) -> Any:
        """
        Args:
            model: to compute with.
            target: a head's target, a context.
        """
        params = llama_cpp.llama_context_default_params()
        if self.head:
            params.ctx_other = target
            if metadata(model, "general.architecture") != EAGLE3:
                params.ctx_type = llama_cpp.LLAMA_CONTEXT_TYPE_MTP
        tiles = self.sessions * TILE if self.sessions > 1 else 0
        rows = self.max_nodes + tiles
        params.n_ctx = self.tokens(model) + self.sessions * (self.max_nodes + TILE) + self.kept * TILE
        params.n_batch, params.n_ubatch = rows + self.sessions * self.max_nodes, rows
        params.n_seq_max = self.ids + self.extra_ids
        params.n_outputs_max = max(self.max_nodes if self.head else self.budget + 1, TILE, params.n_seq_max)
        if self.embeds:
            params.n_ctx, params.n_seq_max = self.length(model), 1
            params.n_batch = params.n_ubatch = params.n_outputs_max = self.chunk
            params.embeddings, params.pooling_type = True, llama_cpp.LLAMA_POOLING_TYPE_NONE
        elif lanes := 0 if self.head else most_paths(model, self.budget, self.sessions):
            params.n_seq_max = ids_of_session(lanes) * self.sessions
            rows = self.max_nodes + 2 * MOST_UNREAD
            # Cells for all paths of a pass, besides the longest sequences; only few layers have cells.
            nodes = max(rows, (lanes + 1) * (self.budget + 1 + 2 * MOST_UNREAD))
            params.n_ctx = self.sessions * (self.length(model) + nodes)
            params.n_batch = params.n_ubatch = rows
            params.n_outputs_max = max(self.budget + 1, TILE, params.n_seq_max)
        params.kv_unified = True
        params.swa_full = True  # cells stay when a sliding window leaves them, so that a session can be rewound
        params.no_perf = True
        float32 = metadata(model, "general.file_type") == FILE_TYPE_F32
        types = kv_types(self.kv_type_in(model))
        params.type_k, params.type_v = (KV_TYPES[name] for name in types)
        if types == ("f32", "f32") or (float32 and set(types) <= set(PLAIN_TYPES)):
            # Flash attention, which only a quantised cache needs, would round keys, values and scores to 16 bits.
            params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        return params


def of_head(size: ContextSize) -> ContextSize:
    """The size of a head's context, for a target's."""
    return replace(size, chunk=HEAD_CHUNK, own_ids=1, kv_type=None, head=True)


def make_context(path: str, model: Any, size: ContextSize, params: Any) -> Any:
    signals = Signals()
    forget_log()
    with signals.held():
        context = llama_cpp.llama_init_from_model(model, params)
        if context and signals.stop():
            llama_cpp.llama_free(context)
            context = None
    if not context:
        raise ModelError(f"{path}: no context of {size.length(model)} tokens can be made: {last_log()}")
    return context


@contextmanager
def trial_context(path: str, model: Any, size: ContextSize, params: Any) -> Iterator[Any]:
    """A context for few tokens of one sequence, without `op_offload`."""
    trial = type(params).from_buffer_copy(params)
    trial.n_ctx, trial.n_seq_max, trial.op_offload = 1, 1, False
    context = make_context(path, model, size, trial)
    try:
        yield context
    finally:
        llama_cpp.llama_free(context)


def settle_attention(path: str, model: Any, size: ContextSize, params: Any) -> None:
    """Let `params` have flash attention if the model's devices compute it.

    llama.cpp tries it with a row for each sequence. From 32 rows on, `op_offload` moves the attention of the
    processor's layers to the GPU, and llama.cpp gives flash attention up.
    """
    if params.flash_attn_type != llama_cpp.LLAMA_FLASH_ATTN_TYPE_AUTO:
        return
    with logged() as lines, trial_context(path, model, size, params):
        refused = any("Flash Attention" in line and "disabled" in line for line in lines)
    kinds = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED, llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.flash_attn_type = kinds[refused]


def kv_type_of_file(path: str, size: ContextSize) -> str:
    """The type of keys and values of a model file; "" if it has recurrent layers.

    Raises:
        ModelError: as for `load_model`.
    """
    model = load_header(path)
    try:
        return "" if is_recurrent(model) else size.kv_type_in(model)
    finally:
        llama_cpp.llama_model_free(model)
