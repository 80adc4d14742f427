"""Checks of a second anchor and of the sampler as one: means, placements, noise, and other forms that claim to be it.

A teacher's KL is the KL to a reference that is another model; this module holds a head of k tokens and its tail
to the definitions. A test of means alone does not see a form that is noisier than no head at all: so the
noise is measured too, at the teacher, where it must be 0 in every sample.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, get_args

import torch
from torch import Tensor

from klamp.config import KLConfig, LossConfig, build_objective
from klamp.config.teacher import TeacherConfig, TeacherHead
from klamp.core.advantages import group_advantages
from klamp.core.penalty import token_penalty
from klamp.core.term import prepare
from klamp.core.types import Direction
from klamp.verify.one_step import NO_KL, Scene, batch_of, examine_config, quietly, scene, scores_of, teacher_kl
from klamp.verify.oracle import Loss, divergence, expected, expected_gradient, gradient_of, local_kl, reverse_kl, truths
from klamp.verify.proofs.check import EXACT, Check, follows, is_equal, is_true
from klamp.verify.worlds import Chain, Outcomes, Who, enumerate_outcomes, one_position, random_chain, truncate_top_p

VOCAB = 4
DIRECTIONS: tuple[Direction, ...] = get_args(Direction)
WEIGHTS = {
    "none": "tokens of the policy",
    "token": "another sampler, at its prefixes",
    "sequence": "another sampler, prefix ratio",
}
"""How the tokens of the sampler are weighed, and how the claims say it; unweighted they are the policy's own."""


def taught_by(**choices: Any) -> TeacherConfig:
    """A teacher's KL with coefficient 1, and with these choices, whose names begin with `teacher_`."""
    fields = {f"teacher_{name}": value for name, value in choices.items()}
    return quietly(TeacherConfig, teacher_model="teacher", **fields)


def as_loss(teacher: TeacherConfig) -> Loss:
    """klamp's penalty of a teacher as a loss of enumerated completions."""
    objective = build_objective(NO_KL, LossConfig(), max_length=1, teacher=teacher)

    def loss(y: Outcomes) -> Tensor:
        scores: dict[str, Any] = scores_of(y, objective, NO_KL, teacher)
        batch = batch_of(scores, advantages=torch.zeros(len(y.mask)))
        return token_penalty(prepare(batch, teacher.build_term()))

    return loss


def heads(**choices: Any) -> Iterator[TeacherConfig]:
    """A teacher's KL over every head: of no token, of some by each rule, of the whole vocabulary."""
    for k, head in itertools.product(range(VOCAB + 1), get_args(TeacherHead)):
        if 0 < k < VOCAB or head == "student":
            yield taught_by(estimator="topk", top_k=k, head=head, **choices)


def prove_teacher() -> list[Check]:
    """Checks value and gradient to a teacher: each direction, estimator, head, horizon, sampler and placement."""
    return [*_means(), *_placements(), *_sampler()]


def _means() -> Iterator[Check]:
    for direction, horizon, weights in itertools.product(DIRECTIONS, ("token", "sequence"), WEIGHTS):
        if horizon == "sequence" and (direction != "reverse" or weights == "token"):
            continue  # refused: no divergence of sequences, or a ratio that does not reach the prefix
        chain = random_chain(1, vocab=VOCAB, length=2, sampler="policy" if weights == "none" else "other")
        choices = {"direction": direction, "horizon": horizon, "off_policy": weights}
        sampled = ("k1", "k3") if direction == "reverse" else ()
        pair, who = chain.towards("teacher"), "sampler" if weights == "token" else "policy"
        exact = reverse_kl(pair) if horizon == "sequence" else local_kl(pair, direction=direction, prefixes=who)
        kl = exact.item(), gradient_of(exact, pair)
        forms = {name: [taught_by(estimator=name, **choices)] for name in (*sampled, "exact")}
        forms[f"a head of 0 to {VOCAB} and a tail"] = list(heads(**choices))
        for form, teachers in forms.items():
            claim = f"{direction}, horizon {horizon}, {form}; {WEIGHTS[weights]}"
            yield is_equal(f"{claim}: value and gradient", max(_error(chain, kl, teacher) for teacher in teachers), 0.0)


