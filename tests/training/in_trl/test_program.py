"""A run by TRL: its arguments, field by field; whose numbers it has, what it leaves, how it goes on, what ends it."""

import dataclasses
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.training.conftest import json_rows, stored, tiny_llama

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
from klamp.lab.sizing import part_size
from klamp.lab.tasks.base import TaskConfig

CLIPPED = {"kl_clip_method": "hard", "kl_clip_threshold": 0.1, "target_kl": 0.02, "kl_controller": "step"}


def rows_of(folder: Path) -> list[dict[str, float]]:
    """The metrics of a run's steps, as `klamp doctor` reads them, but for times."""
    return [
        {name: value for name, value in row.metrics.items() if not name.startswith("speed")}
        for row in read_record(folder).rows
    ]


def test_what_a_run_leaves(quick, tmp_path):
    launch(quick(log_completions_every=2, log_completions=5, log_answers=1, max_steps=4, save_every=2), [])
    folder = tmp_path / "run"
    rows = rows_of(folder)
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


@pytest.mark.parametrize("changes", [{}, CLIPPED, {"lora_r": 2}, {"num_iterations": 2}])
def test_a_run_that_goes_on_has_the_numbers_of_the_uninterrupted_one(changes, quick, tmp_path, monkeypatch):
    launch(quick(output_dir=str(tmp_path / "whole"), max_steps=4, save_every=2, **changes), [])

    class Broken(program.RunCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 3 * args.max_steps // 4:
                raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(program, "RunCallback", Broken)
        with pytest.raises(TrainingStopped, match="--resume") as stopped:
            launch(quick(max_steps=4, save_every=2, **changes), [])
    assert stopped.value.interrupted
    launch(quick(max_steps=4, save_every=2, resume=True, **changes), [])
    assert rows_of(tmp_path / "run") == rows_of(tmp_path / "whole")


def test_a_checkpoint_that_changed_is_refused_and_one_that_was_cut_short_passed_over(quick, tmp_path):
    launch(quick(max_steps=2, save_every=1), [])
    (tmp_path / "run" / "checkpoint-2" / "checksums.json").unlink()
    launch(quick(max_steps=2, save_every=1, resume=True), [])
    assert len(rows_of(tmp_path / "run")) == 2
    (tmp_path / "run" / "checkpoint-2" / "trainer_state.json").write_text("{}")
    with pytest.raises(RunFolderError, match="damaged"):
        launch(quick(max_steps=3, resume=True), [])


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
    config = quick(reward="tests.training.rewards:constant", stop_on=("saturated",), max_steps=40)
    with pytest.raises(TrainingStopped, match="saturated") as stopped:
        launch(config, [])
    assert not stopped.value.interrupted and newest_policy(tmp_path / "run") is not None
    assert "saturated" in (tmp_path / "run" / "alarms.jsonl").read_text()


def test_another_reference_is_taken(quick, tmp_path):
    launch(quick(ref_model=stored(tiny_llama(initializer_range=0.1), tmp_path / "other"), max_steps=1), [])
    assert rows_of(tmp_path / "run")[0]["kl/k3"] > 0.1


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


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kl_normalizer": "token_mean"}, "kl_normalizer"),
        ({"reference_dtype": "bfloat16", "lora_r": 2}, "reference_dtype"),
    ],
)
def test_what_klamps_door_to_trl_refuses_leaves_no_run_behind(changes, said, quick, tmp_path):
    with pytest.raises(ConfigError, match=said):
        launch(quick(**changes), [])
    assert not list((tmp_path / "run").iterdir())
    launch(quick(max_steps=1), [])


def test_a_resume_cannot_change_what_trl_counts_by(quick):
    launch(quick(max_steps=1), [])
    with pytest.raises(ConfigError, match="cannot change num_iterations"):
        launch(quick(max_steps=2, num_iterations=4, resume=True), [])


