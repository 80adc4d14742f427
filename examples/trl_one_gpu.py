"""Half a billion parameters on one GPU: Qwen2.5-0.5B-Instruct on grade-school sums, by TRL with klamp's KL.

    pip install -e '.[train,trl]'    # in a clone
    python examples/trl_one_gpu.py                                  # a GPU of 24 GB should do; downloads model and data
    python examples/trl_one_gpu.py --model FOLDER --data rows.jsonl # your own: columns `question` and `answer`
    klamp doctor runs/qwen-gsm8k                                    # what is wrong with it, if anything

NOT run on a GPU by us: there was none. What a test does run is this file, its configuration with smaller sizes, on a
tiny Qwen2 on a CPU (tests/examples/test_one_gpu.py). So the learning rate and the target are where to begin, not where
to end, and no time or memory is promised. By arithmetic, weights, gradients and moments in float32 take 16 bytes for
each of 494 million weights, 7.9 GB, and the reference 2 GB; activations come on top.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, load_dataset
from transformers import HfArgumentParser

from klamp.trl import GRPOConfig, GRPOTrainer, effective

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
SYSTEM = "Solve the problem step by step. End with the answer as a number."


@dataclass(frozen=True)
class Options:
    """What to train, on what, for how long."""

    model: str = "Qwen/Qwen2.5-0.5B-Instruct"
    """A hub id or a folder."""
    data: str = "openai/gsm8k"
    """A hub id with the configuration `main`, or a .jsonl file; columns `question` and `answer`."""
    output_dir: str = "runs/qwen-gsm8k"
    """Folder of checkpoints and logs."""
    target_kl: float = 0.01
    """Nats per token at which beta holds the policy."""
    steps: int = 300
    """Optimizer steps."""
    prompts: int = 8
    """Prompts per step."""
    num_generations: int = 8
    """Completions of each."""
    max_completion_length: int = 256
    """Tokens."""
    learning_rate: float = 1e-6
    """Peak learning rate."""


def arguments(given: Options) -> GRPOConfig:
    """The whole configuration."""
    on_gpu = torch.cuda.is_available()
    return GRPOConfig(
        output_dir=given.output_dir,
        # the KL: it starts at beta 0.01, and beta then follows the measured KL
        beta=0.01,
        target_kl=given.target_kl,
        # each prompt is run once for its completions, logits are never held; checkpointing would take the cache away
        fast_scoring=True,
        gradient_checkpointing=False,
        # a prompt with its completions in a micro-batch; a step adds up all of its prompts
        per_device_train_batch_size=given.num_generations,
        gradient_accumulation_steps=given.prompts,
        num_generations=given.num_generations,
        max_completion_length=given.max_completion_length,
        max_steps=given.steps,
        learning_rate=given.learning_rate,
        warmup_steps=min(10, given.steps // 2),
        max_grad_norm=1.0,
        # weights in float32, or steps of this size round away; products in bfloat16
        model_init_kwargs={"dtype": "float32"},
        bf16=on_gpu,
        use_cpu=not on_gpu,
        logging_steps=1,
        save_steps=min(100, given.steps),
        save_total_limit=2,
        report_to="tensorboard",
    )


def rows_of(data: str) -> Dataset:
    """Conversations with the number that is expected: columns `prompt` and `answer`."""
    local = Path(data).suffix == ".jsonl"
    rows = load_dataset("json", data_files=data, split="train") if local else load_dataset(data, "main", split="train")

    def conversation(row: dict[str, Any]) -> dict[str, Any]:
        said = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": row["question"]}]
        return {"prompt": said, "answer": last_number(row["answer"])}

    return rows.map(conversation, remove_columns=rows.column_names)


def last_number(text: str) -> str:
    """The last number of a text, without commas; empty where there is none. GSM8K's answers end with `#### 72`."""
    found = NUMBER.findall(text)
    return found[-1].replace(",", "") if found else ""


def right_number(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """1 where the last number of the completion is the answer."""
    found = [last_number(completion[-1]["content"]) for completion in completions]
    return [float(bool(n) and float(n) == float(expected)) for n, expected in zip(found, answer, strict=True)]


def main(given: Options) -> GRPOTrainer:
    """Train, and say before what the KL will really do."""
    trainer = GRPOTrainer(
        model=given.model, reward_funcs=right_number, args=arguments(given), train_dataset=rows_of(given.data)
    )
    print(effective(trainer), flush=True)
    trainer.train()
    return trainer


if __name__ == "__main__":
    main(*HfArgumentParser(Options).parse_args_into_dataclasses())
