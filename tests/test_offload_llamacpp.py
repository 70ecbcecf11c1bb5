"""llama.cpp with weights that are streamed: the same numbers, to the bit, and nothing left behind.

SmolLM2's weights are Q4_1, whose kernels are the same with and without llama.cpp's repacking; `tiny` has floats.
"""

import gc
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

import llama_cpp
from alone import Generation
from conftest import Run, once
from edgespec.backends.common import loader as loader_module
from edgespec.backends.llamacpp import engine as llamacpp_engine
from edgespec.backends.llamacpp.backend import LlamaBackend
from edgespec.backends.llamacpp.context import ContextSize
from edgespec.backends.llamacpp.engine import engine, load
from edgespec.backends.llamacpp.memory import planning as llamacpp_memory
from edgespec.backends.llamacpp.memory.gpu import Buffers
from edgespec.backends.llamacpp.memory.own_memory import OwnMemory
from edgespec.backends.llamacpp.memory.planning import MIN_NODES, SHARE
from gguf_files import small_llama
from hybrid_files import write_with_head

from edgespec.errors import Interrupted, ModelError, NoRoom, UsageError
from edgespec.loading import row_classes
from edgespec.loading.pair import open_backends
from edgespec.loading.row_classes import TRYING
from edgespec.loop.backend import Work
from edgespec.loop.engines import LoadOptions
from edgespec.loop.passes import prefill
from edgespec.loop.sampling import SamplingParams
from edgespec.loop.stats import GenerationStats
from edgespec.machine import disk
from edgespec.machine import memory as process
from edgespec.machine.memory import parse_size
from edgespec.machine.this_machine import Machine, this_machine
from edgespec.models.registry import Defaults, Entry
from edgespec.planners.none import NonePlanner
from edgespec.planners.specexec import SpecExecPlanner
from edgespec.planners.sssd import SssdPlanner
from edgespec.weights import ring
from edgespec.weights.linux import LinuxStore, mappings
from edgespec.weights.plan import SAFETY, Tensor

pytestmark = pytest.mark.skipif(not ring.can_stream(this_machine()), reason="weights are streamed on Linux and macOS")
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")

MIB = 1 << 20
OPTIONS: dict[str, Any] = {"context_length": 256, "threads": 1, "budget": 16}
FIVE = [1, 2, 3, 4, 5]
PROMPT = "Count: one two three four one two three four one two"


@pytest.fixture(autouse=True)
def _steady_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the process itself takes differs from test to test; here plans are to depend on the model alone."""
    monkeypatch.setattr("edgespec.machine.memory.private_memory", lambda: 0)


@pytest.fixture(scope="module")
def tiny(smollm2_folder: Path) -> Path:
    return once(smollm2_folder / "six-layers.gguf", lambda new: small_llama(new, layers=6))


def least_memory(path: Path, **options: Any) -> int:
    """What the error names."""
    with pytest.raises(UsageError, match="it needs at least") as caught:
        load(str(path), memory=1, **options)
    return parse_size(re.search(r"at least ([\d.]+ \w+)", str(caught.value))[1])  # type: ignore[index]


def load_streamed(path: Path, more: int = 0, **options: Any) -> LlamaBackend:
    """With the least memory, or that much more; what this program holds besides may not change in between."""
    options, held = OPTIONS | options, process.private_memory()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("edgespec.machine.memory.private_memory", lambda: held)
        backend = load(str(path), memory=least_memory(path, **options) + more, **options)
    assert len(backend.streamer.plan.streamed) >= 4
    return backend


@contextmanager
def closing_one(make: Callable[[], LlamaBackend]) -> Iterator[LlamaBackend]:
    """For tests that share it, so it is loaded once, as `_steady_memory` has it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("edgespec.machine.memory.private_memory", lambda: 0)
        backend = make()
    with closing(backend):
        yield backend


@pytest.fixture(scope="module")
def resident(smollm2: Path) -> Iterator[LlamaBackend]:
    with closing_one(lambda: load(str(smollm2), resident=True, **OPTIONS)) as backend:
        yield backend


@pytest.fixture(scope="module")
def streamed(smollm2: Path) -> Iterator[LlamaBackend]:
    with closing_one(lambda: load_streamed(smollm2, 10 * MIB)) as backend:
        yield backend


@pytest.fixture(scope="module")
def tiny_resident(tiny: Path) -> Iterator[LlamaBackend]:
    with closing_one(lambda: load(str(tiny), resident=True, **OPTIONS)) as backend:
        yield backend


@pytest.fixture(scope="module")
def tiny_streamed(tiny: Path) -> Iterator[LlamaBackend]:
    with closing_one(lambda: load_streamed(tiny)) as backend:
        yield backend


@pytest.fixture
def store_here() -> type[Any]:
    return LinuxStore if sys.platform == "linux" else OwnMemory


@pytest.fixture
def fresh(tiny: Path) -> Iterator[LlamaBackend]:
    """Streamed, and of one test."""
    with closing(load_streamed(tiny)) as backend:
        yield backend


def row_after(backend: LlamaBackend, session: Any, tokens: list[int]) -> np.ndarray:
    last = prefill(backend, session, tokens, want_last=True)
    return last[0].row(last[1])


