"""Answers of a model in vLLM, with their log-probabilities there and in transformers: FOLDER QUESTION ..."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from vllm import LLM, SamplingParams

from klamp.tasks.config import TaskConfig
from klamp.tasks.prompts import prompt_text
from klamp.training.models import end_tokens, load_tokenizer


def main(folder: str, *questions: str) -> dict[str, Any]:
    """The texts, why each ended, and the largest difference of a token's log-probabilities in nats."""
    tokenizer = load_tokenizer(folder)
    prompts = [prompt_text(question, TaskConfig(), tokenizer, where="a question") for question in questions]
    ids = [tokenizer(prompt, add_special_tokens=False)["input_ids"] for prompt in prompts]  # pyright: ignore
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    engine = LLM(model=folder, dtype="float32", enforce_eager=True, max_model_len=256)
    settings = SamplingParams(temperature=0, max_tokens=24, logprobs=0, stop_token_ids=end_tokens(model, tokenizer))
    outputs = engine.generate([{"prompt_token_ids": each} for each in ids], settings)
    texts, ends, largest = [], [], 0.0
    for prompt, output in zip(ids, outputs, strict=True):
        answer = output.outputs[0]
        texts.append(answer.text)
        ends.append(answer.finish_reason)
        sequence = torch.tensor([[*prompt, *answer.token_ids]])
        with torch.no_grad():
            ours = model(sequence).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        for row, token, theirs in zip(ours, answer.token_ids, answer.logprobs, strict=True):
            largest = max(largest, abs(float(row[token]) - theirs[token].logprob))
    return {"texts": texts, "ends": ends, "largest_difference": largest}


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))  # noqa: TID251  (a program of its own)
