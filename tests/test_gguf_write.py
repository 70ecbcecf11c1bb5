"""GGUF files made of others: sizes as foretold, the same tokens, nothing left behind by what is refused or stopped."""

import ctypes
import json
import os
import re
import shutil
import signal
import sys
import tarfile
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked import RUN, Forked

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
pytest.importorskip("gguf", reason="gguf is not installed: pip install 'edgespec[convert]'")

import gguf
from conftest import Run
from edgespec.backends.llamacpp.tools import imatrix as imatrix_module
from edgespec.backends.llamacpp.tools.quantise import read_imatrix
from gguf_files import VOCAB, byte_level_vocab, small_llama
from gguf_writer import Reader, add, finish
from head_files import write_step35

from edgespec.errors import EdgespecError, MissingPackage, ModelError, UsageError
from edgespec.loop.engines import load_vocab
from edgespec.models.convert import gguf_write
from edgespec.models.convert.converter import SCRIPT, convert_folder, count_weights, extract, find_converter
from edgespec.models.convert.folder_from_gguf import appearing, read_gguf
from edgespec.models.convert.gguf_write import PURPOSES, Recipe, merge, parse_layers, quantise


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers in float32, made up."""
    return small_llama(tmp_path_factory.mktemp("floats") / "f32.gguf")


@pytest.fixture(autouse=True)
def _short_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_write, "CHUNKS", 1)


def tensor_bytes(path: Path) -> int:
    """As they lie in the file."""
    reader = Reader(path)
    return int(path.stat().st_size - reader.data_offset)


def types(path: Path) -> dict[str, str]:
    return {tensor.name: tensor.tensor_type.name for tensor in Reader(path).tensors}


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize(
    "recipe",
    [
        Recipe("Q8_0"),
        Recipe("Q4_K_M"),
        Recipe("Q4_0", (("attn_v", "q8_0"), ("^token_embd", "q6_K"))),
        Recipe("Q4_0", imatrix="auto"),
        Recipe(drop=(1, 2)),
        Recipe("Q4_0", drop=(0, 3)),
    ],
    ids=lambda recipe: f"{recipe.type}{recipe.imatrix}{recipe.drop}",
)
def test_sizes_are_as_foretold_and_token_ids_the_same(floats: Path, tmp_path: Path, recipe: Recipe) -> None:
    out = tmp_path / "out.gguf"
    foretold = quantise(floats, out, recipe, rehearse=True)
    assert not list(tmp_path.iterdir())
    written = quantise(floats, out, recipe)
    assert foretold.bytes == written.bytes == tensor_bytes(out)
    assert written.file_bytes == out.stat().st_size
    assert [file.name for file in tmp_path.iterdir()] == ["out.gguf"]
    source, copy = read_gguf(floats), read_gguf(out)
    assert copy.metadata["llama.block_count"] == 4 - len(recipe.drop)
    assert copy.metadata["general.quantized_by"].startswith("edgespec")
    assert ("quantize.imatrix.file" in copy.metadata) == (recipe.imatrix == "auto")
    for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.chat_template"):
        assert source.metadata[key] == copy.metadata[key]


@pytest.mark.usefixtures("in_this_process")
def test_types_are_those_asked_for(floats: Path, tmp_path: Path) -> None:
    quantise(floats, tmp_path / "a.gguf", Recipe("Q4_0", (("blk.1.attn_v", "q8_0"), ("attn_v", "q5_0"))))
    found = types(tmp_path / "a.gguf")
    assert [found[f"blk.{i}.attn_v.weight"] for i in range(4)] == ["Q5_0", "Q8_0", "Q5_0", "Q5_0"]
    assert found["blk.0.ffn_up.weight"] == "Q4_0"


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("recipe", [Recipe("IQ3_XS"), Recipe("Q4_0", (("ffn_up", "iq3_xxs"),))], ids=["file", "tensor"])
def test_a_type_that_needs_a_matrix_gets_one(tmp_path: Path, recipe: Recipe) -> None:
    floats = small_llama(tmp_path / "f32.gguf", layers=1)
    written = quantise(floats, tmp_path / "a.gguf", recipe)
    assert written == quantise(floats, tmp_path / "b.gguf", replace(recipe, imatrix="auto"))
    assert "quantize.imatrix.file" in read_gguf(tmp_path / "a.gguf").metadata
    with pytest.raises(UsageError, match=r"(?i)^IQ3_XX?S is garbage without an importance matrix"):
        quantise(floats, tmp_path / "c.gguf", replace(recipe, imatrix="none"))


@pytest.mark.usefixtures("in_this_process")
def test_a_head_is_spared_low_types_since_no_matrix_has_it(tmp_path: Path) -> None:
    source, out = write_step35(tmp_path / "a.gguf"), tmp_path / "b.gguf"  # three layers and three heads
    recipe = Recipe("Q4_0", (("attn_v", "q8_0"), ("attn", "iq3_xxs"), ("ffn_up", "q5_0")))
    foretold = quantise(source, out, recipe, rehearse=True)
    assert foretold.bytes == quantise(source, out, recipe).bytes == tensor_bytes(out)
    found = types(out)
    assert [found[f"blk.{i}.attn_q.weight"] for i in range(6)] == 3 * ["IQ3_XXS"] + 3 * ["Q6_K"]
    for name, kind in ("attn_v", "Q8_0"), ("ffn_up", "Q5_0"), ("ffn_down", "Q4_0"):  # none of these needs a matrix
        assert {found[f"blk.{i}.{name}.weight"] for i in range(6)} == {kind}


def test_heads_are_found_by_their_new_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As llama.cpp knows them when layers are left out."""
    writer, jobs = gguf.GGUFWriter(tmp_path / "a.gguf", "llama"), list[dict[str, Any]]()
    writer.add_block_count(6)
    writer.add_uint32("llama.nextn_predict_layers", 2)
    writer.add_tensor("blk.5.attn_norm.weight", np.zeros(4, np.float32))
    finish(writer)
    monkeypatch.setattr(gguf_write, "_child", lambda name, job, say: jobs.append(job) or {"tensors": {}, "bytes": 0})
    for name in ("IQ2_M", "Q4_0"):
        quantise(tmp_path / "a.gguf", tmp_path / "b.gguf", Recipe(name, drop=(1, 2)), rehearse=True)
    assert [job["types"] for job in jobs] == [[(r"^blk\.2\.", "q6_K"), (r"^blk\.3\.", "q6_K")], []]


