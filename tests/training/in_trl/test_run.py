"""What a run by TRL leaves behind and tells; a stopped one goes on with the same numbers."""

from __future__ import annotations

import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors import SafetensorError
from tests.training import rewards
from tests.training.conftest import rows_of, steps_of
from tests.training.in_trl.conftest import QUICK
from tests.training.test_trainer import Recorder

from klamp.errors import RewardError, RunFolderError, TrainingStopped
from klamp.training.backends import train_run
from klamp.training.checkpoint import OF_TRL, checkpoints, newest
from klamp.training.config import TrainConfig
from klamp.training.folders import number_of
from klamp.training.observers import Observer

pytestmark = pytest.mark.slow

LONG = {"max_steps": 5, "eval_every": 2, "save_every": 2, "eval_size": 2}
SHORT = {"max_steps": 3, "eval_every": 2, "eval_size": 1}


class Stop(Observer):
    """Sends a signal after some step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, step, metrics):
        if step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture(scope="module")
def whole(llama, tmp_path_factory) -> tuple[TrainConfig, Recorder]:
    """A run of five steps, and what it told."""
    folder, recorder = tmp_path_factory.mktemp("runs") / "run", Recorder()
    changes = {**QUICK, **LONG, "log_completions_every": 4, "log_completions": 5}
    config = TrainConfig.from_flat({"model": llama, "output_dir": str(folder), **changes})
    train_run(config, [recorder])
    return config, recorder


def folder_of(config: TrainConfig) -> Path:
    return Path(str(config.run.output_dir))


def test_a_run_leaves_and_tells_what_a_local_one_does(whole):
    folder, recorder = folder_of(whole[0]), whole[1]
    names = {path.name for path in folder.iterdir()}
    assert names >= {"config.yaml", "metrics.jsonl", "completions.jsonl", "answers.jsonl", "versions.json"}
    assert "summary.json" in names
    assert recorder.calls == [
        ("start", 0),
        ("evaluation", 0),
        ("answers", 0),
        ("completions", 1, 5),
        ("step", 1),
        ("step", 2),
        ("evaluation", 2),
        ("answers", 2),
        ("checkpoint", 2),
        ("step", 3),
        ("completions", 4, 5),
        ("step", 4),
        ("evaluation", 4),
        ("answers", 4),
        ("checkpoint", 4),
        ("step", 5),
        ("evaluation", 5),
        ("answers", 5),
        ("checkpoint", 5),
        ("end", 5),
        ("close",),
    ]
    info = recorder.info
    assert info.parameters == info.trainable_parameters > 10_000
    assert (info.device, info.processes, info.reference) == ("cpu", 1, "loaded by TRL")
    assert [path.name for path in checkpoints(folder, begin=OF_TRL)] == ["checkpoint-4", "checkpoint-5"], "two are kept"
    assert json.loads((folder / "versions.json").read_text())["trl"][0] == "1"
    first, last = steps_of(folder)[0], steps_of(folder)[-1]
    assert abs(first["kl/k1"]) < 1e-6 and first["kl/k3"] < 1e-6 and first["kl/exact"] < 1e-6
    wanted = {"reward", "reward_std", "groups/saturated", "kl/k1", "kl/k3", "kl/k3_sequence", "kl/exact", "beta"}
    wanted |= {"beta/price", "policy/entropy", "policy/ratio_clipped", "policy/updates", "length/mean"}
    wanted |= {"length/truncated", "train/loss", "train/policy_loss", "train/kl_penalty", "train/grad_norm"}
    assert wanted | {"train/learning_rate", "kl/log_ratio_max"} <= last.keys()
    (row,) = [row for row in rows_of(folder, keep_speed=True) if row["step"] == 3]
    assert row["speed/step_seconds"] > 0 and row["speed/tokens_per_second"] > 0


CHOICES = {
    "two updates, copies of weights in 16 bits": {
        "num_iterations": 2,
        "gradient_accumulation_steps": 2,
        "dtype": "bfloat16",
    },
    "adapter, controller, measured budget": {
        "lora_r": 2,
        "target_kl": 0.02,
        "kl_controller": "step",
        "kl_clip_method": "hard",
        "kl_clip_threshold": 0.01,
    },
}


@pytest.mark.parametrize("choice", CHOICES)
def test_a_stopped_run_goes_on_with_the_same_numbers(choice, quick, tmp_path):
    changes = SHORT | CHOICES[choice]
    train_run(quick(**changes, output_dir=str(tmp_path / "whole")))
    with pytest.raises(TrainingStopped, match="after step 2 of 3") as stopped:
        train_run(quick(**changes), [Stop(2)])
    updates = changes.get("num_iterations", 1)
    assert f"checkpoint-{2 * updates}" in str(stopped.value)
    assert "--resume" in str(stopped.value)
    assert [row["step"] for row in steps_of(tmp_path / "run")] == [1, 2]
    recorder = Recorder()
    summary = train_run(quick(**changes, resume=True), [recorder])
    assert recorder.calls[0] == ("start", 2)
    assert rows_of(tmp_path / "run") == rows_of(tmp_path / "whole")
    whole = json.loads((tmp_path / "whole" / "summary.json").read_text())
    assert (summary.before, summary.after) == (whole["before"], whole["after"])


def test_a_run_that_is_done_is_only_summed_up(whole):
    folder = folder_of(whole[0])
    rows = rows_of(folder, keep_speed=True)
    summary = train_run(replace(whole[0], run=replace(whole[0].run, resume=True)))
    assert rows_of(folder, keep_speed=True) == rows
    assert summary.steps == 5
    assert summary.after == {name[5:]: x for name, x in rows[-1].items() if name.startswith("eval/")}
    assert summary.final_metrics == {name: x for name, x in rows[-2].items() if name != "step"}


def test_an_alarm_of_stop_on_ends_it(quick, tmp_path):
    with pytest.raises(TrainingStopped, match="alarm kl-high"):
        train_run(quick(max_steps=40, stop_on=("kl-high",)))
    assert "kl-high" in (tmp_path / "run" / "alarms.jsonl").read_text()
    done = steps_of(tmp_path / "run")[-1]["step"]
    assert number_of(newest(tmp_path / "run", begin=OF_TRL)) == done < 40


def test_a_reward_that_fails_names_the_newest_checkpoint(quick):
    rewards.STATE.update(calls=0, break_at=6 + 2 * 12 + 7)  # six held-out answers, and twelve completions a step
    with pytest.raises(RewardError) as failed:
        train_run(quick(max_steps=5, save_every=1, eval_size=1, reward="tests.training.rewards:breaks"))
    assert any("the state after step" in note for note in failed.value.__notes__)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "trainer_state.json"])
def test_a_byte_that_changed_since_is_noticed_and_the_newest_whole_one_is_named(whole, tmp_path, name):
    folder = Path(shutil.copytree(folder_of(whole[0]), tmp_path / "copy"))
    file = folder / "checkpoints" / "checkpoint-5" / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    config = replace(whole[0], run=replace(whole[0].run, resume=True, output_dir=str(folder), max_steps=6))
    with pytest.raises(RunFolderError, match="the checkpoint is damaged") as caught:
        train_run(config)
    assert name in caught.value.why
    assert f"{folder}/checkpoints/checkpoint-4 is whole" in caught.value.fix
    shutil.rmtree(file.parent)
    assert train_run(config).steps == 6


SAVE_WEIGHTS = "transformers.modeling_utils.safe_save_file"


@pytest.mark.parametrize("writes", ["torch.save", "klamp.training.in_trl.trainer.seal", SAVE_WEIGHTS])
def test_a_full_disk_ends_it_and_names_what_is_whole(quick, tmp_path, monkeypatch, writes):
    class Fills(Observer):
        def on_step(self, step, metrics):
            if step == 3:
                error = SafetensorError if writes == SAVE_WEIGHTS else OSError
                monkeypatch.setattr(writes, lambda *_, **__: (_ for _ in ()).throw(error("No space left on device")))

    with pytest.raises(RunFolderError, match=r"(?s)cannot be written any more.*No space left") as caught:
        train_run(quick(max_steps=4, save_every=1, eval_size=1), [Fills()])
    whole = tmp_path / "run" / "checkpoints" / "checkpoint-2"
    assert caught.value.__notes__ == [f"  the state after step 2 is saved in {whole}"]
    assert sorted(each.name for each in whole.parent.glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-2"]


def test_without_a_checkpoint_it_begins_anew(quick, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").touch()
    (tmp_path / "run" / "metrics.jsonl").write_text(
        '{"step": 0, "eval/addition": 9.0}\n{"step": 1, "reward": 9.0}\n{"st'
    )
    (tmp_path / "run" / "checkpoints" / "checkpoint-1").mkdir(parents=True)  # killed while it was written
    train_run(quick(max_steps=2, save_every=1, eval_size=1, resume=True))
    assert [row["step"] for row in rows_of(tmp_path / "run")] == [0, 1, 2, 2]
    assert "9.0" not in (tmp_path / "run" / "metrics.jsonl").read_text().split("reward")[0]
