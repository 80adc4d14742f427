"""Public threads about a wrong KL, mask or shift, replayed: the fault is named with the fix that ended the thread.

Each fault is rebuilt as a small loss with the inputs that its loop has at hand. No line is a copy of a project's code.
A thread is a function `(world, fixed)`: the fault, or the loss with the fix; it returns the loss and what is passed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from tests.audit.bench.advantages import normalised
from tests.audit.bench.losses import entropy, exact_kl, head_of, k2, k3, ppo, ratio_k3
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
        codes: one of these is found, separated by spaces; none for a sound loss.
        fix: a word of the fix that ended the thread; it is in the fix that the finding names.
        mended: whether the fix of the thread leaves a loss that is right.
        lag: how far the old policy is from the policy.
    """

    make: Callable[[World, bool], Made]
    codes: str = ""
    fix: str = ""
    mended: bool = True
    lag: float = 0.1


def verdict_of(thread: Thread, *, fixed: bool = False, seed: int = 1) -> Verdict:
    loss, arguments = thread.make(make_world(seed, lag=thread.lag), fixed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return klamp.check(loss, once=False, **arguments)


def is_named(thread: Thread, verdict: Verdict) -> bool:
    """Whether a verdict finds the fault and names the fix that ended the thread."""
    found = [x for x in verdict.findings if x.code in thread.codes.split() and x.level in ("wrong", "warning")]
    return any(thread.fix.lower() in x.fix.lower() for x in found)


def on(w: World, beta: float | None = None, **more: Any) -> dict[str, Any]:
    """What a loop passes; not the sampler's log-probabilities, and nothing that is None."""
    known = w.passed() | {"sampler_logprobs": None, "beta": beta} | more
    return {name: x for name, x in known.items() if x is not None}


def added(beta: float, kl: Callable[[World, bool], Tensor], *, mean: Any = World.token, **more: Any) -> Any:
    """PPO's loss and beta times a KL under one mean."""
    return lambda w, f: (mean(w, ppo(w) + beta * kl(w, f)), on(w, beta, **more))


def subtracted(w: World, fixed: bool, policy_loss: Tensor, **more: Any) -> Made:
    """A policy loss minus, instead of plus, 0.001 times k3."""
    return policy_loss + (1 if fixed else -1) * 0.001 * w.token(k3(w.d)), on(w, 0.001, **more)


# the inputs


def trinity_426(w: World, fixed: bool) -> Made:
    """The old log-probabilities come from the sampler's engine, so that the ratio is not 1 before any update."""
    old = w.old if fixed else w.sampler
    loss = w.token(ppo(w, r=(w.logp - old).exp()) + 0.05 * k2(w))
    return loss, on(w, 0.05, old_logprobs=old, sampler_logprobs=w.sampler)


def ms_swift_8196(w: World, fixed: bool) -> Made:
    """Trainer: the log-probability of the next token, at temperature 1. Sampler: of this token, at 0.9."""
    sampler = pick(w.logits.detach() / 0.9, w.ids)
    both = [pick(x / 0.9, w.ids) if fixed else pick(x, w.ids).roll(-1, 1) for x in (w.logits, w.ref_logits)]
    world = w.of(both[0], ref=both[1], old=both[0].detach())
    loss = w.token(ppo(world) * (world.old - sampler).exp().clamp(max=2) + 0.04 * ratio_k3(world))
    return loss, on(world, 0.04, sampler_logprobs=sampler)


def prime_rl_1525(w: World, fixed: bool) -> Made:
    """One packed row: the trainer's log-probabilities stand one place left of the sampler's, mask and advantages."""
    logp = w.logp.flatten().roll(0 if fixed else -1)
    sampler, mask, a = w.sampler.flatten(), w.mask.flatten(), w.a.expand_as(w.logp).flatten()
    loss = -((logp - sampler).exp() * a)[mask].sum() / mask.sum()
    rows = torch.arange(len(w.logp)).repeat_interleave(w.ids.shape[1])
    given = {"policy_logprobs": logp, "mask": mask, "sampler_logprobs": sampler, "ref_logprobs": None}
    return loss, on(w, old_logprobs=None, advantages=a[None], segments=rows, **given)


def light_rft_53(w: World, fixed: bool) -> Made:
    """An image token becomes three patches: the logits are longer than the ids, and gather reads other places."""
    front = torch.zeros_like(w.logits[:, :3]).detach()
    logits, ref_logits = (x if fixed else torch.cat([front, x], 1) for x in (w.logits, w.ref_logits))
    policy, ref = (pick(x[:, : w.ids.shape[1]], w.ids) for x in (logits, ref_logits))
    world = w.of(policy, ref=ref, old=policy.detach())
    given = {"logits": logits, "ref_logits": ref_logits, "ids": w.ids, "old_logprobs": None}
    return w.token(-w.a * world.r + 0.05 * ratio_k3(world)), on(world, 0.05, **given)


def tinker_cloud_26(w: World, fixed: bool) -> Made:
    """The trainer divides its logits by 0.7; the plain model's logits are at hand for a comparison."""
    policy = pick(w.logits if fixed else w.logits / 0.7, w.ids)
    nothing = dict.fromkeys(("ref_logprobs", "old_logprobs", "advantages"))
    return -w.token(policy), on(w, policy_logprobs=policy, logits=w.logits, ids=w.ids, **nothing)


# losses


def torchforge_527(w: World, fixed: bool) -> Made:
    """Distillation: (teacher - student) times exp of itself, nothing detached; the fix detaches the log-ratio."""
    u = w.ref - w.logp
    return w.token(-u.detach() * w.logp if fixed else u * u.exp()), on(w, advantages=None, old_logprobs=None)


def open_instruct_530(w: World, fixed: bool) -> Made:
    """The KL is computed under no_grad, then added."""
    policy = w.logp
    with torch.set_grad_enabled(fixed):
        kl = (policy - w.ref).square() / 2
    return w.token(ppo(w) + 0.03 * kl), on(w, 0.03)


def sky_rl_1353(w: World, fixed: bool) -> Made:
    """The KL function wears no_grad; the loss is a mean of each completion's mean."""
    policy = w.logp
    with torch.set_grad_enabled(fixed):
        kl = k3(policy - w.ref)
    return w.sequence(ppo(w) + 0.001 * kl), on(w, 0.001)


def open_instruct_535(w: World, fixed: bool) -> Made:
    """beta * kl.mean() over all places beside a masked mean."""
    return w.token(ppo(w)) + 0.03 * (w.token(k2(w)) if fixed else k2(w).mean()), on(w, 0.03)


def logic_rl_58(w: World, fixed: bool) -> Made:
    """The sign, in one of four micro-batches, with advantages of each token."""
    loss, given = subtracted(w, fixed, w.token(ppo(w)), advantages=w.a.expand_as(w.logp))
    return loss / 4, given


def marin_1708(w: World, fixed: bool) -> Made:
    """Minus the mean log-ratio is added: each sampled token is raised, whatever the reference says."""
    return w.token(-w.a * w.r) + 0.05 * (w.token(w.d.square()) if fixed else -w.token(w.d)), on(w, 0.05)


def fla_1076(w: World, fixed: bool) -> Made:
    """The loss of a token is negated, and the sum once more."""
    return w.token(ppo(w) + 0.04 * ratio_k3(w)) * (1 if fixed else -1), on(w, 0.04)


def torchrl_grpo(w: World, fixed: bool) -> Made:
    """The KL is zero outside the mask, and a mean over all places."""
    kl = ratio_k3(w) * w.m
    return w.token(ppo(w)) + 0.05 * (w.token(kl) if fixed else kl.mean()), on(w, 0.05)


def mlx_lm_lora_55(w: World, fixed: bool) -> Made:
    """The default ratio is exp(0), a constant: the advantages have no gradient."""
    r = w.r if fixed else torch.ones_like(w.r)
    return w.sequence(ppo(w, r=r) + 0.1 * ratio_k3(w)), on(w, 0.1)


def open_rlhf_294(w: World, fixed: bool) -> Made:
    """DPO: chosen rows, then rejected rows; the prompt's mask covers the chosen half alone."""
    half, answers = len(w.logp) // 2, w.mask & (w.places >= 3)
    used = answers.clone()
    used[half:, :3] |= not fixed
    margin = ((w.logp - w.ref) * used).sum(1)
    nothing = {"advantages": None, "old_logprobs": None}
    return -logsigmoid(0.1 * (margin[:half] - margin[half:])).mean(), on(w, mask=answers, **nothing)


# losses on logits


def of_head(s: Tensor, t: Tensor) -> Tensor:
    """KL(t||s), not renormalised."""
    return (t.exp() * (t - s)).sum(-1)


def atropos_464(w: World, fixed: bool) -> Made:
    """The teacher's top four, both sides renormalised, beside the GRPO loss."""
    whole = (w.logits.log_softmax(-1), w.ref_logits.log_softmax(-1))
    kl = of_head(*(whole if fixed else (x.log_softmax(-1) for x in head_of(w))))
    return w.token(-w.a * w.live + 0.1 * kl), on(w, 0.1, means="forward", old_logprobs=None, **w.logits_passed())


def miles_2362(w: World, fixed: bool) -> Made:
    """A KL over the student's top four, its weights renormalised, is a factor of the score of any sampled token."""
    s, t = head_of(w, whose=w.logits)
    kl = (s.softmax(-1) * (s - t)).sum(-1).detach()
    return w.token(exact_kl(w) if fixed else kl * w.live), w.teacher_passed()


def verl_5041(w: World, fixed: bool) -> Made:
    """The reverse KL over the teacher's top four, without a tail. The fix: the forward KL of head and tail."""
    s, t = head_of(w, tail=fixed)
    return w.token(of_head(s, t) if fixed else of_head(t, s)), w.teacher_passed(means="forward" if fixed else "reverse")


def optipfair_34(w: World, fixed: bool) -> Made:
    """Cross-entropy and a skewed KL over all places, padding too."""
    labels = w.ids.masked_fill(~w.mask, -100) if fixed else w.ids
    s, t = w.logits.softmax(-1), w.ref_logits.softmax(-1)
    skewed = kl_div((0.1 * t + 0.9 * s).log(), t, reduction="none").sum(-1)
    loss = cross_entropy(w.logits.flatten(0, 1), labels.flatten()) + (w.token(skewed) if fixed else skewed.mean())
    return 0.5 * loss, w.teacher_passed(means="forward")


def soup_682(w: World, fixed: bool) -> Made:
    """Distances of sorted probabilities, masked by attention and not by the labels, which leave the prompt out."""
    answer = w.mask & (w.places >= 3)
    s, t = (x.softmax(-1).sort(-1, descending=True).values for x in (w.logits, w.ref_logits))
    used = answer if fixed else w.mask
    return ((s - t).abs().sum(-1) * used).sum() / used.sum(), w.teacher_passed(mask=answer)


FAULTS: dict[str, Thread] = {
    "Trinity-RFT 426": Thread(trinity_426, "sampler-mismatch old-is-sampler", lag=0),
    # the teacher is asked, and the loss has no term with it; beta is in the recipe and never reaches the trainer
    "atropos 456": Thread(added(0.1, lambda w, f: f * ratio_k3(w), kl_in="loss"), "kl-absent", "add beta * kl to the"),
    "FAI-RL 96": Thread(
        added(0.04, lambda w, f: f * ratio_k3(w), mean=World.sequence, kl_in="loss"),
        "kl-absent",
        "add beta * kl to the",
    ),
    "atropos 464": Thread(atropos_464, "head-renormalised", "tail"),
    "torchforge 527": Thread(torchforge_527, "kl-neither kl-zero kl-away", "kl_penalty", lag=0),
    # k3 of the other direction, exp(d) - 1 - d
    "rlhf-book 489": Thread(
        added(0.04, lambda w, f: k3(w.d if f else -w.d), mean=World.sequence), "kl-swapped", "exp(ref - policy)", False
    ),
    "open-instruct 530": Thread(open_instruct_530, "kl-detached kl-absent", "no_grad"),
    # kl1 as a loss; the fix offers kl4, the live ratio times the log-ratio
    "open-instruct 534": Thread(
        added(0.03, lambda w, f: (w.r if f else 1) * w.d), "kl-zero", "log_ratio**2", mended=False
    ),
    "SkyRL 1353": Thread(sky_rl_1353, "kl-detached kl-absent", "no_grad", mended=False),
    # the KL is subtracted; the third beside an entropy bonus, which reaches the parameters around the log-probabilities
    "ToolRL 52": Thread(lambda w, f: subtracted(w, f, w.token(ppo(w))), "kl-away", "+ beta * kl", mended=False),
    "Logic-RL 58": Thread(logic_rl_58, "kl-away", "+ beta * kl", mended=False),
    "RAGEN 58": Thread(
        lambda w, f: subtracted(w, f, w.token(ppo(w) - 0.001 * entropy(w))), "kl-away", "+ beta * kl", mended=False
    ),
    "marin 1708": Thread(marin_1708, "kl-zero kl-away", "log_ratio**2", mended=False),
    "miles 2362": Thread(miles_2362, "kl-zero", lag=0),
    "ms-swift 8196": Thread(ms_swift_8196, "shift", "logits[:, :-1] with ids[:, 1:]"),
    "prime-rl 1525": Thread(prime_rl_1525, "shift", "logits[:, :-1] with ids[:, 1:]"),
    "flash-linear-attention 1076": Thread(fla_1076, "policy-reversed", "negate it only once"),
    "verl 5041": Thread(verl_5041, "head-no-tail", "tail"),
    "torchrl GRPOLoss": Thread(torchrl_grpo, "beta-off", "mask.sum()"),
    "open-instruct 535": Thread(open_instruct_535, "off-mask-gradient", "mask.sum()"),
    "mlx-lm-lora 55": Thread(mlx_lm_lora_55, "policy-absent", "exp(logp - old)"),
    # k3 is differentiated without the score term
    "NeMo-RL 2506": Thread(
        added(0.01, lambda w, f: (w.live if f else 1.0) * k3(w.d)), "kl-forward", "exp(logp - logp.detach())"
    ),
    "LightRFT 53": Thread(light_rft_53, "logits-shape", "cut the logits", lag=0),
    "tinker-cloud 26": Thread(tinker_cloud_26, "temperature", "temperature"),
    "OpenRLHF 294": Thread(open_rlhf_294, "off-mask-gradient", "mask"),
    "optipfair 34": Thread(optipfair_34, "off-mask-gradient", "mask"),
    "Soup 682": Thread(soup_682, "off-mask-gradient", "mask"),
}
"""The 27 threads that one micro-batch shows."""


def slime_397(w: World, fixed: bool) -> Made:
    """The KL meant for the reward is computed and dropped: the returns are the rewards, normalised per prompt."""
    a = normalised(w.rewards - 0.05 * fixed * w.sums(w.old - w.ref), w.group, "z-score")
    given = {"advantages": a, "rewards": w.rewards, "group_size": w.group}
    return w.sequence(ppo(w, a=a[:, None])), on(w, 0.05, **given)


REWARDS = {"slime 397": Thread(slime_397, "kl-absent", "add beta * kl to the loss")}
"""A thread that rewards and advantages show."""


def slime_1068(w: World, _: bool) -> Made:
    """Advantages: teacher minus student, detached; the policy loss is PPO's."""
    a = (w.ref - w.old).detach()
    return w.token(ppo(w, a=a)), on(w, 1.0, advantages=a)


def leave_one_out(w: World, scaled: bool) -> Made:
    """RLOO's loss: the ratio of a whole completion, clipped; the old policy's log-ratio is taken from the reward."""
    a = normalised(w.rewards - 0.05 * w.sums(w.old - w.ref), w.group, "leave one out")
    a = (a - a.mean()) / (a.std() + 1e-4) if scaled else a
    given = {"advantages": a, "rewards": w.rewards, "group_size": w.group}
    return ppo(w, a=a, r=w.sums(w.log_r).exp()).mean(), on(w, 0.05, **given)


def trl_5588(w: World, _: bool) -> Made:
    """One prompt's rewards are equal: its advantages are 0, and its KL has a gradient."""
    a = w.advantages * (torch.arange(len(w.ids)) >= w.group)
    return w.sequence(ppo(w, a=a[:, None]) + 0.05 * ratio_k3(w)), on(w, 0.05, advantages=a)


def of_kl_div(first: Tensor, second: Tensor) -> Tensor:
    """kl_div(student, teacher) is KL(teacher||student)."""
    return kl_div(first.log_softmax(-1), second.log_softmax(-1), reduction="none", log_target=True).sum(-1)


SOUND: dict[str, Thread] = {
    "slime 1068": Thread(slime_1068),
    "TRL 5889": Thread(lambda w, _: leave_one_out(w, False)),
    "TRL 7086": Thread(lambda w, _: leave_one_out(w, True)),
    "TRL 5588": Thread(trl_5588),
    "TRL 4935": Thread(lambda w, _: (w.token(of_kl_div(w.logits, w.ref_logits)), w.teacher_passed(means="forward"))),
    "twinkle 112": Thread(lambda w, _: (w.sequence(of_kl_div(w.ref_logits, w.logits)), w.teacher_passed())),
}
"""Right, though somebody cried bug."""


def test_at_least_25_of_the_27_faults_are_named_with_the_fix_of_their_thread() -> None:
    verdicts = {name: verdict_of(thread) for name, thread in FAULTS.items()}
    missed = [name for name, verdict in verdicts.items() if not is_named(FAULTS[name], verdict)]
    assert len(FAULTS) == 27
    assert len(missed) <= 2, "".join(f"\n--- {name}\n{verdicts[name]}" for name in missed)


def test_a_kl_that_the_reward_should_hold_is_missed_from_the_rewards() -> None:
    assert all(is_named(thread, verdict_of(thread)) for thread in REWARDS.values())


@pytest.mark.parametrize("name", FAULTS | REWARDS)
def test_the_fix_of_a_thread_ends_its_finding(name: str) -> None:
    thread = (FAULTS | REWARDS)[name]
    verdict = verdict_of(thread, fixed=True)
    assert not set(thread.codes.split()) & set(verdict.codes("wrong")), str(verdict)
    assert verdict.ok is not False or not thread.mended, str(verdict)


@pytest.mark.parametrize("name", SOUND)
def test_threads_without_a_fault_are_not_accused(name: str) -> None:
    for seed in (1, 2):
        verdict = verdict_of(SOUND[name], seed=seed)
        assert verdict.ok is not False, str(verdict)
