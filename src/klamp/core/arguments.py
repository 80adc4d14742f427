"""Checks of what is handed to klamp's functions: numbers and tensors of the right kind, each error with the way out.

Of a tensor only its type, data type, device and shape are looked at, never a value: a check waits for no device. What a
field of a configuration takes is written once, beside its name, and checked here against its own type.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import reprlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, TypeGuard, Union, cast, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from klamp.errors import ConfigError, TensorError, check_name


@dataclass(frozen=True)
class Numbers:
    """Which numbers an argument takes."""

    text: str  # how an error says it, behind "a number"
    holds: Callable[[float], bool]  # whether a finite number is one of them
    why: str = ""  # why another one cannot work
    fix: str = ""  # what to use instead

    def but(self, why: str, fix: str) -> Numbers:
        """The same numbers, with the reason and the way out of one argument."""
        return replace(self, why=why, fix=fix)


ANY = Numbers("", lambda x: True)
AT_LEAST_0 = Numbers(" >= 0", lambda x: x >= 0)
AT_LEAST_1 = Numbers(" >= 1", lambda x: x >= 1)
POSITIVE = Numbers(" > 0", lambda x: x > 0)
INSIDE_0_1 = Numbers(" between 0 and 1", lambda x: 0 < x < 1)
FROM_0_TO_1 = Numbers(" in [0, 1]", lambda x: 0 <= x <= 1)
FROM_0_BELOW_1 = Numbers(" in [0, 1)", lambda x: 0 <= x < 1)
ABOVE_0_TO_1 = Numbers(" in (0, 1]", lambda x: 0 < x <= 1)
COEFFICIENT = AT_LEAST_0.but("a negative coefficient rewards leaving the reference", "use 0 for no KL")


def limited(default: Any, numbers: Numbers) -> Any:
    """A field of a dataclass that takes only these numbers; default MISSING: the field has no default."""
    return dataclasses.field(default=default, metadata={"numbers": numbers})


LARGEST = 2**63 - 1
"""The largest whole number that a tensor holds."""
LARGEST_FLOAT = torch.finfo(torch.float32).max
"""The largest other number."""


def describe(x: object) -> str:
    """What an argument is, in a few words: a value with its type, a tensor without its values."""
    dtype, shape = getattr(x, "dtype", None), getattr(x, "shape", None)
    if dtype is None or shape is None:
        return "None" if x is None else f"{reprlib.repr(x)} ({type(x).__name__})"
    place = f" on {x.device}" if isinstance(x, Tensor) else ""
    return f"a {type(x).__module__}.{type(x).__name__} of {dtype}, shape {tuple(shape)}{place}"


def _is_number(x: object, *, whole: bool) -> TypeGuard[float]:
    return isinstance(x, (int, float)) and not isinstance(x, bool) and not (whole and isinstance(x, float))


def is_finite_number(x: object) -> TypeGuard[float]:
    """Whether it is a finite int or float within float's range; False for a bool and NaN."""
    return _is_number(x, whole=False) and bool(abs(x) <= sys.float_info.max)


def check_number(
    name: str, x: object, numbers: Numbers = ANY, *, whole: bool = False, optional: bool = False, fix: str = ""
) -> None:
    """Refuse what is no finite number of the kind that an argument takes; `fix` where `numbers` has none."""
    number = _is_number(x, whole=whole)
    if isinstance(x, int | float) and (LARGEST if isinstance(x, int) else LARGEST_FLOAT) < abs(x) < math.inf:
        fix = fix or "pass a smaller number"
        raise ConfigError(f"{name} is too large", got=describe(x), why="no tensor holds it", fix=fix)
    if (x is None and optional) or (is_finite_number(x) and number and numbers.holds(x)):
        return
    kind = "a whole number" if whole else "a number"
    way_out = numbers.fix or fix
    raise ConfigError(
        f"{name} must be {kind}{numbers.text}{', or None' if optional else ''}",
        got=x if number and is_finite_number(x) else describe(x),
        why=_why_no_number(x, whole) or numbers.why or f"it is used as {kind}",
        fix=_as_number(name, x, whole) or way_out or f"pass {kind}{numbers.text}",
    )


