"""The rules about the advantages, values out of range, retained skills and settings."""

from __future__ import annotations

import math

from klamp.diagnostics.alarm import Evidence, Limit, number
from klamp.diagnostics.history import History

HUGE = Limit(
    value=1e3,
    unit="in a KL, a gradient norm or a loss; or a value that is not finite",
    source="the k3 bug report (docs/sources.md): 1e5 was '100,000x normal'",
)
WATCHED = ("kl/k1", "kl/k3", "kl/exact", "sampler/k3", "train/grad_norm", "train/loss", "train/kl_penalty")
NOISE = Limit(
    value=1e-3,
    unit="of the reward's size, as the standard deviation within groups that have one",
    source="klamp's choice: dividing by it makes advantages of size 1 out of rounding",
)
ADVANTAGE = Limit(
    value=10,
    unit="in size",
    source="divided by its std, no advantage exceeds (G - 1)/sqrt(G): 10 needs a group of 102",
)
DROPPED = Limit(
    value=0.05,
    unit="of the score before training, and 3 standard errors where the number of examples is known",
    source="klamp's choice; falling scores are a warning sign of the GRPO tutorial (docs/sources.md)",
)


def huge_values(history: History) -> Evidence | None:
    """Finds values a thousand times larger than they should be, or not finite."""
    last = history.rows[-1].metrics if history.rows else {}
    found = {
        name: value
        for name, value in last.items()
        if not math.isfinite(value) or (name in WATCHED and abs(value) >= HUGE.value)
    }
    said = [f"{name} is {value:.1e}" for name, value in found.items()]
    lost = sum(
        on and not math.isfinite(policy)
        for each in history.completions.get(history.step, [])
        for on, policy in zip(each.trained or (), each.policy, strict=False)
    )
    if lost:
        said.append(f"{lost} trained {'token has' if lost == 1 else 'tokens have'} no finite log-probability")
    return Evidence(", ".join(said)) if said else None


def advantage_scale(history: History) -> Evidence | None:
    """Finds advantages that are too large, from what is logged of them or from the rewards."""
    last = history.rows[-1].metrics if history.rows else {}
    largest = max((abs(last[name]) for name in ("advantage/max", "advantage/min") if name in last), default=0.0)
    rows = [each for each in history.completions.get(history.step, []) if each.advantage is not None]
    largest = max([largest, *(abs(each.advantage or 0.0) for each in rows)])
    if largest > ADVANTAGE.value:
        return Evidence(f"an advantage of {number(largest)}")
    spread, active = last.get("reward_std", 0.0), 1 - last.get("groups/saturated", 1.0)
    size = max(1.0, abs(last.get("reward", 0.0)))
    scaled = history.settings.scale_rewards != "none" and history.settings.loss_type != "dr_grpo"
    if scaled and active > 0 and 0 < spread / active < NOISE.value * size:
        return Evidence(
            f"rewards of about {number(last.get('reward', 0.0))} differ by {number(spread / active)} within their "
            "groups and are divided by that"
        )
    return _signal_from_nothing(history)


def _signal_from_nothing(history: History) -> Evidence | None:
    """Finds advantages in groups whose rewards are all equal."""
    if history.settings.kl_in_reward:
        return None
    groups: dict[str, list[tuple[float, float]]] = {}
    for each in history.completions.get(history.step, []):
        if each.reward is not None and each.advantage is not None and each.group:
            groups.setdefault(each.group, []).append((each.reward, each.advantage))
    for pairs in groups.values():
        rewards, advantages = zip(*pairs, strict=True)
        if len(pairs) > 1 and max(rewards) == min(rewards) and max(advantages) - min(advantages) > 1e-6:
            return Evidence(
                f"{len(pairs)} completions of one prompt have the same reward {number(rewards[0])} and advantages from "
                f"{number(min(advantages))} to {number(max(advantages))}"
            )
    return None


def dr_grpo_with_kl(history: History) -> Evidence | None:
    """Finds a KL under Dr. GRPO where the reward comes from rules."""
    settings = history.settings
    if settings.loss_type != "dr_grpo" or settings.verifier != "rules" or not history.penalized:
        return None
    last = history.rows[-1].metrics if history.rows else {}
    beta = last.get("beta", settings.beta)
    return Evidence(f"loss_type is dr_grpo, beta {'above 0' if beta is None else number(beta)}, the reward is a rule's")


def retention(history: History) -> Evidence | None:
    """Finds a skill that is not trained and whose score fell."""
    if len(history.evaluations) < 2:
        return None
    before, now = history.evaluations[0].metrics, history.evaluations[-1].metrics
    worst: list[tuple[float, str]] = []
    for skill in before.keys() & now.keys() - {history.settings.rl_skill}:
        old, new = before[skill], now[skill]
        if old - new > max(DROPPED.value * (1.0 if 0 <= old <= 1 else abs(old)), _noise(old, new, history)):
            worst.append((old - new, f"{skill} went from {_score(old, history)} to {_score(new, history)}"))
    return Evidence("; ".join(text for _, text in sorted(worst, reverse=True))) if worst else None


def _score(value: float, history: History) -> str:
    """A score as the report and the terminal write it: of 100, where all scores lie between 0 and 1."""
    shares = all(0 <= each <= 1 for row in history.evaluations for each in row.metrics.values())
    return f"{100 * value:.1f} of 100" if shares else number(value)


def _noise(old: float, new: float, history: History) -> float:
    """Three standard errors of the difference of two shares."""
    size, share = history.settings.eval_size, (old + new) / 2
    return 3 * math.sqrt(2 * share * (1 - share) / size) if size and 0 <= share <= 1 else 0.0
