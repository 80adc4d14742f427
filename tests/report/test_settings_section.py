"""Configuration and versions."""

from __future__ import annotations

from tests.report.pages import parse, run_of

from klamp.report.settings_section import changed, differing, settings_section, versions_section

DEFAULTS = {"beta": 0.01, "kl_estimator": "k3", "kl_exclude_tokens": [], "seed": 0, "output_dir": None}


def run(name: str = "a", **config):
    details = {"config": DEFAULTS | config, "defaults": DEFAULTS, "versions": {"klamp": "0.1.0", "torch": name}}
    return run_of(name=name, details=details)


def test_what_differs_from_the_defaults() -> None:
    one = run(beta=0.04, output_dir="runs/x", kl_exclude_tokens=())
    assert changed(one) == ["beta", "output_dir"]
    made = parse(settings_section([one]))
    first, whole = made.all("table")
    assert "open" not in made.one("details").attributes
    assert first.rows() == [["field", "value", "default"], ["beta", "0.04", "0.01"], ["output_dir", "runs/x", "none"]]
    assert whole.rows()[1:3] == [["beta", "0.04 changed", "0.01"], ["kl_estimator", "k3", "k3"]]
    assert "Every field that has a default has it." in parse(settings_section([run()])).text
    one.history.changes = {3: "beta 0.04 -> 0.01"}
    assert "a, after step 3: beta 0.04 -> 0.01" in parse(settings_section([one])).text


def test_what_differs_between_runs() -> None:
    runs = [run("a", beta=0.04), run("b", seed=1, output_dir="runs/b"), run_of(name="c")]
    assert differing([each.config for each in runs[:2]]) == ["beta", "seed"]
    made = parse(settings_section(runs))
    assert made.all("table")[0].rows() == [
        ["field", "a", "b", "c"],
        ["beta", "0.04 changed", "0.01", "–"],
        ["seed", "0", "1 changed", "–"],
    ]
    same = parse(settings_section([run("a"), run("b")]))
    assert "Nothing that the records say, output_dir and resume aside." in same.text


def test_a_trainer_whose_defaults_are_not_known() -> None:
    config = {f"option_{i}": i for i in range(200)} | {"beta": 0.04, "loss_type": "<grpo>"}
    made = parse(settings_section([run_of(details={"config": config})]))
    details = made.one("details")
    assert "open" in details.attributes, "there is nothing shorter to show"
    assert details.one("table").rows()[-2:] == [["beta", "0.04"], ["loss_type", "<grpo>"]]

    assert "does not hold the configuration" in settings_section([run_of()])


def test_versions() -> None:
    assert "does not hold versions" in versions_section([run_of()])
    made = parse(versions_section([run("a"), run("b")]))
    assert made.one("table").rows() == [["package", "a", "b"], ["klamp", "0.1.0", "0.1.0"], ["torch", "a", "b"]]
