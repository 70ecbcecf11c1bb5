"""What a person sees while a model loads."""

import io
import re
import sys

import pytest

from edgespec.cli.terminal import LoadingBar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO) -> str:
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with LoadingBar("big.gguf") as bar:
        for done in range(5):
            bar.update(done << 30, 4 << 30)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())


def test_a_spinner_and_then_bytes_and_their_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(monkeypatch, Terminal())
    assert text.index("loading big.gguf") < text.index("reading big.gguf")
    assert "4.0/4.0 GiB" in text
    assert "/s" in text


def test_nothing_where_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch, io.StringIO()) == ""


def test_a_model_that_is_not_streamed_has_a_spinner_only(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    with LoadingBar("small.gguf"):
        pass
    assert "loading small.gguf" in stream.getvalue()
    assert "reading" not in stream.getvalue()
