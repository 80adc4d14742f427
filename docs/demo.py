"""Records `klamp train` on the built-in task in a terminal and draws it: `python docs/demo.py` writes demo.svg.

A real run in a pseudo-terminal of 96 columns and 24 rows, half a minute on two cores; what it writes there becomes
pictures of the screen, and those one SVG that plays them, without a script. Who asked for less motion sees the last.
"""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import chain
from pathlib import Path

from rich.ansi import AnsiDecoder
from rich.cells import cell_len
from rich.console import Console
from rich.style import Style
from rich.terminal_theme import MONOKAI
from rich.text import Text

PICTURE = Path(__file__).resolve().parent / "demo.svg"
COLUMNS, ROWS = 96, 24
FRAMES, SECONDS, REST = 44, 12.0, 4.0
"""Pictures of the screen; how long they play; how long the last one stands."""
QUIET = 0.03
"""A picture is taken where nothing was written for so many seconds: a display that is half drawn is none."""

WIDE, HIGH, MARGIN, BAR = 7.4, 16, 14, 22
"""Size of a cell, and the border, in pixels."""
STYLE = """
  .paper { fill: #14181f } .bar { fill: #262c36 } .dot { fill: #5b6472 }
  text { fill: #d7dce3; font: 12px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; white-space: pre }
  .b { fill: #ffffff; font-weight: 700 } .d { fill: #8a93a1 }
"""
PLAIN = Console(width=COLUMNS)

Written = tuple[float, bytes]
"""Seconds since the start, and what was written then."""
Picture = tuple[Text, ...]
"""What a terminal shows: its rows."""


@dataclass
class Screen:
    """The lines that a terminal would show, as text with its colours; it knows what rich's live display writes."""

    lines: list[str] = field(default_factory=lambda: [""])
    row: int = 0
    rest: str = ""

    HALF = re.compile(r"\x1b(?:\[[?\d;]*)?$")
    TOKEN = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])|([\r\n])|([^\x1b\r\n]+)")

    def write(self, text: str) -> None:
        """Take what a program writes; an escape sequence may come in two parts."""
        text = self.rest + text
        half = self.HALF.search(text)
        self.rest = half[0] if half else ""
        for found in self.TOKEN.finditer(text.removesuffix(self.rest)):
            number, command, line_end, plain = found.groups()
            if command == "A":
                self.row = max(0, self.row - int(number or 1))
            elif command == "K":
                self.lines[self.row] = ""
            elif line_end == "\n":
                self.row += 1
                self.lines += [""] * (self.row + 1 - len(self.lines))
            elif command == "m" or plain:
                self.lines[self.row] += found[0]

    def shown(self) -> Picture:
        """The rows of the terminal: the last lines; a longer one goes on in the next row."""
        texts = AnsiDecoder().decode("\n".join(self.lines[-ROWS:]))
        rows = chain.from_iterable(text.divide(range(COLUMNS, len(text), COLUMNS)) for text in texts)
        return tuple(rows)[-ROWS:]


