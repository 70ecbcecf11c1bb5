"""Every option of every command as a page, and the keywords of Python on theirs, made of the program itself.

python tests/options_page.py        writes docs/reference/options.md, and tables in docs/reference/api.md
"""

import inspect
import re
from pathlib import Path
from typing import Any, get_type_hints

import click

from edgespec.cli.commands import cli
from edgespec.cli.options import SECTIONS, SectionedCommand
from edgespec.loading.keywords import GenerateKeywords, LoadKeywords, RequestKeywords
from edgespec.loop.sampling import SamplingParams
from edgespec.model import load

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "options.md"
PYTHON_PAGE = PAGE.with_name("api.md")
START = """\
# Options

Every option of every command, as `edgespec COMMAND --help` lists them. `tests/options_page.py` writes this page.

Each of them can also be set by an environment variable, `EDGESPEC_<COMMAND>_<OPTION>`, with `_` for each space and `-`.
So `EDGESPEC_RUN_MEMORY=12G` stands for `edgespec run --memory 12G`, and `EDGESPEC_DATASTORE_BUILD_MODEL` for
`edgespec datastore build --model`. An option with two names has the variable of the long one. Options that `--help`
does not list have none.

- An option on the command line takes precedence.
- A flag has no value and is off by default, if its row has no other default. 1 switches it on, 0 off.
- Values of an option that is repeatable are separated by spaces.
- A SIZE is a number of bytes, or has a unit, a power of 1024: 900M, 12G.
"""
DEFAULT = re.compile(r" ?\[default: (.+)\]$")
UNITS = {  # name of a parameter -> what its number counts
    "context_length": "tokens", "budget": "draft tokens", "max_tokens": "tokens", "top_k": "tokens",
    "gpu_layers": "layers", "drop_layers": "layers", "bits": "bits", "threads": "threads", "targets": "processes",
    "tau": "logits", "top_p": "probability", "min_p": "share", "limit": "prompts", "count": "questions",
    "parallel": "requests", "grace": "seconds", "memory": "bytes", "gpu_memory": "bytes",
}  # fmt: skip


def page() -> str:
    return "\n".join([START, *(part(name, command) for name, command in sorted(all_commands().items()))])


def all_commands() -> dict[str, click.Command]:
    """Name, such as `edgespec datastore build` -> command."""
    found = dict[str, click.Command]()
    for name, command in cli.commands.items():
        inner = command.commands if isinstance(command, click.Group) else {"": command}
        found |= {f"edgespec {name} {sub}".rstrip(): one for sub, one in inner.items()}
    return found


def part(name: str, command: click.Command) -> str:
    """One command: usage, purpose, and its options in a table for each section."""
    arguments = [
        one.metavar or str(one.name).upper() if one.required else f"[{str(one.name).upper()}]"
        for one in command.params
        if isinstance(one, click.Argument)
    ]
    purpose = (command.help or "").split("\n\n")[0].replace("\n", " ")
    options = {one.name: row(one) for one in command.params if isinstance(one, click.Option) and not one.hidden}
    sections = SECTIONS if isinstance(command, SectionedCommand) else {}
    listed = {title: [options.pop(name) for name in names if name in options] for title, names in sections.items()}
    lines = [f"## {name}", "", f"    {' '.join([name, '[OPTIONS]', *arguments])}", "", purpose, ""]
    for title, rows in (listed | {"Other" if sections else "Option": list(options.values())}).items():
        if rows:
            lines += [f"| {title} | | unit | default |", "| --- | --- | --- | --- |", *rows, ""]
    return "\n".join(lines)


def row(option: click.Option) -> str:
    kind = "|".join(option.type.choices) if isinstance(option.type, click.Choice) else option.type.name.upper()
    value = "" if option.is_flag else f" {option.metavar or kind.partition(' ')[0]}"
    names = ", ".join(sorted(option.opts, key=len)) + "".join(f" / {name}" for name in option.secondary_opts)
    about = str(option.help)
    default = DEFAULT.search(about)
    shown = default[1] if default else option.default if option.show_default else ""
    unit = "bytes" if option.metavar == "SIZE" else UNITS.get(str(option.name), "")
    cells = (f"`{names}{value}`", DEFAULT.sub("", about), unit, str(shown))
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def python_page() -> str:
    """The page of Python with its tables of keywords made anew."""
    text, docs = PYTHON_PAGE.read_text(), inspect.getdoc
    inherited = f"{docs(RequestKeywords)}\n{docs(SamplingParams)}"
    for keywords, about in ((LoadKeywords, docs(load)), (GenerateKeywords, f"{docs(GenerateKeywords)}\n{inherited}")):
        lines = ["| keyword | type | | unit | default |", "| --- | --- | --- | --- | --- |"]
        lines += [keyword_row(name, kind, str(about)) for name, kind in get_type_hints(keywords).items()]
        before, _, after = text.partition(f"<!-- {keywords.__name__} -->\n")
        text = f"{before}<!-- {keywords.__name__} -->\n{chr(10).join(lines)}{after[after.index(chr(10) * 2) :]}"
    return text


def keyword_row(name: str, kind: Any, docstring: str) -> str:
    """A keyword by its type, and by the entry that a docstring has of it: its meaning, and perhaps "default: "."""
    entries = (
        rf"^    (?:{names}): (.+(?:\n     .+)*)" for names in (name, rf"[\w, ]*\b{name},? [\w, ]+|[\w, ]+, {name}")
    )
    found = next(filter(None, (re.search(entry, docstring, re.MULTILINE) for entry in entries)))
    about, _, default = re.sub(r"\s+", " ", found[1]).replace(". Default:", "; default:").partition("; default: ")
    default = default or ("the model's" if name in SamplingParams.__dataclass_fields__ else "")
    shown = kind.__name__ if isinstance(kind, type) else str(kind)
    shown = re.sub(r"\w+\.(?=\w)", "", shown.replace(" | None", "").replace("None | ", ""))
    cells = (f"`{name}`", f"`{shown}`", about.rstrip("."), UNITS.get(name, ""), default.rstrip("."))
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


if __name__ == "__main__":
    PAGE.write_text(page())
    PYTHON_PAGE.write_text(python_page())