def last_row(backend: LlamaBackend, tokens: list[int], before: int = 0) -> np.ndarray:
    """`before`: first tokens that are read in a pass of their own."""
    with closing(backend.open()) as session:
        prefill(backend, session, tokens[:before])
        return row_after(backend, session, tokens)


def same_rows(path: Path, rows: Callable[[LlamaBackend], Any], **options: Any) -> None:
    """What is streamed has the rows of what is in memory."""
    found = []
    for make in (load_streamed, lambda path, **given: load(str(path), resident=True, **given)):
        with closing(make(path, **OPTIONS | options)) as backend:
            found.append(rows(backend))
    np.testing.assert_array_equal(*found)


def tree_rows(backend: LlamaBackend) -> np.ndarray:
    """Logits after a prompt: of a tree, and of a tree grown from it."""
    session = backend.open()
    prefill(backend, session, [1, 9, 12, 44, 100])
    rows = []
    for tokens, parents in (([7, 8, 9, 10, 11], [-1, 0, 0, 1, -1]), ([3, 4, 5], [2, 5, 4])):
        first = len(rows)
        numbers = np.arange(first, first + len(tokens), dtype=np.int32)
        logits = backend.forward([Work(session, np.array(tokens, np.int32), np.array(parents, np.int32), numbers)])[0]
        rows += [logits.row(int(node)) for node in numbers]
    session.close()
    return np.array(rows)


def write(backend: LlamaBackend, planner: Any, sampling: SamplingParams, count: int = 24) -> list[int]:
    prompt = backend.vocab.encode(PROMPT, add_bos=True, parse_special=False)
    with closing(backend.open()) as session:
        made = Generation(
            backend, session, planner, prompt, sampling, max_tokens=count, budget=16, stats=GenerationStats()
        )
        return [token for step in made.steps() for token in step.tokens]


def exact(backend: LlamaBackend, other: LlamaBackend) -> None:
    np.testing.assert_array_equal(tree_rows(backend), tree_rows(other))


class Enters:
    """Notes what is entered, pass by pass, and can fail at one layer."""

    def __init__(self, backend: LlamaBackend, monkeypatch: pytest.MonkeyPatch) -> None:
        self.really, self.passes, self.fail = backend.streamer.enter, list[list[int]](), dict[int, BaseException]()
        begin = backend.streamer.begin
        monkeypatch.setattr(backend.streamer, "enter", self.enter)
        monkeypatch.setattr(backend.streamer, "begin", lambda: (self.passes.append([]), begin()))

    def enter(self, index: int) -> None:
        self.passes[-1].append(index)
        if index in self.fail:
            raise self.fail.pop(index)
        self.really(index)


# --- the same numbers --------------------------------------------------------------------------------------------


def test_logits_are_the_same_to_the_bit(streamed: LlamaBackend, resident: LlamaBackend) -> None:
    assert 4 < len(streamed.streamer.plan.streamed) < 30  # some stay, some are streamed
    exact(streamed, resident)
    np.testing.assert_array_equal(last_row(streamed, list(range(5, 40))), last_row(resident, list(range(5, 40))))


PLAIN: dict[float, list[int]] = {}


@pytest.mark.parametrize("temperature", [0, 0.8])
@pytest.mark.parametrize("kind", ["none", "sssd", "specexec"])
def test_texts_are_the_same(
    tiny_streamed: LlamaBackend, tiny_resident: LlamaBackend, kind: str, temperature: float
) -> None:
    """The draft is the same file again, in the same process."""
    sampling = SamplingParams(temperature=temperature, seed=4)
    if temperature not in PLAIN:
        PLAIN[temperature] = write(tiny_resident, NonePlanner(), sampling)
    makers: dict[str, Callable[[], Any]] = {
        "none": NonePlanner,
        "sssd": SssdPlanner,
        "specexec": lambda: SpecExecPlanner(tiny_resident, depth=6, beam=4),
    }
    planner = makers[kind]()
    assert write(tiny_streamed, planner, sampling) == PLAIN[temperature]
    planner.close()


