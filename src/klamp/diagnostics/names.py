"""Translates the names of metrics and settings of other trainers into klamp's."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from klamp.diagnostics.history import RunSettings, Verifier
from klamp.diagnostics.metrics import METRICS
from klamp.diagnostics.recorded import NAMES, OTHER_KL
from klamp.errors import ConfigError, unknown_name

SHORT_NAMES: Mapping[str, str] = {
    "kl": "kl/k3",
    "k1": "kl/k1",
    "length": "length/mean",
    "truncated": "length/truncated",
    "saturated": "groups/saturated",
    "entropy": "policy/entropy",
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "lr": "train/learning_rate",
}
"""A short name that `--map` takes -> klamp's name; `reward`, `reward_std` and `beta` are short as they are."""

STEP_NAMES = (
    *("train/global_step", "global_step", "training/global_step", "trainer/global_step", "global_step/max_steps"),
    *("train/step", "rollout/step", "current_steps", "iteration", "iter", "step", "Step", "progress/batch"),
    *("global_steps", "training_step", "train_step", "optimizer_step", "steps", "iterations", "update", "_step"),
)
"""The names under which a logged row may hold its step, the best first."""

STEP = re.compile(r"\s*(?:[a-z]+[ _:=]*)?(\d{1,3}(?:,\d{3})+|\d+(?:\.\d*)?)\s*(?:/.*)?$", re.IGNORECASE)
"""How a step is written as a text."""

EVALUATION_PREFIXES = ("eval/", "eval_", "val-core/", "test/")

SCORES = ("reward", "acc", "score", "mean@", "correct", "pass@")
"""Parts of a metric's name that say that it scores an evaluation."""
NO_SCORES = ("std", "correlation", "_max", "_min")
"""Parts of a name that say that it is something else about scores."""

OVER_UPDATES = "actor/kl_loss"
"""verl's name of a k3 that is a mean over all mini-batches and epochs of a step (train_mini_batch)."""

OURS = "policy/logp_mean"
"""A metric that only klamp logs, by which its runs are known."""

RULES = ("accuracy", "exact", "match", "math", "format", "verif", "correct", "rule", "regex", "gsm8k", "unit_test")
"""Parts of a reward function's name that say that it is a rule."""


def known(name: str, theirs: Mapping[str, str] = NAMES) -> str | None:
    """The name that klamp has for a logged metric; None where it has none.

    Args:
        name: as it was logged.
        theirs: the names of other trainers that count, see `recorded.names_in`.
    """
    bare = name.removeprefix("train/")
    for candidate in (name, bare, bare.removesuffix("/mean")):
        if candidate in theirs or candidate in METRICS:
            return theirs.get(candidate, candidate)
    return None


KL = re.compile(r"kl(?![a-z])|(?<![a-z])kl|kld", re.IGNORECASE)
"""How the name of a KL shows."""
SETTING = re.compile(r"coe?f|beta|target|weight|tau|time|timing|type|estimator|ctrl", re.IGNORECASE)
"""How the name of something about a KL shows that is none itself."""


def unread_kls(logged: Collection[str], read: Collection[str]) -> dict[str, str]:
    """The names of a record that speak of a KL and were not read -> what they are, as far as that is known; none twice,
    as its least and its largest beside its mean.

    Args:
        logged: all names.
        read: those that were read.
    """
    beside = {name.rpartition("/")[0] + end for name in logged if name.endswith("/avg") for end in ("/min", "/max")}
    left = sorted(name for name in {*logged} - beside - {*read} if KL.search(name) and not SETTING.search(name))
    left = [name for name in left if not name.startswith(EVALUATION_PREFIXES)]
    return {name: OTHER_KL.get(name, OTHER_KL.get(name.removeprefix("train/"), "")) for name in left}


def read_pairs(pairs: Iterable[str]) -> dict[str, str]:
    """What `--map` says: klamp's name of a metric -> its name in the record.

    Args:
        pairs: OURS=THEIRS; OURS is a name of `METRICS` or of `SHORT_NAMES`, THEIRS is taken as it stands.

    Raises:
        UnknownNameError: klamp has no such metric; names the nearest.
        ConfigError: not two names with = between them, or a metric that is given twice.
    """
    found: dict[str, str] = {}
    for pair in pairs:
        name, _, theirs = pair.partition("=")
        if not (name and theirs):
            raise ConfigError(
                "a pair of names has no = with a name on either side",
                got=pair,
                why="it says which metric of klamp a name in the record stands for",
                fix="write OURS=THEIRS, for example kl=my_kl; the path stands before the flags",
            )
        ours = SHORT_NAMES.get(name, name)
        if ours not in METRICS:
            short = ", ".join(f"{short} ({full})" for short, full in SHORT_NAMES.items())
            raise unknown_name(
                "metric", name, [*SHORT_NAMES, *METRICS], why=f"short names: {short}; else those of klamp's metrics"
            )
        if ours in found:
            raise ConfigError(
                "a metric is given two names",
                got=f"{found[ours]} and {theirs} for {ours}",
                why="a step has one value of it",
                fix="leave one of the two out",
            )
        found[ours] = theirs
    return found


def translate(
    logged: Mapping[str, object], names: Mapping[str, str] | None = None, theirs: Mapping[str, str] = NAMES
) -> dict[str, float]:
    """The known metrics of a logged row under klamp's names; where two mean the same, klamp's own name comes first.

    Args:
        logged: name -> value.
        names: klamp's name -> that in the row, which alone then counts for this metric and means nothing else.
        theirs: the names of other trainers that count.
    """
    names = names or {}
    numbers = {name: value for name in logged if (value := as_number(logged[name])) is not None}
    found = {ours: numbers[theirs] for ours, theirs in names.items() if theirs in numbers}
    taken = set(names.values())
    for name in sorted(numbers, key=lambda name: not _is_own(name)):
        ours = known(name, theirs)
        if ours is not None and ours not in names and name not in taken:
            found.setdefault(ours, numbers[name])
    if "kl/k1" not in found and {"kl/k1_sequence", "length/mean"} <= found.keys():
        found["kl/k1"] = found["kl/k1_sequence"] / max(found["length/mean"], 1.0)
    return found


