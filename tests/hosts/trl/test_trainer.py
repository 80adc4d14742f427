"""Whole runs beside the stock class: every micro-batch's loss, every weight at the end."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import trl
from tests.hosts.trl.hosts import (
    arguments,
    build,
    dataset,
    klamp_trainer,
    model,
    noisy,
    saved,
    stock_trainer,
    tokenizer,
    with_kl,
)

from klamp.config import KLConfig
from klamp.errors import ConfigError, KLWarning, ModelError
from klamp.hosts.trl.reference import frozen_copy
from klamp.trl import GRPOConfig, GRPOTrainer, attach, effective

LORA = {"peft_config": peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)}
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


def run(make: Any, folder: Path, path: str, base: Any, **options: Any) -> tuple[list[float], Any]:
    """The losses of every micro-batch, and the trainer."""
    extra = {"eval_dataset": dataset()} if "eval_strategy" in options else {}
    given = {**options.pop("trainer", {}), **extra}
    policy = copy.deepcopy(base)
    policy.config._name_or_path = path
    torch.manual_seed(7)  # TRL 1.10 draws an adapter's weights before it sets its seed
    trainer = make(policy, folder, trainer=given, **({"beta": 0.3, "max_steps": 3} | options))
    inner, losses = trainer.compute_loss, []

    def noting(*args: Any, **kwargs: Any) -> Any:
        losses.append(inner(*args, **kwargs))
        return losses[-1]

    trainer.compute_loss = noting
    torch.manual_seed(11)
    trainer.train()
    return [loss.item() for loss in losses], trainer


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
    logged = [{k: v for k, v in row.items() if k in other} for row, other in _rows(ours, stock)]
    assert [row.get("kl") for row in logged] == [row.get("kl") for row in stock.state.log_history]


def _rows(ours: Any, stock: Any) -> list[tuple[dict, dict]]:
    return list(zip(ours.state.log_history, stock.state.log_history, strict=True))


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
    """The clipping notes: a clip without a beta is TRL's beta of 0, which klamp says."""
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


class Subclass(trl.GRPOTrainer):
    """A user's trainer with something of its own."""

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        return super()._compute_loss(model, inputs) + 1.0


@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_attach_gives_a_built_trainer_the_same_kl(tmp_path: Path, beta: float) -> None:
    base = model()
    path = saved(base, tmp_path / "base")
    policy = copy.deepcopy(base)
    policy.config._name_or_path = path
    args = arguments(trl.GRPOConfig, tmp_path, beta=beta)
    attached = attach(build(Subclass, policy, args), KLConfig(beta=0.3, kl_clip_method="hard", kl_reference_length=4))
    options = {"kl_clip_method": "hard", "kl_reference_length": 4}
    expected, _ = run(klamp_trainer, tmp_path / "b", path, base, max_steps=2, **options)
    losses: list[float] = []
    inner = attached.compute_loss
    attached.compute_loss = lambda *a, **k: (losses.append(inner(*a, **k)), losses[-1])[1]
    torch.manual_seed(11)
    attached.train()
    assert [loss.item() - 1.0 for loss in losses] == pytest.approx(expected, abs=1e-6)
    assert isinstance(attached, Subclass)
    assert type(attached).__name__ == "KLSubclass"
    assert attached.args.beta == 0.3


def test_attach_refuses_what_it_cannot_upgrade(tmp_path: Path) -> None:
    trainer = klamp_trainer(model(), tmp_path, beta=0.1)
    with pytest.raises(ConfigError, match="not attached to yet"):
        attach(trainer, KLConfig())
    with pytest.raises(ConfigError, match="not attached to yet"):
        attach(object(), KLConfig())
    stock = build(trl.GRPOTrainer, model(), arguments(trl.GRPOConfig, tmp_path))
    stock.train()
    with pytest.raises(ConfigError, match="before train"):
        attach(stock, KLConfig())
    fresh = build(trl.GRPOTrainer, model(), arguments(trl.GRPOConfig, tmp_path))
    with pytest.raises(ConfigError, match="kl_early_stop"):
        attach(fresh, KLConfig(kl_early_stop=0.1))
    assert type(fresh) is trl.GRPOTrainer


def test_effective_reads_the_trainer_not_the_wish(tmp_path: Path) -> None:
    stock = build(trl.GRPOTrainer, model(), arguments(trl.GRPOConfig, tmp_path))
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
    assert term.controller == "step controller from 0.2, towards 0.05 nats per token"
    assert term.clip == "hard clip at 0.5 nats x 9 tokens"
    assert "beta       0.2" in str(found).splitlines()
    with_kl(trainer, KLConfig(beta=0.2, kl_clip_method="hard"))
    assert effective(trainer).terms[0].clip.endswith("length (the data's column, or measured at the start)")


