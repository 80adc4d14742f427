"""The pipeline from scratch: the printed value, the gradient that was meant, and a loop that learns."""

import copy
import logging
import math
import re
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tests.training import rewards
from tests.training.conftest import disturb, refused, rollout_of, sample, tiny_llama
from torch.utils.tensorboard import SummaryWriter

from klamp import errors
from klamp.doctor.examine import examine
from klamp.doctor.metrics import METRICS
from klamp.doctor.readers import read_record
from klamp.lab.config import RolloutConfig
from klamp.lab.loop import Trainer
from klamp.lab.tasks.arithmetic import arithmetic_tokenizer
from klamp.lab.updates import adamw, update
from klamp.scoring.completions import select
from klamp.training.loop import compute_kl_divergence, compute_loss, grpo_microbatch_step, log_train, train

V = 6
"""Tokens of the enumerated vocabulary."""
THEIRS = {name: f"train/{name}" for name in ("loss", "policy_loss", "kl_penalty", "grad_norm", "learning_rate")}
"""A name of the guide's -> klamp's."""


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def expected_gradient(loss_of_token) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradient of a loss in the logits, averaged over every token the policy could sample; and the true ones."""
    logits = drawn(V).requires_grad_(True)
    ref = drawn(V, seed=1).log_softmax(-1)
    policy = logits.log_softmax(-1)
    probs = policy.detach().exp()
    # one row per token, one position each
    losses = loss_of_token(policy[:, None], ref[:, None])
    (gradient,) = torch.autograd.grad((probs * losses.reshape(V)).sum(), logits, retain_graph=True)
    (reverse,) = torch.autograd.grad((policy.exp() * (policy - ref)).sum(), logits, retain_graph=True)
    (forward,) = torch.autograd.grad((ref.exp() * (ref - policy)).sum(), logits)
    return gradient, reverse, forward


def data(rows: int = 4, tokens: int = 5):
    """Log-probabilities of old, policy and reference, advantages, and a mask with holes."""
    old, policy, ref = (-drawn(rows, tokens, seed=s).abs() - 0.1 for s in range(3))
    policy = (old + 0.3 * (policy - old)).requires_grad_(True)
    mask = torch.ones(rows, tokens, dtype=torch.bool)
    mask[0, 3:] = mask[2, 1:] = mask[3, 2] = False
    return policy, old, ref, drawn(rows, seed=9), mask


def printed(policy, old, ref, advantages, mask, kl_coef: float, clip: float) -> torch.Tensor:
    """PPO's clipped loss + kl_coef * mean(log policy - log ref) over response tokens: the from-scratch guide."""
    ratio = (policy - old).exp()
    ppo = -torch.minimum(ratio * advantages[:, None], ratio.clamp(1 - clip, 1 + clip) * advantages[:, None])
    return (ppo[mask]).mean() + kl_coef * (policy - ref)[mask].mean()


def test_the_divergence_has_the_printed_value_and_the_gradient_of_the_reverse_kl():
    policy, ref = (-x.abs() for x in (drawn(3, 4), drawn(3, 4, seed=1)))
    torch.testing.assert_close(compute_kl_divergence(policy, ref), policy - ref)
    gradient, reverse, forward = expected_gradient(compute_kl_divergence)
    torch.testing.assert_close(gradient, reverse, rtol=0, atol=1e-12)
    assert gradient.abs().max() > 0.05
    assert (gradient - forward).abs().max() > 0.01
    as_printed, _, _ = expected_gradient(lambda policy, ref: policy - ref)
    assert as_printed.abs().max() < 1e-12, "differentiated as printed, nothing is left"