def number_names(rows: Iterable[Mapping[str, object]]) -> set[str]:
    """The names that hold a number in some row."""
    return {name for row in rows for name, value in row.items() if as_number(value) is not None}


def as_number(value: object) -> float | None:
    """A value as a number, also one that is written as a text; None: it is none, or a flag."""
    try:
        return float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else None
    except (ValueError, OverflowError):
        return None


def _is_own(name: str) -> bool:
    return known(name) in (name, name.removeprefix("train/"))


def evaluations(logged: Mapping[str, object], *, every: bool = False) -> dict[str, float]:
    """The scores of evaluations in a logged row: skill -> score.

    Args:
        logged: name -> value.
        every: whether every name is a score, as klamp logs them; else those that speak of rewards, accuracy and so on.
    """
    found: dict[str, float] = {}
    for name, value in logged.items():
        prefix = next((prefix for prefix in EVALUATION_PREFIXES if name.startswith(prefix)), None)
        number = as_number(value)
        if prefix is None or number is None or not math.isfinite(number):
            continue
        is_score = any(word in name for word in SCORES) and not any(word in name for word in NO_SCORES)
        if every or is_score:
            found[name.removeprefix(prefix)] = number
    return found


def _written(value: object) -> float | None:
    """The number of a step, as a number or as a text has it."""
    said = STEP.match(value) if isinstance(value, str) else None
    return as_number(said[1].replace(",", "") if said else value)


def step_of(logged: Mapping[str, object]) -> int | None:
    """The step that a logged row belongs to; of `5/200` and `step 5` the 5, of `1,500` the 1500."""
    for name in STEP_NAMES:
        step = _written(logged.get(name))
        if step is not None and math.isfinite(step):
            return int(step)
    return None


COUNTS = re.compile(r"(^|[/_ .])(step|iteration|iter|update)s?(_?(num|idx|index|count|id))?$", re.IGNORECASE)
"""How the name of a column shows that counts steps."""


def step_column(rows: Sequence[Mapping[str, object]]) -> str | None:
    """The name of a column that counts steps where none has a known name: whole numbers that never fall."""
    if any(step_of(row) is not None for row in rows):
        return None
    columns: dict[str, list[float]] = {}
    for row in rows:
        for name in filter(COUNTS.search, row):
            columns.setdefault(name, []).append(math.nan if (x := _written(row[name])) is None else x)
    rising = (name for name, x in columns.items() if len(x) > 1 and x == sorted(x) and x[0] < x[-1])
    return next((name for name in rising if all(x.is_integer() for x in columns[name])), None)


def verifier_of(logged: set[str]) -> Verifier | None:
    """Whether all reward functions are rules, judged by their names; None where the names do not tell.

    Args:
        logged: names of all metrics; TRL's rewards/NAME/mean say how its reward functions are called.
    """
    parts = [name.removeprefix("train/").split("/") for name in logged]
    rewards = [part[1].lower() for part in parts if len(part) == 3 and part[::2] == ["rewards", "mean"]]
    return "rules" if rewards and all(any(word in name for word in RULES) for name in rewards) else None


def settings_of(config: Mapping[str, object], logged: set[str], names: Mapping[str, str] | None = None) -> RunSettings:
    """The settings of a run, as far as its arguments and the names of its metrics tell.

    Args:
        config: arguments as TRL or Unsloth name them, or none.
        logged: names of all metrics.
        names: as in `translate`.
    """
    over_updates = (
        OVER_UPDATES in logged and "kl/k3" not in logged and (names or {}).get("kl/k3", OVER_UPDATES) == OVER_UPDATES
    )
    beta, loss, scale = config.get("beta"), config.get("loss_type"), config.get("scale_rewards")
    settings = RunSettings(verifier=verifier_of(logged), k3_over_updates=over_updates, other_kernels=OURS not in logged)
    if isinstance(beta, int | float):
        settings = replace(settings, beta=float(beta))
    if isinstance(loss, str):
        settings = replace(settings, loss_type=loss)
    coefficient = config.get("teacher_coef")
    if isinstance(coefficient, int | float) and not any("teacher" in x and "kl" in x for x in logged):
        settings = replace(settings, teacher_coef=float(coefficient))  # else it is logged, perhaps by another name
    if scale not in (None, "None"):
        settings = replace(settings, scale_rewards="none" if scale in (False, "none", "False", "batch") else "std")
    return settings


def is_verl_line(line: Mapping[str, Any]) -> bool:
    """Whether a line is one of verl's file logger: a step and its data."""
    return "step" in line and isinstance(line.get("data"), dict)


def flat(line: Mapping[str, Any], depth: int = 3) -> dict[str, Any]:
    """A logged line as one row; of verl's file logger its data, with the step, and null as NaN, which JSON cannot hold.

    Args:
        line: as it was read.
        depth: how many names, one within the other, are joined by `/`.
    """
    verls, found = is_verl_line(line), dict[str, Any]()
    for name, value in (line["data"] if verls else line).items():
        inner = flat(value, depth - 1) if depth and isinstance(value, dict) else {"": value}
        found |= {f"{name}/{part}".rstrip("/"): each for part, each in inner.items()}
    lost = {name: math.nan for name, value in found.items() if value is None} if verls else {}
    return found | lost | ({"step": line["step"]} if verls else {})
