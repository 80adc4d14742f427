"""Unsloth's loss function: what stands in its place, its columns, its versions and its silent clamps."""

from typing import Any

import pytest
import torch
from tests.engines.unsloth.hosts import HOST
from torch import Tensor

from klamp.core.estimators import ESTIMATORS
from klamp.errors import UnsupportedVersion
from klamp.hosts.trl.grpo_trainer import K3_STOPS
from klamp.hosts.unsloth.loss_function import LOSS, Added, Call, Columns, LossWithKL, in_place, loss_function, weighed

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
    counts = {"num_items_in_batch": torch.tensor(17), "num_processes": 2}
    counts |= {"current_gradient_accumulation_steps": 3, "steps_per_generation": 6}
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
            **counts,
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


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "loss scaling": {"scaler": Scaler()},
    "accumulation undone": {"upstream_scale": 3.0},
    "all of it, in chunks": {"scaler": Scaler(), "upstream_scale": 0.5, "chunks": 2},
    "on-policy": {"old": None},
    "weighted": {"extra_kwargs": {"sample_weight": torch.tensor([0.1, 0.0, 0.4, 0.2])}},
    "sequence": {"extra_kwargs": {"importance_sampling_level": "sequence"}},
}


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_unsloths_own_k3(loss_type: str, options: dict[str, Any]) -> None:
    """Whatever arrives from above at the backward pass: Unsloth drops it, or not, as it does for its own."""
    given = call(loss_type=loss_type, **options)
    for grad_output in (1.0, 0.25):
        loss, slope, outputs = run(LossWithKL(UNSLOTHS, k3), given, grad_output)
        own_loss, own_slope, own_outputs = run(UNSLOTHS, given, grad_output)
        torch.testing.assert_close(loss, own_loss, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(slope, own_slope, rtol=1e-6, atol=1e-6)
        assert torch.equal(outputs[1], own_outputs[1]) and torch.equal(outputs[5], own_outputs[5])
        assert outputs[2] == 0.25


def test_the_weights_are_those_of_the_average_also_without_a_gradient() -> None:
    given, tokens = call(loss_type="grpo"), torch.rand(4, 6, requires_grad=True)
    weights = given.mask / torch.tensor([3.0, 4.0, 3.0, 1.0]).unsqueeze(-1) / 4 / 3  # 4 rows, 3 accumulation steps
    (slope,) = torch.autograd.grad(weighed(UNSLOTHS, given, tokens), tokens)
    torch.testing.assert_close(slope, weights)
    loss = weighed(UNSLOTHS, given, tokens.detach())
    assert not loss.requires_grad
    torch.testing.assert_close(loss, (weights * tokens.detach()).sum())
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


def test_a_call_with_other_arguments_is_refused() -> None:
    with pytest.raises(UnsupportedVersion, match="12 arguments where 13 were expected"):
        LossWithKL(UNSLOTHS, k3).apply(*call()[:-1])


PAD = 0
PROMPTS = [[5], [6, 7, 8], [9, 9]]
COMPLETIONS = [[11, 12, 13, 14], [21, 22], [31, PAD, 33]]
"""The last one holds the padding token itself, which Unsloth takes for padding."""


def batch() -> dict[str, Any]:
    prompt = torch.tensor([[PAD] * (3 - len(row)) + row for row in PROMPTS])
    completion = torch.tensor([row + [PAD] * (4 - len(row)) for row in COMPLETIONS])
    return {"prompt_ids": prompt, "completion_ids": completion, "max_left_pad": torch.tensor([[2]] * 3)}


def unsloths(width: int) -> tuple[Tensor, Tensor]:
    """Ids and mask as Unsloth has them: padding at the right, the last `width` columns."""
    ids, masks = [], []
    for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True):
        kept = [token for token in completion if token != PAD]
        row, mask = prompt + kept, [0] * len(prompt) + [1] * len(kept)
        ids.append((row + [PAD] * 7)[:7][-width:])
        masks.append((mask + [0] * 7)[:7][-width:])
    return torch.tensor(ids), torch.tensor(masks)


