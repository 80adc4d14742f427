"""Configuration and versions."""

from tests.report.pages import parse, run_of

from klamp.report.page import settings_section


def run(name: str = "a", **config):
    details = {"config": {"beta": 0.01, "seed": 0} | config, "versions": {"klamp": "0.1.0", "torch": name}}
    return run_of(name=name, details=details)


def test_runs_have_a_column_each_of_their_fields_and_versions() -> None:
    one = run("a", beta=0.04, output_dir="<runs/x>", kl_exclude_tokens=())
    one.history.changes = {3: "beta 0.04 -> 0.01"}
    made = parse(settings_section([one, run("b"), run_of(name="c")]))
    fields, versions = made.all("table")
    assert fields.rows()[:3] == [["field", "a", "b", "c"], ["beta", "0.04", "0.01", "–"], ["seed", "0", "0", "–"]]
    assert fields.rows()[3:] == [["output_dir", "<runs/x>", "–", "–"], ["kl_exclude_tokens", "(empty)", "–", "–"]]
    assert versions.rows()[1:] == [["klamp", "0.1.0", "0.1.0", "–"], ["torch", "a", "b", "–"]]
    assert "a, after step 3: beta 0.04 -> 0.01" in made.text
    assert parse(settings_section([one])).all("table")[0].rows()[0] == ["field", "value"]
    assert len(parse(settings_section([run_of()])).all(of="missing")) == 2, "neither is in the record"
