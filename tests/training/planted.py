"""Real runs with something planted in them, trained, written, and read again as `klamp doctor` reads them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.training.conftest import TINY

from klamp.doctor.examine import AlarmFinding, Diagnosis, examine
from klamp.doctor.readers import read_record
from klamp.lab.config import TrainConfig
from klamp.lab.loop import Trainer
from klamp.lab.observers import Observer, RunLog
from klamp.lab.setup import build

ARITHMETIC: dict[str, Any] = {
    "model": "builtin",
    "reward": "",
    "train_size": 0,
    "max_completion_length": 16,
    "learning_rate": 1e-4,
    "num_generations": 8,
    "prompts_per_step": 3,
    "warmup_steps": 5,
}
"""The built-in task and model: it mostly knows the answers, and ends."""


class Told(Observer):
    def __init__(self, after_step: Callable[[int], None] = lambda step: None) -> None:
        self.names: list[str] = []
        self.after_step = after_step

    def on_alarm(self, finding: AlarmFinding) -> None:
        self.names.append(finding.alarm.name)

    def on_step(self, step, metrics) -> None:
        self.after_step(step)


def trained(folder: Path, *, plant: Callable[[Trainer, Told], None] | None = None, **changes: Any) -> Diagnosis:
    """A run, examined from what it wrote."""
    every = {"output_dir": str(folder), "eval_every": 0, "save_every": 0, "eval_size": 2, "log_completions_every": 1}
    config = TrainConfig.from_flat({**TINY, **every, **changes})
    told = Told()
    folder.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(build(config), [RunLog(), told], folder)
    if plant is not None:
        plant(trainer, told)
    trainer.tell(lambda observer: observer.on_start(trainer.info()))
    trainer.run()
    diagnosis = examine(read_record(folder))
    found = {finding.alarm.name: finding for finding in diagnosis.findings}
    assert sorted(told.names) == sorted(found), "told while it ran: each once, and the same as afterwards"
    unmeasured = {
        name: gap for name, gap in diagnosis.unchecked.items() if "kl/" not in gap and "steps with" not in gap
    }
    assert unmeasured.keys() <= {"dr-grpo-with-kl", "end-token-lost"}, (
        "its verifier, and a mask if all is trained, may be left out"
    )
    written = [json.loads(line) for line in (folder / "alarms.jsonl").read_text().splitlines()] if told.names else []
    assert [(row["name"], row["step"]) for row in written] == [(name, found[name].first_step) for name in told.names]
    return diagnosis


def alarms(diagnosis: Diagnosis) -> set[str]:
    return {finding.alarm.name for finding in diagnosis.findings if finding.alarm.level == "alarm"}
