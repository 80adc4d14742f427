"""`klamp evaluate --checkpoint FOLDER`: what a policy that is there scores, how far it went, what it kept."""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from klamp.ablation.results import Outcome, retained
from klamp.cli.arguments import apart
from klamp.cli.display import skill_rows
from klamp.cli.flags import fields_of, read_argv, train_fields
from klamp.cli.help import EVALUATED
from klamp.cli.options import EvaluateOptions
from klamp.cli.text import fixed, say, show_paragraph, show_table
from klamp.errors import ConfigError, KLWarning, RunFolderError
from klamp.files import at_home, followed
from klamp.records.klamp_run import read_config
from klamp.report.run import ScoreFormat
from klamp.tasks.base import TaskConfig
from klamp.training.config import TrainConfig
from klamp.training.folders import CHECKPOINTS, CONFIG, NAMED, checkpoint_folders, number_of, policy_in

OF_ANY_TASK = ("eval_size", "task_seed")
"""Fields of a task that another task takes over from it."""


@dataclass(frozen=True, kw_only=True)
class EvaluatedPolicy:
    """The policy that is evaluated."""

    config: TrainConfig
    """The configuration to evaluate it with; its model is the start, or without one the policy."""
    weights: str | None
    """Folder (or id) of the policy, or of its adapter; None: it is the configuration's model."""
    start: str | None
    """The model that training started from, if it is known."""
    steps: int | None = None
    """The number of steps in the checkpoint's name, if it is a checkpoint."""


def run(argv: Sequence[str]) -> int:
    """Evaluate a policy and print its numbers."""
    options, changes = read_request(argv)
    checkpoint = options.checkpoint or ""
    subject = find_subject(checkpoint, changes)
    from transformers.utils.logging import disable_progress_bar

    from klamp.ablation.measure import evaluate

    disable_progress_bar()
    outcome = evaluate(subject.config, subject.weights, start=subject.start is not None, prompts=options.kl_prompts)
    if options.json:
        say(json.dumps(as_object(checkpoint, subject, outcome), indent=2))
    else:
        show(checkpoint, subject, outcome)
    return 0


def read_request(argv: Sequence[str]) -> tuple[EvaluateOptions, dict[str, Any]]:
    """The options of a command line, and the fields of the run that it replaces."""
    taken = {name: train_fields()[name] for name in EVALUATED}
    given = read_argv(fields_of(EvaluateOptions) | taken, argv, command="klamp evaluate")
    options, changes = apart(given, EvaluateOptions)
    if not options.checkpoint:
        raise ConfigError(
            "--checkpoint is missing",
            why="there is nothing to evaluate",
            fix="klamp evaluate --checkpoint FOLDER: a run's folder, one of its checkpoints, or any model",
        )
    return options, changes


def find_subject(checkpoint: str, changes: Mapping[str, Any]) -> EvaluatedPolicy:
    """The policy that `--checkpoint` names, with the configuration of its run if it has one.

    Args:
        checkpoint: a run's folder, a checkpoint, or any model.
        changes: fields that differ from the run's.

    Raises:
        RunFolderError: a run without a checkpoint.
        ConfigError: flags that do not fit the run.
        DataError: a damaged configuration.
    """
    changes = dict(changes)
    start = changes.pop("ref_model", None)
    inside = _in_a_run(followed(at_home(checkpoint)))
    if inside is None:
        named = {"model": start or checkpoint, "tokenizer": None if start is None else checkpoint}
        weights = None if start is None else checkpoint
        return EvaluatedPolicy(config=_config(named | changes), weights=weights, start=start)
    run, saved = inside
    config = read_config(run)[1]
    if saved is None:
        raise RunFolderError(
            "the run has no checkpoint",
            got=str(run),
            why="the weights of a policy are in its checkpoints",
            fix="let it take its first steps, or name another run",
        )
    if start is not None and config.model.lora_r:
        raise ConfigError(
            "--ref_model cannot be given for an adapter",
            got=f"--ref_model {start}, lora_r={config.model.lora_r} in {run / 'config.yaml'}",
            why="an adapter belongs to the model that it was trained on, which is its start",
            fix="leave --ref_model out",
        )
    steps = number_of(saved) // (config.optim.num_iterations if saved.name.startswith("checkpoint-") else 1)
    values = read_config(run, steps)[1].flat() | {"resume": False, "output_dir": None}
    if start is not None:
        values |= {"model": start, "tokenizer": values["tokenizer"] or values["model"]}
    if changes.get("task", values["task"]) != values["task"]:  # another task brings its own reward and columns
        values |= {each.name: each.default for each in dataclasses.fields(TaskConfig) if each.name not in OF_ANY_TASK}
    values["num_generations"] = max(2, values["num_generations"])  # nothing is trained: a reward needs no group here
    config = _config(values | changes)
    return EvaluatedPolicy(config=config, weights=str(policy_in(saved)), start=values["model"], steps=steps)


