"""klamp: the KL layer for GRPO-style training of language models."""

from klamp._version import __version__
from klamp.config import KLConfig, preset
from klamp.core.advantages import group_advantages
from klamp.core.clipping import clip_kl, kl_budget
from klamp.core.controllers import (
    DualController,
    FixedController,
    PIDController,
    ProportionalController,
    StepController,
)
from klamp.core.estimators import exact_kl, kl_estimate
from klamp.core.gradients import kl_penalty
from klamp.core.linear import linear_kl, linear_logprobs
from klamp.core.objective import grpo_loss

__all__ = [
    "DualController",
    "FixedController",
    "KLConfig",
    "PIDController",
    "ProportionalController",
    "StepController",
    "__version__",
    "clip_kl",
    "exact_kl",
    "group_advantages",
    "grpo_loss",
    "kl_budget",
    "kl_estimate",
    "kl_penalty",
    "linear_kl",
    "linear_logprobs",
    "preset",
]