def test_ctrl_c_ends_the_run_after_the_step_and_it_goes_on(quick, tmp_path, monkeypatch):
    class Pressed(program.RunCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 1:
                signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patched:
        patched.setattr(program, "RunCallback", Pressed)
        with pytest.raises(TrainingStopped, match="--resume") as stopped:
            launch(quick(max_steps=4, save_every=1), [])
    assert stopped.value.interrupted and signal.getsignal(signal.SIGINT) is before
    assert newest_policy(tmp_path / "run").name == "checkpoint-1"


def test_a_run_keeps_its_id_once_it_has_a_checkpoint_and_a_start_that_was_cut_short_needs_none(quick, tmp_path):
    config, folder = quick(resume=True), tmp_path / "run"
    folder.mkdir()
    record(config, folder)  # nothing was written: the first start ended while it loaded
    first = identity_in(folder)
    (folder / "checkpoint-2").mkdir()
    (folder / "checkpoint-2" / SEAL).write_text("{}")
    record(config, folder)
    assert identity_in(folder) == first


FOLDER = Path("runs/one")

SHARED: dict[str, Any] = {"epsilon": 0.1, "epsilon_high": 0.28, "temperature": 0.7, "top_p": 0.9, "top_k": 3}
SHARED |= {"prompts_per_step": 4, "num_generations": 4, "max_completion_length": 5, "num_iterations": 2}
SHARED |= {"learning_rate": 1e-3, "warmup_steps": 3, "weight_decay": 0.1, "adam_beta1": 0.8, "adam_beta2": 0.95}
SHARED |= {"max_grad_norm": 0.5, "gradient_accumulation_steps": 4, "gradient_checkpointing": True, "seed": 1}
SHARED |= {"max_steps": 7, "eval_every": 3, "save_every": 3, "keep_checkpoints": 3, "report_to": ("wandb",)}
"""Another value of each field that is translated; verl takes these too."""
TRANSLATED: dict[str, Any] = {**SHARED, "loss_type": "grpo", "surrogate": "cispo", "scale_rewards": "std"}
TRANSLATED |= {"mask_truncated_completions": True, "sampler": "vllm", "sampler_url": "http://there:8000"}
TRANSLATED |= {"lr_scheduler_type": "linear", "off_policy_mask_threshold": 0.5, "dtype": "bfloat16", "cpu": True}
TRANSLATED |= {"vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_clip_max": 2.0}
TRANSLATED |= {"vllm_importance_sampling_clip_min": 0.5, "master_weights": "none", "output_dir": "elsewhere"}
TRANSLATED |= {"resume": True, "rollout_rs": "seq_max_k3", "rollout_rs_threshold": 0.1, "dppo_mask": "dppo_tv"}
TRANSLATED |= {"dppo_mask_low": 0.1, "dppo_mask_high": 0.1}
NEEDS: dict[str, dict[str, Any]] = {
    "surrogate": {"loss_type": "dapo", "epsilon": 1.0},
    "vllm_importance_sampling_clip_max": {"vllm_importance_sampling_mode": "token_mask"},
    "vllm_importance_sampling_clip_min": {"vllm_importance_sampling_mode": "token_mask"},
    "rollout_rs": {"rollout_rs_threshold": 0.2},
    "rollout_rs_threshold": {"rollout_rs": "seq_max_k3", "rollout_rs_threshold": 0.2},
    "dppo_mask_low": {"dppo_mask": "dppo_tv"},
    "dppo_mask_high": {"dppo_mask": "dppo_tv"},
    "master_weights": {"dtype": "bfloat16"},
    "resume": {"output_dir": "elsewhere"},
}
"""Field -> the fields that it needs."""

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


def test_every_field_is_in_one_of_the_lists():
    kl = names_of(KLConfig) - set(NEUTRAL)
    of_verl = {name for name, who in ONLY.items() if "trl" not in who}
    lists = [set(TRANSLATED), kl, set(AROUND), names_of(TaskConfig), set(NEUTRAL), of_verl, names_of(TeacherConfig)]
    every = set(TrainConfig().flat()) - {"exact_kl_completions"}  # refused there
    assert every == set().union(*lists)
    assert sum(map(len, lists)) == len(every), "no field is in two of them"


@pytest.mark.filterwarnings("ignore::klamp.errors.KLWarning")
@pytest.mark.parametrize("field", TRANSLATED)
def test_another_value_is_another_argument(field: str):
    needed = NEEDS.get(field, {})
    before = arguments_of(**{k: v for k, v in needed.items() if k != "epsilon"})
    assert arguments_of(**needed | {field: TRANSLATED[field]}) != before


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


@pytest.mark.parametrize(("ours", "theirs"), [("dapo", "dapo"), ("bnpo", "dapo"), ("grpo", "grpo")])
def test_loss_types_are_those_of_the_same_average(ours: str, theirs: str):
    arguments = arguments_of(loss_type=ours)
    assert (arguments["loss_type"], arguments["scale_rewards"]) == (theirs, "group")
    assert (arguments_of()["loss_type"], arguments_of()["scale_rewards"]) == ("dr_grpo", "none")


def test_the_ratio_bound_of_cispo_is_its_largest_value():
    arguments = arguments_of(surrogate="cispo", loss_type="dapo", epsilon=1.0, epsilon_high=0.28)
    assert (arguments["loss_type"], arguments["epsilon_high"]) == ("cispo", 1.28)


def test_updates_are_counted_where_klamp_counts_steps():
    arguments = arguments_of(max_steps=5, num_iterations=3, warmup_steps=2)
    assert (arguments["max_steps"], arguments["warmup_steps"]) == (15, 6)
    assert arguments_of(max_steps=5, warmup_steps=9)["warmup_steps"] == 5


@pytest.mark.parametrize(("processes", "size"), [(1, 64), (2, 32), (4, 16)])
def test_processes_and_parts_share_the_completions(processes: int, size: int):
    config = TrainConfig.from_flat({"backend": "trl", "gradient_accumulation_steps": 4})
    assert part_size(config, processes) == size
    arguments = trl_arguments(config, FOLDER, processes=processes)
    assert arguments["per_device_train_batch_size"] == size
    assert arguments["steps_per_generation"] == arguments["gradient_accumulation_steps"] == 4


def test_what_is_done_only_at_the_end_is_done_at_the_last_step():
    arguments = arguments_of(max_steps=5, num_iterations=2, eval_every=0, save_every=0)
    assert arguments["save_steps"] == arguments["eval_steps"] == arguments["max_steps"] == 10
    assert arguments_of(resume=True, output_dir="there")["eval_on_start"] is False


@pytest.mark.filterwarnings("ignore::klamp.errors.KLWarning")
@pytest.mark.parametrize(
    ("changes", "loaded", "mixed"),
    [
        ({}, "float32", False),
        ({"dtype": "bfloat16"}, "float32", True),
        ({"dtype": "bfloat16", "master_weights": "none"}, "bfloat16", False),
        ({"dtype": "bfloat16", "lora_r": 2}, "bfloat16", False),
    ],
)
def test_float32_copies_are_float32_weights_that_are_computed_in_bfloat16(changes, loaded, mixed, monkeypatch):
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    assert weights_dtype(TrainConfig.from_flat(changes).model) == loaded
    assert arguments_of(**changes)["bf16"] is mixed


def test_the_launcher_can_ask_for_bfloat16(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert arguments_of()["bf16"] is True


def test_completions_that_do_not_divide_are_refused():
    config = TrainConfig.from_flat({"backend": "trl", "prompts_per_step": 3})
    with pytest.raises(ConfigError, match="do not divide") as caught:
        part_size(config, 5)
    assert "multiple of 5" in str(caught.value)


def test_vllm_is_colocated_or_a_server():
    here, there = arguments_of(sampler="vllm"), arguments_of(sampler_url="http://there:8000")
    assert (here["use_vllm"], here["vllm_mode"]) == (True, "colocate")
    assert (there["use_vllm"], there["vllm_mode"]) == (True, "server")
    assert there["vllm_server_base_url"] == "http://there:8000"
    assert arguments_of()["use_vllm"] is False


def test_trl_knows_every_argument():
    from klamp.hosts.trl.grpo_config import GRPOConfig

    arguments = arguments_of(sampler_url="http://there:8000", target_kl=0.1, gradient_checkpointing=True)
    assert set(arguments) <= {field.name for field in dataclasses.fields(GRPOConfig)}
