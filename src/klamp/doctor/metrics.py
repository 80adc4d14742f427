"""The table of all metrics, `metrics.yaml`, and what other trainers call them, `recorded.yaml`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any, Literal, TypeAlias

import yaml

from klamp.errors import ConfigError, check_name

Better: TypeAlias = Literal["higher", "lower", "neither"]
Counted: TypeAlias = Literal["completions", "tokens", "KL tokens", "parts"]


@dataclass(frozen=True)
class MetricRow:
    """One metric."""

    name: str
    """The name as it is logged; the part before the slash is its family."""
    unit: str
    better: Better
    reduction: str
    """How it is reduced over the batch of a step: a mean over completions, tokens, KL tokens; a sum over parts."""
    text: str
    shown: Mapping[str, str] = field(default_factory=dict)
    """Where it is shown: `chart` of the report, `label` of its curve, `column` of the table of `klamp train`."""

    @property
    def label(self) -> str:
        """The label of its curve: by default the part of the name after the slash."""
        return self.shown.get("label", self.name.rpartition("/")[2].replace("_", " "))


def _table(file: str) -> Mapping[str, Any]:
    return yaml.safe_load(files("klamp.doctor").joinpath(file).read_bytes())


METRICS: Mapping[str, MetricRow] = {name: MetricRow(name, *row) for name, row in _table("metrics.yaml").items()}
"""Name -> row. Evaluations are logged as `eval/SKILL`, the mean score of a skill on held-out prompts."""
COLUMNS = {row.shown["column"]: row.name for row in METRICS.values() if "column" in row.shown}
"""Column of the table that `klamp train` prints -> metric."""


_COUNTED: Mapping[str, Counted] = {
    "mean over completions": "completions",
    "mean over tokens": "tokens",
    "mean over KL tokens": "KL tokens",
    "sum over parts": "parts",
    "value": "completions",
}


def check_metrics(names: Iterable[str]) -> None:
    """Refuse metrics without a row; of several teachers each has the row of the one (`teacher/kl.KEY`).

    Raises:
        UnknownNameError: a metric has no row in metrics.yaml, so neither the report nor the docs would show it.
    """
    for name in names:
        check_name("metric of metrics.yaml", name.partition(".")[0], METRICS)


def averaged_over(name: str) -> Counted:
    """What the parts of a step count by when their means are joined.

    Raises:
        UnknownNameError: the metric has no row in metrics.yaml.
        ConfigError: its reduction is no mean, such as a maximum: parts of a step do not add up to it.
    """
    check_metrics([name])
    reduction = METRICS[name].reduction
    if reduction not in _COUNTED:
        why = f"its reduction in metrics.yaml is {reduction!r}, and means of parts do not give that"
        fix = "measure it over the whole step (klamp.hosts.common.step_metrics)"
        raise ConfigError("a metric cannot be joined from the parts of a step", got=name, why=why, fix=fix)
    return _COUNTED[reduction]


@dataclass(frozen=True, kw_only=True)
class Logs:
    """What a trainer writes of a step: its name of a metric, without `train/` -> klamp's; of other KLs -> a text."""

    source: str
    """Where the names were read: files and version."""
    names: Mapping[str, str]
    other_kl: Mapping[str, str] = field(default_factory=dict)
    marks: Collection[str] = ()
    """Names that only this trainer logs: a record with one of them uses its names before those of the others."""


LOGS: Mapping[str, Logs] = {trainer: Logs(**table) for trainer, table in _table("recorded.yaml").items()}
"""Trainer -> what it writes."""

NAMES: Mapping[str, str] = {
    theirs: ours
    for logs in sorted(LOGS.values(), key=lambda logs: bool(logs.marks), reverse=True)
    for theirs, ours in logs.names.items()
}
"""The name that another trainer uses -> klamp's; where two use one name, that of whom no mark tells."""

OTHER_KL: Mapping[str, str] = {name: what for logs in LOGS.values() for name, what in logs.other_kl.items()}
"""The name of a KL of another kind -> what it is."""


def names_in(logged: Collection[str]) -> Mapping[str, str]:
    """The name of another trainer -> klamp's, for a record that has these names.

    A KL under klamp's own name makes it klamp's record: then only names without a mark count.
    """
    found = dict(NAMES)
    if any(name.removeprefix("train/").startswith("kl/") for name in logged):
        return found
    for logs in LOGS.values():
        if not set(logs.marks).isdisjoint(logged):
            found |= {f"{part}{name}": ours for name, ours in logs.names.items() for part in ("", "train/")}
            found = {name: ours for name, ours in found.items() if name not in logs.other_kl}
    return found
