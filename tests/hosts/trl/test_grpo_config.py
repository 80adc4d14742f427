"""klamp's fields in TRL's arguments: the command line, the saved form, the other names, the refusals."""

from __future__ import annotations

import dataclasses
import json
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import trl
from tests.hosts.trl.hosts import arguments, klamp_trainer, model

from klamp._field_texts import field_texts
from klamp.config import KLConfig
from klamp.config.kl import ALIASES, KLWarning
from klamp.errors import ConfigError, UnknownNameError
from klamp.hosts.common.kl_fields import touched
from klamp.hosts.trl.grpo_config import UNSLOTH, host_class, refuse_classes
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
    wanted = {field.name for field in dataclasses.fields(KLConfig)}
    assert wanted | ALIASES.keys() <= {field.name for field in dataclasses.fields(GRPOConfig)}
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


LORA = {"peft_config": peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"kl_normalizer": "token_mean", "loss_type": "grpo"}, "sequence_mean"),
        ({"kl_normalizer": "token_mean", "loss_type": "bnpo"}, "each micro-batch"),
        ({"kl_placement": "reward", "kl_estimator": "k1", "kl_horizon": "sequence"}, "cancels beta"),
        ({"kl_placement": "advantage", "kl_estimator": "k1", "off_policy_mask_threshold": 0.1}, "sign of its"),
        ({"kl_placement": "advantage", "kl_estimator": "k1", "loss_type": "vespo"}, "sign of its"),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        arguments(beta=0.1, **options)


def test_a_moving_reference_is_the_one_of_trl() -> None:
    ema = arguments(beta=0.1, reference="ema", reference_decay=0.75)
    assert (ema.sync_ref_model, ema.ref_model_mixup_alpha, ema.ref_model_sync_steps) == (True, 0.25, 1)
    periodic = arguments(beta=0.1, reference="periodic", reference_reset_steps=7)
    assert (periodic.sync_ref_model, periodic.ref_model_mixup_alpha, periodic.ref_model_sync_steps) == (True, 1.0, 7)


def test_a_loss_type_that_klamp_does_not_know_is_refused_by_name_where_the_kl_is_klamps() -> None:
    with pytest.raises(UnknownNameError, match=r"(?s)unknown loss_type.*'dpao'.*did you mean 'dapo'") as caught:
        arguments(GRPOConfig, loss_type="dpao", beta=0.1, kl_estimator="k2")
    assert "luspo" in caught.value.why
    assert arguments(GRPOConfig, loss_type="dpao", beta=0.1).loss_type == "dpao", "TRL's own KL is TRL's business"


@pytest.mark.parametrize(
    ("options", "extra", "text"),
    [
        ({"reference": "adapter_off"}, {}, "needs a model with a PEFT adapter"),
        ({"reference": "adapter_off"}, {**LORA, "ref_model": "given"}, "cannot be combined with ref_model"),
        ({"reference_dtype": "bfloat16"}, LORA, "the policy itself with its adapter off"),
        ({"reference": "ema"}, {**LORA, "ref_model": "given"}, "an adapter is not among them"),
        ({"kl_estimator": "exact", "sync_ref_model": True}, {}, "the reference moves"),
        ({"kl_exclude_tokens": ["<nope>"]}, {}, "a token that the tokenizer does not have"),
    ],
)
def test_what_the_built_trainer_cannot_do_is_refused(
    tmp_path: Path, options: dict[str, Any], extra: dict[str, Any], text: str
) -> None:
    given = extra | ({"ref_model": model(seed=3)} if "ref_model" in extra else {})
    with pytest.raises(ConfigError, match=text):
        klamp_trainer(model(), tmp_path, beta=0.1, trainer=given, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"kl_placement": "reward", "kl_estimator": "k1", "kl_horizon": "sequence", "scale_rewards": "none"},
        {"kl_placement": "reward", "kl_estimator": "k1", "kl_horizon": "sequence", "scale_rewards": False},
        {"kl_placement": "advantage", "kl_estimator": "k1", "loss_type": "dapo"},
        {"kl_normalizer": "sequence_mean", "loss_type": "grpo"},
    ],
)
def test_their_neighbours_are_allowed(options: dict[str, Any]) -> None:
    assert arguments(beta=0.1, **options).kl_config() is not None


def test_a_kl_that_is_not_used_may_stand_anywhere() -> None:
    with pytest.warns(UserWarning, match="beta is 0"):
        args = arguments(beta=0.0, kl_placement="reward", kl_estimator="k1", kl_horizon="sequence")
    assert args.scale_rewards == "group"


def unsloths() -> type:
    """A class of the name that Unsloth gives its own."""
    return type(UNSLOTH, (), {})


def test_unsloths_class_is_found_among_the_bases() -> None:
    theirs = unsloths()
    assert host_class(theirs) is theirs
    assert host_class(type("Mine", (theirs,), {})) is theirs
    assert host_class(trl.GRPOTrainer) is None
    assert host_class(object) is None


def test_klamps_own_classes_are_refused_once_trl_is_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_classes()
    monkeypatch.setattr(trl, "GRPOTrainer", type("UnslothGRPOTrainer", (unsloths(),), {}))
    with pytest.raises(ConfigError, match="cannot be used once Unsloth has patched TRL") as caught:
        refuse_classes()
    assert caught.value.got == "trl.GRPOTrainer is UnslothGRPOTrainer"
    assert "klamp.trl.attach(trainer, KLConfig(...))" in caught.value.fix
