"""Scripts with wrong numbers and wrong files: one line that names the value, before any model is loaded."""

import json
import socket
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent.parent / "scripts"
SCRIPT = SCRIPTS / "none"


@pytest.fixture
def refused(script, monkeypatch, tmp_path):
    """What a script says last, when it refuses its arguments; FILE and OUT among them are paths."""

    def call(name, *arguments, file=b""):
        monkeypatch.setattr(sys.modules[__name__], "SCRIPT", SCRIPTS / name)
        given, out = tmp_path / "given.jsonl", tmp_path / "out.jsonl"
        given.write_bytes(file)
        code, printed, said = script(*({"FILE": given, "OUT": out}.get(one, one) for one in arguments))
        assert (code, printed) == (2, ""), said
        assert not out.exists()
        return said.splitlines()[-1]

    return call


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (
            "bench-offload folders torch:x --nodes 1,x",
            "--nodes is '1,x', but must be whole numbers of at least 0",
        ),
        ("bench-gpu --dtypes bf16", "there is no format 'bf16'"),
        ("bench-gpu --layers 1", "1 is not in the range x>=2"),
        ("bench-offload folders torch:x --share nan", "nan is not a finite number"),
        ("bench-offload folders torch:x --budget 0", "0 is not in the range x>=1"),
        ("bench-offload texts FILE FILE --room 1G --plain-tokens -1", "-1 is not in the range x>=0"),
        ("bench-serve gap FILE --port 70000", "70000 is not in the range 1<=x<=65535"),
        ("bench-serve typing FILE --model x --pause nan", "nan is not a finite number"),
        ("bench-serve typing FILE --model x --speed 0", "0.0 is not in the range x>=0.1"),
        ("perplexity FILE x --draft y --after 1.5", "--after is '1.5', but must be whole numbers of at least 1"),
        (
            "perplexity FILE x --draft y --tokens 9",
            "--tokens is not used with --draft: --after and --passes say how many",
        ),
        ("perplexity FILE x --draft y --kv-type q8_0", "--kv-type is not used with --draft: the cache of PyTorch has"),
        ("perplexity FILE x --draft y --after nan", "--after is 'nan', but must be whole numbers"),
        (
            "perplexity FILE x --draft y --shares 0.9,2",
            "--shares is '0.9,2', but must be numbers above 0 and at",
        ),
        ("perplexity FILE x --passes 4", "--passes is not used without --draft"),
        ("perplexity FILE x --shares 0.9", "--shares is not used without --draft"),
        ("bench-serve throughput FILE --model x --threads 0", "0 is not in the range x>=1"),
        ("bench-serve throughput FILE --model x --mode plain", "--mode is not used without --llama-server"),
        (
            "bench-serve throughput FILE --model x --llama-options=-fa",
            "--llama-options is not used without --llama-server",
        ),
    ],
)
def test_a_wrong_number_is_refused(refused, line, says):
    assert says in refused(*line.split())


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--planners specexec", "the planner specexec needs a draft model: give one with --draft"),
        ("--planners sssd,spexec --draft FILE", "there is no planner 'spexec'; did you mean specexec?"),
        ("--planners sssd+fast", "sssd+fast: there is no setting 'fast'"),
        ("-t -1", "temperature is -1.0, but must be"),
        ("--draft no.gguf", "'no.gguf' does not exist"),
    ],
)
def test_a_wrong_variant_is_refused_before_the_first_is_measured(refused, line, says):
    command = ["bench-offload", "texts", "FILE", "FILE", "--room", "1G"]
    assert says in refused(*command, *line.split(), file=b'{"prompt": "Why?"}')


HUMANEVAL = {"entry_point": "f", "prompt": "def f():\n", "task_id": "0"}  # without its test
DEEP = pytest.param(b"[" * 9999, id="deep")


@pytest.mark.parametrize(
    "content", [b"", b"\n", b"[]", b"5", b'{"question": 5, "answer": "4"}', b"\xff", b"[[1]]", DEEP]
)
@pytest.mark.parametrize("line", ["bench-approximate x y"])
def test_a_file_without_problems_is_refused(refused, line, content):
    assert "given.jsonl" in refused(*line.split(), "FILE", "OUT", file=content)


@pytest.mark.parametrize("record", [{"question": "Why?", "answer": 5}, HUMANEVAL, HUMANEVAL | {"test": 5}])
def test_a_problem_whose_answer_cannot_be_checked_is_refused(refused, record):
    said = refused("bench-approximate", "x", "y", "FILE", "OUT", file=json.dumps(record).encode())
    assert said.endswith("needs lines of GSM8K (question, answer) or HumanEval (prompt, test)")


def test_a_port_where_nothing_answers_is_one_line(script, monkeypatch, tmp_path):
    monkeypatch.setattr(sys.modules[__name__], "SCRIPT", SCRIPTS / "bench-serve")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Why?"}\n')
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    code, printed, said = script("gap", prompts, "--port", port)
    assert (code, printed) == (1, "")
    assert said.splitlines()[-1].startswith(f"edgespec: 127.0.0.1 port {port} does not answer: ")
