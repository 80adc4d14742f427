"""A run's configuration and what is settled before it: values, references, tokenizers, and what is refused."""

import dataclasses
import json
import math
import warnings
from pathlib import Path

import pytest
import torch
from tests.training.conftest import IN_REWARD, steps_of, stored, tiny_llama

from klamp.errors import ConfigError, DataError, KlampError, KLWarning, ModelError, RunFolderError, UnknownNameError
from klamp.lab.ablate.one_run import evaluate
from klamp.lab.backends import train_run
from klamp.lab.config import ModelConfig, OptimConfig, RolloutConfig, RunConfig, TrainConfig, reference_kind
from klamp.lab.folders import newest_policy
from klamp.lab.models import load_model
from klamp.lab.setup import open_inputs
from klamp.lab.tasks.base import Task


def refused(config, kind: type[KlampError], match: str) -> KlampError:
    """The error of a run, which must have four parts and must have left nothing behind."""
    folder = Path(str(config.run.output_dir))
    before = sorted(folder.rglob("*")) if folder.exists() else None
    with pytest.raises(kind, match=match) as caught:
        train_run(config)
    error = caught.value
    assert error.what and error.got is not None and error.why and error.fix, str(error)
    assert (sorted(folder.rglob("*")) if folder.exists() else None) == before, "a refused run leaves no trace"
    return error


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


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(config_of, tmp_path):
    folder = stored(tiny_llama(vocab_size=30, eos_token_id=1, pad_token_id=0), tmp_path / "small")
    error = refused(config_of(model=folder), ModelError, "more tokens than the model")
    assert "42" in error.got and "30" in error.got


def test_a_reference_with_another_vocabulary_is_refused(config_of, tmp_path):
    folder = stored(tiny_llama(vocab_size=30, eos_token_id=1, pad_token_id=0), tmp_path / "small")
    error = refused(config_of(ref_model=folder), ModelError, "another vocabulary")
    assert "reference 30" in error.got
    other = Path(stored(tiny_llama(vocab_size=50), tmp_path / "other"))
    (other / "tokenizer.json").write_text((other / "tokenizer.json").read_text().replace('"1":', '"&":'))
    refused(config_of(ref_model=str(other)), ModelError, "another tokenizer")


def test_a_reference_that_is_padded_further_is_the_reference(llama, config_of, tmp_path):
    """As in one family a small model has 151,936 entries and a large one 152,064: k1 has the mass m beyond the policy's
    entries, -log(1 - m); the sum over the shared ones is the generalised KL, -log(1 - m) - m, of the same gradient."""
    padded = load_model(llama, "float32")
    padded.resize_token_embeddings(50)
    settings = {"max_steps": 1, "eval_every": 0, "exact_kl_completions": 8, "eval_size": 1}
    train_run(config_of(ref_model=stored(padded, tmp_path / "padded"), **settings))
    (row,) = steps_of(tmp_path / "run")
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
    error = refused(config_of(task=task, eval_split=task), DataError, "prompt 2 is too long: 59 tokens")
    assert "58" in error.what and "64 tokens" in error.why
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
def cached_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KLAMP_CACHE", str(tmp_path / "cache"))
    return tmp_path


def opened(**flat: object) -> Task:
    return open_inputs(TrainConfig.from_flat(dict(flat)))


def test_prompts_are_counted_and_measured(cached_nowhere: Path) -> None:
    rows = ({"prompt": prompt, "answer": "5"} for prompt in ("1+1=", "2+2=", "33+44="))
    task = opened(task=file_of(cached_nowhere, *rows))
    assert (len(task.train), len(task.held_out), task.longest) == (2, 1, 6)
    assert not (cached_nowhere / "cache").exists()


@pytest.mark.parametrize(
    ("flat", "text"),
    [
        ({"task": "missing.jsonl"}, "does not exist"),
        ({"model": "no/folder"}, "cannot load"),
        ({"tokenizer": "no/folder"}, "cannot load a tokenizer"),
        ({"reward": "no_module:score"}, "cannot be imported"),
    ],
)
@pytest.mark.usefixtures("cached_nowhere")
def test_what_would_stop_a_run_is_an_error(flat: dict[str, str], text: str) -> None:
    with pytest.raises(KlampError, match=text):
        opened(**flat)


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
        TrainConfig.from_flat({"kl_early_stop": 0.1, "num_iterations": 2, "kl_off_policy": "token"})


@pytest.mark.parametrize(
    ("values", "text", "mended"),
    [
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
def test_a_rate_that_destroys_and_factors_that_are_0_are_warned_of(values, text, mended) -> None:
    with pytest.warns(KLWarning, match=text):
        TrainConfig.from_flat(values)
    with warnings.catch_warnings():
        warnings.simplefilter("error", KLWarning)
        TrainConfig.from_flat(values | mended)


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
