"""A run by TRL: its arguments, field by field; whose numbers it has, what it leaves, how it goes on, what ends it."""

import dataclasses
import shutil
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.training.conftest import json_rows, stored, tiny_llama
from tests.training.in_trl.conftest import WHOLE

from klamp.config import KLConfig, TeacherConfig
from klamp.core.advantages import group_advantages
from klamp.doctor.readers import read_record
from klamp.errors import ConfigError, ModelError, RunFolderError, TrainingStopped
from klamp.lab.backends import ONLY, launch, record
from klamp.lab.checkpoint import identity_in
from klamp.lab.config import TrainConfig
from klamp.lab.engines import trl_program as program
from klamp.lab.engines.trl_arguments import trl_arguments, weights_dtype
from klamp.lab.folders import SEAL, newest_policy
from klamp.lab.models import load_model
from klamp.lab.sampling import examples_of_run
from klamp.lab.tasks.base import TaskConfig


def rows_of(folder: Path) -> list[dict[str, float]]:
    """The metrics of a run's steps, as `klamp doctor` reads them, but for times."""
    return [
        {name: value for name, value in row.metrics.items() if not name.startswith("speed")}
        for row in read_record(folder).rows
    ]


@pytest.fixture
def copied(whole_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole_run, tmp_path / "run"))


def test_what_a_run_leaves(whole_run):
    folder, rows = whole_run, rows_of(whole_run)
    assert len(rows) == 4 and abs(rows[0]["kl/k3"]) < 1e-6 < rows[-1]["kl/k3"]
    assert [row.step for row in read_record(folder).evaluations] == [0, 4]
    assert read_record(folder).details.versions["trl"]
    files = ("config.yaml", "identity.json", "versions.json", "trainer_state.json", "checkpoint-2", "checkpoint-4")
    assert {path.name for path in folder.iterdir()} >= {*files}
    lines = json_rows(folder / "completions.jsonl")
    assert {line["step"] for line in lines} == {1, 2, 4} and sum(line["step"] == 4 for line in lines) == 5
    assert len(json_rows(folder / "answers.jsonl")) == 2
    assert (folder / "checkpoint-4" / "identity.json").read_text() == (folder / "identity.json").read_text()
    assert newest_policy(folder) == folder / "checkpoint-4" and load_model(str(newest_policy(folder)))


def test_a_checkpoint_that_was_cut_short_is_passed_over_and_one_that_changed_is_refused(quick, copied, whole_run):
    older, newest = copied / "checkpoint-2" / SEAL, copied / "checkpoint-4"
    written = older.stat().st_mtime_ns
    (newest / SEAL).unlink()
    (copied / "trainer_state.json").unlink()
    launch(quick(**WHOLE, resume=True), [])
    assert (newest / SEAL).exists() and rows_of(copied) == rows_of(whole_run)
    assert older.stat().st_mtime_ns == written, "it goes on from there"
    (newest / "trainer_state.json").write_text("{}")
    with pytest.raises(RunFolderError, match="damaged"):
        launch(quick(**WHOLE, resume=True), [])


