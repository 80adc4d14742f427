"""A run's folder and trackers, read back as a user reads them."""

import json
import math
import re
import shutil
from types import SimpleNamespace

import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tests.training.conftest import TINY, full_disk, info_of, json_rows, rows_of

from klamp._version import __version__
from klamp.doctor.metrics import METRICS
from klamp.errors import RunFolderError
from klamp.lab.backends import train_run
from klamp.lab.config import TrainConfig
from klamp.lab.observers import RunLog, RunSummary, versions

SKILLS = ("addition", "subtraction", "reversal")


@pytest.fixture(scope="module")
def run(llama, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    changes = {"report_to": ("tensorboard", "wandb"), "kl_clip_method": "hard", "kl_clip_threshold": 0.01}
    changes |= {"num_iterations": 2, "log_completions": 5, "log_completions_every": 3, "kl_off_policy": "token"}
    changes |= {"kl_max_weight": 2.0, "kl_max_log_ratio": 5.0}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("WANDB_SILENT", "true")
        config = TrainConfig.from_flat({"model": llama, "output_dir": str(folder), **TINY, **changes})
        return SimpleNamespace(folder=folder, config=config, summary=train_run(config))


def test_the_folder_holds_what_a_run_is(run):
    names = {p.name for p in run.folder.iterdir()}
    files = {"config.yaml", "versions.json", "metrics.jsonl", "completions.jsonl", "answers.jsonl", "summary.json"}
    assert names == files | {"checkpoints", "tracking", "wandb"}
    values = yaml.safe_load((run.folder / "config.yaml").read_text())
    assert TrainConfig.from_flat(values) == run.config, "it runs again"
    assert values["report_to"] == ["tensorboard", "wandb"], "a list, as YAML has no tuples"
    written = json.loads((run.folder / "versions.json").read_text())
    assert written == versions() and written["klamp"] == __version__
    assert written["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert {"python", "transformers", "peft", "torch_threads"} <= written.keys()


def test_metrics_have_a_line_per_step_and_per_evaluation(run):
    rows = rows_of(run.folder, keep_speed=True)
    kinds = [("step" if "reward" in row else "eval", row["step"]) for row in rows]
    assert kinds == [("eval", 0), ("step", 1), ("step", 2), ("eval", 2), ("step", 3), ("step", 4), ("eval", 4)]
    for row in rows:
        assert all(math.isfinite(x) for x in row.values())
        if "reward" not in row:
            assert row.keys() == {"step", *(f"eval/{skill}" for skill in SKILLS)}


def test_every_metric_is_in_the_table(run):
    names = {name for row in rows_of(run.folder, keep_speed=True) for name in row if not name.startswith("eval/")}
    assert names - METRICS.keys() == {"step"}
    promised = {"kl/k1", "kl/k3", "kl/exact", "kl/over_budget", "beta", "length/mean", "policy/entropy"}
    promised |= {"policy/ratio_clipped", "train/learning_rate", "speed/tokens_per_second", "kl/weights_truncated"}
    assert promised <= names


def test_completions_carry_tokens_and_their_log_probabilities(run):
    rows = json_rows(run.folder / "completions.jsonl")
    assert [row["step"] for row in rows] == [1] * 5 + [3] * 5, "the first step, and every third"
    for row in rows:
        count = len(row["tokens"])
        assert all(len(row[f"{who}_logprobs"]) == count for who in ("policy", "sampler", "ref"))
        assert row["completion"] == "".join(t for t in row["tokens"] if not t.startswith("<"))
        assert row["reward"] == pytest.approx(sum(c.isdigit() for c in row["completion"]) / 6)
        assert row["policy_logprobs"] == pytest.approx(row["sampler_logprobs"], abs=1e-5)
        if row["step"] == 1:
            assert row["ref_logprobs"] == pytest.approx(row["policy_logprobs"], abs=1e-5)
    assert len({row["prompt"] for row in rows[:4]}) == 1 and rows[4]["prompt"] != rows[0]["prompt"]


def test_tensorboard_has_every_number_under_its_name(run):
    (file,) = (run.folder / "tracking").glob("events.out.tfevents.*")
    events = EventAccumulator(str(file))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    assert {"train/kl_penalty", "train/loss", "eval/addition", "kl/k3", "beta", "reward"} <= tags
    for row in rows_of(run.folder, keep_speed=True):
        for name, value in row.items():
            if name == "step":
                continue
            at_step = [e.value for e in events.Scalars(name) if e.step == row["step"]]
            assert at_step == [pytest.approx(value, rel=1e-5, abs=1e-7)], f"{name} at step {row['step']}"


def test_wandb_writes_its_offline_run_into_the_folder(run):
    (offline,) = (run.folder / "wandb").glob("offline-run-*")
    (log,) = offline.glob("run-*.wandb")
    content = log.read_bytes()
    for name in (b"train/kl_penalty", b"train/loss", b"kl/k3"):
        assert name in content


def test_a_resumed_run_drops_the_lines_of_steps_it_will_do_again(tmp_path):
    log = RunLog()
    (tmp_path / "config.yaml").write_text("seed: 3\n")
    lines = [{"step": 1, "reward": 0.1}, {"step": 2, "reward": 0.2}, {"step": 2, "eval/a": 1.0}, {"step": 3}]
    half = '{"step": 3, "rew'
    (tmp_path / "metrics.jsonl").write_text("\n".join([*map(json.dumps, lines), half]))
    (tmp_path / "completions.jsonl").write_text(json.dumps({"step": 3}) + "\n")
    log.on_start(info_of(tmp_path, 2, TrainConfig.from_flat({"seed": 3})))
    assert rows_of(tmp_path) == lines[:3]
    assert (tmp_path / "completions.jsonl").read_text() == ""
    assert (tmp_path / "config.yaml").read_text() == "seed: 3\n", "the configuration of the run's beginning stays"
    log.on_step(3, {"reward": 0.3})
    assert rows_of(tmp_path)[-1] == {"step": 3, "reward": 0.3}


@pytest.mark.parametrize("left", [["step-000002"], []])
def test_tensorboard_shows_no_point_twice(config_of, tmp_path, left):
    """TensorBoard reads files in the order of the seconds in their names."""
    fields = {"report_to": ("tensorboard",), "max_steps": 4, "save_every": 2}
    train_run(config_of(**fields))
    (tmp_path / "run" / "summary.json").unlink()
    for saved in (tmp_path / "run" / "checkpoints").iterdir():  # as if it had been killed before they were written
        if saved.name not in left:
            shutil.rmtree(saved)
    (first,) = (tmp_path / "run" / "tracking").glob("events.out.tfevents.*")
    first.rename(first.with_name(re.sub(r"\d{10}", "1000000000", first.name, count=1)))
    train_run(config_of(**fields, resume=True))
    events = EventAccumulator(str(tmp_path / "run" / "tracking"), size_guidance={"scalars": 0})
    events.Reload()
    assert [event.step for event in events.Scalars("reward")] == [1, 2, 3, 4]
    assert [event.step for event in events.Scalars("eval/addition")] == [0, 2, 4]


def test_cautions_are_written_with_the_steps_done_and_go_with_what_a_resumed_run_repeats(tmp_path):
    log = RunLog()
    log.on_start(info_of(tmp_path, 0))
    log.on_warning("no template")
    log.on_step(1, {"reward": 0.0})
    log.on_step(2, {"reward": 0.0})
    log.on_warning("late")
    assert json_rows(tmp_path / "cautions.jsonl") == [{"step": 0, "text": "no template"}, {"step": 2, "text": "late"}]
    log.on_start(info_of(tmp_path, 1))
    log.on_warning("no template")
    assert json_rows(tmp_path / "cautions.jsonl") == [{"step": 0, "text": "no template"}], "nothing is said twice"
    log.on_warning("late")
    assert len(json_rows(tmp_path / "cautions.jsonl")) == 2


def test_a_disk_that_is_full_at_the_beginning_or_the_end_is_said(tmp_path, monkeypatch):
    log = RunLog()
    log.on_start(info_of(tmp_path, 0))
    monkeypatch.setattr("klamp.lab.observers.write_whole", full_disk)
    for done in (0, 2):
        with pytest.raises(RunFolderError, match="(?s)cannot be written.*No space left"):
            RunLog().on_start(info_of(tmp_path, done))
    summary = RunSummary(output_dir=tmp_path, steps=1, seconds=1.0, rl_skill="a", before={}, after={})
    with pytest.raises(RunFolderError, match="(?s)cannot be written.*No space left"):
        log.on_end(summary)
