"""The help of every command: how it is called, what it is for, examples, its flags; argparse lays it out.

A command that takes the configuration of a run has one screen of what one sets first, and the rest by section.
"""

from __future__ import annotations

import argparse
import inspect
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from pkgutil import resolve_name
from typing import Any

from klamp.cli import options
from klamp.cli.flags import Field, add_field, fields_of, train_fields
from klamp.cli.text import room
from klamp.errors import unknown_name

COLUMN = 30
"""Columns before a flag's text."""


class _Layout(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=COLUMN, width=room())

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False)  # names such as exact-objective stay whole


def help_text(command: str, topic: str = "") -> str:
    """The help of a command as text.

    Args:
        command: its name.
        topic: a section of the configuration, or `all`, where the command takes the configuration; "": the first page.

    Raises:
        UnknownNameError: no such topic; names the nearest.
    """
    page = COMMANDS[command]
    examples = "\n  ".join(("examples:", *page.examples))
    parser = argparse.ArgumentParser(
        usage=f"klamp {command} {page.usage}",
        description=None if topic else f"{textwrap.fill(page.about, room())}\n\n{examples}",
        formatter_class=_Layout,
        add_help=False,
    )
    parts = _parts(command, page)
    if page.first:
        titles = ", ".join(f"{title} ({len(part)})" for title, part in parts.items())
        more = f"every flag: klamp {command} --help SECTION or all; sections: {titles}"
    else:
        more = "; ".join(f"{title}: {', '.join(resolve_name(names))}" for title, names in page.lists.items())
    if not topic:
        parser.epilog = textwrap.fill(more, room(), break_on_hyphens=False)
    if page.first and not topic:
        known = {name: each for part in parts.values() for name, each in part.items()}
        parts = {title: {name: known[name] for name in names} for title, names in page.first.items()}
    elif topic in parts:
        parts = {topic: parts[topic]}
    elif topic not in ("", "all"):
        raise unknown_name(f"part of `klamp {command} --help`", topic, {*parts, "all"})
    for title, part in parts.items():
        group = parser.add_argument_group(title, _about(title) if page.first and topic else None)
        for each in part.values():
            text = _short(each) if page.first and not topic else _full(each)
            add_field(group.add_argument, each, text=text.replace("%", "%%"))
    return parser.format_help().rstrip()


def _parts(command: str, page: Command) -> dict[str, dict[str, Field]]:
    """Heading -> fields: the command's own, then those of the configuration that it takes, by section."""
    own = fields_of(page.options)
    if not page.first:
        words = {name: each for name, each in own.items() if each.word}
        flags = {name: each for name, each in own.items() if not each.word}
        taken = {name: train_fields()[name] for name in page.takes}
        parts = {"arguments": words, "flags": flags, "of the evaluation": taken}
        return {title: part for title, part in parts.items() if part}
    parts = {command: {**own, "preset": train_fields()["preset"]}}
    for name, each in train_fields().items():
        if each.section and name not in page.hidden:
            parts.setdefault(each.section, {})[name] = each
    return parts


def _about(section: str) -> str | None:
    """What a section of the configuration holds."""
    from klamp.training.config import section_classes

    text = (inspect.getdoc(section_classes().get(section)) or "").partition("\n")[0]
    return textwrap.fill(text, room() - 2) if section in section_classes() else None


def _short(each: Field) -> str:
    """The text of a field in one line: its first clause, its names, its default."""
    clause, names, default = re.split(r"[.;:](?:\s|$)", each.text)[0], each.choices or each.suggested, _default(each)
    clause += f": {', '.join(names)}" if names else ""
    default = f" ({default})" if default else ""
    return textwrap.shorten(clause, room() - COLUMN - len(default), placeholder=" ...") + default


def _full(each: Field) -> str:
    """The text of a field with the names that it takes, its other names and its default."""
    names = [] if all(name in each.text for name in each.choices) else each.choices
    one_of = f" One of {', '.join(names or each.suggested)}." if names or each.suggested else ""
    also = f" Also {', '.join(f'--{alias}' for alias in each.aliases)}." if each.aliases else ""
    default = _default(each)
    return f"{each.text}{one_of}{also}" + (f" (default: {default})" if default else "")


def _default(each: Field) -> str:
    """The default of a field as text; empty where it says nothing."""
    if isinstance(each.default, tuple):
        return " ".join(map(str, each.default))
    return "" if each.default in (MISSING, None, "") or each.default is False else str(each.default)


