"""The hooks of a run: each can be left out, and a run calls them in the order in which things happen."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.training.conftest import far_away, info_of, json_rows

from klamp.doctor.alarms import ALARMS
from klamp.doctor.readers import read_record
from klamp.errors import TrainingStopped
from klamp.lab.backends import train_run
from klamp.lab.config import TrainConfig
from klamp.lab.observers import AlarmObserver


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """In such a run reference-differs rises after the first step, and kl-high after the fifth."""
    return far_away(tmp_path_factory.mktemp("elsewhere"))


def test_a_run_stops_at_an_alarm_with_a_checkpoint(config_of: Any, tmp_path: Path, elsewhere: dict[str, Any]) -> None:
    config = config_of(stop_on=("retention", "kl-high"), max_steps=10, save_every=0, **elsewhere)
    with pytest.raises(TrainingStopped) as caught:
        train_run(config)
    error = caught.value
    step = read_record(tmp_path / "run").rows[-1].step
    assert step == 5
    assert error.what == f"training was stopped after step {step} of 10 by the alarm kl-high: {ALARMS['kl-high'].text}"
    assert "the KL is" in str(error.got) and ALARMS["kl-high"].next_step in error.why and error.fix
    assert [folder.name for folder in (tmp_path / "run" / "checkpoints").iterdir()] == [f"step-{step:06d}"]
    train_run(replace(config, run=replace(config.run, stop_on=(), resume=True)))
    assert read_record(tmp_path / "run").rows[-1].step == 10
    alarms = [row["name"] for row in json_rows(tmp_path / "run" / "alarms.jsonl")]
    assert alarms[:2] == ["reference-differs", "kl-high"]
    assert len(alarms) == len(set(alarms)), "an alarm is written once"


def test_what_was_seen_before_a_checkpoint_counts_after_it(tmp_path: Path) -> None:
    """The run stops where it would have stopped, and at the same alarm, wherever it was killed."""
    rows = [{"step": step, "kl/k3": 0.01 if step < 9 else 2.0, "reward": 0.5} for step in range(1, 12)]
    lines = [{"step": 0, "eval/a": 0.1, "eval/b": 0.9}, *rows]
    for done in range(9):
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
