"""The tables of the page on where a configuration ends are what the fixed points say; some rows are found again."""

from __future__ import annotations

import pytest
from tests.docs.pages import DOCS, load

from klamp.verify.convergence import LOSSES, ends, terms

PAGE = (DOCS / "records" / "where-it-ends.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("term", ["reward, k1", "loss, k3, token"])
def test_a_row_of_six_tokens_is_found_again(term: str) -> None:
    end = ends(term, "fixed length")[-1]
    numbers = f"{end.price:.3g} | {end.kl:.3f} | {end.kl / end.optimal_kl:.2f} | {end.length:.2f} | {end.reward:.3f}"
    assert f"| {term} | {numbers} |" in PAGE


def test_every_term_and_loss_has_its_cell() -> None:
    distances = PAGE.partition("Distance to the optimum")[2].partition("\n6 tokens")[0]
    assert all(f"| {term} |" in distances for term in terms()) and all(f"| {loss} |" in distances for loss in LOSSES)


def test_tables_stand_between_their_marks_and_nothing_else_moves() -> None:
    page = load("where_it_ends")
    around = f"before\n{page.BEGIN}\nold\n{page.END}\nafter"
    assert page.with_tables(around, []) == f"before\n{page.BEGIN}\n\n{page.END}\nafter"
