"""The alarms about the KL: its estimates, its jumps, and how far the policy is from its reference."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean, stdev

from klamp.doctor import causes
from klamp.doctor.alarm import KL, Evidence, Limit, alarm, count_tokens, is_apart, is_beyond, noise, number
from klamp.doctor.alarms_run import not_trained
from klamp.doctor.causes import blame
from klamp.doctor.history import EARLY, History, bounded
from klamp.names import KL_NAMES, best_kl

NEGATIVE_STEPS = Limit(20, "steps in a row below 0 (by chance alone, one in a million)")
NEGATIVE_K1 = Limit(1e-4, "nats per token below 0, their mean (the size of the step-zero limit)")
NEGATIVE_FEW = Limit(8, "steps in a row below 0, and as many standard errors (Student's t: 5 in 100,000)")
NEGATIVE_AT_ONCE = Limit(
    0.1, "nats per token below 0 in one step, and 14 per completion or in all (E[exp(-k1)] <= 1: one in a million)"
)
NEGATIVE_COMPLETION = 14.0
FAR_WINDOW, FAR_FLOOR, FAR_ERRORS, FAR_NOISE = 5, 0.05, 3.0, 20
K3_FAR = Limit(10, f"times k1 (and the exact KL), mean over {FAR_WINDOW} steps, k3 above {FAR_FLOOR} nats per token")
FAR_AT_ONCE = Limit(100, "times k1 in one step, k3 above 1 nat per token (seen in the field: k3 1635, k1 .003)")
SPIKE_MEMORY, SPIKE_ERRORS, SAME_KL = 20, 6.0, 1e-4
SPIKE = Limit(3, "times the highest of the 20 steps before; of samples twice in a row, or far beyond their scatter")
SPIKE_FLOOR = Limit(
    0.2, "nats per token (the GRPO tutorial's warning sign); 1 with fewer than 5 steps before, or 16 prompts in a step"
)
SPIKE_PROMPTS = 16
"""With fewer prompts per step than this, the KL changes from step to step just because the prompts do."""
STEP_ZERO = Limit(1e-4, "nats per token before the first update (equal kernels give about 1e-6)")
STEP_ZERO_OTHERS = Limit(3e-3, "nats per token, and 4 standard errors, in another trainer's record (bfloat16's part)")
REFERENCE_DIFFERS = Limit(0.02, "nats per token before the first update, to a reference that was chosen")
DETACHED_WINDOW, DETACHED_ERRORS = 5, 4.0
DETACHED = Limit(
    0.01,
    "of the KL that a change of the reward by 4 standard errors proves, after 20 steps (Pinsker: a reward of range R "
    "that changed by d needs 2 (d / R)^2 nats per completion)",
)
STILL = Limit(20, "steps in a row at exactly 0 (no update rounds to nothing in all tokens)")
FELL = Limit(
    0.01,
    "of the lower KL of the 2 steps before, above 0.02 nats per token, in one step (seen: .47 to 0 where a resume made "
    "the checkpoint the reference); at equal intervals it is a reference that is reset on purpose",
)
FAR_STEPS = 5
FAR = Limit(
    1.0,
    f"nats per token, mean of {FAR_STEPS} steps without the largest (seen: a language model was best at .5 and fell "
    "into one word at 1.6 to 1.9)",
)
FAR_COMPLETION = Limit(8.0, "nats per completion besides (an answer of one token may need 3 to be right)")
GROWING = Limit(
    1.3,
    "times the KL of the 10 steps before, twice in a row and by 3 standard errors, above 0.1 nats per token, while the "
    "reward did not rise by 1",
)
GROWING_FLOOR = 0.1
HIGH = Limit(0.2, "nats per token, mean of 5 steps without the largest (the GRPO tutorial, docs/sources.md)")
LOW = Limit(0.01, "nats per token, mean of 5 steps without the largest, after 20 (the GRPO tutorial, docs/sources.md)")
LEFT_OUT_STEPS, LEFT_OUT = 20, Limit(0.01, "of beta times the KL is in the loss at most, in each of 20 steps")
MISSED_WINDOW, MISSED_STEPS, MISSED_MEMORY = 20, 40, 150
MISSED = Limit(
    0.3,
    f"of the target: each mean of {MISSED_WINDOW} steps is farther off in {MISSED_STEPS} steps since the KL reached it",
)
FEW_PROMPTS = 8
"""Prompts in a step below which the KL of the step scatters so much that a controller may miss its target."""
RUNAWAY_WINDOW = 10
RUNAWAY = Limit(
    30,
    f"times the first beta, while beta times the KL per completion outweighs the reward, {RUNAWAY_WINDOW} steps (seen: "
    "from 0.03 to 32, the score from 99 to 87)",
)


@alarm(
    "negative-k1",
    needs=("kl/k1|kl/k1_sequence|kl/k3|teacher/k1|teacher/kl",),
    limits=(NEGATIVE_STEPS, NEGATIVE_FEW, NEGATIVE_K1, NEGATIVE_AT_ONCE),
    means="A KL is never negative if the policy sampled the tokens, and a k3 never is. So another policy sampled them "
    "(an old sampler, another temperature, top-p), the mask is wrong, or the signs are swapped.",
    do="Compare the log-probabilities of sampler and trainer on the same tokens; check that the mask covers the "
    "completion only and that the log-ratio is policy - reference, or policy - teacher.",
)
def negative_k1(history: History) -> Evidence | None:
    """The KL is negative beyond chance."""
    at_once = {"kl/k1": NEGATIVE_AT_ONCE.value, "kl/k3": NEGATIVE_AT_ONCE.value, "kl/k1_sequence": NEGATIVE_COMPLETION}
    if not any(history.latest.get(name) for name in ("teacher/teacher_mass", "teacher/log_ratio_clamped")):
        names = [name for name in history.latest if name.partition(".")[0] in ("teacher/k1", "teacher/kl")]
        at_once |= dict.fromkeys(names, NEGATIVE_AT_ONCE.value)
    for name, limit in at_once.items():
        unit = "completion" if name.endswith("sequence") else "token"
        value = history.latest.get(name, 0.0)
        if value < -limit and (unit == "completion" or value < -NEGATIVE_COMPLETION / count_tokens(history)):
            return Evidence(f"{name} is {number(value)} nats per {unit} in this step")
    return next(filter(None, (_below_zero(history, name) for name in at_once)), None)


def _below_zero(history: History, name: str) -> Evidence | None:
    values = history.last(name, int(NEGATIVE_STEPS.value))
    while values and max(values) >= 0:
        values = values[1:]
    if len(values) < NEGATIVE_FEW.value or fmean(values) > -NEGATIVE_K1.value:
        return None
    if len(values) < NEGATIVE_STEPS.value and -fmean(values) < NEGATIVE_FEW.value * stdev(values) / len(values) ** 0.5:
        return None
    return Evidence(f"the last {len(values)} values of {name} are below 0, {number(fmean(values))} nats on average")


@alarm(
    "k3-far-above-k1",
    needs=("kl/k1", "kl/k3"),
    limits=(K3_FAR, FAR_AT_ONCE),
    means="Both estimate the same KL. k3 grows with ref/policy, so a few tokens that the reference finds far likelier "
    "dominate it: padding or masked tokens, a shift by one, or a vocabulary that the policy has cut.",
    do="Look at the tokens to blame. If they are padding, end tokens or always at the same place, fix the mask; if "
    "they are real, set kl_max_log_ratio or measure the exact KL.",
)
def k3_far_above_k1(history: History) -> Evidence | None:
    """K3 is far above k1."""
    for window, ratio, floor in ((FAR_WINDOW, K3_FAR.value, FAR_FLOOR), (1, FAR_AT_ONCE.value, 1.0)):
        k1, k3 = history.together(window, "kl/k1", "kl/k3")
        if len(k1) < window or not math.isfinite(sum(history.latest.get(x, math.nan) for x in ("kl/k1", "kl/k3"))):
            continue
        exact = history.last("kl/exact", window)
        scatter = noise(history.last("kl/k1", FAR_NOISE)) / window**0.5
        other = max(abs(fmean(k1)) + FAR_ERRORS * scatter, fmean(exact) if exact else 0.0)
        if fmean(k3) >= floor and fmean(k3) > ratio * other:
            over = f"on average of the last {window}" if window > 1 else "in this step"
            text = f"kl/k3 is {number(fmean(k3))} nats per token {over}, kl/k1 {number(fmean(k1))}"
            exact_text = f", kl/exact {number(fmean(exact))}" if exact else ""
            return Evidence(text + exact_text, blame(history))
    return None


@alarm(
    "kl-spike",
    needs=(KL,),
    steps=2,
    limits=(SPIKE, SPIKE_FLOOR),
    means="If the KL stays high, an update moved the policy far: learning rate, extreme rewards or advantages, or no "
    "gradient clipping. If it falls in the next step, a few tokens caused most of the jump.",
    do="Look at the tokens to blame and at the step's rewards; if these fell, go back to an earlier checkpoint. If "
    "the KL stays high, lower the learning rate or max_grad_norm, or raise beta.",
)
def kl_spike(history: History) -> Evidence | None:
    """The KL jumped."""
    prompts = (history.rows[-1].prompts if history.rows else None) or history.settings.prompts or SPIKE_PROMPTS
    exact = history.kl_name() == "kl/exact"
    for stays in (1,) if exact else (1, 2):
        values = history.kl(SPIKE_MEMORY + stays)
        before, now = values[:-stays], min(values[-stays:], default=0.0)
        few = len(before) < 5 or prompts < SPIKE_PROMPTS
        highest = max(map(abs, before), default=math.inf)
        if now < (1.0 if few else SPIKE_FLOOR.value) or now <= SPIKE.value * highest:
            continue
        if stays == 2 or len(before) < 5 or exact or _stands_out(before, now):
            why = causes.likely_causes(history, causes.last_jump if stays == 1 else causes.learning_rate)
            highest_before = f"{number(max(before))} was the highest of {len(before)} before"
            text = f"{history.kl_name()} jumped to {number(now)} nats per token, {highest_before}"
            return Evidence(text, blame(history), why)
    return None


def is_over(history: History, step: int) -> bool:
    """Whether a jump to less than `FAR` was over within 3 steps and the reward did not fall: no update did it."""
    at, kl = [row.step for row in history.rows].index(step), history.kl_name()
    parts = [History(rows=history.rows[max(i, 0) : j]) for i, j in ((at - SPIKE_MEMORY, at), (at + 3, at + 8))]
    (before, after), rewards = ([part.last(name, SPIKE_MEMORY) for part in parts] for name in (kl, "reward"))
    fell = is_apart(*rewards, errors=3) and fmean(rewards[1]) < fmean(rewards[0])
    is_back = before and len(after) == 5 and max(after) <= SPIKE.value * max(before)
    return bool(is_back) and history.rows[at].metrics.get(kl, math.inf) < FAR.value and not fell


def _stands_out(before: Sequence[float], now: float) -> bool:
    """Whether a value lies beyond what the curve scattered by, in powers of e: sampled KLs have a long tail."""
    logs = [math.log(abs(value)) for value in before if abs(value) > SAME_KL]
    return len(logs) < 2 or abs(math.log(max(abs(now), 1e-9)) - fmean(logs)) > SPIKE_ERRORS * noise(logs)


@alarm(
    "step-zero-kl",
    needs=(KL, "the first step"),
    concerns="the start as reference",
    limits=(STEP_ZERO, STEP_ZERO_OTHERS),
    means="Policy and reference differ before training: dropout, an adapter that is not zero, another data type or "
    "kernel, other weights, or tokens that only one of them sees.",
    do="Score one batch twice with the policy (the two must agree), then with the reference. Put both into eval() and "
    "one dtype; compare tokens, mask and temperature.",
)
def step_zero(history: History) -> Evidence | None:
    """KL is not 0 before the first update."""
    name, kl = _first_kl(history)
    elsewhere = history.settings.other_kernels
    differs = is_beyond(history, name, kl, STEP_ZERO_OTHERS.value) if elsewhere else abs(kl) > STEP_ZERO.value
    if history.settings.other_reference or not differs:
        return None
    text = f"{name} is {kl:.2e} nats per token before the first update and should be about 0"
    return Evidence(text, blame(history))


@alarm(
    "reference-differs",
    needs=(KL, "the first step"),
    concerns="a chosen reference",
    limits=(REFERENCE_DIFFERS,),
    means="The reference is not the model that training starts from (an older checkpoint, a wrong path, another chat "
    "template or precision), so the KL pulls the policy away from its own start.",
    do="Check its path, or leave it out to hold the policy at its start. If it is intended, set target_kl above it.",
)
def reference_differs(history: History) -> Evidence | None:
    """The chosen reference is far from the model that is trained."""
    name, kl = _first_kl(history)
    limit = REFERENCE_DIFFERS.value
    if not history.settings.other_reference or not kl > limit:
        return None
    if name != "kl/exact" and not is_beyond(history, name, kl, limit):
        return None
    text = f"{name} is {number(kl)} nats per token to the chosen reference, before the first update"
    return Evidence(text, blame(history))


@alarm(
    "detached-reference",
    needs=(KL,),
    steps=3,
    limits=(DETACHED, STILL, FELL),
    means="Nothing trains the policy; the reference follows it (shared weights, an adapter that stays on); a resume "
    "made the checkpoint the reference; or the sampler is another model than the scored one.",
    do="After a resume, load the model that training started from as the reference. Else change one weight of the "
    "policy by hand: the reference's log-probabilities must not move, the sampler's must.",
)
def detached_reference(history: History) -> Evidence | None:
    """The KL is about 0 although the policy should have moved."""
    if (evidence := _vanished(history)) is not None:
        return evidence
    window, settings, name = DETACHED_WINDOW, history.settings, history.kl_name()
    if settings.moving_reference or settings.other_reference:
        name = best_kl(history.latest, ["kl/k3_original"] if settings.moving_reference else [])
    if not name or not history.penalized or len(history.rows) < 20 or not_trained(history):
        return None
    moves = [x for x in ("train/learning_rate", "train/grad_norm") if history.latest.get(x, 0.0) > 0]
    why = [FOLLOWS] if len(moves) == 2 else []
    before, now = history.first("reward", window), history.last("reward", window)
    kl, length = history.last(name, window), history.last("length/mean", window)
    curve = history.last("reward", EARLY)
    if min(map(len, (before, now, kl))) < window or not is_apart(before, now, errors=DETACHED_ERRORS, curve=curve):
        still, equal = (history.last(metric, int(STILL.value)) for metric in (name, "groups/saturated"))
        if len(still) < STILL.value or any(still) or min(equal, default=0.0) == 1:
            return None
        facts = [f"the last {len(still)} values of {name} are exactly 0"]
        facts += [f"{x} is {number(history.latest[x])}" for x in moves]
        return Evidence(", ".join(facts), causes=why)
    reward_range = max(1.0, 2 * max(map(abs, (*before, *now))))
    least = 2 * ((fmean(now) - fmean(before)) / reward_range) ** 2
    distance = abs(fmean(kl)) * (fmean(length) if length else 1.0)
    if max(map(abs, history.last(name, 20))) * (fmean(length) if length else 1.0) >= DETACHED.value * least:
        return None
    return Evidence(
        f"the reward went from {number(fmean(before))} to {number(fmean(now))}, which takes at least "
        f"{number(least)} nats per completion on like prompts, if rewards differ by {number(reward_range)} at most; "
        f"the KL is {number(distance)}{'' if length else ' per token'}",
        causes=why,
    )


FOLLOWS = (
    "the reference follows the policy: shared weights, an adapter that is on in its pass too, or weights that were "
    "reloaded into it; or, where the reward stands still, updates that rounding swallows (bfloat16 weights)"
)


def _vanished(history: History) -> Evidence | None:
    values = history.kl(3)
    least = min(values[:-1], default=0.0)
    if history.settings.moving_reference or len(values) < 3 or least < REFERENCE_DIFFERS.value:
        return None
    if values[-1] > FELL.value * least or not _stands_out(history.kl(SPIKE_MEMORY)[:-1], values[-1]):
        return None
    text = f"{history.kl_name()} fell from {number(values[-2])} to {number(values[-1])} nats per token from one logged"
    return Evidence(f"{text} step to the next: updates hardly take a policy back to its reference")


def is_reset(history: History) -> bool:
    """Whether a record shows a reference that becomes the policy again and again, after equally many steps."""
    falls = [view.step for view in history.replay() if _vanished(view)]
    gaps = [after - before for before, after in pairwise([min((r.step for r in history.rows), default=0), *falls])]
    if len(gaps) < 2 or max(gaps[1:]) - min(gaps[1:]) > 1:
        return False
    return abs(gaps[0] - gaps[1]) <= 1 or (len(gaps) > 2 and gaps[0] < gaps[1])  # a record may begin between two


def _first_kl(history: History) -> tuple[str, float]:
    """The KL before the first update and its name, while that is the latest step; else 0."""
    settings = history.settings
    if len(history.rows) > 1 or history.step > 1 or settings.steps_counted:
        return "", 0.0
    after_updates = "kl/k3" if settings.k3_over_updates else ""
    name = best_kl(history.latest.keys() - {after_updates})
    return name, history.latest.get(name, 0.0)


@alarm(
    "kl-far",
    needs=(KL, "length/mean"),
    steps=FAR_STEPS,
    limits=(FAR, FAR_COMPLETION),
    means="The average token is at least e times likelier under the policy than under the reference, unless a few "
    "tokens dominate a k3. Mostly the policy gave up its language: words repeat, other skills are lost.",
    do="Read completions, also of another task. Lower the learning rate, raise beta, or hold a target_kl.",
)
def kl_far(history: History) -> Evidence | None:
    """The policy is far from its reference."""
    kl, length = _settled(history, FAR_STEPS), history.last("length/mean", FAR_STEPS)
    k1 = history.last("kl/k1", FAR_STEPS) if history.kl_name() == "kl/k3" else []
    if kl is not None and len(k1) == FAR_STEPS:  # k3 is short by what the policy no longer samples
        kl = max(kl, min(k1))
    if kl is None or not length or kl <= FAR.value or kl * fmean(length) <= FAR_COMPLETION.value:
        return None
    text = f"the KL is {number(kl)} nats per token, {number(kl * fmean(length))} per completion, {MIDDLE}"
    return Evidence(text, blame(history), causes.why_far(history))


@alarm(
    "kl-growing",
    needs=(KL, "reward"),
    steps=30,
    limits=(GROWING,),
    means="The policy moves away and gains nothing: the optimizer adds up noise, or the reward is at its maximum.",
    do="End the run at the step where the reward stopped rising, lower the learning rate, or hold a target_kl.",
)
def kl_growing(history: History) -> Evidence | None:
    """The KL goes on growing, and the reward does not."""
    name, (kl, reward) = history.kl_name(), history.together(30, history.kl_name(), "reward")
    if len(kl) < 30 or fmean(kl[20:]) < GROWING_FLOOR:
        return None
    parts = [kl[:10], kl[10:20], kl[20:]]
    for before, after in pairwise(parts):
        if fmean(after) < GROWING.value * fmean(before) or not is_apart(before, after, errors=3):
            return None
    early, late = reward[:10], reward[20:]
    if fmean(late) > fmean(early) and is_apart(early, late, errors=1):
        return None
    text = (
        f"{name} grew from {number(fmean(parts[0]))} to {number(fmean(parts[2]))} nats per token, and the reward went"
    )
    rewards = f"from {number(fmean(early))} to {number(fmean(late))} (means of 10 values, 20 apart)"
    return Evidence(f"{text} {rewards}", causes=causes.why_far(history))


@alarm(
    "kl-high",
    needs=(KL,),
    steps=5,
    limits=(HIGH,),
    level="note",
    means="The GRPO tutorial takes it for drifting too much (docs/sources.md). Alone it proves nothing: a language "
    "model was best at 0.5 and kept its other skills; digits are learned at 0.1.",
    do="Read completions and look at the retained skills. If both are well, leave it.",
)
def kl_high(history: History) -> Evidence | None:
    """KL above 0.2, a tutorial's warning sign."""
    kl = _settled(history, 5)
    return Evidence(f"the KL is {number(kl)} nats per token, {MIDDLE}") if kl is not None and kl > HIGH.value else None


