"""klamp's options as fields of a host's arguments, each unset by default.

None means untouched. A host whose KL fields are all untouched keeps its own KL; one that is set, whichever it is,
replaces it by klamp's term, in which every other untouched field has klamp's default. `beta` is the host's own field
and says nothing about whose term it is; `kl_coef`, `kl_penalty` and `kl_beta` are other names of it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from klamp._field_texts import field_texts
from klamp.config.choices import ControllerName, DType, ReferenceName
from klamp.config.kl import ALIASES, KLConfig
from klamp.config.rules import check_beta
from klamp.core.clipping import ClipLevel
from klamp.core.schedules import Schedule
from klamp.core.term import OffPolicy, Placement
from klamp.core.types import ClipMethod, Gradient, Horizon, Reduction, Value
from klamp.errors import ConfigError


@dataclass
class KLFields:
    """The fields of `klamp.KLConfig` but `beta`, for a host's arguments; see there for what each does."""

    kl_coef: float | None = None
    kl_penalty: float | None = None
    kl_beta: float | None = None
    kl_estimator: Value | None = None
    kl_gradient: Gradient | None = None
    kl_horizon: Horizon | None = None
    kl_placement: Placement | None = None
    kl_clip_method: ClipMethod | None = None
    kl_clip_threshold: float | None = None
    use_per_token_kl_threshold: bool | None = None
    kl_clip_temperature: float | None = None
    kl_clip_level: ClipLevel | None = None
    kl_reference_length: int | None = None
    kl_controller: ControllerName | None = None
    target_kl: float | None = None
    kl_controller_gain: float | None = None
    kl_controller_lead: float | None = None
    kl_controller_factors: list[float] | None = None
    kl_controller_horizon: int | None = None
    kl_controller_clip: float | None = None
    kl_controller_lr: float | None = None
    kl_controller_gains: list[float] | None = None
    beta_min: float | None = None
    beta_max: float | None = None
    kl_max_log_ratio: float | None = None
    kl_off_policy: OffPolicy | None = None
    kl_max_weight: float | None = None
    kl_normalizer: Reduction | None = None
    kl_exclude_tokens: list[str] | None = None
    kl_exclude_prefix: int | None = None
    kl_exclude_between: list[str] | None = None
    kl_schedule: Schedule | None = None
    kl_warmup_steps: int | None = None
    kl_schedule_end: float | None = None
    kl_early_stop: float | None = None
    kl_lr_guard: float | None = None
    kl_monitor: bool | None = None
    reference: ReferenceName | None = None
    reference_decay: float | None = None
    reference_reset_steps: int | None = None
    reference_device: str | None = None
    reference_dtype: DType | None = None
    reference_url: str | None = None
    reference_name: str | None = None
    reference_share: float | None = None


def _describe(cls: type[KLFields]) -> None:
    """Give every field its help, which is where a host's command line looks for it."""
    defaults = {field.name: field.default for field in dataclasses.fields(KLConfig)}
    texts = field_texts(KLConfig)
    for field in dataclasses.fields(cls):
        name = field.name
        text = (
            f"Another name of {ALIASES[name]}."
            if name in ALIASES
            else f"{texts[name]} Unset: {defaults[name]!r}, or the host's own KL if no KL field is set."
        )
        field.metadata = MappingProxyType({"help": text.replace("%", "%%")})


_describe(KLFields)


def settle_fields(args: Any) -> None:
    """Bring a host's arguments into one form: aliases into `beta`, tuples into lists (which JSON can hold).

    Raises:
        ConfigError: `beta` given under two names with different values, or negative, or not finite.
    """
    given = {name: getattr(args, name) for name in ALIASES if getattr(args, name, None) is not None}
    if args.beta:
        given["beta"] = args.beta
    if len(set(given.values())) > 1:
        raise ConfigError(
            "beta is given twice, with different values",
            got=", ".join(f"{name}={value}" for name, value in given.items()),
            why=f"{', '.join(ALIASES)} are other names of beta",
            fix="keep one",
        )
    args.beta = next(iter(given.values()), args.beta)
    if isinstance(args.beta, (int, float)):
        check_beta(args.beta)
    for name in ALIASES:
        setattr(args, name, None)
    for name in ("kl_controller_gains", "kl_controller_factors", "kl_exclude_tokens", "kl_exclude_between"):
        value = getattr(args, name)
        setattr(args, name, value if value is None else list(value))


def touched(args: Any) -> dict[str, Any]:
    """The KL fields (`beta` is none of them) that a host's arguments set."""
    names = [field.name for field in dataclasses.fields(KLConfig) if field.name != "beta"]
    return {name: getattr(args, name) for name in names if getattr(args, name, None) is not None}


def kl_config(args: Any) -> KLConfig | None:
    """The KL configuration that a host's arguments describe; None where they leave the host's own KL alone.

    Raises:
        ConfigError: a combination that `KLConfig` refuses.
    """
    given = touched(args)
    if not given:
        return None
    for name in ("kl_controller_gains", "kl_controller_factors", "kl_exclude_tokens", "kl_exclude_between"):
        if name in given:
            given[name] = tuple(given[name])
    return KLConfig(beta=args.beta, **given)
