"""The README's example runs as it stands, and its commands exist."""

import re
from pathlib import Path

import pytest

from edgespec.cli.commands import cli

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_readme_is_short() -> None:
    assert len(README.splitlines()) <= 150


@pytest.mark.usefixtures("smollm2")
def test_the_python_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(example, "README.md", "exec"), {"__name__": "__main__"})
    assert "tokens per pass" in capsys.readouterr().out


def test_the_commands_and_options_shown_exist() -> None:
    shown = re.findall(r"^    edgespec (\w+)(.*)$", README, re.MULTILINE)
    assert shown
    for name, rest in shown:
        command = cli.commands[name]
        known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        for sub in getattr(command, "commands", {}).values():
            known |= {option for parameter in sub.params for option in parameter.opts}
        assert set(re.findall(r"(?<!\S)--[\w-]+", rest)) <= known, name
