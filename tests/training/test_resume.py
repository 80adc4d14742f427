"""A run that was interrupted and resumed has the numbers of one that never was, bit for bit."""

import json
import os
import shutil
import signal
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.training import rewards
from tests.training.conftest import IN_REWARD, AfterStep, full_disk, refused, rows_of, steps_of

from klamp.errors import NonFiniteError, RewardError, RunFolderError, TrainingStopped
from klamp.lab import checkpoint, updates
from klamp.lab.backends import train_run
from klamp.lab.observers import TRACKERS, tensorboard

pytestmark = pytest.mark.slow

LATE = {"max_steps": 6, "eval_every": 2, "save_every": 2}
K1 = {"kl_estimator": "k1"}
SOFT = {"kl_clip_method": "soft", "kl_clip_threshold": 0.001, "kl_clip_temperature": 1e-4}
CLOSED = {"kl_clip_method": "hard", "kl_clip_threshold": 1e-7, "gradient_accumulation_steps": 2}


def held(controller: str, target: float, **more: Any) -> dict[str, Any]:
    return {"kl_controller": controller, "target_kl": target, **more}


CASES = {
    "fixed": {},
    "no KL": {"beta": 0.0, "weight_decay": 0.1},
    "hold": {"target_kl": 1e-4},
    "step, measured budget": held("step", 0.002, num_iterations=2, kl_clip_method="hard", kl_clip_threshold=1e-4),
    "proportional, adapter": held("proportional", 0.01, kl_controller_horizon=2, lora_r=2),
    "step, advantage": held("step", 1e-3, kl_placement="advantage", **K1),
    "hold, reward, adapter": held("hold", 1e-3, lora_r=2, loss_type="dr_grpo", **IN_REWARD),
    "step, soft": held("step", 2e-3, lr_scheduler_type="linear", gradient_accumulation_steps=5, **SOFT),
    "ema": {"reference": "ema", "reference_decay": 0.5},
    "periodic": {"reference": "periodic", "reference_reset_steps": 2},
    "ema with an adapter": {"reference": "ema", "reference_decay": 0.5, "lora_r": 2},
    "schedule": {"kl_schedule": "cosine", "kl_warmup_steps": 1},
    "early stop": {"kl_early_stop": 1e-4, "num_iterations": 3},
    "exclusions": {"kl_exclude_tokens": ["special"], "kl_horizon": "sequence"},
    "exact": {"kl_estimator": "exact", "kl_horizon": "sequence", "kl_normalizer": "sequence_sum"},
    "off-policy": {"kl_off_policy": "sequence", "kl_horizon": "sequence", "kl_max_weight": 1.5, "num_iterations": 2},
    "hold, clipped": held("hold", 1e-6, **CLOSED),
    "copies of 16 bits": {"dtype": "bfloat16", "learning_rate": 1e-4},
    "copies of 16 bits, ema": {"dtype": "bfloat16", "learning_rate": 1e-4, "reference": "ema", "num_iterations": 2},
    "bounded": {"kl_max_log_ratio": 0.01, "reference_dtype": "bfloat16"},
}


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    (file,) = (checkpoint.checkpoints(folder)[-1] / "policy").glob("*.safetensors")
    return load_file(file)


def assert_same_run(one: Path, other: Path) -> None:
    """Every line of both runs, and the last weights, bit for bit."""
    assert rows_of(one) == rows_of(other)
    for name in ("completions.jsonl", "answers.jsonl"):
        assert (one / name).read_text() == (other / name).read_text()
    mine, theirs = weights_of(one), weights_of(other)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    before, after = (json.loads((f / "summary.json").read_text()) for f in (one, other))
    unlike = {"seconds": 0, "final_metrics": 0}
    assert before | unlike == after | unlike


@pytest.fixture
def parts_of(config_of, tmp_path):
    return lambda **changes: config_of(**{"beta": 0.05, **LATE, **changes, "output_dir": str(tmp_path / "parts")})


@pytest.fixture
def whole_and(parts_of, run_once):
    """The folder of an uninterrupted run, and what makes the configuration of such a run elsewhere."""
    return lambda **changes: (run_once(**{"beta": 0.05, **LATE, **changes}), partial(parts_of, **changes))


