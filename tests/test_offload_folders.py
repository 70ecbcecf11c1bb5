"""`bench-offload folders`: what it is told, and its table."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.offload import text_summary
from benchmarks.offload_folders import Folder, parse_folder, weight_bytes
from benchmarks.offload_tables import folder_table
from benchmarks.offload_worker import MLX_LM, Task, measure
from edgespec.errors import UsageError


@pytest.fixture
def folders(tmp_path: Path) -> tuple[str, str]:
    for name in ("big", "small"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "model.safetensors").write_bytes(b"x" * 100)
    return str(tmp_path / "big"), str(tmp_path / "small")


def test_engines_and_folders(folders: tuple[str, str]) -> None:
    big, small = folders
    assert parse_folder(f"mlx:{big}") == Folder("mlx", big)
    assert parse_folder(f"torch:{big}+{small}") == Folder("torch", big, small)
    file = f"{big}/model.safetensors"
    assert parse_folder(f"llamacpp:{file}") == Folder("llamacpp", file)
    assert weight_bytes(big) == weight_bytes(file) == 100


@pytest.mark.parametrize("text", ["{big}", "llamacpp:{big}", "mlx:", "mlx:{big}/no", "mlx:{big}+{big}/no"])
def test_what_is_none(text: str, folders: tuple[str, str]) -> None:
    with pytest.raises(UsageError) as caught:
        parse_folder(text.format(big=folders[0]))
    assert "\n" not in str(caught.value)


def test_the_table_compares_with_what_is_possible() -> None:
    one = {"seconds": 2.0, "waited": 1.0}
    report = {
        "target": "big", "engine": "mlx", "size": 2 << 30, "bandwidth": 1e9, "limit": 1 << 30,
        "limit_of_texts": 1 << 30,
        "passes": {
            "in memory": {"passes": {"1": {"seconds": 0.5}, "64": {"seconds": 1.0}}, "failed": []},
            "streamed": {"passes": {"1": one, "64": one}, "failed": [], "streamed": 800_000_000, "peak": 1 << 29},
        },
        "texts": {
            "plain": {"tokens_per_second": 2.0, "acceptance_length": 1.0, "peak": 1 << 29},
            "specexec": {"tokens_per_second": 5.0, "acceptance_length": 4.0, "peak": 1 << 29},
            "mlx-lm alone": {"failed": ["it was killed: out of memory"]},
        },
    }  # fmt: skip
    table = folder_table(report)
    for text in ("2.50 of max(compute, read)", "2.00 of max", "2.50 x plain", "it was killed: out of memory", "0.50"):
        assert text in table


@pytest.mark.skipif(sys.platform != "linux", reason="bytes read are counted on Linux")
def test_what_mlx_lm_does_alone_can_be_summed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = SimpleNamespace(apply_chat_template=lambda messages, add_generation_prompt: [1, 2])
    fake = SimpleNamespace(
        load=lambda folder: (None, tokenizer),
        stream_generate=lambda model, tokenizer, ids, max_tokens: [0] * max_tokens,
    )
    monkeypatch.setitem(sys.modules, "mlx_lm", fake)
    result = measure(Task("folder", backend=MLX_LM, prompts=["one", "two"], max_tokens=3))
    found = text_summary([result | {"peak": 5, "stayed_in_cache": 0.0}])
    assert (found["tokens"], found["passes"], found["peak"]) == (4, 4, 5)  # the first comes with the prompt
    assert found["user_seconds"] >= 0 <= found["system_seconds"]
