"""The table of metrics: one row per name, units and reductions that belong together, sentences for people."""

from __future__ import annotations

import re
from typing import get_args

import pytest

from klamp.diagnostics.metrics import METRICS, Better, MetricRow, averaged_over
from klamp.errors import ConfigError


@pytest.mark.parametrize("row", METRICS.values(), ids=METRICS)
def test_a_row_is_a_family_and_a_word_a_sentence_and_a_unit_that_belongs_to_its_reduction(row: MetricRow) -> None:
    assert re.fullmatch(r"[a-z][a-z0-9_]*(/[a-z0-9_]+){0,2}", row.name)
    assert not row.text[0].islower() or row.text.startswith(("k1", "k3", "log "))
    assert row.unit and row.reduction and row.text.endswith(".") and "\n" not in row.text
    assert row.better in get_args(Better)
    over = {"nats/token": "tokens", "nats/sequence": "completions"}.get(row.unit)
    assert over is None or row.reduction.removesuffix("KL tokens").removesuffix(over) != row.reduction
    assert row.unit != "share" or row.reduction.startswith("mean over "), "a share is a mean of zeros and ones"
    assert not row.name.endswith("_max") or row.reduction.startswith("maximum")


def test_a_name_without_a_row_has_no_reduction_and_is_refused() -> None:
    assert averaged_over("kl/k3") == "KL tokens"
    assert averaged_over("policy/logp_mean") == "tokens"
    assert averaged_over("kl/log_ratio_max") is None
    with pytest.raises(ConfigError, match="no row in METRICS"):
        averaged_over("kl/new")


def test_each_estimate_of_a_completions_kl_has_one_of_its_tokens() -> None:
    """What is logged per sequence is logged per token too, in the unit that says so."""
    for name, row in METRICS.items():
        if name.startswith("kl/") and name.endswith("_sequence"):
            assert METRICS[name.removesuffix("_sequence")].unit == "nats/token"
            assert row.unit == "nats/sequence"
