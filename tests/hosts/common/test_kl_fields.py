"""klamp's options in a host's arguments: all of them, none set by itself, each with its help."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest

from klamp.config import KLConfig, KLWarning, LossConfig, TeacherConfig
from klamp.config.kl import ALIASES
from klamp.config.loss import MASKS
from klamp.errors import ConfigError
from klamp.hosts.common import kl_fields
from klamp.hosts.common.kl_fields import KLFields, field_texts, kl_config, settle_fields, teacher_config, touched

DEFAULTS = {field.name: field.default for field in dataclasses.fields(KLConfig)}
TAUGHT = {field.name: field.default for field in dataclasses.fields(TeacherConfig)}


@dataclass
class Arguments(KLFields):
    beta: float = 0.0


def arguments(**changes: Any) -> Arguments:
    made = Arguments(**changes)
    settle_fields(made)
    return made


def test_every_field_of_the_configuration_is_there_but_beta() -> None:
    defaults = {field.name: field.default for field in dataclasses.fields(KLFields)}
    assert defaults.pop("klamp_report") is True, "the one field that is not of the KL"
    assert defaults.keys() == (DEFAULTS.keys() - {"beta"}) | TAUGHT.keys() | ALIASES.keys() | {*MASKS}
    assert all(default is None for default in defaults.values())
    assert KLFields.__annotations__["kl_controller_factors"] == list[float] | None


def test_untouched_it_is_the_hosts_own_kl() -> None:
    assert kl_config(arguments()) is None
    assert kl_config(arguments(beta=0.3)) is None, "beta is the host's own field"
    assert touched(arguments(kl_coef=0.3)) == {}


@pytest.mark.parametrize("given", [{"kl_estimator": "k1"}, {"kl_monitor": False}, {"target_kl": 0.1}])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_one_that_is_set_makes_it_klamps_with_klamps_defaults(given: dict[str, Any]) -> None:
    assert kl_config(arguments(beta=0.3, **given)) == KLConfig(beta=0.3, **given)


@pytest.mark.parametrize("alias", ALIASES)
def test_another_name_of_beta_sets_beta(alias: str) -> None:
    made = arguments(**{alias: 0.25})
    assert made.beta == 0.25 and getattr(made, alias) is None
    assert arguments(beta=0.25, **{alias: 0.25}).beta == 0.25
    with pytest.raises(ConfigError, match="beta is given twice") as caught:
        arguments(beta=0.3, **{alias: 0.25})
    assert caught.value.got == "0.25 and 0.3" and alias in caught.value.why


@pytest.mark.parametrize("beta", [-0.1, float("nan"), float("inf")])
def test_a_beta_that_is_none_is_refused(beta: float) -> None:
    with pytest.raises(ConfigError, match="beta"):
        arguments(kl_coef=beta)


def test_the_help_is_what_the_configuration_says_under_its_fields() -> None:
    texts = field_texts(KLConfig) | field_texts(TeacherConfig) | field_texts(LossConfig)
    defaults = DEFAULTS | TAUGHT | {name: getattr(LossConfig, name) for name in MASKS}
    assert texts.keys() >= defaults.keys()
    for field in dataclasses.fields(KLFields):
        shown = field.metadata["help"] % ()
        if field.name == "klamp_report":
            assert "klamp report OUTPUT_DIR" in shown
        elif field.name in ALIASES:
            assert shown == "Another name of beta."
        else:
            assert shown.startswith(texts[field.name]) and repr(defaults[field.name]) in shown
    assert texts["kl_horizon"].endswith("also the effect of a token on the KL of later tokens.")


@pytest.mark.filterwarnings("error")
def test_fields_without_a_beta_are_warned_of_and_a_monitor_is_not() -> None:
    with pytest.warns(KLWarning, match="beta is 0 .* no KL term and no reference"):
        kl_fields.warn_without_kl(KLConfig(beta=0.0, kl_estimator="k1"))
    kl_fields.warn_without_kl(KLConfig(beta=0.0, kl_monitor=True))
    kl_fields.warn_without_kl(KLConfig(beta=0.1))


def test_a_teacher_is_the_one_that_is_named_else_the_model_that_is_passed() -> None:
    for fields, name in (({"teacher_coef": 1.0}, kl_fields.PASSED), ({"teacher_coef": 1.0, "teacher_model": "x"}, "x")):
        teacher = teacher_config(KLFields(**fields))
        assert teacher is not None and teacher.teacher_model == name
