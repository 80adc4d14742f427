"""From the command line and the file of klamp ablate to a plan."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from klamp.ablation.plan import Arm, runs
from klamp.cli.ablate_arguments import DEFAULTS, PlanFile, parse_ablate, read_plan_file
from klamp.config import PRESETS
from klamp.errors import ConfigError
from klamp.training.config import TrainConfig


def plan_of(words: str):
    return parse_ablate(words.split())[0]


def test_several_values_are_swept_and_one_is_for_all() -> None:
    plan = plan_of("--beta 0 0.001 0.01 0.1 --seeds 3 --max-steps 5 --cpu --kl_estimator k1")
    assert [arm.values for arm in plan.arms] == [{"beta": b} for b in (0.0, 0.001, 0.01, 0.1)]
    assert plan.seeds == (0, 1, 2) and plan.name == "beta"
    assert plan.base == {**DEFAULTS, "max_steps": 5, "cpu": True, "kl_estimator": "k1"}
    assert len(runs(plan)) == 12 and runs(plan)[0].config.run.report_to == ()


def test_several_such_flags_make_a_grid_aliases_and_switches_too() -> None:
    plan = plan_of("--kl-coef 0 0.1 --use_per_token_kl_threshold True False --kl_clip_method none hard soft")
    assert len(plan.arms) == 12 and plan.name == "beta-use_per_token_kl_threshold-kl_clip_method"
    assert plan.arms[-1].values == {"beta": 0.1, "use_per_token_kl_threshold": False, "kl_clip_method": "soft"}


def test_fields_of_several_values_are_values_not_sweeps() -> None:
    plan = plan_of(
        "--beta 0 0.1 --kl_exclude_tokens special 3 --kl_controller_factors 2 0.5 1 1 --report_to tensorboard"
    )
    assert len(plan.arms) == 2
    assert plan.base["kl_exclude_tokens"] == ("special", 3) and plan.base["kl_controller_factors"] == (2, 0.5, 1, 1)
    assert plan.base["report_to"] == ("tensorboard",), "trackers are off only where nobody asks for them"


@pytest.mark.parametrize(
    ("words", "seeds"), [("", (0, 1, 2)), ("--seeds 5", (0, 1, 2, 3, 4)), ("--seeds 5 7 11", (5, 7, 11))]
)
def test_one_number_of_seeds_is_how_many_several_are_those_and_one_arm_is_enough(words, seeds) -> None:
    plan = plan_of(f"--beta 0.1 {words}")
    assert plan.seeds == seeds and plan.name == "arithmetic"
    assert [(arm.name, arm.values) for arm in plan.arms] == [("base", {})]


@pytest.mark.parametrize(
    ("words", "what", "fix"),
    [
        ("--bta 0 1", "unknown flag", "--beta"),
        ("--worker 3", "unknown flag", "--workers"),
        ("--beta 0 x", "--beta cannot be read", ""),
        ("--kl_estimator k1 k9", "unknown --kl_estimator", "k"),
        ("--beta 0 1 --seeds", "--seeds cannot be read", "for example 3"),
        ("--beta 0 1 --seeds 0", "--seeds cannot be read", "seeds 0, 1 and 2"),
        ("--beta 0 1 --seeds x", "--seeds cannot be read", ""),
        ("--beta 0 1 --workers 0", "--workers takes 1 or more", ""),
        ("--gpus_per_run 1", "--gpus_per_run has no meaning without --ray", "leave --gpus_per_run out"),
        ("--ray local --workers 2", "--workers has no meaning with --ray", "leave --workers out"),
        ("--runs a b --beta 0 0.1", "--beta has no meaning with --runs", "leave --beta out"),
        ("--runs a b --dry_run", "--dry_run has no meaning with --runs", "leave --dry_run out"),
        ("plan.yaml", "a word that belongs to no flag", "--config plan.yaml"),
        ("--plan nowhere.yaml", "cannot be read", ""),
        ("--no_cpu 3", "a word that belongs to no flag", "--NAME VALUE"),
        ("--preset nothing", "unknown preset", ""),
        ("--config nowhere.yaml", "cannot be read", ""),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_way_out(words, what, fix) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_ablate(words.split())
    assert what in caught.value.what and fix in caught.value.fix


# recipes -------------------------------------------------------------------------------------------------------------


def test_a_preset_is_for_all_arms_and_gives_way_to_flags() -> None:
    plan = plan_of("--preset dr_grpo --beta 0 0.1 --kl_estimator k1")
    (off, on) = (run.config for run in runs(plan)[:2])
    assert on.loss == PRESETS["dr_grpo"].loss and (off.kl.beta, on.kl.beta) == (0, 0.1)
    assert on.kl.kl_estimator == "k1"


def test_presets_are_swept_as_klamp_train_reads_them() -> None:
    plan = plan_of("--preset grpo dr_grpo recommended --max_steps 7")
    assert [arm.name for arm in plan.arms] == ["preset=grpo", "preset=dr_grpo", "preset=recommended"]
    for run in runs(plan)[:3]:
        preset = PRESETS[run.arm.name.partition("=")[2]]
        assert (run.config.kl, run.config.loss, run.config.run.max_steps) == (preset.kl, preset.loss, 7)


def test_an_arms_preset_replaces_that_of_the_base(tmp_path) -> None:
    """Nothing of the base's recipe is left in it."""
    file = write(tmp_path, "base: {preset: dr_grpo}\narms: {a: {}, b: {preset: grpo}, c: {preset: grpo, beta: 0.7}}\n")
    a, b, c = (run.config for run in runs(plan_of(f"--plan {file}"))[:3])
    assert (a.loss, b.loss, c.loss) == (PRESETS["dr_grpo"].loss, PRESETS["grpo"].loss, PRESETS["grpo"].loss)
    assert b.kl == PRESETS["grpo"].kl and c.kl.beta == 0.7


