"""Hooks of a pass, which wait until the weights of the next operation are in memory."""

from collections.abc import Iterable

from edgespec.errors import ModelError
from edgespec.weights.ring import Streamer

from ...common.interrupts import Stop
from ..ggml.callback import OperationCallback
from ..ggml.files import ggml_base
from .mixture import Mixture
from .own_memory import OwnMemory
from .skip_padding import SkipPadding


class LayerHooks:
    """Hooks that keep a streamer in step with a pass.

    Operations are named after their layer ("ffn_out-7"). llama.cpp asks for each if it shall be reported; if so, it
    computes up to that operation, and reports it. So at the next question, all earlier ones are computed. The first
    pass reports every operation, and so finds the last one before each streamed layer; later passes stop only there.

    Attributes:
        error: raised in the callback; `forward` raises it again, because C code cannot.
    """

    def __init__(self, streamer: Streamer, own: OwnMemory | None = None, operations: Iterable[bytes] = ()) -> None:
        """Args:
        streamer: of the layers.
        own: where the weights lie; None: in the mapped file.
        operations: of a pass, in order, if they are known; without them the first pass finds the last ones.
        """
        self.error: BaseException | None = None
        self._watched = OperationCallback(self._called)
        self.callback, self.signals = self._watched.callback, self._watched.signals
        self.operations = self._watched.operations
        self.streamer, self._own = streamer, own
        self.mixture: Mixture | None = None
        self.skip_padding: SkipPadding | None = None
        self.stop: Stop | None = None
        self._streamed = {layer.index for layer in streamer.plan.streamed}
        self._layer_of: dict[bytes, int] = {}  # by operation; -1: its name has no layer
        self._name_of = ggml_base().ggml_get_name
        self._last_operations: set[bytes] = set()
        self._learning, self._layer, self._name, self._reported = True, -1, b"", True
        for name in operations:
            if self._new_layer(self._find_layer(name)):
                self._last_operations.add(self._name)
                self._layer = self._find_layer(name)
            self._name = name

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
        self._layer, self._name, self._reported = -1, b"", True

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
        unknown = name not in self._layer_of
        layer = self._find_layer(name)
        if layer < 0:
            layer = self._layer
        if layer == 0 < self._layer:
            self.finish()
            self._layer = -1
        new = self._new_layer(layer)
        if new:
            self._last_operations.add(self._name)
        if new and self._reported:
            self.streamer.enter(layer)
        if new and self._own and layer in self._own.only_here and not (self._reported and self.streamer.shows(layer)):
            raise ModelError(f"layer {layer} would be computed before it is read: try again, or with --gpu-layers 0")
        if not new or self._reported:
            self._layer = max(layer, self._layer)
        if self._own:
            self._own.follow(tensor)
        stop = self.mixture is not None and self.mixture.asked(name, tensor, self._reported)
        # In a graph unlike the first, a layer may begin without a report: report this operation, then enter the layer.
        self._reported = stop or self._learning or name in self._last_operations or self._layer < layer
        # The processor may compute a layer of another graph too early, a device may not.
        self._reported |= unknown and self._own is not None and bool(self._own.only_here)
        self._name = name
        return self._reported

    def _find_layer(self, name: bytes) -> int:
        if (layer := self._layer_of.get(name)) is None:
            digits = name.rpartition(b"-")[2]
            layer = self._layer_of[name] = int(digits) if digits.isdigit() else -1
        return layer

    def _new_layer(self, layer: int) -> bool:
        return layer > self._layer and layer in self._streamed
