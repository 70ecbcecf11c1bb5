"""A GGUF as a folder: the logits and token ids of llama.cpp, or one clear line and nothing left behind."""

import json
import sys
import tracemalloc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Run
from gguf_files import VOCAB, gguf, write_gguf
from gguf_writer import Reader, add, finish

from edgespec.errors import EdgespecError, MissingPackage, ModelError, UsageError, pip_install
from edgespec.loading.by_name import load_backend
from edgespec.loop.backend import Work
from edgespec.loop.engines import load_vocab
from edgespec.models.convert.folder_from_gguf import convert, read_gguf, write_safetensors
from edgespec.models.convert.gguf_tokenizer import PATTERNS, build_tokenizer, tokenizer_config
from edgespec.models.gguf_model import model_config

pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed: pip install 'edgespec[convert]'")
pytest.importorskip("tokenizers", reason="tokenizers is not installed: pip install 'edgespec[convert]'")
safetensors_numpy = pytest.importorskip(
    "safetensors.numpy", reason="safetensors is not installed: pip install 'edgespec[convert]'"
)
torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'edgespec[torch]'")
transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install 'edgespec[torch]'"
)
llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

SCRIPT = Path(__file__).parent.parent / "scripts" / "convert"
IDS = np.random.default_rng(1).integers(0, 256, 40).astype(np.int32)  # bytes: both test vocabularies have them
TEXTS = {
    "code": "def f(xs: list[int]) -> int:\n    return sum(x ** 2 for x in xs if x != 0x1F)  # naïve\n\n\n\tpass\r\n",
    "numbers": "3.14159, 1234567890, 2026-11-21, ١٢٣, ½, ², Ⅻ, 1st and 2nd",
    "languages": "Привет, мир! 你好，世界。日本語のテキスト مرحبا بالعالم नमस्ते दुनिया 안녕하세요 שלום ไทย Ελληνικά",
    "emoji": "🤷🏽‍♂️ 👍🏿👩‍👩‍👧‍👦 🇨🇭 ☃️ ok 😀😀",
    "spaces": "  two   three    four\t\ttabs \n\n\n\n  lines\r\n\r\n   \u00a0nbsp\u3000wide \u200b zero   ",
    "contractions": "I'LL say we're DON'T 'tis o'clock it's they'd've",
    "punctuation": '!!! ... --- ###???\n/* x */ <a href="b">&amp;</a> $5.00 {}[]()@%^~`|\\',
    "combining": "e\u0301 A\u030a \u1112\u1161\u11ab cafe\u0301",
    "end": "x",
    "empty": "",
}


def llamacpp_logits(path: Path, token_ids: Any) -> Any:
    """Of every token, shape [n, V]."""
    backend = load_backend("llamacpp", str(path), context_length=512, threads=2)
    session, rows = backend.open(), []
    for start in range(0, len(token_ids), 50):
        piece = np.asarray(token_ids[start : start + 50], np.int32)
        nodes = np.arange(len(piece), dtype=np.int32)
        logits = backend.forward([Work(session, piece, nodes - 1, nodes)])[0]
        rows += [logits.row(i) for i in range(len(piece))]
        session.commit(nodes.tolist())
    backend.close()
    return np.stack(rows)


def transformers_logits(model: Any, token_ids: Any) -> Any:
    with torch.no_grad():
        return model(torch.tensor(np.asarray(token_ids)[None], dtype=torch.long)).logits[0].float().numpy()


def mlx_logits(folder: Path, token_ids: Any) -> Any:
    mx = pytest.importorskip("mlx.core", reason="mlx is not installed: pip install 'edgespec[mlx]'")
    mlx_lm = pytest.importorskip("mlx_lm", reason="mlx-lm is not installed: pip install 'edgespec[mlx]'")
    model, _ = mlx_lm.load(str(folder))
    return np.array(model(mx.array(np.asarray(token_ids)[None]))[0].astype(mx.float32))


SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
TIED = SIZES | {"tie_word_embeddings": True}


def rope(kind: str = "default", theta: float = 10000.0, **settings: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **settings}}


