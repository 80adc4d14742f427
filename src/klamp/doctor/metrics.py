"""The table of metrics, `metrics.yaml`, other trainers' names, `recorded.yaml`, and a logged row in klamp's names."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib.resources import files
from typing import Any, Literal, TypeAlias

import yaml

from klamp.doctor.history import History, RunSettings, Verifier
from klamp.errors import ConfigError, UnknownNameError, unknown_name
from klamp.names import SHORT_METRICS

Better: TypeAlias = Literal["higher", "lower", "neither"]
Counted: TypeAlias = Literal["completions", "tokens", "KL tokens", "parts"]


@dataclass(frozen=True)
class MetricRow:
    """One metric."""

    name: str
    """The logged name; the part before the slash is its family."""
    unit: str
    better: Better
    reduction: str
    """How it is reduced over the batch of a step: a mean over completions, tokens, KL tokens; a sum over parts."""
    text: str
    shown: Mapping[str, str] = field(default_factory=dict)
    """Where it is shown: `chart` of the report, `label` of its curve, `column` of the table of `klamp train`."""

    @property
    def label(self) -> str:
        """The label of its curve: by default the part of the name after the slash."""
        return self.shown.get("label", self.name.rpartition("/")[2].replace("_", " "))


def _table(file: str) -> Mapping[str, Any]:
    return yaml.safe_load(files("klamp.doctor").joinpath(file).read_bytes())


METRICS: Mapping[str, MetricRow] = {name: MetricRow(name, *row) for name, row in _table("metrics.yaml").items()}
"""Name -> row. Evaluations are logged as `eval/SKILL`, the mean score of a skill on held-out prompts."""
COLUMNS = {row.shown["column"]: row.name for row in METRICS.values() if "column" in row.shown}
"""Column of the table that `klamp train` prints -> metric."""


_COUNTED: Mapping[str, Counted] = {
    "mean over completions": "completions",
    "mean over tokens": "tokens",
    "mean over KL tokens": "KL tokens",
    "sum over parts": "parts",
    "value": "completions",
}


def check_metrics(names: Iterable[str]) -> None:
    """Refuse metrics without a row, with an UnknownNameError; `teacher/kl.KEY` has the row of `teacher/kl`."""
    for name in names:
        if name.partition(".")[0] not in METRICS:
            why, fix = "its unit, reduction and chart are not known", "add its row to klamp/doctor/metrics.yaml"
            raise UnknownNameError("a metric has no row in metrics.yaml", got=name, why=why, fix=fix)


def averaged_over(name: str) -> Counted:
    """What the parts of a step count by when their means are joined; a ConfigError for a maximum and its like."""
    check_metrics([name])
    reduction = METRICS[name].reduction
    if reduction not in _COUNTED:
        why = f"its reduction in metrics.yaml is {reduction!r}, and means of parts do not give that"
        fix = "measure it over the whole step (klamp.hosts.common.step_metrics)"
        raise ConfigError("a metric cannot be joined from the parts of a step", got=name, why=why, fix=fix)
    return _COUNTED[reduction]


@dataclass(frozen=True, kw_only=True)
class Logs:
    """What a trainer writes of a step: its name of a metric, without `train/` -> klamp's; of other KLs -> a text."""

    source: str
    """Where the names were read: files and version."""
    names: Mapping[str, str]
    other_kl: Mapping[str, str] = field(default_factory=dict)
    marks: Collection[str] = ()
    """Names that only this trainer logs: a record with one of them uses this trainer's names first."""
    no_reference: str = ""
    """Why its runs have no KL to a reference, for a trainer that has none by design."""


LOGS: Mapping[str, Logs] = {trainer: Logs(**table) for trainer, table in _table("recorded.yaml").items()}
"""Trainer -> what it writes."""
NAMES: Mapping[str, str] = {
    theirs: ours
    for logs in sorted(LOGS.values(), key=lambda logs: bool(logs.marks), reverse=True)
    for theirs, ours in logs.names.items()
}
"""The name that another trainer uses -> klamp's; if two trainers share a name, the one without marks wins."""
OTHER_KL: Mapping[str, str] = {name: what for logs in LOGS.values() for name, what in logs.other_kl.items()}
"""The name of a KL of another kind -> what it is."""


