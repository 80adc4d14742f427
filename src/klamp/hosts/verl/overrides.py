"""klamp's KL in verl's configuration, as a name (`klamp:kl_gradient=forward`) and as arguments; what it cannot hold."""

from __future__ import annotations

import ast
import functools
import itertools
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, get_args

from klamp.config import KLConfig
from klamp.config.beyond import check_beyond
from klamp.config.fields import host_refusals
from klamp.config.kl import check_beta
from klamp.config.teacher import Tail, TeacherConfig
from klamp.core.term import OffPolicy
from klamp.core.types import Direction, Horizon
from klamp.errors import ConfigError, KLWarning, Refusal, refuse, unknown_name

PREFIX = "klamp"
_ELSEWHERE = ("beta", "kl_normalizer", "kl_early_stop", "kl_monitor")
LOSS_FIELDS = tuple(
    field.name for field in fields(KLConfig) if field.name not in _ELSEWHERE and not field.name.startswith("reference")
)
"""Fields that a name in `kl_loss_type` may set: all but the refused ones; beta is verl's `kl_loss_coef`."""
CHOICES: Mapping[str, tuple[object, ...]] = {
    "teacher_estimator": ("k1", "k3", "topk"),
    "teacher_direction": get_args(Direction),
    "teacher_top_k": (TeacherConfig.teacher_top_k, 0),
    "teacher_tail": get_args(Tail),
    "teacher_horizon": get_args(Horizon),
    "teacher_off_policy": get_args(OffPolicy),
}
"""Fields that a name in `loss_mode` may set; a head's size is verl's `topk`."""
OF_A_TOKEN = ("teacher_estimator", "teacher_horizon", "teacher_off_policy")
"""The fields that apply to k1 and k3."""

ACTOR, DISTILLATION = "actor_rollout_ref.actor", "distillation"
ONE = f"{DISTILLATION}.teacher_models.teacher_model"
"""The teacher in every configuration; its engine's settings hold for the other teachers too."""
IMPORTED = "+ray_kwargs.ray_init.runtime_env.env_vars.VERL_USE_EXTERNAL_MODULES=klamp.verl.registered"
"""Has klamp's names registered in every process of verl's."""
DRIVEN = "++trainer.checkpoint_callback_class=klamp.verl.Driver"


def is_ours(name: object) -> bool:
    """Whether a name in verl's configuration is klamp's."""
    return isinstance(name, str) and (name == PREFIX or name.startswith(f"{PREFIX}:"))


def name_of(kl: KLConfig | TeacherConfig, places: Iterable[str]) -> str:
    """The name for those fields of a KL that a place can hold; fields with their default are left out."""
    values = {field: getattr(kl, field) for field in places}
    changed = [f"{field}={value}" for field, value in values.items() if value != getattr(type(kl), field)]
    return f"{PREFIX}:{','.join(changed)}" if changed else PREFIX


@functools.cache
def loss_kl(name: str, beta: float = KLConfig.beta) -> KLConfig:
    """The KL of a name in `kl_loss_type`: fields like arguments in Python, a bare word is a text."""
    arguments = name.partition(":")[2]
    call = _as_call(arguments)
    names = [keyword.arg for keyword in call.keywords] if call else []
    if call is None or call.args or None in names or len(set(names)) < len(names):
        raise ConfigError(
            f"{name!r} cannot be read as a KL of klamp",
            got=arguments,
            why="behind the colon it takes FIELD=VALUE, each field once, with commas between them",
            fix=f"{PREFIX}:{LOSS_FIELDS[1]}=..., or {PREFIX} alone for the defaults",
        )
    for field in names:
        if field not in LOSS_FIELDS:
            why = "a name can hold what this place of verl's configuration has no field for"
            raise unknown_name(f"field in {name!r}", str(field), LOSS_FIELDS, why=why)
    check_beta(beta)
    return KLConfig(**{str(keyword.arg): _value(keyword.value) for keyword in call.keywords}, beta=beta)


def _as_call(arguments: str) -> ast.Call | None:
    try:
        call = ast.parse(f"{PREFIX}({arguments})", mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return call if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) else None


