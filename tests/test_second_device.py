"""Layers on a second device, for real: a build of llama.cpp with its RPC backend. See CONTRIBUTING.md for one.

The device computes on the same processor with the same kernels, so nothing may differ, not by a bit.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gguf", reason="needs gguf: pip install gguf")

from conftest import quantised
from gguf_files import small_llama
from rpc_build import BUILD, ENVIRONMENT

PROGRAM = Path(__file__).parent / "second_device.py"
LAYERS, F16, MIB = 24, 1, 1 << 20
RESERVE = 512 * MIB


pytestmark = pytest.mark.skipif(BUILD is None, reason="no llama.cpp with RPC: CONTRIBUTING.md says how to build one")


def command(*arguments: str) -> dict[str, Any]:
    return {"args": [sys.executable, str(PROGRAM), *arguments], "env": ENVIRONMENT, "text": True}


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = subprocess.Popen(**command("serve"), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert server.stdin
    where = server.stdout.readline().strip()
    yield where
    server.stdin.close()  # it ends
    assert server.wait(30) == 0


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """One with its output where a converter puts it, one where the quantiser does: in front."""
    folder = tmp_path_factory.mktemp("models")
    whole = small_llama(folder / "float32.gguf", layers=LAYERS)
    return {"float32": str(whole), "float16": str(quantised(whole, folder / "float16.gguf", F16))}


def checked(endpoint: str, cases: list[list[Any]]) -> list[Any]:
    """What came of the device itself, and of every case: [file, free memory of the device, options]."""
    for _ in range(20):  # the server says where it will be before it is there
        done = subprocess.run(**command("use", endpoint, json.dumps(cases)), capture_output=True, check=False)
        if done.returncode == 0:
            break
        time.sleep(0.5)
    assert done.returncode == 0, done.stderr
    found: list[Any] = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 1 + len(cases)
    assert not [one for one in found[1:] if "failed" in one]
    return found


def test_layers_are_where_they_are_said_to_be(endpoint: str, models: dict[str, str]) -> None:
    """All, some, and as many as fit; without --memory."""
    for path in models.values():
        weights = Path(path).stat().st_size
        cases = [
            [path, None, {}],
            [path, RESERVE, {}],
            [path, RESERVE + 65 * MIB, {}],
            [path, None, {"gpu_layers": 5}],
        ]
        (device,), everything, nothing, some, five = checked(endpoint, cases)
        name, shared, free = device
        assert (name, shared) == ("RPC0", False)
        assert free > 0
        assert [one["difference"] for one in (everything, nothing, some, five)] == [0.0] * 4
        assert [one["gpu_layers"] for one in (everything, nothing, five)] == [-1, 0, 5]
        assert 2 <= some["gpu_layers"] <= LAYERS
        assert "RPC0" not in nothing["places"]
        for one in (some, five):
            assert 0 < one["places"]["RPC0"] < everything["places"]["RPC0"] < weights / MIB
        assert all(not one["streamed"] for one in (everything, nothing, some, five))


def test_streamed_layers_are_never_on_the_device(endpoint: str, models: dict[str, str]) -> None:
    """Those before the device's are streamed; what llama.cpp has given it is what the plan counts on."""
    for path in models.values():
        cases = [
            *([path, None, {"memory": 5 * MIB, "gpu_layers": layers}] for layers in (0, 2, 5, 9)),
            [path, RESERVE + 65 * MIB, {"memory": 5 * MIB}],
        ]
        _, *found = checked(endpoint, cases)
        on_device = [one["places"].get("RPC0", 0.0) for one in found[:4]]
        assert on_device[0] == 0
        a_layer = (on_device[2] - on_device[1]) / 3  # with the output first: 2 is one layer, 5 are four
        assert on_device[3] - on_device[2] == pytest.approx(4 * a_layer, rel=0.02)
        for one in found:
            assert one["difference"] == 0.0
            assert one["streamed"], "nothing was streamed"
            first = LAYERS - max(0, one["gpu_layers"] - 1)
            assert max(one["streamed"]) < first
            expected = on_device[1] + a_layer * (LAYERS - first - 1) if one["gpu_layers"] else 0.0
            assert one["places"].get("RPC0", 0.0) == pytest.approx(expected, abs=0.1)


def test_all_layers_on_the_device_need_no_memory_here(endpoint: str, models: dict[str, str]) -> None:
    """Rows of the embedding, and what a program takes."""
    _, found, plain = checked(
        endpoint,
        [
            [models["float32"], None, {"memory": 8 * MIB, "gpu_layers": -1}],
            [models["float32"], None, {"memory": 5 * MIB}],
        ],
    )
    assert (found["difference"], found["streamed"]) == (0.0, [])
    assert (plain["gpu_layers"], plain["difference"]) == (-1, 0.0)
