"""The checks at the door: what cannot be a log-probability is refused where it counts and ignored where it does not."""

from __future__ import annotations

import pytest
import torch

from klamp.core.masking import check_batch, check_logprobs, check_mask
from klamp.core.types import Batch
from klamp.errors import DataError, EmptyMaskError, NonFiniteError, TensorError

MASK = torch.tensor([[True, True, False], [True, False, False]])
LOGPROBS = torch.tensor([[-1.0, -2.0, -3.0], [-0.5, -0.1, -4.0]])
IMPOSSIBLE = (
    (float("nan"), NonFiniteError),
    (float("inf"), NonFiniteError),
    (-float("inf"), NonFiniteError),
    (0.5, DataError),
)


def batch(**changes):
    columns = dict.fromkeys(("policy_logprobs", "old_logprobs", "ref_logprobs", "sampler_logprobs"), LOGPROBS)
    return Batch(**(columns | {"mask": MASK, "advantages": torch.tensor([1.0, -1.0])} | changes))


def with_value(value, row, column):
    changed = LOGPROBS.clone()
    changed[row, column] = value
    return changed


def test_a_sound_batch_passes():
    assert check_batch(batch()) is None


@pytest.mark.parametrize(("value", "error"), IMPOSSIBLE)
@pytest.mark.parametrize("name", ["policy_logprobs", "old_logprobs", "ref_logprobs", "sampler_logprobs"])
def test_an_impossible_logprob_is_refused_where_the_mask_is_true_and_named(name, value, error):
    with pytest.raises(error, match=rf"{name}[\s\S]*\(0, 1\)"):
        check_batch(batch(**{name: with_value(value, 0, 1)}))
    check_batch(batch(**{name: with_value(value, 0, 2)}))


def test_nan_beside_a_positive_logprob_is_what_is_named():
    with pytest.raises(NonFiniteError, match=r"1 of 6 tokens, the first at \(1, 0\) with value nan"):
        check_logprobs("policy_logprobs", torch.where(MASK, with_value(float("nan"), 1, 0).abs(), LOGPROBS), MASK)


def test_a_logprob_just_above_zero_from_half_precision_rounding_passes():
    check_logprobs("policy_logprobs", torch.full((2, 3), 0.004), MASK)


@pytest.mark.usefixtures("shapes_unchecked")
def test_a_mask_of_numbers_is_refused():
    with pytest.raises(TensorError, match="boolean"):
        check_mask(MASK.long())


@pytest.mark.usefixtures("shapes_unchecked")
def test_an_empty_mask_is_refused_unless_it_is_a_part_of_a_batch():
    empty = torch.zeros(2, 3, dtype=torch.bool)
    with pytest.raises(EmptyMaskError):
        check_mask(empty)
    check_mask(empty, part=True)


def test_advantages_must_be_finite_where_they_count():
    with pytest.raises(NonFiniteError, match="advantage"):
        check_batch(batch(advantages=torch.tensor([1.0, float("nan")])))
    per_token = torch.zeros(2, 3)
    per_token[0, 2] = float("nan")
    check_batch(batch(advantages=per_token))
    per_token[0, 0] = float("nan")
    with pytest.raises(NonFiniteError, match="advantage"):
        check_batch(batch(advantages=per_token))
