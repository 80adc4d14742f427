"""Every spelling of a flag leads to its field; whatever leads nowhere is an error that names the nearest."""

from __future__ import annotations

import pytest

from klamp.cli.options import TrainOptions
from klamp.cli.train_fields import every_flag, fields, fields_by_any_name, read_flags
from klamp.config import ALIASES, PRESETS
from klamp.errors import ConfigError, UnknownNameError
from klamp.training.config import TrainConfig, field_owners


def test_the_fields_are_the_commands_own_and_those_of_the_configuration() -> None:
    configured = {name: field for name, field in fields().items() if field.section}
    assert {name: field.section for name, field in configured.items()} == field_owners()
    assert {name: field.default for name, field in configured.items()} == TrainConfig().flat()
    assert fields().keys() - configured.keys() == TrainOptions.__dataclass_fields__.keys()
    assert fields()["preset"].suggested == tuple(PRESETS)
    assert fields_by_any_name().keys() == fields().keys() | ALIASES.keys()
    assert {alias: field.name for field in fields().values() for alias in field.aliases} == ALIASES


def test_every_field_says_what_it_is() -> None:
    assert [name for name, field in fields().items() if len(field.text) < 10] == []


def test_every_flag_is_there() -> None:
    assert {"--beta", "--kl_coef", "--resume", "--no_resume", "--help", "--dry_run"} <= every_flag()
    assert "--no_beta" not in every_flag()


@pytest.mark.parametrize("name", sorted(fields()))
def test_every_field_is_a_flag_in_both_spellings(name: str) -> None:
    field = fields()[name]
    words = [str(each) for each in field.default] if isinstance(field.default, tuple) else [str(field.default)]
    for flag in (f"--{name}", f"--{name.replace('_', '-')}"):
        assert read_flags([flag, *words]) == {name: field.default}


@pytest.mark.parametrize("alias", ["kl-beta", "kl_beta", "kl_coef", "kl-coef", "kl_penalty", "kl-penalty"])
def test_aliases_lead_to_their_field(alias: str) -> None:
    assert read_flags([f"--{alias}", "0.25"]) == {"beta": 0.25}
    assert read_flags([f"--{alias}=0.25"]) == {"beta": 0.25}


def test_every_alias_of_the_configuration_is_a_flag() -> None:
    assert {name: read_flags([f"--{name}", "2"]) for name in ALIASES} == {
        name: {target: 2.0} for name, target in ALIASES.items()
    }


def test_two_names_of_one_field_must_agree() -> None:
    assert read_flags(["--kl_coef", "0.1", "--beta", "0.10"]) == {"beta": 0.1}
    with pytest.raises(ConfigError, match=r"beta is given twice") as caught:
        read_flags(["--kl_coef", "0.1", "--kl-penalty", "0.2"])
    assert caught.value.got == "0.1 and 0.2"


def test_a_flag_that_is_repeated_counts_as_it_stands_last() -> None:
    assert read_flags(["--beta", "0.1", "--beta", "0.2"]) == {"beta": 0.2}


@pytest.mark.parametrize(
    ("argv", "value"),
    [
        (["--mask-truncated-completions"], True),
        (["--no-mask-truncated-completions"], False),
        (["--no_mask_truncated_completions"], False),
        (["--mask_truncated_completions", "True"], True),
        (["--mask_truncated_completions", "false"], False),
        (["--mask_truncated_completions=0"], False),
    ],
)
def test_switches_with_and_without_a_value(argv: list[str], value: bool) -> None:
    assert read_flags([*argv, "--seed", "3"]) == {"mask_truncated_completions": value, "seed": 3}


def test_a_switch_that_may_be_none_is_a_switch_all_the_same() -> None:
    assert read_flags(["--chat_template"]) == {"chat_template": True}
    assert read_flags(["--no-chat-template"]) == {"chat_template": False}
    assert read_flags(["--chat_template", "None"]) == {"chat_template": None}


def test_several_values_end_where_the_next_flag_begins() -> None:
    found = read_flags(["--report_to", "tensorboard", "wandb", "--kl_exclude_tokens", "1", "2", "--report-to"])
    assert found == {"report_to": (), "kl_exclude_tokens": (1, 2)}


def test_negative_numbers_and_values_with_dashes_are_values() -> None:
    assert read_flags(["--seed", "-1", "--system_prompt=--think"]) == {"seed": -1, "system_prompt": "--think"}


@pytest.mark.parametrize(
    ("flag", "nearest"),
    [
        ("--max_stepz", "--max_steps"),
        ("--learning-rte", "--learning_rate"),
        ("--kl-bets", "--kl_beta"),
        ("--no-resumee", "--no_resume"),
        ("--dry", "--dry_run"),
    ],
)
def test_an_unknown_flag_names_the_nearest(flag: str, nearest: str) -> None:
    with pytest.raises(UnknownNameError) as caught:
        read_flags([flag, "1"])
    assert (caught.value.got, caught.value.fix) == (flag, f"did you mean {nearest}?")


def test_a_flag_like_no_other_points_to_the_help() -> None:
    with pytest.raises(UnknownNameError) as caught:
        read_flags(["--qqqqqqqq"])
    assert "klamp train --help" in caught.value.fix


def test_only_switches_have_an_opposite() -> None:
    with pytest.raises(UnknownNameError):
        read_flags(["--no-seed"])
    with pytest.raises(ConfigError, match="takes no value"):
        read_flags(["--no-resume", "True"])


def test_a_word_that_belongs_to_no_flag_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        read_flags(["config.yaml", "--seed", "1"])
    assert caught.value.fix == "--config config.yaml"
