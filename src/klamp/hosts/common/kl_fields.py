"""klamp's options as fields of a host's arguments, each None by default; see `klamp.trl.GRPOConfig`."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any, get_args, get_origin, get_type_hints

from klamp._field_texts import field_texts
from klamp.config import KLConfig
from klamp.config.beyond import BESIDE_A_TEACHER
from klamp.config.fields import host_refusals, resolve_aliases
from klamp.config.kl import ALIASES, check_beta
from klamp.config.loss import MASKS, LossConfig
from klamp.config.teacher import TeacherConfig
from klamp.core.surrogates import TrustRegion
from klamp.errors import KLWarning, Refusal, check_name


def _field(name: str, kind: Any, text: str) -> tuple[str, Any, Any]:
    """A field that is unset; JSON has no tuples, and so takes lists."""
    if get_origin(kind) is tuple:
        kind = list[float] if float in get_args(kind) else list[str]
    return name, kind | None, dataclasses.field(default=None, metadata={"help": text.replace("%", "%%")})


def _names(config: type) -> list[str]:
    """The fields of a configuration that a host's arguments have from klamp: all but beta."""
    names = MASKS if config is LossConfig else [field.name for field in dataclasses.fields(config)]
    return [name for name in names if name != "beta"]


def _fields(config: Any, unset: str) -> list[tuple[str, Any, Any]]:
    """These fields; the help is where a host looks for it."""
    kinds, texts, fields = get_type_hints(config), field_texts(config), config.__dataclass_fields__
    return [_field(x, kinds[x], f"{texts[x]} {unset.format(fields[x].default)}") for x in _names(config)]


_ALIASES = [_field(name, float, f"Another name of {of}.") for name, of in ALIASES.items()]
_OF_KL = _fields(KLConfig, "Unset: {!r}, or the host's own KL if no KL field is set.")
_OF_TEACHER = _fields(TeacherConfig, "Unset: {!r}.")
_OF_TRUST = _fields(LossConfig, "Unset: {!r}.")
_SWITCH = {"help": "Write some completions with their log-probabilities, which `klamp report OUTPUT_DIR` shows."}
_OF_BOTH = [*_OF_TEACHER, ("klamp_report", bool, dataclasses.field(default=True, metadata=_SWITCH))]


def _new(cls: Any, *_: Any, **options: Any) -> Any:
    """A field that does not exist is refused with the nearest name, as on the command line."""
    names = [field.name for field in dataclasses.fields(cls) if field.init]
    for name in options:
        check_name(f"field of {cls.__name__}", name, names)
    return object.__new__(cls)


_SPACE = {"__module__": __name__, "__new__": _new}
KLFields: Any = dataclasses.make_dataclass("KLFields", _ALIASES + _OF_KL + _OF_TRUST + _OF_BOTH, namespace=_SPACE)
"""`klamp.KLConfig`'s fields (without `beta`), `TeacherConfig`'s, `LossConfig`'s masks, the report's switch."""
TeacherFields: Any = dataclasses.make_dataclass("TeacherFields", _OF_BOTH, namespace=_SPACE)


def settle_fields(args: Any) -> None:
    """Bring a host's arguments into one form: aliases into `beta`, tuples into lists (which JSON can hold)."""
    values = {name: getattr(args, name) for name in ALIASES if getattr(args, name, None) is not None}
    if args.beta:
        values["beta"] = args.beta
    args.beta = resolve_aliases(values, {"beta"}, ALIASES).get("beta", args.beta)
    if isinstance(args.beta, (int, float)) and not touched(args, TeacherConfig):
        check_beta(args.beta, fix=BESIDE_A_TEACHER)
    for name in ALIASES:
        setattr(args, name, None)
    for name, value in (touched(args) | touched(args, TeacherConfig)).items():
        if isinstance(value, tuple):
            setattr(args, name, list(value))


def touched(args: Any, config: type = KLConfig) -> dict[str, Any]:
    """The fields of a configuration, `beta` aside, that a host's arguments set; lists as tuples."""
    values = {name: value for name in _names(config) if (value := getattr(args, name, None)) is not None}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def kl_config(args: Any) -> KLConfig | None:
    """The KL configuration that a host's arguments describe; None: they name no KL field, and no teacher."""
    values = touched(args)
    if not values and not touched(args, TeacherConfig):
        return None
    return KLConfig(**values, beta=float(args.beta) if isinstance(args.beta, float) else args.beta)


PASSED = "the model passed as teacher_model"
"""What a teacher is called that the arguments do not name."""


def teacher_config(args: Any) -> TeacherConfig | None:
    """The KL to a teacher in a host's arguments; None: no teacher field is set."""
    values = touched(args, TeacherConfig)
    if values and not {"teacher_model", "teacher_url", "teacher_models", "teacher_kind"} & {*values}:
        values["teacher_model"] = PASSED
    return TeacherConfig(**values) if values else None


def read_again(args: Any) -> tuple[KLConfig | None, TeacherConfig | None, TrustRegion]:
    """The configurations of a host's arguments, without the warnings that were given when these were made."""
    with warnings.catch_warnings(action="ignore", category=KLWarning):
        return kl_config(args), teacher_config(args), LossConfig(**touched(args, LossConfig)).trust


def one_teacher_refusals(teacher: TeacherConfig) -> list[Refusal]:
    """What TRL's trainer cannot do with a teacher."""
    return [
        *host_refusals(teacher, "TRL"),
        Refusal(
            teacher.kind == "live" and teacher.teacher_estimator in ("exact", "topk"),
            f"teacher_kind='live' cannot have teacher_estimator={teacher.teacher_estimator!r} in TRL",
            why="the policy's output head moves between the teacher's pass and the loss",
            fix="use teacher_estimator='k1' or 'k3'; klamp train has the others",
        ),
    ]


def warn_without_kl(kl: KLConfig) -> None:
    """Say so when KL fields are set and there is no KL term because beta is 0."""
    if not kl.needs_reference:
        warnings.warn(
            "KL fields are set and beta is 0 (the host's default): there is no KL term and no reference is loaded. "
            "Set beta (0.001 to 0.05 is usual), or kl_monitor=True to log the KL without a term.",
            KLWarning,
            stacklevel=4,
        )
