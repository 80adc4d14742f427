"""klamp's fields in verl's configuration: a KL as a name, and values in the grammar of Hydra.

verl's configuration has room for a text only, so that a KL is written as one: `klamp:kl_gradient=forward`.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from klamp.config import KLConfig
from klamp.config.teacher import TeacherConfig
from klamp.errors import ConfigError, unknown_name

PREFIX = "klamp"
_ELSEWHERE = ("beta", "kl_normalizer", "kl_early_stop", "kl_monitor")
LOSS_FIELDS = tuple(
    each.name for each in fields(KLConfig) if each.name not in _ELSEWHERE and not each.name.startswith("reference")
)
"""What a name in the place of `kl_loss_type` may say: all but what is refused; beta is verl's `kl_loss_coef`."""


def is_ours(name: object) -> bool:
    """Whether a name in verl's configuration is klamp's."""
    return isinstance(name, str) and (name == PREFIX or name.startswith(f"{PREFIX}:"))


def name_of(kl: KLConfig | TeacherConfig, places: Iterable[str]) -> str:
    """The name for those fields of a KL that a place can hold; fields with their default are left out."""
    values, defaults = {field: getattr(kl, field) for field in places}, type(kl)
    changed = [f"{field}={value}" for field, value in values.items() if value != getattr(defaults, field)]
    return f"{PREFIX}:{','.join(changed)}" if changed else PREFIX


@functools.cache
def loss_kl(name: str, beta: float = KLConfig.beta) -> KLConfig:
    """The KL that a name in the place of `kl_loss_type` stands for; beta is verl's `kl_loss_coef`."""
    return KLConfig(**_read(name), beta=beta)


def needs_driver(kl: KLConfig) -> bool:
    """Whether a KL needs what only verl's trainer has, where the whole batch is: groups, tokens, the step."""
    moves = kl.kl_schedule != "constant" or kl.kl_warmup_steps > 0
    of_batch = kl.kl_clip_method != "none" or kl.excludes or kl.kl_placement == "advantage"
    return moves or of_batch or kl.controller_name != "fixed"


def is_driven(kl: KLConfig) -> bool:
    """Whether klamp's driver settles a KL that `kl_loss_type` names; into the reward it comes in no other way."""
    return needs_driver(kl) or kl.kl_placement == "reward"


def _read(name: str) -> dict[str, Any]:
    """The fields behind the colon, which are written as the arguments of a call in Python; a bare word is a text."""
    call = _as_call(name.partition(":")[2])
    fields = [each.arg for each in call.keywords] if call else []
    if call is None or call.args or None in fields or len(set(fields)) < len(fields):
        raise ConfigError(
            f"{name!r} cannot be read as a KL of klamp",
            got=name.partition(":")[2],
            why="behind the colon it takes FIELD=VALUE, each field once, with commas between them",
            fix=f"{PREFIX}:{LOSS_FIELDS[1]}=..., or {PREFIX} alone for the defaults",
        )
    for field in fields:
        if field not in LOSS_FIELDS:
            why = "a name can hold what this place of verl's configuration has no field for"
            raise unknown_name(f"field in {name!r}", str(field), LOSS_FIELDS, why=why)
    return {str(each.arg): _value(each.value) for each in call.keywords}


def _as_call(arguments: str) -> ast.Call | None:
    try:
        found = ast.parse(f"{PREFIX}({arguments})", mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return found if isinstance(found, ast.Call) and isinstance(found.func, ast.Name) else None


def _value(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)  # a word


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
        return "{" + ",".join(f"{name}:{written(each)}" for name, each in value.items()) + "}"
    return repr(value)


def _quoted(text: str) -> str:
    """A text between quotes: a quote in it is escaped, and so are backslashes right before a quote or the end."""
    inner = re.sub(r"(\\*)'", r"\1\1\\'", text)
    return "'" + re.sub(r"(\\+)$", r"\1\1", inner) + "'"
