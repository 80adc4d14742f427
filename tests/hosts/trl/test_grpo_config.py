"""klamp's fields in TRL's arguments: the command line, the saved form, the other names, the refusals."""

import dataclasses
import json
import pickle
import warnings
from operator import mul
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
import yaml
from tests.hosts.trl.hosts import LORA, arguments, build, klamp_trainer, model, saved

from klamp.config import ALIASES, KLConfig
from klamp.config.kl import KLWarning
from klamp.core.surrogates import TrustRegion
from klamp.errors import ConfigError, UnknownNameError
from klamp.hosts.common.kl_fields import kl_config, read_again, touched
from klamp.hosts.trl.grpo_config import UNSLOTH, refuse_classes
from klamp.trl import GRPOConfig, GRPOTrainer, attach

EVERY: dict[str, Any] = {"kl_estimator": "k2", "kl_gradient": "forward", "kl_horizon": "token"}
EVERY |= {"kl_placement": "loss", "kl_clip_method": "hard", "kl_clip_threshold": 0.02}
EVERY |= {"use_per_token_kl_threshold": False, "kl_clip_temperature": 0.001, "kl_clip_level": "batch"}
EVERY |= {"kl_reference_length": 9, "kl_controller": "step", "target_kl": 0.05}
EVERY |= {"kl_controller_factors": [2.0, 0.5, 1.5, 0.5], "kl_controller_horizon": 20, "beta_min": 0.001}
EVERY |= {"beta_max": 2.0, "kl_max_log_ratio": 0.01, "kl_off_policy": "token", "kl_max_weight": 1.001}
EVERY |= {"kl_normalizer": "token_mean"}
EVERY |= {"kl_exclude_tokens": ["special", "20"]}
EVERY |= {"kl_monitor": True, "reference": "ema", "reference_decay": 0.5, "reference_reset_steps": 7}
EVERY |= {"reference_dtype": "bfloat16"}
"""Another value of each field, but of a schedule, which no target goes with."""
SCHEDULE = {"kl_schedule": "linear", "kl_warmup_steps": 3}
REFUSED = {"kl_early_stop", "reference_url", "reference_name"}


def test_every_field_of_the_kl_is_a_field_of_the_arguments() -> None:
    wanted = {field.name for field in dataclasses.fields(KLConfig)}
    assert wanted | ALIASES.keys() <= {field.name for field in dataclasses.fields(GRPOConfig)}
    assert EVERY.keys() | SCHEDULE.keys() | REFUSED <= wanted


def test_the_fields_and_defaults_of_trl_stay() -> None:
    stock = {field.name: field for field in dataclasses.fields(trl.GRPOConfig)}
    ours = {field.name: field for field in dataclasses.fields(GRPOConfig)}
    assert [name for name in ours if name in stock] == list(stock)  # in this order: positional arguments work
    for name, field in stock.items():
        assert (ours[name].default, ours[name].metadata) == (field.default, field.metadata), name
    assert GRPOConfig.beta == 0.0
    assert touched(arguments()) == {}
    assert kl_config(arguments()) is None
    masks = arguments(dppo_mask="dppo_tv", dppo_mask_high=0.1)  # TRL's own KL stays, TRL's own trainer is refused
    assert kl_config(masks) is None and read_again(masks)[2] == TrustRegion(dppo_mask="dppo_tv", dppo_mask_high=0.1)
    with pytest.raises(ConfigError, match="the trainer is not klamp's"):
        masks.get_warmup_steps(1)


@pytest.mark.parametrize("given", [EVERY, SCHEDULE], ids=["all but a schedule", "a schedule"])
def test_the_command_line_reads_every_field(given: dict[str, Any]) -> None:
    words = ["--output_dir", "x", "--use_cpu", "--bf16", "false", "--kl_penalty", "0.03", "--loss_type", "dapo"]
    for name, value in given.items():
        words += [f"--{name}", *(map(str, value) if isinstance(value, list) else [str(value)])]
    with warnings.catch_warnings(action="ignore", category=KLWarning):
        (args,) = trl.TrlParser(GRPOConfig).parse_args_and_config(words)
    assert touched(args) == {name: tuple(x) if isinstance(x, list) else x for name, x in given.items()}
    assert args.beta == 0.03


def test_the_saved_form_is_json_and_makes_the_same_kl() -> None:
    with warnings.catch_warnings(action="ignore", category=KLWarning):
        args = arguments(kl_coef=0.03, loss_type="dapo", **EVERY | {"kl_controller_factors": (2.0, 0.5, 1.5, 0.5)})
        saved = json.loads(args.to_json_string())
        again = arguments(loss_type="dapo", **{name: saved[name] for name in (*EVERY, *ALIASES, "beta")})
        assert kl_config(again) == kl_config(args)
    assert {name: saved[name] for name in EVERY} == EVERY
    assert (saved["beta"], saved["kl_coef"]) == (0.03, None)
    assert kl_config(args).kl_controller_factors == (2.0, 0.5, 1.5, 0.5)


ASKING: list[dict[str, Any]] = [
    {"beta": 0.1, "kl_clip_method": "hard"},
    {"beta": 0.1, "target_kl": 0.1},
    {"kl_monitor": True},
    {"fast_scoring": True},
]


class AskedEarly(GRPOTrainer):
    """A trainer of klamp's whose arguments are asked for the schedule before it is made, as DeepSpeed does."""

    def create_optimizer(self, *args: Any) -> Any:
        self.args.get_warmup_steps(1)
        return super().create_optimizer(*args)


