"""scripts/make-mixture: the dense model's numbers, and nothing half-written."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
pytest.importorskip("gguf", reason="gguf is not installed: pip install 'edgespec[convert]'")

from conftest import quantised
from edgespec.backends.llamacpp.engine import load
from edgespec.backends.llamacpp.ggml.files import all_tensors
from edgespec.backends.llamacpp.memory.planning import find_expert_layers
from gguf_files import small_llama

from benchmarks.made_up_mixture import Experts, write_mixture
from edgespec.errors import EdgespecError, ModelError, UsageError
from edgespec.loop.backend import Work
from edgespec.models.gguf_header import own_values

Q8_0, Q4_K_M, F16 = 7, 15, 1
CHAIN = [5, 80, 33, 120, 7, 64]


def unseen(done: int, total: int) -> None:
    pass


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("dense")
    found = {kind: small_llama(folder / f"{kind}.gguf", layers=2, kind=kind) for kind in ("llama", "qwen2")}
    kinds = {"Q8_0": Q8_0, "Q4_K_M": Q4_K_M, "F16": F16}
    return found | {name: quantised(found["llama"], folder / f"{name}.gguf", kind) for name, kind in kinds.items()}


def routers(count: int) -> Any:
    """Random ones."""
    return lambda: np.random.default_rng(7).normal(size=(2, count, 256)).astype(np.float32)


def write(source: Path, out: Path) -> None:
    write_mixture(source, out, Experts(4, 2, 256), routers(4), unseen)


def rows(path: Path) -> Any:
    backend = load(str(path), context_length=64, budget=8, threads=1)
    nodes = np.arange(len(CHAIN), dtype=np.int32)
    logits = backend.forward([Work(backend.open(), np.array(CHAIN, np.int32), nodes - 1, nodes)])[0]
    found = np.stack([logits.row(node) for node in nodes.tolist()])
    backend.close()
    return found


@pytest.mark.parametrize(
    ("kind", "experts", "error"),
    [
        ("llama", Experts(4, 2, 1), 1e-3),
        ("llama", Experts(7, 3, 100), 1e-3),
        ("qwen2", Experts(4, 1, 511), 1e-3),
        ("F16", Experts(8, 8, 160), 0.02),
        ("Q8_0", Experts(8, 3, 160), 0.02),
        ("Q4_K_M", Experts(8, 6, 256), 0.02),
    ],
)
def test_its_numbers_are_the_dense_models(
    dense: dict[str, Path], tmp_path: Path, kind: str, experts: Experts, error: float
) -> None:
    out, told = tmp_path / "mixture.gguf", list[tuple[int, int]]()
    size = write_mixture(dense[kind], out, experts, routers(experts.count), lambda *done: told.append(done))
    assert size == out.stat().st_size > told[-1][0] == told[-1][1]
    assert [path.name for path in tmp_path.iterdir()] == ["mixture.gguf"]
    layers = find_expert_layers(str(out), all_tensors(str(out)))
    assert [layer.count for layer in layers] == [experts.count] * 2
    expected = rows(dense[kind])
    assert np.abs(rows(out) - expected).max() <= error * expected.std()


@pytest.mark.parametrize(
    ("kind", "experts"),
    [
        ("Q8_0", Experts(4, 5)),
        ("Q8_0", Experts(4, 0)),
        ("Q8_0", Experts(4, 2, 0)),
        ("Q8_0", Experts(4, 2, 512)),
        ("Q8_0", Experts(4, 2, 100)),
        ("Q4_K_M", Experts(4, 2, 160)),
    ],
)
def test_mixtures_that_cannot_be(dense: dict[str, Path], tmp_path: Path, kind: str, experts: Experts) -> None:
    """They are refused before a router is made."""
    with pytest.raises(UsageError, match=r"but must be|needs a multiple of"):
        write_mixture(dense[kind], tmp_path / "out.gguf", experts, pytest.fail, unseen)
    assert not list(tmp_path.iterdir())


def test_what_is_refused(dense: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out.gguf"
    write(dense["Q8_0"], out)
    with pytest.raises(UsageError, match="exists already"):
        write(dense["Q8_0"], out)
    with pytest.raises(EdgespecError, match="is no dense model of architecture qwen2 or llama"):
        write(out, tmp_path / "twice.gguf")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(EdgespecError, match="but only"):
        write(dense["Q8_0"], tmp_path / "large.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["out.gguf"]


def with_header(source: Path, out: Path, change: Any) -> Path:
    """A copy whose header was changed in place."""
    import gguf

    out.write_bytes(source.read_bytes())
    reader = gguf.GGUFReader(out, "r+")
    change(reader.fields)
    reader.data.flush()
    return out


def rename(key: str) -> Any:
    """Changes a header so that a key has an unknown name."""

    def change(fields: Any) -> None:
        fields[key].parts[1][-1] = ord("x")

    return change


def test_the_file_says_how_much_of_a_head_is_rotated(dense: dict[str, Path], tmp_path: Path) -> None:
    def half(fields: Any) -> None:
        fields["llama.rope.dimension_count"].parts[-1][0] = 32

    write(with_header(dense["Q8_0"], tmp_path / "in", half), tmp_path / "out.gguf")
    assert own_values(str(tmp_path / "out.gguf"))["rope.dimension_count"] == 32
    nothing = with_header(dense["Q8_0"], tmp_path / "in", rename("llama.rope.dimension_count"))
    write(nothing, tmp_path / "other.gguf")
    assert own_values(str(tmp_path / "other.gguf"))["rope.dimension_count"] == 64


def test_a_model_in_parts(dense: dict[str, Path], tmp_path: Path) -> None:
    small_llama(tmp_path / "parts.gguf", layers=2, split=8)
    parts = sorted(tmp_path.glob("parts-*"))
    assert len(parts) > 1
    for source, name in ((parts[1], "of-parts"), (dense["llama"], "whole")):
        write(source, tmp_path / name)
    assert np.array_equal(rows(tmp_path / "of-parts"), rows(tmp_path / "whole"))
    parts[0].unlink()
    with pytest.raises(ModelError, match="there is no such file"):
        write(parts[1], tmp_path / "again")


def test_damaged_headers(dense: dict[str, Path], tmp_path: Path) -> None:
    """One line, and no file."""
    source = tmp_path / "in"
    for part in (0.02, 0.5, 0.99):
        source.write_bytes(dense["Q8_0"].read_bytes()[: int(part * dense["Q8_0"].stat().st_size)])
        with pytest.raises(ModelError, match="is damaged or cut off") as caught:
            write(source, tmp_path / "out")
        assert "\n" not in str(caught.value)
    for key, message in (
        ("attention.head_count", r"llama.attention.head_count is None, but must be one number"),
        ("embedding_length", r"has no llama.embedding_length"),
    ):
        with_header(dense["Q8_0"], source, rename(f"llama.{key}"))
        with pytest.raises(ModelError, match=message):
            write(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    as_many = rename("llama.attention.head_count_kv")
    write(with_header(dense["Q8_0"], source, as_many), tmp_path / "out")
