"""The coefficient: a number to look at, a penalty when multiplied, and never used twice or not at all."""

from typing import Any

import pytest
import torch
from tests.batches import read

from klamp.core.term import KLTerm
from klamp.errors import UnsupportedVersion
from klamp.hosts.common.coefficient import Coefficient, ShiftedInputs, batch_of, check_once, gated_penalty, loss_mask

KL = torch.full((2, 3), 7.0)


def test_it_is_the_number_and_its_product_is_the_penalty() -> None:
    penalty = torch.arange(6.0).view(2, 3)
    beta = Coefficient(0.3, lambda: 0.3 * penalty)
    assert beta == 0.3 and beta != 0.0 and f"{beta:.1f}" == "0.3" and beta * 2 == 0.6 and 2 * beta == 0.6
    assert beta.uses == 0
    assert torch.equal(beta * KL, 0.3 * penalty)
    assert beta.uses == 1


def test_a_product_that_goes_past_it_and_a_kl_of_another_shape_are_noticed() -> None:
    """A host that wrote `per_token_kl * beta` would get its own KL: torch multiplies by the number."""
    beta = Coefficient(0.3, lambda: torch.zeros(2, 3))
    assert torch.equal(KL * beta, KL * 0.3)
    with pytest.raises(UnsupportedVersion, match="0 products in one loss"):
        check_once(beta.uses, "products")
    check_once(1, "products")
    with pytest.raises(UnsupportedVersion, match=r"shape \(2, 1\)"):
        beta * torch.ones(2, 1)


def inputs(**changes: Any) -> dict[str, Any]:
    return {
        "completion_mask": torch.tensor([[1, 1, 1], [1, 1, 0]]),
        "advantages": torch.zeros(2),
        "ref_per_token_logps": torch.full((2, 3), -1.5),
        **changes,
    }


def test_tools_are_not_trained_on() -> None:
    tools = torch.tensor([[1, 0, 1], [1, 1, 1]])
    assert loss_mask(inputs()).sum() == 5
    assert loss_mask(inputs(tool_mask=tools)).tolist() == [[True, False, True], [True, True, False]]


def test_the_sampler_is_who_reported_else_the_recorded_policy_else_the_policy() -> None:
    policy = torch.full((2, 3), -1.0, requires_grad=True)
    old, reported = torch.full((2, 3), -1.1), torch.full((2, 3), -1.2)
    reported[0, 0] = torch.nan
    assert torch.equal(read(batch_of(inputs(), policy), "sampler_logprobs"), policy.detach())
    assert torch.equal(read(batch_of(inputs(old_per_token_logps=old), policy), "sampler_logprobs"), old)
    both = inputs(old_per_token_logps=old, sampling_per_token_logps=reported)
    found = read(batch_of(both, policy), "sampler_logprobs")
    assert found[0, 0] == old[0, 0] and found[1, 1] == reported[1, 1]


def test_the_kl_is_divided_by_the_tokens_that_carry_it() -> None:
    policy = torch.full((2, 3), -1.0)
    carried = torch.tensor([[False, True, True], [False, True, True]])
    batch = batch_of(inputs(klamp_kl_mask=carried), policy)
    assert gated_penalty(batch_of(inputs(), policy), KLTerm(value="k1"))[0, 1] == pytest.approx(0.5)
    by_part = gated_penalty(batch, KLTerm(value="k1"))  # 5 tokens, of which 3 carry
    assert torch.allclose(by_part, torch.tensor([[0, 5 / 6, 5 / 6], [0, 5 / 6, 0]]))
    scaled = gated_penalty(batch, KLTerm(value="k1"), torch.tensor([3.0, 2.0]))
    assert scaled.tolist() == [[0, 1.5, 1.5], [0, 1.0, 0]]


def test_each_reading_of_the_shifted_advantages_counts_once() -> None:
    inputs = ShiftedInputs({"advantages": 1, "mask": 2}, lambda: torch.ones(3))
    assert (inputs["mask"], inputs.uses) == (2, 0)
    assert inputs["advantages"].tolist() == [1.0] * 3 and inputs.uses == 1
