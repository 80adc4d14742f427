"""What klamp keeps between a trainer's calls: beta over a resume, the sampler's drift, the numbers in TRL's log."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trl
from tests.hosts.trl.hosts import dataset, klamp_trainer, model, saved, stock_trainer
from tests.hosts.trl.losses import generated, plain_logits, plain_logprobs, trained

from klamp.doctor.metrics import METRICS
from klamp.errors import KLWarning
from klamp.hosts.common.sampler_weights import START, WEIGHTS
from klamp.hosts.trl.measure import sync_report, watch_sampler
from klamp.hosts.trl.session import Warned

OPTIONS: dict[str, Any] = {"beta": 0.4, "target_kl": 0.02, "kl_clip_method": "hard", "kl_clip_threshold": 0.005}
OPTIONS |= {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "max_completion_length": 20}
OPTIONS |= {"lr_scheduler_type": "constant"}
CONTROLLERS: dict[str, dict[str, Any]] = {
    "hold": {"target_kl": 1e-4},
    "step": {"kl_controller": "step"},
    "proportional": {"kl_controller": "proportional", "kl_controller_horizon": 2},
}


def logged(trainer: Any) -> list[tuple[float, ...]]:
    names = ("loss", "beta", "kl/k3", "kl/reference_length", "kl/budget")
    return [tuple(row[name] for name in names) for row in trainer.state.log_history if "loss" in row]


@pytest.mark.parametrize("name", ["hold", *(pytest.param(name, marks=pytest.mark.slow) for name in [*CONTROLLERS][1:])])
@pytest.mark.filterwarnings("ignore::klamp.errors.KLWarning")
def test_a_resumed_run_has_the_same_beta_and_losses(base: Any, tmp_path: Path, name: str) -> None:
    options = OPTIONS | CONTROLLERS[name]
    whole = trained(base, tmp_path, **options)
    saved = json.loads((tmp_path / "checkpoint-2" / "klamp_state.json").read_text())
    resumed = trained(base, tmp_path / "b", resume=tmp_path / "checkpoint-2", **options)
    assert logged(resumed) == [pytest.approx(row) for row in logged(whole)]
    betas = [row[1] for row in logged(whole)]
    assert len(set(betas)) >= 3  # the controller moved
    assert saved["reference_length"] == logged(whole)[0][3]
    fresh = klamp_trainer(copy.deepcopy(base), tmp_path / "c", **options)
    assert fresh._klamp.control.beta(2, 4) != pytest.approx(betas[2])  # without the state it would be another


@pytest.mark.filterwarnings("ignore:kl_estimator:klamp.errors.KLWarning")
def test_a_checkpoint_without_the_state_says_so(base: Any, tmp_path: Path) -> None:
    options = {**OPTIONS, "kl_reference_length": 5}
    trained(base, tmp_path, **(options | {"max_steps": 2}))
    (tmp_path / "checkpoint-2" / "klamp_state.json").unlink()
    with pytest.warns(KLWarning, match="holds no klamp_state.json"):
        trainer = trained(base, tmp_path / "b", resume=tmp_path / "checkpoint-2", **options)
    assert logged(trainer)[2][1] == pytest.approx(0.4)  # the configured beta


@pytest.mark.filterwarnings("ignore::klamp.errors.KLWarning")
def test_what_a_resume_asks_for_counts(base: Any, tmp_path: Path) -> None:
    """beta and the rate, from a run without a KL too; moments and step are the saved."""
    options: dict[str, Any] = {"kl_estimator": "k3", "save_strategy": "steps", "save_steps": 2}
    options |= {"lr_scheduler_type": "cosine", "max_steps": 4}
    trained(base, tmp_path, beta=0.0, **options)
    folder = tmp_path / "checkpoint-2"
    changed: dict[str, Any] = {"beta": 0.3, "learning_rate": 5e-3}
    for fields in ({}, {"kl_estimator": None}):
        trainer = trained(base, tmp_path / "b", resume=folder, **options | changed | fields)
        rows = [row for row in trainer.state.log_history if "loss" in row][2:]
        assert [row["beta"] for row in rows] == [0.3, 0.3] and rows[0]["kl/k3"] > 0
        assert [row["learning_rate"] for row in rows] == pytest.approx([5e-3 * 0.5, 5e-3 * (1 - 2**-0.5) / 2])
        assert {int(state["step"]) for state in trainer.optimizer.state.values()} == {4}
    stopped = trained(base, tmp_path / "c", resume=folder, beta=0.0, **options)
    assert stopped.state.global_step == 4 and stopped.ref_model is None


def test_a_resume_without_klamps_fields_is_told(tmp_path: Path) -> None:
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1, "beta": 0.2}
    trained(model(), tmp_path, kl_estimator="k3", **options)
    with pytest.warns(KLWarning, match=r"written with klamp's KL, and no KL field is set now: beta=0.2"):
        trained(model(), tmp_path / "b", resume=tmp_path / "checkpoint-1", **options | {"max_steps": 2})


def logprobs(made: Any, output: Any) -> torch.Tensor:
    with torch.no_grad():
        return plain_logprobs(plain_logits(copy.deepcopy(made).eval(), output), output)


@pytest.fixture
def watched(trainer: Any, base: Any, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A trainer that has trained, a batch as an engine in sync would have written it, and what is said."""
    said: list[str] = []
    session = trainer._klamp
    facts = session.reference._replace(is_start=True)
    monkeypatch.setattr(trainer, "_klamp", replace(session, reference=facts, warned=Warned()))
    monkeypatch.setattr(trainer, "_caution", said.append)
    monkeypatch.setattr(trainer.state, "global_step", 3)
    output = generated(trainer)
    own = logprobs(trainer.model, output)
    output |= {"old_per_token_logps": own, "sampling_per_token_logps": own + 1e-6}
    return SimpleNamespace(trainer=trainer, output=output, said=said, start=logprobs(base, output))


