"""Models with recurrent layers on PyTorch: a pass is a batch, whose sequences are the lanes (paths of a tree).

Recurrent layers find the lanes' states in transformers' cache; `tree_attention` reads all lanes as one row of tokens.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, cast

import numpy as np
import torch
import transformers

from edgespec.errors import ModelError
from edgespec.loop.backend import Capabilities, Logits, Work
from edgespec.loop.passes import check_batch
from edgespec.loop.session_files import StateDetails

from ..common.interrupts import Stop, interruptible
from ..common.model_folder import refused
from ..common.recurrent import Lane, Rectangle, RecurrentSession, RecurrentStates
from .attention import Part, Probe, Tree, additive, finish, hide_committed
from .session import TorchOwner, TorchSession
from .spans import Cells, out_of_memory

State = list[Any]  # tensors [1, ...], as many as transformers' cache has
WITHOUT_CELLS = ("linear_attention", "conv", "mlp", "moe")  # `layer_types` of transformers
WITH_BOTH = ("hybrid", "hybrid_sliding")
RECURRENT = ("linear_attention", "conv", *WITH_BOTH)
STATE_WIDTHS = ("mamba_d_state", "ssm_state_size", "state_size", "linear_key_head_dim")


def is_recurrent(config: Any) -> bool:
    return any(kind in RECURRENT for kind in getattr(config, "layer_types", None) or ())


def with_cells(config: Any) -> list[int]:
    kinds = getattr(config, "layer_types", None)
    return [i for i in range(config.num_hidden_layers) if not kinds or kinds[i] not in WITHOUT_CELLS]


def state_bytes(model: Any, layer: Any = None) -> int:
    """
    Args:
        model: the model.
        layer: of it; None: all layers.

    Returns:
        An upper bound of a state's bytes, by the channels of convolutions, of which a layer has at least as many as
        rows in its state; 0 if no layer is recurrent.
    """
    config = model.config.get_text_config()
    if not is_recurrent(config):
        return 0
    width = max(getattr(config, name, None) or 0 for name in STATE_WIDTHS)
    kernels = [module for module in (layer or model).modules() if isinstance(module, torch.nn.Conv1d)]
    return sum(one.out_channels * (one.kernel_size[0] * model.dtype.itemsize + 4 * width) for one in kernels)


class StateCache(transformers.DynamicCache):  # type: ignore[misc]
    """transformers' cache, with the states of a pass, but without keys and values."""

    def __init__(self, model: Any) -> None:
        super().__init__(config=model.config)
        takes = inspect.signature(model.forward).parameters
        # Of Mamba models it is `cache` since transformers 5.24, `cache_params` before.
        self.name = next(name for name in ("cache", "cache_params", "past_key_values") if name in takes)
        self._rows: Any = None
        model.get_output_embeddings().register_forward_pre_hook(self._cut)

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return key_states, value_states

    def _cut(self, module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Keep only the final vectors whose logits are wanted."""
        return (args[0].flatten(0, 1)[self._rows],)

    def _places(self) -> Iterator[tuple[dict[int, Any], int]]:
        for layer in self.layers:
            for states in (layer.conv_states, layer.recurrent_states) if _has_states(layer) else ():
                yield from ((states, index) for index, state in states.items() if state is not None)

    def make_empty(self) -> None:
        """Make the state before the first token, with the shapes of a first pass.

        Raises:
            ModelError: a recurrent layer left no state, so the model keeps it elsewhere.
        """
        held = [layer for layer in self.layers if _has_states(layer)]
        if any(state is None for layer in held for state in layer.conv_states.values()) or not held:
            raise ModelError("its recurrent layers keep their states where they cannot be copied; use a GGUF of it")
        self.empty = [torch.zeros_like(states[index]) for states, index in self._places()]

    def without_recurrent(self, state: State) -> State:
        """A copy of a state in which only the convolutions remember tokens."""
        conv = [id(layer.conv_states) for layer in self.layers if _has_states(layer)]
        return [
            one if id(held) in conv else empty
            for (held, _), one, empty in zip(self._places(), state, self.empty, strict=True)
        ]

    def run(
        self, model: Any, token_ids: Any, positions: Any, states: Sequence[State | None], rows: Any, tree: Any
    ) -> Any:
        """
        Args:
            model: the model.
            token_ids: [lanes, width].
            positions: [lanes, width].
            states: before each lane; None: of no tokens.
            rows: [n], wanted rows among the lanes' tokens, lane after lane.
            tree: for `tree_attention`.

        Returns:
            Logits [n, V] on the device, after the pass has ended.
        """
        self._rows = rows
        for number, (held, index) in enumerate(self._places() if states else ()):
            held[index] = torch.cat([(state or self.empty)[number] for state in states])
        more = {self.name: self, "tree": tree}
        logits = model(input_ids=token_ids, position_ids=positions, use_cache=True, **more).logits
        finish(logits.device)
        return logits

    def states(self, count: int) -> list[State]:
        every = [held[index] for held, index in self._places()]
        return [[state[lane : lane + 1].clone() for state in every] for lane in range(count)]


def _has_states(layer: Any) -> bool:
    return hasattr(layer, "conv_states")


def make_cache(model: Any, device: Any) -> tuple[StateCache, Probe]:
    """Make a model's cache, and check it with a few tokens.

    Returns:
        The cache, and facts of the attention layers.

    Raises:
        ModelError: the model cannot be run on paths, or two passes, the second from a copied state, do not give the
            logits of one pass.
    """
    probe = Probe()
    with refused(f"{type(model).__name__} cannot be run on paths"), torch.inference_mode(), out_of_memory("a pass"):
        cache = StateCache(model)

        def last(tokens: list[list[int]], states: Sequence[State | None]) -> Any:
            """Logits after the first lane's last token, without attention."""
            ids = torch.tensor(tokens, device=device)
            places, rows = torch.arange(ids.shape[1], device=device).expand_as(ids), ids[0, :1] * 0
            return cache.run(model, ids, places, states, rows + ids.shape[1] - 1, probe)[0].float()

        last([[1, 2]], [])
        cache.make_empty()
        (state,) = cache.states(1)
        at_once, goes_on = last([[1, 2, 3, 4]], [None]), last([[3, 4], [5, 6]], [state, None])
        lost, part = (last([[3, 4], [5, 6]], [one, None]) for one in (None, cache.without_recurrent(state)))
    error_of_state, effect = (float((row - at_once).abs().max()) for row in (goes_on, lost))
    whole = all(one is other for one, other in zip(state, cache.without_recurrent(state), strict=True))
    if not error_of_state <= 0.25 * effect or (not whole and torch.equal(goes_on, part)):
        raise ModelError(f"{type(model).__name__} does not go on from copies of its states; use a GGUF of it")
    return cache, probe


class RecurrentOwner(TorchOwner, Protocol):
    model: Any
    cache: StateCache
    windows: tuple[int | None, ...]
    device: Any
    dtype: Any
    stop: Stop

    def logits(self, logits: Any, wanted: Sequence[int], rows: Mapping[int, int]) -> Logits: ...


class TorchRecurrentSession(RecurrentSession[State], TorchSession):
    _backend: RecurrentOwner
    _form = StateDetails

    def __init__(self, backend: RecurrentOwner, cells: Cells) -> None:
        super().__init__(backend, cells)
        self._empty = backend.cache.empty
        self.states = RecurrentStates[State](backend.capabilities.max_leaves, backend.capabilities.streams)

    def _details(self) -> StateDetails:
        return StateDetails(**self._prompt.as_dict(), states=list(self.states.text.kept))

    def _size(self, length: int, details: StateDetails) -> int:
        return super()._size(length, details) + len(details.states) * sum(int(state.nbytes) for state in self._empty)

    def _make(self, details: StateDetails) -> None:
        for at in details.states:
            self.states.text.add(at, [torch.empty_like(state) for state in self._empty])

    def _saved(self, length: int) -> list[Any]:
        return [*super()._saved(length), *(tensor for state in self.states.text.kept.values() for tensor in state)]


def forward_recurrent(backend: RecurrentOwner, batch: Sequence[Work]) -> list[Logits]:
    limits = backend.capabilities
    check_batch(batch, limits)
    sessions = [cast(TorchRecurrentSession, work.session) for work in batch]
    positions = [session.check(work) for session, work in zip(sessions, batch, strict=True)]
    with interruptible(sessions, backend.stop):
        for session in sessions:
            while rectangle := session.states.unread(session.token_ids, limits.max_nodes):
                _, states = _compute(backend, [(session, rectangle, [])], [])
                session.states.take(rectangle, states)
        lanes = [session.lanes(work) for session, work in zip(sessions, batch, strict=True)]
        found, taken = dict[int, Logits](), list[tuple[TorchRecurrentSession, Rectangle[State], list[State]]]()
        for group, width in groups(batch, lanes, limits):
            parts, rows, counts = (
                list[tuple[TorchRecurrentSession, Rectangle[State], list[int]]](),
                list[int](),
                list[int](),
            )
            for i in group:
                first, before = sessions[i].nodes, width * sum(counts)
                rectangle = Rectangle(lanes[i], width, first)
                rows += [before + int(rectangle.rows[node - first]) for node in batch[i].wanted.tolist()]
                parts.append((sessions[i], rectangle, sessions[i].parents + batch[i].parents.tolist()))
                counts.append(len(lanes[i]))
            logits, states = _compute(backend, parts, rows)
            start = 0
            for i, (session, rectangle, _), count in zip(group, parts, counts, strict=True):
                wanted, places = batch[i].wanted.tolist(), (start + rectangle.rows).tolist()
                of_work = backend.logits(logits[: len(wanted)], wanted, dict(enumerate(places, rectangle.first)))
                found[i], logits, start = of_work, logits[len(wanted) :], start + rectangle.nodes.size
                taken.append((session, rectangle, states[:count]))
                states = states[count:]
    for session, work, new in zip(sessions, batch, positions, strict=True):
        session.add(work, new)
    for session, rectangle, behind in taken:
        session.states.take(rectangle, behind)
    return [found[i] for i in range(len(batch))]


def groups(
    batch: Sequence[Work], lanes: Sequence[Sequence[Lane[State]]], limits: Capabilities
) -> Iterator[tuple[list[int], int]]:
    """
    Yields:
        Works that share a pass, and the width of their lanes. A prompt has its own pass. If weights are in memory, only
        trees of one depth share a pass: then no lane is filled up, and each leaf has a state.
    """
    together = dict[object, list[int]]()
    widths = [max(len(lane.token_ids) for lane in some) for some in lanes]
    for i, work in enumerate(batch):
        together.setdefault(("prompt", i) if work.prompt else 0 if limits.streams else widths[i], []).append(i)
    for members in together.values():
        width, group, count = max(widths[i] for i in members), list[int](), 0
        for i in members:
            if group and (count + len(lanes[i])) * width > limits.max_nodes:
                yield group, width
                group, count = [], 0
            group.append(i)
            count += len(lanes[i])
        yield group, width


def _compute(
    backend: RecurrentOwner,
    parts: Sequence[tuple[TorchRecurrentSession, Rectangle[State], list[int]]],
    rows: Sequence[int],
) -> tuple[Any, list[State]]:
    """
    Args:
        backend: that computes.
        parts: sessions, rectangles of one width, and the parents of all nodes of each session.
        rows: wanted rows among the lanes' tokens.

    Returns:
        Logits of `rows`, and the states after all lanes.
    """
    device, found, row = backend.device, list[Part](), 0
    for session, rectangle, parents in parts:
        length, size = len(session.token_ids), rectangle.nodes.size
        plain = rectangle.in_order and (length == 0 or size == 1)
        masks: dict[int | None, tuple[int, Any]] = {}
        for window in set(backend.windows):
            if plain and (window is None or length + size <= window):
                masks[window] = 0, None
            else:
                mask = additive(rectangle.sees(parents, length, window)[:, length:], backend.dtype, device, length)
                masks[window] = 0, hide_committed(mask, rectangle.positions.flatten().tolist(), 0, length, window)
        start, new = length + rectangle.first, torch.from_numpy(row + rectangle.rows).to(device)
        cells = session.cells.by_layer
        found.append(Part(slice(row, row + size), new, cells, start, start + len(rectangle.rows), masks))
        row += size
    lanes = [lane for _, rectangle, _ in parts for lane in rectangle.lanes]
    home = backend.model.get_input_embeddings().weight.device
    token_ids, positions = (
        torch.from_numpy(np.concatenate([getattr(rectangle, name) for _, rectangle, _ in parts])).to(where)
        for name, where in (("token_ids", home), ("positions", device))
    )
    tree, wanted = Tree(tuple(found), backend.windows, backend.stop), torch.tensor(list(rows), device=device)
    states = [lane.state for lane in lanes]
    logits = backend.cache.run(backend.model, token_ids, positions, states, wanted.long(), tree)
    return logits, backend.cache.states(len(lanes))
