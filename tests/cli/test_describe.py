"""A configuration in words, and the command that continues its run."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest
from tests.cli.fake_trainer import write_files

from klamp.cli import describe as words
from klamp.cli.arguments import parse_train
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
        (["--beta", "0", "--kl_controller", "dual", "--target_kl", "0.1"], "a frozen copy of the starting policy"),
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
    assert "not cached yet" in words.describe_model(config_of())
    words.base_model_folder(words.BaseModelConfig()).mkdir(parents=True)
    assert "(cached)" in words.describe_model(config_of())
    assert words.describe_model(config_of("--model", "a/b", "--lora_r", "4", "--dtype", "bfloat16")) == (
        "a/b; bfloat16, a LoRA adapter of rank 4 is trained"
    )


def test_the_resume_command_continues_with_this_configuration(tmp_path: Path) -> None:
    """The command, parsed again, is the configuration in force with `resume` on."""
    folder = tmp_path / "my run"
    write_files(config_of("--beta", "0.5", "--target_kl", "0.1"), folder)
    now = config_of("--beta", "0.5", "--target_kl", "0.1", "--seed", "9", "--report_to", "tensorboard", "wandb")
    command = shlex.split(words.resume_command(now, folder, max_steps=400))
    again = parse_train(command[command.index("train") + 1 :]).config
    wanted = now.flat() | {"max_steps": 400, "output_dir": str(folder), "resume": True}
    assert again.flat() == wanted
    assert "--beta" not in command


def test_the_resume_command_of_a_continued_run_is_as_short(tmp_path: Path) -> None:
    write_files(TrainConfig(), tmp_path / "out")
    continued = config_of("--output_dir", str(tmp_path / "out"), "--resume", "--max_steps", "9")
    command = shlex.split(words.resume_command(continued, tmp_path / "out"))
    assert [command.count(flag) for flag in ("--output_dir", "--resume", "--max_steps")] == [1, 1, 1]
    assert command[-3:] == ["--resume", "--max_steps", "9"]


@pytest.mark.parametrize("text", ["", "- 1", "a: [*b]", "3"])
def test_a_damaged_configuration_ends_no_run_that_is_done(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    assert words.resume_command(TrainConfig(), tmp_path, max_steps=9).endswith(f"--output_dir {tmp_path} --resume")


def test_the_resume_command_of_several_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "torchrun --nproc_per_node 2 -m klamp.cli train " in words.resume_command(TrainConfig(), tmp_path)


def test_the_resume_command_splits_the_weights_as_the_run_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher's words are not known to the processes that it starts; its variables are."""
    told = {"WORLD_SIZE": "2", "ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    command = words.resume_command(TrainConfig(), tmp_path)
    assert command.startswith("env ACCELERATE_DEEPSPEED_ZERO_STAGE=3 ACCELERATE_USE_DEEPSPEED=true ")
    assert "torchrun --nproc_per_node 2 -m klamp.cli train " in command


def test_tools_are_called_so_that_the_shell_finds_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    beside = tmp_path / "bin" / "tensorboard"
    beside.parent.mkdir()
    beside.touch()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    monkeypatch.setattr(words.shutil, "which", lambda name: None)
    assert words.tool("tensorboard") == str(beside)
    assert words.tool("no-such-tool") == "no-such-tool"
    monkeypatch.chdir(tmp_path)
    assert words.tool("tensorboard") == "bin/tensorboard"
    monkeypatch.setattr(words.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert words.tool("tensorboard") == "tensorboard"