@pytest.mark.usefixtures("in_this_process")
def test_dropped_layers_are_those_named(floats: Path, tmp_path: Path) -> None:
    quantise(floats, tmp_path / "a.gguf", Recipe(drop=(1,)))
    source, copy = (
        {tensor.name: tensor.data for tensor in Reader(path).tensors} for path in (floats, tmp_path / "a.gguf")
    )
    for new, old in ((0, 0), (1, 2), (2, 3)):
        name = "attn_q.weight"
        assert np.array_equal(copy[f"blk.{new}.{name}"], source[f"blk.{old}.{name}"])
    assert "blk.3.attn_q.weight" not in copy


@pytest.mark.usefixtures("in_this_process")
def test_an_importance_matrix_makes_a_difference_and_can_be_kept(floats: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("def main() -> int:\n    return 1\n\n" * 200)
    matrix = tmp_path / "a.imatrix"
    job = {"source": str(floats), "out": str(matrix), "text": str(text), "chunks": 1}
    imatrix_module.work(job, lambda line: None)
    found = read_imatrix(str(matrix))
    assert len(found) == 4 * 7  # all weights of the layers, those of the last included
    assert all((values > 0).any() and np.isfinite(values).all() for values in found.values())
    for name, asked in (("plain", "none"), ("text", str(text)), ("matrix", str(matrix))):
        quantise(floats, tmp_path / f"{name}.gguf", Recipe("Q4_0", (("ffn_down", "q4_0"),), imatrix=asked))
    weights = [
        next(t.data for t in Reader(tmp_path / f"{name}.gguf").tensors if t.name == "blk.2.ffn_up.weight")
        for name in ("plain", "text", "matrix")
    ]
    assert not np.array_equal(weights[0], weights[1])
    assert np.array_equal(weights[1], weights[2])


def test_the_matrix_is_the_mean_square_of_inputs(floats: Path, tmp_path: Path) -> None:
    """Of the first layer, whose input is the embedding's norm: computed again from the file alone."""
    reader = {tensor.name: tensor for tensor in Reader(floats).tensors}
    ids = np.arange(imatrix_module.TOKENS) % 256
    collector = imatrix_module.collect(str(floats), ids.tolist(), lambda line: None)
    rows = gguf.dequantize(reader["token_embd.weight"].data, reader["token_embd.weight"].tensor_type)[ids]
    normed = rows / np.sqrt((rows**2).mean(1, keepdims=True) + 1e-5) * reader["blk.0.attn_norm.weight"].data
    found = collector.sums["blk.0.attn_q.weight"][0] / collector.counts["blk.0.attn_q.weight"][0]
    assert np.allclose(found, (normed**2).mean(0), rtol=1e-2)


def test_the_inputs_are_in_memory_also_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_model(path: str, *, devices: Any, **options: Any) -> None:
        raise ModelError(f"first device: {ctypes.c_void_p.from_address(devices.value).value}")

    monkeypatch.setattr(imatrix_module, "load_model", load_model)
    with pytest.raises(ModelError, match="first device: None"):
        imatrix_module.collect("model.gguf", [], lambda line: None)


def write_latent_attention(path: Path) -> Path:
    """A made-up DeepSeek 2 without experts; attn_k_b and attn_v_b have a matrix for each head."""
    width, heads, rank, plain, turned, values = 128, 4, 32, 32, 32, 64
    writer, rng = gguf.GGUFWriter(path, "deepseek2"), np.random.default_rng(0)
    add(
        writer,
        block_count=2,
        leading_dense_block_count=2,
        context_length=2048,
        embedding_length=width,
        feed_forward_length=2 * width,
        expert_feed_forward_length=width,
        expert_count=0,
        expert_shared_count=0,
        head_count=heads,
        head_count_kv=1,
        q_lora_rank=64,
        kv_lora_rank=rank,
        key_length=rank + turned,
        value_length=rank,
        key_length_mla=plain + turned,
        value_length_mla=values,
        rope_dimension_count=turned,
        layer_norm_rms_eps=1e-5,
        file_type=0,
    )
    byte_level_vocab(writer)
    shapes = {"token_embd": (VOCAB, width), "output": (VOCAB, width), "output_norm": (width,)}
    for layer in range(2):
        of_layer = {
            "attn_norm": (width,), "attn_q_a_norm": (64,), "attn_kv_a_norm": (rank,), "ffn_norm": (width,),
            "attn_q_a": (64, width), "attn_q_b": (heads * (plain + turned), 64),
            "attn_kv_a_mqa": (rank + turned, width),
            "attn_k_b": (heads, rank, plain), "attn_v_b": (heads, values, rank), "attn_output": (width, heads * values),
            "ffn_gate": (2 * width, width), "ffn_up": (2 * width, width), "ffn_down": (width, 2 * width),
        }  # fmt: skip
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in of_layer.items()}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", rng.normal(0, 0.1, shape).astype(np.float32))
    finish(writer)
    return path


