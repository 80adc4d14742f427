"""What stands further right wins: defaults < preset < file < flags."""

from __future__ import annotations

from pathlib import Path

import pytest

from klamp.cli.arguments import parse_train
from klamp.config import PRESETS
from klamp.errors import ConfigError, UnknownNameError
from klamp.training.config import TrainConfig

DEMO = Path(__file__).resolve().parents[2] / "examples" / "config_demo.yaml"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "run.yaml"


def test_no_arguments_are_the_defaults() -> None:
    request = parse_train([])
    assert request.config == TrainConfig()
    assert request.sources == {}
    assert not request.options.dry_run


def test_the_command_line_of_the_grpo_tutorial() -> None:
    argv = ["--config", str(DEMO), "--kl_penalty", "0.04", "--output_dir", "out", "--max_steps", "500"]
    request = parse_train(argv)
    config = request.config
    assert (config.kl.beta, config.kl.target_kl, config.kl.controller_name) == (0.04, 0.05, "hold")
    assert (config.run.output_dir, config.run.max_steps) == ("out", 500)
    assert request.sources == {
        "beta": "flag",
        "target_kl": f"file {DEMO}",
        "output_dir": "flag",
        "max_steps": "flag",
    }


@pytest.mark.parametrize("beta", ["0.0", "0.001", "0.01", "0.1"])
def test_the_ablation_loop_of_the_grpo_tutorial_with_its_beta_of_zero(beta: str) -> None:
    argv = ["--config", str(DEMO), "--kl_penalty", beta, "--output_dir", f"output_beta_{beta}", "--max_steps", "5000"]
    kl = parse_train(argv).config.kl
    assert kl.beta == float(beta)
    assert kl.controller_name == ("fixed" if beta == "0.0" else "hold"), "beta 0 means: without KL"


def test_the_flags_of_the_k3_bug_report() -> None:
    argv = ["--kl-beta", "0.0", "--num-generations", "8", "--max-steps", "100"]
    config = parse_train(argv).config
    assert (config.kl.beta, config.rollout.num_generations, config.run.max_steps) == (0.0, 8, 100)


def test_flags_win_over_the_file_and_the_file_over_the_preset(file: Path) -> None:
    file.write_text("kl_gradient: reverse\nepsilon: 0.1\nmax_steps: 7\n", encoding="utf-8")
    request = parse_train(["--preset", "grpo", "--config", str(file), "--epsilon", "0.3"])
    assert request.config.kl.beta == PRESETS["grpo"].kl.beta == 0.04
    assert PRESETS["grpo"].kl.kl_gradient == "forward"
    assert request.config.kl.kl_gradient == "reverse"
    assert request.config.loss.epsilon == 0.3
    assert request.config.run.max_steps == 7
    assert request.sources == {
        "beta": "preset grpo",
        "kl_gradient": f"file {file}",
        "loss_type": "preset grpo",
        "advantage_baseline": "preset grpo",
        "epsilon": "flag",
        "max_steps": f"file {file}",
    }


def test_an_alias_in_the_flags_wins_over_the_fields_name_in_the_file(file: Path) -> None:
    file.write_text("beta: 0.5\n", encoding="utf-8")
    assert parse_train(["--config", str(file), "--kl_coef", "0.2"]).config.kl.beta == 0.2


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_gives_its_recipe(name: str) -> None:
    config = parse_train(["--preset", name]).config
    assert (config.kl, config.loss) == (PRESETS[name].kl, PRESETS[name].loss)


def test_a_preset_may_stand_in_the_file_and_a_flag_replaces_it(file: Path) -> None:
    file.write_text("preset: dapo\n", encoding="utf-8")
    assert parse_train(["--config", str(file)]).config.loss.loss_type == "dapo"
    assert parse_train(["--config", str(file), "--preset", "grpo"]).config.loss.loss_type == "grpo"
    assert parse_train(["--config", str(file), "--preset", "None"]).config.loss.loss_type == "dr_grpo"


def test_an_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="dapo"):
        parse_train(["--preset", "dappo"])


def test_only_the_whole_is_checked_not_its_parts(file: Path) -> None:
    """A controller without its target in the file is fine where the flags give the target."""
    file.write_text("kl_controller: proportional\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="needs target_kl"):
        parse_train(["--config", str(file)])
    config = parse_train(["--config", str(file), "--target_kl", "0.1"]).config
    assert (config.kl.controller_name, config.kl.target_kl) == ("proportional", 0.1)
