"""Files that were mutated at random are read, or refused in one line: sessions, datastores, models.yaml and others."""

import json
import os
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from fuzz_files import mutated
from test_datastore import LetterVocab
from test_saved import backend, describe, session_of
from test_templates import one_line

from edgespec.errors import EdgespecError
from edgespec.loading.row_classes import TriedClass
from edgespec.machine.described import BUILT_IN, find_machine
from edgespec.machine.measurements import checked
from edgespec.measure.json_lines import append, resume
from edgespec.models.registry import find_model, read_models
from edgespec.models.safetensors_header import read_safetensors_header
from edgespec.planners.auto import Pace, new_auto_state
from edgespec.planners.datastore import HEADER_SIZE, build, open_datastore

ODD = [None, True, -1, 0, 3, 2.5, 10**400, float("nan"), "", "a", "\ud800", "\0", [], {}, [[]], {"a": {}}, [1] * 99]
SEEDS = [pytest.param(seed, marks=pytest.mark.exhaustive if seed >= 20 else ()) for seed in range(200)]


def odd(value: Any, draw: random.Random) -> Any:
    """A JSON value with one place that is something else, is missing, or has a further key."""
    inner = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else []
    if not inner or draw.random() < 0.2:
        return draw.choice(ODD)
    copy, key = value.copy(), draw.choice(list(inner))
    kind = draw.choice(["deeper", "deeper", "deeper", "gone", "more"])
    if kind == "gone":
        del copy[key]
    elif kind == "more" and isinstance(copy, dict):
        copy[draw.choice(["later", f"{key}s", "", "$ref"])] = draw.choice(ODD)
    else:
        copy[key] = odd(copy[key], draw)
    return copy


@pytest.mark.parametrize("seed", SEEDS)
def test_a_session(seed: int, tmp_path: Path) -> None:
    draw, path, target = random.Random(seed), tmp_path / "a.session", backend()
    session_of(target).save(path, note=["hello"])
    whole = path.read_bytes()
    if draw.random() < 0.3:
        path.write_bytes(mutated(whole, 0, len(whole), draw, moves=True))
    else:
        text = whole[whole.rindex(b'{"identity"') : whole.rindex(b"}") + 1]
        describe(path, json.dumps(odd(json.loads(text), draw)).encode())
    read_or_one_line(lambda: target.open().load(path))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_datastore(seed: int, tmp_path: Path) -> None:
    draw, path = random.Random(seed), tmp_path / "text.store"
    build(path, ["abcabc", "cab"], LetterVocab())
    whole = path.read_bytes()
    if draw.random() < 0.5:
        path.write_bytes(mutated(whole, 0, len(whole), draw, moves=True))
    else:
        header = json.dumps(odd(json.loads(whole[:HEADER_SIZE]), draw)).encode()
        path.write_bytes(header[:HEADER_SIZE].ljust(HEADER_SIZE) + whole[HEADER_SIZE:])

    def look_up() -> None:
        store = open_datastore(path, LetterVocab())
        store.continuations(*store.find([1, 2]), 2, 4, 4)

    read_or_one_line(look_up)


MODELS = yaml.safe_load((Path(__file__).parents[1] / "models.yaml").read_text("utf-8"))
MACHINES = yaml.safe_load(BUILT_IN.read_text("utf-8"))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_models_yaml(seed: int, tmp_path: Path) -> None:
    draw, path = random.Random(seed), tmp_path / "models.yaml"
    few = {"models": draw.sample(MODELS["models"], 3)}
    if draw.random() < 0.5:
        text = yaml.safe_dump(few).encode()
        path.write_bytes(mutated(text, 0, len(text), draw, moves=True))
    else:
        path.write_text(yaml.safe_dump(odd(few, draw)), "utf-8", "surrogatepass")
    read_or_one_line(lambda: read_models(path))
    read_or_one_line(lambda: find_model(few["models"][0]["name"], str(path)))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_machine_file(seed: int, tmp_path: Path) -> None:
    draw, path = random.Random(seed), tmp_path / "machine.yaml"
    few = {"machines": draw.sample(MACHINES["machines"], 1)}
    text = yaml.safe_dump(odd(few, draw)).encode("utf-8", "surrogatepass")
    path.write_bytes(text if len(text) < 16 or draw.random() < 0.5 else mutated(text, 0, len(text), draw, moves=True))
    read_or_one_line(lambda: find_machine(str(path)))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_safetensors_header(seed: int, tmp_path: Path) -> None:
    draw, path = random.Random(seed), tmp_path / "model.safetensors"
    tensor = {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}
    header = {"__metadata__": {"format": "pt"}, "a": tensor, "b": tensor | {"data_offsets": [12, 24]}}
    text = json.dumps(odd(header, draw)).encode()
    whole = struct.pack("<Q", len(text)) + text + bytes(24)
    path.write_bytes(whole if draw.random() < 0.7 else mutated(whole, 0, len(whole), draw, moves=True))
    read_or_one_line(lambda: read_safetensors_header(path))


@dataclass
class Line:
    name: str
    values: list[int]
    more: dict[str, float]


@pytest.mark.parametrize("seed", SEEDS)
def test_lines_of_answers(seed: int, tmp_path: Path) -> None:
    draw, path = random.Random(seed), tmp_path / "lines.jsonl"
    for name in "abc":
        append(path, Line(name, [1, 2], {"x": 0.5}))
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    changed = "".join(json.dumps(odd(line, draw)) + "\n" for line in lines).encode()
    path.write_bytes(changed if len(changed) < 16 else mutated(changed, 0, len(changed), draw, moves=True))

    def names() -> list[str]:
        return [line.name + "!" for line in resume(path, Line) if sum(line.values) < 9 and sum(line.more.values()) < 9]

    read_or_one_line(names)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_kept_measurement(seed: int) -> None:
    draw = random.Random(seed)
    state = new_auto_state(streams=False)
    state.ledger().add({"copies": 0.5}, "copies", 1.5, 2)
    pace = odd(json.loads(json.dumps({**state.as_dict(), "target": [[0, 1, 0.5], [0, 8, 0.75]]})), draw)
    if known := checked(pace, Pace):
        new_auto_state(streams=False).recall(known)
    found = checked(odd([{"least": 1, "most": 7, "trees": True, "row_independent": True}], draw), list[TriedClass])
    assert all(type(one.least) is int for one in found or [])


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no such pipes")
@pytest.mark.parametrize("read", [read_safetensors_header, lambda path: resume(path, Line), read_models])
def test_nothing_waits_for_a_pipe(read: Callable[[Path], Any], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(EdgespecError, match="pipe or a device"):
        read(tmp_path / "pipe")


def read_or_one_line(read: Callable[[], Any]) -> None:
    try:
        read()
    except EdgespecError as error:
        one_line(error).encode()
