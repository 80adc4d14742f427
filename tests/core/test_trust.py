"""The trust region to the sampler: by hand, and by enumeration of what it follows; what it cuts is counted."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.batches import changed, flat_batch, objective_of, read, rows_of

from klamp.config import KLConfig, LossConfig, build_objective
from klamp.core.estimators import exact_kl
from klamp.core.objective import grpo_loss
from klamp.core.surrogates import TrustRegion, trm_bound
from klamp.core.term import KLTerm
from klamp.core.types import Batch, Scored
from klamp.errors import ConfigError, KLWarning
from klamp.verify.worlds import Chain, enumerate_outcomes, random_chain

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
    advantages = torch.tensor([[2.0, 2.0], [-3.0, 1.0], [-1.0, -1.0]])
    per_token = replace(batch_of(ratios, [0.0, 0.0, 0.0]), advantages=advantages)
    assert pulls(per_token, TrustRegion(threshold=0.5))[0][1] == [0.0, 0.0]


def of(table: torch.Tensor) -> torch.Tensor:
    """The log-probabilities of every completion of two tokens; row 1 + i of the table is for what follows token i."""
    first, second = torch.cartesian_prod(*[torch.arange(table.shape[1])] * 2).T
    return torch.stack([table[0][first], table[1 + first, second]], -1)


def test_unbounded_the_weighted_gradient_is_that_of_the_old_policy_and_each_bound_changes_it():
    """Enumeration of two tokens of three words: the sequence's weight is exact, the token's leaves prefixes out."""
    torch.manual_seed(0)
    policy = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    sampler, reward = torch.randn(4, 3, dtype=torch.float64).log_softmax(-1), torch.randn(9, dtype=torch.float64)

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


WEIGHT = {"mode": "token_truncate", "high": None}


@pytest.mark.parametrize("surrogate", ["score_function", "cispo", "ppo_clip"])
@pytest.mark.parametrize(
    "region",
    [
        {"mode": "token_mask", "low": 0.5, "high": 2.0},
        {"mode": "sequence_mask", "low": 0.5, "high": 2.0},
        WEIGHT | {"rollout_rs": "seq_max_k3", "rollout_rs_threshold": 0.2},
        WEIGHT | {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": 1.2},
        WEIGHT | {"dppo_mask": "dppo_tv", "dppo_mask_low": 0.05, "dppo_mask_high": 0.02},
        WEIGHT | {"dppo_mask": "dppo_kl", "dppo_mask_low": 0.01, "dppo_mask_high": 0.01},
    ],
)
def test_a_mask_drops_no_kl_in_the_advantage(region, surrogate):
    """Enumeration of two tokens of four words: the KL's gradient is exact at the sampler's prefixes."""
    torch.manual_seed(1)
    policy = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    ref = torch.randn(5, 4, dtype=torch.float64).log_softmax(-1)
    sampler = (policy.detach() + torch.randn(5, 4, dtype=torch.float64)).log_softmax(-1)
    logprobs = policy.log_softmax(-1)
    kl = (logprobs.exp() * (logprobs - ref)).sum(-1)
    truth = torch.autograd.grad(kl[0] + (sampler[0].exp() * kl[1:]).sum(), policy, retain_graph=True)[0]
    pulled, cut = torch.zeros_like(policy), 0.0
    choices = {"surrogate": surrogate, "reduction": "sequence_sum", "trust": TrustRegion(**region)}
    objectives = [objective_of(beta=beta, kl=KLTerm(value="k1", placement="advantage"), **choices) for beta in (1, 0)]
    whole = flat_batch(
        policy_logprobs=of(logprobs),
        ref_logprobs=of(ref),
        sampler_logprobs=of(sampler),
        mask=torch.ones(16, 2, dtype=torch.bool),
        advantages=torch.randn(16, dtype=torch.float64),
    )
    for row in range(16):
        output, without = (grpo_loss(rows_of(whole, [row]), objective) for objective in objectives)
        slope = torch.autograd.grad(output.loss - without.loss, policy, retain_graph=True)[0]
        pulled += of(sampler)[row].sum().exp() * slope
        cut += output.metrics["sampler/tokens_cut"].item() / 16
    assert cut > 0.1
    torch.testing.assert_close(pulled, truth, rtol=0, atol=1e-12)


def test_the_sampler_that_is_the_policy_changes_nothing_and_the_kl_keeps_its_own_weights():
    batch = batch_of([[1.0, 1.0], [1.0, 1.0]], [1.0, -1.0])
    region = TrustRegion(mode="sequence_mask", low=0.5, high=2.0, threshold=0.1)
    found, told = pulls(batch, region)
    assert found == [[1.0, 1.0], [-1.0, -1.0]] and told["tokens_cut"] == told["sequences_cut"] == 0
    far = changed(batch_of([[9.0, 9.0], [9.0, 9.0]], [1.0, -1.0]), ref_logprobs=torch.full((2, 2), -4.0))
    cut, whole = (grpo_loss(far, objective_of(**SUM, beta=1.0, trust=t)).metrics for t in (region, TrustRegion()))
    assert cut["train/kl_penalty"] == whole["train/kl_penalty"] > 0


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
    for options in ({"rollout_rs": "seq_max_k3"}, {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": 1.0}):
        with pytest.raises(ConfigError, match="has no threshold that it can keep to"):
            LossConfig(**options)
    with pytest.raises(ConfigError, match=r"seq_max_exact needs KL\(sampler"):
        pulls(batch_of([[1.0]], [1.0]), TrustRegion(rollout_rs="seq_max_exact", rollout_rs_threshold=0.1))
    with pytest.warns(KLWarning, match="needs dppo_mask"):
        LossConfig(dppo_mask_low=0.1)


@pytest.mark.parametrize(
    ("region", "expected"),
    [  # the policy's probabilities are exp(-3)
        ({"rollout_rs": "seq_max_k3", "rollout_rs_threshold": 0.05}, [[1, 1], [0, 0], [0, 0]]),
        ({"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": 1.2}, [[1, 1], [0, 0], [0, 0]]),
        ({"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": 1.05}, [[0, 0], [0, 0], [0, 0]]),
        ({"dppo_mask": "dppo_tv", "dppo_mask_low": 0.02, "dppo_mask_high": 0.01}, [[0, 1], [0, -1], [1, 1]]),
        ({"dppo_mask": "dppo_tv", "dppo_mask_low": 0.04, "dppo_mask_high": 0.02}, [[1, 1], [-1, -1], [1, 1]]),
        ({"dppo_mask": "dppo_kl", "dppo_mask_low": 0.005, "dppo_mask_high": 0.001}, [[0, 1], [0, -1], [1, 1]]),
        ({"dppo_mask": "dppo_kl", "dppo_mask_low": 0.02, "dppo_mask_high": 0.02}, [[1, 1], [-1, -1], [1, 1]]),
    ],
)
def test_masks_of_the_current_policy_by_hand(region, expected):
    ratios, advantages = [[1.3, 0.9], [0.6, 1.0], [0.6, 1.0]], [1.0, -1.0, 1.0]
    batch = batch_of(ratios, advantages)
    stale = replace(batch, old_logprobs=read(batch, "sampler_logprobs"))  # the old policy is the sampler itself
    for case in (batch, stale, replace(batch, advantages=torch.tensor(advantages)[:, None].expand(3, 2))):
        slopes, metrics = pulls(case, TrustRegion(**region))
        assert slopes == expected
        assert metrics["tokens_cut"] == pytest.approx(sum(x == 0 for row in expected for x in row) / 6)
    w = torch.tensor(ratios, dtype=torch.float64)
    for name, x in {"ess": w.flatten(), "ess_sequence": w.prod(-1)}.items():
        assert metrics[name] == pytest.approx(float(x.sum() ** 2 / x.square().sum() / len(x)))


def test_prime_rl_s_default_and_a_binary_kl_by_a_formula_of_its_own():
    """prime-rl (src/prime_rl/trainer/rl/loss.py, 559b447): -A p / q, up to a change of 0.2 in A's direction."""
    generator = np.random.default_rng(0)
    (p, q), a = generator.uniform(0.02, 0.98, (2, 400)), generator.normal(size=400)
    two, of_policy = np.stack([q, 1 - q]), np.stack([p, 1 - p])
    distances = {"dppo_tv": np.abs(two - of_policy).sum(0) / 2, "dppo_kl": (two * np.log(two / of_policy)).sum(0)}
    batch = replace(batch_of((p / q)[:, None].tolist(), a.tolist()), advantages=torch.tensor(a))
    logprobs, sampler = (torch.tensor(np.log(x))[:, None] for x in (p, q))
    batch = changed(batch, policy_logprobs=logprobs.requires_grad_(), sampler_logprobs=sampler, old_logprobs=sampler)
    for name, distance in distances.items():
        keeps = ~((distance > 0.2) & (np.sign(p - q) == np.sign(a)))
        unclipped = {"surrogate": "cispo", "clip_low": 1.0, "clip_high": 1e9, "reduction": "sequence_sum"}
        loss = grpo_loss(batch, objective_of(**unclipped, trust=TrustRegion(dppo_mask=name))).loss
        slope = -400 * torch.autograd.grad(loss, logprobs)[0][:, 0].numpy()
        assert 0 < keeps.mean() < 1 and np.abs(slope - keeps * a * p / q).max() < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
