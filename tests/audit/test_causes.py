"""`klamp audit` names the cause in the words of `klamp.check`, which names masks too, and measures the distance."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.batches import flat_batch, objective_of
from torch import Tensor

import klamp
from klamp import check, topk_kl
from klamp.audit.examine import AuditedLoss
from klamp.core.objective import grpo_loss
from klamp.core.surrogates import TrustRegion
from klamp.verify.sequences import Sequences


def kl(p: Tensor, q: Tensor) -> Tensor:
    return (p.exp() * (p - q)).sum(-1)


def top(x: Tensor, like: Tensor) -> Tensor:
    return x.log_softmax(-1).gather(-1, like.topk(64).indices)


def bucketed(x: Tensor, like: Tensor) -> Tensor:
    head = top(x, like)
    return torch.cat([head, torch.log1p(-head.exp().sum(-1, keepdim=True))], -1)


def of(value: Callable[[Tensor, Tensor], Tensor], count: Callable[[Tensor], Any] = Tensor.sum) -> AuditedLoss:
    """The mean of a KL of positions."""

    def compute(batch: Sequences) -> Tensor:
        student, teacher, _, mask, _ = batch.aligned
        return (value(student, teacher) * mask).sum() / count(mask)

    return AuditedLoss(name="", compute=compute, takes="sequences")


CAUSES = {
    "head-renormalised": of(lambda s, t: kl(top(s, t).log_softmax(-1), top(t, t).log_softmax(-1))),
    "head-no-tail": of(lambda s, t: kl(top(s, t), top(t, t))),
    "head-bucket": of(lambda s, t: kl(bucketed(s, t), bucketed(t, t))),
    "shift": of(lambda s, t: kl(s.log_softmax(-1), t.roll(1, 1).log_softmax(-1))),
    "temperature": of(lambda s, t: kl((s / 2).log_softmax(-1), t.log_softmax(-1))),
    "kl-bounded": of(lambda s, t: kl(s.log_softmax(-1), t.log_softmax(-1)).clamp(max=0.22)),
    "double-softmax": of(lambda s, t: kl(s.log_softmax(-1), t.softmax(-1).log_softmax(-1))),
    "double-softmax of the student": of(lambda s, t: kl(s.softmax(-1).log_softmax(-1), t.log_softmax(-1))),
    "mean-over-padding": of(lambda s, t: kl(s.log_softmax(-1), t.log_softmax(-1)), torch.numel),
}


@pytest.mark.parametrize("name", CAUSES)
def test_a_fault_is_named(name: str) -> None:
    verdict, code = CAUSES[name].verdict(), name.partition(" ")[0]
    assert code in verdict.codes(), str(verdict)
    assert verdict.ok is False or code in ("head-bucket", "kl-bounded")


def headed(head: float, tail: float, *, forward: bool = False) -> AuditedLoss:
    """The teacher's top-64 and a sampled tail, with a constant in either."""

    def compute(batch: Sequences) -> Tensor:
        student, teacher, ids, mask, _ = batch.aligned
        s, ell = student.log_softmax(-1), (student.log_softmax(-1) - teacher.log_softmax(-1)).detach()
        inside = torch.zeros_like(s).scatter(-1, teacher.topk(64).indices, 1.0)
        slope = -(-ell).exp() if forward else ell
        sampled = ((1 - inside) * (slope + tail) * s).gather(-1, ids[..., None])[..., 0]
        return ((inside * s.exp().detach() * (slope + head) * s).sum(-1) + sampled)[mask].mean()

    return AuditedLoss(name="", compute=compute, takes="sequences", means="forward" if forward else "reverse")


@pytest.mark.parametrize("forward", [False, True])
@pytest.mark.parametrize(("head", "tail"), [(0, 0), (1, 1), (1, 0), (0, 1)])
def test_a_head_and_its_sampled_tail_need_one_constant(head: float, tail: float, forward: bool) -> None:
    loss = headed(head, tail, forward=forward)
    assert loss.verdict().codes("wrong") == (("head-mass",) if head != tail else ())
    assert loss.distances[0] == pytest.approx(0.47 if head != tail else 0.0, abs=0.03 if head != tail else 1e-5)


