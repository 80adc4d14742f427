"""klamp's controller as verl's `apply_kl_penalty` calls it; what needs verl itself is in tests/engines/verl."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from klamp.errors import NonFiniteError
from klamp.hosts.verl.hooks import RewardController

RULES = (
    "",
    ":kl_controller=step",
    ":kl_controller=proportional",
    ":kl_controller=dual",
    ":kl_controller=pid",
    ":kl_controller=fixed",
)


def controller(rule: str) -> RewardController:
    return RewardController(f"klamp{rule}", SimpleNamespace(kl_coef=0.2, target_kl=0.05))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("rule", RULES)
def test_a_kl_that_is_not_finite_stops_the_run_as_in_every_host(rule: str) -> None:
    control = controller(rule)
    control.update(current_kl=0.2, n_steps=1024)
    before = control.value
    for kl in (math.nan, math.inf, -math.inf):
        with pytest.raises(NonFiniteError, match="KL of this step is not finite"):
            control.update(current_kl=kl, n_steps=1024)
    assert control.value == before


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_noise_below_zero_counts_as_zero() -> None:
    noisy, still = controller(":kl_controller=step"), controller(":kl_controller=step")
    assert [noisy.value, still.value] == [0.2, 0.2]
    noisy.update(current_kl=-0.3, n_steps=1)
    still.update(current_kl=0.0, n_steps=1024)
    assert noisy.value == still.value == pytest.approx(0.15)
