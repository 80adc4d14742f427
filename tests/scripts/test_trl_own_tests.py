"""The comparison of two runs of TRL's own tests."""

from __future__ import annotations

import json
from pathlib import Path

from scripts.trl_own_tests import Result, compare, place_tests, read_record, report

STOCK = {
    "same": Result("passed", losses=("0x1p-3", "0x1p-4")),
    "other loss": Result("passed", losses=("0x1p-3",)),
    "no training": Result("passed"),
    "lost": Result("passed", losses=("0x1p-3",)),
    "lost to a skip": Result("passed"),
    "gone": Result("passed"),
    "expected": Result("xfailed"),
    "never": Result("failed", "no such model"),
    "gained": Result("failed", "no such model"),
    "skipped": Result("skipped"),
}
OTHER = {
    "same": Result("passed", losses=("0x1p-3", "0x1p-4")),
    "other loss": Result("passed", losses=("0x1.0000000000001p-3",)),
    "no training": Result("passed"),
    "lost": Result("failed", "E   ValueError: no"),
    "lost to a skip": Result("skipped"),
    "expected": Result("passed"),
    "never": Result("failed", "another reason"),
    "gained": Result("passed"),
    "skipped": Result("skipped"),
    "new": Result("failed"),
}


def test_every_difference_is_listed_with_its_reason_and_every_test_counted() -> None:
    found = compare(STOCK, OTHER)
    assert found.lost == ["lost", "lost to a skip", "gone"]
    assert found.differences == [
        "lost: passed -> failed E   ValueError: no",
        "lost to a skip: passed -> skipped",
        "gone: passed -> not run",
        "expected: xfailed -> passed",
        "gained: failed -> passed no such model",
        "new: not run -> failed",
    ]
    assert found.counts == {
        "failed": (2, 3),
        "not run": (1, 1),
        "passed": (6, 5),
        "skipped": (1, 2),
        "xfailed": (1, 0),
    }
    lines = report(found).splitlines()
    assert lines[-4:] == ["passes with TRL's class and not with klamp's: 3", "lost", "lost to a skip", "gone"]
    assert [line.split() for line in lines if line.startswith("passed")] == [["passed", "6", "5"]]
    assert "tests that train and pass in both: 2; the same losses to the last bit: 1" in lines


def test_losses_are_compared_to_the_last_bit_where_both_pass() -> None:
    found = compare(STOCK, OTHER)
    assert (found.trained, found.other_losses, found.far_losses) == (2, ["other loss"], [])
    far = compare({"a": Result("passed", losses=("0x1p-3",))}, {"a": Result("passed", losses=("0x1.001p-3",))})
    assert far.far_losses == ["a"]


def test_two_equal_runs_have_no_difference() -> None:
    found = compare(STOCK, dict(STOCK))
    assert (found.lost, found.differences, found.other_losses) == ([], [], [])


def test_a_failed_teardown_outlives_the_pass_before_it(tmp_path: Path) -> None:
    record = tmp_path / "record.jsonl"
    lines = [("a", "passed", ""), ("a", "failed", "teardown"), ("b", "failed", "call"), ("b", "passed", "")]
    record.write_text(
        "".join(json.dumps({"test": t, "outcome": o, "why": w, "losses": ["0x0p+0"]}) + "\n" for t, o, w in lines)
    )
    assert read_record(record) == {
        "a": Result("failed", "teardown", ("0x0p+0",)),
        "b": Result("failed", "call", ("0x0p+0",)),
    }
    assert read_record(tmp_path / "none.jsonl") == {}


def test_the_tests_of_a_checkout_are_copied(tmp_path: Path) -> None:
    (tmp_path / "checkout" / "tests").mkdir(parents=True)
    (tmp_path / "checkout" / "tests" / "test_grpo_trainer.py").write_text("x = 1\n")
    place_tests(tmp_path / "checkout", "HEAD", tmp_path)
    assert (tmp_path / "tests" / "test_grpo_trainer.py").read_text() == "x = 1\n"