@alarm(
    "kl-low",
    needs=(KL,),
    steps=20,
    limits=(LOW,),
    level="note",
    means="Right if the reward is high or a KL holds the policy; else the updates are small.",
    do="Look at the reward. If it stands still and no alarm says why, raise the learning rate or lower beta.",
)
def kl_low(history: History) -> Evidence | None:
    """KL below 0.01, a tutorial's sign of not learning enough."""
    kl = _settled(history, 20)
    low = kl is not None and abs(kl) < LOW.value and not not_trained(history)
    return Evidence(f"the KL is {number(kl or 0.0)} nats per token, {MIDDLE}") if low else None


MIDDLE = "mean of the last 5 but the largest"


def _settled(history: History, steps: int) -> float | None:
    """The mean KL of the last 5 steps without the largest, once there are so many: one outlier says nothing."""
    values = history.kl(5) if len(history.rows) >= steps else []
    return fmean(sorted(values)[:-1]) if len(values) == 5 else None


@alarm(
    "negative-beta",
    needs=("beta|settings.beta",),
    means="The loss rewards every nat of distance from the reference, so nothing holds the policy.",
    do="Make the coefficient positive, or 0. An adaptive rule that overshoots 0 needs a longer horizon, or a bound.",
)
def negative_beta(history: History) -> Evidence | None:
    """The coefficient of the KL is negative."""
    beta = history.latest.get("beta", history.settings.beta)
    if beta is None or not beta < 0 or history.goes_beyond:
        return None
    return Evidence(f"beta is {number(beta)}: a bonus for distance from the reference")


