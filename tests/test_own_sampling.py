"""How a model's own file proposes to sample, and whose word holds: the call's, models.yaml's, the model's own."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from conftest import Run

import edgespec
from edgespec.errors import ModelError
from edgespec.loop.sampling import SamplingParams
from edgespec.models.gguf_header import header_values
from edgespec.models.own_sampling import GGUF_NAMES, GGUF_PREFIX, choose_sampling, own_sampling
from edgespec.models.registry import Defaults

FLOAT32, INT32, STRING, LIST = 6, 5, 8, 9  # gguf_type in ggml's gguf.h


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def entry(key: str, value: Any) -> bytes:
    """A key and its value as they lie in a header."""
    if isinstance(value, str):
        return text(key) + struct.pack("<I", STRING) + text(value)
    if isinstance(value, list):
        return text(key) + struct.pack("<IIQ", LIST, STRING, len(value)) + b"".join(map(text, value))
    if isinstance(value, int):
        return text(key) + struct.pack("<Ii", INT32, value)
    return text(key) + struct.pack("<If", FLOAT32, value)


def header(path: Path, values: dict[str, Any]) -> str:
    """A GGUF without tensors."""
    path.write_bytes(
        b"GGUF" + struct.pack("<IQQ", 3, 0, len(values)) + b"".join(entry(*item) for item in values.items())
    )
    return str(path)


def with_values(source: Path, path: Path, values: dict[str, Any]) -> Path:
    """A copy of a GGUF with more in its header; what is added has a multiple of 32 bytes, as tensors are aligned."""
    data = source.read_bytes()
    (count,) = struct.unpack_from("<Q", data, 16)
    added = b"".join(entry(*item) for item in values.items())
    added += entry("padding", "-" * (-(len(added) + len(entry("padding", ""))) % 32))
    path.write_bytes(data[:16] + struct.pack("<Q", count + len(values) + 1) + added + data[24:])
    return path


def own(**values: Any) -> dict[str, Any]:
    return {GGUF_PREFIX + key: value for key, value in values.items()}


def folder(path: Path, config: Any) -> str:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text("{}")
    (path / "generation_config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return str(path)


def test_a_gguf(tmp_path: Path) -> None:
    """Also behind lists; numbers may be text, as llama.cpp takes them."""
    values = {"tokenizer.ggml.tokens": ["a", "é", ""], **own(temp=0.7, top_k=20, top_p="0.8", penalty_repeat=1.05)}
    path = header(tmp_path / "a.gguf", {**values, "general.name": "a", **own(min_p=0.0)})
    assert own_sampling(path) == (
        {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.0, "repetition_penalty": 1.05},
        [],
    )
    assert header_values(path, "general.name") == {"general.name": "a"}


def test_the_keys_are_those_of_llama_cpp() -> None:
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    kinds = ("TEMP", "TOP_K", "TOP_P", "MIN_P", "PENALTY_REPEAT")
    keys = [getattr(llama_cpp, f"LLAMA_MODEL_META_KEY_SAMPLING_{kind}") for kind in kinds]
    assert [llama_cpp.llama_model_meta_key_str(key).decode() for key in keys] == [GGUF_PREFIX + k for k in GGUF_NAMES]


@pytest.mark.parametrize(
    ("values", "good", "says"),
    [
        ({"temp": float("nan"), "top_k": 20}, {"top_k": 20}, ["temperature is nan"]),
        ({"temp": -1.0}, {}, ["temperature is -1.0"]),
        ({"temp": "warm", "top_p": 0.0}, {}, ["temperature is 'warm', but must be a number", "top_p is 0.0"]),
        ({"top_k": -5, "min_p": 1.0}, {}, ["top_k is -5", "min_p is 1.0"]),
        ({"top_k": 2.5}, {}, ["top_k is 2.5, but must be a whole number"]),
        ({"penalty_repeat": float("inf")}, {}, ["repetition_penalty is inf"]),
        ({"mirostat": 2, "mirostat_tau": 5.0, "xtc_probability": 0.5, "temp": 1.0}, {"temperature": 1.0},
         ["xtc_probability, mirostat, which edgespec does not have"]),
        ({"mirostat": 0, "xtc_probability": 0.0}, {}, []),
    ],
)  # fmt: skip
def test_what_is_wrong_in_a_gguf_is_left_out_with_a_note(
    tmp_path: Path, values: dict[str, Any], good: dict[str, Any], says: list[str]
) -> None:
    found, notes = own_sampling(header(tmp_path / "a.gguf", own(**values)))
    assert found == good
    assert len(notes) == len(says)
    for note in notes:
        assert note.startswith("left out of the model's own sampling: ")
        assert "\n" not in note
    assert all(any(what in note for note in notes) for what in says)


@pytest.mark.parametrize(
    ("config", "good"),
    [
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.9, "eos_token_id": 2}, {"temperature": 0.6, "top_p": 0.9}),
        ({"temperature": 0.6, "top_k": 50.0, "min_p": None}, {"temperature": 0.6, "top_k": 50}),
        ({"do_sample": True, "top_k": 5}, {"temperature": 1.0, "top_k": 5}),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, {"temperature": 0.0}),
        ({"do_sample": False, "repetition_penalty": 1.1}, {"temperature": 0.0, "repetition_penalty": 1.1}),
        ({"eos_token_id": 2}, {}),
    ],
)
def test_a_folder(tmp_path: Path, config: dict[str, Any], good: dict[str, Any]) -> None:
    assert own_sampling(folder(tmp_path, config)) == (good, [])


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"temperature": True}, "temperature is True"),
        ('{"temperature": NaN}', "temperature is nan"),
        ({"top_p": [1]}, "top_p is [1]"),
        ("[1]", "is not a JSON object"),
        ("{", "is damaged: Expecting property name"),
        (9999 * "[", "is damaged: it is nested too deeply"),
    ],
)
def test_what_is_wrong_in_a_folder_is_left_out_with_a_note(tmp_path: Path, config: Any, says: str) -> None:
    found, (note,) = own_sampling(folder(tmp_path, config))
    assert found == {}
    assert says in note


def test_a_folder_and_a_file_that_say_nothing(tmp_path: Path) -> None:
    assert own_sampling(str(tmp_path)) == ({}, [])
    assert own_sampling(header(tmp_path / "a.gguf", {})) == ({}, [])
    other = tmp_path / "model.npz"
    other.write_bytes(b"PK\x03\x04")
    assert own_sampling(str(other)) == ({}, [])


def test_damaged_headers_are_refused(tmp_path: Path) -> None:
    good = Path(header(tmp_path / "a.gguf", {"tokens": ["a"] * 9, **own(temp=0.5)})).read_bytes()
    bad = tmp_path / "b.gguf"
    for data in (good[:10], good[:30], good[:-2], good[:4] + b"\1" + good[5:], good[:16] + b"\xff" * 8 + good[24:]):
        bad.write_bytes(data)
        with pytest.raises(ModelError, match="is damaged or cut off"):
            own_sampling(str(bad))
    with pytest.raises(ModelError, match="there is no such file"):
        own_sampling(str(tmp_path / "c.gguf"))


def test_models_yaml_comes_first_and_a_zero_counts(tmp_path: Path) -> None:
    path = header(tmp_path / "a.gguf", own(temp=0.7, top_k=20, top_p=0.8))
    assert choose_sampling(Defaults(), path)[0] == SamplingParams(temperature=0.7, top_k=20, top_p=0.8)
    given = Defaults(temperature=0, top_k=0, min_p=0.1)
    assert choose_sampling(given, path)[0] == SamplingParams(temperature=0, top_k=0, top_p=0.8, min_p=0.1)
    assert choose_sampling(Defaults(), header(tmp_path / "b.gguf", {}))[0] == SamplingParams()


@pytest.fixture(scope="module")
def warm(smollm2_tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that proposes to sample, and badly to filter."""
    path = tmp_path_factory.mktemp("warm") / "warm.gguf"
    return with_values(smollm2_tiny, path, own(temp=0.9, top_k=40, top_p=7.0))


