"""`klamp doctor PATH`: what is wrong with a run, whoever wrote its record; the exit code is for CI."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from klamp.cli.errors import show_error
from klamp.cli.flags import field_name, split_flags, unknown_key
from klamp.cli.tables import show_paragraph, show_table
from klamp.diagnostics.alarm import Blamed
from klamp.diagnostics.alarms import ALARMS, check_names
from klamp.diagnostics.doctor import Diagnosis, Finding, examine
from klamp.diagnostics.history import History
from klamp.errors import ConfigError, DataError, KlampError, unknown_name

HEALTHY, ALARMED, UNREADABLE = 0, 1, 2

HELP = """\
usage: klamp doctor PATH [flags]

Says what is wrong with a run, with the evidence and the next step. PATH is what the run left behind:
a klamp run folder, TRL's trainer_state.json (or the folder of its checkpoints), a TensorBoard folder,
a W&B offline run, JSONL of metrics, or JSONL of completions with token log-probabilities (klamp's,
prime-rl's and verl's names).

The exit code is 0 for a healthy run, 1 where an alarm rose, 2 where the record cannot be read
or holds nothing to check.

  klamp doctor runs/arithmetic-001
  klamp doctor outputs/checkpoint-500/trainer_state.json --loss_type dr_grpo --verifier rules
  klamp doctor outputs --json --fail-on huge-values kl-spike

flags:
  --json                 one JSON object instead of text
  --fail-on NAME ...     exit with 1 for these alarms and notes only
  --beta X               what the record does not say: the coefficient of the KL,
  --loss_type NAME       the loss (grpo, dr_grpo, ...),
  --verifier KIND        and what gives the reward: rules or model
