"""Windows, as far as another system can show it: `as_on_windows.py` takes away what Windows lacks."""

import ast
import ctypes
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import platformdirs
import pytest
from as_on_windows import ROOT, Kernel32, no_replacing_of_open_files
from conftest import Run
from test_datastore import LetterVocab

from edgespec.cli.terminal import mark_pastes, open_streams
from edgespec.errors import MissingPackage, UsageError
from edgespec.loop.engines import LoadOptions, find_engine
from edgespec.machine import files, measurements
from edgespec.machine.system import read_into
from edgespec.machine.this_machine import this_machine
from edgespec.measure import doctor
from edgespec.planners.datastore import build, open_datastore
from edgespec.weights.ring import CANNOT_STREAM

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows shows it itself: make check-windows")

CHILD = [sys.executable, str(ROOT / "tests" / "as_on_windows.py")]
PATHS = os.pathsep.join(str(ROOT / name) for name in ("tests", "scripts"))


RUN = """
import sys
from contextlib import suppress
from edgespec.cli.commands import main
from edgespec.machine.system import read_buffer
print(len(read_buffer(5)))
for _ in range(2):
    with suppress(SystemExit):
        main(arguments={arguments})
"""


@pytest.mark.parametrize("left_out", ["torch|mlx|common|sparse", pytest.param("mlx", marks=pytest.mark.exhaustive)])
def test_all_imports_and_a_prompt_need_no_posix_system(tmp_path: Path, left_out: str) -> None:
    """Of the package and its engines, of scripts/install and the tests of `make check-windows`. A session goes on."""
    from reference.backend import random_model

    listed = re.search(r"^ON_WINDOWS := .*tests/test_,([\w\s\\]*)\)\)$", (ROOT / "Makefile").read_text("utf-8"), re.M)
    assert listed
    tests = [str(ROOT / "tests" / f"test_{name}.py") for name in listed[1].replace("\\", "").split()]
    assert len(tests) > 10
    random_model(2, vocab_size=258).save(str(tmp_path / "tiny.npz"))
    arguments = [
        "run",
        str(tmp_path / "tiny.npz"),
        "hello",
        "--backend",
        "reference",
        "--raw",
        "-n",
        "4",
        "--seed",
        "1",
    ]
    arguments += ["--resume", str(tmp_path / "talk.session"), "--json"]
    done = subprocess.run(
        [*CHILD, left_out, RUN.format(arguments=arguments), *tests], stdin=subprocess.DEVNULL, capture_output=True,
        encoding="utf-8", check=False, env={**os.environ, "PYTHONPATH": PATHS},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    failed, length, *answers = map(json.loads, done.stdout.splitlines()[-4:])
    assert (failed, length) == ({}, 5)
    assert [one["stats"]["cached_tokens"] > 0 for one in answers] == [False, True]


MIXTURE = """
import json, sys
from pathlib import Path
from edgespec.backends.llamacpp.engine import load
from edgespec.backends.llamacpp.memory import planning
from edgespec.loop.passes import prefill
from edgespec.machine.this_machine import this_machine
from edgespec.weights import experts
from edgespec.weights.plan import Pool
path, rows = {path!r}, []
for pooled in (False, True):
    if pooled:
        experts.most_pools = lambda layers, room: (Pool((0, 2), 9), Pool((1,), 8))
        planning.memory_of, planning.pool_reserve = (lambda layers, pools: 0), (lambda room: 0)
        Least = planning.ContextSize(512, 32, 1, planning.CHUNKS[0], "f16")
        memory = planning.memory_needs(path, Least, this_machine()) + Path(path).stat().st_size - (300 << 10)
        more = dict(memory=memory)
    else:
        more = dict(repack=False)
    with_ = load(path, context_length=512, threads=2, budget=32, kv_type="f16", **more)
    last = prefill(with_, with_.open(), list(range(1, 40)), want_last=True)
    rows.append(last[0].row(last[1]).tolist())
    read = with_.mixture.memory.bytes_read if pooled else 0
    with_.close()
print(json.dumps([sys.platform, rows[0] == rows[1], read > 0]))
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform != "linux", reason="its libraries have Linux's names")
def test_experts_are_read_as_they_are_chosen(tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    pytest.importorskip("gguf", reason="gguf is not installed: pip install 'edgespec[convert]'")
    from mixture_files import write_mixture

    path = write_mixture(tmp_path / "mixture.gguf", "gpt-oss")
    done = subprocess.run(
        [*CHILD, "torch|mlx|common|sparse", MIXTURE.format(path=str(path))], stdin=subprocess.DEVNULL,
        capture_output=True, encoding="utf-8", check=False, env={**os.environ, "PYTHONPATH": PATHS},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == ["win32", True, True]


@pytest.mark.parametrize("works", [True, False])
def test_reads_at_any_byte_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, works: bool) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(100)))
    monkeypatch.delattr(os, "preadv")
    monkeypatch.setattr(ctypes, "windll", SimpleNamespace(kernel32=Kernel32(works)), raising=False)
    monkeypatch.setitem(sys.modules, "msvcrt", SimpleNamespace(get_osfhandle=lambda descriptor: descriptor))
    first, second = bytearray(60), bytearray(60)
    with path.open("rb") as file:
        if not works:
            with pytest.raises(OSError, match="ReadFile: error 30"):
                read_into(file.fileno(), [first], 10)
            return
        assert read_into(file.fileno(), [first, second], 10) == 90
        assert read_into(file.fileno(), [second], 100) == 0
    assert first + second[:30] == bytes(range(10, 100))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells which files are open")
def test_files_are_replaced_once_they_are_closed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A measurement, a datastore; tests of sessions are among those of `make check-windows`."""
    monkeypatch.delenv(measurements.OFF)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    store = tmp_path / "text.store"
    with no_replacing_of_open_files():
        for number in range(2):
            assert measurements.remember({"kind": "test"}, number)
            assert measurements.recall({"kind": "test"}, int) == number
            build(store, ["some text"], LetterVocab())
        opened = open_datastore(store, LetterVocab())
        with pytest.raises(Exception, match=r"text\.store: cannot be written: "):
            build(store, ["other text"], LetterVocab())
    assert len(opened) > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["edgespec", "text.store"]


def test_doctor_measures_no_disk_that_nothing_is_streamed_from(
    run: Run, smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (doctor, import_module("edgespec.backends.llamacpp.memory.planning")):
        monkeypatch.setattr(module, "can_stream", lambda machine: False)
    monkeypatch.delattr(os, "preadv")
    code, out, _ = run("doctor", str(smollm2), "--backend", "llamacpp", "--ctx", "256", "--exact", "off", "--memory=1M")
    assert code == 0
    for line in (r"disk +not measured", r"plan +nothing is streamed: see the note", f"note +{CANNOT_STREAM}"):
        assert re.search(f"^{line}", out, re.M)


def test_borrowing_layers_is_refused_in_one_line(smollm2: Path) -> None:
    machine = replace(this_machine(), platform="win32")
    with pytest.raises(UsageError, match=r"^--lender \(lenders\) works on Linux and macOS only$"):
        find_engine("llamacpp").plan(str(smollm2), LoadOptions(lenders=("127.0.0.1:50052",)), machine)


def test_the_pip_command_can_be_pasted_into_powershell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "C:\\edgespec\\.venv\\Scripts\\python.exe")
    with monkeypatch.context() as windows:
        windows.setattr(os, "name", "nt")
        says = str(MissingPackage("huggingface_hub", "hub", "fetching"))
    assert says.endswith(": C:\\edgespec\\.venv\\Scripts\\python.exe -m pip install edgespec[hub]")


@pytest.mark.parametrize(("system", "written"), [("posix", "\x1b[?2004h"), ("nt", "")])
def test_a_console_of_windows_gets_no_mark_for_pastes(
    monkeypatch: pytest.MonkeyPatch, system: str, written: str
) -> None:
    texts = list[str]()
    terminal = SimpleNamespace(isatty=lambda: True, write=texts.append, flush=lambda: None)
    with monkeypatch.context() as other:
        other.setattr(sys, "stdout", terminal)
        other.delenv("TERM", raising=False)
        other.setattr(os, "name", system)
        mark_pastes(True)
    assert "".join(texts) == written


def test_xdg_folders_are_obeyed_where_platformdirs_ignores_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for kind, folder in (("cache", files.cache_folder), ("config", files.config_folder)):
        usual = tmp_path / "AppData" / kind
        monkeypatch.setattr(platformdirs, f"user_{kind}_path", lambda *_, usual=usual, **__: usual)
        monkeypatch.setenv(f"XDG_{kind.upper()}_HOME", str(tmp_path / "mine"))
        assert folder() == tmp_path / "mine" / "edgespec"
        monkeypatch.setenv(f"XDG_{kind.upper()}_HOME", "")
        assert folder() == usual


def test_the_size_of_a_part_is_known_where_blocks_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as windows:
        windows.setattr(Path, "stat", lambda path: SimpleNamespace(st_size=1000))
        assert files.size_on_disk(Path("model.edgespec-partial")) == 1000


@pytest.mark.parametrize("encoding", ["cp1252", "cp437"])
def test_a_console_without_a_character_shows_a_question_mark(run_child: Callable[..., bytes], encoding: str) -> None:
    shown = run_child(
        "from edgespec.cli.commands import main; from edgespec.cli.terminal import *\n"
        "open_streams(); show('│ ä → 語\\n')\n"
        "main(None, ['models', 'smollm2-135m']); main(None, ['run', '--help'])",
        PYTHONIOENCODING=encoding,
    )
    first, _, others = shown.partition(b"\n")
    assert first.split() == [text.encode(encoding, "replace") for text in ("│", "ä", "→", "語")]
    assert b"smollm2-135m" in others
    assert b"Usage: " in others


@pytest.mark.parametrize(("terminal", "encoding"), [(False, "utf-8"), (True, "cp1252")])
def test_a_pipe_gets_utf8_in_every_locale(monkeypatch: pytest.MonkeyPatch, terminal: bool, encoding: str) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="cp1252")
    monkeypatch.setattr(stream, "isatty", lambda: terminal, raising=False)
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.delenv("PYTHONIOENCODING", raising=False)
    open_streams()
    assert (stream.encoding, stream.errors) == (encoding, "replace")


@pytest.fixture
def run_child() -> Callable[..., bytes]:
    def call(script: str, **environment: str) -> bytes:
        command, known = [sys.executable, "-c", script], {**os.environ, **environment}
        return subprocess.run(command, stdout=subprocess.PIPE, env=known, check=True).stdout

    return call


def test_text_files_name_their_encoding() -> None:
    """Ruff's rule PLW1514 knows only paths whose type it sees."""
    unnamed = []
    for path in (*(ROOT / "edgespec").rglob("*.py"), *(ROOT / "backends").rglob("*.py"), *(ROOT / "scripts").iterdir()):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))) if path.is_file() else ():
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                values = len(node.args) + sum(word.arg == "encoding" for word in node.keywords)
                if values < {"read_text": 1, "write_text": 2}.get(node.func.attr, 0):
                    unnamed.append(f"{path}:{node.lineno}")
    assert unnamed == []
