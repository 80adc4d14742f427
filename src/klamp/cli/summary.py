"""The end of a run: what it gained, what it kept, how far it went from its reference, where its files are."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table
from rich.text import Text

from klamp.cli.columns import GAP, Scale, fixed, short, spoken
from klamp.cli.describe import MONITOR, resume_command, tool
from klamp.cli.live import skills_table
from klamp.config.describe import describe_controller, describe_price
from klamp.config.loss import configured_price
from klamp.training.config import TrainConfig
from klamp.training.folders import checkpoint_folders
from klamp.training.observers import RunSummary

ESTIMATORS = ("k1", "k3", "exact")
ROWS = {"": "nats per token", "_sequence": "nats per completion", "_original": "from its start, per token"}


def print_summary(console: Console, config: TrainConfig, summary: RunSummary) -> None:
    """Print the summary of a finished run: scores before and after, KL and beta, files.

    Args:
        console: where to.
        config: the run's configuration.
        summary: what the trainer returned.
    """
    scale = Scale.of(summary.before, summary.after)
    console.print(Text(f"\n{_done(summary)} in {spoken(summary.seconds)}\n", style="bold"))
    skills = skills_table(summary.before, summary.after, scale=scale, after_title="after", trained=summary.rl_skill)
    console.print(skills)
    console.print(Text(""))
    if not summary.steps:
        console.print(Text("KL from the reference: not measured; that is done in each step, and none was taken"))
    elif config.kl.needs_reference:
        console.print(_kl_table(summary.final_metrics))
        console.print(Text(_beta_text(config, summary.final_metrics)), soft_wrap=True)
    else:
        console.print(Text(f"KL from the reference: not measured; beta is 0, so no reference was loaded{MONITOR}"))
    console.print(Text(""))
    for name, text in _files(config, summary):
        console.print(Text.assemble((f"{name:<12} ", "dim"), text), soft_wrap=True)


def _done(summary: RunSummary) -> str:
    """What the run did, in a few words."""
    if summary.steps:
        return f"done: {summary.steps} steps"
    return "done: no step was taken (--max_steps 0); the model was evaluated as it is,"


def _kl_table(metrics: Mapping[str, float]) -> Table:
    table = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False)
    table.add_column("KL from the reference (last step)", min_width=16)
    for estimator in ESTIMATORS:
        table.add_column(estimator, justify="right", min_width=7)
    for suffix, name in ROWS.items():
        names = [f"kl/{estimator}{suffix}" for estimator in ESTIMATORS]
        if suffix == "_original" and not metrics.keys() & names:
            continue  # only a moving reference has left its start
        table.add_row(name, *(fixed(4)(metrics[each]) if each in metrics else "-" for each in names))
    return table


def _beta_text(config: TrainConfig, metrics: Mapping[str, float]) -> str:
    kl, beta = config.kl, metrics.get("beta", config.kl.beta)
    held = "fixed" if kl.controller_name == "fixed" else describe_controller(kl)
    if "length/mean" not in metrics:
        return f"beta: {short(beta)} ({held})"
    price = configured_price(
        kl,
        config.loss,
        group_size=config.rollout.num_generations,
        mean_length=metrics["length/mean"],
        max_length=config.rollout.max_completion_length,
        beta=beta,
    )
    return f"beta: {describe_controller(kl)}; price: {describe_price(price, group_size=config.rollout.num_generations)}"


def _files(config: TrainConfig, summary: RunSummary) -> list[tuple[str, str]]:
    """The paths of the run's files; only files that exist are named."""
    folder = summary.output_dir
    lines = [("run", f"{folder}")]
    for name, file in (("metrics", "metrics.jsonl"), ("completions", "completions.jsonl")):
        if (folder / file).exists():
            lines.append((name, str(folder / file)))
    saved = checkpoint_folders(folder)
    if saved:
        lines.append(("checkpoints", f"{saved[-1].parent}: {', '.join(path.name for path in saved)}"))
    if "tensorboard" in config.run.report_to:
        lines.append(("TensorBoard", f"{tool('tensorboard')} --logdir {folder}"))
    lines.append(("look at it", f"{tool('klamp')} report {folder}"))
    if saved:
        more = max(1, 2 * summary.steps)
        lines.append(("continue", resume_command(config, folder, max_steps=more)))
    return lines