@alarm(
    "kl-not-in-loss",
    needs=("train/loss", "train/policy_loss", KL, "beta|settings.beta"),
    steps=LEFT_OUT_STEPS,
    concerns="a KL in the loss",
    limits=(LEFT_OUT,),
    means="The coefficient is set, but the loss is the policy loss alone: the KL is measured and holds nothing.",
    do="Find where the trainer adds the KL to the loss. With the term in it, total minus policy loss is beta times KL.",
)
def kl_not_in_loss(history: History) -> Evidence | None:
    """The loss leaves the KL out."""
    beta = history.latest.get("beta", history.settings.beta) or 0.0
    columns = history.together(LEFT_OUT_STEPS, "train/loss", "train/policy_loss", history.kl_name())
    rows = [(abs(loss - policy), beta * kl) for loss, policy, kl in zip(*columns, strict=True)]
    too_small = any(part < SAME_KL or rest > LEFT_OUT.value * part for rest, part in rows)
    if not history.settings.kl_in_loss or len(rows) < LEFT_OUT_STEPS or too_small:
        return None
    text = f"beta times the KL is {number(rows[-1][1])}; loss and policy loss differ by {number(max(rows)[0])} at most"
    return Evidence(f"{text}, in {LEFT_OUT_STEPS} steps")


