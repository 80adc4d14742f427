"""`klamp doctor PATH`: what is wrong with a run; `klamp check FILE`: with a micro-batch's KL. Neither needs torch."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from klamp.cli.commands import CheckOptions, DoctorOptions, read_command
from klamp.cli.text import CANNOT_TELL, FAILED, say, show_paragraph, show_table
from klamp.doctor.alarms import check_names
from klamp.doctor.examine import AlarmFinding, Diagnosis, examine
from klamp.doctor.history import RunSettings
from klamp.doctor.metrics import MODELS, read_pairs
from klamp.errors import DataError
from klamp.report.run import coverage, judged
from klamp.report.text import count


def run_check(argv: Sequence[str]) -> int:
    """Print the verdict on a capture file; 0 sound, 1 wrong, 3 cannot tell, a DataError if it cannot be read."""
    from klamp.audit.capture import Capture
    from klamp.audit.conclude import conclude

    options: CheckOptions = read_command("check", argv)[0]
    verdict = conclude(Capture.load(options.path))
    say(verdict.to_json() if options.json else verdict)
    return verdict.exit_code


def run(argv: Sequence[str]) -> int:
    """Examine a record and print the findings; 0 sound, 1 wrong, 3 cannot tell, a KlampError if nothing is checked."""
    from klamp.doctor.readers import read_record

    options: DoctorOptions = read_command("doctor", argv)[0]
    check_names(options.fail_on)
    history = read_record(options.path, read_pairs(options.map))
    names = (field.name for field in dataclasses.fields(RunSettings))
    changes = {name: value for name in names if (value := getattr(options, name, None)) is not None}
    history.settings = dataclasses.replace(history.settings, **changes)
    diagnosis = examine(history)
    if diagnosis.empty:
        why = f"it has {', '.join(sorted(history.names))}" if history.names else "no step was logged"
        advice = [_map_advice(name) for name, what in history.unread.items() if not what] or ["--map OURS=THEIRS"]
        fix = f"log a KL or a loss at every step (TRL: logging_steps=1), or name what the record has: {advice[0]}"
        raise DataError("nothing in the record can be checked", got=str(options.path), why=why, fix=fix)
    failed = diagnosis.failed(options.fail_on)
    if options.json:
        say(json.dumps(_as_object(diagnosis, options.path, failed), indent=2))
    else:
        _show(diagnosis, options.path)
    if failed:
        return FAILED
    return CANNOT_TELL if diagnosis.blind and not options.fail_on else 0


def _show(diagnosis: Diagnosis, path: Path) -> None:
    history = diagnosis.history
    say(f"{path}: {history.source}, {count(len(history.rows), 'logged step')} up to step {history.step}")
    for step, text in history.changes.items():
        show_paragraph(f"after step {step}: {text}", label="changed")
    for caution in history.cautions:
        show_paragraph(caution, label="caution")
    for name, what in history.unread.items():
        reason = what or f"what it is can be said, as {_map_advice(name)}"
        show_paragraph(f"{name}: {reason}", label="not read")
    for finding in diagnosis.findings:
        _show_finding(finding)
    say(f"\n{judged([diagnosis])}; {coverage(diagnosis)}")
    if diagnosis.blind:
        fix = "Log a KL, name its column with --map, or say with --beta 0 that the run has no KL."
        show_paragraph(f"NOT looked at: {diagnosis.blind}. {fix}", label="the KL")
    for name, gap in diagnosis.unchecked.items():
        gap_text = re.sub(r"(?:\b(\w+) or settings\.(?=\1\b)|settings\.)(\w+)", r"\2 (--\2 says it)", gap)
        show_paragraph(f"not checked, needs {gap_text}", label=name, width=22)


def _map_advice(name: str) -> str:
    """What `--map` may say of a KL that was not read, by its name: the model that it is to, the estimator, the unit."""
    model = next((model for model, pattern in MODELS.items() if pattern.search(name)), "reference")
    if model == "teacher":
        return f"--map teacher/kl={name}"
    if model == "sampler" and re.search(r"diff|abs", name, re.IGNORECASE):
        return f"--map sampler/abs={name} (a mean |log-ratio|)"
    if re.search(r"seq|sum(?!mary)|episode|trajector", name, re.IGNORECASE):
        return f"--map kl/k1_sequence={name} (a sum over a completion)"
    k3, k1 = ("kl", "k1") if model == "reference" else ("sampler/k3", "sampler/k1")
    estimators = {"k3": f"{k3}={name} (a k3)", "k1": f"{k1}={name} (a k1)"}
    named = [text for estimator, text in estimators.items() if estimator in name.lower()]
    return f"--map {' or '.join(named or estimators.values())}"


def _show_finding(finding: AlarmFinding) -> None:
    alarm, evidence = finding.alarm, finding.evidence
    say(f"\n{alarm.level}: {alarm.name}: {alarm.text} ({finding.since})")
    show_paragraph(evidence.text, label="seen")
    for rank, cause in enumerate(evidence.causes, start=1):
        show_paragraph(cause, label=f"likely {rank}" if len(evidence.causes) > 1 else "likely")
    show_paragraph(alarm.means, label="means")
    show_paragraph(alarm.next_step, label="next step")
    if evidence.tokens:
        headings = ("token", "completion", "position", "log policy", "log other", "share of the k3")
        rows = [
            (
                *(repr(token.token), str(token.completion), str(token.position)),
                *(f"{token.policy_logprob:.3f}", f"{token.other_logprob:.3f}", f"{100 * token.share:.0f} %"),
            )
            for token in evidence.tokens
        ]
        show_table(f"  tokens to blame, step {evidence.tokens[0].step}", headings, rows)


def _as_object(diagnosis: Diagnosis, path: Path, failed: Sequence[str]) -> dict[str, Any]:
    history = diagnosis.history
    return {
        "path": str(path),
        "source": history.source,
        "steps": len(history.rows),
        "healthy": not failed and not diagnosis.blind,
        "failed": list(failed),
        "changed": dict(history.changes),
        "cautions": list(history.cautions),
        "findings": [finding.record for finding in diagnosis.findings],
        "not_checked": dict(diagnosis.unchecked),
        "not_read": dict(history.unread),
        "kl_not_seen": diagnosis.blind,
    }
