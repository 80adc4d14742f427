"""Generation inside TRL runs each distinct prompt once, and writes what it would have written."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.hosts.trl.hosts import generated, klamp_trainer, model, rows_of
from tests.hosts.trl.test_fast_scoring import LORA, cached
from transformers import GenerationConfig

from klamp.errors import ConfigError
from klamp.hosts.trl.fast_generation import prompts_once, why_not_once

__all__ = ["cached"]

MADE: dict[str, dict[str, Any]] = {
    "plain": {},
    "adapter": {"trainer": LORA},
    "checkpointing": {"gradient_checkpointing": True},
    "top-p, penalty": {"top_p": 0.9, "repetition_penalty": 1.1},
    "longer": {"max_completion_length": 24},
}


@pytest.mark.parametrize("name", MADE)
def test_the_completions_are_those_of_generation_without(
    base: Any, tmp_path: Path, name: str, cached: list[tuple[bool, int]]
) -> None:
    ids = []
    for fast in (False, "require"):
        torch.manual_seed(7)  # TRL 1.10 draws an adapter's weights before it sets its seed
        trainer = klamp_trainer(copy.deepcopy(base), tmp_path, fast_scoring=fast, seed=3, **MADE[name])
        trainer.model.train()
        cached.clear()
        made = [generated(trainer, seed=seed, rows=rows_of(3, 4)) for seed in range(4)]
        ids.append([each["completion_ids"] for each in made])
    assert cached == [(False, 3)] * 4, "three prompts, twelve completions"
    assert all(map(torch.equal, *ids))
    assert "generate" not in vars(trainer.accelerator.unwrap_model(trainer.model))


def test_prompts_that_are_all_different_are_left_to_transformers(
    base: Any, tmp_path: Path, cached: list[tuple[bool, int]]
) -> None:
    trainer = klamp_trainer(base, tmp_path, fast_scoring="require")
    cached.clear()
    generated(trainer, rows=rows_of(4, 1))
    assert cached == []


def test_a_model_without_a_cache_in_training_mode_is_left_to_transformers(
    base: Any, tmp_path: Path, cached: list[tuple[bool, int]]
) -> None:
    """As those of a sliding window in older transformers, which make one in evaluation only."""
    trainer = klamp_trainer(base, tmp_path, fast_scoring="require")
    traits = trainer._klamp.fast.traits
    traits.update({key: replace(each, sharing="values") for key, each in traits.items()})
    for training in (True, False):
        trainer.model.train(training)
        cached.clear()
        with torch.no_grad(), prompts_once(trainer):
            ids, mask = torch.ones(4, 3, dtype=torch.long), torch.ones(4, 3, dtype=torch.long)
            trainer.model.generate(ids, attention_mask=mask, generation_config=GenerationConfig(max_new_tokens=2))
        assert cached == ([] if training else [(False, 1)])


def test_a_cache_of_ones_own_is_said_once_and_refused_where_required(base: Any, tmp_path: Path) -> None:
    own = {"generation_kwargs": {"cache_implementation": "static"}}
    trainer = klamp_trainer(copy.deepcopy(base), tmp_path, fast_scoring=True, **own)
    with pytest.warns(match="ransformers' own first pass is used in spite of fast_scoring: the generation has a cache"):
        generated(trainer)
    assert len(trainer._klamp.fast.told) == 1
    generated(trainer)
    assert len(trainer._klamp.fast.told) == 1
    with pytest.raises(ConfigError, match="fast_scoring='require' cannot be honoured"):
        generated(klamp_trainer(base, tmp_path, fast_scoring="require", **own))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, ""),
        ({"generation_config": GenerationConfig(max_new_tokens=4)}, ""),
        ({"generation_config": GenerationConfig(num_beams=2)}, "beams"),
        ({"generation_config": GenerationConfig(use_cache=False)}, "no cache"),
        ({"generation_config": GenerationConfig(prompt_lookup_num_tokens=2)}, "prompt_lookup_num_tokens"),
        ({"pixel_values": torch.zeros(1)}, "more than tokens (pixel_values)"),
        ({"pixel_values": None, "disable_compile": True}, ""),
    ],
)
def test_why_not(options: dict[str, Any], reason: str) -> None:
    said = why_not_once(model(), options)
    assert reason in said and bool(said) == bool(reason)
