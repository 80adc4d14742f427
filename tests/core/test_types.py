"""A batch: the shapes and values that it refuses where they count, by name, and ignores where they do not."""

import dataclasses
from typing import Any

import pytest
import torch
from tests.batches import flat_batch

from klamp.core.types import Batch, Scored, check_batch, check_logprobs
from klamp.errors import DataError, EmptyMaskError, NonFiniteError, ShapeError, TensorError

ONE = torch.zeros(1, 1)
COLUMNS: dict[str, Any] = {"policy_logprobs": ONE, "mask": ONE == 0, "advantages": torch.zeros(1)}


def wrong(name: str) -> Any:
    return torch.zeros(1, 2, dtype=torch.bool if name == "mask" else None)


@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.parametrize("name", ["mask", "old_logprobs", "ref_logprobs", "sampler_logprobs"])
def test_a_tensor_of_another_shape_is_refused_by_name_when_the_batch_is_built(name: str) -> None:
    with pytest.raises(ShapeError, match=rf"^{name} does not have the shape of policy_logprobs"):
        flat_batch(**(COLUMNS | {name: wrong(name)}))
    with pytest.raises(ShapeError, match=name):
        dataclasses.replace(flat_batch(**COLUMNS), **{name: wrong(name)})


@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.parametrize(
    ("shape", "words"), [((1, 2, 5), "which looks like logits"), ((2,), r"policy_logprobs\[None\]")]
)
def test_logits_and_a_single_completion_are_told_apart(shape: tuple[int, ...], words: str) -> None:
    with pytest.raises(ShapeError, match=words):
        flat_batch(**(COLUMNS | {"policy_logprobs": -torch.ones(shape)}))


@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.parametrize("name", ["kl", "forward_kl", "mask", "gate", "weight"])
def test_what_an_anchor_says_in_another_shape_is_refused_by_name(name: str) -> None:
    with pytest.raises(ShapeError, match=rf"^anchors\['x'\]\.{name} does not have"):
        Batch(**COLUMNS, anchors={"x": Scored(ONE, **{name: wrong(name)})})


MASK = torch.tensor([[True, True, False], [True, False, False]])
LOGPROBS = torch.tensor([[-1.0, -2.0, -3.0], [-0.5, -0.1, -4.0]])
IMPOSSIBLE = [*((float(x), NonFiniteError) for x in ("nan", "inf", "-inf")), (0.5, DataError)]
NAMES = ("policy_logprobs", "old_logprobs", "ref_logprobs", "sampler_logprobs")


def batch(**changes):
    columns = dict.fromkeys(NAMES, LOGPROBS)
    return flat_batch(**(columns | {"mask": MASK, "advantages": torch.tensor([1.0, -1.0])} | changes))


def with_value(value, row, column):
    changed = LOGPROBS.clone()
    changed[row, column] = value
    return changed


@pytest.mark.parametrize(("value", "error"), IMPOSSIBLE)
@pytest.mark.parametrize("name", NAMES)
def test_an_impossible_logprob_is_refused_where_the_mask_is_true_and_named(name, value, error):
    with pytest.raises(error, match=rf"{name}[\s\S]*\(0, 1\)"):
        check_batch(batch(**{name: with_value(value, 0, 1)}))
    check_batch(batch(**{name: with_value(value, 0, 2)}))


def test_nan_beside_a_positive_logprob_is_what_is_named_and_one_just_above_zero_by_rounding_passes():
    with pytest.raises(NonFiniteError, match=r"1 of 6 tokens, the first at \(1, 0\) with value nan"):
        check_logprobs("policy_logprobs", torch.where(MASK, with_value(float("nan"), 1, 0).abs(), LOGPROBS), MASK)
    check_logprobs("policy_logprobs", torch.full((2, 3), 0.004), MASK)


@pytest.mark.usefixtures("shapes_unchecked")
def test_a_mask_of_numbers_and_an_empty_one_that_is_no_part_of_a_batch_are_refused():
    with pytest.raises(TensorError, match="boolean"):
        batch(mask=MASK.long())
    empty = batch(mask=torch.zeros(2, 3, dtype=torch.bool))
    with pytest.raises(EmptyMaskError):
        check_batch(empty)
    check_batch(empty, part=True)


def test_advantages_must_be_finite_where_they_count():
    nan = torch.tensor([[0.0, 0.0, float("nan")], [0.0, 0.0, 0.0]])
    check_batch(batch(advantages=nan))
    for advantages in (nan[:, 2], nan.flip(-1)):
        with pytest.raises(NonFiniteError, match="advantage"):
            check_batch(batch(advantages=advantages))
