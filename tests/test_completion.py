"""Shells complete commands, options and models: click's own scripts, and what is offered for a model."""

from pathlib import Path

import pytest
from conftest import Run


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_gets_a_script(run: Run, monkeypatch: pytest.MonkeyPatch, shell: str) -> None:
    monkeypatch.setenv("_EDGESPEC_COMPLETE", f"{shell}_source")
    status, out, _ = run()
    assert status == 0
    assert f"_EDGESPEC_COMPLETE={shell}_complete" in out


def offered(run: Run, monkeypatch: pytest.MonkeyPatch, *words: str) -> list[str]:
    """What bash is told for the last word."""
    monkeypatch.setenv("_EDGESPEC_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", " ".join(["edgespec", *words]))
    monkeypatch.setenv("COMP_CWORD", str(len(words)))
    status, out, err = run()
    assert (status, err) == (0, "")
    return out.splitlines()


@pytest.mark.parametrize(
    "words",
    [
        ["run"],
        ["doctor"],
        ["models"],
        ["run", "x.gguf", "--draft"],
        ["bench", "p.jsonl", "--model"],
        ["datastore", "build", "o", "t", "--model"],
    ],
    ids=" ".join,
)
def test_models_are_offered_by_name_and_as_files(run: Run, monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    assert offered(run, monkeypatch, *words, "smol") == ["file,smol", "plain,smollm2-135m"]
    assert offered(run, monkeypatch, *words, "./a") == ["file,./a"]


def test_names_of_ones_own(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    yaml = tmp_path / "models.yaml"
    yaml.write_text("models:\n  - {name: smoke, target: 'file:a.gguf'}\n")
    words = ["run", "--models", str(yaml)]
    assert offered(run, monkeypatch, *words, "smo") == ["file,smo", "plain,smoke", "plain,smollm2-135m"]
    yaml.write_text("models: 7\n")  # is told when the command runs
    assert offered(run, monkeypatch, *words, "smo") == ["file,smo"]


def test_commands_and_options(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "plain,doctor" in offered(run, monkeypatch, "do")
    assert "plain,--kv-type" in offered(run, monkeypatch, "run", "--kv")
