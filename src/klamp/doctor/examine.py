"""Examines a run with every alarm, afterwards or while it happens: then an alarm is told once, and may stop it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from klamp.doctor.alarm import Alarm, Evidence
from klamp.doctor.alarms import ALARMS, check_names
from klamp.doctor.alarms_kl import is_reset
from klamp.doctor.history import EARLY, Completion, History, Row, RunSettings


@dataclass(frozen=True, kw_only=True)
class AlarmFinding:
    """An alarm that rose in a run: when, and what was seen."""

    alarm: Alarm
    first_step: int
    last_step: int
    """The latest step in which it was still there."""
    steps: int
    evidence: Evidence

    @property
    def in_a_line(self) -> str:
        """The step, the name, what was seen, and the likeliest cause."""
        cause_text = "".join(f"; likely {cause}" for cause in self.evidence.causes[:1])
        start = f"alarm after step {self.first_step}: {self.alarm.name}: {self.alarm.text}"
        return f"{start} ({self.evidence.text}{cause_text})"

    @property
    def since(self) -> str:
        """The step in which it rose, and how many more have it, in words."""
        return f"step {self.first_step}" + (f", and {self.steps - 1} more" if self.steps > 1 else "")

    @property
    def record(self) -> dict[str, Any]:
        """The finding as a line of a run's `alarms.jsonl`, and in the doctor's JSON."""
        return {
            "step": self.first_step,
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
    findings: Sequence[AlarmFinding]
    """Alarms first, then notes, each by the step in which it rose."""
    unchecked: dict[str, str]
    """Alarm that could not be checked -> what the record lacks for it."""
    concerned: int = len(ALARMS)
    """Alarms that concern the run: those of a teacher only where it has one."""

    @property
    def blind(self) -> str:
        """Why nothing can be said of the KL of a run that may have one, in words; empty where it was looked at."""
        no_kl = self.history.latest.get("beta", self.history.settings.beta) == 0
        return "" if no_kl or self.history.measures_kl else "no KL to the reference was found in the record"

    @property
    def empty(self) -> bool:
        """Whether nothing in the record could be checked."""
        return not self.findings and (self.history.is_empty or len(self.unchecked) == self.concerned)

    def failed(self, names: Iterable[str] = ()) -> list[str]:
        """The names of the findings that make a check fail: of these names, or without names of all alarms."""
        chosen, alarms = set(names), [finding.alarm for finding in self.findings]
        return [alarm.name for alarm in alarms if (alarm.name in chosen if chosen else alarm.level == "alarm")]


def examine(history: History) -> Diagnosis:
    """Run every alarm over a run, or what the record holds of it, step by step, as if it happened again."""
    if is_reset(history):
        history.settings = replace(history.settings, moving_reference=True)
    evidences: dict[str, dict[int, Evidence]] = {}
    for view in history.replay():
        for alarm, evidence in _rising(view):
            evidences.setdefault(alarm.name, {}).setdefault(view.step, evidence)
    contents = _held(history)
    gaps = {
        name: ", ".join(" or ".join(need.split("|")) for need in alarm.needs if contents.isdisjoint(need.split("|")))
        for name, alarm in ALARMS.items()
    }
    findings = [_finding(ALARMS[name], by_step) for name, by_step in evidences.items() if not gaps[name]]
    findings.sort(key=lambda finding: (finding.alarm.level != "alarm", finding.first_step))
    has_teacher = any(name.startswith(TEACHER) for name in contents)
    concerned = [name for name, alarm in ALARMS.items() if has_teacher or not alarm.needs[0].startswith(TEACHER)]
    unchecked = {name: gaps[name] for name in concerned if gaps[name]}
    return Diagnosis(history=history, findings=findings, unchecked=unchecked, concerned=len(concerned))


def _rising(history: History) -> Iterator[tuple[Alarm, Evidence]]:
    for alarm in ALARMS.values():
        if (evidence := alarm.rule(history)) is not None:
            yield alarm, evidence


def _finding(alarm: Alarm, by_step: Mapping[int, Evidence]) -> AlarmFinding:
    first = min(by_step)
    return AlarmFinding(
        alarm=alarm, first_step=first, last_step=max(by_step), steps=len(by_step), evidence=by_step[first]
    )


TEACHER = "teacher/"
"""How the metrics of a teacher begin; an alarm of it is not missed where there is none."""


def _held(history: History) -> set[str]:
    """What a record holds, in the words of `Alarm.needs`."""
    contents = history.names | {
        f"settings.{name}" for name, value in asdict(history.settings).items() if value is not None
    }
    contents |= {"completions"} if history.completions else set()
    contents |= {"sampler_logprobs"} if history.tells_sampler else set()
    return contents | ({"evaluations"} if len(history.evaluations) > 1 else set())


LATE = 150
"""Steps at the end of a run (at its beginning `EARLY`) that are kept: no rule looks at more."""


class AlarmWatch:
    """A run under way: `reported` are the alarms from before a checkpoint, those in `stop_on` end the run."""

    def __init__(self, settings: RunSettings, *, reported: Collection[str] = (), stop_on: Sequence[str] = ()) -> None:
        check_names(stop_on)
        self.history = History(settings=settings)
        self.reported, self.stop_on = set(reported), tuple(stop_on)
        self.stopped_by: AlarmFinding | None = None

    def keep(
        self, *, rows: Iterable[Row] = (), evaluations: Iterable[Row] = (), completions: Iterable[Completion] = ()
    ) -> None:
        """Add what came before a checkpoint, or the completions before their step's metrics, and examine nothing."""
        self.history.rows.extend(rows)
        del self.history.rows[EARLY:-LATE]
        self.history.evaluations.extend(evaluations)
        self.history.add_completions(list(completions))
        self.history.forget_completions()

    def step(self, step: int, metrics: Mapping[str, float]) -> list[AlarmFinding]:
        """The alarms that rise with the metrics of a step and were not told before."""
        self.keep(rows=[Row(step=step, metrics=metrics)])
        return list(self._look(step))

    def evaluation(self, step: int, scores: Mapping[str, float]) -> list[AlarmFinding]:
        """The alarms that rise with the scores of an evaluation and were not told before."""
        self.keep(evaluations=[Row(step=step, metrics=scores)])
        return list(self._look(step))

    def _look(self, step: int) -> Iterator[AlarmFinding]:
        for alarm, evidence in _rising(self.history):
            finding = _finding(alarm, {step: evidence})
            if alarm.name in self.stop_on and self.stopped_by is None:
                self.stopped_by = finding
            if alarm.name not in self.reported:
                self.reported.add(alarm.name)
                yield finding
