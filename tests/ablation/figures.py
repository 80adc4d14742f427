"""What is in a figure of matplotlib, read back for the tests of pictures."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.collections import PathCollection


def points(axes: Any) -> np.ndarray:
    """The faint points of a panel, in the order they were drawn."""
    clouds = [each for each in axes.collections if isinstance(each, PathCollection)]
    return np.concatenate([np.asarray(cloud.get_offsets()) for cloud in clouds])


def means(axes: Any) -> list[tuple[float, float]]:
    """The marks of means."""
    lines = [container.lines[0] for container in axes.containers]
    return [(float(line.get_xdata()[0]), float(line.get_ydata()[0])) for line in lines]


def whiskers(axes: Any) -> list[tuple[float, float]]:
    """Ends of the intervals, upright ones."""
    bars = [container.lines[2][0].get_segments()[0] for container in axes.containers]
    return [(float(low[1]), float(high[1])) for low, high in bars]


def labels(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.get_legend().get_texts()]