def _error(chain: Chain, kl: tuple[float, Tensor], teacher: TeacherConfig) -> float:
    """The largest error of a KL's value (nats) and of its gradient (relative), against the definitions."""
    (value, gradient), loss = kl, as_loss(teacher)
    off = (expected_gradient(chain, loss) - gradient).norm() / gradient.norm()
    return max(abs(expected(chain, loss).item() - value), off.item())


def _placements() -> Iterator[Check]:
    """Checks the whole step, in groups of two and beside a reference, and in groups of one without a reward."""
    rows: tuple[tuple[str, dict[str, Any], str], ...] = (
        ("in the advantage, k1, token", {"placement": "advantage"}, "local"),
        ("in the advantage, k1, sequence", {"placement": "advantage", "horizon": "sequence"}, "reverse"),
        ("in the reward, k1", {"placement": "reward", "horizon": "sequence"}, "reverse"),
        ("in the loss, a head of 1", {"estimator": "topk", "top_k": 1}, "local"),
    )
    world = scene(0, length=2, rewards="mixed")
    for claim, choices, name in rows:
        step = examine_config(KLConfig(beta=0.3), scene=world, teacher=taught_by(coef=0.5, **choices)).kl
        yield _followed(f"{claim}, beside a reference", world.chain, step.gradient, name)
    alone = scene(0, length=2, group_size=1)
    step = examine_config(NO_KL, scene=alone, teacher=taught_by(placement="advantage")).kl
    yield _followed("on-policy distillation: no reward, groups of one", alone.chain, step.gradient, "local")


def _followed(claim: str, chain: Chain, gradient: Tensor, name: str, *, to: Who = "teacher") -> Check:
    return follows(claim, [gradient], [truths(chain.towards(to))], name, anchor=to)


def proximal(coef: float) -> KLConfig:
    """A KL to whoever drew the tokens."""
    return quietly(KLConfig, beta=coef, reference="sampler", kl_off_policy="token")


def _sampler() -> Iterator[Check]:
    """Checks the KL to who drew the tokens: nothing on-policy, else what it says."""
    step = examine_config(proximal(5.0), scene=scene(0, length=2)).kl
    any_sample = step.gradient.abs().max() + step.gradient_variance
    yield is_equal("to the sampler, on-policy, coefficient 5: gradient of any sample", any_sample, 0.0)
    world = Scene(chain=random_chain(0, vocab=4, length=1, sampler="other"), group_size=1)
    gradient = examine_config(proximal(1.0), scene=world).kl.gradient
    yield _followed("to the sampler, second update of a batch", world.chain, gradient, "reverse", to="sampler")


def prove_noise() -> list[Check]:
    """Checks the noise of a head and its tail: none at the teacher, and near it less than without a head."""
    return [*_at_the_teacher(), *_near_the_teacher()]


def _at_the_teacher() -> Iterator[Check]:
    chain = random_chain(1, vocab=VOCAB, length=2, sampler="other")
    own = replace(chain, policy_logits=chain.logits("teacher"))
    samplers = {
        "tokens of the policy": (replace(own, sampler_logits=None), "none"),
        "another sampler": (own, "token"),
        "top-p 0.7": (replace(own, sampler_logits=truncate_top_p(own.policy_logits, 0.7)), "token"),
    }
    for direction, (name, (world, weights)) in itertools.product(DIRECTIONS, samplers.items()):
        every = heads(direction=direction, off_policy=weights)
        worst = max(_of_each_sample(world, as_loss(teacher)).abs().max().item() for teacher in every)
        yield is_equal(f"{direction}, at the teacher, {name}: gradient of any sample, every head", worst, 0.0)


