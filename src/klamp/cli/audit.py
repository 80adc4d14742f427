"""`klamp audit NAME`: what the KL of an installed trainer, or of any function, really does; one table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from klamp.audit import load_subject
from klamp.audit.examine import Subject, audit
from klamp.audit.verdict import ANSWERS, EXIT_CODES, Verdict
from klamp.cli.commands import AuditOptions, read_command
from klamp.cli.text import MISSING, say, show_caution, show_table

HEADINGS = ("loss", "means", "KL", "off", "off-policy", "mean over", "verdict", "findings")
LEGEND = """\
means      the divergence that its name or its options promise
KL         whose gradient descent on the loss follows: reverse = KL(policy||ref), forward = KL(ref||policy), js, zero,
           away, sign, ...: the classes of klamp.check
off        distance of the expected gradient from the promised divergence's, enumerated; beside a policy loss, the
           coefficient is relative to it; off-policy: the policy has moved since the rollout
mean over  what a batch is the mean of: tokens, or the means of sequences
verdict    klamp.check's, on a drawn batch with padding; a distillation has 320 words, and a head of more than 160
           counts as the whole vocabulary"""


def run(argv: Sequence[str]) -> int:
    """Audit what is named: hosts, or `module:function`. Returns the exit code, as `klamp check` does."""
    options: AuditOptions = read_command("audit", argv)[0]
    codes = {EXIT_CODES[True]}
    for name in options.names:
        subject = load_subject(name, means=options.means)
        for caution in subject.cautions:
            show_caution(caution)
        verdicts = audit(subject)
        if ":" in name:
            say(f"{name}\n{verdicts[name]}\n")
        else:
            show_audit(subject, verdicts)
        codes |= {verdict.exit_code for verdict in verdicts.values()}
    if any(":" not in name for name in options.names):
        say(LEGEND)
    return next(code for code in EXIT_CODES.values() if code in codes)


def show_audit(subject: Subject, verdicts: Mapping[str, Verdict]) -> None:
    """Print a table with a verdict per loss, and each sentence once."""
    rows, sentences = list[tuple[str, ...]](), dict[str, str]()
    for loss in subject.losses:
        name, verdict = loss.name, verdicts[loss.name]
        findings = [finding for finding in verdict.findings if finding.level != "note"]
        codes = ", ".join(dict.fromkeys(finding.code for finding in findings))
        measured = verdict.kl or MISSING, *map(percent, loss.distances), verdict.mean or MISSING
        rows.append((name, loss.means, *measured, ANSWERS[verdict.ok], codes or MISSING))
        for finding in findings:
            fix = f"; fix: {finding.fix}" if finding.fix else ""
            sentences.setdefault(finding.code, f"{finding.code} ({name}): {finding.what}{fix}")
    show_table(subject.title, HEADINGS, rows)
    for sentence in (*sentences.values(), *subject.notes):
        say(f"- {sentence}")
    say()


def percent(share: float | None) -> str:
    """A share as the tables have it."""
    return MISSING if share is None else "0" if share < 0.005 else f"{100 * share:.0f} %" if share < 10 else "> 1000 %"
