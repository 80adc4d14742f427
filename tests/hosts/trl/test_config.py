"""klamp's fields in TRL's arguments: the command line, the saved form, the other names, the refusals."""

from __future__ import annotations

import dataclasses
import json
import warnings
from typing import Any

import pytest
import torch
import trl
from tests.hosts.trl.hosts import arguments

from klamp._field_texts import field_texts
from klamp.config import KLConfig
from klamp.config.kl import ALIASES, KLWarning
from klamp.errors import ConfigError
from klamp.hosts.common.fields import KLFields, touched
from klamp.trl import GRPOConfig

EVERY: dict[str, Any] = {
    "kl_estimator": "k2",
    "kl_gradient": "own",
    "kl_horizon": "token",
    "kl_placement": "loss",
    "kl_clip_method": "soft",
    "kl_clip_threshold": 0.2,
    "use_per_token_kl_threshold": False,
    "kl_clip_temperature": 0.01,
    "kl_clip_level": "batch",
    "kl_reference_length": 7,
    "kl_controller": "pid",
    "target_kl": 0.3,
    "kl_controller_gain": 0.05,
    "kl_controller_lead": 5.0,
    "kl_controller_factors": [2.0, 0.5, 1.5, 0.5],
    "kl_controller_clip": 0.5,
    "kl_controller_horizon": 50,
    "kl_controller_lr": 0.02,
    "kl_controller_gains": [0.2, 0.3, 0.4],
    "beta_min": 0.001,
    "beta_max": 2.0,
    "kl_max_log_ratio": 5.0,
    "kl_off_policy": "token",
    "kl_max_weight": 3.0,
    "kl_normalizer": "token_mean",
    "kl_exclude_tokens": ["special", "5"],
    "kl_exclude_prefix": 2,
    "kl_exclude_between": ["<a>", "</a>"],
    "kl_lr_guard": 0.5,
    "kl_monitor": True,
    "reference": "ema",
    "reference_decay": 0.9,
    "reference_reset_steps": 7,
    "reference_dtype": "bfloat16",
}
SCHEDULE: dict[str, Any] = {"kl_schedule": "cosine", "kl_warmup_steps": 3, "kl_schedule_end": 0.1}
"""What no target goes with."""
REFUSED: dict[str, Any] = {
    "reference_share": 0.5,
    "kl_early_stop": 0.1,
    "reference_device": "cpu",
    "reference_url": "http://localhost:1",
    "reference_name": "start",
}


def test_every_field_of_the_kl_is_a_field_of_the_arguments() -> None:
    fields = {field.name for field in dataclasses.fields(GRPOConfig)}
    wanted = {field.name for field in dataclasses.fields(KLConfig)}
    assert wanted | ALIASES.keys() <= fields
    assert {field.name for field in dataclasses.fields(KLFields)} == (wanted - {"beta"}) | ALIASES.keys()
    assert EVERY.keys() | SCHEDULE.keys() | REFUSED.keys() == wanted - {"beta"}


def test_the_fields_and_defaults_of_trl_stay() -> None:
    stock = {field.name: field for field in dataclasses.fields(trl.GRPOConfig)}
    ours = {field.name: field for field in dataclasses.fields(GRPOConfig)}
    assert [name for name in ours if name in stock] == list(stock)  # in this order: positional arguments work
    for name, field in stock.items():
        assert (ours[name].default, ours[name].metadata) == (field.default, field.metadata), name
    assert GRPOConfig.beta == 0.0
    assert touched(arguments()) == {}
    assert arguments().kl_config() is None


def test_the_command_line_names_and_explains_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    parser = trl.TrlParser(GRPOConfig)
    with pytest.raises(SystemExit):
        parser.parse_args_and_config(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    for name, meaning in field_texts(KLConfig).items():
        if name != "beta":
            assert f"--{name}" in text
            assert meaning.split(";")[0][:40] in text, name


@pytest.mark.parametrize("given", [EVERY, SCHEDULE], ids=["all but a schedule", "a schedule"])
def test_the_command_line_reads_every_field(given: dict[str, Any]) -> None:
    words = ["--output_dir", "x", "--use_cpu", "--bf16", "false", "--kl_penalty", "0.03", "--loss_type", "dapo"]
    for name, value in given.items():
        words += [f"--{name}", *(map(str, value) if isinstance(value, list) else [str(value)])]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KLWarning)
        (args,) = trl.TrlParser(GRPOConfig).parse_args_and_config(words)
    assert touched(args) == given
    assert args.beta == 0.03


def test_the_saved_form_is_json_and_makes_the_same_kl() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KLWarning)
        args = arguments(
            kl_coef=0.03,
            loss_type="dapo",
            **{**EVERY, "kl_controller_gains": (0.2, 0.3, 0.4), "kl_controller_factors": (2.0, 0.5, 1.5, 0.5)},
        )
        saved = json.loads(args.to_json_string())
        again = arguments(loss_type="dapo", **{name: saved[name] for name in (*EVERY, *ALIASES, "beta")})
        assert again.kl_config() == args.kl_config()
    assert {name: saved[name] for name in EVERY} == EVERY
    assert (saved["beta"], saved["kl_coef"]) == (0.03, None)
    assert args.kl_config().kl_controller_gains == (0.2, 0.3, 0.4)


def test_the_arguments_survive_being_pickled_with_a_checkpoint(tmp_path: Any) -> None:
    args = arguments(beta=0.1, kl_gradient="reverse")
    torch.save(args, tmp_path / "training_args.bin")
    loaded = torch.load(tmp_path / "training_args.bin", weights_only=False)
    assert loaded.kl_config() == args.kl_config()


@pytest.mark.parametrize("name", ALIASES)
def test_other_names_of_beta(name: str) -> None:
    assert arguments(**{name: 0.2}).beta == 0.2
    assert arguments(**{name: 0.2}).kl_config() is None  # beta says nothing about whose term it is
    assert arguments(**{name: 0.2}, beta=0.2).beta == 0.2
    with pytest.raises(ConfigError, match="beta is given twice"):
        arguments(**{name: 0.2}, beta=0.1)


def test_one_field_makes_it_the_term_of_klamp() -> None:
    assert arguments(beta=0.1, kl_gradient="reverse").kl_config() == KLConfig(beta=0.1)
    with pytest.warns(KLWarning, match="beta is 0"):
        assert arguments(kl_gradient="reverse").kl_config() == KLConfig(beta=0.0)


@pytest.mark.parametrize("beta", [-0.1, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["beta", *ALIASES])
def test_a_beta_that_is_no_coefficient_is_refused_whoever_computes_the_kl(name: str, beta: float) -> None:
    with pytest.raises(ConfigError, match="beta must be a number >= 0"):
        arguments(**{name: beta})
