"""sampler_mismatch: the sampler's words against the trainer's."""

from __future__ import annotations

import math

import pytest
import torch
from tests.hosts.tinker.fakes import fake_batch

from klamp.errors import ShapeError
from klamp.tinker import sampler_mismatch


def test_one_token_that_differs_shows_in_k3_and_the_maximum():
    data, policies = fake_batch(off=0.0)
    assert sampler_mismatch(data, policies) == pytest.approx(
        {"sampler/k1": 0, "sampler/k3": 0, "sampler/log_ratio_max": 0}, abs=1e-12
    )
    with torch.no_grad():
        policies[2][-1] = data[2].loss_fn_inputs["logprobs"][-1] + 5 - 5.5
        policies[0][0] = -9.0  # the prompt
    found = sampler_mismatch(data, policies)
    assert found["sampler/k1"] == pytest.approx(0.5 / 12)
    assert found["sampler/k3"] == pytest.approx((math.exp(-0.5) - 1 + 0.5) / 12)
    assert found["sampler/log_ratio_max"] == pytest.approx(0.5)


def test_rows_that_do_not_fit_are_refused():
    data, policies = fake_batch()
    with pytest.raises(ShapeError):
        sampler_mismatch(data, policies[:-1])
