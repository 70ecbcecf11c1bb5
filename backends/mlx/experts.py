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

from edgespec.loop.engines import Progress
from edgespec.weights.expert_memory import ExpertMemory
from edgespec.weights.plan import Plan

from ..common.expert_files import Form
from ..common.interrupts import Stop
from .memory import Layout
from .words import NUMBER, address, new_words, weight


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
        try:
            self.memory.fill(progress)
            modules = dict(model.named_modules())
            for number, one in enumerate(layout.experts):
                self._place(modules[one.path], number, one.forms)
        except BaseException:
            self.memory.close()
            raise

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
        mx.eval(x, indices)
        found = np.array(indices)
        chosen = found.reshape(-1, found.shape[-1])
        slots = self.memory.choose(number, chosen, chosen if self.prompt else None)
        self.memory.wait(number)
        return mx.array(slots[found].astype(found.dtype))

    def begin(self) -> None:
        """Start a pass over one session's tokens.

        Raises:
            ModelError: the model cannot be read.
        """
        self.prompt = False
        self.memory.begin()


def words(size: int) -> tuple[Any, int]:
    """Memory of slots, for `ExpertMemory`."""
    array = new_words(size + NUMBER)
    return array, -(-address(array) // NUMBER) * NUMBER
