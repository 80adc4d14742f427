"""A baseline for the KL of sampled tokens, and the constant of a centered tail: the same mean, another noise."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.core.test_anchors import of_one_token

from klamp.config import KLConfig, LossConfig, TeacherConfig, build_objective
from klamp.config.beyond import baseline_cautions
from klamp.core.objective import grpo_loss
from klamp.errors import ConfigError
from klamp.lab.config import TrainConfig
from klamp.verify.explain import measure_config
from klamp.verify.oracle import expected_gradient, gradient_of, local_kl, reverse_kl
from klamp.verify.proofs.anchors import as_loss, heads, taught_by
from klamp.verify.worlds import random_chain, truncate_top_p
from studies.head_noise import head, noise, pairs

FORMS: dict[str, dict[str, Any]] = {
    "exact": {"estimator": "k1", "baseline": "exact"},
    "bucket": {"estimator": "k1", "baseline": "bucket", "top_k": 2},
    "bucket of the teacher's head": {"estimator": "k3", "baseline": "bucket", "top_k": 2, "head": "teacher"},
}


def errors_of(teachers: Any, weights: str = "none", horizon: str = "token", seed: int = 1) -> float:
    chain = random_chain(seed, vocab=4, length=2, sampler="policy" if weights == "none" else "other")
    pair, who = chain.towards("teacher"), "sampler" if weights == "token" else "policy"
    kl = reverse_kl(pair) if horizon == "sequence" else local_kl(pair, prefixes=who)
    truth = gradient_of(kl, pair)
    found = [expected_gradient(chain, as_loss(teacher)) for teacher in teachers]
    return max(float((x - truth).norm() / truth.norm()) for x in found)


@pytest.mark.parametrize(
    ("weights", "horizon"), [("none", "token"), ("token", "token"), ("none", "sequence"), ("sequence", "sequence")]
)
def test_a_baseline_and_a_centered_tail_leave_the_mean_where_it_is(weights: str, horizon: str) -> None:
    """By enumeration, on- and off-policy with full weights; b is taken from the token's own log-ratio alone."""
    how = {"off_policy": weights, "horizon": horizon}
    assert errors_of([taught_by(**form, **how) for form in FORMS.values()], weights, horizon) < 1e-12
    assert errors_of(heads(tail="centered", **how), weights, horizon) < 1e-12


def test_a_bounded_weight_or_no_weight_moves_the_mean_with_a_baseline() -> None:
    """What kl_max_weight and a missing off-policy weight do: the reason for which they are refused."""
    without, beside = (errors_of([taught_by(estimator="k1", baseline=b)], "token") for b in ("none", "exact"))
    assert without != pytest.approx(beside, rel=1e-2) and min(without, beside) > 0.05


@pytest.mark.parametrize("horizon", ["token", "sequence"])
def test_in_the_advantage_it_follows_the_reverse_kl(horizon: str) -> None:
    choices = FORMS["bucket of the teacher's head"] | {"estimator": "k1", "placement": "advantage", "horizon": horizon}
    facts = measure_config(taught_by(**choices), LossConfig())
    assert (facts.position.follows.name, facts.position.follows.factor) == ("reverse", pytest.approx(1.0))
    assert facts.sequence.follows.name == ("local" if horizon == "token" else "reverse")
    assert facts.still, "0 in every sample at the teacher"


def test_the_constant_of_a_centered_tail_quiets_small_vocabularies_and_large_heads_little() -> None:
    """Half the noise for 3 of 6 words near the teacher, a tenth at most for 4 of 40, and nothing two nats away."""
    for size, k, gap, least, most in ((6, 3, 0.1, 1.8, 2.2), (40, 4, 0.1, 1.05, 1.12), (40, 4, 2.0, 0.95, 1.05)):
        policy, teacher = pairs(size, gap)
        plain, centered = (noise(policy, head(policy, teacher, k, tail)) for tail in ("sampled", "centered"))
        assert least < plain / centered < most, (size, k, gap)


def test_a_centered_tail_is_still_at_the_teacher_under_a_truncated_sampler_too() -> None:
    chain = random_chain(1, vocab=4, length=2, sampler="other")
    own = replace(chain, policy_logits=chain.logits("teacher"))
    cut = replace(own, sampler_logits=truncate_top_p(own.policy_logits, 0.7))
    for scene, teacher in itertools.product((own, cut), heads(tail="centered", off_policy="token")):
        assert float(expected_gradient(scene, as_loss(teacher)).abs().max()) < 1e-12


