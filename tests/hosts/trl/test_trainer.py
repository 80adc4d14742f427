"""Whole runs beside the stock class: every micro-batch's loss, every weight at the end."""

from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from tests.hosts.trl.hosts import LORA, arguments, build, klamp_trainer, model, run, saved, stock_trainer

from klamp.errors import KLWarning
from klamp.trl import GRPOConfig, GRPOTrainer, effective

RUNS: dict[str, dict[str, Any]] = {
    "accumulation": {"gradient_accumulation_steps": 2},
    "two iterations": {"num_iterations": 2, "gradient_accumulation_steps": 2, "loss_type": "dapo"},
    "four steps per generation": {"steps_per_generation": 4, "gradient_accumulation_steps": 2, "loss_type": "luspo"},
    "moving reference": {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5},
    "checkpointing": {"gradient_checkpointing": True},
    "truncation mask": {"mask_truncated_completions": True, "loss_type": "bnpo", "max_completion_length": 24},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 10},
    "adapter": {"trainer": LORA, "num_iterations": 2},
    "llama, no KL": {"beta": 0.0, "kind": "llama"},
}


@pytest.mark.parametrize("name", RUNS)
def test_untouched_a_run_is_that_of_the_stock_class(name: str, tmp_path: Path) -> None:
    options = dict(RUNS[name])
    base = model(options.pop("kind", "qwen2"))
    path = saved(base, tmp_path / "base")
    expected, stock = run(stock_trainer, tmp_path / "a", path, base, **options)
    found, ours = run(klamp_trainer, tmp_path / "b", path, base, **options)
    assert found == expected
    assert len(set(expected)) > 1 or stock.beta == 0  # on-policy and without a KL the loss is 0 at every step
    assert any(not torch.equal(a, b) for a, b in zip(ours.model.parameters(), base.parameters(), strict=False))
    for (title, a), b in zip(stock.model.named_parameters(), ours.model.parameters(), strict=True):
        assert torch.equal(a, b), title
    rows = zip(ours.state.log_history, stock.state.log_history, strict=True)
    logged = [{k: v for k, v in row.items() if k in other} for row, other in rows]
    assert [row.get("kl") for row in logged] == [row.get("kl") for row in stock.state.log_history]


@pytest.mark.filterwarnings("ignore::klamp.errors.KLWarning")
@pytest.mark.parametrize("name", ["accumulation", "moving reference", "adapter", "two iterations"])
def test_k3_with_its_own_gradient_trains_like_trl_without_bias_correction(name: str, tmp_path: Path) -> None:
    options = RUNS[name] | {"use_bias_correction_kl": False, "optim": "sgd"}
    base = model()
    path = saved(base, tmp_path / "base")
    expected, stock = run(stock_trainer, tmp_path / "a", path, base, **options)
    found, ours = run(klamp_trainer, tmp_path / "b", path, base, kl_gradient="own", **options)
    assert found == pytest.approx(expected, abs=2e-6)
    for a, b in zip(stock.model.parameters(), ours.model.parameters(), strict=True):
        assert (a - b).abs().max() < 1e-6


def test_the_usage_of_the_clipping_notes_runs_as_printed(tmp_path: Path) -> None:
    with pytest.warns(KLWarning, match="beta is 0"):
        training_args = arguments(GRPOConfig, tmp_path, kl_clip_method="hard", kl_clip_threshold=0.5)
    trainer = build(GRPOTrainer, model(), training_args)
    trainer.train()
    assert trainer.ref_model is None
    args = arguments(
        GRPOConfig,
        tmp_path,
        temperature=1.0,
        learning_rate=5e-6,
        beta=0.001,
        kl_clip_method="soft",
        kl_clip_threshold=0.5,
        use_per_token_kl_threshold=True,
    )
    trainer = build(GRPOTrainer, model(), args)
    trainer.train()
    assert {"kl/budget", "kl/k3", "beta"} <= trainer.state.log_history[0].keys()
    assert trainer.state.log_history[0]["kl/budget"] == pytest.approx(
        0.5 * trainer.state.log_history[0]["kl/reference_length"]
    )


def test_a_stock_configuration_or_none_is_taken(tmp_path: Path) -> None:
    trainer = build(GRPOTrainer, model(), arguments(trl.GRPOConfig, tmp_path, beta=0.2))
    assert [term.term for term in effective(trainer).terms] == ["TRL's own"]
    assert trainer.ref_model is not None