def _of_each_sample(chain: Chain, loss: Loss) -> Tensor:
    """The gradient of every completion in the policy's logits at its own prefixes. [outcomes, tokens, vocab]"""
    y = enumerate_outcomes(chain)
    rows = y.policy_logits.detach().requires_grad_()
    drawn = rows.log_softmax(-1).gather(-1, y.tokens.clamp(min=0)[..., None])[..., 0]
    own = y._replace(policy_logits=rows, policy_logprobs=torch.where(y.mask, drawn, 0.0))
    return torch.autograd.grad(loss(own)[own.mask].sum(), rows)[0]


def _near_the_teacher() -> Iterator[Check]:
    """Forty tokens, a gap of .1 in the logits, a head of 4: one constant in head and tail has no bias, but noise."""
    policy, gap = (torch.randn(40, generator=torch.Generator().manual_seed(seed)).double() for seed in (0, 1))
    chain = one_position(3 * policy, 3 * policy, teacher_logits=3 * policy + 0.1 * gap)
    for direction, head in (("reverse", "student"), ("forward", "teacher")):
        none, four = (taught_by(estimator="topk", direction=direction, head=head, top_k=k) for k in (0, 4))
        bias = (expected_gradient(chain, _plus(four)) - expected_gradient(chain, as_loss(four))).abs().max()
        mine, bare, one = (_noise(chain, loss) for loss in (as_loss(four), as_loss(none), _plus(four)))
        text = f"bias {bias:.0e}, variance {one:.2g}; no head {bare:.2g}; klamp's head {mine:.2g}"
        claim = f"{direction}, delta + 1 in head and tail: no bias, and noisier than no head at all"
        yield is_true(claim, bias < EXACT and mine < bare < one / 10, text, expected="klamp's < none < a tenth")


def _noise(chain: Chain, loss: Loss) -> float:
    probs, gradients = enumerate_outcomes(chain).probs, _of_each_sample(chain, loss)[:, 0]
    return float(probs @ (gradients - probs @ gradients).square().sum(-1))


def _plus(teacher: TeacherConfig) -> Loss:
    return lambda y: as_loss(teacher)(y) + constants(y, teacher, 1.0, 1.0)


def constants(y: Outcomes, teacher: TeacherConfig, head: float, tail: float) -> Tensor:
    """What constants added to delta add: the head's mass, and the weighted score of a token outside the head."""
    logits = y.policy_logits if teacher.teacher_head == "student" else y.teacher_logits
    inside = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, logits.topk(teacher.teacher_top_k).indices, True)
    drawn = inside.gather(-1, y.tokens.clamp(min=0)[..., None])[..., 0]
    weight = 1.0 if teacher.teacher_off_policy == "none" else y.weight.detach()
    mass = torch.where(inside, y.policy_logits.softmax(-1), 0.0).sum(-1)
    return head * mass + tail * ~drawn * weight * (y.policy_logprobs - y.policy_logprobs.detach())


FIVE = ((1.0, 0.4, -0.2, -0.6, -1.0), (0.2, 0.9, -0.1, 0.3, -0.7), (0.2, 0.1, 0.4, 0.0, -0.3))
FOUR = ((1.0, 0.2, -0.3, -0.8), (0.1, 0.9, -0.2, 0.0))
SIX = ((2.0, 1.2, 0.3, -0.4, -1.0, -1.5),) * 2
"""Logits of a student, a teacher and perhaps a sampler, at which these forms were found elsewhere."""


def _position(logits: Sequence[Sequence[float]]) -> Chain:
    policy, teacher, *sampler = (torch.tensor(row, dtype=torch.float64) for row in logits)
    return one_position(policy, policy, sampler[0] if sampler else None, teacher)


def prove_wrong_forms() -> list[Check]:
    """Checks what forms that claim the KL to a teacher do instead: each differentiated as written."""
    return [*_other_heads(), *_other_tails(), *_other_gradients()]


