"""forward_backward_kl through the real SDK over real HTTP: the gradient is that of plain autograd."""

import functools
import math
import warnings

import pytest
import tinker
import torch
from tests.hosts.tinker.wire import assert_same_gradient, by_autograd, datums, move, over_the_wire

from klamp import KLConfig, LossConfig
from klamp.errors import DataError, NonFiniteError
from klamp.tinker import compute_grpo_kl_loss, forward_backward_kl
from klamp.tinker.testing import Fault

CONFIGURATIONS = {
    "kl_coef": {"kl_coef": 0.3},
    "sequence": {"kl": KLConfig(beta=0.3, kl_horizon="sequence", kl_off_policy="sequence")},
    "clip": {
        "kl": KLConfig(beta=0.3, kl_clip_method="hard", kl_clip_threshold=0.5, use_per_token_kl_threshold=False),
        "group_size": 2,
        "loss": LossConfig(loss_type="grpo"),
    },
    "advantage": {"kl": KLConfig(beta=0.3, kl_estimator="k1", kl_placement="advantage", kl_horizon="sequence")},
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_the_gradient_over_the_wire_is_that_of_autograd(trainer, reference, standin, name):
    data, options = datums(reference), CONFIGURATIONS[name]
    move(trainer, data)
    with warnings.catch_warnings():
        for kind in (FutureWarning, DeprecationWarning):
            warnings.simplefilter("error", kind)
        result = forward_backward_kl(trainer, data, **options).result()
    found = over_the_wire(standin)
    value, expected = by_autograd(standin, data, functools.partial(compute_grpo_kl_loss, **options))
    assert_same_gradient(found, expected)
    assert result.metrics["train/loss"] == pytest.approx(value, abs=1e-6)
    assert result.metrics["kl/k3"] > 1e-3


def test_bad_data_is_refused_before_anything_is_sent(trainer, reference, standin):
    data = datums(reference)
    requests = standin.requests.total()
    broken = datums(reference)
    del broken[2].loss_fn_inputs["ref_logprobs"]
    asked = standin.requests["forward_backward"]
    with pytest.raises(DataError, match="datum 2 has no 'ref_logprobs'"):
        forward_backward_kl(trainer, broken, 0.3)
    broken[2].loss_fn_inputs["ref_logprobs"] = tinker.TensorData.from_torch(torch.full((5,), math.nan))
    with pytest.raises(NonFiniteError, match="datum 2: ref_logprobs"):
        forward_backward_kl(trainer, broken, 0.3)
    assert standin.requests["forward_backward"] == asked
    assert requests > 0
    assert forward_backward_kl(trainer, data, 0.3).result().metrics["train/denominator"] == 10


def test_nan_from_the_service_ends_the_step_and_names_the_datum(trainer, reference, standin):
    data = datums(reference)
    standin.inject(Fault(kind="nan", route="forward_backward"))
    with pytest.raises(NonFiniteError, match="datum 0: the policy's row"):
        forward_backward_kl(trainer, data, 0.3).result()
    assert all(tensor.grad is None for tensor in standin.weights().values())


def test_a_client_that_nobody_has_awaited_is_waited_for(service, standin, reference):
    pending = service.create_lora_training_client(base_model=standin.base_model, rank=4)
    assert forward_backward_kl(pending, datums(reference), 0.3).result().metrics["train/denominator"] == 10
