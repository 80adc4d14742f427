"""Check the KL of TRL's own GRPO trainer before training: the verdict that README.md shows.

    python examples/check_trl.py              # use_bias_correction_kl=False: the KL is WRONG
    python examples/check_trl.py --correct    # TRL's default: the KL is sound

The model is klamp's built-in one (arithmetic, 3 MB). The first run trains it, which takes a minute on a CPU.
"""

from __future__ import annotations

import sys
import tempfile
import warnings

import trl
from datasets import Dataset
from transformers.utils import logging

import klamp.trl
from klamp.audit.verdict import Verdict
from klamp.lab.models import load_model, load_tokenizer
from klamp.lab.tasks import load_task
from klamp.lab.tasks.base import TaskConfig


def exact_match(completions: list[str], answer: list[str], **_: object) -> list[float | None]:
    """Return 1 for the expected answer, else 0."""
    return [float(text.strip() == expected) for text, expected in zip(completions, answer, strict=True)]


def verdict(folder: str, *, correct: bool) -> Verdict:
    """Build TRL's trainer as its documentation does, and check it.

    Args:
        folder: for the model's files, because TRL loads the reference from the policy's folder.
        correct: the value of TRL's use_bias_correction_kl.
    """
    model, tokenizer = load_model("builtin"), load_tokenizer("builtin")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    task = load_task(TaskConfig(train_size=1024), tokenizer)
    args = trl.GRPOConfig(
        output_dir=folder,
        beta=0.05,
        use_bias_correction_kl=correct,
        per_device_train_batch_size=64,
        max_completion_length=16,
        report_to="none",
        use_cpu=True,
        bf16=False,
    )
    trainer = trl.GRPOTrainer(
        model=folder,
        reward_funcs=exact_match,
        args=args,
        train_dataset=Dataset.from_list([{"prompt": row.prompt, "answer": row.answer} for row in task.train]),
        processing_class=tokenizer,
    )
    return klamp.trl.check(trainer)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        print(verdict(folder, correct="--correct" in sys.argv))
