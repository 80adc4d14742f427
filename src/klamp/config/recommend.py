"""Which KL to begin with: the rules of docs/which-kl.md, each with its reason and the record that it rests on.

Every number in a reason stands on the page that is named beside it; what is computed for the situation stands apart.

>>> found = recommend(Situation(gamed=False, keeps=False))
>>> found.values["beta"]
0.0
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from klamp.config.choices import KLChoices
from klamp.config.describe import describe_both_prices
from klamp.config.kl import KLConfig
from klamp.config.loss import LossConfig
from klamp.config.price import configured_price, spreads_of_right_or_wrong
from klamp.config.situation import Situation
from klamp.errors import KLWarning

WHICH, ESTIMATORS, CONCEPTS = "docs/which-kl.md", "docs/estimators.md", "docs/concepts.md"
LANGUAGE, CLIPPING, CONTROLLERS = "docs/language.md", "docs/clipping-study.md", "docs/controllers.md"
ENDS = "docs/where-it-ends.md"

GAMED_BETA = 0.05
"""Where to begin if the reward can be gamed, in a reward of 0 to 1 per nat of a completion."""
TARGET = 0.05
"""The KL to hold where the model must not forget, in nats per token."""
LOG_RATIO = 10.0
"""The bound of the log-ratio in nats where numbers are coarse."""
LONGEST = 24
"""Tokens of the longest completions in any study that the reasons rest on."""
_KL_FIELDS = frozenset(KLConfig.__dataclass_fields__)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The value of one field, why, and what that rests on."""

    value: Any
    """The value, as `klamp train` takes it."""
    reason: str
    """The reason; its numbers stand on the pages that are named."""
    rests_on: tuple[str, ...]
    """Pages of the documentation, with the record that the reason comes from."""
    computed: str = ""
    """What was computed for the situation; empty: nothing."""


Choices: TypeAlias = Mapping[str, Choice]
"""Field -> choice."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A row of the table in docs/which-kl.md."""

    situation: str
    """The situation in the words of that table."""
    applies: Callable[[Situation], bool]
    """Whether it is this situation."""
    settle: Callable[[Situation], Choices]
    """The fields that it sets; a later rule takes their place."""


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """A configuration with its reasons and its price."""

    choices: Choices
    """Field -> its value and why, in the order of a configuration."""
    price: str
    """What beta costs, in both units; empty without a KL."""
    cautions: tuple[str, ...]
    """What the configuration may not do, and what no record says."""

    @property
    def values(self) -> dict[str, Any]:
        """Field -> value, as `klamp train --config` takes them."""
        return {name: choice.value for name, choice in self.choices.items()}


def recommend(situation: Situation) -> Recommendation:
    """The configuration to begin with in a situation, by the rules of docs/which-kl.md.

    Args:
        situation: what is to be trained.
    """
    found: dict[str, Choice] = {}
    for rule in RULES:
        if rule.applies(situation):
            found |= rule.settle(situation)
    shown = {name: found[name] for name in ORDER if name in found and _counts(name, situation)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KLWarning)  # the cautions are part of the answer
        kl = KLConfig(**{name: choice.value for name, choice in shown.items() if name in _KL_FIELDS})
    loss = LossConfig(loss_type=shown["loss_type"].value, advantage_baseline=shown["advantage_baseline"].value)
    price = ""
    if situation.needs_kl:
        longest = shown["max_completion_length"].value
        cost = configured_price(
            kl, loss, group_size=situation.group_size, mean_length=situation.length, max_length=longest
        )
        price = describe_both_prices(cost, group_size=situation.group_size, length=situation.length)
    return Recommendation(choices=shown, price=price, cautions=(*kl.cautions(), *_unknown(situation)))


def _counts(name: str, s: Situation) -> bool:
    """Whether a field says anything: without a KL only beta does of the KL's."""
    return s.needs_kl or name == "beta" or name not in _KL_FIELDS


def _unknown(s: Situation) -> tuple[str, ...]:
    """What no record says."""
    if not s.needs_kl or s.length <= LONGEST:
        return ()
    return (
        f"The longest completions in the records behind these reasons have {LONGEST} tokens ({LANGUAGE}, {CLIPPING}); "
        f"at {s.length:,} the units are computed and the choices not measured. Watch kl/k3 and kl/k3_sequence.",
    )


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


def _scaled(base: float, s: Situation, *, reason: str, rests_on: str, name: str = "{:g}") -> Choice:
    """A coefficient for rewards of 0 to 1, in the unit of these rewards."""
    computed = "" if s.reward_range == 1 else f"{name.format(base)} x the reward's range of {s.reward_range:g}"
    return Choice(value=_rounded(base * s.reward_range), reason=reason, rests_on=(rests_on,), computed=computed)


