"""What is to be trained: what follows from it, and what cannot be."""

from __future__ import annotations

from typing import Any

import pytest

from klamp.config.situation import Situation
from klamp.errors import ConfigError


def test_what_follows() -> None:
    assert Situation().needs_kl and Situation().holds_target and not Situation().in_reward
    assert not Situation(gamed=False, keeps=False, steady_length=True).in_reward, "there is no KL"
    assert Situation(steady_length=True).in_reward and Situation(ends_where_beta_says=True).in_reward
    assert not Situation(ends_where_beta_says=True).holds_target and not Situation(free_kl=0.1).holds_target


@pytest.mark.parametrize(
    "wrong",
    [{"length": 0}, {"group_size": 1}, {"updates": 0}, {"reward_range": 0.0}, {"free_kl": -1.0}, {"max_length": 999}],
)
def test_what_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Situation(**wrong)
