"""The alarms about rewards, advantages, lengths, values out of range, retained skills and settings."""

from __future__ import annotations

import math
from itertools import pairwise, takewhile
from statistics import fmean, median

from klamp.doctor import causes
from klamp.doctor.alarm import LONG, Evidence, Limit, alarm, is_apart, least_and_most, noise, number
from klamp.doctor.causes import ENTROPY_FLOOR, PAYS
from klamp.doctor.history import EARLY, WRITTEN, History

HUGE = Limit(1e3, "in a KL, a gradient norm or a loss (docs/sources.md); or a value that is not finite")
WATCHED = ("kl/k1", "kl/k3", "kl/exact", "sampler/k3", "train/grad_norm", "train/loss", "train/kl_penalty")
NOISE = Limit(1e-3, "of the reward's size, as the standard deviation within groups that have one")
ADVANTAGE = Limit(10, "in size (divided by its std, no advantage exceeds (G - 1)/sqrt(G): 10 needs a group of 102)")
DROPPED = Limit(
    0.05,
    "of the score before training, and 3 standard errors: by the number of examples, else by the scatter of 6 "
    "evaluations or more, else as of 50 examples",
)
FEW_EXAMPLES, MANY_SCORES = 50, 6
IDLE = Limit(20, "steps in a row, or all of the first 5 and more, with a gradient or a learning rate of exactly 0")
IDLE_START = 5
COLLAPSE_WINDOWS, COLLAPSE_MEMORY, COLLAPSE_ERRORS = (5, 20), 100, 6
COLLAPSE = Limit(
    0.3,
    f"of the best mean of 5 steps (of 20 with more noise) among the {COLLAPSE_MEMORY} before, which is lost; and half "
    f"of the reward's standard deviation within groups, and {COLLAPSE_ERRORS} standard errors",
)
SHIFT, SAME_POLICY = 10, 1.5
"""Steps before and after a change of the prompts, and times that the KL, or its substitute, may grow meanwhile."""
REPEATED = Limit(0.5, "of the tokens repeat a pair of tokens of their completion, mean of 5 steps")
MORE_REPEATED = Limit(0.2, "more than in the first 5 steps (a task may want repetition)")
STUCK_STEPS, AT_CEILING = 20, 0.9
ENTROPY_LEFT = Limit(
    0.25,
    f"of the entropy of the first 5 steps, below {ENTROPY_FLOOR} nats per token, mean of {STUCK_STEPS} steps, while "
    "the reward does not rise and is not at its ceiling, where it scatters less",
)
SATURATED_STEPS, SATURATED_GROUPS = 20, 60
SATURATED = Limit(
    0.99, f"of the groups have equal rewards, in {SATURATED_STEPS} steps, or of {SATURATED_GROUPS} prompts"
)
TRUNCATED = Limit(0.25, "of the completions, mean over 5 steps")
USELESS = 0.6
MORE_TRUNCATED = Limit(
    0.1,
    "more than in the first 5 steps, in which there were fewer; or as many from the start, and equal "
    f"rewards in {100 * USELESS:.0f} % of the groups; unless the reward pays for length",
)
GROWN = Limit(3, "times the length of the first 20 steps, mean of 20 steps, while the reward did not rise")


@alarm(
    "huge-values",
    needs=("|".join((*WATCHED, "completions")),),
    limits=(HUGE,),
    means="A large KL or gradient has exploded: k3 is exponential in how far a token is below the reference. Gradient "
    "clipping then hides it. A nan may also be a mean over nothing.",
    do="Lower the learning rate, bound the log-ratio, use float32, check that both models see the same tokens.",
)
def huge_values(history: History) -> Evidence | None:
    """Values of a thousand and more, or not finite."""
    values = {
        name: value
        for name, value in history.latest.items()
        if not math.isfinite(value) or (name in WATCHED and abs(value) >= HUGE.value)
    }
    facts = [f"{name} is {value:.1e}" for name, value in values.items()]
    lost = sum(
        on and (any(map(math.isinf, x)) or (row.trained is not None and any(map(math.isnan, x[:2]))))
        for row in history.written
        for on, *x in zip(row.is_trained, row.policy, row.ref or row.policy, row.sampler or row.policy, strict=True)
    )
    facts += [f"{lost} trained {'token has' if lost == 1 else 'tokens have'} no finite log-probability"] * bool(lost)
    return Evidence(", ".join(facts), causes=_broken_before(history)) if facts else None


