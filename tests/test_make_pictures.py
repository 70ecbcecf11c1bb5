"""scripts/make-pictures: a terminal's lines as an animation, charts, and the house of rooms."""

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from edgespec.errors import EdgespecError
from pictures import charts, rooms

SCRIPT = Path(__file__).parent.parent / "scripts" / "make-pictures"
SVG = "{http://www.w3.org/2000/svg}"


def drawn(path):
    """The texts of a picture, each with its runs."""
    texts = ElementTree.parse(path).getroot().iter(f"{SVG}text")
    return {"".join(text.itertext()): text for text in texts}


def test_the_house_has_every_room_of_the_table(tmp_path):
    rooms.house(tmp_path / "rooms.svg")
    texts = drawn(tmp_path / "rooms.svg")
    table = rooms.floors()
    assert len(table) > 5
    for floor, names, _ in table:
        assert {str(floor), *names} <= texts.keys()


def test_a_recording_has_colours_and_ends_with_the_last_screen(tmp_path):
    pytest.importorskip("pyte", reason="no recordings: pip install pyte")
    from pictures.terminal import record

    program = "printf 'wait'; sleep 0.2; printf '\\r\\033[Ka \\033[32m<b>\\033[0m\\n'"
    record(["sh", "-c", program], "answer", tmp_path / "run.svg", tmp_path)
    texts = drawn(tmp_path / "run.svg")
    assert {"$ answer", "wait", "a <b>"} <= texts.keys()
    assert [(run.text, run.get("style")) for run in texts["a <b>"]] == [("a ", None), ("<b>", "fill:#56d364;")]
    style = next(ElementTree.parse(tmp_path / "run.svg").iter(f"{SVG}style")).text
    hidden = {name for name in ("$ answer", "wait", "a <b>") if f".{texts[name].get('class')}{{visibility" in style}
    assert hidden == {"wait"}


def test_without_pyte_only_the_terminals_are_one_line(script, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyte", None)
    assert script("--help")[0] == 0
    code, _, said = script("big", "small", "--only", "run", "--out", tmp_path)
    assert (code, said.count("\n")) == (1, 1)
    assert said.startswith("edgespec: a picture of a terminal needs the package 'pyte': ")


def test_a_command_that_fails_leaves_no_picture(tmp_path):
    pytest.importorskip("pyte", reason="no recordings: pip install pyte")
    from pictures.terminal import record

    with pytest.raises(EdgespecError, match=r"exit code 3: broken$"):
        record(["sh", "-c", "echo broken; exit 3"], "answer", tmp_path / "run.svg", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_charts_have_a_bar_a_run_and_a_line_a_way_and_no_background(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'edgespec[bench]'")
    stats = {"draft_seconds": 2.0, "target_seconds": 5.0, "wait_seconds": 3.0, "plan_seconds": 1.0, "passes": 4,
             "acceptance_length": 6.5}  # fmt: skip
    charts.rounds({"plain": stats | {"acceptance_length": 1.0}, "drafted": stats}, "a title", tmp_path / "round.svg")
    texts = drawn(tmp_path / "round.svg")
    assert {"plain", "drafted", "a title", *charts.COLOURS} <= texts.keys()
    assert {text.strip() for text in texts} >= {"1.0 tokens", "6.5 tokens"}
    charts.by_memory([8, 16], {"one": [1, 2], "two": [2, 4]}, "another", tmp_path / "memory.svg")
    assert {"one", "two", "another", "8", "16"} <= drawn(tmp_path / "memory.svg").keys()
    for name in ("round.svg", "memory.svg"):
        assert "#ffffff" not in (tmp_path / name).read_text()


def test_wrong_models_are_refused_before_the_first_picture(script, tmp_path):
    pytest.importorskip("pyte", reason="no recordings: pip install pyte")
    out = tmp_path / "pictures"
    code, shown, said = script("no.gguf", "no.gguf", "--out", out)
    assert (code, shown, len(said.splitlines())) == (1, "", 1)
    assert "no.gguf: there is no such file" in said
    assert not out.exists()
