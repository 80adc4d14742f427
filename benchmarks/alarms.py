"""How often an alarm rises by chance: drawn runs that are sound, with few samples, and twins with one thing wrong."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.records import Benchmark, table
from klamp.doctor.alarms import ALARMS
from klamp.doctor.examine import examine
from klamp.doctor.history import History, Row, RunSettings

Floats, Ints = NDArray[np.float64], NDArray[np.int64]

SOUND, QUICK_SOUND = 400, 20
"""Runs that are sound: a quarter each of klamp's, of another trainer's, of a distillation, of a chosen reference."""
TWINS, QUICK_TWINS = 10, 2
"""Runs per thing that is wrong."""
COMPLETIONS, GROUPS, STEPS = (4, 8, 16, 32, 64), (2, 4, 8), (40, 100, 200)
LENGTHS = (1, 8, 40, 250)
"""Tokens of a completion, on average; the lengths are log-normal, up to 2000."""
KLS, SAMPLERS = (0.003, 0.02, 0.1, 0.3), (2e-5, 5e-4, 2e-3)
"""Nats per token: of the policy at the end, and of sampler and trainer."""
SOLVED = ((0.05, 0.3), (0.3, 0.7), (0.5, 0.9), (0.8, 0.95))
"""Share of right answers at the start and at the end."""
CUT, REPEATED, LOOPS = (0.0, 0.02, 0.1, 0.15), (0.05, 0.2, 0.3), (0.0, 0.01, 0.03)
"""Shares: completions at the limit, tokens that repeat, completions in a loop."""
EQUAL = 0.9
"""Share of groups with equal rewards up to which a run still learns."""

WRONG: Mapping[str, tuple[str, str]] = {
    "from the middle on the KL is at 1 nat per token": ("spike", "kl-spike"),
    "the KL goes to 2.5 nats per token": ("far", "kl-far"),
    "3 % of the tokens are padding that the reference finds 150 times likelier": ("padding", "k3-far-above-k1"),
    "the sampler's weights are 0.05 nats per token away": ("stale", "sampler-mismatch"),
    "the sampler's weights are 0.3 nats per token away": ("far stale", "sampler-mismatch"),
    "60 % of the completions are cut, from a quarter on": ("cut", "truncated"),
    "nearly all completions fall into a loop": ("loops", "repetition"),
    "rewards are equal everywhere from a quarter on": ("equal", "saturated"),
    "the chosen reference is 0.2 nats per token away": ("other", "reference-differs"),
    "beta grows a hundredfold, until the KL costs 10 times the reward": ("runaway", "beta-runaway"),
    "30 % of the completions have no score of the teacher": ("unscored", "teacher-silent"),
    "the KL to the teacher does not fall": ("stays", "teacher-not-reached"),
}
"""What is wrong in a twin -> its short name, and the alarm that should rise."""


@dataclass(frozen=True)
class World:
    """What is true of a run, of which a few samples are seen."""

    kind: str
    completions: int
    group: int
    steps: int
    length: int
    kl: float
    sampler: float
    solved: tuple[float, float]
    cut: float
    repeated: float
    loops: float
    wrong: str


def drawn(rng: np.random.Generator, kind: str, wrong: str = "") -> World:
    """A world whose settings are drawn, each by itself."""
    pick = lambda values: values[rng.integers(len(values))]  # noqa: E731
    completions, length = int(pick(COMPLETIONS)), int(pick(LENGTHS))
    if wrong in ("far", "padding", "loops"):  # one token each is no repetition, and never far
        length = max(length, 8)
    while True:
        group, solved = int(pick([each for each in GROUPS if each <= completions])), pick(SOLVED)
        if _equal(solved[1], group) <= EQUAL:
            break
    return World(
        kind=kind,
        completions=completions,
        group=group,
        steps=int(pick([each for each in STEPS if kind != "distillation" or each > 40])),
        length=length,
        kl=max(pick(KLS), 2 * (solved[1] - solved[0]) ** 2 / length),  # Pinsker: a reward costs at least this
        sampler=pick(SAMPLERS),
        solved=solved,
        cut=pick(CUT),
        repeated=pick(REPEATED),
        loops=pick(LOOPS) if length > 1 else 0.0,
        wrong=wrong,
    )


SPREAD = 3.0
"""How alike the prompts of a run are: the two numbers of the Beta law of their shares of right answers sum to it."""


@cache
def _equal(solved: float, group: int) -> float:
    """The share of groups with equal rewards."""
    share = np.random.default_rng(0).beta(SPREAD * solved, SPREAD * (1 - solved), 20_000)
    return float(np.mean(share**group + (1 - share) ** group))


# --- tokens -----------------------------------------------------------------------------------------------------


def log_ratios(rng: np.random.Generator, scale: Floats) -> Floats:
    """Log-ratios of sampled tokens: two models differ in a logit by Student's t with 3 degrees of freedom.

    They are of two true distributions, so k1 and k3 both estimate their KL.
    """
    logit = rng.normal(1.5, 2.0, scale.shape)
    other = logit - scale * rng.standard_t(3, scale.shape)
    sign = np.where(rng.random(scale.shape) < 1 / (1 + np.exp(-logit)), 1.0, -1.0)
    return np.logaddexp(0.0, -sign * other) - np.logaddexp(0.0, -sign * logit)


SCALES = np.geomspace(1e-3, 60.0, 60)


@cache
def _kls() -> Floats:
    """The KL at each scale."""
    rng = np.random.default_rng(1)
    logit, t = rng.normal(1.5, 2.0, 100_000), rng.standard_t(3, 100_000)
    p, found = 1 / (1 + np.exp(-logit)), []
    for scale in SCALES:
        other = logit - scale * t
        to_one = np.logaddexp(0.0, -other) - np.logaddexp(0.0, -logit)
        to_none = np.logaddexp(0.0, other) - np.logaddexp(0.0, logit)
        found.append(np.mean(p * to_one + (1 - p) * to_none))
    return np.array(found)


def scale_of(kl: float) -> float:
    """The scale of the logits' differences at a KL."""
    return float(np.exp(np.interp(math.log(max(kl, 1e-9)), np.log(_kls()), np.log(SCALES)))) if kl > 0 else 0.0


