"""`KLConfig`, the one KL configuration for every trainer; checks the choices and builds controller and term."""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import InitVar, dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

from klamp.config.rules import NUMBERS, KLChoices, cautions, check_server, refusals
from klamp.core.arguments import check_fields
from klamp.core.controllers import Controller, FixedController, HoldController, ProportionalController, StepController
from klamp.core.gradients import check_gradient_choice
from klamp.core.term import KLTerm
from klamp.errors import ConfigError, KLWarning, refuse, unknown_name
from klamp.names import ALIASES


def resolve_aliases(values: Mapping[str, Any], known: set[str], aliases: Mapping[str, str] = ALIASES) -> dict[str, Any]:
    """Configuration values under their proper names; refuses unknown ones, and two that differ."""
    resolved: dict[str, Any] = {}
    for key, value in values.items():
        name = aliases.get(key, key)
        if name not in known:
            why = "it is no field of the configuration"
            raise unknown_name("configuration key", key, known | aliases.keys(), why=why)
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
        """A fresh controller of beta."""
        low, high = self.beta_bounds
        target = math.nan if self.target_kl is None else self.target_kl  # which each of them refuses
        if self.controller_name == "hold":
            gain, lead = self.kl_controller_gain, self.kl_controller_lead
            return HoldController(self.beta, target=target, gain=gain, lead=lead, min_value=low, max_value=high)
        if self.controller_name == "step":
            up, down, above, below = self.kl_controller_factors
            return StepController(
                self.beta, target=target, up=up, down=down, high=above, low=below, min_value=low, max_value=high
            )
        if self.controller_name == "proportional":
            horizon, clip = self.kl_controller_horizon, self.kl_controller_clip
            return ProportionalController(
                self.beta, target=target, horizon=horizon, clip=clip, min_value=low, max_value=high
            )
        return FixedController(self.beta, min_value=low, max_value=high)

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
