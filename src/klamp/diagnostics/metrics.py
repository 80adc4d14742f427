"""The table of all metrics: name, unit, direction, how it is averaged, what it says. Others' names: `recorded`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from klamp.errors import ConfigError

Better: TypeAlias = Literal["higher", "lower", "neither"]
Counted: TypeAlias = Literal["completions", "tokens", "KL tokens", "parts"]


@dataclass(frozen=True)
class MetricRow:
    """One metric."""

    name: str
    """The name as it is logged; the part before the slash is its family."""
    unit: str
    """The unit of the value."""
    better: Better
    """Whether higher values are better, lower ones, or neither."""
    reduction: str
    """How it is reduced, always over the whole global batch of a step: a mean over completions, over the trained tokens
    or over those that carry the KL (KL tokens); `sum over parts`: each part is divided by the step's totals already."""
    text: str
    """What the metric says, in a sentence."""


_row = MetricRow
_Kind: TypeAlias = tuple[str, Better, str]
_KL: _Kind = "nats/token", "neither", "mean over KL tokens"
_TAUGHT: _Kind = "nats/token", "lower", "mean over tokens"
_MASS: _Kind = "share", "higher", "mean over tokens"
_ENDS: _Kind = "probability", "higher", "mean over completions"
_OF_COMPLETION: _Kind = "nats/sequence", "neither", "mean over completions"
_LARGEST: _Kind = "nats", "lower", "maximum over tokens"
_COMPLETIONS: _Kind = "share", "lower", "mean over completions"
_KL_TOKENS: _Kind = "share", "lower", "mean over KL tokens"
_TOKENS: _Kind = "share", "lower", "mean over tokens"
_NUMBER: _Kind = "1", "neither", "value"
_SAMPLER: _Kind = "nats/token", "lower", "mean over tokens"
_PART: _Kind = "loss", "neither", "sum over parts"
_POLICY: _Kind = "nats/token", "neither", "mean over tokens"
_BETA: _Kind = "reward/nat", "neither", "value"