@pytest.mark.filterwarnings("ignore::klamp.errors.KLWarning")
@pytest.mark.parametrize(
    ("asked", "kind"),
    [
        (ASKING[0], trl.GRPOTrainer),
        *(pytest.param(asked, trl.GRPOTrainer, marks=pytest.mark.slow) for asked in ASKING[1:-1]),
        (ASKING[-1], type("Mine", (trl.GRPOTrainer,), {})),
    ],
)
def test_klamps_arguments_train_in_no_trainer_of_trls(tmp_path: Path, asked: dict[str, Any], kind: type) -> None:
    """Not with a schedule of one's own either, as far as there is a beta; after a trainer of klamp's had them, too."""
    args = arguments(folder=tmp_path, max_steps=1, **asked)
    build(GRPOTrainer, model(), args).create_optimizer_and_scheduler(4)  # before any training, too
    build(AskedEarly, model(), args).train()
    made = model()
    made.config._name_or_path = saved(made, tmp_path / "start")
    for own in (False, True)[: 1 + (args.beta > 0)]:
        optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        trainer = build(kind, made, args, **({"optimizers": (optimizer, schedule)} if own else {}))
        with pytest.raises(ConfigError, match="klamp's fields are set, and the trainer is not klamp's") as caught:
            trainer.train()
        assert "from klamp.trl import GRPOTrainer" in caught.value.fix and trainer.state.global_step == 0
        assert own or trainer._buffered_inputs is None, "before anything is generated"


def test_a_beta_of_klamps_is_a_number_that_no_tensor_is_multiplied_by() -> None:
    args = arguments(beta=0.1, kl_clip_method="hard")
    assert args.beta == 0.1 and args.beta != 0.0 and 2 * args.beta == 0.2 and f"{args.beta}" == "0.1"
    assert type(args.to_dict()["beta"]) is float and yaml.safe_load(yaml.safe_dump(args.to_dict()["beta"])) == 0.1
    assert json.loads(args.to_json_string())["beta"] == 0.1
    for copied in (args, pickle.loads(pickle.dumps(args)), arguments(beta=args.beta, kl_clip_method="hard")):
        assert kl_config(copied) == kl_config(args) and type(kl_config(copied).beta) is float
        for product in (mul, lambda x, y: y * x):
            with pytest.raises(ConfigError, match="not klamp's"):
                product(copied.beta, torch.ones(1))
    assert type(arguments(beta=args.beta).beta) is float, "TRL's own KL"


def test_attach_takes_no_trainer_whose_arguments_have_a_kl_of_their_own(tmp_path: Path) -> None:
    trainer = build(trl.GRPOTrainer, model(), arguments(folder=tmp_path, beta=0.0, kl_monitor=True))
    with pytest.raises(ConfigError, match=r"have KL fields of their own\n  got: kl_monitor"):
        attach(trainer, KLConfig(beta=0.1))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"kl_normalizer": "token_mean", "loss_type": "grpo"}, "sequence_mean"),
        ({"kl_normalizer": "token_mean", "loss_type": "bnpo"}, "each micro-batch"),
        ({"reference": "frozen", "sync_ref_model": True}, "then moves the reference"),
        ({"kl_placement": "reward", "kl_estimator": "k1", "kl_horizon": "sequence"}, "cancels beta"),
        ({"kl_placement": "advantage", "kl_estimator": "k1", "loss_type": "vespo"}, "sign of its"),
        ({"dppo_mask": "dppo_tv", "loss_type": "vespo"}, "sign of its"),
        ({"rollout_rs": "seq_max_exact", "rollout_rs_threshold": 0.1}, "cannot be honoured by TRL"),
        ({"rollout_rs": "seq_max_k3"}, "no threshold"),
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
        ({"reference": "ema"}, LORA, "reference='ema' cannot be combined with a PEFT adapter"),
        ({"kl_estimator": "exact", "sync_ref_model": True}, {}, "the reference moves"),
        ({"kl_exclude_tokens": ["<nope>"]}, {}, "a token that the tokenizer does not have"),
    ],
)
def test_a_built_trainer_refuses(tmp_path: Path, options: dict[str, Any], extra: dict[str, Any], text: str) -> None:
    given = extra | ({"ref_model": model(seed=3)} if "ref_model" in extra else {})
    with pytest.raises(ConfigError, match=text):
        klamp_trainer(model(), tmp_path, beta=0.1, trainer=given, **options)


def test_klamps_own_classes_are_refused_once_trl_is_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_classes()
    monkeypatch.setattr(trl, "GRPOTrainer", type("UnslothGRPOTrainer", (type(UNSLOTH, (), {}),), {}))
    with pytest.raises(ConfigError, match="cannot be used once Unsloth has patched TRL") as caught:
        refuse_classes()
    assert caught.value.got == "trl.GRPOTrainer is UnslothGRPOTrainer"
    assert "klamp.trl.attach(trainer, KLConfig(...))" in caught.value.fix


def test_trls_own_gradient_of_the_kl_is_said_to_have_no_effect() -> None:
    other = {"use_bias_correction_kl": not trl.GRPOConfig.use_bias_correction_kl}
    with pytest.warns(KLWarning, match=r"(?s)use_bias_correction_kl.*effect"):
        arguments(beta=0.1, kl_estimator="k3", **other)
    with warnings.catch_warnings(action="error", category=KLWarning):
        arguments(beta=0.1, **other)
