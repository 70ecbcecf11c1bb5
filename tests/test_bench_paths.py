"""scripts/bench-paths: seconds by paths and depth."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from edgespec.backends.reference.backend import ReferenceBackend, random_model

from benchmarks.paths import Shape, measure, shapes, table

SCRIPT = Path(__file__).parent.parent / "scripts" / "bench-paths"


def test_shapes_are_trees() -> None:
    assert Shape(1, 0).parents.tolist() == [-1]
    assert Shape(1, 3).parents.tolist() == [-1, 0, 1, 2]
    assert Shape(3, 2).parents.tolist() == [-1, 0, 1, 0, 3, 0, 5]
    assert shapes([1, 2], [4]) == [Shape(1, 0), Shape(1, 4), Shape(2, 4)]


def test_every_shape_that_there_are_paths_for_is_timed() -> None:
    few = ReferenceBackend(random_model(1, vocab_size=48, layers=2, recurrent=True), max_leaves=2)
    many = ReferenceBackend(random_model(1, vocab_size=48, layers=2, recurrent=True), max_leaves=4)
    tried = shapes([1, 2, 4], [1, 3])
    found = measure({"few": few, "many": many}, tried, accepted=1, rounds=2)
    assert list(found["many"]) == tried
    assert list(found["few"]) == [shape for shape in tried if shape.paths <= 2]
    assert all(seconds > 0 for times in found.values() for seconds in times.values())
    assert few.open_sessions == 0


def test_the_table() -> None:
    found = {Shape(1, 0): 2.0, Shape(1, 4): 2.2, Shape(2, 4): 3.0}
    assert table(found)[0] == "plain 2.000 s"
    assert [line.split() for line in table(found)[2:]] == [
        ["1", "2.200", "s", "(1.10", "x)"],
        ["2", "3.000", "s", "(1.50", "x)"],
    ]


def test_the_command(tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    from hybrid_files import write_hybrid

    path = write_hybrid(tmp_path / "tiny.gguf", "lfm2")
    options = ["--paths", "1,2", "--depths", "2", "--rounds", "1", "--json"]
    done = subprocess.run([sys.executable, SCRIPT, path, *options], capture_output=True, text=True, check=True)
    rows = json.loads(done.stdout)["passes"]
    assert [(row["paths"], row["depth"]) for row in rows] == [(1, 0), (1, 2), (2, 2)]
    wrong = subprocess.run([sys.executable, SCRIPT, path, "--paths", "x"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2
    assert "with commas" in wrong.stderr
