"""TRL's trainer with a real vLLM on the CPU and fast scoring, and TRL's own scoring of the same completions: MODEL."""

import functools
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import trl.generation.vllm_generation as generation
from datasets import Dataset
from tests.engines.vllm.weights import use_here
from tests.hosts.trl.hosts import arguments, reward
from torch import Tensor

from klamp.lab.models import load_tokenizer
from klamp.lab.tasks import load_task
from klamp.lab.tasks.base import TaskConfig
from klamp.scoring import completions
from klamp.trl import GRPOTrainer

generation.LLM = functools.partial(generation.LLM, dtype="float32", enforce_eager=True)
use_here()
completions.PASS_TOKENS = 0  # short prompts are shared too


def trained(model: str) -> dict[str, Any]:
    """What fast scoring and TRL's own make of the same completions of vLLM's, at each of three steps."""
    rows = [{"prompt": example.prompt} for example in load_task(TaskConfig(train_size=16), load_tokenizer(model)).train]
    folder = Path(tempfile.mkdtemp())
    engine = {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": 0.3,
        "vllm_max_model_length": 64,
    }
    sizes = {"per_device_train_batch_size": 8, "num_generations": 4, "num_iterations": 2, "max_steps": 4}
    loss = {"beta": 0.04, "fast_scoring": True, "learning_rate": 5e-3}
    args = arguments(folder=folder, **engine, **sizes, **loss)
    trainer = GRPOTrainer(model=model, reward_funcs=reward, args=args, train_dataset=Dataset.from_list(rows))
    apart: dict[str, list[float]] = {"loss": [], "gradient": [], "old": [], "reference": [], "ratio": [], "engine": []}
    fast, lossing, scoring = trainer._klamp.fast, trainer.compute_loss, trainer._generate_and_score_completions

    def by_trl(function: Any, *given: Any) -> Any:
        fast.reason = "the test wants TRL's own"
        try:
            return function(*given)
        finally:
            fast.reason = ""

    def of_loss(loss: Tensor) -> Tensor:
        found = torch.autograd.grad(loss, list(trainer.model.parameters()), retain_graph=True)
        return torch.cat([each.flatten() for each in found])

    def compute(model: Any, inputs: Any, *_: Any, **__: Any) -> Tensor:
        expected, found = by_trl(lossing, model, inputs), lossing(model, inputs)
        gradient = of_loss(expected)
        apart["loss"].append(float((found - expected).abs()))
        apart["gradient"].append(float((of_loss(found) - gradient).abs().max() / gradient.abs().max()))
        return found

    def generate(inputs: Any) -> Any:
        found = scoring(inputs)
        mask = found["completion_mask"].bool()
        ids = torch.cat([found["prompt_ids"], found["completion_ids"]], 1)
        tokens = torch.cat([found["prompt_mask"], found["completion_mask"]], 1)
        call = (ids, tokens, mask.shape[1], len(ids))
        with torch.no_grad():
            old = by_trl(trainer._get_per_token_logps_and_entropies, trainer.model, *call)[0]
            reference = by_trl(trainer._get_per_token_logps_and_entropies, trainer.ref_model, *call)[0]
        apart["old"].append(float((found["old_per_token_logps"] - old)[mask].abs().max()))
        apart["reference"].append(float((found["ref_per_token_logps"] - reference)[mask].abs().max()))
        apart["engine"].append(float((found["sampling_per_token_logps"] - old)[mask].abs().max()))
        apart["ratio"].append(float((found["importance_sampling_ratio"] - 1).abs().max()))
        return found

    trainer.compute_loss, trainer._generate_and_score_completions = compute, generate
    trainer.train()
    kls = [row["kl"] for row in trainer.state.log_history if "kl" in row]
    return {"apart": apart, "kl": kls, "in force": str(fast), "told": sorted(fast.reasons)}


if __name__ == "__main__":
    print(json.dumps(trained(sys.argv[1])))  # noqa: TID251  (a program of its own)
