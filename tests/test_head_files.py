"""Files that are heads or have one: what doctor, pair and run tell of them, and damaged ones."""

import json
import os
import re
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Run
from forked import forked

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
from edgespec.backends.llamacpp.engine import load
from gemma4_files import copy, gguf, write_assistant, write_gemma4
from gguf_files import small_llama
from head_files import write_eagle3
from hybrid_files import write_with_head
from test_offload_llamacpp import MIB, OPTIONS, last_row, linux_only, load_streamed

UINT32, INT32, FLOAT32, STRING = (
    getattr(gguf.GGUFValueType, name) for name in ("UINT32", "INT32", "FLOAT32", "STRING")
)
HEAD = "multi-token prediction"
Change = Callable[[str, Any], Any]
SHORT = ("--ctx", "128", "--exact", "off")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("heads")
    write = {
        "qwen35": write_with_head, "gemma4": lambda path: write_gemma4(path, wide=4), "llama": small_llama,
        "eagle3": write_eagle3, "assistant": write_assistant,
    }  # fmt: skip
    found = {name: make(folder / f"{name}.gguf") for name, make in write.items()}
    return found | {"mtp": copy(found["qwen35"], folder / "mtp-qwen35.gguf", tensor=without_trunk)}


def without_trunk(name: str, values: Any) -> Any:
    return None if name.startswith(("blk.0", "blk.1", "blk.2", "blk.3")) else values


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("eagle3", "is a head (EAGLE-3) for models with states of 256, not a model"),
        ("assistant", "is a head (assistant) for gemma4 models with states of 128, not a model"),
        ("mtp", f"is a head ({HEAD}) for qwen35 models with states of 256, not a model"),
    ],
)
def test_a_head_named_as_a_model_is_one_line_that_says_what_it_is_for(
    files: dict[str, Path], run: Run, name: str, says: str
) -> None:
    """llama.cpp runs one kind as a model of its own, and is killed by another."""
    path = files[name]
    for arguments in (
        ["run", str(path), "--raw", "Hi"],
        ["doctor", str(path)],
        ["pair", str(path), str(files["llama"])],
    ):
        status, out, err = run(*arguments)
        assert (status, out) == (1, "")
        assert err.strip().splitlines()[-1] == f"edgespec: {path}: {says}: edgespec run TARGET --draft {path}"
    settings = f"edgespec: {path}: is a head, not a model: edgespec run TARGET --draft {path}\n"
    assert run("models", str(path)) == (1, "", settings)


@pytest.mark.parametrize("command", [("run", "Hi"), ("doctor",)])
def test_a_folder_that_is_a_head_is_one_line_too(run: Run, tmp_path: Path, command: tuple[str, ...]) -> None:
    layer = {"num_hidden_layers": 1, "hidden_size": 64}  # as of vLLM's speculators
    config = {"architectures": ["Speculator"], "draft_vocab_size": 9, "transformer_layer_config": layer}
    (tmp_path / "config.json").write_text(json.dumps(config))
    status, out, err = run(command[0], str(tmp_path), *command[1:])
    assert (status, out) == (1, "")
    assert err.endswith(
        f"edgespec: {tmp_path}: is a head (EAGLE-3) for models with states of 64, not a model: "
        f"edgespec run TARGET --draft {tmp_path}\n"
    )


@pytest.mark.parametrize("place", ["target", "draft"])
def test_a_folder_with_a_head_of_another_kind_is_one_line(
    files: dict[str, Path], run: Run, tmp_path: Path, place: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["DFlashDraftModel"], "model_type": "qwen3"}))
    arguments = [str(tmp_path)] if place == "target" else [str(files["llama"]), "--draft", str(tmp_path)]
    status, out, err = run("run", *arguments, "--raw", "Hi", *SHORT)
    assert (status, out) == (1, "")
    says = f"edgespec: {tmp_path}: is a head that drafts blocks (DFlash), which is not supported: use another\n"
    assert err.endswith(says)


@pytest.mark.parametrize("name", ["qwen35", "gemma4"])
def test_files_with_heads_and_their_targets_run_and_stream(files: dict[str, Path], run: Run, name: str) -> None:
    status, _, err = run("run", str(files[name]), "--raw", "Hi", "-n", "4", *SHORT)
    assert status == 0, err
    assert "Traceback" not in err


@linux_only
def test_a_made_up_gemma_4_streams_bit_for_bit(files: dict[str, Path]) -> None:
    whole = load(str(files["gemma4"]), resident=True, **OPTIONS)
    backend = load_streamed(files["gemma4"], MIB)
    tokens = [1, 9, 12, 44, 100]
    assert backend.streamer.plan.streamed  # type: ignore[union-attr]
    np.testing.assert_array_equal(last_row(backend, tokens), last_row(whole, tokens))
    backend.close()
    whole.close()


def test_doctor_tells_of_a_head_in_the_file(files: dict[str, Path], run: Run) -> None:
    status, out, err = run("doctor", str(files["qwen35"]), *SHORT)
    assert status == 0, err
    lines = dict(line.split(maxsplit=1) for line in out.splitlines() if line.startswith(("head", "draft")))
    assert lines["head"] == f"{HEAD}, 1 layer, 5 MiB, in the file of its model"
    assert lines["draft"].startswith("5 MiB")
    assert "specexec about" in out
    assert "\nhead " not in run("doctor", str(files["gemma4"]), *SHORT)[1]