def _in_a_run(folder: Path) -> tuple[Path, Path | None] | None:
    """The run that a folder is or belongs to, and the checkpoint that it names; None: it belongs to no run.

    Of a run, the newest checkpoint; None where it has none yet.
    """
    if (folder / CONFIG).is_file():
        saved = checkpoint_folders(folder)
        return folder, saved[-1] if saved else None
    for checkpoint in (folder, folder.parent):  # the checkpoint itself, or the model in it
        run = checkpoint.parent.parent if checkpoint.parent.name == CHECKPOINTS else checkpoint.parent
        if NAMED.fullmatch(checkpoint.name) and (run / CONFIG).is_file():
            return run, checkpoint
    return None


def _config(values: Mapping[str, Any]) -> TrainConfig:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KLWarning)  # of a KL that nobody is about to train with
        return TrainConfig.from_flat(values)


def as_object(checkpoint: str, subject: EvaluatedPolicy, outcome: Outcome) -> dict[str, Any]:
    """An evaluation as JSON."""
    before, after, forgotten = retention(outcome)
    return {
        "checkpoint": checkpoint,
        "weights": subject.weights or subject.config.model.model,
        "steps": subject.steps,
        "start": subject.start,
        "task": subject.config.task.task,
        "rl_skill": outcome.rl_skill,
        "scores": dict(outcome.after),
        "before": dict(outcome.before),
        "retained": {"before": before, "after": after, "forgotten": forgotten},
        **outcome.numbers,
    }


def retention(outcome: Outcome) -> tuple[float | None, float | None, float | None]:
    """The mean score of the skills that were not trained, before and after training, and how much it fell."""
    before, after = retained(outcome, outcome.before), retained(outcome, outcome.after)
    return before, after, None if before is None or after is None else before - after


def show(checkpoint: str, subject: EvaluatedPolicy, outcome: Outcome) -> None:
    """Print the evaluation: the skills, the KL to the start, what is left of the other skills."""
    scale = ScoreFormat.fitting(outcome.before, outcome.after)
    steps = "" if subject.steps is None else f", after {subject.steps} steps"
    say(f"{checkpoint}{steps}; greedy answers to held-out prompts of {subject.config.task.task}\n")
    trained = "" if subject.start is None else outcome.rl_skill
    show_table("skills", ("", "start", "now", "change"), skill_rows(outcome.before, outcome.after, trained))
    say()
    if subject.start is None:
        show_paragraph("no start is known, so there is no KL and no retention: --ref_model names it", label="KL")
        return
    directions, units = ("reverse", "forward"), {"": "nats per token", "_sequence": "nats per completion"}
    kls = {end: [fixed(4)(outcome.numbers[f"kl/{each}{end}"]) for each in directions] for end in units}
    title = f"exact KL to the start, {subject.start}, on {outcome.rl_skill}"
    show_table(title, ("", *DIRECTIONS), [(unit, *kls[end]) for end, unit in units.items()])
    before, after, forgotten = retention(outcome)
    if after is not None:
        kept, lost = scale.write(before), scale.change(0.0, forgotten).lstrip("+")
        say()
        text = f"{scale.write(after)} of {kept}, the mean of the other skills; {lost} forgotten"
        show_paragraph(text, label="retention")


DIRECTIONS = ("KL(policy‖start)", "KL(start‖policy)")
