"""TRL's trainer as a run has it: prompts as they stand, klamp's optimizer and schedule, errors before a bad step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.training.conftest import steps_of
from tests.training.test_optimizer import factor
from tokenizers.processors import TemplateProcessing

from klamp.errors import NonFiniteError, UnsupportedVersion
from klamp.hosts.trl.measure import price_in
from klamp.training.backends import train_run
from klamp.training.in_trl import trainer as module
from klamp.training.in_trl.run import trainer_of
from klamp.training.in_trl.trainer import (
    EXAMPLE,
    Generated,
    RunTrainer,
    check_prompts_stand,
    dataset_of,
    reward_function,
)
from klamp.training.optimizer import MasterAdamW
from klamp.training.setup import load_context, make_accelerator
from klamp.training.trainer import Trainer


@pytest.fixture
def built(quick, tmp_path) -> Callable[..., RunTrainer]:
    """A trainer that has not started, with some values of its run changed."""

    def make(**changes: Any) -> RunTrainer:
        config = quick(**changes)
        accelerator = make_accelerator(config, tmp_path / "run")
        return trainer_of(load_context(config, accelerator, tmp_path / "run", ()))

    return make


def test_parts_are_put_together_in_the_order_of_the_rows():
    empty = torch.zeros(4)
    generated = Generated(rows=[], batch={}, lengths=empty, rewards=empty, advantages=empty)
    whole = torch.arange(8.0).view(4, 2)
    rows = [torch.tensor([3, 0]), torch.tensor([1, 2])]
    generated.updates.append([(part, whole[part], -whole[part]) for part in rows])
    seen = generated.seen(0)
    assert torch.equal(seen.logprobs, whole)
    assert seen.entropy is not None and torch.equal(seen.entropy, -whole)


def test_a_beginning_token_is_not_added_to_prompts(built, quick, llama):
    from transformers import AutoTokenizer

    made = built()
    tokenizer = AutoTokenizer.from_pretrained(llama)
    tokenizer._tokenizer.post_processor = TemplateProcessing(
        single=f"{tokenizer.eos_token} $A", special_tokens=[(tokenizer.eos_token, tokenizer.eos_token_id)]
    )
    assert tokenizer("12")["input_ids"][0] == tokenizer.eos_token_id
    made._tokenizer = made.processing_class = tokenizer
    assert made._tokenize_prompts(["12", "3"])[0] == [tokenizer.convert_tokens_to_ids(list(x)) for x in ("12", "3")]
    output = {"prompt_ids": torch.tensor([[9, 8]]), "prompt_mask": torch.ones(1, 2)}
    with pytest.raises(UnsupportedVersion, match="other tokens"):
        check_prompts_stand([{"prompt": "12"}], output, tokenizer)


def test_the_optimizer_is_the_own_loop_s(built):
    made = built(weight_decay=0.1, adam_beta2=0.9)
    (group,) = made.create_optimizer().param_groups
    assert (group["weight_decay"], group["betas"]) == (0.1, (0.9, 0.9))
    assert sum(p.numel() for p in group["params"]) == sum(p.numel() for p in made.model.parameters())
    assert type(built(dtype="bfloat16").create_optimizer()) is MasterAdamW
    assert type(built(dtype="bfloat16", master_weights="none").create_optimizer()) is torch.optim.AdamW


def test_all_updates_of_a_step_have_one_rate(quick, tmp_path):
    train_run(quick(num_iterations=2, max_steps=4, warmup_steps=2, lr_scheduler_type="linear"))
    seen = [row["train/learning_rate"] for row in steps_of(tmp_path / "run")]
    assert seen == pytest.approx([2e-2 * factor("linear", step, 2, 4) for step in range(4)])


def test_a_loss_that_is_not_finite_moves_nothing(built, monkeypatch, quick, tmp_path):
    def advantages(rewards: torch.Tensor, size: int, **options: Any) -> torch.Tensor:
        return torch.full_like(rewards, torch.inf)

    monkeypatch.setattr(module, "group_advantages", advantages)
    with pytest.raises(NonFiniteError, match="the loss is not finite"):
        train_run(quick())
    assert not steps_of(tmp_path / "run")


def test_a_gradient_that_is_not_finite_leaves_no_checkpoint(monkeypatch, quick, tmp_path):
    create = RunTrainer.create_optimizer

    def spoiled(self, model: Any = None) -> Any:
        next(self.model.parameters()).register_hook(lambda gradient: gradient * torch.nan)
        return create(self, model)

    monkeypatch.setattr(RunTrainer, "create_optimizer", spoiled)
    with pytest.raises(NonFiniteError, match="the gradient is not finite"):
        train_run(quick(save_every=1))
    assert not list((tmp_path / "run" / "checkpoints").glob("*-*"))


def test_a_model_with_several_ends_needs_a_trl_that_knows_them(built, monkeypatch):
    import trl

    assert len(built().stop) > 1
    init = trl.GRPOTrainer.__init__

    def older(self, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        del self.eos_token_ids

    monkeypatch.setattr(trl.GRPOTrainer, "__init__", older)
    with pytest.raises(UnsupportedVersion, match="end token only"):
        built()


def test_the_price_that_a_controller_goes_by_is_that_of_the_baseline(built):
    assert price_in(built(), 0.5, "loss").per_completion == pytest.approx(0.5)
    assert price_in(built(advantage_baseline="mean"), 0.5, "loss").per_completion == pytest.approx(0.5 * 4 / 3)


def test_the_order_is_that_of_the_own_loop(built, context_of):
    context = context_of(max_steps=5)
    prompts = [example.prompt for step in range(5) for example in Trainer(context, []).prompts(step)]
    rows = dataset_of(context.config, context.task, context.tokenizer).to_list()
    assert [row["prompt"] for row in rows] == prompts, "as they stand"
    assert [context.task.train[row[EXAMPLE]].prompt for row in rows] == prompts
    assert {row["reference_length"] for row in rows} == {None}
    order = list(built(max_steps=5, num_iterations=2, gradient_accumulation_steps=3)._get_train_sampler())
    groups = [[row] * 4 for row in range(15)]
    steps = [[row for group in groups[3 * step : 3 * step + 3] for row in group] for step in range(5)]
    assert order == [row for step in steps for row in step * 6], "anew for each part of each update"


def test_a_reward_is_the_task_s(context_of):
    context = context_of()
    reward = reward_function(context)
    given = reward(["12", "x7", ""], example=[3, 3, 4], prompts=["", "", ""], trainer_state=None)
    examples = [context.task.train[i] for i in (3, 3, 4)]
    assert given == pytest.approx([context.task.score(e, t) for e, t in zip(examples, ["12", "x7", ""], strict=True)])
    assert len(set(given)) > 1
