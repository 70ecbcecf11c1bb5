"""llama.cpp with a BLAS library, which copies weights as float32 for passes of 32 rows and more.

The last test needs such a build: CMAKE_ARGS="-DGGML_BLAS=ON -DGGML_BLAS_VENDOR=OpenBLAS" as in CONTRIBUTING.md, and its
folder in PYTHONPATH.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

from edgespec.backends.llamacpp.context import ContextSize
from edgespec.backends.llamacpp.engine import load
from edgespec.backends.llamacpp.ggml import files
from edgespec.backends.llamacpp.memory import gpu, planning

from edgespec.loop.backend import Work
from edgespec.loop.engines import LoadOptions
from edgespec.machine.memory import private_memory
from edgespec.machine.this_machine import Gpu, this_machine
from edgespec.weights.plan import Tensor

F32, Q8_0 = 0, 8
SIZE = ContextSize(256, 96, 1, 512)


def matrix(name: str, weights: int, kind: int = Q8_0) -> Tensor:
    return Tensor(name, 0, 0, weights * 4 if kind == F32 else weights // 32 * 34, kind)


MODEL = [
    matrix("token_embd.weight", 6400), matrix("output.weight", 3200), matrix("output_norm.weight", 12800, F32),
    *(matrix(f"blk.{i}.ffn_up.weight", weights) for i, weights in enumerate((960, 640))),
    matrix("blk.0.ffn_up_exps.weight", 64000),
]  # fmt: skip


@pytest.mark.parametrize(
    ("gpu_layers", "output_here", "weights"),
    [(0, False, 3200), (1, False, 960), (2, False, 960), (2, True, 3200), (3, False, 0), (-1, False, 0)],
)
def test_the_largest_weight_of_the_processor_is_copied(
    gpu_layers: int, output_here: bool, weights: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not experts, nor the embedding, of which a token needs one row, nor what is float32."""
    monkeypatch.setattr(gpu, "compiled_backends", lambda: {"blas"})
    assert gpu.blas_copy(MODEL, gpu_layers, output_here) == 4 * weights


def test_a_plan_has_room_for_the_copies_of_target_and_draft(
    smollm2_tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(smollm2_tiny)
    machine = replace(this_machine(), gpus=(Gpu("Metal", True, 1 << 40),), platform="darwin", used=0)
    planner = planning.MemoryPlanner(path, LoadOptions(draft_files=(path,)), machine)
    layers = (0, 3, 8, -1)

    def needed() -> list[int]:
        return [planner._drafts(SIZE), *(planner.needs([SIZE], count)[0] for count in layers)]

    monkeypatch.setattr(gpu, "compiled_backends", lambda: {"cpu"})
    before, output = needed(), 4 * 4096 * 576
    monkeypatch.setattr(gpu, "compiled_backends", lambda: {"blas"})
    more = [after - usual for after, usual in zip(needed(), before, strict=True)]
    assert more == [output, output, output, 0, 0]  # in part on a Mac's GPU, the output stays here


def test_the_one_compute_buffer_counts_once(smollm2_tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """BLAS computes in the processor's, and llama.cpp logs it for both."""
    [usual] = planning.rehearse(str(smollm2_tiny), [SIZE], 1 << 60)[1]
    make = planning.make_context

    def make_context(*given):
        context = make(*given)
        planning.size_lines.extend([line for line in planning.size_lines if "compute buffer size" in line])
        return context

    monkeypatch.setattr(planning, "make_context", make_context)
    assert planning.rehearse(str(smollm2_tiny), [SIZE], 1 << 60)[1] == [usual]


def test_row_classes_of_a_build_with_blas_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    builds = set[str]()
    for names in ({"base", "cpu"}, {"base", "cpu", "blas"}, {"base", "cpu", "metal"}):
        monkeypatch.setattr(files, "compiled_backends", lambda names=names: names)
        builds.add(files.engine_build())
    assert len(builds) == 3


@pytest.mark.skipif("blas" not in files.compiled_backends(), reason="this llama.cpp has no BLAS")
def test_a_long_pass_takes_no_more_memory_than_is_planned(smollm2: Path, tmp_path: Path) -> None:
    from benchmarks.made_up import Shape, write_made_up

    path, shape = str(tmp_path / "made-up.gguf"), Shape(1, 2048, 2048, 32, 8, vocab=65536)
    write_made_up(Path(path), shape, smollm2, lambda done, total: None)
    needed = planning.memory_needs(path, SIZE, this_machine(path))
    backend = load(path, context_length=256, budget=96)
    session, nodes = backend.open(), np.arange(65, dtype=np.int32)
    backend.forward([Work(session, nodes + 5, nodes - 1, nodes)])[0].row(64)
    taken = private_memory()
    backend.close()
    assert taken <= needed
