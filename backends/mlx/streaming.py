"""MLX models larger than memory: layers are read from disk during a pass.

A slot is an array of words, which the threads of `edgespec/weights/ring.py` fill without MLX; weights are views of it.
The graphs of all works are made first, and then computed layer by layer, so that weights are read once. Where chosen
experts are read (`experts.py`), a work's router must be computed before its graph goes on: works are computed in turn.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import ArraysCache

from edgespec.errors import ModelError, undone
from edgespec.loop.engines import Progress
from edgespec.machine.disk import Reading
from edgespec.machine.system import HUGE, wish_huge_pages
from edgespec.weights.direct_io import ALIGNED, DirectFiles
from edgespec.weights.open_files import Store
from edgespec.weights.plan import Extent, Layer, Plan, Tensor
from edgespec.weights.ring import Streamer

from ..common.interrupts import Stop
from .experts import Mixture
from .loading import evaluate
from .memory import Layout, Placed
from .recurrent import leaves_of
from .session import MlxSession, as_bytes
from .tree import TreeCache
from .words import NUMBER, address, new_words, weight

Result = TypeVar("Result")


class SlotStore(Store):
    """Slots of streamed layers, in MLX's memory."""

    def __init__(self, paths: Sequence[str], bases: Sequence[int], plan: Plan) -> None:
        """
        Args:
            paths: of the files.
            bases: as in `Layout`.
            plan: with the layers to stream.

        Raises:
            OSError: a file cannot be opened.
        """
        self._direct = DirectFiles(paths)
        super().__init__(self._direct)
        self.plan = replace(plan, streamed=tuple(map(self._direct.widened, plan.streamed)))
        self._inside: dict[tuple[int, Extent], int] = {}  # offset in the slot, by layer and extent
        size = 0
        for layer in self.plan.streamed:
            offset = 0
            for extent in layer.extents:
                # MLX's writer does not align tensors in a file, but kernels need aligned views.
                self._inside[layer.index, extent] = offset + -bases[extent.file] % NUMBER
                offset += -(-(extent.size + NUMBER) // ALIGNED) * ALIGNED
            size = max(size, offset)
        self.slot_bytes = size
        self._arrays = [new_words(size + HUGE) for _ in range(plan.slots)]
        self._offsets = [-address(array) % HUGE for array in self._arrays]  # of slots in their arrays
        for slot in range(plan.slots):
            wish_huge_pages(self.address(slot), size)

    def address(self, slot: int) -> int:
        return address(self._arrays[slot]) + self._offsets[slot]

    def view(self, slot: int, layer: Layer, placed: Placed) -> Any:
        """A weight of a layer as a view of the slot; None if the weight is not streamed."""
        tensor = placed.tensor
        for extent in layer.extents:
            if extent.file == tensor.file and extent.start <= tensor.start < tensor.start + tensor.size <= extent.stop:
                start = self._offsets[slot] + self._inside[layer.index, extent] + tensor.start - extent.start
                return weight(self._arrays[slot], start, placed.dtype, placed.shape)
        return None

    def load(self, tensors: Sequence[Tensor], progress: Progress) -> list[Any]:
        """Read tensors into new arrays, as of `new_words`.

        Raises:
            OSError: a file cannot be read.
        """
        arrays = [new_words(tensor.size) for tensor in tensors]
        places = {tensor.extent: address(array) for tensor, array in zip(tensors, arrays, strict=True)}
        self._direct.fill(places, progress)
        return arrays

    def read(self, slot: int, layer: Layer, extent: Extent, start: int, stop: int) -> None:
        place = self.address(slot) + self._inside[layer.index, extent] - extent.start
        self._direct.read(extent.file, place + start, start, stop)

    def close(self) -> None:
        super().close()
        self._arrays = []


@dataclass(slots=True)
class LayerGraph:
    """The graph of one layer for one work.

    Attributes:
        layer: number of the layer.
        taken: input.
        made: output.
        cache: of the attention; None: there is none.
        states: None: the layer is not recurrent.
    """

    layer: int
    taken: Any
    made: Any
    cache: TreeCache | None
    states: ArraysCache | None

    @property
    def outputs(self) -> list[Any]:
        buffers = [self.cache.keys, self.cache.values] if self.cache else []
        return [
            self.made,
            *buffers,
            *(array for array in (self.states.cache if self.states else ()) if array is not None),
        ]


class LayerSweep:
    """Streams a model's layers, and reads chosen experts; made before the model's first pass, closed after the last."""

    def __init__(
        self,
        model: Any,
        layout: Layout,
        plan: Plan,
        disk: Reading,
        progress: Progress,
        store: SlotStore,
        about: dict[str, Any] | None,
    ) -> None:
        """
        Args:
            model: loaded lazily; its weights are replaced.
            layout: of its weights.
            plan: of the layers to stream, with whole tensors.
            disk: how it is read.
            progress: gets the number of resident bytes that have been read, and of all.
            store: of the same plan; closed by `close`.
            about: key of the remembered scores of experts; None: they are not remembered.

        Raises:
            ModelError: the files hold other values than mlx-lm takes from them.
            OSError: a file cannot be read.
        """
        self.stop = Stop()
        self.mixture: Mixture | None = None
        self._graphs = list[LayerGraph]()
        self._order = [layer.index for layer in plan.streamed]
        self._store = store
        layers = {layer.index: layer for layer in store.plan.streamed}
        views = dict[int, list[list[tuple[str, Any]]]]()
        staying = list[Placed]()
        for placed in layout.placed:
            layer = layers.get(placed.layer)
            found = [store.view(slot, layer, placed) for slot in range(plan.slots)] if layer else []
            if found and found[0] is not None:
                for slot, view in enumerate(found):
                    views.setdefault(placed.layer, [[] for _ in range(plan.slots)])[slot].append((placed.name, view))
            else:
                staying.append(placed)
        first = self._order[0] if self._order else 0
        if self._is_changed(model, layout, first, {name for slots in views.get(first, []) for name, _ in slots}):
            staying = []  # mlx-lm makes what stays
        if plan.pools:
            self._take_experts(model, layout)
        for placed, array in zip(staying, store.load([one.tensor for one in staying], progress), strict=True):
            owner = model.layers[placed.layer] if placed.layer >= 0 else model
            owner.update(tree_unflatten([(placed.name, weight(array, 0, placed.dtype, placed.shape))]))
        self._views = {i: [tree_unflatten(names) for names in slots] for i, slots in views.items()}
        mx.eval(self._views)
        for index in self._order:
            model.layers[index].update(self._views[index][0])
            self._watch(model.layers[index], index)
        evaluate(model)
        self.streamer = Streamer(store.plan, store, disk.threads, disk.size)
        if plan.pools:
            with undone(self.streamer.close):
                self.mixture = Mixture(model, layout, plan, about, self.stop, progress)

    def _is_changed(self, model: Any, layout: Layout, layer: int, streamed: Collection[str]) -> bool:
        """Compare one layer's bytes, because mlx-lm may change values without another shape or type.

        Returns:
            True if it changes a weight that stays.

        Raises:
            ModelError: it changes one that is streamed.
        """
        weights = dict(tree_flatten(model.layers[layer].parameters()))
        of_layer = [one for one in layout.placed if one.layer == layer]
        changed = [one.name for one in of_layer if not self._is_stored(weights[one.name], [one.tensor])]
        for name in changed:
            if name in streamed:
                raise _changed(layer, name)
        return bool(changed)

    def _take_experts(self, model: Any, layout: Layout) -> None:
        """Compare one layer's experts, and take all from the model, for pools hold them."""
        modules = dict(model.named_modules())
        for one in layout.experts:
            arrays = dict(tree_flatten(modules[one.path].parameters())) if one is layout.experts[0] else {}
            for form, places in zip(one.forms, one.layer.places, strict=True):
                each = [Tensor("", part.file, part.start, part.size) for parts in places for part in parts]
                if arrays and not self._is_stored(arrays.pop(form.name), each):
                    raise _changed(one.layer.index, form.name)
                modules[one.path].update(tree_unflatten([(form.name, mx.zeros(0))]))

    def _is_stored(self, array: Any, stored: Sequence[Tensor]) -> bool:
        """True if an array has the bytes of these tensors, one after the other."""
        parts = np.split(np.asarray(as_bytes(array)), len(stored))
        return all(
            np.array_equal(np.asarray(memoryview(words)).view(np.uint8)[: len(part)], part)
            for part, words in zip(parts, self._store.load(stored, lambda *_: None), strict=True)
        )

    def _watch(self, layer: Any, index: int) -> None:
        """Make a layer take its weights from this pass's slot, and record its graph."""
        kind = type(layer)

        def call(module: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
            module.update(self._views[index][self.streamer.slot(index)])
            if self.mixture:
                mx.async_eval(x)  # earlier layers compute during the wait
                self.streamer.enter(index)
            made = kind.__call__(module, x, *args, **kwargs)
            found = list(leaves_of((*args, *kwargs.values())))
            cache = next((one for one in found if isinstance(one, TreeCache)), None)
            states = next((one for one in found if type(one) is ArraysCache), None)
            graph = LayerGraph(index, x, made, cache, states)
            if self.mixture:
                mx.eval(graph.outputs)
                self.streamer.leave(index)
            else:
                self._graphs.append(graph)
            return made

        layer.__class__ = type(kind.__name__, (kind,), {"__call__": call})  # an instance's `__call__` is not used

    def run(self, sessions: Sequence[MlxSession], graphs: Sequence[Callable[[], Result]]) -> list[Result]:
        """Make a pass over several works; after an error, the sessions' committed tokens are as before.

        Args:
            sessions: of each work.
            graphs: make the graph of each work, without computation.

        Returns:
            The results of `graphs`, which no longer depend on a streamed weight.

        Raises:
            ModelError: a layer cannot be read.
            Interrupted: `stop` is set.
        """
        if self.mixture:
            return [self._in_turn(self.mixture, *one) for one in zip(sessions, graphs, strict=True)]
        return self._together([session.caches for session in sessions], graphs)

    def _in_turn(self, mixture: Mixture, session: MlxSession, graph: Callable[[], Result]) -> Result:
        """After an error, only cells of new nodes have changed: nobody reads them before they are written again."""
        self.streamer.begin()
        try:
            mixture.begin()
            made = graph()
            mx.eval(made, session.state)
            return made
        except BaseException:
            with suppress(RuntimeError):
                mx.eval(session.state)  # no work on a slot may remain
            raise
        finally:
            mixture.memory.finish()
            self.streamer.finish()

    def _together(self, caches: Sequence[Sequence[TreeCache]], graphs: Sequence[Callable[[], Result]]) -> list[Result]:
        self.streamer.begin()
        before = [Before(some) for some in caches]
        self._graphs = []
        try:
            result = [graph() for graph in graphs]
            by_layer = {index: [graph for graph in self._graphs if graph.layer == index] for index in self._order}
            self._graphs = []
            for index in self._order:
                self.stop.check()
                self._compute(index, by_layer.pop(index), before)
            return result
        except BaseException:
            for one in before:
                one.restore()
            raise
        finally:
            self._graphs = []
            self.streamer.finish()

    def _compute(self, index: int, graphs: list[LayerGraph], before: Sequence["Before"]) -> None:
        for one, graph in zip(before, graphs, strict=True):
            one.forget_until(graph.cache)
        mx.async_eval([graph.taken for graph in graphs])  # earlier layers compute during the wait
        self.streamer.enter(index)
        outputs = [graph.outputs for graph in graphs]
        try:
            for one, graph in zip(before, graphs, strict=True):
                one.forget(graph.cache)
            mx.eval(outputs)
        except BaseException:
            with suppress(RuntimeError):
                mx.eval(outputs)  # no work on the slot may remain
            raise
        self.streamer.leave(index)

    @property
    def bytes_held(self) -> int:
        plan = self.streamer.plan
        return plan.pinned_bytes + plan.slots * self._store.slot_bytes + plan.pool_bytes

    @property
    def wait_seconds(self) -> float:
        return self.streamer.wait_seconds + (self.mixture.memory.wait_seconds if self.mixture else 0.0)

    def close(self) -> None:
        self.streamer.close()
        if self.mixture:
            self.mixture.close()
        self._views = {}


def _changed(layer: int, name: str) -> ModelError:
    return ModelError(
        f"layer {layer}'s weight {name} is changed by mlx-lm as it is loaded, so it cannot be streamed from this file; "
        "write the folder once as MLX needs it, with mlx_lm.convert"
    )


class Before:
    """The caches of a session before a pass, to restore them after an error.

    MLX writes in place only into a buffer with one holder, so each cache is dropped here before its layer computes.
    """

    def __init__(self, caches: Iterable[TreeCache]) -> None:
        self._held = {id(cache): (cache, *_handles(cache)) for cache in caches}  # in the order of the layers

    def forget_until(self, cache: TreeCache | None) -> None:
        for key in list(self._held):
            if cache is None or key == id(cache):
                break
            del self._held[key]

    def forget(self, cache: TreeCache | None) -> None:
        self._held.pop(id(cache), None)

    def restore(self) -> None:
        for cache, keys, values in self._held.values():
            cache.keys, cache.values = keys, values


def _handles(cache: TreeCache) -> tuple[Any, Any]:
    """New array objects for the buffers; an assignment to a part of `cache.keys` changes the old ones."""
    return (None, None) if cache.keys is None else (cache.keys[...], cache.values[...])