def _k3(delta: Floats) -> Floats:
    return np.expm1(-delta) + delta


# --- a step -----------------------------------------------------------------------------------------------------


def step_of(rng: np.random.Generator, world: World, part: float) -> dict[str, float]:
    """The metrics of a step.

    Args:
        rng: the chance of the run.
        world: what is true of it.
        part: how much of the run is over, from 0 to 1.
    """
    n, wrong = world.completions, world.wrong
    looped = rng.random(n) < (0.9 * min(1.0, 2 * part) if wrong == "loops" else world.loops)
    cut = rng.random(n) < (0.6 if wrong == "cut" and part > 0.25 else world.cut)
    lengths = np.exp(rng.normal(math.log(world.length) - 0.18, 0.6, n)) if world.length > 1 else np.ones(n)
    lengths = np.where(looped, 8 * world.length, lengths).clip(1, 2000).astype(int)
    found = {"length/mean": float(lengths.mean()), "length/truncated": float(cut.mean())}
    if world.length > 1:
        share = np.where(looped, 0.95, rng.beta(4 * world.repeated, 4 * (1 - world.repeated), n))
        found["length/repeated"] = float(np.average(share, weights=lengths))
    if world.kind == "distillation":
        return found | _taught(rng, world, part, lengths)
    return found | _kl(rng, world, part, lengths) | _rewarded(rng, world, part, lengths)