EVALUATED = (
    *("task", "reward", "prompt_column", "answer_column", "skill_column", "chat_template", "system_prompt"),
    *("eval_size", "eval_split", "task_seed", "max_completion_length", "temperature", "ref_model", "tokenizer"),
    *("dtype", "cpu"),
)
"""Fields of `klamp train` that an evaluation depends on."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command: the word after `klamp`.

    `run(argv)` in the module of the same name takes the arguments after that word, prints to stdout and returns the
    exit code; what stops it is raised as a KlampError, and `klamp.cli.main` shows it.
    """

    summary: str
    """What the command does, in one line."""
    alone: bool = False
    """Whether the command works without arguments; if not, its help is shown then."""
    refusal: int | None = None
    """The exit code of any error; None: that of the error's kind."""

    usage: str
    """The usage line, without the command itself."""
    about: str
    """What the command does, in a paragraph."""
    examples: Sequence[str]
    """Examples: whole command lines."""
    options: type[Any]
    """The class of the command's own options."""
    first: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Heading -> fields on the first page of the help; empty: the command's own options."""
    hidden: Sequence[str] = ()
    """Fields of `klamp train` that the command does not take."""
    takes: Sequence[str] = ()
    """Fields of `klamp train` that the command takes, where it does not take the configuration as a whole."""
    lists: Mapping[str, str] = field(default_factory=dict)
    """Heading -> where the names stand that the command knows (presets, hosts, alarms): `module:attribute`."""


