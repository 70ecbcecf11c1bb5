"""Markers in a model's text, some of which are control tokens: these have no bytes, only a name."""

import re

from edgespec.loop.backend import Vocab

MARKER = re.compile(r"(<[^<>\s]+>|\[/?[A-Z_]+\])")  # what may be the name of a control token


def parts_of(text: str) -> list[str]:
    """A text cut before and behind each marker."""
    return [part for part in MARKER.split(text) if part]


def control_tokens(vocab: Vocab, text: str) -> dict[str, int]:
    """Marker -> its token, of the text's markers that are control tokens."""
    found = dict[str, int]()
    for part in parts_of(text):
        ids = vocab.encode(part, add_bos=False, parse_special=True)
        if len(ids) == 1 and not vocab.token_bytes(ids[0]):
            found[part] = ids[0]
    return found
