"""The table of an ablation: which numbers, how they are averaged, and how they are written."""

from __future__ import annotations

import json
import math

import pytest
from tests.ablation.outcomes import failed, outcome, sweep

from klamp.ablation.outcome import GROUPS
from klamp.ablation.statistics import bootstrap_interval
from klamp.ablation.table import (
    Table,
    cell_text,
    markdown,
    number,
    plain,
    sections,
    summarise,
)


def test_a_cell_is_the_mean_over_seeds_and_its_bootstrap_interval() -> None:
    scores = (0.88, 0.94, 0.91)
    table = summarise([outcome(seed=i, after={"addition": score}) for i, score in enumerate(scores)])
    (row,) = table.rows
    assert row.cells["rl/after"].mean == pytest.approx(0.91)
    assert row.cells["rl/after"].interval == bootstrap_interval(scores)
    assert row.cells["rl/after"].values == scores
    assert row.cells["rl/gain"].mean == pytest.approx(0.91 - 0.62)


def test_seeds_are_in_order_and_arms_as_they_come() -> None:
    runs = [outcome("b", 1, after={"addition": 0.2}), outcome("a", 0), outcome("b", 0, after={"addition": 0.1})]
    table = summarise(runs)
    assert [row.arm for row in table.rows] == ["b", "a"]
    assert table.rows[0].cells["rl/after"].values == (0.1, 0.2)


def test_only_columns_with_numbers_are_there() -> None:
    names = [column.name for column in summarise([outcome()]).columns]
    assert names == [
        "rl/after",
        "rl/gain",
        "retained/after",
        "retained/loss",
        "kl/reverse",
        "kl/forward",
        "length",
        "seconds",
    ]
    alone = summarise([outcome(after={"addition": 0.9}, numbers={})])
    assert [column.name for column in alone.columns] == ["rl/after", "rl/gain"]
    assert alone.retained == ()


def test_a_failed_run_is_counted_shown_and_left_out_of_the_means() -> None:
    table = summarise([outcome(seed=0), failed(seed=1), failed("beta=1", 0)])
    first, second = table.rows
    assert (first.done, first.failed, second.done, second.failed) == (1, 1, 0, 1)
    assert first.cells["rl/after"].values == (0.9,)
    assert second.cells == {}
    page = markdown(table)
    assert "| beta=0.01 | 1, 1 failed | 0.9 |" in page
    assert "| beta=1 | 0, 1 failed | - | - | - | - |" in page
    assert "- beta=1, seed 0: RewardError: the judge \\| is out to lunch\n" in page


def test_a_value_that_is_not_finite_is_left_out_and_the_cell_says_so() -> None:
    runs = [outcome(seed=i, numbers={"kl/reverse": kl}) for i, kl in enumerate((0.2, math.nan, 0.3, math.inf))]
    table = summarise(runs)
    cell = table.rows[0].cells["kl/reverse"]
    assert cell.values == (0.2, 0.3)
    assert cell_text(cell, table.rows[0].done) == "0.25 [0.2, 0.3] (2 of 4)"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (-0.0, "0"),
        (0.81234, "0.8123"),
        (12.3456, "12.35"),
        (1234.5, "1234"),
        (12345.6, "12346"),
        (9999.9, "10000"),
        (1.25e8, "1.25e+08"),
        (0.000123456, "0.0001235"),
        (1.5e-9, "1.5e-09"),
        (-0.04, "-0.04"),
    ],
)
def test_numbers_have_four_significant_digits(value: float, text: str) -> None:
    assert number(value) == text


def test_the_page_names_units_and_draws_one_table_per_group() -> None:
    page = markdown(summarise(sweep([{"beta": 0.0}, {"beta": 0.01}, {"beta": 0.1}])))
    assert [title for title in GROUPS.values() if f"## {title}\n" in page] == list(GROUPS.values())
    for text in (
        "KL(policy‖start) (nats/token)",
        "KL(start‖policy) (nats/sequence)",
        "wall time (s)",
        "length (tokens)",
    ):
        assert text in page
    tables = [block.split("\n") for block in page.split("\n\n") if block.startswith("| arm")]
    assert [len(block) for block in tables] == [5, 5, 5, 6], "the last one: two arms in two numbers"
    for block in tables:
        assert len({line.replace("\\|", "").count("|") for line in block}) == 1, "as many cells in every row"
    assert "Mean over seeds [95 % bootstrap interval of the mean]." in page
    assert "With 3 seeds the intervals are rough" in page