@pytest.mark.parametrize(("kl_coef", "clip"), [(0.0, 0.2), (0.7, 0.05)])
def test_the_loss_has_the_value_that_the_document_prints(kl_coef, clip):
    policy, old, ref, advantages, mask = data()
    loss, metrics = compute_loss(policy, old, advantages, mask, ref_log_probs=ref, kl_coef=kl_coef, cliprange=clip)
    expected = printed(policy, old, ref, advantages, mask, kl_coef, clip)
    torch.testing.assert_close(loss, expected)
    k1 = float((policy - ref)[mask].mean())
    assert float(metrics["kl_penalty_mean"]) == pytest.approx(kl_coef * k1)
    assert float(metrics["kl_mean"]) == pytest.approx(k1)
    assert float(metrics["policy_loss"]) == pytest.approx(float(printed(policy, old, ref, advantages, mask, 0.0, clip)))
    outside = ((policy - old).exp() - 1)[mask]
    sign = advantages[:, None].expand_as(policy)[mask]
    bound = ((outside > clip) & (sign > 0)) | ((outside < -clip) & (sign < 0))
    assert float(metrics["clip_fraction"]) == pytest.approx(float(bound.double().mean()))
    assert float(metrics["log_prob_mean"]) == pytest.approx(float(policy[mask].mean()))
    assert not any(x.requires_grad for x in metrics.values())


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"ref_log_probs": None, "kl_coef": 0.1}, errors.ConfigError, "a KL to the reference needs"),
        ({"kl_coef": -0.1}, errors.ConfigError, "kl_coef must be"),
        ({"response_mask": torch.zeros(4, 5, dtype=torch.bool)}, errors.EmptyMaskError, ""),
        ({"ref_log_probs": torch.full((4, 5), math.nan), "kl_coef": 0.1}, errors.NonFiniteError, ""),
        ({"response_mask": [[1.0, 0.0]]}, errors.TensorError, "response_mask must be a torch.Tensor"),
        ({"response_mask": torch.full((4, 5), 0.5)}, errors.TensorError, "response_mask must hold booleans"),
        ({"response_mask": torch.ones(4, 5, dtype=torch.long)}, errors.TensorError, "response_mask must hold booleans"),
        ({"policy_log_probs": [[-1.0]]}, errors.TensorError, "policy_logprobs must be a torch.Tensor"),
        ({"kl_coef": "0.1"}, errors.ConfigError, "kl_coef must be a number"),
        ({"kl_coef": True}, errors.ConfigError, "kl_coef must be a number"),
        ({"cliprange": "0.2"}, errors.ConfigError, "epsilon must be a number"),
        ({"totals": (4, 20, 20)}, errors.KlampError, "totals must be a Totals"),
    ],
)
def test_what_cannot_work_is_refused(changes: dict[str, Any], kind: type[errors.KlampError], words: str) -> None:
    policy, old, ref, advantages, mask = data()
    good: dict[str, Any] = {"policy_log_probs": policy, "old_log_probs": old, "ref_log_probs": ref}
    good |= {"advantages": advantages, "response_mask": mask}
    with refused(kind, f"^{words}"):
        compute_loss(**good | changes)


def test_the_divergence_and_a_step_refuse_in_words_too() -> None:
    with pytest.raises(errors.ShapeError):
        compute_kl_divergence(torch.zeros(2, 3), torch.zeros(2, 4))
    with pytest.raises(errors.TensorError, match="ref_log_probs must be a torch.Tensor"):
        compute_kl_divergence(torch.zeros(2, 3), [[0.0]])
    own = tiny_llama()
    completions = sample(own, prompts=["1+1="])
    for kl_coef, words in (("0.1", "kl_coef must be a number"), (0.1, "no reference")):
        with refused(errors.ConfigError, words):  # before there is a model to call
            grpo_microbatch_step(None, completions, torch.ones(1), kl_coef=kl_coef)
    with pytest.raises(errors.ModelError, match="the reference is the policy itself"):
        grpo_microbatch_step(own, completions, torch.ones(1), ref_model=own, kl_coef=0.1)


ROLLOUT = RolloutConfig(prompts_per_step=4, num_generations=6, max_completion_length=6)


def trained(*, steps: int, seed: int = 0, **changes):
    """A tiny model trained to be brief; the model and its history."""
    model = tiny_llama()
    settings = {"rollout": ROLLOUT, "ref_model": tiny_llama(), "kl_coef": 0.05, **changes}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    reward = settings.pop("reward", lambda prompt, completion: rewards.short(completion))
    prompts = settings.pop("prompts", ["1+1=", "rev ab=", "5-2=", "77+8=", "1-1="])
    history = train(model, arithmetic_tokenizer(), prompts, reward, optimizer, steps=steps, seed=seed, **settings)
    return model, history


PRINTED = {
    "beta": 0.3,
    "kl_estimator": "k1",
    "kl_gradient": "reverse",
    "loss_type": "dapo",
    "advantage_baseline": "mean",
    "prompts_per_step": 4,
    "num_generations": 6,
    "gradient_accumulation_steps": 5,
    "max_grad_norm": 0.5,
}
"""The guide's loss in klamp's words; five parts of 24 completions, which cut groups."""


@pytest.mark.parametrize("beta", [0.3, 0.0])
def test_what_a_reader_takes_apart_is_what_runs(context_of, beta):
    """Bit by bit: the loss of every step, the last gradient and the weights after AdamW are those of the trainer."""
    context = context_of(
        **PRINTED | {"beta": beta}, lr_scheduler_type="constant", warmup_steps=0, exact_kl_completions=0
    )
    model, ref = copy.deepcopy(context.policy), copy.deepcopy(context.policy)
    trainer = Trainer(context, [])
    prompts = [example.prompt for step in range(3) for example in trainer.prompts(step)]
    theirs = [trainer.train_step() for _ in range(3)]
    history = train(
        model,
        context.tokenizer,
        prompts,
        lambda prompt, completion: rewards.digits(completion),
        adamw(model, context.config),
        ref_model=ref,
        kl_coef=beta,
        steps=3,
        rollout=context.config.rollout,
        optim=context.config.optim,
        seed=context.config.run.seed,
    )
    assert abs(history[-1]["loss"]) > 1e-3 and history[0]["grad_norm"] > 0.5
    for ours, theirs_ in zip(history, theirs, strict=True):
        assert ours == {name: theirs_[THEIRS.get(name, name)] for name in ours}
    for (name, x), y in zip(model.named_parameters(), context.policy.parameters(), strict=True):
        assert torch.equal(x, y) and torch.equal(x.grad, y.grad), name


