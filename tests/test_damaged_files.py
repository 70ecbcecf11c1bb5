"""GGUFs with bytes that are not what they were: one line for the user, never a traceback."""

import io
import re
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
from forked import forked
from gguf_writer import finish

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
from edgespec.backends.llamacpp.ggml.files import all_tensors
from edgespec.backends.llamacpp.vocab import load_vocab
from gguf_files import small_llama

from edgespec.cli.commands import main
from edgespec.errors import ModelError
from edgespec.models.convert.converter import convert_folder
from edgespec.models.convert.folder_from_gguf import read_gguf
from edgespec.models.gguf_header import architecture, tensor_names


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> bytes:
    return small_llama(tmp_path_factory.mktemp("whole") / "model.gguf", layers=1).read_bytes()


@pytest.fixture(autouse=True)
def no_input(monkeypatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO())


def run(path: Path, *more: str) -> int:
    """Exit code of edgespec."""
    try:
        main(arguments=["run", str(path), "--raw", "Hi", "-n", "2", "--exact", "off", *more])
    except SystemExit as stopped:
        return int(stopped.code or 0)
    return 0


@pytest.mark.parametrize(
    ("name", "more", "what"),
    [
        (b"blk.0.ffn_up.weight", ["--memory", "1G"], "a tensor's name is not UTF-8"),
        (b"{% for", [], "the chat template is not UTF-8"),
        (b"{% for", ["--memory", "1G"], "the chat template is not UTF-8"),
    ],
)
def test_a_name_or_template_that_is_no_utf_8_is_one_line(name, more, what, whole, tmp_path, capfd) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(whole.replace(name, b"\xcf" + name[1:]))
    assert run(path, *more) == 1
    said = capfd.readouterr().err.strip().splitlines()
    assert what in said[-1]


@pytest.mark.parametrize("more", [[], ["--memory", "1G"]])
@pytest.mark.parametrize("length", [4, 20, 30, 1000, 0.5])
def test_of_a_file_that_is_cut_in_its_header_llama_cpps_reason_is_shown(length, more, whole, tmp_path, capfd) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(whole)
    header = min(tensor.start for tensor in all_tensors(str(path)))
    path.write_bytes(whole[: length if length > 1 else int(length * header)])
    assert run(path, *more) == 1
    said = capfd.readouterr().err.strip().splitlines()
    assert len(said) == 1
    assert "gave no reason" not in said[0]


def test_lists_that_are_nested_too_deeply_are_one_line(tmp_path, capfd) -> None:
    path, key = tmp_path / "model.gguf", b"general.architecture"
    lists = 3000 * struct.pack("<IQ", 9, 1) + struct.pack("<IQ", 4, 0)
    path.write_bytes(
        struct.pack("<4sIQQQ", b"GGUF", 3, 0, 1, len(key)) + key + struct.pack("<I", 9) + lists
    )  # fmt: skip
    assert run(path) == 1
    assert "is damaged or cut off" in capfd.readouterr().err
    with pytest.raises(ModelError, match="is damaged or cut off"):
        read_gguf(path)


ARCHITECTURE = struct.pack("<Q20sIQ5s", 20, b"general.architecture", 8, 5, b"llama")
LIST = struct.pack("<Q1sI", 1, b"x", 9)


@pytest.mark.parametrize(
    ("tensors", "keys", "more"),
    [
        (0, 2**62, b""),
        (0, 70_000, b"".join(struct.pack("<Q6sIB", 6, b"%06d" % i, 0, 0) for i in range(70_000))),
        (2**40, 0, b""),
        (70_000, 0, b"".join(struct.pack("<Q6sIQIQ", 6, b"%06d" % i, 1, 1, 0, 0) for i in range(70_000))),
        (0, 1, LIST + struct.pack("<IQ", 8, 2**33)),
        (0, 1, LIST + struct.pack("<IQ", 0, 2**35)),
        (0, 1, LIST + struct.pack("<IQ", 9, 2**33)),
        (0, 1, struct.pack("<Q1sIQ", 1, b"x", 8, 2**35)),
        (0, 1, struct.pack("<Q", 2**35)),
    ],
    ids=["keys", "many keys", "tensors", "many tensors", "texts", "bytes", "lists", "a text", "a key"],
)
@pytest.mark.skipif(sys.platform == "win32", reason="gaps in a file take room on the disk")
def test_a_header_is_bounded_before_it_is_read(tensors, keys, more, tmp_path) -> None:
    """In a file of gigabytes of zeros, which takes no room on the disk."""
    path = tmp_path / "model.gguf"
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, tensors, keys + 1) + ARCHITECTURE + more)
    with path.open("r+b") as file:
        file.truncate(1 << 36)
    for read in (lambda path: architecture(path) and tensor_names(path), load_vocab, all_tensors, read_gguf):
        with pytest.raises(ModelError, match="is damaged or cut off"):
            read(path if read is read_gguf else str(path))


