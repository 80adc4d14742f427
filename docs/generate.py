"""Writes the pages that are made from tables of the code: `python docs/generate.py`.

`estimators.md` comes from `klamp.core.estimators.ESTIMATORS` and from what `klamp.verify` measures, `metrics.md` from
`klamp.doctor.metrics.METRICS`, `alarms.md` from `klamp.doctor.alarms.ALARMS`, and `findings.md` from
`klamp.audit.verdict`; the table in `records/newest.md` comes from `klamp.hosts.common.versions.HOSTS`. A test compares
the committed pages with what this writes.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from klamp.audit.verdict import LEVELS, findings_table
from klamp.config import KLConfig, KLWarning, LossConfig
from klamp.core.estimators import ESTIMATORS
from klamp.doctor.alarm import Alarm, Limit
from klamp.doctor.alarms import ALARMS
from klamp.doctor.metrics import LOGS, METRICS, Logs, MetricRow
from klamp.hosts.common.versions import HOSTS
from klamp.verify.explain import LENGTH, ConfigFacts, measure_config
from klamp.verify.oracle import IN_WORDS
from klamp.verify.proofs.values import EstimatorFacts, measure_estimators

DOCS = Path(__file__).resolve().parent

FEW = 8
"""Words that what to do first has at least, if the next step has so many."""
NOTICE = "<!-- Written by docs/generate.py; change the table that it is made from, not this page. -->\n"

TERMS: Sequence[tuple[str, Mapping[str, str]]] = (
    ("`k1`, gradient `own`", {"kl_estimator": "k1", "kl_gradient": "own"}),
    ("`k3`, gradient `own` (= `forward`)", {"kl_estimator": "k3", "kl_gradient": "own"}),
    ("`k3`, gradient `reverse`", {}),
    ("`exact`", {"kl_estimator": "exact"}),
    ("`k3`, gradient `forward`, horizon `sequence`", {"kl_gradient": "forward", "kl_horizon": "sequence"}),
    ("`k1`, gradient `reverse`, horizon `sequence`", {"kl_estimator": "k1", "kl_horizon": "sequence"}),
    ("`k3`, gradient `reverse`, horizon `sequence`", {"kl_horizon": "sequence"}),
    ("`exact`, horizon `sequence`", {"kl_estimator": "exact", "kl_horizon": "sequence"}),
    (
        "`k1` in the reward",
        {"kl_estimator": "k1", "kl_placement": "reward", "kl_horizon": "sequence"},
    ),
    (
        "`k1` in the advantage, horizon `sequence`",
        {"kl_estimator": "k1", "kl_placement": "advantage", "kl_horizon": "sequence"},
    ),
)
"""What the table of gradients over completions shows."""


def estimators_page() -> str:
    """The page on the estimators: what each is, and what enumeration measures of it."""
    facts = {each.name: each for each in measure_estimators()}
    return "\n".join(
        (
            "# Estimators",
            "",
            NOTICE,
            "delta = log policy - log ref at a sampled token; *unbiased* is meant for KL(policy‖ref) and tokens of",
            "the policy. Nothing here is a claim by hand: the numbers come from enumeration, and `klamp verify`",
            "repeats and checks them on your machine.",
            "",
            "## What each one is",
            "",
            *_table(
                ("`kl_estimator`", "per token", "bias of the value", "sign", "when to use it"),
                [*(_definition(name) for name in ESTIMATORS), _exact_definition()],
            ),
            "",
            "## What is measured of each one",
            "",
            "One position, five tokens, KL(policy‖ref) of about 0.9 nats; the deviation is that of a single token's",
            "value, in units of the KL.",
            "",
            *_table(
                ("", "bias", "deviation / KL", "as a loss, follows the gradient of", "in the reward, follows"),
                [_measured(facts[name]) for name in (*ESTIMATORS, "exact")],
            ),
            "",
            "`kl_gradient` chooses the gradient apart from the value: `reverse` (the default) and `forward` give the",
            "gradient that they name with every estimator, `own` gives that of the table.",
            "",
            "## Over whole completions",
            "",
            f"Completions of up to {LENGTH} tokens with an end token, tokens of the policy. *Share* is how much of the",
            "gradient of KL(policy‖ref) of the whole completion the term holds, *cosine* how well it points there,",
            "*noise* how far the gradient of one completion scatters, in units of its mean.",
            "",
            *_table(
                ("term", "follows", "share", "cosine", "noise"),
                [_over_completions(name, measure(fields)) for name, fields in TERMS],
            ),
            "",
            "Token-local terms hold the prefixes fixed: what a token does to the KL of later ones is left out.",
            "`klamp explain` measures the same of your configuration.",
            "",
        )
    )


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
    head, _, rest = (DOCS / "records" / "newest.md").read_text(encoding="utf-8").partition("| package |")
    _, _, tail = rest.partition("\n\n")
    rows = [(f"`{name}`", host.upto, host.asked) for name, host in HOSTS.items()]
    return "\n".join((head.rstrip("\n"), "", *_table(("package", "tried up to", "asked where"), rows), "", tail))


PAGES: Mapping[str, Callable[[], str]] = {
    "estimators.md": estimators_page,
    "metrics.md": metrics_page,
    "alarms.md": alarms_page,
    "findings.md": findings_page,
    "records/newest.md": newest_page,
}
"""File under docs/ -> what writes it."""


def _definition(name: str) -> tuple[str, ...]:
    row = ESTIMATORS[name]
    sign = "≥ 0" if row.non_negative else "any"
    return f"`{name}`", f"`{row.formula}`", row.bias, sign, f"{row.remark} ([source]({row.paper}))"


def _exact_definition() -> tuple[str, ...]:
    return (
        "`exact`",
        "`sum_v policy_v delta_v`",
        "none, and no noise of its own: only the prefixes are sampled",
        "≥ 0",
        "where the logits of both models fit into memory",
    )


def _measured(facts: EstimatorFacts) -> tuple[str, ...]:
    return (
        f"`{facts.name}`",
        facts.bias_text,
        f"{facts.deviation:.2f}",
        facts.as_loss.in_words,
        facts.in_reward.in_words,
    )


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
