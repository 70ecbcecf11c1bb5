"""Questions that only a GPU can answer: each has a row, whatever was seen, and the row says what that means."""

import re
import sys
from pathlib import Path

import pytest

from benchmarks.to_try import GPU, MAC, Question, Seen, answer_table, answers


def flat(text: str) -> str:
    """Without the lines of a table, and with one space between words."""
    return re.sub(r"[\s│┃┏┓└┘━─┡┩┴┬╇┳]+", " ", text)


@pytest.mark.parametrize("questions", [MAC, GPU], ids=["mac", "gpu"])
@pytest.mark.parametrize("value", [0, 1, 100])
def test_every_answer_has_a_meaning(questions: dict[str, Question], value: int) -> None:
    for name, question in questions.items():
        seen = {name: Seen(value, f"{value} was seen")}
        text = flat(answer_table(answers({name: question}, {}, seen)))
        meaning, other = question.then, question.otherwise
        if not question.holds(value):
            meaning, other = other, meaning
        for word in f"{question.about} {value} was seen {meaning}".split():
            assert word in text
        assert meaning != other


def test_a_measure_that_fails_is_a_row_too() -> None:
    def broken() -> Seen:
        raise OSError("no such device\nand more")

    measures = dict.fromkeys(GPU, broken) | {"two GPUs": lambda: Seen(2, "2 of them")}
    text = flat(answer_table(answers(GPU, measures, {"row classes": Seen(True, "yes, right")})))
    assert text.count("failed: no such device") == len(GPU) - 2
    assert "2 of them" in text
    assert "yes, right" in text
    assert "and more" not in text
    assert flat(answer_table(answers(GPU, {}, {}))).count("not tried") == len(GPU)


@pytest.mark.skipif(sys.platform == "win32", reason="streaming")
def test_every_question_has_a_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="needs PyTorch: pip install 'edgespec[torch]'")
    from benchmarks import gpu

    monkeypatch.setattr(gpu.torch.cuda, "device_count", lambda: 2)
    given = gpu.measures(None, gpu.CudaCopies).keys()
    assert given | {gpu.WIDE_TREES} == GPU.keys()


def test_every_question_of_a_mac_has_a_measure() -> None:
    pytest.importorskip("mlx_lm", reason="mlx-lm is not installed: pip install 'edgespec[mlx]'")
    from benchmarks import mac

    found = [mac.Found("a, 3 layers streamed, reads 0 ms later", False, ""), mac.Found("10 passes", True, "0 bytes")]
    assert mac.measures(Path(), "").keys() | mac.known(found).keys() == MAC.keys()
    assert mac.known(found)["streamed bits"] == Seen(False, "1 of 1 checks failed")
