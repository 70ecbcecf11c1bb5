"""Prompts for a gap in a text, in the tokens that models of code have for it."""

from collections.abc import Sequence
from dataclasses import dataclass

from edgespec.loop.backend import Vocab
from edgespec.server.errors import Refused

# Before the text in front of the gap, before the text behind it, and before what is to be written.
FORMS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    ("<PRE>", "<SUF>", "<MID>"),
)


@dataclass(frozen=True, slots=True)
class Gap:
    before: str
    behind: str

    def __len__(self) -> int:
        return len(self.before) + len(self.behind)

    def ids(self, vocab: Vocab) -> list[int]:
        """Raises Refused: the model has no tokens for it."""
        for names in FORMS:
            found = [vocab.encode(name, add_bos=False, parse_special=True) for name in names]
            if all(len(ids) == 1 and vocab.token_text(ids[0]) == name for ids, name in zip(found, names, strict=True)):
                parts: list[Sequence[int]] = [vocab.encode("", add_bos=True, parse_special=False)]
                for ids, text in zip(found, (self.before, self.behind, ""), strict=True):
                    parts += [ids, vocab.encode(text, add_bos=False, parse_special=False)]
                return [token for part in parts for token in part]
        raise Refused(400, "this model has no tokens for a text with a gap: leave out suffix", param="suffix")