COMMANDS: Mapping[str, Command] = {
    "train": Command(
        summary="train a model with GRPO, its KL held; without arguments the built-in task",
        alone=True,
        usage="[flags]",
        about="Trains a language model with GRPO, its KL to a reference held where you want it. Without flags the "
        "built-in arithmetic task: a small model, minutes on a CPU, no download. What stands further right wins: "
        "defaults < --preset < --config < flags.",
        examples=(
            "klamp train",
            "klamp train --config config_demo.yaml --kl_penalty 0.01 --output_dir out --max_steps 500",
            "klamp train --model DIR_OR_HUB_ID --task data.jsonl --reward math_verify --lora_r 16 --dry_run",
        ),
        options=options.TrainOptions,
        first={
            "the run": (
                "model",
                "task",
                "reward",
                "lora_r",
                "max_steps",
                "output_dir",
                "resume",
                "config",
                "dry_run",
                "prepare",
            ),
            "the KL": ("beta", "preset", "target_kl", "kl_gradient", "kl_placement", "kl_clip_method"),
            "a step": ("prompts_per_step", "num_generations", "max_completion_length", "learning_rate", "loss_type"),
        },
    ),
    "ablate": Command(
        summary="compare settings: a grid of flags over seeds, one table, one picture",
        usage="[flags]",
        about="Trains the same thing in several ways, several seeds each, and compares what came out. A flag of klamp "
        "train with one value holds for all arms; with several it is compared, and several such flags make a grid "
        "(fields that hold several values themselves: in a YAML plan only). The same command again goes on where it "
        "stopped: what is done is kept, what failed is tried again.",
        examples=(
            "klamp ablate --beta 0 0.001 0.01 0.1 --seeds 3",
            "klamp ablate --kl_clip_method none hard --kl_clip_threshold 0.05 0.1 --seeds 5 7 11 --dry_run",
            "klamp ablate --plan plan.yaml --output_dir out --ray auto",
            "klamp ablate --runs output_beta_*     # runs that are there already",
        ),
        options=options.AblateOptions,
        first={
            "the ablation": ("seeds", "plan", "output_dir", "ray", "dry_run"),
            "often compared": ("beta", "target_kl", "kl_gradient", "kl_placement", "kl_clip_method", "loss_type"),
            "for all arms": ("config", "preset", "model", "task", "max_steps", "learning_rate"),
        },
        hidden=("seed", "output_dir", "resume"),
    ),
    "evaluate": Command(
        summary="score a run or model that is there, and its exact KL to its start",
        usage="--checkpoint FOLDER [flags]",
        about="Scores a policy that is there: every skill on its held-out prompts, as the run itself did, the exact KL "
        "to the model that training started from, and how much of the other skills was kept. A run's folder, or one "
        "of its checkpoints, brings its task and its start with it; for any other model --task and --ref_model (here: "
        "the start) say them.",
        examples=(
            "klamp evaluate --checkpoint output_beta_0.01",
            "klamp evaluate --checkpoint runs/arithmetic-001/checkpoints/step-000080 --json",
            "klamp evaluate --checkpoint DIR --ref_model START --task data.jsonl --reward math_verify",
        ),
        options=options.EvaluateOptions,
        takes=EVALUATED,
    ),
    "verify": Command(
        summary="prove klamp's claims on this machine, in seconds",
        alone=True,
        usage="[QUESTION] [flags]",
        about="Proves klamp's claims about values, gradients, placements, clips, controllers and number types by "
        "enumerating small worlds in float64; some seconds on one core. The exit code is 1 if a claim fails.",
        examples=(
            "klamp verify               # every claim",
            "klamp verify direction     # is GRPO's k3 formula backwards? for whose tokens is it right?",
            "klamp verify convergence   # which settings reach the optimum that they claim?",
        ),
        options=options.VerifyOptions,
    ),
    "explain": Command(
        summary="what a configuration's KL does, in words and numbers",
        usage="CONFIG [CONFIG ...] [flags]",
        about="Says what a KL term does: which divergence it pulls towards, which share of the sequence's gradient it "
        "keeps, where it clips, its price, its cost, its cautions. Nothing is loaded or trained; gradients are "
        "measured by enumeration.",
        examples=(
            "klamp explain recommended",
            "klamp explain config_demo.yaml --length 2000",
            "klamp explain --kl_estimator k3 --kl_gradient own --beta 0.04",
        ),
        options=options.ExplainOptions,
        lists={"presets": "klamp.config:PRESETS", "printed forms": "klamp.verify.printed_formulas:FORMS"},
    ),
    "audit": Command(
        summary="what the KL of an installed trainer, or of any function, does",
        refusal=2,
        usage="NAME [NAME ...]",
        about="Runs the KL of what is installed here, to a reference and to a teacher, through the enumeration "
        "oracle: the bias of its value, the divergence whose gradient it follows, where that gradient stops, how far "
        "out it is right in each floating-point type; of distillation also its noise at the teacher, padding, and a "
        "teacher of a larger vocabulary. The exit code is 0 if each KL follows the divergence that it names, 1 if one "
        "does not, 2 if a name cannot be audited, 3 if a KL could not be computed.",
        examples=("klamp audit trl", "klamp audit my_losses:kl", "klamp audit my_losses:distil --means forward"),
        options=options.AuditOptions,
        lists={"names": "klamp.audit:HOSTS"},
    ),
    "check": Command(
        summary="whether the KL in a micro-batch is right, from a capture file",
        refusal=2,
        usage="FILE [flags]",
        about="Prints the verdict of klamp.check on a capture file: the policy loss, the KL and its coefficient that "
        "explain the gradient, and what is wrong. Needs neither torch nor the trainer. The exit code is 0 if nothing "
        "is wrong, 1 if something is, 2 if the file cannot be read, 3 if the capture cannot tell.",
        examples=("klamp check check.safetensors", "klamp check check.safetensors --json"),
        options=options.CheckOptions,
    ),
    "doctor": Command(
        summary="what is wrong with a run, from what it left behind",
        usage="PATH [flags]",
        about="Says what is wrong with a run, with the evidence and the next step. PATH is what the run left behind: a "
        "klamp run folder, TRL's trainer_state.json (or the folder of its checkpoints), a TensorBoard folder, a W&B "
        "offline run, JSONL of metrics (verl's file log too), or JSONL of completions with token "
        "log-probabilities (klamp's, prime-rl's and verl's names). The exit code is 0 for a healthy run, 1 where an "
        "alarm rose, 2 where the record cannot be read or holds nothing to check.",
        examples=(
            "klamp doctor runs/arithmetic-001",
            "klamp doctor outputs/checkpoint-500/trainer_state.json --loss_type dr_grpo --verifier rules",
            "klamp doctor runs/arithmetic-001 --check-sync",
            "klamp doctor outputs --json --fail-on huge-values kl-spike",
            "klamp doctor log.jsonl --map kl=my_kl reward=my_reward",
        ),
        options=options.DoctorOptions,
        lists={"alarms": "klamp.diagnostics.alarms:ALARMS"},
    ),
    "report": Command(
        summary="one HTML file that shows a run, or compares several",
        usage="RUN [RUN ...] [flags]",
        about="Writes one self-contained HTML file: headline numbers, alarms, curves over steps, "
        "completions with every token shaded by its log-ratio, configuration and versions. Several runs are compared: "
        "their curves in the same charts, their numbers and configurations side by side.",
        examples=(
            "klamp report runs/arithmetic-001",
            "klamp report runs/arithmetic-001 runs/arithmetic-002 --output compared.html",
            "klamp report sweeps/beta",
        ),
        options=options.ReportOptions,
    ),
}
"""Word after `klamp` -> what is called so."""
