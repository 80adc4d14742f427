"""Faults of public threads, each rebuilt as a small loss with the inputs that its loop has at hand.

A thread is a function `(world, fixed)`: the fault, or, if `fixed` is true, the loss with the fix that ended the thread.
It returns the loss and the arguments of `klamp.check`. No line is a copy of a project's code.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from tests.audit.bench.sound import entropy, k3, ppo
from tests.audit.bench.worlds import World, make_world, pick
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div, logsigmoid

import klamp
from klamp.audit.verdict import Verdict

Made = tuple[Tensor, dict[str, Any]]


class Thread(NamedTuple):
    """A fault and its end.

    Attributes:
        make: the loss and the arguments.
        codes: one of these is found; () for a sound loss.
        fix: a word of the fix that ended the thread; it is in the fix that the finding names.
        mended: whether the fix of the thread leaves a loss that is right.
        world: arguments of `make_world`.
    """

    make: Callable[[World, bool], Made]
    codes: tuple[str, ...] = ()
    fix: str = ""
    mended: bool = True
    world: tuple[tuple[str, Any], ...] = ()


def verdict_of(thread: Thread, *, fixed: bool = False, seed: int = 1) -> Verdict:
    """`klamp.check` on a thread's loss."""
    loss, arguments = thread.make(make_world(seed, **dict(thread.world)), fixed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return klamp.check(loss, once=False, **arguments)


def is_named(thread: Thread, verdict: Verdict) -> bool:
    """Whether a verdict finds the fault and names the fix that ended the thread."""
    found = [x for x in verdict.findings if x.code in thread.codes and x.level in ("wrong", "warning")]
    return any(thread.fix.lower() in x.fix.lower() for x in found)


def passed(w: World, *names: str, **more: Any) -> dict[str, Any]:
    """The arguments that a loop passes: policy, mask, reference, advantages, and what is named."""
    known: dict[str, Any] = {"policy_logprobs": w.logp, "mask": w.mask, "ref_logprobs": w.ref}
    known |= {"advantages": w.advantages}
    known |= {f"{name}_logprobs": getattr(w, name) for name in names}
    return {name: x for name, x in (known | more).items() if x is not None}


def on_logits(w: World, **more: Any) -> dict[str, Any]:
    """The arguments of a distillation loss."""
    return {"logits": w.logits, "teacher_logits": w.ref_logits, "mask": w.mask, "ids": w.ids} | more


# the inputs


def trinity_426(w: World, fixed: bool) -> Made:
    """The old log-probabilities come from the sampler's engine, so that the ratio is not 1 before any update."""
    old = w.old if fixed else w.sampler
    r = (w.logp - old).exp()
    return w.token(ppo(w, r=r) + 0.05 * w.d.square() / 2), passed(
        w, beta=0.05, old_logprobs=old, sampler_logprobs=w.sampler
    )


def ms_swift_8196(w: World, fixed: bool) -> Made:
    """Trainer: the log-probability of the next token, at temperature 1. Sampler: of this token, at 0.9."""
    heat = 0.9 if fixed else 1.0
    logits, ids = w.logits / heat, w.ids
    sampler = pick(w.logits.detach() / 0.9, ids)
    policy, ref = pick(logits, ids), pick(w.ref_logits / heat, ids)
    if not fixed:
        policy, ref = policy.roll(-1, 1), ref.roll(-1, 1)
    old = policy.detach()
    r = (policy - old).exp()
    weight = (old - sampler).exp().clamp(max=2)
    loss = w.token(ppo(w, r=r) * weight + 0.04 * k3(policy - ref) * r)
    given = {"policy_logprobs": policy, "ref_logprobs": ref, "old_logprobs": old, "sampler_logprobs": sampler}
    return loss, passed(w, beta=0.04, **given)


def prime_rl_1525(w: World, fixed: bool) -> Made:
    """One packed row: the trainer's log-probabilities stand one place left of the sampler's, mask and advantages."""
    flat = w.logp.flatten() if fixed else w.logp.flatten().roll(-1)
    sampler, mask, a = w.sampler.flatten(), w.mask.flatten(), w.a.expand_as(w.logp).flatten()
    ratio = (flat - sampler).exp()
    loss = -(ratio * a)[mask].sum() / mask.sum()
    given: dict[str, Any] = {"policy_logprobs": flat, "mask": mask, "sampler_logprobs": sampler}
    return loss, given | {
        "advantages": a[None],
        "segments": torch.arange(len(w.logp)).repeat_interleave(w.ids.shape[1]),
    }


def light_rft_53(w: World, fixed: bool) -> Made:
    """An image token becomes three patches: the logits are longer than the ids, and gather reads other places."""
    rows, width, size = w.logits.shape
    patches = torch.zeros(rows, 3, size, dtype=w.logits.dtype)
    logits, ref_logits = (torch.cat([patches, x], 1) for x in (w.logits, w.ref_logits))
    if fixed:
        logits, ref_logits = logits[:, -width:], ref_logits[:, -width:]
    policy, ref = (x.log_softmax(-1)[:, :width].gather(-1, w.ids[..., None])[..., 0] for x in (logits, ref_logits))
    r = (policy - policy.detach()).exp()
    loss = w.token(-w.a * r + 0.05 * r * k3(policy - ref))
    given = {"policy_logprobs": policy, "ref_logprobs": ref, "logits": logits, "ref_logits": ref_logits}
    return loss, passed(w, beta=0.05, ids=w.ids, **given)


def tinker_cloud_26(w: World, fixed: bool) -> Made:
    """The trainer divides its logits by 0.7; the plain model's logits are at hand for a comparison."""
    policy = pick(w.logits if fixed else w.logits / 0.7, w.ids)
    loss = -(w.m * policy).sum() / w.m.sum()
    given: dict[str, Any] = {"policy_logprobs": policy, "ref_logprobs": None, "advantages": None}
    return loss, passed(w, logits=w.logits, ids=w.ids, **given)


# losses


def atropos_456(w: World, fixed: bool) -> Made:
    """The teacher is asked, and the loss has no term with it."""
    kl = w.r * k3(w.d) if fixed else 0.0
    return w.sequence(ppo(w) + 0.1 * kl), passed(w, "old", beta=0.1, kl_in="loss")


def torchforge_527(w: World, fixed: bool) -> Made:
    """Distillation: (teacher - student) times exp of itself, nothing detached; the fix detaches the log-ratio."""
    u = w.ref - w.logp
    loss = w.token(-u.detach() * w.logp if fixed else u * u.exp())
    return loss, passed(w, advantages=None)


def rlhf_book_489(w: World, fixed: bool) -> Made:
    """k3 of the other direction: exp(d) - 1 - d."""
    return w.sequence(ppo(w) + 0.04 * (k3(w.d) if fixed else torch.expm1(w.d) - w.d)), passed(w, "old", beta=0.04)


def open_instruct_530(w: World, fixed: bool) -> Made:
    """The KL is computed under no_grad, then added."""
    policy = w.logp
    with torch.set_grad_enabled(fixed):
        kl = (policy - w.ref).square() / 2
    return w.token(ppo(w) + 0.03 * kl), passed(w, "old", beta=0.03)


def open_instruct_534(w: World, fixed: bool) -> Made:
    """kl1 as a loss; the fix offers kl4, the live ratio times the log-ratio."""
    return w.token(ppo(w) + 0.03 * (w.r * w.d if fixed else w.d)), passed(w, "old", beta=0.03)


def open_instruct_535(w: World, fixed: bool) -> Made:
    """beta * kl.mean() over all places beside a masked mean."""
    kl = 0.03 * w.d.square() / 2
    return w.token(ppo(w)) + (w.token(kl) if fixed else kl.mean()), passed(w, "old", beta=0.03)


def sky_rl_1353(w: World, fixed: bool) -> Made:
    """The KL function wears no_grad; the loss is a mean of each completion's mean."""
    policy = w.logp
    with torch.set_grad_enabled(fixed):
        kl = k3(policy - w.ref)
    return w.sequence(ppo(w)) + 0.001 * w.sequence(kl), passed(w, "old", beta=0.001)


def tool_rl_52(w: World, fixed: bool) -> Made:
    """The KL is subtracted."""
    return w.token(ppo(w)) + (1 if fixed else -1) * 0.001 * w.token(k3(w.d)), passed(w, "old", beta=0.001)


def logic_rl_58(w: World, fixed: bool) -> Made:
    """The same sign, in one of four micro-batches, with advantages of each token."""
    a = w.a.expand_as(w.logp)
    loss = w.token(ppo(w, a=a)) + (1 if fixed else -1) * 0.001 * w.token(k3(w.d))
    return loss / 4, passed(w, "old", beta=0.001, advantages=a)


def ragen_58(w: World, fixed: bool) -> Made:
    """The same sign beside an entropy bonus, which reaches the parameters around the log-probabilities."""
    bonus = 0.001 * w.token(entropy(w))
    return w.token(ppo(w)) - bonus + (1 if fixed else -1) * 0.001 * w.token(k3(w.d)), passed(w, "old", beta=0.001)


def marin_1708(w: World, fixed: bool) -> Made:
    """Minus the mean log-ratio is added: each sampled token is raised, whatever the reference says."""
    kl = w.token(w.d.square()) if fixed else -w.token(w.d)
    return w.token(-w.a * w.r) + 0.05 * kl, passed(w, "old", beta=0.05)


def fla_1076(w: World, fixed: bool) -> Made:
    """The loss of a token is negated, and the sum once more."""
    loss = w.token(ppo(w) + 0.04 * w.r * k3(w.d))
    return loss if fixed else -loss, passed(w, "old", beta=0.04)


def torchrl_grpo(w: World, fixed: bool) -> Made:
    """The KL is zero outside the mask, and a mean over all places."""
    kl = w.r * k3(w.d) * w.m
    return w.token(ppo(w)) + 0.05 * (w.token(kl) if fixed else kl.mean()), passed(w, "old", beta=0.05)


def fai_rl_96(w: World, fixed: bool) -> Made:
    """beta is in the recipe and never reaches the trainer."""
    return w.sequence(ppo(w) + (0.04 if fixed else 0.0) * w.r * k3(w.d)), passed(w, "old", beta=0.04, kl_in="loss")


def mlx_lm_lora_55(w: World, fixed: bool) -> Made:
    """The default ratio is exp(0), a constant: the advantages have no gradient."""
    log_ratio = w.log_r if fixed else torch.zeros_like(w.logp)
    loss = w.sequence(ppo(w, r=log_ratio.exp()) + 0.1 * w.r * k3(w.d))
    return loss, passed(w, "old", beta=0.1)


def nemo_rl_2506(w: World, fixed: bool) -> Made:
    """k3 is differentiated without the score term; the fix multiplies it by exp(logp - logp.detach())."""
    return w.token(ppo(w) + 0.01 * (w.live if fixed else 1.0) * k3(w.d)), passed(w, "old", beta=0.01)


def open_rlhf_294(w: World, fixed: bool) -> Made:
    """DPO: chosen rows, then rejected rows; the prompt's mask covers the chosen half alone."""
    half = len(w.logp) // 2
    prompt = torch.zeros_like(w.mask)
    prompt[: (len(w.logp) if fixed else half), :3] = True
    used = (w.mask & ~prompt).to(w.logp.dtype)
    policy, ref = (w.logp * used).sum(1), (w.ref * used).sum(1)
    margin = (policy - ref)[:half] - (policy - ref)[half:]
    answers = w.mask.clone()
    answers[:, :3] = False
    return -logsigmoid(0.1 * margin).mean(), passed(w, advantages=None, mask=answers)


# losses on logits


def head_of(w: World, size: int = 4, *, whose: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Log-probabilities of student and teacher at the largest logits of the teacher, or of another model."""
    at = (w.ref_logits if whose is None else whose).topk(size).indices
    student, teacher = (x.log_softmax(-1).gather(-1, at) for x in (w.logits, w.ref_logits))
    return student, teacher


def atropos_464(w: World, fixed: bool) -> Made:
    """The teacher's top four, both sides renormalised, beside the GRPO loss."""
    s, t = head_of(w)
    kl = (t.log_softmax(-1).exp() * (t.log_softmax(-1) - s.log_softmax(-1))).sum(-1)
    if fixed:
        log_s, log_t = w.logits.log_softmax(-1), w.ref_logits.log_softmax(-1)
        kl = (log_t.exp() * (log_t - log_s)).sum(-1)
    given = {"logits": w.logits, "ref_logits": w.ref_logits, "ids": w.ids}
    return w.token(-w.a * w.live + 0.1 * kl), passed(w, beta=0.1, means="forward", **given)


def miles_2362(w: World, fixed: bool) -> Made:
    """A KL over the student's top four, its weights renormalised, is a factor of the score of any sampled token."""
    s, t = (x.detach() for x in head_of(w, whose=w.logits))
    kl = (s.softmax(-1) * (s - t)).sum(-1)
    if fixed:
        log_s, log_t = w.logits.log_softmax(-1), w.ref_logits.log_softmax(-1)
        return w.token((log_s.exp() * (log_s - log_t)).sum(-1)), on_logits(w)
    return w.token(kl * w.live), on_logits(w)


def verl_5041(w: World, fixed: bool) -> Made:
    """The reverse KL over the teacher's top four, without a tail. The fix: the forward KL of head and tail."""
    s, t = head_of(w)
    kl = (s.exp() * (s - t)).sum(-1)
    if fixed:
        s, t = (torch.cat([x, torch.log1p(-x.exp().sum(-1, keepdim=True))], -1) for x in (s, t))
        kl = (t.exp() * (t - s)).sum(-1)
    return w.token(kl), on_logits(w, **({"means": "forward"} if fixed else {}))


def optipfair_34(w: World, fixed: bool) -> Made:
    """Cross-entropy and a skewed KL over all places, padding too."""
    labels = w.ids.masked_fill(~w.mask, -100) if fixed else w.ids
    task = cross_entropy(w.logits.flatten(0, 1), labels.flatten())
    s, t = w.logits.softmax(-1), w.ref_logits.softmax(-1)
    skewed = kl_div((0.1 * t + 0.9 * s).log(), t, reduction="none").sum(-1)
    return 0.5 * task + 0.5 * (w.token(skewed) if fixed else skewed.mean()), on_logits(w, means="forward")


def soup_682(w: World, fixed: bool) -> Made:
    """Distances of sorted probabilities, masked by attention and not by the labels, which leave the prompt out."""
    answer = w.mask.clone()
    answer[:, :3] = False
    s, t = (x.softmax(-1).sort(-1, descending=True).values for x in (w.logits, w.ref_logits))
    distance, used = (s - t).abs().sum(-1), answer if fixed else w.mask
    return (distance * used).sum() / used.sum(), on_logits(w, mask=answer)


def slime_397(w: World, fixed: bool) -> Made:
    """The KL meant for the reward is computed and dropped: the returns are the rewards, normalised per prompt."""
    rewards = w.rewards - 0.05 * w.sums(w.old - w.ref) if fixed else w.rewards
    groups = rewards.reshape(-1, w.group)
    a = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)).flatten()
    given = {"advantages": a, "rewards": w.rewards, "group_size": w.group}
    return w.sequence(ppo(w, a=a[:, None])), passed(w, "old", beta=0.05, **given)


