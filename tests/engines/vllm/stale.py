"""Weights loaded anew into a running vLLM on the CPU, as it comes and with its packing switched off: FOLDER."""

from __future__ import annotations

import copy
import json
import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from vllm import LLM, SamplingParams

from klamp import check_sync

PROMPTS = [[2, 3, 4, 5], [5, 4, 3, 2]]
TEMPERATURE = 0.7


def checked(engine: LLM, model: Any, start: Any) -> dict[str, Any]:
    """What vLLM draws and reports now, held against the model's weights."""
    settings = SamplingParams(max_tokens=8, temperature=TEMPERATURE, logprobs=0, ignore_eos=True, detokenize=False)
    outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], settings, use_tqdm=False)
    answers = [output.outputs[0] for output in outputs]
    tokens = [list(answer.token_ids) for answer in answers]
    told = [
        [each[token].logprob for each, token in zip(answer.logprobs, ids, strict=True)]  # pyright: ignore
        for answer, ids in zip(answers, tokens, strict=True)
    ]
    report = check_sync(model, PROMPTS, tokens, told, temperature=TEMPERATURE, start=start)
    sampler = report.sides[0]
    return {"in_sync": report.in_sync, "nearest": sampler.nearest, "gaps": dict(sampler.gaps), "text": report.text}


def main(folder: str) -> dict[str, Any]:
    """The report before an update, after it, and after vLLM was told to load the new weights."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    engine = LLM(
        model=folder,
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=48,
        enforce_eager=True,
        logprobs_mode="processed_logprobs",
    )
    start = copy.deepcopy(model)
    found = {"before": checked(engine, model, None)}
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * weight.std() * torch.randn_like(weight))
    found["not told"] = checked(engine, model, start)
    new = [(name, weight.detach().clone()) for name, weight in model.named_parameters()]
    engine.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(new)})
    engine.reset_prefix_cache()
    return found | {"reloaded": checked(engine, model, start)}


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))  # noqa: TID251  (a program of its own)