def test_ctrl_c_ends_the_run_after_the_step_and_it_goes_on_with_the_numbers_of_the_whole(quick, tmp_path, monkeypatch):
    changes = {"lora_r": 2, "num_iterations": 2, "max_steps": 4, "save_every": 2}
    launch(quick(output_dir=str(tmp_path / "whole"), **changes), [])
    ended = []

    class Pressed(program.RunCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 5:
                signal.raise_signal(signal.SIGINT)

        def on_step_end(self, args, state, control, **kwargs):
            ended.append(state.global_step)
            super().on_step_end(args, state, control, **kwargs)

    before = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patched:
        patched.setattr(program, "RunCallback", Pressed)
        with pytest.raises(TrainingStopped, match="--resume") as stopped:
            launch(quick(**changes), [])
    assert stopped.value.interrupted and signal.getsignal(signal.SIGINT) is before
    assert ended[-1] == 6 and newest_policy(tmp_path / "run").name == "checkpoint-4"
    launch(quick(**changes, resume=True), [])
    assert rows_of(tmp_path / "run") == rows_of(tmp_path / "whole")


@pytest.mark.parametrize(
    ("changes", "scale", "baseline"),
    [({}, "none", "leave_one_out"), ({"loss_type": "dapo", "advantage_baseline": "mean"}, "std", "mean")],
)
def test_prompts_and_advantages_are_those_of_klamp(changes, scale, baseline, quick, monkeypatch):
    rollouts = []

    class Watched(program.RunTrainer):
        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            if self.model.training:
                prompts = [row["prompt"] for row in inputs]
                rollouts.append((prompts, self._klamp.rollout.rewards.flatten(), output["advantages"]))
                for ids, mask, text in zip(output["prompt_ids"], output["prompt_mask"], prompts, strict=True):
                    written = self._tokenizer(text, add_special_tokens=False)["input_ids"]
                    assert ids[mask.bool()].tolist() == written
            return output

    monkeypatch.setattr(program, "RunTrainer", Watched)
    config = quick(max_steps=2, **changes)
    launch(config, [])
    task = program.load_prompts(config, program.models.load_tokenizer(config.model.model), longest=None)
    wanted = [task.train[i].prompt for i in examples_of_run(config, len(task.train))]
    assert [prompt for prompts, *_ in rollouts for prompt in prompts[::4]] == wanted
    for _, rewards, advantages in rollouts:
        expected = group_advantages(rewards, 4, scale=scale, baseline=baseline)
        torch.testing.assert_close(advantages, expected.to(advantages))


def test_an_alarm_of_stop_on_ends_the_run_with_a_checkpoint(quick, tmp_path):
    """It rises in the first step, for another reference was taken."""
    other = stored(tiny_llama(initializer_range=0.1), tmp_path / "other")
    with pytest.raises(TrainingStopped, match="update 1 of 3 by the alarm reference-differs") as stopped:
        launch(quick(ref_model=other, stop_on=("reference-differs",)), [])
    folder = tmp_path / "run"
    assert not stopped.value.interrupted and newest_policy(folder) is not None
    assert "reference-differs" in (folder / "alarms.jsonl").read_text()
    assert rows_of(folder)[0]["kl/k3"] > 0.1


def test_a_teacher_without_a_reward(quick, teacher, tmp_path):
    launch(quick(teacher_model=teacher, teacher_estimator="k3", reward="none", beta=0.0, max_steps=1), [])
    (row,) = rows_of(tmp_path / "run")
    assert row["teacher/kl"] > 0.01 and row["reward"] == 0 and not any(name.startswith("kl/") for name in row)


def test_a_reference_with_other_tokens_is_refused(quick, tmp_path):
    other = stored(tiny_llama(), tmp_path / "other")
    file = Path(other) / "tokenizer.json"
    file.write_text(file.read_text().replace('"1":', '"&":'))
    with pytest.raises(ModelError, match="reference"):
        launch(quick(ref_model=other), [])


@pytest.mark.parametrize("changes", [{"kl_normalizer": "token_mean"}, {"reference_dtype": "bfloat16", "lora_r": 2}])
def test_what_klamps_door_to_trl_refuses_leaves_no_run_behind(changes, quick, tmp_path):
    with pytest.raises(ConfigError, match=next(iter(changes))):
        launch(quick(**changes), [])
    assert not list((tmp_path / "run").iterdir())


@pytest.mark.usefixtures("copied")
def test_a_resume_cannot_change_what_trl_counts_by(quick):
    changed = {"max_steps": 5, "num_iterations": 4, "target_kl": None, "kl_controller": "fixed"}
    with pytest.raises(ConfigError, match="cannot change num_iterations"):
        launch(quick(**{**WHOLE, **changed}, resume=True), [])


def test_a_run_keeps_its_id_once_it_has_a_checkpoint_and_a_start_that_was_cut_short_needs_none(quick, tmp_path):
    config, folder = quick(resume=True), tmp_path / "run"
    folder.mkdir()
    record(config, folder)  # nothing was written: the first start ended while it loaded
    first = identity_in(folder)
    (folder / "checkpoint-2").mkdir()
    (folder / "checkpoint-2" / SEAL).write_text("{}")
    record(config, folder)
    assert identity_in(folder) == first


FOLDER, URL = Path("runs/one"), "http://there:8000"

SHARED: dict[str, Any] = {"epsilon": 0.1, "epsilon_high": 0.28, "temperature": 0.7, "top_p": 0.9, "top_k": 3}
SHARED |= {"prompts_per_step": 4, "num_generations": 4, "max_completion_length": 5, "num_iterations": 2}
SHARED |= {"learning_rate": 1e-3, "warmup_steps": 3, "weight_decay": 0.1, "adam_beta1": 0.8, "adam_beta2": 0.95}
SHARED |= {"max_grad_norm": 0.5, "gradient_accumulation_steps": 4, "gradient_checkpointing": True, "seed": 1}
SHARED |= {"max_steps": 7, "eval_every": 3, "save_every": 3, "keep_checkpoints": 3, "report_to": ("wandb",)}
"""Another value of each field that is translated; verl takes these too."""
TRANSLATED: dict[str, Any] = {**SHARED, "loss_type": "grpo", "surrogate": "cispo", "scale_rewards": "none"}
TRANSLATED |= {"mask_truncated_completions": True, "sampler": "vllm", "sampler_url": URL}
TRANSLATED |= {"lr_scheduler_type": "linear", "off_policy_mask_threshold": 0.5, "dtype": "float32", "cpu": True}
TRANSLATED |= {"vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_clip_max": 2.0}
TRANSLATED |= {"vllm_importance_sampling_clip_min": 0.5, "master_weights": "none", "output_dir": "elsewhere"}
TRANSLATED |= {"resume": True, "rollout_rs": "seq_max_k3", "rollout_rs_threshold": 1.2, "dppo_mask": "dppo_tv"}
TRANSLATED |= {"dppo_mask_low": 0.1, "dppo_mask_high": 0.1}
NEEDED: dict[str, Any] = {"loss_type": "dapo", "dtype": "bfloat16", "output_dir": "there", "epsilon": 1.0}
NEEDED |= {"vllm_importance_sampling_mode": "sequence_mask", "rollout_rs": "seq_mean_k1", "rollout_rs_threshold": 1.1}
NEEDED |= {"dppo_mask": "dppo_kl"}
"""What each of these replaces a value of: some need another field."""

AROUND = (
    *("model", "ref_model", "tokenizer", "lora_r", "lora_alpha", "lora_target_modules", "advantage_baseline"),
    *("log_completions", "log_completions_every", "log_answers", "stop_on", "backend", "gpus", "gpu_memory"),
)
"""Fields that the program, the launcher and --prepare use, besides those of the task."""
NEUTRAL = ("kl_early_stop", "reference_url", "reference_name")
"""Fields of which only the default can be honoured; see tests/training/test_backends.py."""


def arguments_of(**changes: Any) -> dict[str, Any]:
    config = TrainConfig.from_flat({"backend": "trl", **changes})
    return trl_arguments(config, Path(config.run.output_dir or FOLDER))


def names_of(cls: type) -> set[str]:
    return {field.name for field in dataclasses.fields(cls)}


def assert_each_field_once(*lists: Iterable[str]) -> None:
    assert sorted(name for names in lists for name in names) == sorted(TrainConfig().flat())


def test_every_field_is_in_one_of_the_lists():
    kl = names_of(KLConfig) - set(NEUTRAL)
    of_verl = {name for name, who in ONLY.items() if "trl" not in who}
    refused = {"exact_kl_completions"}
    classes = (names_of(TaskConfig), names_of(TeacherConfig))
    assert_each_field_once(TRANSLATED, kl, AROUND, NEUTRAL, of_verl, refused, *classes)


@pytest.mark.filterwarnings("ignore::klamp.errors.KLWarning")
@pytest.mark.parametrize("field", TRANSLATED)
def test_another_value_is_another_argument(field: str):
    assert arguments_of(**NEEDED | {field: TRANSLATED[field]}) != arguments_of(**NEEDED)


def test_the_fields_of_the_kl_keep_their_names_and_values():
    kl = KLConfig(beta=0.3, kl_clip_method="hard", kl_clip_threshold=0.05, kl_exclude_tokens=("1",), target_kl=0.1)
    arguments = arguments_of(**dataclasses.asdict(kl))
    names = {name for name, value in dataclasses.asdict(kl).items() if value is not None}
    assert {name: arguments[name] for name in names} == {name: getattr(kl, name) for name in names}


def test_without_a_kl_trl_is_told_of_none():
    arguments = arguments_of(beta=0.0)
    assert arguments["beta"] == 0.0
    assert not set(arguments) & (names_of(KLConfig) - {"beta"})
    assert "kl_estimator" in arguments_of(beta=0.0, kl_monitor=True)


CISPO: dict[str, Any] = {"surrogate": "cispo", "loss_type": "dapo", "epsilon": 1.0}


@pytest.mark.filterwarnings("ignore::klamp.errors.KLWarning")
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"loss_type": "dr_grpo", "scale_rewards": "none", "use_vllm": False}),
        ({"loss_type": "dapo"}, {"loss_type": "dapo", "scale_rewards": "group"}),
        ({"loss_type": "bnpo"}, {"loss_type": "dapo", "scale_rewards": "group"}),
        ({"loss_type": "grpo"}, {"loss_type": "grpo", "scale_rewards": "group"}),
        (CISPO | {"epsilon_high": 0.28}, {"loss_type": "cispo", "epsilon_high": 1.28}),  # TRL's is the largest ratio
        ({"max_steps": 5, "num_iterations": 3, "warmup_steps": 2}, {"max_steps": 15, "warmup_steps": 6}),
        ({"max_steps": 5, "warmup_steps": 9}, {"warmup_steps": 5}),
        ({"max_steps": 5, "num_iterations": 2, "eval_every": 0}, {"eval_steps": 10, "max_steps": 10}),
        ({"max_steps": 5, "num_iterations": 2, "save_every": 0}, {"save_steps": 10, "max_steps": 10}),
        ({"resume": True, "output_dir": "there"}, {"eval_on_start": False}),
        ({"sampler": "vllm"}, {"use_vllm": True, "vllm_mode": "colocate"}),
        ({"sampler_url": URL}, {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": URL}),
    ],
)
def test_losses_counts_and_samplers_have_trls_arguments(changes: dict[str, Any], expected: dict[str, Any]):
    arguments = arguments_of(**changes)
    assert {name: arguments[name] for name in expected} == expected


