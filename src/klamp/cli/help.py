"""The commands: what each is called, does and takes; and one page of help for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pkgutil import resolve_name
from typing import Any, NamedTuple

from klamp.cli import options
from klamp.cli.flags import help_text, train_fields

EVALUATED = (
    *("task", "reward", "prompt_column", "answer_column", "skill_column", "chat_template", "system_prompt"),
    *("eval_size", "eval_split", "task_seed", "max_completion_length", "temperature", "ref_model", "tokenizer"),
    *("dtype", "cpu"),
)
"""Fields of `klamp train` that an evaluation depends on."""
TAKES: Mapping[str, Callable[[str], bool]] = {
    "train": lambda name: True,
    "ablate": lambda name: name not in ("seed", "output_dir", "resume"),
    "evaluate": EVALUATED.__contains__,
}
"""Command -> whether it shows a field of the configuration in its help."""


class Command(NamedTuple):
    """A command: the word after `klamp`.

    `run(argv)` in the module of the same name takes the arguments after that word, prints to stdout and returns the
    exit code. It raises a KlampError when it cannot go on, and `klamp.cli.main` shows the error.
    """

    summary: str
    """What the command does, in one line."""
    options: type[Any]
    """The class of the command's own options; its text is the first part of the help."""
    alone: bool = False
    """Whether the command works without arguments; if not, its help is shown then."""
    refusal: int | None = None
    """The exit code of any error; None: that of the error's kind."""
    lists: tuple[str, ...] = ()
    """Where the names are that the command knows (presets, hosts, alarms), for its help: `module:attribute`."""


COMMANDS = {
    "train": Command("train a model with GRPO; without arguments the built-in task", options.TrainOptions, alone=True),
    "ablate": Command("compare settings: a grid of flags over seeds, one table, one picture", options.AblateOptions),
    "evaluate": Command("score an existing run or model, and its exact KL to its start", options.EvaluateOptions),
    "verify": Command("prove klamp's claims on this machine, in seconds", options.VerifyOptions, alone=True),
    "explain": Command(
        "what a configuration's KL does, in words and numbers",
        options.ExplainOptions,
        lists=("klamp.config:PRESETS", "klamp.verify.explain:FORMS"),
    ),
    "audit": Command(
        "what the KL of an installed trainer, or of any function, does",
        options.AuditOptions,
        refusal=2,
        lists=("klamp.audit:HOSTS",),
    ),
    "check": Command("whether the KL in a micro-batch is right, from a file", options.CheckOptions, refusal=2),
    "doctor": Command(
        "what is wrong with a run, from what it left behind",
        options.DoctorOptions,
        lists=("klamp.diagnostics.alarms:ALARMS",),
    ),
    "report": Command("one HTML file that shows a run, or compares several", options.ReportOptions),
}
"""Word after `klamp` -> the command."""


def help_of(name: str) -> str:
    """The page of help of a command."""
    options, lists = COMMANDS[name].options, COMMANDS[name].lists
    fields = train_fields() if name in TAKES else {}
    taken = [field for field in fields.values() if field.section and TAKES[name](field.name)]
    return help_text(name, options, taken, [each for names in lists for each in resolve_name(names)])
