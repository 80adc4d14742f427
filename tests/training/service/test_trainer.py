"""The trainer whose weights are at a service: when it takes snapshots, saves and continues."""

from __future__ import annotations

from pathlib import Path

import pytest

from klamp.errors import KlampError
from klamp.training import checkpoint
from klamp.training.backends import train_run
from klamp.training.observers import Observer
from klamp.training.service import calls
from klamp.training.service.run import LAST_WAIT, TinkerTrainer

pytestmark = pytest.mark.slow

SHORT = {"max_steps": 2, "eval_every": 0, "save_every": 0, "prompts_per_step": 2, "eval_size": 1}


@pytest.fixture
def trainers(monkeypatch):
    """The trainers that a run makes."""
    made: list[TinkerTrainer] = []
    usual = TinkerTrainer.__init__

    def noted(self, *given, **options):
        usual(self, *given, **options)
        made.append(self)

    monkeypatch.setattr(TinkerTrainer, "__init__", noted)
    return made


def test_a_snapshot_is_kept_until_the_weights_move(tiny, run_of, trainers):
    class Asks(Observer):
        def on_step(self, step, metrics):
            (trainer,) = trainers
            before = tiny.requests["save_weights_for_sampler"]
            assert trainer.sampler() is trainer.sampler()
            taken.append(tiny.requests["save_weights_for_sampler"] - before)

    taken: list[int] = []
    train_run(run_of(**SHORT), [Asks()])
    assert taken == [1, 1], "the update moved the weights, so one new snapshot, and one only"


def test_a_step_is_saved_once_at_the_service(tiny, run_of, trainers):
    class Saves(Observer):
        def on_step(self, step, metrics):
            (trainer,) = trainers
            before = tiny.requests["save_weights"]
            paths.append({checkpoint.load_state(trainer.save())["tinker_path"] for _ in range(2)})
            assert tiny.requests["save_weights"] == before + 1

    paths: list[set[str]] = []
    train_run(run_of(**SHORT), [Saves()])
    (first,), (second,) = paths
    assert first.endswith("-step-000001")
    assert second.endswith("-step-000002")


def test_the_learning_rate_of_the_schedule_reaches_the_service(tiny, run_of, monkeypatch):
    rates: list[float] = []
    usual = calls.update

    def noted(*given, rate, **options):
        rates.append(rate)
        return usual(*given, rate=rate, **options)

    monkeypatch.setattr(calls, "update", noted)
    train_run(run_of(**SHORT | {"max_steps": 4, "learning_rate": 0.01, "warmup_steps": 2}))
    assert rates[:3] == pytest.approx([0.0, 0.005, 0.01])


def test_a_service_that_fails_at_the_end_too_leaves_the_newest_checkpoint(tiny, run_of, trainers, monkeypatch):
    """The state cannot be saved any more: the run stops at the one on disk, and does not wait as long as before."""
    config = run_of(**SHORT | {"max_steps": 4, "save_every": 2})

    class Breaks(Observer):
        def on_step(self, step, metrics):
            if step == 3:
                (trainer,) = trainers
                monkeypatch.setattr(trainer, "save", refused)
                raise KlampError("trouble")

    def refused() -> Path:
        raise KlampError("the service is gone")

    with pytest.raises(KlampError, match="trouble") as caught:
        train_run(config, [Breaks()])
    (trainer,) = trainers
    assert checkpoint.load_state(checkpoint.newest(trainer.context.output_dir))["step"] == 2
    assert trainer.connection.seconds <= LAST_WAIT
    assert "the state after step 2 is saved" in "".join(caught.value.__notes__)