@pytest.mark.usefixtures("in_this_process")
def test_each_heads_matrix_has_sums_of_its_own(tmp_path: Path) -> None:
    path = write_latent_attention(tmp_path / "f32.gguf")
    collector = imatrix_module.collect(str(path), [*range(256)] * 2, lambda line: None)
    for name, columns in (("k", 32), ("v", 32)):
        sums, counts = (found[f"blk.1.attn_{name}_b.weight"] for found in (collector.sums, collector.counts))
        assert sums.shape == (4, columns)
        assert counts.tolist() == [imatrix_module.TOKENS] * 4
        assert len({*sums[:, 0]}) == 4
    quantise(path, tmp_path / "out.gguf", Recipe("Q4_0", imatrix="auto"))
    assert types(tmp_path / "out.gguf")["blk.0.attn_k_b.weight"] == "Q4_0"


def test_experts_are_counted_apart() -> None:
    collector = imatrix_module.Collector()
    collector._add("a", 2, np.array([1]), np.array([[4.0, 9.0]]), 1)
    collector._add("a", 2, np.array([1]), np.array([[0.0, 1.0]]), 3)
    assert collector.sums["a"].tolist() == [[0, 0], [4, 10]]
    assert collector.counts["a"].tolist() == [0, 4]


@pytest.mark.parametrize(
    ("recipe", "error", "says"),
    [
        (Recipe("Q9"), UsageError, "there is no type 'Q9'"),
        (Recipe(), UsageError, "nothing to do"),
        (Recipe("IQ2_M", imatrix="none"), UsageError, "IQ2_M is garbage without an importance matrix"),
        (Recipe("Q4_0", imatrix="missing.txt"), UsageError, "missing.txt: there is no such file"),
        (Recipe("Q4_0", (("attn_v", "q99"),)), UsageError, "there is no type 'q99' of a tensor"),
        (Recipe("Q4_0", (("attn_v", "q8_1"),)), UsageError, "there is no type 'q8_1' of a tensor"),
        (Recipe("Q4_0", (("attn_v", "i8"),)), UsageError, "there is no type 'i8' of a tensor"),
        (Recipe("Q4_0", (("(", "q8_0"),)), UsageError, "is not a regular expression"),
        (Recipe("Q4_0", (("attn_x", "q8_0"),)), UsageError, "no tensor's name matches 'attn_x'"),
        (Recipe(drop=(2, 4)), UsageError, "layer 4 is to be left out, but .* has the layers 0 to 3"),
        (Recipe(drop=(0, 1, 2, 3)), UsageError, "keep at least one"),
    ],
)
def test_what_is_refused_leaves_nothing(
    floats: Path, tmp_path: Path, recipe: Recipe, error: type[EdgespecError], says: str
) -> None:
    with pytest.raises(error, match=says) as caught:
        quantise(floats, tmp_path / "out.gguf", recipe)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("in_this_process")
