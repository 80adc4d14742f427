"""Arguments of the wrong kind are refused in words; their type, data type, device and shape are looked at, no value."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
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
    check_data,
    check_fields,
    check_flag,
    check_instance,
    check_number,
    check_tensors,
    check_values_exist,
    choices,
    describe,
)
from klamp.errors import ConfigError, KlampError, TensorError, UnknownNameError

ON_META = torch.zeros(2, device="meta")


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (None, "None"),
        ("0.1", "'0.1' (str)"),
        (True, "True (bool)"),
        (torch.zeros(2, 3), "a torch.Tensor of torch.float32, shape (2, 3) on cpu"),
        (np.zeros(2), "a numpy.ndarray of float64, shape (2,)"),
        (list(range(100)), "[0, 1, 2, 3, 4, 5, ...] (list)"),
        (SimpleNamespace(dtype=1), "namespace(dtype=1) (SimpleNamespace)"),
    ],
)
def test_a_description_is_short_and_says_the_type(x: object, text: str) -> None:
    assert describe(x) == text


@pytest.mark.parametrize("x", [1, 0.5, np.float64(0.5), 2**63 - 1, 3e38])
def test_positive_numbers_pass(x: object) -> None:
    check_number("x", x, POSITIVE)


@pytest.mark.parametrize(
    ("x", "why", "fix"),
    [
        ("0.1", "text is not read as a number", "x=0.1, without quotes"),
        (" 1e-3 ", "text is not read as a number", "x=1e-3, without quotes"),
        ("much", "text is not read as a number", "pass a number > 0"),
        (True, "True would count as 1", "pass a number > 0"),
        (math.nan, "nothing can be computed with it", "pass a number > 0"),
        (math.inf, "nothing can be computed with it", "pass a number > 0"),
        (0, "it is used as a number", "pass a number > 0"),
        (None, "it is used as a number", "pass a number > 0"),
        (torch.tensor(0.1), "it is used as a number", "pass float(x)"),
        (np.float32(0.1), "it is used as a number", "pass float(x)"),
        (np.zeros(3), "it is used as a number", "pass a number > 0"),
        ({"x": 1}, "it is used as a number", "pass a number > 0"),
        (1j, "it is used as a number", "pass a number > 0"),
    ],
)
def test_what_is_no_positive_number_is_refused(x: Any, why: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_number("x", x, POSITIVE)
    assert (caught.value.what, caught.value.why, caught.value.fix) == ("x must be a number > 0", why, fix)


@pytest.mark.parametrize("x", [2**63, -(2**70), 10**400, 1e39, -1e308])
def test_a_number_that_no_tensor_holds_is_refused(x: float) -> None:
    with pytest.raises(ConfigError, match="x is too large") as caught:
        check_number("x", x)
    assert (caught.value.why, caught.value.fix) == ("no tensor holds it", "pass a smaller number")


def test_none_passes_where_it_may_and_a_fraction_is_not_whole() -> None:
    check_number("x", None, optional=True)
    with pytest.raises(
        ConfigError, match=r"x must be a whole number >= 1, or None\n  got: 2.5 \(float\)\n  why: it is"
    ):
        check_number("x", 2.5, AT_LEAST_1, whole=True, optional=True)


def test_a_flag_is_true_or_false() -> None:
    check_flag("x", False)
    with pytest.raises(ConfigError, match=r"x must be True or False\n  got: 0 \(int\)(?s:.*)fix: x=False"):
        check_flag("x", 0)


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


@pytest.mark.parametrize("x", [[1.0], np.zeros(1), 1.0, None, "text", {}])
def test_what_is_no_tensor_is_refused(x: object) -> None:
    fix = "pass x" if x is None else r"torch.as_tensor\(x\).float\(\)"
    with pytest.raises(TensorError, match=rf"x must be a torch.Tensor\n  got: (?s:.*)\n  why: (?s:.*)\n  fix: {fix}$"):
        check_tensors(FLOATS, x=x)


def test_tensors_on_two_devices_are_refused_by_name() -> None:
    with pytest.raises(TensorError, match="ref is on another device(?s:.*)got: meta, the others on cpu"):
        check_tensors(FLOATS, policy=torch.zeros(2), ref=ON_META)
    with pytest.raises(TensorError, match="mask is on another device"):
        check_tensors(MASKS, like=ON_META, mask=torch.zeros(2, dtype=torch.bool))
    check_tensors(FLOATS, policy=ON_META, ref=ON_META)
    with pytest.raises(TensorError, match="policy is on the meta device"):
        check_values_exist("policy", ON_META)


def test_data_carries_no_gradient_and_a_dict_is_told_which_configuration_to_become() -> None:
    check_data(rewards=torch.zeros(2), nothing=None)
    with pytest.raises(TensorError, match=r"rewards must not carry a gradient(?s:.*)fix: pass rewards.detach\(\)"):
        check_data(rewards=torch.zeros(2, requires_grad=True))
    check_instance("error", KlampError("x"), Exception)
    with pytest.raises(ConfigError, match=r"kl must be a KlampError(?s:.*)fix: KlampError\(\*\*kl\)"):
        check_instance("kl", {"beta": 1}, KlampError)


# --- the fields of a configuration -----------------------------------------------------------------------------------


@dataclass
class Cook:
    """A configuration within a configuration."""

    name: str = "Ada"


@dataclass
class Meal:
    """A dataclass with every kind of field that is looked at, and one that is not."""

    main: Literal["soup", "pie"] = "soup"
    sweet: Literal["cake"] | None = None
    guests: int = 1
    price: float = 2.5
    tip: float | None = None
    hot: bool = True
    note: str | None = None
    table: str = "round"
    courses: tuple[str, ...] = ()
    seats: tuple[int | str, ...] = ()
    shares: tuple[float, float] = (0.5, 0.5)
    cook: Cook = field(default_factory=Cook)
    anything: Any = None


NUMBERS = {"guests": POSITIVE, "price": AT_LEAST_0, "shares": AT_LEAST_0}

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
    ("guests", 2.0, "guests must be a whole number > 0", "guests=1 is the default"),
    ("guests", True, "guests must be a whole number > 0", "guests=1 is the default"),
    ("guests", "3", "guests must be a whole number > 0", "guests=3, without quotes"),
    ("guests", None, "guests must be a whole number > 0", "guests=1 is the default"),
    ("price", -0.1, "price must be a number >= 0", "price=2.5 is the default"),
    ("price", math.nan, "price must be a number >= 0", "price=2.5 is the default"),
    ("price", math.inf, "price must be a number >= 0", "price=2.5 is the default"),
    ("price", "cheap", "price must be a number >= 0", "price=2.5 is the default"),
    ("price", [1.0], "price must be a number >= 0", "price=2.5 is the default"),
    ("tip", "1e-3", "tip must be a number, or None", "tip=1e-3, without quotes"),
    ("hot", 1, "hot must be True or False", "hot=True"),
    ("hot", None, "hot must be True or False", "hot=True"),
    ("note", 3, "note must be a text, or None", "note=None is the default"),
    ("table", Path("round/one"), "table must be a text", f"table='{Path('round/one')}'"),
    ("courses", "soup", "courses must be a tuple of texts", "courses=('soup',)"),
    ("courses", ["soup", "pie"], "courses must be a tuple of texts", "courses=('soup', 'pie')"),
    ("courses", None, "courses must be a tuple of texts", "courses=() is the default"),
    ("courses", ("soup", 1), "courses must be a tuple of texts", "courses=() is the default"),
    ("seats", 7, "seats must be a tuple of whole numbers or texts", "seats=(7,)"),
    ("seats", (1.5,), "seats must be a tuple of whole numbers or texts", "seats=() is the default"),
    ("seats", (True,), "seats must be a tuple of whole numbers or texts", "seats=() is the default"),
    ("shares", (1.0,), "shares must be a tuple of 2 numbers", "shares=(0.5, 0.5) is the default"),
    ("shares", [0.5, 0.25], "shares must be a tuple of 2 numbers", "shares=(0.5, 0.25)"),
    ("shares", (0.5, math.nan), "shares[1] must be a number >= 0", "shares=(0.5, 0.5) is the default"),
    ("shares", (-1.0, 0.5), "shares[0] must be a number >= 0", "shares=(0.5, 0.5) is the default"),
    ("cook", {"name": "Bob"}, "cook must be a Cook", "Cook(**cook)"),
    ("cook", None, "cook must be a Cook", "pass a Cook"),
]


def test_the_choices_are_those_of_the_types_and_none_where_none_may_stand() -> None:
    assert choices(Meal) == {"main": ("soup", "pie"), "sweet": ("cake", None)}


@pytest.mark.parametrize("changes", TAKEN)
def test_what_a_field_takes_passes(changes: dict[str, Any]) -> None:
    check_fields(Meal(**changes), NUMBERS)


@pytest.mark.parametrize(("name", "value", "what", "fix"), REFUSED, ids=lambda each: repr(each)[:30])
def test_what_a_field_does_not_take_is_refused_with_the_way_out(name: str, value: Any, what: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_fields(Meal(**{name: value}), NUMBERS)
    assert (caught.value.what, caught.value.fix) == (what, fix)
    assert caught.value.why and caught.value.got is not None


@pytest.mark.parametrize(("name", "value"), [("main", "piee"), ("main", None), ("sweet", "soup"), ("sweet", ["cake"])])
def test_a_choice_that_is_none_is_refused_by_its_name(name: str, value: Any) -> None:
    with pytest.raises(UnknownNameError, match=f"unknown {name}") as caught:
        check_fields(Meal(**{name: value}))
    assert caught.value.got == repr(value) and "None" not in caught.value.why, "None is no name"
