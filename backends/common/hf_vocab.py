"""The tokenizer of a model folder, through transformers.

Token texts are those that llama.cpp's converter writes into a GGUF (convert_hf_to_gguf.py, `get_vocab_base`), so that
fingerprints are equal across engines: unused ids at the end are named [PAD<id>].
"""

import hashlib
import json
import re
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from transformers import AutoTokenizer

from edgespec.errors import ModelError, named, shown
from edgespec.machine.files import read_json_object

from .model_folder import LOCAL, check_folder, read_config, refused

BYTE_LEVEL, SENTENCE_PIECE = "ByteLevel", "SentencePiece"

# Tokens that end a generation in every model: llama.cpp's list (llama-vocab.cpp).
END_TOKENS = frozenset(
    [
        *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>"),
        *("<|endoftext|>", "<|end_of_text|>", "<end_of_turn>", "<end_of_utterance>", "<EOT>", "_<EOT>", "[EOT]"),
        *("[EOS]", "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "<|fim_repo|>", "<|repo_name|>", "<fim-repo>"),
        *("<REPO>", "<reponame>", "<|file_sep|>"),
    ]
)
HARMONY = {"<|return|>", "<|call|>"}  # where these are tokens, <|end|> only ends a channel, and a next one comes
LOOKS_SPECIAL = re.compile(r"<\|.*\|>|<｜.*｜>|<unused.*>|<pad>|<mask>|<2mass>|\[@BOS@\]", re.DOTALL)
BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_level_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level BPE (`bytes_to_unicode` in GPT-2's encoder.py)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


ALPHABET = byte_level_alphabet()


class HfVocab:
    def __init__(self, tokenizer: Any, size: int, end_ids: Iterable[int] = ()) -> None:
        """
        Args:
            tokenizer: a transformers tokenizer backed by the library tokenizers.
            size: the width of the model's logits; may be more, and rarely less, than the tokenizer knows.
            end_ids: ids at which the model's configuration ends a generation.

        Raises:
            ModelError: the tokenizer is of another kind.
        """
        self.size = size
        self.bos_id: int | None = tokenizer.bos_token_id
        self.eos_id: int | None = tokenizer.eos_token_id
        self.chat_template, self.tool_template = _chat_templates(tokenizer)
        self._tokenizer: Any = getattr(tokenizer, "backend_tokenizer", None)
        if self._tokenizer is None:
            raise ModelError(
                f"the tokenizer is a {type(tokenizer).__name__}; one that tokenizer.json describes is needed"
            )
        # tokenizer.json may hold settings for training batches, which would cut and pad prompts.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._kind = _kind(self._tokenizer)
        added = self._tokenizer.get_added_tokens_decoder()
        self._added: dict[int, str] = {token: entry.content for token, entry in added.items()}
        texts = END_TOKENS - ({"<|end|>"} if {*self._added.values()} >= HARMONY else set())
        ends = {*end_ids, self.eos_id} | {token for token, text in self._added.items() if text in texts}
        self.eog_ids = frozenset(token for token in ends if token is not None and 0 <= token < size)
        special = {token for token, entry in added.items() if entry.special or LOOKS_SPECIAL.fullmatch(entry.content)}
        self._control = frozenset(special | self.eog_ids)
        # `encode_special_tokens` turns only tokens that are marked as special back into text.
        unmarked = [token for token in self._control if token not in added or not added[token].special]
        names = [text for text in map(self._text, unmarked) if text]
        self._tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
        first = self._tokenizer.encode("a", add_special_tokens=True).ids[:1]
        self._wants_bos = self.bos_id is not None and first == [self.bos_id]

    def encode(self, text: str, *, add_bos: bool, parse_special: bool) -> list[int]:
        self._tokenizer.encode_special_tokens = not parse_special
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        if ids and max(ids) >= self.size:
            token = max(ids)
            raise ModelError(
                f"the text holds {self._text(token)!r}, token {token}, but the model has {self.size} tokens"
            )
        return [self.bos_id, *ids] if add_bos and self._wants_bos and self.bos_id is not None else ids

    def token_bytes(self, token_id: int) -> bytes:
        text = self._text(token_id)
        if text is None or token_id in self._control:
            return b""
        if token_id in self._added:
            return text.encode("utf-8")
        if self._kind == BYTE_LEVEL:
            return b"".join(bytes([ALPHABET[char]]) if char in ALPHABET else char.encode("utf-8") for char in text)
        byte = BYTE_PIECE.fullmatch(text)
        return bytes([int(byte[1], 16)]) if byte else text.replace("▁", " ").encode("utf-8")

    def token_text(self, token_id: int) -> str:
        return self._text(token_id) or f"[PAD{token_id}]"

    def _text(self, token_id: int) -> str | None:
        text: str | None = self._tokenizer.id_to_token(token_id)
        return text

    @cached_property
    def longest(self) -> int:
        return max(len(self.token_text(token)) for token in range(self.size))

    @cached_property
    def fingerprint(self) -> str:
        texts = (self.token_text(token).encode("utf-8") for token in range(self.size))
        return hashlib.sha256(b"\0".join(texts)).hexdigest()


def _chat_templates(tokenizer: Any) -> tuple[str | None, str | None]:
    """The Jinja sources with the names "default" and "tool_use", if templates have names."""
    given = getattr(tokenizer, "chat_template", None)
    named = given if isinstance(given, dict) else {"default": given}
    default, tool_use = (one if isinstance(one := named.get(name), str) else None for name in ("default", "tool_use"))
    return default, tool_use


def _kind(tokenizer: Any) -> str:
    """The spelling of bytes in token texts, from the decoder's own description."""
    state = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder is not None else {}
    steps = state.get("decoders", [state])
    names = {step.get("type") for step in steps}
    if "ByteLevel" in names:
        return BYTE_LEVEL
    if "Metaspace" in names or any(step.get("pattern") == {"String": "▁"} for step in steps):
        return SENTENCE_PIECE
    raise ModelError(
        f"the tokenizer joins its tokens by {', '.join(sorted(map(str, names)))}; "
        f"byte-level BPE and SentencePiece tokenizers can be used"
    )


def load_vocab(path: str) -> HfVocab:
    """The tokenizer of a model folder, without network access and without running the folder's code.

    Raises:
        ModelError: the folder or its tokenizer is missing, damaged, or of a kind that cannot be used.
    """
    folder = check_folder(path)
    text_config = read_config(folder).get_text_config()
    with refused(f"{path}: its tokenizer cannot be read"):
        tokenizer = AutoTokenizer.from_pretrained(folder, **LOCAL)
    if not isinstance(getattr(text_config, "vocab_size", None), int):
        raise ModelError(f"{path}: config.json gives no vocab_size")
    ends = _end_ids(folder, text_config)
    with named(path):
        return HfVocab(tokenizer, text_config.vocab_size, ends)


def _end_ids(folder: Path, config: Any) -> list[int]:
    """`eos_token_id` of generation_config.json, else of config.json: an id or a list of ids."""
    ends = getattr(config, "eos_token_id", None)
    file = folder / "generation_config.json"
    if file.is_file():
        ends = read_json_object(file, ModelError).get("eos_token_id", ends)
    found = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if any(not isinstance(end, int | None) for end in found):
        raise ModelError(f"{folder}: its eos_token_id is {shown(ends)}, but must be a token id or a list of them")
    return [end for end in found if end is not None]
