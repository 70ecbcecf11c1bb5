"""What computes where, in one wording for `run`, `doctor`, `--json` and the server."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from edgespec.errors import pip_install
from edgespec.loop.backend import Backend
from edgespec.loop.engines import find_engine
from edgespec.machine.cards import nvidia_cards

LIBRARIES = {"llamacpp": "llama-cpp-python", "torch": "PyTorch"}
PAGE = "docs/guides/gpus.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """
    Attributes:
        engine: its name.
        device: that computes `device_layers`; "": the processor computes all.
        layers: of the model.
        device_layers: of these on the device.
        streamed: of these read in every pass.
        exact: the text is that of plain decoding to the bit; False: up to ties within rounding.
        unused: a card that does not compute, why, and what would help; "" if there is none.
    """

    engine: str
    device: str = ""
    layers: int
    device_layers: int = 0
    streamed: int = 0
    exact: bool = False
    unused: str = ""

    @property
    def line(self) -> str:
        here = self.layers - self.device_layers
        places = [f"{self.device_layers} of {self.layers} layers on {self.device}"] if self.device else []
        places += [f"{here} of {self.layers} layers on the processor"] if here or not self.device else []
        streamed = f"{self.streamed} of them streamed" if self.streamed else "none streamed"
        exact = "exactly the text of plain decoding" if self.exact else "the text of plain decoding up to rounding ties"
        return "; ".join([f"{self.engine}: {', '.join(places)}, {streamed}", exact, *filter(None, [self.unused])])


def where(backend: Backend, gpu_layers: int | None = None) -> Where:
    """
    Args:
        backend: loaded.
        gpu_layers: as asked for.
    """
    limits, plan = backend.capabilities, getattr(backend, "plan", None)
    device, on_device, streamed = getattr(backend, "placed", ("", 0, len(plan.streamed) if plan else 0))
    unused = "" if device or gpu_layers == 0 else _unused(backend.name, nvidia_cards())
    return Where(
        engine=backend.name, device=device, layers=limits.layers, device_layers=on_device, streamed=streamed,
        exact=limits.logit_tolerance == 0, unused=unused,
    )  # fmt: skip


def _unused(engine: str, cards: Sequence[str]) -> str:
    if not cards or engine not in LIBRARIES:
        return ""
    if find_engine(engine).gpus(None):
        return f"{', '.join(cards)} computes no layers, since none fits into its free memory: {PAGE}"
    return f"{', '.join(cards)} is not used, since {LIBRARIES[engine]} is a build without CUDA: {build_line(engine)}"


def build_line(engine: str) -> str:
    """What replaces a build without CUDA."""
    if engine == "torch":
        return f"see {PAGE}"
    name: Any = LIBRARIES[engine]
    return f"CMAKE_ARGS=-DGGML_CUDA=on {pip_install('--force-reinstall', '--no-cache-dir', '--no-binary', name, name)}"