def _other_heads() -> Iterator[Check]:
    """Forms that stand still where they should not, or do not at the teacher: the size of their gradients."""
    four, same = _position(FOUR), _position((FOUR[1], FOUR[1]))
    no_tail = as_loss(taught_by(estimator="topk", top_k=2, tail="none"))

    def js(y: Outcomes, b: float = 0.99) -> Tensor:
        p, q = _logprobs(y)
        m = torch.logaddexp(p + math.log(1 - b), q + math.log(b))
        return b * divergence(q, m) + (1 - b) * divergence(p, m)

    def half_renormalised(y: Outcomes) -> Tensor:
        return divergence(_logprobs(y, 2)[1], _logprobs(y)[0][..., :2])

    rows: tuple[tuple[str, Chain, Loss, float], ...] = (
        ("klamp's head of 1 and a tail, apart", four, as_loss(taught_by(estimator="topk", top_k=1)), 0.431888),
        ("renormalised over a head of 1, apart", four, lambda y: divergence(*_logprobs(y, 1)), 0.0),
        ("JS(.99) as the reverse KL, apart", four, js, 0.004262),
        ("no tail, at the teacher", _position(SIX), no_tail, 0.152188),
        ("teacher renormalised, student not, at it", same, half_renormalised, 0.350623),
    )
    for claim, chain, loss, size in rows:
        yield is_equal(f"{claim}: size of the gradient", expected_gradient(chain, loss).norm(), size, tolerance=1e-6)


def _logprobs(y: Outcomes, first: int | None = None) -> tuple[Tensor, Tensor]:
    return y.policy_logits[..., :first].log_softmax(-1), y.teacher_logits[..., :first].log_softmax(-1)


def _other_tails() -> Iterator[Check]:
    """Tails without a weight, with another constant, or made of one entry: how far the gradient is off."""
    five, head = _position(FIVE), {"estimator": "topk", "head": "teacher", "top_k": 1}
    weighted, bare = taught_by(**head, off_policy="token"), taught_by(**head)
    rows: tuple[tuple[str, Loss, float], ...] = (
        ("klamp's head and tail", as_loss(weighted), 0.0),
        ("tail without its weight", as_loss(bare), 0.330511),
        ("tail without its weight, delta + 1", _plus(bare), 1.063616),
        ("delta + 1 in the tail alone", lambda y: as_loss(weighted)(y) + constants(y, weighted, 0.0, 1.0), 0.621929),
        ("one bucket for the tail", as_loss(taught_by(**head, tail="bucket")), 0.754653),
        ("the generalised head", as_loss(taught_by(**head, tail="generalised")), 0.820546),
    )
    truth = truths(five.towards("teacher"))["reverse"]
    for claim, loss, off in rows:
        error = (expected_gradient(five, loss) - truth).norm() / truth.norm()
        yield is_equal(f"{claim}, another sampler: share that is off", error, off, tolerance=1e-6)


def _other_gradients() -> Iterator[Check]:
    """Forms that follow another divergence or none, and a teacher in front of the standardisation."""
    four, chain = _position(FOUR), random_chain(0, vocab=3, length=2)
    k3 = expected_gradient(four, lambda y: torch.exp(y.teacher_logprobs - y.policy_logprobs) + y.policy_logprobs)
    yield _followed("k3 of the sampled token as a loss, called reverse", four, k3, "forward")
    top = taught_by(estimator="topk", top_k=2, tail="none")
    shift = expected_gradient(chain, lambda y: teacher_kl(y, top).detach() * y.policy_logprobs)
    yield _followed("a head's KL as a shift of the advantage", chain, shift, "zero")
    delta = torch.tensor([0.02, -0.01, 0.03, -0.02], dtype=torch.float64)
    small, large = (group_advantages(-coef * delta, 4, scale="std", eps=0.0) for coef in (0.01, 1.0))
    claim = "in front of the standardisation: 100 times the coefficient, the same advantages"
    yield is_equal(claim, (small - large).abs().max(), 0.0)
