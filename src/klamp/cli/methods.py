"""`klamp report RUN --methods`: the paragraph of a paper's section of methods, from the folder of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TextIO

from klamp.cli.describe import describe_reference
from klamp.cli.output_file import check_output, write_output
from klamp.errors import DataError
from klamp.records.details import read_versions
from klamp.records.klamp_run import is_klamp_run, read_config, read_klamp_run
from klamp.report.methods import Setting, methods
from klamp.training.config import TrainConfig
from klamp.training.folders import CONFIG

MARK = "% klamp report --methods"
"""How the text begins, and so every file of it."""
TRAINERS = {"local": "klamp's trainer", "trl": "TRL", "verl": "verl", "tinker": "klamp's trainer at a Tinker service"}
LAST = 5
"""Steps at the end of a run that its last beta is the mean of."""


def show_methods(runs: Sequence[Path], output: Path | None, stream: TextIO) -> None:
    """Print the paragraph of each run, or write them into a file.

    Args:
        runs: folders of klamp runs.
        output: the file; None: they are printed.
        stream: where to print.

    Raises:
        DataError: a record without a configuration of klamp's, or a damaged one.
        RunFolderError: the file exists and is none of these, or its folder does not exist.
    """
    if output is not None:
        check_output(
            output,
            example="methods.tex",
            refused="the file exists and holds no methods of klamp's",
            is_one=lambda text: text.startswith(MARK),
        )
    text = "\n\n".join(methods_of(run) for run in runs) + "\n"
    if output is None:
        print(text, end="", file=stream, flush=True)
        return
    write_output(output, text, what="the paragraph")
    print(f"{output}: {len(runs)} paragraph{'s' if len(runs) != 1 else ''} in LaTeX", file=stream, flush=True)


def methods_of(run: Path) -> str:
    """The paragraph of one run, from its config.yaml, its versions.json and, where it took steps, its metrics.

    Raises:
        DataError: it is no folder of a klamp run, or a file in it is damaged.
    """
    if not (run / CONFIG).is_file():
        raise DataError(
            "the methods of a run need its configuration",
            got=str(run),
            why=f"it holds no {CONFIG}, as the folder of a klamp run does"
            if run.exists()
            else "the path does not exist",
            fix="name such a folder, or use `klamp explain` with the settings of another trainer",
        )
    _, config = read_config(run)
    means = _means(run)
    return f"{MARK}: {run.name}\n{methods(config.kl, config.loss, setting_of(config, means, read_versions(run)))}"


def setting_of(config: TrainConfig, means: Mapping[str, float], versions: Mapping[str, str]) -> Setting:
    """What a configuration and its record say besides KL and loss.

    Args:
        config: of the run.
        means: `length/mean` over the run and `beta` over its last steps, where they are recorded.
        versions: name of a package -> its version.
    """
    model, optim, rollout = config.model, config.optim, config.rollout
    moves = f"a LoRA adapter of rank {model.lora_r} on " if model.lora_r else ""
    return Setting(
        model=f"{moves}{model.model} ({model.dtype})",
        steps=config.run.max_steps,
        reference=describe_reference(config),
        trainer=TRAINERS[config.run.backend],
        optimizer=f"AdamW, learning rate {optim.learning_rate:g}, {optim.lr_scheduler_type}",
        prompts=rollout.prompts_per_step,
        group_size=rollout.num_generations,
        max_length=rollout.max_completion_length,
        mean_length=means.get("length/mean"),
        last_beta=means.get("beta"),
        updates=optim.num_iterations,
        sampling=_sampling(config),
        versions={name: version for name, version in versions.items() if name in _used(config)},
    )


def _used(config: TrainConfig) -> list[str]:
    """The packages that a run's numbers depend on, of those that are recorded."""
    ways = {
        "trl": config.run.backend == "trl",
        "verl": config.run.backend == "verl",
        "vllm": config.run.backend == "verl" or config.rollout.sampler == "vllm",
        "peft": config.model.lora_r > 0,
        "reasoning-gym": config.task.task.startswith("reasoning_gym:"),
    }
    return ["klamp", "python", "torch", "transformers", *(name for name, used in ways.items() if used)]


def _sampling(config: TrainConfig) -> str:
    rollout = config.rollout
    parts = [f"temperature {rollout.temperature:g}"]
    parts += [f"top-p {rollout.top_p:g}"] if rollout.top_p < 1 else []
    parts += [f"top-k {rollout.top_k}"] if rollout.top_k else []
    parts += ["those that reach L are left out of the loss"] if rollout.mask_truncated_completions else []
    return ", ".join(parts)


def _means(run: Path) -> dict[str, float]:
    """The mean length over the run and the mean beta of its last steps; empty where nothing was logged."""
    rows = read_klamp_run(run).rows if is_klamp_run(run) else []
    lengths = [row.metrics["length/mean"] for row in rows if "length/mean" in row.metrics]
    betas = [row.metrics["beta"] for row in rows if "beta" in row.metrics][-LAST:]
    found = {"length/mean": lengths, "beta": betas}
    return {name: fmean(values) for name, values in found.items() if values}
