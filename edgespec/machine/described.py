"""Computers as YAML: machines.yaml has common ones by name, and `edgespec doctor --describe` writes this one."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, fields, replace
from difflib import get_close_matches
from math import inf
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import yaml
from pydantic import TypeAdapter, ValidationError

from edgespec.errors import EdgespecError, UsageError, first_mistake, unknown_key
from edgespec.machine.disk import Reading, disk_speed
from edgespec.machine.files import read_yaml
from edgespec.machine.measurements import Amount, processor_name, recall, remember
from edgespec.machine.memory import parse_size
from edgespec.machine.system import machine_is_busy
from edgespec.machine.this_machine import Gpu, Machine, this_machine

BUILT_IN = Path(__file__).parent.parent / "machines.yaml"
SYSTEM, QUARTERS = 4 << 30, 36 << 30  # bytes: what a system takes; a Mac's memory from which its GPU may use 3/4
SIZES = ("memory", "free", "used", "limit")
MORE = ("name", "description", "chip", "sources")  # keys of an entry that `Machine` has not
PARTS: Mapping[str, type] = {"gpus": Gpu, "disk": Reading}
MEASURED, ROWS = 1 << 28, 1024  # bytes, and rows of a matrix
ROUNDS = 5


def find_machine(name: str) -> tuple[str, Machine]:
    """
    Args:
        name: of machines.yaml, or the path of a file of `describe`.

    Returns:
        What the machine is called, and the machine.

    Raises:
        UsageError: there is none, or the file is wrong.
    """
    known = named()
    if name in known:
        return _called(known[name]), _machine(known[name], f"{name} of machines.yaml")
    if not Path(name).is_file():
        wanted = name.lower().replace(" ", "")
        like = [one for one, entry in known.items() if wanted in f"{one} {entry.get('chip')}".lower().replace(" ", "")]
        near = like[:3] if len(wanted) > 1 and like else get_close_matches(name, known)
        hint = f"did you mean {' or '.join(near)}?" if near else "--machine list shows all names"
        raise UsageError(f"there is no machine {name!r}; {hint} (or a file of `edgespec doctor --describe`)")
    found = _entries(Path(name))
    if len(found) != 1:
        raise UsageError(f"{name}: has {len(found)} machines, but must have one")
    machine = _machine(found[0], name)
    return _called(found[0]), machine


def named() -> dict[str, dict[str, Any]]:
    """Entries of machines.yaml by name, one for each size of memory."""
    found = {}
    for entry in _entries(BUILT_IN):
        for memory in map(parse_size, entry["memory"]):
            limit = memory * 2 // 3 if memory < QUARTERS else memory * 3 // 4
            sizes = {"free": limit, "limit": limit}  # of a GPU that has no memory of its own
            name, gpus = f"{entry['name']}-{memory >> 30}", [sizes | gpu for gpu in entry.get("gpus", ())]
            found[name] = entry | {"name": name, "memory": memory, "free": memory - SYSTEM, "gpus": gpus}
            found[name]["description"] += f", {memory >> 30} GB"
    return found


def with_speeds(machine: Machine, chip: str) -> Machine:
    """A copy of this machine with the speeds that `describe` has kept, else those of the same chip in machines.yaml."""
    memory_speed, operations = recall(_about_speeds(), tuple[Amount, Amount]) or (0.0, 0.0)
    machine = replace(
        machine, memory_speed=memory_speed or machine.memory_speed, operations=operations or machine.operations
    )
    known = [_machine(entry, str(BUILT_IN)) for entry in named().values() if chip and entry.get("chip") == chip]
    if not known:
        return machine
    like = min(known, key=lambda one: abs(one.memory - machine.memory))
    speed = machine.disk.speed or like.disk.speed
    gpus = [
        replace(gpu, memory_speed=gpu.memory_speed or other.memory_speed, operations=gpu.operations or other.operations)
        for gpu, other in zip(machine.gpus, like.gpus, strict=False)
    ]
    return replace(
        machine, memory_speed=machine.memory_speed or like.memory_speed, gpus=tuple(gpus),
        operations=machine.operations or like.operations, disk=replace(machine.disk, speed=speed),
    )  # fmt: skip


def with_measured(machine: Machine, path: str) -> Machine:
    """A copy in which speeds of this machine's disk and processors that are not known are measured, in about a second.

    Args:
        machine: this one.
        path: a file on the disk.
    """
    disk = machine.disk.speed
    with suppress(EdgespecError):  # such as a folder, or a system that cannot read past its cache
        disk = disk or disk_speed(path)
    return replace(
        machine, disk=replace(machine.disk, speed=float(round(disk))),
        memory_speed=machine.memory_speed or float(round(_memory_speed())),
        operations=machine.operations or float(round(_operations())),
    )  # fmt: skip


def _about_speeds() -> dict[str, str]:
    return {"kind": "speeds of the processors", "machine": processor_name()}


def _called(entry: Mapping[str, Any]) -> str:
    return str(entry.get("description") or entry.get("name") or "a machine")


def _entries(path: Path) -> list[Any]:
    found, _ = read_yaml(path, UsageError, ours=path == BUILT_IN)
    entries = found.get("machines") if isinstance(found, dict) else None
    if not isinstance(entries, list):
        raise UsageError(
            f"{path}: must be a mapping with the key machines, a list, as edgespec doctor --describe writes it"
        )
    return entries


def _machine(entry: Any, where: str) -> Machine:
    """
    Raises:
        UsageError: a key is unknown or missing, or a value is wrong; `where` is named.
    """
    if not isinstance(entry, dict):
        raise UsageError(f"{where}: a machine is {entry!r}, but must be a mapping")
    values = _checked({key: value for key, value in entry.items() if key not in MORE}, Machine, where)
    try:
        machine = TypeAdapter(Machine).validate_python(values)
    except ValidationError as error:
        raise UsageError(f"{where}: {first_mistake(error, Machine)[1]}") from error
    _check_numbers(machine, where)
    for part, of in [(machine.disk, "disk"), *((gpu, "gpus") for gpu in machine.gpus)]:
        _check_numbers(part, f"{where}: {of}")
    if machine.free > machine.memory:
        raise UsageError(f"{where}: free is {machine.free}, but memory only {machine.memory}")
    names = [gpu.name for gpu in machine.gpus]  # of cards of one kind numbered, as layers are counted by name
    numbered = [
        replace(gpu, name=f"{gpu.name}-{names[:i].count(gpu.name)}") if names.count(gpu.name) > 1 else gpu
        for i, gpu in enumerate(machine.gpus)
    ]
    return replace(machine, gpus=tuple(numbered))


def _check_numbers(part: Any, where: str) -> None:
    """Refuse numbers that are negative or not finite; called after conversion, as YAML reads -1e9 as a string."""
    for key in _names(type(part)):
        value = getattr(part, key)
        if isinstance(value, int | float) and not 0 <= value < inf:
            raise UsageError(f"{where}: {key} is {value}, but must be a finite number, and not below 0")


def _checked(values: Any, kind: type, where: str) -> Any:
    """A mapping for `kind` with sizes in bytes."""
    if not isinstance(values, dict):
        raise UsageError(f"{where}: {values!r} must be a mapping with keys of {', '.join(_names(kind))}")
    found = {}
    for key, value in values.items():
        if key not in _names(kind):
            raise UsageError(f"{where}: {unknown_key(str(key), _names(kind))}")
        if key in SIZES and isinstance(value, str):
            try:
                value = parse_size(value)
            except UsageError as error:
                raise UsageError(f"{where}: {key}: {error}") from error
        if key in PARTS:
            parts = value if key == "gpus" and isinstance(value, list) else [value]
            parts = [_checked(part, PARTS[key], f"{where}: {key}") for part in parts]
            value = parts if key == "gpus" else parts[0]
        found[key] = value
    return found


def _names(kind: Any) -> list[str]:
    return [field.name for field in fields(kind)]


def describe(machine: Machine, path: str, operations: float) -> dict[str, Any]:
    """
    Args:
        machine: this one.
        path: of a model's file, on the disk to measure where its speed is not remembered.
        operations: measured floating-point operations per second.

    Returns:
        It in the form of machines.yaml, with measured speeds, which are kept.
    """
    machine = with_measured(replace(machine, memory_speed=0.0, operations=float(round(operations))), path)
    if not machine_is_busy():
        remember(_about_speeds(), [machine.memory_speed, machine.operations])
    values: dict[str, Any] = {"name": "mine", "description": f"measured here: {machine.cores} cores"}
    values |= {name: value for name, value in asdict(machine).items() if name != "used"}
    values["packages"] = list(machine.packages)
    values["gpus"] = [asdict(gpu) for gpu in machine.gpus]
    values["sources"] = {
        "memory_speed": "sums over an array, measured",
        "operations": "a pass of MODEL over 64 tokens, measured",
        "gpus": "memory_speed, operations and link_speed are not measured: 0 is not known",
    }
    return {"machines": [values]}


def as_yaml(described: dict[str, Any]) -> str:
    return str(yaml.safe_dump(described, sort_keys=False, allow_unicode=True))


def _memory_speed() -> float:
    """Bytes per second in which this process reads memory, with one thread a core."""
    cores = this_machine().cores
    parts = np.array_split(np.ones(MEASURED // 8), cores)
    with ThreadPoolExecutor(cores) as pool:
        return MEASURED / _shortest(lambda: list(pool.map(np.max, parts)))


def _operations() -> float:
    """Floating-point operations per second of this machine's processors in a product of matrices in float32."""
    one = np.ones((ROWS, ROWS), np.float32)
    return 2 * ROWS**3 / _shortest(lambda: one @ one)


def _shortest(work: Callable[[], Any]) -> float:
    """Seconds of the shortest of `ROUNDS` runs: other programs only slow them."""
    seconds = []
    for _ in range(ROUNDS):
        started = perf_counter()
        work()
        seconds.append(perf_counter() - started)
    return min(seconds)