@alarm(
    "target-missed",
    needs=(KL, "kl/target"),
    steps=MISSED_STEPS,
    concerns="a target",
    limits=(MISSED,),
    means="The controller does not hold target_kl: beta is at its bound, the KL of a step is mostly noise, or the KL "
    "answers more slowly than beta moves.",
    do="Take more prompts per step, raise beta_max if beta is there, or lower the learning rate; else fix beta.",
)
def target_missed(history: History) -> Evidence | None:
    """The KL is not at its target."""
    count = MISSED_STEPS - MISSED_WINDOW + 1
    means = means_in_targets(history, MISSED_MEMORY)[-count:] if "kl/target" in history.latest else []
    if len(means) < count or min(abs(mean - 1) for mean in means) <= MISSED.value:
        return None
    betas, prompts = history.last("beta", MISSED_WINDOW), history.settings.prompts or FEW_PROMPTS
    stays = len({*betas}) == 1
    if stays and means[-1] < 1:  # at its lower bound: the reward does not ask for so large a KL
        return None
    rest = "its upper bound (beta_max), or where kl_controller='step' rests"
    why = [f"beta stays at {number(betas[-1])}: {rest}"] if stays else []
    why += [f"{prompts} prompts per step: take {FEW_PROMPTS} or more"] if prompts < FEW_PROMPTS else []
    target = number(history.latest["kl/target"])
    text = f"the mean KL of the last {MISSED_WINDOW} steps is {number(means[-1])} targets of {target} nats per token"
    return Evidence(text, causes=why)


