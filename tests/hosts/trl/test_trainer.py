"""Whole runs beside the stock class; what a trainer's KL will really do; the exact KL on request."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trl
from tests.hosts.trl.hosts import LORA, arguments, build, klamp_trainer, model, saved, stock_trainer
from tests.hosts.trl.losses import generated, loss_of, plain_logits, run, trained, with_kl

from klamp.config import KLConfig
from klamp.core.estimators import exact_kl
from klamp.errors import ConfigError, KLWarning
from klamp.hosts.common.control import NEVER_ZERO
from klamp.hosts.trl.reference import exact_rows, why_not_exact
from klamp.trl import GRPOTrainer, attach, effective

TRUNCATED = {"mask_truncated_completions": True, "max_completion_length": 24}
RUNS: dict[str, dict[str, Any]] = {
    "accumulation": {"gradient_accumulation_steps": 2},
    "two iterations": {"num_iterations": 2, "gradient_accumulation_steps": 2, "loss_type": "dapo"},
    "four steps per generation": {"steps_per_generation": 4, "gradient_accumulation_steps": 2, "loss_type": "luspo"},
    "moving reference": {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5},
    "checkpointing, truncation mask": {"gradient_checkpointing": True, "loss_type": "bnpo", **TRUNCATED},
    "adapter": {"trainer": LORA, "num_iterations": 2},
    "llama, no KL, evaluation": {"beta": 0.0, "kind": "llama", "eval_strategy": "steps", "eval_steps": 2},
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
    for row, other in zip(ours.state.log_history, stock.state.log_history, strict=True):
        assert [row.get(key) for key in ("kl", "eval_loss")] == [other.get(key) for key in ("kl", "eval_loss")]


@pytest.mark.filterwarnings("ignore::klamp.errors.KLWarning")
@pytest.mark.parametrize("name", ["moving reference", "adapter", "two iterations"])
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
        trainer = trained(model(), tmp_path, kl_clip_method="hard", kl_clip_threshold=0.5)
    assert trainer.ref_model is None
    options = {"temperature": 1.0, "learning_rate": 5e-6, "beta": 0.001, "use_per_token_kl_threshold": True}
    trainer = trained(model(), tmp_path, kl_clip_method="soft", kl_clip_threshold=0.5, **options)
    row = trainer.state.log_history[0]
    assert {"kl/budget", "kl/k3", "beta"} <= row.keys()
    assert row["kl/budget"] == pytest.approx(0.5 * row["kl/reference_length"])


def test_a_stock_configuration_or_none_is_taken(tmp_path: Path) -> None:
    trainer = build(GRPOTrainer, model(), arguments(trl.GRPOConfig, tmp_path, beta=0.2))
    assert [term.term for term in effective(trainer).terms] == ["TRL's own"]
    assert trainer.ref_model is not None


def test_effective_reads_the_trainer_not_the_wish(tmp_path: Path) -> None:
    stock = stock_trainer(model(), tmp_path)
    assert effective(stock).terms == () and effective(stock).reference == "none: beta is 0"
    trainer = klamp_trainer(model(), tmp_path, beta=0.1, importance_sampling_level="sequence", loss_type="bnpo")
    found = effective(trainer)
    assert (found.terms[0].value, found.reference) == ("k3 times the policy ratio", "a frozen copy in memory")
    assert found.normalizer == "mean over the tokens of each micro-batch (TRL's own, loss_type='bnpo')"
    assert any("broadcasts" in note for note in found.notes)
    assert any("micro-batch" in note for note in found.notes)
    with_kl(trainer, KLConfig(beta=0.2, target_kl=0.05, kl_clip_method="hard", kl_reference_length=9))
    found = effective(trainer)
    (term,) = found.terms
    assert (term.term, term.beta, term.value, term.placement) == ("klamp's", 0.2, "k3", "in the loss")
    assert term.gradient == "reverse per token: KL(policy||ref)"
    assert term.controller == "hold controller from 0.2, towards 0.05 nats per token"
    assert term.clip == "hard clip at 0.5 nats x 9 tokens"
    assert "beta       0.2" in str(found).splitlines()
    with_kl(trainer, KLConfig(beta=0.2, kl_clip_method="hard"))
    assert effective(trainer).terms[0].clip.endswith("length (the data's column, or measured at the start)")


def test_what_is_no_trainer_or_no_configuration_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^effective takes a trl\.GRPOTrainer") as caught:
        effective(trl.GRPOTrainer)
    assert caught.value.got and caught.value.why and caught.value.fix
    with pytest.raises(ConfigError, match=r"kl must be a KLConfig[\s\S]*KLConfig\(\*\*kl\)"):
        attach(stock_trainer(model(), tmp_path), {"beta": 0.1})  # pyright: ignore[reportArgumentType]


def test_the_page_shows_what_effective_prints(tmp_path: Path) -> None:
    given = {"loss_type": "dapo", "kl_clip_method": "hard", "kl_clip_threshold": 0.1, "num_generations": 8}
    trainer = klamp_trainer(model(), tmp_path, beta=0.02, per_device_train_batch_size=8, **given)
    lines = str(effective(trainer)).splitlines()
    page = (Path(__file__).resolve().parents[3] / "docs" / "trl.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"```text\n(.*?)```", page, re.S)
    assert [line for line in shown.splitlines() if line not in ("...", *lines)] == []


def test_the_price_of_beta_is_the_one_that_is_logged(tmp_path: Path) -> None:
    trainer = klamp_trainer(model(), tmp_path, beta=0.1, scale_rewards="none", kl_monitor=True)
    (term,) = effective(trainer).terms
    assert term.price == "0.2 reward per nat of a whole completion = beta 0.1 x 2 (the mean of 2 holds the own reward)"
    trainer.train()
    assert {row["beta/price"] for row in trainer.state.log_history if "beta/price" in row} == {0.2}


@pytest.mark.parametrize(
    ("name", "value", "price"),
    [
        ("scale_rewards", "batch", "0.2 x the standard deviation of the batch's rewards per nat"),
        ("multi_objective_aggregation", "normalize_then_sum", "unknown: each reward function is divided"),
    ],
)
def test_the_price_of_trls_own_beta_or_why_it_is_unknown(tmp_path: Path, name: str, value: str, price: str) -> None:
    trainer = stock_trainer(model(), tmp_path)
    trainer.beta = 0.1
    for owner in (trainer, trainer.args):
        setattr(owner, name, value)
    (term,) = effective(trainer).terms
    assert term.price.startswith(price)


def test_what_may_surprise_is_noted(tmp_path: Path) -> None:
    moving = klamp_trainer(model(), tmp_path, beta=0.1, reference="ema")
    assert any("checkpoints of TRL do not hold it" in note for note in effective(moving).notes)
    monitored = klamp_trainer(model(), tmp_path, kl_monitor=True)
    assert monitored.beta == NEVER_ZERO
    assert any("smallest number" in note for note in effective(monitored).notes)
    assert effective(klamp_trainer(model(), tmp_path, beta=0.1, kl_gradient="reverse")).notes == ()


def test_the_exact_kl_of_a_sample_is_the_sum_over_the_vocabulary(trainer: Any, base: Any) -> None:
    with_kl(trainer, KLConfig(beta=0.4), loss_type="grpo")
    inputs = generated(trainer)
    assert [kept is None for kept in inputs["klamp_ref_hidden"]] == [False, True, False, True]  # one of each group
    trainer._metrics["train"].clear()
    loss_of(trainer, inputs)
    with torch.no_grad():
        exact = exact_kl(plain_logits(trainer.model, inputs), plain_logits(base, inputs))[::2]
    mask = inputs["completion_mask"][::2]
    expected = (exact * mask).sum() / mask.sum()
    assert trainer._metrics["train"]["kl/exact"] == [pytest.approx(expected.item(), rel=1e-4)]


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [("_never_exact", "own reasons", "own reasons"), ("is_fsdp_enabled", True, "spread over processes")],
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
    assert "backbone and plain output head cannot" in why_not_exact(trainer)
    monkeypatch.undo()
    monkeypatch.setattr(trainer.args, "sync_ref_model", True)
    assert "the reference moves" in why_not_exact(trainer)
