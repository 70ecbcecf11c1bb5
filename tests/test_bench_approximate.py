"""scripts/bench-approximate: answers are checked, code of models is kept in, and a run goes on where it stopped."""

import json
import socket
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from benchmarks.approximate import EXACT, RULES, Answer, Settings, mcnemar, quality_table, read_problems, runs
from benchmarks.problems import read_questions
from edgespec.errors import UsageError
from edgespec.lab.cascade import mixture
from edgespec.loop.sampling import SamplingParams

SCRIPT = Path(__file__).parent.parent / "scripts" / "bench-approximate"
TASK = {
    "task_id": "HumanEval/0", "entry_point": "double",
    "prompt": 'from math import pi\n\n\ndef double(x: float) -> float:\n    """Twice x."""\n',
    "test": "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(pi) == 2 * pi\n",
}  # fmt: skip
SUM = {"question": "How many are 1,200 and 34?", "answer": "1,200 + 34 = <<1200+34=1234>>\n#### 1,234"}


@pytest.fixture
def problems(tmp_path):
    def call(*records):
        path = tmp_path / "problems.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return path

    return call


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("So it is #### 1234", True), ("So it is #### 1,234.0 apples", True), ("1,234", True), ("", False),
        ("#### 12345", False), ("1234, less 4: #### 1230", False), ("#### none", False), ("2 + 3 = 1234.", True),
    ],
)  # fmt: skip
def test_numbers_are_compared_as_numbers(problems, answer, right):
    [problem] = read_problems(problems(SUM), None)
    assert problem.is_right(answer) is right


def test_the_number_of_a_problem_depends_on_no_limit_and_a_file_may_begin_with_a_mark(problems):
    """Else a run that goes on with another --limit would take another seed."""
    path = problems(*(SUM | {"question": f"{SUM['question']} {i}"} for i in range(6)))
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert [one.number for one in read_problems(path, None)] == list(range(6))
    assert [one.number for one in read_problems(path, 3)] == [0, 2, 4]
    assert [one for one, _ in read_questions(path, 3)] == [f"{SUM['question']} {i}" for i in (0, 2, 4)]


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("```python\ndef double(x):\n    return 2 * x\n```\nThis is it.", True),
        ("```python\ndef double(x):\n    return x\n```", False),
        ("```\ndef double(x):\n    return 2 * x", True),
        ("```python\n    return 2 * x\n```", True),
        ("```py\ndef double(x):\n    return 2 * x\n```", True),
        ("```Python\ndef double(x):\n    return 2 * x\n```", True),
        ("```python \ndef double(x):\n    return 2 * x\n```", True),
        ("With `x`:\r\n```python\r\ndef double(x):\r\n    return 2 * x\r\n```\r\nDone.", True),
        ("def double(x:", False),
        ("```python\nimport sys\nsys.exit(0)\n```", False),
        ("```python\nprint('passed')\nraise ValueError\n```", False),
        ("```python\nprint('passed')\nraise SystemExit\n```", False),
        ("```python\nimport os\nprint('passed', flush=True)\nos._exit(0)\n```", False),
        ("```python\nimport atexit\natexit.register(print, 'passed')\nexit()\n```", False),
        ("```python\ndef double(x):\n    print('twice', end='')\n    return 2 * x\n```", True),
    ],
)
def test_code_is_right_if_its_test_passes(problems, answer, right):
    [problem] = read_problems(problems(TASK), None)
    assert problem.is_right(answer) is right


@pytest.mark.parametrize(
    "line",
    [
        "import socket; socket.create_connection(('127.0.0.1', {port}))", "import os; os.system('true')",
        "import subprocess; subprocess.run(['true'])", "open('{file}', 'w')", "import os; os.remove('{file}')",
        "import os; os.open('{file}', os.O_TRUNC)", "import os; os.open('{file}x', os.O_CREAT)",
        "import os; os.open('{file}', os.O_WRONLY)", "import os; os.open('{file}', os.O_RDWR)",
        "import os; os.fork()", "import ctypes; ctypes.CDLL(None)",
    ],
)  # fmt: skip
def test_code_reaches_no_network_no_program_and_no_file(tmp_path, line):
    file = tmp_path / "kept"
    file.write_text("kept")
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = line.format(port=server.getsockname()[1], file=file)
        assert not runs(code)
        assert runs(f"try:\n    {code}\nexcept PermissionError:\n    pass")
    assert file.read_text() == "kept"
    assert list(tmp_path.iterdir()) == [file]
    assert runs(
        f"import os; assert open({str(file)!r}).read() + os.read(os.open({str(file)!r}, 0), 4).decode() == 'kept' * 2"
    )


def test_code_has_little_memory():
    assert runs("x = bytearray(1 << 20)")
    if sys.platform == "linux":
        assert not runs("x = bytearray(3 << 30)")


def test_what_code_prints_is_not_kept():
    """Neither in memory nor in a pipe that nobody empties."""
    code = "import os, sys\nfor _ in range(1 << 10):\n    os.write({}, bytes(1 << 16))"
    tracemalloc.start()
    try:
        assert all(runs(code.format(number)) for number in (1, 2))
        assert tracemalloc.get_traced_memory()[1] < 1 << 24
    finally:
        tracemalloc.stop()


def test_code_that_does_not_end_is_wrong():
    assert not runs("while True:\n    pass", seconds=1)


