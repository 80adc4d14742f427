"""GRPO through the Tinker SDK, in async code, with and without a KL: the Tinker guide (docs/sources.md), step by step.

    python examples/grpo_with_kl_example.py                  # Option 2: with a KL, kl_coef 0.01
    python examples/grpo_with_kl_example.py --kl_coef 0      # Option 1: the built-in PPO loss, no reference

Offline, against klamp's stand-in for the service (`pip install ./standin` in a clone); for the hosted one,
`tinker.ServiceClient()` takes no arguments. Everything is awaited (SDK 0.38: what a client's method returns can be),
and the optimizer step is submitted before its gradient is waited for. `grpo_kl_loss.compute_grpo_kl_loss` is klamp's,
from `klamp.tinker`: its arguments are the guide's, its KL has the right sign. `examples/tinker_grpo_kl.py` is the same
loop with klamp's helpers for datums.
"""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import dataclass
from typing import Any

import tinker
import torch
from tinker.types import TensorData

from klamp import group_advantages
from klamp.lab.tasks import Example, TaskConfig, arithmetic_task, load_base_model
from klamp.tinker import compute_grpo_kl_loss, compute_reference_logprobs
from klamp.tinker.testing import serve


@dataclass(frozen=True)
class Config:
    """The settings of the guide's `grpo_train_tinker.py`."""

    model_name: str = "klamp/arithmetic"
    kl_coef: float = 0.01  # 0.0: no KL penalty
    cliprange: float = 0.2
    group_size: int = 8
    questions: int = 8
    steps: int = 5
    learning_rate: float = 2e-3


def build_datum(
    prompt: list[int], response: list[int], logprobs: list[float], advantage: float, ref_logprobs: list[float] | None
) -> tinker.types.Datum:
    """Step 3: reference logprobs are one more row of the datum; the prompt's places are zeros."""
    tokens, before = prompt + response, [0.0] * (len(prompt) - 1)
    loss_fn_inputs = {
        "target_tokens": TensorData.from_torch(torch.tensor(tokens[1:])),
        "advantages": TensorData.from_torch(torch.tensor(before + [advantage] * len(response))),
        "logprobs": TensorData.from_torch(torch.tensor(before + logprobs)),
    }
    if ref_logprobs is not None:
        all_ref_logprobs = before + ref_logprobs
        loss_fn_inputs["ref_logprobs"] = TensorData.from_torch(torch.tensor(all_ref_logprobs))  # NEW
    return tinker.types.Datum(
        model_input=tinker.types.ModelInput.from_ints(tokens=tokens[:-1]), loss_fn_inputs=loss_fn_inputs
    )


async def sample(client: Any, prompts: list[list[int]], size: int) -> list[list[Any]]:
    """Group sampling: for each question, `group_size` responses, all questions at once."""
    params = tinker.types.SamplingParams(max_tokens=8, temperature=1.0)
    inputs = [tinker.types.ModelInput.from_ints(tokens=prompt) for prompt in prompts]
    answers = await asyncio.gather(*(client.sample(each, size, params) for each in inputs))
    return [answer.sequences for answer in answers]


async def train_step(
    config: Config, training_client: Any, ref_sampling_client: Any, questions: list[Example], tokenizer: Any, score: Any
) -> dict[str, float]:
    """Sample, score, normalise within each group, ask the reference, update."""
    prompts = [tokenizer.encode(question.prompt, add_special_tokens=False) for question in questions]
    sampling_client = await training_client.save_weights_and_get_sampling_client()
    groups = await sample(sampling_client, prompts, config.group_size)
    rows = [(prompt, question, row) for prompt, question, group in zip(prompts, questions, groups, strict=True)
            for row in group]  # fmt: skip
    texts = tokenizer.batch_decode([row.tokens for _, _, row in rows], skip_special_tokens=True)
    rewards = torch.tensor([score(question, text) for (_, question, _), text in zip(rows, texts, strict=True)])
    advantages = group_advantages(rewards, config.group_size).tolist()  # (rewards - mean) / (std + eps)

    ref_logprobs_list: list[Any] = [None] * len(rows)
    if config.kl_coef > 0:  # Step 2: compute reference logprobs
        ref_logprobs_list = await compute_reference_logprobs(
            ref_sampling_client, [prompt for prompt, _, _ in rows], [row.tokens for _, _, row in rows]
        )
    training_datums = [
        build_datum(prompt, row.tokens, row.logprobs, advantage, ref)
        for (prompt, _, row), advantage, ref in zip(rows, advantages, ref_logprobs_list, strict=True)
    ]
    if config.kl_coef > 0:  # Step 4: use custom loss
        fwd_bwd_future = training_client.forward_backward_custom(
            training_datums,
            loss_fn=lambda data, logprobs: compute_grpo_kl_loss(
                data, logprobs, kl_coef=config.kl_coef, cliprange=config.cliprange, normalizer="token_sum"
            ),
        )
    else:  # the built-in PPO; its clip is in loss_fn_config, NOT in loss_fn_inputs
        fwd_bwd_future = training_client.forward_backward(
            training_datums,
            loss_fn="ppo",
            loss_fn_config={
                "clip_low_threshold": 1.0 - config.cliprange,
                "clip_high_threshold": 1.0 + config.cliprange,
            },
        )
    optim_future = training_client.optim_step(tinker.types.AdamParams(learning_rate=config.learning_rate))
    fwd_bwd_result = await fwd_bwd_future
    await optim_future
    shown = {"kl/k1", "kl/k3", "train/kl_penalty"}
    return {"reward": float(rewards.mean())} | {k: v for k, v in fwd_bwd_result.metrics.items() if k in shown}


async def main(config: Config) -> None:
    """Train for a few steps at the stand-in."""
    model, tokenizer = load_base_model()
    task = arithmetic_task(TaskConfig(train_size=1024))
    with serve(model, tokenizer, name=config.model_name) as standin:
        service_client = tinker.ServiceClient(base_url=standin.url, api_key=standin.api_key)
        training_client = await service_client.create_lora_training_client(config.model_name, rank=8, seed=0)
        ref_sampling_client = None
        if config.kl_coef > 0:  # Step 1: the reference, the base model before training; once, at the start
            ref_sampling_client = await service_client.create_sampling_client(base_model=config.model_name)
        for step in range(config.steps):
            questions = list(task.train[step * config.questions : (step + 1) * config.questions])
            metrics = await train_step(config, training_client, ref_sampling_client, questions, tokenizer, task.score)
            print(
                f"step {step + 1}  " + "  ".join(f"{name} {value:.4f}" for name, value in metrics.items()), flush=True
            )
        asked = {route: standin.requests[route] for route in ("asample", "forward_backward", "optim_step")}
        print("asked of the service: " + ", ".join(f"{route} {count}" for route, count in asked.items()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kl_coef", type=float, default=Config.kl_coef)
    parser.add_argument("--steps", type=int, default=Config.steps)
    given = parser.parse_args()
    asyncio.run(main(Config(kl_coef=given.kl_coef, steps=given.steps)))
