"""Folders for MLX: a layer is one run of whole pages, and nothing about the model has changed."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("mlx_lm", reason="mlx-lm is not installed: pip install 'edgespec[mlx]'")

import mlx.core as mx
from edgespec.backends.mlx.loading import load_weights
from edgespec.backends.mlx.memory import find_layout
from mlx_models import FAMILIES, write_model

from edgespec.errors import ModelError
from edgespec.models.convert.layer_files import PAGE, write_layer_files
from edgespec.models.safetensors_header import read_safetensors_header


def all_weights(folder: Path) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        found |= {name: np.array(array.view(mx.uint8)) for name, array in mx.load(str(file)).items()}
    return found


@pytest.mark.parametrize("options", [{"bits": 4}, {"shards": 2, "dtype": mx.bfloat16}], ids=["4 bits", "two files"])
def test_every_layer_is_one_run_of_pages(tmp_path: Path, options: dict) -> None:
    folder = write_model(tmp_path / "model", FAMILIES["llama"] | {"num_hidden_layers": 12}, **options)
    before, told = all_weights(folder), []
    write_layer_files(folder, lambda done, total: told.append((done, total)))
    after = all_weights(folder)
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)
    assert told[-1][0] == told[-1][1] == sum(array.size for array in before.values())
    files = sorted(folder.glob("*.safetensors*"))
    assert [file.name for file in files] == [
        *(f"model-{i:05}-of-00013.safetensors" for i in range(1, 14)), "model.safetensors.index.json"
    ]  # fmt: skip
    index = json.loads(files[-1].read_text())["weight_map"]
    for number, file in enumerate(files[:-1]):
        header = read_safetensors_header(file)
        assert header[0].start % PAGE == 0
        assert all(index[tensor.name] == file.name for tensor in header)
        for one, two in pairwise(header):
            assert two.start == one.start + one.size
        assert all((f".layers.{number - 1}." in tensor.name) == (number > 0) for tensor in header)
    layout = find_layout(load_weights(folder), folder)  # mlx-lm takes every weight as it is
    assert (layout.others, layout.rebuilt) == ((), ())
    assert {base % PAGE for base in layout.bases} == {0}


def write(path: Path, header: bytes, data: bytes = b"") -> Path:
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return path


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{", "header is damaged"),
        (b"[]", "header is damaged"),
        (b"[" * 100_000, "header is damaged"),
        (b'{"a": {"dtype": "F4", "shape": [2], "data_offsets": [4, 0]}}', "header is damaged"),
        (b'{"a": {"dtype": "F4", "shape": [2], "data_offsets": [-8, 0]}}', "header is damaged"),
        (b'{"a": {"dtype": "F4", "shape": [2], "data_offsets": [0, 0.5]}}', "header is damaged"),
        (b'{"a": {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}}', "header is damaged"),
        (b'{"a": 1}', "header is damaged"),
        (b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}', "header is damaged"),
        (b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}', "is cut off"),
    ],
)
def test_damaged_files(header: bytes, message: str, tmp_path: Path) -> None:
    file = write(tmp_path / "model.safetensors", header, b"1234")
    with pytest.raises(ModelError, match=message) as caught:
        read_safetensors_header(file)
    assert str(caught.value).startswith(f"{file}: ")


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"123")
    (tmp_path / "huge").write_bytes(b"\xff" * 20)
    for name, message in [("short", "damaged"), ("huge", "damaged"), ("nothing", "cannot be read")]:
        with pytest.raises(ModelError, match=message):
            read_safetensors_header(tmp_path / name)
