"""Standard streams that fail, and text that is no UTF-8: one line, an exit code, and no traceback."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Run, few
from forked import RUN, forked

EDGESPEC = [sys.executable, "-m", "edgespec"]
FULL = Path("/dev/full")
ASCII = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
LOCALES: dict[str, dict[str, str]] = {"UTF-8": {}, "C": {"LC_ALL": "C"}, "ASCII": ASCII}
NO_UTF8 = b"\xff\xfe"


def answer(tiny: str, *arguments: str) -> list[str]:
    return ["run", tiny, *arguments, "--backend", "reference", "--raw", "-n", "8", "--planner", "none"]


@pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")
def test_a_full_disk_is_one_line(tiny: str) -> None:
    full = f"import os; os.dup2(os.open('{FULL}', os.O_WRONLY), 1); {RUN}"
    for arguments in (["models", "smollm2-135m"], answer(tiny, "hello"), answer(tiny, "hello", "--json")):
        done = forked(*arguments, program=full)
        last = done.stderr.splitlines()[-1]
        assert (done.returncode, last) == (1, "edgespec: writing or reading failed: No space left on device")
        assert "Traceback" not in done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="shells")
def test_closed_streams(run: Run, tiny: str) -> None:
    def shell(redirections: str) -> tuple[int, str, str]:
        command = ["sh", "-c", f'exec "$@" {redirections}', "sh", *EDGESPEC, *answer(tiny, "hello", "--seed", "1")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout, done.stderr

    says = "edgespec: standard output is closed: send it to a file or to /dev/null\n"
    assert shell(">&-") == (1, "", says)
    assert shell("<&- 2>&-")[:2] == run(*answer(tiny, "hello", "--seed", "1"))[:2]


@pytest.mark.parametrize("name", few(LOCALES, "UTF-8", "ASCII"))
def test_text_that_is_no_utf8_is_refused_in_every_locale(tiny: str, tmp_path: Path, name: str) -> None:
    locale = LOCALES[name]
    file, text = tmp_path / "text", os.fsdecode(NO_UTF8)
    file.write_bytes(NO_UTF8)
    cases = [
        (answer(tiny, "-"), "edgespec: standard input is not UTF-8 text"),
        (answer(tiny, text), "is not UTF-8 text"),
        (answer(tiny, "hello", "--stop", text), "'--stop': is not UTF-8 text"),
        (["run", tiny, "hello", "--backend", "reference", "--system", text], "'--system': is not UTF-8 text"),
    ]
    for arguments, says in cases[:2] if locale else cases:
        with file.open() as stdin:
            if locale:  # Python itself starts in it
                command, environment = [*EDGESPEC, *arguments], os.environ | locale
                done = subprocess.run(
                    command, stdin=stdin, capture_output=True, env=environment, text=True, check=False
                )
            else:
                done = forked(*arguments, stdin=stdin.fileno())
        assert (done.returncode, done.stdout) == (2, "")
        assert says in done.stderr.splitlines()[-1]


def test_text_is_utf8_in_every_locale(run: Run, tiny: str) -> None:
    def prompt_tokens(*arguments: str, stdin: str = "") -> int:
        command, environment = [*EDGESPEC, *answer(tiny, *arguments, "--json")], os.environ | ASCII
        done = subprocess.run(command, input=stdin.encode(), capture_output=True, env=environment, check=True)
        return int(json.loads(done.stdout)["stats"]["prompt_tokens"])

    here = json.loads(run(*answer(tiny, "äöü…", "--json"))[1])["stats"]["prompt_tokens"]
    assert prompt_tokens("äöü…") == prompt_tokens("-", stdin="äöü…") == here


def test_half_a_character_is_one_line(run: Run, tiny: str, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "good"}\n{"prompt": "a\\ud800b"}\n', "utf-8")
    code, out, err = run("bench", str(prompts), "--model", tiny, "--backend", "reference")
    assert (code, out) == (2, "")
    assert err == f"edgespec: {prompts}, line 2: needs a JSON object with UTF-8 text as prompt, turns, question, text\n"
    models = tmp_path / "models.yaml"
    models.write_text(
        f'models:\n  - name: mine\n    target: "file:{tiny}"\n    defaults: {{system: "a\\ud800b"}}\n', "utf-8"
    )
    code, out, err = run("run", "mine", "hello", "--backend", "reference", "--models", str(models))
    assert (code, out) == (1, "")
    assert err == f"edgespec: {models}, line 4: is not YAML: a text has half a surrogate pair\n"
