"""What each rule of beta does with a `target_kl`: whole runs of the built-in task, judged against bounds."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.measure import isolated
from benchmarks.plots import Panel, draw
from benchmarks.records import Benchmark, table

RULES: dict[str, dict[str, Any]] = {
    "klamp: hold": {},
    "step": {"kl_controller": "step"},
    "PPO's step": {"kl_controller": "step", "kl_controller_factors": (2.0, 0.5, 1.5, 1 / 1.5)},
    "proportional": {"kl_controller": "proportional"},
}
"""Name -> fields of `KLConfig`; the first is the default."""
TARGETS = (0.02, 0.05, 0.15)
SEEDS = 10
RATE = 1e-4
"""The default learning rate."""
SETTLING = 20
"""Steps after the KL first reached its target from which it is judged, and over which it is averaged."""
BAND = 0.3
EVERY = 5
"""Steps that are averaged for the picture."""


def run(quick: bool, *, targets: Sequence[float] = TARGETS, seeds: int = SEEDS) -> dict[str, Any]:
    """The default rule at every target and seed, in TRL too, and at three times the rate; the others with one seed."""
    own, *published = RULES
    middle = targets[len(targets) // 2]
    targets, seeds, steps = ((middle,), 1, 20) if quick else (targets, seeds, 120)
    cases = [{"rule": own, "target": target, "seed": seed} for target in targets for seed in range(seeds)]
    cases += [{"rule": own, "target": middle, "seed": 0, "rate": 3 * RATE}]
    cases += [{"rule": rule, "target": middle, "seed": 0} for rule in published]
    in_trl = [{"target": target, "seed": seed} for target in targets for seed in range(seeds)]
    return {
        "steps": steps,
        "runs": [isolated("benchmarks.controllers:one", case | {"steps": steps}) for case in cases]
        + [isolated("benchmarks.controllers:in_trl", case | {"steps": steps}) for case in in_trl],
    }


def one(rule: str, target: float, seed: int, steps: int, rate: float = RATE) -> dict[str, Any]:
    """Train once and judge the run: `klamp train --target_kl ...`, with the evaluation at its end."""
    from klamp.training.backends import train_run
    from klamp.training.config import TrainConfig

    with tempfile.TemporaryDirectory() as folder:
        values = {"output_dir": folder + "/run", "target_kl": target, "seed": seed, "max_steps": steps}
        sparse = {"learning_rate": rate, "eval_every": 0, "save_every": 0, "report_to": (), "log_completions": 0}
        train_run(TrainConfig.from_flat(values | sparse | RULES[rule]))
        text = Path(folder, "run", "metrics.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    course = [row for row in rows if "reward" in row]
    kl, beta, reward = ([row[name] for row in course] for name in ("kl/exact", "beta", "reward"))
    found = {"rule": rule, "target": target, "seed": seed, "rate": rate, "steps": steps, **judged(kl, beta, target)}
    found |= {"reward": fmean(reward[-SETTLING:]), "addition": rows[-1]["eval/addition"]}
    return found | {name: _sparse(values) for name, values in {"kl": kl, "beta": beta}.items()}


def in_trl(target: float, seed: int, steps: int) -> dict[str, Any]:
    """Train once with `klamp.trl.GRPOTrainer` and judge the run: the same task, sizes and learning rate."""
    from datasets import Dataset
    from torch import no_grad, tensor

    from klamp.tasks import TaskConfig, load_task
    from klamp.training.models import load_model, load_tokenizer
    from klamp.trl import GRPOConfig, GRPOTrainer

    model, tokenizer = load_model("builtin"), load_tokenizer("builtin")
    task = load_task(TaskConfig(), tokenizer)

    def right(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        return [float(text == expected) for text, expected in zip(completions, answer, strict=True)]

    with tempfile.TemporaryDirectory() as folder:
        sizes = {"per_device_train_batch_size": 256, "num_generations": 8, "max_completion_length": 16}
        rates = {"learning_rate": RATE, "lr_scheduler_type": "cosine", "warmup_steps": 10, "adam_beta2": 0.99}
        quiet = {"report_to": "none", "save_strategy": "no", "logging_steps": 1, "use_cpu": True, "bf16": False}
        loss = {"loss_type": "dr_grpo", "scale_rewards": "none", "beta": 0.01, "target_kl": target}
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=right,
            args=GRPOConfig(output_dir=folder, max_steps=steps, seed=seed, **sizes, **rates, **quiet, **loss),
            train_dataset=Dataset.from_list([{"prompt": e.prompt, "answer": e.answer} for e in task.train]),
            processing_class=tokenizer,
        )
        trainer.train()
    course = [row for row in trainer.state.log_history if "kl/exact" in row]
    kl, beta, reward = ([row[name] for row in course] for name in ("kl/exact", "beta", "reward"))
    held_out = task.evaluation["addition"]
    policy: Any = model.eval()
    with no_grad():
        ids = tensor([tokenizer(e.prompt)["input_ids"] for e in held_out])  # sums of two digits: all equally long
        found = policy.generate(ids, max_new_tokens=6, do_sample=False)[:, ids.shape[1] :]
    texts = tokenizer.batch_decode(found, skip_special_tokens=True)
    addition = fmean(right(texts, [e.answer for e in held_out]))
    run = {"rule": "klamp: hold, in TRL", "target": target, "seed": seed, "rate": RATE, "steps": steps}
    run |= judged(kl, beta, target) | {"reward": fmean(reward[-SETTLING:]), "addition": addition}
    return run | {name: _sparse(values) for name, values in {"kl": kl, "beta": beta}.items()}


def judged(kl: Sequence[float], beta: Sequence[float], target: float) -> dict[str, Any]:
    """How well a KL was held: see the columns of the table.

    `in_band` is the share of the steps, from 20 after the KL first reached its target, at which its mean over the last
    20 steps is within 30 % of it; `moved` the largest factor of beta within 5 of these steps; None where the KL never
    reached it. `peak` is the highest mean over 10 steps, in targets, and `last` the mean over the last 20 steps.
    """
    first = next((step for step, value in enumerate(kl) if value >= target), None)
    begin = len(kl) if first is None else first + SETTLING
    means = [fmean(kl[step - SETTLING + 1 : step + 1]) / target for step in range(begin, len(kl))]
    windows = [beta[step : step + 6] for step in range(begin, len(beta) - 5)]
    return {
        "reached": first,
        "in_band": fmean(abs(mean - 1) <= BAND for mean in means) if means else None,
        "peak": max(fmean(kl[step : step + 10]) for step in range(max(1, len(kl) - 9))) / target,
        "moved": max((max(each) / min(each) if min(each) > 0 else float("inf") for each in windows), default=None),
        "last": fmean(kl[-SETTLING:]) / target,
        "highest_beta": max(beta),
        "last_beta": beta[-1],
    }


def _sparse(values: Sequence[float]) -> list[float]:
    """Means over a few steps, with four digits: what the picture shows."""
    return [float(f"{fmean(values[step : step + EVERY]):.4g}") for step in range(0, len(values), EVERY)]


def text(results: Mapping[str, Any]) -> str:
    """One line per rule, target and learning rate, with the range over seeds."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for each in results["runs"]:
        groups.setdefault((each["rule"], each["target"], each["rate"], each["steps"]), []).append(each)
    rows = [
        (
            name + ("" if rate == RATE else f", {rate / RATE:g} times the learning rate"),
            steps,
            f"{target:g}",
            len(runs),
            _range([each["in_band"] for each in runs], "{:.0%}"),
            *(_range([each[key] for each in runs], "{:.2f}") for key in ("peak", "moved", "last")),
            _range([each["highest_beta"] for each in runs], "{:.3g}"),
            _range([each["reward"] for each in runs], "{:.3f}"),
            _range([100 * each["addition"] for each in runs], "{:.1f}"),
        )
        for (name, target, rate, steps), runs in groups.items()
    ]
    headings = ("rule", "steps", "target", "seeds", "in the band", "highest 10", "beta in 5", "last 20", "highest beta")
    return table((*headings, "reward", "addition"), rows)


