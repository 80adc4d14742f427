"""The built-in losses: their values, their gradients over the wire, and what they refuse."""

import pytest
import tinker
import torch
from tests.waiting import SECONDS
from tinker import types

from klamp_standin import losses
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


ONES = torch.ones(3, 2)
REFUSED = {
    "mask": (request(mask=torch.ones(3)), r"not known to this loss \['mask'\]"),
    "missing": (request(advantages=None), r"missing \['advantages'\]"),
    "length": (request(advantages=torch.ones(2)), r"shape \(2,\); model_input has 3 tokens"),
    "dtype": (request(advantages=torch.ones(3).long()), "torch.int64; torch.float32 is needed"),
    "targets": (request(target_tokens=torch.ones(3)), "torch.float32; torch.int64 is needed"),
    "nan": (request(logprobs=torch.tensor([torch.nan, 0, 0])), "holds NaN"),
    "vocabulary": (request(target_tokens=torch.tensor([2, 3, 64])), "outside the vocabulary of 64"),
    "too long": (request(tokens=range(9)), "9 tokens; the model takes 8"),
    "loss": (request("dpo"), "unknown loss_fn 'dpo'"),
    "setting": (request(config={"cliprange": 0.2}), r"'cliprange'\] is no setting of ppo"),
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


def test_a_refusal_is_an_http_error_and_holds_up_nothing(trainer):
    tokens = types.ModelInput.from_ints([1, 2, 3])
    bare = types.Datum(model_input=tokens, loss_fn_inputs={"target_tokens": torch.tensor([2, 3, 4])})
    with pytest.raises(tinker.BadRequestError, match="missing .*'advantages', 'logprobs'"):
        trainer.forward_backward([bare], "ppo").result(timeout=SECONDS)
    assert len(trainer.forward([bare], "cross_entropy").result(timeout=SECONDS).loss_fn_outputs) == 1