@pytest.mark.parametrize(("processes", "size"), [(1, 64), (2, 32), (4, 16)])
def test_processes_and_parts_share_the_completions(processes: int, size: int):
    config = TrainConfig.from_flat({"backend": "trl", "gradient_accumulation_steps": 4})
    arguments = trl_arguments(config, FOLDER, processes=processes)
    assert arguments["per_device_train_batch_size"] == size
    assert arguments["steps_per_generation"] == arguments["gradient_accumulation_steps"] == 4


@pytest.mark.filterwarnings("ignore::klamp.errors.KLWarning")
@pytest.mark.parametrize(
    ("changes", "launcher", "loaded", "mixed"),
    [
        ({}, "no", "float32", False),
        ({}, "bf16", "float32", True),
        ({"dtype": "bfloat16"}, "no", "float32", True),
        ({"dtype": "bfloat16", "master_weights": "none"}, "no", "bfloat16", False),
        ({"dtype": "bfloat16", "lora_r": 2}, "no", "bfloat16", False),
    ],
)
def test_float32_copies_are_float32_weights_computed_in_bfloat16(changes, launcher, loaded, mixed, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launcher)
    assert weights_dtype(TrainConfig.from_flat(changes).model) == loaded
    assert arguments_of(**changes)["bf16"] is mixed


def test_trl_knows_every_argument():
    from klamp.hosts.trl.grpo_config import GRPOConfig

    arguments = arguments_of(sampler_url=URL, target_kl=0.1, gradient_checkpointing=True)
    assert set(arguments) <= {field.name for field in dataclasses.fields(GRPOConfig)}
