"""What stands in Unsloth's loss function, on tensors alone, against that function itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.engines.unsloth.hosts import HOST
from torch import Tensor

from klamp.core.estimators import ESTIMATORS
from klamp.errors import UnsupportedVersion
from klamp.hosts.unsloth.host import loss_function
from klamp.hosts.unsloth.loss import Added, Call, LossWithKL, weighed

UNSLOTHS = loss_function(HOST)[1]
BETA = 0.7


class Scaler:
    """Loss scaling as torch.amp's GradScaler announces it."""

    def get_scale(self) -> float:
        return 1024.0


def call(*, loss_type: str = "grpo", chunks: int = 1, **options: Any) -> Call:
    """Random arguments: 4 rows of 6 columns, some of them padding."""
    torch.manual_seed(3)
    mask = torch.tensor([[1, 1, 1, 0, 0, 0], [0, 1, 1, 1, 1, 0], [0, 0, 1, 0, 1, 1], [0, 0, 0, 0, 0, 0]])
    new = torch.randn(4, 6) - 2
    defaults: dict[str, Any] = {
        "new": new.requires_grad_(),
        "old": new.detach() + 0.1 * torch.randn(4, 6),
        "ref": new.detach() + 0.5 * torch.randn(4, 6),
        "sampling": None,
        "lm_head": None,
        "input_ids": torch.zeros(4, 6, dtype=torch.long),
        "mask": mask,
        "advantages": torch.tensor([1.0, -0.5, 0.3, 2.0]),
        "beta": BETA,
        "scaler": None,
        "n_chunks": chunks,
        "upstream_scale": None,
        "extra_kwargs": {
            "loss_type": loss_type,
            "max_completion_length": 9,
            "num_items_in_batch": torch.tensor(17),
            "num_processes": 2,
            "current_gradient_accumulation_steps": 3,
            "steps_per_generation": 6,
            **options.pop("extra_kwargs", {}),
        },
    }
    return Call(**(defaults | options))


def k3(given: Call) -> Added:
    assert given.ref is not None
    tokens = BETA * ESTIMATORS["k3"].value(given.new - given.ref)
    return Added(tokens.masked_fill(given.mask == 0, 0), given.advantages, torch.tensor(0.25))


def run(function: Any, given: Call, grad_output: float) -> tuple[Tensor, Tensor, Any]:
    outputs = function.apply(*given)
    (slope,) = torch.autograd.grad(outputs[0], given.new, torch.tensor(grad_output))
    return outputs[0].detach(), slope, outputs


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scaler": Scaler()},
        {"upstream_scale": 3.0},
        {"scaler": Scaler(), "upstream_scale": 0.5, "chunks": 2},
        {"old": None},
        {"extra_kwargs": {"sample_weight": torch.tensor([0.1, 0.0, 0.4, 0.2])}},
        {"extra_kwargs": {"importance_sampling_level": "sequence"}},
    ],
    ids=["plain", "loss scaling", "accumulation undone", "all of it, in chunks", "on-policy", "weighted", "sequence"],
)
def test_unsloths_own_k3(loss_type: str, options: dict[str, Any]) -> None:
    """Whatever arrives from above at the backward pass: Unsloth drops it, or not, as it does for its own."""
    given = call(loss_type=loss_type, **options)
    for grad_output in (1.0, 0.25):
        loss, slope, outputs = run(LossWithKL(UNSLOTHS, k3), given, grad_output)
        own_loss, own_slope, own_outputs = run(UNSLOTHS, given, grad_output)
        torch.testing.assert_close(loss, own_loss, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(slope, own_slope, rtol=1e-6, atol=1e-6)
        assert torch.equal(outputs[1], own_outputs[1])
        assert torch.equal(outputs[5], own_outputs[5])
        assert outputs[2] == 0.25


def test_the_weights_are_those_of_the_average() -> None:
    given = call(loss_type="grpo")
    rows = torch.tensor([3.0, 4.0, 3.0, 1.0]).unsqueeze(-1)
    expected = given.mask / rows / 4 / 3  # mean over 4 rows of the row's mean, by 3 accumulation steps
    tokens = torch.zeros(4, 6, requires_grad=True)
    loss = weighed(UNSLOTHS, given, tokens)
    (slope,) = torch.autograd.grad(loss, tokens)
    assert loss == 0
    torch.testing.assert_close(slope, expected)


def test_a_value_without_gradient_counts_all_the_same() -> None:
    given = call(loss_type="grpo")
    tokens = torch.rand(4, 6)
    loss = weighed(UNSLOTHS, given, tokens)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, (given.mask * tokens).sum(1).div(torch.tensor([3.0, 4.0, 3.0, 1.0])).mean() / 3)
    with torch.no_grad():
        assert weighed(UNSLOTHS, given, tokens) == loss


def test_a_penalty_far_beyond_unsloths_clamps_keeps_value_and_gradient() -> None:
    given = call(loss_type="grpo", old=None, advantages=torch.zeros(4))
    given = given._replace(ref=given.new.detach() + 30)
    far = (given.new - given.ref) ** 2 / 2
    loss, slope, _ = run(LossWithKL(UNSLOTHS, lambda c: Added(far, c.advantages, torch.tensor(0.0))), given, 1.0)
    torch.testing.assert_close(loss, torch.tensor(450.0 / 4))  # 3 of 4 rows have tokens; by 3 accumulation steps
    torch.testing.assert_close(slope[0, 0], torch.tensor(-30.0 / 3 / 4 / 3))
    own_loss, own_slope, _ = run(UNSLOTHS, given, 1.0)
    assert own_loss < 10 and own_slope.abs().max() == 0


def test_nothing_added_is_unsloth_without_kl() -> None:
    given = call()
    nothing = LossWithKL(UNSLOTHS, lambda c: Added(None, c.advantages, torch.tensor(0.0)))
    loss, slope, _ = run(nothing, given, 1.0)
    plain, plain_slope, _ = run(UNSLOTHS, given._replace(beta=0.0), 1.0)
    assert torch.equal(loss, plain) and torch.equal(slope, plain_slope)


def test_the_hook_has_to_be_called_once() -> None:
    stand_in = LossWithKL(UNSLOTHS, k3)
    with pytest.raises(UnsupportedVersion, match="0 calls in one loss"):
        stand_in.check_called_once()
    stand_in.apply(*call())
    stand_in.check_called_once()
    stand_in.apply(*call())
    with pytest.raises(UnsupportedVersion, match="2 calls in one loss"):
        stand_in.check_called_once()
    with pytest.raises(UnsupportedVersion, match="12 arguments where 13 were expected"):
        stand_in.apply(*call()[:-1])
