"""klamp: the KL layer for GRPO-style training of language models.

`import klamp` loads nothing heavy: a name brings its module, and with it torch, when it is first used (PEP 562).
"""

import functools
import importlib
import sys
from typing import TYPE_CHECKING, Any

from klamp._version import __version__

if TYPE_CHECKING:  # what type checkers, editors and the documentation see; `_homes` reads it for Python
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
    from klamp.core.objective import Objective, Weighted, grpo_loss
    from klamp.core.term import KLTerm
    from klamp.core.topk import topk_kl
    from klamp.core.types import Batch, LossOutput
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

_ROOMS = ("config", "core", "errors", "tinker", "trl", "unsloth", "verl")
"""Modules that are there as `klamp.errors` after `import klamp` alone; a trainer is imported with its door."""


@functools.cache
def _homes() -> dict[str, str]:
    """Exported name -> the module that it comes from: the imports for type checkers above."""
    import ast
    from pathlib import Path

    nodes = ast.walk(ast.parse(Path(__file__).read_text(encoding="utf-8")))
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    return {alias.name: str(node.module) for node in imports for alias in node.names if alias.name in __all__}


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"klamp.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'klamp' has no attribute {name!r}", name=name, obj=sys.modules[__name__])
    value = getattr(importlib.import_module(_homes()[name]), name)
    globals()[name] = value  # the next time it is there like any other
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_ROOMS})