# right, though somebody cried bug


def slime_1068(w: World, fixed: bool) -> Made:
    """Advantages: teacher minus student, detached; the policy loss is PPO's."""
    del fixed
    a = (w.ref - w.old).detach()
    return w.token(ppo(w, a=a)), passed(w, "old", advantages=a, beta=1.0)


def leave_one_out(w: World, fixed: bool, *, scaled: bool = False) -> Made:
    """RLOO's loss: the ratio of a whole completion, clipped; the old policy's log-ratio is taken from the reward."""
    del fixed
    rewards = w.rewards - 0.05 * w.sums(w.old - w.ref)
    groups = rewards.reshape(-1, w.group)
    a = (groups - (groups.sum(1, keepdim=True) - groups) / (w.group - 1)).flatten()
    if scaled:
        a = (a - a.mean()) / (a.std() + 1e-4)
    r = w.sums(w.log_r).exp()
    loss = torch.maximum(-a * r, -a * r.clamp(0.8, 1.2)).mean()
    return loss, passed(w, "old", advantages=a, rewards=w.rewards, group_size=w.group, beta=0.05)


def trl_5588(w: World, fixed: bool) -> Made:
    """One prompt's rewards are equal: its advantages are 0, and its KL has a gradient."""
    del fixed
    a = w.advantages.clone()
    a[: w.group] = 0
    return w.sequence(ppo(w, a=a[:, None]) + 0.05 * w.r * k3(w.d)), passed(w, "old", advantages=a, beta=0.05)


