"""KL clipping in TRL: the same short run without a clip and with three of them, in one table and one picture.

    python examples/trl_kl_clipping.py [--steps 60] [--beta 1.0] [--seed 0] [--out runs/trl-kl-clipping]

The demonstration that the clipping notes describe (docs/sources.md), on the built-in arithmetic task: baseline, soft
clip with a threshold per token, soft clip with a total threshold, hard clip. Each threshold is the same budget, 0.05
nats per token of the reference's own length. Runs on a CPU; the first use of the built-in model teaches it, in about a
minute.
"""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib
from datasets import Dataset
from transformers import PrinterCallback, set_seed
from transformers.utils import logging

from klamp.lab.models import load_model, load_tokenizer
from klamp.lab.tasks import load_task
from klamp.lab.tasks.base import TaskConfig
from klamp.trl import GRPOConfig, GRPOTrainer

PER_TOKEN, LENGTH = 0.05, 3.5  # nats per token; tokens that the base model usually answers with
TOTAL = PER_TOKEN * LENGTH
ARMS: dict[str, dict[str, Any]] = {
    "baseline": {"kl_clip_method": "none"},
    "soft, per token": {
        "kl_clip_method": "soft",
        "kl_clip_threshold": PER_TOKEN,
        "use_per_token_kl_threshold": True,
        "kl_clip_temperature": TOTAL / 10,
    },
    "soft, total": {
        "kl_clip_method": "soft",
        "kl_clip_threshold": TOTAL,
        "use_per_token_kl_threshold": False,
        "kl_clip_temperature": TOTAL / 10,
    },
    "hard, per token": {
        "kl_clip_method": "hard",
        "kl_clip_threshold": PER_TOKEN,
        "use_per_token_kl_threshold": True,
    },
}
CURVES = {
    "reward": "reward",
    "kl/k3_sequence": "KL, nats per completion",
    "completions/mean_length": "completion length, tokens",
    "kl/over_budget": "share of completions over budget",
}


def train(arm: dict[str, Any], *, steps: int, beta: float, seed: int, folder: Path) -> list[dict[str, float]]:
    """One run; returns what was logged at each step."""
    set_seed(seed)
    tokenizer = load_tokenizer("builtin")
    task = load_task(TaskConfig(train_size=1024), tokenizer)
    examples = {example.prompt: example for example in task.train}

    def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        return [task.score(examples[p], c) for p, c in zip(prompts, completions, strict=True)]

    args = GRPOConfig(
        output_dir=str(folder),
        max_steps=steps,
        learning_rate=1e-4,
        per_device_train_batch_size=64,
        num_generations=8,
        max_completion_length=16,
        beta=beta,
        seed=seed,
        use_cpu=True,
        bf16=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **arm,
    )
    trainer = GRPOTrainer(
        model=load_model("builtin"),
        reward_funcs=reward,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": list(examples)}),
        processing_class=tokenizer,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return [row for row in trainer.state.log_history if "reward" in row]


def table(runs: dict[str, list[dict[str, float]]]) -> str:
    """Means of the last ten steps of each run."""
    lines = [f"{'':18}" + "".join(f"{name:>26}" for name in CURVES)]
    for arm, rows in runs.items():
        last = [[row[name] for row in rows[-10:] if name in row] for name in CURVES]
        lines.append(f"{arm:18}" + "".join(f"{mean(seen):26.4f}" if seen else f"{'-':>26}" for seen in last))
    return "\n".join(lines)


def picture(runs: dict[str, list[dict[str, float]]], path: Path) -> None:
    """Every curve over steps, as the mean of the last eight; one line for each run."""
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(11, 7), sharex=True, layout="constrained")
    for axis, (name, title) in zip(axes.flat, CURVES.items(), strict=True):
        for number, (arm, rows) in enumerate(runs.items()):
            values = [row[name] for row in rows if name in row]
            means = [mean(values[max(0, i - 7) : i + 1]) for i in range(len(values))]
            steps = [row["step"] for row in rows if name in row]
            axis.plot(steps, means, color=f"C{number}", label=arm, linewidth=1.6)
        axis.set_title(title)
        axis.grid(alpha=0.3)
    axes.flat[1].axhline(TOTAL, color="black", linestyle="--", linewidth=1, label=f"budget, {TOTAL:.3g} nats")
    axes.flat[1].legend()
    for axis in axes[1]:
        axis.set_xlabel("step")
    figure.savefig(path, dpi=120)


def main() -> None:
    """Run every arm and show them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--beta", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/trl-kl-clipping"))
    given = parser.parse_args()
    warnings.simplefilter("ignore", FutureWarning)  # transformers, of TRL's own arguments
    logging.disable_progress_bar()
    given.out.mkdir(parents=True, exist_ok=True)
    runs = {}
    for arm, options in ARMS.items():
        print(f"{arm} ...", flush=True)
        runs[arm] = train(options, steps=given.steps, beta=given.beta, seed=given.seed, folder=given.out / "trl")
    (given.out / "runs.json").write_text(json.dumps(runs, indent=1), encoding="utf-8")
    picture(runs, given.out / "curves.png")
    print(f"\nmeans of the last ten steps; beta {given.beta}, budget {TOTAL:.3g} nats per completion\n")
    print(table(runs))
    print(f"\npicture  {given.out / 'curves.png'}\nnumbers  {given.out / 'runs.json'}")


if __name__ == "__main__":
    main()
