"""Whole steps, enumerated: against sampled steps, against the oracle, and in groups where they matter."""

import itertools
from dataclasses import replace

import pytest
import torch
from tests.batches import changed, flat_batch

from klamp.config import KLConfig, LossConfig
from klamp.core.estimators import exact_kl
from klamp.core.penalty import advantages_with_kl, shifted_advantages, token_penalty
from klamp.core.term import measure, prepare, sequence_gate_kl
from klamp.core.types import Batch
from klamp.errors import ConfigError
from klamp.verify.one_step import Scene, examine_config, scene
from klamp.verify.oracle import examine, reverse_kl
from klamp.verify.worlds import Chain, Outcomes, enumerate_outcomes, random_chain


@pytest.mark.parametrize(
    ("choices", "follows"),
    [
        ({}, "local"),
        ({"kl_gradient": "forward"}, "local_forward"),
        ({"kl_gradient": "own"}, "local_forward"),
        ({"kl_estimator": "k2", "kl_gradient": "own"}, "local"),
        ({"kl_estimator": "k1", "kl_gradient": "own"}, "zero"),
        ({"kl_estimator": "k1", "kl_gradient": "none"}, "zero"),
        ({"kl_horizon": "sequence"}, "reverse"),
        ({"kl_horizon": "sequence", "kl_gradient": "forward"}, "forward"),
        ({"kl_estimator": "exact"}, "local"),
        ({"kl_estimator": "exact", "kl_gradient": "forward"}, "local_forward"),
        ({"kl_estimator": "exact", "kl_horizon": "sequence"}, "reverse"),
        ({"kl_estimator": "k1", "kl_placement": "reward", "kl_horizon": "sequence"}, "reverse"),
        ({"kl_estimator": "k1", "kl_placement": "advantage", "kl_horizon": "sequence"}, "reverse"),
        ({"kl_estimator": "k1", "kl_placement": "advantage", "kl_horizon": "token"}, "local"),
        ({"beta": 0.0}, "zero"),
    ],
)
@pytest.mark.filterwarnings("ignore::klamp.errors.KLWarning")
def test_on_policy_configurations_follow_what_they_should(choices: dict, follows: str) -> None:
    report = examine_config(KLConfig(**choices), scene=scene(1, length=2, rewards="mixed"))
    assert report.kl.follows == (follows, pytest.approx(0.0 if follows == "zero" else 1.0, abs=1e-9))


@pytest.mark.parametrize(
    ("choices", "follows"),
    [
        ({}, "none of these"),
        ({"kl_off_policy": "token"}, "local_sampled"),
        ({"kl_off_policy": "token", "kl_gradient": "forward"}, "local_sampled_forward"),
        ({"kl_horizon": "sequence", "kl_off_policy": "sequence"}, "reverse"),
        ({"kl_estimator": "exact", "kl_horizon": "sequence", "kl_off_policy": "sequence"}, "reverse"),
        ({"kl_horizon": "sequence", "kl_off_policy": "sequence", "kl_max_weight": 0.5}, "none of these"),
    ],
)
def test_off_policy_configurations(choices: dict, follows: str) -> None:
    report = examine_config(KLConfig(**choices), scene=scene(1, length=2, sampler="other"))
    assert report.kl.follows.name == follows


def test_the_value_of_an_unbiased_estimator_is_the_kl_over_completions() -> None:
    world = scene(2, length=2)
    for estimator, unbiased in (("k1", True), ("k3", True), ("exact", True), ("k2", False)):
        pull = examine_config(KLConfig(kl_estimator=estimator), scene=world).kl
        assert (abs(pull.value_bias) < 1e-12) == unbiased
    sampled = examine_config(KLConfig(kl_estimator="k1"), scene=world).kl
    assert sampled.value == pytest.approx(reverse_kl(world.chain).item(), abs=1e-12)


