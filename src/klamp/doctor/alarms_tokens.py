"""The alarms about single tokens, the sampler and a teacher."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

from klamp.doctor.alarm import Evidence, Limit, alarm, is_apart, is_beyond, least_and_most, number
from klamp.doctor.causes import MANY, blame
from klamp.doctor.history import Completion, History, bounded
from klamp.doctor.metrics import MODELS

MISMATCH = Limit(0.01, "nats per token, k1 or k3 (seen in the field: healthy about .002)")
LEFT, LEFT_FLOOR = Limit(3, "times the mean sampler/abs of 20 steps in the 5 after them, above 0.02 nats"), 0.02
PROMPT = Limit(1, "token that the model did not write")
END_TOKEN = Limit(0.5, "of the completions that ended, their last token left out of the loss")
OTHER_KERNELS = Limit(0.1, "nats per token, k3, before the first update (data types and kernels explain .003 at most)")
STEADY = 5
"""Steps until which the mean counts with a margin by tokens; later the scatter of 2 and 4 times as many does."""
ONE_SIDED, SAME = 50, 1e-4
"""Tokens of which none is likelier under the policy by so many nats: other weights or kernels make some of them so."""
SHIFTED = 0.2
"""The part of the distance that is left at most once a shift is undone."""
GREW = 4.0
"""How many times farther apart than before the first update: the mismatch came with the updates."""
COURSE, START_LIKE = 20, 1.5
"""Steps over which the distances of sampler and reference are compared, and how many times they differ at most."""


@alarm(
    "mask-on-prompt",
    needs=("completions", "sampler_logprobs"),
    limits=(PROMPT,),
    means="Prompt tokens or a tool's answers get the group's advantage and a KL; the policy did not choose them.",
    do="Decode one sequence with its mask. The mask must begin at the first token of the completion.",
)
def mask_on_prompt(history: History) -> Evidence | None:
    """The loss mask covers tokens that the model did not write."""
    offenders: list[tuple[list[int], int, Completion]] = []
    for index, completion in enumerate(history.written):
        pairs = zip(completion.is_trained, completion.is_sampled, strict=True)
        positions = [i for i, (trained, sampled) in enumerate(pairs) if trained and not sampled]
        offenders += [(positions, index, completion)] if positions else []
    if not offenders:
        return None
    positions, index, completion = offenders[0]
    prompt_tokens = " ".join(repr(str(completion.tokens[i])) for i in positions[:MANY])
    text = f"in {len(offenders)} of {len(history.written)} sequences; {len(positions)} in sequence {index} alone"
    return Evidence(f"{text}, from position {positions[0]}: {prompt_tokens}")


@alarm(
    "end-token-lost",
    needs=("completions", "loss masks"),
    limits=(END_TOKEN,),
    means="The reward does not teach the model when to stop, so length may drift. Common if the end token is also the "
    "padding token and the mask is made by comparing with it.",
    do="Make the mask from lengths, and let it include the first end token.",
)
def end_token_lost(history: History) -> Evidence | None:
    """The loss mask leaves out the end token."""
    endings = [_ending(row) for row in history.written if row.ended is not False and any(row.is_trained)]
    lost = [(before, tail) for before, tail in endings if tail]
    padded = any(len(tail) > 1 for _, tail in lost)
    if padded:  # the first token after the trained ones is the lost end token if it alone never varies
        last_trained, first_masked = {before for before, _ in endings}, {tail[0] for _, tail in lost}
        lost = lost if len(first_masked) == 1 and len(last_trained) > 1 else []
    if not lost or len(lost) <= END_TOKEN.value * len(endings):
        return None
    token = lost[0][1][0]
    return Evidence(f"in {len(lost)} of {len(endings)} completions the last token ({token!r}) is not trained on")


def _ending(completion: Completion) -> tuple[str, list[str]]:
    """The last trained token of a completion, and the tokens after it that the model may have written."""
    last = max(i for i, trained in enumerate(completion.is_trained) if trained)
    tail = range(last + 1, len(completion.tokens))
    return str(completion.tokens[last]), [str(completion.tokens[i]) for i in tail if completion.is_sampled[i]]


@alarm(
    "sampler-mismatch",
    needs=("sampler/k3|sampler/k1|sampler/abs",),
    limits=(MISMATCH, LEFT, OTHER_KERNELS),
    means="The sampling model is not the scored one: weights or an adapter not synced, other kernels or data types, "
    "top-p or top-k, another temperature or prompt. Every estimate assumes that the policy sampled.",
    do="Look at both k1 and k3: k1 can cancel where k3 shows a single bad token. Sync the weights, sample from the "
    "whole distribution, or correct for the difference (kl_off_policy).",
)
def sampler_mismatch(history: History) -> Evidence | None:
    """Sampler and trainer disagree about the sampled tokens."""
    sizes = _sizes(history.latest)
    if not any(_beyond_chance(history, name) for name in sizes):
        return None
    curves = {name: history.last(name, 2 * STEADY) for name in sizes}
    means = {name: f" ({number(fmean(x))}, mean of {len(x)})" if len(x) > 1 else "" for name, x in curves.items()}
    text = ", ".join(f"{name} is {number(history.latest[name])}{mean}" for name, mean in means.items())
    tokens = blame(history, against="sampler")
    return Evidence(f"{text} nats per token", tokens, causes=causes_of(history))


def _beyond_chance(history: History, name: str) -> bool:
    """Whether a distance of sampler and policy is out of order: steadily by its scatter, or at once by its tokens."""
    values = [x * x / 2 if name == "sampler/abs" else x for x in history.last(name, 4 * STEADY)]
    ranges = [least_and_most(values[-steps:]) for steps in (2 * STEADY, 4 * STEADY) if len(values) >= steps]
    if any(least > MISMATCH.value or most < -MISMATCH.value for least, most in ranges):
        return True
    before, now = history.last(name, 4 * STEADY, before=STEADY), history.last(name, STEADY)
    left = name == "sampler/abs" and len(before) == 4 * STEADY and min(now) > max(before)
    if left and fmean(now) > max(LEFT_FLOOR, LEFT.value * fmean(before)):
        return True
    latest, limit = (values, MISMATCH.value) if len(values) < STEADY else (values[-1:], OTHER_KERNELS.value)
    return bool(latest) and is_beyond(history, name, fmean(latest), limit, steps=len(latest))


def _sizes(metrics: Mapping[str, float]) -> dict[str, float]:
    """How far sampler and trainer are apart by each measure of a step, in nats per token; |d| as the least k2."""
    sizes = {name: abs(metrics[name]) for name in ("sampler/k1", "sampler/k3", "sampler/abs") if name in metrics}
    return {name: size * size / 2 if name == "sampler/abs" else size for name, size in sizes.items()}


def causes_of(history: History) -> list[str]:
    """What a mismatch comes from, if its course shows it: before the first update both have the same weights."""
    deltas = [delta for completion in history.written for _, delta in completion.log_ratios("sampler")]
    if text := _shift(history.written) or _own_cut(history, deltas):
        return [text]
    if len(deltas) >= ONE_SIDED and min(deltas) > -SAME and fmean(deltas) > SAME:
        return [
            f"each of {len(deltas)} tokens is at least as likely under the sampler: it cuts the distribution (top-p, "
            "top-k, min-p) or sharpens it (temperature), and the trainer scores another one; no sync mends that"
        ]
    first = {name: size for name, size in _sizes(history.rows[0].metrics).items() if math.isfinite(size)}
    if not first or history.rows[0].step > 1 or history.settings.steps_counted:
        return []
    name = max(first, key=lambda name: first[name])
    is_apart_at_start = first[name] > MISMATCH.value
    metric = name if is_apart_at_start or "sampler/k3" not in first else "sampler/k3"
    at_start = f"{metric} was {number(history.rows[0].metrics[metric])}"
    if not is_apart_at_start:
        text = _of_start(history) or _at_once(history, metric)
        text = text or (
            f"it came with the updates ({at_start} before the first one): the sampler's weights, or its "
            "adapter's, are not synced before each rollout"
        )
        return [text] if max(_sizes(history.latest).values()) > GREW * first[name] else []
    since = f"it was there before the first update ({at_start}), so a missing sync alone does not explain it"
    if first[name] <= OTHER_KERNELS.value:
        return [f"{since}: other data types or kernels, or a slightly different temperature, top-p or top-k"]
    return [
        f"{since}: the trainer scores with another temperature, another prompt or template, or without the adapter (or "
        "with one) that the sampler has. klamp.check_sync says which"
    ]


def _shift(completions: Sequence[Completion]) -> str:
    """Whether sampler and policy agree once one of the two lists is moved by a position."""
    gaps: dict[int, float] = {}
    for shift in (-1, 0, 1):
        pairs = [
            bounded(abs(completion.sampler[i + shift] - completion.policy[i]))
            for completion in completions
            if completion.sampler is not None
            for i, trained in enumerate(completion.is_trained)
            if trained and 0 <= i + shift < len(completion.policy)
        ]
        gaps[shift] = fmean(gap for gap in pairs if math.isfinite(gap)) if any(map(math.isfinite, pairs)) else math.inf
    best = min(gaps, key=lambda shift: (gaps[shift], abs(shift)))
    if not gaps[best] < SHIFTED * gaps[0]:
        return ""
    place = "after" if best > 0 else "before"
    return (
        f"the lists are shifted by one position: the sampler's number of the token {place} is the policy's of this one "
        f"(they differ by {number(gaps[best])} nats then, and by {number(gaps[0])} now). Logits at t score token t + 1"
    )


def _own_cut(history: History, deltas: Sequence[float]) -> str:
    """Whether the run's own top-p or top-k explains that the sampler finds its tokens likelier."""
    top_p, top_k = history.settings.top_p or 1.0, max(history.settings.top_k or 0, 0)
    k1 = fmean(deltas) if deltas else history.latest.get("sampler/k1", 0.0)
    # k1 - k3 is the mass that is cut; of weights that differ, with nothing cut, it is 0
    is_cut = top_k and (deltas or 2 * history.latest.get("sampler/k3", math.inf) < k1)
    most = math.inf if is_cut else MISMATCH.value - math.log(top_p)
    if (top_p >= 1 and not top_k) or not 0 < k1 <= most or min(deltas, default=0.0) < -SAME:
        return ""
    cuts = [f"top_p {top_p:g}"] * (top_p < 1) + [f"top_k {top_k}"] * (top_k > 0)
    return (
        f"the run's own {' and '.join(cuts)}: the trainer scores the whole distribution, and no sync mends that. "
        "Sample from the whole distribution, or score the tokens after the same cut"
    )


