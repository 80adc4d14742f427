"""`klamp doctor PATH`: what is wrong with a run, whoever wrote its record; the exit code is for CI."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from klamp.cli.flags import read_options
from klamp.cli.options import DoctorOptions
from klamp.cli.text import of_the_system, say, show_error, show_paragraph, show_table
from klamp.diagnostics.alarms import check_names
from klamp.diagnostics.doctor import Diagnosis, Finding, examine
from klamp.diagnostics.history import History
from klamp.diagnostics.names import read_pairs
from klamp.errors import DataError, KlampError
from klamp.report.run import judged
from klamp.report.text import count

if TYPE_CHECKING:
    from klamp.hosts.common.sampler_weights import SyncReport

HEALTHY, ALARMED, UNREADABLE = 0, 1, 2


def run(argv: Sequence[str]) -> int:
    """Examine a record; 1 where it is not sound, 2 where it cannot be read or holds nothing to check."""
    options = read_options(DoctorOptions, argv, command="klamp doctor")
    check_names(options.fail_on)
    names = read_pairs(options.map)
    try:
        diagnosis = _examined(options, names)
        reports = _synced(options.path) if options.check_sync else {}
    except (KlampError, OSError) as error:
        show_error(error if isinstance(error, KlampError) else of_the_system(error))
        return UNREADABLE
    history = diagnosis.history
    if diagnosis.empty and not reports:
        show_error(_nothing_to_check(options.path, history))
        return UNREADABLE
    failed = diagnosis.failed(options.fail_on)
    failed += [f"sync at step {step}" for step, report in reports.items() if not report.in_sync]
    blind = "" if options.fail_on else diagnosis.blind
    if options.json:
        say(json.dumps(as_object(diagnosis, options.path, failed, reports), indent=2))
    else:
        show(diagnosis, options.path)
        show_sync(reports)
    if blind and not failed:
        show_error(_not_looked_at(options.path, blind))
        return UNREADABLE
    return ALARMED if failed else HEALTHY


def _examined(options: DoctorOptions, names: Mapping[str, str]) -> Diagnosis:
    """What the alarms find in a record.

    Raises:
        KlampError: it cannot be read.
    """
    from klamp.records import read_record

    history = read_record(options.path, names)
    said = {name: getattr(options, name) for name in ("beta", "loss_type", "verifier")}
    given = {name: value for name, value in said.items() if value is not None}
    history.settings = dataclasses.replace(history.settings, **given)
    return examine(history)


def _synced(path: Path) -> dict[int, SyncReport]:
    """Step -> whose log-probabilities sampler and trainer reported.

    Raises:
        DataError: no run of klamp's, or one whose completions cannot be scored again.
    """
    from klamp.records.klamp_run import is_klamp_run, read_config
    from klamp.training.evaluation import check_completions

    if not is_klamp_run(path):
        raise DataError(
            "--check-sync takes the folder of a klamp run",
            got=str(path),
            why="it scores kept completions again, with the weights that the configuration and the checkpoints name",
            fix="klamp doctor runs/NAME --check-sync; for another trainer, call klamp.check_sync(model, ...)",
        )
    return dict(check_completions(read_config(path)[1], path))


def _nothing_to_check(path: Path, history: History) -> DataError:
    logged = sorted(history.names)
    return DataError(
        "nothing in the record can be checked",
        got=str(path),
        why=f"it has {', '.join(logged[:8])}{', ...' * (len(logged) > 8)}" if logged else "no step was logged",
        fix="log a KL, a gradient norm or a loss at every step (TRL: logging_steps=1), or say with --map what "
        "the record calls them",
    )


def _not_looked_at(path: Path, why: str) -> DataError:
    return DataError(
        "no alarm, and the KL was not looked at",
        got=str(path),
        why=why,
        fix="log a KL, say with --map what a column is, or with --beta 0 that there is none",
    )


def show(diagnosis: Diagnosis, path: Path) -> None:
    """Print what was found in the record at a path."""
    history = diagnosis.history
    say(f"{path}: {history.source}, {count(len(history.rows), 'logged step')} up to step {history.step}")
    for step, text in history.changes.items():
        show_paragraph(f"after step {step}: {text}", label="changed")
    for caution in history.cautions:
        show_paragraph(caution, label="caution")
    for name, what in history.unread.items():
        show_paragraph(
            f"{name}: {what or f'what it is can be said, as --map kl={name} (a k3) or k1={name}'}", label="not read"
        )
    for finding in diagnosis.findings:
        _show_finding(finding)
    checked = diagnosis.concerned - len(diagnosis.unchecked)
    say(f"\n{judged([diagnosis])}; {checked} of {diagnosis.concerned} were checked")
    if diagnosis.blind:
        show_paragraph(f"NOT looked at: {diagnosis.blind}", label="the KL")
    for name, lacks in diagnosis.unchecked.items():
        said = re.sub(r"settings\.(\w+)", r"\1 (--\1 says it)", lacks)
        show_paragraph(f"not checked, the record has no {said}", label=name, width=22)


def show_sync(reports: Mapping[int, SyncReport]) -> None:
    """Print what sampler and trainer reported at each step."""
    for step, report in reports.items():
        say(f"\nsync at step {step}: {'yes' if report.in_sync else 'NO'}, {count(report.tokens, 'token')}")
        for side in report.sides:
            show_paragraph(side.text, label=side.side)


def _show_finding(finding: Finding) -> None:
    alarm = finding.alarm
    since = f"step {finding.first_step}" + (f", and {finding.steps - 1} more" if finding.steps > 1 else "")
    say(f"\n{alarm.level}: {alarm.name}: {alarm.text} ({since})")
    show_paragraph(finding.evidence.text, label="seen")
    for rank, cause in enumerate(finding.evidence.causes, start=1):
        show_paragraph(cause, label=f"likely {rank}" if len(finding.evidence.causes) > 1 else "likely")
    show_paragraph(alarm.means, label="means")
    show_paragraph(alarm.next_step, label="next step")
    if finding.evidence.tokens:
        written = finding.evidence.tokens[0].step
        near = "" if written == finding.first_step else ", the nearest that was written"
        headings = ("token", "completion", "position", "log policy", "log other", "share of the k3")
        rows = [
            (
                *(repr(each.token), str(each.completion), str(each.position)),
                *(f"{each.policy_logprob:.3f}", f"{each.other_logprob:.3f}", f"{100 * each.share:.0f} %"),
            )
            for each in finding.evidence.tokens
        ]
        show_table(f"  tokens to blame, step {written}{near}", headings, rows)


def as_object(
    diagnosis: Diagnosis, path: Path, failed: Sequence[str], reports: Mapping[int, SyncReport]
) -> dict[str, Any]:
    """A diagnosis as JSON.

    Args:
        diagnosis: what was found.
        path: where the record is.
        failed: names that fail the check.
        reports: step -> whose log-probabilities sampler and trainer reported.
    """
    synced = [
        {"step": step, "in_sync": each.in_sync, "gaps": {side.side: dict(side.gaps) for side in each.sides}}
        for step, each in reports.items()
    ]
    return {
        "path": str(path),
        "source": diagnosis.history.source,
        "steps": len(diagnosis.history.rows),
        "healthy": not failed and not diagnosis.blind,
        "failed": list(failed),
        "changed": dict(diagnosis.history.changes),
        "cautions": list(diagnosis.history.cautions),
        "findings": [finding.plain() for finding in diagnosis.findings],
        "not_checked": dict(diagnosis.unchecked),
        "not_read": dict(diagnosis.history.unread),
        "kl_not_seen": diagnosis.blind,
        **({"sync": synced} if synced else {}),
    }
