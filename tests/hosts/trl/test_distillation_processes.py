"""Distillation in two real processes over gloo: TRL's numbers, and one set of metrics."""

from __future__ import annotations

from typing import Any

import pytest
from tests.hosts.trl.two_processes import found_by_ranks

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return found_by_ranks("tests.hosts.trl.children_distillation", tmp_path_factory.mktemp("ranks"))


def test_untouched_every_process_has_the_numbers_of_the_stock_class(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["untouched"] == found["stock"]


@pytest.mark.parametrize("name", ["exact", "topk"])
def test_both_processes_have_the_same_weights_and_metrics(ranks: list[dict[str, Any]], name: str) -> None:
    assert ranks[0][name] == ranks[1][name]
    for row in ranks[0][name]["rows"]:
        assert row["loss"] == pytest.approx(row["teacher/kl"], abs=1e-4), "the mean over the tokens of both"


def test_the_exact_kl_gives_trls_own_loss_and_weights(ranks: list[dict[str, Any]]) -> None:
    own, stock = ranks[0]["exact"], ranks[0]["stock"]
    for row, other in zip(own["rows"], stock["rows"], strict=True):
        assert {key: row[key] for key in other} == pytest.approx(other, abs=1e-4)
    assert own["weights"] == pytest.approx(stock["weights"], abs=1e-5)