def names_in(logged: Collection[str]) -> Mapping[str, str]:
    """Another trainer's name -> klamp's, for a record that has these names; klamp's own has a KL under its name."""
    names = dict(NAMES)
    if any(name.removeprefix("train/").startswith("kl/") for name in logged):
        return names
    for logs in LOGS.values():
        if not set(logs.marks).isdisjoint(logged):
            names |= {f"{part}{name}": ours for name, ours in logs.names.items() for part in ("", "train/")}
            names = {name: ours for name, ours in names.items() if name not in logs.other_kl}
    return names


KL_FLAGS = ("use_kl_loss", "use_kl_in_reward", "add_token_level_kl")
SWITCHES = (KL_FLAGS, ("kl_loss_coef", "init_kl_coef", "kl_coef", "kl_coeff", "beta"))
"""The settings that turn a KL on or off; where a flag is there, the coefficients do not count."""


def declare_no_reference(history: History, logged: Collection[str] = ()) -> None:
    """Set beta to 0 for a run that has no reference, by its trainer or its configuration, and say why."""
    wrote = (logs for name, logs in LOGS.items() if history.source.startswith(name) or {*logs.marks} & {*logged})
    reason = next((logs.no_reference for logs in wrote if logs.no_reference), "")
    config = {name.rpartition("/")[2]: value for name, value in flat(history.config).items()}
    values = next(filter(None, ([config[name] for name in names if name in config] for names in SWITCHES)), [1])
    if history.settings.beta is None and all(str(x).lower() == "false" or as_number(x) == 0 for x in values):
        reason = reason or "the configuration turns the KL off, so there is no KL to a reference"
    if reason and not any(name.startswith("kl/") for name in history.names):
        history.settings = replace(history.settings, beta=0.0)
        history.cautions.append(reason)


STEP_NAMES = (
    *("train/global_step", "global_step", "training/global_step", "trainer/global_step", "global_step/max_steps"),
    *("train/step", "rollout/step", "current_steps", "iteration", "iter", "step", "Step", "progress/batch"),
    *("global_steps", "training_step", "train_step", "optimizer_step", "steps", "iterations", "update", "_step"),
)
"""The names under which a logged row may hold its step, the best first."""
COUNTS = re.compile(r"^(?!tim).*?(^|[/_ .])(step|iteration|iter|update)s?(_?(num|idx|index|count|id))?$", re.IGNORECASE)
"""How other names of a step look."""
STEP = re.compile(r"\s*(?:[a-z]+[ _:=]*)?(\d{1,3}(?:,\d{3})+|\d+(?:\.\d*)?)\s*(?:/.*)?$", re.IGNORECASE)
"""How a step is written as a text."""
EVALUATION_PREFIXES = ("eval/", "eval_", "val-core/", "test/")

SCORES = ("reward", "acc", "score", "mean@", "correct", "pass@")
"""Parts of a metric's name that say that it scores an evaluation."""
NO_SCORES = ("std", "correlation", "_max", "_min")
"""Parts of a name that say that it is something else about scores."""
STOPPED = "val/stop_rate"  # of open-instruct: 1 - length/truncated
OVER_UPDATES = "actor/kl_loss"
"""verl's name of a k3 that is a mean over all mini-batches and epochs of a step (train_mini_batch)."""
OURS = "policy/logp_mean"
"""A metric that only klamp logs, by which its runs are known."""
RULES = ("accuracy", "exact", "match", "math", "format", "verif", "correct", "rule", "regex", "gsm8k", "unit_test")
"""Parts of a reward function's name that say that it is a rule."""
OWN_RULES = ("exact_match", "math_verify")
"""klamp's reward functions that are rules."""


def own_name(name: str, theirs: Mapping[str, str] = NAMES) -> str | None:
    """klamp's name of a logged metric, None if it has none; `theirs`: see `metrics.names_in`."""
    bare = name.removeprefix("train/")
    for candidate in (name, bare, bare.removesuffix("/mean")):
        if candidate in theirs or candidate in METRICS:
            return theirs.get(candidate, candidate)
    return None


KL = re.compile(r"kl(?![a-z])|(?<![a-z])kl|kld|log_?p(rob)?s?[_/](abs_)?diff|distill\w*[_/](loss|div)", re.IGNORECASE)
"""How the name of a KL, or of another distance of two models, shows."""
SETTING = re.compile(r"coe?f|beta|target|weight|tau|time|timing|type|estimator|ctrl", re.IGNORECASE)
"""Parts of names that concern a KL and are not a KL."""
EXTREME = re.compile(r"[/_](max|min|std)$")
OF_OLD = re.compile(r"ppo_?kl|approx_?kl|policykl|pre_post|(?<![a-z])old(?![a-z])", re.IGNORECASE)
"""How the name of a KL to the policy before an update shows."""
MODELS: Mapping[str, re.Pattern[str]] = {
    "teacher": re.compile(r"teacher|distil|(?<![a-z])opd|student", re.IGNORECASE),
    "sampler": re.compile(r"mismatch|rollout|vllm|sglang|infer|sampl|(?<![a-z])gen_|behav", re.IGNORECASE),
}
"""Model -> how the name of a KL to it, and not to the reference, shows."""


