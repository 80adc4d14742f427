"""Examines a run with every alarm, afterwards, or during the run: each alarm is then reported once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import Any

from klamp.doctor.alarm import KL, Alarm, Evidence
from klamp.doctor.alarms import ALARMS, check_names
from klamp.doctor.alarms_kl import is_over, is_reset
from klamp.doctor.alarms_tokens import TO_TEACHER, teacher_alone
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
    checked: Sequence[str]
    """The alarms that could have risen."""
    unchecked: dict[str, str]
    """Alarm that could not have risen, though it concerns the run -> what the record lacks for it."""

    @property
    def concerned(self) -> int:
        """The number of alarms that concern the run: a teacher's only if it has one."""
        return len(self.checked) + len(self.unchecked)

    @property
    def blind(self) -> str:
        """Why the doctor could not check the KL of a run that may have one; empty if it checked."""
        declared_absent = self.history.latest.get("beta", self.history.settings.beta) == 0
        about_teacher = TO_TEACHER in self.history.names and "teacher-inert" in self.checked
        if declared_absent or about_teacher or any(KL in ALARMS[name].needs for name in self.checked):
            return ""
        little = "the record has too little KL data: too few steps, or only sums over completions of unknown length"
        return little if self.history.measures_kl else "no KL to the reference was found in the record"

    @property
    def empty(self) -> bool:
        """Whether nothing in the record could be checked."""
        return not self.findings and (self.history.is_empty or not self.checked)

    def failed(self, names: Iterable[str] = ()) -> list[str]:
        """The names of the findings that make a check fail: of these names, or without names of all alarms."""
        chosen, alarms = set(names), [finding.alarm for finding in self.findings]
        return [alarm.name for alarm in alarms if (alarm.name in chosen if chosen else alarm.level == "alarm")]


def examine(history: History) -> Diagnosis:
    """Run every alarm over a run's record, step by step, as if the run happened again."""
    if is_reset(history):
        history.settings = replace(history.settings, moving_reference=True)
    evidences: dict[str, dict[int, Evidence]] = {}
    for view in history.replay():
        for alarm, evidence in _rising(view):
            evidences.setdefault(alarm.name, {}).setdefault(view.step, evidence)
    contents = _contents(history)
    concerned = {x.name: x for x in _applicable(history) if not x.concerns or x.concerns in contents}
    gaps = {name: _gap(alarm, history, contents) for name, alarm in concerned.items()}
    findings = [_finding(ALARMS[name], by_step) for name, by_step in evidences.items() if gaps.get(name) == ""]
    findings = [_settled(history, finding) for finding in findings]
    findings.sort(key=lambda finding: (finding.alarm.level != "alarm", finding.first_step))
    unchecked = {name: gap for name, gap in gaps.items() if gap}
    checked = [name for name in concerned if not gaps[name]]
    return Diagnosis(history=history, findings=findings, checked=checked, unchecked=unchecked)


BY_DESIGN = ("kl-spike", "kl-far", "kl-growing", "kl-high")  # with a negative beta, which leaves the reference


def _applicable(history: History) -> list[Alarm]:
    """The alarms without those that a negative beta raises by design."""
    left_out = BY_DESIGN if history.goes_beyond else ()
    return [alarm for name, alarm in ALARMS.items() if name not in left_out]


def _rising(history: History) -> Iterator[tuple[Alarm, Evidence]]:
    for alarm in _applicable(history):
        if (evidence := alarm.rule(history)) is not None:
            yield alarm, evidence


def _finding(alarm: Alarm, by_step: Mapping[int, Evidence]) -> AlarmFinding:
    first, last = min(by_step), max(by_step)
    return AlarmFinding(alarm=alarm, first_step=first, last_step=last, steps=len(by_step), evidence=by_step[first])


def _settled(history: History, finding: AlarmFinding) -> AlarmFinding:
    """The finding, as a note where it is a single jump of the KL that the record shows to be over."""
    if finding.alarm.name != "kl-spike" or finding.steps > 1 or not is_over(history, finding.first_step):
        return finding
    why = ["a few tokens of one batch: the KL was back within 3 steps, and the reward did not fall"]
    note = replace(finding.alarm, level="note")
    return replace(finding, alarm=note, evidence=replace(finding.evidence, causes=why))


def _gap(alarm: Alarm, history: History, contents: set[str]) -> str:
    """What a record lacks for an alarm to rise, in words; empty if it could have risen."""
    parts = {need: [part.split("+") for part in need.split("|")] for need in alarm.needs}
    absent = [need for need in alarm.needs if not any(contents.issuperset(part) for part in parts[need])]
    if absent:
        return ", ".join(need.replace("|", " or ").replace("+", " with ") for need in absent)
    metrics = [need for need in alarm.needs if not any(contents - history.names >= {*part} for part in parts[need])]
    steps = sum(all(any(row.metrics.keys() >= {*p} for p in parts[need]) for need in metrics) for row in history.rows)
    return "" if steps >= alarm.steps or not metrics else f"{alarm.steps} steps with its metrics, not {steps}"


CONTENTS: Mapping[str, Callable[[History], bool]] = {
    "completions": lambda run: bool(run.completions),
    "sampler_logprobs": lambda run: any(x.sampled is not None for x in chain(*run.completions.values())),
    "loss masks": lambda run: any(x.trained is not None for x in chain(*run.completions.values())),
    "advantages": lambda run: any(x.advantage is not None for x in chain(*run.completions.values())),
    "evaluations": lambda run: len(run.evaluations) > 1,
    "the first step": lambda run: bool(run.rows) and run.rows[0].step <= 1 and not run.settings.steps_counted,
    "a teacher": lambda run: run.settings.teacher_coef is not None or any(x.startswith("teacher/") for x in run.names),
    "a teacher alone": teacher_alone,
    "a target": lambda run: "kl/target" in run.names,
    "a KL in the loss": lambda run: run.settings.kl_in_loss,
    "a chosen reference": lambda run: run.settings.other_reference,
    "the start as reference": lambda run: not run.settings.other_reference,
}
"""What a record may hold besides metrics and settings -> whether it does."""


def _contents(history: History) -> set[str]:
    """What a record holds, in the words of `Alarm.needs` and `Alarm.concerns`."""
    settings = {f"settings.{name}" for name, value in asdict(history.settings).items() if value is not None}
    return history.names | settings | {name for name, holds in CONTENTS.items() if holds(history)}


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
        """The alarms that rise with the metrics of a step and were not reported yet."""
        self.keep(rows=[Row(step=step, metrics=metrics)])
        return list(self._look(step))

    def evaluation(self, step: int, scores: Mapping[str, float]) -> list[AlarmFinding]:
        """The alarms that rise with the scores of an evaluation and were not reported yet."""
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
