"""Tokenizers of model folders: bytes, control tokens, ends, and fingerprints equal to llama.cpp's."""

import json
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="needs transformers: pip install 'edgespec[torch]'")

from edgespec.backends.common.hf_vocab import HfVocab, load_vocab
from edgespec.backends.common.model_folder import experts_of
from hf_models import VOCAB_SIZE, byte_tokenizer, piece_tokenizer, transformers
from tokenizers import Tokenizer, decoders, models
from tokenizers.processors import TemplateProcessing

from edgespec.errors import ModelError, VocabMismatch, pip_install
from edgespec.loop.same_vocab import MAX_PADDING, check_same_vocab

TEXTS = ["to be or not to be", " two  spaces\n\ttab", "žluťoučký kůň, 日本語, 🎉", "a</s>b<|im_end|>", ""]


def tokenizer_folder(folder: Path, tokenizer, size: int = VOCAB_SIZE, **config) -> Path:
    """What `load_vocab` reads: no weights."""
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": size} | config))
    return folder


@pytest.mark.parametrize("text", TEXTS)
def test_every_byte_of_byte_level_bpe_comes_back(text):
    vocab = HfVocab(byte_tokenizer(), VOCAB_SIZE)
    ids = vocab.encode(text, add_bos=False, parse_special=False)
    assert b"".join(map(vocab.token_bytes, ids)).decode() == text


@pytest.mark.parametrize("text", TEXTS)
def test_every_byte_of_sentencepiece_comes_back(text):
    vocab = HfVocab(piece_tokenizer(), 400)
    ids = vocab.encode(text, add_bos=False, parse_special=False)
    prefix = " " if text else ""  # SentencePiece puts a space before the first word
    assert b"".join(map(vocab.token_bytes, ids)).decode() == prefix + text


def test_sentencepiece_pieces():
    vocab = HfVocab(piece_tokenizer(), 400)
    ids = vocab.encode("to be\n", add_bos=False, parse_special=False)
    assert [vocab.token_text(token) for token in ids] == ["▁to", "▁be", "<0x0A>"]
    assert [vocab.token_bytes(token) for token in ids] == [b" to", b" be", b"\n"]


def test_control_tokens_are_text_only_when_asked():
    vocab = HfVocab(byte_tokenizer(), VOCAB_SIZE)
    for name in ("<s>", "</s>", "<|im_end|>"):  # the last is not marked as special, but looks it
        (token,) = vocab.encode(name, add_bos=False, parse_special=True)
        assert vocab.token_text(token) == name
        assert vocab.token_bytes(token) == b""
        assert token not in vocab.encode(f"a{name}", add_bos=False, parse_special=False)
    (tool,) = vocab.encode("<tool>", add_bos=False, parse_special=False)  # an added token that is plain text
    assert vocab.token_bytes(tool) == b"<tool>"


def test_where_generation_stops(tmp_path):
    folder = tokenizer_folder(tmp_path, byte_tokenizer(), eos_token_id=7)
    names = {load_vocab(str(folder)).token_text(token) for token in load_vocab(str(folder)).eog_ids}
    assert {"</s>", "<|im_end|>"} < names
    assert 7 in load_vocab(str(folder)).eog_ids
    (folder / "generation_config.json").write_text('{"eos_token_id": [8, 9, 5000]}')
    ends = load_vocab(str(folder)).eog_ids
    assert {8, 9} < ends
    assert not {7, 5000} & ends  # what generation_config.json says counts, as far as the model has such tokens


