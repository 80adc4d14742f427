"""The configuration of a run: flat and back, aliases, and refusals that name the field."""

from __future__ import annotations

import dataclasses
import typing
import warnings

import pytest

from klamp.errors import ConfigError, KlampError, KLWarning, UnknownNameError
from klamp.training.config import (
    ModelConfig,
    OptimConfig,
    RolloutConfig,
    RunConfig,
    TrainConfig,
    field_owners,
    section_classes,
)


def test_flat_values_make_the_same_configuration_again():
    config = TrainConfig.from_flat({"kl_coef": 0.2, "seed": 4, "report_to": ["tensorboard", "wandb"], "lora_r": 8})
    assert (config.kl.beta, config.run.seed, config.model.lora_r) == (0.2, 4, 8)
    assert config.run.report_to == ("tensorboard", "wandb"), "lists become tuples"
    assert TrainConfig.from_flat(config.flat()) == config
    assert TrainConfig.from_flat({}) == TrainConfig()


def test_no_two_sections_share_a_field_name():
    every = [f.name for cls in section_classes().values() for f in dataclasses.fields(cls)]
    assert len(every) == len(set(every)) == len(field_owners())


@pytest.mark.parametrize("alias", ["kl_coef", "kl_penalty", "kl_beta"])
def test_aliases_mean_beta_and_cannot_contradict_it(alias):
    assert TrainConfig.from_flat({alias: 0.5}).kl.beta == 0.5
    with pytest.raises(ConfigError, match="given twice"):
        TrainConfig.from_flat({alias: 0.5, "beta": 0.4})


def test_an_unknown_key_names_the_nearest():
    with pytest.raises(UnknownNameError, match="did you mean 'learning_rate'"):
        TrainConfig.from_flat({"learning_rat": 1.0})


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"resume": True}, "resume needs output_dir"),
        (
            {"kl_placement": "reward", "kl_estimator": "k1", "kl_horizon": "sequence", "scale_rewards": "std"},
            "cannot be combined with advantages divided",
        ),
    ],
)
def test_what_cannot_work_together_is_refused(values, named):
    with pytest.raises(KlampError, match=named) as caught:
        TrainConfig.from_flat(values)
    assert caught.value.fix, "and the way out is given"


def test_an_early_stop_that_never_comes_is_warned_of():
    with pytest.warns(KLWarning, match="kl_early_stop=0.1 has no effect: it needs num_iterations of 2 or more"):
        TrainConfig.from_flat({"kl_early_stop": 0.1})
    with warnings.catch_warnings():
        warnings.simplefilter("error", KLWarning)
        TrainConfig.from_flat({"kl_early_stop": 0.1, "num_iterations": 2})


def test_a_section_is_a_configuration_not_a_dict():
    with pytest.raises(ConfigError, match=r"rollout must be a RolloutConfig(?s:.*)RolloutConfig\(\*\*rollout\)"):
        TrainConfig(rollout={"num_generations": 4})


NAN = float("nan")
SECTIONS = (ModelConfig, RolloutConfig, OptimConfig, RunConfig)


@pytest.mark.parametrize(
    ("section", "values", "named"),
    [
        (RolloutConfig, {"num_generations": 0}, "num_generations must be a whole number >= 1"),
        (RolloutConfig, {"prompts_per_step": 0}, "prompts_per_step"),
        (RolloutConfig, {"max_completion_length": 0}, "max_completion_length"),
        (RolloutConfig, {"temperature": 0.0}, "temperature"),
        (RolloutConfig, {"temperature": NAN}, "temperature"),
        (RolloutConfig, {"temperature": 1e-300}, "temperature"),
        (RolloutConfig, {"top_p": 0.0}, "top_p"),
        (RolloutConfig, {"top_p": 1.1}, "top_p"),
        (OptimConfig, {"learning_rate": 0.0}, "learning_rate"),
        *(
            (OptimConfig, {"adam_beta1": x}, r"(?s)adam_beta1 must be a number in \[0, 1\).*default")
            for x in (2.0, NAN)
        ),
        (OptimConfig, {"adam_beta2": 1.0}, r"adam_beta2 must be a number in \[0, 1\)"),
        (OptimConfig, {"max_grad_norm": -1.0}, "max_grad_norm"),
        (OptimConfig, {"num_iterations": 0}, "num_iterations"),
        (OptimConfig, {"gradient_accumulation_steps": 0}, "gradient_accumulation_steps"),
        (OptimConfig, {"lr_scheduler_type": "cosin"}, "did you mean 'cosine'"),
        (ModelConfig, {"dtype": "float23"}, "did you mean 'float32'"),
        (ModelConfig, {"lora_r": -1}, "lora_r"),
        (RunConfig, {"max_steps": -1}, "max_steps"),
        (RunConfig, {"stop_on": ("kl-spik",)}, "did you mean 'kl-spike'"),
        (RunConfig, {"keep_checkpoints": 0}, "keep_checkpoints"),
        *((RunConfig, {"seed": seed}, "seed") for seed in (-1, 2**32, 10**400)),
        (RunConfig, {"max_steps": 10**400}, "max_steps"),
    ],
)
def test_values_that_cannot_work_are_refused_by_name(section, values, named):
    with pytest.raises(KlampError, match=named) as caught:
        section(**values)
    assert caught.value.fix, "and the way out is given"


@pytest.mark.parametrize("section", SECTIONS)
def test_a_section_is_read_only_takes_names_only_and_its_defaults_work(section):
    made = section()
    name = dataclasses.fields(section)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(made, name, getattr(made, name))
    with pytest.raises(TypeError):
        section(getattr(made, name))


@pytest.mark.parametrize("section", SECTIONS)
def test_every_choice_of_a_literal_is_accepted(section):
    for name, hint in typing.get_type_hints(section).items():
        if typing.get_origin(hint) is typing.Literal:
            for choice in typing.get_args(hint):
                assert getattr(section(**{name: choice}), name) == choice
