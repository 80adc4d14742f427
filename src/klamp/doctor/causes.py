"""Why something went wrong: causes that a run's curves show, each with a number and a remedy; the tokens to blame."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from statistics import fmean
from typing import TypeAlias

from klamp.doctor.alarm import Blamed, Limit, is_apart, noise, number
from klamp.doctor.history import History, Side, k3

Cause: TypeAlias = Callable[[History], str]
"""Looks for one cause in the steps up to an alarm: its text, or ""."""

MANY = 5
"""Tokens that are blamed at most."""
WINDOW, BY_NOISE = 30, 10
"""Steps that are searched for a cause, and from which a jump has to stand out of the curve's own scatter."""
JUMP = 0.15
"""Nats per token that one step moves a policy by if its learning rate is too high; healthy runs stay below 0.05."""
FARTHEST = 20.0
"""Nats per token, more than a policy is from a reference whose every token is as likely as one in 100 million."""
ENTROPY, ENTROPY_FLOOR, WHOLE = 2.0, 0.2, 150
"""Times that an entropy, of so many nats per token, rises to become noise; steps of a fall from the first steps on."""
PAYS = Limit(0.3, "correlation of reward and length within groups, mean of 10 steps")


def likely_causes(history: History, *causes: Cause) -> list[str]:
    """The texts of the causes that the run shows, in this order."""
    return [text for cause in causes if (text := cause(history))]


def why_far(history: History) -> list[str]:
    """What the run shows of why the KL is large."""
    return likely_causes(history, learning_rate, no_kl, pays_for_length)


def last_jump(history: History) -> str:
    """Shows that the last step may have moved the policy far; the next one decides."""
    return _rate(history, next((b - a for a, b in pairwise(history.kl(2))), 0.0), ", if the KL stays there")


def learning_rate(history: History) -> str:
    """Shows that single steps moved the policy far, and it stayed there: the learning rate is too high."""
    kl = history.kl(WINDOW)
    largest = max((min(b, c) - a for a, b, c in zip(kl, kl[1:], kl[2:], strict=False)), default=0.0)
    bends = [a - 2 * b + c for a, b, c in zip(kl, kl[1:], kl[2:], strict=False)]  # a slope has none, noise has sqrt(6)
    scattered = len(kl) > BY_NOISE and largest < 4 * (fmean(x * x for x in bends) / 6) ** 0.5
    return "" if scattered else _rate(history, largest, "")


def _rate(history: History, largest: float, if_so: str) -> str:
    if largest <= JUMP:
        return ""
    if largest > FARTHEST:
        return (
            f"a few tokens, or numbers that are wrong: {number(largest)} nats per token is farther than a policy "
            "moves. k3 is exponential in single log-ratios: bound them (kl_max_log_ratio), and check mask and shift"
        )
    rates = history.last("train/learning_rate", WINDOW)
    rate = f" (up to {number(max(rates))})" if rates else ""
    return (
        f"the learning rate{rate}{if_so}: the KL rose by {number(largest)} nats per token from one logged step to the "
        "next. Take a tenth of this rate, or lower max_grad_norm"
    )


def wrong_sign(history: History) -> str:
    """Shows that the reward fell from the first steps on, smoothly."""
    rewards = history.first("reward", WHOLE)
    size = len(rewards) // 3
    if size < 5 or len(history.rows) > WHOLE or learning_rate(history):
        return ""
    thirds = [rewards[i * size : (i + 1) * size] for i in range(3)]
    means, largest = list(map(fmean, thirds)), max(a - b for a, b in pairwise(rewards))
    smooth = largest < max(means[0] - means[2], 4 * noise(rewards))
    if not (means[0] > means[1] > means[2] and smooth and is_apart(thirds[0], thirds[1], errors=3)):
        return ""
    return (
        f"the reward falls from the first steps on (means {', '.join(map(number, means))} of a third each): the sign "
        "of the loss, of the advantage or of the reward is wrong"
    )


def entropy_rose(history: History) -> str:
    """Shows that the policy became noise."""
    start, now = history.first("policy/entropy", 5), history.last("policy/entropy", 5)
    if min(len(start), len(now)) < 5 or fmean(now) < ENTROPY * max(fmean(start), ENTROPY_FLOOR):
        return ""
    text = f"the entropy rose from {number(fmean(start))} to {number(fmean(now))} nats per token: the policy turns into"
    return f"{text} noise. Lower the learning rate, the entropy bonus or the upper clip bound, or hold a KL"


def no_kl(history: History) -> str:
    """Shows that no KL to a reference holds the policy."""
    absent = history.latest.get("beta", history.settings.beta) == 0
    text = "no KL to a reference holds the policy (beta is 0). Set beta, or target_kl, which finds one"
    return text if absent else ""


def pays_for_length(history: History) -> str:
    """Shows that longer completions of a prompt earn more."""
    values = history.last("length/reward_correlation", WINDOW)
    if not values or fmean(values) < PAYS.value:
        return ""
    text = f"the reward pays for length: within groups the two correlate by {fmean(values):.2f}. Score the answer alone"
    return f"{text}, or let length cost something"


def blame(history: History, *, against: Side = "ref") -> list[Blamed]:
    """The tokens with most of the k3 among the completions of the latest step, or of the nearest one that has some."""
    step = min(history.completions, key=lambda written: abs(written - history.step), default=0)
    sums: dict[Blamed, float] = {}
    first: dict[Blamed, int] = {}
    for index, completion in enumerate(history.completions.get(step, ())):
        other_logprobs = (completion.ref if against == "ref" else completion.sampler) or ()
        for position, delta in completion.log_ratios(against):
            token, logprob = str(completion.tokens[position]), completion.policy[position]
            blamed = Blamed(step, 0, position, token, logprob, other_logprobs[position], 0.0)
            sums[blamed] = sums.get(blamed, 0.0) + k3(delta)
            first.setdefault(blamed, index)
    worst = [token for token in sorted(sums, key=lambda token: -sums[token])[:MANY] if sums[token] > 0]
    return [replace(token, completion=first[token], share=sums[token] / sum(sums.values())) for token in worst]
