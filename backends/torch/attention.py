"""Attention over trees instead of transformers' own, and one pass of a model with it.

In each layer, `tree_attention` writes the keys and values of each work into its session's cells (see `backend.py`), and
attends to these cells.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch.nn.functional import scaled_dot_product_attention

from edgespec.errors import ModelError
from edgespec.loop.tree import ancestor_mask

from ..common.interrupts import Stop

ATTENTION = "edgespec_tree"
MASK_ALIGNMENT = 16  # elements; rows start at multiples, else CUDA's memory-efficient kernel copies the mask


@dataclass(frozen=True, slots=True)
class Part:
    """One work's share of a pass.

    Attributes:
        rows: the work's rows of the pass.
        new: slice or indices of the rows whose keys and values get cells.
        cells: the session's [2, key heads, cells, d], by layer.
        start: cell of the first new row.
        end: the cell after that of the last new row.
        masks: by window, as `build_mask` returns them.
        chosen: cells that are read, by layer; other layers read all.
        keep: number of the last rows whose queries are kept.
        queries: those that were kept, [heads, rows, d] by layer, scaled.
    """

    rows: slice
    new: Any
    cells: Mapping[int, Any]
    start: int
    end: int
    masks: dict[int | None, tuple[int, Any]]
    chosen: Mapping[int, Any] = field(default_factory=dict)
    keep: int = 0
    queries: dict[int, Any] = field(default_factory=dict)

    def to(self, device: Any) -> Self:
        """A copy whose rows and masks lie on a device; cells stay where they are."""
        new = self.new if isinstance(self.new, slice) else self.new.to(device)
        masks = {window: (low, None if mask is None else mask.to(device)) for window, (low, mask) in self.masks.items()}
        chosen = {layer: cells.to(device) for layer, cells in self.chosen.items()}
        return replace(self, new=new, masks=masks, chosen=chosen)


@dataclass(slots=True)
class Probe:
    """Replaces `Tree` in the first pass, which inspects the layers.

    Attributes:
        heads: number of key heads and their size d, by layer.
        windows: sliding window, by layer.
        calls: of attention, by layer.
    """

    heads: dict[int, tuple[int, int]] = field(default_factory=dict)
    windows: dict[int, int | None] = field(default_factory=dict)
    calls: Counter[int] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class Tree:
    """
    Attributes:
        parts: of the works of a pass.
        windows: sliding window, by layer.
        stop: once it is set, no further layer is computed.
    """

    parts: tuple[Part, ...]
    windows: tuple[int | None, ...]
    stop: Stop

    def to(self, device: Any) -> Self:
        return replace(self, parts=tuple(part.to(device) for part in self.parts))


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
    s_aux: Any = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Any, None]:
    """
    Args:
        module: the layer's attention module.
        query: [1, heads, n, d], rotated by position; n nodes of all works. For paths [lanes, heads, width, d].
        key: [1, key heads, n, d], or [lanes, key heads, width, d].
        value: as `key`.
        attention_mask: None; the masks are those of `tree`.
        tree: the pass, or a probe.
        scaling: of the scores; default: 1 / sqrt(d).
        softcap: scores become softcap * tanh(score / softcap) (Gemma 2).
        s_aux: [heads], the score of each head's attention sink (gpt-oss).
        sliding_window: only a `Probe` reads it.
        options: further arguments of the model class.

    Returns:
        [1, n, heads, d], or [lanes, width, heads, d]; None instead of attention weights.
    """
    if isinstance(tree, Probe):
        if attention_mask is not None:
            raise ModelError("its attention has a mask of its own, which this backend does not compute")
        return _probe(module, query, key, value, tree, sliding_window, options)
    tree.stop.check()
    lanes = len(query)
    query, key, value = (x.transpose(0, 1).flatten(1, 2)[None] if lanes > 1 else x for x in (query, key, value))
    out = torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format)  # [1, n, heads, d]
    out[:, tree.parts[-1].rows.stop :] = 0  # padding
    layer = module.layer_idx
    for part in tree.parts:
        keys, values = part.cells[layer]
        start, end = part.start, part.end
        keys[:, start:end] = key[0, :, part.new]
        values[:, start:end] = value[0, :, part.new]
        low, mask = part.masks[tree.windows[layer]]
        read = part.chosen.get(layer, slice(low, end))
        if layer in part.chosen and mask is not None:
            mask = mask[:, read]
        attend: Any = scaled_dot_product_attention
        if softcap is not None or s_aux is not None:
            attend = _by_definition(softcap, s_aux)
        # The batch dimension is the key head, so that its query heads share keys and values without a copy (stride 0).
        shared = query[0, :, part.rows].unflatten(0, (len(keys), -1))
        # A single node's query heads become rows of one product, as in flash-attention: keys and values are read once.
        single = shared.shape[2] == 1 and attend is scaled_dot_product_attention
        if single:
            shared = shared.transpose(1, 2)
        k, v = (cells[:, read][:, None].expand(-1, shared.shape[1], -1, -1) for cells in (keys, values))
        found = attend(shared, k, v, attn_mask=mask, scale=scaling, is_causal=mask is None and end - start > 1)
        found = found.transpose(1, 2) if single else found
        out[0, part.rows] = found.flatten(0, 1).transpose(0, 1)
        if part.keep:
            scale = query.shape[-1] ** -0.5 if scaling is None else scaling
            part.queries[layer] = query[0, :, part.rows][:, -part.keep :] * scale
    return out.unflatten(1, (lanes, -1))[0], None


def _by_definition(softcap: float | None, sinks: Any) -> Any:
    """Attention with capped scores or attention sinks, for which PyTorch has no kernel."""

    def attend(query: Any, key: Any, value: Any, attn_mask: Any, scale: float | None, is_causal: bool) -> Any:
        scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril().log()
        if attn_mask is not None:
            scores = scores + attn_mask
        if sinks is not None:
            nowhere = sinks.to(scores.dtype).view(*scores.shape[:2], 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, nowhere], -1)
        weights = torch.softmax(scores, -1, dtype=torch.float32)[..., : key.shape[-2]]
        return weights.to(value.dtype) @ value

    return attend


def _probe(
    module: Any, query: Any, key: Any, value: Any, probe: Probe, window: int | None, options: dict[str, Any]
) -> tuple[Any, None]:
    if options.get("position_bias") is not None:
        raise ModelError("its attention has a term (position_bias) that this backend does not compute")
    if key.shape != value.shape:
        raise ModelError(f"its keys and values have different shapes: {list(key.shape)} and {list(value.shape)}")
    probe.heads[module.layer_idx] = key.shape[1], key.shape[3]
    probe.windows[module.layer_idx] = window
    probe.calls[module.layer_idx] += 1
    return value.repeat_interleave(query.shape[1] // value.shape[1], 1).transpose(1, 2), None


transformers.AttentionInterface.register(ATTENTION, tree_attention)


def build_mask(
    sees: NDArray[np.bool_],
    positions: Sequence[int],
    length: int,
    window: int | None,
    dtype: Any,
    device: Any,
    hides_first: bool = False,
) -> tuple[int, Any]:
    """
    Args:
        sees: [n, nodes], the uncommitted nodes that each new node sees.
        positions: of all uncommitted nodes; the new ones are the last n.
        length: committed tokens.
        window: how many positions, its own included, a node can look at; None: all.
        dtype: of the scores.
        device: where they are computed.
        hides_first: cell 0 is hidden from all others.

    Returns:
        The first cell that any node can see, and an `additive` mask of the cells from there on. The mask is None if
        nothing is hidden, or if the nodes are a chain at the beginning of the sequence.
    """
    count = len(sees)
    new = np.asarray(positions[len(positions) - count :])
    low = max(0, int(new.min()) - window + 1) if window is not None else 0
    low = min(max(low, int(hides_first)), length)
    within_text = window is None or int(new.max()) < window
    hidden = hides_first and length == 0 and sees.shape[1] > 1  # cell 0 is that of node 0
    if (
        within_text
        and not hidden
        and (sees.all() or (length == 0 and sees.shape[1] == count and (sees == np.tri(count, dtype=np.bool_)).all()))
    ):
        return low, None
    sees = sees.copy()
    sees[int(count == sees.shape[1]) :, : int(hidden)] = False  # node 0 is the first row, or was in a pass before
    if within_text or window is None:
        return low, additive(sees, dtype, device, length - low)
    mask = additive(sees & (new[:, None] - np.asarray(positions) < window), dtype, device, length - low)
    return low, hide_committed(mask, new.tolist(), low, length, window)


def additive(allowed: NDArray[np.bool_], dtype: Any, device: Any, before: int = 0) -> Any:
    """The mask [n, before + cells]: 0 where a node sees a cell, and -inf elsewhere; all see the cells before."""
    count, width = allowed.shape[0], before + allowed.shape[1]
    mask = torch.zeros((count, -(-width // MASK_ALIGNMENT) * MASK_ALIGNMENT), dtype=dtype, device=device)[:, :width]
    mask[:, before:].masked_fill_(~torch.from_numpy(allowed).to(device), -torch.inf)
    return mask


def hide_committed(mask: Any, positions: Sequence[int], low: int, length: int, window: int | None) -> Any:
    """`mask`, with the committed tokens from `low` on hidden that are later than a node or outside its window."""
    (at,), cells = numbers_on(mask.device, positions), torch.arange(low, length, device=mask.device)
    hidden = cells > at[:, None]
    if window is not None:
        hidden |= cells <= at[:, None] - window
    mask[:, : length - low].masked_fill_(hidden, -torch.inf)
    return mask


def tree_after(length: int, window: int | None, cells: Any, heads: int) -> tuple[Any, Any]:
    """Attention of two siblings' parent and the siblings, after `length` random tokens, as computed and by definition.

    Args:
        length: number of these tokens.
        window: as for `build_mask`.
        cells: [2, key heads, cells, d], which are overwritten.
        heads: of queries.
    """
    device, dtype, d = cells.device, cells.dtype, cells.shape[-1]
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn((3, cells.shape[1], length + 3, d), generator=generator)
    query = torch.full((heads, 3, d), 3 / d**0.25)
    noise[0, :, length : length + 2] = query[0, 0]  # a node that sees its parent or sibling sees little else
    keys, values = noise[:2].to(device, dtype)
    cells[0, :, :length], cells[1, :, :length] = keys[:, :length], values[:, :length]
    low, mask = build_mask(
        ancestor_mask(np.array([-1, 0, 0])), [length, length + 1, length + 1], length, window, dtype, device
    )
    part = Part(slice(0, 3), slice(0, 3), {0: cells}, length, length + 3, {window: (low, mask)})
    tree, one, new = Tree((part,), (window,), Stop()), SimpleNamespace(layer_idx=0), slice(length, None)
    query = query.to(device, dtype)
    found, _ = tree_attention(one, query[None], keys[None, :, new], values[None, :, new], None, tree=tree)
    shared = query.float().unflatten(0, (cells.shape[1], -1))
    keys, values = (part[:, None, low:].float().expand(-1, shared.shape[1], -1, -1) for part in (keys, values))
    right = _by_definition(None, None)(shared, keys, values, None if mask is None else mask.float(), None, mask is None)
    return found[0].float().transpose(0, 1), right.flatten(0, 1)


def numbers_on(device: Any, *rows: Sequence[int]) -> Any:
    """A tensor of each row on a device, by one copy: each waits for weights that are copied."""
    every = torch.tensor([number for row in rows for number in row], dtype=torch.int64).to(device)
    return every.split([len(row) for row in rows])


def run(
    model: Any,
    token_ids: Sequence[int],
    positions: Sequence[int],
    wanted: Sequence[int],
    tree: Tree | Probe,
    device: Any,
) -> Any:
    """
    Returns:
        Logits [wanted, V] on the device, after the pass has ended.
    """
    places, rows, ids = numbers_on(device, positions, wanted, token_ids)
    if model.get_input_embeddings().weight.device.type == "cpu":
        ids = torch.tensor(list(token_ids))
    logits = model(
        input_ids=ids[None], position_ids=places[None], logits_to_keep=rows, use_cache=False, tree=tree
    ).logits[0]
    finish(device)
    return logits


def finish(device: Any) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()  # copies for the next pass go on in another stream
    elif device.type == "mps":
        torch.mps.synchronize()
