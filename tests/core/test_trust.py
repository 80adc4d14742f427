"""The trust region to the sampler: by hand, and by enumeration of what it follows; what it cuts is counted."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from tests.batches import changed, flat_batch, objective_of

from klamp.config import KLConfig, LossConfig, build_objective
from klamp.core.objective import grpo_loss
from klamp.core.surrogates import TrustRegion
from klamp.core.term import KLTerm
from klamp.core.types import Batch
from klamp.errors import ConfigError, KLWarning

SUM = {"surrogate": "score_function", "reduction": "sequence_sum"}


def batch_of(ratios: list[list[float]], advantages: list[float]) -> Batch:
    policy = torch.full((len(ratios), len(ratios[0])), -3.0, dtype=torch.float64, requires_grad=True)
    sampler = (policy - torch.tensor(ratios, dtype=torch.float64).log()).detach()
    mask = torch.ones(policy.shape, dtype=torch.bool)
    return flat_batch(policy_logprobs=policy, sampler_logprobs=sampler, mask=mask, advantages=torch.tensor(advantages))


def pulls(batch: Batch, region: TrustRegion) -> tuple[list[list[float]], dict[str, float]]:
    found = grpo_loss(batch, objective_of(**SUM, trust=region))
    slope = -len(batch.mask) * torch.autograd.grad(found.loss, batch.policy_logprobs)[0]
    return slope.tolist(), {name.removeprefix("sampler/"): float(x) for name, x in found.metrics.items()}


@pytest.mark.parametrize(
    ("mode", "expected", "cut"),
    [
        ("token_truncate", [[2.0, 1.5], [0.5, 1.0]], 2 / 4),
        ("token_mask", [[0.0, 1.5], [0.0, 1.0]], 2 / 4),
        ("sequence_truncate", [[2.0, 2.0], [0.5, 0.5]], 1.0),
        ("sequence_mask", [[0.0, 0.0], [0.0, 0.0]], 1.0),
    ],
)
def test_each_mode_by_hand(mode, expected, cut):
    batch = batch_of([[4.0, 1.5], [0.25, 1.0]], [1.0, 1.0])
    found, told = pulls(batch, TrustRegion(mode=mode, low=0.5, high=2.0))
    assert found == [pytest.approx(row) for row in expected]
    assert told["tokens_cut"] == told["advantage_cut"] == pytest.approx(cut)
    assert told["sequences_cut"] == (1.0 if mode == "sequence_mask" else 0.0)


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask"])
def test_what_is_at_a_bound_is_within_it(mode):
    half = math.log(0.5)
    policy = torch.tensor([[half, 0.0]], dtype=torch.float64, requires_grad=True)
    batch = changed(batch_of([[1.0, 1.0]], [1.0]), policy_logprobs=policy, sampler_logprobs=policy.detach().flip(-1))
    found, told = pulls(batch, TrustRegion(mode=mode, low=0.5, high=2.0))
    assert found == [[0.5, 2.0]] and told["tokens_cut"] == told["advantage_cut"] == 0.0
    far = changed(batch, sampler_logprobs=torch.zeros_like(policy))
    for advantage, threshold in ((-1.0, -half / 2), (0.0, 0.1)):
        dropped = changed(far, advantages=torch.tensor([advantage]))
        assert pulls(dropped, TrustRegion(threshold=threshold))[1]["tokens_cut"] == 0.0


def test_deepseek_s_mask_drops_what_is_bad_and_was_left():
    """The second is bad and far; the first is good, the third near, and they stay as they are."""
    ratios = [[0.25, 0.25], [0.25, 0.25], [0.9, 0.9]]
    found, told = pulls(batch_of(ratios, [2.0, -1.0, -1.0]), TrustRegion(threshold=0.5))
    assert found == [[2.0, 2.0], [0.0, 0.0], [-1.0, -1.0]]
    assert told["sequences_cut"] == told["tokens_cut"] == pytest.approx(1 / 3)
    assert told["advantage_cut"] == pytest.approx(1 / 4)
    per_token = replace(
        batch_of(ratios, [0.0, 0.0, 0.0]), advantages=torch.tensor([[2.0, 2.0], [-3.0, 1.0], [-1.0, -1.0]])
    )
    assert pulls(per_token, TrustRegion(threshold=0.5))[0][1] == [0.0, 0.0]


def test_unbounded_the_weighted_gradient_is_that_of_the_old_policy_and_each_bound_changes_it():
    """Enumeration of two tokens of three words: the sequence's weight is exact, the token's leaves prefixes out."""
    torch.manual_seed(0)
    policy = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    sampler, reward = torch.randn(4, 3, dtype=torch.float64).log_softmax(-1), torch.randn(9, dtype=torch.float64)
    first, second = torch.arange(9) // 3, torch.arange(9) % 3

    def of(table: torch.Tensor) -> torch.Tensor:
        return torch.stack([table[0][first], table[1 + first, second]], -1)

    def expected(region: TrustRegion) -> torch.Tensor:
        logprobs, drawn = of(policy.log_softmax(-1)), of(sampler)
        batch = flat_batch(
            policy_logprobs=logprobs,
            sampler_logprobs=drawn,
            mask=torch.ones(9, 2, dtype=torch.bool),
            advantages=9 * drawn.sum(-1).exp() * reward,
        )
        return torch.autograd.grad(grpo_loss(batch, objective_of(**SUM, trust=region)).loss, policy)[0]

    truth = -torch.autograd.grad((of(policy.log_softmax(-1)).sum(-1).exp() * reward).sum(), policy)[0]
    torch.testing.assert_close(expected(TrustRegion(mode="sequence_truncate", high=None)), truth, rtol=0, atol=1e-14)
    for region in (
        TrustRegion(mode="token_truncate", high=None),
        TrustRegion(mode="sequence_truncate", high=1.2),
        TrustRegion(mode="sequence_mask", high=1.2),
    ):
        assert (expected(region) - truth).norm() > 0.05


@pytest.mark.parametrize("surrogate", ["score_function", "cispo", "ppo_clip"])
@pytest.mark.parametrize("mode", ["token_mask", "sequence_mask"])
def test_a_mask_drops_no_kl_in_the_advantage(mode, surrogate):
    """Enumeration of two tokens of four words: the KL's gradient is exact at the sampler's prefixes."""
    torch.manual_seed(1)
    policy = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    ref = torch.randn(5, 4, dtype=torch.float64).log_softmax(-1)
    sampler = (policy.detach() + torch.randn(5, 4, dtype=torch.float64)).log_softmax(-1)
    first, second = torch.arange(16) // 4, torch.arange(16) % 4

    def of(table: torch.Tensor) -> torch.Tensor:
        return torch.stack([table[0][first], table[1 + first, second]], -1)

    logprobs = policy.log_softmax(-1)
    kl = (logprobs.exp() * (logprobs - ref)).sum(-1)
    truth = torch.autograd.grad(kl[0] + (sampler[0].exp() * kl[1:]).sum(), policy)[0]
    pulled = torch.zeros_like(policy)
    cut = 0.0
    for row in range(16):
        batch = flat_batch(
            policy_logprobs=of(policy.log_softmax(-1))[row : row + 1],
            ref_logprobs=of(ref)[row : row + 1],
            sampler_logprobs=of(sampler)[row : row + 1],
            mask=torch.ones(1, 2, dtype=torch.bool),
            advantages=torch.zeros(1, dtype=torch.float64),
        )
        kl_term = KLTerm(value="k1", placement="advantage")
        trust = TrustRegion(mode=mode, low=0.5, high=2.0)
        choices = {"surrogate": surrogate, "reduction": "sequence_sum", "beta": 1.0, "kl": kl_term, "trust": trust}
        output = grpo_loss(batch, objective_of(**choices))
        pulled += of(sampler)[row].sum().exp() * torch.autograd.grad(output.loss, policy)[0]
        cut += output.metrics["sampler/tokens_cut"].item() / 16
    assert cut > 0.2
    torch.testing.assert_close(pulled, truth, rtol=0, atol=1e-12)


def test_the_sampler_that_is_the_policy_changes_nothing_and_the_kl_keeps_its_own_weights():
    batch = batch_of([[1.0, 1.0], [1.0, 1.0]], [1.0, -1.0])
    region = TrustRegion(mode="sequence_mask", low=0.5, high=2.0, threshold=0.1)
    found, told = pulls(batch, region)
    assert found == [[1.0, 1.0], [-1.0, -1.0]] and told["tokens_cut"] == told["sequences_cut"] == 0
    far = changed(batch_of([[9.0, 9.0], [9.0, 9.0]], [1.0, -1.0]), ref_logprobs=torch.full((2, 2), -4.0))
    losses = [
        grpo_loss(far, objective_of(**SUM, beta=1.0, trust=t)).metrics["train/kl_penalty"]
        for t in (region, TrustRegion())
    ]
    assert losses[0] == losses[1] > 0


def test_what_cannot_work_is_refused():
    with pytest.raises(ConfigError, match="bounds of the ratio to the sampler cross"):
        LossConfig(vllm_importance_sampling_mode="token_mask", vllm_importance_sampling_clip_min=3.0)
    bare = changed(batch_of([[1.0]], [1.0]), sampler_logprobs=None)
    with pytest.raises(ConfigError, match="a trust region needs the sampler's log-probabilities"):
        grpo_loss(bare, objective_of(trust=TrustRegion(threshold=1.0)))
    with pytest.warns(KLWarning, match="needs vllm_importance_sampling_mode"):
        LossConfig(vllm_importance_sampling_clip_max=2.0)
    loss = LossConfig(vllm_importance_sampling_mode="token_mask", off_policy_mask_threshold=0.25)
    region = TrustRegion(mode="token_mask", threshold=0.25)
    assert build_objective(KLConfig(), loss, max_length=4).trust == region and not TrustRegion().is_set