def test_beside_a_teacher_both_baselines_silence_the_end_of_two_anchors() -> None:
    """At the mix the coefficient is the constant -s log Z: noise without a baseline, and 0 with both."""
    ref, teacher = torch.randn(2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    for beta, coef in ((-0.25, 1.0), (0.5, 0.5)):
        policy = ((beta * ref + coef * teacher) / (beta + coef)).log_softmax(-1).requires_grad_()
        bases = [(policy.exp() * (policy - other)).sum().detach() for other in (ref, teacher)]
        noise = dict[str, float]()
        for baseline in ("none", "exact"):
            kl = KLConfig(beta=beta, kl_estimator="k1", kl_baseline=baseline)
            taught = TeacherConfig(teacher_model="DIR", teacher_coef=coef, teacher_baseline=baseline)
            objective = build_objective(kl, LossConfig(surrogate="score_function"), max_length=1, teacher=taught)
            exact = {"exact_kl": bases[0].expand(5), "teacher_kl": bases[1].expand(5)}
            batch = of_one_token(policy_logprobs=policy, ref_logprobs=ref, teacher_logprobs=teacher, **exact)
            pull = torch.autograd.grad(grpo_loss(batch, objective).loss, policy)[0]
            noise[baseline] = float(pull.abs().max())
        assert noise["exact"] < 1e-12 < noise["none"]


@pytest.mark.parametrize(
    ("kl", "teacher", "loss"),
    [
        ({}, {}, {"loss_type": "grpo", "scale_rewards": "none"}),
        ({"kl_normalizer": "sequence_mean"}, {}, {}),
        ({"kl_off_policy": "token", "kl_max_weight": 2.0}, {}, {}),
        ({"kl_exclude_tokens": ("special",)}, {}, {}),
        ({"reference": "remote", "reference_url": "http://h"}, {}, {}),
        (None, {"teacher_placement": "advantage"}, {"vllm_importance_sampling_mode": "token_truncate"}),
        (None, {"teacher_url": "http://h", "teacher_model": None}, {}),
        (None, {"teacher_url": "http://h", "teacher_model": None, "teacher_baseline": "bucket"}, {}),
    ],
)
def test_a_baseline_that_would_move_the_mean_is_refused(kl: Any, teacher: dict[str, Any], loss: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as error:
        build(kl, teacher, loss)
    assert "baseline" in str(error.value) and error.value.fix


def build(kl: Any, teacher: dict[str, Any], loss: dict[str, Any]) -> Any:
    if kl is not None:
        return build_objective(KLConfig(kl_baseline="exact", kl_estimator="k1", **kl), LossConfig(**loss), max_length=4)
    taught = TeacherConfig(**{"teacher_model": "DIR", "teacher_baseline": "exact", **teacher})
    return build_objective(KLConfig(beta=0.0), LossConfig(**loss), max_length=4, teacher=taught)


def test_ppos_clip_and_a_truncated_sampler_are_said() -> None:
    term = TeacherConfig(teacher_model="DIR", teacher_baseline="exact", teacher_placement="advantage").build_term()
    in_loss = replace(term, placement="loss")
    terms = term, in_loss, replace(in_loss, off_policy="token"), replace(term, baseline="none")
    assert [len(list(baseline_cautions(one, later=True, cut=True))) for one in terms] == [2, 2, 1, 0]
    with pytest.warns(match="top_p or top_k"):
        TrainConfig.from_flat({"cpu": True, "teacher_model": "DIR", "teacher_baseline": "exact", "top_p": 0.9})


def test_a_batch_without_the_baseline_is_refused() -> None:
    logprobs = torch.full((2,), -1.0, requires_grad=True)
    batch = of_one_token(policy_logprobs=logprobs, teacher_logprobs=torch.full((2,), -2.0))
    with pytest.raises(ConfigError, match="baseline 'exact'"):
        grpo_loss(batch, build(None, {}, {}))
    with pytest.raises(ConfigError, match="centered"):
        TeacherConfig(teacher_model="DIR", teacher_estimator="topk", teacher_tail="centered", teacher_direction="js")
