"""What `klamp.check` answers: a verdict, and the findings that it rests on. Plain data; loads no torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from klamp.errors import KlampError

SCHEMA = "klamp.check/1"
Level: TypeAlias = Literal["wrong", "cannot tell", "warning", "note"]

LEVELS: tuple[Level, ...] = get_args(Level)  # the worst first: the order in which findings are printed
EXIT_CODES: dict[bool | None, int] = {False: 1, None: 3, True: 0}  # the worst first; 2: wrong usage or file
ANSWERS: dict[bool | None, str] = {True: "sound", False: "WRONG", None: "cannot tell"}  # `Verdict.ok` in words


class WrongKL(KlampError, ValueError):
    """`Verdict.raise_if_wrong` found something wrong."""


@dataclass(frozen=True, kw_only=True)
class CheckFinding:
    """One fact about a loss or about a pair of tokenizers."""

    code: str  # a short name that does not change between versions, such as `kl-forward`
    level: Level  # `cannot tell`: a question that stayed open
    what: str  # the fact, in one sentence
    evidence: Mapping[str, Any] = field(default_factory=dict[str, Any])  # the numbers behind it
    fix: str = ""  # what to change


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Is the KL right? Covers only the inputs that were passed.

    `print(verdict)` shows it, `to_json` returns it as text, `raise_if_wrong` turns it into an error.
    """

    ok: bool | None  # True: nothing wrong in what was looked at. False: something is wrong. None: cannot tell.
    findings: tuple[CheckFinding, ...] = ()  # the worst first
    summary: str = ""  # what was looked at: tokens, completions, data type, size of the log-ratio
    found: str = ""  # the loss that explains the gradient
    kl: str | None = None  # its gradient: reverse, forward, zero, away, swapped, sign, step, neither, none, unknown
    beta: float | None = None  # coefficient of the KL relative to the policy loss; None: not known
    surrogate: str | None = None  # the policy loss: plain policy loss, ratio, ppo_clip(...), ...; None: not known
    mean: str | None = None  # both terms are a mean over: token or sequence; `A; KL B` if they differ; None: not known
    beta_seen: float | None = None  # the smallest beta that would have stood out of the rounding
    not_checked: Mapping[str, str] = field(default_factory=dict[str, str])  # what was not -> the argument it needs

    @classmethod
    def of(cls, findings: Sequence[CheckFinding], **parts: Any) -> Verdict:
        """A verdict whose `ok` follows from its findings."""
        ordered = tuple(sorted(findings, key=lambda x: LEVELS.index(x.level)))
        levels = {finding.level for finding in ordered}
        ok = False if "wrong" in levels else None if "cannot tell" in levels else True
        return cls(ok=ok, findings=ordered, **parts)

    def with_findings(self, findings: Iterable[CheckFinding]) -> Verdict:
        """The verdict with further findings."""
        parts = {name: x for name, x in vars(self).items() if name not in ("ok", "findings")}
        return Verdict.of([*self.findings, *findings], **parts)

    @property
    def exit_code(self) -> int:
        """0 sound, 1 wrong, 3 cannot tell."""
        return EXIT_CODES[self.ok]

    def codes(self, level: Level | None = None) -> tuple[str, ...]:
        """The codes of all findings, or of the findings of one level."""
        return tuple(x.code for x in self.findings if level in (None, x.level))

    def raise_if_wrong(self) -> Verdict:
        """Returns the verdict itself if nothing is wrong.

        Raises:
            WrongKL: with the whole verdict as its text.
        """
        if self.ok is False:
            raise WrongKL(str(self))
        return self

    def to_json(self) -> str:
        """The verdict as JSON, with its `schema`."""
        return json.dumps({"schema": SCHEMA, **asdict(self)}, default=str, allow_nan=False, indent=1)

    def __str__(self) -> str:
        lines = [f"klamp check: {ANSWERS[self.ok]}" + f"; {self.summary}" * bool(self.summary)]
        lines += [f"  found    {self.found}"] * bool(self.found)
        for finding in self.findings:
            label = finding.level if finding.level in ("warning", "note") else finding.level.upper()
            lines.append(f"  {label:8s} {finding.what}")
            lines += [f"           fix: {finding.fix}"] * bool(finding.fix)
        if self.not_checked:
            open_points = (f"{what} ({how})" if how else what for what, how in self.not_checked.items())
            lines.append(f"  not checked: {', '.join(open_points)}")
        return "\n".join(lines)


@cache
def findings_table() -> dict[str, dict[str, str]]:
    """Code -> level, sentence (what) and way out (fix)."""
    import yaml

    return yaml.safe_load((Path(__file__).parent / "findings.yaml").read_text(encoding="utf-8"))


def finding(code: str, level: Level | None = None, **evidence: Any) -> CheckFinding:
    """The finding of this code, at its own level or another; the evidence fills its sentence and its fix."""
    row: Any = findings_table()[code]
    what, fix = (row.get(part, "").format_map(evidence) for part in ("what", "fix"))
    return CheckFinding(code=code, level=level or row["level"], what=what, evidence=evidence, fix=fix)
