"""Pools of experts in the memory of devices, before those in this machine's memory (`expert_memory.py`).

What a device's pool lacks is wanted from the pools in memory, and uploaded from there: once it is read, if it was on
disk.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike

from edgespec.weights.expert_memory import ExpertMemory
from edgespec.weights.experts import Residents, SlotArray


@dataclass(frozen=True, slots=True)
class DevicePlace:
    """A layer's place in its pool on a device.

    Attributes:
        residents: of the pool.
        row: of the layer in it.
        weights: the layer's or the pool's, as `Devices.upload` takes them.
    """

    residents: Residents
    row: int
    weights: tuple[Any, ...]


class Devices(Protocol):
    """
    Attributes:
        places: of layers whose experts devices hold, by number.
    """

    places: dict[int, DevicePlace]

    def upload(self, weight: Any, source: int, offset: int, size: int) -> None:
        """Copy `size` bytes from an address to a weight; `ExpertMemory.want` of a later layer may change them there."""

    def close(self) -> None: ...


class TieredMemory(ExpertMemory):
    """An `ExpertMemory` with pools on devices before its own, for some layers."""

    def __init__(self, devices: Devices, *given: Any) -> None:
        """
        Args:
            devices: closed with this memory.
            given: as for `ExpertMemory`.
        """
        self._devices = devices
        self._missing: tuple[int, list[tuple[int, int]]] = -1, []  # number of the layer; (expert, slot) to be uploaded
        self.release = devices.close
        super().__init__(*given)
        self.on_devices = devices.places.keys()
        for number, known in enumerate(super().scores):
            if place := devices.places.get(number):
                place.residents.scores[place.row] = known

    @property
    def scores(self) -> list[list[float]]:
        found = super().scores
        for number, place in self._devices.places.items():
            found[number] = place.residents.scores[place.row].tolist()
        return found

    def want(self, number: int, experts: Sequence[int], prompt: ArrayLike | None = None) -> SlotArray:
        if (place := self._devices.places.get(number)) is None:
            return super().want(number, experts, prompt)
        residents, row = place.residents, place.row
        missing = [expert for expert in experts if residents.slots_of(row)[expert] < 0]
        if prompt is None:
            residents.use(row, experts)
            self.wanted += len(experts) - len(missing)
            self.hits += len(experts) - len(missing)
        else:
            residents.use_in_turn(row, prompt)
        self._used = missing
        if missing:  # a prompt counts once there
            super().want(number, missing, None if prompt is None else [missing])
            self._missing = number, residents.place(row, experts)
        return residents.slots_of(row)

    def expect(self, number: int, experts: Sequence[int] | None = None) -> list[int]:
        if place := self._devices.places.get(number):
            lacking = np.flatnonzero(place.residents.slots_of(place.row) < 0)
            experts = lacking.tolist() if experts is None else np.intersect1d(lacking, experts).tolist()
        return super().expect(number, experts)

    def wait(self, number: int, weights: Sequence[int] | None = None) -> None:
        """As before; what a device lacks is uploaded, all weights together."""
        if (place := self._devices.places.get(number)) is None:
            super().wait(number, weights)
            return
        if self._missing[0] != number:
            return
        super().wait(number)
        layer, here = self.layers[number], self._places[number]
        slots = here.residents.slots_of(here.row)
        for i, there in enumerate(place.weights):
            base, stride, size = self.base(number, i), layer.stride(i), layer.expert_size(i)
            for expert, slot in self._missing[1]:
                source = base + int(slots[expert]) * stride
                self._devices.upload(there, source, slot * size, size)
        self._missing = -1, []

    def _forget_missing(self) -> None:
        number, missing = self._missing
        for expert, _ in missing:
            self._devices.places[number].residents.forget(self._devices.places[number].row, expert)
        self._missing = -1, []

    def finish(self) -> None:
        self._forget_missing()
        super().finish()
