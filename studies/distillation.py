"""`python -m studies.distillation`: on-policy distillation beside SFT and GRPO: docs/records/distillation.md.

A teacher is made first: the built-in model after `klamp train` (GRPO, 120 steps). Then the built-in model learns to be
like it, or to earn the same reward, for the same numbers of tokens: by its own tokens under the teacher's
log-probabilities (on-policy), by the teacher's tokens (SFT), or by the reward (GRPO). What is learned is measured the
same way for all: the held-out scores, and the exact KL(student || teacher) of completions that the student samples.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from benchmarks.measure import isolated
from benchmarks.records import table

RECORD = Path(__file__).resolve().parents[1] / "docs" / "records" / "distillation.jsonl"
MARK = "<!-- written by `python -m studies.distillation` -->"
SEEDS, STEPS = (0, 1, 2, 3, 4), (5, 10, 20, 40)
ARMS: Mapping[str, Mapping[str, Any]] = {
    "on-policy, k1": {"reward": "none", "beta": 0.0, "teacher_estimator": "k1"},
    "on-policy, exact": {"reward": "none", "beta": 0.0, "teacher_estimator": "exact"},
    "SFT on the teacher's samples": {},
    "GRPO on the reward": {"beta": 0.0},
}
"""Arm -> fields of `TrainConfig` besides the common ones; SFT has a loop of its own below."""
COMMON: Mapping[str, Any] = {"learning_rate": 3e-4, "warmup_steps": 2, "prompts_per_step": 32, "num_generations": 8}
SPARSE: Mapping[str, Any] = {"eval_every": 0, "save_every": 0, "report_to": (), "log_completions": 0, "log_answers": 0}
STUDENT_T = {4: 2.776, 3: 3.182, 2: 4.303, 1: 12.706}
"""Degrees of freedom -> the factor of a 95 % interval."""


def _config(folder: str, **fields: Any) -> Any:
    from klamp.training.config import TrainConfig

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return TrainConfig.from_flat({"output_dir": folder, **SPARSE, **fields})


def one(arm: str, steps: int, seed: int, teacher: str) -> dict[str, Any]:
    """Train one arm for so many steps and measure what it learned."""
    from klamp.training.backends import train_run

    given = {**COMMON, **ARMS[arm], "max_steps": steps, "seed": seed}
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        if arm.startswith("SFT"):
            policy, tokens = _fine_tuned(_config(f"{folder}/run", **given, teacher_model=teacher), Path(folder))
        else:
            taught = {"teacher_model": teacher} if "teacher_estimator" in given else {}
            train_run(_config(f"{folder}/run", **given, **taught, eval_size=1))
            policy, tokens = f"{folder}/run/checkpoints/step-{steps:06d}", _tokens(Path(folder, "run"))
        seconds = time.perf_counter() - started
        found = _measured(policy, teacher, f"{folder}/measured", seed)
    return {"arm": arm, "steps": steps, "seed": seed, "tokens": tokens, "seconds": round(seconds, 2), **found}


def _tokens(run: Path) -> int:
    """How many tokens the student sampled."""
    rows = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return round(sum(row["length/mean"] for row in rows if "reward" in row) * 256)


def _fine_tuned(config: Any, folder: Path) -> tuple[str, int]:
    """Cross-entropy on completions that the teacher samples, anew in each step, of the prompts that the others see."""
    import torch

    from klamp.scoring.scorer import Ask
    from klamp.training.optimizer import adamw, schedule_of
    from klamp.training.rollouts import completed
    from klamp.training.sampling import examples_of_step, uniform_numbers
    from klamp.training.setup import build

    context: Any = build(config, folder, ())
    optimizer, tokens = adamw(context.policy, config), 0
    schedule, train = schedule_of(optimizer, config), context.task.train
    for step in range(config.run.max_steps):
        rows = examples_of_step(step, len(train), size=config.rollout.prompts_per_step, seed=config.run.seed)
        prompts = [train[i].prompt for i in rows for _ in range(config.rollout.num_generations)]
        uniforms = uniform_numbers(config.run.seed, step, len(prompts), config.rollout.max_completion_length)
        drawn = completed(context, prompts, uniforms=uniforms, reference=context.teachers.models[""])
        scores = context.scorer(drawn, Ask(temperature=1.0))
        loss = -(scores.logprobs * drawn.mask).sum() / drawn.mask.sum()
        optimizer.zero_grad()
        loss.backward()  # pyright: ignore[reportUnknownMemberType]
        torch.nn.utils.clip_grad_norm_(context.policy.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        tokens += int(drawn.mask.sum())
    context.policy.save_pretrained(folder / "policy")
    context.tokenizer.save_pretrained(folder / "policy")
    return str(folder / "policy"), tokens


def _measured(policy: str, teacher: str, folder: str, seed: int) -> dict[str, float]:
    """The held-out scores, and the exact KL to the teacher of 1,024 completions, by a run that moves nothing."""
    from klamp.training.backends import train_run

    given = {"model": policy, "teacher_model": teacher, "teacher_estimator": "exact", "reward": "none", "beta": 0.0}
    size = {"prompts_per_step": 128, "num_generations": 8, "max_steps": 1, "warmup_steps": 1, "seed": 1000 + seed}
    summary = train_run(_config(folder, **given, **size, eval_size=1024))
    rows = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return {"kl": next(row["teacher/kl"] for row in rows if "teacher/kl" in row), **summary.before}


def interval(values: Sequence[float], digits: int) -> str:
    """Mean and half of its 95 % interval (Student's t)."""
    half = STUDENT_T.get(len(values) - 1, 0.0) * stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return f"{fmean(values):.{digits}f} ± {half:.{digits}f}"


def text(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table of the page: one line for each arm and length."""
    lines = []
    for arm in ARMS:
        for steps in STEPS:
            runs = [row for row in rows if (row["arm"], row["steps"]) == (arm, steps)]
            if runs:
                every = {name: [row[name] for row in runs] for name in ("tokens", "seconds", "kl", "addition")}
                scores = interval([100 * x for x in every["addition"]], 1)
                cells = f"{fmean(every['tokens']):,.0f}", f"{fmean(every['seconds']):.1f}", scores
                lines.append((arm, str(steps), *cells, interval(every["kl"], 3), str(len(runs))))
    return table(("arm", "steps", "tokens", "seconds", "addition, %", "KL to the teacher, nats/token", "seeds"), lines)


def make_teacher(folder: Path) -> str:
    """The checkpoint of `klamp train`'s defaults; it is made once."""
    from klamp.training.backends import train_run

    made = folder / "teacher" / "checkpoints" / "step-000120"
    if not made.is_dir():
        train_run(_config(str(folder / "teacher"), eval_size=256))
    return str(made)


def main(argv: Sequence[str] | None = None) -> None:
    """Run what is missing; write the page of what is there."""
    parser = argparse.ArgumentParser(prog="python -m studies.distillation")
    parser.add_argument("--folder", type=Path, default=Path("runs/distillation"), help="where the teacher is kept")
    parser.add_argument("--seeds", nargs="*", type=int, default=SEEDS, help="none: the page")
    parser.add_argument("--record", type=Path, default=RECORD, help="the file of finished runs")
    given = parser.parse_args(argv)
    lines = given.record.read_text(encoding="utf-8").splitlines() if given.record.exists() else []
    rows = [json.loads(line) for line in lines]
    done = {(row["arm"], row["steps"], row["seed"]) for row in rows}
    for seed in given.seeds:
        for steps in STEPS:
            for arm in ARMS:
                if (arm, steps, seed) not in done:
                    options = {"arm": arm, "steps": steps, "seed": seed, "teacher": make_teacher(given.folder)}
                    rows.append(isolated("studies.distillation:one", options, threads=1))
                    with given.record.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(rows[-1]) + "\n")
                    print(rows[-1], flush=True)
    page = given.record.with_suffix(".md")
    kept, _, _ = page.read_text(encoding="utf-8").partition(MARK) if page.exists() else ("", "", "")
    page.write_text(f"{kept}{MARK}\n\n{text(rows)}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
