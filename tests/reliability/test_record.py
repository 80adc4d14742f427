"""What docs/records/reliability.md says of the kills is what the record says, and of the fuzzers what they are."""

from __future__ import annotations

import json

import pytest
from tests.reliability import fuzzers, record
from tests.reliability.drawn import FACTOR
from tests.reliability.kills import Outcome, plan
from tests.reliability.runs import CASES
from tests.reliability.test_fuzz_core import CONTROLLERS


@pytest.mark.skipif(FACTOR != 1, reason="the page is of `make test`")
def test_the_page_shows_the_record() -> None:
    found = json.loads(record.RECORD.read_text(encoding="utf-8"))
    page = record.PAGE.read_text(encoding="utf-8")
    assert record.page_of(page, found) == page, "run: python -m tests.reliability --page"
    assert page.count("<!-- end of kills -->") == page.count("<!-- end of fuzz -->") == 1


def test_the_record_is_of_a_whole_series() -> None:
    found = json.loads(record.RECORD.read_text(encoding="utf-8"))
    kills = plan(100, seed=0)
    assert [record.row(kill, Outcome(hits=0, differs=[])) | {"hits": 0, "differs": []} for kill in kills] == [
        json.loads(json.dumps(row)) | {"hits": 0, "differs": [], "blows": tuple(row["blows"])} for row in found["kills"]
    ], "the kills are others now: run python -m tests.reliability --record"


def test_a_run_that_differs_shows_in_the_table() -> None:
    rows = [record.row(kill, Outcome(hits=1, differs=["metrics"] * (i == 1))) for i, kill in enumerate(plan(8, seed=0))]
    *_, total = record.table(rows).splitlines()
    assert total.startswith("| all |") and total.endswith(" 7 of 8 |")
    assert record.table(rows).splitlines()[0] == f"| killed | {' | '.join(CASES)} | all |"


@pytest.mark.skipif(FACTOR != 1, reason="the counts are those of `make test`")
def test_what_is_drawn_is_counted_over_cases_and_in_tests_within_tests() -> None:
    core = fuzzers.drawn("tests.reliability.test_fuzz_core")
    assert core["test_kl_penalty"] == 120 and len(core) == 13
    assert core["test_a_controller_stays_finite_and_within_its_bounds_or_refuses"] == 25 * len(CONTROLLERS)
    assert fuzzers.drawn("tests.training.test_vllm_reference").keys() == {
        "test_whatever_a_server_answers_it_is_connected_or_refused",
        "test_whatever_entries_are_answered_they_are_log_probabilities_or_refused",
    }


def test_every_file_of_fuzzers_is_on_the_page() -> None:
    files = {path.stem for path in record.RECORD.parent.glob("test_fuzz_*.py")}
    assert files == {module.rpartition(".")[2] for module in fuzzers.MODULES if "test_fuzz_" in module}


def test_a_part_of_a_page_is_replaced_and_nothing_else() -> None:
    page = "a\n<!-- kills: written by x -->\n\nold\n\n<!-- end of kills -->\nb\n"
    assert record.with_part(page, "kills", "new") == page.replace("old", "new")