def test_two_equal_tokens_are_one_line(whole, tmp_path) -> None:
    """llama.cpp ends the process."""
    path = tmp_path / "model.gguf"
    first, second = (struct.pack("<Q", 1) + letter for letter in (b"a", b"b"))
    assert whole.count(first + second) == 1
    path.write_bytes(whole.replace(first + second, first + first))
    done = forked("run", str(path), "--raw", "Hi")
    assert done.returncode == 1
    assert re.fullmatch(r"edgespec: llama\.cpp cannot go on: GGML_ASSERT.*\n", done.stderr)


def test_a_converters_line_that_is_no_utf_8_is_shown(tmp_path) -> None:
    folder, script = tmp_path / "folder", tmp_path / "convert.py"
    folder.mkdir()
    script.write_text("import os\nos.write(2, b'what a name: \\xff\\n')\nraise SystemExit(1)")
    given = {"dtype": "float16", "script": script, "trust": False}
    with pytest.raises(ModelError, match="what a name"):
        convert_folder(folder, tmp_path / "out.gguf", **given, progress=lambda *_: None)


@pytest.mark.parametrize(
    ("name", "keys", "says"),
    [
        ("llama", {"general.type": "adapter"}, "is an adapter (LoRA), not a model that writes text: merge it"),
        ("x", {"general.type": "imatrix"}, "is an importance matrix, not a model that writes text: it is for"),
        ("clip", {"general.type": "mmproj"}, "is the image part of a model, not a model that writes text: name the"),
        ("clip", {}, "is the image part of a model"),
        ("controlvector", {}, "is a control vector"),
        ("t5", {}, "is a model with an encoder"),
        ("bert", {"bert.attention.causal": False}, "is a model of embeddings or of diffusion: edgespec runs"),
        ("llama", {"split.no": 1, "split.count": 3}, "is part 2 of 3 of a model: name the first part"),
        ("llama", {"split.count": 3}, "is one of 3 parts, but its name does not say so: rename the parts to"),
        ("nix", {}, "cannot be loaded: unknown model architecture: 'nix', to llama-cpp-python"),
        ("eagle3", {}, "is a head (EAGLE-3) for models with states of"),
    ],
)
def test_a_gguf_that_is_no_model_is_called_what_it_is(name, keys, says, tmp_path, capfd) -> None:
    path = tmp_path / "model.gguf"
    written(path, name, keys, tensors=1)
    assert run(path) == 1
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith(f"edgespec: {path}: {says}")
    if name in ("llama", "clip"):  # the checks of `run` stand before others, too
        for command in (
            ["models", path],
            ["convert", path, tmp_path / "o.gguf", "--quant", "Q4_0"],
            ["pair", path, path],
        ):
            with pytest.raises(SystemExit):
                main(arguments=[*map(str, command)])
            assert says in capfd.readouterr().err


def test_a_tokenizer_alone_is_no_model(tmp_path, capfd) -> None:
    written(tmp_path / "model.gguf", "llama", {}, tensors=0)
    assert run(tmp_path / "model.gguf") == 1
    assert "is a tokenizer without weights, not a model: name a file that has them" in capfd.readouterr().err


def written(path: Path, name: str, keys: dict[str, object], tensors: int) -> None:
    """A GGUF of an architecture with some keys, and tensors of four numbers."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, name)
    for key, value in keys.items():
        add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint16}[type(value)]
        add(key, value)
    for number in range(tensors):
        writer.add_tensor(f"blk.{number}.attn_norm.weight", np.zeros(4, np.float32))
    finish(writer)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.gguf", b"", "is not a GGUF file but empty: fetch or copy it again"),
        (
            "a.gguf",
            b"version https://git-lfs.github.com/spec/v1",
            "is not a GGUF file but a pointer of Git LFS: git lfs",
        ),
        ("a.gguf", b"<!DOCTYPE html>", "is not a GGUF file but a web page: fetch the file itself"),
        ("a.gguf", b"hello", "is not a GGUF file (it starts with b'hell')"),
        ("a.safetensors", b"hello", "is a part of a model folder: name the folder, with config.json in it"),
    ],
)
def test_what_is_no_gguf_is_called_what_it_is(name, content, says, tmp_path, capfd) -> None:
    (tmp_path / name).write_bytes(content)
    assert run(tmp_path / name) == 1
    assert f"{tmp_path / name}: {says}" in capfd.readouterr().err


def test_names_beside_a_file_that_is_not_there_are_named(whole, tmp_path, capfd) -> None:
    (tmp_path / "model.gguf").write_bytes(whole)
    assert run(tmp_path / "modle.gguf") == 1
    assert f"there is no such file; did you mean {tmp_path / 'model.gguf'}?" in capfd.readouterr().err
    assert run(tmp_path) == 1
    assert (
        f"so it is not a model folder: name a file in it, such as {tmp_path / 'model.gguf'}" in capfd.readouterr().err
    )
