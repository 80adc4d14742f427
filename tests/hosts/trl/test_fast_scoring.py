"""Fast scoring is TRL's to 1e-5 in every loss and whole runs; a prompt is generated from once."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tests.hosts.trl.hosts import klamp_trainer, model, noisy, saved
from tests.hosts.trl.losses import generated, loss_of, rows_of, run

from klamp.hosts.trl import fast_scoring
from klamp.scoring.model_parts import OpenedModel
from klamp.trl import effective

pytestmark = pytest.mark.usefixtures("cheap_passes")

SMALL = 1e-5
LATER = 1e-4
"""Of what a run logs: each update carries the rounding of those before it on."""


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


LORA = {"peft_config": LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)}
CUT = {"steps_per_generation": 4, "gradient_accumulation_steps": 2}
TRUNCATED = {"mask_truncated_completions": True, "max_completion_length": 24}
EVALUATION = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4, "max_steps": 2}
EPOCHS = {"per_device_train_batch_size": 2, "num_iterations": 2, "num_generations": 8, "epsilon": 0.01}
RUNS: dict[str, dict[str, Any]] = {
    "two micro-batches, two epochs": CUT | EPOCHS,
    "no KL": {"beta": 0.0, "loss_type": "grpo", "importance_sampling_level": "sequence", "num_iterations": 2},
    "adapter, checkpointing": {"trainer": LORA, "gradient_checkpointing": True},
    "adapter that was trained before": {"before": LORA["peft_config"], "num_iterations": 2},
    "truncated, misaligned": CUT | TRUNCATED | {"loss_type": "luspo"},
    "klamp's k3": {"kl_estimator": "k3", "num_iterations": 2},
    "klamp's exact KL, evaluation": EVALUATION | {"kl_estimator": "exact"},
    "klamp's clip": {"kl_clip_method": "hard", "kl_clip_threshold": 0.01, "num_iterations": 2},
}
PLAIN = {"optim": "sgd", "learning_rate": 0.1}
"""AdamW would make steps of full size out of rounding, where a gradient is 0."""


SLOW = ("no KL", "adapter that was trained before", "klamp's k3", "klamp's clip")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in RUNS])
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
    cached.clear()
    inputs = generated(trainer)
    assert len(inputs["prompt_ids"]) == 4
    assert cached == [(False, 2)] * 2, "generation, then the reference: two prompts, four completions"
    loss_of(trainer, inputs)
    assert cached[2:] == [(True, 2)]


def test_only_completions_with_a_gradient_are_run_with_one(base: Any, folder: Path) -> None:
    trainer = klamp_trainer(base, folder, beta=0.0, fast_scoring=True)
    inputs = generated(trainer) | {"advantages": torch.tensor([1.0, 0.0, 0.0, -1.0])}
    assert fast_scoring.learning_rows(trainer, inputs, 0.0).tolist() == [True, False, False, True]
    trainer.beta = 0.1
    assert fast_scoring.learning_rows(trainer, inputs, 0.0).tolist() == [True] * 4, "TRL's KL pulls at all of them"
    trainer.beta = 0.0
    inputs["advantages"] *= 0
    loss_of(trainer, inputs).backward()
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


MADE: dict[str, dict[str, Any]] = {
    "plain": {},
    "adapter": {"trainer": copy.deepcopy(LORA)},
    "checkpointing, longer": {"gradient_checkpointing": True, "max_completion_length": 24},
    "top-p, penalty": {"top_p": 0.9, "repetition_penalty": 1.1},
}


@pytest.mark.parametrize("name", MADE)
def test_the_completions_are_the_same(tmp_path: Path, name: str, cached: list[tuple[bool, int]]) -> None:
    ids = []
    for fast in (False, True):
        torch.manual_seed(7)  # TRL 1.10 draws an adapter's weights before it sets its seed
        trainer = klamp_trainer(model(), tmp_path, fast_scoring=fast, seed=3, **MADE[name])
        cached.clear()
        made = [generated(trainer, seed=seed, rows=rows_of(3, 4)) for seed in range(2)]
        ids.append([each["completion_ids"] for each in made])
    assert cached == [(False, 3)] * 2, f"three prompts, twelve completions: {trainer._klamp.fast.reasons}"
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
