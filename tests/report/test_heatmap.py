"""The shaded picture of the KL by position and step."""

from __future__ import annotations

import pytest
from tests.report.pages import parse

from klamp.report.heatmap import COLUMNS, Heatmap, edges_of, level_of, render_heatmap


def heatmap(steps: int) -> Heatmap:
    rows = {f"part {part} of 2": {float(s): part * 0.1 * s / steps for s in range(1, steps + 1)} for part in (1, 2)}
    return Heatmap(name="h", title="T", unit="nats/token", text="Says.", rows=rows)


def test_shades_are_even_on_a_logarithmic_axis() -> None:
    edges = edges_of([0.0, 0.001, 1.0])
    assert edges == pytest.approx([0.001, 0.0032, 0.01, 0.032, 0.1, 0.32])
    assert [level_of(value, edges) for value in (0.0, 0.0009, 0.001, 0.05, 1.0)] == [0, 0, 1, 4, 6]
    assert edges_of([0.0, 0.0]) == [1e-4]


def test_cells_legend_and_table() -> None:
    node = parse(render_heatmap(heatmap(4)))
    cells = node.one("svg", of="chart").all("rect")
    assert len(cells) == 8
    assert cells[-1].classes == ["q6"] and cells[-1].text == "step 4, part 2 of 2: 0.2"
    assert float(cells[0].attributes["y"] or 0) > float(cells[-1].attributes["y"] or 0), "the beginning is below"
    legend = [item.text for item in node.one("ul", of="steps").all("li")]
    assert legend == ["below", "0.0002", "0.00063", "0.002", "0.0063", "0.02", "0.063+"]
    assert node.one("table").rows()[:2] == [["step", "part 1 of 2", "part 2 of 2"], ["1", "0.025", "0.05"]]


def test_long_runs_are_thinned() -> None:
    node = parse(render_heatmap(heatmap(1000)))
    assert len(node.one("svg", of="chart").all("rect")) <= 2 * COLUMNS
