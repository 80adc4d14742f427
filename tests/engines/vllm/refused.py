"""klamp's trainer for TRL around a vLLM in bfloat16 that packs weights without oneDNN, and what it says: MODEL."""

from __future__ import annotations

import functools
import json
import sys
import tempfile

import trl.generation.vllm_generation as generation
import vllm._custom_ops as operations
from datasets import Dataset
from tests.engines.vllm.amx import imitate_if_asked
from tests.hosts.trl.hosts import reward

from klamp.errors import ConfigError
from klamp.trl import GRPOConfig, GRPOTrainer

imitate_if_asked()
operations._supports_onednn = False
generation.LLM = functools.partial(generation.LLM, dtype="bfloat16", enforce_eager=True)


def said(model: str) -> str:
    """The refusal when the trainer is made; "" where there is none."""
    args = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.3,
        vllm_max_model_length=64,
        per_device_train_batch_size=4,
        num_generations=4,
        report_to="none",
        use_cpu=True,
        bf16=False,
    )
    rows = Dataset.from_list([{"prompt": "1+2="}])
    try:
        GRPOTrainer(model=model, reward_funcs=reward, args=args, train_dataset=rows)
    except ConfigError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    print(json.dumps({"error": said(sys.argv[1])}))  # noqa: TID251  (a program of its own)