def test_the_python_api(warm: Path, smollm2_tiny: Path) -> None:
    options: dict[str, Any] = {"planner": "none", "context_length": 64, "threads": 1, "exact": "off"}
    with edgespec.load(str(warm), **options) as model:
        assert model.sampling == SamplingParams(temperature=0.9, top_k=40)
        assert any("top_p is 7.0" in note for note in model.notes)
        own_text = model.generate("Once upon a time", max_tokens=12).token_ids
        greedy = model.generate("Once upon a time", max_tokens=12, temperature=0.0).token_ids
    with edgespec.load(str(smollm2_tiny), **options) as model:
        assert model.sampling == SamplingParams()
        assert model.generate("Once upon a time", max_tokens=12).token_ids == greedy != own_text


def test_the_command_line(run: Run, warm: Path, tmp_path: Path) -> None:
    yaml = tmp_path / "models.yaml"
    yaml.write_text(f"models:\n  - {{name: cold, target: 'file:{warm}', defaults: {{temperature: 0.0}}}}\n")

    def tokens(model: str, *more: str) -> list[int]:
        options = ["--raw", "--json", "-n", "12", "--ctx", "64", "--planner", "none", "--exact", "off", "--seed", "3"]
        status, out, err = run("run", model, "Once upon a time", *options, "--models", str(yaml), *more)
        assert status == 0, err
        assert "top_p is 7.0" in err
        found: list[int] = json.loads(out)["tokens"]
        return found

    sampled = tokens(str(warm))
    assert sampled == tokens(str(warm), "--temperature", "0.9", "--top-k", "40")
    assert sampled == tokens("cold", "--temperature", "0.9")  # top-k is still the model's own
    assert tokens("cold") == tokens(str(warm), "--temperature", "0") != sampled


