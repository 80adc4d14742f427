"""One KL configuration for every trainer, and the presets that carry a recipe's name.

`KLConfig` holds the choices, refuses the ones that cannot work, warns of the ones that do not do what their name says,
and builds core callables from them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import InitVar, dataclass
from typing import TYPE_CHECKING, Any

from klamp.config.choices import ControllerName, KLChoices, check_choices
from klamp.config.rules import cautions, check_beta, refusals
from klamp.core import controllers
from klamp.core.controllers import Controller
from klamp.core.gradients import check_bound, check_gradient_choice
from klamp.core.schedules import kl_schedule_factor
from klamp.core.term import KLTerm
from klamp.errors import ConfigError, KLWarning, refuse, unknown_name

ALIASES: Mapping[str, str] = {"kl_coef": "beta", "kl_penalty": "beta", "kl_beta": "beta"}
"""Other names of a field, as other trainers and guides call it."""


def resolve_aliases(values: Mapping[str, Any], known: set[str]) -> dict[str, Any]:
    """Configuration values under their proper names.

    Raises:
        UnknownNameError: a key that is neither a field nor an alias; names the nearest.
        ConfigError: a field given twice, under different names, with different values.
    """
    resolved: dict[str, Any] = {}
    for key, value in values.items():
        name = ALIASES.get(key, key)
        if name not in known:
            raise unknown_name(
                "configuration key", key, known | ALIASES.keys(), why="it is no field of the configuration"
            )
        if name in resolved and resolved[name] != value:
            raise ConfigError(
                f"{name} is given twice, with different values",
                got=f"{resolved[name]!r} and {value!r}",
                why=f"{', '.join(a for a, n in ALIASES.items() if n == name)} are other names of {name}",
                fix="keep one",
            )
        resolved[name] = value
    return resolved


def _accepts_aliases(cls: type[KLConfig]) -> type[KLConfig]:
    """Let the constructor take the aliases, and nothing that is unknown."""
    init: Callable[..., None] = cls.__init__
    known = {field.name for field in dataclasses.fields(cls)}

    @functools.wraps(init)
    def __init__(self: KLConfig, **values: Any) -> None:
        init(self, **resolve_aliases(values, known))

    setattr(cls, "__init__", __init__)  # noqa: B010  (a frozen dataclass class attribute, not an instance's)
    return cls


if TYPE_CHECKING:

    @dataclass(frozen=True, kw_only=True)
    class _OtherNames:
        """`ALIASES`, for type checkers; at run time `_accepts_aliases` takes them, and no such field exists."""

        kl_coef: InitVar[float] = KLChoices.beta
        kl_penalty: InitVar[float] = KLChoices.beta
        kl_beta: InitVar[float] = KLChoices.beta
else:

    class _OtherNames:
        pass


@_accepts_aliases
@dataclass(frozen=True, kw_only=True)
class KLConfig(KLChoices, _OtherNames):
    """The KL term, in nats: what is measured, what its gradient does, where it enters, and how it is held.

    The same fields mean the same in every trainer. `beta` may be given as `kl_coef`, `kl_penalty` or `kl_beta`.
    Numbers are Python's int and float (a bool, a tensor or a text is refused), lists of choices are tuples.

    Raises:
        UnknownNameError: an unknown field or choice; names the nearest.
        ConfigError: a combination that cannot work or would not do what its name says.
    """

    def __post_init__(self, *_: object) -> None:
        self._check_numbers()
        check_gradient_choice(self.kl_estimator, self.kl_gradient, self.kl_horizon)
        check_choices(self)
        self._check_combinations()
        for text in self.cautions():
            warnings.warn(text, KLWarning, stacklevel=4)

    def _check_numbers(self) -> None:
        check_beta(self.beta)
        if not (math.isfinite(self.kl_clip_threshold) and self.kl_clip_threshold >= 0):
            raise ConfigError(
                "kl_clip_threshold must be a number >= 0",
                got=self.kl_clip_threshold,
                why="a KL is never negative",
                fix="0.5 nats per token is the default; 0 means no free budget",
            )
        if self.kl_reference_length is not None and self.kl_reference_length < 1:
            raise ConfigError(
                "kl_reference_length must be at least 1 token",
                got=self.kl_reference_length,
                why="the budget of a completion is threshold * reference length",
                fix="give the usual length of a completion of the reference, or None to have it measured",
            )
        for name in ("kl_max_log_ratio", "kl_max_weight", "target_kl", "kl_clip_temperature"):
            check_bound(name, getattr(self, name))
        for name in ("kl_early_stop", "kl_lr_guard", "reference_reset_steps"):
            check_bound(name, getattr(self, name))
        if not 0 < self.reference_decay < 1:
            raise ConfigError(
                "reference_decay must lie between 0 and 1",
                got=self.reference_decay,
                why="the reference keeps this share of itself at every step",
                fix="0.99 follows over about a hundred steps; reference='frozen' never moves",
            )
        if not 0 < self.reference_share <= 1:
            raise ConfigError(
                "reference_share must lie in (0, 1]",
                got=self.reference_share,
                why="it is the share of the sequences that the reference scores",
                fix="1.0 scores them all; beta=0 trains without a reference",
            )
        kl_schedule_factor(0, 1, warmup_steps=self.kl_warmup_steps, end=self.kl_schedule_end)

    def _check_combinations(self) -> None:
        refuse(refusals(self))
        self.build_controller()

    def cautions(self) -> list[str]:
        """What this configuration may not do although its name suggests it; each with the way out."""
        return cautions(self)

    def build_controller(self) -> Controller:
        """A fresh controller of beta.

        Raises:
            ConfigError: parameters that the controller refuses.
        """
        return CONTROLLERS[self.controller_name](self)

    def build_term(self) -> KLTerm:
        """The KL term for `grpo_loss`."""
        return KLTerm(
            value=self.kl_estimator,
            gradient=self.kl_gradient,
            horizon=self.kl_horizon,
            placement=self.kl_placement,
            off_policy=self.kl_off_policy,
            max_weight=self.kl_max_weight,
            max_log_ratio=self.kl_max_log_ratio,
            clip_method=self.kl_clip_method,
            clip_threshold=self.kl_clip_threshold,
            clip_temperature=self.kl_clip_temperature,
            clip_level=self.kl_clip_level,
            clip_per_token=self.use_per_token_kl_threshold,
            normalizer=self.kl_normalizer,
        )


def _target(c: KLConfig) -> float:
    return math.nan if c.target_kl is None else c.target_kl


CONTROLLERS: Mapping[ControllerName, Callable[[KLConfig], Controller]] = {
    "fixed": lambda c: controllers.FixedController(c.beta, min_value=c.beta_min, max_value=c.beta_max),
    "step": lambda c: controllers.StepController(c.beta, target=_target(c), min_value=c.beta_min, max_value=c.beta_max),
    "proportional": lambda c: controllers.ProportionalController(
        c.beta, target=_target(c), horizon=c.kl_controller_horizon, min_value=c.beta_min, max_value=c.beta_max
    ),
    "dual": lambda c: controllers.DualController(
        c.beta, target=_target(c), lr=c.kl_controller_lr, min_value=c.beta_min, max_value=c.beta_max
    ),
    "pid": lambda c: controllers.PIDController(
        c.beta,
        target=_target(c),
        kp=c.kl_controller_gains[0],
        ki=c.kl_controller_gains[1],
        kd=c.kl_controller_gains[2],
        min_value=c.beta_min,
        max_value=c.beta_max,
    ),
}