def test_a_certain_token_and_thirty_nats_drop_what_moved_and_keep_numbers_finite(name, dtype):
    policy = torch.tensor([[0.0, 0.0, -30.0, -0.1], [0.0, -1.0, -1.0, -1.0]], dtype=dtype, requires_grad=True)
    sampler = torch.tensor([[0.0, -30.0, 0.0, -0.1], [-0.1, -1.0, -1.0, torch.inf]], dtype=dtype)
    mask = torch.tensor([[True] * 4, [True] * 3 + [False]])
    advantages = torch.tensor([1.0, -1.0])
    batch = flat_batch(policy_logprobs=policy, sampler_logprobs=sampler, mask=mask, advantages=advantages)
    region = TrustRegion(dppo_mask=name, rollout_rs="seq_max_k3", rollout_rs_threshold=1e30)
    slopes, metrics = pulls(batch, region)
    assert [[x != 0 for x in row] for row in slopes] == [[True, False, True, True], [True, True, True, False]]
    assert all(math.isfinite(x) for x in metrics.values()) and metrics["ess"] > 0


def worlds(lag: float, count: int):
    """Every completion of three tokens out of three words, the exact KL at its prefixes, and a reward in [0, 1]."""
    for seed in range(count):
        drawn = random_chain(seed, vocab=3, length=3, eos=None)
        sampler = drawn.policy_logits.detach()
        y = enumerate_outcomes(Chain(sampler + lag * drawn.ref_logits, sampler, sampler, length=3))
        kl = exact_kl(y.policy_logits, y.ref_logits, direction="forward").detach()
        yield y, kl, torch.rand(len(y.probs), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("name", ["seq_max_exact", "seq_max_k3", "seq_mean_k1"])
def test_with_the_whole_product_a_mask_follows_the_reward_of_what_it_keeps(name):
    """The gradient of E_policy[M R] at fixed M: neither that of E_policy[R], nor that of the mean over what is kept."""
    dropped, threshold = 0.0, 1.1 if name == "seq_mean_k1" else 0.1
    region = TrustRegion(mode="sequence_truncate", high=None, rollout_rs=name, rollout_rs_threshold=threshold)
    for y, kl, reward in worlds(0.5, 5):
        delta = (y.policy_logprobs - y.sampler_logprobs).detach()
        far = {
            "seq_max_exact": kl.amax(-1),
            "seq_max_k3": (delta.exp() - 1 - delta).amax(-1),
            "seq_mean_k1": delta.mean(-1).abs().exp(),
        }[name]
        batch = Batch(
            policy_logprobs=y.policy_logprobs,
            mask=y.mask,
            advantages=len(reward) * y.probs * reward,
            anchors={"sampler": Scored(y.sampler_logprobs, forward_kl=kl)},
        )
        output = grpo_loss(batch, objective_of(**SUM, trust=region))
        found = -torch.autograd.grad(output.loss, y.policy_logprobs, retain_graph=True)[0]
        kept = (y.policy_logprobs.sum(-1).exp() * (far <= threshold) * reward).sum()
        truth = torch.autograd.grad(kept, y.policy_logprobs, retain_graph=True)[0]
        torch.testing.assert_close(found, truth, rtol=0, atol=1e-15)
        dropped += float(output.metrics["sampler/sequences_cut"]) / 5
    assert 0.2 < dropped < 0.9


def test_trm_s_bound_holds_over_every_prefix_and_is_that_of_the_paper():
    for lag in (0.1, 0.5, 2.0):
        for y, kl, reward in worlds(lag, 8):
            p, w, t = y.policy_logprobs.sum(-1).exp().detach(), y.weight.detach(), 3
            error = ((p - y.probs) @ reward - y.probs @ ((w - 1).sum(-1) * reward)).abs()
            largest, whole = kl.max(), y.probs @ kl.sum(-1)
            bounds = [t * (t - 1) * largest, 4 / 3 * t**1.5 * largest, 2 * t * (largest * whole).sqrt()]
            assert error <= min(bounds)
            rows = torch.multinomial(y.probs, 4000, replacement=True, generator=torch.Generator().manual_seed(0))
            assert trm_bound(kl[rows], y.mask[rows]) <= 1.1 * min(bounds)
    kl = torch.full((1, 4096), 1e-4, dtype=torch.float64)
    assert float(trm_bound(kl, kl > 0)) == pytest.approx(4 / 3 * 4096**1.5 * 1e-4)
    assert float(trm_bound(kl[:, :2], kl[:, :2] > 0)) == pytest.approx(2 * 1 * 1e-4)
