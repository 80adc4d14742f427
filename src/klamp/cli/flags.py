"""From argv to options by argparse: the fields of dataclasses are the flags, what stands under them is their help.

argparse finds which words belong to which flag; the type of a field reads them, on a command line and in a file alike.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import math
import re
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass
from difflib import get_close_matches
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NoReturn, TypeVar

from klamp._field_texts import field_texts
from klamp.cli.options import TrainOptions
from klamp.errors import ConfigError, UnknownNameError, unknown_name

TRUE_WORDS, FALSE_WORDS = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
NONE_WORDS = ("none", "null", "~")
KINDS: Mapping[Any, tuple[str, str]] = {
    int: ("INT", "a whole number"),
    float: ("FLOAT", "a number"),
    str: ("STR", "a text"),
    Path: ("PATH", "a path"),
    bool: ("BOOL", "true or false"),
}
"""Type of a value -> its name in the help, and in a sentence."""
FILE_FLAGS = {"klamp train": "--config", "klamp ablate": "klamp ablate --plan"}
"""Command -> what to write before a YAML file."""


@dataclass(frozen=True, kw_only=True)
class Field:
    """A field of a class of options as the command line sees it."""

    name: str
    """The field's name."""
    section: str = ""
    """The section of the configuration that holds it; "" for a command's own."""
    hint: Any
    """The type of the field's value."""
    default: Any
    """The field's default; `dataclasses.MISSING`: a value has to be given."""
    text: str
    """The field's documentation: the text below it in its class."""
    word: str = ""
    """Its name in the help, for a field that is a plain word after the command and no flag."""
    least: float | None = None
    """The smallest number allowed; for a field of several values, the fewest allowed."""
    aliases: tuple[str, ...] = ()
    """Other names of the field, which mean the same."""
    suggested: tuple[str, ...] = ()
    """Names that the help shows, for a field that takes any text."""

    @property
    def types(self) -> tuple[Any, ...]:
        """The types that one value may have; NoneType is among them where it may be None."""
        one = typing.get_args(self.hint)[0] if typing.get_origin(self.hint) is tuple else self.hint
        return typing.get_args(one) if typing.get_origin(one) in (typing.Union, types.UnionType) else (one,)

    @property
    def count(self) -> int | None:
        """How many values the field takes; None: any number."""
        parts = typing.get_args(self.hint) if typing.get_origin(self.hint) is tuple else (self.hint,)
        return None if parts[-1] is ... else len(parts)

    @property
    def choices(self) -> tuple[str, ...]:
        """The names that a value may be; empty where it is no name."""
        named = (each for each in self.types if typing.get_origin(each) is Literal)
        return tuple(str(name) for each in named for name in typing.get_args(each))

    @property
    def is_switch(self) -> bool:
        """Whether the field is a switch: `--name` and `--no_name` need no value."""
        return bool in self.types

    @property
    def kind(self) -> str:
        """The kind of one value, as the help shows it: INT, FLOAT, STR, PATH, or several with | between."""
        return "NAME" if self.choices else "|".join(KINDS[each][0] for each in self.types if each is not NoneType)

    @property
    def in_words(self) -> str:
        """What a value has to be, in words, for errors."""
        kind = " or ".join(KINDS[each][1] for each in self.types if each in KINDS)
        kind = f"one of {', '.join(self.choices)}" if self.choices else kind
        if self.count != 1:
            kind = f"{'any number of' if self.count is None else self.count} values, each {kind}"
        return f"{kind}, or None" if NoneType in self.types else kind

    def read(self, texts: Sequence[str], *, shown: str) -> Any:
        """The field's value from its texts.

        Args:
            texts: one text per value.
            shown: where the texts stand, for the message: `--max_steps`, or `max_steps in FILE`.

        Raises:
            UnknownNameError: a name that the field does not know; names the nearest.
            ConfigError: a text that is no value of the field's type, or a number below its least.
        """
        if self.count not in (None, len(texts)):
            raise self.refused(texts, shown=shown)
        values = tuple(self._one(text, texts, shown) for text in texts)
        value = values if typing.get_origin(self.hint) is tuple else values[0]
        if self.least is not None and value is not None:
            size: float = len(values) if self.count is None else values[0]
            noun = " values" if self.count is None else ""
            if not self.least <= size < math.inf:
                raise ConfigError(f"{shown} takes {self.least} or more{noun}", got=value, why=self.text)
        return value

    def _one(self, text: str, texts: Sequence[str], shown: str) -> Any:
        """The value of the first type that a text fits; `true` and `null` as YAML and shells have them, too."""
        word = text.strip().lower()
        if NoneType in self.types and word in NONE_WORDS and text not in self.choices:
            return None
        if self.is_switch and word in (*TRUE_WORDS, *FALSE_WORDS):
            return word in TRUE_WORDS
        for each in self.types:
            if typing.get_origin(each) is Literal and text in self.choices:
                return typing.get_args(each)[self.choices.index(text)]
            if each in KINDS and each is not bool:
                with suppress(ValueError, RuntimeError):  # the home folder of nobody
                    return Path(text).expanduser() if each is Path else each(text)
        raise unknown_name(shown, text, self.choices) if self.choices else self.refused(texts, shown=shown)

    def refused(self, texts: Sequence[str], *, shown: str) -> ConfigError:
        """The error for texts that are no value of the field."""
        default = " ".join(map(str, self.default)) if isinstance(self.default, tuple) else self.default
        return ConfigError(
            f"{shown} cannot be read",
            got=", ".join(map(repr, texts)) or "no value",
            why=f"it takes {self.in_words}",
            fix="" if default in (MISSING, None) else f"for example {default} (the default)",
        )


