"""Writes the pages that are made from tables of the code: `python docs/generate.py`.

Two tables of `which-kl.md` come from `klamp.core.estimators.ESTIMATORS` and `klamp.verify`, `metrics.md` from
`klamp.doctor.metrics.METRICS`, `alarms.md` from `klamp.doctor.alarms.ALARMS`, and `findings.md` from
`klamp.audit.verdict`; the table in `records/index.md` comes from `klamp.hosts.common.versions.HOSTS`, and the one of
all options on a trainer's page from the fields of the configurations. A test compares the committed pages with what
this writes.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from klamp.audit.verdict import LEVELS, findings_table
from klamp.config import KLConfig, KLWarning, LossConfig
from klamp.config.fields import HostLimit
from klamp.config.teacher import TeacherConfig
from klamp.core.estimators import ESTIMATORS
from klamp.doctor.alarm import Alarm, Limit
from klamp.doctor.alarms import ALARMS
from klamp.doctor.metrics import LOGS, METRICS, Logs, MetricRow
from klamp.hosts.common.versions import HOSTS
from klamp.verify.explain import ConfigFacts, measure_config, measure_trust
from klamp.verify.oracle import IN_WORDS
from klamp.verify.proofs.values import EstimatorFacts, measure_estimators

DOCS = Path(__file__).resolve().parent

FEW = 8
"""Words that what to do first has at least, if the next step has so many."""
NOTICE = "<!-- Written by docs/generate.py; change the table that it is made from, not this page. -->\n"

TERMS: Sequence[tuple[str, Mapping[str, str]]] = (
    ("`k1`, gradient `own`", {"kl_estimator": "k1", "kl_gradient": "own"}),
    ("`k3`, gradient `own` (= `forward`)", {"kl_estimator": "k3", "kl_gradient": "own"}),
    ("`k3` (default)", {}),
    ("`exact`", {"kl_estimator": "exact"}),
    ("`k3`, horizon `sequence`", {"kl_horizon": "sequence"}),
    ("`exact`, horizon `sequence`", {"kl_estimator": "exact", "kl_horizon": "sequence"}),
    ("`k1` in the reward", {"kl_estimator": "k1", "kl_placement": "reward", "kl_horizon": "sequence"}),
)
"""What the table of gradients over completions shows."""
WEIGHED = {"surrogate": "score_function", "vllm_importance_sampling_clip_max": None}
UNCLIPPED = {"surrogate": "cispo", "epsilon": 1.0, "epsilon_high": 1e9}
MODE, MAX, MIN = (f"vllm_importance_sampling_{name}" for name in ("mode", "clip_max", "clip_min"))
NEVER: Mapping[str, Any] = {"off_policy_mask_threshold": 1e9}
REGIONS: Sequence[tuple[str, Mapping[str, Any]]] = (
    ("no weight", NEVER | {"surrogate": "score_function"}),
    ("PPO's clip, `epsilon: 0.2`", NEVER),
    ("`token_truncate`, unbounded: the token's ratio", WEIGHED | {MODE: "token_truncate"}),
    ("`token_truncate` at 1.2", WEIGHED | {MODE: "token_truncate", MAX: 1.2}),
    ("`sequence_truncate`, unbounded: the completion's ratio", WEIGHED | {MODE: "sequence_truncate"}),
    ("IcePop: `token_mask` 0.5 to 2", WEIGHED | {MODE: "token_mask", MIN: 0.5, MAX: 2.0}),
    ("IcePop: `token_mask` 0.8 to 1.25", WEIGHED | {MODE: "token_mask", MIN: 0.8, MAX: 1.25}),
    ("`dppo_tv` 0.1", UNCLIPPED | {"dppo_mask": "dppo_tv", "dppo_mask_low": 0.1, "dppo_mask_high": 0.1}),
    ("`dppo_kl` 0.02", UNCLIPPED | {"dppo_mask": "dppo_kl", "dppo_mask_low": 0.02, "dppo_mask_high": 0.02}),
    ("TRM: `seq_max_exact` 0.1", UNCLIPPED | {"rollout_rs": "seq_max_exact", "rollout_rs_threshold": 0.1}),
    ("`seq_max_k3` 0.1", UNCLIPPED | {"rollout_rs": "seq_max_k3", "rollout_rs_threshold": 0.1}),
    ("geometric mean: `seq_mean_k1` 1.1", UNCLIPPED | {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": 1.1}),
    ("DeepSeek-V3.2: `off_policy_mask_threshold` 0.05", UNCLIPPED | {"off_policy_mask_threshold": 0.05}),
)
"""What the table of trust regions shows; `UNCLIPPED` gives each token its ratio to the sampler."""
EXACT = ("sum_v policy_v delta_v", "unbiased", "where the logits of both models fit into memory")
"""Formula, bias and use of the exact KL, which is no estimator of a sampled token."""


def which_kl_page() -> str:
    """The page on the choices of a KL, with the measured tables of estimators and terms between their marks."""
    page = (DOCS / "which-kl.md").read_text(encoding="utf-8")
    for name, table in (("estimators", _estimators()), ("terms", _terms()), ("trust", _trust())):
        begin, end = f"<!-- {name}: written by `python docs/generate.py` -->", f"<!-- end of {name} -->"
        head, tail = page.partition(begin)[0], page.partition(end)[2]
        page = "\n".join((head + begin, "", *table, "", end + tail))
    return page


def _estimators() -> list[str]:
    facts = {each.name: each for each in measure_estimators()}
    headings = ("`kl_estimator`", "value", "bias", "noise", "as a loss, follows", "use")
    return _table(headings, [_estimator(facts[name]) for name in (*ESTIMATORS, "exact")])


def _terms() -> list[str]:
    headings = ("term", "follows", "share", "cosine", "noise")
    return _table(headings, [_over_completions(name, measure(fields)) for name, fields in TERMS])


def _trust() -> list[str]:
    headings = ("rule", "off the policy's gradient", "off it at the sampler's prefixes", "constant advantage", "cut")
    rows = [(name, *_followed(fields)) for name, fields in REGIONS]
    rows[:2] = [(*row[:-1], "-") for row in rows[:2]]  # no region cuts there
    return _table(headings, rows)


def _followed(fields: Mapping[str, Any]) -> Iterator[str]:
    with warnings.catch_warnings(action="ignore", category=KLWarning):
        near, far = (measure_trust(LossConfig(**fields), lag)[1:] for lag in (0.1, 0.5))
    return (f"{100 * a:.0f} / {100 * b:.0f} %" for a, b in zip(near, far, strict=True))


def measure(fields: Mapping[str, str]) -> ConfigFacts:
    """What a term does, without the caution that it may deserve."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KLWarning)
        kl = KLConfig(**fields)  # pyright: ignore[reportArgumentType]
        return measure_config(kl, LossConfig(scale_rewards="none"))


