"""A KL in words, with units: the texts that every trainer, plan, summary and explanation shows."""

from __future__ import annotations

from collections.abc import Mapping

from klamp.config.kl import KLConfig
from klamp.config.loss import Price, spreads_of_right_or_wrong
from klamp.config.teacher import TeacherConfig
from klamp.core.term import Placement
from klamp.core.types import Direction, Gradient, Reduction

PLACEMENTS: Mapping[Placement, str] = {
    "loss": "in the loss",
    "reward": "taken from the reward",
    "advantage": "taken from the advantage",
}
DIVERGENCES: Mapping[Gradient, str] = {
    "reverse": "KL(policy||ref)",
    "forward": "KL(ref||policy)",
    "own": "the estimator's own",
    "none": "none: it is only logged",
}
"""Whose gradient a choice of `kl_gradient` is."""
TAUGHT: Mapping[Direction, str] = {
    "reverse": "KL(policy||teacher)",
    "forward": "KL(teacher||policy)",
    "js": "JS(policy, teacher)",
}
"""The divergence that a `teacher_direction` names."""


def describe_kl(kl: KLConfig) -> str:
    """A whole KL in one line: its value, its gradient, where it enters, how it is clipped."""
    if not kl.needs_reference:
        return "none: beta is 0"
    if kl.beta == 0:
        return "measured and logged only: beta is 0"
    parts = f"{describe_value(kl)}, gradient {describe_gradient(kl)}, {PLACEMENTS[kl.kl_placement]}"
    return parts if kl.kl_clip_method == "none" else f"{parts}; {describe_clip(kl)}"


def describe_anchors(kl: KLConfig, teacher: TeacherConfig | None) -> str:
    """The KL to the reference in one line, and that to a teacher where there is one."""
    if teacher is None or not teacher.there:
        return describe_kl(kl)
    return f"{describe_kl(kl)}; to the teacher {describe_teacher(teacher)}"


def describe_teacher(teacher: TeacherConfig) -> str:
    """A whole KL to a teacher in one line: who it is, what is measured, where it enters, its coefficient."""
    if not teacher.there:
        return "none"
    c, names = teacher, ", ".join(filter(None, (teacher.teacher_model, teacher.teacher_url, *teacher.teacher_models)))
    who = names or {"adapter_off": "the policy with its adapter off", "live": "the policy itself"}.get(c.kind, c.kind)
    prompt = f", at the prompt of column {c.teacher_prompt}" if c.teacher_prompt else ""
    value = f"{describe_teacher_value(c)}, {TAUGHT[c.teacher_direction]}"
    reach = "over the sequence" if c.teacher_horizon == "sequence" else "per token"
    return f"{who}{prompt}: {c.teacher_coef:g} x {value} {reach}, {PLACEMENTS[c.teacher_placement]}"


def describe_teacher_value(c: TeacherConfig) -> str:
    """What is summed or sampled of a KL to a teacher: the estimator, and its head and tail."""
    head = f" of the {c.teacher_head}'s {c.teacher_top_k} likeliest and a {c.teacher_tail} tail"
    return f"{c.teacher_estimator}{head if c.teacher_estimator == 'topk' else ''}"


def describe_value(kl: KLConfig) -> str:
    """The estimator of the KL's value, its bound of the log-ratio, and a KL to the sampler beside it, in words."""
    bound = "" if kl.kl_max_log_ratio is None else f", log-ratio bounded at {kl.kl_max_log_ratio:g}"
    beside = "".join(f", beside {coef:g} x KL(policy||sampler) in the loss" for coef, _ in kl.beside())
    return f"{kl.kl_estimator}{bound}{beside}"


def describe_gradient(kl: KLConfig) -> str:
    """The gradient of the KL, its horizon and its off-policy weights, in words."""
    weights = {"none": "", "token": ", off-policy weight per token", "sequence": ", off-policy weight of the prefix"}
    cut = "" if kl.kl_off_policy == "none" or kl.kl_max_weight is None else f" up to {kl.kl_max_weight:g}"
    reach = "over the sequence" if kl.kl_horizon == "sequence" else "per token"
    return f"{kl.kl_gradient} {reach}{weights[kl.kl_off_policy]}{cut}"


def describe_clip(kl: KLConfig, *, length: float | str | None = None) -> str:
    """The clip of the KL and its budget in nats; `length` in force, in tokens or words, else the configuration's."""
    if kl.kl_clip_method == "none":
        return "none"
    length = kl.kl_reference_length if length is None else length
    budget = "nats per completion"
    if kl.use_per_token_kl_threshold:
        tokens = length if length is None or isinstance(length, str) else f"{length:g}"
        budget = f"nats x {tokens} tokens" if tokens else "nats per token of the reference length"
    return f"{kl.kl_clip_method} clip at {kl.kl_clip_threshold:g} {budget}"


def describe_controller(kl: KLConfig) -> str:
    """The controller of beta and its target in nats per token, in words."""
    if kl.controller_name != "fixed":  # which takes no schedule
        return f"{kl.controller_name} controller from {kl.beta:g}, towards {kl.target_kl:g} nats per token"
    schedule = f"; schedule {kl.kl_schedule}, {kl.kl_warmup_steps} steps of warm-up"
    moves = kl.kl_schedule != "constant" or kl.kl_warmup_steps > 0
    return f"fixed at {kl.beta:g}{schedule if moves else ''}"


def describe_movement(kl: KLConfig) -> str:
    """How the reference moves during training, in words; empty where it does not move."""
    if kl.reference == "ema":
        return f"follows the policy, keeping {kl.reference_decay:g} of itself at every step"
    return f"becomes the policy every {kl.reference_reset_steps} steps" if kl.reference == "periodic" else ""


def describe_average(
    reduction: Reduction, *, over: str = "the optimizer step, all processes", length: str = "max_completion_length"
) -> str:
    """How a reduction makes tokens one number: `token_mean` over `over`, `fixed_length` divides by `length`."""
    words: Mapping[Reduction, str] = {
        "token_mean": f"mean over the tokens of {over}",
        "sequence_mean": "mean over completions of the mean over tokens",
        "sequence_sum": "mean over completions of the sum over tokens",
        "fixed_length": f"sum over tokens / (completions * {length})",
    }
    return words[reduction]


def describe_price(price: Price, *, group_size: int, of_batch: bool = False, name: str = "beta") -> str:
    """The reward per nat of a whole completion, and its factors; `of_batch`: scaled by the batch's deviation."""
    parts = [f"{name} {price.beta:g}"]
    if price.length_ratio != 1:
        compared = "more" if price.length_ratio > 1 else "fewer"
        parts.append(f"{price.length_ratio:.4g} (the policy loss is divided by {compared} tokens than the KL)")
    if price.baseline_ratio != 1:
        parts.append(f"{price.baseline_ratio:.3g} (the mean of {group_size} holds the own reward)")
    why = f" = {' x '.join(parts)}" if len(parts) > 1 else ""
    if not price.scaled:
        return f"{price.per_completion:.3g} reward per nat of a whole completion{why}"
    whose = "the batch" if of_batch else "a group"
    text = (
        f"{price.per_completion:.3g} x the standard deviation of {whose}'s rewards per nat of a whole completion{why}"
    )
    if of_batch:
        return text
    least, most = (price.at(std) for std in spreads_of_right_or_wrong(group_size))
    span = f"{least:.3g} to {most:.3g} for rewards of 0 and 1 in groups of {group_size}"
    return f"{text}; no single number is the price: {span}"
