"""The built-in losses: their values, their gradients over the wire, and what they refuse."""

from __future__ import annotations

import pytest
import tinker
import torch
from tests.waiting import SECONDS
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto

from klamp_standin import losses, protocol, tiny_model
from klamp_standin.model import BaseModel, LoraShape, Weights
from klamp_standin.protocol import Refused, TrainingRequest

LOGPROBS = [torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64), torch.tensor([-0.1, -3.0], dtype=torch.float64)]
OLD = [torch.tensor([-1.5, -2.0, -0.1]), torch.tensor([-0.1, -2.0])]
ADVANTAGES = [torch.tensor([1.0, -1.0, -2.0]), torch.tensor([0.5, -1.0])]
INPUTS = [{"logprobs": q, "advantages": a} for q, a in zip(OLD, ADVANTAGES, strict=True)]


def test_importance_sampling_is_minus_the_sum_of_ratio_times_advantage():
    ratios = [1.6487212707, 1.0, 0.6703200460, 1.0, 0.3678794412]
    expected = -(ratios[0] * 1 - ratios[1] * 1 - ratios[2] * 2 + ratios[3] * 0.5 - ratios[4] * 1)
    assert float(losses.summed("importance_sampling", LOGPROBS, INPUTS, {})) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("low", "high"), [(0.8, 1.2), (0.5, 1.3)])
def test_ppo_takes_the_smaller_of_clipped_and_unclipped(low, high):
    ratios = [1.6487212707, 1.0, 0.6703200460, 1.0, 0.3678794412]
    advantages = [1.0, -1.0, -2.0, 0.5, -1.0]
    pairs = zip(ratios, advantages, strict=True)
    expected = -sum(min(r * a, min(max(r, low), high) * a) for r, a in pairs)
    config = {} if low == 0.8 else {"clip_low_threshold": low, "clip_high_threshold": high}
    assert float(losses.summed("ppo", LOGPROBS, INPUTS, config)) == pytest.approx(expected, rel=1e-6)


def request(loss_fn="ppo", *, tokens=(1, 2, 3), config=None, forward_only=False, **inputs):
    given = {
        "target_tokens": torch.tensor([2, 3, 4]),
        "logprobs": torch.tensor([-1.0, -1.0, -1.0]),
        "advantages": torch.tensor([0.0, 1.0, 1.0]),
    } | inputs
    return TrainingRequest(
        model_id="m",
        seq_id=1,
        tokens=[list(tokens)],
        inputs=[{name: value for name, value in given.items() if value is not None}],
        loss_fn=loss_fn,
        loss_fn_config=config or {},
        forward_only=forward_only,
    )


def check(asked):
    losses.check(asked, 64, 8)


def test_a_request_that_fits_passes():
    check(request())
    check(request(config={"clip_low_threshold": 0.7}))
    check(request("importance_sampling"))