def test_bench_stays_greedy(run: Run, warm: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Once upon a time"}\n')
    status, out, err = run(
        "bench", str(prompts), "--model", str(warm), "-n", "4", "--ctx", "64", "--exact", "off", "--json"
    )
    assert status == 0, err
    assert json.loads(out)["sampling"] == {}


class TestModelCard:
    """`edgespec models NAME`."""

    def test_where_each_value_comes_from(self, run: Run, tmp_path: Path) -> None:
        path = header(tmp_path / "a.gguf", own(temp=0.7, top_k=20, top_p=7.0))
        yaml = tmp_path / "models.yaml"
        yaml.write_text(
            f"models:\n  - name: a\n    target: 'file:{path}'\n"
            "    defaults: {planner: sssd, context_length: 0, top_k: 0, system: Hi.}\n"
        )
        status, out, err = run("models", "a", "--models", str(yaml), "--json")
        assert status == 0, err
        card = json.loads(out)
        assert {name: (setting["value"], setting["from"]) for name, setting in card["settings"].items()} == {
            "planner": ("sssd", "models.yaml"),
            "budget": (None, "edgespec"),
            "context_length": (0, "models.yaml"),
            "system": ("Hi.", "models.yaml"),
            "temperature": (0.7, "the model's own"),
            "top_k": (0, "models.yaml"),
            "top_p": (1.0, "edgespec"),
            "min_p": (0.0, "edgespec"),
            "repetition_penalty": (1.0, "edgespec"),
        }
        assert len(card["notes"]) == 1
        lines = run("models", "a", "--models", str(yaml))[1].splitlines()
        assert any(line.split() == ["temperature", "0.7", "the", "model's", "own"] for line in lines)
        assert any(line.startswith("note") and "top_p is 7.0" in line for line in lines)

    def test_a_path_and_a_folder(self, run: Run, tmp_path: Path) -> None:
        path = header(tmp_path / "a.gguf", own(temp=0.5))
        for model, value in ((path, 0.5), (folder(tmp_path / "folder", {"temperature": 0.25}), 0.25)):
            status, out, err = run("models", model, "--json")
            assert status == 0, err
            assert json.loads(out)["settings"]["temperature"] == {"value": value, "from": "the model's own"}

    def test_what_is_not_there(self, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        status, out, err = run("models", "nothing.gguf")
        assert (status, out, err) == (1, "", "edgespec: nothing.gguf: there is no such file\n")
        status, out, err = run("models", "smolm2")
        assert status == 2
        assert "did you mean smollm2-135m" in err
        pytest.importorskip("huggingface_hub", reason="the extra `hub` is not installed")
        import huggingface_hub

        download = huggingface_hub.hf_hub_download

        def watched(*arguments: Any, **options: Any) -> Any:
            assert options["local_files_only"]
            return download(*arguments, **options, cache_dir=tmp_path)

        monkeypatch.setattr(huggingface_hub, "hf_hub_download", watched)
        status, out, err = run("models", "qwen2.5-coder-32b")
        assert (status, err) == (0, "")
        assert "is not fetched yet" in out