def test_the_page_shows_what_effective_prints(tmp_path: Path) -> None:
    kl = {"kl_clip_method": "hard", "kl_clip_threshold": 0.1}
    lines = str(effective(klamp_trainer(model(), tmp_path, beta=0.02, loss_type="dapo", **kl))).splitlines()
    page = (Path(__file__).resolve().parents[3] / "docs" / "trl.md").read_text(encoding="utf-8")
    assert "\n".join(lines[1:]) in page, "but for the version installed and the class of the tests"


def test_the_reference_may_be_passed(tmp_path: Path) -> None:
    base = model()
    other = noisy(base)
    with pytest.raises(ModelError, match="the reference is the policy itself"):
        klamp_trainer(base, tmp_path, beta=0.1, trainer={"ref_model": base})
    path = saved(other, tmp_path / "other")
    passed = klamp_trainer(copy.deepcopy(base), tmp_path, beta=0.1, trainer={"ref_model": other})
    named = klamp_trainer(copy.deepcopy(base), tmp_path, beta=0.1, trainer={"ref_model": path})
    for trainer in (passed, named):
        for mine, theirs in zip(trainer.ref_model.parameters(), other.parameters(), strict=True):
            assert torch.equal(mine, theirs)
            assert not mine.requires_grad
    adapter = klamp_trainer(copy.deepcopy(base), tmp_path, beta=0.1, trainer={"ref_model": noisy(base), **LORA})
    assert adapter.ref_model is not None
    adapter.train()
    assert adapter.state.log_history[0]["kl"] > 0.01


def test_a_model_in_memory_is_copied(tmp_path: Path) -> None:
    base = model()
    base.config._name_or_path = str(tmp_path / "gone" / "away")
    trainer = klamp_trainer(base, tmp_path, beta=0.1)
    trainer.train()
    assert trainer.state.log_history[0]["kl/k3"] == 0.0
    assert trainer.state.log_history[1]["kl/k3"] > 1e-3
    assert effective(trainer).reference == "a frozen copy in memory"
    assert tokenizer() is not None


def test_a_moving_reference_follows_the_policy(tmp_path: Path) -> None:
    """`ema` is TRL's own callback on whichever reference there is: here a copy in memory, and one that attach makes."""
    base = model()
    options = {"reference": "ema", "reference_decay": 0.5, "max_steps": 1}
    built = klamp_trainer(copy.deepcopy(base), tmp_path, beta=0.1, **options)
    stock = build(trl.GRPOTrainer, copy.deepcopy(base), arguments(trl.GRPOConfig, tmp_path, max_steps=1))
    attached = attach(stock, KLConfig(beta=0.1, reference="ema", reference_decay=0.5))
    for trainer in (built, attached):
        trainer.train()
        start, moved, ref = (next(m.parameters()) for m in (base, trainer.model, trainer.ref_model))
        assert not torch.equal(start, moved)
        assert torch.allclose(ref, (start + moved) / 2, atol=1e-6)
        assert "moved by a share of 0.5" in effective(trainer).reference


@pytest.mark.parametrize(
    ("options", "extra", "text"),
    [
        ({"reference": "adapter_off"}, {}, "needs a model with a PEFT adapter"),
        ({"reference": "adapter_off"}, {**LORA, "ref_model": "given"}, "cannot be combined with ref_model"),
        ({"reference_dtype": "bfloat16"}, LORA, "the policy itself with its adapter off"),
        ({"reference": "ema"}, {**LORA, "ref_model": "given"}, "an adapter is not among them"),
        ({"kl_estimator": "exact", "sync_ref_model": True}, {}, "the reference moves"),
        ({"kl_exclude_tokens": ["<nope>"]}, {}, "a token that the tokenizer does not have"),
    ],
)
def test_what_the_built_trainer_cannot_do_is_refused(
    tmp_path: Path, options: dict[str, Any], extra: dict[str, Any], text: str
) -> None:
    given = extra | ({"ref_model": model(seed=3)} if "ref_model" in extra else {})
    with pytest.raises(ConfigError, match=text):
        klamp_trainer(model(), tmp_path, beta=0.1, trainer=given, **options)


def test_a_reference_without_a_beta_is_said_to_be_unused(tmp_path: Path) -> None:
    with pytest.warns(KLWarning, match="it is not used"):
        klamp_trainer(model(), tmp_path, trainer={"ref_model": model(seed=3)})


def test_a_copy_carries_nothing_that_a_trainer_bound_to_the_original() -> None:
    base = model()
    base.forward = lambda *_, **__: None  # as TRL's fused head does, by a closure over the original
    made = frozen_copy(base)
    assert "forward" not in made.__dict__
    assert made.forward.__func__ is type(base).forward
    assert all(torch.equal(a, b) for a, b in zip(made.parameters(), base.parameters(), strict=True))
