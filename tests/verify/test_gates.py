"""Gates of a clip and tokens left out of the KL: the gradient, over every completion, of the functional that is named.

f is the clip, K a completion's KL, m the KL that decides its clip. By hand here, without klamp's clip:
    the mean of the others    E_others[f(m) + f'(m) (K - m)], whose gradient is E_others[f'(m)] grad KL
    exact, sequence           E[f(X)], X the exact KL of the sampled prefixes, which are held fixed
    exact, group or batch     E[f(mean of the group's X)], likewise
The generalised KL over the kept tokens v at each prefix s is D(s) = sum_v (p log(p / q) - p + q), in the mean over the
policy's prefixes; horizon `token` holds their P(s) fixed.
"""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from klamp.config import KLConfig, LossConfig
from klamp.core.estimators import exact_kl
from klamp.errors import ConfigError
from klamp.verify.one_step import Scene, examine_config
from klamp.verify.oracle import gradient_of, reverse_kl, truths
from klamp.verify.worlds import Chain, enumerate_outcomes, prefix_probs, random_chain

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::klamp.errors.KLWarning"),
]

BUDGET, WIDTH = 0.3, 0.03
AT_BUDGET = {"kl_clip_threshold": BUDGET, "use_per_token_kl_threshold": False}
CLIPS: dict[str, dict[str, Any]] = {
    "hard": {"kl_clip_method": "hard", **AT_BUDGET},
    "soft": {"kl_clip_method": "soft", "kl_clip_temperature": WIDTH, **AT_BUDGET},
}
SAMPLED: dict[str, tuple[dict[str, Any], str]] = {
    "k3": ({}, "local"),
    "k3, sequence": ({"kl_horizon": "sequence"}, "reverse"),
    "k3, forward": ({"kl_gradient": "forward"}, "local_forward"),
    "k2, own": ({"kl_estimator": "k2", "kl_gradient": "own"}, "local"),
    "exact, sequence": ({"kl_estimator": "exact", "kl_horizon": "sequence"}, "reverse"),
    "exact, forward": ({"kl_estimator": "exact", "kl_gradient": "forward"}, "local_forward"),
    "advantage": ({"kl_estimator": "k1", "kl_placement": "advantage"}, "local"),
    "advantage, sequence": ({"kl_estimator": "k1", "kl_placement": "advantage", "kl_horizon": "sequence"}, "reverse"),
    "reward": ({"kl_estimator": "k1", "kl_placement": "reward", "kl_horizon": "sequence"}, "reverse"),
}
WORLDS = [(1, 2), (5, 3)]


def clip(x: Tensor, method: str) -> tuple[Tensor, Tensor]:
    """f and f'."""
    over = x - BUDGET
    if method == "hard":
        return over.clamp(min=0), (over > 0).double()
    return WIDTH * torch.log1p((over / WIDTH).exp()), 1 / (1 + (-over / WIDTH).exp())


def world_of(seed: int, size: int) -> Scene:
    return Scene(chain=random_chain(seed, length=2), group_size=size, whole_batch=True)


def assert_pull(scene: Scene, kl: KLConfig, charged: Tensor, *, value: float | None = None) -> None:
    """The step follows the gradient of what is charged, and has this value."""
    pull = examine_config(kl, scene=scene).kl
    torch.testing.assert_close(pull.gradient, gradient_of(charged, scene.chain), rtol=0, atol=1e-12)
    assert value is None or pull.value == pytest.approx(value, abs=1e-12)


def kl_of_each(scene: Scene, kl: KLConfig) -> Tensor:
    """What a gate reads of each completion, detached: the exact KL of its prefixes, or k3."""
    y = enumerate_outcomes(scene.chain)
    delta = y.policy_logprobs - y.ref_logprobs
    exact = exact_kl(y.policy_logits, y.ref_logits) if kl.kl_estimator == "exact" else (-delta).exp() - 1 + delta
    return torch.where(y.mask, exact, 0.0).sum(-1).detach()


def others(scene: Scene, each: Tensor, method: str) -> tuple[float, float]:
    """E[f'(m)] and E[f(m) - f'(m) m], m the mean of group_size - 1 other completions."""
    probs = enumerate_outcomes(scene.chain).probs.tolist()
    slope = rest = 0.0
    for group in itertools.product(range(len(probs)), repeat=scene.group_size - 1):
        p = math.prod(probs[i] for i in group)
        m = each[list(group)].mean()
        f, g = (x.item() for x in clip(m, method))
        slope, rest = slope + p * g, rest + p * (f - g * m.item())
    return slope, rest


