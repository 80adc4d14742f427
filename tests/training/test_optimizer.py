"""The rates of a run; weights in bfloat16 are trained on float32 copies, which a checkpoint holds exactly."""

import math

import pytest
import torch
from tests.training.conftest import StopAfter, tiny_llama
from tests.training.test_resume import weights_of
from torch.optim import AdamW

from klamp.errors import ConfigError, KLWarning, TrainingStopped
from klamp.lab import checkpoint
from klamp.lab.backends import train_run
from klamp.lab.config import TrainConfig
from klamp.lab.updates import MASTERS, MasterAdamW, adamw, schedule_of

FULL = {"dtype": "bfloat16", "lr_scheduler_type": "constant", "warmup_steps": 0}


def factor(name: str, step: int, warmup: int, total: int) -> float:
    if step < warmup:
        return step / warmup
    done = (step - warmup) / (total - warmup)
    return {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}[name]


@pytest.mark.parametrize("name", ["constant", "linear", "cosine"])
def test_learning_rates_follow_the_schedule(context_of, name):
    context = context_of(lr_scheduler_type=name, warmup_steps=3, max_steps=11, learning_rate=0.02)
    optimizer = adamw(context.policy, context.config)
    schedule = schedule_of(optimizer, context.config)
    seen = []
    for _ in range(11):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert seen == pytest.approx([0.02 * factor(name, step, 3, 11) for step in range(11)])


def test_at_a_small_rate_the_copies_of_all_weights_move(config_of, tmp_path, llama):
    """At 1e-6, in bfloat16 alone, a few in a hundred move: those nearest to 0."""
    train_run(config_of(**FULL, learning_rate=1e-6))
    optimizer = torch.load(checkpoint.checkpoints(tmp_path / "run")[-1] / "optimizer.pt", weights_only=True)
    masters = optimizer[MASTERS]
    assert {x.dtype for x in masters} == {torch.float32}
    assert {x.dtype for state in optimizer["state"].values() for x in state.values()} == {torch.float32}
    start = [p.bfloat16().float() for p in tiny_llama().parameters()]
    moved = torch.cat([(a != b).flatten() for a, b in zip(masters, start, strict=True)])
    assert moved.float().mean() > 0.9
    saved = weights_of(tmp_path / "run")
    assert {x.dtype for x in saved.values()} == {torch.bfloat16}
    names = [name for name, _ in tiny_llama().named_parameters()]
    for name, master in zip(names, masters, strict=True):
        assert torch.equal(saved[name], master.bfloat16()), "the model's weights are the copies, rounded"


def test_small_steps_add_up_to_those_of_float32():
    """Two hundred steps of the same size: a fifth of the weight in all, each one below its last bit."""
    start, pull = torch.full((8,), 1.0), torch.linspace(0.5, 2, 8)
    found = {}
    for name, dtype, kind in (("wide", torch.float32, AdamW), ("copies", torch.bfloat16, MasterAdamW)):
        weight = start.clone().to(dtype).requires_grad_(True)
        optimizer = kind([weight], lr=1e-3, weight_decay=0.0)
        for _ in range(200):
            optimizer.zero_grad()
            (weight * pull).sum().backward()
            optimizer.step()
        found[name] = weight.detach()
    assert torch.equal(found["copies"], found["wide"].bfloat16())
    assert (found["wide"] < 0.85).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_an_adapter_on_16_bits_is_float32_also_after_a_resume(context_of, config_of, tmp_path, dtype):
    config = {"dtype": dtype, "lora_r": 2}
    with pytest.raises(TrainingStopped):
        train_run(config_of(**config), [StopAfter(2)])
    for context in (context_of(**config), context_of(resume=True, **config)):
        assert {p.dtype for p in context.policy.parameters() if p.requires_grad} == {torch.float32}
        assert type(adamw(context.policy, context.config)) is AdamW


def test_float16_is_for_adapters_only():
    with pytest.raises(ConfigError, match="float16") as caught:
        TrainConfig.from_flat({"dtype": "float16"})
    assert caught.value.why and caught.value.fix
    assert TrainConfig.from_flat({"dtype": "float16", "lora_r": 4}).model.dtype == "float16"


@pytest.mark.parametrize("changes", [{}, {"dtype": "bfloat16", "lora_r": 4}])
def test_copies_of_nothing_are_not_left_out_in_silence(changes):
    with pytest.warns(KLWarning, match="master_weights='none' has no effect"):
        TrainConfig.from_flat({"master_weights": "none", **changes})
