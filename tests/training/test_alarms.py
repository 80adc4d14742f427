"""Alarms in real runs: a planted fault raises the one that is meant for it, a sound run raises none.

Every faulty run goes the whole way: trained, written to its folder, read again by `klamp doctor`'s reader, and what
was told while it ran is held against what is found afterwards.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.training import rewards
from tests.training.conftest import disturb, steps_of
from tests.training.planted import ARITHMETIC, Told, alarms, found, trained

from klamp.diagnostics.alarms import ALARMS
from klamp.errors import ConfigError, TrainingStopped
from klamp.records import read_record
from klamp.training.alarms import AlarmObserver, settings_of
from klamp.training.config import TrainConfig
from klamp.training.observers import RunInfo
from klamp.training.references import MovingReference
from klamp.training.trainer import Trainer, train_run

pytestmark = pytest.mark.slow


@pytest.mark.usefixtures("default_base_model")
@pytest.mark.parametrize(
    ("steps", "changes"),
    [
        (22, {}),
        (16, {"seed": 1, "beta": 0.04, "lora_r": 8, "learning_rate": 3e-4}),
        (8, {"seed": 2, "beta": 0.0}),
        (8, {"seed": 3, "kl_placement": "advantage", "kl_estimator": "k1", "kl_horizon": "sequence"}),
        (8, {"seed": 4, "target_kl": 0.05, "reference": "ema", "num_iterations": 2}),
        (8, {"seed": 5, "loss_type": "dr_grpo", "beta": 0.0}),
    ],
)
def test_sound_runs_are_quiet(tmp_path: Path, steps: int, changes: dict[str, Any]) -> None:
    size = {"eval_size": 16} if steps > 8 else {}
    assert alarms(trained(tmp_path, **{**ARITHMETIC, **size, **changes, "max_steps": steps})) == set()


def test_an_adapter_that_is_not_zero_at_the_start(llama: str, tmp_path: Path) -> None:
    def plant(trainer: Trainer, told: Told) -> None:
        disturb(trainer.context.policy, size=0.02)

    finding = found(trained(tmp_path, plant=plant, model=llama, lora_r=4, max_steps=1), "step-zero-kl")
    assert finding.first_step == 1 and len(finding.evidence.tokens) == 5


SCALED = {"loss_type": "grpo", "advantage_baseline": "mean"}
"""Advantages of the size 1, with which a few steps of a tiny model go far enough."""


@pytest.fixture
def stale_sampler(monkeypatch: pytest.MonkeyPatch) -> Callable[[Trainer, Told], None]:
    """Completions come from the weights that the run began with: they are never synced."""
    from klamp.training import rollouts

    real = rollouts.generate

    def plant(trainer: Trainer, told: Told) -> None:
        old = copy.deepcopy(trainer.context.policy)
        monkeypatch.setattr(rollouts, "generate", lambda model, *args, **kwargs: real(old, *args, **kwargs))

    return plant


def test_an_adapter_that_is_not_synced(llama: str, tmp_path: Path, stale_sampler: Any) -> None:
    diagnosis = trained(tmp_path, plant=stale_sampler, model=llama, lora_r=4, max_steps=22, **SCALED)
    mismatch = found(diagnosis, "sampler-mismatch")
    assert mismatch.first_step <= 4 and mismatch.evidence.tokens
    of_the_kl = {finding.alarm.name for finding in diagnosis.findings} & {"negative-k1", "k3-far-above-k1"}
    assert of_the_kl, "which of the two comes first depends on the draws"


def test_weights_that_explode_and_are_not_synced(llama: str, tmp_path: Path, stale_sampler: Any) -> None:
    def plant(trainer: Trainer, told: Told) -> None:
        stale_sampler(trainer, told)
        told.after_step = lambda step: disturb(trainer.context.policy, size=0.5) if step == 2 else None

    diagnosis = trained(tmp_path, plant=plant, model=llama, beta=0.0, kl_monitor=True, max_steps=3)
    assert "kl/k3" in found(diagnosis, "huge-values").evidence.text
    assert found(diagnosis, "k3-far-above-k1").evidence.tokens


def test_a_reference_that_follows_the_policy(llama: str, tmp_path: Path) -> None:
    def plant(trainer: Trainer, told: Told) -> None:
        trainer.context.reference = MovingReference(copy.deepcopy(trainer.context.policy), reset_steps=1)

    diagnosis = trained(tmp_path, plant=plant, model=llama, max_steps=22, num_generations=8, learning_rate=1e-2)
    assert "nats per completion" in found(diagnosis, "detached-reference").evidence.text


@pytest.mark.usefixtures("default_base_model")
def test_an_update_that_went_wrong(tmp_path: Path) -> None:
    def plant(trainer: Trainer, told: Told) -> None:
        told.after_step = lambda step: disturb(trainer.context.policy, size=0.1) if step == 8 else None

    diagnosis = trained(tmp_path, plant=plant, **{**ARITHMETIC, "prompts_per_step": 12, "max_steps": 10})
    spike = found(diagnosis, "kl-spike")
    assert spike.first_step == 9 and spike.evidence.tokens[0].step == 9
    assert found(diagnosis, "spike-with-reward-drop").first_step in (9, 10)


def test_a_learning_rate_that_explodes(llama: str, tmp_path: Path) -> None:
    diagnosis = trained(tmp_path, model=llama, learning_rate=1.0, max_steps=8)
    assert found(diagnosis, "kl-spike").first_step <= 3
    assert found(diagnosis, "kl-high").alarm.level == "note"


@pytest.mark.usefixtures("default_base_model")
def test_completions_that_are_cut(tmp_path: Path) -> None:
    diagnosis = trained(tmp_path, **{**ARITHMETIC, "max_completion_length": 2, "max_steps": 6})
    assert found(diagnosis, "truncated").first_step == 5


@pytest.mark.parametrize(
    ("reward", "changes", "seen"),
    [
        (lambda completion, **_: 100 * rewards.digits(completion), {"scale_rewards": "none"}, "an advantage of"),
        (lambda completion, **_: 1 + 1e-5 * len(completion), {"scale_rewards": "std"}, "differ by"),
    ],
)
def test_advantages_out_of_scale(
    llama: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reward: Any, changes: Any, seen: str
) -> None:
    monkeypatch.setattr(rewards, "unscaled", reward, raising=False)
    diagnosis = trained(tmp_path, model=llama, reward="tests.training.rewards:unscaled", max_steps=2, **changes)
    assert seen in found(diagnosis, "advantage-scale").evidence.text


@pytest.mark.usefixtures("default_base_model")
def test_a_target_below_what_the_reward_needs(tmp_path: Path) -> None:
    changes = {
        "beta": 0.1,
        "target_kl": 1e-3,
        "kl_controller": "step",
        "learning_rate": 3e-4,
        "max_steps": 28,
        **SCALED,
    }
    finding = found(trained(tmp_path, **{**ARITHMETIC, **changes}), "beta-runaway")
    assert finding.first_step > 15 and "beta went from 0.1 to" in finding.evidence.text


def test_a_mask_that_loses_the_end_token(llama: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from klamp.training import rollouts

    real = rollouts._masks

    def without_ends(context: Any, completions: Any) -> Any:
        last = torch.zeros_like(completions.mask)
        last[torch.arange(len(last)), completions.mask.sum(-1) - 1] = True
        return real(context, replace(completions, mask=completions.mask & ~(last & completions.ended[:, None])))

    monkeypatch.setattr(rollouts, "_masks", without_ends)
    diagnosis = trained(tmp_path, model=llama, max_steps=2, log_completions=12)
    assert "is not trained on" in found(diagnosis, "end-token-lost").evidence.text


def test_a_kl_under_dr_grpo_with_a_rule(llama: str, tmp_path: Path) -> None:
    diagnosis = trained(tmp_path, model=llama, reward="", advantage_baseline="mean", beta=0.04, max_steps=2)
    assert "dr_grpo, beta 0.04" in found(diagnosis, "dr-grpo-with-kl").evidence.text


@pytest.mark.usefixtures("default_base_model")
def test_a_skill_that_is_lost(tmp_path: Path) -> None:
    changes = {"learning_rate": 3e-3, "beta": 0.0, "max_steps": 12, "eval_size": 32}
    finding = found(trained(tmp_path, **{**ARITHMETIC, **changes}), "retention")
    assert "addition" not in finding.evidence.text and finding.first_step == 12


def test_little_learning_is_a_note(llama: str, tmp_path: Path) -> None:
    diagnosis = trained(tmp_path, model=llama, learning_rate=1e-6, max_steps=20, prompts_per_step=1)
    assert found(diagnosis, "kl-low").first_step == 20


PADDED: dict[str, Any] = {
    "reward": "tests.training.rewards:seven",
    "scale_rewards": "none",
    "beta": 0.1,
    "max_completion_length": 24,
    "prompts_per_step": 6,
    "num_generations": 8,
    "learning_rate": 2e-3,
    "lr_scheduler_type": "constant",
    "max_steps": 40,
}
"""The first character is learned and costs most of the KL; every further one takes something from the reward."""


def test_a_reward_that_begins_to_pay_for_length_dilutes_the_kl(
    gpt2: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(rewards.STATE, "pay", -0.1)

    def plant(trainer: Trainer, told: Told) -> None:
        told.after_step = lambda step: rewards.STATE.update(pay=0.05) if step == 20 else None

    finding = found(trained(tmp_path, plant=plant, model=gpt2, **PADDED), "dilution")
    assert 20 < finding.first_step <= 40
    steps = steps_of(tmp_path)[finding.first_step - 20 : finding.first_step]
    length, kl, sequence = (
        fmean(step[name] for step in steps[10:]) / fmean(step[name] for step in steps[:10])
        for name in ("length/mean", "kl/exact", "kl/exact_sequence")
    )
    assert length > 1.2 and kl < 1 / 1.2 and sequence > 0.9, "longer, less per token, no less in all"


def test_without_that_pay_the_same_run_is_not_diluted(
    gpt2: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(rewards.STATE, "pay", -0.1)
    diagnosis = trained(tmp_path, model=gpt2, **PADDED)
    assert alarms(diagnosis) == set()
    assert fmean(step["kl/exact_sequence"] for step in steps_of(tmp_path)[-10:]) > 2, "it learned the same"


def stopped(config: TrainConfig) -> TrainingStopped:
    with pytest.raises(TrainingStopped) as caught:
        train_run(config)
    return caught.value


def test_a_run_stops_at_an_alarm_and_keeps_its_checkpoint(config_of: Any, tmp_path: Path) -> None:
    config = config_of(stop_on=("retention", "kl-high"), learning_rate=1.0, max_steps=10, save_every=0)
    error = stopped(config)
    steps = read_record(tmp_path / "run").rows
    step = steps[-1].step
    assert step < 10
    assert error.what == f"training was stopped after step {step} of 10 by the alarm kl-high: {ALARMS['kl-high'].text}"
    assert "the KL is" in str(error.got) and ALARMS["kl-high"].next_step in error.why and error.fix
    assert [folder.name for folder in (tmp_path / "run" / "checkpoints").iterdir()] == [f"step-{step:06d}"]
    train_run(replace(config, run=replace(config.run, stop_on=(), resume=True)))
    assert read_record(tmp_path / "run").rows[-1].step == 10
    told = [json.loads(line)["name"] for line in (tmp_path / "run" / "alarms.jsonl").read_text().splitlines()]
    assert len(told) == len(set(told)) and "kl-high" in told, "what was told is not told again"


def test_an_alarm_that_is_not_named_stops_nothing(config_of: Any, tmp_path: Path) -> None:
    train_run(config_of(stop_on=("retention",), learning_rate=1.0, max_steps=4))
    assert read_record(tmp_path / "run").rows[-1].step == 4


def test_names_to_stop_on_are_checked() -> None:
    with pytest.raises(ConfigError, match="did you mean 'kl-spike'"):
        TrainConfig.from_flat({"stop_on": ["kl-spiek"]})


@pytest.mark.parametrize(
    ("changes", "verifier"),
    [
        ({}, "rules"),
        ({"task": "arithmetic-filler"}, "rules"),
        ({"task": "reasoning_gym:leg_counting"}, "rules"),
        ({"reward": "tests.training.rewards:digits"}, None),
        ({"task": "data.jsonl", "reward": "math_verify"}, "rules"),
        ({"task": "data.jsonl", "reward": "format_regex:<a>.*</a>"}, "rules"),
        ({"task": "data.jsonl"}, None),
    ],
)
def test_what_the_alarms_know_of_a_configuration(changes: dict[str, str], verifier: str | None) -> None:
    settings = settings_of(TrainConfig.from_flat({"beta": 0.02, "advantage_baseline": "mean", **changes}), rl_skill="a")
    assert settings.verifier == verifier
    assert (settings.beta, settings.loss_type, settings.scale_rewards, settings.rl_skill) == (
        0.02,
        "dr_grpo",
        "none",
        "a",
    )
    others = settings_of(TrainConfig.from_flat({"beta": 0.02, **changes}))
    assert others.loss_type == "dr_grpo, leave_one_out", "its average alone is not the recipe"


def test_a_score_that_is_none_in_a_damaged_record_is_passed_over(tmp_path: Path) -> None:
    rows = [{"step": step, "eval/addition": 0.5, "eval/words": None if step < 2 else 0.1} for step in (0, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    observer = AlarmObserver(lambda call: None, rl_skill="addition")
    observer.on_start(SimpleNamespace(config=TrainConfig(), output_dir=tmp_path, start_step=2))  # type: ignore[arg-type]
    assert [dict(row.metrics) for row in observer.watch.history.evaluations] == [
        {"addition": 0.5},
        {"addition": 0.5, "words": 0.1},
    ]
    observer.on_step(3, {"kl/k3": 0.1})


def test_what_was_seen_before_a_checkpoint_counts_after_it(tmp_path: Path) -> None:
    """The run stops where it would have stopped, and at the same alarm, wherever it was killed."""
    rows = [{"step": step, "kl/k3": 0.01 if step < 9 else 2.0, "reward": 0.5} for step in range(1, 12)]
    lines = [{"step": 0, "eval/a": 0.1, "eval/b": 0.9}, *rows]
    for done in range(9):
        written = [line for line in lines if line["step"] <= done]
        (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in written))
        row = {"step": done, "tokens": ["4"], "policy_logprobs": [-1.0], "ref_logprobs": [-1.0]}
        (tmp_path / "completions.jsonl").write_text(json.dumps(row) + '\n{"step": 0}\n')
        observer = AlarmObserver(lambda hook: None, rl_skill="a", stop_on=("kl-spike",))
        observer.on_start(info(tmp_path, done))
        assert sum(map(len, observer.watch.history.completions.values())) == bool(done)
        assert len(observer.watch.history.evaluations) == bool(done)
        for each in rows[done:]:
            observer.on_step(int(each["step"]), {name: x for name, x in each.items() if name != "step"})
            if observer.stopped_by is not None:
                break
        assert observer.stopped_by is not None and observer.stopped_by.first_step == 9


def info(folder: Path, start_step: int) -> RunInfo:
    """A run that goes on after a step."""
    known = {"parameters": 1, "trainable_parameters": 1, "reference": "", "device": "", "processes": 1}
    return RunInfo(config=TrainConfig(), output_dir=folder, start_step=start_step, **known)
