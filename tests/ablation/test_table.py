"""The table of an ablation: which numbers, how they are averaged, and how they are written."""

from __future__ import annotations

import json
import math

import pytest
from tests.ablation.outcomes import failed, outcome, sweep

from klamp.ablation.table import cell_of, cell_text, markdown, number, plain, summarise, text_table


def test_a_cell_is_the_mean_over_seeds_and_its_student_interval() -> None:
    scores = (0.88, 0.94, 0.91)
    (row,) = summarise([outcome(seed=i, after={"addition": score}) for i, score in enumerate(scores)]).rows
    cell = row.cells["rl/after"]
    assert cell.mean == pytest.approx(0.91) and cell.values == scores and cell.seeds == (0, 1, 2)
    half = 4.302652729911275 * 0.03 / 3**0.5  # t of 2 degrees of freedom, 97.5 %; the standard deviation is 0.03
    assert cell.interval == pytest.approx((0.91 - half, 0.91 + half))
    assert cell_of({0: 0.5}).interval is None and cell_of({0: 0.1 + 0.2, 1: 0.3}).interval is None, "no spread"


def test_seeds_are_in_order_and_arms_as_they_come() -> None:
    runs = [outcome("b", 1, after={"addition": 0.2}), outcome("a", 0), outcome("b", 0, after={"addition": 0.1})]
    table = summarise(runs)
    assert [row.arm for row in table.rows] == ["b", "a"]
    assert table.rows[0].cells["rl/after"].values == (0.1, 0.2)


def test_only_columns_with_numbers_are_there() -> None:
    heading, _ = text_table(summarise([outcome()]))
    kls = ("KL(policy‖start) (nats/token)", "KL(start‖policy) (nats/token)")
    assert heading == ("arm", "seeds", "RL skill (score)", "retained skills (mean score)", *kls, "length (tokens)")
    alone = summarise([outcome(after={"addition": 0.9}, numbers={})])
    assert text_table(alone)[0] == ("arm", "seeds", "RL skill (score)") and alone.retained == ()


def test_a_failed_run_is_counted_shown_and_left_out_of_the_means() -> None:
    table = summarise([outcome(seed=0), failed(seed=1), failed("beta=1", 0)])
    first, second = table.rows
    assert (first.done, len(first.failures), second.done, len(second.failures)) == (1, 1, 0, 1)
    assert first.cells["rl/after"].values == (0.9,)
    assert second.cells == {}
    page = markdown(table)
    assert "| beta=0.01 | 1, 1 failed | 0.9 |" in page
    assert "| beta=1 | 0, 1 failed | - | - | - | - | - |" in page
    assert "- beta=1, seed 0: RewardError: the judge \\| is out to lunch\n" in page


def test_a_value_that_is_not_finite_is_left_out_and_the_cell_says_so() -> None:
    runs = [outcome(seed=i, numbers={"kl/reverse": kl}) for i, kl in enumerate((0.2, math.nan, 0.3, math.inf))]
    table = summarise(runs)
    cell = table.rows[0].cells["kl/reverse"]
    assert cell.values == (0.2, 0.3)
    assert cell_text(cell, table.rows[0].done) == "0.25 [-0.3853, 0.8853] (2 of 4)"


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


def test_the_page_is_one_table_with_units_and_notes() -> None:
    page = markdown(summarise(sweep([{"beta": 0.0}, {"beta": 0.01}, {"beta": 0.1}])))
    block = next(block.split("\n") for block in page.split("\n\n") if block.startswith("| arm"))
    assert len(block) == 5 and len({line.count("|") for line in block}) == 1, "as many cells in every row"
    assert "| RL skill, minus beta=0.0 |" in block[0] and "KL(policy‖start) (nats/token)" in block[0]
    assert "Mean over seeds [95 % Student interval of the mean]." in page
    assert "One seed per arm" in markdown(summarise([outcome()]))


def test_differences_to_the_first_arm_pair_the_seeds_that_both_have() -> None:
    runs = [outcome("a", seed, after={"addition": 0.1 * seed}) for seed in (0, 1, 2)]
    runs += [outcome("b", seed, after={"addition": 0.2 * seed}) for seed in (1, 2, 5)]
    first, second = summarise([*runs, failed("a", 5)]).rows
    assert "rl/difference" not in first.cells
    difference = second.cells["rl/difference"]
    assert difference.seeds == (1, 2) and difference.values == pytest.approx((0.1, 0.2))
    only_failures = summarise([failed("a", 0), outcome("b", 0)]).rows[1]
    assert "rl/difference" not in only_failures.cells


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
    assert cell["interval"][0] < min(cell["values"]) and cell["seeds"] == [0, 1, 2]
    assert content["rows"][2]["failures"] == ["seed 0: RewardError: the judge | is out\nto lunch"]
    assert "kl/forward_sequence" in content["rows"][0]["cells"]


def test_nothing_and_nothing_but_failures_are_pages_too() -> None:
    assert markdown(summarise([])) == "No run has ended.\n"
    assert "## Runs that failed\n" in markdown(summarise([failed()]))