def _broken_before(history: History) -> list[str]:
    """What shows that a step's completions, which are written before its loss, were broken already."""
    rewards, lengths = (history.last(name, EARLY) for name in ("reward", "length/mean"))
    cut = history.latest.get("length/truncated", 0.0) if "reward" in history.latest else 0.0
    if min(len(rewards), len(lengths)) <= IDLE_START or cut < 1 or rewards[-1] > 0 or median(rewards[:-1]) <= 0:
        return []
    return [
        f"the weights were broken before: this step's completions earn {number(rewards[-1])} "
        f"({number(median(rewards[:-1]))} before) and all run to the limit ({number(lengths[-1])} tokens). They were "
        "written before its loss, so the update of the step before, or the weights that the sampler got, did it"
    ]


@alarm(
    "not-trained",
    needs=("train/grad_norm|train/learning_rate|completions",),
    steps=IDLE_START,
    limits=(IDLE,),
    means="The learning rate is 0, the gradient is 0, or no token counts.",
    do="Print the learning rate, the trainable parameters and their gradients, and the sum of the loss mask.",
)
def not_trained(history: History) -> Evidence | None:
    """Nothing trains the policy."""
    steps = sorted(history.completions)[-WRITTEN:]
    completions = [completion for step in steps for completion in history.completions[step]]
    if len(history.completions) >= WRITTEN and not any(any(completion.is_trained) for completion in completions):
        text = f"no token of the last {len(completions)} completions that were kept is trained on"
        return Evidence(text, (), [MASKED if all(x.ended is False for x in completions) else "the loss mask is empty"])
    rate, gradient = (_idle(history, name) for name in ("train/learning_rate", "train/grad_norm"))
    if rate:
        why = "the learning rate was set to 0, a schedule has ended, a warm-up is long, or the log rounds it to 0"
        return Evidence(f"train/learning_rate is 0 in {rate}", causes=[why])
    equal, cut = (history.last(name, IDLE_START) for name in ("groups/saturated", "length/truncated"))
    if not gradient or min(equal, default=0.0) == 1:
        return None
    why = "frozen weights, an adapter that is not trained, a loss without a gradient, or updates that are skipped"
    why = MASKED if min(cut, default=0.0) == 1 else why
    still = [name for name in ("train/loss", "kl/k3", "kl/k1") if history.latest.get(name) == 0]
    return Evidence(", ".join([f"train/grad_norm is 0 in {gradient}", *(f"{x} is 0" for x in still)]), (), [why])


MASKED = "every completion is cut at the length limit, and cut ones are masked. Raise max_completion_length"
MOVED = 1e-4
"""Nats per token; no numbers of one model differ by so much."""


def _moved(history: History, name: str) -> bool:
    """Whether the KL moved, though a metric is logged as 0: a rounded number, where it never was another one."""
    kl, now = history.kl_name(), history.kl(5)
    was = history.last(kl, 5, before=int(IDLE.value) - 5) if any(history.first(name, EARLY)) else history.first(kl, 5)
    return bool(now) and fmean(now) > max(MOVED, 2 * fmean(was or [0.0]))


def _idle(history: History, name: str) -> str:
    """In which steps a metric was exactly 0, in words; empty where in too few."""
    values = history.last(name, int(IDLE.value))
    if name not in history.latest or any(values) or _moved(history, name):
        return ""
    if len(values) == IDLE.value:
        return f"its last {len(values)} values"
    if any(history.kl(IDLE_START)) and name == "train/learning_rate":
        return ""  # a KL that has only begun does not tell a rate that is rounded from none
    from_first_step = len(values) >= IDLE_START and len(values) == len(history.rows) and history.rows[0].step <= 1
    return f"all {len(values)} steps" if from_first_step else ""


@alarm(
    "advantage-scale",
    needs=("reward_std+groups/saturated|advantage/max|advantages",),
    limits=(ADVANTAGE, NOISE),
    means="The policy gradient is as large as the advantages. Causes: a reward that is not of order 1, a division by "
    "a standard deviation that is only rounding, or a critic. beta then has another meaning.",
    do="Print rewards and advantages of one group. Scale the reward to order 1, give groups without variance the "
    "advantage 0, or leave the division out (scale_rewards='none').",
)
def advantage_scale(history: History) -> Evidence | None:
    """Advantages are out of scale."""
    last = history.latest
    largest = max((abs(last[name]) for name in ("advantage/max", "advantage/min") if name in last), default=0.0)
    largest = max([largest, *(abs(completion.advantage or 0.0) for completion in history.written)])
    if largest > ADVANTAGE.value:
        return Evidence(f"an advantage of {number(largest)}")
    spread, active = last.get("reward_std", 0.0), 1 - last.get("groups/saturated", 1.0)
    size = max(1.0, abs(last.get("reward", 0.0)))
    scaled = history.settings.scale_rewards != "none" and history.settings.loss_type != "dr_grpo"
    if scaled and active > 0 and 0 < spread / active < NOISE.value * size:
        text = f"rewards of about {number(last.get('reward', 0.0))} differ by {number(spread / active)} within their"
        return Evidence(f"{text} groups, by which advantages may be divided")
    return None


