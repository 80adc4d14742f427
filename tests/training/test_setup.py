"""A run's configuration and what is settled before it: values, references, tokenizers, and what is refused."""

import dataclasses
import json
import math
import warnings
from pathlib import Path

import pytest
import torch
from tests.training import conftest
from tests.training.conftest import IN_REWARD, steps_of, steps_taken, stored, tiny_llama

from klamp.errors import ConfigError, DataError, KlampError, KLWarning, ModelError, RunFolderError, UnknownNameError
from klamp.lab.ablate.one_run import evaluate
from klamp.lab.backends import train_run
from klamp.lab.config import ModelConfig, OptimConfig, RolloutConfig, RunConfig, TrainConfig, reference_kind
from klamp.lab.folders import newest_policy
from klamp.lab.models import load_model
from klamp.lab.setup import open_inputs


def refused(config, kind: type[KlampError], words: str) -> None:
    """The error of a run, which must have left nothing behind."""
    with conftest.refused(kind, words):
        train_run(config)
    assert not Path(config.run.output_dir).exists(), "a refused run leaves no trace"


def file_of(folder: Path, *rows: dict) -> str:
    file = folder / "rows.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows))
    return str(file)


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"report_to": ("tensorbored",)}, ConfigError, "tracker cannot be used(?s:.*)not installed: tensorbored"),
        ({"report_to": ("tensorboard", "clearml")}, ConfigError, "tracker cannot be used(?s:.*)not installed: clearml"),
        ({"resume": True}, RunFolderError, "no run to continue"),
        ({"reward": "exact_mach"}, UnknownNameError, "exact_match"),
        ({"lora_r": 2, "lora_target_modules": ("nowhere",)}, ModelError, "does not fit"),
    ],
)
def test_what_cannot_be_used_is_refused(config_of, changes, kind, words):
    refused(config_of(**changes), kind, words)


def test_a_tokenizer_or_a_reference_with_other_tokens_is_refused(config_of, tmp_path):
    small = stored(tiny_llama(vocab_size=30, eos_token_id=1, pad_token_id=0), tmp_path / "small")
    refused(config_of(model=small), ModelError, "(?s)more tokens than the model.*42.*30")
    refused(config_of(ref_model=small), ModelError, "(?s)another vocabulary.*reference 30")
    other = Path(stored(tiny_llama(vocab_size=50), tmp_path / "other"))
    (other / "tokenizer.json").write_text((other / "tokenizer.json").read_text().replace('"1":', '"&":'))
    refused(config_of(ref_model=str(other)), ModelError, "another tokenizer")


def test_a_reference_that_is_padded_further_is_the_reference(llama, context_of, tmp_path):
    """With the mass m beyond the policy's entries k1 is -log(1 - m), and the sum over the others -log(1 - m) - m."""
    padded = load_model(llama, "float32")
    padded.resize_token_embeddings(50)
    (row,) = steps_taken(context_of(ref_model=stored(padded, tmp_path / "padded"), exact_kl_completions=8), 1)
    beyond = -math.expm1(-row["kl/k1"])
    assert row["kl/k1"] > 1e-3 and row["kl/exact"] == pytest.approx(row["kl/k1"] - beyond, rel=0.1)


def test_padding_of_the_policy_that_the_reference_has_not_is_cut(llama, config_of, tmp_path):
    padded = load_model(llama, "float32")
    padded.resize_token_embeddings(50)
    config = config_of(
        model=stored(padded, tmp_path / "padded"), ref_model=llama, max_steps=1, eval_every=0, eval_size=1
    )
    with pytest.warns(KLWarning, match="entries from 42 on are cut"):
        train_run(config)
    (row,) = steps_of(tmp_path / "run")
    assert abs(row["kl/k1"]) < 1e-6 and abs(row["kl/exact"]) < 1e-6, "without them they are one model"
    saved = newest_policy(tmp_path / "run")
    assert load_model(str(saved), "float32").config.vocab_size == 42
    assert evaluate(config, saved).numbers["kl/reverse"] >= 0, "the start has its padding"


def test_prompts_that_leave_no_room_for_a_completion_are_refused(config_of, tmp_path):
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "9" * 59, "answer": "9"}]
    task = file_of(tmp_path, *rows)
    refused(config_of(task=task, eval_split=task), DataError, "(?s)prompt 2 is too long: 59 tokens.*58.*64 tokens")
    train_run(config_of(task=task, eval_split=task, max_completion_length=5, max_steps=0))


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({}, "frozen"),
        ({"lora_r": 2}, "adapter_off"),
        ({"lora_r": 2, "reference": "frozen"}, "frozen"),
        ({"lora_r": 2, "ref_model": "elsewhere"}, "frozen"),
        ({"beta": 0.0}, "none"),
        ({"beta": 0.0, "kl_monitor": True}, "frozen"),
    ],
)
def test_which_reference_a_run_has(config_of, changes, kind):
    assert reference_kind(config_of(**changes)) == kind


