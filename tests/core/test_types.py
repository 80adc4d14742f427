"""The words of the core: every choice of a Literal is one that the core's tables know, and no table knows another."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

import pytest
import torch

from klamp.core import types
from klamp.core.clipping import clip_kl
from klamp.core.gradients import kl_penalty
from klamp.core.types import Batch, LossOutput
from klamp.errors import ConfigError, ShapeError, UnknownNameError

ONE = torch.zeros(1, 1)
TRUE = torch.ones(1, 1, dtype=torch.bool)


def test_the_values_of_a_kl_are_the_estimators_and_the_exact_one() -> None:
    assert set(get_args(types.Value)) == {*get_args(types.Estimator), "exact"}


@pytest.mark.parametrize("method", get_args(types.ClipMethod))
def test_every_clip_method_is_known(method: Any) -> None:
    assert clip_kl(torch.tensor([1.0]), 0.5, method=method).isfinite().all()


@pytest.mark.usefixtures("shapes_unchecked")
def test_a_name_that_is_no_choice_is_refused() -> None:
    with pytest.raises(UnknownNameError):
        clip_kl(torch.tensor([1.0]), 0.5, method="har")  # pyright: ignore[reportArgumentType]
    with pytest.raises(UnknownNameError):
        kl_penalty(ONE, ONE, TRUE, gradient="revers")  # pyright: ignore[reportArgumentType]


def test_a_batch_is_read_only_and_takes_names_only() -> None:
    batch = Batch(policy_logprobs=ONE, mask=TRUE, advantages=torch.zeros(1))
    with pytest.raises(dataclasses.FrozenInstanceError):
        batch.mask = TRUE  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(TypeError):
        Batch(ONE, TRUE, torch.zeros(1))  # pyright: ignore[reportCallIssue]
    given = {field.name for field in dataclasses.fields(Batch) if field.default is dataclasses.MISSING}
    assert given == {"policy_logprobs", "mask", "advantages"}, "all else may be left out"


@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.parametrize(
    "name", ["mask", "kl_mask", "old_logprobs", "ref_logprobs", "sampler_logprobs", "exact_kl", "exact_kl_forward"]
)
def test_a_tensor_of_another_shape_is_refused_by_name_when_the_batch_is_built(name: str) -> None:
    columns: dict[str, Any] = {"policy_logprobs": ONE, "mask": TRUE, "advantages": torch.zeros(1)}
    wrong: Any = torch.zeros(1, 2, dtype=torch.bool) if "mask" in name else torch.zeros(1, 2)
    with pytest.raises(ShapeError, match=rf"^{name} does not have the shape of policy_logprobs"):
        Batch(**(columns | {name: wrong}))
    with pytest.raises(ShapeError, match=name):
        dataclasses.replace(Batch(**columns), **{name: wrong})


@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.parametrize("name", ["kl_weight", "gate_kl", "reference_length"])
def test_one_number_per_completion_is_asked_for_by_name(name: str) -> None:
    columns: dict[str, Any] = {"policy_logprobs": ONE, "mask": TRUE, "advantages": torch.zeros(1), name: torch.ones(3)}
    with pytest.raises(ShapeError, match=f"^{name} does not have one number per completion"):
        Batch(**columns)


@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.parametrize("shape", [(3,), (2, 1), (1, 3)])
def test_advantages_that_fit_neither_completions_nor_tokens_are_refused(shape: tuple[int, ...]) -> None:
    two = torch.zeros(2, 3)
    with pytest.raises(ShapeError, match="advantages"):
        Batch(policy_logprobs=two, mask=two == 0, advantages=torch.zeros(shape))


@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.parametrize("size", [0, 1.5, True])
def test_the_size_of_a_group_is_a_whole_number(size: Any) -> None:
    with pytest.raises(ConfigError, match="group_size must be a whole number >= 1"):
        Batch(policy_logprobs=ONE, mask=TRUE, advantages=torch.zeros(1), group_size=size)


def test_a_loss_can_be_taken_apart() -> None:
    loss, metrics = LossOutput(torch.tensor(1.0), {"beta": torch.tensor(0.1)})
    assert loss.item() == 1.0
    assert set(metrics) == {"beta"}