def fields_of(cls: Any, section: str = "") -> dict[str, Field]:
    """The fields of a class of options by name, in its order.

    Args:
        cls: a dataclass; `klamp.cli.options` says what a field's metadata can hold.
        section: the section of the configuration that it is; "" for a command's own.
    """
    hints, texts = typing.get_type_hints(cls), field_texts(cls)
    return {
        each.name: Field(
            name=each.name, section=section, hint=hints[each.name], default=each.default, text=texts[each.name],
            **each.metadata,
        )
        for each in dataclasses.fields(cls)
    }  # fmt: skip


@functools.cache
def train_fields() -> dict[str, Field]:
    """Every field that `klamp train` knows, by name: its own, then those of the configuration."""
    from klamp.config import PRESETS
    from klamp.config.teacher import ALL_ALIASES
    from klamp.training.config import section_classes

    own = fields_of(TrainOptions)
    own["preset"] = dataclasses.replace(own["preset"], suggested=tuple(PRESETS))
    configured = (fields_of(cls, section) for section, cls in section_classes().items())
    every = {name: field for part in (own, *configured) for name, field in part.items()}
    every["resume"] = dataclasses.replace(every["resume"], hint=bool | str)  # a folder is output_dir besides
    for name in set(ALL_ALIASES.values()):
        aliases = tuple(alias for alias, field in ALL_ALIASES.items() if field == name)
        every[name] = dataclasses.replace(every[name], aliases=aliases)
    return every


def by_any_name(fields: Mapping[str, Field]) -> dict[str, Field]:
    """The fields by their names and by each of their aliases."""
    return {name: field for field in fields.values() for name in (field.name, *field.aliases)}


Options = TypeVar("Options")


def read_options(options: type[Options], argv: Sequence[str], *, command: str) -> Options:
    """The options of a command, read from its arguments.

    Args:
        options: their class.
        argv: the arguments after the command.
        command: the command, for messages.

    Raises:
        UnknownNameError: an unknown flag or choice; names the nearest.
        ConfigError: a value that cannot be read or is missing, or a word that belongs to no flag.
    """
    return options(**read_argv(fields_of(options), argv, command=command))


def read_argv(fields: Mapping[str, Field], argv: Sequence[str], *, command: str) -> dict[str, Any]:
    """The fields that a command line names, under their own names, with their values.

    A flag that is repeated counts as it stands last, one of several values adds them up; two names of one field
    (`--beta`, `--kl_coef`) must agree.

    Raises:
        UnknownNameError, ConfigError: as `read_options`.
    """
    known, texts = by_any_name(fields), split_argv(fields, argv, command=command)
    given = {
        name: known[name].read(each, shown=known[name].word.lower() or f"--{name}") for name, each in texts.items()
    }
    if given.keys() <= fields.keys():
        return given
    from klamp.config.kl import resolve_aliases
    from klamp.config.teacher import ALL_ALIASES

    return resolve_aliases(given, set(fields), ALL_ALIASES)