EXPERTS = {"num_experts_per_tok": 2, "head_dim": 16}
QWEN3_EXPERTS = EXPERTS | {"num_experts": 4, "moe_intermediate_size": 48, "norm_topk_prob": True}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {  # transformers' class, and its fields
    "llama": ("Llama", SIZES | {"head_dim": 32} | rope()),
    "llama, biases, linear rope": (
        "Llama",
        TIED | {"attention_bias": True, "mlp_bias": True} | rope("linear", factor=4.0),
    ),
    "llama 3.1": ("Llama", SIZES | {"head_dim": 64} | rope("llama3", 500000.0, **LLAMA3)),
    "mixtral": ("Mixtral", SIZES | EXPERTS | {"num_local_experts": 4, "sliding_window": None} | rope()),
    "qwen2": ("Qwen2", SIZES | rope(theta=1e6)),
    "qwen2, yarn": ("Qwen2", SIZES | rope("yarn", factor=4.0, original_max_position_embeddings=4096)),
    "qwen3": ("Qwen3", TIED | {"head_dim": 32} | rope(theta=1e6)),
    "qwen3moe": ("Qwen3Moe", SIZES | QWEN3_EXPERTS | rope()),
    "gemma": ("Gemma", TIED | {"head_dim": 32} | rope()),
    "gemma2": ("Gemma2", TIED | GEMMA | rope()),
    # Seven layers: every sixth has global attention.
    "gemma3": ("Gemma3Text", TIED | GEMMA | {"num_hidden_layers": 7, "rope_parameters": GEMMA3_ROPE}),
}


@dataclass
class Tiny:
    """A random model, the same as a GGUF, and what convert makes of that."""

    name: str
    model: Any
    weights: dict[str, Any]
    gguf: Path
    folder: Path


def make_tiny(name: str, folder: Path) -> Tiny:
    torch.manual_seed(0)
    kind, fields = CONFIGS[name]
    config = getattr(transformers, f"{kind}Config")(**fields)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # as initialised, norms and biases would hide mistakes
            vector = parameter.ndim == 1
            centre = 1.0 if vector and not name.startswith("gemma") else 0.0
            parameter.copy_(centre + torch.randn_like(parameter) * (0.3 if vector else 0.15))
    model.save_pretrained(folder / "original")
    weights = safetensors_numpy.load_file(folder / "original" / "model.safetensors")
    if model.config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    path = write_gguf(folder / "tiny.gguf", model.config, weights)
    convert(path, folder / "converted", dtype="float32")
    return Tiny(name, model, weights, path, folder / "converted")


@pytest.fixture(scope="module", params=CONFIGS)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny(request.param, tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny("llama", tmp_path_factory.mktemp("llama"))


def test_transformers_computes_what_the_original_model_computes(tiny: Tiny) -> None:
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(tiny.folder, output_loading_info=True)
    assert not any(report.values()), report
    assert type(loaded) is type(tiny.model)
    np.testing.assert_allclose(transformers_logits(loaded, IDS), transformers_logits(tiny.model, IDS), atol=1e-5)


def test_transformers_computes_what_llamacpp_computes(tiny: Tiny) -> None:
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tiny.folder)
    # Seen: 1e-5; Gemma 3e-3, since llama.cpp's GELU is a table in float16.
    tolerance = 1e-2 if tiny.name.startswith("gemma") else 1e-4
    np.testing.assert_allclose(transformers_logits(loaded, IDS), llamacpp_logits(tiny.gguf, IDS), atol=tolerance)


def test_mlx_computes_what_transformers_computes(tiny: Tiny) -> None:
    # mlx-lm's Gemma 2 attends to the whole text, so only what fits into the window can be equal.
    ids = IDS[: tiny.model.config.sliding_window] if tiny.name == "gemma2" else IDS
    # mlx-lm's first Gemma has the exact GELU, not the approximation by tanh: seen 2e-3, the others 1e-5.
    tolerance = 1e-2 if tiny.name == "gemma" else 1e-4
    np.testing.assert_allclose(mlx_logits(tiny.folder, ids), transformers_logits(tiny.model, ids), atol=tolerance)


def test_tokenizers_of_both_kinds_agree_with_llamacpp(tiny: Tiny) -> None:
    check_folder_tokenizer(tiny.folder, load_vocab("llamacpp", str(tiny.gguf)))