@pytest.mark.parametrize(
    ("compute", "near", "far"),
    [
        (lambda p, q, old, m: ((p - q).square() / 2)[m].mean(), 0.0, None),
        (lambda p, q, old, m: ((p - old).exp() * (torch.expm1(q - p) + p - q))[m].mean(), 0.0, 0.0),
        (lambda p, q, old, m: (p - q)[m].mean(), 1.0, None),
        (lambda p, q, old, m: -(p - q).square()[m].mean() / 2, 2.0, None),
        (lambda p, q, old, m, a: (5 * (p - q).square() / 2 - a[:, None] * (p - old).exp())[m].mean(), 4.0, None),
    ],
    ids=["k2", "ratio x k3", "k1", "away", "five-fold beside the policy loss"],
)
def test_the_distance_is_enumerated(compute: Callable[..., Tensor], near: float, far: float | None) -> None:
    on, off = AuditedLoss(name="", compute=compute).distances
    assert on == pytest.approx(near, abs=1e-5)
    assert off is not None and (off > 0.05 if far is None else off == pytest.approx(far, abs=1e-5))


@pytest.mark.parametrize("tail", ["centered", "sampled", "bucket"])
@pytest.mark.parametrize(("words", "k", "of_teacher"), [(64, 4, False), (320, 16, True)])
def test_a_tail_with_the_constant_of_the_masses_is_named(tail: Any, words: int, k: int, of_teacher: bool) -> None:
    student = (1.5 * torch.randn(4, 24, words).double()).requires_grad_()
    teacher = student.detach() + torch.randn(4, 24, words).double()
    ids = torch.distributions.Categorical(logits=student.detach()).sample()[..., None]
    top = (teacher if of_teacher else student.detach()).topk(k).indices
    logs = [x.log_softmax(-1) for x in (student, teacher)]
    heads, targets = ([x.gather(-1, at) for x in logs] for at in (top, ids))
    kl = topk_kl(*heads, *(x[..., 0] for x in targets), (top != ids).all(-1), tail=tail)
    verdict = check(kl.mean(), logits=student, teacher_logits=teacher, ids=ids[..., 0], once=False)
    named = {"centered": ["head-centered"], "sampled": [], "bucket": ["head-bucket"]}[tail]
    assert [x.code for x in verdict.findings if x.code.startswith("head")] == named


MASKS: dict[str, dict[str, Any]] = {
    "dppo_tv": {"dppo_mask": "dppo_tv", "dppo_mask_low": 0.05, "dppo_mask_high": 0.08},
    "dppo_kl": {"dppo_mask": "dppo_kl", "dppo_mask_low": 0.01, "dppo_mask_high": 0.02},
    "seq_max_k3": {"rollout_rs": "seq_max_k3", "rollout_rs_threshold": 0.08},
    "seq_mean_k1": {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": 1.06},
    "off_policy_mask_threshold": {"threshold": 0.03},
    "token_mask (IcePop)": {"mode": "token_mask", "low": 0.8, "high": 1.4},
}


SLOW = ("dppo_tv", "seq_mean_k1")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in MASKS])
def test_a_mask_is_named_where_it_alone_explains_what_is_dropped(name: str) -> None:
    names = list[set[str]]()
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        policy = (-2.5 * torch.rand(10, 16, generator=generator) - 0.02).requires_grad_()
        noise = 0.3 * torch.randn(10, 16, generator=generator) * (0.3 + torch.rand(10, 1, generator=generator))
        sampler, ref = ((policy.detach() + x).clamp(max=-1e-3) for x in (noise, noise.flip(0)))
        mask = torch.arange(16) < torch.randint(8, 17, (10, 1), generator=generator)
        region, advantages = TrustRegion(**MASKS[name]), torch.randn(10, generator=generator)
        scores = {"ref_logprobs": ref, "sampler_logprobs": sampler, "advantages": advantages, "mask": mask}
        scores |= {} if region.mode else {"old_logprobs": sampler}
        batch = flat_batch(policy_logprobs=policy, **scores)
        choices = {"surrogate": "cispo", "clip_low": 1.0, "clip_high": 1e6, "reduction": "token_mean", "beta": 0.05}
        loss = grpo_loss(batch, objective_of(**choices, trust=region)).loss
        verdict = klamp.check(loss, policy_logprobs=policy, beta=0.05, once=False, **scores)
        assert not any(x.level == "wrong" for x in verdict.findings), str(verdict)
        gated = [x for x in verdict.findings if x.code == "policy-gated"]
        names.append(set(gated[0].evidence["by"].split(" or ")) if gated else {name})
    assert set.intersection(*names) == {name}, names
