"""Every option of every command as a page, made of the commands themselves.

python tests/options_page.py        writes docs/reference/options.md
"""

from pathlib import Path

import click

from edgespec.cli.commands import cli
from edgespec.cli.options import SECTIONS, SectionedCommand

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "options.md"
START = """\
# Options

Every option of every command, as `edgespec COMMAND --help` lists them. `tests/options_page.py` writes this page.

Each option can be set by an environment variable, whose name is EDGESPEC, the command and the option:
`EDGESPEC_RUN_MEMORY=12G` stands for `edgespec run --memory 12G`. An option on the command line takes precedence.
A flag is set by 1; values of an option that is repeatable are separated by spaces.
"""


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
            lines += [f"| {title} | | variable |", "| --- | --- | --- |", *rows, ""]
    return "\n".join(lines)


def row(option: click.Option) -> str:
    kind = "|".join(option.type.choices) if isinstance(option.type, click.Choice) else option.type.name.upper()
    value = "" if option.is_flag else f" {option.metavar or kind.partition(' ')[0]}"
    names = ", ".join(sorted(option.opts, key=len)) + "".join(f" / {name}" for name in option.secondary_opts)
    default = f" [default: {option.default}]" if option.show_default else ""
    cells = (f"`{names}{value}`", f"{option.help}{default}", f"`{option.envvar}`")
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


if __name__ == "__main__":
    PAGE.write_text(page())
