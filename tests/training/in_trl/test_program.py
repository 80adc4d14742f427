"""A run by TRL: whose numbers it has, what it leaves, how it goes on, what ends it early."""

import signal
from pathlib import Path

import pytest
import torch
from tests.training.conftest import json_rows, stored, tiny_llama

from klamp.core.advantages import group_advantages
from klamp.doctor.readers import read_record
from klamp.errors import ConfigError, ModelError, RunFolderError, TrainingStopped
from klamp.lab.backends import launch, record
from klamp.lab.checkpoint import identity_in
from klamp.lab.engines import trl_program as program
from klamp.lab.folders import SEAL, newest_policy
from klamp.lab.models import load_model
from klamp.lab.sampling import examples_of_run

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
