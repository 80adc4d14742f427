"""Baseline, hard clip and soft clip on one task: the clipping notes' configuration and demonstration (docs/sources.md).

    python examples/simple_kl_grpo.py [--steps 12] [--beta 0.001]

The notes' `GRPOConfig` and `GRPOTrainer`, from `klamp.trl` instead of `trl`. klamp's own is that the KL which opens the
gate is detached and that of the other completions of a prompt, and that a soft clip has a temperature (1, the notes'
softplus, is no clip on a threshold per token). A dozen steps at the notes' beta of 0.001 show budgets and KLs, not an
effect: `examples/trl_kl_clipping.py` trains longer, at beta 1, and draws it.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from statistics import mean
from typing import Any

from datasets import Dataset
from transformers import PrinterCallback, set_seed
from transformers.utils import logging

from klamp.lab.tasks import TaskConfig, arithmetic_task, load_base_model
from klamp.trl import GRPOConfig, GRPOTrainer, effective

METHODS: dict[str, dict[str, Any]] = {
    "1. baseline (no clipping)": {"kl_clip_method": "none"},
    "2. hard clipping": {
        "kl_clip_method": "hard",
        "kl_clip_threshold": 0.1,  # 0.1 nats per token
        "use_per_token_kl_threshold": True,  # scale by reference length
    },
    "3. soft clipping": {
        "kl_clip_method": "soft",
        "kl_clip_threshold": 0.1,
        "use_per_token_kl_threshold": True,
        "kl_clip_temperature": 0.01,  # without it: half of beta everywhere, which klamp warns of
    },
}
COLUMNS = {"reward": "reward", "kl/k3": "KL per token", "kl/k3_sequence": "KL in all", "kl/budget": "budget",
           "kl/over_budget": "over it", "completions/mean_length": "length"}  # fmt: skip


def run(method: dict[str, Any], *, steps: int, beta: float, folder: str) -> list[dict[str, float]]:
    """One training run; what was logged at each step."""
    set_seed(0)
    model, tokenizer = load_base_model()
    task = arithmetic_task(TaskConfig(train_size=512))
    examples = {example.prompt: example for example in task.train}

    def reward_function(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        return [task.score(examples[p], c) for p, c in zip(prompts, completions, strict=True)]

    training_args = GRPOConfig(
        output_dir=folder,
        # Standard GRPO parameters
        temperature=1.0,
        learning_rate=1e-3,  # 5e-6 in the notes, for a model a thousand times as large
        beta=beta,  # base KL coefficient
        # KL clipping parameters
        **method,
        # how long, and where
        max_steps=steps,
        per_device_train_batch_size=64,
        num_generations=8,
        max_completion_length=8,
        use_cpu=True,
        bf16=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=[reward_function],
        args=training_args,
        train_dataset=Dataset.from_dict({"prompt": list(examples)}),
    )
    trainer.remove_callback(PrinterCallback)
    print(next(line for line in str(effective(trainer)).splitlines() if line.startswith("clip")), flush=True)
    trainer.train()
    return [row for row in trainer.state.log_history if "reward" in row]


def main() -> None:
    """Run all three methods on the same task, and compare them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--beta", type=float, default=0.001)
    given = parser.parse_args()
    warnings.simplefilter("ignore", FutureWarning)  # transformers, of TRL's own arguments
    logging.disable_progress_bar()
    print(f"{'':26}" + "".join(f"{title:>14}" for title in COLUMNS.values()))
    for name, method in METHODS.items():
        with tempfile.TemporaryDirectory() as folder:
            rows = run(method, steps=given.steps, beta=given.beta, folder=folder)[-5:]
        cells = [[row[column] for row in rows if column in row] for column in COLUMNS]
        print(f"{name:26}" + "".join(f"{mean(seen):14.4f}" if seen else f"{'-':>14}" for seen in cells), flush=True)


if __name__ == "__main__":
    main()
