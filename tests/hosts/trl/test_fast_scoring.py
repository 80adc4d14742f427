"""Fast scoring is TRL's to 1e-5 in every loss and whole runs; a prompt is generated from once."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tests.hosts.trl.hosts import generated, klamp_trainer, model, noisy, rows_of, run, saved, stock_trainer
from tests.hosts.trl.test_matrix import BETA, INPUTS, LOSS_TYPES, OPTIONS, SOME, _recorded, loss_and_gradient

from klamp.hosts.trl import fast_scoring
from klamp.scoring import completions
from klamp.scoring.model_parts import OpenedModel
from klamp.trl import effective

SMALL = 1e-5
LATER = 1e-4
"""Of what a run logs: each update carries the rounding of those before it on."""
HALF = torch.tensor([1.0, 0.0, 0.0, -1.0])
"""Advantages with which two of four completions have no gradient where there is no KL."""
OWN = "the entropy bonus needs the entropy's gradient"
"""The only option whose loss is left to TRL's scoring."""


@pytest.fixture(autouse=True, scope="module")
def cheap_passes() -> Iterator[None]:
    """Prompts of a few tokens are shared too: a pass costs nothing."""
    kept, completions.PASS_TOKENS = completions.PASS_TOKENS, 0
    yield
    completions.PASS_TOKENS = kept


@pytest.fixture
def cached(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, int]]:
    """Every pass over prompts alone: whether it had a gradient, and how many prompts it had."""
    inner, seen = OpenedModel.run, []

    def noting(self: OpenedModel, ids: torch.Tensor, *args: Any, **options: Any) -> Any:
        if options.get("use_cache"):
            seen.append((torch.is_grad_enabled(), len(ids)))
        return inner(self, ids, *args, **options)

    monkeypatch.setattr(OpenedModel, "run", noting)
    return seen


@pytest.fixture(scope="module")
def folder(base: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("fast")
    saved(base, made / "base")
    return made


@pytest.fixture(scope="module")
def pair(base: Any, folder: Path) -> tuple[Any, Any, dict[str, dict[str, Any]]]:
    """A stock trainer, a fast one, and recorded micro-batches."""
    policy = noisy(base)
    policy.config._name_or_path = str(folder / "base")
    stock = stock_trainer(copy.deepcopy(policy), folder, beta=BETA)
    fast = klamp_trainer(copy.deepcopy(policy), folder, beta=BETA, fast_scoring=True)
    for trainer in (stock, fast):
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = 1
    inputs = _recorded(stock)
    return stock, fast, inputs | {"half silent": inputs["later update"] | {"advantages": HALF}}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("beta", [BETA, 0.0])
def test_every_loss_and_its_gradient_is_that_of_trl(pair: Any, loss_type: str, option: str, beta: float) -> None:
    stock, fast, inputs = pair
    fast._klamp.fast.reasons.clear()
    options = {"loss_type": loss_type, "beta": beta} | OPTIONS[option]
    for name in ("half silent", *(INPUTS if option == "plain" else SOME)):
        for trainer in (stock, fast):
            for metrics in trainer._metrics["train"].values():
                metrics.clear()
        expected, gradient = loss_and_gradient(stock, inputs[name], options)
        found, found_gradient = loss_and_gradient(fast, inputs[name], options)
        assert found == pytest.approx(expected, abs=SMALL, rel=SMALL), name
        assert (found_gradient - gradient).abs().max() <= SMALL * max(1.0, float(gradient.abs().max())), name
        for metric, values in stock._metrics["train"].items():
            assert fast._metrics["train"][metric] == pytest.approx(values, abs=SMALL, rel=SMALL, nan_ok=True), metric
    assert fast._klamp.fast.reasons == ({OWN} if option == "entropy bonus" else set()), "the scoring was klamp's"


LORA = {"peft_config": LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)}
RUNS: dict[str, dict[str, Any]] = {
    "four micro-batches, two epochs": {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "steps_per_generation": 8,
        "num_iterations": 2,
        "num_generations": 8,
        "epsilon": 0.01,
    },
    "misaligned": {"steps_per_generation": 4, "gradient_accumulation_steps": 2, "loss_type": "cispo"},
    "no KL": {"beta": 0.0, "loss_type": "grpo", "importance_sampling_level": "sequence", "num_iterations": 2},
    "adapter, checkpointing": {"trainer": LORA, "gradient_checkpointing": True},
    "adapter that was trained before": {"before": LORA["peft_config"], "num_iterations": 2},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4},
    "truncated": {"mask_truncated_completions": True, "max_completion_length": 24, "loss_type": "luspo"},
    "klamp's k3": {"kl_estimator": "k3", "num_iterations": 2},
    "klamp's exact KL": {"kl_estimator": "exact"},
    "klamp's clip": {"kl_clip_method": "hard", "kl_clip_threshold": 0.01, "num_iterations": 2},
}
PLAIN = {"optim": "sgd", "learning_rate": 0.1}
"""AdamW would make steps of full size out of rounding, where a gradient is 0."""


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_that_of_one_without(base: Any, folder: Path, name: str, cached: list[tuple[bool, int]]) -> None:
    options, path = PLAIN | RUNS[name], str(folder / "base")
    if "before" in options and not hasattr(options["before"], "target_parameters"):
        pytest.skip("TRL itself asks an adapter that was trained before for what this PEFT does not have")
    if "before" in options:
        base = get_peft_model(copy.deepcopy(base), options.pop("before"))
    expected, without = run(klamp_trainer, folder / "out", path, base, **options)
    assert not cached
    found, fast = run(klamp_trainer, folder / "out", path, base, fast_scoring=True, **options)
    assert fast._klamp.fast.traits and not fast._klamp.fast.reasons
    assert (fast.ref_model is None) == ("adapter" in name or options.get("beta") == 0), "no second model for an adapter"
    assert {grad for grad, _ in cached} >= ({False} if options.get("gradient_checkpointing") else {True})
    assert found == pytest.approx(expected, abs=SMALL)
    for one, two in zip(without.model.parameters(), fast.model.parameters(), strict=True):
        assert torch.allclose(one, two, atol=SMALL)
    for row, other in zip(without.state.log_history, fast.state.log_history, strict=True):
        others = {key for key in row if "time" in key or "per_second" in key}
        kept = {key: value for key, value in row.items() if key not in others and value is not None}
        assert row.keys() == other.keys()
        assert {key: other[key] for key in kept} == pytest.approx(kept, abs=SMALL, rel=LATER, nan_ok=True)


