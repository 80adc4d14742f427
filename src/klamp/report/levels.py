"""The targets, budgets and guards of a configuration, as lines and bands in a chart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from klamp.core.beta_rules import StepRule
from klamp.diagnostics.causes import MISMATCH
from klamp.report.chart import Line
from klamp.report.numerals import short
from klamp.report.run import ReportRun


def levels_of(run: ReportRun, chart: str) -> list[Line]:
    """The lines and bands of a chart; without a known configuration only those of the alarms.

    Args:
        run: whose configuration counts.
        chart: name of the plan.
    """
    if chart == "kl":
        return _target(run.config) + _level(run.config, "kl_lr_guard", "learning-rate guard")
    if chart == "sampler":
        return [Line(label=f"alarm above {short(MISMATCH.value)}", low=MISMATCH.value)]
    if chart == "kl-completion" and not run.curve("kl/budget"):
        return _budget(run)
    return []


def _target(config: Mapping[str, Any]) -> list[Line]:
    target = _number(config.get("target_kl"))
    if target is None:
        return []
    lines = _level(config, "target_kl", "target")
    if config.get("kl_controller") == "step" and config.get("beta") != 0:
        rule = StepRule(target=target)
        _, _, above, below = config.get("kl_controller_factors") or (None, None, rule.high, rule.low)
        low, high = below * target, above * target
        lines.insert(0, Line(label=f"beta rests from {short(low)} to {short(high)}", low=low, high=high))
    return lines


def _level(config: Mapping[str, Any], name: str, label: str) -> list[Line]:
    value = _number(config.get(name))
    return [] if value is None else [Line(label=f"{label} {short(value)}", low=value)]


def _budget(run: ReportRun) -> list[Line]:
    config = run.config
    threshold = _number(config.get("kl_clip_threshold"))
    if config.get("kl_clip_method") not in ("hard", "soft") or threshold is None:
        return []
    if config.get("use_per_token_kl_threshold", True):
        logged = list(run.curve("kl/reference_length").values())
        length = logged[-1] if logged else _number(config.get("kl_reference_length"))
        if length is None:
            return []
        threshold *= length
    return [Line(label=f"budget {short(threshold)}", low=threshold)]


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