def _value(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)  # a word


def teacher_name(teacher: TeacherConfig) -> str:
    """The name of a KL to a teacher among verl's losses of distillation."""
    places = CHOICES if teacher.teacher_estimator == "topk" else OF_A_TOKEN
    return name_of(teacher, [field for field in places if field != "teacher_top_k" or not teacher.head_size])


@functools.cache
def named() -> dict[str, TeacherConfig]:
    """Every registered name, and its KL."""
    teachers = dict[str, TeacherConfig]()
    with warnings.catch_warnings(action="ignore", category=KLWarning):
        for values in itertools.product(*CHOICES.values()):
            choices: Any = dict(zip(CHOICES, values, strict=True))
            try:
                teacher = TeacherConfig(teacher_model="a model", teacher_head="teacher", **choices)
                refuse(teacher_refusals(teacher))
            except ConfigError:
                continue
            teachers.setdefault(teacher_name(teacher), teacher)
    return teachers


def teacher_of(name: str) -> TeacherConfig:
    """The KL to a teacher of a registered name; verl's `topk` sets the head's size."""
    if name not in named():
        raise unknown_name("KL to a teacher", name, tuple(named()), why="verl accepts registered names only")
    return named()[name]


def needs_driver(kl: KLConfig) -> bool:
    """Whether a KL needs what only verl's trainer has, where the whole batch is: groups, tokens, the step."""
    moves = kl.kl_schedule != "constant" or kl.kl_warmup_steps > 0
    of_batch = kl.kl_clip_method != "none" or kl.excludes or kl.kl_placement == "advantage"
    return moves or of_batch or kl.controller_name != "fixed"


def is_driven(kl: KLConfig) -> bool:
    """Whether klamp's driver settles a KL that `kl_loss_type` names; into the reward it comes in no other way."""
    return needs_driver(kl) or kl.kl_placement == "reward"


def overrides(kl: KLConfig, teacher: TeacherConfig | None = None) -> list[str]:
    """The arguments of `python -m verl.trainer.main_ppo` that give a run this KL, and this teacher, one per element.

    A plain KL in the reward is verl's own `kl`, which is k1; with any KL there they also set
    `algorithm.norm_adv_by_std_in_grpo=False`, because the division cancels beta where a group's rewards are all equal.

    A KL that needs whole groups, the tokens, or a coefficient that moves is settled by `klamp.verl.Driver`:
    `kl_loss_type` then names it wherever it enters. Each teacher gets one GPU; arguments that come later win.

    Args:
        kl: the KL. beta 0 gives a run without one, and without a reference.
        teacher: the KL to a teacher besides; None: none.

    Raises:
        ConfigError: verl has no place for what is asked for; with the reason.

    Source: the fields: verl's `ppo_trainer.yaml`; the cancelling: docs/which-kl.md
    """
    check_beyond(kl, None, host="verl")
    distilled = teacher if teacher is not None and teacher.there else None
    refuse([*host_refusals(kl, "verl"), *(teacher_refusals(distilled) if distilled else ())])
    shifts_reward = kl.needs_reference and kl.kl_placement == "reward"
    by_verl = shifts_reward and not needs_driver(kl) and kl.kl_max_log_ratio is None
    in_loss = kl.needs_reference and not by_verl
    values: dict[str, object] = {f"{ACTOR}.use_kl_loss": in_loss, "algorithm.use_kl_in_reward": by_verl}
    if in_loss:
        values |= {f"{ACTOR}.kl_loss_coef": kl.beta, f"{ACTOR}.kl_loss_type": name_of(kl, LOSS_FIELDS)}
    if by_verl:
        control = "algorithm.kl_ctrl"
        values |= {"algorithm.kl_penalty": "kl", f"{control}.type": "fixed", f"{control}.kl_coef": kl.beta}
    if shifts_reward:
        values["algorithm.norm_adv_by_std_in_grpo"] = False
    values |= {} if distilled is None else _teacher_values(distilled)
    arguments = [f"{key}={written(value)}" for key, value in values.items()]
    arguments += [DRIVEN] if in_loss and is_driven(kl) else []
    return [*arguments, IMPORTED] if in_loss or distilled is not None else arguments


