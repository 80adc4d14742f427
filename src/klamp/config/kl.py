"""`KLConfig`, the one KL configuration for every trainer; checks the choices and builds controller and term.

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
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, cast

from klamp.config.choices import NUMBERS, ControllerName, KLChoices
from klamp.config.rules import cautions, check_server, refusals
from klamp.core import controllers
from klamp.core.arguments import check_fields
from klamp.core.controllers import Controller
from klamp.core.gradients import check_gradient_choice
from klamp.core.term import KLTerm
from klamp.errors import ConfigError, KLWarning, refuse, unknown_name

ALIASES: Mapping[str, str] = {"kl_coef": "beta", "kl_penalty": "beta", "kl_beta": "beta"}
"""Other names of a field, as other trainers and guides call it."""


def resolve_aliases(values: Mapping[str, Any], known: set[str], aliases: Mapping[str, str] = ALIASES) -> dict[str, Any]:
    """Configuration values under their proper names.

    Raises:
        UnknownNameError: a key that is neither a field nor an alias; names the nearest.
        ConfigError: a field given twice, under different names, with different values.
    """
    resolved: dict[str, Any] = {}
    for key, value in values.items():
        name = aliases.get(key, key)
        if name not in known:
            raise unknown_name(
                "configuration key", key, known | aliases.keys(), why="it is no field of the configuration"
            )
        if name in resolved and resolved[name] != value:
            raise ConfigError(
                f"{name} is given twice, with different values",
                got=f"{resolved[name]!r} and {value!r}",
                why=f"{', '.join(a for a, n in aliases.items() if n == name)} are other names of {name}",
                fix="keep one",
            )
        resolved[name] = value
    return resolved


Config = TypeVar("Config")


def accepts_aliases(aliases: Mapping[str, str]) -> Callable[[type[Config]], type[Config]]:
    """Let the constructor of a configuration take other names of its fields, and nothing that is unknown."""

    def accepting(cls: type[Config]) -> type[Config]:
        init: Callable[..., None] = cls.__init__
        known = {field.name for field in dataclasses.fields(cast(Any, cls))}

        @functools.wraps(init)
        def __init__(self: Config, **values: Any) -> None:
            init(self, **resolve_aliases(values, known, aliases))

        setattr(cls, "__init__", __init__)  # noqa: B010  (a frozen dataclass class attribute, not an instance's)
        return cls

    return accepting


if TYPE_CHECKING:

    @dataclass(frozen=True, kw_only=True)
    class _OtherNames:
        """The names of `ALIASES` for type checkers; at run time `accepts_aliases` takes them instead."""

        kl_coef: InitVar[float] = KLChoices.beta
        kl_penalty: InitVar[float] = KLChoices.beta
        kl_beta: InitVar[float] = KLChoices.beta
else:

    class _OtherNames:
        pass


@accepts_aliases(ALIASES)
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
        check_fields(self, NUMBERS)
        check_server(self.reference_url, "reference_url", key="the environment variable KLAMP_REFERENCE_KEY")
        check_gradient_choice(self.kl_estimator, self.kl_gradient, self.kl_horizon)
        refuse(refusals(self))
        self.build_controller()
        for text in self.cautions():
            warnings.warn(text, KLWarning, stacklevel=4)

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
            anchor="sampler" if self.reference == "sampler" else "reference",
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
            clip_level=self.clip_level,
            clip_unit="token" if self.use_per_token_kl_threshold else "sequence",
            normalizer=self.kl_normalizer,
        )


class _Bounds(TypedDict):
    min_value: float
    max_value: float | None


class _Aim(_Bounds):
    target: float


def _bounds(c: KLConfig) -> _Bounds:
    low, high = c.beta_bounds
    return {"min_value": low, "max_value": high}


def _aim(c: KLConfig) -> _Aim:
    """What every controller with a target takes; no target is NaN, which each of them refuses."""
    return {"target": math.nan if c.target_kl is None else c.target_kl, **_bounds(c)}


def _step(c: KLConfig) -> Controller:
    up, down, high, low = c.kl_controller_factors
    return controllers.StepController(c.beta, up=up, down=down, high=high, low=low, **_aim(c))


CONTROLLERS: Mapping[ControllerName, Callable[[KLConfig], Controller]] = {
    "fixed": lambda c: controllers.FixedController(c.beta, **_bounds(c)),
    "hold": lambda c: controllers.HoldController(
        c.beta, gain=c.kl_controller_gain, lead=c.kl_controller_lead, **_aim(c)
    ),
    "step": _step,
    "proportional": lambda c: controllers.ProportionalController(
        c.beta, horizon=c.kl_controller_horizon, clip=c.kl_controller_clip, **_aim(c)
    ),
}
