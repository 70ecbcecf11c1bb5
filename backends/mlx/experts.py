"""A mixture of experts in MLX: chosen experts are read into slots, and the layer gets the numbers of their slots.

The arrays [experts, …] of a module with a layer's experts are views [slots, …] of memory that the threads of
`edgespec/weights/expert_memory.py` fill without MLX. Before a layer's experts are placed, what the module reads is
computed, and with it all that uses the slots of earlier layers.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_unflatten

from edgespec.errors import undone
from edgespec.loop.engines import Progress
from edgespec.weights.expert_memory import ROWS_SHOWN, ExpertMemory, most_predicted
from edgespec.weights.plan import Plan

from ..common.expert_files import Form
from ..common.interrupts import Stop
from .memory import Layout
from .words import NUMBER, address, new_words, weight

ROUTERS = "gate", "router"  # of modules of the block that has a layer's experts


class Mixture:
    """
    Attributes:
        memory: slots of experts.
        prompt: the pass reads a prompt.
    """

    def __init__(
        self, model: Any, layout: Layout, plan: Plan, about: dict[str, Any] | None, stop: Stop, progress: Progress
    ) -> None:
        """Let a model use experts in slots; those of layers whose experts all have room are read now.

        Args:
            model: without experts.
            layout: with places of its experts.
            plan: with their pools.
            about: key of the remembered scores; None: they are not remembered.
            stop: ends a pass within a layer.
            progress: of reading.

        Raises:
            OSError: a file cannot be opened.
            ModelError: experts cannot be read.
        """
        self.prompt = False
        self._stop = stop
        self.memory = ExpertMemory(layout.paths, layout.expert_layers, plan.pools, about, words)
        with undone(self.memory.close):
            self.memory.fill(progress)
            modules = dict(model.named_modules())
            beside = [one.path.rpartition(".")[0] for one in layout.experts]
            self._routers = [
                next(filter(None, (modules.get(f"{at}.{name}") for name in ROUTERS)), None) for at in beside
            ]
            for number, one in enumerate(layout.experts):
                self._place(modules[one.path], number, one.forms)

    def _place(self, module: Any, number: int, forms: Sequence[Form]) -> None:
        first, slots, arrays = 0, self.memory.slots(number), list[tuple[str, Any]]()
        if (stay := self.memory.stays(number)) is None:
            self._watch(module, number)
        else:
            first, slots = int(stay[0]), len(stay)
        for i, form in enumerate(forms):
            memory, place = self.memory.memory(number, i)
            start = place - address(memory) + first * form.size
            arrays.append((form.name, weight(memory, start, form.dtype, (slots, *form.shape))))
        module.update(tree_unflatten(arrays))
        mx.eval(module.parameters())

    def _watch(self, module: Any, number: int) -> None:
        """Make a module get its experts before it computes."""
        kind = type(module)

        def call(module: Any, x: Any, indices: Any) -> Any:
            return kind.__call__(module, x, self._slots(number, x, indices))

        module.__class__ = type(kind.__name__, (kind,), {"__call__": call})  # an instance's `__call__` is not used

    def _slots(self, number: int, x: Any, indices: Any) -> Any:
        self._stop.check()
        predictions = self._predict(number + 1, x, most_predicted(indices.shape[-1]))
        mx.eval(x, indices, *predictions)
        found = np.array(indices)
        chosen = found.reshape(-1, found.shape[-1])
        slots = self.memory.choose(number, chosen, chosen if self.prompt else None)
        for predicted in predictions:
            self.memory.foresee(number + 1, np.unique(np.array(predicted)).tolist())
        self.memory.wait(number)
        return mx.array(slots[found].astype(found.dtype))

    def _predict(self, number: int, x: Any, count: int) -> list[Any]:
        """Experts that a layer is likely to want: its router is shown what the layer before it gives to its experts."""
        some = not self.prompt and self.memory.may_foresee(number)
        if not some or (router := self._routers[number]) is None:
            return []
        try:
            found = router(x.reshape(-1, x.shape[-1])[:ROWS_SHOWN])
        except ValueError:  # experts read something narrower (Nemotron's latent)
            self._routers[number] = None
            return []
        if isinstance(found, tuple):  # experts and their weights
            return [found[0]]
        return [mx.argpartition(-found, kth=count - 1, axis=-1)[:, :count]]

    def begin(self) -> None:
        """Start a pass over one session's tokens.

        Raises:
            ModelError: the model cannot be read.
        """
        self.prompt = False
        self.memory.begin()

    def close(self) -> None:
        self._routers = []
        self.memory.close()


def words(size: int) -> tuple[Any, int]:
    """Memory of slots, for `ExpertMemory`."""
    array = new_words(size + NUMBER)
    return array, -(-address(array) // NUMBER) * NUMBER