@pytest.mark.parametrize("width", [6, 7])
def test_there_and_back(width: int) -> None:
    inputs, (ids, mask) = batch(), unsloths(width)
    columns = Columns.of(inputs, width, pad_id=PAD)
    columns.check(inputs, ids, mask)
    assert torch.equal(columns.take(ids), inputs["completion_ids"])
    assert columns.take(mask.bool()).tolist() == [[True] * 4, [True, True, False, False], [True, False, True, False]]
    values = torch.rand(3, 4)
    assert torch.equal(columns.put(values) * (1 - mask), torch.zeros(3, width))
    assert torch.equal(columns.take(columns.put(values)), values * columns.take(mask.bool()))


def test_gradients_flow_both_ways() -> None:
    ids, mask = unsloths(6)
    scored = torch.rand(ids.shape, requires_grad=True)
    columns = Columns.of(batch(), 6, pad_id=PAD)
    columns.put(3 * columns.take(scored)).sum().backward()
    assert torch.equal(scored.grad, 3.0 * mask)


def test_nothing_is_moved_where_unsloth_has_not_packed() -> None:
    inputs = {key: value for key, value in batch().items() if key != "max_left_pad"}
    values = torch.rand(3, 4)
    columns = Columns.of(inputs, 4, pad_id=PAD)
    assert torch.equal(columns.take(values), values) and torch.equal(columns.put(values), values)


@pytest.mark.parametrize("spoilt", ["another token", "a token that is not found", "another width"])
def test_tokens_that_do_not_match_are_refused(spoilt: str) -> None:
    inputs, (ids, mask) = batch(), unsloths(6)
    if spoilt == "another token":
        ids[0, 1] = 12 if ids[0, 1] != 12 else 13
    if spoilt == "a token that is not found":
        mask[1, 0] = 1
    if spoilt == "another width":
        ids, mask = ids.roll(1, 1), mask.roll(1, 1)
    with pytest.raises(UnsupportedVersion, match="does not find the completions among Unsloth's columns"):
        Columns.of(inputs, 6, pad_id=PAD).check(inputs, ids, mask)


def test_a_loss_function_that_is_gone_or_another_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    names, function = loss_function(HOST)

    class Other:
        @staticmethod
        def forward(ctx: object, _new_hidden_states: object, beta: float) -> None: ...

    monkeypatch.setitem(names, LOSS, Other)
    with pytest.raises(UnsupportedVersion, match="takes _new_hidden_states, beta"):
        loss_function(HOST)
    monkeypatch.delitem(names, LOSS)
    with pytest.raises(UnsupportedVersion, match="it is not there"):
        loss_function(HOST)
    monkeypatch.undo()
    assert loss_function(HOST)[1] is function


def test_the_function_is_put_back_whatever_happens() -> None:
    names, function = loss_function(HOST)
    stand_in = LossWithKL(function, lambda call: pytest.fail("not called"))
    with pytest.raises(KeyError, match="the loss failed"), in_place(HOST, stand_in):
        raise KeyError("the loss failed" if names[LOSS] is stand_in else "not in place")
    assert names[LOSS] is function


@pytest.mark.parametrize(("apart", "stops"), [(-2.610, False), (-2.612, True), (10.99, False), (11.01, True)])
def test_where_unsloths_own_kl_stops(apart: float, stops: bool) -> None:
    """Its value stops at 10: exp(-d) - 1 + d = 10 at d = -2.6109, and at d = 11 - exp(-11) above."""
    given = call(old=None, advantages=torch.zeros(4))
    given = given._replace(ref=given.new.detach() - apart)
    _, slope, _ = run(UNSLOTHS, given, 1.0)
    assert (slope.abs().max() == 0) == stops and K3_STOPS.endswith("-2.61 and +11.00 it has no gradient")