def test_a_micro_batch_adds_what_the_trainers_adds_bit_by_bit(context_of):
    context = context_of(**PRINTED | {"max_grad_norm": 0.0})
    disturb(context.policy, size=0.03)
    rollout = rollout_of(context, prompts=4, beta=0.3)
    output = update(context, torch.optim.SGD(context.policy.parameters(), lr=0.0), rollout, context.objective)
    expected = {name: p.grad.clone() for name, p in context.policy.named_parameters()}

    def added(model, ref_model) -> float:
        loss = 0.0
        context.policy.zero_grad()
        for part in context.parts(24):
            part_loss, metrics = grpo_microbatch_step(
                model, select(rollout.completions, part), rollout.advantages[part],
                ref_model=ref_model, kl_coef=0.3, totals=rollout.totals,
            )  # fmt: skip
            assert not part_loss.requires_grad and not any(x.requires_grad for x in metrics.values())
            loss += float(part_loss.double())
        return loss

    assert added(context.scorer, context.reference.scorer) == output.losses["train/loss"]
    for name, p in context.policy.named_parameters():
        assert torch.equal(p.grad, expected[name]), name
    assert added(context.policy, context.reference.model) == pytest.approx(output.losses["train/loss"], abs=1e-6)
    for name, p in context.policy.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], rtol=1e-5, atol=2e-6)
    assert all(p.grad is None for p in context.reference.model.parameters())


def test_the_loop_writes_to_tensorboard_as_much_as_doctor_reads_of_the_trainer(tmp_path):
    with SummaryWriter(str(tmp_path)) as writer:
        _, history = trained(steps=3, writer=writer)
    assert history[0].keys() <= METRICS.keys() | THEIRS.keys()
    assert history[0]["kl/k1"] == pytest.approx(0, abs=1e-6) and abs(history[-1]["kl/k1"]) > 1e-6
    for row in history:
        assert row["kl_penalty"] == pytest.approx(0.05 * row["kl/k1"], abs=1e-7)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert {"train/kl_penalty", "train/loss", "train/reward", "train/grad_norm"} <= set(events.Tags()["scalars"])
    record = read_record(tmp_path)
    assert [row.step for row in record.rows] == [1, 2, 3]
    for row, logged in zip(record.rows, history, strict=True):
        metrics = {name: value for name, value in row.metrics.items() if name != "speed/step_seconds"}  # of the events
        assert metrics == {THEIRS.get(name, name): pytest.approx(value, rel=1e-5) for name, value in logged.items()}
    assert {"kl/k1_sequence", "kl/k3_sequence", "ref/logp_mean", "sampler/k3", "policy/entropy"} <= record.names
    diagnosis = examine(record)
    gaps = {gap for gap in diagnosis.unchecked.values() if not gap.endswith("steps with its metrics, not 3")}
    completions = {"completions", "completions, sampler_logprobs", "completions, loss masks"}
    assert gaps <= completions | {"evaluations", "settings.loss_type, settings.verifier"}
    assert not diagnosis.failed(["step-zero-kl", "sampler-mismatch", "huge-values", "negative-k1"])


def test_the_loop_refuses_what_it_cannot_use():
    with pytest.raises(errors.ConfigError, match="no reference"):
        trained(steps=1, ref_model=None)
    with pytest.raises(errors.DataError, match="no prompts"):
        trained(steps=1, prompts=[])
    for reward in (lambda prompt, completion: float("nan"), lambda prompt, completion: 1 / 0):
        with pytest.raises(errors.RewardError, match=re.escape("1+1=")):
            trained(steps=1, reward=reward)


def test_a_steps_line_reads_as_documented(caplog):
    metrics = {"kl_penalty": 0.00123, "reward": 0.5, "length/mean": 4.0, "loss": 0.12341, "grad_norm": 0.5678}
    expected = "Step 1 | Loss: 0.1234 | Grad norm: 0.5678 | Reward: 0.5000 | KL penalty: 0.0012"
    with caplog.at_level(logging.INFO, logger="klamp.training.loop"):
        assert log_train(1, metrics) == expected
    assert caplog.messages == [expected]
    assert log_train(7, {"loss": 1.0}) == "Step 7 | Loss: 1.0000"
    assert log_train(8, {"loss": -1e-6, "kl_penalty": -4e-5}) == "Step 8 | Loss: 0.0000 | KL penalty: 0.0000"
    assert log_train(9, {"loss": float("nan"), "kl_penalty": -6e-5}) == "Step 9 | Loss: nan | KL penalty: -0.0001"
