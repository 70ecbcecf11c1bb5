"""Engine, devices and exactness of a model, in one wording for `run`, `doctor`, `--json` and the server."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from edgespec.errors import pip_install
from edgespec.loop.backend import Backend, Placed, TellsPlaced
from edgespec.loop.engines import find_engine
from edgespec.machine.cards import nvidia_cards

LIBRARIES = {"llamacpp": "llama-cpp-python", "torch": "PyTorch"}
EXACTLY, UP_TO_TIES = "exactly the text of plain decoding", "the text of plain decoding up to rounding ties"
PAGE = "docs/guides/gpus.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """
    Attributes:
        engine: its name.
        placed: its layers; None: the engine does not tell.
        exact: the text is that of plain decoding to the bit; False: up to ties within rounding.
        row_class: name of the class that passes are kept to, and what else decides its bits; "": none is needed.
        unused: a card that does not compute, why, and what would help; "" if there is none.
        approximate: what changes the distribution; "": nothing does.
    """

    engine: str
    placed: Placed | None
    exact: bool = False
    row_class: str = ""
    unused: str = ""
    approximate: str = ""

    @property
    def line(self) -> str:
        exactness = EXACTLY if self.exact else UP_TO_TIES
        if self.row_class:
            exactness += f" (row class {self.row_class})"
        if self.approximate:
            exactness = f"approximate ({self.approximate}): not the text of plain decoding"
        return "; ".join([f"{self.engine}{self._places()}", exactness, *filter(None, [self.unused])])

    def _places(self) -> str:
        placed = self.placed
        if placed is None:
            return ""
        on_devices = placed.shares or [(placed.on_device, placed.device)]
        shares = [*on_devices, (placed.layers - placed.on_device, "the processor")]
        places = [
            f"{'all' if count == placed.layers else f'{count} of'} {placed.layers} layers on {device}"
            for count, device in shares
            if count
        ]
        streamed = f"{placed.streamed} layers streamed" if placed.streamed else "none streamed"
        return f": {', '.join(places)}, {streamed}"

    def as_dict(self) -> dict[str, Any]:
        placed = asdict(self.placed) if self.placed else {}
        exactness = {"exact": self.exact, "row_class": self.row_class}
        return {"engine": self.engine, **placed, **exactness, "unused": self.unused, "line": self.line}


def where(backend: Backend, gpu_layers: int | None = None, approximate: str = "") -> Where:
    """
    Args:
        backend: loaded.
        gpu_layers: as asked for.
        approximate: as for `Where`.
    """
    placed = backend.placed if isinstance(backend, TellsPlaced) else None
    unused = _unused(backend.name, nvidia_cards()) if placed and not placed.device and gpu_layers != 0 else ""
    exact = backend.capabilities.logit_tolerance == 0 and not approximate
    kept, row_class = backend.capabilities.exact, ""
    if kept:
        row_class = f"{kept.name}, weights repacked" if "repacked" in backend.computing else kept.name
        if "attention_on" in backend.computing:
            row_class += f", passes of up to {kept.trees.most} rows, attention on the processor"
    return Where(
        engine=backend.name, placed=placed, exact=exact, row_class=row_class, unused=unused, approximate=approximate
    )


def _unused(engine: str, cards: Sequence[str]) -> str:
    if not cards or engine not in LIBRARIES:
        return ""
    if find_engine(engine).gpus(None):
        return f"{', '.join(cards)} computes no layers, since none fits into its free memory: {PAGE}"
    return f"{', '.join(cards)} is not used, since {LIBRARIES[engine]} is a build without CUDA: {build_line(engine)}"


def build_line(engine: str) -> str:
    """The command that replaces a build without CUDA."""
    if engine == "torch":
        return f"see {PAGE}"
    name: Any = LIBRARIES[engine]
    return f"CMAKE_ARGS=-DGGML_CUDA=on {pip_install('--force-reinstall', '--no-cache-dir', '--no-binary', name, name)}"