def _at_once(history: History, name: str) -> str:
    """Whether sampler and trainer still agreed in the steps before: weights that are not synced drift apart."""
    sizes = [_sizes({name: value})[name] for value in history.last(name, 2 * STEADY)]
    agreed = len(sizes) > 2 and max(sizes[:-1]) <= MISMATCH.value and sizes[-1] >= 100 * MISMATCH.value
    text = (
        "this step alone, so far: sampler and trainer agreed in the steps before. Look for a single bad batch: numbers "
        "that overflowed, or experts that the sampler routed differently (MoE). If it stays, the sync is missing"
    )
    return text if agreed else ""


def _of_start(history: History) -> str | None:
    """Whether the sampler is as far as the reference at each step: it then has the starting weights."""
    sampler, kl = history.together(COURSE, "sampler/k3", history.kl_name())
    pairs = [(a, b) for a, b in zip(sampler, kl, strict=True) if b > 0]
    elsewhere = history.settings.moving_reference or history.settings.other_reference
    if len(pairs) < STEADY or max(kl) < 2 * min(b for _, b in pairs) or elsewhere:
        return None
    if not all(1 / START_LIKE < a / b < START_LIKE for a, b in pairs):
        return None
    return (
        f"the sampler still has the weights that training started from: it is as far from the policy as the reference "
        f"is ({number(sampler[-1])} and {number(kl[-1])} nats per token). New weights, or the adapter, never reach it"
    )