def _why_no_number(x: object, whole: bool) -> str:
    if isinstance(x, bool):
        return f"{x} would count as {int(x)}"
    if isinstance(x, str):
        return "text is not read as a number"
    if isinstance(x, float) and not math.isfinite(x):
        return "nothing can be computed with it"
    return "it is not whole" if whole and isinstance(x, float) else ""


def _as_number(name: str, x: object, whole: bool) -> str:
    kind = int if whole else float
    if isinstance(x, str):
        try:
            kind(x)
        except ValueError:
            return ""
        return f"{name}={x.strip()}, without quotes"
    is_array = hasattr(x, "dtype") and not isinstance(x, float) and getattr(x, "shape", None) in ((), (1,))
    return f"pass {kind.__name__}({name})" if is_array else ""


def check_flag(name: str, x: object) -> None:
    """Refuse what is neither True nor False, also 0 and 1."""
    if not isinstance(x, bool):
        raise ConfigError(
            f"{name} must be True or False",
            got=describe(x),
            why="anything else would silently count as one of the two",
            fix=f"{name}={bool(x) if isinstance(x, int) else True}",
        )


@dataclass(frozen=True)
class Kind:
    """A kind of tensor."""

    text: str  # what it must hold
    holds: Callable[[torch.dtype], bool]  # whether a data type is of this kind
    why: str  # why another one cannot work
    cast: str  # the method that makes it one


