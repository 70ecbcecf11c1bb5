"""Layers in another machine's memory: here a process of this machine, behind a socket.

Needs a llama.cpp with its RPC backend, in the folder EDGESPEC_RPC_BUILD or installed; what needs none comes first.
"""

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rpc_build import BUILD, ENVIRONMENT

Run = Callable[..., tuple[int, str, str]]
PROGRAM = [sys.executable, "-c", "from edgespec.cli.commands import main; main()"]


def test_it_listens_to_this_machine_alone(run: Run) -> None:
    for host in ("0.0.0.0", "192.168.1.7"):
        code, _, error = run("lend", "--host", host)
        assert code == 2
        assert "ssh -L" in error
        assert "--i-know-it-is-insecure" in error


@pytest.mark.parametrize("host", ["::1", "a..b", "no such name"])
def test_it_listens_where_llamacpp_can(run: Run, host: str) -> None:
    code, _, error = run("lend", "--host", host)
    assert code == 2
    assert "IPv4" in error


@pytest.mark.parametrize("address", ["studio", "studio:", ":50052", "studio:many", ""])
def test_a_lender_has_a_host_and_a_port(address: str) -> None:
    pytest.importorskip("llama_cpp")
    from edgespec.backends.llamacpp.lending.rpc import check_lender

    from edgespec.errors import UsageError

    with pytest.raises(UsageError, match="HOST:PORT"):
        check_lender(address)


def test_a_build_without_rpc_is_one_line(run: Run, monkeypatch: pytest.MonkeyPatch, smollm2_tiny: Path) -> None:
    from edgespec.backends.llamacpp.lending import rpc as lending

    monkeypatch.setattr(lending, "compiled_backends", lambda: {"cpu"})
    for command in (["lend", "--port", "0"], ["run", str(smollm2_tiny), "Hello", "--lender", "127.0.0.1:1"]):
        code, _, error = run(*command)
        assert code == 1
        assert "GGML_RPC=on" in error
        assert error.count("\n") == 1


