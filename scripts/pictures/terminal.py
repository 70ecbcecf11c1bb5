"""A command on a terminal as an animated SVG. Each line of text is shown while the terminal shows it."""

import os
import pty
import re
import time
from collections.abc import Sequence
from fcntl import ioctl
from html import escape
from itertools import groupby
from pathlib import Path
from struct import pack
from termios import TIOCSWINSZ
from typing import Any

from edgespec.errors import EdgespecError, MissingPackage
from edgespec.machine.files import write_whole

Line = tuple[tuple[str, str], ...]  # runs of text and their style
Shot = tuple[float, tuple[Line, ...]]

WIDTH, HEIGHT, LEFT, TOP = 8.43, 18, 14, 30  # of a character; of the frame
MOST_WAIT, LAST = 1.5, 8.0  # seconds: a longer wait is cut; the last shot stays
SPINNER = re.compile("[\u2800-\u28ff]")
COLOURS = {
    "black": "#6e7681", "red": "#ff7b72", "green": "#56d364", "brown": "#e3b341", "blue": "#79c0ff",
    "magenta": "#d2a8ff", "cyan": "#56d4dd", "white": "#e6edf3",
}  # fmt: skip


def record(command: Sequence[str], shown: str, out: Path, folder: Path, columns: int = 92, rows: int = 20) -> None:
    """
    Args:
        command: the program and its arguments.
        shown: what a user types.
        out: the SVG.
        folder: where the command runs.
        columns: of the terminal.
        rows: likewise.

    Raises:
        MissingPackage: pyte is not installed.
        EdgespecError: the command fails, or the picture cannot be written.
    """
    try:
        import pyte
    except ImportError as error:
        raise MissingPackage("pyte", "", "a picture of a terminal") from error
    screen = pyte.Screen(columns, rows)
    stream = pyte.ByteStream(screen)
    stream.feed(f"\x1b[1m$ {shown}\x1b[0m\r\n".encode())
    shots, last, now = [(0.0, _lines(screen))], time.monotonic(), 0.5
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(folder)
        os.environ.pop("NO_COLOR", None)
        os.environ |= {"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}
        os.execvp(command[0], list(command))
    ioctl(terminal, TIOCSWINSZ, pack("HHHH", rows, columns, 0, 0))
    while data := _read(terminal):
        stream.feed(data)
        lines, at = _lines(screen), time.monotonic()
        if lines != shots[-1][1]:
            now, last = now + min(at - last, MOST_WAIT), at
            shots.append((now, lines))
    os.close(terminal)
    if code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        said = [line.strip() for line in screen.display if line.strip()]
        raise EdgespecError(f"{' '.join(command)}: ended with exit code {code}: {said[-1]}")
    write_whole(out, animation(shots, columns))


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # Linux, when the program has ended
        return b""


def _lines(screen: Any) -> tuple[Line, ...]:
    return tuple(_line(screen, y) for y in range(screen.lines))


def _line(screen: Any, y: int) -> Line:
    cells = [(SPINNER.sub("…", screen.buffer[y][x].data), _style(screen.buffer[y][x])) for x in range(screen.columns)]
    while cells and cells[-1][0] == " ":
        cells.pop()
    runs = groupby(cells, key=lambda cell: cell[1])
    return tuple(("".join(text for text, _ in run), style) for style, run in runs)


def _style(cell: Any) -> str:
    colour = COLOURS.get(cell.fg.removeprefix("bright"), "" if cell.fg == "default" else f"#{cell.fg}")
    return (f"fill:{colour};" if colour else "") + ("font-weight:bold;" if cell.bold else "")


def animation(shots: Sequence[Shot], columns: int) -> str:
    """The SVG. A viewer without motion shows the last shot."""
    end, rows = shots[-1][0] + LAST, max(y + 1 for _, lines in shots for y, line in enumerate(lines) if line)
    width, height = 2 * LEFT + columns * WIDTH, TOP + rows * HEIGHT + 12
    still, moves, texts = list[str](), list[str](), list[str]()
    for y in range(rows):
        changes = [(line, next(run)[0]) for line, run in groupby(shots, key=lambda shot: shot[1][y])]
        for (line, start), until in zip(changes, [*(at for _, at in changes[1:]), end], strict=True):
            if line:
                name = f"t{len(texts)}"
                texts.append(f'<text y="{TOP + (y + 1) * HEIGHT - 5}" class="{name}">{_spans(line)}</text>')
                still += [f".{name}{{visibility:hidden}}"] if until < end else []
                moves += [_shown(name, start / end, until / end, end)] if start or until < end else []
    dots = "".join(f'<circle cx="{16 + 16 * n}" cy="15" r="5" fill="#484f58"/>' for n in range(3))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" width="{width:.0f}" '
        f'height="{height}" font-family="ui-monospace,SFMono-Regular,Menlo,Consolas,DejaVu Sans Mono,monospace" '
        f'font-size="14" fill="#e6edf3"><style>text{{white-space:pre}}{"".join(still)}'
        f"@media (prefers-reduced-motion:no-preference){{{''.join(moves)}}}</style>"
        f'<rect width="100%" height="100%" rx="8" fill="#0d1117"/>{dots}{"".join(texts)}</svg>\n'
    )


def _spans(line: Line) -> str:
    spans, x = "", float(LEFT)
    for text, style in line:
        styled = f' style="{style}"' if style else ""
        length = f' textLength="{len(text) * WIDTH:.1f}"'
        spans += f'<tspan x="{x:.1f}"{length}{styled}>{escape(text)}</tspan>'
        x += len(text) * WIDTH
    return spans


def _shown(name: str, start: float, until: float, seconds: float) -> str:
    first, after = ("hidden" if start else "visible"), ("hidden" if until < 1 else "visible")
    return (
        f"@keyframes {name}{{0%{{visibility:{first}}}{start:.3%}{{visibility:visible}}{until:.3%}{{visibility:{after}}}"
        f"100%{{visibility:{after}}}}}.{name}{{animation:{name} {seconds:.1f}s step-end infinite}}"
    )
