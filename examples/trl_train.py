"""Train with TRL and klamp's KL from the command line, with the values that a hunt for a KL bug wants to see.

    python examples/trl_train.py train --kl-beta 0.01 --batch-size 8 --num-generations 8 --max-steps 100
    python examples/trl_train.py train --model Qwen/Qwen2.5-0.5B-Instruct --lora-r 16 \\
        --datasets "bdsaglam/musique-mini,answerable,train[:100]" --kl-beta 0.0 --batch-size 8 --num-generations 8

The command line of the k3 bug report (docs/sources.md). A dataset is `PATH[,CONFIG[,SPLIT]]`: a hub id, or a local
.jsonl, .json or .parquet file; with none the built-in arithmetic task is trained. Every logged step also has
`debug/kl_mean`, `debug/kl_max`, `debug/kl_min`, `debug/ref_logp_mean` and `debug/policy_logp_mean`.
"""

from __future__ import annotations

import re
import sys
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, concatenate_datasets, load_dataset
from peft import LoraConfig
from transformers import HfArgumentParser, TrainerCallback
from transformers.utils import logging

from klamp.lab.models import load_model, load_tokenizer
from klamp.lab.tasks import load_task
from klamp.lab.tasks.base import TaskConfig
from klamp.trl import GRPOConfig, GRPOTrainer, effective

DEBUG = {
    "debug/kl_mean": "kl/k3",
    "debug/kl_max": "kl/k3_max",
    "debug/kl_min": "kl/k3_min",
    "debug/ref_logp_mean": "ref/logp_mean",
    "debug/policy_logp_mean": "policy/logp_mean",
}
FILES = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}


@dataclass
class Train:
    """Train a model with GRPO and a KL term."""

    datasets: list[str] = field(default_factory=list)
    """PATH[,CONFIG[,SPLIT]] each; none: the built-in arithmetic task."""
    model: str = "builtin"
    """`builtin`, a local folder, or a hub id."""
    kl_beta: float = 0.01
    """Coefficient of the KL; 0 loads no reference."""
    kl_estimator: str = "k3"
    """k1, k2, k3, abs or exact."""
    loss_type: str = "grpo"
    """TRL's name of the loss."""
    batch_size: int = 8
    """Completions per step; a multiple of num_generations."""
    num_generations: int = 8
    """Completions per prompt."""
    max_steps: int = 100
    """Optimizer steps."""
    learning_rate: float = 1e-5
    """Peak learning rate."""
    max_completion_length: int = 16
    """Tokens."""
    lora_r: int = 0
    """Rank of a LoRA adapter; 0 trains all weights."""
    lora_alpha: int = 32
    """Scale of the adapter."""
    fast_scoring: bool = False
    """Score with klamp's scorer in the place of TRL's own."""
    prompt_column: str = "question"
    """Column of the prompts."""
    answer_column: str = "answer"
    """Column of the expected answers."""
    output_dir: str = "runs/trl-train"
    """Folder of checkpoints and logs."""
    report_to: list[str] = field(default_factory=list)
    """TRL's trackers: tensorboard, wandb ..."""
    seed: int = 0
    """Seed."""


class DebugValues(TrainerCallback):
    """Adds the `debug/` values to what is logged; must come before the callbacks that write it."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        """Copy klamp's metrics under their other names."""
        for name, source in DEBUG.items():
            if logs is not None and source in logs:
                logs[name] = state.log_history[-1][name] = logs[source]


def load_rows(spec: str, given: Train) -> Dataset:
    """The rows of one dataset, with columns `prompt` and `answer`."""
    path, config, split = ([part.strip() for part in spec.split(",", 2)] + ["", ""])[:3]
    kind = FILES.get(Path(path).suffix)
    if kind is not None:
        rows = load_dataset(kind, data_files=path, split=split or "train")
    else:
        rows = load_dataset(path, config or None, split=split or "train")
    columns = {given.prompt_column: "prompt", given.answer_column: "answer"}
    return rows.select_columns(list(columns)).rename_columns({a: b for a, b in columns.items() if a != b})


def exact_match(completions: list[Any], answer: list[Any], **_: Any) -> list[float]:
    """1 where the completion is the answer, but for case, punctuation and spaces."""

    def plain(text: Any) -> str:
        return re.sub(r"[\W_]+", " ", str(text)).strip().lower()

    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [float(plain(text) == plain(expected)) for text, expected in zip(texts, answer, strict=True)]


def train(given: Train) -> GRPOTrainer:
    """Train a model with GRPO and a KL term."""
    tokenizer = load_tokenizer(given.model)
    if given.datasets:
        rows = concatenate_datasets([load_rows(spec, given) for spec in given.datasets])
    else:
        task = load_task(TaskConfig(train_size=1024), tokenizer)
        rows = Dataset.from_list([{"prompt": e.prompt, "answer": e.answer} for e in task.train])
    args = GRPOConfig(
        output_dir=given.output_dir,
        kl_beta=given.kl_beta,
        kl_estimator=given.kl_estimator if given.kl_beta else None,  # type: ignore[arg-type]
        loss_type=given.loss_type,
        per_device_train_batch_size=given.batch_size,
        num_generations=given.num_generations,
        max_steps=given.max_steps,
        learning_rate=given.learning_rate,
        max_completion_length=given.max_completion_length,
        fast_scoring=given.fast_scoring,
        seed=given.seed,
        report_to=given.report_to or "none",
        logging_steps=1,
        save_strategy="no",
        use_cpu=not torch.accelerator.is_available(),
        bf16=torch.cuda.is_available(),
    )
    lora = LoraConfig(r=given.lora_r, lora_alpha=given.lora_alpha, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = GRPOTrainer(
        model=load_model(given.model),
        reward_funcs=exact_match,
        args=args,
        train_dataset=rows,
        processing_class=tokenizer,
        peft_config=lora if given.lora_r else None,
    )
    trainer.callback_handler.callbacks.insert(0, DebugValues())
    print(effective(trainer), flush=True)
    trainer.train()
    return trainer


if __name__ == "__main__":
    warnings.simplefilter("ignore", FutureWarning)  # transformers, of TRL's own arguments
    logging.disable_progress_bar()
    if sys.argv[1:2] != ["train"]:
        sys.exit("usage: trl_train.py train [flags]; trl_train.py train --help lists them")
    train(*HfArgumentParser(Train).parse_args_into_dataclasses(args=sys.argv[2:]))