def unread_kls(logged: Collection[str], read: Collection[str]) -> dict[str, str]:
    """The logged names of a KL that were not read -> what they are, if known; not the extremes beside a mean."""
    means = {name: {EXTREME.sub(end, name) for end in ("", "/avg", "/mean", "_avg", "_mean")} for name in logged}
    extremes = {name for name in logged if means[name] & {*logged} - {name}}
    candidates = sorted(name for name in {*logged} - extremes - {*read} if not name.startswith(EVALUATION_PREFIXES))
    texts = {name: OTHER_KL.get(name, OTHER_KL.get(name.removeprefix("train/"), "")) for name in candidates}
    to_old = "between the policy and the one that sampled, not to the reference"
    return {
        name: text or (to_old if OF_OLD.search(name) else "")
        for name, text in texts.items()
        if text or (KL.search(name) and not SETTING.search(name))
    }


def read_pairs(pairs: Iterable[str]) -> dict[str, str]:
    """What `--map` says in pairs OURS=THEIRS: klamp's name of a metric, short or not -> its name in the record."""
    names: dict[str, str] = {}
    for pair in pairs:
        name, _, theirs = pair.partition("=")
        ours = SHORT_METRICS.get(name, name)
        if not (name and theirs) or ours in names:
            raise ConfigError(
                "--map takes pairs of names, one for each metric",
                got=pair,
                why=f"{ours} has two names" if ours in names else "there is no = with a name on either side",
                fix="write OURS=THEIRS once for a metric, for example kl=my_kl; the path comes before the flags",
            )
        if ours not in METRICS:
            why = f"short names: {', '.join(f'{a} ({b})' for a, b in SHORT_METRICS.items())}; else klamp's own"
            raise unknown_name("metric", name, [*SHORT_METRICS, *METRICS], why=why)
        names[ours] = theirs
    return names


def translate(
    logged: Mapping[str, object], names: Mapping[str, str] | None = None, theirs: Mapping[str, str] = NAMES
) -> dict[str, float]:
    """The metrics of a row under klamp's names: by `names` (ours -> theirs), then its own names, then `theirs`."""
    names = names or {}
    numbers = {name: value for name in logged if (value := as_number(logged[name])) is not None}
    metrics = {ours: numbers[theirs] for ours, theirs in names.items() if theirs in numbers}
    numbers |= {STOPPED: 1 - numbers[STOPPED]} if STOPPED in numbers else {}
    mapped = set(names.values())
    for name in sorted(numbers, key=lambda name: own_name(name) not in (name, name.removeprefix("train/"))):
        ours = own_name(name, theirs)
        if ours is not None and ours not in names and name not in mapped:
            metrics.setdefault(ours, numbers[name])
    if "kl/k1" not in metrics and {"kl/k1_sequence", "length/mean"} <= metrics.keys():
        metrics["kl/k1"] = metrics["kl/k1_sequence"] / max(metrics["length/mean"], 1.0)
    return metrics


def as_number(value: object) -> float | None:
    """A value as a number, also from a text; None: a flag, or not a number."""
    try:
        return float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else None
    except (ValueError, OverflowError):
        return None


def evaluations(logged: Mapping[str, object], *, every: bool = False) -> dict[str, float]:
    """The scores of evaluations in a logged row: skill -> score; `every`: all names are scores, as klamp logs them."""
    scores: dict[str, float] = {}
    for name, value in logged.items():
        prefix = next((prefix for prefix in EVALUATION_PREFIXES if name.startswith(prefix)), None)
        is_score = any(word in name for word in SCORES) and not any(word in name for word in NO_SCORES)
        number = as_number(value) if prefix and (every or is_score) else None
        if number is not None and math.isfinite(number):
            scores[name.removeprefix(prefix or "")] = number
    return scores