def check_folder_tokenizer(folder: Path, vocab: Any) -> None:
    """Token ids, the start token, the end tokens and the chat template, as transformers reads them."""
    as_written = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    automatic = transformers.AutoTokenizer.from_pretrained(folder)
    bos, eos = ("" if i is None else vocab.token_text(i) for i in (vocab.bos_id, vocab.eos_id))
    marked = {"marked": f"{bos}user\nhi{eos}  {eos}\n{bos} <think>", "unknown mark": "<|nothing|> <end_of_turn>"}
    for kind, text in (TEXTS | marked).items():
        expected = vocab.encode(text, add_bos=False, parse_special=True)
        assert as_written.encode(text, add_special_tokens=False) == expected, kind
        # transformers 5 builds Qwen 2's tokenizer itself, and composes combining characters, which llama.cpp does not.
        if not (kind == "combining" and type(automatic).__name__ == "Qwen2Tokenizer"):
            assert automatic.encode(text, add_special_tokens=False) == expected, kind
        # llama.cpp puts the start token before an empty text too.
        assert as_written.encode(text) == vocab.encode(text, add_bos=True, parse_special=True), kind
    as_written.backend_tokenizer.encode_special_tokens = True  # control tokens are text, user-defined ones are not
    for kind, text in marked.items():
        expected = vocab.encode(text, add_bos=False, parse_special=False)
        assert as_written.backend_tokenizer.encode(text, add_special_tokens=False).ids == expected, kind
    assert len(as_written) == vocab.size
    assert (automatic.chat_template or None) == vocab.chat_template
    ends = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    assert set(ends) == vocab.eog_ids


def test_a_template_for_tools_is_kept() -> None:
    tokens = {"tokenizer.ggml.tokens": ["a"], "tokenizer.chat_template": "one"}
    for more, expected in [
        ({}, "one"),
        ({"tokenizer.chat_template.tool_use": "two"}, {"default": "one", "tool_use": "two"}),
    ]:
        config = tokenizer_config(tokens | more, 64)
        assert transformers.PreTrainedTokenizerBase(**config).chat_template == expected


# Real files


def test_smollm2_has_the_token_ids_of_llamacpp(smollm2: Path, smollm2_hf: Path) -> None:
    check_folder_tokenizer(smollm2_hf, load_vocab("llamacpp", str(smollm2)))


@pytest.mark.exhaustive
def test_qwen_has_the_token_ids_of_llamacpp(tmp_path: Path) -> None:
    path = Path.home() / ".cache/edgespec/models/qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"
    if not path.is_file():
        pytest.skip(f"{path.name} is not there")
    vocab = load_vocab("llamacpp", str(path))
    tokenizer = build_tokenizer(read_gguf(path).metadata, vocab)
    for kind, text in TEXTS.items():
        marked = f"<|im_start|>{text}<|im_end|>\n<|fim_prefix|>{text}"
        for sample in (text, marked):
            expected = vocab.encode(sample, add_bos=False, parse_special=True)
            assert tokenizer.encode(sample, add_special_tokens=False).ids == expected, kind


@pytest.fixture(scope="module")
def smollm2_metadata(smollm2: Path) -> dict[str, Any]:
    return read_gguf(smollm2).metadata


@pytest.mark.parametrize("pre", PATTERNS)
def test_every_pre_tokenizer_cuts_as_llamacpp_does(pre: str, smollm2_metadata: dict[str, Any], tmp_path: Path) -> None:
    """SmolLM2's merges under another name: they join whatever the cuts let them."""
    metadata = smollm2_metadata | {"tokenizer.ggml.pre": pre}
    writer = gguf.GGUFWriter(tmp_path / "vocab.gguf", "llama")
    add(
        writer,
        block_count=1,
        context_length=64,
        embedding_length=64,
        head_count=1,
        layer_norm_rms_eps=1e-5,
        feed_forward_length=64,
        tokenizer_model="gpt2",
        tokenizer_pre=pre,
        token_list=metadata["tokenizer.ggml.tokens"],
        token_types=metadata["tokenizer.ggml.token_type"],
        token_merges=metadata["tokenizer.ggml.merges"],
    )
    finish(writer)
    vocab = load_vocab("llamacpp", str(tmp_path / "vocab.gguf"))
    tokenizer = build_tokenizer(metadata, vocab)
    for kind, text in TEXTS.items():
        expected = vocab.encode(text, add_bos=False, parse_special=True)
        assert tokenizer.encode(text, add_special_tokens=False).ids == expected, kind


# The files


def test_a_split_gguf_converts_from_any_part(llama: Tiny, tmp_path: Path) -> None:
    write_gguf(tmp_path / "parts.gguf", llama.model.config, llama.weights, split=8)
    parts = sorted(tmp_path.glob("parts-*.gguf"))
    assert len(parts) > 2
    convert(parts[1], tmp_path / "out", dtype="float32")
    expected, found = (
        safetensors_numpy.load_file(folder / "model.safetensors") for folder in (llama.folder, tmp_path / "out")
    )
    assert expected.keys() == found.keys()
    assert all(np.array_equal(expected[name], found[name]) for name in expected)


