"""What other trainers call their metrics: one table per trainer, `recorded.yaml`, with its source and version.

klamp's name of a metric says its estimator and, in `METRICS`, its unit: `kl/k3` is a k3 in nats per token.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from importlib.resources import files

import yaml


@dataclass(frozen=True, kw_only=True)
class Logs:
    """What a trainer writes of a step."""

    source: str
    """Where the names were read: files and version."""
    names: Mapping[str, str]
    """Its name of a metric, without `train/` -> klamp's name."""
    other_kl: Mapping[str, str] = field(default_factory=dict)
    """Its name of a KL that klamp does not read -> what it is."""
    marks: Collection[str] = ()
    """Names that only this trainer logs: where one is there, its names win over those of the others."""


LOGS: Mapping[str, Logs] = {
    trainer: Logs(**table)
    for trainer, table in yaml.safe_load(files("klamp.diagnostics").joinpath("recorded.yaml").read_bytes()).items()
}
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
