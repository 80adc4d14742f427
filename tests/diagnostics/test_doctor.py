"""A whole run: findings in order, when they rose, what could not be checked."""

from __future__ import annotations

from tests.diagnostics.histories import completion, history_of

from klamp.diagnostics.doctor import examine
from klamp.diagnostics.history import Row, RunSettings


def run_of_trouble():
    kl = [0.0, 0.01, 0.02, 0.02, 0.02, 0.02, 0.02, 0.5, 0.5, 0.5, 0.5, 0.5]
    norms = [1.0, 1.0, 1.0, 2e3, 1.0, 3e3, *[1.0] * 6]
    history = history_of(k3=kl, train__grad_norm=norms, settings=RunSettings(beta=0.1))
    history.add_completions([completion(8, ref=(-1.0, -2.0, -3.0))])
    return history


def test_findings_come_in_order_with_when_they_rose() -> None:
    diagnosis = examine(run_of_trouble())
    assert [(f.alarm.name, f.first_step, f.last_step, f.steps) for f in diagnosis.findings] == [
        ("huge-values", 4, 6, 2),
        ("kl-spike", 8, 8, 1),
        ("kl-high", 9, 12, 4),
    ]
    spike = diagnosis.findings[1]
    assert "0.5" in spike.evidence.text and "0.02" in spike.evidence.text
    assert [token.position for token in spike.evidence.tokens] == [2]


def test_notes_fail_only_where_they_are_named() -> None:
    diagnosis = examine(run_of_trouble())
    assert diagnosis.failed() == ["huge-values", "kl-spike"]
    assert diagnosis.failed(["kl-high"]) == ["kl-high"]
    assert diagnosis.failed(["retention"]) == []


def test_what_the_record_lacks_is_said() -> None:
    history = history_of(k3=[0.0, 0.1])
    unchecked = examine(history).unchecked
    assert unchecked["negative-k1"] == "kl/k1 or completions"
    assert unchecked["dr-grpo-with-kl"] == "settings.loss_type, settings.verifier"
    assert unchecked["retention"] == "evaluations"
    assert "kl-spike" not in unchecked and "step-zero-kl" not in unchecked
    history.evaluations = [Row(step=step, metrics={"a": 1.0}) for step in (0, 2)]
    assert "retention" not in examine(history).unchecked


def test_a_finding_as_plain_values() -> None:
    finding = examine(run_of_trouble()).findings[1].plain()
    assert finding["name"] == "kl-spike" and finding["first_step"] == 8 and finding["level"] == "alarm"
    assert finding["tokens"][0]["token"] == "<eos>"
