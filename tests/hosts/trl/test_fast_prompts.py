"""What else is run once for a prompt's completions: its pass in generation, and over the micro-batches of a step."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.hosts.trl.hosts import generated, klamp_trainer, rows_of, run, saved
from tests.hosts.trl.test_fast_scoring import LORA, PLAIN, SMALL, cached, of_steps
from tests.hosts.trl.test_matrix import LOSS_TYPES

from klamp.errors import ConfigError
from klamp.hosts.trl.fast_scoring import OWN_MEAN, cut, keeps_sums

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


OF_MICRO_BATCHES = ("kl", "entropy", "is_ratio")
"""What TRL logs as the mean over its micro-batches of their own means."""
ACCUMULATED = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "num_generations": 4}


def batches(prompts: list[int], size: int) -> list[dict[str, Any]]:
    """Micro-batches of rows with these prompts, and all kinds of fields."""
    rows = [
        {
            "prompt_ids": torch.tensor(part)[:, None],
            "prompt_mask": torch.ones(len(part), 1, dtype=torch.long),
            "number": torch.arange(first, first + len(part)),
            "name": [f"row {first + row}" for row in range(len(part))],
            "total": torch.tensor(7),
            "nothing": None,
        }
        for first in range(0, len(prompts), size)
        for part in [prompts[first : first + size]]
    ]
    return rows


def test_rows_stay_in_their_optimizer_step_and_fields_with_their_row() -> None:
    found = cut(batches([3, 1, 1, 3, 2, 1, 1, 2], 2), accumulated=2)
    assert [batch["prompt_ids"][:, 0].tolist() for batch in found] == [[1, 1], [3, 3], [1, 1], [2, 2]]
    assert [batch["number"].tolist() for batch in found] == [[1, 2], [0, 3], [5, 6], [4, 7]]
    for batch in found:
        assert batch["name"] == [f"row {number}" for number in batch["number"]]
        assert batch["total"] == 7 and batch["nothing"] is None


@pytest.mark.parametrize("odd", [(1, 2), torch.zeros(7, 3), ["a"]])
def test_a_field_that_is_no_row_each_leaves_them_as_they_were(odd: Any) -> None:
    given = [batch | {"odd": odd} for batch in batches([1, 2, 1, 2], 2)]
    assert cut(given, accumulated=2) is given


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_the_gradient_of_a_step_is_that_without(base: Any, tmp_path: Path, loss_type: str) -> None:
    path = saved(base, tmp_path / "base")
    options = PLAIN | ACCUMULATED | {"loss_type": loss_type, "max_steps": 2}
    seen, logged = [], []
    for fast in (False, "require"):
        losses, trainer = run(klamp_trainer, tmp_path / "out", path, base, fast_scoring=fast, **options)
        seen.append((of_steps(losses, 4), [p.detach().clone() for p in trainer.model.parameters()]))
        logged.append([row for row in trainer.state.log_history if "loss" in row])
        if fast:
            together = all(len(batch["prompt_ids"].unique(dim=0)) == 1 for batch in trainer._buffered_inputs)
            assert together or loss_type in OWN_MEAN
    (expected, weights), (found, moved) = seen
    assert found == pytest.approx(expected, abs=SMALL)
    for row, other in zip(*logged, strict=True):
        own = {name: value for name, value in row.items() if name not in OF_MICRO_BATCHES and "time" not in name}
        assert {name: other[name] for name in own} == pytest.approx(own, abs=SMALL, rel=SMALL, nan_ok=True)
    assert all(torch.allclose(one, two, atol=SMALL) for one, two in zip(weights, moved, strict=True))


def test_steps_that_are_made_of_two_generations_are_left_alone(base: Any, tmp_path: Path) -> None:
    options = ACCUMULATED | {"gradient_accumulation_steps": 2, "steps_per_generation": 3, "num_generations": 2}
    assert not keeps_sums(klamp_trainer(base, tmp_path, fast_scoring="require", **options))