def places(teacher: TeacherConfig) -> list[str]:
    """The place of each teacher in verl's configuration; several teachers may not use the single one's name."""
    several = range(1, len(teacher.teacher_models) + 1)
    return [f"+{DISTILLATION}.teacher_models.teacher_{number}" for number in several] or [ONE]


def _teacher_values(teacher: TeacherConfig) -> dict[str, object]:
    """The values that give a run of verl's this teacher: its engines, one GPU for each, and its loss."""
    models, loss = teacher.models, f"{DISTILLATION}.distillation_loss"
    values: dict[str, object] = {
        f"{DISTILLATION}.enabled": True,
        f"{DISTILLATION}.nnodes": 1,
        f"{DISTILLATION}.n_gpus_per_node": len(models),
        f"{ONE}.inference.tensor_model_parallel_size": 1,
        f"{loss}.loss_mode": teacher_name(teacher),
        f"{loss}.use_task_rewards": True,
        f"{loss}.distillation_loss_coef": teacher.teacher_coef,
        f"{loss}.use_policy_gradient": False,
        f"{loss}.loss_max_clamp": None,
        f"{loss}.log_prob_min_clamp": None,
    }
    if teacher.head_size:
        values[f"{loss}.topk"] = teacher.teacher_top_k
    for place, (key, model) in zip(places(teacher), models.items(), strict=True):
        values[f"{place}.model_path"] = model
        if key:
            values |= {f"{place}.key": key, f"{place}.num_replicas": 1, f"{place}.inference": f"${{{ONE}.inference}}"}
    return values | ({f"{DISTILLATION}.teacher_key": teacher.teacher_key} if teacher.teacher_key else {})


PLAIN = re.compile(r"(?!(?:true|false|null|nan|inf)$)[a-z_/][a-z0-9_/.\-]*", re.IGNORECASE)
"""Texts that Hydra reads as they stand, and as texts."""


def written(value: object) -> str:
    """A value (a text, number, bool, None, or sequences and mappings of such) as the right side of KEY=VALUE."""
    if value is None:
        return "null"
    if isinstance(value, str):
        return value if PLAIN.fullmatch(value) else _quoted(value)
    if isinstance(value, tuple | list):
        return f"[{','.join(map(written, value))}]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{name}:{written(entry)}" for name, entry in value.items()) + "}"
    return repr(value)


def _quoted(text: str) -> str:
    """A text between quotes: a quote in it is escaped, and so are backslashes right before a quote or the end."""
    inner = re.sub(r"(\\*)'", r"\1\1\\'", text)
    return "'" + re.sub(r"(\\+)$", r"\1\1", inner) + "'"


def teacher_refusals(teacher: TeacherConfig) -> list[Refusal]:
    """What verl's design does not let in, one row for each."""
    c, head = teacher, bool(teacher.head_size)
    as_verl_has_it = (c.teacher_direction, c.teacher_head) == ("forward", "teacher") and c.teacher_tail != "sampled"
    return [
        *host_refusals(c, "verl"),
        Refusal(
            head and not as_verl_has_it,
            f"a head of teacher_top_k={c.teacher_top_k} tokens cannot be honoured by verl",
            got=f"teacher_direction={c.teacher_direction!r}, teacher_head={c.teacher_head!r}, "
            f"teacher_tail={c.teacher_tail!r}",
            why="with logits verl computes the forward KL over the teacher's likeliest tokens, and drops a "
            "sampled token that is not among them",
            fix="set teacher_direction='forward', teacher_head='teacher' and another teacher_tail, or teacher_top_k=0",
        ),
        Refusal(
            head and c.teacher_off_policy != "none",
            f"teacher_off_policy={c.teacher_off_policy!r} of a head cannot be honoured by verl",
            why="where it trains on a head alone its engine leaves out the log-probabilities of the sampled tokens",
            fix="set teacher_off_policy='none', or teacher_top_k=0",
        ),
    ]
