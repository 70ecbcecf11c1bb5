"""scripts/bench-scaling: accuracy and target passes of votes, by the share of chunks that the target writes again."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.problems import number_in
from benchmarks.scaling import Settings, interval

SCRIPT = Path(__file__).parent.parent / "scripts" / "bench-scaling"
RECORDS = [
    {"question": "What is two plus two?", "answer": "2 + 2 = <<2+2=4>>4\n#### 4"},
    {"question": "What is two times five hundred?", "answer": "It is 1,000\n#### 1,000"},
]


@pytest.fixture
def asked(smollm2_tiny, smollm2_tiny_q2k, tmp_path):
    """The arguments of a run, and where its lines go."""
    problems, out = tmp_path / "problems.jsonl", tmp_path / "scaling.jsonl"
    problems.write_text("\n".join(map(json.dumps, RECORDS)))
    fixed = "--samples", "3", "--chunk", "6", "-n", "12", "--ctx", "128", "--rejects", "0.5"
    return (smollm2_tiny, smollm2_tiny_q2k, problems, out, *fixed), out


def lines(out):
    return [json.loads(line) for line in out.read_text().splitlines()]


def untimed(found):
    for line in found:
        assert line.pop("seconds") >= 0
    return found


METHODS = ["target, greedy", "target, majority", "draft, majority", "reject 0.5"]


def test_a_line_for_each_method_a_table_and_a_cut_file_goes_on(script, asked):
    run, out = asked
    code, shown, _ = script(*run)
    assert code == 0
    found = lines(out)
    questions = [record["question"] for record in RECORDS]
    assert [(line["question"], line["method"]) for line in found] == [
        (question, method) for question in questions for method in METHODS
    ]
    assert all(name in shown for name in METHODS)
    runs = {(line["question"], line["method"]): line for line in found}
    chunks = 0
    for question in questions:
        draft, both = runs[question, "draft, majority"], runs[question, "reject 0.5"]
        assert draft["passes"] == 0 < both["passes"]
        assert 0 <= both["rejected"] <= both["chunks"]
        chunks += both["chunks"]
        assert len(both["calibration"]) == chunks
    whole = out.read_text().splitlines(keepends=True)
    out.write_text("".join(whole[: len(METHODS)]) + whole[len(METHODS)][:60])  # a line was cut short
    assert script(*run)[0] == 0
    assert untimed(lines(out)) == untimed(found)
    before = out.read_text()
    assert script(*run)[0] == 0
    assert out.read_text() == before
    code, _, says = script(*run, "--chunk", "7", "--memory", "1K")  # before models are loaded
    assert code == 2
    assert says.strip().endswith(f"{out}: was made with other chunk: name another file, or a new one")


def test_several_problems_at_once_write_the_same_lines(script, asked):
    run, out = asked
    assert script(*run)[0] == 0
    alone = {(line["question"], line["method"]): line for line in lines(out)}
    out.unlink()
    assert script(*run, "--at-once", "2")[0] == 0
    found = lines(out)
    assert {(line["question"], line["method"]) for line in found} == alone.keys()
    for line in found:
        assert line["seconds"] is None
        for name in ("tokens", "chunks"):  # rounding depends on what shares a pass
            assert line[name] == alone[line["question"], line["method"]][name], name
        assert (line["passes"] == 0) == (line["method"] == "draft, majority")
    kept = out.read_text().splitlines(keepends=True)[:5]
    out.write_text("".join(kept))
    assert script(*run, "--at-once", "2")[0] == 0
    assert out.read_text().startswith("".join(kept))
    assert {(line["question"], line["method"]) for line in lines(out)} == alone.keys()


def test_more_texts_at_once_than_a_model_holds_are_refused(script, asked):
    code, _, said = script(*asked[0], "--samples", "16", "--rejects", "0.2,0.4", "--at-once", "3")
    assert code == 2
    assert "147 texts at once are needed, and 128 are the most: take a smaller --at-once, fewer --samples, or " in said
    settings = Settings(["a", "b"], "none", 8, 128, [0.2, 0.4, 0.6], 64, 0.7, 320, 0, 1024, at_once=3)
    assert (settings.sessions(draft=False), settings.sessions(draft=True)) == (99, 96)
    settings = replace(settings, at_once=None)
    assert (settings.sessions(draft=False), settings.sessions(draft=True)) == (8, 8)


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ({"question": "Why?"}, "needs a question and an answer in each line"),
        ({"question": "Why?", "answer": 5}, "needs a question and an answer in each line"),
        ({"question": "Why?", "answer": "#### because"}, "the answer to 'Why?' has no number"),
    ],
)
def test_problems_without_an_answer_are_refused(script, asked, record, says):
    run, out = asked
    run[2].write_text(json.dumps(record))
    code, _, found = script(*run)
    assert code == 2
    assert found.strip().endswith(f"{run[2]}: {says}")
    assert not out.exists()


def test_rejects_that_are_no_numbers_are_refused(script, asked):
    for given, says in [
        ("a", "--rejects is 'a', but must be numbers from 0 to 1, with commas in between"),
        ("0.5,2", "--rejects is '0.5,2', but must be numbers from 0 to 1"),
    ]:
        code, _, found = script(*asked[0], "--rejects", given)
        assert code == 2
        assert says in found
        assert not asked[1].exists()


def test_the_answer_is_the_last_number():
    assert number_in("3 apples and 4 pears: 7.") == "7"
    assert number_in("The answer is $1,250.50 a year") == "1250.5"
    assert number_in(r"\boxed{-18.00}") == "-18"
    assert number_in("100 %") == "100"
    assert number_in("none") is None


def test_the_interval_is_wilson_s():
    low, high = interval(50, 100)
    assert (round(low, 3), round(high, 3)) == (0.404, 0.596)
    assert interval(0, 10)[0] == pytest.approx(0)