def test_every_streamed_byte_is_read_once_in_a_pass(
    tiny: Path, store_here: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    really = store_here.read

    def counted(self: Any, slot: int, layer: Any, extent: Any, start: int, stop: int) -> None:
        really(self, slot, layer, extent, start, stop)
        sizes.append(stop - start)

    monkeypatch.setattr(store_here, "read", counted)
    backend = load_streamed(tiny)
    plan, passes = backend.streamer.plan, 6
    for count in range(passes):
        last_row(backend, [5 + count])
    backend.close()
    ahead = sum(layer.size for layer in plan.streamed[: plan.slots])
    assert passes * plan.streamed_bytes <= sum(sizes) <= passes * plan.streamed_bytes + ahead


def test_several_sessions_in_one_pass(tiny: Path) -> None:
    def rows(backend: LlamaBackend) -> Any:
        sessions = [backend.open() for _ in range(3)]
        for number, session in enumerate(sessions):
            prefill(backend, session, list(range(10, 14 + 3 * number)))
        one, root = np.array([77], np.int32), np.array([-1], np.int32)
        logits = backend.forward([Work(session, one, root, np.array([0], np.int32)) for session in sessions])
        return [each.row(0) for each in logits]

    same_rows(tiny, rows, sessions=3)


def test_a_prompt_of_several_chunks(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llamacpp_memory, "CHUNKS", (512,))

    def rows(backend: LlamaBackend) -> Any:
        assert backend.capabilities.max_nodes == 512
        return last_row(backend, [20 + i % 200 for i in range(600)])

    same_rows(tiny, rows, context_length=700)


def test_a_pass_of_several_graphs(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens whose cells were given up are computed again, and may make a pass too large for one graph."""
    monkeypatch.setattr(llamacpp_memory, "CHUNKS", (512,))
    length, enters = 300, list[Enters]()

    def rows(backend: LlamaBackend) -> Any:
        session = backend.open()
        # The first branch is given up, so the cells behind its gap are, too.
        tokens = np.array([5, *(20 + i % 200 for i in range(length))], np.int32)
        parents = np.array([-1, -1, *range(1, length)], np.int32)
        backend.forward([Work(session, tokens, parents, np.array([0], np.int32))])
        session.commit(list(range(1, length + 1)))
        assert session.unread_committed == length
        if backend.streamer:
            enters.append(Enters(backend, monkeypatch))
        nodes = np.arange(length, dtype=np.int32)
        return backend.forward([Work(session, 30 + nodes % 200, nodes - 1, nodes[-1:])])[0].row(length - 1)

    same_rows(tiny, rows, context_length=1000)
    np.testing.assert_array_equal(enters[0].passes, [[*range(6), *range(6)]])


def test_one_file_streamed_twice(tiny: Path, tiny_resident: LlamaBackend) -> None:
    """Each moves weights in its own mapping, also while the other one loads."""
    first = load_streamed(tiny)
    last_row(first, [5])
    second = load_streamed(tiny)
    if sys.platform == "linux":
        places = [backend.streamer._store._mapped[0] for backend in (first, second)]
        assert places[0].stop <= places[1].start or places[1].stop <= places[0].start
        assert places[0].stop - places[0].start == places[1].stop - places[1].start
    for backend in (first, second, first):
        exact(backend, tiny_resident)
    first.close()
    exact(second, tiny_resident)
    second.close()


# --- the hooks ---------------------------------------------------------------------------------------------------


def test_every_layer_is_entered_once_before_it_is_computed(
    fresh: LlamaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    enters = Enters(fresh, monkeypatch)
    for tokens in ([5], [5, 6, 7], list(range(9, 60))):  # the first pass learns; later graphs have other sizes
        last_row(fresh, tokens)
    assert enters.passes == [list(range(6))] * 3


@pytest.mark.parametrize("names", [{"nothing"}, {"l_out-2"}, {"norm-0", "norm-1", "Qcur-3", "ffn_out-5"}])
def test_graphs_unlike_the_first(
    fresh: LlamaBackend, tiny_resident: LlamaBackend, monkeypatch: pytest.MonkeyPatch, names: set[str]
) -> None:
    """The nodes learnt do not come, or come elsewhere: nothing is wrong, no layer is forgotten."""
    enters = Enters(fresh, monkeypatch)
    for _ in range(2):
        fresh._hooks._last_operations = {name.encode() for name in names}  # type: ignore[union-attr]
        fresh._hooks._learning = False  # type: ignore[union-attr]
        exact(fresh, tiny_resident)
    assert all(layers == list(range(6)) for layers in enters.passes)


def test_only_the_ends_of_layers_are_reported(fresh: LlamaBackend) -> None:
    """Each report stops the engine once; the first pass has one for each node, later ones have one for each layer."""
    hooks = fresh._hooks
    assert hooks
    for tokens in ([5], [5, 6], list(range(30)), [9]):
        last_row(fresh, tokens)
    assert len(hooks._last_operations) <= 6 + 1


# --- passes that end badly ---------------------------------------------------------------------------------------


class Broken(Exception):
    pass


@pytest.mark.parametrize("error", [Broken("broken"), ModelError("bad"), KeyboardInterrupt(), SystemExit(3)], ids=repr)
def test_an_error_in_the_middle_of_a_pass(
    fresh: LlamaBackend, tiny_resident: LlamaBackend, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """It comes out as it is, and the next text is right: also when the pass was the first, from which is learnt."""
    enters = Enters(fresh, monkeypatch)
    for layer in (3, 0, 1, 5):
        enters.fail[layer] = error
        with pytest.raises(type(error)) as caught:
            last_row(fresh, [7, 8, 9])
        assert caught.value is error
        assert not enters.fail
        assert enters.passes[-1] == list(range(layer + 1))  # nothing was computed after it
        exact(fresh, tiny_resident)
    session = fresh.open()  # in the middle of a text
    prefill(fresh, session, [1, 2, 3])
    enters.fail[2] = error
    with pytest.raises(type(error)):
        prefill(fresh, session, FIVE)
    assert session.token_ids == [1, 2, 3]
    np.testing.assert_array_equal(row_after(fresh, session, FIVE), last_row(tiny_resident, FIVE, before=3))


@pytest.mark.parametrize("asked", [True, False])
def test_an_interrupted_pass_ends_within_a_layer(
    fresh: LlamaBackend, tiny_resident: LlamaBackend, monkeypatch: pytest.MonkeyPatch, asked: bool
) -> None:
    """Also where llama.cpp does not ask whether to go on, as on a GPU."""
    if not asked:
        nobody = llama_cpp.ggml_abort_callback()
        llama_cpp.llama_set_abort_callback(fresh.context, nobody, None)
    session, entered = fresh.open(), list[int]()
    prefill(fresh, session, [1, 2, 3])
    enter, end = fresh.streamer.enter, fresh.cells.end  # type: ignore[union-attr]
    for layer in (0, 3, 5):

        def interrupt(index: int, layer: int = layer) -> None:
            entered.append(index)
            enter(index)
            if index == layer:
                fresh.interrupt(fresh.pass_number)

        with monkeypatch.context() as patch:
            patch.setattr(fresh.streamer, "enter", interrupt)
            entered.clear()
            with pytest.raises(Interrupted):
                prefill(fresh, session, FIVE)
        assert max(entered) <= layer + 1
        assert (session.token_ids, fresh.cells.end) == ([1, 2, 3], end)
    np.testing.assert_array_equal(row_after(fresh, session, FIVE), last_row(tiny_resident, FIVE, before=3))


@contextmanager
def soon(number: int, handler: Any, delay: float = 0.05) -> Iterator[None]:
    """A real signal while the `with` computes."""
    before, timer = signal.signal(number, handler), threading.Timer(delay, os.kill, (os.getpid(), number))
    timer.start()
    try:
        yield
    finally:
        timer.join()
        assert signal.getsignal(number) is handler
        signal.signal(number, before)


def leave(number: int, frame: Any) -> None:
    sys.exit(128 + number)


@pytest.mark.parametrize(
    ("name", "handler", "error", "delay"),
    [
        ("SIGINT", signal.default_int_handler, KeyboardInterrupt, 0.05),
        ("SIGINT", signal.default_int_handler, KeyboardInterrupt, 0.15),
        ("SIGTERM", leave, SystemExit, 0.05),
        ("SIGHUP", leave, SystemExit, 0.05),
    ],
)
def test_what_ends_the_program_ends_a_pass(
    name: str,
    handler: Any,
    error: type[BaseException],
    delay: float,
    streamed: LlamaBackend,
    resident: LlamaBackend,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Python handles a signal on entry to the callback, from where no exception comes through."""
    with closing(streamed.open()) as session, pytest.raises(error), soon(getattr(signal, name), handler, delay):
        prefill(streamed, session, list(range(5, 205)))
    assert session.token_ids == []
    exact(streamed, resident)
    assert "ignored" not in capfd.readouterr().err


def test_a_signal_whose_handler_does_not_raise_ends_no_pass(streamed: LlamaBackend, resident: LlamaBackend) -> None:
    seen: list[int] = []
    with soon(signal.SIGINT, lambda number, frame: seen.append(number)):
        row = last_row(streamed, list(range(5, 40)))
    assert seen == [signal.SIGINT]
    np.testing.assert_array_equal(row, last_row(resident, list(range(5, 40))))


def test_a_pass_on_another_thread(tiny: Path, tiny_resident: LlamaBackend) -> None:
    """Signals are the main thread's affair; a server computes elsewhere."""
    backend, rows = load_streamed(tiny), list[np.ndarray]()
    thread = threading.Thread(target=lambda: rows.append(tree_rows(backend)))
    thread.start()
    thread.join(60)
    np.testing.assert_array_equal(rows[0], tree_rows(tiny_resident))
    backend.close()


def test_a_read_error_is_one_model_error_until_the_disk_is_back(
    tiny: Path, tiny_resident: LlamaBackend, store_here: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    really, calls = store_here.read, list[int]()
    broken = range(20, 10**9)

    def flaky(self: Any, *arguments: Any) -> None:
        calls.append(1)
        if len(calls) in broken:
            raise OSError(5, "Input/output error")
        really(self, *arguments)

    monkeypatch.setattr(store_here, "read", flaky)
    before = reading_threads()
    backend = load_streamed(tiny)
    for _ in range(2):  # as long as the disk is broken
        with pytest.raises(ModelError, match=r"^layer \d cannot be read: .*Input/output error$"):
            write(backend, NonePlanner(), SamplingParams())
    broken = range(0)
    exact(backend, tiny_resident)
    backend.close()
    assert reading_threads() == before


SHRINK = """
import os, sys
sys.path.insert(0, sys.argv[2])
from test_offload_llamacpp import *
process.private_memory = lambda: 0
path = Path(sys.argv[1])
backend = load_streamed(path)
last_row(backend, [5])
os.truncate(path, path.stat().st_size // 3)
for _ in range(2):
    try:
        last_row(backend, [5])
    except ModelError as error:
        print(error)
backend.close()
print("alive")
"""


def test_a_file_that_shrinks_while_it_is_loaded(tiny: Path, tmp_path: Path) -> None:
    """In a process of its own: touching a page behind a file's end would kill it."""
    copy = tmp_path / "copy.gguf"
    shutil.copyfile(tiny, copy)
    done = subprocess.run(
        [sys.executable, "-c", SHRINK, str(copy), str(Path(__file__).parent)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 3
    assert re.fullmatch(rf"the model cannot be read any more: {copy} has shrunk from \d+ to \d+ bytes", lines[0])
    assert lines[1:] == [lines[0], "alive"]


# --- what stays behind -------------------------------------------------------------------------------------------


def reading_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("edgespec-read")]


def left_behind(path: Path, *, collect: bool = False) -> tuple[list[str], int, int, int]:
    """Reading threads, descriptors, locked KiB, mappings of the file; `collect` what tests before have left."""
    if collect:
        gc.collect()
    locked = re.search(r"VmLck:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"))
    assert locked
    mapped = len(mappings(str(path)))
    return reading_threads(), len(os.listdir("/proc/self/fd")), int(locked[1]), mapped


@linux_only
def test_closing_leaves_nothing_and_may_be_done_twice(tiny: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.gguf"
    shutil.copyfile(tiny, copy)
    before = left_behind(copy, collect=True)
    assert before[3] == 0
    for passes in range(3):
        backend = load_streamed(copy)
        assert len(reading_threads()) > len(before[0])
        session = backend.open()
        for token in range(passes):
            prefill(backend, session, [token + 5])
        backend.close()
        backend.close()
        session.close()
        assert left_behind(copy) == before


@linux_only
@pytest.mark.parametrize("where", ["preload", "drop", "context", "measure"])
def test_a_load_that_fails_leaves_nothing(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    copy = tmp_path / "copy.gguf"
    shutil.copyfile(tiny, copy)
    memory = least_memory(copy, **OPTIONS)
    before = left_behind(copy, collect=True)
    if where == "context":
        really = llama_cpp.llama_init_from_model
        monkeypatch.setattr(
            llama_cpp,
            "llama_init_from_model",
            lambda model, params: None if params.cb_eval else really(model, params),
        )
    elif where == "measure":
        monkeypatch.setattr(
            disk, "disk_bandwidth", Mock(side_effect=ModelError("x: cannot be read: Input/output error"))
        )
    else:
        monkeypatch.setattr(LinuxStore, where, Mock(side_effect=OSError(12, "Cannot allocate memory")))
    says = {"context": "no context of", "measure": "cannot be read: Input/output error"}.get(
        where, "cannot be streamed"
    )
    with pytest.raises(ModelError, match=says):
        load(str(copy), memory=memory, **OPTIONS)
    assert left_behind(copy) == before


def check_that_nothing_grows(passes: Callable[[int], None], first: int, more: int, most: int) -> None:
    """Passes leave no threads, no open files, no mappings and no memory but so many bytes."""

    def taken() -> tuple[int, int, int]:
        entries = len(Path("/proc/self/maps").read_text(encoding="utf-8").splitlines())
        return threading.active_count(), len(os.listdir("/proc/self/fd")), entries

    def held() -> int:
        return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * resource.getpagesize()

    passes(first)
    before, memory = taken(), held()
    passes(more)
    after = taken()
    assert after[:2] == before[:2]
    assert after[2] <= before[2] + 3
    assert held() - memory < most


@linux_only
def test_hundreds_of_passes_do_not_grow(fresh: LlamaBackend) -> None:
    session, one, root = fresh.open(), np.array([5], np.int32), np.array([-1], np.int32)
    prefill(fresh, session, [1, 2, 3])

    def passes(count: int) -> None:
        for number in range(count):
            session.rewind(3)
            fresh.forward([Work(session, one + number % 200, root, root[:0])])
        deadline = time.monotonic() + 10  # until the ring is at rest
        while len(fresh.streamer._shown) < fresh.streamer.plan.slots:  # type: ignore[union-attr]
            assert time.monotonic() < deadline
            time.sleep(0.002)

    check_that_nothing_grows(passes, 30, 200, 6 * MIB)


# --- memory and the command line ---------------------------------------------------------------------------------


def test_the_least_memory_named_works_and_less_does_not(tiny: Path) -> None:
    least = least_memory(tiny, **OPTIONS)
    backend = load(str(tiny), memory=least, **OPTIONS)
    plan = backend.streamer.plan
    assert plan.pinned_bytes + plan.slots * plan.slot_bytes + plan.needed <= least
    backend.close()
    with pytest.raises(UsageError, match="are too little for this model: it needs at least"):
        load(str(tiny), memory=least - 2 * MIB, **OPTIONS)


def has(monkeypatch: pytest.MonkeyPatch, **facts: Any) -> None:
    monkeypatch.setattr(loader_module, "this_machine", lambda *looked: replace(this_machine(*looked), **facts))


def test_enough_memory_means_no_plan_and_no_callback(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    callbacks = []
    really = llama_cpp.llama_init_from_model
    monkeypatch.setattr(
        llama_cpp,
        "llama_init_from_model",
        lambda model, params: (callbacks.append(bool(params.cb_eval)), really(model, params))[1],
    )
    has(monkeypatch, free=8 << 30)
    backend = load(str(tiny), memory=4 << 30, **OPTIONS)
    assert backend.streamer is None
    assert backend.notes == []
    assert backend.wait_seconds == 0
    assert not any(callbacks)
    backend.close()


def test_a_plan_for_another_machine(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is loaded, and what is free here does not matter."""
    monkeypatch.setattr(llamacpp_engine, "without_amx", lambda info: False)  # which may not repack
    least = least_memory(str(tiny), **OPTIONS)
    rich = machine(64 << 30, 64 << 30)
    poor = replace(rich, memory=1 << 30, free=int((least + MIB) / (1 - SAFETY)))
    plans = [engine.plan(str(tiny), LoadOptions(**OPTIONS), machine) for machine in (rich, poor)]
    assert [plan.weights is None for plan in plans] == [True, False]
    assert [plan.fills_memory for plan in plans] == [False, True]
    assert plans[1].weights.streamed
    assert plans[1].ways == plans[0].ways[-1:]


def machine(memory: int, free: int) -> Machine:
    return Machine(platform="linux", cores=8, memory=memory, free=free)


MUCH: dict[str, Any] = {"context_length": 1 << 24, "sessions": 200}
MUCH_SAYS = "context of 16777216 tokens for 200 texts at once: it needs at least"


@pytest.mark.parametrize(
    ("options", "free", "says"),
    [
        ({"context_length": 1 << 20}, 3 << 30, r"needs (at least )?[0-9.]+ GiB"),
        ({"context_length": 1 << 17, "sessions": 32}, 3 << 30, r"needs (at least )?[0-9.]+ GiB"),
        # The draft of a target on another engine is resident, and no plan of the target counts it.
        ({"context_length": 1 << 20, "resident": True}, 3 << 30, r"needs (at least )?[0-9.]+ GiB"),
        ({"context_length": 1 << 17, "sessions": 32, "resident": True}, 3 << 30, r"needs (at least )?[0-9.]+ GiB"),
        ({"context_length": 0, "resident": True}, 1 << 20, "a context of 2048 tokens needs"),
        (MUCH, 16 << 30, MUCH_SAYS),
        (MUCH | {"memory": 8 << 30}, 16 << 30, MUCH_SAYS),
    ],
)
def test_caches_that_memory_cannot_hold_are_refused_before_many_cells_are_made(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], free: int, says: str
) -> None:
    if says == MUCH_SAYS:
        monkeypatch.setattr(llama_cpp, "llama_init_from_model", lambda *_: pytest.fail("cells are made"))
    with pytest.raises(NoRoom, match=says):
        engine.plan(str(tiny), LoadOptions(**options), machine(64 << 30 if free > 4 << 30 else 4 << 30, free))


def test_caches_get_no_memory_that_the_program_holds(tiny: Path) -> None:
    options = LoadOptions(context_length=8192, resident=True)
    free = machine(8 << 30, 4 << 30)
    assert engine.plan(str(tiny), options, free).weights is None
    with pytest.raises(NoRoom, match="but 1 MiB are free"):
        engine.plan(str(tiny), options, replace(free, used=(4 << 30) - MIB))


def test_many_sessions_share_cells_where_each_cannot_have_a_whole_context(smollm2_tiny: Path) -> None:
    rich = machine(64 << 30, 64 << 30)
    plans = [
        engine.plan(str(smollm2_tiny), LoadOptions(context_length=8192, sessions=32), machine)
        for machine in (rich, replace(rich, free=5 << 29))
    ]
    assert [plan.size.share for plan in plans] == [1, SHARE]


def test_sequence_ids_of_cells_are_counted(smollm2_tiny: Path) -> None:
    """Each token of a text has a node in a map for each leaf of the widest tree."""
    few, many = (
        llamacpp_memory.memory_needs(str(smollm2_tiny), ContextSize(1 << 16, budget, 1, 512), this_machine())
        for budget in (32, 128)
    )
    assert many - few > 95 * (1 << 16) * 48


def test_more_memory_than_there_is_is_told(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, free=1 << 30)
    backend = load(str(tiny), memory=4 << 30, **OPTIONS)
    assert backend.notes == ["4.00 GiB of memory are asked for, but only 1.00 GiB are free"]
    backend.close()


@pytest.mark.parametrize("memory", [None, 4 << 30])
@pytest.mark.parametrize(("free", "told"), [(8 << 30, False), (100 * MIB, False), (10 * MIB, True)])
def test_where_nothing_can_be_streamed_a_model_larger_than_memory_is_told(
    tiny: Path, tiny_resident: LlamaBackend, monkeypatch: pytest.MonkeyPatch, memory: int | None, free: int, told: bool
) -> None:
    """As on Windows. With --memory it is always told: the limit cannot be kept."""
    size = tiny.stat().st_size
    assert 10 * MIB < size < 100 * MIB
    has(monkeypatch, free=free, platform="win32")
    backend = load(str(tiny), memory=memory, **OPTIONS)
    note = "streaming weights works on Linux and macOS; here the system's own paging does what it can"
    assert backend.notes == [note] * (told or memory is not None)
    assert backend.streamer is None
    backend.close()


@linux_only
def test_a_file_with_an_embedded_head_is_streamed(tmp_path: Path) -> None:
    """llama.cpp unmaps the head at the end of the file, and other memory may lie there."""
    path = write_with_head(tmp_path / "head.gguf")
    whole = load(str(path), resident=True, **OPTIONS)
    backend = load_streamed(path, MIB)
    assert {layer.index for layer in backend.streamer.plan.streamed} == set(range(4))  # type: ignore[union-attr]
    tokens = [1, 9, 12, 44, 100]
    np.testing.assert_array_equal(last_row(backend, tokens), last_row(whole, tokens))
    backend.close()
    whole.close()


def test_where_nothing_can_be_streamed_the_draft_counts(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = tiny.stat().st_size
    has(monkeypatch, free=size * 3 // 2, platform="win32")
    for beside, notes in (([], 0), ([str(tiny)], 1)):
        backend = load(str(tiny), draft_files=beside, **OPTIONS)
        assert len(backend.notes) == notes
        backend.close()


def test_a_draft_takes_its_part(tiny: Path, smollm2: Path) -> None:
    alone = least_memory(tiny, **OPTIONS)
    beside = least_memory(tiny, draft_files=[str(smollm2)], **OPTIONS)
    assert beside - alone > smollm2.stat().st_size + 4 * MIB  # caches and buffers


def test_a_cascades_draft_has_two_sessions_for_each_text(tiny: Path, smollm2: Path) -> None:
    plain, cascade = (
        llamacpp_memory.MemoryPlanner(str(tiny), LoadOptions(draft_files=(str(smollm2),), mixed=mixed), this_machine())
        for mixed in (False, True)
    )
    size = ContextSize(256, 16, 2, MIN_NODES, share=SHARE)
    assert plain._drafts(size) < cascade._drafts(size) == plain._drafts(replace(size, sessions=4))


def test_a_drafts_per_layer_embeddings_take_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row for each token is read of them; the system may take back the others."""
    tensors = [Tensor("blk.0.w", 0, 0, 5), Tensor("per_layer_token_embd.weight", 0, 5, 1000)]
    monkeypatch.setattr(llamacpp_memory, "loaded_tensors", lambda path: tensors)
    nothing = Buffers(0, 0, ())
    monkeypatch.setattr(llamacpp_memory, "rehearse", lambda path, sizes, free, target: (0, [nothing] * len(sizes)))
    monkeypatch.setattr(llamacpp_memory, "is_head", lambda path: False)
    planner = llamacpp_memory.MemoryPlanner("", LoadOptions(draft_files=("draft",)), this_machine())
    assert planner._drafts(ContextSize(64, 8, 1, MIN_NODES)) == 5


@pytest.mark.parametrize(
    ("free", "sessions", "line"),
    [
        (2 * MIB, 1, "2 MiB of memory are too little for a context of 1048576 tokens: it needs at least 48 MiB"),
        (9, 1, "no memory is free, which is too little for a context of 1048576 tokens: it needs at least 48 MiB"),
        (9, 3, "no memory is free, which is too little for a context of 1048576 tokens for 3 texts at once: it needs "
        "at least 144 MiB"),
    ],
)  # fmt: skip
def test_too_little_memory_for_a_context_is_one_line(tiny: Path, free: int, sessions: int, line: str) -> None:
    with pytest.raises(NoRoom, match=f"^{line} besides keys and values$"):
        llamacpp_memory.rehearse(str(tiny), [ContextSize(1 << 20, 16, sessions, MIN_NODES)], free)


def test_float32_caches_are_counted(small: Path, small_q4: Path) -> None:
    """A model in float32 has keys and values in float32: twice as large, and so counted."""
    rounded, exact = (
        [
            llamacpp_memory.memory_needs(str(path), ContextSize(length, 16, 1, MIN_NODES), this_machine())
            for length in (1024, 4096)
        ]
        for path in (small_q4, small)
    )
    cache = 3072 * 2 * 2 * 128 * 2  # keys and values of two layers, two bytes each
    assert rounded[1] - rounded[0] >= cache
    assert exact[1] - exact[0] >= rounded[1] - rounded[0] + cache


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("run hi --memory 1M", "1 MiB of memory are too little for this model: it needs at least "),
        ("run hi --memory abc", "memory: 'abc' is not a size: write for example 12G, 900M or 1.5GiB"),
        ("run hi --memory 0", "memory: '0' is not a size"),
        ("run hi --memory -5G", "memory: '-5G' is not a size"),
        ("serve --port 0 --ctx 1048576", "2.38 GiB of memory are too little for"),
        ("serve --port 0 --ctx 16777216 --parallel 32", "2.50 GiB of memory are too little for"),
    ],
)
def test_too_little_memory_is_one_line(
    run: Run, tiny: Path, monkeypatch: pytest.MonkeyPatch, command: str, says: str
) -> None:
    monkeypatch.setattr("edgespec.machine.memory.available_memory", lambda: 5 << 29)
    name, *options = command.split()
    code, out, err = run(name, str(tiny), *options)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"edgespec: {says}")


def test_run_tells_what_it_streams(run: Run, tiny: Path) -> None:
    options = ["-n", "8", "--ctx", "256", "--budget", "8", "--raw", "--threads", "1", "--seed", "1"]
    arguments = ["run", str(tiny), "hi", *options]
    plain = run(*arguments)
    least = least_memory(tiny, context_length=256, budget=8)
    code, out, err = run(*arguments, "--memory", f"{least // MIB}M")
    assert code == plain[0] == 0
    assert out == plain[1] != ""
    lines = err.removeprefix(f"{TRYING}\n").splitlines()
    assert lines.pop(0).startswith("llamacpp: ")
    assert re.fullmatch(
        r"model of \d+ MiB in \d+ MiB of memory: \d+ MiB stays, \d+ MiB \(from \d of 6 layers\) is read from disk "
        r"in every pass, about [\d.]+ s at [\d.]+ GB/s, 0 MiB of embeddings row by row; "
        r"\d+ MiB locked in memory(, \d+ MiB kept in the page cache.*)?",
        lines[0],
    )
    assert "in every pass" not in plain[2]
    roomy = run(*arguments, "--memory", "3G")
    assert roomy[:2] == plain[:2]
    assert "in every pass" not in roomy[2]


def test_run_warns_of_a_slow_disk_before_it_starts(tiny: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    least = least_memory(tiny, context_length=256, budget=8)
    arguments = ["run", str(tiny), "hi", "-n", "2", "--ctx", "256", "--budget", "8", "--memory", f"{least // MIB}M"]
    monkeypatch.setattr(disk, "disk_bandwidth", lambda path, seconds, ranges: 1e6)
    code, _, err = run(*arguments)
    assert code == 0
    lines = err.removeprefix(f"{TRYING}\n").splitlines()
    assert lines.pop(0).startswith("llamacpp: ")
    found = re.search(r"in every pass, about (\d+) s at 0\.0010 GB/s, ", lines[0])
    assert found
    told = re.match(
        r"slow: the disk allows (0\.\d+) tokens/s, more only with accepted draft tokens; a faster", lines[1]
    )
    assert float(told[1]) == pytest.approx(1 / int(found[1]), rel=0.1)
    monkeypatch.setattr(disk, "disk_bandwidth", lambda path, seconds, ranges: 1e9)
    assert "the disk allows" not in run(*arguments)[2]


# --- an ordinary user --------------------------------------------------------------------------------------------

ORDINARY = """
import ctypes, re, resource, sys
from pathlib import Path
from edgespec.backends.llamacpp.engine import load
from edgespec.machine import memory as process
from edgespec.loop.passes import prefill
from edgespec.errors import UsageError
from edgespec.machine.memory import parse_size

process.private_memory = lambda: 0  # it grows with every load

def row(**options):
    backend = load(sys.argv[1], context_length=256, threads=1, budget=16, **options)
    session = backend.open()
    last = prefill(backend, session, [1, 9, 12, 44], want_last=True)
    print(backend.streamer is not None, *backend.notes)
    result = last[0].row(last[1]).tobytes()
    print(re.search(r"VmLck:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
    backend.close()
    return result

try:
    load(sys.argv[1], context_length=256, threads=1, budget=16, memory=1)
except UsageError as error:
    least = parse_size(re.search(r"at least ([\\d.]+ \\w+)", str(error))[1])
assert row(memory=least + (10 << 20)) == row(resident=True)
"""


@linux_only
def test_an_ordinary_user_streams_without_locking_and_is_told(smollm2: Path) -> None:
    user: list[str] = []
    if os.geteuid() == 0:
        if not shutil.which("setpriv"):
            pytest.skip("this is root, and there is no setpriv to become somebody else")
        user = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", "--inh-caps=-all"]
        probe = [
            *user,
            sys.executable,
            "-c",
            f"import edgespec.backends.llamacpp.backend; open({str(smollm2)!r}, 'rb')",
        ]
        if subprocess.run(probe, capture_output=True, check=False, timeout=60).returncode != 0:
            pytest.skip("another user may not read the model or run the interpreter")
    done = subprocess.run(
        [*user, sys.executable, "-c", ORDINARY, str(smollm2)], capture_output=True, text=True, timeout=120, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 16, 1 << 16)),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("True model of ")
    assert re.search(r"; 0 MiB locked in memory, \d+ MiB kept in the page cache; the limit .* is 0 MiB", lines[0])
    assert int(lines[1]) <= 64  # KiB
    assert lines[2] == "False"


def test_classes_are_found_before_weights_fill_the_memory(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The small model that is tried for them has contexts and logits of its own, which no plan knows."""
    order = list[str]()
    start = llamacpp_engine.start_streaming

    def fill(*arguments: Any) -> Any:
        order.append("fill")
        return start(*arguments)

    def probe(small: LlamaBackend) -> list[row_classes.TriedClass]:
        order.append("probe")
        assert small.streamer is None
        return [row_classes.TriedClass(least, most, True, True) for least, most in ((2, 63), (64, 128))]

    monkeypatch.setattr(llamacpp_engine, "start_streaming", fill)
    monkeypatch.setattr(row_classes, "probe", probe)
    monkeypatch.setattr(row_classes, "_known", {})
    monkeypatch.setattr("edgespec.machine.memory.private_memory", lambda: 0)
    entry = Entry(name="target", target=f"file:{tiny}", defaults=Defaults())
    for asked, expected in ((None, ["probe", "fill"]), ("off", ["fill"])):
        order.clear()
        memory = least_memory(str(tiny), **OPTIONS)
        options = LoadOptions(exact=asked, memory=memory, **OPTIONS)
        (backend,) = open_backends(entry, None, None, options, remember=False)
        assert backend.capabilities.streams
        backend.close()
        assert order == expected
