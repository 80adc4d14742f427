"""From a configuration to a run: what is refused before any work, each with what, got, why and fix."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from tests.training.conftest import steps_of, stored, tiny_llama

from klamp.errors import ConfigError, DataError, KlampError, ModelError, RunFolderError, UnknownNameError
from klamp.tasks.arithmetic import arithmetic_tokenizer
from klamp.training import setup
from klamp.training.backends import train_run
from klamp.training.setup import make_accelerator, make_optimizer, reference_kind


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


# refusals ------------------------------------------------------------------------------------------------------------


def test_an_unknown_tracker_is_refused(config_of):
    refused(config_of(report_to=("tensorbored",)), ConfigError, "tracker cannot be used")


@pytest.fixture
def of_its_own():
    """A state of accelerate's that is this test's: it is one for the whole process."""
    AcceleratorState._reset_state()
    yield
    AcceleratorState._reset_state()


def test_mixed_precision_is_refused_before_any_work(config_of, monkeypatch, of_its_own):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    error = refused(config_of(), ConfigError, "does not run in accelerate's mixed precision")
    assert "mixed_precision bf16" in error.text and "--dtype bfloat16" in error.fix


def test_another_trainer_of_the_process_leaves_no_precision_behind(config_of, tmp_path, of_its_own):
    assert Accelerator(cpu=True, mixed_precision="bf16").mixed_precision == "bf16"
    train_run(config_of(max_steps=1, eval_every=0, save_every=0))
    first = steps_of(tmp_path / "run")[0]
    assert first["kl/exact"] == first["kl/k3"] == 0, "the policy is its reference"


def test_a_tracker_that_is_not_installed_is_refused_instead_of_passed_over(config_of):
    error = refused(config_of(report_to=("tensorboard", "clearml")), ConfigError, "tracker cannot be used")
    assert "not installed: clearml" in error.why


def test_prompts_that_do_not_divide_over_the_processes_are_refused(config_of, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(
        setup, "Accelerator", lambda **_: SimpleNamespace(num_processes=2, log_with=[], mixed_precision="no")
    )
    with pytest.raises(ConfigError, match="do not divide") as caught:
        make_accelerator(config_of(prompts_per_step=3), Path())
    assert "multiple of 2" in caught.value.fix and "3" in caught.value.got
    make_accelerator(config_of(prompts_per_step=4), Path())


def test_processes_that_did_not_join_are_refused(config_of, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    refused(config_of(), ConfigError, "did not find each other")


def test_a_folder_with_another_run_in_it_is_refused(config_of, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("")
    refused(config_of(), RunFolderError, "holds another run")


def test_a_run_that_is_not_there_cannot_be_resumed(config_of):
    refused(config_of(resume=True), RunFolderError, "no run to continue")


def test_a_model_folder_without_tokenizer_is_refused_unless_one_is_named(config_of, llama, tmp_path):
    folder = tmp_path / "bare"
    shutil.copytree(llama, folder, ignore=shutil.ignore_patterns("tokenizer*"))
    refused(config_of(model=str(folder)), ModelError, "cannot load a tokenizer")
    train_run(config_of(model=str(folder), tokenizer=llama, max_steps=0, eval_size=1))


def test_a_model_folder_without_weights_is_refused(config_of, llama, tmp_path):
    folder = tmp_path / "bare"
    shutil.copytree(llama, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    refused(config_of(model=str(folder)), ModelError, "cannot load a causal language model")


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(config_of, tmp_path):
    folder = stored(tiny_llama(vocab_size=30, eos_token_id=1, pad_token_id=0), tmp_path / "small")
    error = refused(config_of(model=folder), ModelError, "more tokens than the model")
    assert "42" in error.got and "30" in error.got


def test_a_reference_with_another_vocabulary_is_refused(config_of, tmp_path):
    folder = stored(tiny_llama(vocab_size=50), tmp_path / "other")
    error = refused(config_of(ref_model=folder), ModelError, "another vocabulary")
    assert "reference 50" in error.got


def test_prompts_that_leave_no_room_for_a_completion_are_refused(config_of, tmp_path):
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "9" * 59, "answer": "9"}]
    task = file_of(tmp_path, *rows)
    error = refused(config_of(task=task, eval_split=task), DataError, "prompt 2 is too long: 59 tokens")
    assert "58" in error.what and "64 tokens" in error.why
    train_run(config_of(task=task, eval_split=task, max_completion_length=5, max_steps=0))


@pytest.mark.parametrize(
    ("rows", "match"),
    [
        ([{"prompt": "", "answer": "2"}], "prompt"),
        ([{"prompt": "1+1=", "answer": "2"}, {"answer": "2"}], "prompt"),
        ([{"prompt": "naïve", "answer": "2"}], "cannot be tokenized"),
    ],
)
def test_rows_that_cannot_be_used_are_refused(config_of, tmp_path, rows, match):
    task = file_of(tmp_path, *rows)
    refused(config_of(task=task, eval_split=task), DataError, match)


def test_an_unknown_reward_is_refused(config_of):
    refused(config_of(reward="exact_mach"), UnknownNameError, "exact_match")


def test_an_adapter_that_does_not_fit_is_refused(config_of):
    refused(config_of(lora_r=2, lora_target_modules=("nowhere",)), ModelError, "does not fit")


# what is built -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({}, "frozen"),
        ({"lora_r": 2}, "adapter_off"),
        ({"lora_r": 2, "reference": "frozen"}, "frozen"),
        ({"lora_r": 2, "ref_model": "elsewhere"}, "frozen"),
        ({"beta": 0.0}, "none"),
        ({"beta": 0.0, "kl_monitor": True}, "frozen"),
        ({"beta": 0.0, "kl_controller": "pid", "target_kl": 0.1}, "frozen"),
    ],
)
def test_which_reference_a_run_has(config_of, changes, kind):
    assert reference_kind(config_of(**changes)) == kind


def test_only_what_is_trained_is_optimised(context_of):
    for changes in ({}, {"lora_r": 2}):
        context = context_of(weight_decay=0.1, adam_beta1=0.8, adam_beta2=0.95, **changes)
        optimizer, _ = make_optimizer(context)
        (group,) = optimizer.param_groups
        trained = [p for p in context.policy.parameters() if p.requires_grad]
        assert {id(p) for p in group["params"]} == {id(p) for p in trained}
        assert (group["weight_decay"], group["betas"]) == (0.1, (0.8, 0.95))


def factor(name: str, step: int, warmup: int, total: int) -> float:
    """The schedules, written down once more."""
    if step < warmup:
        return step / warmup
    done = (step - warmup) / (total - warmup)
    return {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}[name]


@pytest.mark.parametrize("name", ["constant", "linear", "cosine"])
def test_learning_rates_follow_the_schedule(context_of, name):
    context = context_of(lr_scheduler_type=name, warmup_steps=3, max_steps=11, learning_rate=0.02)
    optimizer, schedule = make_optimizer(context)
    seen = []
    for _ in range(11):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert seen == pytest.approx([0.02 * factor(name, step, 3, 11) for step in range(11)])


def test_the_same_seed_makes_the_same_adapter(context_of):
    def weights(**changes):
        policy = context_of(lora_r=4, **changes).policy
        return torch.cat([p.detach().flatten() for n, p in policy.named_parameters() if "lora_A" in n])

    torch.manual_seed(99)
    first = weights()
    assert torch.equal(first, weights())
    assert not torch.equal(first, weights(seed=1))


def test_a_tokenizer_of_another_folder_is_used(context_of, tmp_path):
    other = arithmetic_tokenizer()
    other.model_max_length = 12
    other.save_pretrained(tmp_path / "tokenizer")
    assert context_of(tokenizer=str(tmp_path / "tokenizer")).tokenizer.model_max_length == 12


@pytest.mark.parametrize("device", ["nope", "cuda:99"])
def test_a_device_of_the_reference_that_is_not_there(config_of, device):
    refused(config_of(reference_device=device), ConfigError, "reference_device cannot be used")
