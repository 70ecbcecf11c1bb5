"""The recorder of texts, on made-up models: texts are equal however they are drafted, and what differs is found.

The models are two whose passes are not tried for classes of shapes, which takes long: one with recurrent layers, one
with windows.
"""

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
pytest.importorskip("gguf", reason="gguf is not installed: pip install 'edgespec[convert]'")

from record_texts import Case, _difference, ask_api, cases, main, record
from recorded_models import make_models

KINDS = ("hybrid", "windowed")
LOADS: dict[str, dict[str, Any]] = {
    "auto": {},
    "specexec": {"planner": "specexec", "budget": 8},
    "sssd": {"planner": "sssd", "budget": 8},
}
TOKENS = 10


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("recorded")
    assert make_models(folder, kinds=KINDS) == []
    return folder


def case(models: Path, kind: str, way: str = "api", **load: Any) -> Case:
    draft = {"draft": str(models / f"{kind}-draft.gguf")} if load.get("planner") in (None, "specexec") else {}
    return Case("text", way, str(models / f"{kind}.gguf"), {"context_length": 512, **load, **draft}, TOKENS)


@pytest.fixture(scope="module")
def plain(models: Path) -> dict[str, list[dict[str, Any]]]:
    """Plain decoding's answers, by the kind of model."""
    return {kind: ask_api(case(models, kind, planner="none")) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("planner", LOADS)
def test_texts_are_those_of_plain_decoding(
    models: Path, plain: dict[str, list[dict[str, Any]]], kind: str, planner: str
) -> None:
    answers = ask_api(case(models, kind, **LOADS[planner]))
    assert [_difference(a, b) for a, b in zip(plain[kind], answers, strict=True)] == [""] * len(answers)
    assert all(len(answer["tokens"]) == answer["count"] > 0 for answer in answers)
    if planner == "specexec":
        assert any("draft" in (answer["sources"] or ()) for answer in answers)


@pytest.mark.exhaustive
def test_the_server_and_the_command_are_recorded(models: Path) -> None:
    if not Path(sys.executable).with_name("edgespec").exists():
        pytest.skip("the command edgespec is not installed beside this Python")
    wanted = [case(models, "windowed", way, planner="none") for way in ("run", "serve")]
    found = [record([one], say=lambda line: None)["text"] for one in wanted]
    assert [one.get("error") for one in found] == [None, None]
    assert [len(one["answers"]) for one in found] == [2, 10]
    assert all(answer["count"] == TOKENS for one in found for answer in one["answers"])
    assert [answer["seed"] for answer in found[1]["answers"]] == [11, 12, 13, 14, 15] * 2


def test_all_models_in_the_folder_are_recorded(models: Path) -> None:
    found = list(cases(models))
    assert {one.name.partition(",")[0] for one in found} == set(KINDS)
    assert {one.way for one in found} == {"api", "run", "serve"}
    assert len({one.name for one in found}) == len(found)


class TestCompare:
    @pytest.fixture
    def recorded(self, plain: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
        return {kind: {"fixed": kind == "hybrid", "answers": answers} for kind, answers in plain.items()}

    @pytest.fixture
    def changed(self, recorded: dict[str, Any]) -> Any:
        return copy.deepcopy(recorded)

    def compared(self, folder: Path, old: dict[str, Any], new: dict[str, Any]) -> int:
        paths = [folder / "a.json", folder / "b.json"]
        for path, found in zip(paths, (old, new), strict=True):
            path.write_text(json.dumps({"cases": found}), "utf-8")
        return main(["--compare", *map(str, paths)])

    def test_equal_recordings(self, tmp_path: Path, recorded: Any, capsys: pytest.CaptureFixture[str]) -> None:
        assert self.compared(tmp_path, recorded, recorded) == 0
        assert capsys.readouterr().out == "20 texts equal, 0 texts other sources, 0 texts not compared\n"

    def test_a_changed_token(
        self, tmp_path: Path, recorded: Any, changed: Any, capsys: pytest.CaptureFixture[str]
    ) -> None:
        changed["windowed"]["answers"][3]["tokens"][7] += 1
        assert self.compared(tmp_path, recorded, changed) == 1
        out = capsys.readouterr().out
        assert "DIFFERENT: windowed, text 3: token 7: " in out
        assert out.count("DIFFERENT") == 1

    @pytest.mark.parametrize(("part", "value"), [("text", "x"), ("finish", "stop"), ("count", 3), ("seed", 99)])
    def test_what_else_of_a_text_has_changed(
        self, tmp_path: Path, recorded: Any, changed: Any, part: str, value: Any
    ) -> None:
        changed["hybrid"]["answers"][0][part] = value
        assert self.compared(tmp_path, recorded, changed) == 1

    def test_tokens_that_are_missing(self, tmp_path: Path, recorded: Any, changed: Any) -> None:
        del changed["hybrid"]["answers"][0]["tokens"][-1]
        assert self.compared(tmp_path, recorded, changed) == 1

    def test_other_sources_are_no_difference(
        self, tmp_path: Path, recorded: Any, changed: Any, capsys: pytest.CaptureFixture[str]
    ) -> None:
        changed["hybrid"]["answers"][0]["sources"][2] = "draft"
        changed["hybrid"]["answers"][1]["passes"] += 1
        assert self.compared(tmp_path, recorded, changed) == 0
        out = capsys.readouterr().out
        assert "text 0: equal tokens, token 2 was drafted by target and draft" in out
        assert "text 1: equal tokens, passes: " in out
        assert "20 texts equal, 2 texts other sources" in out

    def test_texts_of_another_class_are_compared_only_where_it_is_fixed(
        self, tmp_path: Path, recorded: Any, changed: Any, capsys: pytest.CaptureFixture[str]
    ) -> None:
        changed["windowed"]["answers"][0] |= {"class": "wide", "tokens": [1]}
        assert self.compared(tmp_path, recorded, changed) == 0
        assert "windowed, text 0: not compared" in capsys.readouterr().out
        changed["hybrid"]["answers"][0]["class"] = "wide"
        assert self.compared(tmp_path, recorded, changed) == 1

    @pytest.mark.parametrize("lacks", ["case", "text", "answers"])
    def test_what_was_not_recorded_is_a_difference(
        self, tmp_path: Path, recorded: Any, changed: Any, lacks: str
    ) -> None:
        if lacks == "case":
            del changed["hybrid"]
        elif lacks == "text":
            del changed["hybrid"]["answers"][-1]
        else:
            changed["hybrid"] = {"fixed": True, "error": "it was not loaded"}
        assert self.compared(tmp_path, recorded, changed) == 1
        assert self.compared(tmp_path, changed, recorded) == 1


def test_a_case_that_fails_is_told(models: Path) -> None:
    wrong = case(models, "hybrid", exact="narrow", planner="none")
    found = record([wrong], say=lambda line: None)["text"]
    assert "recurrent" in found["error"]
    assert "answers" not in found
