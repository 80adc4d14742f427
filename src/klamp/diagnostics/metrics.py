"""The table of all metrics, `metrics.yaml`: name, unit, direction, how it is averaged, what it says. Others' names:
`recorded`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Literal, TypeAlias

import yaml

from klamp.errors import ConfigError

Better: TypeAlias = Literal["higher", "lower", "neither"]
Counted: TypeAlias = Literal["completions", "tokens", "KL tokens", "parts"]


@dataclass(frozen=True)
class MetricRow:
    """One metric."""

    name: str
    """The name as it is logged; the part before the slash is its family."""
    unit: str
    """The unit of the value."""
    better: Better
    """Whether higher values are better, lower ones, or neither."""
    reduction: str
    """How it is reduced, always over the whole global batch of a step: a mean over completions, over the trained tokens
    or over those that carry the KL (KL tokens); `sum over parts`: each part is divided by the step's totals already."""
    text: str
    """What the metric says, in a sentence."""


METRICS: dict[str, MetricRow] = {
    name: MetricRow(name, *row)
    for name, row in yaml.safe_load(files("klamp.diagnostics").joinpath("metrics.yaml").read_bytes()).items()
}
"""Name -> row. Evaluations are logged as `eval/SKILL`, the mean score of a skill on held-out prompts."""


_COUNTED: Mapping[str, Counted] = {
    "mean over completions": "completions",
    "mean over tokens": "tokens",
    "mean over KL tokens": "KL tokens",
    "sum over parts": "parts",
    "value": "completions",
}


def averaged_over(name: str) -> Counted | None:
    """What the parts of a step count by when their means are joined; None: a maximum or the like, which is not a mean.

    Args:
        name: a metric; a `value` is the same in every part, which counts by its completions.

    Raises:
        ConfigError: a name that is not in `METRICS`.
    """
    if name not in METRICS:
        raise ConfigError(
            "a metric has no row in METRICS",
            got=name,
            why="without its reduction the parts of a step would be averaged wrongly, and nobody would see it",
            fix="add a row with its unit and reduction to klamp/diagnostics/metrics.yaml",
        )
    return _COUNTED.get(METRICS[name].reduction)
