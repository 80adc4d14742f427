"""A run: when something is due, how an interrupt ends it; it is one process."""

import os
import signal
from pathlib import Path

import pytest

from klamp.errors import ConfigError
from klamp.lab.backends import train_run
from klamp.lab.interrupts import deferred_interrupts
from klamp.lab.loop import Trainer


@pytest.mark.parametrize(("every", "steps"), [(0, [4]), (1, [1, 2, 3, 4]), (3, [3, 4]), (9, [4])])
def test_what_is_due_is_due_at_the_end_too(context_of, every, steps):
    run, due = Trainer(context_of(max_steps=4), []), []
    for run.step in range(1, 5):
        if run.is_due(every):
            due.append(run.step)
    assert due == steps


def test_the_first_signal_waits_and_the_second_does_not():
    before = signal.getsignal(signal.SIGTERM)
    with deferred_interrupts() as interrupt:
        assert not interrupt.asked
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupt.asked
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is before


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


def test_several_processes_are_refused(config_of, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    config = config_of()
    with pytest.raises(ConfigError, match="one process") as caught:
        train_run(config)
    assert "--backend trl" in caught.value.fix and "--backend verl" in caught.value.fix
    assert not Path(config.run.output_dir).exists()
