"""A plan's arms and runs; the outcomes of runs, and what a table says of them."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from tests.ablation.outcomes import BEFORE, failed, outcome, sweep

from klamp.errors import ConfigError, DataError, UnknownNameError
from klamp.lab.ablate import results
from klamp.lab.ablate.plan import OWNED, Arm, Plan, folder_name, grid, run_folder, runs
from klamp.lab.ablate.results import cell_of, draw_frontier
from klamp.lab.config import TrainConfig
from klamp.names import OUTCOME


def test_an_outcome_survives_its_file(tmp_path: Path) -> None:
    assert results.read_outcome(tmp_path) is None
    for each in (outcome(values={"ref_model": None}), failed()):
        results.write_outcome(tmp_path, each)
        assert results.read_outcome(tmp_path) == each
    assert [file.name for file in tmp_path.iterdir()] == [OUTCOME], "nothing half written is left"


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"run": "a"}', '{"run": "a", "arm": "a", "seed": 0, "before": {"addition": "good"}}']
)
def test_a_damaged_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / OUTCOME).write_text(text)
    with pytest.raises(DataError) as caught:
        results.read_outcome(tmp_path)
    assert str(tmp_path / OUTCOME) in str(caught.value.got) and "delete that file" in caught.value.fix


def test_retained_skills_were_measured_twice_and_not_trained() -> None:
    run = outcome(before={**BEFORE, "only before": 1.0}, after={"addition": 0.9, "reversal": 0.5, "only after": 1.0})
    assert results.retained_skills(run) == ("reversal",)
    assert (results.retained(run, run.before), results.retained(run, run.after)) == (0.99, 0.5)
    alone = outcome(before={"addition": 0.1}, after={"addition": 0.2})
    assert results.retained(alone, alone.after) is None


def test_a_cell_is_the_mean_over_seeds_and_its_student_interval() -> None:
    scores = (0.88, 0.94, 0.91)
    (row,) = results.summarise([outcome(seed=i, after={"addition": score}) for i, score in enumerate(scores)])
    cell = row.cells["rl/after"]
    assert cell.mean == pytest.approx(0.91) and cell.values == dict(enumerate(scores))
    half = 4.302652729911275 * 0.03 / 3**0.5  # t of 2 degrees of freedom, 97.5 %; the standard deviation is 0.03
    assert cell.interval == pytest.approx((0.91 - half, 0.91 + half))
    assert cell_of({0: 0.5}).interval is None and cell_of({0: 0.1 + 0.2, 1: 0.3}).interval is None, "no spread"


def test_a_failed_run_is_counted_and_left_out_of_the_means() -> None:
    table = results.summarise([outcome(seed=0), failed(seed=1), failed("beta=1", 0)])
    first, second = table
    assert (first.done, first.failed, second.done, second.failed) == (1, 1, 0, 1)
    assert first.cells["rl/after"].values == {0: 0.9} and second.cells == {}
    page = results.markdown(table)
    assert "| beta=0.01 | 1, 1 failed | 0.9 |" in page and "Student interval" in page and "length" in page
    lines = page.split("\n\n")[0].split("\n")
    assert len(lines) == 4 and len({line.count("|") for line in lines}) == 1, "as many cells in every row"


def test_a_value_that_is_not_finite_is_left_out_and_the_cell_says_so() -> None:
    runs = [outcome(seed=i, numbers={"kl/reverse": kl}) for i, kl in enumerate((0.2, math.nan, 0.3, math.inf))]
    (row,) = results.summarise(runs)
    assert results.cell_text(row.cells["kl/reverse"], row.done) == "0.25 [-0.3853, 0.8853] (2 of 4)"


def test_differences_to_the_first_arm_pair_the_seeds_that_both_have() -> None:
    runs = [outcome("a", seed, after={"addition": 0.1 * seed}) for seed in (0, 1, 2)]
    runs += [outcome("b", seed, after={"addition": 0.2 * seed}) for seed in (1, 2, 5)]
    first, second = results.summarise([*runs, failed("a", 5)])
    assert "rl/difference" not in first.cells
    assert second.cells["rl/difference"].values == pytest.approx({1: 0.1, 2: 0.2})
    assert "rl/difference" not in results.summarise([failed("a", 0), outcome("b", 0)])[1].cells


def test_the_files_have_every_number_of_every_seed(tmp_path: Path) -> None:
    runs = [*sweep([{"beta": 0.0}, {"beta": 0.1, "kl_estimator": "$k_1$"}]), failed("broken")]
    result = results.write_results(runs, tmp_path)
    assert [file.name for file in result.files] == ["table.md", "table.json", "frontier.png"]
    rows = json.loads((tmp_path / "table.json").read_text())["rows"]
    assert [row["arm"] for row in rows] == ["beta=0.0", "beta=0.1 kl_estimator=$k_1$", "broken"]
    assert list(rows[0]["cells"]["kl/reverse"]["values"].values()) == [run.numbers["kl/reverse"] for run in runs[:3]]
    assert "reward" in rows[0]["cells"], "which the page does not have"


def test_the_frontier_is_every_skill_against_the_kl_of_a_completion() -> None:
    runs = [
        outcome(arm, seed, numbers={"kl/reverse_sequence": kl}, after={**BEFORE, "addition": score})
        for arm, seed, kl, score in (("free", 0, 3.0, 0.9), ("free", 1, 5.0, 1.0), ("held", 0, 0.5, 0.7))
    ]
    figure = draw_frontier([*runs, failed()])
    assert figure is not None and draw_frontier([outcome(), failed()]) is None, "without a KL there is no picture"
    titles = ["addition (trained)", "subtraction (not trained)", "reversal (not trained)"]
    assert [axes.get_title() for axes in figure.axes] == titles
    trained = figure.axes[0]
    points = np.concatenate([np.asarray(cloud.get_offsets()) for cloud in trained.collections])
    assert points == pytest.approx(np.array([(3, 0.9), (5, 1.0), (4, 0.95), (0.5, 0.7), (0.5, 0.7)]))
    assert list(trained.lines[0].get_ydata()) == [BEFORE["addition"]] * 2, "the score before training"
    assert [text.get_text().strip("\u200b") for text in figure.legends[0].get_texts()] == ["free", "held"]


def test_a_grid_is_every_combination_the_last_field_fastest() -> None:
    arms = grid({"beta": [0, 0.01], "kl_estimator": ["k1", "k3"]})
    names = ["beta=0 kl_estimator=k1", "beta=0 kl_estimator=k3", "beta=0.01 kl_estimator=k1"]
    assert [arm.name for arm in arms[:3]] == names
    assert arms[2].values == {"beta": 0.01, "kl_estimator": "k1"}
    assert [arm.name for arm in grid({})] == ["base"]


def test_runs_are_seed_by_seed_with_the_arms_values_over_the_base() -> None:
    plan = Plan(base={"beta": 0.5, "max_steps": 7}, arms=grid({"beta": [0, 0.25]}), seeds=(3, 1))
    found = runs(plan)
    assert [run.name for run in found] == ["beta-0_seed-3", "beta-0.25_seed-3", "beta-0_seed-1", "beta-0.25_seed-1"]
    assert found[1].config == TrainConfig.from_flat({"beta": 0.25, "max_steps": 7, "seed": 3})
    assert run_folder(Path("out"), found[0]) == Path("out/runs/beta-0_seed-3")


@pytest.mark.parametrize("name", OWNED)
def test_what_the_ablation_sets_itself_is_refused(name: str) -> None:
    values = {name: TrainConfig().flat()[name]}
    for plan in (Plan(base=values), Plan(arms=(Arm(name="base", values=values),))):
        with pytest.raises(ConfigError, match=f"it sets {name}"):
            runs(plan)


def test_a_refused_configuration_names_its_arm() -> None:
    plan = Plan(arms=grid({"kl_placement": ["loss", "reward"]}))
    with pytest.raises(ConfigError) as caught:
        runs(plan)
    error = caught.value
    assert error.what.startswith("kl_placement='reward' takes kl_estimator='k1' only")
    assert error.__notes__ == ["in the arm 'kl_placement=reward'"]
    with pytest.raises(UnknownNameError, match="bta"):
        runs(Plan(arms=(Arm(name="typo", values={"bta": 1}),)))
    with pytest.raises(ConfigError, match="klamp's own loop only"):
        runs(Plan(base={"model": "Qwen/Qwen3-8B"}, arms=grid({"backend": ["trl"]})))


EQUAL = (Arm(name="a", values={"beta": 0.3}), Arm(name="b"), Arm(name="c", values={"beta": 0.3}))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"seeds": (1, 1)}, "is repeated"),
        ({"arms": (Arm(name="a=b"), Arm(name="a-b", values={"beta": 1.0}))}, "is repeated"),
        ({"arms": EQUAL}, "the arms 'a' and 'c' are equal"),
    ],
)
def test_plans_with_a_run_twice_are_refused(change, said) -> None:
    with pytest.raises(ConfigError, match=said):
        runs(Plan(**change))


def test_folder_names_are_safe_and_differ_where_arms_do() -> None:
    assert folder_name("beta=0.01 kl_estimator=k1") == "beta-0.01_kl_estimator-k1"
    assert folder_name("lr 1e-05") == "lr_1e-05"
    names = ["model=/a/b", "model=/a:b", "../up", "hart, größer", "x" * 300, "x" * 301, "  ", "a\nb"]
    found = [folder_name(name) for name in names]
    assert len(set(found)) == len(names)
    assert all(re.fullmatch(r"[A-Za-z0-9_.+-]+", name) and len(name) < 120 and name[0] not in ".-" for name in found)
