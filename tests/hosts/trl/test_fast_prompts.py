"""The pass of a prompt in generation is run once for its completions."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.hosts.trl.hosts import generated, klamp_trainer, rows_of
from tests.hosts.trl.test_fast_scoring import LORA, cached

__all__ = ["cached"]

MADE: dict[str, dict[str, Any]] = {
    "plain": {},
    "adapter": {"trainer": LORA},
    "checkpointing": {"gradient_checkpointing": True},
    "top-p, penalty": {"top_p": 0.9, "repetition_penalty": 1.1},
    "longer": {"max_completion_length": 24},
}


@pytest.mark.parametrize("name", MADE)
def test_the_completions_are_the_same(base: Any, tmp_path: Path, name: str, cached: list[tuple[bool, int]]) -> None:
    ids = []
    for fast in (False, True):
        torch.manual_seed(7)  # TRL 1.10 draws an adapter's weights before it sets its seed
        trainer = klamp_trainer(copy.deepcopy(base), tmp_path, fast_scoring=fast, seed=3, **MADE[name])
        trainer.model.train()
        cached.clear()
        made = [generated(trainer, seed=seed, rows=rows_of(3, 4)) for seed in range(4)]
        ids.append([each["completion_ids"] for each in made])
    assert cached == [(False, 3)] * 4, "three prompts, twelve completions"
    assert all(map(torch.equal, *ids))
    assert "generate" not in vars(trainer.accelerator.unwrap_model(trainer.model))


def test_a_cache_of_ones_own_is_said_once(base: Any, tmp_path: Path) -> None:
    own = {"generation_kwargs": {"cache_implementation": "static"}}
    trainer = klamp_trainer(copy.deepcopy(base), tmp_path, fast_scoring=True, **own)
    with pytest.warns(match="ransformers' own first pass is used in spite of fast_scoring: the generation has a cache"):
        generated(trainer)
    assert len(trainer._klamp.fast.reasons) == 1
    generated(trainer)
    assert len(trainer._klamp.fast.reasons) == 1
