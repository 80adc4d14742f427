"""What is measured of a configuration: direction, share, noise."""

import functools
import math

import pytest

from klamp.config import KLConfig, LossConfig
from klamp.verify.explain import measure_config

pytestmark = pytest.mark.usefixtures("shapes_unchecked")  # checked in tests/core; here they would cost minutes


@functools.cache
def measure(loss: LossConfig | None = None, **choices: object):
    return measure_config(KLConfig(**choices), loss or LossConfig())


@pytest.mark.filterwarnings("ignore::klamp.errors.KLWarning")
def test_k1s_own_gradient_is_nothing_but_noise() -> None:
    facts = measure(LossConfig(loss_type="dapo"), kl_estimator="k1", kl_gradient="own")
    assert facts.position.follows.name == facts.sequence.follows.name == "zero" and facts.reduced == (1, 1)
    assert (facts.sequence.share, facts.noise) == (0.0, math.inf)
    assert measure(kl_gradient="none").noise == 0, "no completion has a gradient"
    assert facts.off_policy.follows.name == "none of these"


@pytest.mark.filterwarnings("ignore::klamp.errors.KLWarning")
def test_divided_by_the_own_length_k1_is_not_null() -> None:
    facts = measure(LossConfig(loss_type="grpo"), kl_estimator="k1", kl_gradient="own")
    assert facts.reduced == (0, 0) and measure(kl_estimator="k1", kl_gradient="own").reduced == (1, 1)


def test_beta_clip_and_controller_keep_the_direction() -> None:
    """What a gradient follows off-policy and in the reward: tests/verify/test_sentences.py."""
    other = measure(beta=0.5, kl_clip_method="hard", target_kl=0.05, beta_max=0.9, kl_clip_threshold=0.01)
    assert other.sequence == measure().sequence
    in_reward = measure(kl_estimator="k1", kl_placement="reward", kl_horizon="sequence")
    assert math.isnan(in_reward.value_bias)
