"""What asks klamp's derivatives for more than the first one is refused in words, not answered wrongly."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from klamp.core.gradients import kl_penalty
from klamp.core.heads.kl import linear_kl
from klamp.core.heads.logprobs import linear_logprobs
from klamp.errors import ConfigError, TensorError

pytestmark = pytest.mark.usefixtures("shapes_unchecked")  # a transform's tensors are of classes of their own

REF, MASK = torch.randn(3, 4).log_softmax(-1), torch.ones(3, 4, dtype=torch.bool)
HIDDEN, WEIGHT, TARGETS = torch.randn(3, 4), torch.randn(5, 4), torch.tensor([0, 4, 2])

OWN: dict[str, Callable[[Tensor], Tensor]] = {
    "kl_penalty": lambda x: kl_penalty(-x.abs(), REF[: len(x)], MASK[: len(x)]),
    "linear_logprobs": lambda x: linear_logprobs(x, WEIGHT, TARGETS[: len(x)]),
    "linear_logprobs of a head that learns": lambda x: linear_logprobs(x, x[:1] + WEIGHT, TARGETS[: len(x)]),
    "linear_kl": lambda x: linear_kl(x, WEIGHT, HIDDEN[: len(x)], 2 * WEIGHT),
}
"""Functions with a derivative of klamp's own, each of one tensor [N, 4]."""
TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor]], Tensor]] = {
    "grad": lambda function: torch.func.grad(lambda x: function(x).sum())(HIDDEN),
    "jacrev": lambda function: torch.func.jacrev(function)(HIDDEN),
    "vmap": lambda function: torch.vmap(lambda x: function(x).sum())(HIDDEN.unsqueeze(1)),
    "jvp": lambda function: torch.func.jvp(function, (HIDDEN,), (HIDDEN,))[1],
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("function", [OWN["kl_penalty"], OWN["linear_kl"]], ids=["kl_penalty", "linear_kl"])
def test_torch_func_is_refused(function: Callable[[Tensor], Tensor], transform: Callable[..., Tensor]) -> None:
    with pytest.raises(ConfigError, match=r"torch\.func") as caught:
        transform(function)
    assert "loss.backward()" in caught.value.fix


@pytest.mark.parametrize("function", OWN.values(), ids=OWN)
def test_a_second_derivative_is_refused_where_its_graph_would_be_built(function: Callable[[Tensor], Tensor]) -> None:
    """With a term of plain torch beside it autograd would give a number, which lacks klamp's part."""
    x = HIDDEN.clone().requires_grad_(True)
    with pytest.raises(ConfigError, match="no second derivative"):
        torch.autograd.grad(function(x).sum() + (x**2).sum(), x, create_graph=True)
    assert torch.autograd.grad(function(x).sum(), x)[0].isfinite().all()


@pytest.mark.parametrize("learns", ["hidden", "weight"])
def test_inference_tensors_that_would_have_to_be_kept_are_refused(learns: str) -> None:
    with torch.inference_mode():
        hidden, weight = HIDDEN.clone(), WEIGHT.clone()
    mine, head = HIDDEN.clone().requires_grad_(learns == "hidden"), WEIGHT.clone().requires_grad_(learns == "weight")
    with pytest.raises(TensorError, match="inference_mode") as caught:
        linear_kl(mine, head, hidden, weight)
    assert "no_grad" in caught.value.fix
    assert linear_kl(mine, head, hidden.clone(), weight.clone()).requires_grad