def split_argv(
    fields: Mapping[str, Field], argv: Sequence[str], *, command: str, several: Collection[str] = ()
) -> dict[str, list[str]]:
    """The texts that a command line gives to each field, by the name or alias that it used.

    Args:
        fields: the fields of the command.
        argv: the arguments after the command.
        command: the command, for messages.
        several: names of fields that take several values here, although they have one.

    Raises:
        UnknownNameError: an unknown flag; names the nearest.
        ConfigError: a value that is missing, or a word that belongs to no flag.
    """
    parser = _Parser(usage=command, add_help=False, allow_abbrev=False, exit_on_error=False)
    for field in fields.values():
        add_field(parser.add_argument, field, several=field.name in several)
    known = by_any_name(fields)
    try:
        found, left = parser.parse_known_intermixed_args(_spelled(argv, known))
    except argparse.ArgumentError as error:
        shown = error.argument_name or command
        field = known.get(shown.removeprefix("--"))
        if field is not None:
            raise field.refused([], shown=shown) from None
        raise ConfigError(f"{shown}: {error.message}", fix=f"`{command} --help` says how it is called") from None
    flag = next((word for word in left if word.startswith("-")), None)
    if flag is not None:
        flags = {f"--{name}" for name, field in known.items() if not field.word}
        flags |= {f"--no_{field.name}" for field in fields.values() if field.is_switch}
        why = f"`{command} --help` lists the flags"
        raise unknown_key("flag", flag.partition("=")[0], flags, why=why, command=command)
    if left:
        takes_it = FILE_FLAGS.get(command) if left[0].endswith((".yaml", ".yml")) else None
        raise ConfigError(
            "a word that belongs to no flag",
            got=left[0],
            why=f"here {command} takes flags only",
            fix=f"{takes_it} {left[0]}" if takes_it else f"write --NAME VALUE; `{command} --help` lists the names",
        )
    return {name: [each] if isinstance(each, str) else list(each) for name, each in vars(found).items()}


class _Parser(argparse.ArgumentParser):
    """argparse without its own way out: what it refuses is raised."""

    def error(self, message: str) -> NoReturn:
        raise argparse.ArgumentError(None, message)


def add_field(
    add: Callable[..., object], field: Field, *, text: str = argparse.SUPPRESS, several: bool = False
) -> None:
    """Add a field to a parser, or to a part of its help.

    Args:
        add: `add_argument` of the parser or part.
        field: what to add, with its aliases and its opposite.
        text: its help.
        several: whether it takes several values, although it has one.
    """
    many, unset = field.count is None, argparse.SUPPRESS
    if field.word:
        required = field.default is MISSING
        words = ("+" if required else "*") if many else (None if required else "?")
        add(field.name, metavar=field.word, nargs=words, default=unset, help=text)
        return
    nargs = None if field.count in (1, None) else field.count
    if many or several:
        nargs = "+" if field.least or not (many or field.is_switch) else "*"
    elif field.is_switch:
        nargs = "?"
    shown = {"metavar": field.kind, "nargs": nargs, "default": unset, "action": "extend" if many else "store"}
    add(f"--{field.name}", help=text, **shown)
    for alias in field.aliases:
        add(f"--{alias}", help=unset, **shown)
    if field.is_switch:
        add(f"--no_{field.name}", dest=field.name, action="store_const", const="False", default=unset, help=unset)


def _spelled(argv: Sequence[str], known: Mapping[str, Field]) -> list[str]:
    """The words with underscores in their flags, and with a value for each switch that has none."""
    words = [re.sub("^--[^=]+", lambda flag: f"--{field_name(flag[0])}", word) for word in argv]
    switches = {f"--{name}" for name, field in known.items() if field.is_switch}
    texts = {f"--{name}" for name, field in known.items() if str in field.types}
    truth = (*TRUE_WORDS, *FALSE_WORDS, *NONE_WORDS)
    return [
        f"{word}=True"
        if word in switches and after.lower() not in truth and (word not in texts or after[:1] in ("", "-"))
        else word
        for word, after in itertools.zip_longest(words, words[1:], fillvalue="")
    ]


def field_name(flag: str) -> str:
    """The name of the field (or alias, or `no_` and a switch) that a flag spells, with underscores."""
    return flag.removeprefix("--").replace("-", "_")


def unknown_key(kind: str, name: str, known: Collection[str], *, why: str, command: str) -> UnknownNameError:
    """The error for a flag or key that nothing answers to: klamp's own name of what other trainers call so, else the
    nearest, else where to look.

    Args:
        kind: "flag", or "key in" a file.
        name: as it was given.
        known: every flag or key that there is; flags with their dashes.
        why: why it is none of them.
        command: whose help lists them.
    """
    dashes = name[: len(name) - len(name.lstrip("-"))]
    other = field_name(name)
    field = OTHER_NAMES.get(other, "")
    nearest = get_close_matches(name, sorted(known), n=1, cutoff=0.6)
    if f"{dashes}{field}" in known:
        nearest, why = [f"{dashes}{field}"], DIFFERENCES.get(other, f"{field}: {train_fields()[field].text}")
    elif other in ABSENT:
        return UnknownNameError(f"unknown {kind}", got=name, why=ABSENT[other], fix="leave it out")
    fix = f"did you mean {nearest[0]}?" if nearest else f"see `{command} --help` for every name"
    return UnknownNameError(f"unknown {kind}", got=name, why=why, fix=fix)