def test_shards_hold_every_tensor_once_and_load(llama: Tiny, tmp_path: Path) -> None:
    convert(llama.gguf, tmp_path / "out", dtype="float32", shard_bytes=100_000)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2
    assert sorted({*index["weight_map"].values()}) == [file.name for file in files]
    for file in files:
        held = safetensors_numpy.load_file(file)
        assert sum(values.nbytes for values in held.values()) <= 100_000
        assert all(index["weight_map"][name] == file.name for name in held)
    assert sum(index["metadata"].values()) == sum(values.nbytes for values in llama.weights.values())
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    np.testing.assert_allclose(transformers_logits(loaded, IDS), transformers_logits(llama.model, IDS), atol=1e-5)


def test_tensors_read_in_pieces_are_whole(llama: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgespec.models.convert.folder_from_gguf.CHUNK", 64 * 7)  # 288 rows are no multiple of 7
    convert(llama.gguf, tmp_path / "out", dtype="float32")
    file = "model.safetensors"
    assert (tmp_path / "out" / file).read_bytes() == (llama.folder / file).read_bytes()


def test_memory_stays_near_one_shard(tmp_path: Path) -> None:
    tensors = ((f"tensor{i}", np.full(2**20, i, np.uint8)) for i in range(40))
    tracemalloc.start()
    write_safetensors(tmp_path, tensors, 40 * 2**20, 4 * 2**20, lambda done: None)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(list(tmp_path.glob("*.safetensors"))) == 10
    assert peak < 7 * 2**20


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_are_rounded_to_nearest(llama: Tiny, tmp_path: Path, dtype: str) -> None:
    from safetensors.torch import load_file

    convert(llama.gguf, tmp_path / "out", dtype=dtype)
    written = load_file(tmp_path / "out/model.safetensors")
    for name, values in llama.weights.items():
        assert torch.equal(written[name], torch.from_numpy(values).to(getattr(torch, dtype))), name
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == getattr(torch, dtype)


def test_the_progress_ends_at_the_total(llama: Tiny, tmp_path: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    convert(llama.gguf, tmp_path / "out", dtype="float32", progress=lambda *call: calls.append(call))
    total = sum(values.nbytes for values in llama.weights.values())
    assert calls[0] == ("reading the header", 0, 0)
    assert calls[-1] == ("weights", total, total)
    assert [done for _, done, _ in calls] == sorted(done for _, done, _ in calls)


def test_mlx_loads_what_it_quantised(llama: Tiny, tmp_path: Path) -> None:
    pytest.importorskip("mlx_lm", reason="mlx-lm is not installed: pip install 'edgespec[mlx]'")
    convert(llama.gguf, tmp_path / "out", dtype="float32", bits=8)
    assert json.loads((tmp_path / "out/config.json").read_text())["quantization"]["bits"] == 8
    assert (tmp_path / "out/tokenizer.json").read_bytes() == (llama.folder / "tokenizer.json").read_bytes()
    rough, exact = mlx_logits(tmp_path / "out", IDS), transformers_logits(llama.model, IDS)
    assert 0 < np.abs(rough - exact).max() < 0.2 * np.abs(exact).max()


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_a_folder_that_mlx_can_stream(name: str, tmp_path: Path) -> None:
    """Every layer in a file of its own, experts as mlx-lm stacks them; the same numbers."""
    pytest.importorskip("mlx_lm", reason="mlx-lm is not installed: pip install 'edgespec[mlx]'")
    from edgespec.backends.mlx.loading import load_weights
    from edgespec.backends.mlx.memory import find_layout

    made = make_tiny(name, tmp_path)
    convert(made.gguf, tmp_path / "out", dtype="float32", to_mlx=True)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 3
    assert find_layout(load_weights(tmp_path / "out"), tmp_path / "out").rebuilt == ()
    np.testing.assert_array_equal(mlx_logits(tmp_path / "out", IDS), mlx_logits(made.folder, IDS))


# Refusals


def refused(source: Path, out: Path, error: type[EdgespecError], words: str, **options: Any) -> None:
    """One line that holds the words, and nothing new beside OUT."""
    before = sorted(out.parent.iterdir()) if out.parent.exists() else []
    with pytest.raises(error) as caught:
        convert(source, out, **options)
    message = str(caught.value)
    assert words in message
    assert "\n" not in message
    assert (sorted(out.parent.iterdir()) if out.parent.exists() else []) == before


def edited(source: Path, target: Path, changes: dict[str, Any], without: str = "", extra: str = "") -> Path:
    """A copy of a GGUF with other values in its header, one tensor less, or one more."""
    reader = Reader(source)
    writer = gguf.GGUFWriter(target, changes.get("general.architecture", "llama"))
    for key, value in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        kind, contents = value.types[0], changes.get(key, value.contents())
        writer.add_key_value(key, contents, kind, value.types[-1] if len(value.types) > 1 else None)
    for key in changes.keys() - reader.fields.keys():
        writer.add_uint32(key, changes[key])
    for tensor in reader.tensors:
        if tensor.name != without:
            writer.add_tensor(tensor.name, np.array(tensor.data))
    if extra:
        writer.add_tensor(extra, np.ones(64, np.float32))
    finish(writer)
    return target


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"changes": {"general.architecture": "rwkv7"}}, "architecture 'rwkv7' cannot be converted; these can: llama,"),
        ({"changes": {"llama.logit_scale": 3}}, "llama.logit_scale = 3, which cannot be carried over"),
        ({"changes": {"llama.attention.head_count": 2}}, "rows, not 2 heads x 32"),
        ({"changes": {"tokenizer.ggml.pre": "viking"}}, "pre-tokenizer is 'viking'; supported are gpt-2,"),
        ({"changes": {}, "without": "blk.1.ffn_up.weight"}, "the tensor blk.1.ffn_up.weight is missing"),
        ({"changes": {}, "extra": "blk.0.attn_sinks.weight"}, "a tensor blk.0.attn_sinks.weight, which llama does not"),
        ({"changes": {}, "extra": "rope_freqs.weight"}, ""),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_cannot_be_carried_over_is_named(llama: Tiny, tmp_path: Path, change: dict[str, Any], words: str) -> None:
    source = edited(llama.gguf, tmp_path / "edited.gguf", **change)
    if words:
        refused(source, tmp_path / "out", ModelError, words)
    else:  # factors of one change nothing
        convert(source, tmp_path / "out")
        assert "rope_scaling" not in json.loads((tmp_path / "out/config.json").read_text())