"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `klamp doctor` was asked for."""

    path: Path
    """The record."""
    as_json: bool = False
    """One JSON object."""
    fail_on: tuple[str, ...] = ()
    """Alarms and notes that fail; none: every alarm."""
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What the record does not say."""


def run(argv: Sequence[str], *, stream: TextIO | None = None) -> int:
    """Run `klamp doctor` with these arguments; returns the exit code.

    Args:
        argv: the arguments after `doctor`.
        stream: where the findings go; None: stdout.

    Raises:
        ConfigError: wrong flags; the caller shows it, with the exit code 2.
    """
    out = sys.stdout if stream is None else stream
    if not argv or "-h" in argv or "--help" in argv:
        print(HELP + "\nalarms:\n" + "\n".join(_names()), file=out)
        return HEALTHY
    options = read_options(argv)
    try:
        from klamp.records import read_record

        history = read_record(options.path)
    except KlampError as error:
        show_error(error)
        return UNREADABLE
    history.settings = dataclasses.replace(history.settings, **options.settings)
    diagnosis = examine(history)
    if not diagnosis.findings and (history.is_empty or len(diagnosis.unchecked) == len(ALARMS)):
        show_error(_nothing_to_check(options.path, history))
        return UNREADABLE
    failed = diagnosis.failed(options.fail_on)
    if options.as_json:
        print(json.dumps(as_object(diagnosis, options.path, failed), indent=2), file=out, flush=True)
    else:
        show(diagnosis, options.path, out)
    return ALARMED if failed else HEALTHY


def read_options(argv: Sequence[str]) -> Options:
    """The options that a command line names.

    Raises:
        UnknownNameError: an unknown flag, alarm, loss or verifier; names the nearest.
        ConfigError: no path, or a value that cannot be read.
    """
    words = [word for word in argv if word != "--json"]
    if not words or words[0].startswith("-"):
        raise ConfigError("the first argument is the record", got=" ".join(argv), fix="klamp doctor PATH [flags]")
    settings: dict[str, Any] = {}
    fail_on: tuple[str, ...] = ()
    for flag, values in split_flags(words[1:], command="klamp doctor"):
        name = field_name(flag)
        if name == "fail_on" and values:
            check_names(values)
            fail_on += tuple(values)
        elif name in ("beta", "loss_type", "verifier") and len(values) == 1:
            settings[name] = _setting(name, values[0])
        elif name in ("fail_on", "beta", "loss_type", "verifier"):
            takes = "one or more names" if name == "fail_on" else "one value"
            raise ConfigError(f"{flag} takes {takes}", got=" ".join([flag, *values]), fix="see `klamp doctor --help`")
        else:
            known = ("--json", "--fail-on", "--beta", "--loss_type", "--verifier")
            raise unknown_key("flag", flag, known, why="`klamp doctor --help` lists them", command="klamp doctor")
    return Options(path=Path(words[0]), as_json="--json" in argv, fail_on=fail_on, settings=settings)


def _setting(name: str, text: str) -> Any:
    if name == "verifier" and text not in ("rules", "model"):
        raise unknown_name("verifier", text, ("rules", "model"))
    if name != "beta":
        return text
    try:
        beta = float(text)
    except ValueError as error:
        raise ConfigError("--beta takes a number", got=text, fix="--beta 0.04") from error
    if not 0 <= beta < math.inf:
        raise ConfigError("--beta takes a number >= 0", got=text, why="it is the KL's coefficient", fix="--beta 0.04")
    return beta


def _nothing_to_check(path: Path, history: History) -> DataError:
    logged = sorted(history.names)
    return DataError(
        "nothing in the record can be checked",
        got=str(path),
        why=f"it has only {', '.join(logged[:8])}" if history.rows and logged else "no step was logged",
        fix="log a KL, a gradient norm or a loss at every step (TRL: logging_steps=1)",
    )


def show(diagnosis: Diagnosis, path: Path, out: TextIO) -> None:
    """Print a diagnosis.

    Args:
        diagnosis: what was found.
        path: where the record is.
        out: where to.
    """
    history = diagnosis.history
    print(f"{path}: {history.source}, {_count(len(history.rows), 'logged step')} up to step {history.step}", file=out)
    for finding in diagnosis.findings:
        _show_finding(finding, out)
    alarms = sum(finding.alarm.level == "alarm" for finding in diagnosis.findings)
    checked = len(ALARMS) - len(diagnosis.unchecked)
    verdict = _count(alarms, "alarm") if alarms else "no alarm"
    print(f"\n{verdict}; {checked} of {len(ALARMS)} were checked", file=out)
    for name, lacks in diagnosis.unchecked.items():
        show_paragraph(out, f"not checked, the record has no {lacks}", label=name, width=22)


def _show_finding(finding: Finding, out: TextIO) -> None:
    alarm = finding.alarm
    since = f"step {finding.first_step}" + (f", and {finding.steps - 1} more" if finding.steps > 1 else "")
    print(f"\n{alarm.level}: {alarm.name}: {alarm.text} ({since})", file=out)
    show_paragraph(out, finding.evidence.text, label="seen")
    show_paragraph(out, alarm.means, label="means")
    show_paragraph(out, alarm.next_step, label="next step")
    if finding.evidence.tokens:
        rows = [_token_row(token) for token in finding.evidence.tokens]
        written = finding.evidence.tokens[0].step
        near = "" if written == finding.first_step else ", the nearest that was written"
        headings = ("token", "completion", "position", "log policy", "log other", "share of the k3", "times")
        show_table(out, f"  tokens to blame, step {written}{near}", headings, rows)


def _token_row(token: Blamed) -> tuple[str, ...]:
    return (
        repr(token.token),
        str(token.completion),
        str(token.position),
        f"{token.policy_logprob:.3f}",
        f"{token.other_logprob:.3f}",
        f"{100 * token.share:.0f} %",
        str(token.times),
    )


def as_object(diagnosis: Diagnosis, path: Path, failed: Sequence[str]) -> dict[str, Any]:
    """A diagnosis as JSON.

    Args:
        diagnosis: what was found.
        path: where the record is.
        failed: names that fail the check.
    """
    return {
        "path": str(path),
        "source": diagnosis.history.source,
        "steps": len(diagnosis.history.rows),
        "healthy": not failed,
        "failed": list(failed),
        "findings": [finding.plain() for finding in diagnosis.findings],
        "not_checked": dict(diagnosis.unchecked),
    }


def _names() -> list[str]:
    return [f"  {alarm.name:<22} {alarm.text}{_level(alarm.level)}" for alarm in ALARMS.values()]


def _level(level: str) -> str:
    return "" if level == "alarm" else " (a note)"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
