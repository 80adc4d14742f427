"""Evaluation: greedy, every held-out prompt once, the same mean however many batches."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from tests.training import rewards
from tests.training.conftest import tiny_llama
from transformers import GenerationConfig

from klamp.errors import DataError
from klamp.hosts.common.sampler_weights import START, WEIGHTS
from klamp.lab import evaluation
from klamp.lab.backends import train_run
from klamp.lab.config import TrainConfig
from klamp.lab.evaluation import check_completions, evaluate, probabilities
from klamp.lab.folders import lines_of
from klamp.lab.tasks import Example, arithmetic_tokenizer
from klamp.names import COMPLETIONS


def by_hand(context) -> dict[str, float]:
    """Mean reward of what transformers' own greedy decoding writes, prompt by prompt."""
    settings = GenerationConfig(do_sample=False, max_new_tokens=6, eos_token_id=context.stop, pad_token_id=context.pad)
    found = {}
    for skill, examples in context.task.evaluation.items():
        scores = []
        for example in examples:
            ids = context.tokenizer(example.prompt, return_tensors="pt")["input_ids"]
            out = context.policy.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
            scores.append(rewards.digits(context.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)))
        found[skill] = sum(scores) / len(scores)
    return found


def test_every_skill_is_scored_as_greedy_decoding_of_each_prompt_scores(context_of, monkeypatch):
    context = context_of(eval_size=7, temperature=2.0)
    expected = by_hand(context)
    assert list(expected) == ["addition", "subtraction", "reversal"]
    assert len(set(expected.values())) > 1
    assert evaluate(context)[0] == pytest.approx(expected)
    monkeypatch.setattr(evaluation, "BATCH", 3)
    assert evaluate(context)[0] == pytest.approx(expected)


def test_a_skill_that_is_read_is_scored_by_the_probability_of_its_answers(context_of):
    context = context_of(eval_size=7, temperature=2.0)  # the temperature of sampling does not count here
    context.task = replace(context.task, read=frozenset({"reversal", "addition"}))
    expected = by_hand(context) | {
        skill: fmean(read_by_hand(context.policy, context.tokenizer, context.task.evaluation[skill]))
        for skill in ("reversal", "addition")
    }
    assert evaluate(context)[0] == pytest.approx(expected, rel=1e-5)
    assert 0 < expected["reversal"] != expected["addition"] < 1


EXAMPLES = [
    Example(prompt="47+85=", answer="132"),
    Example(prompt="rev abcd=", answer="dcba"),
    Example(prompt="a", answer="b"),
]


def read_by_hand(model: Any, tokenizer: Any, examples: Any) -> list[float]:
    """exp(mean log-probability of the answer's tokens) of each example, one forward pass each."""
    found = []
    for example in examples:
        prompt, answer = (
            tokenizer(text, add_special_tokens=False)["input_ids"] for text in (example.prompt, example.answer)
        )
        logprobs = model(torch.tensor([[*prompt, *answer]])).logits[0].double().log_softmax(-1)
        each = [logprobs[len(prompt) + place - 1, token].item() for place, token in enumerate(answer)]
        found.append(math.exp(sum(each) / len(each)))
    return found


def test_they_are_the_geometric_means_of_the_tokens_probabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = tiny_llama(), arithmetic_tokenizer()
    expected = read_by_hand(model, tokenizer, EXAMPLES)
    for at_once in (16, 2, 1):
        monkeypatch.setattr("klamp.lab.evaluation.READ_AT_ONCE", at_once)
        found = probabilities(EXAMPLES, tokenizer, model)
        assert found == pytest.approx(expected, rel=1e-5)
    assert len(set(expected)) == 3 and all(0 < value < 1 for value in expected)
    assert probabilities([], tokenizer, model) == []


KEPT: dict[str, Any] = {"save_every": 1, "log_completions_every": 1, "log_completions": 8, "keep_checkpoints": 9}


Make = Callable[..., TrainConfig]


def trained(config_of: Make, **changes: Any) -> tuple[TrainConfig, Path]:
    config = config_of(**{**KEPT, "learning_rate": 2e-2, **changes})
    train_run(config)
    return config, Path(str(config.run.output_dir))


@pytest.mark.parametrize("changes", [{}, {"temperature": 0.7}, {"lora_r": 4}, {"num_iterations": 2}])
def test_klamps_own_runs_are_in_sync_at_every_step(config_of: Make, changes: dict[str, Any]) -> None:
    found = dict(check_completions(*trained(config_of, **changes)))
    assert list(found) == [1, 2, 3, 4]
    for report in found.values():
        assert report.in_sync
        assert all(side.gaps[WEIGHTS] < 1e-4 for side in report.sides)


def test_log_probabilities_of_other_weights_are_named(config_of: Make) -> None:
    config, folder = trained(config_of, beta=0.1)
    file = folder / COMPLETIONS
    rows = lines_of(file)
    assert max(abs(p - r) for row in rows for p, r in zip(row["policy_logprobs"], row["ref_logprobs"], strict=True)) > 1
    file.write_text("".join(json.dumps(row | {"sampler_logprobs": row["ref_logprobs"]}) + "\n" for row in rows))
    found = dict(check_completions(config, folder))
    assert found[1].in_sync, "before the first update they are the same weights"
    assert not found[4].in_sync
    sampler, trainer = found[4].sides
    assert sampler.nearest == START
    assert trainer.is_right


def test_a_run_without_such_completions_is_refused(config_of: Make) -> None:
    config, folder = trained(config_of, max_steps=2)
    (folder / COMPLETIONS).unlink()
    with pytest.raises(DataError, match="no completions can be scored again"):
        dict(check_completions(config, folder))
