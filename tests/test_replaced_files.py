"""A file is replaced only by one of its own kind."""

import os
import sys
from pathlib import Path

import pytest
from conftest import Run

from edgespec.errors import UsageError
from edgespec.machine.files import check_out, write_whole


def test_only_a_file_of_its_kind_is_replaced(tmp_path: Path) -> None:
    for name, content in [("own", b"PIC and more"), ("other", b"# Tides"), ("empty", b""), ("short", b"PI")]:
        (tmp_path / name).write_bytes(content)
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    names = ["other", "empty", "short", "folder", "link"]
    if sys.platform != "win32":
        os.mkfifo(tmp_path / "pipe")
        names.append("pipe")
    for name in ("own", "new"):
        check_out(tmp_path / name, b"PIC", "a picture")
    for name in names:
        with pytest.raises(
            UsageError, match=f"{name}: exists and is not a picture, so it is not replaced: give another"
        ):
            check_out(tmp_path / name, b"PIC", "a picture")
    with pytest.raises(UsageError, match="there is no folder"):
        check_out(tmp_path / "nowhere" / "x", b"PIC", "a picture")


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    write_whole(tmp_path / "x", "old")
    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(tmp_path / "x", b"new")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("x", "old")]


@pytest.mark.parametrize(
    "arguments",
    [
        ["serve", "wire", "smollm2-135m", "--llama-server", "none", "--record", "notes.md"],
        ["accuracy", "m.gguf", "p.jsonl", "notes.md"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_benchmarks_replace_no_note_of_the_user(
    bench: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    for name, content in [
        ("notes.md", "# Tides"),
        ("m.gguf", "GGUF"),
        ("p.jsonl", '{"question": "", "answer": "1"}\n'),
    ]:
        (tmp_path / name).write_text(content)
    monkeypatch.chdir(tmp_path)
    code, _, said = bench(*arguments)
    assert code == 2
    assert "notes.md: " in said.splitlines()[-1], said
    assert (tmp_path / "notes.md").read_text() == "# Tides"


@pytest.mark.skipif(os.name == "nt", reason="no such rights")
def test_a_new_file_has_the_usual_rights(tmp_path: Path) -> None:
    (tmp_path / "usual").write_text("")
    write_whole(tmp_path / "x", "new")
    assert (tmp_path / "x").stat().st_mode == (tmp_path / "usual").stat().st_mode