@pytest.mark.parametrize(
    ("names", "ends", "expected"),
    [
        (["<|end|>"], [], {"<|end|>"}),
        (["<|end|>", "<|return|>", "<|call|>"], [], {"<|return|>", "<|call|>"}),
        (["<|end|>", "<|return|>", "<|call|>"], ["<|end|>"], {"<|end|>", "<|return|>", "<|call|>"}),
    ],
)
def test_the_end_of_a_channel_is_not_that_of_the_answer(names, ends, expected):
    """As in llama.cpp: gpt-oss thinks, writes <|end|> and then answers."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": names})
    vocab = HfVocab(tokenizer, VOCAB_SIZE, tokenizer.convert_tokens_to_ids(ends))
    assert {*map(vocab.token_text, vocab.eog_ids)} & {*names} == expected
    (token,) = vocab.encode("<|end|>", add_bos=False, parse_special=True)
    assert vocab.token_bytes(token) == b""


def test_the_start_token_comes_first_where_the_tokenizer_puts_it():
    tokenizer = byte_tokenizer()
    assert HfVocab(tokenizer, VOCAB_SIZE).encode("a", add_bos=True, parse_special=False) != [0]
    plain = HfVocab(tokenizer, VOCAB_SIZE).encode("ab", add_bos=True, parse_special=False)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    vocab = HfVocab(tokenizer, VOCAB_SIZE)
    assert vocab.encode("ab", add_bos=True, parse_special=False) == [0, *plain]
    assert vocab.encode("ab", add_bos=False, parse_special=False) == plain


def test_what_a_folder_was_trained_with_cuts_and_pads_no_text(tmp_path):
    """Fine-tuned folders often have `truncation` and `padding` in their tokenizer.json."""
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    folder = tokenizer_folder(tmp_path, tokenizer)
    described = json.loads((folder / "tokenizer.json").read_text())
    padding = {"strategy": {"Fixed": 12}, "direction": "Left", "pad_to_multiple_of": None}
    described["padding"] = padding | {"pad_id": 1, "pad_type_id": 0, "pad_token": "</s>"}
    described["truncation"] = {"max_length": 8, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    (folder / "tokenizer.json").write_text(json.dumps(described))
    vocab = load_vocab(str(folder))
    for text in ("x " * 50, "hi"):
        ids = vocab.encode(text, add_bos=True, parse_special=False)
        assert b"".join(map(vocab.token_bytes, ids)).decode() == text
        assert [ids[0], len(ids)] == [0, 1 + len(text)]


def test_padding_at_the_end():
    tokenizer = byte_tokenizer()
    vocab, more = HfVocab(tokenizer, VOCAB_SIZE), HfVocab(tokenizer, VOCAB_SIZE + 64)
    last = VOCAB_SIZE - 1
    assert vocab.token_text(last) == f"[PAD{last}]"
    assert vocab.token_bytes(last) == b""
    assert vocab.fingerprint != more.fingerprint
    check_same_vocab(vocab, more)
    with pytest.raises(VocabMismatch, match="not 272"):
        check_same_vocab(vocab, HfVocab(tokenizer, VOCAB_SIZE + MAX_PADDING + 1))
    with pytest.raises(VocabMismatch, match="token 3 is '!' in the target and '<0x00>'"):
        check_same_vocab(vocab, HfVocab(piece_tokenizer(), VOCAB_SIZE))


def test_a_token_that_the_model_does_not_have():
    vocab = HfVocab(byte_tokenizer(), 200)
    with pytest.raises(ModelError, match="but the model has 200 tokens"):
        vocab.encode("žluťoučký <tool>", add_bos=False, parse_special=False)


def test_chat_templates(tmp_path):
    tokenizer = byte_tokenizer()
    assert HfVocab(tokenizer, VOCAB_SIZE).chat_template is None
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    assert load_vocab(str(tokenizer_folder(tmp_path, tokenizer))).chat_template == "{{ messages[0]['content'] }}"
    assert load_vocab(str(tmp_path)).tool_template is None
    tokenizer.chat_template = {"default": "one", "tool_use": "two"}
    vocab = load_vocab(str(tokenizer_folder(tmp_path, tokenizer)))
    assert (vocab.chat_template, vocab.tool_template) == ("one", "two")


@dataclass
class Slow:
    """A tokenizer that is not backed by the library tokenizers."""

    bos_token_id: int = 0
    eos_token_id: int = 1


def test_tokenizers_of_other_kinds(tmp_path):
    with pytest.raises(ModelError, match=r"is a Slow; one that tokenizer\.json describes"):
        HfVocab(Slow(), 10)
    words = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    words.decoder = decoders.WordPiece()
    folder = tokenizer_folder(tmp_path, transformers.PreTrainedTokenizerFast(tokenizer_object=words))
    with pytest.raises(ModelError, match="joins its tokens by WordPiece; byte-level BPE and SentencePiece"):
        load_vocab(str(folder))


def test_folders_that_are_not_models(tmp_path):
    folder, file = tmp_path / "folder", tmp_path / "file"
    with pytest.raises(ModelError, match="there is no such folder"):
        load_vocab(str(folder))
    file.touch()
    with pytest.raises(ModelError, match="is a file; a model folder"):
        load_vocab(str(file))
    folder.mkdir()
    with pytest.raises(ModelError, match=r"has no config\.json"):
        load_vocab(str(folder))
    for text, message in [
        ("{", r"config\.json cannot be used: ."),
        (9999 * "[", r"config\.json cannot be used: ."),
        ('{"model_type": "nonsense"}', r"config\.json cannot be used: .*nonsense"),
        ('{"model_type": "llama", "vocab_size": 9}', r"its tokenizer cannot be read: ."),  # there is none
    ]:
        (folder / "config.json").write_text(text)
        with pytest.raises(ModelError, match=message) as caught:
            load_vocab(str(folder))
        assert "\n" not in str(caught.value)
    tokenizer_folder(folder, byte_tokenizer())
    for text in ("[1]", 9999 * "["):
        (folder / "generation_config.json").write_text(text)
        with pytest.raises(ModelError, match=r"generation_config\.json: is damaged: it is n"):
            load_vocab(str(folder))
    for ends in ('"</s>"', "2.0", '[1, "</s>"]', "[[1]]"):
        (folder / "generation_config.json").write_text(f'{{"eos_token_id": {ends}}}')
        with pytest.raises(ModelError, match=r"folder: its eos_token_id is .*, but must be a token id or a list"):
            load_vocab(str(folder))


def test_where_a_package_is_missing_the_extra_of_the_engine_is_named():
    engines = [one for one, library in (("torch", "torch"), ("mlx", "mlx_lm")) if find_spec(library)]
    script = (
        "import sys\n"
        "from edgespec.loop.engines import load_vocab\n"
        "from edgespec.errors import MissingPackage\n"
        f"for engine in {engines}:\n"
        "    for package in ('tokenizers', 'transformers'):\n"
        "        sys.modules[package] = None\n"
        "        try: load_vocab(engine, 'folder')\n"
        "        except MissingPackage as error: print(error)\n"
        "        del sys.modules[package]"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    expected = [pip_install(f"edgespec[{engine}]") for engine in engines for _ in range(2)]
    assert [line.rpartition(": ")[2] for line in found.splitlines()] == expected


def test_smollm2_is_the_same_as_in_llama_cpp(smollm2, smollm2_hf):
    from edgespec.backends.llamacpp import vocab as llamacpp

    ours, theirs = load_vocab(str(smollm2_hf)), llamacpp.load_vocab(str(smollm2))
    for name in ("size", "bos_id", "eos_id", "eog_ids", "chat_template", "fingerprint", "longest"):
        assert getattr(ours, name) == getattr(theirs, name), name
    for token in range(ours.size):
        assert ours.token_bytes(token) == theirs.token_bytes(token)
        assert ours.token_text(token) == theirs.token_text(token)
    for text in (*TEXTS, "def f(x):\n    return x + 1234"):
        for parse_special in (False, True):
            options = {"add_bos": True, "parse_special": parse_special}
            assert ours.encode(text, **options) == theirs.encode(text, **options)


@pytest.mark.parametrize(
    ("config", "experts"),
    [
        ({"num_local_experts": 8, "num_experts_per_tok": 2}, (8, 2)),
        ({"num_experts": 128, "num_experts_per_tok": 8, "num_local_experts": None}, (128, 8)),
        ({"n_routed_experts": 64, "num_experts_per_tok": 6}, (64, 6)),
        ({"n_routed_experts": None, "num_experts_per_tok": None}, None),
        ({"num_experts": 0, "num_experts_per_tok": 2}, None),
        ({"num_experts": 4, "num_experts_per_tok": 4}, None),
        ({}, None),
    ],
)
def test_experts_of_a_mixture(config, experts):
    assert experts_of(config) == experts
