"""Standard streams that fail, and text that is no UTF-8: one line, an exit code, and no traceback."""

import json
import os
import subprocess
import sys
from pathlib import Path
from subprocess import DEVNULL, PIPE

import pytest
from conftest import Run
from edgespec.backends.reference.backend import random_model

EDGESPEC = [sys.executable, "-m", "edgespec"]
FULL = Path("/dev/full")
ASCII = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
NO_UTF8 = b"\xff\xfe"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("model") / "tiny.npz")
    random_model(2, vocab_size=258).save(path)
    return path


def answer(tiny: str, *arguments: str | bytes) -> list[str | bytes]:
    return ["run", tiny, *arguments, "--backend", "reference", "--raw", "-n", "8", "--planner", "none"]


@pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")
def test_a_full_disk_is_one_line(tiny: str) -> None:
    for arguments in (["models", "smollm2-135m"], answer(tiny, "hello"), answer(tiny, "hello", "--json")):
        with FULL.open("w", encoding="utf-8") as full:
            done = subprocess.run([*EDGESPEC, *arguments], stdin=DEVNULL, stdout=full, stderr=PIPE, check=False)
        last = done.stderr.decode().splitlines()[-1]
        assert (done.returncode, last) == (1, "edgespec: writing or reading failed: No space left on device")
        assert b"Traceback" not in done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="shells")
def test_closed_streams(tiny: str) -> None:
    def shell(redirections: str) -> tuple[int, str, str]:
        command = ["sh", "-c", f'exec "$@" {redirections}', "sh", *EDGESPEC, *map(str, answer(tiny, "hello"))]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout, done.stderr

    says = "edgespec: standard output is closed: send it to a file or to /dev/null\n"
    assert shell(">&-") == (1, "", says)
    whole = shell("")
    assert whole[0] == 0
    assert shell("<&- 2>&-")[:2] == whole[:2]


@pytest.mark.parametrize("locale", [{"LC_ALL": "C.UTF-8"}, {"LC_ALL": "C"}, ASCII], ids=["UTF-8", "C", "ASCII"])
def test_text_that_is_no_utf8_is_refused_in_every_locale(tiny: str, locale: dict[str, str]) -> None:
    for arguments, stdin, says in [
        (answer(tiny, NO_UTF8), b"", "is not UTF-8 text"),
        (answer(tiny, "hello", "--stop", NO_UTF8), b"", "'--stop': is not UTF-8 text"),
        (["run", tiny, "hello", "--backend", "reference", "--system", NO_UTF8], b"", "'--system': is not UTF-8 text"),
        (answer(tiny, "-"), NO_UTF8, "edgespec: standard input is not UTF-8 text"),
    ]:
        environment = os.environ | locale
        done = subprocess.run([*EDGESPEC, *arguments], input=stdin, capture_output=True, env=environment, check=False)
        assert (done.returncode, done.stdout) == (2, b"")
        assert says in done.stderr.decode().splitlines()[-1]


def test_text_is_utf8_in_every_locale(tiny: str) -> None:
    def prompt_tokens(locale: dict[str, str], *arguments: str, stdin: str = "") -> int:
        command = [*EDGESPEC, *map(str, answer(tiny, *arguments, "--json"))]
        environment = os.environ | locale
        done = subprocess.run(command, input=stdin.encode(), capture_output=True, env=environment, check=False)
        assert done.returncode == 0, done.stderr
        return int(json.loads(done.stdout)["stats"]["prompt_tokens"])

    assert prompt_tokens(ASCII, "äöü…") == prompt_tokens(ASCII, "-", stdin="äöü…") == prompt_tokens({}, "äöü…")


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