@pytest.mark.parametrize(("name", "step"), [*((name, 3) for name in CASES), ("fixed", 4)])
def test_an_interrupted_run_resumes_with_the_same_numbers(whole_and, tmp_path, name, step):
    """After step 4 an evaluation is due, which the resumed run makes up for."""
    whole, parts = whole_and(**CASES[name])
    words = f"(?s)after step {step} of 6.*step-{step:06d}.*--resume {tmp_path / 'parts'}"
    with refused(TrainingStopped, words) as caught:
        train_run(parts(), [AfterStep(step)])
    assert caught.value.resumable
    assert checkpoint.load_state(checkpoint.checkpoints(tmp_path / "parts")[-1])["step"] == step
    train_run(parts(resume=True))
    assert_same_run(whole, tmp_path / "parts")
    betas, moves = {row["beta"] for row in steps_of(whole)}, {"target_kl", "kl_schedule"} & CASES[name].keys()
    assert len(betas) > 2 if moves else len(betas) == 1


def test_the_measured_length_is_that_of_the_first_start_for_good(parts_of, tmp_path):
    with pytest.raises(TrainingStopped):
        train_run(parts_of(**CASES["step, measured budget"]), [AfterStep(2)])
    file = checkpoint.checkpoints(tmp_path / "parts")[-1] / "state.json"
    state = json.loads(file.read_text())
    assert steps_of(tmp_path / "parts")[0]["kl/budget"] == pytest.approx(1e-4 * state["reference_length"])
    file.write_text(json.dumps(state | {"reference_length": 123.0}))
    checkpoint.seal(file.parent)
    train_run(parts_of(**CASES["step, measured budget"], resume=True))
    assert [row["kl/budget"] for row in steps_of(tmp_path / "parts")][2:] == [pytest.approx(0.0123)] * 4


def interrupting(monkeypatch, update: int, *, signals: int):
    """Sends signals to this process just after the optimizer step of one update of the run."""
    usual, number = updates.update, count(1)

    def interrupted(*args, **kwargs):
        output = usual(*args, **kwargs)
        if next(number) == update:
            for _ in range(signals):
                os.kill(os.getpid(), signal.SIGTERM)
        return output

    monkeypatch.setattr(updates, "update", interrupted)


def test_a_signal_in_mid_step_waits_for_the_steps_end(whole_and, tmp_path, monkeypatch):
    whole, parts = whole_and(num_iterations=2)
    interrupting(monkeypatch, 5, signals=1)
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(TrainingStopped, match="after step 3 of 6"):
        train_run(parts())
    assert signal.getsignal(signal.SIGTERM) is handler, "handlers are put back"
    monkeypatch.undo()
    assert len(steps_of(tmp_path / "parts")) == 3
    train_run(parts(resume=True))
    assert_same_run(whole, tmp_path / "parts")


def test_a_second_signal_ends_at_once_and_never_saves_half_a_step(whole_and, tmp_path, monkeypatch):
    whole, parts = whole_and(num_iterations=2)
    interrupting(monkeypatch, 7, signals=2)
    with pytest.raises(TrainingStopped, match="step-000002"):  # the weights are half way into step 4
        train_run(parts())
    assert checkpoint.checkpoints(tmp_path / "parts")[-1].name == "step-000002"
    monkeypatch.undo()
    train_run(parts(resume=True))
    assert_same_run(whole, tmp_path / "parts")


@pytest.mark.parametrize("reward", ["breaks", "not_a_number"])
def test_a_reward_that_fails_leaves_the_last_good_step(whole_and, tmp_path, reward):
    whole, parts = whole_and()  # with the reward `digits`, as the two others are up to that call
    # 12 held-out prompts before and 12 after two steps, 12 completions in a step: the fourth step's seventh
    rewards.STATE.update(calls=0, break_at=12 + 2 * 12 + 12 + 12 + 7)
    with refused(RewardError, f"(?s)rewards:{reward}.*prompt:") as caught:
        train_run(parts(reward=f"tests.training.rewards:{reward}"))
    folder = tmp_path / "parts" / "checkpoints" / "step-000003"
    assert caught.value.__notes__ == [f"  the state after step 3 is saved in {folder}"]
    assert folder.is_dir() and len(steps_of(tmp_path / "parts")) == 3
    rewards.STATE.update(break_at=-1)  # it is mended
    train_run(parts(resume=True, reward=f"tests.training.rewards:{reward}"))
    assert_same_run(whole, tmp_path / "parts")


def with_a_nan_loss(usual, *args, **kwargs):
    output = usual(*args, **kwargs)
    return output._replace(loss=output.loss * float("nan"))