def _kl(rng: np.random.Generator, world: World, part: float, lengths: Ints) -> dict[str, float]:
    level = world.kl * (1 - math.exp(-4 * part))
    if world.wrong == "spike":
        level = 1.0 if part >= 0.5 else min(level, 0.1)
    if world.wrong == "far":
        level = 2.5 * (1 - math.exp(-4 * part))
    if world.wrong == "other":
        level = 0.2
    elif world.kind == "other reference":
        level = max(level, 0.005)
    prompts = np.repeat(np.exp(rng.normal(-0.125, 0.5, world.completions // world.group)), world.group)
    delta = log_ratios(rng, np.repeat(scale_of(level) * prompts, lengths))
    if world.wrong == "padding":
        delta = np.where(rng.random(delta.shape) < 0.03, -5.0, delta)
    apart = {"stale": 0.05, "far stale": 0.3}.get(world.wrong, world.sampler)
    other = log_ratios(rng, np.full(delta.shape, scale_of(apart)))
    found = {
        "kl/k3": float(_k3(delta).mean()),
        "sampler/k1": float(other.mean()),
        "sampler/k3": float(_k3(other).mean()),
    }
    whole = np.add.reduceat(_k3(delta), np.cumsum(lengths) - lengths)
    price = min(0.05 * 100**part, 5.0) if world.wrong == "runaway" else 0.05
    if world.kind == "another trainer":
        return found
    found |= {"kl/k1": float(delta.mean()), "kl/k3_sequence": float(whole.mean())}
    return found | {"beta": price, "beta/price": price}


def _rewarded(rng: np.random.Generator, world: World, part: float, lengths: Ints) -> dict[str, float]:
    solved = world.solved[0] + part * (world.solved[1] - world.solved[0])
    share = np.repeat(rng.beta(SPREAD * solved, SPREAD * (1 - solved), world.completions // world.group), world.group)
    right = (rng.random(world.completions) < share).astype(float)
    if world.wrong == "equal" and part > 0.25:
        right = np.zeros_like(right)
    if world.wrong == "runaway":
        right = right * 0.1
    groups = right.reshape(-1, world.group)
    found = {"reward": float(right.mean()), "groups/saturated": float((groups.std(1) == 0).mean())}
    found["reward_std"] = float(groups.std(1, ddof=1).mean())
    return found | _correlated(right, lengths.astype(float), world.group)


def _correlated(right: Floats, other: Floats, group: int) -> dict[str, float]:
    a, b = (x.reshape(-1, group) - x.reshape(-1, group).mean(1, keepdims=True) for x in (right, other))
    size = float((a * a).sum() * (b * b).sum())
    return {"length/reward_correlation": float((a * b).sum() / math.sqrt(size))} if size > 1e-12 else {}


def _taught(rng: np.random.Generator, world: World, part: float, lengths: Ints) -> dict[str, float]:
    n, wrong = world.completions, world.wrong
    level = max(5 * world.kl, 0.1) * (1 if wrong == "stays" else 0.3 + 0.7 * math.exp(-4 * part))
    prompts = np.repeat(np.exp(rng.normal(-0.125, 0.5, n // world.group)), world.group)
    delta = log_ratios(rng, np.repeat(scale_of(level) * prompts, lengths))
    lost = rng.random(n) < (0.3 if wrong == "unscored" else world.loops)
    return {
        "teacher/kl": float(_k3(delta).mean()),
        "teacher/coef": 1.0,
        "teacher/unscored": float(lost @ lengths / lengths.sum()),
    }


def history_of(rng: np.random.Generator, world: World) -> History:
    """The record of a run."""
    settings = RunSettings(
        other_kernels=world.kind == "another trainer",
        other_reference=world.kind == "other reference",
        prompts=None if world.kind == "another trainer" else world.completions // world.group,
    )
    rows = [Row(step=i + 1, metrics=step_of(rng, world, i / (world.steps - 1))) for i in range(world.steps)]
    return History(settings=settings, rows=rows)


# --- the count --------------------------------------------------------------------------------------------------

KINDS = ("klamp", "another trainer", "distillation", "other reference")


def raised(rng: np.random.Generator, world: World) -> set[str]:
    """The alarms that rise in a run, without notes."""
    found = examine(history_of(rng, world)).findings
    return {each.alarm.name for each in found if each.alarm.level == "alarm"}


def run(quick: bool) -> dict[str, Any]:
    """Sound runs of each kind, then twins."""
    sound, twins = (QUICK_SOUND, QUICK_TWINS) if quick else (SOUND, TWINS)
    false: dict[str, Counter[str]] = {name: Counter() for name in (*KINDS, *map(str, COMPLETIONS))}
    runs: Counter[str] = Counter()
    for seed in range(sound):
        rng, kind = np.random.default_rng((0, seed)), KINDS[seed % len(KINDS)]
        world = drawn(rng, kind)
        found = raised(rng, world)
        for place in (kind, str(world.completions)):
            runs[place] += 1
            false[place].update(found)
    seen = {}
    for number, (name, (wrong, alarm)) in enumerate(WRONG.items()):
        kind = "distillation" if alarm.startswith("teacher") else "other reference" if wrong == "other" else "klamp"
        counts: Counter[str] = Counter()
        for seed in range(twins):
            rng = np.random.default_rng((1, number, seed))
            world = drawn(rng, kind, wrong)
            counts[str(world.completions)] += 1
            counts[f"{world.completions} found"] += alarm in raised(rng, world)
        seen[name] = {"alarm": alarm, **counts}
    return {"runs": dict(runs), "false": {name: dict(counts) for name, counts in false.items()}, "twins": seen}


def text(results: Mapping[str, Any]) -> str:
    """False alarms by kind and by size, then the twins that were found."""
    runs, false = results["runs"], results["false"]
    places = [place for place in (*KINDS, *map(str, COMPLETIONS)) if runs.get(place)]
    names = [name for name in ALARMS if any(name in false[place] for place in places)]
    rows = [("runs", *(runs[place] for place in places))]
    rows += [(f"`{name}`", *(false[place].get(name, 0) for place in places)) for name in names]
    sizes = [str(size) for size in COMPLETIONS]
    found = [
        (name, f"`{seen['alarm']}`", *(f"{seen.get(f'{size} found', 0)} of {seen.get(size, 0)}" for size in sizes))
        for name, seen in results["twins"].items()
    ]
    heading = [f"{place} completions" if place.isdigit() else place for place in places]
    return "\n\n".join(
        (
            "Sound runs in which an alarm rose:",
            table(("alarm", *heading), rows),
            "Runs with one thing wrong in which its alarm rose:",
            table(("what is wrong", "alarm", *(f"{size} completions" for size in sizes)), found),
        )
    )


BENCHMARK = Benchmark(
    name="alarms",
    title="Alarms by chance",
    about="Drawn runs of 40 to 200 steps through `klamp doctor`'s alarms. Log-ratios of two true distributions whose "
    "logits differ by Student's t (3 degrees of freedom) and by prompt, binary rewards, log-normal lengths of 1 to "
    "2000 tokens; settings drawn each by itself: completions a step, group size, steps, length, KL, shares of right, "
    "cut, looping and repeating completions.",
    run=run,
    text=text,
)