METRICS: dict[str, MetricRow] = {
    row.name: row
    for row in (
        _row(
            "reward", "reward", "higher", "mean over completions", "Reward of the task, before any KL is taken from it."
        ),
        _row("reward_std", "reward", "neither", "mean over groups", "Standard deviation of the reward within a group."),
        _row(
            "groups/saturated", "share", "lower", "mean over groups", "Groups whose rewards are all equal: no signal."
        ),
        _row("kl/k1", *_KL, "Mean log-ratio; unbiased, may be negative by noise."),
        _row("kl/k3", *_KL, "k3 estimate of KL(policy||ref); never negative."),
        _row("kl/exact", *_KL, "Exact KL over the vocabulary, where measured."),
        _row("kl/exact_forward", *_KL, "Exact KL(ref||policy), where measured."),
        _row("kl/k1_original", *_KL, "k1 to where a moving reference started."),
        _row("kl/k3_original", *_KL, "k3 to where a moving reference started."),
        _row("kl/k1_sequence", *_OF_COMPLETION, "k1 summed over a completion."),
        _row("kl/k3_sequence", *_OF_COMPLETION, "k3 summed over a completion."),
        _row("kl/exact_sequence", *_OF_COMPLETION, "Exact KL summed over a completion."),
        _row("kl/k3_max", "nats/token", "lower", "maximum over tokens", "Largest k3 of a token; logged in TRL."),
        _row("kl/k3_min", "nats/token", "neither", "minimum over tokens", "Smallest k3 of a token; logged in TRL."),
        _row("kl/log_ratio_max", *_LARGEST, "Largest |log policy - log ref| of a token."),
        _row("kl/log_ratio_p99", "nats", "lower", "99th percentile over tokens", "99th percentile of |log-ratio|."),
        _row("kl/over_budget", *_COMPLETIONS, "Completions whose KL exceeds the budget."),
        _row("kl/budget", *_OF_COMPLETION, "KL budget of a completion."),
        _row(
            "kl/reference_length", "tokens", "neither", "value", "Frozen length that turns a threshold into a budget."
        ),
        _row("kl/before_clip", *_OF_COMPLETION, "Gated KL before the clip."),
        _row("kl/after_clip", *_OF_COMPLETION, "What the clip leaves of it."),
        _row("kl/log_ratio_clamped", *_KL_TOKENS, "Tokens whose log-ratio hit kl_max_log_ratio."),
        _row(
            "kl/k3_saturated",
            *_KL_TOKENS,
            "Tokens whose k3 is past 3e30 (70 nats below the reference): the loss counts it as that, kl/k3 does not.",
        ),
        _row("kl/lr_factor", *_NUMBER, "What kl_lr_guard multiplied the learning rate of the step by."),
        _row("kl/weights_truncated", *_TOKENS, "Off-policy weights cut at kl_max_weight."),
        _row(
            "teacher/kl",
            *_TAUGHT,
            "KL to the teacher, by teacher_estimator and teacher_direction; k3 where that is k1. Of several each too: "
            "`teacher/kl.KEY`, and so the metrics of unscored tokens, end, head and correlation.",
        ),
        _row("teacher/k1", *_TAUGHT, "Mean log-ratio to the teacher; unbiased, may be negative by noise."),
        _row("teacher/log_ratio_clamped", *_TOKENS, "Tokens whose log-ratio to the teacher hit teacher_max_log_ratio."),
        _row("teacher/unscored", *_TOKENS, "Trained tokens that the teacher gave no number for."),
        _row("teacher/end", *_ENDS, "Probability that the teacher gives to the policy's own end of an answer."),
        _row("teacher/student_mass", *_MASS, "Mass of the head under the policy."),
        _row("teacher/teacher_mass", *_MASS, "Its mass under the teacher."),
        _row("teacher/overlap_ratio", *_MASS, "Policy's k likeliest tokens among the teacher's."),
        _row("teacher/cut_mass", *_TOKENS, "Teacher's mass on tokens that the policy has not; exact and topk."),
        _row(
            "teacher/reward_correlation",
            *("1", "higher", "over completions"),
            "Correlation of reward and log teacher - log policy per token, within groups.",
        ),
        _row("teacher/coef", *_BETA, "Coefficient of the KL to the teacher in force in this step."),
        _row("sampler/k1", *_SAMPLER, "log sampler - log policy: sampler against trainer."),
        _row("sampler/k3", *_SAMPLER, "k3 of the same; one bad token shows here first."),
        _row("sampler/abs", *_SAMPLER, "Mean |log-ratio| of the same, in logs of TRL."),
        _row("sampler/log_ratio_max", *_LARGEST, "Largest |log-ratio| of the same."),
        _row("sampler/tokens_cut", *_TOKENS, "Tokens whose ratio to the sampler was bounded, or which were dropped."),
        _row("sampler/sequences_cut", *_COMPLETIONS, "Completions that the trust region to the sampler dropped whole."),
        _row("sampler/advantage_cut", *_TOKENS, "The part of the advantages' size that was cut with them."),
        _row("beta", *_BETA, "Coefficient of the KL in force in this step."),
        _row(
            "beta/price",
            *_BETA,
            "Reward that it takes for one nat of a whole completion; where advantages are divided by the group's "
            "standard deviation, at the mean of the groups that are not saturated.",
        ),
        _row("train/loss", *_PART, "The loss of the step's first update: policy loss plus KL terms."),
        _row("train/policy_loss", *_PART, "The part of the policy surrogate."),
        _row("train/kl_penalty", *_PART, "The part of the KL: beta times its reduced penalty."),
        _row("train/teacher_penalty", *_PART, "The part of the KL to the teacher: teacher_coef times its penalty."),
        _row("train/denominator", *_NUMBER, "What klamp.tinker divided the policy loss by."),
        _row("train/kl_denominator", *_NUMBER, "What klamp.tinker divided the KL by."),
        _row("train/grad_norm", "norm", "neither", "mean over updates", "Norm of the gradient before clipping."),
        _row("train/learning_rate", *_NUMBER, "Learning rate in force."),
        _row("policy/entropy", *_POLICY, "Entropy of the policy at sampled prefixes."),
        _row("policy/ratio_clipped", *_TOKENS, "Tokens past a ratio bound, last update."),
        _row(
            "policy/skipped",
            "share",
            "neither",
            "mean over completions",
            "Completions without gradient (advantage 0, no KL that pulls), left out of the first backward pass.",
        ),
        _row("policy/updates", *_NUMBER, "Updates done on the rollout; fewer where kl_early_stop cut."),
        _row("policy/kl_old", *_POLICY, "k3 of KL(old||policy), last update."),
        _row("policy/logp_mean", *_POLICY, "Mean log-probability under the policy."),
        _row("ref/logp_mean", *_POLICY, "Mean log-probability under the reference."),
        _row("advantage/max", "reward", "neither", "maximum over tokens", "Largest advantage, in logs of verl."),
        _row("advantage/min", "reward", "neither", "minimum over tokens", "Smallest advantage, in logs of verl."),
        _row("length/mean", "tokens", "neither", "mean over completions", "Completion length, end token included."),
        _row("length/total", "tokens", "neither", "running total", "Tokens of prompts and completions; logged in TRL."),
        _row("length/truncated", *_COMPLETIONS, "Completions cut at the length limit."),
        _row(
            "length/repeated", *_TOKENS, "Tokens that stand in a pair of tokens which was in their completion before."
        ),
        _row(
            "length/reward_correlation",
            "1",
            "neither",
            "over completions",
            "Correlation of a completion's length and reward, within groups; absent where one has no spread.",
        ),
        _row("speed/tokens_per_second", "tokens/s", "higher", "value", "Sampled and trained tokens per second."),
        _row("speed/step_seconds", "s", "lower", "value", "Wall time of the step."),
    )
}
"""Name -> row. Evaluations are logged as `eval/SKILL`, the mean score of a skill on held-out prompts."""


_COUNTED: Mapping[str, Counted] = {
    "mean over completions": "completions",
    "mean over tokens": "tokens",
    "mean over KL tokens": "KL tokens",
    "sum over parts": "parts",
    "value": "completions",
}


def averaged_over(name: str) -> Counted | None:
    """What the parts of a step count by when their means are joined; None: a maximum or the like, which is not a mean.

    Args:
        name: a metric; a `value` is the same in every part, which counts by its completions.

    Raises:
        ConfigError: a name that is not in `METRICS`.
    """
    if name not in METRICS:
        raise ConfigError(
            "a metric has no row in METRICS",
            got=name,
            why="without its reduction the parts of a step would be averaged wrongly, and nobody would see it",
            fix="add a row with its unit and reduction to klamp.diagnostics.metrics.METRICS",
        )
    return _COUNTED.get(METRICS[name].reduction)
