"""The hooks: what they add before the batch is split, when beta moves, and that a KL is never left out silently."""

import copy
from typing import Any

import pytest
import torch
import trl
from packaging.version import Version
from tests.hosts.trl.hosts import arguments, build, klamp_trainer, stock_trainer, tokenizer
from tests.hosts.trl.losses import (
    generated,
    gradient_of,
    loss_of,
    plain_logits,
    plain_logprobs,
    rows_of,
    trained,
    with_kl,
)

from klamp.config import KLConfig
from klamp.core.clipping import kl_budget
from klamp.errors import ConfigError, NonFiniteError, UnsupportedVersion
from klamp.hosts.common.coefficient import replaced
from klamp.hosts.common.kl_fields import kl_config
from klamp.hosts.trl.grpo_config import liger_bypasses
from klamp.trl import attach

CLIP: dict[str, Any] = {"kl_clip_method": "hard", "kl_clip_threshold": 0.1}


@pytest.mark.parametrize("level", ["group", "batch", None])
def test_the_gate_does_not_depend_on_how_the_batch_is_split(trainer: Any, level: str | None) -> None:
    """Every micro-batch of one row, added up, is the whole: the gate was settled before the split."""
    with_kl(trainer, KLConfig(beta=0.4, kl_clip_level=level, kl_reference_length=6, **CLIP), loss_type="luspo")
    inputs = generated(trainer)
    whole = gradient_of(trainer, loss_of(trainer, inputs))
    tensors = {name: x for name, x in inputs.items() if not (isinstance(x, torch.Tensor) and x.ndim == 0)}
    parts = [{**inputs, **{name: x[i : i + 1] for name, x in tensors.items()}} for i in range(4)]
    summed = sum(gradient_of(trainer, loss_of(trainer, part)) for part in parts) / 4
    assert (summed - whole).abs().max() < 1e-6
    assert len(inputs["klamp_gate_kl"].unique()) == 4, "each is gated by the others"


def test_the_reference_length_may_be_a_column_of_the_data(trainer: Any) -> None:
    with_kl(trainer, KLConfig(beta=0.4, **CLIP))
    inputs = generated(trainer, rows=rows_of(reference_length=list(range(3, 13))))
    assert inputs["klamp_reference_length"].tolist() == [3.0, 3.0, 4.0, 4.0]
    assert trainer._klamp.control.reference_length is None


def test_a_reference_length_is_measured_on_the_first_batch_and_frozen(base: Any, tmp_path: Any) -> None:
    trainer = trained(base, tmp_path, beta=0.4, max_completion_length=60, **CLIP)
    rows = trainer.state.log_history
    assert {row["kl/reference_length"] for row in rows[:2]} == {rows[0]["completions/mean_length"]}
    assert rows[0]["completions/mean_length"] != rows[1]["completions/mean_length"]
    budget = kl_budget(0.1, per_token=True, reference_length=rows[0]["length/mean"])
    assert rows[1]["kl/budget"] == pytest.approx(budget)


def test_the_kl_in_the_reward_leaves_completions_without_a_reward_out(trainer: Any, monkeypatch: Any) -> None:
    in_reward: dict[str, Any] = {"kl_placement": "reward", "kl_estimator": "k1", "kl_horizon": "sequence"}
    monkeypatch.setattr(trainer, "reward_funcs", [lambda completions, **_: [1.0, 2.0, None, 3.0]])
    with_kl(trainer, KLConfig(beta=0.4, **in_reward), scale_rewards="none")
    inputs = generated(trainer)
    with torch.no_grad():
        policy = plain_logprobs(plain_logits(trainer.model, inputs), inputs)
    delta = ((policy - inputs["ref_per_token_logps"]) * inputs["completion_mask"]).sum(-1)
    taken = 0.4 * (delta[:2] - delta[:2].mean())
    expected = torch.tensor([-0.5, 0.5]) - taken
    assert torch.allclose(inputs["advantages"][:2], expected, atol=1e-5)
    assert inputs["advantages"][2:].tolist() == [0.0, 0.0]  # one without a reward, one alone in its group


def test_monitoring_without_a_term_leaves_the_loss_alone(base: Any, tmp_path: Any) -> None:
    stock = stock_trainer(copy.deepcopy(base), tmp_path)
    stock.train()
    monitored = trained(base, tmp_path, kl_monitor=True)
    assert all(map(torch.equal, stock.model.parameters(), monitored.model.parameters()))
    rows = monitored.state.log_history
    assert rows[1]["kl/k3"] > 0 and rows[1]["beta"] == 0.0
    assert monitored.args.beta == 0.0 and monitored.beta > 0  # what TRL must see to score the reference