def test_a_name_of_no_parts_is_a_name_like_others(floats: Path, tmp_path: Path) -> None:
    path = tmp_path / "a-00001-of-00000.gguf"
    path.write_bytes(floats.read_bytes())
    assert quantise(path, tmp_path / "out.gguf", Recipe("Q8_0"), rehearse=True).bytes
    assert len(read_gguf(path).tensors) == len(read_gguf(floats).tensors)


def test_a_file_that_is_cut_off_is_refused_before_work(floats: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(floats.read_bytes()[:-1000])
    with pytest.raises(ModelError, match=rf"^{re.escape(str(cut))}: is cut off: fetch"):
        quantise(cut, tmp_path / "out.gguf", Recipe("Q8_0"))
    assert os.listdir(tmp_path) == ["cut.gguf"]


@pytest.mark.usefixtures("in_this_process")
def test_what_is_quantised_already_is_refused(floats: Path, tmp_path: Path) -> None:
    once = tmp_path / "once.gguf"
    quantise(floats, once, Recipe("Q8_0"))
    with pytest.raises(ModelError, match=r"is quantised already \(Q8_0\)"):
        quantise(once, tmp_path / "out.gguf", Recipe("Q4_0"))
    quantise(once, tmp_path / "again.gguf", Recipe("Q4_0"), requantise=True)
    quantise(once, tmp_path / "fewer.gguf", Recipe(drop=(1,)))  # weights stay as they are
    assert types(tmp_path / "again.gguf")["blk.0.ffn_up.weight"] == "Q4_0"
    assert types(tmp_path / "fewer.gguf")["blk.0.ffn_up.weight"] == "Q8_0"


@pytest.mark.parametrize(
    ("layers", "key", "value", "says"),
    [
        (4, "attention.sliding_window", 512, "its layers are not alike"),
        (4, "attention.head_count_kv", [1, 2, 3, 4], "its layers are not alike"),
        (4, "ssm.inner_size", 3, "its layers are not alike"),
        (4, "nothing", 5, ""),
        ("four", "nothing", 5, "is damaged: block_count is 'four', but must be a whole number from 1 to 512"),
    ],
)
def test_layers_of_which_none_can_be_left_out(
    tmp_path: Path, layers: int | str, key: str, value: int | list[int], says: str
) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    for name, one in (("block_count", layers), (key, value)):
        add_one = {int: writer.add_uint32, str: writer.add_string, list: writer.add_array}[type(one)]
        add_one(f"llama.{name}", one)  # type: ignore[operator]
    finish(writer)
    with pytest.raises(ModelError, match=says) if says else nullcontext():
        gguf_write.check_drop(tmp_path / "a.gguf", (1,))


def test_modules_in_the_folder_of_the_user_are_not_run(
    floats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "numpy.py").write_text("raise SystemExit('must not run')")
    monkeypatch.chdir(tmp_path)
    assert quantise(floats, tmp_path / "out.gguf", Recipe("Q8_0"), rehearse=True).bytes


@pytest.mark.usefixtures("in_this_process")
def test_a_disk_that_becomes_full_is_the_reason(floats: Path, tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")  # not on Windows
    whole, usual = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, whole[1]))
        with pytest.raises(ModelError, match="the result cannot be written: is there room on its disk"):
            quantise(floats, tmp_path / "out.gguf", Recipe("Q8_0"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, whole)
        signal.signal(signal.SIGXFSZ, usual)
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.usefixtures("in_this_process")
def test_no_room_and_no_matrix(floats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(EdgespecError, match=r"needs 0\.0 GB, but only 0\.0 GB are free"):
        quantise(floats, tmp_path / "out.gguf", Recipe("Q8_0"))
    monkeypatch.undo()
    with pytest.raises(ModelError, match="is a GGUF without an importance matrix"):
        quantise(floats, tmp_path / "out.gguf", Recipe("Q8_0", imatrix=str(floats)))
    (tmp_path / "short.txt").write_text("too short")
    with pytest.raises(ModelError, match=r"[/\\]short\.txt: has \d tokens, but .* needs at least 512"):
        quantise(floats, tmp_path / "out.gguf", Recipe("Q8_0", imatrix=str(tmp_path / "short.txt")))
    assert [file.name for file in tmp_path.iterdir()] == ["short.txt"]


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "killed"])
def test_what_is_stopped_leaves_nothing(
    smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    code = (
        "from pathlib import Path; from edgespec.models.convert.gguf_write import *\n"
        f"quantise(Path({str(smollm2)!r}), Path('out.gguf'), Recipe('IQ4_XS'), requantise=True,"
        " progress=lambda *what: print(*what, flush=True))"
    )
    monkeypatch.chdir(tmp_path)
    with Forked(program=code) as process:
        while process.stdout.readline().split()[1] != "3":
            pass
        assert len(list(tmp_path.iterdir())) == 1
        process.send_signal(number)
        process.wait()
    deadline = time.monotonic() + 30
    while list(tmp_path.iterdir()):  # its child sees that it has gone
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_what_the_system_ends_leaves_nothing(folder: Path, tmp_path: Path, name: str) -> None:
    number, seen = getattr(signal, name), tmp_path / "seen"
    seen.mkdir()
    (tmp_path / "stub.py").write_text(f"""
import os, sys, time
open(sys.argv[sys.argv.index("--outfile") + 1], "wb").close()
open(os.path.join({str(seen)!r}, str(os.getpid())), "w").close()
time.sleep(60)
""")
    command = ["convert", str(folder), str(tmp_path / "out.gguf"), "--to", "gguf"]
    heard = f"import signal; signal.signal({number}, signal.SIG_DFL); {RUN}"  # under nohup SIGHUP is ignored
    with Forked(*command, "--converter", str(tmp_path / "stub.py"), program=heard) as process:
        while not (found := list(seen.iterdir())):
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(number)
        assert process.wait() == 128 + number
    assert not list(tmp_path.glob(".*"))
    with pytest.raises(ProcessLookupError):
        os.kill(int(found[0].name), 0)


def test_brackets_in_a_name_are_no_pattern(tmp_path: Path) -> None:
    with appearing(tmp_path / "model [Q4].gguf") as partial:
        partial.write_bytes(b"x")
        partial.with_name(f"{partial.name}.floats.gguf").write_bytes(b"y")
    assert [file.name for file in tmp_path.iterdir()] == ["model [Q4].gguf"]


@pytest.mark.parametrize(("text", "layers"), [("14-16", (14, 15, 16)), ("3,7,10-11", (3, 7, 10, 11)), ("5", (5,))])
def test_layers(text: str, layers: tuple[int, ...]) -> None:
    assert parse_layers(text) == layers


@pytest.mark.parametrize(
    ("text", "says"),
    [
        *((text, "such as 14-21") for text in ("", "a", "3-1", "1,", "-1")),
        *((text, "no model has a layer") for text in ("512", "1-9999999999")),  # which take no memory
    ],
)
def test_no_layers(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        parse_layers(text)


def test_a_purpose_is_a_recipe_that_may_be_changed() -> None:
    assert merge("draft", Recipe()).imatrix == "auto"
    assert merge("draft", Recipe("Q8_0", imatrix="none")) == Recipe("Q8_0", imatrix="none", why=PURPOSES["draft"].why)
    first = ("attn_v", "q8_0")
    assert merge("streamed", Recipe(types=(first,))).types == (first, *PURPOSES["streamed"].types)


STUB = """
import sys
from pathlib import Path
folder, out = Path(sys.argv[1]), Path(sys.argv[sys.argv.index("--outfile") + 1])
out = out.with_name(out.name.format(ftype="bf16"))  # as in llama.cpp
print("INFO:hf-to-gguf:blk.0.attn_v.weight,  torch.bfloat16 --> BF16, shape = {1}", file=sys.stderr)
if (folder / "refuse").exists():
    print("NotImplementedError: BPE pre-tokenizer was not recognized", file=sys.stderr)
    sys.exit(1)
print("INFO:gguf.gguf_writer:Writing the following files:", file=sys.stderr)
print("\\rWriting:  12%|x | 1/8\\rWriting: 100%|xx| 8/8", file=sys.stderr)
out.write_bytes(b"GGUF" + " ".join(sorted(file.name for file in folder.iterdir())).encode())
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """As far as it is looked at before the converter."""
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text("{}")
    header = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    for name in ("model.safetensors", "consolidated.safetensors"):  # the same once more, which nobody reads
        (path / name).write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 4)
    (path / "modeling.py").write_text("raise SystemExit('must not run')")
    (tmp_path / "stub.py").write_text(STUB)
    return path


def test_programs_in_a_folder_are_left_out(folder: Path, tmp_path: Path) -> None:
    seen = list[tuple[str, int, int]]()
    options: dict[str, Any] = {"dtype": "bfloat16", "script": tmp_path / "stub.py"}
    convert_folder(folder, tmp_path / "a", **options, trust=False, progress=lambda *what: seen.append(what))
    assert (tmp_path / "a").read_bytes() == b"GGUFconfig.json consolidated.safetensors model.safetensors"
    assert seen == [("naming tensors", 1, 1), ("writing", 12, 100), ("writing", 100, 100)]
    convert_folder(folder, tmp_path / "b", **options, trust=True, progress=lambda *what: None)
    assert b"modeling.py" in (tmp_path / "b").read_bytes()


def test_a_folder_without_programs_needs_no_links(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows lets not every user make them."""
    monkeypatch.delattr(Path, "symlink_to")
    (folder / "modeling.py").unlink()
    script, out = tmp_path / "stub.py", tmp_path / "a"
    convert_folder(folder, out, dtype="bfloat16", script=script, trust=False, progress=lambda *what: None)
    assert out.read_bytes() == b"GGUFconfig.json consolidated.safetensors model.safetensors"


@pytest.mark.parametrize("name", ["out.gguf", "m-{ftype}.gguf", "m-{0}-}.gguf"])
def test_a_folder_by_the_command(run: Run, folder: Path, tmp_path: Path, name: str) -> None:
    out, no = str(tmp_path / name), str(tmp_path / "no.gguf")
    code, said, error = run("convert", str(folder), out, "--to", "gguf", "--converter", str(tmp_path / "stub.py"))
    assert code == 0, error
    assert f"{name}: 0.00 GB of bfloat16 weights" in said
    assert Path(out).is_file()
    said = run("convert", str(folder), no, "--to", "gguf", "--quant", "Q4_K_M", "--dry-run")[1]
    assert "about 0.00 GB as bfloat16, then about" in said
    assert not list(tmp_path.glob("*no.gguf*"))
    assert not list(tmp_path.glob(".*"))


def test_a_tensor_that_is_not_there_is_refused_before_the_weights_are_written(
    run: Run, folder: Path, tmp_path: Path
) -> None:
    script, out = tmp_path / "stub.py", tmp_path / "out.gguf"
    script.write_text(STUB.replace('print("\\rWriting', 'import time; time.sleep(60)\nprint("\\rWriting'))
    command = ["convert", str(folder), str(out), "--to", "gguf", "--quant", "Q4_0", "--converter", str(script)]
    status, _, err = run(*command, "--tensor-type", "nosuch=q8_0")
    assert status == 2
    assert err.splitlines()[-1] == "edgespec: no tensor's name matches 'nosuch'; one of them is blk.0.attn_v.weight"
    assert not list(tmp_path.glob("*.gguf*")) + list(tmp_path.glob(".*"))


@pytest.mark.parametrize("place", ["my--model", "models--owner--A-1.5B/snapshots/0123abc", "snapshots/0123abc"])
def test_a_model_is_called_as_its_folder_or_its_repository(folder: Path, tmp_path: Path, place: str) -> None:
    script, name = tmp_path / "stub.py", "A-1.5B" if "A-1.5B" in place else place.rpartition("/")[2]
    script.write_text(STUB + 'out.write_text(sys.argv[sys.argv.index("--model-name") + 1])\n')
    (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
    made, out = folder.rename(tmp_path / place), tmp_path / "a"
    convert_folder(made, out, dtype="bfloat16", script=script, trust=False, progress=lambda *what: None)
    assert out.read_text() == name


def test_a_dry_run_reckons_with_the_type_that_is_written(run: Run, folder: Path, tmp_path: Path) -> None:
    command = ["convert", str(folder), str(tmp_path / "no.gguf"), "--to", "gguf", "--dry-run"]
    header = json.dumps({"a": {"dtype": "F32", "shape": [5000000], "data_offsets": [0, 20000000]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(20_000_000))
    assert "about 0.01 GB as bfloat16" in run(*command)[1]  # the folder has twice as many bytes
    assert "about 0.02 GB as float32" in run(*command, "--dtype", "float32", "--quant", "Q8_0")[1]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--quant", "Q9_9"], "there is no type 'Q9_9'"),
        (["--quant", "Q4_0", "--tensor-type", "attn_v=q9"], "there is no type 'q9' of a tensor"),
        (["--quant", "Q4_0", "--imatrix", "none.txt"], "none.txt: there is no such file"),
        (["--drop-layers", "1-4"], "model has the layers 0 to 3"),
        (["--drop-layers", "0-3"], "all 4 layers are to be left out"),
    ],
)
def test_a_wrong_type_is_refused_before_a_folder_is_converted(
    run: Run, folder: Path, tmp_path: Path, arguments: list[str], says: str
) -> None:
    command = ["convert", str(folder), str(tmp_path / "out.gguf"), "--to", "gguf", *arguments]
    (folder / "config.json").write_text('{"num_hidden_layers": 4}')
    for more in (["--dry-run"], ["--converter", str(tmp_path / "stub.py")]):
        (folder / "refuse").touch()  # the stub would say so
        status, out, err = run(*command, *more)
        assert (status, out) == (2, "")
        assert says in err


def test_what_is_refused_after_the_conversion_names_the_folder(run: Run, folder: Path, tmp_path: Path) -> None:
    command = ["convert", str(folder), str(tmp_path / "out.gguf"), "--to", "gguf", "--quant", "Q4_0"]
    err = run(*command, "--converter", str(tmp_path / "stub.py"))[2]  # it makes no GGUF that llama.cpp can read
    assert err.splitlines()[-1].startswith(f"edgespec: {folder}: ")
    assert "partial" not in err


def test_bad_folders(folder: Path, tmp_path: Path) -> None:
    options = {"dtype": "bfloat16", "trust": False, "progress": lambda *what: None}
    (folder / "refuse").touch()
    with pytest.raises(ModelError, match="converter refuses it: NotImplementedError: BPE pre-tokenizer was not"):
        convert_folder(folder, tmp_path / "a", script=tmp_path / "stub.py", **options)  # type: ignore[arg-type]
    (tmp_path / "missing.py").write_text("import no_such_package")
    with pytest.raises(MissingPackage, match=r"'no_such_package': .* -m pip install 'edgespec\[torch,convert\]'"):
        convert_folder(folder, tmp_path / "b", script=tmp_path / "missing.py", **options)  # type: ignore[arg-type]
    (folder / "config.json").write_text('{"auto_map": {"AutoModel": "modeling.A"}}')
    with pytest.raises(ModelError, match="wants to run programs of its own"):
        count_weights(folder, trust=False)
    assert count_weights(folder, trust=True) == 1
    for text in ("{", "[]", 9999 * '{"a":'):
        (folder / "config.json").write_text(text)
        with pytest.raises(ModelError, match=r"config\.json: is damaged: "):
            count_weights(folder, trust=True)
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"has no config\.json"):
        count_weights(folder, trust=True)
    (folder / "config.json").write_text("{}")
    for text in ("5", 9999 * "["):
        (folder / "tokenizer_config.json").write_text(text)
        assert count_weights(folder, trust=False) == 1
    (folder / "tokenizer_config.json").write_text('{"auto_map": {}}')
    with pytest.raises(ModelError, match="wants to run programs of its own"):
        count_weights(folder, trust=False)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="has no weights"):
        count_weights(folder, trust=True)


def test_the_archive_gives_only_the_converter(tmp_path: Path) -> None:
    root = tmp_path / "engine-1" / "vendor" / "llama.cpp"
    for name in (SCRIPT, "conversion/base.py", "gguf-py/gguf/a.py", "src/llama.cpp", "gguf-py/tests/a.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    (root / "conversion" / "link.py").symlink_to("/etc/passwd")
    archive = tmp_path / "a.tar.gz"
    with tarfile.open(archive, "w:gz") as files:
        files.add(tmp_path / "engine-1", "engine-1")
        evil = tarfile.TarInfo("engine-1/vendor/llama.cpp/conversion/../../../../evil.py")
        files.addfile(evil)
    extract(archive, tmp_path / "out" / "deep" / "er")
    made = sorted(p.relative_to(tmp_path / "out").as_posix() for p in (tmp_path / "out").rglob("*") if p.is_file())
    assert made == [f"deep/er/{name}" for name in ("conversion/base.py", SCRIPT, "gguf-py/gguf/a.py")]
    assert not (tmp_path / "evil.py").exists()


def test_a_converter_by_its_path(tmp_path: Path) -> None:
    (tmp_path / SCRIPT).touch()
    for path in (tmp_path, tmp_path / SCRIPT):
        assert find_converter(str(path), lambda *what: None) == tmp_path / SCRIPT
    with pytest.raises(UsageError, match="there is no such file"):
        find_converter(str(tmp_path / "other.py"), lambda *what: None)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--to", "hf", "--quant", "Q4_0"], "--quant is for --to gguf only"),
        (["--to", "mlx", "--for", "draft"], "--for is for --to gguf only"),
        (["--to", "gguf", "--imatrix", "auto"], "say --quant or --for"),
        (["--to", "gguf", "--quant", "Q4_0", "--tensor-type", "attn_v"], "must be REGEX=TYPE"),
        (["--to", "gguf", "--drop-layers", "x"], "such as 14-21"),
        (["--quant", "Q4_0"], "Say --to hf or --to mlx for a folder; a GGUF has a name that ends in .gguf"),
        (["--to", "gguf", "--quant", "Q4_0"], "a.gguf: there is no such file"),
    ],
)
def test_bad_options_are_one_line(run: Run, tmp_path: Path, arguments: list[str], says: str) -> None:
    code, said, error = run("convert", str(tmp_path / "a.gguf"), str(tmp_path / "b"), *arguments)
    assert (code, said) == (1 if "no such file" in says else 2, "")
    assert error.count("\n") == 1
    assert says in error
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("in_this_process")
def test_a_name_that_ends_in_gguf_needs_no_to(run: Run, floats: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    assert run("convert", str(floats), str(out), "--quant", "Q4_0")[0] == 0
    assert out.exists()
    _, _, error = run("convert", str(floats), str(tmp_path / "x.gguf"), "--to", "hf")
    assert "--to hf writes a folder, but" in error
    _, _, error = run("convert", str(floats), str(tmp_path), "--to", "gguf", "--quant", "Q4_0")
    assert f"is a folder; name a file in it, as in {tmp_path / 'model.gguf'}" in error
    _, _, error = run("convert", str(tmp_path), str(tmp_path / "x"), "--to", "mlx")
    assert "has no config.json" in error


def test_the_type_of_weights_is_for_folders(run: Run, floats: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    code, said, error = run("convert", str(floats), str(out), "--to", "gguf", "--quant", "Q8_0", "--dtype", "float16")
    assert (code, said) == (2, "")
    assert error.splitlines()[-1] == "edgespec: --dtype is for model folders: leave it out"
    assert not out.exists()


@pytest.mark.usefixtures("in_this_process")
def test_the_same_tokenizer(floats: Path, tmp_path: Path) -> None:
    quantise(floats, tmp_path / "a.gguf", Recipe("Q4_0"))
    source, copy = load_vocab("llamacpp", str(floats)), load_vocab("llamacpp", str(tmp_path / "a.gguf"))
    assert source.fingerprint == copy.fingerprint
    assert source.chat_template == copy.chat_template


def test_a_file_that_appears_during_the_work_stays(tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"

    def work() -> None:
        with appearing(out) as partial:
            partial.write_text("made")
            out.write_text("mine")

    with pytest.raises(UsageError, match="exists already"):
        work()
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("out.gguf", "mine")]
