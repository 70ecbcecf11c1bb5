"""Texts of numbers, whose tokens are the numbers."""


class NumberVocab:
    """A text is numbers with spaces between them."""

    bos_id = None
    eos_id = None
    eog_ids: frozenset[int] = frozenset()
    chat_template = tool_template = None
    size = 1000
    fingerprint = "numbers"

    def encode(self, text, *, add_bos, parse_special):
        return [int(number) for number in text.split()]

    def token_bytes(self, token_id):
        return b"%d " % token_id

    def token_text(self, token_id):
        return str(token_id)


def text_of(tokens):
    return " ".join(map(str, tokens))