# files ---------------------------------------------------------------------------------------------------------------


def write(folder: Path, text: str, name: str = "plan.yaml") -> Path:
    (folder / name).write_text(text)
    return folder / name


PLAN = """
name: mine
base:
  kl: {beta: 0.2}
  max_steps: 9
arms:
  free: {}
  hard clip: {kl_clip_method: hard, kl_clip_threshold: 0.05}
seeds: [4, 5]
"""


def test_a_plan_file_with_flags_over_it(tmp_path) -> None:
    file = write(tmp_path, PLAN)
    plan = plan_of(f"--plan {file}")
    assert [arm.name for arm in plan.arms] == ["free", "hard clip"]
    assert (plan.name, plan.seeds, plan.base) == ("mine", (4, 5), {**DEFAULTS, "beta": 0.2, "max_steps": 9})
    over = plan_of(f"--plan {file} --max_steps 3 --seeds 1")
    assert over.base == {**DEFAULTS, "beta": 0.2, "max_steps": 3} and over.seeds == (0,)
    with pytest.raises(ConfigError, match="named arms cannot also sweep"):
        plan_of(f"--plan {file} --beta 0.1 0.3")
    swept = plan_of(f"--plan {write(tmp_path, 'sweep: {beta: [0, 1], kl_estimator: [k1, k3]}')} --kl_estimator k2")
    assert [arm.name for arm in swept.arms] == ["beta=0", "beta=1"] and swept.base["kl_estimator"] == "k2"


def test_a_config_file_stands_below_the_plan(tmp_path) -> None:
    config = write(tmp_path, "max_steps: 1\nnum_generations: 4\npreset: dapo\n", "config.yaml")
    plan = plan_of(f"--plan {write(tmp_path, PLAN)} --config {config}")
    assert plan.base["max_steps"] == 9 and plan.base["num_generations"] == 4
    assert runs(plan)[0].config.loss == PRESETS["dapo"].loss