def _whole(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


FLOATS = Kind(
    "floating-point numbers", lambda d: d.is_floating_point, "whole numbers here are usually token ids", "float()"
)
REALS = Kind(
    "real numbers", lambda d: d.is_floating_point or _whole(d), "it is added up and compared as a number", "float()"
)
IDS = Kind("whole numbers", _whole, "they are token ids", "long()")
MASKS = Kind(
    "booleans", lambda d: d == torch.bool, "True means: this token counts; a number could mean a weight", "bool()"
)


def check_tensors(kind: Kind, *, like: Tensor | None = None, **tensors: object) -> None:
    """Refuse anything but a tensor of a kind, on one device with the others (with `like`, checked before)."""
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise TensorError(
                f"{name} must be a torch.Tensor",
                got=describe(x),
                why="klamp computes with tensors: nothing else has a data type, a device and a gradient",
                fix=f"torch.as_tensor({name}).{kind.cast}" if x is not None else f"pass {name}",
            )
        if not kind.holds(x.dtype):
            raise TensorError(
                f"{name} must hold {kind.text}", got=str(x.dtype), why=kind.why, fix=f"pass {name}.{kind.cast}"
            )
        like = x if like is None else like
        if x.device != like.device:
            raise TensorError(
                f"{name} is on another device than the other tensors",
                got=f"{x.device}, the others on {like.device}",
                why="they are computed with together",
                fix=f"pass {name}.to({str(like.device)!r})",
            )


def check_data(**tensors: Tensor) -> None:
    """Refuse tensors that carry a gradient although they are data."""
    for name, x in tensors.items():
        if x.requires_grad:
            raise TensorError(
                f"{name} must not carry a gradient",
                got="requires_grad=True",
                why="it is data; its gradient would train the model that computed it (a value head, a reward model)",
                fix=f"pass {name}.detach()",
            )


def check_roles(policy_logprobs: Tensor, ref_logprobs: Tensor) -> None:
    """Refuse log-probabilities of which the reference's carry the gradient and the policy's none: they are swapped."""
    if torch.is_grad_enabled() and ref_logprobs.requires_grad and not policy_logprobs.requires_grad:
        raise ConfigError(
            "the reference has a gradient, and the policy has none",
            got="policy_logprobs.requires_grad=False, ref_logprobs.requires_grad=True",
            why="a penalty pulls on the policy's alone: none would flow, and every log-ratio has the wrong sign",
            fix="pass the policy first; where they stand right, pass ref_logprobs.detach()",
        )


def check_values_exist(name: str, x: Tensor) -> None:
    """Refuse a tensor on the meta device where values decide what is done."""
    if x.is_meta:
        raise TensorError(
            f"{name} is on the meta device",
            got=describe(x),
            why="a tensor there has a shape and no values, and values are checked here",
            fix="pass tensors on a real device",
        )


def check_instance(name: str, x: object, kind: type, *, fix: str = "") -> None:
    """Refuse an object of another class; for a dict the error says how to convert it."""
    if isinstance(x, kind):
        return
    raise ConfigError(
        f"{name} must be a {kind.__name__}",
        got=describe(x),
        why="its fields are read by name, and were checked when it was built",
        fix=fix or (f"{kind.__name__}(**{name})" if isinstance(x, dict) else f"pass a {kind.__name__}"),
    )


class _Field(NamedTuple):
    definition: dataclasses.Field[Any]
    kinds: tuple[Any, ...]  # the types that it may be of, None aside
    optional: bool  # whether it may be None

    @property
    def allowed(self) -> tuple[Any, ...]:
        """What may be chosen if the type is a Literal; otherwise empty."""
        named: list[Any] = [choice for kind in self.kinds if get_origin(kind) is Literal for choice in get_args(kind)]
        return (*named, None) if named and self.optional else (*named,)

    @property
    def fix(self) -> str:
        name, default = self.definition.name, self.definition.default
        return f"pass {name}" if default is dataclasses.MISSING else f"{name}={default!r} is the default"


@functools.cache
def _fields(cls: type) -> tuple[_Field, ...]:
    hints, fields = get_type_hints(cls), list[_Field]()
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        fields.append(_Field(field, tuple(part for part in parts if part is not NoneType), NoneType in parts))
    return tuple(fields)


@functools.cache
def choices(cls: type) -> Mapping[str, tuple[Any, ...]]:
    """What may be chosen in the fields of a dataclass whose type is a Literal; None among it where None may stand."""
    return {field.definition.name: field.allowed for field in _fields(cls) if field.allowed}


def check_fields(config: object) -> None:
    """Refuse what no field of this dataclass takes: another type, an unknown choice, a number outside of its limits.

    Choices of a Literal by name; int and float (finite, and no bool); bool; str; tuples of these; other configurations.
    Fields of other types are not looked at.
    """
    for field in _fields(type(config)):
        _check(field.definition.name, getattr(config, field.definition.name), field)


def _check(name: str, x: object, field: _Field) -> None:
    numbers = field.definition.metadata.get("numbers", ANY)
    if field.allowed:
        check_name(name, x, field.allowed)
    elif x is None and field.optional:
        return
    elif field.kinds in ((int,), (float,)):
        check_number(name, x, numbers, whole=field.kinds == (int,), optional=field.optional, fix=field.fix)
    elif field.kinds == (bool,):
        check_flag(name, x)
    elif field.kinds == (str,) and not isinstance(x, str):
        raise ConfigError(
            f"{name} must be a text{', or None' if field.optional else ''}",
            got=describe(x),
            why="it is a name, a path or a part of one",
            fix=f"{name}={str(x)!r}" if hasattr(x, "__fspath__") else field.fix,
        )
    elif get_origin(field.kinds[0]) is tuple:
        _check_tuple(name, x, get_args(field.kinds[0]), fix=field.fix)
        for i, element in enumerate(cast("tuple[object, ...]", x)):
            if isinstance(element, int | float):
                check_number(f"{name}[{i}]", element, numbers, fix=field.fix)
    elif isinstance(field.kinds[0], type) and dataclasses.is_dataclass(field.kinds[0]):
        check_instance(name, x, cast(type, field.kinds[0]))


def _check_tuple(name: str, x: object, parts: tuple[Any, ...], *, fix: str) -> None:
    kinds = get_args(parts[0]) or parts[:1]
    words = {int: "whole numbers", float: "numbers", str: "texts"}
    text = " or ".join(words.get(kind, f"{kind.__name__}(...)") for kind in kinds)
    count = None if parts[-1] is Ellipsis else len(parts)
    elements = tuple(cast("list[object]", x)) if isinstance(x, list | tuple) else (x,)
    types = (int, *kinds) if float in kinds else kinds
    fits = all(isinstance(element, types) and not isinstance(element, bool) for element in elements)
    fits = fits and count in (None, len(elements))
    if not (fits and isinstance(x, tuple)):
        raise ConfigError(
            f"{name} must be a tuple of {f'{count} ' if count else ''}{text}",
            got=describe(cast(object, x)),
            why="a tuple cannot change, and each of its elements has a meaning of its own",
            fix=f"{name}={elements!r}" if fits else fix,
        )
