"""A run as its observers see it, and its evaluations."""

import math
from dataclasses import replace
from functools import partial
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.training import rewards
from tests.training.conftest import TINY, disturb, greedy, steps_of

from klamp.core.controllers import StepController
from klamp.lab import evaluation
from klamp.lab.backends import train_run
from klamp.lab.config import TrainConfig
from klamp.lab.evaluation import evaluate
from klamp.lab.loop import Trainer
from klamp.lab.observers import Observer
from klamp.lab.updates import control_metrics


class Recorder(Observer):
    """Keeps every call: the hook, and what it was given."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        for hook in ("start", "step", "evaluation", "answers", "completions", "warning", "end"):
            setattr(self, f"on_{hook}", partial(self.record, hook))
        self.close = partial(self.record, "close")

    def record(self, hook: str, *given: Any) -> None:
        self.calls.append((hook, *given))


@pytest.fixture(scope="module")
def run(llama, tmp_path_factory):
    folder, recorder = tmp_path_factory.mktemp("runs") / "run", Recorder()
    changes = {"max_steps": 7, "eval_every": 3, "save_every": 4, "target_kl": 0.004, "warmup_steps": 2, "beta": 0.1}
    changes |= {"kl_controller": "step", "log_completions_every": 4, "num_iterations": 2, "max_grad_norm": 0.5}
    train_run(TrainConfig.from_flat({"model": llama, **TINY, **changes, "output_dir": str(folder)}), [recorder])
    return SimpleNamespace(recorder=recorder, steps=steps_of(folder))


def test_observers_are_told_everything_in_order(run):
    (_, info), *during, (_, summary), (last,) = run.recorder.calls
    assert [call[:2] for call in during] == [
        *(("evaluation", 0), ("answers", 0)),
        *(("completions", 1), ("step", 1), ("step", 2), ("step", 3), ("evaluation", 3), ("answers", 3)),
        *(("completions", 4), ("step", 4)),
        *(("step", 5), ("step", 6), ("evaluation", 6), ("answers", 6)),
        *(("step", 7), ("evaluation", 7), ("answers", 7)),
    ]
    assert [len(call[2]) for call in during if call[0] == "completions"] == [8, 8]
    assert (info.start_step, summary.steps, last) == (0, 7, "close")
    assert info.parameters == info.trainable_parameters > 10_000
    assert info.device == "cpu"


def test_beta_is_what_the_controller_makes_of_the_exact_kl(run):
    controller = StepController(0.1, target=0.004)
    betas = []
    for row in run.steps:
        betas.append(controller.value)
        controller.update(row["kl/exact"])
    assert [row["beta"] for row in run.steps] == betas
    assert len(set(betas)) > 2


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"lora_r": 4},
        {"temperature": 0.7},
        {"gradient_checkpointing": True},
        {"lora_r": 2, "reference": "frozen", "gradient_accumulation_steps": 5},
        {"model": "gpt2"},
    ],
)
def test_before_the_first_update_there_is_no_kl(context_of, request, changes):
    if "model" in changes:
        changes = {"model": request.getfixturevalue(changes["model"])}
    recorder = Recorder()
    row = Trainer(context_of(**changes), [recorder]).train_step()
    for name in ("kl/k1", "kl/k3", "kl/exact", "kl/exact_forward"):
        assert abs(row[name]) < 1e-6, name
    assert row["kl/log_ratio_max"] < 1e-4
    assert abs(row["sampler/k1"]) < 1e-5 and row["sampler/k3"] < 1e-6
    assert "warning" not in [hook for hook, *_ in recorder.calls]


def test_a_step_learns_from_the_first_updates_view(context_of):
    """Loss and KL that are logged are those before the weights moved, the clipped share that of the last update."""
    rows = []
    for iterations in (1, 4):
        context = context_of(num_iterations=iterations, warmup_steps=0, learning_rate=0.05)
        disturb(context.policy, size=0.02)
        rows.append(Trainer(context, []).train_step())
    one, four = rows
    for name in ("train/loss", "kl/k3", "kl/exact", "policy/entropy", "reward"):
        assert one[name] == four[name]
    assert one["policy/ratio_clipped"] == 0 < four["policy/ratio_clipped"]
    assert four["policy/kl_old"] > 0 and "policy/kl_old" not in one


def test_a_step_without_a_token_that_carries_the_kl_measures_none(context_of):
    """No KL is no KL of 0, which would have lowered beta."""
    every = tuple(range(len(context_of().tokenizer)))
    context = context_of(kl_exclude_tokens=every, target_kl=0.1, beta=0.2)
    trainer = Trainer(context, [])
    metrics = [trainer.train_step() for _ in range(2)]
    assert [row["beta"] for row in metrics] == [0.2, 0.2]
    assert not [name for name in metrics[1] if name.startswith("kl/") and name != "kl/target"]
    assert metrics[1]["train/kl_penalty"] == 0.0 and "policy/logp_mean" in metrics[1]


MEASURED = {"length/mean": 5.0, "reward_std": 0.3, "groups/saturated": 0.25}


@pytest.mark.parametrize(
    ("changes", "beta", "measured", "price"),
    [
        ({"loss_type": "dr_grpo"}, 0.06, {}, 0.06),
        ({"loss_type": "dr_grpo"}, 0.0, {}, 0.0),
        ({"kl_normalizer": "token_mean", "max_completion_length": 8}, 0.06, {}, 0.06 * 8 / 5),
        ({"scale_rewards": "std"}, 0.06, {}, 0.06 * 0.4),  # that of the groups that teach something
        ({"scale_rewards": "std"}, 0.06, {"reward_std": 0.0, "groups/saturated": 1.0}, None),
    ],
)
def test_beta_and_its_price(context_with, changes, beta, measured, price):
    context = context_with(advantage_baseline="leave_one_out", **changes)
    expected = {"beta": beta} | ({} if price is None else {"beta/price": price})
    assert control_metrics(context, beta, MEASURED | measured) == pytest.approx(expected)


def by_hand(context) -> dict[str, float]:
    return {
        skill: fmean(rewards.digits(greedy(context, context.policy, example.prompt)) for example in examples)
        for skill, examples in context.task.evaluation.items()
    }


def test_every_skill_is_scored_as_greedy_decoding_of_each_prompt_scores(context_of, monkeypatch):
    context = context_of(eval_size=7, temperature=2.0)
    expected = by_hand(context)
    assert list(expected) == ["addition", "subtraction", "reversal"]
    assert len(set(expected.values())) > 1
    assert evaluate(context)[0] == pytest.approx(expected)
    monkeypatch.setattr(evaluation, "BATCH", 3)
    assert evaluate(context)[0] == pytest.approx(expected)


def test_a_skill_that_is_read_is_scored_by_the_probability_of_its_answers(context_of, monkeypatch):
    context = context_of(eval_size=7, temperature=2.0)  # the temperature of sampling does not count here
    context.task = replace(context.task, read=frozenset({"reversal", "addition"}))
    expected = by_hand(context) | {
        skill: fmean(read_by_hand(context.policy, context.tokenizer, context.task.evaluation[skill]))
        for skill in ("reversal", "addition")
    }
    for at_once in (16, 2, 1):
        monkeypatch.setattr(evaluation, "READ_AT_ONCE", at_once)
        assert evaluate(context)[0] == pytest.approx(expected, rel=1e-5)
    assert 0 < expected["reversal"] != expected["addition"] < 1


def read_by_hand(model: Any, tokenizer: Any, examples: Any) -> list[float]:
    """exp(mean log-probability of the answer's tokens) of each example, one forward pass each."""
    found = []
    for example in examples:
        prompt, answer = (
            tokenizer(text, add_special_tokens=False)["input_ids"] for text in (example.prompt, example.answer)
        )
        logprobs = model(torch.tensor([[*prompt, *answer]])).logits[0].double().log_softmax(-1)
        each = [logprobs[len(prompt) + place - 1, token].item() for place, token in enumerate(answer)]
        found.append(math.exp(sum(each) / len(each)))
    return found