def test_warm_up_starts_at_zero_without_losing_the_reference(base: Any, tmp_path: Any) -> None:
    trainer = trained(base, tmp_path, beta=0.4, kl_warmup_steps=2, max_steps=4)
    assert [row["beta"] for row in trainer.state.log_history[:4]] == [0.0, 0.2, 0.4, 0.4]
    assert all("kl/k3" in row for row in trainer.state.log_history[:4])


def test_beta_moves_at_the_end_of_an_optimizer_step_only(base: Any, tmp_path: Any) -> None:
    options = {"target_kl": 0.001, "kl_controller": "step", "gradient_accumulation_steps": 4, "max_steps": 3}
    trainer = klamp_trainer(copy.deepcopy(base), tmp_path, beta=0.4, **options)
    used: list[float] = []
    inner = trainer._loss_hook
    trainer._loss_hook = lambda *args: (used.append(args[-1]), inner(*args))[1]
    trainer.train()
    rows = trainer.state.log_history[:3]
    expected = [0.4]
    for row in rows[:2]:
        expected.append(expected[-1] * (1.5 if row["kl/k3"] > 0.0015 else 0.75 if row["kl/k3"] < 0.0005 else 1))
    assert used == [pytest.approx(beta) for beta in expected for _ in range(4)]
    assert expected[1] == pytest.approx(0.3) and expected[2] == pytest.approx(0.45)


def test_a_step_without_a_token_that_carries_the_kl_measures_none(base: Any, tmp_path: Any) -> None:
    every = list(range(len(tokenizer())))
    trainer = trained(base, tmp_path, beta=0.2, kl_exclude_tokens=every, target_kl=0.1)
    rows = [row for row in trainer.state.log_history if "beta" in row]
    assert [row["beta"] for row in rows] == [0.2, 0.2] and not any("kl/k3" in row for row in rows)


@pytest.mark.parametrize("options", [{}, {"beta": 0.0, "kl_monitor": True}, {"target_kl": 0.1}])
def test_a_kl_that_is_not_finite_stops_the_run_before_the_weights(base: Any, tmp_path: Any, options: Any) -> None:
    broken = copy.deepcopy(base)
    with torch.no_grad():
        broken.model.norm.weight.fill_(torch.nan)
    options = {"beta": 0.1, "gradient_accumulation_steps": 2, "kl_estimator": "k3", **options}
    trainer = klamp_trainer(copy.deepcopy(base), tmp_path, trainer={"ref_model": broken}, **options)
    with pytest.raises(NonFiniteError, match=r"KL of this step is not finite[\s\S]*newest checkpoint"):
        trainer.train()
    assert trainer.state.global_step == 0
    assert all(map(torch.equal, base.parameters(), trainer.model.parameters()))
    assert trainer._klamp.control.last_kl is None


class Elsewhere(trl.GRPOTrainer):
    """A host that stopped using beta where klamp puts its term."""

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        with replaced(self, "beta", 0.0):
            return super()._compute_loss(model, inputs)


class Twice(trl.GRPOTrainer):
    """A host that uses it twice."""

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        return super()._compute_loss(model, inputs) + (self.beta * inputs["ref_per_token_logps"]).sum()


class Bypassing(trl.GRPOTrainer):
    """A host whose loss never comes by, as with Liger's kernel in TRL below 1.14."""

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        return sum(p.sum() for p in model.parameters())


@pytest.mark.parametrize(
    ("kind", "text"),
    [(Elsewhere, "0 products of beta"), (Twice, "2 products of beta"), (Bypassing, "0 products of beta")],
)
def test_a_host_that_stops_calling_the_hook_is_noticed(base: Any, tmp_path: Any, kind: type, text: str) -> None:
    # Built with beta 0, since TRL cannot load the reference of a model in memory; attach brings it.
    trainer = build(kind, copy.deepcopy(base), arguments(trl.GRPOConfig, tmp_path))
    attach(trainer, KLConfig(beta=0.4))
    with pytest.raises(UnsupportedVersion, match=text):
        trainer.train()


def test_the_fused_loss_of_liger_is_refused_where_it_bypasses_the_hook(tmp_path: Any) -> None:
    """TRL below 1.14 computes the whole loss in Liger's kernel; later ones only swap layers."""
    if not liger_bypasses():
        assert Version(trl.__version__) >= Version("1.14")
        assert arguments(beta=0.1, kl_gradient="reverse", use_liger_kernel=True).use_liger_kernel
        return
    assert Version(trl.__version__) < Version("1.14")
    with pytest.raises(ConfigError, match="never looks at klamp's term"):
        arguments(beta=0.1, kl_gradient="reverse", use_liger_kernel=True)
    assert kl_config(arguments(beta=0.1, use_liger_kernel=True)) is None  # TRL's own KL may go that way
