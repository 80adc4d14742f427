"""klamp: the KL layer for GRPO-style training of language models.

`import klamp` loads nothing heavy: a name brings its module, and with it torch, when it is first used (PEP 562).
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

from klamp._version import __version__

if TYPE_CHECKING:  # what type checkers, editors and the documentation see; _HOMES says the same to Python
    from klamp import config as config
    from klamp import core as core
    from klamp import errors as errors
    from klamp.audit.micro_batch import check, tap, watch
    from klamp.audit.pair import check_pair
    from klamp.audit.verdict import Verdict
    from klamp.config import KLConfig, LossConfig, TeacherConfig, build_objective, preset
    from klamp.core.advantages import group_advantages
    from klamp.core.clipping import clip_kl, kl_budget
    from klamp.core.controllers import (
        FixedController,
        HoldController,
        ProportionalController,
        StepController,
        adaptive_kl_coefficient,
    )
    from klamp.core.estimators import exact_kl, kl_estimate
    from klamp.core.gradients import kl_penalty
    from klamp.core.heads.kl import linear_head_kl, linear_kl
    from klamp.core.heads.logprobs import TopTokens, linear_logprobs, linear_topk
    from klamp.core.masking import Totals
    from klamp.core.objective import Objective, grpo_loss
    from klamp.core.term import KLTerm, Weighted
    from klamp.core.topk import topk_kl
    from klamp.core.types import Batch, LossOutput, Scored
    from klamp.errors import KLWarning
    from klamp.hosts.common.sampler_weights import check_sync

__all__ = [
    "Batch",
    "FixedController",
    "HoldController",
    "KLConfig",
    "KLTerm",
    "KLWarning",
    "LossConfig",
    "LossOutput",
    "Objective",
    "ProportionalController",
    "Scored",
    "StepController",
    "TeacherConfig",
    "TopTokens",
    "Totals",
    "Verdict",
    "Weighted",
    "__version__",
    "adaptive_kl_coefficient",
    "build_objective",
    "check",
    "check_pair",
    "check_sync",
    "clip_kl",
    "exact_kl",
    "group_advantages",
    "grpo_loss",
    "kl_budget",
    "kl_estimate",
    "kl_penalty",
    "linear_head_kl",
    "linear_kl",
    "linear_logprobs",
    "linear_topk",
    "preset",
    "tap",
    "topk_kl",
    "watch",
]

_NAMES = {
    "audit.micro_batch": ("check", "tap", "watch"),
    "audit.verdict": ("Verdict",),
    "audit.pair": ("check_pair",),
    "config": ("KLConfig", "LossConfig", "TeacherConfig", "build_objective", "preset"),
    "core.advantages": ("group_advantages",),
    "core.clipping": ("clip_kl", "kl_budget"),
    "core.controllers": (*(name for name in __all__ if name.endswith("Controller")), "adaptive_kl_coefficient"),
    "core.estimators": ("exact_kl", "kl_estimate"),
    "core.gradients": ("kl_penalty",),
    "core.heads.kl": ("linear_head_kl", "linear_kl"),
    "core.heads.logprobs": ("TopTokens", "linear_logprobs", "linear_topk"),
    "core.masking": ("Totals",),
    "core.objective": ("Objective", "grpo_loss"),
    "core.term": ("KLTerm", "Weighted"),
    "core.topk": ("topk_kl",),
    "core.types": ("Batch", "LossOutput", "Scored"),
    "errors": ("KLWarning",),
    "hosts.common.sampler_weights": ("check_sync",),
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names}
"""Exported name -> the module that it comes from."""

_ROOMS = ("config", "core", "errors", "tinker", "trl", "unsloth", "verl")
"""Modules that are there as `klamp.errors` after `import klamp` alone; a trainer is imported with its door."""


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"klamp.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'klamp' has no attribute {name!r}", name=name, obj=sys.modules[__name__])
    value = getattr(importlib.import_module(f"klamp.{_HOMES[name]}"), name)
    globals()[name] = value  # the next time it is there like any other
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_ROOMS})
