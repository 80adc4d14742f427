"""The section of settings and versions: what differs from the defaults, and between runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from klamp.report.figure import plain_table
from klamp.report.run import ReportRun
from klamp.report.text import MISSING, Html, element, join, setting, shorten

LONGEST = 200
IMPORTANT = (
    "model_name_or_path",
    "beta",
    "loss_type",
    "scale_rewards",
    "epsilon",
    "epsilon_high",
    "learning_rate",
    "lr_scheduler_type",
    "warmup_steps",
    "max_grad_norm",
    "num_generations",
    "num_iterations",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "max_completion_length",
    "temperature",
    "top_p",
    "max_steps",
    "num_train_epochs",
    "seed",
    "target_kl",
)
"""What is shown of a trainer's hundreds of arguments where their defaults are not known; the rest is folded away."""
UNIMPORTANT = ("output_dir", "resume")
"""Fields that are never the same in two runs, and decide nothing."""


def settings_section(runs: Sequence[ReportRun]) -> Html:
    """The section about the configurations of the runs.

    Args:
        runs: those of the report.
    """
    if not any(run.config for run in runs):
        return element("p", "The record does not hold the configuration.", class_="missing")
    parts: list[Html] = []
    if len(runs) > 1:
        parts += [element("h3", "What differs between the runs"), _differences(runs)]
    parts += _changed(runs[0]) if len(runs) == 1 else []
    summary = element("summary", "Every field")
    parts.append(element("details", summary, _everything(runs), class_="data"))
    return join(parts)


def changed(run: ReportRun) -> list[str]:
    """The fields whose value is not the default."""
    return [name for name, value in run.config.items() if name in run.defaults and _differs(value, run.defaults[name])]


def differing(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The fields in which the configurations differ; a field that one of them lacks counts."""
    names = list(dict.fromkeys(name for config in configs for name in config))
    return [
        name
        for name in names
        if name not in UNIMPORTANT and any(_differs(config.get(name), configs[0].get(name)) for config in configs[1:])
    ]


def _differs(a: Any, b: Any) -> bool:
    plain = [list(value) if isinstance(value, tuple) else value for value in (a, b)]
    return plain[0] != plain[1]


def _changed(run: ReportRun) -> list[Html]:
    if not run.defaults:
        names = [name for name in IMPORTANT if name in run.config] or list(run.config)[: len(IMPORTANT)]
        rows = [(element("code", name), _value(run.config[name])) for name in names]
        return [plain_table(("field", "value"), rows, caption="configuration", classes="settings")]
    names = changed(run)
    if not names:
        return [element("p", "Every field has its default.", class_="aside")]
    rows = [(element("code", name), _value(run.config[name]), _value(run.defaults[name])) for name in names]
    caption = "fields that differ from their default"
    heading = element("h3", "Differs from the default")
    return [heading, plain_table(("field", "value", "default"), rows, caption=caption, classes="settings")]


def _differences(runs: Sequence[ReportRun]) -> Html:
    known = [run for run in runs if run.config]
    names = differing([run.config for run in known]) if len(known) > 1 else []
    if not names:
        return element("p", "Nothing, as far as the records say.", class_="aside")
    rows = [(element("code", name), *(_cell(run, name) for run in runs)) for name in names]
    return plain_table(
        ("field", *(run.name for run in runs)), rows, caption="configuration that differs", classes="settings"
    )


def _everything(runs: Sequence[ReportRun]) -> Html:
    names = list(dict.fromkeys(name for run in runs for name in run.config))
    defaults = {name: value for run in runs for name, value in run.defaults.items()}
    rows = [
        (
            element("code", name),
            *(_cell(run, name) for run in runs),
            *([_value(defaults.get(name, MISSING))] if defaults else []),
        )
        for name in names
    ]
    headings = ("field", *(run.name if len(runs) > 1 else "value" for run in runs), *(["default"] if defaults else []))
    return plain_table(headings, rows, caption="the whole configuration", classes="settings")


def _cell(run: ReportRun, name: str) -> Html:
    if name not in run.config:
        return Html(MISSING)
    mark = [element("span", "changed", class_="changed")] if name in changed(run) else []
    return element("span", _value(run.config[name]), *([Html(" "), *mark] if mark else []))


def _value(value: Any) -> str:
    return shorten(setting(value), LONGEST)


def versions_section(runs: Sequence[ReportRun]) -> Html:
    """The versions of the software of each run.

    Args:
        runs: those of the report.
    """
    names = list(dict.fromkeys(name for run in runs for name in run.versions))
    if not names:
        return element("p", "The record does not hold versions.", class_="missing")
    rows = [(element("code", name), *(run.versions.get(name, MISSING) for run in runs)) for name in names]
    headings = ("package", *(run.name if len(runs) > 1 else "version" for run in runs))
    return plain_table(headings, rows, caption="versions", classes="settings")
