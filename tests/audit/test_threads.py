"""Public threads about a wrong KL, mask or shift, replayed: the fault is named with the fix that ended the thread.

Each fault is rebuilt as a small loss with the inputs that its loop has at hand. No line is a copy of a project's code.
"""

from itertools import product
from typing import Any

import pytest
import torch
from tests.audit.bench.losses import entropy, head_of, k2, k3, normalised, ppo, ratio_k3
from tests.audit.bench.worlds import Score, World, made_cases, make_world, pick, verdict_of
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div, logsigmoid

Made = dict[str, tuple[Tensor, dict[str, Any]]]


def on(w: World, beta: float | None = None, **more: Any) -> dict[str, Any]:
    """What a loop passes: not the sampler's log-probabilities."""
    return w.passed() | {"sampler_logprobs": None, "beta": beta} | more


def losses(w: World) -> Made:
    policy, rk3, a = ppo(w), ratio_k3(w), w.a.expand_as(w.logp)
    subtracted = -0.001 * w.token(k3(w.d))
    first, half, answers = w.logp, len(w.logp) // 2, w.mask & (w.places >= 3)
    with torch.no_grad():
        unseen_k2, unseen_k3 = (first - w.ref).square() / 2, k3(first - w.ref)
    # DPO: chosen rows, then rejected rows; the prompt's mask covers the chosen half alone
    margin = ((w.logp - w.ref) * (answers | (w.mask & (torch.arange(2 * half) >= half)[:, None]))).sum(1)
    apart = margin[:half] - margin[half:]
    # the KL meant for the reward is computed and dropped: the returns are the rewards, normalised per prompt
    returns = normalised(w.rewards, w.group, "z-score")
    dropped = {"advantages": returns, "rewards": w.rewards, "group_size": w.group}
    return {
        # the teacher is asked, and the loss has no term with it; beta is in the recipe and never reaches the trainer
        "atropos 456: kl-absent": (w.sequence(policy), on(w, 0.1, kl_in="loss")),
        "FAI-RL 96: kl-absent": (w.token(policy), on(w, 0.04, kl_in="loss")),
        "slime 397: kl-absent": (w.sequence(ppo(w, a=returns[:, None])), on(w, 0.05, **dropped)),
        # k3 of the other direction; kl1 as a loss (the fix offers kl4, the live ratio times the log-ratio)
        "rlhf-book 489: kl-swapped": (w.sequence(policy + 0.04 * k3(-w.d)), on(w, 0.04)),
        "open-instruct 534: kl-zero": (w.token(policy + 0.03 * w.d), on(w, 0.03)),
        # computed under no_grad
        "open-instruct 530: kl-detached kl-absent": (w.token(policy + 0.03 * unseen_k2), on(w, 0.03)),
        "SkyRL 1353: kl-detached kl-absent": (w.sequence(policy + 0.001 * unseen_k3), on(w, 0.001)),
        # the KL is subtracted: plainly; in one of four micro-batches; beside an entropy bonus
        "ToolRL 52: kl-away": (w.token(policy) + subtracted, on(w, 0.001)),
        "Logic-RL 58: kl-away": ((w.token(policy) + subtracted) / 4, on(w, 0.001, advantages=a)),
        "RAGEN 58: kl-away": (w.token(policy - 0.001 * entropy(w)) + subtracted, on(w, 0.001)),
        # minus the mean log-ratio is added: each sampled token is raised, whatever the reference says
        "marin 1708: kl-zero kl-away": (w.token(-a * w.r) - 0.05 * w.token(w.d), on(w, 0.05)),
        # the loss of a token is negated, and the sum once more
        "flash-linear-attention 1076: policy-reversed": (-w.token(policy + 0.04 * rk3), on(w, 0.04)),
        # a mean over all places beside a masked mean: of zeros outside the mask, and of the KL itself
        "torchrl GRPOLoss: beta-off": (w.token(policy) + 0.05 * (rk3 * w.m).mean(), on(w, 0.05)),
        "open-instruct 535: off-mask-gradient": (w.token(policy) + 0.03 * k2(w).mean(), on(w, 0.03)),
        # the default ratio is exp(0), a constant: the advantages have no gradient
        "mlx-lm-lora 55: policy-absent": (w.sequence(ppo(w, r=w.r.detach() ** 0) + 0.1 * rk3), on(w, 0.1)),
        # k3 is differentiated without the score term
        "NeMo-RL 2506: kl-forward": (w.token(policy + 0.01 * k3(w.d)), on(w, 0.01)),
        "OpenRLHF 294: off-mask-gradient": (-logsigmoid(apart / 10).mean(), on(w, mask=answers, advantages=None)),
    }


