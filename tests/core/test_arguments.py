"""Arguments of the wrong kind are refused in words; their type, data type, device and shape are looked at, no value."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from klamp.core.arguments import (
    AT_LEAST_0,
    AT_LEAST_1,
    FLOATS,
    IDS,
    MASKS,
    POSITIVE,
    REALS,
    check_fields,
    check_number,
    check_tensors,
    choices,
    limited,
)
from klamp.errors import ConfigError, TensorError, UnknownNameError


def test_positive_numbers_pass_and_none_where_it_may_and_a_fraction_is_not_whole() -> None:
    for x in (1, 0.5, np.float64(0.5), 2**63 - 1, 3e38):
        check_number("x", x, POSITIVE)
    check_number("x", None, optional=True)
    with pytest.raises(ConfigError, match=r"x must be a whole number >= 1, or None\n  got: 2.5 \(float\)"):
        check_number("x", 2.5, AT_LEAST_1, whole=True, optional=True)


@pytest.mark.parametrize(
    ("kind", "dtypes"),
    [
        (FLOATS, (torch.float16, torch.bfloat16, torch.float32, torch.float64)),
        (REALS, (torch.float32, torch.int64, torch.uint8)),
        (IDS, (torch.int64, torch.int32, torch.uint8)),
        (MASKS, (torch.bool,)),
    ],
)
def test_which_data_types_a_kind_of_tensor_has(kind: Any, dtypes: tuple[torch.dtype, ...]) -> None:
    for dtype in dtypes:
        check_tensors(kind, x=torch.zeros(2, dtype=dtype))
    for dtype in {torch.float32, torch.int64, torch.bool, torch.complex64} - set(dtypes):
        if not (kind is REALS and dtype == torch.int64):
            with pytest.raises(TensorError, match=f"x must hold {kind.text}"):
                check_tensors(kind, x=torch.zeros(2, dtype=dtype))


@dataclass
class Cook:
    name: str = "Ada"


@dataclass
class Meal:
    """A dataclass with every kind of field that is looked at, and one that is not."""

    main: Literal["soup", "pie"] = "soup"
    sweet: Literal["cake"] | None = None
    guests: int = limited(1, POSITIVE)
    price: float = limited(2.5, AT_LEAST_0)
    tip: float | None = None
    hot: bool = True
    note: str | None = None
    table: str = "round"
    courses: tuple[str, ...] = ()
    seats: tuple[int | str, ...] = ()
    shares: tuple[float, float] = limited((0.5, 0.5), AT_LEAST_0)
    cook: Cook = field(default_factory=Cook)
    anything: Any = None


TAKEN: list[dict[str, Any]] = [
    {},
    {"main": "pie", "sweet": "cake"},
    {"guests": 3, "price": 0, "tip": 1, "anything": [math.nan]},
    {"guests": 2**63 - 1},
    {"tip": -1.5, "note": "late", "hot": False, "courses": ("a", "b"), "seats": (1, "window")},
    {"shares": (1, 0.25), "cook": Cook(name="Bob")},
]

# (field, value, what the error says, and the way out)
REFUSED: list[tuple[str, Any, str, str]] = [
    ("guests", 0, "guests must be a whole number > 0", "guests=1 is the default"),
    ("guests", 2**63, "guests is too large", "guests=1 is the default"),
    ("price", 1e39, "price is too large", "price=2.5 is the default"),
    ("guests", True, "guests must be a whole number > 0", "guests=1 is the default"),
    ("guests", "3", "guests must be a whole number > 0", "guests=3, without quotes"),
    ("price", -0.1, "price must be a number >= 0", "price=2.5 is the default"),
    ("price", math.nan, "price must be a number >= 0", "price=2.5 is the default"),
    ("tip", "1e-3", "tip must be a number, or None", "tip=1e-3, without quotes"),
    ("hot", 1, "hot must be True or False", "hot=True"),
    ("note", 3, "note must be a text, or None", "note=None is the default"),
    ("table", Path("round/one"), "table must be a text", f"table='{Path('round/one')}'"),
    ("courses", "soup", "courses must be a tuple of texts", "courses=('soup',)"),
    ("courses", ["soup", "pie"], "courses must be a tuple of texts", "courses=('soup', 'pie')"),
    ("courses", ("soup", 1), "courses must be a tuple of texts", "courses=() is the default"),
    ("seats", 7, "seats must be a tuple of whole numbers or texts", "seats=(7,)"),
    ("seats", (True,), "seats must be a tuple of whole numbers or texts", "seats=() is the default"),
    ("shares", (1.0,), "shares must be a tuple of 2 numbers", "shares=(0.5, 0.5) is the default"),
    ("shares", [0.5, 0.25], "shares must be a tuple of 2 numbers", "shares=(0.5, 0.25)"),
    ("shares", (0.5, math.nan), "shares[1] must be a number >= 0", "shares=(0.5, 0.5) is the default"),
    ("cook", {"name": "Bob"}, "cook must be a Cook", "Cook(**cook)"),
]


def test_the_choices_are_those_of_the_types_and_none_where_none_may_stand() -> None:
    assert choices(Meal) == {"main": ("soup", "pie"), "sweet": ("cake", None)}


def test_what_a_field_takes_passes() -> None:
    for changes in TAKEN:
        check_fields(Meal(**changes))


@pytest.mark.parametrize(("name", "value", "what", "fix"), REFUSED, ids=lambda each: repr(each)[:30])
def test_what_a_field_does_not_take_is_refused_with_the_way_out(name: str, value: Any, what: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_fields(Meal(**{name: value}))
    assert (caught.value.what, caught.value.fix) == (what, fix)
    assert caught.value.why and caught.value.got is not None


@pytest.mark.parametrize(("name", "value"), [("main", "piee"), ("main", None), ("sweet", "soup"), ("sweet", ["cake"])])
def test_a_choice_that_is_none_is_refused_by_its_name(name: str, value: Any) -> None:
    with pytest.raises(UnknownNameError, match=f"unknown {name}") as caught:
        check_fields(Meal(**{name: value}))
    assert caught.value.got == repr(value) and "None" not in caught.value.why, "None is no name"
