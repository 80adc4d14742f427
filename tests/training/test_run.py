"""What every loop of a run shares: when something is due, how an interrupt ends it, what a launcher may ask of it."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest
from tests.training.conftest import steps_of
from torch.distributed import DistNetworkError

from klamp.errors import ConfigError, RewardError, TrainerFailed
from klamp.training.backends import train_run
from klamp.training.processes import check_alone, check_one_machine, explained, timeout_of
from klamp.training.run import Training, deferred_interrupts


@pytest.mark.parametrize(("every", "steps"), [(0, [4]), (1, [1, 2, 3, 4]), (3, [3, 4]), (9, [4])])
def test_what_is_due_is_due_at_the_end_too(context_of, every, steps):
    run, due = Training(context_of(max_steps=4), []), []
    for run.step in range(1, 5):
        if run.is_due(every):
            due.append(run.step)
    assert due == steps


def test_weights_that_a_later_update_cut_are_counted(config_of, tmp_path):
    changes = {"num_iterations": 2, "max_steps": 1, "learning_rate": 5e-2, "warmup_steps": 0}
    train_run(config_of(kl_off_policy="token", kl_max_weight=1.01, **changes))
    (row,) = steps_of(tmp_path / "run")
    assert row["kl/weights_truncated"] > 0, "in the first update the sampler is the policy, and no weight is above 1"


def test_the_first_signal_waits_and_the_second_does_not():
    before = signal.getsignal(signal.SIGTERM)
    with deferred_interrupts() as interrupt:
        assert not interrupt.asked
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupt.asked
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_thread_takes_no_signals():
    found = []

    def work() -> None:
        with deferred_interrupts() as interrupt:
            found.append(interrupt.asked)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [False]


def test_a_hangup_ends_a_run_as_sigterm_does_unless_it_is_ignored():
    for handler, asked in ((signal.SIG_DFL, True), (signal.SIG_IGN, False)):
        before = signal.signal(signal.SIGHUP, handler)
        try:
            with deferred_interrupts() as interrupt:
                if asked:
                    assert signal.getsignal(signal.SIGHUP) is interrupt
                os.kill(os.getpid(), signal.SIGHUP if asked else signal.SIGCONT)
                assert interrupt.asked is asked
            assert signal.getsignal(signal.SIGHUP) is handler
        finally:
            signal.signal(signal.SIGHUP, before)


@pytest.fixture
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
@pytest.mark.usefixtures("unlaunched")
def test_more_than_one_machine_has_is_refused_with_who_does_it(config_of, monkeypatch, asked, got):
    for name, value in asked.items():
        monkeypatch.setenv(name, value)
    config = config_of()
    with pytest.raises(ConfigError, match="klamp's own loop is for one machine") as caught:
        train_run(config)
    assert caught.value.got == got and "--backend trl" in caught.value.fix and "--backend verl" in caught.value.fix
    assert not Path(config.run.output_dir).exists()


@pytest.mark.parametrize("asked", [{}, {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, {"ACCELERATE_USE_FSDP": "false"}])
@pytest.mark.usefixtures("unlaunched")
def test_processes_on_one_machine_are_not(monkeypatch, asked):
    for name, value in asked.items():
        monkeypatch.setenv(name, value)
    check_one_machine()


@pytest.mark.usefixtures("unlaunched")
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
