"""What is true of runs, by their own rows, tokens and configurations, to hold the sentences of a report against."""

from __future__ import annotations

import math

from tests.report.worlds import SMALL, World, worlds

from klamp.diagnostics.alarms import ALARMS
from klamp.report.curves import PLANS
from klamp.report.run import ReportRun
from klamp.report.text import short

KL = ("kl/exact", "kl/k3", "kl/k1")
SEQUENCE = ("kl/exact_sequence", "kl/k3_sequence", "kl/k1_sequence")
MEASURED = ("reward", "teacher/kl", "length/mean", "policy/entropy", "beta", "teacher/coef")
"""Metrics that have a tile each; of the KLs the best has one."""


LABELLED = {
    "Reward": "reward",
    "Length": "length/mean",
    "Entropy": "policy/entropy",
    "beta": "beta",
    "Divergence from the teacher": "teacher/kl",
    **{f"KL ({name[3:]})": name for name in KL},
    **{f"KL per completion ({name[3:-9]})": name for name in SEQUENCE},
}
"""What a headline number is called -> its metric."""


def mean_of(run: ReportRun, name: str) -> str:
    """The mean of a metric's last values that are finite, as it is written."""
    values = [row.metrics[name] for row in run.history.rows if name in row.metrics]
    last = [value for value in values[-max(1, min(5, len(values) // 2)) :] if math.isfinite(value)]
    return short(sum(last) / len(last)) if last else short(values[-1])


def first_of(names: tuple[str, ...], world: World) -> list[dict[int, float]]:
    """Of each run the curve of the first of these metrics that it has."""
    each = world.values(*names)
    runs = [each[i : i + len(names)] for i in range(0, len(each), len(names))]
    return [curve for curves in runs for curve in [next(filter(None, curves), {})] if curve]


def tiles(world: World) -> list[dict[int, float]]:
    """The curves that the headline numbers are of."""
    return [curve for names in (*((name,) for name in MEASURED), KL, SEQUENCE) for curve in first_of(names, world)]


def lasts(world: World) -> list[list[float]]:
    """The values that the headline numbers are means of: the last half of a curve, five at most."""
    return [[*curve.values()][-max(1, min(5, len(curve) // 2)) :] for curve in tiles(world)]


def lost_of_lasts(world: World) -> list[tuple[int, int]]:
    """(values, those that are not finite) of each, where it has some of both."""
    each = [(len(values), sum(not math.isfinite(value) for value in values)) for values in lasts(world)]
    return [(total, lost) for total, lost in each if 0 < lost < total]


def mean_as_said(world: World, few: str, lost: str) -> bool:
    """Whether so many values are in a mean, and it is said which are not."""
    if lost:
        return (int(few), int(lost.split()[1])) in lost_of_lasts(world)
    return any(len(values) == int(few) for values in lasts(world))


def constant(world: World) -> bool:
    """Whether some metric with a tile has the same value in each of several steps."""
    curves = [curve for name in MEASURED for curve in first_of((name,), world)]
    return any(len(curve) > 1 and all(x == next(iter(curve.values())) for x in curve.values()) for curve in curves)


def highest(world: World, value: str, step: str) -> bool:
    """Whether a KL is as high as that in that step, and nowhere higher."""
    for curve in (*first_of(KL, world), *first_of(SEQUENCE, world)):
        top = max((x for x in curve.values() if not math.isnan(x)), default=math.nan)
        if curve.get(int(step)) == top and value == short(top):
            return True
    return False


def has_a_kl(world: World) -> bool:
    curves = (*first_of(KL, world), *first_of(SEQUENCE, world))
    return any(not math.isnan(value) for curve in curves for value in curve.values())


def in_points(world: World) -> bool:
    """Whether scores are klamp's own and lie between 0 and 1."""
    scores = [score for *_, rows in world.skills() for _, score in rows]
    ours = all(run.history.source == "klamp run" for run in world.runs)
    return ours and all(0 <= score <= 1 for score in scores) and bool(scores or answers(world))


def shares(world: World) -> set[tuple[int, int]]:
    """In how many runs anything rose, and each alarm, of how many."""
    found = {name: {i for i, each, *_ in findings(world) if each == name} for _, name, *_ in findings(world)}
    return {(len(runs), len(world.runs)) for runs in (*found.values(), set[int]().union(*found.values()))}


def concerned(run: ReportRun) -> int:
    """How many alarms there are for a run: those of a teacher only where it has one."""
    taught = any(name.startswith("teacher/") for name in run.history.names)
    return sum(taught or "teacher" not in name for name in ALARMS)


def checked(world: World, some: str, every: str) -> bool:
    (run,) = world.runs
    return int(every) == concerned(run) and int(every) - int(some) == len(run.diagnosis.unchecked)


def unchecked(world: World, missing: str, asked: str, where: str) -> bool:
    names = where.removeprefix(" in ").split(", ") if where else [world.runs[0].name]
    found = {(len(run.diagnosis.unchecked), concerned(run)) for run in world.runs if run.name in names}
    return found == {(int(missing), int(asked))}


def judged(world: World, *, sound: bool) -> bool:
    """Whether no alarm rose, and the KL was looked at in each run."""
    seen = not blind(world) and not any(run.history.is_empty for run in world.runs)
    return not nothing(world) and not any(level == "alarm" for _, _, level, *_ in findings(world)) and seen is sound


def marked(world: World) -> bool:
    return any(level == "alarm" for _, _, level, *_ in findings(world))


def is_there(world: World, step: str, number: str, position: str) -> bool:
    """Whether a token that is blamed was written at that place."""
    steps = [run.history.completions.get(int(step), []) for run in world.runs]
    return any(len(each) >= int(number) and len(each[int(number) - 1].tokens) >= int(position) for each in steps)


def lost(world: World) -> list[int]:
    """How many values of a curve are not finite, where some are and some are not."""
    each = [(len(c), sum(not math.isfinite(x) for x in c.values())) for c in every_curve(world)]
    return [number for total, number in each if 0 < number < total]


def near(world: World) -> bool:
    return any(run.config.get("reference") == "sampler" for run in world.runs)


def several_anchors(world: World) -> bool:
    return near(world) or world.logs("teacher/kl", "teacher/kl.math")


def all_sampled(world: World) -> bool:
    """Whether each run measures what the alarm of the sampler looks at."""
    return all(not run.history.names.isdisjoint({"sampler/k1", "sampler/k3"}) for run in world.runs)


def alarm_of_the_sampler() -> float:
    return next(limit.value for limit in ALARMS["sampler-mismatch"].limits if "k1 or k3" in limit.text)


def drawn(world: World) -> bool:
    """Whether some chart has a finite value."""
    curves = [*every_curve(world), *world.values("teacher/kl")]
    return any(math.isfinite(x) for c in curves for x in c.values()) or bool(world.skills())


def nowhere_finite(world: World) -> bool:
    return any(not any(map(math.isfinite, curve.values())) for curve in every_curve(world))


def changes(world: World) -> list[tuple[int, str]]:
    return [each for run in world.runs for each in run.history.changes.items()]


def small(world: World) -> bool:
    return any(world is worlds()[name] for name in SMALL)


def apart(world: World) -> bool:
    """Whether policy and the first other model that scored a trained token differ there."""
    for each in world.completions():
        other = next((x for x in (each.ref, each.teacher, each.sampler) if x is not None), None)
        rows = zip(each.policy, other, each.is_trained, strict=True) if other is not None else ()
        if any(on and p != o for p, o, on in rows):
            return True
    return False


def shaded(world: World, who: str) -> bool:
    return anchored(world, {"reference": "ref"}.get(who, who))


def choice(world: World) -> bool:
    """Whether the tokens can be compared with more than one model."""
    kinds = ("ref", "teacher", "sampler")
    return sum(any(getattr(each, kind) is not None for each in world.completions()) for kind in kinds) > 1


def long_prompts(world: World) -> bool:
    return any(len(each.prompt) > 2000 for each in world.completions())


def every_curve(world: World) -> list[dict[int, float]]:
    """Each curve of the charts over steps of metrics."""
    return [each for plan in PLANS for each in world.values(*plan.curves) if each]


def findings(world: World) -> list[tuple[int, str, str, int, int]]:
    """(run, alarm, level, first step, steps) of each."""
    every = [(i, each) for i, run in enumerate(world.runs) for each in run.diagnosis.findings]
    return [(i, each.alarm.name, each.alarm.level, each.first_step, each.steps) for i, each in every]


def blind(world: World) -> list[str]:
    """The runs that may have a KL of which none was logged."""
    kls = {*KL, *SEQUENCE, "teacher/kl"}
    rows = {run.name: [row.metrics for row in run.history.rows] for run in world.runs}
    beta = {run.name: (rows[run.name] or [{}])[-1].get("beta", run.history.settings.beta) for run in world.runs}
    return [name for name, seen in rows.items() if beta[name] != 0 and not any(kls & row.keys() for row in seen)]


def named(text: str, names: list[str], world: World) -> bool:
    return text == ("" if world.one else f" in {', '.join(names)}")


def quiet(world: World) -> list[str]:
    rose = {i for i, *_ in findings(world)}
    return [run.name for i, run in enumerate(world.runs) if i not in rose and not run.history.is_empty]


def groups(world: World) -> dict[str, int]:
    names = [run.group for run in world.runs if run.group]
    return {name: names.count(name) for name in names if names.count(name) > 1}


def in_order(world: World, label: str, *numbers: str) -> bool:
    """Whether the least and the highest of a curve in words are, and the highest is where it is said to be."""
    first, begin, last, end, low, high, at = (number.replace("−", "-").split()[-1] for number in numbers)
    return float(low) <= min(float(first), float(last)) <= max(float(first), float(last)) <= float(high) and (
        float(begin) <= float(at) <= float(end)
    )


def answers(world: World, who: str = "policy") -> list[int]:
    return [each.step for run in world.runs for each in run.history.answers if each.who == who]


def anchored(world: World, *names: str) -> bool:
    """Whether completions have log-probabilities of one of these and of nobody whose name comes before."""
    order = ("ref", "teacher", "sampler")
    first = [next((name for name in order if getattr(each, name) is not None), None) for each in world.completions()]
    return any(name in names for name in first)


def cut(world: World) -> bool:
    return any(len(each.tokens) > 3000 for each in world.completions())


def twins(world: World) -> int:
    """How many completions are the same as one before them in their run and step."""
    each = [
        (i, c.step, tuple(c.policy), c.ref and tuple(c.ref))
        for i, run in enumerate(world.runs)
        for step in run.history.completions.values()
        for c in step
    ]
    return len(each) - len(set(each))


def config(world: World, name: str) -> bool:
    return any(run.config.get(name) is not None for run in world.runs)


def nothing(world: World) -> bool:
    return all(run.diagnosis.empty for run in world.runs)


def blamed(world: World) -> bool:
    return any(each.evidence.tokens for run in world.runs for each in run.diagnosis.findings)
