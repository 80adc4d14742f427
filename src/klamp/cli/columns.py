"""The columns of a run's table, and numbers as they stand in it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from klamp.training.config import TrainConfig

MISSING = "-"
BARS = "▁▂▃▄▅▆▇█"


def fixed(digits: int) -> Callable[[float], str]:
    """A number with so many digits after the point; very small and very large ones in powers of ten."""

    def write(value: float) -> str:
        size = abs(value)
        if not math.isfinite(value):
            return str(value)
        if size == 0:
            return f"{0:.{digits}f}"
        return f"{value:.{digits}f}" if 0.5 * 10**-digits <= size < 1000 else f"{value:.0e}"

    return write


def short(value: float) -> str:
    """A number as text, with three significant digits."""
    return f"{value:.3g}" if 1e-3 <= abs(value) < 1e4 or value == 0 else f"{value:.1e}"


def percent(value: float) -> str:
    """A share in [0, 1] as text, in percent."""
    return f"{100 * value:.1f}%"


def thousands(value: float) -> str:
    """A count as text, in thousands where it is long."""
    return f"{value:.0f}" if value < 10_000 else f"{value / 1000:.1f}k"


def duration(seconds: float) -> str:
    """Seconds as text on a clock: 1:02 or 3:04:05."""
    minutes, left = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{left:02d}" if hours else f"{minutes}:{left:02d}"


def spoken(seconds: float) -> str:
    """Seconds as text in words: 1 min 12 s, or 3 h 4 min."""
    minutes, left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {left} s" if minutes else f"{seconds:.1f} s"


@dataclass(frozen=True, kw_only=True)
class StepColumn:
    """One column of the table."""

    title: str
    """The column's heading."""
    metric: str
    """The metric that the column shows; see `klamp.diagnostics.metrics`."""
    width: int
    """The column's width in characters."""
    write: Callable[[float], str]
    """The function that writes a value as text."""
    rank: int
    """Order of removal on a narrow terminal: columns with the largest rank go first."""

    def cell(self, metrics: Mapping[str, float]) -> str:
        """The metric's value as text; "-" where there is none."""
        return self.write(metrics[self.metric]) if self.metric in metrics else MISSING


COLUMNS = (
    StepColumn(title="reward", metric="reward", width=6, write=fixed(3), rank=0),
    StepColumn(title="KL k1", metric="kl/k1", width=7, write=fixed(4), rank=4),
    StepColumn(title="KL k3", metric="kl/k3", width=6, write=fixed(4), rank=1),
    StepColumn(title="exact", metric="kl/exact", width=6, write=fixed(4), rank=2),
    StepColumn(title="over", metric="kl/over_budget", width=6, write=percent, rank=3),
    StepColumn(title="beta", metric="beta", width=7, write=short, rank=1),
    StepColumn(title="length", metric="length/mean", width=6, write=fixed(1), rank=5),
    StepColumn(title="entropy", metric="policy/entropy", width=7, write=fixed(3), rank=7),
    StepColumn(title="clip", metric="policy/ratio_clipped", width=6, write=percent, rank=6),
    StepColumn(title="lr", metric="train/learning_rate", width=7, write=short, rank=8),
    StepColumn(title="tok/s", metric="speed/tokens_per_second", width=6, write=thousands, rank=9),
)
GAP, STEP_WIDTH = 2, 7

LEGEND = "KL in nats per token; clip: tokens past a ratio bound; tok/s: sampled and trained"
LEGEND_OVER = "; over: completions past the KL budget"


def columns_for(config: TrainConfig, width: int) -> list[StepColumn]:
    """The columns that a run of this configuration has, and that fit into a line."""
    empty = {"kl/over_budget"} if config.kl.kl_clip_method == "none" else set()
    if config.run.backend == "tinker":
        empty |= {"kl/exact", "policy/entropy"}  # a service keeps the logits
    if config.run.backend == "verl":
        empty |= {"kl/exact", "kl/k1", "kl/k3"} - {f"kl/{config.kl.kl_estimator}"}  # it logs one KL, that of its term
    kept = [column for column in COLUMNS if column.metric not in empty]
    while len(kept) > 1 and STEP_WIDTH + sum(column.width + GAP for column in kept) > width:
        kept.remove(max(kept, key=lambda column: column.rank))
    return kept


def legend_for(config: TrainConfig) -> str:
    """The legend of the table: what columns mean whose titles do not say it."""
    return LEGEND + (LEGEND_OVER if config.kl.kl_clip_method != "none" else "")


def sparkline(values: Sequence[float], width: int) -> str:
    """A curve in one line of text: the mean of each of `width` stretches, from lowest to highest."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    count = min(width, len(finite))
    means = [_mean(finite[i * len(finite) // count : (i + 1) * len(finite) // count]) for i in range(count)]
    low, span = min(means), max(means) - min(means)
    return "".join(BARS[int((mean - low) / span * (len(BARS) - 1) + 0.5) if span > 0 else 0] for mean in means)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


@dataclass(frozen=True)
class ScoreScale:
    """How scores are written: as points of 100 where all lie between 0 and 1, else as they are."""

    points: bool

    @classmethod
    def of(cls, *scores: Mapping[str, float]) -> ScoreScale:
        """The scale that fits these scores."""
        return cls(all(0 <= value <= 1 for each in scores for value in each.values()))

    def write(self, value: float | None) -> str:
        """A score as text, on this scale."""
        return MISSING if value is None else f"{100 * value:.1f}" if self.points else f"{value:.4g}"

    def change(self, before: float | None, after: float | None) -> str:
        """The change of a score as text, with its sign."""
        if before is None or after is None:
            return MISSING
        return f"{100 * (after - before):+.1f}" if self.points else f"{after - before:+.4g}"
