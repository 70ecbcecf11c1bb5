"""Problems whose answers can be checked: a number, as GSM8K's, or a function and its test, as HumanEval's."""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from secrets import token_hex
from tempfile import TemporaryDirectory
from typing import Any

from edgespec.errors import UsageError
from edgespec.machine.files import read_text

SECONDS = 10  # of processor time for the code of an answer
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
BLOCK = re.compile(r"```[^\n`]*\n(.*?)(?:```|$)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Problem:
    """
    Attributes:
        number: its place in the file.
        name: it, in short.
        question: what the model is asked.
        is_right: checks its answer.
    """

    number: int
    name: str
    question: str
    is_right: Callable[[str], bool]


def read_problems(path: Path, limit: int | None) -> list[Problem]:
    """The problems of GSM8K or HumanEval, `limit` of them evenly spaced.

    Raises:
        UsageError: the file has others, or cannot be read.
    """
    try:
        lines = [line for line in read_text(path, UsageError).split("\n") if line.strip()]
        found = [_problem(number, json.loads(line)) for number, line in enumerate(lines)]
        if not found:
            raise ValueError
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        right = "lines of GSM8K (question, answer) or HumanEval (prompt, test)"
        raise UsageError(f"{path}: needs {right}") from error
    count = min(len(found), limit or len(found))
    return [found[i * len(found) // count] for i in range(count)]


def _problem(number: int, record: dict[str, Any]) -> Problem:
    coding = "entry_point" in record
    for name in ("task_id", "entry_point", "prompt", "test") if coding else ("question", "answer"):
        record[name].encode()  # fails here if a field is missing or no text, and not after the first answer
    if coding:
        question = f"Complete this function. Answer with the whole function.\n```python\n{record['prompt']}```"
        return Problem(number, record["task_id"], question, lambda text: runs(program(record, text)))
    result = numbers_in(record["answer"].rpartition("####")[2])[-1]
    question = f"{record['question']}\nReason step by step, and end with #### and the result as a number."
    return Problem(number, record["question"], question, lambda text: _result(text) == result)


def numbers_in(text: str) -> list[Decimal]:
    """All numbers of a text, which may have commas between thousands."""
    return [Decimal(one.replace(",", "")) for one in NUMBER.findall(text)]


def _result(text: str) -> Decimal | None:
    """The first number after the last "####", else the last number."""
    marked = numbers_in(text.rpartition("####")[2]) if "####" in text else []
    return next(iter(marked or reversed(numbers_in(text))), None)


def program(record: Mapping[str, str], answer: str) -> str:
    """The function of an answer, whose prompt has its imports, and HumanEval's test of it."""
    block = BLOCK.search(answer)
    code = block[1] if block else answer
    start = record["prompt"] + ("" if f"def {record['entry_point']}" not in code else "    pass\n\n")
    return f"{start}{code}\n\n{record['test']}\n\ncheck({record['entry_point']})\n"


# The hook is no wall against a program that wants out, but stops what a model writes by chance.
GUARD = """
import os, resource, sys
for name, most in (("CPU", int(sys.argv[1])), ("AS", 2 << 30), ("FSIZE", 0), ("NOFILE", 64), ("CORE", 0)):
    try:
        resource.setrlimit(getattr(resource, "RLIMIT_" + name), (most, most))
    except (OSError, ValueError, AttributeError):  # a Mac does not limit addresses
        pass
text, READS = sys.stdin.read(), ("listdir", "scandir", "walk", "fwalk")
secret = sys.argv.pop()
result, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
os.dup2(nowhere, 1), os.dup2(nowhere, 2)  # what code prints is not kept
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
def guard(event, arguments):
    kind, _, name = event.partition(".")
    writes = event == "open" and arguments[2] & WRITES  # the mode is None for os.open
    if writes or kind in ("socket", "subprocess", "ctypes", "shutil") or (kind == "os" and name not in READS):
        raise PermissionError(event)
sys.addaudithook(guard)
exec(compile(text, "answer", "exec"), {"__name__": "answer"})
os.write(result, secret.encode())
"""


def runs(code: str, seconds: int = SECONDS) -> bool:
    """Run code in a child process with resource limits, without network, processes or files.

    Args:
        code: a program.
        seconds: most processor time.

    Returns:
        False: it raised something, ended early, or took too long.
    """
    secret = token_hex()  # printed at the end, so code that ends early does not pass
    with TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-c", GUARD, str(seconds), secret], input=code, capture_output=True, text=True,
                cwd=folder, timeout=6 * seconds, env={}, check=False,
            )  # fmt: skip
        except (subprocess.TimeoutExpired, UnicodeError):
            return False
    return done.returncode == 0 and done.stdout == secret
