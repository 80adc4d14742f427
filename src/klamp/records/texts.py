"""Reads rows of metrics from texts: what a trainer prints, a table of a notebook, a chart's export."""

from __future__ import annotations

import ast
import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from klamp.records.files import text_lines, unreadable

CONSOLE = re.compile(r"\bstep:\s*(\d+) - (\S.*)")
"""A line that verl prints: its step, then NAME:VALUE with ` - ` between."""
PRINTED = re.compile(r"\{'[^{}]*\}")
"""A row that transformers prints, as Python writes a dict; a progress bar may stand before it."""
ROW = re.compile(r"\{['\"][^{}]*\}")
"""The same, or an object of JSON behind the time and the level of a log."""
NUMPY = re.compile(r"\b(?:np|numpy)\.\w+\(([^()]*)\)")
"""A number as numpy writes it."""
BARE = re.compile(r"(?<![\w'])-?(nan|inf|NaN|Infinity|null|true|false)(?![\w'])")
"""A number that is none of Python's literals."""
GAP = re.compile(r" {2,}")
"""What stands between the columns of a table that is aligned with spaces."""
OF_CHARTS = ("__MIN", "__MAX")
"""How the columns of W&B's export end that are the same curve once more."""
LOOKED_AT = 200
"""Lines within which the first row stands; a log begins with what a program says of itself."""


def rows_in(path: Path) -> list[dict[str, Any]]:
    """The rows of metrics in a text, in order."""
    lines = [line.strip("\r\n") for line in text_lines(path)]
    lines = [line for line in lines if line.strip()]
    for read in (_console, _printed):
        if any(True for _ in read(lines[:LOOKED_AT])):
            return list(read(lines))
    table = list(_table(lines, path)) if lines else []
    if not table:
        raise unreadable(
            "a text has no rows of metrics",
            path,
            why="it holds neither a table with a column of steps, nor rows as transformers or verl print them",
        )
    return table


def _console(lines: Sequence[str]) -> Iterator[dict[str, Any]]:
    for found in filter(None, map(CONSOLE.search, lines)):
        pairs = (part.rpartition(":") for part in found[2].split(" - "))
        yield {"step": found[1], **{name.strip(): NUMPY.sub(r"\1", value.strip()) for name, _, value in pairs if name}}


def _printed(lines: Sequence[str]) -> Iterator[dict[str, Any]]:
    for text in (found for line in lines for found in ROW.findall(line)):
        try:
            row = ast.literal_eval(BARE.sub(r"'\g<0>'", NUMPY.sub(r"\1", text)))
        except (ValueError, SyntaxError, RecursionError):
            continue
        if isinstance(row, dict):
            yield {str(name): value for name, value in row.items()}


def _table(lines: Sequence[str], path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a table, one column of which counts steps, with tabs, commas, bars or spaces between columns."""
    between = max("\t|,", key=lines[0].count)
    if between not in lines[0]:  # columns that stand under one another
        lines = [GAP.sub("\t", line.strip()) for line in lines]
        between = "\t"
    head, *rows = csv.reader((line.strip().strip("|") if between == "|" else line for line in lines), delimiter=between)
    names = _columns([name.strip() for name in head], path)
    if not any("step" in name.lower() for name in names):
        return
    for row in rows:
        found = {name: value.strip() for name, value in zip(names, row, strict=False) if name}
        if any(part.isdigit() for part in found.get(next(n for n in names if "step" in n.lower()), "")):
            yield found


def _columns(head: Sequence[str], path: Path) -> list[str]:
    """The metrics' names in a table's head; `RUN - NAME`, as W&B exports a chart, without the run, which is one."""
    split: list[tuple[str, str]] = []
    for name in head:
        run, _, rest = name.rpartition(" - ")
        split.append((run, "" if rest.endswith(OF_CHARTS) else rest.replace(" / ", "/")))
    runs = sorted({run for run, name in split if run and name})
    if len(runs) > 1:
        raise unreadable(
            "a table has several runs",
            path,
            why=", ".join(runs[:6]),
            fix="export the chart with one run alone, or the run itself (docs/doctor.md says how)",
        )
    return [name for _, name in split]


def rows_by_metric(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of an object {metric: {step: value}}, as NeMo-RL writes it, or {metric: [value, ...]}; else none."""
    lists = {name: values for name, values in found.items() if isinstance(values, list) and values}
    plain = not any(isinstance(value, list | dict) for values in lists.values() for value in values)
    if plain and len(set(map(len, lists.values()))) == 1:
        return [dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True)]
    columns = {name: values for name, values in found.items() if isinstance(values, dict) and values}
    if not columns or not all(step.isdigit() for values in columns.values() for step in values):
        return []
    rows: dict[int, dict[str, Any]] = {}
    for name, values in columns.items():
        for step, value in values.items():
            rows.setdefault(int(step), {"step": int(step)})[name] = value
    return [rows[step] for step in sorted(rows)]
