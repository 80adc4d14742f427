"""A trainer that trains nothing: it tells its observers what a run tells them, with numbers that look like a run's."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import yaml

from klamp.doctor.alarm import Evidence
from klamp.doctor.alarms import ALARMS
from klamp.doctor.examine import AlarmFinding
from klamp.lab.checkpoint import identity
from klamp.lab.config import TrainConfig
from klamp.lab.observers import Observer, RunInfo, RunSummary
from klamp.names import IDENTITY

BEFORE = {"addition": 0.7617, "subtraction": 0.9023, "reversal": 1.0}
AFTER = {"addition": 0.9375, "subtraction": 0.8945, "reversal": 0.9961}


def metrics_at(step: int, config: TrainConfig) -> dict[str, float]:
    done = 1 - math.exp(-step / 40)
    found = {
        "reward": 0.752 + 0.18 * done,
        "beta": config.kl.beta,
        "beta/price": config.kl.beta,
        "policy/entropy": 0.31 - 0.1 * done,
        "policy/ratio_clipped": 0.0123,
        "length/mean": 4.8,
        "train/learning_rate": 3e-4 * (1 - step / max(1, config.run.max_steps)),
        "train/loss": 0.01,
        "speed/tokens_per_second": 12_345.0,
        "speed/step_seconds": 0.2,
    }
    if config.kl.beta > 0:
        found |= {"kl/k1": 0.0131 * done - 1e-3, "kl/k3": 0.0129 * done, "kl/exact": 0.0130 * done}
        found |= {"kl/k1_sequence": 0.063 * done, "kl/k3_sequence": 0.062 * done, "kl/exact_sequence": 0.0624 * done}
    if config.kl.kl_clip_method != "none":
        found["kl/over_budget"] = 0.25
    return found


def run_info(config: TrainConfig, folder: Path, *, start_step: int = 0) -> RunInfo:
    sizes = {"parameters": 862_592, "trainable_parameters": 862_592}
    return RunInfo(config=config, output_dir=folder, start_step=start_step, device="cpu", **sizes)


def summary_of(config: TrainConfig, folder: Path, *, steps: int) -> RunSummary:
    scores = {"rl_skill": "addition", "before": BEFORE, "after": AFTER}
    return RunSummary(output_dir=folder, steps=steps, seconds=72.4, final_metrics=metrics_at(steps, config), **scores)


def write_files(config: TrainConfig, folder: Path) -> None:
    """The files of a run's folder that the command line names."""
    (folder / "checkpoints" / "step-000100").mkdir(parents=True)
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in config.flat().items()}
    (folder / "config.yaml").write_text(yaml.safe_dump(plain), encoding="utf-8")
    (folder / "checkpoints" / "step-000100" / IDENTITY).write_text(json.dumps(identity(config)), encoding="utf-8")
    for name in ("metrics.jsonl", "completions.jsonl"):
        (folder / name).write_text(json.dumps({"step": 1}) + "\n", encoding="utf-8")


def fake_trainer(
    folder: Path, *, loading: int = 0, at_step: Callable[[int], None] = lambda step: None
) -> Callable[[TrainConfig, Sequence[Observer]], RunSummary]:
    """A stand-in for `train_run`."""

    def run(config: TrainConfig, observers: Sequence[Observer]) -> RunSummary:
        write_files(config, folder)
        steps = config.run.max_steps
        for watcher in observers:
            for done in range(1, loading + 1):
                watcher.on_loading("teaching the built-in base model", done, loading, 3.0 / done)
            watcher.on_start(run_info(config, folder))
            watcher.on_evaluation(0, BEFORE)
        for step in range(1, steps + 1):
            for watcher in observers:
                watcher.on_step(step, metrics_at(step, config))
                if step == 20:
                    watcher.on_warning("KL rises while the reward falls. Lower the learning rate.")
                if step == steps:
                    watcher.on_evaluation(step, AFTER)
            at_step(step)
        summary = summary_of(config, folder, steps=steps)
        for watcher in observers:
            watcher.on_end(summary)
        return summary

    return run


def rise(name: str, step: int) -> AlarmFinding:
    evidence = Evidence("from .1 to .9")
    return AlarmFinding(alarm=ALARMS[name], first_step=step, last_step=step, steps=1, evidence=evidence)
