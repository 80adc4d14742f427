"""The commands: what each is called, does and takes; the fields of a class of options become flags and their help.

The text of a class is the command's help, its first line is in `klamp --help`. Nothing but the standard library is
loaded for them. Metadata of a field: `word`, its name in the help if it is a word after the command and no flag;
`least`, the smallest number that it takes.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import itertools
import re
import textwrap
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Literal, NamedTuple

from klamp.cli.flags import (
    Field,
    add_field,
    configured_fields,
    configured_names,
    fields_of,
    read_argv,
    underscored,
    unknown_flag,
)
from klamp.doctor.history import Verifier


@dataclass(frozen=True, kw_only=True)
class BaseOptions:
    """Where a configuration comes from."""

    config: str | None = None
    """A YAML file of flags' names and values, flat or by section (kl, loss, task, ...)."""
    preset: str | None = None
    """KL and loss fields of a published recipe; `klamp explain` lists the recipes."""


@dataclass(frozen=True, kw_only=True)
class TrainOptions(BaseOptions):
    """Train a model with GRPO; without arguments the built-in task.

    That is arithmetic for a small model: minutes on a CPU, no download. The last one of these wins: defaults, --preset,
    --config, flags.

      klamp train
      klamp train --config config_demo.yaml --kl_penalty 0.01 --output_dir out --max_steps 500
      klamp train --model DIR_OR_HUB_ID --task data.jsonl --reward math_verify --lora_r 16 --dry_run
    """

    dry_run: bool = False
    """Print what would run, and start nothing."""
    prepare: bool = False
    """Print how a run is divided over GPUs, why, and the commands to type there (backend trl, verl)."""


@dataclass(frozen=True, kw_only=True)
class AblateOptions(BaseOptions):
    """Compare settings: a grid of flags over seeds, one table, one picture.

    A flag of klamp train with one value holds for all arms; with several values it is compared, and several such flags
    make a grid. The same command with the same --output_dir continues what is not done.

      klamp ablate --beta 0 0.001 0.01 0.1 --seeds 3
      klamp ablate --kl_clip_method none hard --kl_clip_threshold 0.05 0.1 --seeds 5 7 11 --dry_run
      klamp ablate --plan plan.yaml --output_dir out --ray auto
      klamp ablate --runs output_beta_*     # compares existing runs
    """

    dry_run: bool = False
    """Print what would run, and start nothing."""
    seeds: tuple[int, ...] = ()
    """One number: how many (3 is 0 1 2). Several: those seeds. None: 3, or the plan's."""
    runs: tuple[Path, ...] = ()
    """Folders of existing runs (or of an ablation): they are measured and compared, nothing is trained."""
    plan: str | None = None
    """YAML file with `base`, `sweep` or `arms`, and `seeds`."""
    output_dir: str | None = None
    """Folder of the ablation; None: the next free runs/ablation-NAME-NNN."""
    kl_prompts: int | None = field(default=None, metadata={"least": 1})
    """Held-out prompts that a run's KL is measured on; None: 256, or the plan's number."""
    workers: int | None = field(default=None, metadata={"least": 1})
    """Processes at a time; None: one per core, or one on a GPU."""
    ray: str | None = None
    """Run on the Ray cluster at this address; local: a cluster of this machine only, started for the ablation."""
    cpus_per_run: float | None = field(default=None, metadata={"least": 0})
    """With --ray: CPUs of a run, and its threads; None: 1."""
    gpus_per_run: float | None = field(default=None, metadata={"least": 0})
    """With --ray: GPUs of a run; a fraction shares one."""


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """Score an existing run or model, and its exact KL to its start.

    A run's folder, or one of its checkpoints, includes its task and its start; for any other model give --task and
    --ref_model (here: the start).

      klamp evaluate --checkpoint output_beta_0.01
      klamp evaluate --checkpoint DIR --ref_model START --task data.jsonl --reward math_verify
    """

    checkpoint: str
    """A run's folder (its newest checkpoint), one of its checkpoints, or any model: a folder, a hub id, `builtin`."""
    kl_prompts: int = field(default=256, metadata={"least": 1})
    """Held-out prompts of the trained skill that the KL is measured on, at most."""
    json: bool = False
    """One JSON object instead of text."""


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """Prove klamp's claims on this machine, in seconds.

    They are checked by enumerating small worlds in float64. The exit code is 1 if a claim fails.

      klamp verify               # every claim
      klamp verify direction     # is GRPO's k3 formula backwards? for whose tokens is it right?
      klamp verify convergence   # which settings reach the optimum that they claim?
    """

    question: Literal["direction", "convergence"] | None = field(default=None, metadata={"word": "QUESTION"})
    """One question instead of every claim."""