def on_logits(w: World) -> Made:
    (s, t), answers = head_of(w), w.mask & (w.places >= 3)
    log_p, log_q = w.logits.log_softmax(-1), w.ref_logits.log_softmax(-1)
    p, q = s.log_softmax(-1), t.log_softmax(-1)
    skewed = kl_div((0.1 * log_q.exp() + 0.9 * log_p.exp()).log(), log_q.exp(), reduction="none").sum(-1)
    labels = cross_entropy(w.logits.flatten(0, 1), w.ids.flatten())
    apart = (log_p.exp().sort(-1).values - log_q.exp().sort(-1).values).abs().sum(-1)
    ours = on(w, 0.1, old_logprobs=None, means="forward", **w.logits_passed())
    return {
        # the teacher's top four, both sides renormalised, beside the GRPO loss
        "atropos 464: head-renormalised": (w.token(-w.a * w.live + 0.1 * (q.exp() * (q - p)).sum(-1)), ours),
        # the reverse KL over the teacher's top four without a tail; the fix: the forward KL of head and tail
        "verl 5041: head-no-tail": (w.token((s.exp() * (s - t)).sum(-1)), w.teacher_passed()),
        # over all places, padding too; masked by attention and not by the labels, which leave the prompt out
        "optipfair 34: off-mask-gradient": ((skewed.mean() + labels) / 2, w.teacher_passed(means="forward")),
        "Soup 682: off-mask-gradient": (w.token(apart), w.teacher_passed(mask=answers)),
    }


def lagless(w: World) -> Made:
    """Faults that show before the first update."""
    # the old log-probabilities come from the sampler's engine, so that the ratio is not 1 before any update
    trinity, u, (own, its) = w.of(w.logp, old=w.sampler), w.ref - w.logp, head_of(w, whose=w.logits)
    sampled, weighted = on(trinity, 0.05, sampler_logprobs=w.sampler), (own.softmax(-1) * (own - its)).sum(-1)
    # an image token becomes three patches: the logits are longer than the ids, and gather reads other places
    front = torch.zeros_like(w.logits[:, :3]).detach()
    long = [torch.cat([front, x], 1) for x in (w.logits, w.ref_logits)]
    cut = [pick(x[:, : w.ids.shape[1]], w.ids) for x in long]
    patched = w.of(cut[0], ref=cut[1], old=cut[0].detach())
    seen = {"logits": long[0], "ref_logits": long[1], "ids": w.ids, "old_logprobs": None}
    return {
        "Trinity-RFT 426: sampler-mismatch old-is-sampler": (w.token(ppo(trinity) + 0.05 * k2(w)), sampled),
        # distillation: (teacher - student) times exp of itself, nothing detached
        "torchforge 527: kl-neither kl-zero kl-away": (w.token(u * u.exp()), on(w, advantages=None)),
        # a KL over the student's top four, its weights renormalised, is a factor of the score of any sampled token
        "miles 2362: kl-zero": (w.token(weighted.detach() * w.live), w.teacher_passed()),
        "LightRFT 53: logits-shape": (w.token(-w.a * patched.r + 0.05 * ratio_k3(patched)), on(patched, 0.05, **seen)),
    }


