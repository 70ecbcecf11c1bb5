"""README and docs: examples run, and the commands, options, scripts and links that they show exist."""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import click
import pytest
from options_page import PAGE, PYTHON_PAGE, UNITS, all_commands, page, python_page

import edgespec
from benchmarks.program import bench
from edgespec.models import registry
from edgespec.planners import choice

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
SITE = ROOT / "docs" / "site" / "mkdocs.yml"
README = (ROOT / "README.md").read_text()
FIGURES = (ROOT / "docs" / "figures.md").read_text()
PYTHON = re.compile(r"```python\n(.*?)```", re.DOTALL)


def test_readme_is_short() -> None:
    assert len(README.splitlines()) <= 90


def test_the_python_examples_of_the_pages_and_of_help_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = pytest.importorskip("gguf_files").small_llama(tmp_path / "big.gguf", layers=1)
    (tmp_path / "small.gguf").symlink_to(model)
    monkeypatch.setattr(registry, "_package_file", lambda name: str(model))
    monkeypatch.setattr(choice, "PLANNERS", {**choice.PLANNERS})  # an example adds one
    monkeypatch.chdir(tmp_path)
    shown = [example for path in PAGES if "docs" in path.parts for example in PYTHON.findall(path.read_text())]
    examples = [example for example in shown if "edgespec" in example]
    assert [one.partition("(")[0] for one in shown if one not in examples] == ["def step"]  # tests/test_rooms.py
    assert len(examples) > 1
    assert not any(re.search(r"^ {4}import edgespec", path.read_text(), re.MULTILINE) for path in PAGES)
    for example in (*examples, dedent(re.findall(r"\n\n( +import.*?)\n\n\S", edgespec.__doc__, re.DOTALL)[0])):
        short = re.sub(r"max_tokens=\d+", "max_tokens=4", example.replace("samples=8", "samples=2, max_tokens=4"))
        exec(compile(short, "example", "exec"), {"__name__": "__main__"})
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
def test_the_subcommands_and_options_of_benchmarks_that_are_shown_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    for line in re.findall(r"(?<!:)scripts/bench ([^`\n]+)", text):
        words, command = shlex.split(line, comments=True), bench
        while isinstance(command, click.Group):
            command = command.get_command(click.Context(command), words.pop(0)) or pytest.fail(line)
        known = {option for one in command.params for option in one.opts}
        assert {word for word in words if re.fullmatch(r"-[\w-]+", word)} <= known, line


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_scripts_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", text):
        assert (path.parent / link).exists(), link
    for script in re.findall(r"(?<![\w/:])(?:scripts|tests|backends|edgespec/\w+)/[\w/.-]*\w", text):
        assert (ROOT / script).exists() or list(ROOT.glob(f"{script}*")), script


def test_every_figure_of_the_readme_has_its_command() -> None:
    measured = README.partition("measured on")[2].partition("\n\n")[0]
    table = re.findall(r"\| (\d+\.\d+)(?= \|)", measured)
    text = re.findall(r"(\d[\d.]*)(?: (?:to|of) (\d[\d.]*))? (?:×|%|tokens/s|GiB|MB|GB|layers)", README)
    figures = {*table, *(one for found in text for one in found if one)}
    rows = re.findall(r"^\| (.+?) \| (?:.+) \| (?:.+) \|$", FIGURES, re.MULTILINE)
    known = set(re.findall(r"(?<![\d.])\d+(?:\.\d+)?", " ".join(rows)))
    assert len(table) == 5
    assert "computed: " not in README  # of no such kind enough sources are known
    assert figures <= known


def test_every_picture_is_shown_and_has_its_command() -> None:
    there = {path.name for path in (ROOT / "docs" / "pictures").iterdir()}
    shown = {name for path in PAGES for name in re.findall(r"!\[.+?\]\((?:.*/)?pictures/(.+?)\)", path.read_text())}
    made = set(re.findall(r'out / "([\w.]+)"', (ROOT / "scripts" / "make-pictures").read_text()))
    assert there == shown == made == set(re.findall(r"^\| `([\w.]+)` \|", FIGURES, re.MULTILINE))


def test_docs_and_the_menu_of_the_site_list_every_page() -> None:
    there = {str(path.relative_to(ROOT / "docs")) for path in PAGES if "docs" in path.parts}
    listed = set(re.findall(r"\]\(([\w/.-]+\.md)\)", (ROOT / "docs" / "README.md").read_text()))
    menu = re.findall(r"^ *- (?:\w+: )?([\w/-]+\.md)$", SITE.read_text(), re.MULTILINE)
    assert listed == there - {"README.md"}
    assert sorted(menu) == sorted(there)


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    for name in ("material", "mkdocstrings_handlers"):
        pytest.importorskip(name, reason="no site: pip install 'edgespec[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(SITE), "-d", str(tmp_path)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    assert "Continue the prompt" in (tmp_path / "reference" / "api.html").read_text()


def test_the_page_of_python_has_the_docstring_of_every_name() -> None:
    shown = re.findall(r"^::: edgespec\.(\w+)$", (ROOT / "docs" / "reference" / "api.md").read_text(), re.MULTILINE)
    assert sorted(shown) == sorted(name for names in edgespec._MODULES.values() for name in names)


def test_the_pages_of_options_and_keywords_are_current() -> None:
    assert PAGE.read_text() == page(), "python tests/options_page.py writes it"
    assert PYTHON_PAGE.read_text() == python_page(), "python tests/options_page.py writes it"


def test_the_page_of_options_has_every_option_that_help_shows() -> None:
    parts = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL))
    assert parts.keys() == all_commands().keys()
    for name, command in all_commands().items():
        rows = re.findall(r"^\| `(.+?)` \|", parts[name], re.MULTILINE)
        shown = [one for one in command.params if isinstance(one, click.Option) and not one.hidden]
        assert len(rows) == len(shown)
        for option in shown:
            assert any({*option.opts, *option.secondary_opts} <= set(re.split(r"[ ,]+", row)) for row in rows), name


def test_the_page_of_options_has_the_default_and_the_unit_of_an_option() -> None:
    rows = re.findall(r"^\| `--(budget|memory|grace) .+?` \|.*\| (.*?) \| (.*?) \|$", PAGE.read_text(), re.MULTILINE)
    assert {("budget", "draft tokens", "64"), ("memory", "bytes", "what is free"), ("grace", "seconds", "30")} <= {
        *rows
    }
    assert "[default" not in PAGE.read_text()
    assert UNITS.keys() <= {one.name for command in all_commands().values() for one in command.params}


def test_code_in_a_list_of_a_guide_has_eight_spaces_else_the_site_shows_it_as_prose() -> None:
    for path in (ROOT / "docs" / "guides").iterdir():
        assert not re.search(r"^(- |  \S).*\n\n {5,7}\S", path.read_text(encoding="utf-8"), re.MULTILINE), path.name


def test_pages_that_code_refers_to_exist() -> None:
    found = set[str]()
    for folder in ("edgespec", "backends", "scripts", "tests"):
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and path.suffix in ("", ".py"):
                found |= set(re.findall(r"docs/[\w/-]+\.md", path.read_text()))
    assert len(found) > 3
    assert all((ROOT / name).exists() for name in found), found
