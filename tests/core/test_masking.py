"""Masked sums and reductions: by hand, under hostile padding, and adding up exactly over micro-batches."""

import pytest
import torch

from klamp.core.masking import Totals, masked_mean, masked_sum, reduce_tokens, total_denominator, totals_of
from klamp.errors import ConfigError, KlampError, UnknownNameError

POISONS = (float("nan"), float("inf"), -float("inf"))

VALUES = torch.tensor([[1.0, 2.0, 3.0, 4.0], [10.0, 20.0, 0.0, 0.0], [5.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]], dtype=torch.bool)
BY_HAND = {
    "token_mean": (10 + 30) / 6,
    "sequence_mean": (2.5 + 15 + 0) / 3,
    "sequence_sum": (10 + 30 + 0) / 3,
    "fixed_length": (10 + 30) / (3 * 8),
}


@pytest.mark.parametrize("reduction", BY_HAND)
def test_each_reduction_by_hand_with_an_empty_row_counted_as_zero(reduction):
    loss = reduce_tokens(VALUES, MASK, reduction, length=8)
    assert loss.item() == pytest.approx(BY_HAND[reduction], abs=1e-14)


def test_masked_sums_and_means_by_hand():
    assert masked_sum(VALUES, MASK).item() == 40.0
    assert masked_sum(VALUES, MASK, -1).tolist() == [10.0, 30.0, 0.0]
    assert masked_sum(VALUES, MASK, 0).tolist() == [11.0, 22.0, 3.0, 4.0]
    assert masked_mean(VALUES, MASK).item() == pytest.approx(40 / 6)
    assert masked_mean(VALUES, MASK, -1).tolist() == [2.5, 15.0, 0.0]
    assert masked_mean(VALUES, MASK, 0).tolist() == [5.5, 11.0, 3.0, 4.0]
    assert total_denominator(totals_of(torch.ones(1, 1, dtype=torch.bool)), "token_mean") == 1


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("reduction", BY_HAND)
@pytest.mark.parametrize("mask", [MASK, MASK & False], ids=["some", "none"])
def test_padding_reaches_neither_the_value_nor_the_gradient_also_where_all_is_masked(mask, reduction, poison):
    dirty, clean = (torch.where(mask, VALUES, x).requires_grad_(True) for x in (poison, 7.0))
    losses = [reduce_tokens(x, mask, reduction, length=8) for x in (dirty, clean)]
    slopes = [torch.autograd.grad(loss, x)[0] for loss, x in zip(losses, (dirty, clean), strict=True)]
    assert losses[0] == losses[1] and (mask.any() or losses[0] == 0)
    assert torch.equal(*slopes) and torch.equal(slopes[0] > 0, mask) and (slopes[0] >= 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_summed_in_float32(dtype):
    # 4096 ones: float16 and bfloat16 sums would stall at 2048 and 256.
    x, mask = torch.ones(1, 4096, dtype=dtype), torch.ones(1, 4096, dtype=torch.bool)
    total = reduce_tokens(x + 0.5 * x, mask, "sequence_sum")
    assert total.dtype == torch.float32 and total == 6144.0


@pytest.mark.parametrize(("reduction", "wanted"), [("token_mean", 6), ("sequence_mean", 3), ("fixed_length", 3 * 8)])
def test_the_denominator_of_a_batch_is_that_of_totals_that_count_it(reduction, wanted):
    totals = Totals(sequences=3, tokens=6, kl_tokens=4)
    for counted in (totals_of(MASK), totals):
        assert float(total_denominator(counted, reduction, length=8)) == wanted
    with_kl = 4 if reduction == "token_mean" else wanted
    assert total_denominator(totals, reduction, length=8, part="kl") == with_kl


@pytest.mark.parametrize("length", [None, 0, -1])
def test_fixed_length_without_a_length_is_refused(length):
    with pytest.raises(ConfigError, match="length"):
        reduce_tokens(VALUES, MASK, "fixed_length", length=length)
    with pytest.raises(ConfigError, match="length"):
        total_denominator(Totals(sequences=3, tokens=6, kl_tokens=6), "fixed_length", length=length)


@pytest.mark.usefixtures("shapes_unchecked")
def test_an_unknown_reduction_is_refused_by_name_and_so_is_a_mask_that_would_broadcast():
    with pytest.raises(UnknownNameError, match="tokenmean"):
        reduce_tokens(VALUES, MASK, "tokenmean")
    with pytest.raises(KlampError):
        reduce_tokens(VALUES, MASK[:1], "token_mean")