def _first_beta(s: Situation) -> Choice:
    reason = (
        "where to begin: with a reward of 0 or 1 a beta of 0.01 gives up a hundredth of a right answer for a nat; then "
        "by what kl/k3 shows"
    )
    return _scaled(KLChoices.beta, s, reason=reason, rests_on=f"{WHICH}#5-how-much")


def _first_time(s: Situation) -> Choices:
    others = spreads_of_right_or_wrong(s.group_size)
    centred = s.group_size / (s.group_size - 1)
    return {
        "beta": _first_beta(s),
        "kl_estimator": Choice(
            value=KLChoices.kl_estimator,
            reason="unbiased, never negative, low noise near the reference; nothing but log-probabilities is needed",
            rests_on=(f"{ESTIMATORS}#what-each-one-is",),
        ),
        "kl_gradient": Choice(
            value=KLChoices.kl_gradient,
            reason="the gradient of what is logged; differentiating k3 itself follows KL(ref‖policy)",
            rests_on=(f"{WHICH}#2-which-gradient", f"{ESTIMATORS}#what-is-measured-of-each-one"),
        ),
        "kl_horizon": Choice(
            value=KLChoices.kl_horizon,
            reason="each token answers for its own position: quiet, and it leaves out what a token does to the KL of "
            "the tokens after it. On completions of up to 6 tokens it ends at about twice the KL that the price is "
            "worth",
            rests_on=(f"{WHICH}#3-one-token-at-a-time-or-the-whole-completion", f"{ENDS}#the-answer"),
        ),
        "kl_placement": Choice(
            value=KLChoices.kl_placement,
            reason="works with every estimator and every way to scale advantages",
            rests_on=(f"{WHICH}#4-in-the-loss-the-reward-or-the-advantage",),
        ),
        "loss_type": Choice(
            value=LossConfig.loss_type,
            reason="a fixed length divides every completion alike, and advantages are divided by nothing, so that beta "
            "is the price of a nat",
            rests_on=(f"{CONCEPTS}#5-the-price-what-a-beta-costs", f"{ENDS}#the-answer"),
            computed=f"divided by the group's standard deviation, rewards of 0 and 1 in groups of {s.group_size} would "
            f"make it {others[0]:.2f} to {others[1]:.2f} of that",
        ),
        "advantage_baseline": Choice(
            value=LossConfig.advantage_baseline,
            reason="the mean of the others shrinks nothing",
            rests_on=(f"{CONCEPTS}#5-the-price-what-a-beta-costs",),
            computed=f"with the mean of all {s.group_size} a nat would cost {centred:.3g} x beta",
        ),
        "num_generations": Choice(value=s.group_size, reason="as asked", rests_on=()),
        "num_iterations": Choice(value=s.updates, reason="as asked", rests_on=()),
        "max_completion_length": Choice(
            value=s.max_length or s.length,
            reason="as asked" if s.max_length else "the mean, since no longest length was named",
            rests_on=(),
        ),
    }


def _no_kl(s: Situation) -> Choices:
    why = (
        "the reward cannot be fooled and nothing else must be kept: no reference is loaded, nothing is computed. "
        "kl_monitor: true still shows the distance"
    )
    return {"beta": Choice(value=0.0, reason=why, rests_on=(f"{WHICH}#1-do-i-need-one-at-all",))}


def _gamed(s: Situation) -> Choices:
    reason = (
        "a reward that is made to be exploited: at 0.05 nothing was lost and no alarm rose; at 0.015 nearly the whole "
        "reward came and descriptions became lists of happy words; without a KL capitals fell from 43.8 to 0.0. If "
        "nothing is learned, lower it"
    )
    return {"beta": _scaled(GAMED_BETA, s, reason=reason, rests_on=f"{LANGUAGE}#what-a-kl-keeps-the-study")}


def _must_not_forget(s: Situation) -> Choices:
    bound = _scaled(
        KLConfig(target_kl=TARGET).beta_bounds[1] or 0.0,
        s,
        reason="the default bound is for rewards of about the size 1",
        rests_on=f"{CONTROLLERS}#what-it-cannot-do",
        name="the default, {:.3g},",
    )
    return {
        **({} if s.reward_range == 1 else {"beta_max": bound}),
        "beta": _first_beta(s),
        "target_kl": Choice(
            value=TARGET,
            reason="beta follows the KL: over ten seeds of the built-in task, from a beta of 0.01, it stayed in the "
            "band for 100 % of the steps, and addition ended at 98.0 to 98.8 rather than above 99",
            rests_on=(f"{CONTROLLERS}#what-it-did", f"{CONTROLLERS}#what-it-cannot-do"),
            computed=f"at {s.length:,} tokens {TARGET:g} per token is {TARGET * s.length:.3g} nats per completion",
        ),
    }