@pytest.mark.parametrize("level", ["group", "batch"])
@pytest.mark.parametrize("method", CLIPS)
@pytest.mark.parametrize("name", SAMPLED)
def test_the_others_gate_a_sampled_kl(name: str, method: str, level: str) -> None:
    """The group is the whole batch here, so that both levels are the mean of its other members."""
    choices, follows = SAMPLED[name]
    for seed, size in WORLDS:
        scene = world_of(seed, size)
        kl = KLConfig(**choices, **CLIPS[method], kl_clip_level=level)
        slope, rest = others(scene, kl_of_each(scene, kl), method)
        assert 0.1 < slope < 0.9, "the gate is open for some and closed for others"
        pull = examine_config(kl, scene=scene).kl
        torch.testing.assert_close(pull.gradient, slope * truths(scene.chain)[follows], rtol=0, atol=1e-12)
        if kl.kl_placement == "loss" and kl.kl_estimator != "k2":
            charged = rest + slope * reverse_kl(scene.chain).item()
            assert pull.value == pytest.approx(charged, abs=1e-12)


@pytest.mark.parametrize("level", ["sequence", "group", "batch"])
@pytest.mark.parametrize("method", CLIPS)
def test_the_exact_kl_of_the_sampled_prefixes_gates_itself(method: str, level: str) -> None:
    for seed, size in WORLDS:
        scene = world_of(seed, size)
        kl = KLConfig(kl_estimator="exact", kl_clip_level=level, **CLIPS[method])
        y = enumerate_outcomes(scene.chain)
        each = torch.where(y.mask, exact_kl(y.policy_logits, y.ref_logits), 0.0).sum(-1)
        charged = torch.zeros((), dtype=torch.float64)
        for group in itertools.product(range(len(y.probs)), repeat=1 if level == "sequence" else size):
            charged = charged + y.probs[list(group)].prod().detach() * clip(each[list(group)].mean(), method)[0]
        assert_pull(scene, kl, charged, value=charged.item())


def test_the_group_mean_as_baseline_keeps_its_share_of_a_clipped_kl_in_the_reward() -> None:
    kl = KLConfig(**SAMPLED["reward"][0], **CLIPS["hard"])
    loss = LossConfig(loss_type="dr_grpo", advantage_baseline="mean")
    scene = world_of(5, 3)
    slope, _ = others(scene, kl_of_each(scene, kl), "hard")
    found = examine_config(kl, loss, scene=scene).kl.gradient
    share = slope * 2 / 3 / scene.chain.length  # dr_grpo divides by the longest length
    torch.testing.assert_close(found, share * truths(scene.chain)["reverse"], rtol=0, atol=1e-12)


def test_alone_only_an_exact_kl_can_be_gated() -> None:
    alone = world_of(0, 1)
    for choices in ({}, {"kl_clip_level": "batch"}, {"kl_estimator": "exact", "kl_horizon": "sequence"}):
        with pytest.raises(ConfigError, match="cannot be gated by a KL of its own tokens") as caught:
            examine_config(KLConfig(**choices, **CLIPS["hard"]), scene=alone)
        assert "two or more completions" in caught.value.fix
    assert examine_config(KLConfig(kl_estimator="exact", **CLIPS["hard"]), scene=alone).gate is not None


def test_without_a_name_the_exact_kl_is_gated_by_itself() -> None:
    assert KLConfig(kl_estimator="exact").build_term().clip_level == "sequence"
    assert KLConfig(kl_estimator="exact", kl_horizon="sequence").build_term().clip_level == "group"


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
        value = (reached * divergence(scene.chain, kl)).sum().item()
        assert_pull(scene, kl, charged, value=value if kl.kl_estimator == "k3" else None)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_off_policy_the_prefix_weights_give_the_same(estimator: str) -> None:
    kl = KLConfig(kl_estimator=estimator, kl_off_policy="sequence", kl_exclude_tokens=(1,), **SEQUENCE)
    for scene in worlds("other"):
        assert_pull(scene, kl, (prefix_probs(scene.chain, "policy") * divergence(scene.chain, kl)).sum())


@pytest.mark.parametrize("excluded", EXCLUDED)
def test_the_exact_kl_token_by_token_counts_whole_positions(excluded: str) -> None:
    """The KL over the whole vocabulary where a kept token was drawn; how often that is, is held fixed."""
    kl = KLConfig(kl_estimator="exact", **EXCLUDED[excluded])
    for scene in worlds():
        chain = scene.chain
        p = chain.logprobs("policy")
        share = torch.where(kept(chain, kl), p.exp(), 0.0).sum(-1) * prefix_probs(chain, "policy")
        charged = (share.detach() * divergence(chain, KLConfig())).sum()
        assert_pull(scene, kl, charged, value=charged.item())


def test_k1_as_a_loss_moves_the_mass_of_the_kept_tokens() -> None:
    """Its gradient is not null any more; the caution says so."""
    kl = KLConfig(kl_estimator="k1", kl_gradient="own", kl_exclude_tokens=(1,))
    assert any("makes the kept ones less likely" in text for text in kl.cautions())
    for scene in worlds():
        chain = scene.chain
        mass = torch.where(kept(chain, kl), chain.logprobs("policy").exp(), 0.0).sum(-1)
        assert_pull(scene, kl, (prefix_probs(chain, "policy").detach() * mass).sum())
