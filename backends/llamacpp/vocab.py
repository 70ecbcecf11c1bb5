"""The tokenizer of a GGUF file, through llama.cpp."""

import ctypes
import hashlib
import re
from functools import cached_property
from typing import Any

from edgespec.errors import Closed, ModelError
from edgespec.machine.process import at_end

from .ggml.files import TEMPLATES, llama_cpp, load_model

PIECE = 2**12  # bytes
TAG = re.compile(rb"<[^<>\[\]\s]+>|\[[^<>\[\]\s]+\]")
EDGE = re.compile(rb"[<>\[\]]")
SHORTEST = 3  # bytes of a tag
CONTROL, LEFT_STRIP = llama_cpp.LLAMA_TOKEN_ATTR_CONTROL, llama_cpp.LLAMA_TOKEN_ATTR_LSTRIP
SPECIAL = CONTROL | llama_cpp.LLAMA_TOKEN_ATTR_USER_DEFINED | llama_cpp.LLAMA_TOKEN_ATTR_UNKNOWN


class _LoadedModel:
    """A model that is freed after its last reader."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.vocab = llama_cpp.llama_model_get_vocab(model)


class LlamaVocab:
    """See `edgespec.loop.backend.Vocab`; thread-safe, also against `close`."""

    def __init__(self, model: Any) -> None:
        self._model: _LoadedModel | None = _LoadedModel(model)
        vocab = self._model.vocab
        self.size: int = llama_cpp.llama_vocab_n_tokens(vocab)
        bos, eos = llama_cpp.llama_vocab_bos(vocab), llama_cpp.llama_vocab_eos(vocab)
        self.bos_id: int | None = bos if bos >= 0 else None
        self.eos_id: int | None = eos if eos >= 0 else None
        self.eog_ids = frozenset(i for i in range(self.size) if llama_cpp.llama_vocab_is_eog(vocab, i))
        found = (llama_cpp.llama_model_chat_template(model, name) for name in TEMPLATES)
        templates = [template.decode("utf-8") if template else None for template in found]
        self.chat_template: str | None = templates[0]
        self.tool_template: str | None = templates[1]
        self._pieces: dict[int, bytes] = {}

    def close(self) -> None:
        """Free the model as soon as no other thread reads its vocabulary; later calls raise Closed."""
        model, self._model = self._model, None
        if model:
            at_end(model, llama_cpp.llama_model_free, model.model)

    def _open(self) -> _LoadedModel:
        """
        Returns:
            The model, which lives at least as long as the caller's reference.

        Raises:
            Closed: after `close`.
        """
        if (model := self._model) is None:
            raise Closed
        return model

    def encode(self, text: str, *, add_bos: bool, parse_special: bool) -> list[int]:
        data = text.encode("utf-8")
        if not parse_special or len(data) < 2 * PIECE or (add_bos and self._adds_eos):
            return self._encoded(data, add_bos, parse_special)
        starts = [0]
        for found in TAG.finditer(data):
            if found.start() - starts[-1] >= PIECE and found[0] in self._cuts:
                starts.append(found.start())
        pieces = [data[start:end] for start, end in zip(starts, [*starts[1:], len(data)], strict=True)]
        return [token for i, piece in enumerate(pieces) for token in self._encoded(piece, add_bos and i == 0, True)]

    @property
    def _adds_eos(self) -> bool:
        return bool(llama_cpp.llama_vocab_get_add_eos(self._open().vocab))

    @cached_property
    def _cuts(self) -> frozenset[bytes]:
        """Tags before which a text may be cut, since no token of the vocabulary reaches across their beginning.

        Of a whole text, llama.cpp's time grows with the square of the number of control tokens.
        """
        model = self._open()
        kinds = {token: kind for token in range(self.size) if (kind := self.kind(token)) & SPECIAL}
        texts = {token: llama_cpp.llama_vocab_get_text(model.vocab, token) for token in kinds}
        longer = [text for text in texts.values() if len(text) >= SHORTEST]
        if any(EDGE.search(TAG.sub(b"", text)) for text in longer):  # a part of a tag
            return frozenset()
        within = {tag for text in longer for tag in TAG.findall(text) if tag != text}
        tags = {text for token, text in texts.items() if kinds[token] & (CONTROL | LEFT_STRIP) == CONTROL}
        return frozenset(tag for tag in tags - within if TAG.fullmatch(tag))

    def _encoded(self, data: bytes, add_bos: bool, parse_special: bool) -> list[int]:
        model, room = self._open(), len(data) + 8
        buffer = (llama_cpp.llama_token * room)()
        count = llama_cpp.llama_tokenize(model.vocab, data, len(data), buffer, room, add_bos, parse_special)
        if count < 0:
            raise ModelError(f"the tokenizer cannot encode a text of {len(data)} bytes")
        return buffer[:count]

    def token_bytes(self, token_id: int) -> bytes:
        piece = self._pieces.get(token_id)
        if piece is None:
            model, buffer = self._open(), ctypes.create_string_buffer(64)
            count = llama_cpp.llama_token_to_piece(model.vocab, token_id, buffer, len(buffer), 0, False)
            if count < 0:
                buffer = ctypes.create_string_buffer(-count)
                count = llama_cpp.llama_token_to_piece(model.vocab, token_id, buffer, len(buffer), 0, False)
            piece = self._pieces[token_id] = buffer.raw[:count]
        return piece

    def token_text(self, token_id: int) -> str:
        model = self._open()
        text: bytes = llama_cpp.llama_vocab_get_text(model.vocab, token_id)
        return text.decode("utf-8", "replace")

    def kind(self, token_id: int) -> int:
        """The token's flags, such as normal or control: llama_token_attr in llama.h."""
        model = self._open()
        return int(llama_cpp.llama_vocab_get_attr(model.vocab, token_id))

    @cached_property
    def longest(self) -> int:
        return max(len(self.token_text(token)) for token in range(self.size))

    @cached_property
    def fingerprint(self) -> str:
        model = self._open()
        texts = (llama_cpp.llama_vocab_get_text(model.vocab, i) for i in range(self.size))
        return hashlib.sha256(b"\0".join(texts)).hexdigest()


def load_vocab(path: str) -> LlamaVocab:
    """Load only the tokenizer of a GGUF file; the model is freed with the returned object.

    Raises:
        ModelError: as for `load_model`.
    """
    model = load_model(path, vocab_only=True)
    vocab = LlamaVocab(model)
    at_end(vocab, llama_cpp.llama_model_free, model)
    return vocab
