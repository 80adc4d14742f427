"""compute_grpo_kl_loss: klamp's own loss on ragged datums, whatever the configuration."""

import math
from dataclasses import replace

import pytest
import torch
from tests.hosts.tinker.fakes import column, fake_batch, slopes

from klamp import KLConfig
from klamp.errors import ConfigError, NonFiniteError, ShapeError
from klamp.tinker import compute_grpo_kl_loss

NAN, INF = math.nan, math.inf


def test_the_plain_sum_at_coefficient_0_is_the_built_in_ppo():
    """-sum(min(ratio A, clip(ratio, .8, 1.2) A)), as the service's documentation prints it."""
    data, policies = fake_batch()
    advantages, sampler = column(data, "advantages"), column(data, "logprobs")
    ratio = (torch.nn.utils.rnn.pad_sequence(policies, batch_first=True) - sampler).exp()
    for bound in (0.2, 0.05):
        expected = -torch.minimum(ratio * advantages, ratio.clamp(1 - bound, 1 + bound) * advantages).sum()
        loss, metrics = compute_grpo_kl_loss(data, policies, 0.0, bound, normalizer="token_sum")
        assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
        given = {"retain_graph": True, "allow_unused": False}
        for found, right in zip(*(torch.autograd.grad(x, policies, **given) for x in (loss, expected)), strict=True):
            torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-15)
        assert metrics["train/denominator"] == 1
    mean, metrics = compute_grpo_kl_loss(data, policies, 0.0, 0.05)
    assert metrics["train/denominator"] == 12 and mean.item() == pytest.approx(loss.item() / 12, rel=1e-12)


def test_a_datum_without_a_token_to_train_on_gets_zeros_and_no_nan():
    data, policies = fake_batch()
    rows = data[1].loss_fn_inputs
    rows |= {"mask": torch.zeros_like(rows["mask"]), "logprobs": torch.full_like(rows["logprobs"], NAN)}
    loss, metrics = compute_grpo_kl_loss(data, policies, kl_coef=0.5)
    loss.backward()
    assert torch.equal(policies[1].grad, torch.zeros_like(policies[1]))
    assert all(policy.grad is not None and bool(policy.grad.isfinite().all()) for policy in policies)
    assert metrics["train/denominator"] == 10


def test_what_stands_where_the_mask_is_0_does_not_matter():
    data, policies = fake_batch()
    before, _ = compute_grpo_kl_loss(data, policies, kl_coef=0.5)
    for datum in data:
        outside = datum.loss_fn_inputs["mask"] == 0
        for name in ("advantages", "logprobs", "ref_logprobs"):
            datum.loss_fn_inputs[name] = datum.loss_fn_inputs[name].masked_fill(outside, NAN)
    with torch.no_grad():
        for datum, policy in zip(data, policies, strict=True):
            policy[datum.loss_fn_inputs["mask"] == 0] = -INF
    after, _ = compute_grpo_kl_loss(data, policies, kl_coef=0.5)
    assert after.item() == before.item()
    assert bool(slopes(after, policies).isfinite().all())


def test_the_reference_is_watched_at_coefficient_0_where_there_is_one():
    data, policies = fake_batch()
    _, metrics = compute_grpo_kl_loss(data, policies, kl_coef=0.0)
    assert metrics["kl/k3"] > 0
    assert "train/kl_penalty" not in metrics
    assert {type(value) for value in metrics.values()} == {float}


def test_a_gradient_that_overflows_is_refused_and_a_bound_of_the_log_ratio_helps():
    data, policies = fake_batch()
    with torch.no_grad():
        policies[1][-1] = -800.0
    with pytest.raises(NonFiniteError, match="datum 1: the gradient of the loss is not finite"):
        compute_grpo_kl_loss(data, policies, kl=KLConfig(beta=0.1, kl_gradient="forward"))
    loss, metrics = compute_grpo_kl_loss(data, policies, kl=KLConfig(beta=0.1, kl_gradient="reverse"))
    assert bool(loss.isfinite()) and bool(slopes(loss, policies).isfinite().all())
    assert metrics["kl/k3_saturated"] == pytest.approx(1 / 12)
    assert metrics["kl/k3"] == math.inf, "what is measured is not bounded"
    loss, metrics = compute_grpo_kl_loss(data, policies, kl=KLConfig(beta=0.1, kl_max_log_ratio=20))
    assert metrics["kl/k3_saturated"] == 0
    assert bool(slopes(loss, policies).isfinite().all())
    assert metrics["kl/log_ratio_clamped"] == pytest.approx(1 / 12)


def test_a_clip_needs_whole_groups_and_a_reference_length():
    data, policies = fake_batch()
    clipped = KLConfig(beta=0.3, kl_clip_method="hard", kl_clip_threshold=0.1)
    known = replace(clipped, kl_reference_length=5)
    with pytest.raises(ShapeError, match="whole number of groups"):
        compute_grpo_kl_loss(data, policies, kl=known)
    with pytest.raises(ConfigError, match="needs a positive reference length"):
        compute_grpo_kl_loss(data, policies, kl=clipped, group_size=2)
    _, metrics = compute_grpo_kl_loss(data, policies, kl=known, group_size=2)
    assert metrics["kl/budget"] == pytest.approx(0.1 * 5)