def step_of(logged: Mapping[str, object]) -> int | None:
    """The step that a logged row belongs to; of `5/200` and `step 5` the 5, of `1,500` the 1500."""
    for name in (*STEP_NAMES, *filter(COUNTS.search, logged)):
        value = logged.get(name)
        text = STEP.match(value) if isinstance(value, str) else None
        step = as_number(text[1].replace(",", "") if text else value)
        if step is not None and math.isfinite(step):
            return int(step)
    return None


def verifier_of(logged: Collection[str]) -> Verifier | None:
    """`rules` if the names of all reward functions (TRL's rewards/NAME/mean) name rules."""
    parts = [name.removeprefix("train/").split("/") for name in logged]
    rewards = [part[1].lower() for part in parts if len(part) == 3 and part[::2] == ["rewards", "mean"]]
    return "rules" if rewards and all(any(word in name for word in RULES) for name in rewards) else None


def settings_of(config: Mapping[str, object], logged: set[str], names: Mapping[str, str] | None = None) -> RunSettings:
    """The settings of a run, as far as its arguments (as TRL names them) and the names of its metrics say."""
    loss, scale, k3 = config.get("loss_type"), config.get("scale_rewards"), (names or {}).get("kl/k3", OVER_UPDATES)
    numbers: dict[str, Any] = {
        name: x for name in ("beta", "teacher_coef", "top_p", "top_k") if isinstance(x := config.get(name), int | float)
    }
    if any("teacher" in name and "kl" in name for name in logged):
        numbers.pop("teacher_coef", None)  # the coefficient is logged, perhaps under another name
    unscaled = scale in (False, "none", "False", "batch")
    return RunSettings(
        **numbers,
        loss_type=loss if isinstance(loss, str) else None,
        verifier=verifier_of(logged),
        scale_rewards=None if scale in (None, "None") else "none" if unscaled else "std",
        k3_over_updates=OVER_UPDATES in logged and "kl/k3" not in logged and k3 == OVER_UPDATES,
        other_kernels=OURS not in logged,
        kl_in_loss=any("kl_loss" in name for name in logged),
    )


def settings_of_run(values: Mapping[str, Any], *, rl_skill: str | None = None) -> RunSettings:
    """The settings in a klamp run's config.yaml; `rl_skill`: the skill that is trained."""
    numbers = {name: x for name, value in values.items() if (x := as_number(value)) is not None and math.isfinite(x)}
    integers = {name: int(x) for name, x in numbers.items()}
    loss, reward = values.get("loss_type"), str(values.get("reward") or "")
    leave_one_out = values.get("advantage_baseline") == "leave_one_out"
    rules = reward in OWN_RULES or (values.get("task") == "arithmetic" and not reward)
    has_model = any(values.get(name) for name in ("teacher_model", "teacher_url", "teacher_models"))
    teacher = has_model or values.get("teacher_kind") in ("ema", "periodic", "live")
    return RunSettings(
        beta=numbers.get("beta"),
        # Dr. GRPO's baseline is the group's mean; klamp's default only averages over tokens as it does.
        loss_type=f"{loss}, leave_one_out" if leave_one_out else str(loss),
        verifier="rules" if rules else None,
        scale_rewards=values.get("scale_rewards") or ("none" if loss == "dr_grpo" else "std"),
        other_reference=values.get("ref_model") is not None,
        moving_reference=values.get("reference") in ("ema", "periodic"),
        top_p=numbers.get("top_p"),
        top_k=integers.get("top_k"),
        prompts=integers.get("prompts_per_step"),
        rl_skill=rl_skill,
        eval_size=integers.get("eval_size"),
        teacher_coef=numbers.get("teacher_coef") or None if teacher else None,
        k3_over_updates=values.get("backend") == "verl" and integers.get("num_iterations", 1) > 1,
    )


def is_verl_line(line: Mapping[str, Any]) -> bool:
    """Whether a line is one of verl's file logger: a step and its data."""
    return "step" in line and isinstance(line.get("data"), dict)


def flat(line: Mapping[str, Any], depth: int = 3) -> dict[str, Any]:
    """A logged line as one row, nested names joined by `/`; of verl's file logger the data and step, null as NaN."""
    from_verl, row = is_verl_line(line), dict[str, Any]()
    for name, value in (line["data"] if from_verl else line).items():
        inner = flat(value, depth - 1) if depth and isinstance(value, dict) else {"": value}
        row |= {f"{name}/{part}".rstrip("/"): inner_value for part, inner_value in inner.items()}
    nulls = {name: math.nan for name, value in row.items() if value is None} if from_verl else {}
    return row | nulls | ({"step": line["step"]} if from_verl else {})