def means_in_targets(history: History, steps: int) -> list[float]:
    """The mean KL of each 20 steps, in targets, after it reached the present target in the last `steps` steps."""
    pairs = list(zip(*history.together(steps, history.kl_name(), "kl/target"), strict=True))
    values = [bounded(kl / target) for kl, target in pairs if target == pairs[-1][1] > 0]
    first = next((step for step, value in enumerate(values) if value >= 1), len(values))
    ends = range(first + MISSED_WINDOW + 1, len(values) + 1)
    return [fmean(values[end - MISSED_WINDOW : end]) for end in ends]


def share_in_band(history: History) -> float | None:
    """The share of these means within 30 % of the target; None: no means yet."""
    means = means_in_targets(history, len(history.rows))
    return fmean(abs(mean - 1) <= MISSED.value for mean in means) if means else None


@alarm(
    "beta-runaway",
    needs=("beta", "|".join(("kl/k3_sequence", *(f"{name}+length/mean" for name in KL_NAMES))), "reward"),
    steps=RUNAWAY_WINDOW,
    limits=(RUNAWAY,),
    means="A schedule or a controller raised beta: the target is below what the reward needs, or the KL does not "
    "react to beta. The pull to the reference exceeds the advantages, and the policy may lose what it learned.",
    do="Raise target_kl to the KL at which the reward had risen, fix beta, or bound it (beta_max).",
)
def beta_runaway(history: History) -> Evidence | None:
    """Beta grew until the KL outweighs the reward."""
    betas, rewards = history.together(RUNAWAY_WINDOW, "beta", "reward")
    costs = [_cost(row.metrics, history.kl_name()) for row in history.rows[-RUNAWAY_WINDOW:]]
    start = next((value for value in history.first("beta", EARLY) if value > 0), None)
    if len(betas) < RUNAWAY_WINDOW or start is None:
        return None
    cost, gain = fmean(costs), fmean(map(abs, rewards))
    if fmean(betas) < RUNAWAY.value * start or cost <= gain:
        return None
    text = f"beta went from {number(start)} to {number(fmean(betas))}; the KL of a completion costs {number(cost)} of"
    return Evidence(f"{text} reward, and its reward is {number(gain)} in size (means of {RUNAWAY_WINDOW} values)")


def _cost(metrics: Mapping[str, float], kl_name: str) -> float:
    """What the KL of a completion costs of the reward; where no price is logged, beta for each nat."""
    beta, per_token = metrics.get("beta", 0.0), metrics.get(kl_name, 0.0) * metrics.get("length/mean", 0.0)
    cost = metrics.get("beta/price", beta) * metrics.get("kl/k3_sequence", per_token)
    return bounded(cost) if math.isfinite(cost) else 0.0