@dataclass(frozen=True, kw_only=True)
class ExplainOptions(BaseOptions):
    """What a configuration's KL does, in words and numbers.

    Nothing is loaded or trained; gradients are measured by enumeration. Every field of klamp train can be given as a
    flag.

      klamp explain recommended
      klamp explain config_demo.yaml --length 2000
      klamp explain --kl_estimator k3 --kl_gradient own --beta 0.04
    """

    names: tuple[str, ...] = field(default=(), metadata={"word": "CONFIG"})
    """Presets, printed forms and YAML files; none: the flags alone."""
    length: int | None = field(default=None, metadata={"least": 1})
    """Expected completion length in tokens, for prices, budgets and costs; None: kl_reference_length, or
    max_completion_length if it is given, else 1000."""


@dataclass(frozen=True, kw_only=True)
class AuditOptions:
    """What the KL of an installed trainer, or of any function, does.

    The exit code is 0 if each KL follows the divergence that it names, 1 if one does not, 2 if a name cannot be
    audited, 3 if a KL could not be computed.

      klamp audit trl
      klamp audit my_losses:distil --means forward
    """

    names: tuple[str, ...] = field(metadata={"word": "NAME"})
    """Hosts that are installed here, or any `module:function`."""
    means: Literal["reverse", "forward", "js"] = "reverse"
    """The divergence that a function is meant to be."""


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """Whether the KL in a micro-batch is right, from a file.

    Needs neither torch nor the trainer. The exit code is 0 if nothing is wrong, 1 if something is, 2 if the file cannot
    be read, 3 if the capture cannot tell.

      klamp check check.safetensors --json
    """

    path: Path = field(metadata={"word": "FILE"})
    """Capture file that klamp.check(..., save=FILE) wrote."""
    json: bool = False
    """One JSON object instead of text."""


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """What is wrong with a run, from what it left behind.

    Shows the evidence and the next step. PATH is what the run left: a klamp run folder, TRL's trainer_state.json (or
    the folder of its checkpoints), a TensorBoard folder, a W&B offline run, JSONL of metrics (verl's file log too), or
    JSONL of completions with token log-probabilities (klamp's, prime-rl's and verl's names). The exit code is 0 for a
    healthy run, 1 if an alarm rose, 2 if the record cannot be read or holds nothing to check, 3 if no alarm rose and
    the KL could not be checked.

      klamp doctor outputs/checkpoint-500/trainer_state.json --loss_type dr_grpo --verifier rules
      klamp doctor outputs --json --fail-on huge-values kl-spike
      klamp doctor log.jsonl --map kl=my_kl reward=my_reward
    """

    path: Path = field(metadata={"word": "PATH"})
    """Folder or file that a run left behind."""
    json: bool = False
    """One JSON object instead of text."""
    fail_on: tuple[str, ...] = ()
    """Exit with 1 for these alarms and notes only; none: for every alarm."""
    beta: float | None = field(default=None, metadata={"least": 0})
    """Coefficient of the KL, if the record does not have it."""
    loss_type: str | None = None
    """Type of the loss (grpo, dr_grpo, ...), if the record does not have it."""
    teacher_coef: float | None = field(default=None, metadata={"least": 0})
    """Coefficient of the KL to a teacher, if the record does not have it."""
    verifier: Verifier | None = None
    """What gives the reward (rules, or a model), if the record does not have it."""
    map: tuple[str, ...] = ()
    """OURS=THEIRS: klamp's name of a metric (or kl, reward, length, ...), and its name in the record."""


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """One HTML file that shows a run, or compares several.

    Headline numbers, alarms, curves, completions with every token shaded by its log-ratio, configuration, versions.

      klamp report runs/arithmetic-001 runs/arithmetic-002 --output compared.html
      klamp report sweeps/beta
    """

    runs: tuple[Path, ...] = field(metadata={"word": "RUN"})
    """Anything that `klamp doctor` reads, or the folder of an ablation, whose runs are compared."""
    output: Path | None = None
    """File to write; None: report.html in the folder of the one run (or sweep) that is named, else in this folder."""


