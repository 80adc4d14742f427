"""What is measured of a configuration: direction, share, noise, gate, probes."""

from __future__ import annotations

import functools
import math

import pytest
import torch

from klamp.config import KLConfig, LossConfig
from klamp.verify.config_facts import measure_config

pytestmark = pytest.mark.usefixtures("shapes_unchecked")  # checked in tests/core; here they would cost minutes


@functools.cache
def measure(loss: LossConfig | None = None, **choices: object):
    return measure_config(KLConfig(**choices), loss or LossConfig(), length=100)


def test_the_default_follows_the_reverse_kl_token_by_token() -> None:
    facts = measure()
    assert facts.position.follows == ("reverse", pytest.approx(1.0))
    assert facts.sequence.follows.name == "local"
    assert 0.3 < facts.sequence.share < 0.9
    assert 0.5 < facts.sequence.cosine_reverse < 0.99
    assert facts.value_bias == pytest.approx(0.0, abs=1e-9)
    assert all(probe.fault == "" for probe in facts.probes)
    assert facts.gate is None


def test_the_sequence_horizon_holds_all_of_it() -> None:
    facts = measure(kl_horizon="sequence")
    assert facts.sequence.follows == ("reverse", pytest.approx(1.0))
    assert facts.sequence.share == pytest.approx(1.0)
    assert facts.noise > measure(kl_estimator="exact", kl_horizon="sequence").noise > 0


@pytest.mark.filterwarnings("ignore::klamp.errors.KLWarning")
def test_k1s_own_gradient_is_nothing_but_noise() -> None:
    facts = measure(LossConfig(loss_type="dapo"), kl_estimator="k1", kl_gradient="own")
    assert facts.position.follows.name == facts.sequence.follows.name == facts.in_loss.follows.name == "zero"
    assert (facts.sequence.share, facts.noise) == (0.0, math.inf)
    assert measure(kl_gradient="none").noise == 0, "no completion has a gradient"
    assert facts.off_policy.follows.name == "none of these"


@pytest.mark.filterwarnings("ignore::klamp.errors.KLWarning")
def test_divided_by_the_own_length_k1_is_not_null() -> None:
    facts = measure(LossConfig(loss_type="grpo"), kl_estimator="k1", kl_gradient="own")
    assert facts.in_loss.follows.name == "none of these" and facts.kept == (0, 0)
    assert measure(kl_estimator="k1", kl_gradient="own").in_loss.follows.name == "zero"


def test_the_off_policy_weight_the_reward_beta_clip_and_controller_keep_the_direction() -> None:
    assert measure().off_policy.follows.name == "none of these"
    assert measure(kl_off_policy="token").off_policy.follows == ("reverse", pytest.approx(1.0))
    facts = measure(LossConfig(scale_rewards="none"), kl_estimator="k1", kl_placement="reward", kl_horizon="sequence")
    assert facts.sequence.follows == ("reverse", pytest.approx(1.0))
    assert math.isnan(facts.value)
    assert facts.probes == ()
    plain = measure()
    other = measure(beta=0.5, kl_clip_method="hard", target_kl=0.05, beta_max=0.9, kl_clip_threshold=0.01)
    assert other.sequence == plain.sequence
    assert measure(kl_estimator="k2").value_bias > 0.1, "a wrong value shows it"


def test_the_gate_of_a_hard_clip() -> None:
    facts = measure(kl_estimator="exact", kl_clip_method="hard", kl_clip_threshold=0.1)
    assert facts.gate is not None
    assert facts.gate.budget == pytest.approx(10.0)
    longer = measure(kl_estimator="exact", kl_clip_method="hard", kl_clip_threshold=0.1, kl_reference_length=200).gate
    assert longer is not None and longer.budget == pytest.approx(20.0)
    assert facts.gate.at == {0.0: 0.0, 0.5: 0.0, 1.0: 0.0, 1.5: 1.0, 2.0: 1.0}


@pytest.mark.filterwarnings("ignore::klamp.errors.KLWarning")
def test_a_wide_soft_clip_is_half_open_everywhere() -> None:
    choices = {"kl_clip_method": "soft", "kl_clip_threshold": 0.05, "use_per_token_kl_threshold": False}
    gate = measure(**choices).gate
    assert gate is not None
    assert gate.budget == 0.05
    assert gate.at[0.0] == pytest.approx(0.4875, abs=1e-4)
    assert gate.at[2.0] == pytest.approx(0.5125, abs=1e-4)


def test_what_float16_cannot_hold_is_found_and_a_bound_mends_it() -> None:
    bare, bound = measure(kl_gradient="forward"), measure(kl_gradient="forward", kl_max_log_ratio=10.0)
    assert [probe.dtype for probe in bare.probes if probe.fault] == [torch.float16]
    assert [probe.fault for probe in bound.probes] == [""] * 6
