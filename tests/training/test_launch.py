"""What a launcher may not ask of klamp's own loop is refused before any work, with who does it; and processes that a
backend has no use for."""

from __future__ import annotations

from pathlib import Path

import pytest

from klamp.errors import ConfigError
from klamp.training.processes import check_alone, check_one_machine
from klamp.training.trainer import train_run


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
