"""Examines a run's history with every alarm."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from klamp.diagnostics.alarm import Alarm, Evidence
from klamp.diagnostics.alarms import ALARMS
from klamp.diagnostics.history import History


@dataclass(frozen=True, kw_only=True)
class Finding:
    """An alarm that rose in a run: when, and what was seen."""

    alarm: Alarm
    """The alarm that rose."""
    first_step: int
    """The step after which it rose."""
    last_step: int
    """The latest step in which it was still there."""
    steps: int
    """The number of steps in which it was there."""
    evidence: Evidence
    """What was seen when it rose."""

    @property
    def in_a_line(self) -> str:
        """The step, the name, what was seen, and the likeliest cause."""
        likely = "".join(f"; likely {cause}" for cause in self.evidence.causes[:1])
        name, text = self.alarm.name, self.alarm.text
        return f"alarm after step {self.first_step}: {name}: {text} ({self.evidence.text}{likely})"

    @property
    def record(self) -> dict[str, Any]:
        """The finding as a line of a run's `alarms.jsonl`."""
        return {"step": self.first_step, **self.plain()}

    def plain(self) -> dict[str, Any]:
        """The finding as plain data for JSON."""
        return {
            "name": self.alarm.name,
            "level": self.alarm.level,
            "text": self.alarm.text,
            "first_step": self.first_step,
            "last_step": self.last_step,
            "steps": self.steps,
            "evidence": self.evidence.text,
            "causes": list(self.evidence.causes),
            "means": self.alarm.means,
            "next_step": self.alarm.next_step,
            "tokens": [asdict(token) for token in self.evidence.tokens],
        }


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Everything that the alarms found in a run."""

    history: History
    """The run that was examined."""
    findings: Sequence[Finding]
    """Alarms first, then notes, each by the step in which it rose."""
    unchecked: dict[str, str]
    """Alarm that could not be checked -> what the record lacks for it."""

    def failed(self, names: Iterable[str] = ()) -> list[str]:
        """The names of the findings that make a check fail.

        Args:
            names: the alarms and notes that count; none: every alarm, no note.
        """
        wanted = set(names)
        found = [finding.alarm for finding in self.findings]
        return [alarm.name for alarm in found if (alarm.name in wanted if wanted else alarm.level == "alarm")]


def examine(history: History) -> Diagnosis:
    """Run every alarm over a run, step by step, as if it happened again.

    Args:
        history: the run; as much of it as the record holds.

    Raises:
        DataError: completions that are still in their files cannot be read.
    """
    raised: dict[str, dict[int, Evidence]] = {}
    for view in history.replay():
        for alarm in ALARMS.values():
            evidence = alarm.rule(view)
            if evidence is not None:
                raised.setdefault(alarm.name, {}).setdefault(view.step, evidence)
    lacks = {name: missing(alarm, history) for name, alarm in ALARMS.items()}
    findings = [
        Finding(
            alarm=ALARMS[name],
            first_step=min(seen),
            last_step=max(seen),
            steps=len(seen),
            evidence=seen[min(seen)],
        )
        for name, seen in raised.items()
        if not lacks[name]
    ]
    findings.sort(key=lambda finding: (finding.alarm.level != "alarm", finding.first_step))
    return Diagnosis(history=history, findings=findings, unchecked={name: text for name, text in lacks.items() if text})


def missing(alarm: Alarm, history: History) -> str:
    """What a record lacks for an alarm, in words; "" where it lacks nothing."""
    return ", ".join(" or ".join(need.split("|")) for need in lacking(alarm, history))


def lacking(alarm: Alarm, history: History) -> list[str]:
    """The needs of an alarm that a record does not meet; see `Alarm.needs`."""
    return [need for need in alarm.needs if not _has(history, need)]


def _has(history: History, need: str) -> bool:
    names = history.names
    for part in need.split("|"):
        if part in names:
            return True
        if part == "completions" and history.completions:
            return True
        if part == "sampler_logprobs" and history.tells_sampler:
            return True
        if part == "evaluations" and len(history.evaluations) > 1:
            return True
        if part.startswith("settings.") and getattr(history.settings, part.removeprefix("settings.")) is not None:
            return True
    return False
