"""A configuration in words, the command that continues its run, and the dry run, in which nothing happens."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from tests.cli.fake_trainer import write_files

from klamp.cli import describe as words
from klamp.cli import main
from klamp.cli.arguments import parse_train, read_entries
from klamp.cli.describe import plan_text, run_folder
from klamp.errors import ConfigError, RunFolderError
from klamp.training.config import TrainConfig


def config_of(*flags: str) -> TrainConfig:
    return parse_train(flags).config


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ([], "a frozen copy of the starting policy"),
        (
            ["--beta", "0"],
            "none: beta is 0, so no reference is loaded; --kl_monitor loads one, and measures the KL all the same",
        ),
        (["--lora_r", "8"], "the policy with its adapter off"),
        (["--lora_r", "8", "--reference", "frozen"], "a frozen copy of the starting policy"),
        (["--ref_model", "my/model"], "my/model, frozen"),
        (["--beta", "0", "--kl_monitor"], "a frozen copy of the starting policy"),
        (["--reference", "ema"], "a copy that follows the policy, keeping 0.99 of itself at every step"),
        (["--reference", "periodic"], "a copy that becomes the policy every 100 steps"),
    ],
)
def test_the_reference(flags: list[str], text: str) -> None:
    assert words.describe_reference(config_of(*flags)) == text


def test_the_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KLAMP_CACHE", str(tmp_path))
    assert "to be taught first" in words.describe_model(config_of())
    words.base_model_folder().mkdir(parents=True)
    assert "cached;" in words.describe_model(config_of())
    assert words.describe_model(config_of("--model", "a/b", "--lora_r", "4", "--dtype", "bfloat16")) == (
        "a/b; bfloat16, a LoRA adapter of rank 4 is trained"
    )


def test_the_resume_command_continues_with_this_configuration(tmp_path: Path) -> None:
    """The command, parsed again, is the configuration in force with `resume` on."""
    folder = tmp_path / "my run"
    now = config_of("--beta", "0.5", "--target_kl", "0.1", "--report_to", "tensorboard", "wandb")
    write_files(now, folder)
    command = shlex.split(words.resume_command(now, folder, max_steps=400, stop_on=()))
    again = parse_train(command[command.index("train") + 1 :]).config
    assert again.flat() == now.flat() | {"max_steps": 400, "output_dir": str(folder), "resume": True}
    assert command[-4:] == ["--resume", str(folder), "--max_steps", "400"]
    other = replace(now, kl=replace(now.kl, beta=0.7))  # stopped while it loaded, before config.yaml was written
    assert shlex.split(words.resume_command(other, folder))[-2:] == ["--beta", "0.7"]


def test_tools_are_called_so_that_the_shell_finds_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    beside = tmp_path / "bin" / "tensorboard"
    beside.parent.mkdir()
    beside.touch()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    monkeypatch.setattr(words.shutil, "which", lambda name: None)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert words.tool("tensorboard") == str(beside)
    assert words.tool("no-such-tool") == "no-such-tool"
    monkeypatch.chdir(tmp_path)
    assert words.tool("tensorboard") == "bin/tensorboard"
    monkeypatch.setattr(words.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert words.tool("tensorboard") == "tensorboard"


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def plan(*flags: str) -> str:
    return plan_text(parse_train(flags).config)


def test_the_configuration_is_yaml_and_the_run_it_describes() -> None:
    argv = ["--preset", "dapo", "--beta", "0.1", "--target_kl", "0.2", "--report_to", "--kl_exclude_tokens", "1", "2"]
    printed = plan(*argv).partition("as a YAML file takes it")[2].partition("\n\n")[2]
    assert TrainConfig.from_flat(read_entries(yaml.safe_load(printed), Path())) == parse_train(argv).config


def test_the_inputs_are_opened_and_nothing_is_started(empty_folder, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def never(*args: object, **others: object) -> None:
        raise AssertionError("weights were loaded, or the trainer was started")

    for name in ("training.models.load_base_model", "cli.train.train_run"):
        monkeypatch.setattr(f"klamp.{name}", never)
    assert main(["train", "--dry-run", "--train_size", "7", "--eval_size", "2", "--max_steps", "7"]) == 0
    out = capsys.readouterr().out
    assert "task        arithmetic; 7 to train on, 6 held out; longest prompt (tokens): 9" in out
    assert "steps       7, each 32 prompts x 8 completions = 256" in out
    assert list(empty_folder.iterdir()) == []
    assert main(["train", "--dry-run", "--reward", "no_such_module:score"]) == 2
    assert "the module of a reward function cannot be imported" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags", [[], ["--output_dir", "here"], ["--task", "data/rows.jsonl"], ["--task", "my.tasks:chess"]]
)
def test_the_folder_is_the_one_that_the_trainer_takes(flags: list[str], empty_folder: Path) -> None:
    from klamp.training.folders import opened_folder

    (empty_folder / "runs" / "arithmetic-001").mkdir(parents=True)
    config = parse_train(flags).config
    assert f"folder      {run_folder(config)}\n" in plan(*flags)
    expected = run_folder(config)
    with opened_folder(config) as folder:
        assert folder == expected


def test_the_plan_of_a_resume_says_what_changes_or_why_it_cannot(empty_folder: Path) -> None:
    write_files(config_of("--beta", "0.1"), empty_folder / "out")
    assert "resume      after step 100; changed: beta 0.1 -> 0.5\n" in plan("--resume", "out", "--beta", "0.5")
    with pytest.raises(ConfigError, match="cannot change seed"):
        plan("--resume", "out", "--seed", "3")


def test_a_folder_that_holds_another_run_is_refused(empty_folder: Path) -> None:
    (empty_folder / "out").mkdir()
    (empty_folder / "out" / "config.yaml").touch()
    with pytest.raises(RunFolderError, match="another run"):
        plan("--output_dir", "out")
    assert "folder      out\n" in plan("--output_dir", "out", "--resume")
    assert main(["train", "--dry-run", "--output_dir", "out"]) == 1
