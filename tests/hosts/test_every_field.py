"""Every field of a KL and of a teacher, set to every other value, in every host: honoured, refused or warned of."""

from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from typing import Any

import pytest
from tests.config.drawn import FIELDS, around, other_values
from tests.hosts.trl.hosts import arguments

from klamp.config import KLConfig, LossConfig, TeacherConfig
from klamp.config.fields import host_refusals
from klamp.errors import ConfigError
from klamp.hosts.common.kl_fields import kl_config, teacher_config
from klamp.hosts.tinker.loss import LossCall
from klamp.hosts.trl.grpo_config import check_arguments
from klamp.lab.backends import check_backend
from klamp.lab.config import TrainConfig
from klamp.verl import overrides


def of_trl(config: Any) -> Any:
    fields = {name: list(x) if isinstance(x, tuple) else x for name, x in vars(config).items()}
    fields = {name: x for name, x in fields.items() if x != getattr(type(config), name)}
    args = arguments(scale_rewards="none", **{"beta": getattr(config, "beta", 0.01)} | fields)
    return (kl_config if isinstance(config, KLConfig) else teacher_config)(args)


def of_unsloth(config: KLConfig) -> KLConfig:
    check_arguments(config, arguments(scale_rewards="none"), host="Unsloth")
    return config


def of_verl(config: Any) -> list[str]:
    return overrides(config) if isinstance(config, KLConfig) else overrides(KLConfig(), config)


def of_tinker(config: Any) -> Any:
    name = "kl" if isinstance(config, KLConfig) else "loss" if isinstance(config, LossConfig) else "teacher"
    call = LossCall(max_length=8, **{name: config})  # type: ignore[arg-type]
    return call.objective, call.notes, call.kl, call.teacher


def of_loop(config: Any) -> Any:
    made = TrainConfig.from_flat({"cpu": True, "num_iterations": 2, **vars(config)})
    check_backend(made)
    return made


HOSTS: dict[str, tuple[Callable[[Any], Any], tuple[type, ...]]] = {
    "TRL": (of_trl, (KLConfig, TeacherConfig)),
    "Unsloth": (of_unsloth, (KLConfig,)),
    "verl": (of_verl, (KLConfig, TeacherConfig)),
    "Tinker": (of_tinker, (KLConfig, TeacherConfig, LossConfig)),
    "loop": (of_loop, (KLConfig, TeacherConfig, LossConfig)),
}
"""Host -> what it makes of a configuration, and the configurations that it takes."""
BESIDE = {"kl_monitor": {"beta": 0.0}}
"""Field -> what it counts with, though it works without."""
ALIKE = {"teacher_key": "x"}
"""What counts with the models that it goes with alone."""


@cache
def configurations(cls: Any, field: Any) -> list[tuple[Any, Any]]:
    """Each other value of a field that some configuration accepts: that configuration, and it without the field."""
    pairs = list[tuple[Any, Any]]()
    for value in other_values(cls, field):
        if ALIKE.get(field.name) == value:
            continue
        for other in around(cls, field):
            rest = other | BESIDE.get(field.name, {})
            with suppress(ConfigError):
                pairs.append((cls(**rest | {field.name: value}), partial(cls, **rest)))
                break
    return pairs


def made_or_refused(make: Callable[[Any], Any], config: Any) -> Any:
    try:
        return make(config())
    except ConfigError as error:
        return error


CASES = [(host, cls, field) for host, (_, classes) in HOSTS.items() for cls, field in FIELDS if cls in classes]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("host", "cls", "field"), CASES, ids=[f"{host}-{field.name}" for host, _, field in CASES])
def test_a_host_honours_a_field_or_refuses_it_or_warns_of_it(host: str, cls: Any, field: Any) -> None:
    make, pairs = HOSTS[host][0], configurations(cls, field)
    assert pairs or field.name in ALIKE, "no other value is accepted"
    for config, without in pairs:
        limited = [row for row in host_refusals(config, host) if row.applies]
        result = made_or_refused(make, partial(type(config), **vars(config)))
        if isinstance(result, ConfigError):
            assert result.why and result.fix
            continue
        assert not limited, "its row says that it is refused"
        assert result != made_or_refused(make, without), "neither honoured, nor refused, nor warned of"