@pytest.mark.parametrize(("kinds", "lent"), [([1, 3, 0], [1]), ([3, 0], [2]), ([1, 2, 3, 0], [1, 2])])
def test_gpus_are_lent_or_else_the_processor_and_no_library(
    kinds: list[int], lent: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """BLAS counts as a device (3), and has no memory."""
    pytest.importorskip("llama_cpp")
    from edgespec.backends.llamacpp.lending import rpc as lending

    from edgespec.errors import EdgespecError

    library = SimpleNamespace(
        ggml_backend_dev_count=lambda: len(kinds), ggml_backend_dev_get=lambda i: i + 1,
        ggml_backend_dev_type=lambda device: kinds[device - 1], ggml_backend_dev_get_props=lambda *given: None,
    )  # fmt: skip
    started = list[Any]()
    monkeypatch.setattr(lending, "ggml", lambda: library)
    server = SimpleNamespace(ggml_backend_rpc_start_server=lambda *given: started.extend(given[-1]))
    monkeypatch.setattr(lending, "rpc", lambda: server)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(EdgespecError, match="could not listen"):
        lending.lend("127.0.0.1", 1, 1, None)
    assert started == lent


def test_a_mac_lends_no_efficiency_cores(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llama_cpp")
    from edgespec.backends.llamacpp.lending import rpc as lending

    from edgespec.machine.this_machine import this_machine

    lent, mac = list[Any](), replace(this_machine(), cores=10)
    monkeypatch.setattr("edgespec.cli.lend.this_machine", lambda: mac)
    monkeypatch.setattr(lending, "rpc", lambda: None)
    monkeypatch.setattr(lending, "lend", lambda *given: lent.append(given))
    run("lend", "--port", "0")
    run("lend", "--port", "0", "--threads", "12")
    assert [threads for _, _, threads, _ in lent] == [10, 12]


def test_only_as_many_layers_are_lent_as_do_not_fit() -> None:
    pytest.importorskip("llama_cpp")
    from edgespec.backends.llamacpp.lending.rpc import choose_lent

    from edgespec.weights.plan import Tensor

    layer, head = 1 << 20, 1 << 19
    names = ["token_embd.weight", *(f"blk.{i}.ffn_up.weight" for i in range(10)), "output.weight"]
    sizes = [head, *[layer] * 10, head]
    starts = [sum(sizes[:i]) for i in range(12)]
    tensors = [Tensor(name, 0, start, size) for name, start, size in zip(names, starts, sizes, strict=True)]
    whole, needed, plenty = 11 << 20, 3 << 20, 1 << 30

    def lent(memory: int, free: int = plenty) -> int:
        return choose_lent(tensors, memory, needed, 0, free, 1)

    assert lent(whole + needed) == 0
    assert lent(whole + needed - 1) == 2  # llama.cpp counts the output as one
    assert lent(whole + needed - 4 * layer) == 5
    assert lent(whole + needed - 4 * layer, free=2 * layer) == 3  # the others are streamed
    assert lent(needed) == -1
    assert lent(needed, free=0) == 0


needs_rpc = pytest.mark.skipif(BUILD is None, reason="no llama.cpp with RPC: see docs/guides/several-machines.md")


@pytest.fixture
def lender() -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Where it listens, and the process."""
    process = subprocess.Popen(
        [*PROGRAM, "lend", "--port", "0", "--threads", "1"], env=ENVIRONMENT, text=True, stdout=subprocess.PIPE
    )
    line = process.stdout.readline()
    assert line.startswith("lending at ")
    for _ in range(100):  # it says so just before it is there
        if "transport" in process.stdout.readline():
            break
    time.sleep(0.2)
    yield line.split()[2].rstrip(";"), process
    process.kill()
    process.wait()


def answer(model: Path, *options: str, exact: tuple[str, ...] = ("--exact", "off")) -> dict[str, Any]:
    command = ["run", str(model), "Say hello.", "--json", "--ctx", "128", "-n", "12", "--seed", "2", *exact]
    done = subprocess.run([*PROGRAM, *command, *options], env=ENVIRONMENT, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout) | {"said": done.stderr}
    return found


@needs_rpc
def test_texts_are_those_of_one_machine(lender: tuple[str, Any], smollm2_tiny_f32: Path) -> None:
    options = ["--lender", lender[0], "-t", "0.8", "--gpu-layers"]
    plain = answer(smollm2_tiny_f32, "--planner", "none", "-t", "0.8")
    half = answer(smollm2_tiny_f32, *options, "4", "--planner", "none")
    drafted = answer(smollm2_tiny_f32, *options, "7", "--draft", str(smollm2_tiny_f32), "--budget", "6")
    assert plain["tokens"] == half["tokens"] == drafted["tokens"]
    assert "the last 3 of 6 layers" in half["said"]
    assert "the last 6 of 6 layers" in drafted["said"]
    assert drafted["stats"]["tokens_by_source"]["draft"] > 0


@needs_rpc
def test_what_fits_is_not_lent(lender: tuple[str, Any], smollm2_tiny: Path) -> None:
    assert "nothing is lent" in answer(smollm2_tiny, "--lender", lender[0], exact=())["said"]


@needs_rpc
def test_a_lender_that_lends_already_is_one_line(lender: tuple[str, Any], smollm2_tiny: Path) -> None:
    host, port = lender[0].split(":")
    program = (
        "from edgespec.backends.llamacpp.lending import child_process as apart\n"
        "from edgespec.loop.engines import LoadOptions\n"
        "from edgespec.errors import ModelError\n"
        "apart.SECONDS_TO_BORROW = 4\n"
        f"options = LoadOptions(lenders=({lender[0]!r},))\n"
        f"try: apart.load_in_child({str(smollm2_tiny)!r}, options, lambda done, total: None)\n"
        "except ModelError as error: print(error)\n"
    )
    with socket.create_connection((host, int(port))):  # whose greeting the lender waits for
        time.sleep(0.5)
        done = subprocess.run(
            [sys.executable, "-c", program], env=ENVIRONMENT, text=True, capture_output=True, timeout=60, check=True
        )
    assert done.stdout == f"no answer from {lender[0]}: a lender lends to one at a time\n"


@needs_rpc
def test_a_lender_that_dies_is_one_clear_error(lender: tuple[str, Any], smollm2_tiny: Path) -> None:
    address, process = lender
    command = ["run", str(smollm2_tiny), "Once", "--raw", "--ctx", "4096", "-n", "4000", "--exact", "off"]
    borrower = subprocess.Popen(
        [*PROGRAM, *command, "--lender", address, "--gpu-layers", "-1", "--planner", "none"],
        env=ENVIRONMENT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert borrower.stderr
    assert borrower.stdout.read(10)  # it writes
    process.send_signal(signal.SIGKILL)
    written, error = borrower.communicate(timeout=60)
    assert borrower.returncode == 1
    assert written
    (line,) = [line for line in error.splitlines() if line.startswith("edgespec:")]
    assert f"a lender ({address}) is gone" in line
    assert "Traceback" not in error


@needs_rpc
def test_nobody_lends_there(smollm2_tiny: Path) -> None:
    command = ["run", str(smollm2_tiny), "Hello", "--lender", "127.0.0.1:1"]
    done = subprocess.run([*PROGRAM, *command], env=ENVIRONMENT, text=True, capture_output=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("edgespec: nobody lends at 127.0.0.1:1")