def test_the_same_seed_makes_the_same_adapter(context_of):
    def weights(**changes):
        policy = context_of(lora_r=4, **changes).policy
        return torch.cat([p.detach().flatten() for n, p in policy.named_parameters() if "lora_A" in n])

    torch.manual_seed(99)
    first = weights()
    assert torch.equal(first, weights())
    assert not torch.equal(first, weights(seed=1))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KLAMP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_prompts_are_counted_and_measured(cache: Path, tmp_path: Path) -> None:
    rows = ({"prompt": prompt, "answer": "5"} for prompt in ("1+1=", "2+2=", "33+44="))
    task = open_inputs(TrainConfig.from_flat({"task": file_of(tmp_path, *rows)}))
    assert (len(task.train), len(task.held_out), task.longest) == (2, 1, 6)
    assert not cache.exists()


@pytest.mark.parametrize(
    ("flat", "text"),
    [
        ({"task": "missing.jsonl"}, "does not exist"),
        ({"model": "no/folder"}, "cannot load"),
        ({"tokenizer": "no/folder"}, "cannot load a tokenizer"),
        ({"reward": "no_module:score"}, "cannot be imported"),
    ],
)
@pytest.mark.usefixtures("cache")
def test_what_would_stop_a_run_is_an_error(flat: dict[str, str], text: str) -> None:
    with pytest.raises(KlampError, match=text):
        open_inputs(TrainConfig.from_flat(flat))


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


@pytest.mark.parametrize(
    ("values", "text", "mended"),
    [
        (
            {"kl_early_stop": 0.1},
            "kl_early_stop=0.1 has no effect: it needs num_iterations of 2 or more",
            {"num_iterations": 2, "kl_off_policy": "token"},
        ),
        ({"learning_rate": 5.0}, "learning_rate=5 moves each weight", {"learning_rate": 0.02}),
        ({"max_steps": 1}, "warmup_steps=10 with max_steps=1", {"warmup_steps": 0}),
        ({"max_steps": 1}, "leaves the only step a learning rate of 0", {"max_steps": 2}),
        (
            {"max_steps": 1, "warmup_steps": 0, "kl_warmup_steps": 3},
            "the only step a beta of 0",
            {"kl_warmup_steps": 0},
        ),
        (
            {"max_steps": 1, "warmup_steps": 0, "teacher_model": "m", "teacher_warmup_steps": 3, "teacher_coef": 0.5},
            "the only step a teacher_coef of 0",
            {"teacher_warmup_steps": 0},
        ),
        ({"max_steps": 1, "backend": "trl"}, "warmup_steps=10", {"num_iterations": 2, "kl_off_policy": "token"}),
    ],
)
def test_what_destroys_the_weights_or_has_no_effect_is_warned_of(values, text, mended) -> None:
    with pytest.warns(KLWarning, match=text):
        TrainConfig.from_flat(values)
    with warnings.catch_warnings():
        warnings.simplefilter("error", KLWarning)
        TrainConfig.from_flat(values | mended)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"resume": True}, "resume needs output_dir"),
        (IN_REWARD | {"scale_rewards": "std"}, "cannot be combined with advantages divided"),
        ({"learning_rat": 1.0}, "did you mean 'learning_rate'"),
        ({"num_generations": 0}, "num_generations must be a whole number >= 1"),
        ({"prompts_per_step": 0}, "prompts_per_step"),
        ({"max_completion_length": 0}, "max_completion_length"),
        *(({"temperature": temperature}, "temperature") for temperature in (0.0, math.nan, 1e-300)),
        ({"top_p": 0.0}, "top_p"),
        ({"adam_beta1": math.nan}, r"(?s)adam_beta1 must be a number in \[0, 1\).*default"),
        ({"lr_scheduler_type": "cosin"}, "did you mean 'cosine'"),
        ({"lora_r": -1}, "lora_r"),
        ({"stop_on": ("kl-spik",)}, "did you mean 'kl-spike'"),
        *(({"seed": seed}, "seed") for seed in (-1, 2**32, 10**400)),
    ],
)
def test_values_that_cannot_work_are_refused_by_name(values, named):
    with pytest.raises(KlampError, match=named) as caught:
        TrainConfig.from_flat(values)
    assert caught.value.fix, "and the way out is given"


@pytest.mark.parametrize("section", [ModelConfig, RolloutConfig, OptimConfig, RunConfig])
def test_a_section_is_read_only_takes_names_only_and_its_defaults_work(section):
    made = section()
    name = dataclasses.fields(section)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(made, name, getattr(made, name))
    with pytest.raises(TypeError):
        section(getattr(made, name))
