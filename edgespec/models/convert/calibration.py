"""Input for an importance matrix: prose, code and chat from the files of every Python."""

import sysconfig
from pathlib import Path
from typing import Any

from edgespec.errors import EdgespecError
from edgespec.loop.engines import load_vocab
from edgespec.loop.text import chat_text

PIECE = 1500  # characters of one kind before the next follows
SIZE = 400_000  # characters in all
CODE = ("argparse", "json/decoder", "heapq", "dataclasses", "textwrap", "statistics", "csv", "queue", "html/parser")


def calibration_text(path: str) -> str:
    """Pieces of prose, code and chat in the model's own template, in turns.

    Args:
        path: the model's GGUF, for its template.
    """
    prose = _pieces(english())
    library = Path(sysconfig.get_path("stdlib"))
    code = _pieces("\n\n".join((library / f"{name}.py").read_text("utf-8") for name in CODE))
    vocab = load_vocab("llamacpp", path)
    found = list[str]()
    for i in range(SIZE // (3 * PIECE)):
        words, lines = prose[i % len(prose)], code[i % len(code)]
        found += [words, lines, _turn(vocab, prose[-1 - i % len(prose)])]
    return "\n\n".join(found)


def english() -> str:
    """Prose that every Python has: the help on its language."""
    from pydoc_data.topics import topics

    return "\n\n".join(text for _, text in sorted(topics.items()))


def _pieces(text: str) -> list[str]:
    return [text[start : start + PIECE] for start in range(0, len(text) - PIECE, PIECE)]


def _turn(vocab: Any, text: str) -> str:
    question, _, answer = text.partition(".")
    try:
        messages = [{"role": "user", "content": f"Explain this: {question}."}, {"role": "assistant", "content": answer}]
        return chat_text(vocab, messages)
    except EdgespecError:  # no template, or one that refuses such messages
        return text