def with_a_far_token(usual, batch, *args, **kwargs):
    """The loss of a batch with one token of the policy's 95 nats lower: it is finite, and so is its gradient."""
    nats = torch.zeros_like(batch.policy_logprobs)
    nats[0, 0] = 95.0
    return usual(replace(batch, policy_logprobs=batch.policy_logprobs - nats, old_logprobs=None), *args, **kwargs)


def with_an_exact_nan(usual, *args, **kwargs):
    scores = usual(*args, **kwargs)
    scores.exact[0, 0] = float("nan")
    return scores


NO_LOSS, NO_KL = "the loss or its gradient is not finite", "KL of this step is not finite"
SPOILED = {
    "loss": ("grpo_loss", with_a_nan_loss, {}, NO_LOSS),
    "k3": ("grpo_loss", with_a_far_token, K1 | {"exact_kl_completions": 1}, NO_KL),
    "exact KL": ("joined", with_an_exact_nan, K1, NO_KL),
}
"""What is spoiled in `updates`, how, in which run, and what is said; the controller could not go by such a KL."""


@pytest.mark.parametrize("spoiled", SPOILED)
@pytest.mark.parametrize(("iterations", "step"), [(1, 3), (2, 2)])
def test_what_is_not_finite_leaves_the_last_whole_step(whole_and, tmp_path, monkeypatch, spoiled, iterations, step):
    """In a first update nothing has moved yet; in a second one the step is half done, and an older one is named."""
    name, spoil, changes, words = SPOILED[spoiled]
    whole, parts = whole_and(num_iterations=iterations, **changes)
    usual, number = getattr(updates, name), count(1)

    def call(*args, **kwargs):
        calls = 2 if name == "grpo_loss" else 1  # for the gradient, and for the metrics
        spoils = -(-next(number) // calls) == 4 * iterations
        return spoil(usual, *args, **kwargs) if spoils else usual(*args, **kwargs)

    monkeypatch.setattr(updates, name, call)
    with pytest.raises(NonFiniteError, match=words) as caught:
        train_run(parts())
    assert f"the state after step {step} is saved in" in caught.value.__notes__[0]
    assert checkpoint.checkpoints(tmp_path / "parts")[-1].name == f"step-{step:06d}"
    monkeypatch.undo()
    train_run(parts(resume=True))
    assert_same_run(whole, tmp_path / "parts")


def test_a_finished_run_can_be_asked_to_resume_and_does_nothing_more(parts_of, tmp_path):
    train_run(parts_of())
    whole = tmp_path / "parts"
    before = rows_of(whole)
    summary = train_run(parts_of(resume=True))
    assert summary.steps == 6 and rows_of(whole) == before, "nor is anything evaluated a second time"
    assert summary.after == json.loads((whole / "summary.json").read_text())["after"]


def test_a_full_disk_ends_a_run_with_what_is_whole(parts_of, tmp_path, monkeypatch):
    fills = AfterStep(3, lambda: monkeypatch.setattr(checkpoint.torch, "save", full_disk))
    with pytest.raises(RunFolderError, match="(?s)cannot be written.*No space") as caught:
        train_run(parts_of(), [fills])
    (saved,) = (tmp_path / "parts" / "checkpoints").iterdir()
    assert saved.name == "step-000002"
    assert caught.value.__notes__ == [f"  the state after step 2 is saved in {saved}"]


def test_a_folder_that_is_deleted_under_the_run_ends_it(parts_of, tmp_path):
    with pytest.raises(RunFolderError, match="cannot be written"):
        train_run(parts_of(), [AfterStep(3, lambda: shutil.rmtree(tmp_path / "parts"))])
    assert not (tmp_path / "parts").exists(), "nor does it come back by half"


def test_trackers_that_cannot_write_are_refused(parts_of, tmp_path, monkeypatch):
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "log.txt").touch()

    def in_the_way(folder, *more):
        (folder / "tracking").touch()
        return tensorboard(folder, *more)

    monkeypatch.setitem(TRACKERS, "tensorboard", in_the_way)
    with pytest.raises(RunFolderError, match="tracking"):
        train_run(parts_of(report_to=("tensorboard",)))


def test_impatience_while_a_step_is_saved_says_what_is_whole(parts_of, monkeypatch):
    save = checkpoint.save

    def interrupted(output_dir, step, *parts, keep):
        if step == 3:
            raise KeyboardInterrupt
        return save(output_dir, step, *parts, keep=keep)

    monkeypatch.setattr(checkpoint, "save", interrupted)
    with pytest.raises(TrainingStopped, match="the state after step 2 is saved in") as caught:
        train_run(parts_of(), [AfterStep(3)])
    assert caught.value.resumable