def metrics_page() -> str:
    """The page on the metrics: a row per metric, and a line per trainer with its names."""
    parts = [
        "# Metrics",
        "",
        NOTICE,
        "What a run logs to `metrics.jsonl` and to the trackers. `grpo_loss`, `klamp.tinker`, `klamp.trl`, `klamp",
        "train` and the reports use these names. Each number covers the global batch of a step, however the batch",
        "is split: nats/token is a mean over tokens (for `kl/...`, over the KL's tokens), nats/sequence a mean over",
        "completions. An arrow shows the good direction. Evaluations are `eval/SKILL`.",
        "",
        *_table(
            ("metric", "unit", "meaning"),
            ((f"`{row.name}`", _unit(row), row.text) for row in METRICS.values()),
        ),
        "",
        "## Other names",
        "",
        "What `klamp doctor` and `klamp report` read in other trainers' logs: klamp's name, then theirs; in",
        "brackets the version. A KL that is named a k3 and falls below 0 is read as a k1. The doctor says why a KL",
        "is not read.",
        "",
    ]
    return "\n".join([*parts, *(_names_of(trainer, logs) for trainer, logs in LOGS.items()), ""])


def _names_of(trainer: str, logs: Logs) -> str:
    """One line: klamp's name, theirs; and the names of KLs that are not read."""
    read = dict[str, list[str]]()
    for theirs, ours in logs.names.items():
        read.setdefault(ours, []).append(f"`{theirs}`")
    source = re.split("[,;:(]", logs.source)[0].strip().removeprefix(f"{trainer} ")
    text = "; ".join(f"`{ours}`: {', '.join(theirs)}" for ours, theirs in read.items())
    unread = ", ".join(f"`{theirs}`" for theirs in logs.other_kl)
    return f"- **{trainer}** ({source}): {text}." + f" Not read: {unread}." * bool(unread)


def alarms_page() -> str:
    """The page on the alarms: a row for each with what it finds, from where on, and what to do first."""
    parts = [
        "# Alarms",
        "",
        NOTICE,
        "What [`klamp doctor`](doctor.md) looks for, and what `klamp train` watches after every step. The doctor",
        "prints what an alarm means, the likely cause and every next step. A *note* fails no check and is not shown",
        "during a run; `--fail-on` and `--stop-on` accept notes, too. A limit on a sampled value has a margin for",
        "the number of samples. How often alarms rise by chance:",
        "[counts](records/index.md#the-doctor-and-the-kills).",
        "",
        *_table(("alarm", "what it means", "main limit", "what to do first"), map(_alarm, ALARMS.values())),
    ]
    return "\n".join([*parts, ""])


def _alarm(alarm: Alarm) -> tuple[str, ...]:
    level = " (note)" if alarm.level == "note" else ""
    first, *rest = re.split(r"(?<=\.) ", alarm.next_step)
    while rest and len(first.split()) < FEW:
        first = f"{first} {rest.pop(0)}"
    return f'<a id="{alarm.name}"></a>`{alarm.name}`{level}', alarm.text, _limit(alarm.limits), first


def _limit(limits: Sequence[Limit]) -> str:
    """The first limit, without where it comes from (in brackets) and without what follows a semicolon."""
    return "; ".join(re.sub(r" \([^;]*\)|[;:].*", "", f"{limit.value:g} {limit.text}") for limit in limits[:1])