def test_a_sampler_that_stayed_at_the_start_is_named_once(watched: SimpleNamespace) -> None:
    watched.output["sampling_per_token_logps"] = watched.start
    for _ in range(2):
        watch_sampler(watched.trainer, watched.output)
    (text,) = watched.said
    assert "out of sync at step 4" in text and START in text and "not synced" in text
    sampler, trainer = sync_report(watched.trainer, watched.output).sides
    assert sampler.gaps[START] < 1e-5 and trainer.gaps[WEIGHTS] < 1e-5
    session = watched.trainer._klamp  # of a reference that is another model, or that moves
    watched.trainer._klamp = replace(session, reference=session.reference._replace(is_start=False))
    assert START not in sync_report(watched.trainer, watched.output).sides[0].gaps


def test_a_run_whose_engine_is_never_synced_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner, start = trl.GRPOTrainer._generate_and_score_completions, model()

    def told(self: Any, inputs: Any) -> Any:
        output = inner(self, inputs)
        own, stale = logprobs(self.model, output), logprobs(start, output)
        return output | {"old_per_token_logps": own, "sampling_per_token_logps": stale}

    monkeypatch.setattr(trl.GRPOTrainer, "_generate_and_score_completions", told)
    with pytest.warns(KLWarning, match=r"Sampler and trainer are out of sync at step [23]: .*weights of the start"):
        trained(model(), tmp_path, beta=0.1, max_steps=3, learning_rate=3e-2)


COMMON = {"beta": 0.2, "gradient_accumulation_steps": 2, "trainer": {"eval_dataset": dataset().select(range(4))}}
COMMON |= {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 2}
EXPECTED = {
    *("beta", "beta/price", "kl/after_clip", "kl/before_clip", "kl/budget", "kl/exact", "kl/k1", "kl/k3"),
    *("kl/k3_sequence", "kl/log_ratio_clamped", "kl/log_ratio_max", "kl/log_ratio_p99", "kl/over_budget"),
    *("kl/reference_length", "length/mean", "length/repeated", "policy/logp_mean", "ref/logp_mean"),
}


def test_every_name_that_klamp_adds_to_trls_log_is_in_the_table(tmp_path: Path) -> None:
    ours = {"kl_clip_method": "hard", "kl_clip_threshold": 0.01, "kl_max_log_ratio": 5.0}
    ours |= {"kl_off_policy": "token", "kl_max_weight": 2.0}
    base = saved(model(), tmp_path / "base")  # TRL loads its own reference from there
    pair = (klamp_trainer(base, tmp_path, **COMMON, **ours), stock_trainer(base, tmp_path, **COMMON))
    for trainer in pair:
        trainer.train()
    added, own = ({name for row in trainer.state.log_history for name in row} for trainer in pair)
    names = {name.removeprefix("eval_") for name in added - own}
    assert names <= METRICS.keys()
    assert names >= EXPECTED | {"kl/weights_truncated", "kl/k3_max"}
    assert added >= EXPECTED | {f"eval_{name}" for name in EXPECTED}
    assert all(isinstance(row.get(name, 0.0), float) for row in pair[0].state.log_history for name in added - own)


def test_the_numbers_are_those_of_the_whole_step_however_it_is_split(tmp_path: Path) -> None:
    rows = []
    same = {"beta": 0.2, "max_steps": 1, "kl_monitor": True, "learning_rate": 0.0}
    for size, steps in ((4, 2), (8, 1)):
        split = {"per_device_train_batch_size": size, "gradient_accumulation_steps": steps}
        trainer = klamp_trainer(model(), tmp_path, trainer={"ref_model": model(seed=1)}, **same, **split)
        torch.manual_seed(1)
        trainer.train()
        rows.append(trainer.state.log_history[0])
    names = EXPECTED & rows[0].keys()
    assert {name: rows[1].get(name) for name in names} == pytest.approx({name: rows[0].get(name) for name in names})
    assert rows[0]["kl/k3"] > 0.1
    assert rows[0]["kl/log_ratio_p99"] < rows[0]["kl/log_ratio_max"] or rows[0]["num_tokens"] < 100


@pytest.mark.parametrize("scale", ["batch", "group"])
def test_the_spread_is_what_the_advantages_were_divided_by(tmp_path: Path, scale: str) -> None:
    rewards = torch.tensor([0.0, 1.0, 5.0, 9.0])
    reward: Any = {"reward_funcs": lambda completions, **_: rewards.tolist()}
    trainer = klamp_trainer(model(), tmp_path, beta=0.2, kl_estimator="k3", scale_rewards=scale, trainer=reward)
    advantages = generated(trainer)["advantages"]
    spread, centred = trainer._klamp.rollout.spread, torch.tensor([-0.5, 0.5, -2.0, 2.0])
    expected = {"batch": 4.113, "group": (0.7071 + 2.8284) / 2}[scale]
    assert spread == pytest.approx(expected, abs=1e-3)
    if scale == "batch":
        torch.testing.assert_close(advantages * spread, centred, rtol=1e-3, atol=1e-3)