def _off_policy(s: Situation) -> Choices:
    return {
        "kl_off_policy": Choice(
            value="token",
            reason="weighs the KL of a token by policy/sampler: at each position the gradient stays that of "
            "KL(policy‖ref) although others wrote the tokens; without it, it is neither KL's",
            rests_on=(WHICH, f"{CONCEPTS}#2-the-gradient-what-it-does"),
        )
    }


def _in_reward(reason: str, page: str) -> Choices:
    where = (page,)
    return {
        "kl_estimator": Choice(
            value="k1",
            reason="in the reward only k1 has the gradient of KL(policy‖ref)",
            rests_on=(f"{ESTIMATORS}#what-is-measured-of-each-one",),
        ),
        "kl_placement": Choice(value="reward", reason=reason, rests_on=where),
        "kl_horizon": Choice(
            value="sequence",
            reason="a reward belongs to the whole completion, and so does its KL",
            rests_on=(f"{WHICH}#4-in-the-loss-the-reward-or-the-advantage",),
        ),
    }


def _ends_where_beta_says(s: Situation) -> Choices:
    reason = (
        "ends at the optimum of E[reward] - beta KL(policy‖ref) under every reduction and baseline, as long as "
        "advantages are not divided by the group's standard deviation"
    )
    return _in_reward(reason, f"{ENDS}#the-answer")


def _steady_length(s: Situation) -> Choices:
    reason = (
        "where padding is free, completions ended at 7.38 tokens with the KL in the reward and at 8.18 with it in the "
        "loss; a right answer with the usual padding has 7.5. No clip changed that"
    )
    return _in_reward(reason, f"{CLIPPING}#what-came")


def _exact(s: Situation) -> Choices:
    return {
        "kl_estimator": Choice(
            value="exact",
            reason="summed over the vocabulary: the same gradient as k3's, and one completion's scatters by 0.9 times "
            "its mean instead of 2.3",
            rests_on=(f"{ESTIMATORS}#over-whole-completions",),
        )
    }


def _free(s: Situation) -> Choices:
    free = 0.0 if s.free_kl is None else s.free_kl
    return {
        "kl_clip_method": Choice(
            value="hard",
            reason="charges nothing below the budget. It says how much KL is free; it is no remedy against length",
            rests_on=(f"{WHICH}#5-how-much", f"{CLIPPING}#what-to-do"),
        ),
        "kl_clip_threshold": Choice(
            value=free,
            reason="as asked, per token of the reference's mean length, which is measured at the start",
            rests_on=(f"{CONCEPTS}#6-clipping-and-budgets",),
            computed=f"at {s.length:,} tokens {free * s.length:.3g} nats per completion",
        ),
    }


def _bounded(s: Situation) -> Choices:
    return {
        "kl_max_log_ratio": Choice(
            value=LOG_RATIO,
            reason="one token that is 11.5 nats off has a k3 of 98,700; the bound keeps such a token's gradient at "
            "that size, and kl/log_ratio_clamped counts how often",
            rests_on=(WHICH, "docs/case-004.md#where-100000-comes-from"),
        )
    }


RULES: tuple[Rule, ...] = (
    Rule(situation="anything, for the first time", applies=lambda s: True, settle=_first_time),
    Rule(situation="rule-based reward, only this task matters", applies=lambda s: not s.needs_kl, settle=_no_kl),
    Rule(situation="the reward is a model, or can be gamed", applies=lambda s: s.gamed, settle=_gamed),
    Rule(situation="the model must not forget", applies=lambda s: s.holds_target, settle=_must_not_forget),
    Rule(
        situation="several updates per rollout, or an inference engine that lags",
        applies=lambda s: (s.updates > 1 or s.lags) and not s.in_reward and not s.small_vocabulary,
        settle=_off_policy,
    ),
    Rule(
        situation="a small vocabulary, or memory to spare",
        applies=lambda s: s.small_vocabulary and not s.in_reward,
        settle=_exact,
    ),
    Rule(situation="completions must not grow under the KL", applies=lambda s: s.steady_length, settle=_steady_length),
    Rule(
        situation="the exact gradient over completions, and a run that ends where beta says",
        applies=lambda s: s.ends_where_beta_says,
        settle=_ends_where_beta_says,
    ),
    Rule(situation="a KL that is free up to a distance", applies=lambda s: s.free_kl is not None, settle=_free),
    Rule(
        situation="log-ratios of many nats in half precision",
        applies=lambda s: s.low_precision and (s.in_reward or not s.small_vocabulary),
        settle=_bounded,
    ),
)
"""The rules in the order in which they are applied: the rows of the table in docs/which-kl.md, its papers apart."""

ORDER = (
    *("beta", "target_kl", "beta_max", "kl_estimator", "kl_gradient", "kl_horizon", "kl_placement", "kl_off_policy"),
    *("kl_clip_method", "kl_clip_threshold", "kl_max_log_ratio", "loss_type", "advantage_baseline"),
    *("num_generations", "num_iterations", "max_completion_length"),
)
"""The fields in the order of a configuration."""
