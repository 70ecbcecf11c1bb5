"""Made-up CUDA cards: tensors lie in the memory of this machine, and each says on which device it is.

As with CUDA, a function whose tensors lie on different devices fails. Results are those of the processor.
"""

from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from edgespec.backends.torch import backend as backend_module
from edgespec.backends.torch import experts as experts_module
from edgespec.backends.torch import loading as loading_module
from hf_models import torch
from torch.overrides import TorchFunctionMode

GIB = 1 << 30
CPU = torch.device("cpu")
COPIES = {torch.Tensor.copy_, torch.Tensor.to, torch.Tensor.cpu}
DEVICE, DATA = torch.Tensor.device.__get__, torch.Tensor.data.__set__
UNSEEN = ("_parse_to", "_has_compatible_shallow_copy_type")
INDEXED = {torch.Tensor.__getitem__, torch.Tensor.__setitem__}


class Cards(TorchFunctionMode):
    """
    Attributes:
        moves: devices between which tensors were copied, as (from, to).
        sizes: bytes of each.
    """

    def __init__(self) -> None:
        super().__init__()
        self._places = dict[int, tuple[Any, Any]]()  # by address; the memory stays, so that no address is used twice
        self.moves, self.sizes = list[tuple[str, str]](), list[int]()

    def device(self, tensor: Any) -> Any:
        found, _ = self._places.get(tensor.untyped_storage()._cdata, (tensor.device, None))
        return found

    def _put(self, tensor: Any, device: Any) -> None:
        storage = tensor.untyped_storage()
        if device.type == "cuda":
            self._places[storage._cdata] = device, storage

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if func == DEVICE:
            return self.device(args[0])
        if func.__name__ in UNSEEN:
            return func(*args, **options)
        if func == torch.Tensor.numpy and self.device(args[0]) != CPU:
            raise TypeError(f"a tensor on {self.device(args[0])} has no array")
        if func == torch.Tensor.to and isinstance(args[-1], str):
            args = (args[0], torch.device(args[-1]))
        elif isinstance(options.get("device"), str):
            options = options | {"device": torch.device(options["device"])}
        wanted = [one for one in (*args[1:], options.get("device")) if isinstance(one, torch.device)]
        found = self._common(func, args, options)
        if func == torch.histc:  # transformers counts a card's whole numbers
            args = (args[0].float(), *args[1:])
        args = tuple(here(one) for one in args)
        out = func(*args, **{name: here(one) for name, one in options.items()})
        device = CPU if func == torch.Tensor.cpu else wanted[0] if wanted else found
        if (func in COPIES and device != found) or (func is torch.tensor and device != CPU):
            out = out.clone() if out is args[0] else out
            self.moves.append((str(found), str(device)))
            self.sizes.append(out.nbytes)
        for tensor in tensors_of([out]):
            self._put(tensor, device)
        return out

    def _common(self, func: Any, args: Any, options: Any) -> Any:
        """The device of all tensors of a call."""
        tensors = list(tensors_of([*args, *options.values()]))
        if func in COPIES or func in INDEXED or func == DATA:
            tensors, others = tensors[:1], tensors[1:]
            if func == torch.Tensor.__getitem__ and not {*map(self.device, others)} <= {
                CPU,
                *map(self.device, tensors),
            }:
                raise RuntimeError("indices lie on another card")
        devices = {self.device(one) for one in tensors if one.ndim or self.device(one) != CPU}
        if len(devices) > 1:
            raise RuntimeError(f"{func.__name__}: tensors lie on {', '.join(sorted(map(str, devices)))}")
        return next(iter(devices), CPU)


def tensors_of(values: Iterable[Any]) -> Iterator[Any]:
    for one in values:
        if isinstance(one, torch.Tensor):
            yield one
        elif isinstance(one, tuple | list):
            yield from tensors_of(one)


def here(value: Any) -> Any:
    return CPU if isinstance(value, torch.device) and value.type == "cuda" else value


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Call it with the free bytes of each card."""
    mode = Cards()

    def there(*free: int) -> Cards:
        stream = SimpleNamespace(synchronize=lambda: None)
        fake = SimpleNamespace(
            is_available=lambda: True, device_count=lambda: len(free), memory_reserved=lambda name: 0,
            mem_get_info=lambda name: (free[torch.device(name).index], 24 * GIB),
            get_device_name=lambda device: "Card", get_device_capability=lambda device: (7, 0),
            get_arch_list=lambda: ["sm_70"],
            current_stream=lambda device: stream,
        )  # fmt: skip
        for name, value in vars(fake).items():
            monkeypatch.setattr(torch.cuda, name, value)
        return mode

    for module in (backend_module, experts_module, loading_module):
        monkeypatch.setattr(module, "needs_pinning", lambda device: False)
    monkeypatch.setattr(backend_module, "CudaCopies", backend_module.HostCopies)
    monkeypatch.setattr(backend_module, "link_speeds", lambda devices: [1.0] * len(devices))
    with mode:
        yield there