class Command(NamedTuple):
    """A command: its function takes the arguments after its word, prints to stdout and returns the exit code."""

    function: str  # where it is in klamp.cli, `module:function`
    options: type[Any]
    alone: bool = False  # whether it works without arguments; if not, its help is shown then
    refusal: int | None = None  # the exit code of any error; None: by the error's kind
    lists: tuple[str, ...] = ()  # where the names for its help are: `module:attribute`


RECIPES = ("klamp.config:PRESETS", "klamp.verify.judge:FORMS")
COMMANDS = {
    "train": Command("train:run", TrainOptions, alone=True),
    "ablate": Command("ablate:run", AblateOptions),
    "evaluate": Command("evaluate:run", EvaluateOptions),
    "verify": Command("verify:run", VerifyOptions, alone=True),
    "explain": Command("verify:run_explain", ExplainOptions, lists=RECIPES),
    "audit": Command("audit:run", AuditOptions, refusal=2, lists=("klamp.audit:HOSTS",)),
    "check": Command("doctor:run_check", CheckOptions, refusal=2),
    "doctor": Command("doctor:run", DoctorOptions, refusal=2, lists=("klamp.doctor.alarms:ALARMS",)),
    "report": Command("report:run", ReportOptions),
}
"""Word after `klamp` -> the command."""
EVALUATED = (
    *("task", "reward", "prompt_column", "answer_column", "skill_column", "chat_template", "system_prompt"),
    *("eval_size", "eval_split", "task_seed", "max_completion_length", "temperature", "ref_model", "tokenizer"),
    *("dtype", "cpu"),
)
"""Fields of the configuration that an evaluation depends on."""


def fields_after(name: str) -> dict[str, Field]:
    """Every field that a command takes, by its name: its own, then the configuration's."""
    own = fields_of(COMMANDS[name].options)
    if name not in ("train", "ablate", "explain", "evaluate"):
        return own
    omitted = {*own, *(("seed", "resume") if name == "ablate" else ())}  # an ablation sets them
    taken = EVALUATED if name == "evaluate" else [field for field in configured_fields() if field not in omitted]
    return own | {field: configured_fields()[field] for field in taken}


def check_flags(name: str, argv: Sequence[str]) -> None:
    """Refuse a flag that a command cannot have, before torch is imported for the classes of the configuration."""
    names = {field.name for field in fields_of(COMMANDS[name].options).values() if not field.word}
    configured = {"evaluate": EVALUATED, **dict.fromkeys(("train", "ablate", "explain"), configured_names())}
    flags = {f"--{field}" for field in names.union(configured.get(name, ()))}
    for word in itertools.takewhile(lambda word: word != "--", map(underscored, argv)):
        flag = word.partition("=")[0].replace("--no_", "--")
        if re.match("--?[A-Za-z]", word) and " " not in word and flag not in flags:
            raise unknown_flag(word, flags, command=f"klamp {name}")


def read_command(name: str, argv: Sequence[str], several: Collection[str] = ()) -> tuple[Any, dict[str, Any]]:
    """The options of a command, and the fields of the configuration that its arguments set; errors as `read_argv`."""
    values = read_argv(fields_after(name), argv, command=f"klamp {name}", several=several)
    options = COMMANDS[name].options
    own = {field: values.pop(field) for field in fields_of(options) if field in values}
    return options(**own), values


def help_of(name: str) -> str:
    """The help of a command: its text, words, flags by section, and names; explain leaves the fields to train's."""
    command = COMMANDS[name]
    fields = fields_of(command.options) if name == "explain" else fields_after(name)
    words = "".join(f"{field.word} " for field in fields.values() if field.word)
    parts = (inspect.getdoc(command.options) or "").split("\n\n")
    about = "\n\n".join(part if part.startswith("  ") else textwrap.fill(part, 100) for part in parts)
    names = ", ".join(dict.fromkeys(listed for place in command.lists for listed in resolve_name(place)))
    listed = textwrap.fill(f"names: {names}", 100, break_on_hyphens=False) if names else None
    texts = {"usage": f"klamp {name} {words}[flags]", "description": about, "epilog": listed}
    layout = functools.partial(argparse.RawDescriptionHelpFormatter, max_help_position=30, width=100)
    parser = argparse.ArgumentParser(**texts, formatter_class=layout, add_help=False)
    for section, part in itertools.groupby(fields.values(), lambda field: field.section):
        group = parser.add_argument_group(section or "options")
        for flag in part:
            add_field(group, flag)
    return parser.format_help().rstrip()