def trl_4935(w: World, fixed: bool) -> Made:
    """kl_div(student, teacher) is KL(teacher||student)."""
    del fixed
    kl = kl_div(w.logits.log_softmax(-1), w.ref_logits.log_softmax(-1), reduction="none", log_target=True).sum(-1)
    return w.token(kl), on_logits(w, means="forward")


def twinkle_112(w: World, fixed: bool) -> Made:
    """kl_div(teacher, student) is KL(student||teacher)."""
    del fixed
    kl = kl_div(w.ref_logits.log_softmax(-1), w.logits.log_softmax(-1), reduction="none", log_target=True).sum(-1)
    return w.sequence(kl), on_logits(w)


PADDING = ("off-mask-gradient",)
LAGLESS = (("lag", 0),)

FAULTS: dict[str, Thread] = {
    "Trinity-RFT 426": Thread(trinity_426, ("sampler-mismatch", "old-is-sampler"), "", world=LAGLESS),
    "atropos 456": Thread(atropos_456, ("kl-absent",), "add beta * kl to the loss"),
    "atropos 464": Thread(atropos_464, ("head-renormalised",), "tail"),
    "torchforge 527": Thread(torchforge_527, ("kl-neither", "kl-zero", "kl-away"), "kl_penalty", world=LAGLESS),
    "rlhf-book 489": Thread(rlhf_book_489, ("kl-swapped",), "exp(ref - policy)", mended=False),
    "open-instruct 530": Thread(open_instruct_530, ("kl-detached", "kl-absent"), "no_grad"),
    "open-instruct 534": Thread(open_instruct_534, ("kl-zero",), "log_ratio**2", mended=False),
    "SkyRL 1353": Thread(sky_rl_1353, ("kl-detached", "kl-absent"), "no_grad", mended=False),
    "ToolRL 52": Thread(tool_rl_52, ("kl-away",), "+ beta * kl", mended=False),
    "Logic-RL 58": Thread(logic_rl_58, ("kl-away",), "+ beta * kl", mended=False),
    "RAGEN 58": Thread(ragen_58, ("kl-away",), "+ beta * kl", mended=False),
    "marin 1708": Thread(marin_1708, ("kl-zero", "kl-away"), "log_ratio**2", mended=False),
    "miles 2362": Thread(miles_2362, ("kl-zero",), "", world=LAGLESS),
    "ms-swift 8196": Thread(ms_swift_8196, ("shift",), "logits[:, :-1] with ids[:, 1:]"),
    "prime-rl 1525": Thread(prime_rl_1525, ("shift",), "logits[:, :-1] with ids[:, 1:]"),
    "flash-linear-attention 1076": Thread(fla_1076, ("policy-reversed",), "negate it only once"),
    "verl 5041": Thread(verl_5041, ("head-no-tail",), "tail"),
    "torchrl GRPOLoss": Thread(torchrl_grpo, ("beta-off",), "mask.sum()"),
    "open-instruct 535": Thread(open_instruct_535, PADDING, "mask.sum()"),
    "FAI-RL 96": Thread(fai_rl_96, ("kl-absent",), "add beta * kl to the loss"),
    "mlx-lm-lora 55": Thread(mlx_lm_lora_55, ("policy-absent",), "exp(logp - old)"),
    "NeMo-RL 2506": Thread(nemo_rl_2506, ("kl-forward",), "exp(logp - logp.detach())"),
    "LightRFT 53": Thread(light_rft_53, ("logits-shape",), "cut the logits", world=LAGLESS),
    "tinker-cloud 26": Thread(tinker_cloud_26, ("temperature",), "temperature"),
    "OpenRLHF 294": Thread(open_rlhf_294, PADDING, "mask"),
    "optipfair 34": Thread(optipfair_34, PADDING, "mask"),
    "Soup 682": Thread(soup_682, PADDING, "mask"),
}
"""The 27 threads that one micro-batch shows."""

REWARDS: dict[str, Thread] = {"slime 397": Thread(slime_397, ("kl-absent",), "add beta * kl to the loss")}
"""A thread that rewards and advantages show."""

SOUND: dict[str, Thread] = {
    "slime 1068": Thread(slime_1068),
    "TRL 5889": Thread(leave_one_out),
    "TRL 7086": Thread(partial(leave_one_out, scaled=True)),
    "TRL 5588": Thread(trl_5588),
    "TRL 4935": Thread(trl_4935),
    "twinkle 112": Thread(twinkle_112),
}
"""Threads without a fault."""
