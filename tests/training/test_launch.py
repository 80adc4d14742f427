"""What a launcher may not ask is refused before any work; a wait in vain for a process is one error of klamp."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.distributed import DistNetworkError

from klamp.errors import ConfigError, RewardError, TrainerFailed
from klamp.training.backends import train_run
from klamp.training.processes import check_alone, check_one_machine, explained, timeout_of


@pytest.fixture(autouse=True)
def unlaunched(monkeypatch):
    for name in ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("asked", "got"),
    [
        ({"ACCELERATE_USE_FSDP": "true"}, "FSDP"),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "DeepSpeed"),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, "4 processes, 2 of them on this machine"),
    ],
)
def test_more_than_one_machine_has_is_refused_with_who_does_it(config_of, monkeypatch, asked, got):
    for name, value in asked.items():
        monkeypatch.setenv(name, value)
    config = config_of()
    with pytest.raises(ConfigError, match="klamp's own loop is for one machine") as caught:
        train_run(config)
    assert caught.value.got == got and "--backend trl" in caught.value.fix and "--backend verl" in caught.value.fix
    assert not Path(config.run.output_dir).exists()


@pytest.mark.parametrize("asked", [{}, {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, {"ACCELERATE_USE_FSDP": "false"}])
def test_processes_on_one_machine_are_not(monkeypatch, asked):
    for name, value in asked.items():
        monkeypatch.setenv(name, value)
    check_one_machine()


def test_several_processes_are_refused_where_one_is_enough(config_of, monkeypatch):
    check_alone(config_of(), why="")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="runs in one process") as caught:
        check_alone(config_of(), why="the work is done elsewhere")
    assert caught.value.why == "the work is done elsewhere" and "torchrun" in caught.value.fix


BROKEN = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer\nand more"


@pytest.mark.parametrize("error", [RuntimeError(BROKEN), DistNetworkError("Broken pipe")])
def test_a_wait_in_vain_says_why_and_what_to_do(config_of, error):
    config = config_of(process_timeout=60.0)
    with pytest.raises(TrainerFailed, match="lost each other") as caught, explained(config):
        raise error
    assert caught.value.got == str(error).partition("\n")[0] and caught.value.__cause__ is error
    assert "process_timeout=60 s" in caught.value.why and "--resume" in caught.value.fix


def test_other_errors_stay_what_they_are(config_of):
    for error in (RuntimeError("out of memory"), RewardError("gloo and so on"), ValueError("gloo")):
        with pytest.raises(type(error), match=str(error)), explained(config_of()):
            raise error


def test_torch_waits_as_long_as_the_run_says(config_of):
    assert timeout_of(config_of(process_timeout=90.5)).total_seconds() == 90.5
