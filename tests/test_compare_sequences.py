"""Batched sequences against single ones: what is kept, resumed, and compared."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.compare_sequences import Written, count_equal, generate_sequences
from edgespec.errors import UsageError
from edgespec.loop.sampling import SamplingParams

PROMPTS = ("Count to five.", "Name a colour.")
SAMPLINGS = (SamplingParams(), SamplingParams(temperature=0.8, top_p=0.9))


def test_batched_sequences_equal_single_ones_and_a_stopped_check_resumes(smollm2_tiny: Path, tmp_path: Path) -> None:
    path, done = tmp_path / "texts.jsonl", []

    def written(**other: int) -> list[Written]:
        options: dict[str, Any] = {"parallel": 3, "context_length": 256, "remember": False, "budget": None, **other}
        return generate_sequences(
            str(smollm2_tiny), PROMPTS, SAMPLINGS, path, ["sssd"], max_tokens=12, done=lambda: done.append(1), **options
        )

    texts = written()
    assert count_equal(texts) == {("sssd", 0.0, 1.0): (2, 2), ("sssd", 0.8, 0.9): (2, 2)}
    assert len(done) == len(texts) == 8
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:6]) + lines[6][:20])  # stopped in the middle of a line
    again = {(text.planner, text.key): text.token_ids for text in written()}
    assert again == {(text.planner, text.key): text.token_ids for text in texts}
    assert len(path.read_text().splitlines()) == 8
    fewer = generate_sequences(
        str(smollm2_tiny), PROMPTS[:1], SAMPLINGS[:1], path, ["sssd"], max_tokens=12, parallel=3, context_length=256,
        remember=False, budget=None, done=lambda: done.append(1),
    )  # fmt: skip
    assert [(text.planner, text.prompt, text.temperature) for text in fewer] == [
        ("none", PROMPTS[0], 0.0), ("sssd", PROMPTS[0], 0.0),
    ], "what the file has besides is not counted"  # fmt: skip
    assert len(done) == 8 + 8 + 2
    for other in ({"parallel": 2}, {"budget": 4}, {"plain_batched": True}):
        with pytest.raises(UsageError, match=f"was made with other {next(iter(other))}"):
            written(**other)


def test_a_sequence_that_differs_is_counted(tmp_path: Path) -> None:
    plain = Written("none", "m", "a", 0.0, 1.0, "narrow", 3, [1, 2, 3], {})
    other = Written("sssd", "m", "a", 0.0, 1.0, "narrow", 2, [1, 2, 4], {})
    assert count_equal([plain, other]) == {("sssd", 0.0, 1.0): (0, 1)}


def test_sequences_of_other_targets_and_lengths_are_not_compared() -> None:
    plain = Written("none", "m, 12 tokens", "a", 0.0, 1.0, "narrow", 3, [1, 2, 3], {})
    assert count_equal([plain, Written("sssd", "m, 24 tokens", "a", 0.0, 1.0, "narrow", 2, [1, 2, 4], {})]) == {}


def test_sequences_of_different_row_classes_are_not_compared() -> None:
    plain = Written("none", "m", "a", 0.0, 1.0, "wide", 3, [1, 2, 3], {})
    with pytest.raises(UsageError, match="--exact"):
        count_equal([plain, Written("sssd", "m", "a", 0.0, 1.0, "narrow", 2, [1, 2, 3], {})])


@pytest.mark.parametrize(
    ("planner", "says"), [("sssdd", "there is no planner 'sssdd'"), ("chain", "needs a draft model")]
)
def test_a_planner_that_cannot_be_used_is_refused_before_plain_decoding(
    smollm2_tiny: Path, tmp_path: Path, planner: str, says: str
) -> None:
    path = tmp_path / "texts.jsonl"
    with pytest.raises(UsageError, match=says):
        generate_sequences(str(smollm2_tiny), PROMPTS[:1], SAMPLINGS[:1], path, ["sssd", planner], max_tokens=2)
    assert not path.exists()


@pytest.mark.parametrize("content", ["prose\n", json.dumps({"planner": "none"}) + "\n"])
def test_another_file_is_left_alone(tmp_path: Path, content: str) -> None:
    path = tmp_path / "notes.jsonl"
    path.write_text(content)
    with pytest.raises(UsageError, match="holds something else"):
        generate_sequences("model.gguf", PROMPTS, SAMPLINGS, path, ["sssd"])
    assert path.read_text() == content
