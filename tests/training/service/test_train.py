"""Whole runs over real HTTP: what they write, what the KL does in them, how they go on."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest
from tests.standin import saved_step
from tests.training.conftest import rows_of, steps_of

import klamp
from klamp.errors import ConfigError, ModelError, RunFolderError
from klamp.training import checkpoint
from klamp.training.backends import train_run
from klamp.training.observers import Observer

pytestmark = pytest.mark.slow

SHORT = {"max_steps": 2, "eval_every": 0, "save_every": 0, "eval_size": 1}


class Seen(Observer):
    """What a run told."""

    def __init__(self):
        self.info, self.warnings, self.saved, self.closed = None, [], [], 0

    def on_start(self, info):
        self.info = info

    def on_warning(self, text):
        self.warnings.append(text)

    def on_checkpoint(self, step, folder):
        self.saved.append(step)

    def close(self):
        self.closed += 1


def test_a_run_leaves_what_a_local_run_leaves(tiny, run_of, tmp_path, recwarn):
    seen, run = Seen(), tmp_path / "run"
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
    assert seen.saved == [2, 4]
    assert seen.closed == 1
    assert not seen.warnings
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


def test_a_coefficient_of_0_drifts_and_of_1_holds(tiny, run_of, tmp_path):
    far = {"max_steps": 7, "prompts_per_step": 4, "lr_scheduler_type": "constant", "warmup_steps": 0}
    kl = {}
    for beta in (0.0, 1.0):
        folder = tmp_path / f"beta-{beta:g}"
        train_run(run_of(**SHORT | far, beta=beta, kl_monitor=True, output_dir=str(folder)))
        kl[beta] = [row["kl/k3"] for row in steps_of(folder)]
    assert kl[0.0][1] == pytest.approx(kl[1.0][1], rel=1e-3)  # the first step is the same: the KL is 0 there
    assert sum(kl[0.0][-3:]) > 1.5 * sum(kl[1.0][-3:]), "4 to 12 times with ten seeds"


def test_a_continued_run_is_the_uninterrupted_one(tiny, run_of, tmp_path):
    held = {"kl_controller": "proportional", "target_kl": 0.01, "kl_controller_horizon": 2, "num_iterations": 2}
    held |= {"prompts_per_step": 2, "eval_size": 1, "save_every": 0, "eval_every": 0}
    whole, parts = str(tmp_path / "whole"), str(tmp_path / "parts")
    train_run(run_of(**held, output_dir=whole))

    class Stop(Observer):
        def on_step(self, step, metrics):
            if step == 3:
                raise KeyboardInterrupt

    with pytest.raises(Exception, match="training was stopped after step 3"):
        train_run(run_of(**held, output_dir=parts), [Stop()])
    assert saved_step(tmp_path / "parts") == 3
    summary = train_run(run_of(**held, output_dir=parts, resume=True))
    assert summary.steps == 4
    assert rows_of(parts) == rows_of(whole)
    betas = [row["beta"] for row in steps_of(whole)]
    assert len(set(betas)) == 4


@pytest.mark.parametrize(
    "placed",
    [
        {"kl_estimator": "k1", "kl_placement": "reward", "kl_horizon": "sequence", "scale_rewards": "none"},
        {"kl_estimator": "k1", "kl_placement": "advantage", "kl_horizon": "sequence"},
        {"kl_clip_method": "hard", "kl_clip_threshold": 0.001, "gradient_accumulation_steps": 3},
    ],
    ids=["reward", "advantage", "clip"],
)
def test_every_placement_runs(tiny, run_of, tmp_path, placed):
    train_run(run_of(**SHORT | placed, beta=0.5))
    last = steps_of(tmp_path / "run")[-1]
    assert last["beta"] == 0.5
    assert ("kl/budget" in last) == ("kl_clip_method" in placed)


def test_without_a_key_nothing_is_begun(run_of, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    monkeypatch.delenv("TINKER_CREDENTIAL_CMD", raising=False)
    with pytest.raises(ConfigError, match="no key for the Tinker service"):
        train_run(run_of())
    assert not (tmp_path / "run").exists()


def test_an_unknown_model_is_named(tiny, run_of, tmp_path):
    with pytest.raises(ModelError, match="no base model 'klamp/other'"):
        train_run(run_of(model="klamp/other"))
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
