"""Tokens left out of the KL: the gradient, over every completion, of the functional over the kept tokens that is named.

By hand here, from the tables of the chain: the generalised KL over the kept tokens v at each prefix s,
D(s) = sum_v (p log(p / q) - p + q), in the mean over the policy's prefixes; horizon `token` holds their P(s) fixed.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from klamp.config import KLConfig
from klamp.verify.one_step import Scene, examine_config
from klamp.verify.oracle import gradient_of
from klamp.verify.worlds import Chain, prefix_probs, random_chain

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("shapes_unchecked"),
    pytest.mark.filterwarnings("ignore::klamp.errors.KLWarning"),
]

EXCLUDED: dict[str, dict[str, Any]] = {
    "the end": {"kl_exclude_tokens": (0,)},
    "two of three": {"kl_exclude_tokens": (0, 2)},
}
IN_ADVANTAGE = {"kl_estimator": "k1", "kl_placement": "advantage"}
SEQUENCE = {"kl_horizon": "sequence"}


def kept(chain: Chain, kl: KLConfig) -> Tensor:
    """Which tokens carry the KL. [vocab]"""
    return torch.tensor([v not in kl.kl_exclude_tokens for v in range(chain.vocab)])


def divergence(chain: Chain, kl: KLConfig, *, forward: bool = False) -> Tensor:
    p, q = chain.logprobs("policy"), chain.logprobs("ref")
    first, second = (q, p) if forward else (p, q)
    each = first.exp() * (first - second) - first.exp() + second.exp()
    return torch.where(kept(chain, kl), each, 0.0).sum(-1)


def worlds(sampler: Any = "policy") -> list[Scene]:
    """With groups of two, and of three in a shorter world."""
    return [Scene(chain=random_chain(n, length=n, sampler=sampler), group_size=5 - n) for n in (2, 3)]


@pytest.mark.parametrize("excluded", EXCLUDED)
@pytest.mark.parametrize(
    "choices",
    [
        {},
        {"kl_estimator": "k1"},
        {"kl_estimator": "k2", "kl_gradient": "own"},
        IN_ADVANTAGE,
        SEQUENCE,
        {"kl_estimator": "k1", **SEQUENCE},
        {"kl_estimator": "k2", **SEQUENCE},
        {**IN_ADVANTAGE, **SEQUENCE},
        {"kl_gradient": "forward"},
        {"kl_gradient": "own"},
    ],
    ids=str,
)
def test_the_gradient_is_that_of_the_generalised_kl_over_the_kept_tokens(choices: dict, excluded: str) -> None:
    kl = KLConfig(**choices, **EXCLUDED[excluded])
    forward = kl.kl_gradient == "forward" or (kl.kl_estimator, kl.kl_gradient) == ("k3", "own")
    for scene in worlds():
        reached = prefix_probs(scene.chain, "policy")
        held = reached if kl.kl_horizon == "sequence" else reached.detach()
        charged = (held * divergence(scene.chain, kl, forward=forward)).sum()
        pull = examine_config(kl, scene=scene).kl
        torch.testing.assert_close(pull.gradient, gradient_of(charged, scene.chain), rtol=0, atol=1e-12)
        if kl.kl_estimator == "k3":
            value = (reached * divergence(scene.chain, kl)).sum().item()
            assert pull.value == pytest.approx(value, abs=1e-12)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_off_policy_the_prefix_weights_give_the_same(estimator: str) -> None:
    kl = KLConfig(kl_estimator=estimator, kl_off_policy="sequence", kl_exclude_tokens=(1,), **SEQUENCE)
    for scene in worlds("other"):
        charged = (prefix_probs(scene.chain, "policy") * divergence(scene.chain, kl)).sum()
        found = examine_config(kl, scene=scene).kl.gradient
        torch.testing.assert_close(found, gradient_of(charged, scene.chain), rtol=0, atol=1e-12)


@pytest.mark.parametrize("excluded", EXCLUDED)
def test_the_exact_kl_token_by_token_counts_whole_positions(excluded: str) -> None:
    """The KL over the whole vocabulary where a kept token was drawn; how often that is, is held fixed."""
    kl = KLConfig(kl_estimator="exact", **EXCLUDED[excluded])
    for scene in worlds():
        chain = scene.chain
        p = chain.logprobs("policy")
        share = torch.where(kept(chain, kl), p.exp(), 0.0).sum(-1) * prefix_probs(chain, "policy")
        charged = (share.detach() * divergence(chain, KLConfig())).sum()
        pull = examine_config(kl, scene=scene).kl
        torch.testing.assert_close(pull.gradient, gradient_of(charged, chain), rtol=0, atol=1e-12)
        assert pull.value == pytest.approx(charged.item(), abs=1e-12)


def test_k1_as_a_loss_moves_the_mass_of_the_kept_tokens() -> None:
    """Its gradient is not null any more; the caution says so."""
    kl = KLConfig(kl_estimator="k1", kl_gradient="own", kl_exclude_tokens=(1,))
    assert any("makes the kept ones less likely" in text for text in kl.cautions())
    for scene in worlds():
        chain = scene.chain
        mass = torch.where(kept(chain, kl), chain.logprobs("policy").exp(), 0.0).sum(-1)
        charged = (prefix_probs(chain, "policy").detach() * mass).sum()
        found = examine_config(kl, scene=scene).kl.gradient
        torch.testing.assert_close(found, gradient_of(charged, chain), rtol=0, atol=1e-12)
