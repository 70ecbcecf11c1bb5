"""Hooks of a pass, which wait until the weights of the next operation are in memory."""

from edgespec.errors import ModelError
from edgespec.weights.ring import Streamer

from ...common.interrupts import Stop
from ..ggml.callback import OperationCallback
from ..ggml.files import ggml_base
from .mixture import Mixture
from .own_memory import Graph, OwnMemory
from .skip_padding import SkipPadding


class LayerHooks(OperationCallback):
    """Hooks that keep a streamer in step with a pass.

    Operations are named after their layer ("ffn_out-7"). llama.cpp asks for each if it shall be reported; if so, it
    computes up to that operation, and reports it. So at the next question, all earlier ones are computed. The first
    pass reports every operation, and so finds the last one before each streamed layer; later passes stop only there.

    A GPU computes operations in another order, which mixes names of neighbouring layers. So with `OwnMemory` a layer
    begins at the first operation that uses its weights: for it, only those that use weights of earlier layers must be
    computed. Its graph tells where to stop: all of a layer depends on the operations that it takes from layers before.

    Attributes:
        error: raised in the callback; `forward` raises it again, because C code cannot.
    """

    def __init__(self, streamer: Streamer, own: OwnMemory | None = None, graph: Graph | None = None) -> None:
        """Args:
        streamer: of the layers.
        own: where the weights lie; None: in the mapped file.
        graph: of `own`.
        """
        self.error: BaseException | None = None
        super().__init__(self._called)
        self.streamer, self._own = streamer, own
        self.mixture: Mixture | None = None
        self.skip_padding: SkipPadding | None = None
        self.stop: Stop | None = None
        self._streamed = {layer.index for layer in streamer.plan.streamed}
        self._layer_of: dict[bytes, int] = {}  # by operation; -1: its name has no layer
        self._name_of = ggml_base().ggml_get_name
        self._last_operations: set[bytes] = set()
        self._learning, self._layer, self._name, self._reported = True, -1, b"", True
        self._unfinished = False  # operations that use the layer's weights, and may not be computed yet
        self._known = set(graph.operations) if graph else set[bytes]()
        if graph:
            self._last_operations.update(*(graph.gates.get(layer, ()) for layer in self._streamed))

    def begin(self, *, prompt: bool, rows: int, padding: int) -> None:
        """Start a pass; arguments as for `Mixture.begin`.

        Raises:
            ModelError: the weights cannot be read.
        """
        self.streamer.begin()
        if chooser := self.mixture or self.skip_padding:
            chooser.begin(prompt=prompt, rows=rows, padding=padding)
        self.error = None
        self._learning = bool(self._streamed) and not self._last_operations
        self._layer, self._name, self._reported, self._unfinished = -1, b"", True, False

    @property
    def wait_seconds(self) -> float:
        return self.streamer.wait_seconds + (self.mixture.memory.wait_seconds if self.mixture else 0.0)

    def close(self) -> None:
        if self.mixture:
            self.mixture.memory.close()
        self.streamer.close()

    def _called(self, tensor: int, ask: bool) -> bool:
        if not ask:
            return self.error is None
        if self.error is not None:
            return True
        try:
            self.signals.obey()
            if self.stop:
                self.stop.check()
            return self._asked(self._name_of(tensor), tensor)
        except BaseException as error:
            self.error = error
            return True

    def finish(self) -> None:
        self.streamer.finish()
        if chooser := self.mixture or self.skip_padding:
            chooser.finish()

    def _asked(self, name: bytes, tensor: int) -> bool:
        self._unfinished &= not self._reported
        used = self._own.layer_used(tensor) if self._own else self._find_layer(name)
        layer = self._layer if used < 0 else used
        if layer <= min(self._streamed, default=0) < self._layer if self._own else layer == 0 < self._layer:
            self.finish()
            self._layer, self._unfinished = -1, False
        new, ready = layer > self._layer and layer in self._streamed, self._reported
        if self._own:
            ready = not self._unfinished
            self._unfinished |= used >= 0
        elif new:
            self._last_operations.add(self._name)
        if new and ready:
            self.streamer.enter(layer)
        if self._own and used in self._own.only_here and not self.streamer.shows(used):
            raise ModelError(f"layer {used} would be computed before it is read: try again, or with --gpu-layers 0")
        if not new or ready:
            self._layer = max(layer, self._layer)
        stop = self.mixture is not None and self.mixture.asked(name, tensor, self._reported)
        # In a graph unlike the first, a layer may begin without a report: report this operation, then enter the layer.
        self._reported = stop or self._learning or name in self._last_operations or self._layer < layer
        # The processor may compute a layer of another graph too early, a device may not.
        self._reported |= self._own is not None and bool(self._own.only_here) and name not in self._known
        self._name = name
        return self._reported

    def _find_layer(self, name: bytes) -> int:
        """By the name of an operation."""
        if (layer := self._layer_of.get(name)) is None:
            digits = name.rpartition(b"-")[2]
            layer = self._layer_of[name] = int(digits) if digits.isdigit() else -1
        return layer