def test_no_gguf_and_no_whole_gguf(llama: Tiny, tmp_path: Path) -> None:
    data = llama.gguf.read_bytes()
    out = tmp_path / "out"
    cases = {"empty": b"", "other": b"PK\x03\x04 and so on", "magic": data[:4], "header": data[:3000]}
    for name, content in (cases | {"weights": data[: len(data) // 2], "last byte": data[:-1]}).items():
        (tmp_path / f"{name}.gguf").write_bytes(content)
    refused(tmp_path / "missing.gguf", out, ModelError, "there is no such file")
    refused(tmp_path, out, ModelError, "is a folder, not a GGUF file")
    for name in ("empty", "other"):
        refused(tmp_path / f"{name}.gguf", out, ModelError, "is not a GGUF file")
    for name in ("magic", "header", "weights", "last byte"):
        refused(tmp_path / f"{name}.gguf", out, ModelError, "is damaged or cut off")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.head_count", 0),
        ("embedding_length", "64"),
        ("block_count", 2.0),
        ("block_count", 2**31),
        ("attention.head_count_kv", "2"),
        ("context_length", -1),
        ("rope.freq_base", "x"),
        ("attention.layer_norm_rms_epsilon", [1]),
    ],
)
def test_a_number_that_is_none_is_named(llama: Tiny, key: str, value: Any) -> None:
    gguf = read_gguf(llama.gguf)
    shapes = {tensor.name: tuple(tensor.shape[::-1].tolist()) for tensor in gguf.tensors}
    with pytest.raises(ModelError, match=rf"is damaged: llama\.{key} is .*, but must be a "):
        model_config(gguf.metadata | {f"llama.{key}": value}, shapes)


def test_texts_that_are_not_utf8_and_a_wrong_count_of_parts(llama: Tiny, tmp_path: Path) -> None:
    data = llama.gguf.read_bytes()
    (tmp_path / "text.gguf").write_bytes(data.replace(b"tiny", b"\xfftin", 1))
    refused(tmp_path / "text.gguf", tmp_path / "out", ModelError, "is damaged or cut off")
    edited(llama.gguf, tmp_path / "parts.gguf", {"split.count": 2**31})
    refused(tmp_path / "parts.gguf", tmp_path / "out", ModelError, "split.count is 2147483648, but must be a whole")


def test_a_split_gguf_needs_its_parts(llama: Tiny, tmp_path: Path) -> None:
    write_gguf(tmp_path / "parts.gguf", llama.model.config, llama.weights, split=8)
    parts = sorted(tmp_path.glob("parts-*.gguf"))
    renamed = parts[0].rename(tmp_path / "one.gguf")
    refused(renamed, tmp_path / "out", ModelError, f"is one of {len(parts)} parts")
    refused(parts[1], tmp_path / "out", ModelError, f"{parts[0].name}: there is no such file")


def test_what_exists_is_not_touched(llama: Tiny, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("file", "folder", "link"):
        refused(llama.gguf, tmp_path / name, UsageError, "exists already")
    refused(llama.gguf, tmp_path / "no" / "out", UsageError, "there is no such folder")
    refused(llama.gguf, tmp_path / "out", UsageError, "dtype is 'int8'", dtype="int8")
    refused(llama.gguf, tmp_path / "out", UsageError, "bits is 7", bits=7)
    assert (tmp_path / "file").read_text() == "mine"


def test_float16_that_would_overflow_is_refused(llama: Tiny, tmp_path: Path) -> None:
    large = llama.weights | {"model.norm.weight": np.full(64, 1e5, np.float32)}
    source = write_gguf(tmp_path / "large.gguf", llama.model.config, large)
    refused(source, tmp_path / "out", ModelError, "output_norm.weight does not fit into float16", dtype="float16")
    convert(source, tmp_path / "out", dtype="bfloat16")


def test_a_full_disk_is_seen_before_and_during(llama: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import edgespec.models.convert.folder_from_gguf as module

    def full(*arguments: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(safetensors_numpy, "save_file", full)
        refused(llama.gguf, tmp_path / "out", EdgespecError, "cannot be written: No space left on device")
    usage = module.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    refused(llama.gguf, tmp_path / "out", EdgespecError, "only 0.0 GB are free")
    asked = list[int]()
    monkeypatch.setattr(module, "check_space", lambda out, needed: asked.append(needed))
    for number, options in enumerate(({}, {"to_mlx": True}, {"bits": 4, "dtype": "float16"})):
        convert(llama.gguf, tmp_path / f"out-{number}", **{"dtype": "float16", **options})
    assert asked[1:] == [2 * asked[0], asked[0] + asked[0] * 5 // 16]  # beside 16 bits: 4, and one for scales


def test_ctrl_c_leaves_nothing(llama: Tiny, tmp_path: Path) -> None:
    def interrupt(phase: str, done: int, total: int) -> None:
        if phase == "weights" and done > total / 2:
            assert list(tmp_path.glob(".out.*.partial/shard-*"))  # it was in the middle of writing
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(llama.gguf, tmp_path / "out", shard_bytes=10_000, progress=interrupt)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("package", ["gguf", "safetensors", "tokenizers", "ml_dtypes"])
def test_a_missing_package_is_named(llama: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    refused(llama.gguf, tmp_path / "out", MissingPackage, f"{package!r}: {pip_install('edgespec[convert]')}")


def test_the_command_converts(script: Run, llama: Tiny, tmp_path: Path) -> None:
    code, out, err = script(llama.gguf, "--to", "hf", tmp_path / "out", "--dtype", "float32")
    assert (code, err) == (0, "")
    assert out.startswith(f"{tmp_path / 'out'}: llama, 0.00 GB of float32 weights")
    for file in llama.folder.iterdir():
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()


def test_the_command_explains_itself_and_its_refusals(script: Run, llama: Tiny, tmp_path: Path) -> None:
    assert "--to hf model-folder" in script("--help")[1]
    code, _, err = script(llama.gguf, "--to", "hf", tmp_path / "out", "--bits", 4)
    assert (code, err.count("\n")) == (2, 1)
    code, _, err = script(SCRIPT, "--to", "hf", tmp_path / "out")
    assert (code, err.count("\n")) == (1, 1)
    assert "is not a GGUF file" in err
    assert not list(tmp_path.iterdir())


def test_what_is_quantised_is_not_quantised_again_without_a_word(script: Run, smollm2: Path, tmp_path: Path) -> None:
    code, _, err = script(smollm2, "--to", "mlx", tmp_path / "out", "--bits", 4)
    assert (code, err.count("\n")) == (1, 1)
    assert err.endswith("what is quantised twice is worse: take a file of 16 bits, or say --requantise\n")
    assert script(smollm2, "--to", "mlx", tmp_path / "out", "--requantise")[0] == 2
    assert not list(tmp_path.iterdir())
