"""What a run writes and when, what watches it, and which signal ends it."""

import json
import math
import os
import re
import shutil
import signal
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tests.training.conftest import TINY, disturb, full_disk, info_of, json_rows, refused, rows_of, stored, tiny_llama

from klamp._version import __version__
from klamp.doctor.alarms import ALARMS
from klamp.doctor.metrics import METRICS
from klamp.doctor.readers import read_record
from klamp.errors import ConfigError, RunFolderError, TrainingStopped
from klamp.lab import observers
from klamp.lab.backends import train_run
from klamp.lab.config import TrainConfig
from klamp.lab.interrupts import deferred_interrupts
from klamp.lab.loop import Trainer
from klamp.lab.observers import AlarmObserver, RunLog, RunSummary, versions

SKILLS = ("addition", "subtraction", "reversal")


@pytest.fixture(scope="module")
def run(llama, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    changes = {"report_to": ("tensorboard",), "kl_clip_method": "hard", "kl_clip_threshold": 0.01}
    changes |= {"num_iterations": 2, "log_completions": 5, "log_completions_every": 3, "kl_off_policy": "token"}
    changes |= {"kl_max_weight": 2.0, "kl_max_log_ratio": 5.0}
    config = TrainConfig.from_flat({"model": llama, "output_dir": str(folder), **TINY, **changes})
    train_run(config)
    return SimpleNamespace(folder=folder, config=config)


@pytest.mark.parametrize(("named", "project"), [({}, "klamp"), ({"WANDB_PROJECT": "mine"}, "mine")])
def test_wandb_gets_the_numbers_of_each_step_in_the_users_project(named, project, tmp_path, monkeypatch):
    wandb, given, calls = pytest.importorskip("wandb"), {}, []
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    for name, value in named.items():
        monkeypatch.setenv(name, value)
    made = SimpleNamespace(log=lambda *row, step: calls.append((*row, step)), finish=lambda: calls.append("finished"))
    monkeypatch.setattr(wandb, "init", lambda **options: given.update(options) or made)
    with ExitStack() as ending:
        observers.wandb(tmp_path, TrainConfig(), 0, ending)({"kl/k3": 0.1}, 2)
    assert (given["project"], given["dir"], given["config"]["task"]) == (project, str(tmp_path), "arithmetic")
    assert calls == [({"kl/k3": 0.1}, 2), "finished"]


@pytest.mark.slow
def test_wandb_writes_its_offline_run_into_the_folder(config_of, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    train_run(config_of(report_to=("wandb",), max_steps=1))
    (offline,) = (tmp_path / "run" / "wandb").glob("offline-run-*")
    (log,) = offline.glob("run-*.wandb")
    for name in (b"train/kl_penalty", b"train/loss", b"kl/k3"):
        assert name in log.read_bytes()


def test_the_folder_holds_what_a_run_is(run):
    names = {p.name for p in run.folder.iterdir()}
    files = {"config.yaml", "versions.json", "metrics.jsonl", "completions.jsonl", "answers.jsonl", "summary.json"}
    assert names == files | {"checkpoints", "tracking"}
    values = yaml.safe_load((run.folder / "config.yaml").read_text())
    assert TrainConfig.from_flat(values) == run.config, "it runs again"
    assert values["report_to"] == ["tensorboard"], "a list, as YAML has no tuples"
    written = json.loads((run.folder / "versions.json").read_text())
    assert written == versions() and written["klamp"] == __version__
    assert written["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert {"python", "transformers", "peft", "torch_threads"} <= written.keys()


def test_metrics_have_a_line_per_step_and_per_evaluation_and_are_in_the_table(run):
    rows = rows_of(run.folder, keep_speed=True)
    kinds = [("step" if "reward" in row else "eval", row["step"]) for row in rows]
    assert kinds == [("eval", 0), ("step", 1), ("step", 2), ("eval", 2), ("step", 3), ("step", 4), ("eval", 4)]
    promised = {"kl/k1", "kl/k3", "kl/exact", "kl/over_budget", "beta", "length/mean", "policy/entropy"}
    promised |= {"policy/ratio_clipped", "train/learning_rate", "speed/tokens_per_second", "kl/weights_truncated"}
    for row in rows:
        assert all(math.isfinite(x) for x in row.values())
        if "reward" in row:
            assert promised | {"step"} <= row.keys() <= METRICS.keys() | {"step"}
        else:
            assert row.keys() == {"step", *(f"eval/{skill}" for skill in SKILLS)}


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
    events = EventAccumulator(str(file)).Reload()
    for row in rows_of(run.folder, keep_speed=True):
        for name in row.keys() - {"step"}:
            at_step = [e.value for e in events.Scalars(name) if e.step == row["step"]]
            assert at_step == [pytest.approx(row[name], rel=1e-5, abs=1e-7)], f"{name} at step {row['step']}"


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
    fields = {"report_to": ("tensorboard",), "max_steps": 4, "save_every": 2, "eval_size": 1}
    train_run(config_of(**fields))
    (tmp_path / "run" / "summary.json").unlink()
    for saved in (tmp_path / "run" / "checkpoints").iterdir():  # as if it had been killed before they were written
        if saved.name not in left:
            shutil.rmtree(saved)
    (first,) = (tmp_path / "run" / "tracking").glob("events.out.tfevents.*")
    first.rename(first.with_name(re.sub(r"\d{10}", "1000000000", first.name, count=1)))
    train_run(config_of(**fields, resume=True))
    events = EventAccumulator(str(tmp_path / "run" / "tracking"), size_guidance={"scalars": 0}).Reload()
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


def test_a_run_stops_at_an_alarm_with_a_checkpoint(config_of: Any, tmp_path: Path) -> None:
    """The reference is 0.6 nats per token away: reference-differs rises after step 1, and kl-high after step 5."""
    other = tiny_llama()
    disturb(other)
    away = {"ref_model": stored(other, tmp_path / "elsewhere"), "learning_rate": 1e-6}
    config = config_of(stop_on=("retention", "kl-high"), max_steps=7, save_every=0, eval_every=0, eval_size=1, **away)
    with pytest.raises(TrainingStopped) as caught:
        train_run(config)
    error, alarm = caught.value, ALARMS["kl-high"]
    assert read_record(tmp_path / "run").rows[-1].step == 5
    assert error.what == f"training was stopped after step 5 of 7 by the alarm kl-high: {alarm.text}"
    assert "the KL is" in str(error.got) and alarm.next_step in error.why and error.fix
    assert [folder.name for folder in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000005"]
    train_run(replace(config, run=replace(config.run, stop_on=(), resume=True)))
    assert read_record(tmp_path / "run").rows[-1].step == 7
    alarms = [row["name"] for row in json_rows(tmp_path / "run" / "alarms.jsonl")]
    assert alarms[:2] == ["reference-differs", "kl-high"]
    assert len(alarms) == len(set(alarms)), "an alarm is written once"


def test_what_was_seen_before_a_checkpoint_counts_after_it(tmp_path: Path) -> None:
    rows = [{"step": step, "kl/k3": 0.01 if step < 9 else 2.0, "reward": 0.5} for step in range(1, 12)]
    lines = [{"step": 0, "eval/a": 0.1, "eval/b": 0.9}, *rows]
    for done in (0, 1, 5, 8):
        written = [line for line in lines if line["step"] <= done]
        (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in written))
        row = {"step": done, "tokens": ["4"], "policy_logprobs": [-1.0], "ref_logprobs": [-1.0]}
        (tmp_path / "completions.jsonl").write_text(json.dumps(row) + "\n")
        (tmp_path / "config.yaml").write_text("{}")
        observer = AlarmObserver(lambda hook: None, rl_skill="a")
        observer.on_start(info_of(tmp_path, done, TrainConfig.from_flat({"stop_on": ("kl-spike",)})))
        assert sum(map(len, observer.watch.history.completions.values())) == bool(done)
        assert len(observer.watch.history.evaluations) == bool(done)
        for row in rows[done:]:
            observer.on_step(int(row["step"]), {name: x for name, x in row.items() if name != "step"})
            if observer.watch.stopped_by is not None:
                break
        assert observer.watch.stopped_by is not None and observer.watch.stopped_by.first_step == 9


@pytest.mark.parametrize(("every", "steps"), [(0, [4]), (1, [1, 2, 3, 4]), (3, [3, 4]), (9, [4])])
def test_what_is_due_is_due_at_the_end_too(context, every, steps):
    run, due = Trainer(context, []), []
    for run.step in range(1, 5):
        if run.is_due(every):
            due.append(run.step)
    assert due == steps


def test_the_first_signal_waits_and_the_second_does_not():
    before = signal.getsignal(signal.SIGTERM)
    with deferred_interrupts() as interrupt:
        assert not interrupt.asked
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupt.asked
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_hangup_ends_a_run_as_sigterm_does_unless_it_is_ignored():
    for handler, asked in ((signal.SIG_DFL, True), (signal.SIG_IGN, False)):
        before = signal.signal(signal.SIGHUP, handler)
        try:
            with deferred_interrupts() as interrupt:
                if asked:
                    assert signal.getsignal(signal.SIGHUP) is interrupt
                os.kill(os.getpid(), signal.SIGHUP if asked else signal.SIGCONT)
                assert interrupt.asked is asked
            assert signal.getsignal(signal.SIGHUP) is handler
        finally:
            signal.signal(signal.SIGHUP, before)


def test_several_processes_are_refused(config_of, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    config = config_of()
    with refused(ConfigError, "(?s)one process.*--backend trl.*--backend verl"):
        train_run(config)
    assert not Path(config.run.output_dir).exists()
