"""What other trainers call a field leads to it, with how it differs; never taken in silence, never in the way."""

from __future__ import annotations

from pathlib import Path

import pytest

from klamp.cli import main
from klamp.cli.arguments import read_file
from klamp.cli.flags import by_any_name, read_argv, train_fields
from klamp.cli.other_names import OTHER_NAMES
from klamp.errors import ConfigError, UnknownNameError

ASKED = {
    "lr": "learning_rate",
    "batch_size": "prompts_per_step",
    "per_device_train_batch_size": "prompts_per_step",
    "epochs": "max_steps",
    "num_train_epochs": "max_steps",
    "steps": "max_steps",
    "kl": "beta",
    "kl_loss_coef": "beta",
    "model_name_or_path": "model",
    "lora_rank": "lora_r",
    "max_new_tokens": "max_completion_length",
    "group_size": "num_generations",
    "n": "num_generations",
    "clip_range": "epsilon",
    "ppo_epochs": "num_iterations",
}
"""What people type who come from TRL, HF, verl or OpenRLHF."""


def test_each_is_a_name_that_klamp_does_not_have_for_a_field_that_it_has() -> None:
    assert OTHER_NAMES.keys() & by_any_name(train_fields()).keys() == set()
    assert {other.field for other in OTHER_NAMES.values()} <= train_fields().keys()


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_each_says_in_a_sentence_how_it_differs(name: str) -> None:
    with pytest.raises(UnknownNameError) as caught:
        read_argv(train_fields(), [f"--{name.replace('_', '-')}", "1"], command="klamp train")
    assert caught.value.fix == f"did you mean --{OTHER_NAMES[name].field}?"
    assert 10 < len(caught.value.why) < 200 and not caught.value.why.endswith(".")


@pytest.mark.parametrize(("name", "field"), ASKED.items())
def test_the_names_that_people_type(name: str, field: str) -> None:
    assert OTHER_NAMES[name].field == field


@pytest.mark.parametrize(("name", "said"), [("epochs", "steps"), ("batch_size", "prompts"), ("lr", "the same")])
def test_the_unit_is_in_the_sentence(name: str, said: str) -> None:
    assert said in OTHER_NAMES[name].difference


@pytest.mark.parametrize("argv", [["train"], ["ablate"], ["explain", "grpo"]])
def test_in_every_command_that_takes_the_configuration(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*argv, "--kl_loss_coef", "0.1"]) == 2
    assert "fix: did you mean --beta?" in capsys.readouterr().err


def test_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("lr: 0.1\n", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        read_file(file)
    assert (caught.value.got, caught.value.fix) == ("lr", "did you mean learning_rate?")