def test_doctor_times_a_head_as_the_draft(files: dict[str, Path], run: Run) -> None:
    status, out, err = run("doctor", str(files["llama"]), "--draft", str(files["eagle3"]), *SHORT)
    assert status == 0, err
    assert re.search(
        "specexec about [0-9.]+ \\(computed, with the tokens per pass of another model's head\\), auto", out
    )


@pytest.mark.parametrize("draft", ["eagle3", "head", "layers"])
def test_pair_says_how_a_head_is_measured(files: dict[str, Path], run: Run, draft: str) -> None:
    name = str(files.get(draft, draft))
    status, out, err = run("pair", str(files["llama"]), name)
    assert (status > 0, out) == (True, "")
    assert f"{name}: drafts from states of its target" in err
    assert f"edgespec bench PROMPTS.jsonl --model TARGET --draft {name} measures it" in err


def drop(*parts: str) -> Change:
    return lambda name, values: None if any(part in name for part in parts) else values


def narrower(part: str) -> Change:
    return lambda name, values: np.ascontiguousarray(values[..., : values.shape[-1] // 2]) if part in name else values


def longer(part: str) -> Change:
    return lambda name, values: np.concatenate([values, values]) if part in name else values


def counts(key: str, *values: int) -> Iterator[dict[str, Any]]:
    yield from ({key: (value, UINT32)} for value in values)


FIRST: list[tuple[dict[str, Any], Change, str]] = [
    (
        {"nextn_predict_layers": (6, UINT32)},
        lambda name, values: values,
        "nextn_predict_layers is 6, but must be a whole",
    ),
    (
        {"nextn_predict_layers": ("x", STRING)},
        lambda name, values: values,
        "nextn_predict_layers is 'x', but must be a",
    ),
    (
        {"block_count": (513, UINT32)},
        lambda name, values: values,
        "block_count is 513, but must be a whole number from 1",
    ),
    (
        {"rope.dimension_count": (0, UINT32)},
        lambda name, values: values,
        "rope.dimension_count is 0 of 64, but must be",
    ),
    ({}, drop("blk.0.attn_norm"), f"is a head ({HEAD})"),
    ({"block_count": (4, UINT32)}, lambda name, values: values, "tensor 'blk.3.nextn.eh_proj.weight' not found"),
    ({"block_count": None}, lambda name, values: values, "key not found in model: qwen35.block_count"),
]


@pytest.mark.parametrize(("keys", "tensor", "says"), FIRST)
def test_what_llama_cpp_would_not_say_is_said(
    files: dict[str, Path], run: Run, tmp_path: Path, keys: dict[str, Any], tensor: Change, says: str
) -> None:
    """It ends the process, never ends a pass, computes without a tensor, or reports a tensor that it skips."""
    path = copy(files["qwen35"], tmp_path / "model.gguf", keys, tensor)
    status, out, err = run("run", str(path), "--raw", "Hi", "-n", "2", *SHORT)
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert says in err


COUNTS: list[dict[str, Any]] = [
    *counts("nextn_predict_layers", 0, 2, 4, 5, 6, 2**32 - 1),
    *({"nextn_predict_layers": value} for value in [(-1, INT32), (float("nan"), FLOAT32), ("x", STRING), None]),
    *counts("block_count", 0, 1, 4, 7, 513, 2**32 - 1), *counts("embedding_length", 0, 64, 2**31),
    *counts("rope.dimension_count", 0, 7, 1000), *counts("attention.head_count", 0, 3),
]  # fmt: skip
TENSORS: dict[str, list[Change]] = {
    "qwen35": [
        drop("nextn.eh_proj"), drop("nextn"), drop("blk.4"), drop("blk.0"), drop("blk.0.attn_norm"), drop("blk.4.attn"),
        narrower("eh_proj"), longer("enorm"), longer("blk.4.attn_q"), narrower("token_embd"),
    ],
    "gemma4": [
        drop("per_layer"), drop("blk.5"), drop("rope_freqs"), drop("blk.0.attn_norm"), narrower("per_layer_token_embd"),
        longer("inp_gate"), longer("blk.0.attn_q.w"), narrower("rope_freqs"), longer("token_embd"), drop("attn_k"),
    ],
}  # fmt: skip
CUTS = (0.999, 0.7, 0.4)  # shares of the file


def changed(source: Path, folder: Path) -> Iterator[Path]:
    for number, keys in enumerate(COUNTS):
        yield copy(source, folder / f"count-{number}.gguf", keys)
    for number, change in enumerate(TENSORS[source.stem]):
        yield copy(source, folder / f"tensor-{number}.gguf", tensor=change)
    for number, share in enumerate(CUTS):
        path = folder / f"cut-{number}.gguf"
        path.write_bytes(source.read_bytes()[: int(share * source.stat().st_size)])
        yield path


@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows cannot fork")
@pytest.mark.parametrize("every", [6, pytest.param(1, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("name", ["qwen35", "gemma4"])
def test_damaged_files_with_heads_are_one_line(files: dict[str, Path], tmp_path: Path, name: str, every: int) -> None:
    paths = list(changed(files[name], tmp_path))
    assert len(paths) >= 30
    for path, command in product(paths[::every], ("run", "doctor")):
        done = forked(command, str(path), *SHORT, *(["--raw", "Hi", "-n", "2"] if command == "run" else []))
        lines = [line for line in done.stderr.splitlines() if not line.startswith(("measuring: ", "llamacpp: "))]
        assert done.returncode == 0 or (done.returncode == 1 and len(lines) == 1), (path, command, done)