@alarm(
    "dr-grpo-with-kl",
    needs=("settings.loss_type", "settings.verifier"),
    means="Dr. GRPO leaves the KL out: a rule is right however far the policy moves, so the KL only holds it back.",
    do="Set beta to 0, or say why the skills of the reference must be kept and watch them.",
)
def dr_grpo_with_kl(history: History) -> Evidence | None:
    """A KL under dr_grpo with a rule-based verifier."""
    settings = history.settings
    if settings.loss_type != "dr_grpo" or settings.verifier != "rules" or not history.penalized:
        return None
    beta = history.latest.get("beta", settings.beta)
    beta_text = "a KL is logged" if beta is None else f"beta is {number(beta)}"
    return Evidence(f"loss_type is dr_grpo, {beta_text}, the reward is a rule's")


@alarm(
    "retention",
    needs=("evaluations",),
    limits=(DROPPED,),
    means="Another skill: mostly old knowledge is forgotten, and the forward KL on the new task predicts it (arXiv "
    "2509.04259). The task itself: mostly the policy games the reward or learns its prompts by heart.",
    do="Raise beta or lower target_kl, train fewer steps, or mix the old skill into the prompts.",
)
def retention(history: History) -> Evidence | None:
    """A held-out score fell."""
    if len(history.evaluations) < 2:
        return None
    before, now = history.evaluations[0].metrics, history.evaluations[-1].metrics
    worst: list[tuple[float, str]] = []
    for skill in before.keys() & now.keys() - {history.settings.rl_skill}:
        old, new = before[skill], now[skill]
        if skill.endswith("reward") or "rewards/" in skill:
            continue
        if old - new > max(DROPPED.value * (1.0 if 0 <= old <= 1 else abs(old)), _noise(skill, history)):
            worst.append((old - new, f"{skill} went from {number(old)} to {number(new)}"))
    return Evidence("; ".join(text for _, text in sorted(worst, reverse=True))) if worst else None


def _noise(skill: str, history: History) -> float:
    """Three standard errors of the difference of the first score and the last."""
    scores = [row.metrics[skill] for row in history.evaluations if skill in row.metrics]
    size, share = history.settings.eval_size, (scores[0] + scores[-1]) / 2
    if size is None and len(scores) >= MANY_SCORES:
        return 3 * 1.48 * median(abs(a - b) for a, b in pairwise(scores))  # 1.48: of a normal law; sqrt(2) is in it
    return 3 * math.sqrt(2 * share * (1 - share) / (size or FEW_EXAMPLES)) if 0 <= share <= 1 else 0.0


@alarm(
    "reward-collapse",
    needs=("reward",),
    steps=2 * COLLAPSE_WINDOWS[0],
    limits=(COLLAPSE,),
    means="The policy lost what it knew: too large an update, or a wrong sign. A new reward looks alike.",
    do="Go back to a checkpoint from before the fall, mend the likely cause, and hold the KL (target_kl).",
)
def reward_collapse(history: History) -> Evidence | None:
    """The reward collapsed."""
    return next(filter(None, (_fallen(history, window) for window in COLLAPSE_WINDOWS)), None)


def _fallen(history: History, window: int) -> Evidence | None:
    now = history.last("reward", window)
    before = history.last("reward", COLLAPSE_MEMORY, before=window)
    if len(now) < window or len(before) < window:
        return None
    best = max(fmean(before[i : i + window]) for i in range(len(before) - window + 1))
    spread = max(history.last("reward_std", 1 + len(before)), default=0.0)
    by_chance = COLLAPSE_ERRORS * noise(before, now) * math.sqrt(2 / window)
    if best - fmean(now) <= max(COLLAPSE.value * abs(best), spread / 2, by_chance) or _harder_prompts(history):
        return None
    why = causes.likely_causes(history, causes.learning_rate, causes.wrong_sign, causes.entropy_rose, causes.no_kl)
    return Evidence(f"the reward fell from {number(best)} to {number(fmean(now))}, means of {window} steps", causes=why)