def findings_page() -> str:
    """The page on the findings of `klamp.check`: a line for each, by level."""
    parts = ["# Findings of klamp.check", "", NOTICE]
    parts += ["The codes of [klamp.check](check.md) and `klamp audit`; a verdict fills the braces and adds the fix."]
    for level in LEVELS:
        lines = [f"- `{code}`: {_plain(row)}." for code, row in findings_table().items() if row["level"] == level]
        parts += ["", f"## {level.capitalize()}", "", *lines]
    return "\n".join([*parts, ""])


def _plain(row: Mapping[str, str]) -> str:
    """The sentence of a finding with the names of its numbers, not their formats, and without numbers in brackets."""
    text = re.sub(r"{(\w+)[^}]*}", r"{\1}", row.get("about", row["what"]))
    text = re.sub(r" \([^()]*{[^()]*\)|(?<=[\w)}]){\w+}$|: {what}$", "", text)
    return text.replace("*", "\\*").replace("[", "\\[")


def newest_page() -> str:
    """The record of the newest versions, with the table of what each host was tried with."""
    head, _, rest = (DOCS / "records" / "index.md").read_text(encoding="utf-8").partition("| package |")
    _, _, tail = rest.partition("\n\n")
    rows = [(f"`{name}`", host.upto, host.asked) for name, host in HOSTS.items()]
    return "\n".join((head.rstrip("\n"), "", *_table(("package", "tried up to", "asked where"), rows), "", tail))


OPTIONS, END = "<!-- options: written by docs/generate.py -->", "<!-- end of options -->"
TRAINERS: Mapping[str, Sequence[Any]] = {
    "trl": (KLConfig, TeacherConfig),
    "unsloth": (KLConfig,),
    "verl": (KLConfig, TeacherConfig),
    "tinker": (KLConfig, TeacherConfig),
}
"""Trainer -> the configurations that it takes."""


def options_page(host: str) -> str:
    """The page of a trainer, with the table of what it refuses and warns about, and of all other fields."""
    head, _, rest = (DOCS / f"{host}.md").read_text(encoding="utf-8").partition(OPTIONS)
    named: dict[tuple[str, str], list[str]] = {}
    for field in (field for config in TRAINERS[host] for field in fields(config)):
        for limit in field.metadata.get("limits", ()):
            if host in limit.hosts:
                named.setdefault(("refused", _because(limit)), []).append(_limited(field.name, limit))
        if host in field.metadata.get("ignored_by", ()):
            named.setdefault(("no effect, with a warning", ""), []).append(f"`{field.name}`")
    rows = [(", ".join(names), *what) for what, names in named.items()]
    configs = " and ".join(f"`{config.__name__}`" for config in TRAINERS[host])
    rows += [(f"every other field of {configs}", "as in klamp", "unless this page says otherwise")]
    table = _table(("field", "what happens", "why, and what to do"), rows)
    return "\n".join((head + OPTIONS, "", *table, "", END)) + rest.partition(END)[2]


PAGES: Mapping[str, Callable[[], str]] = {
    "which-kl.md": which_kl_page,
    "metrics.md": metrics_page,
    "alarms.md": alarms_page,
    "findings.md": findings_page,
    "records/index.md": newest_page,
    **{f"{host}.md": partial(options_page, host) for host in TRAINERS},
}
"""File under docs/ -> what writes it."""


def _limited(name: str, limit: HostLimit) -> str:
    """A field, with the values that a trainer refuses."""
    return ", ".join(f"`{name}={value}`" for value in limit.values) if limit.values else f"`{name}`"


def _because(limit: HostLimit) -> str:
    return f"{limit.why}. {limit.fix[:1].upper()}{limit.fix[1:]}".rstrip(". ")


def _estimator(facts: EstimatorFacts) -> tuple[str, ...]:
    row = ESTIMATORS.get(facts.name)
    formula, bias, use = (row.formula, row.bias, row.remark) if row else EXACT
    if facts.bias_text != "unbiased":
        bias = f"{bias}: {facts.bias_text}"
    return f"`{facts.name}`", f"`{formula}`", bias, f"{facts.deviation:.2f}", facts.as_loss.in_words, use


def _over_completions(name: str, facts: ConfigFacts) -> tuple[str, ...]:
    pull = facts.sequence
    if pull.follows.name == "zero":
        return name, "zero", "0 %", "-", "all of it"
    return (
        name,
        IN_WORDS[pull.follows.name],
        f"{100 * pull.share:.0f} %",
        f"{pull.cosine_reverse:.2f}",
        f"{facts.noise:.1f}",
    )


def _unit(row: MetricRow) -> str:
    return row.unit + {"higher": " ↑", "lower": " ↓", "neither": ""}[row.better]


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table; bars in the cells are escaped, ‖ stands for two of them."""
    lines = [headings, ["---"] * len(headings), *rows]
    return [f"| {' | '.join(cell.replace('||', '‖').replace('|', chr(92) + '|') for cell in line)} |" for line in lines]


if __name__ == "__main__":
    for file, page in PAGES.items():
        (DOCS / file).write_text(page(), encoding="utf-8")
        print(f"docs/{file}")
