"""scripts/bench-sssd: answers recorded once, guessed without the model."""

import json
import re
from pathlib import Path

import pytest

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
    assert answers.read_text() == before
    code, out, _ = script("measure", smollm2_tiny, answers, "--budget", "8")
    assert code == 0
    echo, rest, mean = map(float, re.search(r"text so far .*?([\d.]+) .*?([\d.]+) .*?([\d.]+) ", out).groups())
    assert mean == pytest.approx((echo + rest) / 2, abs=0.011)
    assert min(echo, rest) >= 1
    assert max(echo, rest) <= 9


@pytest.mark.parametrize("content", ['{"question": "1 2"}\n', "[1]\n", "{\n", '{"prompt": "no output"}', ""])
def test_bad_answers_are_one_line(script, smollm2_tiny, tmp_path, content):
    answers = tmp_path / "answers.jsonl"
    answers.write_text(content)
    code, _, err = script("measure", smollm2_tiny, answers)
    assert code != 0
    assert "answers.jsonl" in err
    assert len(err.splitlines()) == 1