def inputs(w: World) -> Made:
    # trainer: the log-probability of the next token, at temperature 1; sampler: of this token, at 0.9
    cooler = pick(w.logits.detach() / 0.9, w.ids)
    both = [pick(x, w.ids).roll(-1, 1) for x in (w.logits, w.ref_logits)]
    swift = w.of(both[0], ref=both[1], old=both[0].detach())
    swift_loss = ppo(swift) * (swift.old - cooler).exp().clamp(max=2) + 0.04 * ratio_k3(swift)
    # one packed row: the trainer's log-probabilities stand one place left of the sampler's, mask and advantages
    flat, sampler, mask, a = (x.flatten() for x in (w.logp, w.sampler, w.mask, w.a.expand_as(w.logp)))
    flat = flat.roll(-1)
    prime = {"policy_logprobs": flat, "mask": mask, "sampler_logprobs": sampler, "advantages": a[None]}
    prime["segments"] = torch.arange(len(w.logp)).repeat_interleave(w.ids.shape[1])
    # the trainer divides its logits by 0.7; the plain model's logits are at hand for a comparison
    warm, nothing = pick(w.logits / 0.7, w.ids), dict.fromkeys(on(w))
    plain = {"policy_logprobs": warm, "mask": w.mask, "logits": w.logits, "ids": w.ids}
    return {
        "ms-swift 8196: shift": (w.token(swift_loss), on(swift, 0.04, sampler_logprobs=cooler)),
        "prime-rl 1525: shift": (-((flat - sampler).exp() * a)[mask].sum() / mask.sum(), nothing | prime),
        "tinker-cloud 26: temperature": (-w.token(warm), nothing | plain),
    }


def sound(w: World) -> Made:
    """Right, though somebody cried bug."""
    teacher = (w.ref - w.old).detach()
    # RLOO: the ratio of a whole completion, clipped; the old policy's log-ratio is taken from the reward
    a = normalised(w.rewards - 0.05 * w.sums(w.old - w.ref), w.group, "leave one out")
    scaled, r, given = (a - a.mean()) / (a.std() + 1e-4), w.sums(w.log_r).exp(), {"rewards": w.rewards}
    given["group_size"] = w.group
    # one prompt's rewards are equal: its advantages are 0, and its KL has a gradient
    some = w.advantages * (torch.arange(len(w.ids)) >= w.group)
    # kl_div(student, teacher) is KL(teacher||student)
    s, t = w.logits.log_softmax(-1), w.ref_logits.log_softmax(-1)
    forward, reverse = (kl_div(*x, reduction="none", log_target=True).sum(-1) for x in ((s, t), (t, s)))
    return {
        "slime 1068": (w.token(ppo(w, a=teacher)), on(w, 1.0, advantages=teacher)),
        "TRL 5889": (ppo(w, a=a, r=r).mean(), on(w, 0.05, advantages=a, **given)),
        "TRL 7086": (ppo(w, a=scaled, r=r).mean(), on(w, 0.05, advantages=scaled, **given)),
        "TRL 5588": (w.sequence(ppo(w, a=some[:, None]) + 0.05 * ratio_k3(w)), on(w, 0.05, advantages=some)),
        "TRL 4935": (w.token(forward), w.teacher_passed(means="forward")),
        "twinkle 112": (w.sequence(reverse), w.teacher_passed()),
    }


FIXES = {
    "kl-absent": "add beta * kl to the loss",
    "kl-detached": "no_grad",
    "kl-away": "+ beta * kl",
    "kl-swapped": "exp(ref - policy)",
    "kl-neither": "kl_penalty",
    "kl-forward": "exp(logp - logp.detach())",
    "policy-reversed": "negate it only once",
    "policy-absent": "exp(logp - old)",
    "beta-off": "mask.sum()",
    "off-mask-gradient": "mask",
    "head-renormalised": "tail",
    "head-no-tail": "tail",
    "shift": "logits[:, :-1] with ids[:, 1:]",
    "logits-shape": "cut the logits",
    "temperature": "temperature",
}
"""Words of the fix that ended the thread, which are in the finding's own fix."""


def test_at_least_25_of_the_27_faults_are_named_with_the_fix_of_their_thread() -> None:
    world, missed = make_world(1), list[str]()
    threads = losses(world) | on_logits(world) | inputs(world) | lagless(make_world(1, lag=0))
    for case in made_cases(threads):
        verdict, codes = verdict_of(case, world), case.name.split(": ")[1].split()
        found = [x for x in verdict.findings if x.code in codes and x.level in ("wrong", "warning")]
        if not any(FIXES.get(x.code, "").lower() in x.fix.lower() for x in found):
            missed.append(f"\n--- {case.name}\n{verdict}")
    assert len(threads) == 28 and len(missed) <= 2 and "slime 397" not in str(missed), "".join(missed)


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_threads_without_a_fault_are_not_accused(seed: int) -> None:
    world = make_world(seed)
    Score(product(made_cases(sound(world), kl=(), beta=None), [world])).demand()