def test_the_configuration_of_a_single_run_is_a_base(tmp_path) -> None:
    """It has every field; what belongs to that run alone is left out."""
    from klamp.training.resumed import plain

    config = TrainConfig.from_flat({"max_steps": 7, "seed": 9, "output_dir": "there", "beta": 0.2})
    file = write(tmp_path, yaml.safe_dump(plain(config)), "config.yaml")
    plan = plan_of(f"--config {file} --beta 0 0.1 --seeds 1")
    (first, second) = (run.config for run in runs(plan))
    assert (first.kl.beta, second.kl.beta) == (0, 0.1) and first.run.max_steps == 7
    assert first.run.seed == 0 and first.run.output_dir is None
    with pytest.raises(ConfigError, match="are the same"):
        runs(plan_of(f"--config {file} --preset grpo dapo"))


def test_the_plan_that_an_ablation_writes_can_be_read(tmp_path) -> None:
    from klamp.ablation.execute import open_folder

    plan = plan_of("--beta 0 1e-05 --kl_exclude_tokens special --max_steps 3 --reward format_regex:a+ --seeds 2")
    open_folder(plan, tmp_path / "out")
    again = plan_of(f"--plan {tmp_path / 'out' / 'plan.yaml'}")
    assert again == plan


def test_a_flag_that_every_arm_overrides_is_refused(tmp_path) -> None:
    file = write(tmp_path, "arms: {a: {beta: 0}, b: {beta: 1}}\n")
    with pytest.raises(ConfigError, match="--beta has no effect"):
        plan_of(f"--plan {file} --beta 0.5")
    assert plan_of(f"--plan {write(tmp_path, 'arms: {a: {beta: 0}, b: {}}')} --beta 0.5").base["beta"] == 0.5


def test_every_part(tmp_path) -> None:
    text = """
        name: n
        base: {run: {max-steps: 3}, kl_penalty: 0.5, preset: dapo}
        sweep: {kl_coef: [0, 1], kl-estimator: [k1], kl_exclude_tokens: [[], [special, 3]], target_kl: [null, 0.1]}
        arms: {one: , two: {kl: {kl_clip_method: hard}}}
        seeds: [3, 1]
        kl_prompts: 12
    """
    assert read_plan_file(write(tmp_path, text)) == PlanFile(
        name="n",
        base={"max_steps": 3, "beta": 0.5, "preset": "dapo"},
        sweep={
            "beta": [0.0, 1.0],
            "kl_estimator": ["k1"],
            "kl_exclude_tokens": [(), ("special", 3)],
            "target_kl": [None, 0.1],
        },
        arms=(Arm(name="one"), Arm(name="two", values={"kl_clip_method": "hard"})),
        seeds=(3, 1),
        kl_prompts=12,
    )
    often = [read_plan_file(write(tmp_path, f"seeds: {seeds}")).seeds for seeds in ("4", "[4]")]
    assert often == [(0, 1, 2, 3), (4,)], "in a file a list is a list"


@pytest.mark.parametrize(
    ("text", "what", "fix"),
    [
        ("", "is empty", "sweep"),
        ("arm: {}", "unknown key", "arms"),
        ("beta: 0.1", "unknown key", "klamp ablate --help"),
        ("base: {bta: 1}", "unknown key", "beta"),
        ("base: 3", "base in", "beta: 0.01"),
        ("arms: [a, b]", "arms in", "beta: 0.01"),
        ("arms: {a: 3}", "the arm a in", "beta: 0.01"),
        ("arms: {a: {kl_estimator: k9}}", "unknown kl_estimator", ""),
        ("sweep: {beta: 0.1}", "sweep of beta", "beta: [0.1, ...]"),
        ("sweep: {beta: [x]}", "beta in", ""),
        ("sweep: {bta: [1]}", "unknown key", "beta"),
        ("seeds: 0", "seeds in", ""),
        ("seeds: [1, -2]", "seeds in", ""),
        ("seeds: true", "seeds in", ""),
        ("seeds: 1000000", "seeds in", ""),
        ("seeds: []", "seeds in", ""),
        ("kl_prompts: 0", "kl_prompts in", ""),
        ("a: [", "not valid YAML", ""),
    ],
)
def test_what_is_wrong_is_named_with_the_file(tmp_path, text, what, fix) -> None:
    with pytest.raises(ConfigError) as caught:
        read_plan_file(write(tmp_path, text))
    assert what in caught.value.what and fix in caught.value.fix and "plan.yaml" in str(caught.value)
