"""The dry run: everything that would happen, in words and in full, and nothing that happens."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from klamp.cli import main
from klamp.cli.arguments import parse_train
from klamp.cli.dry_run import plan_text, run_folder
from klamp.errors import RunFolderError
from klamp.training.config import TrainConfig


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def plan(*flags: str) -> str:
    return plan_text(parse_train(flags))


def test_it_starts_nothing(empty_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def never(*args: object) -> None:
        raise AssertionError("the trainer was started")

    monkeypatch.setattr("klamp.training.backends.train_run", never)
    assert main(["train", "--dry-run", "--max_steps", "7"]) == 0
    assert list(empty_folder.iterdir()) == []
    assert "steps       7, each 32 prompts x 8 completions = 256" in capsys.readouterr().out


@pytest.mark.parametrize("more", [[], ["--all"]])
def test_the_configuration_is_yaml_and_the_run_it_describes(more: list[str]) -> None:
    argv = ["--preset", "dapo", "--beta", "0.1", "--target_kl", "0.2", "--report_to", "--kl_exclude_tokens", "1", "2"]
    printed = plan(*argv, *more).partition("as a YAML file takes it")[2].partition("\n\n")[2]
    assert TrainConfig.from_flat(yaml.safe_load(printed)) == parse_train(argv).config


def test_only_what_differs_from_the_defaults_is_printed() -> None:
    text = plan("--learning-rate", "1e-6", "--seed", "0")
    printed = text.partition("as a YAML file takes it")[2].partition("\n\n")[2]
    assert [line.split()[:2] for line in printed.splitlines()] == [["#", "optim"], ["learning_rate:", "1.0e-06"]]
    assert "every field has its default" in plan() and "# kl" not in plan()


def test_all_without_a_dry_run_is_refused_before_any_work(empty_folder: Path, capsys) -> None:
    assert main(["train", "--all"]) == 2
    assert "--all belongs to --dry_run" in capsys.readouterr().err and not list(empty_folder.iterdir())


def test_the_inputs_are_opened_and_no_weights(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def never(*args: object, **others: object) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("klamp.training.models.load_base_model", never)
    assert main(["train", "--dry-run", "--train_size", "7", "--eval_size", "2"]) == 0
    assert "task        arithmetic; 7 to train on, 6 held out; longest prompt (tokens): 9" in capsys.readouterr().out


def test_a_reward_that_cannot_be_used_is_said(capsys) -> None:
    assert main(["train", "--dry-run", "--reward", "no_such_module:score"]) == 2
    assert "the module of a reward function cannot be imported" in capsys.readouterr().err


def test_what_differs_is_marked_with_who_set_it(empty_folder: Path) -> None:
    (empty_folder / "run.yaml").write_text("seed: 0\neval_every: 5\n", encoding="utf-8")
    text = plan("--config", "run.yaml", "--preset", "grpo", "--learning-rate", "1e-6", "--all")
    lines = {line.strip().partition(":")[0]: " ".join(line.split()) for line in text.splitlines() if ": " in line}
    assert lines["learning_rate"] == "learning_rate: 1.0e-06 #* by flag, default 0.0001"
    assert lines["eval_every"] == "eval_every: 5 #* by file run.yaml, default 40"
    assert lines["kl_gradient"] == "kl_gradient: forward #* by preset grpo, default reverse"
    assert lines["seed"] == "seed: 0 # by file run.yaml"
    assert lines["max_steps"] == "max_steps: 120"
    marked = ("learning_rate", "eval_every", "beta", "kl_gradient", "loss_type", "advantage_baseline")
    assert text.count("#* ") == 1 + len(marked) and all("#* " in lines[name] for name in marked)


def test_the_price_controller_and_reference_are_said() -> None:
    text = plan("--target_kl", "0.05", "--scale_rewards", "none", "--advantage_baseline", "leave_one_out")
    assert "price       0.01 reward per nat of a whole completion" in text
    assert "controller  hold controller from 0.01, towards 0.05" in text
    assert "reference   a frozen copy of the starting policy" in text


def test_without_kl_there_is_no_controller_and_no_reference() -> None:
    text = plan("--beta", "0")
    assert "beta        0: trains without KL" in text
    assert "reference   none" in text
    assert "controller" not in text.partition("as a YAML file")[0]


def test_who_writes_the_completions_is_said_where_it_is_not_the_policy() -> None:
    assert "completions by vLLM in the training processes" in plan("--backend", "trl", "--sampler", "vllm")
    assert "completions by" not in plan()


def test_it_fits_into_a_hundred_columns() -> None:
    text = plan("--target_kl", "0.05", "--kl_clip_method", "hard", "--model", "/models/" + 20 * "x", "--lora_r", "8")
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize(
    "flags", [[], ["--output_dir", "here"], ["--task", "data/rows.jsonl"], ["--task", "reasoning_gym:gcd"]]
)
def test_the_folder_is_the_one_that_the_trainer_takes(flags: list[str], empty_folder: Path) -> None:
    from klamp.training.setup import opened_folder

    (empty_folder / "runs" / "arithmetic-001").mkdir(parents=True)
    config = parse_train(flags).config
    assert f"folder      {run_folder(config)};" in plan(*flags)
    expected = run_folder(config)
    with opened_folder(config) as folder:
        assert folder == expected


def test_a_folder_that_holds_another_run_is_refused(empty_folder: Path) -> None:
    (empty_folder / "out").mkdir()
    (empty_folder / "out" / "config.yaml").touch()
    with pytest.raises(RunFolderError, match="another run"):
        plan("--output_dir", "out")
    assert "folder      out;" in plan("--output_dir", "out", "--resume")
    assert main(["train", "--dry-run", "--output_dir", "out"]) == 1
