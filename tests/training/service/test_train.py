"""Whole runs over real HTTP: what they write, what the KL does in them, how they go on."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest
from tests.standin import saved_step
from tests.training.conftest import StopAfter, rows_of, steps_of
from tests.training.test_trainer import Recorder

import klamp
from klamp.errors import KlampError, ModelError, RunFolderError
from klamp.training import checkpoint
from klamp.training.backends import train_run
from klamp.training.observers import Observer
from klamp.training.service.run import LAST_WAIT, TinkerTrainer

pytestmark = pytest.mark.slow

SHORT = {"max_steps": 2, "eval_every": 0, "save_every": 0, "eval_size": 1}


def test_a_run_leaves_what_a_local_run_leaves(tiny, run_of, tmp_path, recwarn):
    seen, run = Recorder(), tmp_path / "run"
    gc.collect()  # what earlier tests left behind warns when it is collected
    recwarn.clear()
    summary = train_run(run_of(), [seen])
    ours = str(Path(klamp.__file__).parent)
    assert not [str(w.message) for w in recwarn if w.filename.startswith(ours) or "tinker" in str(w.message).lower()]
    assert summary.steps == 4
    assert summary.before.keys() == summary.after.keys()
    names = {path.name for path in run.iterdir()}
    assert names >= {"config.yaml", "metrics.jsonl", "completions.jsonl", "versions.json", "summary.json"}
    assert [row["step"] for row in steps_of(run)] == [1, 2, 3, 4]
    first, last = steps_of(run)[0], steps_of(run)[-1]
    assert first["kl/k3"] == pytest.approx(0, abs=1e-9)
    assert 0 < last["kl/k3"] < 5
    assert abs(last["sampler/k1"]) < 1e-5
    assert last.keys() >= {"reward", "kl/k1", "beta", "train/grad_norm", "policy/ratio_clipped", "length/mean"}
    assert not last.keys() & {"kl/exact", "policy/entropy"}
    assert seen.told("checkpoint") == [2, 4]
    assert [call[0] for call in seen.calls].count("close") == 1
    assert not seen.told("warning")
    assert seen.info.device == f"Tinker, {tiny.url}"
    assert (seen.info.parameters, seen.info.trainable_parameters) == (0, 0), "the service does not say"
    assert seen.info.reference == "klamp/tiny at the service, frozen"
    state = checkpoint.load_state(checkpoint.newest(run))
    assert state["tinker_path"].startswith("tinker://")
    assert state["tinker_path"].endswith("/run-step-000004")
    row = json.loads((run / "completions.jsonl").read_text().splitlines()[0])
    assert len(row["tokens"]) == len(row["policy_logprobs"]) == len(row["ref_logprobs"])
    assert row["policy_logprobs"] == pytest.approx(row["sampler_logprobs"], abs=1e-5)


def test_beta_0_asks_the_reference_for_nothing(tiny, run_of, tmp_path):
    before = tiny.requests.copy()
    train_run(run_of(**SHORT, beta=0.0))
    sampled = 2 * 3 + 2 * 3  # prompts of two steps, one row of three skills before and after
    assert tiny.requests["asample"] - before["asample"] == sampled
    assert tiny.requests["create_sampling_session"] == before["create_sampling_session"]
    assert not any(name.startswith("kl/") for name in steps_of(tmp_path / "run")[-1])


def test_round_trips_of_a_step(tiny, run_of):
    before = tiny.requests.copy()
    train_run(run_of(**SHORT | {"max_steps": 3}))
    found = tiny.requests - before
    assert found["asample"] == 3 * (3 + 12) + 2 * 3  # a request per prompt, one per completion for the reference
    assert found["forward_backward"] == 3 * 2  # the forward pass, and the gradient
    assert found["optim_step"] == 3
    assert found["save_weights_for_sampler"] == 3 + 1


def test_a_continued_run_is_the_uninterrupted_one(tiny, run_of, tmp_path):
    held = {"kl_controller": "proportional", "target_kl": 0.01, "kl_controller_horizon": 2, "num_iterations": 2}
    held |= {"prompts_per_step": 2, "eval_size": 1, "save_every": 0, "eval_every": 0}
    held |= {"kl_clip_method": "hard", "kl_clip_threshold": 0.001}  # its budget needs the measured length
    whole, parts = str(tmp_path / "whole"), str(tmp_path / "parts")
    train_run(run_of(**held, output_dir=whole))
    with pytest.raises(Exception, match="training was stopped after step 3"):
        train_run(run_of(**held, output_dir=parts), [StopAfter(3)])
    assert saved_step(tmp_path / "parts") == 3
    summary = train_run(run_of(**held, output_dir=parts, resume=True))
    assert summary.steps == 4
    assert rows_of(parts) == rows_of(whole)
    betas = [row["beta"] for row in steps_of(whole)]
    assert len(set(betas)) == 4
    assert all("kl/budget" in row for row in steps_of(whole))


def test_a_resume_takes_the_new_rate_and_beta(tiny, run_of, tmp_path):
    changes = SHORT | {"max_steps": 1, "lr_scheduler_type": "constant", "warmup_steps": 0}
    train_run(run_of(**changes))
    train_run(run_of(**changes | {"max_steps": 2, "learning_rate": 1e-4, "beta": 0.7, "resume": True}))
    row = steps_of(tmp_path / "run")[1]
    assert (row["train/learning_rate"], row["beta"]) == (1e-4, 0.7)


def test_an_unknown_model_is_named(tiny, run_of, tmp_path):
    with pytest.raises(ModelError, match="no base model 'klamp/other'") as caught:
        train_run(run_of(model="klamp/other"))
    assert tiny.url in caught.value.text
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_a_checkpoint_of_a_local_run_is_none_of_the_service(tiny, run_of, tmp_path):
    train_run(run_of(**SHORT))
    file = checkpoint.newest(tmp_path / "run") / "state.json"
    state = json.loads(file.read_text())
    del state["tinker_path"]
    file.write_text(json.dumps(state))
    checkpoint.seal(file.parent)
    with pytest.raises(RunFolderError, match="saved by another backend"):
        train_run(run_of(**SHORT, resume=True))


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


def test_a_step_has_one_snapshot_one_saved_state_and_the_rate_of_the_schedule(tiny, run_of, trainers, monkeypatch):
    asked, paths, rates = [], [], []
    usual = TinkerTrainer._step

    class Asks(Observer):
        def on_step(self, step, metrics):
            (trainer,) = trainers
            before = tiny.requests.copy()
            assert trainer.sampler() is trainer.sampler()
            paths.append({checkpoint.load_state(trainer.save())["tinker_path"][-12:] for _ in range(2)})
            asked.append(tiny.requests - before)

    def noted(trainer):
        rates.append(trainer.optimizer.param_groups[0]["lr"])
        return usual(trainer)

    monkeypatch.setattr(TinkerTrainer, "_step", noted)
    changes = {"max_steps": 3, "prompts_per_step": 2, "learning_rate": 0.01, "warmup_steps": 2}
    train_run(run_of(**SHORT | changes), [Asks()])
    assert [found["save_weights_for_sampler"] for found in asked] == [1, 1, 1], "the update moved the weights"
    assert [found["save_weights"] for found in asked] == [1, 1, 1]
    assert paths == [{f"-step-00000{step}"} for step in (1, 2, 3)]
    assert rates == pytest.approx([0.0, 0.005, 0.01])


def test_a_service_that_fails_at_the_end_too_leaves_the_newest_checkpoint(tiny, run_of, trainers, monkeypatch):
    """The state cannot be saved any more: the run stops at the one on disk, and does not wait as long as before."""
    config = run_of(**SHORT | {"max_steps": 4, "save_every": 2, "prompts_per_step": 2})

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