def test_a_group_runs_its_prompt_once(base: Any, folder: Path, cached: list[tuple[bool, int]]) -> None:
    trainer = klamp_trainer(base, folder, beta=0.3, fast_scoring=True, trainer={"ref_model": noisy(base)})
    trainer.model.train()
    cached.clear()
    inputs = generated(trainer)
    assert len(inputs["prompt_ids"]) == 4
    assert cached == [(False, 2)] * 2, "generation, then the reference: two prompts, four completions"
    trainer.current_gradient_accumulation_steps = 1
    trainer.compute_loss(trainer.model, inputs)
    assert cached[2:] == [(True, 2)]


def test_only_completions_with_a_gradient_are_run_with_one(base: Any, folder: Path) -> None:
    trainer = klamp_trainer(base, folder, beta=0.0, fast_scoring=True)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    inputs = generated(trainer) | {"advantages": torch.tensor([1.0, 0.0, 0.0, -1.0])}
    assert fast_scoring.learning_rows(trainer, inputs, 0.0).tolist() == [True, False, False, True]
    trainer.beta = 0.1
    assert fast_scoring.learning_rows(trainer, inputs, 0.0).tolist() == [True] * 4, "TRL's KL pulls at all of them"
    trainer.beta = 0.0
    inputs["advantages"] *= 0
    trainer.compute_loss(trainer.model, inputs).backward()
    assert all(p.grad is not None and not p.grad.any() for p in trainer.model.parameters())
    assert trainer._klamp.calls.learns is None


def test_a_model_whose_scores_differ_is_left_to_trl(base: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_scoring, "_same_as_host", lambda *_: False)
    with pytest.warns(match="TRL's own scoring is used in spite of fast_scoring: TRL's scores of the model are others"):
        trainer = klamp_trainer(base, folder, beta=0.3, fast_scoring=True)
    assert "TRL's own scoring is used: TRL's scores" in str(effective(trainer))


def test_the_trial_tells_another_temperature(base: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = klamp_trainer(base, folder, fast_scoring=True)
    (traits,) = trainer._klamp.fast.traits.values()
    call = fast_scoring._trial(trainer.model)
    assert fast_scoring._same_as_host(trainer, trainer.model, call, traits)
    warmer, scores = copy.copy(trainer), fast_scoring._scores
    warmer.temperature = 1.01
    monkeypatch.setattr(fast_scoring, "_scores", lambda _trainer, *rest: scores(warmer, *rest))
    assert not fast_scoring._same_as_host(trainer, trainer.model, call, traits)


__all__ = ["cached"]

MADE: dict[str, dict[str, Any]] = {
    "plain": {},
    "adapter": {"trainer": copy.deepcopy(LORA)},
    "checkpointing": {"gradient_checkpointing": True},
    "top-p, penalty": {"top_p": 0.9, "repetition_penalty": 1.1},
    "longer": {"max_completion_length": 24},
}


@pytest.mark.parametrize("name", MADE)
def test_the_completions_are_the_same(tmp_path: Path, name: str, cached: list[tuple[bool, int]]) -> None:
    ids = []
    for fast in (False, True):
        torch.manual_seed(7)  # TRL 1.10 draws an adapter's weights before it sets its seed
        trainer = klamp_trainer(model(), tmp_path, fast_scoring=fast, seed=3, **MADE[name])
        trainer.model.train()
        cached.clear()
        made = [generated(trainer, seed=seed, rows=rows_of(3, 4)) for seed in range(4)]
        ids.append([each["completion_ids"] for each in made])
    assert cached == [(False, 3)] * 4, f"three prompts, twelve completions: {trainer._klamp.fast.reasons}"
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