def record(command: Sequence[str], folder: Path) -> Iterator[Written]:
    """Run a program of this environment in a terminal, in a folder, and yield what it writes."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    terminal = {"TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "LINES": str(ROWS), "PATH": path}
    env = {name: value for name, value in os.environ.items() if name != "NO_COLOR"} | terminal
    with subprocess.Popen(command, stdin=its, stdout=its, stderr=subprocess.DEVNULL, env=env, cwd=folder) as program:
        os.close(its)
        begun = time.monotonic()
        while True:
            select.select([ours], [], [])
            try:
                written = os.read(ours, 1 << 16)
            except OSError:  # Linux: nobody is left at the other end
                written = b""
            if not written:
                break
            yield time.monotonic() - begun, written
        os.close(ours)
    if program.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {program.returncode}")


def pictures(written: Iterable[Written]) -> list[tuple[float, Picture]]:
    """The screen at every moment at which it was whole, with the seconds at which it came to be so."""
    screen, decode = Screen(), codecs.getincrementaldecoder("utf-8")().decode
    found: list[tuple[float, Picture]] = []
    last = 0.0
    for seconds, text in written:
        if seconds - last > QUIET and any(screen.lines):
            found.append((last, screen.shown()))
        screen.write(decode(text))
        last = seconds
    return [*found, (last, screen.shown())]


def from_the_first_step(found: Sequence[tuple[float, Picture]]) -> list[tuple[float, Picture]]:
    """The pictures from the first that counts steps: what stands before is Python and the model being loaded."""
    steps = [i for i, (_, lines) in enumerate(found) if any(re.match(r"step \d", line.plain) for line in lines)]
    return list(found[steps[0] :])


def chosen(found: Sequence[tuple[float, Picture]], count: int) -> list[Picture]:
    """So many of the pictures, at even times from the first to the last; equal neighbours are one."""
    first, last = found[0][0], found[-1][0]
    times = [first + (last - first) * i / (count - 1) for i in range(count)]
    at = [next(lines for seconds, lines in reversed(found) if seconds <= moment + 1e-9) for moment in times]
    return [lines for i, lines in enumerate(at) if i == 0 or lines != at[i - 1]]


def draw(frames: Sequence[Picture], *, title: str, description: str) -> str:
    """The frames as one SVG: each line is drawn once, however many frames show it."""
    names: dict[str, str] = {}
    strips = []
    width, height = COLUMNS * WIDE + 2 * MARGIN, ROWS * HIGH + BAR + MARGIN
    for number, lines in enumerate(frames):
        uses = []
        for row, line in enumerate(lines):
            if drawn := "".join(pieces(line)):
                name = names.setdefault(drawn, f"l{len(names)}")
                uses.append(f'<use href="#{name}" y="{row * HIGH}"/>')
        strips.append(f'<g transform="translate({number * width:.0f})">{"".join(uses)}</g>')
    share = 100 * SECONDS / (SECONDS + REST) / max(1, len(frames) - 1)
    moves = [f"{i * share:.2f}%{{transform:translateX({-i * width:.0f}px)}}" for i in range(len(frames))]
    last = f"transform:translateX({-(len(frames) - 1) * width:.0f}px)"
    rules = f"""
  @keyframes play {{ {" ".join(moves)} 100%{{{last}}} }}
  #frames {{ animation: play {SECONDS + REST:g}s step-end infinite }}
  @media (prefers-reduced-motion: reduce) {{ #frames {{ animation: none; {last} }} }}"""
    dots = "".join(f'<circle class="dot" cx="{MARGIN + 14 * i}" cy="{BAR / 2}" r="4"/>' for i in range(3))
    where = f'x="{width / 2:.0f}" y="{BAR / 2 + 4}" text-anchor="middle"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
            f'viewBox="0 0 {width:.0f} {height:.0f}" role="img">',
            f"<title>{escape(title)}</title>",
            f"<desc>{escape(description)}</desc>",
            f"<style>{STYLE}{rules}</style>",
            "<defs>",
            *(f'<g id="{name}">{drawn}</g>' for drawn, name in names.items()),
            "</defs>",
            f'<rect class="paper" width="{width:.0f}" height="{height:.0f}" rx="8"/>',
            f'<path class="bar" d="M0 {BAR}V8a8 8 0 0 1 8 -8H{width - 8:.0f}a8 8 0 0 1 8 8V{BAR}z"/>{dots}',
            f'<text class="d" {where}>{escape(title)}</text>',
            f'<svg x="{MARGIN}" y="{BAR + 6}" width="{COLUMNS * WIDE:.0f}" height="{ROWS * HIGH}">'
            f'<g id="frames">{"".join(strips)}</g></svg>',
            "</svg>\n",
        ]
    )


def pieces(line: Text) -> Iterator[str]:
    """The words of a line that stand together, each at its column and as wide as its cells."""
    column = 0
    for segment in line.render(PLAIN, end=""):
        for found in re.finditer(r"\S+(?: \S+)*", segment.text):
            x = (column + cell_len(segment.text[: found.start()])) * WIDE
            kind = look(segment.style)
            yield (
                f'<text{kind} x="{x:g}" y="13" textLength="{cell_len(found[0]) * WIDE:g}" '
                f'lengthAdjust="spacingAndGlyphs">{escape(found[0])}</text>'
            )
        column += cell_len(segment.text)


def look(style: Style | None) -> str:
    """The attribute of a text in this style: its colour, or whether it is bold or dim."""
    if style is None:
        return ""
    if style.color is not None:
        return f' style="fill:{style.color.get_truecolor(MONOKAI).hex}"'
    return ' class="b"' if style.bold else ' class="d"' if style.dim else ""


def main() -> None:
    """Record a run, and write the picture."""
    with tempfile.TemporaryDirectory() as folder:
        found = from_the_first_step(pictures(record(["klamp", "train", "--cpu"], Path(folder))))
    frames = chosen(found, FRAMES)
    last = " ".join(" ".join(line.plain for line in frames[-1]).split())
    title = f"klamp train: {found[-1][0] - found[0][0]:.0f} seconds in {SECONDS:g}"
    description = f"The display of klamp train on the built-in task, recorded by docs/demo.py. At the end: {last}"
    PICTURE.write_text(draw(frames, title=title, description=description), encoding="utf-8")
    print(f"{PICTURE}: {len(frames)} pictures, {PICTURE.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