def test_a_group_of_one_agrees_with_the_oracle_itself() -> None:
    """Another route to the same numbers: no groups, no klamp loss; the closed form of the penalty by hand."""
    chain = random_chain(3, length=3)
    world = Scene(chain=chain, group_size=1)
    by_hand = examine(chain, lambda y: (y.policy_logprobs - y.ref_logprobs) ** 2 / 2)
    pull = examine_config(KLConfig(kl_estimator="k2", kl_gradient="reverse"), scene=world).kl
    assert torch.allclose(pull.gradient, by_hand.gradient, rtol=0, atol=1e-12)
    assert pull.value == pytest.approx(by_hand.value, abs=1e-12)
    assert pull.gradient_variance == pytest.approx(by_hand.gradient_variance, abs=1e-12)


def test_reductions_change_the_gradient_and_divide_by_the_expected_numbers() -> None:
    kl, chain = KLConfig(), random_chain(5, length=3)
    large = Scene(chain=chain, group_size=1)
    y = enumerate_outcomes(chain)
    mean_length = (y.probs * y.mask.sum(-1)).sum().item()
    by_token = examine_config(kl, LossConfig(loss_type="dapo", scale_rewards="none"), scene=large)
    assert by_token.kl.follows.name == "local"
    assert by_token.kl.follows.factor == pytest.approx(1 / mean_length)
    fixed = examine_config(kl, LossConfig(loss_type="dr_grpo"), scene=large)
    assert (fixed.kl.follows.name, fixed.kl.follows.factor) == ("local", pytest.approx(1 / 3))
    by_mean = examine_config(kl, LossConfig(loss_type="grpo", scale_rewards="none"), scene=large)
    assert by_mean.kl.follows.name == "none of these"


PLACED = {
    "loss": {"kl_estimator": "k3", "kl_off_policy": "token"},
    "loss, exact": {"kl_estimator": "exact"},
    "advantage": {"kl_estimator": "k1", "kl_placement": "advantage"},
    "advantage, reward-to-go": {"kl_estimator": "k1", "kl_placement": "advantage", "kl_horizon": "sequence"},
    "reward": {"kl_estimator": "k1", "kl_placement": "reward", "kl_horizon": "sequence"},
}
CLIPS = [("none", None), ("hard", None), ("soft", "group")]


def scored(kl: KLConfig, pair: list[int], *, by: Outcomes, old: Outcomes) -> Batch:
    """Two completions as one policy scores them; `old` drew them."""
    exact = kl.kl_estimator == "exact"
    return flat_batch(
        policy_logprobs=by.policy_logprobs[pair],
        mask=by.mask[pair],
        advantages=torch.zeros(2, dtype=torch.float64),
        old_logprobs=old.policy_logprobs[pair].detach(),
        sampler_logprobs=old.policy_logprobs[pair].detach(),
        ref_logprobs=by.ref_logprobs[pair],
        exact_kl=exact_kl(by.policy_logits[pair], by.ref_logits[pair]) if exact else None,
        reference_length=3.0,
        group_size=2,
    )


def kl_share(kl: KLConfig, now: Batch, before: Batch) -> torch.Tensor:
    """The KL's part of the loss of each token, per unit of beta, out of the functions that a trainer calls."""
    term = kl.build_term()
    gate_kl = sequence_gate_kl(measure(before, term))  # before the first update, as every trainer does
    now, before = changed(now, gate_kl=gate_kl), changed(before, gate_kl=gate_kl)
    prepared = prepare(now, term)
    if term.placement == "loss":
        return token_penalty(prepared)
    if term.placement == "advantage":
        return -shifted_advantages(now.advantages, prepared, beta=kl.beta) * now.policy_logprobs / kl.beta
    none, against = torch.zeros(2, dtype=torch.float64), {"beta": kl.beta, "advantages": lambda x: x - x.flip(0)}
    advantages = advantages_with_kl(none, prepare(before, term), **against)
    return -advantages[:, None] * now.policy_logprobs / kl.beta


