"""Several KL terms in one loss: each says to whom, and reads that anchor's part of the batch."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.batches import changed, flat_batch, objective_of, read, rows_of

from klamp.config import KLConfig, LossConfig, TeacherConfig, build_objective
from klamp.core.estimators import exact_kl
from klamp.core.gradients import kl_penalty
from klamp.core.masking import Totals
from klamp.core.objective import Objective, grpo_loss
from klamp.core.term import KLTerm, Weighted
from klamp.core.topk import topk_kl
from klamp.core.types import Batch, Scored
from klamp.errors import ConfigError, NonFiniteError

TEACHER = KLTerm(anchor="teacher", value="k1", gradient="reverse", placement="loss")
SUM = {"surrogate": "score_function", "reduction": "sequence_sum"}


def scored(seed: int = 0, **given: torch.Tensor) -> Batch:
    generator = torch.Generator().manual_seed(seed)

    def logprobs() -> torch.Tensor:
        return -3 * torch.rand(4, 3, generator=generator, dtype=torch.float64)

    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 1]], dtype=torch.bool)
    found = {"ref_logprobs": logprobs(), "teacher_logprobs": logprobs(), "sampler_logprobs": logprobs()} | given
    advantages = torch.tensor([1.0, -1.0, 0.0, 0.0])
    return flat_batch(policy_logprobs=logprobs().requires_grad_(), mask=mask, advantages=advantages, **found)


def of_one_token(**scores: torch.Tensor) -> Batch:
    """A batch of completions of one token, one for each number, without an advantage."""
    count = len(scores["policy_logprobs"])
    columns = {name: x[:, None] for name, x in scores.items()}
    return flat_batch(**columns, mask=torch.ones(count, 1, dtype=torch.bool), advantages=torch.zeros(count))


def slope(loss: torch.Tensor, batch: Batch) -> torch.Tensor:
    return torch.autograd.grad(loss, batch.policy_logprobs)[0]


def to_teacher(coefficient: float = 1.0, **changes: Any) -> Weighted:
    return Weighted(coefficient, replace(TEACHER, **changes))


@pytest.mark.parametrize("anchor", ["reference", "teacher", "sampler"])
def test_a_term_to_any_anchor_is_the_reference_s_with_other_numbers(anchor):
    batch = scored()
    as_reference = changed(batch, ref_logprobs=batch.anchors[anchor].logprobs)
    for placement, horizon in itertools.product(("loss", "advantage"), ("token", "sequence")):
        term = KLTerm(anchor=anchor, value="k1", placement=placement, horizon=horizon)
        mine = grpo_loss(batch, objective_of(**SUM, others=(Weighted(0.3, term),)))
        plain = grpo_loss(as_reference, objective_of(**SUM, beta=0.3, kl=replace(term, anchor="reference")))
        torch.testing.assert_close(mine.loss, plain.loss, rtol=0, atol=0)
        torch.testing.assert_close(slope(mine.loss, batch), slope(plain.loss, as_reference), rtol=0, atol=1e-15)


def test_two_terms_add_up():
    batch, kl = scored(), KLTerm(value="k3", horizon="sequence")
    parts = {"beta": 0.2, "kl": kl}, {"others": (to_teacher(0.7),)}
    choices = parts[0] | parts[1], {}, *parts
    found, none, ref, teacher = (grpo_loss(batch, objective_of(**SUM, **each)) for each in choices)
    torch.testing.assert_close(found.loss, ref.loss + teacher.loss - none.loss)
    slopes = [slope(each.loss, batch) for each in (found, none, ref, teacher)]
    torch.testing.assert_close(slopes[0], slopes[2] + slopes[3] - slopes[1])
    assert found.metrics["train/kl_penalty"] == ref.metrics["train/kl_penalty"]
    assert found.metrics["train/teacher_penalty"] == teacher.metrics["train/teacher_penalty"] != 0
    assert found.metrics["kl/k3"] == ref.metrics["kl/k3"] and found.metrics["teacher/k1"] != found.metrics["kl/k1"]


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean"])
def test_a_mean_of_the_teacher_s_kl_counts_every_trained_token_and_no_other(reduction):
    """Case: what the teacher did not score, or the reference leaves out, raises the price of the others."""
    seen = torch.tensor([[1, 0, 1], [0, 1, 1], [1, 1, 1], [1, 0, 0]], dtype=torch.bool)
    batch = changed(scored(), teacher_mask=seen, kl_mask=~seen)
    term = TeacherConfig(teacher_model="DIR", teacher_estimator="k1").build_term()
    delta = (batch.policy_logprobs - read(batch, "teacher_logprobs")).detach() * (batch.mask & seen)
    expected = delta.sum() / 9 if reduction == "token_mean" else (delta.sum(-1) / batch.mask.sum(-1)).mean()
    for totals in (None, Totals(sequences=4.0, tokens=9.0, kl_tokens=3.0)):
        both = objective_of(surrogate="score_function", reduction=reduction, others=(Weighted(1.0, term),))
        found = grpo_loss(batch, both, totals=totals).metrics["train/teacher_penalty"]
        assert found.item() == pytest.approx(expected.item())


def test_the_metrics_of_a_bounded_teacher_measure_the_distance_itself():
    """The bound limits the pull, not what is logged; a token that the teacher rules out is counted, and in no mean."""
    batch = scored()
    policy, teacher = batch.policy_logprobs.detach(), batch.anchors["teacher"].logprobs.clone()
    teacher[0, 0] = -torch.inf
    delta = (policy - teacher)[batch.mask][1:]
    batch = changed(batch, teacher_logprobs=teacher)
    metrics = grpo_loss(batch, objective_of(**SUM, others=(to_teacher(0.3, max_log_ratio=0.1),))).metrics
    assert metrics["teacher/k1"] == pytest.approx(delta.mean().item())
    assert metrics["teacher/kl"] == pytest.approx(((-delta).exp() - 1 + delta).mean().item())
    assert metrics["teacher/log_ratio_clamped"] == pytest.approx((1 + (delta.abs() > 0.1).sum().item()) / 9)


def test_on_policy_distillation_is_the_gradient_of_the_kl_at_each_prefix():
    """Placement `advantage`, k1, token: by enumeration over three words, also where an older policy sampled."""
    policy = torch.tensor([0.3, -0.5, 1.0], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([1.0, 0.2, -0.4], dtype=torch.float64).log_softmax(-1)
    logprobs = policy.log_softmax(-1)
    expected = torch.autograd.grad((logprobs.exp() * (logprobs - teacher)).sum(), policy, retain_graph=True)[0]
    surrogate = {"surrogate": "ppo_clip", "clip_low": 1.0, "clip_high": 1e9, "reduction": "sequence_sum"}
    objective = objective_of(**surrogate, others=(to_teacher(placement="advantage"),))
    batch = of_one_token(policy_logprobs=logprobs, teacher_logprobs=teacher)
    older = torch.zeros(3, dtype=torch.float64).log_softmax(-1)
    for sampler, sampled in ((logprobs.detach(), batch), (older, replace(batch, old_logprobs=older[:, None]))):
        found = sum(sampler[row].exp() * grpo_loss(rows_of(sampled, [row]), objective).loss for row in range(3))
        slope = torch.autograd.grad(found, policy, retain_graph=True)[0]
        torch.testing.assert_close(slope, expected, rtol=0, atol=1e-12)


def test_what_the_teacher_did_not_score_is_a_gap_and_not_a_zero():
    """A masked row of -inf reaches neither the value nor the gradient, and the share of it is told."""
    batch = scored()
    seen = batch.mask.clone()
    seen[1] = False
    unscored = torch.where(seen, read(batch, "teacher_logprobs"), -torch.inf)
    objective = objective_of(others=(to_teacher(),))
    found = grpo_loss(changed(batch, teacher_logprobs=unscored, teacher_mask=seen), objective)
    pull = slope(found.loss, batch)
    assert pull.isfinite().all() and float(found.metrics["teacher/unscored"]) == pytest.approx(2 / 9)
    none = slope(grpo_loss(batch, objective_of()).loss, batch)
    torch.testing.assert_close(pull[1], none[1])
    with pytest.raises(NonFiniteError, match="teacher_logprobs"):
        grpo_loss(changed(batch, teacher_logprobs=unscored), objective)


def test_a_kl_over_the_vocabulary_to_a_teacher_that_forbids_a_word_is_refused_and_js_is_finite():
    policy = torch.tensor([[[0.6, 0.4, 0.0]]], dtype=torch.float64).log().requires_grad_()
    teacher = torch.tensor([[[0.5, 0.0, 0.5]]], dtype=torch.float64).log()
    p, q, out = policy[..., 0], teacher[..., 0], torch.tensor([[True]])
    for value, direction in itertools.product(("exact", "topk"), ("reverse", "forward", "js")):
        if value == "exact":
            kl = exact_kl(policy, teacher, direction=direction)
        else:
            kl = topk_kl(policy[..., 1:], teacher[..., 1:], p, q, out, direction=direction)
        batch = flat_batch(policy_logprobs=p, mask=out, advantages=torch.zeros(1), teacher_logprobs=q, teacher_kl=kl)
        objective = objective_of(**SUM, others=(to_teacher(value=value, gradient="own"),))
        if direction == "js":
            assert torch.autograd.grad(grpo_loss(batch, objective).loss, policy)[0].isfinite().all()
            continue
        with pytest.raises(NonFiniteError, match="the KL to the teacher is infinite"):
            grpo_loss(batch, objective)
        grpo_loss(changed(batch, teacher_mask=~out), objective)


def test_a_term_without_its_anchor_is_refused():
    for anchor in ("teacher", "sampler"):
        bare = changed(scored(), **{f"{anchor}_logprobs": None})
        with pytest.raises(ConfigError, match=f"a KL to the {anchor} needs"):
            grpo_loss(bare, objective_of(others=(Weighted(1.0, KLTerm(anchor=anchor)),)))
        grpo_loss(bare, objective_of(others=(Weighted(0.0, KLTerm(anchor=anchor)),)))
    with pytest.raises(ConfigError, match="kl=None"):
        grpo_loss(scored(), objective_of(others=(to_teacher(value="exact", gradient="own"),)))
    constant = torch.full((4, 3), -1.0)
    carried = changed(scored(), policy_logprobs=constant, teacher_logprobs=constant.clone().requires_grad_())
    with pytest.raises(ConfigError, match="has a gradient"):
        grpo_loss(carried, objective_of(others=(to_teacher(),)))


def test_with_a_tool_between_the_turns_the_gradient_is_that_of_the_whole():
    """By enumeration of turn, tool, turn: the tool's factors cancel, and its own log-probabilities are any."""
    generator = torch.Generator().manual_seed(0)
    first, second, q_first, q_second, tool = (
        torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((3,), (3, 2, 3)) * 2 + ((3, 2),)
    )
    models = [x.requires_grad_(True) for x in (first, second)]
    p, q = ((a.log_softmax(-1), b.log_softmax(-1)) for a, b in ((first, second), (q_first, q_second)))
    a, e, b = torch.cartesian_prod(torch.arange(3), torch.arange(2), torch.arange(3)).T
    ours, theirs = (torch.stack((x[a], torch.full((18,), -2.0).double(), y[a, e, b]), 1) for x, y in (p, q))
    drawn = (ours[:, 0] + tool.log_softmax(-1)[a, e] + ours[:, 2]).exp()
    whole = (drawn * (ours - theirs).sum(-1)).sum()
    mask = torch.tensor([[True, False, True]]).expand(18, 3)
    found = kl_penalty(ours, theirs.detach() - 1.0 * ~mask, mask, value="k1", horizon="sequence")
    mine = torch.autograd.grad((drawn.detach() * found.sum(-1)).sum(), models, retain_graph=True)
    for one, other in zip(mine, torch.autograd.grad(whole, models), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", ["checkpoint of March", "reference", "teacher"])
def test_a_term_to_any_name_follows_the_kl_to_that_anchor(name):
    policy = torch.randn(5, dtype=torch.float64, requires_grad=True)
    anchor = torch.randn(5, dtype=torch.float64).log_softmax(-1)
    logprobs = policy.log_softmax(-1)
    weight = 5 * logprobs.detach().exp()  # every token, by its probability
    batch = replace(of_one_token(policy_logprobs=logprobs), anchors={name: Scored(anchor[:, None], weight=weight)})
    term = KLTerm(anchor=name, value="k3", gradient="reverse")
    loss, metrics = grpo_loss(batch, Objective(terms=(Weighted(0.3, term),)))
    kl = (logprobs.exp() * (logprobs - anchor)).sum()
    torch.testing.assert_close(loss, 0.3 * kl)
    slopes = [torch.autograd.grad(x, policy, retain_graph=True)[0] for x in (loss, 0.3 * kl)]
    torch.testing.assert_close(*slopes)
    assert ("kl/k3" if name == "reference" else f"{name}/kl") in metrics


@pytest.mark.parametrize("anchor", ["reference", "sampler"])
def test_the_run_s_own_anchors_score_every_trained_token(anchor):
    """A bound of the log-ratio or an exclusion excuses no token that the reference or the sampler did not score."""
    name = {"reference": "ref_logprobs", "sampler": "sampler_logprobs"}[anchor]
    kept = torch.tensor([[False, True, True]]).expand(4, 3)
    lost = torch.where(kept, -1.0, -torch.inf).double()
    for batch in (scored(**{name: lost}), changed(scored(**{name: lost}), kl_mask=kept)):
        with pytest.raises(NonFiniteError, match=name):
            grpo_loss(batch, objective_of(beta=0.1, kl=KLTerm(anchor=anchor, max_log_ratio=5.0)))


def test_a_configuration_holds_the_run_to_the_reference_and_each_update_to_the_sampler():
    """By enumeration over four words: E_mu of the gradient is beta grad KL(p||ref) + coef grad KL(p||mu)."""
    logits = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    policy, (ref, sampler) = logits[0].requires_grad_(), logits[1:].log_softmax(-1)
    kl = KLConfig(beta=0.2, sampler_coef=0.3, kl_off_policy="token")
    objective = replace(build_objective(kl, LossConfig(), max_length=1), **SUM)
    p = policy.log_softmax(-1)
    batch = of_one_token(policy_logprobs=p, ref_logprobs=ref, sampler_logprobs=sampler)
    found = sum(sampler[v].exp() * grpo_loss(rows_of(batch, [v]), objective).loss for v in range(4))
    expected = sum(coef * (p.exp() * (p - other)).sum() for coef, other in ((0.2, ref), (0.3, sampler)))
    gradients = [torch.autograd.grad(x, policy, retain_graph=True)[0] for x in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-14)
    metrics = grpo_loss(batch, objective).metrics
    deltas = [(p - other).detach() for other in (ref, sampler)]
    k3 = [((-delta).exp() - 1 + delta).mean().item() for delta in deltas]
    assert (metrics["kl/k3"].item(), metrics["sampler/kl"].item()) == pytest.approx(tuple(k3))
    assert metrics["train/sampler_penalty"] != metrics["train/kl_penalty"]
    assert [coefficient for coefficient, _ in objective.weighted(0.5).terms] == [0.5, 0.3]
    assert len(build_objective(replace(kl, sampler_coef=0.0), LossConfig(), max_length=1).terms) == 1
    with pytest.raises(ConfigError, match="twice"):
        KLConfig(reference="sampler", sampler_coef=0.3)
