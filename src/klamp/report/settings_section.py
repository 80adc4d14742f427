"""The section of settings and versions: what differs from the defaults, and between runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from klamp.report.run import ReportRun
from klamp.report.text import MISSING, Html, element, join, plain_table, setting, shorten

LONGEST = 200
UNIMPORTANT = ("output_dir", "resume")
"""Fields that are never the same in two runs, and decide nothing."""


def settings_section(runs: Sequence[ReportRun]) -> Html:
    """The section about the configurations of the runs.

    Args:
        runs: those of the report.
    """
    if not any(run.config for run in runs):
        return element("p", "The record does not hold the configuration.", class_="missing")
    parts: list[Html] = []
    if len(runs) > 1:
        parts += [element("h3", "What differs between the runs"), _differences(runs)]
    elif runs[0].defaults:
        parts += _changed(runs[0])
    changed = [f"{run.name}, after step {n}: {text}" for run in runs for n, text in run.history.changes.items()]
    if changed:
        parts += [element("h3", "Changed at a resume"), *(element("p", text) for text in changed)]
    summary = element("summary", "Every field")
    parts.append(element("details", summary, _everything(runs), class_="data", open=not parts))
    return join(parts)


def changed(run: ReportRun) -> list[str]:
    """The fields whose value is not the default."""
    return [name for name, value in run.config.items() if name in run.defaults and _differs(value, run.defaults[name])]


def differing(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The fields in which the configurations differ; a field that one of them lacks counts."""
    names = list(dict.fromkeys(name for config in configs for name in config))
    return [
        name
        for name in names
        if name not in UNIMPORTANT and any(_differs(config.get(name), configs[0].get(name)) for config in configs[1:])
    ]


def _differs(a: Any, b: Any) -> bool:
    plain = [list(value) if isinstance(value, tuple) else value for value in (a, b)]
    return plain[0] != plain[1]


def _changed(run: ReportRun) -> list[Html]:
    names = changed(run)
    if not names:
        return [element("p", "Every field that has a default has it.", class_="aside")]
    rows = {name: (_value(run.config[name]), _value(run.defaults[name])) for name in names}
    heading = element("h3", "Differs from the default")
    return [heading, _table("fields that differ from their default", ("field", "value", "default"), rows)]


def _differences(runs: Sequence[ReportRun]) -> Html:
    known = [run for run in runs if run.config]
    names = differing([run.config for run in known]) if len(known) > 1 else []
    if not names:
        text = f"Nothing that the records say, {' and '.join(UNIMPORTANT)} aside."
        return element("p", text, class_="aside")
    rows = {name: [_cell(run, name) for run in runs] for name in names}
    return _table("configuration that differs", ("field", *(run.name for run in runs)), rows)


def _everything(runs: Sequence[ReportRun]) -> Html:
    names = list(dict.fromkeys(name for run in runs for name in run.config))
    defaults = {name: value for run in runs for name, value in run.defaults.items()}
    rows = {name: [_cell(run, name) for run in runs] for name in names}
    headings = ("field", *(run.name if len(runs) > 1 else "value" for run in runs))
    if defaults:
        rows = {name: [*cells, _value(defaults.get(name, MISSING))] for name, cells in rows.items()}
        headings = (*headings, "default")
    return _table("the whole configuration", headings, rows)


def _table(caption: str, headings: Sequence[str], rows: Mapping[str, Sequence[str]]) -> Html:
    cells = [(element("code", name), *values) for name, values in rows.items()]
    return plain_table(headings, cells, caption=caption, classes="settings")


def _cell(run: ReportRun, name: str) -> Html:
    if name not in run.config:
        return Html(MISSING)
    mark = [element("span", "changed", class_="changed")] if name in changed(run) else []
    return element("span", _value(run.config[name]), *([Html(" "), *mark] if mark else []))


def _value(value: Any) -> str:
    return shorten(setting(value), LONGEST)


def versions_section(runs: Sequence[ReportRun]) -> Html:
    """The versions of the software of each run.

    Args:
        runs: those of the report.
    """
    names = list(dict.fromkeys(name for run in runs for name in run.versions))
    if not names:
        return element("p", "The record does not hold versions.", class_="missing")
    rows = {name: [run.versions.get(name, MISSING) for run in runs] for name in names}
    return _table("versions", ("package", *(run.name if len(runs) > 1 else "version" for run in runs)), rows)
