"""Writes a KL as a name for verl's configuration, which has room for a text only: `klamp:kl_gradient=forward`."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable
from typing import Any

from klamp.config import KLConfig
from klamp.core.term import KLTerm
from klamp.errors import ConfigError, unknown_name

PREFIX = "klamp"
TERM_FIELDS = (
    "kl_estimator",
    "kl_gradient",
    "kl_horizon",
    "kl_off_policy",
    "kl_max_weight",
    "kl_max_log_ratio",
)
"""The fields that a name in the place of `kl_penalty` may set, and that verl's losses honour by themselves."""
CONTROLLER_FIELDS = (
    "kl_controller",
    "kl_controller_gain",
    "kl_controller_lead",
    "kl_controller_factors",
    "kl_controller_horizon",
    "kl_controller_clip",
    "kl_controller_lr",
    "kl_controller_gains",
    "beta_min",
    "beta_max",
)
"""What a name in the place of `kl_ctrl.type` may say; beta and the target are verl's `kl_coef` and `target_kl`."""
LOSS_FIELDS = (
    *TERM_FIELDS,
    "kl_placement",
    "kl_clip_method",
    "kl_clip_threshold",
    "use_per_token_kl_threshold",
    "kl_clip_temperature",
    "kl_clip_level",
    "kl_reference_length",
    "kl_exclude_tokens",
    "kl_exclude_prefix",
    "kl_exclude_between",
    "kl_schedule",
    "kl_warmup_steps",
    "kl_schedule_end",
    "kl_lr_guard",
    "target_kl",
    *CONTROLLER_FIELDS,
)
"""What a name in the place of `kl_loss_type` may say; beta is verl's `kl_loss_coef`."""
IN_REWARD = {"kl_placement": "reward", "kl_estimator": "k1", "kl_horizon": "sequence"}
"""What a KL in the reward is, as in klamp everywhere."""

_DEFAULTS = KLConfig()


def is_ours(name: object) -> bool:
    """Whether a name in verl's configuration is klamp's."""
    return isinstance(name, str) and (name == PREFIX or name.startswith(f"{PREFIX}:"))


def name_of(kl: KLConfig, fields: Iterable[str]) -> str:
    """The name for some fields of a KL; fields with their default are left out.

    Args:
        kl: the KL.
        fields: the fields that the place can hold.
    """
    values = {field: getattr(kl, field) for field in fields}
    changed = [f"{field}={value}" for field, value in values.items() if value != getattr(_DEFAULTS, field)]
    return f"{PREFIX}:{','.join(changed)}" if changed else PREFIX


@functools.cache
def loss_kl(name: str, beta: float = _DEFAULTS.beta) -> KLConfig:
    """The KL that a name in the place of `kl_loss_type` stands for.

    Args:
        name: of the KL.
        beta: verl's `kl_loss_coef`.

    Raises:
        ConfigError: the name cannot be read, or what it asks for is refused.
    """
    return KLConfig(**_read(name, LOSS_FIELDS), beta=beta)


@functools.cache
def reward_kl(name: str) -> KLConfig:
    """The KL in the reward that a name stands for: k1, summed over the completion.

    Raises:
        ConfigError: the name cannot be read, or what it asks for is refused.
    """
    return KLConfig(**{**IN_REWARD, **_read(name, TERM_FIELDS)})


def needs_policy_loss(term: KLTerm) -> bool:
    """Whether a KL in the loss needs what verl tells the policy loss only: the mask, the old log-probabilities."""
    return term.horizon == "sequence" or term.off_policy != "none" or term.clip_method != "none"


def needs_driver(kl: KLConfig) -> bool:
    """Whether a KL needs what only verl's trainer has, where the whole batch is: groups, tokens, the step.

    A plain KL in the reward has a hook of its own there.
    """
    moves = kl.kl_schedule != "constant" or kl.kl_warmup_steps > 0 or kl.kl_lr_guard is not None
    of_batch = kl.kl_clip_method != "none" or kl.excludes or kl.kl_placement == "advantage"
    return moves or of_batch or kl.controller_name != "fixed"


def controlled(name: str, *, beta: float, target_kl: float) -> KLConfig:
    """A KL with the controller that a name stands for.

    Args:
        name: of the controller.
        beta: verl's `kl_coef`, where it starts.
        target_kl: verl's `target_kl`, in nats per token.

    Raises:
        ConfigError: the name cannot be read, or what it asks for is refused.
    """
    return KLConfig(**IN_REWARD, **_read(name, CONTROLLER_FIELDS), beta=beta, target_kl=target_kl)


def _read(name: str, fields: tuple[str, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    text = name.partition(":")[2]
    for part in _parts(text):
        field, equals, value = (each.strip() for each in part.partition("="))
        if not equals or field in found:
            raise ConfigError(
                f"{name!r} cannot be read as a KL of klamp",
                got=part,
                why="behind the colon it takes FIELD=VALUE, each field once, with commas between them",
                fix=f"{PREFIX}:{fields[1]}=..., or {PREFIX} alone for the defaults",
            )
        if field not in fields:
            why = "a name can hold what this place of verl's configuration has no field for"
            raise unknown_name(f"field in {name!r}", field, fields, why=why)
        found[field] = _value(value)
    return found


def _parts(text: str) -> list[str]:
    """The text between commas; a comma in brackets, and one between quotes, belongs to its value."""
    parts, depth, quote = [""], 0, ""
    escaped = False
    for each in text:
        if quote:
            quote = "" if each == quote and not escaped else quote
        elif each in "'\"":
            quote = each
        else:
            depth += (each == "(") - (each == ")")
        escaped = each == "\\" and not escaped
        if each == "," and not quote and depth == 0:
            parts.append("")
        else:
            parts[-1] += each
    return parts if text else []


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text  # a word
