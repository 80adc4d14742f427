"""The exact KL inside TRL: which models allow it, which rows it is measured in, and what it is the sum of."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.hosts.trl.hosts import generated, plain_logits, with_kl

from klamp.config import KLConfig
from klamp.core.estimators import exact_kl
from klamp.errors import ConfigError
from klamp.hosts.trl.reference import exact_rows, why_not_exact


def test_the_exact_kl_of_a_sample_is_the_sum_over_the_vocabulary(trainer: Any, base: Any) -> None:
    with_kl(trainer, KLConfig(beta=0.4), loss_type="grpo")
    inputs = generated(trainer)
    assert [kept is None for kept in inputs["klamp_ref_hidden"]] == [False, True, False, True]  # one of each group
    trainer._metrics["train"].clear()
    trainer.compute_loss(trainer.model, inputs)
    with torch.no_grad():
        exact = exact_kl(plain_logits(trainer.model, inputs), plain_logits(base, inputs))[::2]
    mask = inputs["completion_mask"][::2]
    expected = (exact * mask).sum() / mask.sum()
    assert trainer._metrics["train"]["kl/exact"] == [pytest.approx(expected.item(), rel=1e-4)]


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("_never_exact", "for its own reasons", "for its own reasons"),
        ("is_fsdp_enabled", True, "spread over processes"),
    ],
)
def test_what_stops_it(trainer: Any, monkeypatch: pytest.MonkeyPatch, name: str, value: object, reason: str) -> None:
    exact = KLConfig(beta=0.4, kl_estimator="exact")
    assert (exact_rows(trainer, None), exact_rows(trainer, KLConfig(beta=0.4)), exact_rows(trainer, exact)) == (0, 1, 2)
    monkeypatch.setattr(trainer, name, value)
    assert reason in why_not_exact(trainer) and exact_rows(trainer, KLConfig(beta=0.4)) == 0
    with pytest.raises(ConfigError, match="kl_estimator='exact' cannot be honoured") as caught:
        exact_rows(trainer, exact)
    assert reason in caught.value.why


def test_of_deepspeeds_stages_the_third_keeps_a_trainer_from_it(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "is_deepspeed_enabled", True)
    for stage, reason in ((2, ""), (3, "the output head is spread over processes")):
        plugin = SimpleNamespace(zero_stage=stage)
        monkeypatch.setattr(type(trainer.accelerator.state), "deepspeed_plugin", plugin, raising=False)
        assert why_not_exact(trainer) == reason


def test_scaled_logits_and_no_head_are_told(trainer: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(trainer.model.config, "logits_scaling", 8.0, raising=False)
    assert why_not_exact(trainer) == "the model multiplies its logits by 0.125"
    monkeypatch.undo()
    monkeypatch.setattr(type(trainer.model), "get_output_embeddings", lambda self: None)
    assert "no backbone and plain output head" in why_not_exact(trainer)
    monkeypatch.undo()
    monkeypatch.setattr(trainer.args, "sync_ref_model", True)
    assert "the reference moves" in why_not_exact(trainer)
