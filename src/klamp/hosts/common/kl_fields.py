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
from klamp.config.teacher import TeacherConfig
from klamp.errors import KLWarning, Refusal, check_name


def _field(name: str, kind: Any, text: str) -> tuple[str, Any, Any]:
    """A field that is unset; JSON has no tuples, and so takes lists."""
    if get_origin(kind) is tuple:
        kind = list[float] if float in get_args(kind) else list[str]
    return name, kind | None, dataclasses.field(default=None, metadata={"help": text.replace("%", "%%")})


def _fields(config: type, unset: str) -> list[tuple[str, Any, Any]]:
    """The fields of an anchor but beta; the help is where a host looks for it."""
    kinds, texts = get_type_hints(config), field_texts(config)
    return [
        _field(field.name, kinds[field.name], f"{texts[field.name]} {unset.format(field.default)}")
        for field in dataclasses.fields(config)
        if field.name != "beta"
    ]


_OTHER_NAMES = [_field(name, float, f"Another name of {of}.") for name, of in ALIASES.items()]
_OF_KL = _fields(KLConfig, "Unset: {!r}, or the host's own KL if no KL field is set.")
_OF_TEACHER = _fields(TeacherConfig, "Unset: {!r}.")


def _new(cls: Any, *_: Any, **options: Any) -> Any:
    """A field that does not exist is refused with the nearest name, as on the command line."""
    names = [field.name for field in dataclasses.fields(cls) if field.init]
    for name in options:
        check_name(f"field of {cls.__name__}", name, names)
    return object.__new__(cls)


_SPACE = {"__module__": __name__, "__new__": _new}
KLFields: Any = dataclasses.make_dataclass("KLFields", [*_OTHER_NAMES, *_OF_KL, *_OF_TEACHER], namespace=_SPACE)
"""The fields of `klamp.KLConfig` but `beta`, and of `klamp.TeacherConfig`."""
TeacherFields: Any = dataclasses.make_dataclass("TeacherFields", _OF_TEACHER, namespace=_SPACE)


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
    names = [field.name for field in dataclasses.fields(config) if field.name != "beta"]
    values = {name: value for name in names if (value := getattr(args, name, None)) is not None}
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
    """The KL to a teacher that a host's arguments describe; None: no field of it is set."""
    values = touched(args, TeacherConfig)
    if values and not {"teacher_model", "teacher_url", "teacher_models", "teacher_kind"} & {*values}:
        values["teacher_model"] = PASSED
    return TeacherConfig(**values) if values else None


def read_again(args: Any) -> tuple[KLConfig | None, TeacherConfig | None]:
    """Both configurations of a host's arguments, without the warnings that were given when these were made."""
    with warnings.catch_warnings(action="ignore", category=KLWarning):
        return kl_config(args), teacher_config(args)


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
