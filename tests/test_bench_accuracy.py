"""scripts/bench accuracy: answers are checked, code of models is kept in, and a run goes on where it stopped."""

import json
import socket
import sys
import tracemalloc

import pytest

from benchmarks.commands.accuracy import EXACT, Answer, mcnemar, quality_table
from benchmarks.problems import read_problems, runs
from edgespec.errors import UsageError

LATER = pytest.mark.exhaustive  # each is a process

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


def later(*some):
    return [pytest.param(*one, marks=LATER) for one in some]


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("```python\ndef double(x):\n    print('twice', end='')\n    return 2 * x\n```\nThis is it.", True),
        ("```python\n    return 2 * x\n```", True),
        ("```python\ndef double(x):\n    return x\n```", False),
        ("```python\nimport os\nprint('passed', flush=True)\nos._exit(0)\n```", False),
        *later(
            ("```\ndef double(x):\n    return 2 * x", True),
            ("```Python \ndef double(x):\n    return 2 * x\n```", True),
            ("With `x`:\r\n```py\r\ndef double(x):\r\n    return 2 * x\r\n```\r\nDone.", True),
            ("def double(x:", False),
            ("```python\nimport sys\nsys.exit(0)\n```", False),
            ("```python\nprint('passed')\nraise ValueError\n```", False),
            ("```python\nprint('passed')\nraise SystemExit\n```", False),
            ("```python\nimport atexit\natexit.register(print, 'passed')\nexit()\n```", False),
        ),
    ],
)
def test_code_is_right_if_its_test_passes(problems, answer, right):
    [problem] = read_problems(problems(TASK), None)
    assert problem.is_right(answer) is right


@pytest.mark.parametrize(
    "line",
    [
        "import os; os.system('true')", "import os; os.open('{file}', os.O_TRUNC)",
        *later(*([line] for line in (
            "import socket; socket.create_connection(('127.0.0.1', {port}))",
            "import subprocess; subprocess.run(['true'])", "open('{file}', 'w')", "import os; os.remove('{file}')",
            "import os; os.open('{file}x', os.O_CREAT)", "import os; os.open('{file}', os.O_WRONLY)",
            "import os; os.open('{file}', os.O_RDWR)", "import os; os.fork()", "import ctypes; ctypes.CDLL(None)",
        ))),
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


@LATER
def test_code_has_little_memory():
    assert runs("x = bytearray(1 << 20)")
    if sys.platform == "linux":
        assert not runs("x = bytearray(3 << 30)")


@LATER
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


def test_mcnemars_p():
    assert mcnemar(0, 0) == 1
    assert mcnemar(5, 5) == 1
    assert mcnemar(0, 6) == pytest.approx(2 / 64)
    assert mcnemar(2, 10) == pytest.approx(0.0386, abs=1e-4)


@pytest.mark.parametrize(
    ("tokens", "passes", "figures"), [(9, 8, ["1.00", "1.00", "2.00"]), (1, 0, ["0.00", "0.00", "–"])]
)
def test_the_first_token_of_an_answer_is_of_no_pass(tokens, passes, figures):
    answers = {name: Answer(name, EXACT, {}, True, tokens, passes, passes / 2, "") for name in ("a", "b")}
    shown = quality_table({EXACT: answers}, single=True)
    (row,) = [line for line in shown.splitlines() if EXACT in line and "0, 0" in line]
    assert [cell.strip() for cell in row.split("│")][-4:-1] == figures


@pytest.mark.parametrize("record", [{"text": "What?"}, {"question": "How many?", "answer": "#### many"}])
def test_other_files_are_refused(problems, record):
    with pytest.raises(UsageError, match="GSM8K"):
        read_problems(problems(record), None)


def test_a_line_an_answer_a_table_and_a_cut_file_goes_on(bench, problems, small, small_q2k, tmp_path):
    out, names = tmp_path / "out.jsonl", (SUM["question"], "And 1,230 and 4?")
    run = "accuracy", small, problems(*(SUM | {"question": name} for name in names)), out
    fixed = "-n", 12, "--ctx", 512, "--approximate", "cascade:0.9", "--draft", small_q2k, "--budget", 4
    code, shown, said = bench(*run, *fixed, "--batch", 2)
    assert code == 0, said
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    methods = ("exact", "cascade:0.9")
    assert {(one["problem"], one["method"]) for one in lines} == {(name, one) for name in names for one in methods}
    assert all(1 < one["tokens"] <= 12 for one in lines)
    assert "2 problems" in shown
    assert all(f" {method} " in shown for method in methods)
    whole = out.read_text().splitlines(keepends=True)
    out.write_text("".join(whole[:3]) + whole[3][:30])
    assert bench(*run, *fixed, "--batch", 2)[0] == 0
    assert out.read_text().splitlines(keepends=True)[:3] == whole[:3]
    assert {json.loads(line)["problem"] for line in out.read_text().splitlines()[2:]} == set(names)
    code, _, said = bench(*run, *fixed, "--memory", "1K")  # before models are loaded
    assert code == 2
    assert "was made with other batch and memory" in said


def test_a_wrong_method_is_one_line(bench, problems, tmp_path):
    code, _, said = bench("accuracy", "target.gguf", problems(SUM), tmp_path / "out.jsonl", "--approximate", "cast")
    assert (code, said.count("\n")) == (2, 1)
    assert "cast" in said
    assert not (tmp_path / "out.jsonl").exists()