def _harder_prompts(history: History) -> bool:
    """Whether the reward fell in one step, and neither the KL nor the spread within groups changed: other prompts."""
    kl = history.kl_name()  # without one, gradient norm and entropy say it, and a part of the reward must be left
    others = [kl] if kl else [x for x in ("train/grad_norm", "policy/entropy") if x in history.latest]
    *curves, rewards = history.together(COLLAPSE_MEMORY + 2 * SHIFT, *others, "reward")
    if len(rewards) <= SHIFT or not others:
        return False
    at = min(range(SHIFT, len(rewards)), key=lambda i: rewards[i] - rewards[i - 1])
    before, after = slice(at - SHIFT, at), slice(at, at + SHIFT)
    level = fmean(rewards[after])
    fell = fmean(rewards[before]) - level
    by_chance = COLLAPSE_ERRORS * noise(rewards[before]) * math.sqrt(2 / SHIFT)
    at_once = rewards[at - 1] - rewards[at] > fell / 2 and fell > by_chance
    stays = fmean(rewards[-5:]) > level - COLLAPSE.value * abs(level) and min(rewards[after]) > 0
    update = at if kl else at - 1  # the gradient of the step before made the policy that fell
    means = [(fmean(curve[at - SHIFT : update]), fmean(curve[update : at + SHIFT])) for curve in curves]
    moved = any(new > SAME_POLICY * max(old, MOVED) for old, new in means)
    moved |= not kl and level < COLLAPSE.value * (level + fell)
    has_signal = max(history.last("groups/saturated", SHIFT), default=0.0) < 1
    return at_once and stays and has_signal and not moved


@alarm(
    "repetition",
    needs=("length/repeated",),
    steps=6,
    limits=(REPEATED, MORE_REPEATED),
    means="Mostly the policy has collapsed into a word or a phrase that the reward likes.",
    do="Go back to an earlier checkpoint. Let the reward count a thing once, raise beta or hold a target_kl.",
)
def repetition(history: History) -> Evidence | None:
    """Completions repeat themselves."""
    early, now = history.first("length/repeated", 5), history.last("length/repeated", 5)
    if min(len(early), len(now)) < 5 or fmean(now) < REPEATED.value:
        return None
    before = list(takewhile(lambda share: share < REPEATED.value, early))  # a policy may collapse in its first steps
    start = before if 1 < len(before) < len(history.rows) - len(now) else early
    errors = 3.5 if len(history.rows) > LONG else 3.0
    rose = is_apart(start, now, errors=errors, curve=history.last("length/repeated", EARLY))
    if fmean(now) - fmean(start) < MORE_REPEATED.value or not rose:
        return None
    why = causes.likely_causes(history, causes.pays_for_length, causes.no_kl, causes.learning_rate)
    share = f"{100 * fmean(now):.0f} % of the tokens repeat a pair of tokens of their completion"
    return Evidence(f"{share}, {100 * fmean(start):.0f} % in the first steps", causes=why)


@alarm(
    "entropy-collapse",
    needs=("policy/entropy", "reward"),
    steps=3 * STUCK_STEPS,
    limits=(ENTROPY_LEFT,),
    means="The policy writes nearly the same answer each time. It explores no other one, so the reward stops rising.",
    do="Go back to a checkpoint from before the fall. Raise the upper clip bound, add an entropy bonus, or hold a KL.",
)
def entropy_collapse(history: History) -> Evidence | None:
    """The entropy is gone, and the reward does not rise any more."""
    start, now = history.first("policy/entropy", 5), history.last("policy/entropy", STUCK_STEPS)
    before, rewards = (history.last("reward", STUCK_STEPS, before=steps) for steps in (2 * STUCK_STEPS, 0))
    if len(start) < 5 or min(map(len, (now, before))) < STUCK_STEPS or not is_apart(start, now, errors=6):
        return None
    rises = fmean(rewards) > fmean(before) and is_apart(before, rewards, errors=2)
    scatters_less = noise(rewards) <= noise(history.first("reward", STUCK_STEPS)) / 2
    is_left = fmean(now) > min(ENTROPY_LEFT.value * fmean(start), ENTROPY_FLOOR)
    if is_left or rises or scatters_less or AT_CEILING <= fmean(rewards) <= 1:
        return None
    entropy = f"the entropy went from {number(fmean(start))} to {number(fmean(now))} nats per token"
    return Evidence(f"{entropy}; the reward was {number(fmean(before))} and is {number(fmean(rewards))}")


