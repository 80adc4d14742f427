"""The configuration of a run: flat and back, aliases, and refusals that name the field."""

import dataclasses
import warnings

import pytest
from tests.training.conftest import IN_REWARD

from klamp.errors import ConfigError, KlampError, KLWarning, UnknownNameError
from klamp.lab.config import ModelConfig, OptimConfig, RolloutConfig, RunConfig, TrainConfig


def test_flat_values_make_the_same_configuration_again():
    config = TrainConfig.from_flat({"kl_coef": 0.2, "seed": 4, "report_to": ["tensorboard", "wandb"], "lora_r": 8})
    assert (config.kl.beta, config.run.seed, config.model.lora_r) == (0.2, 4, 8)
    assert config.run.report_to == ("tensorboard", "wandb"), "lists become tuples"
    assert TrainConfig.from_flat(config.flat()) == config
    assert TrainConfig.from_flat({}) == TrainConfig()


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
        (IN_REWARD | {"scale_rewards": "std"}, "cannot be combined with advantages divided"),
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
        (OptimConfig, {"adam_beta1": NAN}, r"(?s)adam_beta1 must be a number in \[0, 1\).*default"),
        (OptimConfig, {"lr_scheduler_type": "cosin"}, "did you mean 'cosine'"),
        (ModelConfig, {"lora_r": -1}, "lora_r"),
        (RunConfig, {"stop_on": ("kl-spik",)}, "did you mean 'kl-spike'"),
        *((RunConfig, {"seed": seed}, "seed") for seed in (-1, 2**32, 10**400)),
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