TO_TEACHER = "teacher/kl"
SETTLED = 5
UNSCORED = Limit(0.1, f"of the trained tokens, mean of {SETTLED} steps")
NUMBERLESS = Limit(0.5, "of the trained tokens of one step")
REPEATED_KL = 0.01
REPEATED = Limit(0.8, f"of the numbers repeat the one before, not the policy's; teacher/kl above {REPEATED_KL}")
REACH_STEPS, REACH_FLOOR = 50, 0.05
REACHED = Limit(
    0.9,
    f"of the KL of the first 10 steps is still there in the last 10, after {REACH_STEPS} steps without a reward, and "
    f"above {REACH_FLOOR} nats per token (digits fall to an eighth in 30 steps)",
)
STILL = Limit(3, "steps in a row at exactly 0, or without a KL of the teacher that is configured")
NEAR = Limit(1e-3, "nats per token in size, mean of the first 20 steps and of the last 20, in another trainer's record")
NO_PART = 10


@alarm(
    "teacher-silent",
    needs=("teacher/unscored|teacher/repeated|teacher/logp_mean",),
    concerns="a teacher",
    limits=(UNSCORED, NUMBERLESS, REPEATED),
    means="The teacher's server fails or truncates, its numbers are lost on the way, or they are placeholders.",
    do="Ask the teacher for one completion by hand.",
)
def silent(history: History) -> Evidence | None:
    """The teacher gives many tokens no number, or all the same one."""
    for name in _per_teacher(history, "teacher/unscored"):
        for count, limit in ((1, NUMBERLESS), (SETTLED, UNSCORED), (4 * SETTLED, UNSCORED)):
            values = history.last(name, count)
            if len(values) == count and least_and_most(values)[0] > limit.value:
                return Evidence(f"{fmean(values):.0%} of the trained tokens have no number of the teacher's ({name})")
    for name in _per_teacher(history, "teacher/repeated"):
        share, kl = history.latest[name], history.latest.get(name.replace("repeated", "kl"), math.inf)
        if share > REPEATED.value and kl > REPEATED_KL:
            return Evidence(f"{share:.0%} of the teacher's numbers are the one of the token before ({name})")
    count = 4 * SETTLED if history.latest.get("teacher/logp_mean") else SETTLED
    values = history.last("teacher/logp_mean", count)
    if len(values) < count or len({*values}) > 1:
        return None
    return Evidence(f"teacher/logp_mean is {number(values[0])} in each of {count} steps, for all completions")


