"""llama.cpp with a BLAS library, which would copy weights as float32 for passes of 32 rows and more.

The last test needs such a build in PYTHONPATH: see CONTRIBUTING.md for one.
"""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

from edgespec.backends.llamacpp.context import ContextSize
from edgespec.backends.llamacpp.engine import load
from edgespec.backends.llamacpp.ggml import files
from edgespec.backends.llamacpp.memory.planning import memory_needs

from edgespec.loop.backend import Work
from edgespec.machine.memory import private_memory
from edgespec.machine.this_machine import this_machine


def test_contexts_are_made_without_blas(monkeypatch: pytest.MonkeyPatch) -> None:
    devices, taken = {11: 1, 12: 3, 13: 0}, list[int]()  # address -> kind
    library = SimpleNamespace(
        ggml_backend_dev_count=lambda: len(devices), ggml_backend_dev_get=lambda i: [*devices][i],
        ggml_backend_dev_type=lambda device: devices[device], ggml_backend_dev_backend_reg=lambda device: 10 * device,
        ggml_backend_unload=taken.append,
    )  # fmt: skip
    monkeypatch.setattr(files, "ggml", lambda: library)
    files.leave_out_blas.__wrapped__()
    assert taken == [120]


def test_row_classes_of_other_builds_are_remembered_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a build with BLAS may have been found when it was used."""
    builds = set[str]()
    for names in ({"base", "cpu"}, {"base", "cpu", "blas"}, {"base", "cpu", "metal"}):
        monkeypatch.setattr(files, "compiled_backends", lambda names=names: names)
        builds.add(files.engine_build())
    assert len(builds) == 3


@pytest.mark.skipif("blas" not in files.compiled_backends(), reason="this llama.cpp has no BLAS")
def test_a_long_pass_takes_no_more_memory_than_is_planned(smollm2: Path, tmp_path: Path) -> None:
    """The output would be copied to half a GiB."""
    from benchmarks.made_up import Shape, write_made_up

    path, shape = str(tmp_path / "made-up.gguf"), Shape(1, 2048, 2048, 32, 8, vocab=65536)
    write_made_up(Path(path), shape, smollm2, lambda done, total: None)
    needed = memory_needs(path, ContextSize(256, 96, 1, 512), this_machine(path))
    backend = load(path, context_length=256, budget=96)
    session, nodes = backend.open(), np.arange(65, dtype=np.int32)
    backend.forward([Work(session, nodes + 5, nodes - 1, nodes)])[0].row(64)
    taken = private_memory()
    backend.close()
    assert taken <= needed
