"""Questions that only a GPU can answer: each has a row, whatever was seen, and the row says what that means."""

import re
import sys
from pathlib import Path

import pytest

from benchmarks.to_try import GPU, MAC, Question, Seen, answers

SCRIPTS = Path(__file__).parent.parent / "scripts" / "benchmarks"
MAC_QUESTIONS = {
    "streamed bits", "row classes, llama.cpp", "row classes, MLX", "equal sizes, MLX", "probing", "MLX or llama.cpp",
    "op_offload", "exit", "free memory", "GPU limit", "2 GiB", "page size", "memory over time",
}  # fmt: skip
GPU_QUESTIONS = {
    "512 draft tokens", "pinned memory", "more buffers", "capped scores", "row classes", "equal sizes", "two GPUs",
    "4-bit folder",
}  # fmt: skip


def flat(text: str) -> str:
    """Without the lines of a table, and with one space between words."""
    return re.sub(r"[\s│┃┏┓└┘━─┡┩┴┬╇┳]+", " ", text)


def test_every_question_is_asked() -> None:
    assert (MAC.keys(), GPU.keys()) == (MAC_QUESTIONS, GPU_QUESTIONS)


@pytest.mark.parametrize("questions", [MAC, GPU], ids=["mac", "gpu"])
@pytest.mark.parametrize("value", [0, 1, 100])
def test_every_answer_has_a_meaning(questions: dict[str, Question], value: int) -> None:
    for name, question in questions.items():
        seen = {name: Seen(value, f"{value} was seen")}
        text = flat(answers("To try", {name: question}, {}, seen))
        meaning, other = question.then, question.otherwise
        if not question.holds(value):
            meaning, other = other, meaning
        for word in f"{name} {value} was seen {meaning}".split():
            assert word in text
        assert meaning != other


def test_the_whole_table_of_a_mac() -> None:
    """As a report would have it: texts of the usual lengths, one that was not tried and one that failed."""

    def fails() -> Seen:
        raise OSError("memory_pressure: command not found")

    texts = {
        "streamed bits": (True, "0 of 12 checks failed"),
        "row classes, llama.cpp": (False, "no row class, so the text is that of plain decoding up to rounding ties"),
        "row classes, MLX": (False, "no row class"),
        "equal sizes, MLX": (True, "0 of 786432 logits differ"),
        "probing": (41.2, "41.2 s; no row class"),
        "MLX or llama.cpp": (2.1, "streamed pass over 64 nodes: llamacpp 8.400 s, mlx 4.000 s; remembered"),
        "op_offload": (0.9, "without 1.900 s, with 2.100 s"),
        "exit": (0, "0"),
        "GPU limit": (0.67, "10.67 GiB of 16.00 GiB, iogpu.wired_limit_mb = 0"),
        "2 GiB": (True, "the sum of 536870928 words is 536870928"),
        "page size": (1.0, "pages of 16384: 2.90 GB/s, blocks 2.90 GB/s"),
    }
    seen = {name: Seen(*one) for name, one in texts.items()}
    shown = answers("To try", MAC, {"free memory": fails}, seen)
    lines = shown.splitlines()
    assert max(map(len, lines)) <= 110
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]
    assert "│ not tried " in shown
    rows: list[list[str]] = []
    for name, *others in cells:
        if name in MAC or name == "row classes,":  # which goes on in the next line
            rows.append([name, *others])
        else:
            rows[-1] = [f"{one} {more}".strip() for one, more in zip(rows[-1], [name, *others], strict=True)]
    found = {name: (about, text, means) for name, about, text, means in rows}
    assert found.keys() == MAC.keys()
    for name, question in MAC.items():
        about, text, means = found[name]
        assert about == question.about
        if name in texts:
            assert text == texts[name][1]
            assert means == (question.then if question.holds(texts[name][0]) else question.otherwise)
    assert found["free memory"][1:] == ("failed: memory_pressure: command not found", "")
    assert found["memory over time"][1:] == ("not tried", "")


def test_a_measure_that_fails_is_a_row_too() -> None:
    def broken() -> Seen:
        raise OSError("no such device\nand more")

    measures = dict.fromkeys(GPU, broken) | {"two GPUs": lambda: Seen(2, "2 of them")}
    text = flat(answers("To try", GPU, measures, {"row classes": Seen(True, "yes, right")}))
    assert text.count("failed: no such device") == len(GPU) - 2
    assert "2 of them" in text
    assert "yes, right" in text
    assert "and more" not in text
    assert flat(answers("To try", GPU, {}, {})).count("not tried") == len(GPU)


@pytest.mark.skipif(sys.platform == "win32", reason="streaming")
def test_every_question_has_a_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="needs PyTorch: pip install 'edgespec[torch]'")
    from benchmarks import gpu

    monkeypatch.setattr(gpu.torch.cuda, "device_count", lambda: 2)
    given = gpu.measures(None, gpu.CudaCopies, Path()).keys()
    report = gpu.Report("nf4", 1, 1, 1, 1, 1, 1.0, [gpu.Row(1, 1.0, 1, 1), gpu.Row(512, 1.5, 1, 1)])
    assert given | gpu.known([report]).keys() == GPU.keys()
    assert gpu.known([report])["512 draft tokens"].value == 1.5


def test_every_question_of_a_mac_has_a_measure() -> None:
    pytest.importorskip("mlx_lm", reason="mlx-lm is not installed: pip install 'edgespec[mlx]'")
    from benchmarks import mac

    found = [mac.Found("a, 3 layers streamed, reads 0 ms later", False, ""), mac.Found("10 passes", True, "0 bytes")]
    assert mac.measures(Path(), "").keys() | mac.known(found).keys() == MAC.keys()
    assert mac.known(found)["streamed bits"] == Seen(False, "1 of 1 checks failed")