@alarm(
    "teacher-not-reached",
    needs=(TO_TEACHER,),
    steps=REACH_STEPS,
    concerns="a teacher alone",
    limits=(REACHED,),
    means="Mostly the learning rate is too low, the policy is too small, or the numbers belong to other tokens.",
    do="Score one completion with teacher_model set to the policy itself: the KL must be 0.",
)
def not_reached(history: History) -> Evidence | None:
    """The policy does not come nearer to its teacher."""
    coefficients = history.last("teacher/coef", 10) or [1.0 if (own := history.settings.teacher_coef) is None else own]
    if len(history.rows) < REACH_STEPS or not teacher_alone(history) or min(coefficients) <= 0:
        return None
    for name in _per_teacher(history):
        first, last = history.first(name, 10), history.last(name, 10)
        high = len(first) >= SETTLED and fmean(last) > max(REACH_FLOOR, REACHED.value * fmean(first))
        if high and is_apart([x / 2 for x in first], last, errors=3):
            away = fmean(last) > fmean(first) and is_apart(first, last, errors=3)
            text = f"{name} was {number(fmean(first))} nats per token at first and is {number(fmean(last))}"
            return Evidence(text, causes=["the sign of the KL is wrong: the policy moves away from its teacher"] * away)
    return None


def teacher_alone(history: History) -> bool:
    """Whether a teacher alone trains: no reward (another trainer may log one without spread), and hardly any beta."""
    coefficient = history.latest.get("teacher/coef", history.settings.teacher_coef or 1.0)
    rewards = history.last("reward", REACH_STEPS) if history.settings.other_kernels else []
    rewarded = "reward_std" in history.latest or len({*rewards}) > 1
    is_taught = any(name.startswith(TO_TEACHER) for name in history.latest)
    return is_taught and not rewarded and history.latest.get("beta", 0.0) <= coefficient / 20


@alarm(
    "teacher-inert",
    needs=(f"{TO_TEACHER}|settings.teacher_coef",),
    steps=int(STILL.value),
    concerns="a teacher",
    limits=(STILL, NEAR),
    means="The teacher is the policy itself, or its KL is not in the loss.",
    do="Check the path of the teacher, its adapter, and whether the KL to it is added to the loss.",
)
def inert(history: History) -> Evidence | None:
    """The teacher does nothing."""
    return _absent(history) or _still(history) or _not_in_loss(history)


def _absent(history: History) -> Evidence | None:
    rows, coefficient = history.rows[-int(STILL.value) :], history.settings.teacher_coef or 0.0
    logged = any(name.startswith(TO_TEACHER) for row in rows for name in row.metrics)
    logged |= any(MODELS["teacher"].search(name) for name in history.unread)
    if coefficient <= 0 or len(rows) < STILL.value or logged:
        return None
    text = f"a teacher is configured, with coefficient {number(coefficient)}; the last {len(rows)} steps have no"
    return Evidence(f"{text} {TO_TEACHER}")


def _still(history: History) -> Evidence | None:
    equal, coefficients = (history.last(name, int(STILL.value)) for name in ("groups/saturated", "teacher/coef"))
    if min(equal, default=0.0) == 1 or min(coefficients, default=1.0) <= 0:
        return None  # nothing need have moved
    whole = history.settings.other_kernels and not history.settings.steps_counted and len(history.rows) >= 2 * COURSE
    for name in _per_teacher(history):
        values = history.last(name, int(STILL.value))
        if len(values) == STILL.value and not any(values):
            return Evidence(f"the last {len(values)} values of {name} are exactly 0, as if the teacher were the policy")
        size = max(fmean(map(abs, get(name, COURSE) or [1.0])) for get in (history.first, history.last))
        if whole and history.rows[0].step <= 1 and size < NEAR.value:
            return Evidence(f"{name} is {number(size)} nats in size from the first step on: the teacher is the policy")
    return None


def _not_in_loss(history: History) -> Evidence | None:
    parts, coefficients = (history.last(name, NO_PART) for name in ("train/teacher_penalty", "teacher/coef"))
    kl = fmean(history.last(TO_TEACHER, NO_PART) or [0.0])
    if len(parts) < NO_PART or any(parts) or min(coefficients, default=0.0) <= 0 or kl <= SAME:
        return None
    return Evidence(f"train/teacher_penalty is 0 in {NO_PART} values, and teacher/kl {number(kl)} nats per token")


def _per_teacher(history: History, metric: str = TO_TEACHER) -> list[str]:
    """A metric of the teacher, or of each of several, in the latest step."""
    return [name for name in history.latest if name.split(".", 1)[0] == metric]
