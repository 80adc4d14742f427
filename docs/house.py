"""Draws the house: `python docs/house.py` writes architecture.svg, and the list of rooms in architecture.md.

Both are made from the import contracts in pyproject.toml, which the build enforces, and from the first line of each
room's docstring. A test holds the committed files against what this would write.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
SOURCE = DOCS.parent / "src" / "klamp"
PICTURE, PAGE = DOCS / "architecture.svg", DOCS / "architecture.md"
BEGIN, END = "<!-- rooms: written by `python docs/house.py` -->", "<!-- end of rooms -->"

WIDTH, LEFT, RIGHT = 440, 16, 376
STEP, HEIGHT, GAP = 52, 38, 8
STYLE = """
  .paper { fill: #ffffff } .layer { fill: #dbeafe; stroke: #1d4ed8 } .laboratory { fill: #fef3c7; stroke: #b45309 }
  .line { stroke: #475569; fill: none; stroke-width: 1.5 } text { fill: #0f172a; font: 14px ui-sans-serif, sans-serif }
  .name { font: 600 13px ui-monospace, monospace; text-anchor: middle }
  @media (prefers-color-scheme: dark) {
    .paper { fill: #1e2129 } .layer { fill: #1e3a8a; stroke: #93c5fd } .laboratory { fill: #713f12; stroke: #fcd34d }
    .line { stroke: #cbd5e1 } text { fill: #f1f5f9 }
  }
"""


@dataclass(frozen=True)
class House:
    """The rooms of klamp as the import contracts have them."""

    layers: Sequence[Sequence[str]]
    """From the roof down; a room may import those of lower layers."""
    laboratory: frozenset[str]
    """The rooms that the layer underneath knows nothing of."""


def house() -> House:
    """The house, read from pyproject.toml."""
    settings: Any = tomllib.loads((DOCS.parent / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    (arrows,) = [each for each in contracts if each["type"] == "layers"]
    (apart,) = [each for each in contracts if "klamp.hosts" in each.get("source_modules", ())]
    return House(
        layers=[re.findall(r"\w+", layer) for layer in arrows["layers"]],
        laboratory=frozenset(name.removeprefix("klamp.") for name in apart["forbidden_modules"]),
    )


def picture(found: House) -> str:
    """The house as SVG: a row of rooms for each layer, coloured by the house that it belongs to."""
    bottom = 60 + STEP * len(found.layers)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" viewBox="0 0 {WIDTH} {bottom + 8}" role="img">',
        "<title>The rooms of klamp, one row per layer; a room may import the rooms of the rows below it</title>",
        f"<desc>From the roof down: {escape('; '.join(' and '.join(row) for row in found.layers))}. "
        f"The laboratory: {', '.join(sorted(found.laboratory))}. All others are the layer.</desc>",
        f"<style>{STYLE}</style>",
        f'<rect class="paper" width="{WIDTH}" height="{bottom + 8}" rx="8"/>',
        *_legend(LEFT, "layer", "the KL layer"),
        *_legend(LEFT + 150, "laboratory", "the laboratory"),
    ]
    for level, row in enumerate(found.layers):
        parts += _row(row, 52 + STEP * level, found.laboratory)
    x, y = RIGHT + 22, bottom - 22
    parts.append(f'<path class="line" d="M{x} 52V{y}m-6 -10l6 10l6 -10"/>')
    place = f'transform="translate({x + 22} {(52 + y) // 2}) rotate(90)" text-anchor="middle"'
    parts.append(f"<text {place}>may import</text>")
    return "\n".join([*parts, "</svg>"]) + "\n"


def _legend(x: int, kind: str, text: str) -> list[str]:
    return [
        f'<rect class="{kind}" x="{x}" y="16" width="18" height="18" rx="4"/>',
        f'<text x="{x + 26}" y="30">{text}</text>',
    ]


def _row(rooms: Sequence[str], y: int, laboratory: frozenset[str]) -> list[str]:
    width = (RIGHT - LEFT - GAP * (len(rooms) - 1)) / len(rooms)
    parts: list[str] = []
    for place, room in enumerate(rooms):
        x, kind = LEFT + place * (width + GAP), "laboratory" if room in laboratory else "layer"
        parts.append(f'<rect class="{kind}" x="{x:g}" y="{y}" width="{width:g}" height="{HEIGHT}" rx="6"/>')
        parts.append(f'<text class="name" x="{x + width / 2:g}" y="{y + 24}">{room}</text>')
    return parts


def table(found: House) -> str:
    """The rooms from the roof down, with what their own docstrings say of them, and the folders inside."""
    lines: list[str] = []
    for row in found.layers:
        for room in row:
            kind = " (laboratory)" if room in found.laboratory else ""
            inside = ", ".join(f"`{inner}`" for inner in folders(room))
            lines.append(f"- `{room}`{kind}: {first_line(room)}" + f" [{inside}]" * bool(inside))
    return "\n".join(lines)


def folders(room: str) -> list[str]:
    """The packages inside a room, as paths from there."""
    inside = sorted((SOURCE / room).rglob("__init__.py"))
    return [str(path.parent.relative_to(SOURCE / room)) for path in inside if path.parent != SOURCE / room]


def first_line(room: str) -> str:
    """The beginning of a room's docstring, up to a colon or a semicolon that two words or more stand before."""
    file = SOURCE / room / "__init__.py" if (SOURCE / room).is_dir() else SOURCE / f"{room}.py"
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    line = " ".join(text.split("\n\n")[0].split())
    start = re.split("[:;]", line)[0]
    return (start if len(start.split()) > 2 else line).rstrip(".")


def with_table(page: str, rows: str) -> str:
    """The page with what stands between the two marks replaced."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{rows}\n\n{END}{after}"


if __name__ == "__main__":
    PICTURE.write_text(picture(house()), encoding="utf-8")
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), table(house())), encoding="utf-8")
    print(f"{PICTURE.name}, {PAGE.name}")
