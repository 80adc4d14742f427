"""What no host with a loop and a loss of its own can do, and the word for KL fields without a KL."""

from __future__ import annotations

import warnings

import pytest

from klamp.config import KLConfig, KLWarning
from klamp.errors import ConfigError, refuse
from klamp.hosts.common.refusals import host_refusals, warn_without_kl

REFUSED = {
    "kl_early_stop": {"kl_early_stop": 0.1},
    "reference='remote'": {"reference": "remote", "reference_url": "http://localhost:1"},
    "reference_device": {"reference_device": "cpu"},
    "reference_share=0.5": {"reference_share": 0.5},
}


@pytest.mark.parametrize("name", REFUSED)
def test_each_is_refused_by_name_with_the_way_out(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        refuse(host_refusals(KLConfig(beta=0.1, **REFUSED[name]), "SomeHost"))
    error = caught.value
    assert error.what == f"{name} cannot be honoured by SomeHost"
    assert error.why and error.fix


def test_every_row_has_a_case_above_and_stands_alone() -> None:
    """A row that no configuration reaches would be untested; two that apply at once would hide one."""
    rows = [host_refusals(KLConfig(beta=0.1, **fields), "SomeHost") for fields in REFUSED.values()]
    applied = [[i for i, row in enumerate(table) if row.applies] for table in rows]
    assert applied == [[0], [1], [2], [3]]
    assert len(rows[0]) == len(REFUSED)


def test_what_every_host_can_do_is_not_refused() -> None:
    for fields in ({}, {"kl_clip_method": "hard"}, {"target_kl": 0.1}, {"reference": "ema"}, {"kl_lr_guard": 0.1}):
        refuse(host_refusals(KLConfig(beta=0.1, **fields), "SomeHost"))


def test_fields_without_a_beta_are_warned_of_and_a_monitor_is_not() -> None:
    with pytest.warns(KLWarning, match="beta is 0 .* no KL term and no reference"):
        warn_without_kl(KLConfig(beta=0.0, kl_estimator="k1"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_without_kl(KLConfig(beta=0.0, kl_monitor=True))
        warn_without_kl(KLConfig(beta=0.1))
