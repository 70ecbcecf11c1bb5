"""A target's own layers as its draft, on PyTorch: see `common/own_layers.py`."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from edgespec.loop.backend import Logits, Work

from ..common.own_layers import OwnLayersSession, kept_layers, limits_of, shortened, taken_over
from .backend import TorchBackend
from .loading import cache_shape, decoder_layers, run_probe, session_cells
from .session import TorchSession
from .spans import Cells


class TorchOwnLayersSession(OwnLayersSession, TorchSession):
    def _take_cells(self, source: TorchSession, start: int, end: int) -> None:
        with torch.inference_mode():
            for layer, cells in self.cells.by_layer.items():
                cells[:, :, start:end] = source.cells.by_layer[layer][:, :, start:end]


class TorchOwnLayers(TorchBackend):
    def __init__(self, target: TorchBackend, sessions: int) -> None:
        """
        Raises:
            ModelError: the target is recurrent, cannot leave out layers, or has none that stays on its device.
        """
        limits, layers = limits_of(target.capabilities), list(decoder_layers(target.model))
        streamed = [layers.index(layer) for streamer in target.streamers for layer in streamer.layers]
        kept = kept_layers(len(layers), streamed)
        shape = cache_shape(target.model.config.get_text_config(), session_cells(limits))
        cells = [Cells(target.spans, kept, shape[1:], target.dtype) for _ in range(sessions)]
        super().__init__(target.model, target.vocab, limits, target.windows, cells, target.spans)
        self.computing, self.content = target.computing, f"{target.content} {kept}"
        self._target, self._layers = target, torch.nn.ModuleList(shortened(layers, kept))
        with self._shortened():
            run_probe(self.model, self.device)

    @contextmanager
    def _shortened(self) -> Iterator[None]:
        decoder = self.model.get_decoder()
        whole, decoder.layers = decoder.layers, self._layers
        try:
            yield
        finally:
            decoder.layers = whole

    def _new_session(self, cells: Cells) -> TorchSession:
        return TorchOwnLayersSession(self, cells)

    def forward(self, batch: Sequence[Work]) -> list[Logits]:
        self._check_open()
        return super().forward(taken_over(batch, self.capabilities, self._target.sessions))

    def _run(self, *args: Any) -> Any:
        with self._shortened():
            return super()._run(*args)

    def close(self) -> None:
        super().close()
        self._layers = torch.nn.ModuleList()  # it holds layers of the target