ONES = torch.ones(3, 2)
REFUSED = {
    "mask": (request(mask=torch.ones(3)), r"not known to this loss \['mask'\]"),
    "missing": (request(advantages=None), r"missing \['advantages'\]"),
    "length": (request(advantages=torch.ones(2)), r"shape \(2,\); model_input has 3 tokens"),
    "dtype": (request(advantages=torch.ones(3).long()), "torch.int64; torch.float32 is needed"),
    "targets": (request(target_tokens=torch.ones(3)), "torch.float32; torch.int64 is needed"),
    "nan": (request(logprobs=torch.tensor([torch.nan, 0, 0])), "holds NaN"),
    "vocabulary": (request(target_tokens=torch.tensor([2, 3, 64])), "outside the vocabulary of 64"),
    "input": (request(tokens=(1, 2, -3)), r"data\[0\].model_input holds a token outside"),
    "too long": (request(tokens=range(9)), "9 tokens; the model takes 8"),
    "empty": (request(tokens=()), "is empty"),
    "loss": (request("dpo"), "unknown loss_fn 'dpo'"),
    "setting": (request(config={"cliprange": 0.2}), r"'cliprange'\] is no setting of ppo"),
    "setting of another": (request("importance_sampling", config={"clip_low_threshold": 0.8}), "is no setting of"),
    "candidates of another loss": (request(target_tokens=torch.ones(3, 2).long()), r"shape \(3, 2\)"),
    "a weight for some": (
        request("cross_entropy", logprobs=None, advantages=None, target_tokens=torch.ones(3, 2).long(), weights=OLD[0]),
        r"'weights'\] has shape \(3,\)",
    ),
    "candidates of others": (
        request("cross_entropy", logprobs=None, advantages=None, target_tokens=torch.ones(2, 2).long(), weights=ONES),
        r"shape \(2, 2\); model_input has 3 tokens",
    ),
    "a candidate": (
        request("cross_entropy", logprobs=None, advantages=None, target_tokens=torch.full((3, 2), 64), weights=ONES),
        "outside the vocabulary",
    ),
    "weights": (request("cross_entropy", logprobs=None, advantages=None), r"missing \['weights'\]"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_by_name(name):
    asked, message = REFUSED[name]
    with pytest.raises(Refused, match=message):
        check(asked)


def test_a_forward_pass_needs_no_weights():
    check(request("cross_entropy", logprobs=None, advantages=None, forward_only=True))


def test_a_refusal_is_an_http_error_and_holds_up_nothing(trainer):
    tokens = types.ModelInput.from_ints([1, 2, 3])
    bare = types.Datum(model_input=tokens, loss_fn_inputs={"target_tokens": torch.tensor([2, 3, 4])})
    with pytest.raises(tinker.BadRequestError, match="missing .*'advantages', 'logprobs'"):
        trainer.forward_backward([bare], "ppo").result(timeout=SECONDS)
    assert len(trainer.forward([bare], "cross_entropy").result(timeout=SECONDS).loss_fn_outputs) == 1


def message(**inputs):
    """A `forward_backward` request of one datum, as the SDK encodes it."""
    given = {"target_tokens": torch.tensor([2, 3]), "weights": torch.ones(2)} | inputs
    datum = types.Datum(model_input=types.ModelInput.from_ints([1, 2]), loss_fn_inputs=given)
    asked = types.ForwardBackwardInput(data=[datum], loss_fn="cross_entropy")
    return forward_backward_request_to_proto(
        types.ForwardBackwardRequest(forward_backward_input=asked, model_id="m", seq_id=7)
    )


def test_what_the_wire_cannot_carry_is_refused():
    sparse = torch.zeros(2, 8, dtype=torch.int64)
    sparse[0, 1] = 3
    sent = message(target_tokens=sparse)
    assert sent.data[0].loss_fn_inputs["target_tokens"].WhichOneof("encoding") == "sparse_csr"
    assert protocol.decode_training(sent.SerializeToString()).inputs[0]["target_tokens"].equal(sparse)
    sent.data[0].loss_fn_inputs["target_tokens"].shape[:] = [2, 1]
    with pytest.raises(Refused, match="is no sparse matrix"):
        protocol.decode_training(sent.SerializeToString())
    wrong = message()
    wrong.data[0].loss_fn_inputs["weights"].shape[:] = [3]
    with pytest.raises(Refused, match=r"shape \[3\] and carries 2 values"):
        protocol.decode_training(wrong.SerializeToString())
    with pytest.raises(Refused, match="'image'"):
        protocol.prompt_tokens({"chunks": [{"type": "image", "data": ""}]})


def test_the_candidates_of_a_token_have_log_probabilities_and_gradients_of_their_own(trainer, standin):
    """As for distillation: target_tokens [N, K], of another K in each datum, through the SDK's own custom loss."""
    tokens = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
    targets = [torch.tensor([[2, 9], [3, 8], [4, 0]]), torch.tensor([5, 6]), torch.tensor([[7, 8, 9, 7]] * 4)]
    weights = [torch.linspace(-1, 2, x.numel()).reshape(x.shape) for x in targets]
    data = [
        types.Datum(model_input=types.ModelInput.from_ints(row), loss_fn_inputs={"target_tokens": goal})
        for row, goal in zip(tokens, targets, strict=True)
    ]

    def loss(logprobs):
        return torch.stack([(w * (x**2)).sum() for w, x in zip(weights, logprobs, strict=True)]).sum()

    seen = []
    trainer.forward_backward_custom(data, lambda _, given: (seen.extend(given), (loss(given), {}))[1]).result()
    found = {name: tensor.grad.clone() for name, tensor in standin.weights().items()}
    tensors = {name: x.detach().clone().requires_grad_(True) for name, x in standin.weights().items()}
    here = BaseModel(tiny_model()).logprobs(Weights(shape=LoraShape(rank=4), tensors=tensors), tokens, targets)
    for mine, other, goal in zip(here, seen, targets, strict=True):
        assert other.shape == goal.shape
        torch.testing.assert_close(mine.detach(), other.detach(), rtol=0, atol=1e-6)
    loss(here).backward()
    norm = torch.stack([x.grad.norm() for x in tensors.values()]).norm()
    assert norm > 1e-3
    assert torch.stack([(found[n] - x.grad).norm() for n, x in tensors.items()]).norm() < 1e-6 * norm
