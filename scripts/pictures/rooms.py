"""The rooms of `edgespec/` as a house, from the table in docs/reference/rooms.md."""

import re
from html import escape
from pathlib import Path
from textwrap import wrap

from edgespec.machine.files import write_whole

PAGE = Path(__file__).parent.parent.parent / "docs" / "reference" / "rooms.md"
WIDTH, HIGH, GAP, LEFT = 860, 62, 6, 40
COLOURS = ["#57606a", "#6e5494", "#0969da", "#1a7f5a", "#8a6100", "#b35900", "#a1343c", "#8250df"]


def floors() -> list[tuple[int, list[str], str]]:
    """Floor, its rooms, and what they are for."""
    rows = re.findall(r"^\| (\d+) \| (.+?) \| (.+?) \|$", PAGE.read_text(), re.MULTILINE)
    return [(int(floor), re.findall(r"`(\w+(?:/|\.py))`", names), purpose) for floor, names, purpose in rows]


def house(out: Path) -> None:
    table = floors()
    roof = 54
    boxes = f'<path d="M{LEFT - 12} {roof} L{WIDTH / 2} 8 L{WIDTH - LEFT + 12} {roof} Z" fill="#808080"/>'
    boxes += _text(WIDTH / 2, roof - 14, "edgespec", "700 15px", "middle", "#fff")
    for row, (floor, rooms, purpose) in enumerate(table):
        y, parts = roof + GAP + row * (HIGH + GAP), purpose.split("; ")
        parts = parts if len(parts) == len(rooms) else [purpose] + [""] * (len(rooms) - 1)
        wide = (WIDTH - 2 * LEFT + GAP) / len(rooms)
        boxes += _text(LEFT - 18, y + HIGH / 2 + 5, str(floor), "700 14px", "middle", "#808080")
        for place, (room, part) in enumerate(zip(rooms, parts, strict=True)):
            x = LEFT + place * wide
            boxes += f'<rect x="{x:.1f}" y="{y}" width="{wide - GAP:.1f}" height="{HIGH}" rx="4" '
            boxes += f'fill="{COLOURS[floor % len(COLOURS)]}"/>'
            boxes += _text(x + 10, y + 20, room, "700 14px", "start", "#fff")
            for line, words in enumerate(wrap(part, int((wide - GAP - 16) / 6.4))[:2]):
                boxes += _text(x + 10, y + 38 + 15 * line, words, "400 12px", "start", "#fff")
    height = roof + GAP + len(table) * (HIGH + GAP)
    start = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">'
    write_whole(out, f"{start}{boxes}</svg>\n")


def _text(x: float, y: float, text: str, font: str, anchor: str, colour: str) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}"'
    return f'<text {place} style="font:{font} system-ui,sans-serif">{escape(text)}</text>'