def test_the_rules_are_those_of_the_paper():
    """By its equations, with probabilities in place of logits."""
    p, q = np.array([0.5, 0.3, 0.15, 0.05]), np.array([0.2, 0.55, 0.15, 0.1])
    logits, sampling = [np.log(one).astype(np.float32) for one in (p, q)], SamplingParams(temperature=1.0)
    distance = np.maximum(q - p, 0).sum()
    for alpha in (0.04, 0.21, 0.31, 0.46, 0.6, 0.95):
        kept = {
            "v3": p >= (1 - alpha) * p.max(),
            "v2": p >= p.max() - alpha,
            "v1": q >= p.max() - alpha,
            "chow": np.full(4, q.max() >= 1 - alpha),
            "diff": np.full(4, q.max() >= p.max() - alpha),
            "opt": np.full(4, q.max() >= p.max() - alpha * distance),
        }
        assert kept.keys() == RULES.keys()
        for rule, taken in kept.items():
            pi = np.where(taken, q, 0) + q[~taken].sum() * p
            assert mixture(*logits, alpha, sampling, RULES[rule]) == pytest.approx(pi, abs=1e-6), (rule, alpha)


def test_diff_and_opt_compare_the_best_of_both():
    p, q, sampling = np.array([0.7, 0.2, 0.1]), np.array([0.5, 0.3, 0.2]), SamplingParams(temperature=1.0)
    logits = [np.log(one).astype(np.float32) for one in (p, q)]
    for rule, alpha, taken in (("diff", 0.15, p), ("diff", 0.25, q), ("opt", 0.95, p), ("opt", 1.0, p)):
        assert mixture(*logits, alpha, sampling, RULES[rule]) == pytest.approx(taken, abs=1e-6), (rule, alpha)


def test_mcnemars_p():
    assert mcnemar(0, 0) == 1
    assert mcnemar(5, 5) == 1
    assert mcnemar(0, 6) == pytest.approx(2 / 64)
    assert mcnemar(2, 10) == pytest.approx(0.0386, abs=1e-4)


@pytest.mark.parametrize(
    ("tokens", "passes", "figures"), [(9, 8, ["1.00", "1.00", "2.00"]), (1, 0, ["0.00", "0.00", "–"])]
)
def test_the_first_token_of_an_answer_is_of_no_pass(tokens, passes, figures):
    answers = [Answer(name, EXACT, 0.0, {}, True, tokens, passes, passes / 2, "") for name in ("a", "b")]
    shown = quality_table(answers, Settings([(EXACT, 0.0)], SamplingParams(), 9, 0, 1))
    (row,) = [line for line in shown.splitlines() if EXACT in line and "0, 0" in line]
    assert [cell.strip() for cell in row.split("│")][-4:-1] == figures


@pytest.mark.parametrize("record", [{"text": "What?"}, {"question": "How many?", "answer": "#### many"}])
def test_other_files_are_refused(problems, record):
    with pytest.raises(UsageError, match="GSM8K"):
        read_problems(problems(record), None)


@pytest.mark.parametrize("exact", ["off", "narrow"])
def test_a_line_an_answer_a_table_and_a_cut_file_goes_on(
    script, problems, smollm2_tiny, smollm2_tiny_q2k, tmp_path, exact
):
    """In a class of few rows the draft reads accepted tokens again, more of them than one of its passes takes."""
    out = tmp_path / "out.jsonl"
    run = smollm2_tiny, smollm2_tiny_q2k, problems(TASK, SUM, SUM | {"question": "And 1,230 and 4?"}), out
    fixed = "-n", "12", "--ctx", "512", "--alphas", "0,.9", "--exact", exact
    code, shown, said = script(*run, *fixed, "--batch", "2", "--rules", "v3,opt")
    assert code == 0, said
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    variants = [("exact", 0), ("v3", 0.9), ("opt", 0.9)]
    assert sorted((one["problem"], one["rule"], one["alpha"]) for one in lines) == sorted(
        (name, *variant) for name in ("HumanEval/0", SUM["question"], "And 1,230 and 4?") for variant in variants
    )
    assert "3 problems" in shown
    assert all(f" {rule} " in shown for rule in ("exact", "v3", "opt"))
    whole = out.read_text().splitlines(keepends=True)
    out.write_text("".join(whole[:4]) + whole[4][:30])
    assert script(*run, *fixed, "--batch", "2", "--rules", "v3,opt")[0] == 0
    again = [json.loads(line) for line in out.read_text().splitlines()]
    assert again[:4] == lines[:4]
    assert sorted(one["text"] for one in again) == sorted(one["text"] for one in lines)
    if exact == "narrow":
        assert script(*run[:3], tmp_path / "plain.jsonl", *fixed, "--budget", "0", "--rules", "v3,opt")[0] == 0
        plain = [json.loads(line) for line in (tmp_path / "plain.jsonl").read_text().splitlines()]
        assert sorted(one["text"] for one in plain) == sorted(one["text"] for one in lines)
        assert all(one["passes"] == one["tokens"] - 1 for one in plain)
    code, _, said = script(*run, *fixed, "--batch", "1", "--memory", "1K")  # before models are loaded
    assert code == 2
    assert "was made with other memory and batch" in said


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--rules", "v4"], "no rule 'v4'"), (["--alphas", "half"], "--alphas is 'half'"),
        (["--alphas", "2"], "--alphas is '2', but must be numbers from 0 to 1"),
    ],
)  # fmt: skip
def test_wrong_options_are_one_line(script, problems, tmp_path, options, line):
    code, _, said = script("target.gguf", "draft.gguf", problems(SUM), tmp_path / "out.jsonl", *options)
    assert code == 2
    assert line in said
    assert not (tmp_path / "out.jsonl").exists()
