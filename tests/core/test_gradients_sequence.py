"""Sequences: the future terms, the exact remedies, prefix products off-policy, and what the local losses leave out."""

import math

import pytest
import torch
from tests.core.test_gradients import VALUES, penalty

from klamp.core.gradients import kl_penalty
from klamp.core.term import KLTerm
from klamp.errors import ConfigError
from klamp.verify.oracle import examine, expected, local_kl, reverse_kl
from klamp.verify.worlds import random_chain


def chain_of(seed, *, sampler="policy"):
    return random_chain(seed, vocab=3, length=4, sampler=sampler)


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize(
    ("sampler", "horizon", "gradient", "name"),
    [
        *((sampler, "sequence", name, name) for sampler in ("policy", "other") for name in ("reverse", "forward")),
        ("policy", "token", "reverse", "local"),
        ("policy", "token", "forward", "local_forward"),
        ("other", "token", "reverse", "local_sampled"),
        ("other", "token", "forward", "local_sampled_forward"),
    ],
)
def test_which_gradient_flows_over_sequences_whoever_sampled(sampler, horizon, value, gradient, name):
    choices = {"value": value, "gradient": gradient, "horizon": horizon, "corrected": sampler == "other"}
    report = examine(chain_of(0, sampler=sampler), penalty(**choices))
    assert report.follows.is_exactly(name)
    if value in ("k1", "k3") and (horizon, sampler) != ("token", "other"):
        assert report.value_bias == pytest.approx(0.0, abs=1e-12)


def test_off_policy_the_token_ratio_values_the_samplers_prefixes():
    chain = chain_of(4, sampler="other")
    value = expected(chain, penalty(value="k3", horizon="token", corrected=True))
    assert value.item() == pytest.approx(local_kl(chain, prefixes="sampler").item(), abs=1e-13)
    assert abs((value - reverse_kl(chain)).item()) > 0.05


def test_own_with_the_sequence_horizon_is_refused():
    mask = torch.ones(1, 2, dtype=torch.bool)
    with pytest.raises(ConfigError, match="own"):
        kl_penalty(torch.zeros(1, 2), torch.zeros(1, 2), mask, gradient="own", horizon="sequence")
    with pytest.raises(ConfigError, match="the exact forward KL has no sequence horizon"):
        KLTerm(value="exact", gradient="forward", horizon="sequence")


def random_tokens(seed, rows=3, tokens=5):
    generator = torch.Generator().manual_seed(seed)
    policy, ref, behavior = (-3 * torch.rand(rows, tokens, generator=generator, dtype=torch.float64) for _ in range(3))
    mask = torch.rand(rows, tokens, generator=generator) > 0.3
    mask[0] = True
    return policy.requires_grad_(True), ref, behavior, mask


def loop_coefficients(policy, ref, behavior, mask, *, value, gradient):
    """The coefficients on grad log policy_t, written as the sums in the text."""
    slopes = torch.zeros_like(policy)
    for n in range(len(policy)):
        kept = [t for t in range(policy.shape[1]) if mask[n, t]]
        for i, t in enumerate(kept):
            d = [(policy - ref)[n, j].item() for j in kept]
            rho = [(policy - behavior)[n, kept[: k + 1]].sum().exp().item() for k in range(len(kept))]
            if gradient == "forward":
                slopes[n, t] = rho[i] - (ref - behavior)[n, kept[: i + 1]].sum().exp().item()
                continue
            future = [math.expm1(-x) + x if value == "k3" else x for x in d]
            slopes[n, t] = rho[i] * d[i] + sum(rho[k] * future[k] for k in range(i + 1, len(kept)))
    return slopes


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("gradient", ["reverse", "forward"])
@pytest.mark.parametrize("corrected", [False, True])
def test_sequence_coefficients_equal_a_plain_double_loop_over_the_unmasked_tokens(value, gradient, corrected):
    policy, ref, behavior, mask = random_tokens(13)
    sampler = behavior if corrected else policy.detach()
    choices = {"value": value, "gradient": gradient, "horizon": "sequence"}
    result = kl_penalty(policy, ref, mask, behavior_logprobs=behavior if corrected else None, **choices)
    (slopes,) = torch.autograd.grad(result.sum(), policy)
    wanted = loop_coefficients(policy.detach(), ref, sampler, mask, value=value, gradient=gradient)
    assert torch.allclose(slopes, wanted, rtol=1e-12, atol=1e-12)
