"""Plans: arms, grids, names of folders, what is refused and whose fault it is."""

import re
from pathlib import Path

import pytest

from klamp.errors import ConfigError, UnknownNameError
from klamp.lab.ablate.plan import OWNED, Arm, Plan, folder_name, grid, run_folder, runs
from klamp.lab.config import TrainConfig


def test_a_grid_is_every_combination_the_last_field_fastest() -> None:
    arms = grid({"beta": [0, 0.01], "kl_estimator": ["k1", "k3"]})
    assert [arm.name for arm in arms[:3]] == [
        f"beta={x} kl_estimator={y}" for x, y in ((0, "k1"), (0, "k3"), (0.01, "k1"))
    ]
    assert arms[2].values == {"beta": 0.01, "kl_estimator": "k1"}
    assert [arm.name for arm in grid({})] == ["base"]


def test_runs_are_seed_by_seed_with_the_arms_values_over_the_base() -> None:
    plan = Plan(base={"beta": 0.5, "max_steps": 7}, arms=grid({"beta": [0, 0.25]}), seeds=(3, 1))
    found = runs(plan)
    assert [run.name for run in found] == ["beta-0_seed-3", "beta-0.25_seed-3", "beta-0_seed-1", "beta-0.25_seed-1"]
    expected = {"beta": 0.25, "max_steps": 7, "seed": 3}
    assert found[1].config == TrainConfig.from_flat(expected)
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


@pytest.mark.parametrize(
    "change", [{"seeds": (1, 1)}, {"arms": (Arm(name="a=b"), Arm(name="a-b", values={"beta": 1.0}))}]
)
def test_plans_that_are_none_are_refused(change) -> None:
    with pytest.raises(ConfigError, match="is repeated"):
        runs(Plan(**change))


def test_folder_names_are_safe_and_differ_where_arms_do() -> None:
    assert folder_name("beta=0.01 kl_estimator=k1") == "beta-0.01_kl_estimator-k1"
    assert folder_name("lr 1e-05") == "lr_1e-05"
    names = ["model=/a/b", "model=/a:b", "../up", "hart, größer", "x" * 300, "x" * 301, "  ", "a\nb"]
    found = [folder_name(name) for name in names]
    assert len(set(found)) == len(names)
    assert all(re.fullmatch(r"[A-Za-z0-9_.+-]+", name) and len(name) < 120 and name[0] not in ".-" for name in found)


def test_two_arms_that_are_the_same_are_refused() -> None:
    """Such as recipes that give way to a base which sets every field."""
    plan = Plan(arms=(Arm(name="a", values={"beta": 0.3}), Arm(name="b"), Arm(name="c", values={"beta": 0.3})))
    with pytest.raises(ConfigError, match="the arms 'a' and 'c' are the same"):
        runs(plan)
