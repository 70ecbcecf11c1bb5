"""A GGUF's tokenizer, through llama.cpp."""

import ctypes
import hashlib
import weakref
from functools import cached_property
from typing import Any

from edgespec.errors import ModelError

from .ggml.files import llama_cpp, load_model


class LlamaVocab:
    """See `edgespec.loop.backend.Vocab`."""

    def __init__(self, model: Any) -> None:
        self._vocab = llama_cpp.llama_model_get_vocab(model)
        self.size: int = llama_cpp.llama_vocab_n_tokens(self._vocab)
        bos, eos = llama_cpp.llama_vocab_bos(self._vocab), llama_cpp.llama_vocab_eos(self._vocab)
        self.bos_id: int | None = bos if bos >= 0 else None
        self.eos_id: int | None = eos if eos >= 0 else None
        self.eog_ids = frozenset(i for i in range(self.size) if llama_cpp.llama_vocab_is_eog(self._vocab, i))
        template = llama_cpp.llama_model_chat_template(model, None)
        self.chat_template: str | None = template.decode("utf-8") if template else None
        self._pieces: dict[int, bytes] = {}

    def encode(self, text: str, *, add_bos: bool, parse_special: bool) -> list[int]:
        data = text.encode("utf-8")
        room = len(data) + 8
        buffer = (llama_cpp.llama_token * room)()
        count = llama_cpp.llama_tokenize(self._vocab, data, len(data), buffer, room, add_bos, parse_special)
        if count < 0:
            raise ModelError(f"the tokenizer cannot encode a text of {len(data)} bytes")
        return buffer[:count]

    def token_bytes(self, token_id: int) -> bytes:
        piece = self._pieces.get(token_id)
        if piece is None:
            buffer = ctypes.create_string_buffer(64)
            count = llama_cpp.llama_token_to_piece(self._vocab, token_id, buffer, len(buffer), 0, False)
            if count < 0:
                buffer = ctypes.create_string_buffer(-count)
                count = llama_cpp.llama_token_to_piece(self._vocab, token_id, buffer, len(buffer), 0, False)
            piece = self._pieces[token_id] = buffer.raw[:count]
        return piece

    def token_text(self, token_id: int) -> str:
        text: bytes = llama_cpp.llama_vocab_get_text(self._vocab, token_id)
        return text.decode("utf-8", "replace")

    def kind(self, token_id: int) -> int:
        """What sort of token it is: llama_token_attr in llama.h (normal, control, user-defined, …)."""
        return int(llama_cpp.llama_vocab_get_attr(self._vocab, token_id))

    @cached_property
    def fingerprint(self) -> str:
        texts = (llama_cpp.llama_vocab_get_text(self._vocab, i) for i in range(self.size))
        return hashlib.sha256(b"\0".join(texts)).hexdigest()


def load_vocab(path: str) -> LlamaVocab:
    """Only the tokenizer of a GGUF file; freed with the object. Raises ModelError as `load` does."""
    model = load_model(path, vocab_only=True)
    vocab = LlamaVocab(model)
    weakref.finalize(vocab, llama_cpp.llama_model_free, model)
    return vocab