OTHERS: Mapping[str, str] = {
    "learning_rate": "lr actor_lr peak_lr",
    "max_steps": "steps num_steps train_steps total_steps total_training_steps "
    "epochs num_epochs num_train_epochs total_epochs",
    "prompts_per_step": "batch_size train_batch_size global_batch_size rollout_batch_size "
    "per_device_train_batch_size generation_batch_size",
    "gradient_accumulation_steps": "micro_batch_size ppo_micro_batch_size_per_gpu grad_accum num_minibatches",
    "num_generations": "n group_size num_samples n_samples samples_per_prompt n_samples_per_prompt rollout_n",
    "max_completion_length": "max_new_tokens max_tokens max_length response_length max_response_length",
    "num_iterations": "mu ppo_epochs num_ppo_epochs update_epochs",
    "beta": "kl kl_coeff kl_weight kl_lambda init_kl_coef kl_loss_coef",
    "target_kl": "kl_target desired_kl",
    "kl_controller": "kl_ctrl kl_ctrl_type adap_kl_ctrl adaptive_kl",
    "kl_estimator": "kl_loss_type kl_type kl_penalty_type",
    "epsilon": "clip_range cliprange clip_ratio clip_eps eps_clip clip_param",
    "epsilon_high": "clip_ratio_high eps_clip_high",
    "scale_rewards": "norm_adv_by_std_in_grpo normalize_advantages std_normalization",
    "loss_type": "loss_agg_mode loss",
    "model": "model_name_or_path model_name model_path base_model pretrain",
    "ref_model": "ref_model_path reference_model ref_model_name_or_path",
    "lora_r": "lora_rank lora",
    "dtype": "bf16 fp16 torch_dtype precision mixed_precision",
    "task": "dataset dataset_name data train_file train_files",
    "reward": "reward_funcs reward_fn reward_function use_task_rewards",
    "teacher_coef": "opd_kl_coef teacher_kl_loss_coef",
    "teacher_tail": "loss_add_tail add_tail_bucket zero_outside_topk",
    "teacher_placement": "use_policy_gradient",
    "teacher_max_log_ratio": "log_prob_min_clamp loss_max_clamp",
    "temperature": "teacher_temperature",
    "vllm_importance_sampling_mode": "vllm_importance_sampling_correction",
    "max_grad_norm": "grad_clip clip_grad max_norm",
    "warmup_steps": "warmup warmup_ratio lr_warmup_steps",
    "lr_scheduler_type": "lr_scheduler lr_schedule scheduler",
    "save_every": "save_steps save_freq save_interval",
    "eval_every": "eval_steps test_freq eval_freq eval_interval",
    "keep_checkpoints": "save_total_limit",
    "report_to": "wandb tensorboard logger log_with tracker",
    "output_dir": "output out out_dir save_dir",
    "resume": "resume_from_checkpoint",
    "cpu": "use_cpu no_cuda",
}
"""klamp's field -> what others call it, or what comes nearest to it."""

OTHER_NAMES: Mapping[str, str] = {name: field for field, names in OTHERS.items() for name in names.split()}
"""Another trainer's name -> klamp's field."""

EPOCHS = "klamp counts steps, not passes over the data: one pass is (prompts of the task) / prompts_per_step steps"
BATCH = "prompts_per_step counts the prompts of a step over all processes, with num_generations completions of each"
PARTS = "it is the number of parts that a process's share of a step is computed in, not the size of one"

DIFFERENCES: Mapping[str, str] = {
    **dict.fromkeys(("epochs", "num_epochs", "num_train_epochs", "total_epochs"), EPOCHS),
    **dict.fromkeys(OTHERS["prompts_per_step"].split(), BATCH),
    **dict.fromkeys(OTHERS["gradient_accumulation_steps"].split(), PARTS),
    "kl_loss_coef": "verl's coefficient weighs the KL as its loss_agg_mode averages it, klamp's as kl_normalizer does",
    "kl_loss_type": "kl_estimator names the value: verl's kl is k1, mse is k2, low_var_kl is k3",
    "use_task_rewards": "reward='none' trains on the teacher alone; with a reward both are in the loss",
    **dict.fromkeys(("loss_add_tail", "add_tail_bucket"), "TRL's tail is teacher_tail='bucket'; sampled is unbiased"),
    "teacher_temperature": "policy and teacher are compared at one temperature, that of sampling",
    "warmup_ratio": "warmup_steps counts steps; it is no share of the run",
}
"""Another trainer's name -> how klamp's field differs, where it counts or weighs something else."""

ABSENT: Mapping[str, str] = {
    **dict.fromkeys(("lmbda", "seq_kd", "sft_alpha"), "the policy samples every answer, and the teacher scores it"),
    **dict.fromkeys(
        ("teacher_logprobs", "teacher_scores", "teacher_logits"),
        "stored scores are of stored answers; the policy samples new ones, which teacher_model or teacher_url scores",
    ),
}
"""Another trainer's name -> why klamp has no field for it."""
