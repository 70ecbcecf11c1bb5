"""scripts/bench-sssd: answers recorded once, guessed without the model."""

import json
import re
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from edgespec.loop.engines import load_vocab
from edgespec.measure.replay import Recording
from edgespec.planners.datastore import build

SCRIPT = Path(__file__).parent.parent / "scripts" / "bench-sssd"


def test_answers_are_recorded_once_and_guessed(script, smollm2_tiny, tmp_path):
    prompts, answers = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    questions = [{"prompt": "Say it again, again, again and again.", "category": "echo"}, {"prompt": "Why?"}]
    prompts.write_text("\n".join(map(json.dumps, questions)))
    record = "record", smollm2_tiny, prompts, answers, "-n", "24", "--ctx", "256"
    assert script(*record)[0] == 0
    lines = [json.loads(line) for line in answers.read_text().splitlines()]
    assert [(line["question"], line["category"]) for line in lines] == [(questions[0]["prompt"], "echo"), ("Why?", "")]
    assert all(line["output_ids"] for line in lines)
    before = answers.read_text()
    assert script(*record)[0] == 0
    for options, other in ((("-n", "25"), "max_tokens"), (("-n", "24", "--ctx", "300"), "ctx")):
        code, _, err = script(*record[:4], "--ctx", "256", *options)
        assert (code, err.splitlines()[-1]) == (
            2, f"edgespec: {answers}: was made with other {other}: name another file, or a new one"
        )  # fmt: skip
    assert answers.read_text() == before
    code, out, _ = script("measure", smollm2_tiny, answers, "--budget", "8")
    assert code == 0
    echo, rest, mean = figures(out, "text")
    assert mean == pytest.approx((echo + rest) / 2, abs=0.011)
    assert min(echo, rest) >= 1
    assert max(echo, rest) <= 9


def figures(out, row):
    """The acceptance lengths in a row of the table: of each category, and their mean."""
    return [
        float(each) for each in re.search(rf"^\W*{row} .*", out, re.M)[0].split() if re.fullmatch(r"\d+\.\d\d", each)
    ]


def test_a_datastore_of_the_answers_is_copied_from_and_more_of_it_gives_more(script, smollm2_tiny, tmp_path):
    answers, texts, store = tmp_path / "answers.jsonl", tmp_path / "texts.jsonl", tmp_path / "text.store"
    vocab = load_vocab("llamacpp", str(smollm2_tiny))
    answered = [f"In {year} there were {year % 7} ships, and {year % 11} came home." for year in range(1700, 1720)]
    lines = [
        Recording([1, 2, 3], vocab.encode(text, add_bos=False, parse_special=False), "", "Which ships came home?")
        for text in answered
    ]
    answers.write_text("".join(json.dumps(asdict(line)) + "\n" for line in lines))
    asked = {"question": "Which ships came home?", "answer": "\n".join(answered)}
    texts.write_text("\n".join(map(json.dumps, [*answered[:2], asked])))
    build(store, answered, vocab)
    every = "text,datastore,both,rest,pia,first-match"
    code, out, _ = script("measure", smollm2_tiny, answers, "--datastore", store, "--sources", every)
    assert code == 0
    (text,), (rest,), (both,) = ({*figures(out, row)} for row in ("text", "rest", "both"))
    assert rest > text < both
    assert {row for row in every.split(",") if figures(out, row)} == set(every.split(","))
    code, out, said = script("sizes", smollm2_tiny, answers, texts, "--tokens", "1,9999999")
    assert code == 0
    least, most = (float(line.rsplit(" ", 4)[1]) for line in said.splitlines() if "datastore:" in line)
    assert least < most
    assert re.findall(r"(\d+) .\W+datastore ", out) == ["1", "2"], "what answers the questions is left out"
    for arguments in (
        ("measure", "--sources", "rest"),
        ("measure", "--sources", "rust"),
        ("sizes", texts, "--tokens", "a"),
    ):
        code, _, err = script(arguments[0], smollm2_tiny, answers, *arguments[1:])
        assert (code, len(err.splitlines())) == (2, 1), err


def line(**fields):
    return json.dumps({"prompt_ids": [1], "output_ids": [2, 3]} | fields) + "\n"


@pytest.mark.parametrize(
    "content",
    ['{"question": "1 2"}\n', "[1]\n", "{\n", '{"prompt": "no output"}', "", line(prompt_ids="no"), line(prompt_ids=[]),
     line(output_ids=["a", "b"]), line(output_ids=[-1, 2]), line(output_ids=[]), line(output_ids=[5])],
)  # fmt: skip
def test_bad_answers_are_one_line(script, smollm2_tiny, tmp_path, content):
    answers = tmp_path / "answers.jsonl"
    answers.write_text(content)
    code, _, err = script("measure", smollm2_tiny, answers)
    assert code != 0
    assert "answers.jsonl" in err
    assert len(err.splitlines()) == 1


def test_a_recording_that_cannot_begin_leaves_no_file(script, tmp_path):
    prompts, answers = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    prompts.write_text('{"prompt": "Why?"}\n')
    for arguments in (("no.gguf", prompts, answers), ("no.gguf", tmp_path / "no.jsonl", answers)):
        code, _, err = script("record", *arguments)
        assert (code in (1, 2), len(err.splitlines())) == (True, 1), err
        assert not answers.exists()
    code, _, err = script("record", "no.gguf", prompts, tmp_path / "no" / "answers.jsonl")
    assert code == 2
    assert "there is no folder" in err


def test_answers_of_another_model_are_refused(script, smollm2_tiny, tmp_path, monkeypatch):
    answers = tmp_path / "answers.jsonl"
    answers.write_text(line() + line(output_ids=[2, 49151]))
    for name, arguments in (("train-branches", []), ("simulate-dsi", ["acceptance"])):
        monkeypatch.setattr(sys.modules[__name__], "SCRIPT", SCRIPT.with_name(name))
        code, _, err = script(*arguments, smollm2_tiny, answers)
        assert code == 1
        assert err.strip().endswith(f"{answers}: has the token 49151, but the draft's vocabulary has 4096 tokens")
