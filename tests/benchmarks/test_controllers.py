"""How a run with a target is judged, and what the table says of it."""

from __future__ import annotations

import pytest

from benchmarks.controllers import RULES, judged
from klamp.config import KLConfig

pytestmark = pytest.mark.slow


def test_a_run_is_judged_from_20_steps_after_it_first_reached_its_target() -> None:
    kl = [0.01] * 10 + [0.19] * 10 + [0.1] * 40
    beta = [1.0] * 40 + [4.0] * 20
    found = judged(kl, beta, 0.1)
    assert found["reached"] == 10
    assert found["peak"] == pytest.approx(1.9) and found["last"] == pytest.approx(1.0)
    # 9 of the 0.19 are in the mean at step 30, which is 1.405, then one less each: 1.27 at the fourth
    assert found["in_band"] == pytest.approx(27 / 30)
    assert found["moved"] == 4.0 and found["highest_beta"] == found["last_beta"] == 4.0


def test_a_kl_that_never_reached_its_target_is_not_judged() -> None:
    found = judged([0.01] * 60, [1.0] * 60, 0.1)
    assert (found["reached"], found["in_band"], found["moved"]) == (None, None, None)


@pytest.mark.filterwarnings("ignore::klamp.KLWarning")
def test_every_rule_that_moves_beta_is_measured() -> None:
    names = {KLConfig(target_kl=0.05, **fields).controller_name for fields in RULES.values()}
    assert names == {"hold", "step", "proportional"}
