"""The rules about the strength of the KL against the reward: too weak to matter, too strong to learn, running away."""

from __future__ import annotations

from statistics import fmean

from klamp.diagnostics.alarm import Evidence, Limit, number
from klamp.diagnostics.causes import kl_pull, spread_within_groups
from klamp.diagnostics.history import EARLY, History

RUNAWAY_WINDOW = 10
RUNAWAY = Limit(
    value=30,
    unit=f"times the first beta, while beta times the KL per completion outweighs the reward, {RUNAWAY_WINDOW} steps",
    source="klamp's choice; seen: from 0.03 to 32 at a target of 0.08 nats per token, the score from 99 to 87",
)
INERT_STEPS = 20
INERT = Limit(
    value=0.005,
    unit=f"of the reward's pull, {INERT_STEPS} steps, once the KL is above 0.05 nats per completion; or a clip whose "
    "budget no completion exceeded in any of them",
    source="klamp's choice: the KL's pull is price sqrt(2 KL) / s, 1 at the optimum (s: the reward's standard "
    "deviation within groups)",
)
INERT_KL = 0.05
DOMINATES_STEPS = 10
DOMINATES = Limit(
    value=0.02,
    unit=f"nats per completion: the KL (s / price)^2 / 2 of the optimum is below it, {DOMINATES_STEPS} steps",
    source="to second order, see docs/where-it-ends.md: the reward can rise by s^2 / price at most, a fifth of s",
)


def beta_runaway(history: History) -> Evidence | None:
    """Finds a controller that raised beta until the KL costs more than the reward gives."""
    names = ("beta", "beta/price", "kl/k3_sequence", "reward")
    betas, prices, kls, rewards = (history.last(name, RUNAWAY_WINDOW) for name in names)
    start = next((value for value in history.first("beta", EARLY) if value > 0), None)
    if min(map(len, (betas, prices, kls, rewards))) < RUNAWAY_WINDOW or start is None:
        return None
    cost, gain = fmean(price * kl for price, kl in zip(prices, kls, strict=True)), fmean(map(abs, rewards))
    if fmean(betas) < RUNAWAY.value * start or cost <= gain:
        return None
    return Evidence(
        f"beta went from {number(start)} to {number(betas[-1])}; times the KL it takes {number(cost)} of a completion "
        f"whose reward is {number(fmean(rewards))}, over {RUNAWAY_WINDOW} steps"
    )


def kl_inert(history: History) -> Evidence | None:
    """Finds a KL that is paid for and does nothing: its pull is lost beside the reward's, or its clip never opens."""
    if len(history.rows) < INERT_STEPS or not history.penalized or history.settings.target_kl is not None:
        return None
    over = history.last("kl/over_budget", INERT_STEPS)
    if len(over) == INERT_STEPS and max(over) == 0:
        budget, before = history.last("kl/budget", 1), history.last("kl/before_clip", INERT_STEPS)
        return Evidence(
            f"in {INERT_STEPS} steps no completion exceeded the clip's budget"
            + (f" of {number(budget[0])} nats" if budget else "")
            + (f"; their mean KL was {number(fmean(before))}" if before else "")
            + ": the KL is 0 in the loss"
        )
    kl, pull = history.last("kl/k3_sequence", INERT_STEPS), kl_pull(history, INERT_STEPS)
    if len(kl) < INERT_STEPS or fmean(kl) < INERT_KL or pull is None or pull >= INERT.value:
        return None
    price = fmean(history.last("beta/price", INERT_STEPS))
    return Evidence(
        f"the KL pulls with {100 * pull:.2g} % of the reward's strength, over {INERT_STEPS} steps: {number(price)} of "
        f"reward per nat of a completion, whose KL is {number(fmean(kl))} nats"
    )


def kl_dominates(history: History) -> Evidence | None:
    """Finds a beta at which even the optimum stays at the reference."""
    prices, spread = history.last("beta/price", DOMINATES_STEPS), spread_within_groups(history, DOMINATES_STEPS)
    if len(prices) < DOMINATES_STEPS or spread is None or not history.penalized or min(prices) <= 0:
        return None
    price = fmean(prices)
    optimum = (spread / price) * (spread / price) / 2
    if optimum >= DOMINATES.value:
        return None
    return Evidence(
        f"a nat of a completion costs {number(price)} of reward, and rewards differ by {number(spread)} within their "
        f"groups: the best policy is {number(optimum)} nats per completion from the reference, and earns "
        f"{number(spread * spread / price)} more than it"
    )