def pull_of_core(kl: KLConfig, chain: Chain) -> torch.Tensor:
    """The expected gradient of `kl_share`, over every ordered pair of completions."""
    now = enumerate_outcomes(chain)
    old = enumerate_outcomes(replace(chain, policy_logits=chain.logits("sampler"), sampler_logits=None))
    total = torch.zeros((), dtype=torch.float64)
    for pair in map(list, itertools.product(range(len(now.probs)), repeat=2)):
        share = kl_share(kl, scored(kl, pair, by=now, old=old), scored(kl, pair, by=old, old=old))
        total = total + now.probs[pair].prod() * torch.where(now.mask[pair], share, 0.0).sum() / 2
    (gradient,) = torch.autograd.grad(total, chain.policy_logits)
    return gradient


@pytest.mark.parametrize(("method", "level"), CLIPS)
@pytest.mark.parametrize("placed", PLACED)
@pytest.mark.filterwarnings("ignore::klamp.config.KLWarning")
def test_every_placement_and_clip_is_examined_as_a_trainer_does_it(placed: str, method: str, level: str | None) -> None:
    clip = {"kl_clip_method": method, "kl_clip_level": level, "kl_clip_threshold": 0.1, "kl_clip_temperature": 0.1}
    kl = KLConfig(beta=0.7, kl_reference_length=3, **clip, **PLACED[placed])
    for sampler in ("policy", "other"):
        world = Scene(chain=random_chain(3, length=2, sampler=sampler))
        expected = pull_of_core(kl, world.chain)
        assert torch.allclose(examine_config(kl, scene=world).kl.gradient, expected, rtol=0, atol=1e-12)
        unclipped = examine_config(KLConfig(beta=0.7, **PLACED[placed]), scene=world).kl.gradient
        assert expected.norm() > 1e-3, "the gate is open for some"
        assert (method == "none") == torch.allclose(expected, unclipped, rtol=0, atol=1e-3), "and not for all"


def test_in_a_large_batch_a_gate_of_the_batch_is_the_same_for_every_group() -> None:
    """The expected KL is .36 nats: the gate is wide open below it and shut above, whatever the group itself spent."""
    chain = random_chain(0, length=2)
    y = enumerate_outcomes(chain)
    minus_delta = y.ref_logprobs - y.policy_logprobs
    kl_of_batch = (y.probs * (minus_delta.expm1() - minus_delta).sum(-1)).sum().item()
    world = Scene(chain=chain)
    choices = {"kl_clip_method": "hard", "kl_clip_level": "batch", "use_per_token_kl_threshold": False}
    shut, wide = (
        examine_config(KLConfig(kl_clip_threshold=kl_of_batch + step, **choices), scene=world) for step in (0.01, -0.01)
    )
    assert (shut.gate, shut.kl.follows.name) == (0.0, "zero")
    assert wide.gate == pytest.approx(1.0)
    assert torch.allclose(wide.kl.gradient, examine_config(KLConfig(), scene=world).kl.gradient, rtol=0, atol=1e-12)


def test_excluded_tokens_carry_no_kl() -> None:
    world = scene(7, length=1)
    p, q = (world.chain.logprobs(who)[0].detach() for who in ("policy", "ref"))
    kept = torch.tensor([False, True, True])
    pull = examine_config(KLConfig(kl_estimator="k1", kl_exclude_tokens=(0,)), scene=world).kl
    assert pull.value == pytest.approx((p.exp() * (p - q))[kept].sum().item(), abs=1e-12)
    assert examine_config(KLConfig(kl_exclude_tokens=(0, 1, 2)), scene=world).kl.follows.name == "zero"


@pytest.mark.parametrize("token", ["special", 151643])
def test_tokens_that_the_world_does_not_have_cannot_be_excluded(token: str | int) -> None:
    with pytest.raises(ConfigError, match="which tokens carry no KL") as caught:
        examine_config(KLConfig(kl_exclude_tokens=(token,)), scene=scene(7, length=1))
    assert str(token) in caught.value.got


def test_refusals() -> None:
    kl = KLConfig(kl_estimator="k1", kl_placement="reward", kl_horizon="sequence")
    with pytest.raises(ConfigError, match="group's std"):
        examine_config(kl, LossConfig(scale_rewards="std"), scene=scene(0, length=2))
    with pytest.raises(ConfigError, match="too many groups"):
        scene(0, length=3, vocab=4, group_size=4)
