"""`klamp evaluate --checkpoint FOLDER`: what a policy that is there scores, how far it went, what it kept."""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from klamp.cli.commands import read_command
from klamp.cli.display import skill_rows
from klamp.cli.text import number, say, show_paragraph, show_table
from klamp.errors import ConfigError, KLWarning, RunFolderError
from klamp.files import at_home, followed
from klamp.lab.ablate.results import Outcome, retained
from klamp.lab.config import TrainConfig
from klamp.lab.folders import NAMED, newest_complete, number_of, policy_in, read_config, run_of
from klamp.lab.tasks.base import TaskConfig
from klamp.names import CONFIG
from klamp.report.run import ScoreFormat

OF_ANY_TASK = ("eval_size", "task_seed")
"""Fields of a task that another task takes over from it."""


class EvaluatedPolicy(NamedTuple):
    """The policy that is evaluated: its weights (None: the configuration's model), and where it started, if known."""

    config: TrainConfig
    weights: str | None
    start: str | None
    steps: int | None = None


def run(argv: Sequence[str]) -> int:
    """Evaluate a policy and print its scores, as text or one JSON object; returns the exit code."""
    options, changes = read_command("evaluate", argv)
    with warnings.catch_warnings(action="ignore", category=KLWarning):  # of a KL that nobody is about to train with
        subject = find_subject(options.checkpoint, changes)
    from klamp.lab.ablate.one_run import evaluate

    outcome = evaluate(subject.config, subject.weights, start=subject.start is not None, prompts=options.kl_prompts)
    if options.json:
        say(json.dumps(_as_object(options.checkpoint, subject, outcome), indent=2))
    else:
        show(options.checkpoint, subject, outcome)
    return 0


def find_subject(checkpoint: str, changes: Mapping[str, Any]) -> EvaluatedPolicy:
    """The policy that `--checkpoint` names: a run's newest, or any; `changes` are fields that differ from the run's."""
    changes = dict(changes)
    start = changes.pop("ref_model", None)
    inside = _in_a_run(followed(at_home(checkpoint)))
    if inside is None:
        named = {"model": start or checkpoint, "tokenizer": None if start is None else checkpoint}
        return EvaluatedPolicy(TrainConfig.from_flat(named | changes), None if start is None else checkpoint, start)
    run, saved = inside
    if saved is None:
        why, fix = "only a saved policy can be scored", "let it take its first steps, or name another run"
        raise RunFolderError("the run has no checkpoint", got=str(run), why=why, fix=fix)
    if start is not None and read_config(run)[1].model.lora_r:
        why, fix = "its start is the model that it was trained on", "leave --ref_model out"
        raise ConfigError("--ref_model cannot be given for an adapter", got=start, why=why, fix=fix)
    updates = read_config(run)[1].optim.num_iterations if saved.name.startswith("checkpoint-") else 1
    steps = number_of(saved) // updates
    values = read_config(run, steps)[1].flat() | {"resume": False, "output_dir": None}
    if start is not None:
        values |= {"model": start, "tokenizer": values["tokenizer"] or values["model"]}
    if changes.get("task", values["task"]) != values["task"]:  # another task brings its own reward and columns
        values |= {
            field.name: field.default for field in dataclasses.fields(TaskConfig) if field.name not in OF_ANY_TASK
        }
    values["num_generations"] = max(2, values["num_generations"])  # nothing is trained: a reward needs no group here
    return EvaluatedPolicy(TrainConfig.from_flat(values | changes), str(policy_in(saved)), values["model"], steps)


def _in_a_run(folder: Path) -> tuple[Path, Path | None] | None:
    """The run that a folder is or belongs to, and the checkpoint that it names (of a run the newest, if it has one)."""
    if (folder / CONFIG).is_file():
        return folder, newest_complete(folder)
    for checkpoint in (folder, folder.parent):  # the checkpoint itself, or the model in it
        run = run_of(checkpoint)
        if NAMED.fullmatch(checkpoint.name) and (run / CONFIG).is_file():
            return run, checkpoint
    return None


def _as_object(checkpoint: str, subject: EvaluatedPolicy, outcome: Outcome) -> dict[str, Any]:
    return {
        "checkpoint": checkpoint,
        "weights": subject.weights or subject.config.model.model,
        "steps": subject.steps,
        "start": subject.start,
        "task": subject.config.task.task,
        "rl_skill": outcome.rl_skill,
        "scores": dict(outcome.after),
        "before": dict(outcome.before),
        "retained": dict(zip(("before", "after", "forgotten"), retention(outcome), strict=True)),
        **outcome.numbers,
    }


def retention(outcome: Outcome) -> tuple[float | None, float | None, float | None]:
    """The mean score of the skills that were not trained, before and after training, and how much it fell."""
    before, after = retained(outcome, outcome.before), retained(outcome, outcome.after)
    return before, after, None if before is None or after is None else before - after


def show(checkpoint: str, subject: EvaluatedPolicy, outcome: Outcome) -> None:
    """Print the scores and the KL of a policy, before and after training."""
    steps = "" if subject.steps is None else f", after {subject.steps} steps"
    say(f"{checkpoint}{steps}; greedy answers to held-out prompts of {subject.config.task.task}\n")
    trained = "" if subject.start is None else outcome.rl_skill
    show_table("skills", ("", "start", "now", "change"), skill_rows(outcome.before, outcome.after, trained))
    say()
    if subject.start is None:
        show_paragraph("no start is known, so there is no KL and no retention: --ref_model names it", label="KL")
        return
    title = f"exact KL to the start, {subject.start}, on {outcome.rl_skill}"
    rows = [
        (unit, *(number(outcome.numbers[f"kl/{direction}{end}"]) for direction in ("reverse", "forward")))
        for end, unit in {"": "nats per token", "_sequence": "nats per completion"}.items()
    ]
    show_table(title, ("", "KL(policy‖start)", "KL(start‖policy)"), rows)
    if "teacher/kl" in outcome.numbers:
        say(f"\nKL(policy‖teacher): {number(outcome.numbers['teacher/kl'])} nats per token, k3 of the sampled tokens")
    before, after, forgotten = retention(outcome)
    if after is not None:
        scale = ScoreFormat.fitting(outcome.before, outcome.after)
        lost = scale.change(0.0, forgotten).lstrip("+")
        say()
        text = f"{scale.write(after)} of {scale.write(before)}, the mean of the other skills; {lost} forgotten"
        show_paragraph(text, label="retention")