@alarm(
    "saturated",
    needs=("groups/saturated",),
    steps=SATURATED_STEPS,
    limits=(SATURATED,),
    means="Advantages to a group's mean are 0: the reward has no gradient, and only a KL and noise move the policy.",
    do="Learned: end here. All fail: make the task easier or fix the reward. All alike: go back and hold the KL.",
)
def saturated(history: History) -> Evidence | None:
    """Nothing is left to learn from the reward: it is equal within groups."""
    steps = max(SATURATED_STEPS, math.ceil(SATURATED_GROUPS / (history.settings.prompts or SATURATED_GROUPS)))
    values = history.last("groups/saturated", steps)
    if len(values) < steps or fmean(values) < SATURATED.value:
        return None
    rewards = history.last("reward", SATURATED_STEPS)
    at = f" at {number(fmean(rewards))}" if rewards else ""
    why = [*_why_saturated(history, rewards), *causes.likely_causes(history, causes.pays_for_length)]
    return Evidence(f"{100 * fmean(values):.3g} % of the groups of {steps} steps have equal rewards{at}", causes=why)


def _why_saturated(history: History, rewards: list[float]) -> list[str]:
    if not rewards:
        return []
    best = max(history.first("reward", EARLY), default=0.0)
    if fmean(rewards) < best - COLLAPSE.value * abs(best):
        return [f"the reward was {number(best)} once: look at the alarms before this one"]
    if abs(fmean(rewards)) < 0.02:
        return ["no completion earns anything: read some; take easier prompts, or a reward for parts of an answer"]
    return ["equal rewards within each prompt: learned (end the run, or take harder prompts), failed, or gamed"]


@alarm(
    "truncated",
    needs=("length/truncated|length/mean+reward",),
    steps=5,
    limits=(TRUNCATED, MORE_TRUNCATED, GROWN),
    means="The reward judges unfinished answers, unless they are left out, and the KL misses what would have "
    "followed. Completions grew, or the limit was too low from the start.",
    do="Read some. If they grow by filler, fix the reward; if answers need the room, raise max_completion_length, or "
    "leave such completions out (mask_truncated_completions).",
)
def truncated(history: History) -> Evidence | None:
    """Many completions are cut at the length limit, or grow without a gain."""
    return _cut(history) or _grown(history)


def _grown(history: History) -> Evidence | None:
    names = ("length/mean", "reward")
    (short, before), (long, now) = ([get(x, STUCK_STEPS) for x in names] for get in (history.first, history.last))
    if len(history.rows) < 2 * STUCK_STEPS or min(map(len, (short, before, long, now))) < STUCK_STEPS:
        return None
    rises = fmean(now) > fmean(before) and is_apart(before, now, errors=1)
    if fmean(long) < GROWN.value * fmean(short) or rises or not noise(now) or _harder_prompts(history):
        return None
    lengths = f"length/mean went from {number(fmean(short))} to {number(fmean(long))} tokens"
    text = f"{lengths}, the reward from {number(fmean(before))} to {number(fmean(now))}, means of {STUCK_STEPS} steps"
    return Evidence(text, causes=causes.likely_causes(history, causes.pays_for_length))


def _cut(history: History) -> Evidence | None:
    curve, pays = history.last("length/truncated", EARLY), history.last("length/reward_correlation", 5)
    start, now = history.first("length/truncated", 5), curve[-5:]
    if len(now) < 5 or fmean(now) <= TRUNCATED.value or (pays and fmean(pays) >= PAYS.value):
        return None
    equal = history.first("groups/saturated", 5)
    from_start = least_and_most(history.first("length/truncated", LONG))[0] > TRUNCATED.value
    useless = len(equal) == 5 and from_start and fmean(equal) >= USELESS
    by_design = fmean(start) > TRUNCATED.value or fmean(now) - fmean(start) <= MORE_TRUNCATED.value
    if (by_design or not is_apart(start, now, errors=3.5, curve=curve)) and not useless:
        return None
    few = f", as from the start, where {100 * fmean(equal):.0f} % of the groups had equal rewards" if useless else ""
    earlier = few or f", {100 * fmean(start):.0f} % in the first"
    text = f"{100 * fmean(now):.0f} % of the completions were cut at the length limit, mean of 5{earlier}"
    return Evidence(text, causes=causes.likely_causes(history, causes.pays_for_length))
