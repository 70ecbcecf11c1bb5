"""scripts/bench with wrong numbers and wrong files: one line that names the value, before any model is loaded."""

import json

import pytest

from benchmarks.program import COMMANDS


@pytest.fixture
def refused(bench, tmp_path):
    """What is said last where arguments are refused; FILE and OUT among them are paths."""

    def call(*arguments, file=b""):
        given, out = tmp_path / "given.jsonl", tmp_path / "out.jsonl"
        given.write_bytes(file)
        code, printed, said = bench(*({"FILE": given, "OUT": out}.get(one, one) for one in arguments))
        assert (code, printed) == (2, ""), said
        assert not out.exists()
        return said.splitlines()[-1]

    return call


def test_help_says_what_each_subcommand_does_in_a_few_words(bench):
    for arguments, names in (((), COMMANDS), (("serve",), ("throughput", "wire"))):
        code, shown, _ = bench(*arguments, "--help")
        assert code == 0
        assert all(f"\n  {name} " in shown for name in names)
        assert "..." not in shown.partition("Commands:")[2], "too long a first sentence"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("offload FILE --prompts FILE --budget 0", "0 is not in the range x>=1"),
        ("offload FILE --prompts FILE -t nan", "nan is not a finite number"),
        ("offload FILE", "missing option '--prompts'"),
        ("serve throughput FILE --model x --threads 0", "0 is not in the range x>=1"),
        ("serve throughput FILE --model x --mode plain", "without --llama-server it is not measured: leave out --mode"),
        ("serve throughput FILE --model x --llama-options=-fa", "it is not measured: leave out --llama-options"),
        ("serve throughput FILE --model x --llama-server y --mode quick", "there is no mode 'quick'"),
        ("fuzz --minutes nan", "nan is not a finite number"),
        ("speed", "no such command 'speed'"),
    ],
)
def test_a_wrong_number_is_refused(refused, line, says):
    assert says in refused(*line.split())


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("FILE --planners specexec", "the planner specexec needs a draft model: give one with --draft"),
        ("FILE+FILE --planners sssd,spexec", "there is no planner 'spexec'; did you mean specexec?"),
        ("FILE --planners sssd,", "there is no planner ''"),
        ("FILE --planners none --plain-tokens 0", "nothing is to be measured: give --planners"),
        ("no.gguf", "'no.gguf' is no GGUF file"),
    ],
)
def test_a_wrong_variant_is_refused_before_the_first_is_measured(refused, line, says, tmp_path):
    models, *more = line.replace("FILE", str(tmp_path / "given.jsonl")).split()
    assert says in refused("offload", models, "--prompts", "FILE", *more, file=b'{"prompt": "Why?"}')


HUMANEVAL = {"entry_point": "f", "prompt": "def f():\n", "task_id": "0"}  # without its test
DEEP = pytest.param(b"[" * 9999, id="deep")


@pytest.mark.parametrize(
    "content", [b"", b"\n", b"[]", b"5", b'{"question": 5, "answer": "4"}', b"\xff", b"[[1]]", DEEP]
)
def test_a_file_without_problems_is_refused(refused, content):
    assert "given.jsonl" in refused("accuracy", "x", "FILE", "OUT", file=content)


@pytest.mark.parametrize("record", [{"question": "Why?", "answer": 5}, HUMANEVAL, HUMANEVAL | {"test": 5}])
def test_a_problem_whose_answer_cannot_be_checked_is_refused(refused, record):
    said = refused("accuracy", "x", "FILE", "OUT", file=json.dumps(record).encode())
    assert said.endswith("needs lines of GSM8K (question, answer) or HumanEval (prompt, test)")
