"""The most important numbers of a run: where it ended, and where it began."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from klamp.doctor.history import bounded
from klamp.names import KL_NAMES, best_kl
from klamp.report.charts import key
from klamp.report.run import ReportRun, ScoreFormat, skills_of, slots_of
from klamp.report.text import MINUS, MISSING, Html, element, join, short

WINDOW = 5
SKILLS = 6
COLUMNS = 5
SEQUENCE = {f"{name}_sequence": estimator for name, estimator in KL_NAMES.items()}
AFTER, AFTER_SEQUENCE = "KL from the start (exact)", "KL from the start per completion (exact)"
"""The KL that was measured after training."""


@dataclass(frozen=True, kw_only=True)
class Headline:
    """One of the most important numbers of a run."""

    label: str
    value: str
    unit: str = ""
    detail: str = ""
    """Where the number was at the beginning, or how high it was."""
    over: str = ""
    """What the number is the mean of, or where it is from."""


def headlines(run: ReportRun, skills: Sequence[str], scores: ScoreFormat) -> list[Headline]:
    """The most important numbers of a run, as far as its record has them."""
    numbers = [
        _over_steps(run, {"reward": ""}, "Reward", ""),
        *(_skill(run, name, scores) for name in skills),
        _over_steps(run, KL_NAMES, "KL", "nats/token"),
        _over_steps(run, SEQUENCE, "KL per completion", "nats"),
        _after(run.outcome.get("kl/reverse"), AFTER, "nats/token"),
        _after(run.outcome.get("kl/reverse_sequence"), AFTER_SEQUENCE, "nats"),
        _over_steps(run, {"teacher/kl": ""}, "Divergence from the teacher", "nats/token"),
        _over_steps(run, {"length/mean": ""}, "Length", "tokens"),
        _over_steps(run, {"policy/entropy": ""}, "Entropy", "nats/token"),
        _over_steps(run, {"beta": ""}, "beta", "reward/nat"),
        _over_steps(run, {"teacher/coef": ""}, "teacher_coef", "reward/nat"),
    ]
    return [headline for headline in numbers if headline is not None]


def _over_steps(run: ReportRun, names: Mapping[str, str], label: str, unit: str) -> Headline | None:
    """The number of the first of these metrics that the run logged: metric -> what to add to the label."""
    if not (name := best_kl(run.history.names, names)):
        return None
    curve = run.curve(name)
    first, last, over = ends(curve)
    if names[name]:
        label = f"{label} ({names[name]})"
        at = max((step for step in curve if not math.isnan(curve[step])), key=lambda step: curve[step], default=None)
        detail = "" if at is None else f"highest {short(curve[at])} at step {short(at, digits=9)}"
    else:
        constant = all(value == first for value in curve.values())
        detail = "" if len(curve) == 1 else "constant" if constant else f"from {short(first)}"
    return Headline(label=label, value=short(last), unit=unit, detail=detail, over=over)


def ends(curve: Mapping[float, float]) -> tuple[float, float, str]:
    """The first value; the last one, a mean over up to five finite values; and what it is the mean of, in words."""
    values = list(curve.values())
    tail = values[-max(1, min(WINDOW, len(values) // 2)) :]
    finite = [value for value in tail if math.isfinite(value)]
    left_out = f", {len(tail) - len(finite)} not finite" if 0 < len(finite) < len(tail) else ""
    over = "last logged value" if len(tail) == 1 else f"mean of last {len(tail)} logged values{left_out}"
    return values[0], fmean(map(bounded, finite)) if finite else values[-1], over


def _after(value: float | None, label: str, unit: str) -> Headline | None:
    if value is None:
        return None
    over, detail = "after training (outcome.json)", "on held-out prompts"
    return Headline(label=label, value=short(value), unit=unit, detail=detail, over=over)


def _skill(run: ReportRun, name: str, scores: ScoreFormat) -> Headline | None:
    curve = run.curve(f"eval/{name}")
    if not curve:
        return None
    values, last = list(curve.values()), short([*curve][-1], digits=9)
    trained = run.history.settings.rl_skill
    role = "" if trained is None else (", trained" if name == trained else ", not trained")
    before, after = values[0], values[-1]
    detail = "not evaluated later" if len(values) == 1 else "as at the first evaluation"
    if round(after - before, 6):
        detail = f"from {scores.write(before)} ({scores.change(before, after)})"
    return Headline(
        label=f"{name}{role}",
        value=scores.write(after),
        unit=scores.unit,
        detail=detail,
        over=f"evaluation after step {last}",
    )


def result(run: ReportRun) -> str:
    """What a run achieved: the change of the trained skill, else of the reward; the KL for it; what was forgotten."""
    kl, name = run.outcome.get("kl/reverse_sequence"), best_kl(run.history.names, SEQUENCE)
    kl = ends(run.curve(name))[1] if kl is None and name else kl
    cost = "" if kl is None else f" for {short(kl, digits=2)} nats"
    scores, trained = ScoreFormat.of([run]), run.history.settings.rl_skill or ""
    curves = {skill: [*run.curve(f"eval/{skill}").values()] for skill in skills_of([run])}
    changes = {skill: scores.change(curve[0], curve[-1]) for skill, curve in curves.items() if len(curve) > 1}
    gain = changes.pop(trained, None)
    if gain is None:
        reward = run.curve("reward")
        return "reward {} to {}".format(*map(short, ends(reward)[:2])) + cost if reward else ""
    lost = [f"{skill} {x}" for skill, x in changes.items() if x[0] == MINUS and x.strip(f"{MINUS}0.")]
    rest = f", forgotten: {', '.join(lost)}" if lost else ", nothing forgotten" if changes else ""
    return f"{trained} {gain}{cost}{rest}"


def tiles(run: ReportRun) -> Html:
    """The numbers of one run, as boxes side by side."""
    numbers = headlines(run, skills_of([run])[:SKILLS], ScoreFormat.of([run]))
    return element("dl", *(_tile(headline) for headline in numbers), class_="tiles")


def _tile(headline: Headline) -> Html:
    return element(
        "div",
        element("dt", headline.label),
        element(
            "dd",
            element("span", headline.value, class_="big"),
            Html(" "),
            element("span", headline.unit, class_="unit"),
            class_="number",
        ),
        element("dd", headline.over or Html("&nbsp;"), class_="detail"),
        element("dd", headline.detail or Html("&nbsp;"), class_="detail"),
        class_="tile",
    )


def side_by_side(runs: Sequence[ReportRun]) -> tuple[list[str], list[list[str]]]:
    """The heading and rows of a table of several runs, the KL first: a few runs are its columns, many its rows.

    A KL that was measured after training comes before the steps' KL: runs without logged KL have it, too.
    """
    skills = skills_of(runs)[:SKILLS]
    scores = ScoreFormat.of(runs)
    by_run = [{numbers.label: numbers for numbers in headlines(run, skills, scores)} for run in runs]
    labels = list(dict.fromkeys(label for numbers in by_run for label in numbers))
    labels.sort(key=lambda label: (label not in (AFTER, AFTER_SEQUENCE), not label.startswith(("KL", "Divergence"))))
    if len(runs) > COLUMNS:  # one column more would not fit on a page
        labels = [label for label in labels if label != AFTER_SEQUENCE]
    units = {label: next(numbers[label].unit for numbers in by_run if label in numbers) for label in labels}
    names = [f"{label}, {units[label]}" if units[label] else label for label in labels]
    table: list[list[str]] = [["run", "alarms", *names]]
    for run, numbers, slot in zip(runs, by_run, slots_of(runs), strict=True):
        look = key(f"curve s{slot % 8} d{slot % 5}")
        name = join([look, Html(" "), element("b", run.name), element("small", f"{run.path}, {run.history.source}")])
        blind = element("small", "the KL was not looked at") if run.diagnosis.blind else ""
        alarms = join([str(len(run.diagnosis.failed())), blind])
        table.append([name, alarms, *(_both(numbers.get(label)) for label in labels)])
    if len(runs) <= COLUMNS:
        table = [list(row) for row in zip(*table, strict=True)]
    return table[0], table[1:]


def _both(headline: Headline | None) -> Html:
    return join([element("b", headline.value), element("small", headline.detail)]) if headline else Html(MISSING)
