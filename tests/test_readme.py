"""README and docs: the example runs, and the commands, options, scripts and links that they show exist."""

import re
from pathlib import Path
from textwrap import dedent

import click
import pytest
from options_page import PAGE, all_commands, page

import edgespec
from edgespec.models import registry

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
README = (ROOT / "README.md").read_text()
PYTHON = re.compile(r"```python\n(.*?)```", re.DOTALL)


def test_readme_is_short() -> None:
    assert len(README.splitlines()) <= 100


def test_the_python_example_runs(
    smollm2_tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(registry, "_package_file", lambda name: str(smollm2_tiny))
    (example,) = PYTHON.findall(README)
    exec(compile(example, "README.md", "exec"), {"__name__": "__main__"})
    assert "tokens per pass" in capsys.readouterr().out


def test_the_python_examples_of_the_pages_and_of_help_run(
    smollm2_tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("big.gguf", "small.gguf"):
        (tmp_path / name).symlink_to(smollm2_tiny)
    monkeypatch.chdir(tmp_path)
    examples = [example for path in PAGES if "docs" in path.parts for example in PYTHON.findall(path.read_text())]
    assert len(examples) > 1
    assert not any(re.search(r"^ {4}import edgespec", path.read_text(), re.MULTILINE) for path in PAGES)
    for example in (*examples, dedent(re.findall(r"\n\n( +import.*?)\n\n\S", edgespec.__doc__, re.DOTALL)[0])):
        exec(compile(example, "example", "exec"), {"__name__": "__main__"})
        assert capsys.readouterr().out, example


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_commands_and_options_shown_exist(path: Path) -> None:
    commands = all_commands()
    shown = re.findall(
        r"^ {4,}(?:.*\| )?(edgespec \w+(?: build)?)( .*)?$", path.read_text(encoding="utf-8"), re.MULTILINE
    )
    assert shown or path not in (ROOT / "README.md", ROOT / "docs" / "start.md")
    for name, rest in shown:
        known = {option for one in commands[name].params for option in (*one.opts, *one.secondary_opts)}
        assert set(re.findall(r"(?<!\S)--[\w-]+", rest.partition(" #")[0])) <= known, name


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_scripts_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", text):
        assert (path.parent / link).exists(), link
    for script in re.findall(r"(?<![\w/])(?:scripts|tests|backends|edgespec/\w+)/[\w/.-]*\w", text):
        assert (ROOT / script).exists() or list(ROOT.glob(f"{script}*")), script


def test_docs_list_every_page() -> None:
    listed = set(re.findall(r"\]\(([\w/.-]+)\)", (ROOT / "docs" / "README.md").read_text()))
    assert listed == {str(path.relative_to(ROOT / "docs")) for path in PAGES if "docs" in path.parts} - {"README.md"}


def test_the_page_of_options_is_current() -> None:
    assert PAGE.read_text() == page(), "python tests/options_page.py writes it"


def test_the_page_of_options_has_every_option_that_help_shows() -> None:
    parts = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL))
    assert parts.keys() == all_commands().keys()
    for name, command in all_commands().items():
        rows = re.findall(r"^\| `(.+?)` \|", parts[name], re.MULTILINE)
        shown = [one for one in command.params if isinstance(one, click.Option) and not one.hidden]
        assert len(rows) == len(shown)
        for option in shown:
            assert any({*option.opts, *option.secondary_opts} <= set(re.split(r"[ ,]+", row)) for row in rows), name


def test_pages_that_code_refers_to_exist() -> None:
    found = set[str]()
    for folder in ("edgespec", "backends", "scripts", "tests"):
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and path.suffix in ("", ".py"):
                found |= set(re.findall(r"docs/[\w/-]+\.md", path.read_text()))
    assert len(found) > 3
    assert all((ROOT / name).exists() for name in found), found
