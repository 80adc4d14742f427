"""A teacher in TRL: the same completions through TRL's loss and through klamp's own, with and without a reference."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from tests.hosts.trl.hosts import (
    LENGTH,
    PROMPTS,
    arguments,
    build,
    dataset,
    generated,
    gradient_of,
    klamp_trainer,
    model,
    noisy,
    plain_logits,
    plain_logprobs,
    rows_of,
    saved,
    stock_trainer,
)

from klamp.config import KLConfig
from klamp.config.teacher import TeacherConfig
from klamp.core.objective import Objective, Weighted, grpo_loss
from klamp.core.types import Batch
from klamp.errors import ConfigError, DataError, ModelError
from klamp.trl import GRPOConfig, effective

COEF = 0.6
PLACES: dict[str, dict[str, Any]] = {
    "k3 in the loss": {"teacher_estimator": "k3"},
    "k1 in the loss, over the sequence": {"teacher_estimator": "k1", "teacher_horizon": "sequence"},
    "k3, bounded": {"teacher_estimator": "k3", "teacher_max_log_ratio": 0.2},
    "k1 in the advantage": {"teacher_estimator": "k1", "teacher_placement": "advantage"},
    "in the advantage, to go": {
        "teacher_estimator": "k1", "teacher_placement": "advantage", "teacher_horizon": "sequence",
    },
}  # fmt: skip
REDUCTIONS = {"grpo": "sequence_mean", "dr_grpo": "fixed_length", "dapo": "token_mean"}


@pytest.fixture(scope="module")
def teacher() -> Any:
    return noisy(model(), size=0.2, seed=9)


def made(base: Any, teacher: Any, folder: Path, **options: Any) -> Any:
    """A trainer whose policy has moved from its start, with a teacher."""
    given = {"teacher_coef": COEF, "scale_rewards": "none", "max_steps": 4, **options}
    ref = {"ref_model": copy.deepcopy(base)} if given.get("beta") else {}
    trainer = klamp_trainer(noisy(base), folder, trainer={"teacher_model": copy.deepcopy(teacher), **ref}, **given)
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return trainer


def own_loss(trainer: Any, base: Any, teacher: Any, inputs: dict[str, Any], advantages: Any, options: dict[str, Any]):
    """klamp's loss from the models and the completions alone: nothing that the adapter computed."""
    beta = options.get("beta", 0.0)
    with torch.no_grad():
        ref, other = (plain_logprobs(plain_logits(each, inputs), inputs) for each in (base, teacher))
    config = TeacherConfig(
        teacher_model="given", teacher_coef=COEF, **{k: v for k, v in options.items() if k.startswith("teacher_")}
    )
    batch = Batch(
        policy_logprobs=plain_logprobs(plain_logits(trainer.model, inputs), inputs),
        mask=inputs["completion_mask"].bool(),
        advantages=advantages,
        ref_logprobs=ref,
        teacher_logprobs=other,
    )
    objective = Objective(
        reduction=REDUCTIONS[trainer.loss_type],  # type: ignore[arg-type]
        max_length=LENGTH,
        beta=beta,
        kl=KLConfig(beta=beta).build_term(),
        others=(Weighted(COEF, config.build_term()),),
    )
    return grpo_loss(batch, objective)


@pytest.mark.parametrize("beta", [0.0, 0.4])
@pytest.mark.parametrize("place", PLACES)
def test_the_loss_and_its_gradient_are_klamps_own(
    base: Any, teacher: Any, tmp_path: Path, place: str, beta: float
) -> None:
    options = {**PLACES[place], "beta": beta, "loss_type": "dapo"}
    trainer = made(base, teacher, tmp_path, **options)
    assert (trainer.ref_model is None) == (beta == 0)
    inputs = generated(trainer)
    bare = stock_trainer(noisy(base), tmp_path, scale_rewards="none", loss_type="dapo")
    before = generated(bare)["advantages"]
    assert torch.equal(generated(bare)["completion_ids"], inputs["completion_ids"]), "the same completions"
    expected = own_loss(trainer, base, teacher, inputs, before, options)
    exact = gradient_of(trainer, expected.loss)
    loss = trainer._compute_loss(trainer.model, inputs)
    torch.testing.assert_close(loss.detach(), expected.loss.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient_of(trainer, loss), exact, rtol=1e-4, atol=1e-6)
    metrics = trainer._metrics["train"]
    assert metrics["teacher/coef"] == [COEF]
    assert metrics["teacher/k1"][0] == pytest.approx(float(expected.metrics["teacher/k1"]), rel=1e-4)
    assert bool(metrics["kl"]) == (beta > 0), "TRL's own name is for a reference"


@pytest.mark.parametrize("loss_type", REDUCTIONS)
def test_it_is_divided_as_the_loss_type_divides(base: Any, teacher: Any, tmp_path: Path, loss_type: str) -> None:
    options = {"teacher_estimator": "k3", "loss_type": loss_type}
    trainer = made(base, teacher, tmp_path, **options)
    inputs = generated(trainer)
    expected = own_loss(trainer, base, teacher, inputs, inputs["advantages"], options)
    loss = trainer._compute_loss(trainer.model, inputs)
    torch.testing.assert_close(loss.detach(), expected.loss.detach(), rtol=1e-5, atol=1e-6)