SCORES = {"a": (0.80, 0.84, 0.86), "b": (0.83, 0.85, 0.90), "c": (0.701, 0.741, 0.760), "d": (0.79, 0.83, 0.85)}


def of_scores(scores: dict[str, tuple[float, ...]]) -> Table:
    return summarise([outcome(arm, i, after={"addition": x}) for arm, xs in scores.items() for i, x in enumerate(xs)])


def test_only_seeds_that_both_have_are_paired() -> None:
    runs = [outcome("a", seed, after={"addition": 0.1 * seed}) for seed in (0, 1, 2)]
    runs += [outcome("b", seed, after={"addition": 0.2 * seed}) for seed in (1, 2, 5)]
    found = summarise([*runs, failed("a", 5)]).comparisons["rl/after"]
    assert found["b"].differences == pytest.approx((0.1, 0.2))


def test_the_comparisons_stand_in_the_page_and_in_json() -> None:
    table = of_scores(SCORES)
    assert table.comparisons["rl/after"]["c"].differences == pytest.approx((-0.099, -0.099, -0.1))
    *_, (title, heading, rows) = sections(table)
    assert title == "Against a, seed by seed"
    assert heading == ("arm", "number", "seeds", "difference", "p, Holm")
    assert [row[0] for row in rows] == ["b", "c", "d"]
    assert rows[1][3].startswith("-0.09933 [-0.1008, -0.0979]") and rows[2][4:] == ("-",)
    page = markdown(table)
    assert "## Against a, seed by seed\n" in page and "t-test with Holm's correction" in page
    assert "shown where p is below 0.05" in page
    content = json.loads(json.dumps(plain(table), allow_nan=False))
    assert content["control"] == "a"
    assert list(content["comparisons"]["rl/after"]) == ["b", "c", "d"]
    assert content["comparisons"]["rl/after"]["d"]["p"] is None
    assert content["rows"][0]["cells"]["rl/after"]["seeds"] == [0, 1, 2]
    assert "Against a" not in markdown(of_scores({"a": (0.5,), "b": (0.6,)}))


def test_names_and_reasons_stay_text_in_markdown() -> None:
    page = markdown(summarise([outcome("<img src=x>|*a*"), failed("<img src=x>|*a*", 1, "`x` <b>\n\n# no heading")]))
    assert "<img" not in page
    assert "<b>" not in page
    assert "\n# no heading" not in page
    assert "| &lt;img src=x>\\|\\*a\\* |" in page


def test_plain_values_are_json_with_every_seed_in_them() -> None:
    runs = [*sweep([{"beta": 0.0}, {"beta": 0.1, "kl_estimator": "k1"}]), failed("broken")]
    content = json.loads(json.dumps(plain(summarise(runs)), allow_nan=False))
    assert [arm["arm"] for arm in content["rows"]] == ["beta=0.0", "beta=0.1 kl_estimator=k1", "broken"]
    assert content["rows"][1]["values"] == {"beta": 0.1, "kl_estimator": "k1"}
    cell = content["rows"][0]["cells"]["kl/reverse"]
    assert cell["values"] == [run.numbers["kl/reverse"] for run in runs[:3]]
    assert cell["mean"] == pytest.approx(sum(cell["values"]) / 3)
    assert cell["interval"] == pytest.approx([min(cell["values"]), max(cell["values"])])
    assert content["rows"][2]["failures"] == ["seed 0: RewardError: the judge | is out\nto lunch"]
    units = {column["name"]: column["unit"] for column in content["columns"]}
    assert units["kl/forward_sequence"] == "nats/sequence"


def test_nothing_and_nothing_but_failures_are_pages_too() -> None:
    assert markdown(summarise([])) == "No run has ended.\n"
    assert markdown(summarise([failed()])).startswith("## Runs that failed\n") and sections(summarise([failed()])) == []


BETAS = [{"beta": 0.0}, {"beta": 0.01}, {"beta": 0.1}]
