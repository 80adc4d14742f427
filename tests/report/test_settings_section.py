"""Configuration and versions."""

from __future__ import annotations

from tests.report.pages import parse, run_of

from klamp.report.page import settings_section


def run(name: str = "a", **config):
    details = {"config": {"beta": 0.01, "seed": 0} | config, "versions": {"klamp": "0.1.0", "torch": name}}
    return run_of(name=name, details=details)


def test_every_field_of_a_run_and_its_versions() -> None:
    one = run(beta=0.04, output_dir="<runs/x>", kl_exclude_tokens=())
    made = parse(settings_section([one]))
    fields, versions = made.all("table")
    assert fields.rows() == [
        ["field", "value"],
        ["beta", "0.04"],
        ["seed", "0"],
        ["output_dir", "<runs/x>"],
        ["kl_exclude_tokens", "(empty)"],
    ]
    assert versions.rows() == [["package", "version"], ["klamp", "0.1.0"], ["torch", "a"]]
    one.history.changes = {3: "beta 0.04 -> 0.01"}
    assert "a, after step 3: beta 0.04 -> 0.01" in parse(settings_section([one])).text


def test_several_runs_have_a_column_each() -> None:
    fields, versions = parse(settings_section([run("a", beta=0.04), run("b"), run_of(name="c")])).all("table")
    assert fields.rows() == [["field", "a", "b", "c"], ["beta", "0.04", "0.01", "–"], ["seed", "0", "0", "–"]]
    assert versions.rows()[1:] == [["klamp", "0.1.0", "0.1.0", "–"], ["torch", "a", "b", "–"]]


def test_a_record_without_them_says_so() -> None:
    made = parse(settings_section([run_of()]))
    assert [each.text for each in made.all(of="missing")] == [
        "The record does not hold the configuration.",
        "The record does not hold the versions.",
    ]