def test_fast_scoring_has_the_same_numbers(base: Any, teacher: Any, tmp_path: Path) -> None:
    plain, fast = (made(base, teacher, tmp_path, fast_scoring=each) for each in (False, "require"))
    assert len(fast._klamp.fast.traits) == 2, "policy and teacher"
    ours, theirs = (generated(each) for each in (fast, plain))
    mask = theirs["completion_mask"].bool()
    scores = (each["klamp_teacher_logprobs"][mask] for each in (ours, theirs))
    torch.testing.assert_close(*scores, rtol=1e-5, atol=1e-6)
    gradients = []
    for each, inputs in ((fast, ours), (plain, theirs)):
        inputs["advantages"] = torch.zeros_like(inputs["advantages"])  # what is left is the teacher's pull
        gradients.append(gradient_of(each, each._compute_loss(each.model, inputs)))
    assert float(gradients[1].norm()) > 0
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


def test_a_teacher_behind_another_prompt_scores_the_same_completions(base: Any, teacher: Any, tmp_path: Path) -> None:
    trainer = made(base, teacher, tmp_path, teacher_prompt="hint")
    hints = [f"{text} the days are seven" for text in PROMPTS]
    rows = rows_of(hint=hints)
    inputs = generated(trainer, rows=rows)
    for row, found in enumerate(inputs["klamp_teacher_logprobs"]):
        ids = trainer.processing_class(rows[row]["hint"])["input_ids"]
        completion = inputs["completion_ids"][row][inputs["completion_mask"][row].bool()]
        whole = torch.cat([torch.tensor(ids), completion])[None]
        with torch.no_grad():
            logits = teacher(input_ids=whole).logits[0, len(ids) - 1 : -1].float()
        expected = logits.log_softmax(-1).gather(-1, completion[:, None])[:, 0]
        torch.testing.assert_close(found[: len(completion)], expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(DataError, match="a prompt has no 'hint' for the teacher"):
        generated(trainer)


def test_a_run_has_a_folder_as_its_teacher_and_needs_no_reward(base: Any, teacher: Any, tmp_path: Path) -> None:
    """Rewards that are all equal have no gradient: what moves the weights is the teacher."""
    options = {"teacher_model": saved(teacher, tmp_path / "teacher"), "teacher_coef": 1.0, "max_steps": 2}
    trainer = klamp_trainer(copy.deepcopy(base), tmp_path / "run", trainer={"reward_funcs": _nothing}, **options)
    trainer.train()
    course = [row["teacher/k1"] for row in trainer.state.log_history if "teacher/k1" in row]
    assert len(course) == 2 and all(course)
    assert not torch.equal(trainer.model.lm_head.weight, base.lm_head.weight)
    told = effective(trainer)
    assert [term.beta for term in told.terms] == [1.0] and str(tmp_path / "teacher") in told.terms[0].term


def _nothing(completions: list[str], **_: Any) -> list[float]:
    return [0.0] * len(completions)


def test_stock_numbers_are_untouched_where_no_field_is_set(base: Any, tmp_path: Path) -> None:
    args = arguments(folder=tmp_path)
    assert args.teacher_config() is None and args.kl_config() is None
    assert arguments(folder=tmp_path, teacher_coef=0.0, teacher_model="x").teacher_config() is not None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"teacher_url": "http://h:1"}, "teacher_kind='remote' cannot be honoured by TRL"),
        ({"teacher_kind": "ema"}, "teacher_kind='ema' cannot be honoured by TRL"),
        ({"teacher_models": ["a=x", "b=y"], "teacher_key": "k"}, "with one model of the trainer's process"),
        ({"teacher_model": "x", "teacher_estimator": "topk"}, "teacher_estimator='topk' cannot be honoured"),
        ({"teacher_model": "x", "teacher_estimator": "k1", "teacher_placement": "reward"}, "in the reward|'reward'"),
        (
            {"teacher_model": "x", "teacher_placement": "advantage", "loss_type": "vespo"},
            "'advantage' cannot be combined with loss_type='vespo'",
        ),
        ({"teacher_model": "x", "teacher_estimater": "k1"}, "teacher_estimater"),
    ],
)
def test_what_trl_cannot_do_is_refused_before_a_model_is_loaded(options: dict[str, Any], words: str) -> None:
    with pytest.raises((ConfigError, TypeError), match=words):
        arguments(**options)


def test_a_teacher_that_does_not_fit_is_refused(base: Any, teacher: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="do not leave the teacher to it"):
        klamp_trainer(copy.deepcopy(base), tmp_path, trainer={"teacher_model": teacher})
    with pytest.raises(ConfigError, match="fields of a teacher are set and none is named"):
        klamp_trainer(copy.deepcopy(base), tmp_path, teacher_coef=1.0)
    with pytest.raises(ConfigError, match="needs a model with a PEFT adapter"):
        klamp_trainer(copy.deepcopy(base), tmp_path, teacher_kind="adapter_off")
    other = model()
    other.resize_token_embeddings(20)
    with pytest.raises(ModelError, match="the teacher has another vocabulary"):
        made(base, other, tmp_path)
    args = GRPOConfig(output_dir=str(tmp_path), teacher_model="x", use_cpu=True, bf16=False, report_to="none")
    stock = build(trl.GRPOTrainer, copy.deepcopy(base), args, train_dataset=dataset())
    with pytest.raises(ConfigError, match="the trainer is not klamp's"):
        stock.train()