def _range(values: Sequence[float | None], form: str) -> str:
    """Lowest and highest; a dash where the target was never reached."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return "-"
    ends = dict.fromkeys(form.format(value) for value in (known[0], known[-1]))
    return " to ".join(ends)


def plot(results: Mapping[str, Any], file: Path) -> None:
    """KL and beta over the steps, at the target that all rules were run with, and the default at every target."""
    runs = [each for each in results["runs"] if each["rate"] == RATE and each["steps"] == results["steps"]]
    firsts = {(each["rule"], each["target"]): each for each in reversed(runs)}
    shared = next((each["target"] for each in runs if each["rule"] != next(iter(RULES))), runs[0]["target"])
    rules = {rule: each for (rule, target), each in firsts.items() if target == shared and rule in RULES}
    own = {f"target {target:g}": each for (rule, target), each in firsts.items() if rule == next(iter(RULES))}
    panels = []
    for title, chosen in ((f"every rule, target {shared:g}", rules), ("the default rule", own)):
        for key, label in (("kl", "KL in targets"), ("beta", "beta")):
            lines = {name: _points(each, key) for name, each in sorted(chosen.items())}
            panels.append(Panel(title=title, label=label, over="step", lines=lines, linear=True))
    draw(panels, file)


def _points(each: Mapping[str, Any], key: str) -> list[tuple[float, float]]:
    """Step and value of each mean; a KL in targets, from 1 % of it."""
    unit = each["target"] if key == "kl" else 1.0
    return [(EVERY * (i + 0.5), max(value / unit, 1e-2 if key == "kl" else 1e-6)) for i, value in enumerate(each[key])]


BENCHMARK = Benchmark(
    name="controllers",
    title="Rules of beta against a target",
    about="Runs of the built-in task (`klamp train --target_kl`, beta from 0.01), and what each rule did. "
    "In the band: the share of the steps, from 20 after the KL first reached the target, at which its mean over 20 "
    "steps is within 30 % of the target. Highest 10: the highest mean over 10 steps, in targets. Beta in 5: the "
    "largest factor of beta within 5 of those steps. Last 20: the mean KL of the last 20 steps, in targets. "
    "Reward: their mean reward. Addition: the held-out score at the end. Each cell is the range over seeds.",
    run=run,
    text=text,
    plot=plot,
)
