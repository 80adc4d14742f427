"""Optimizer, schedule and copies of weights; where a model lies, and whether a run fits into its GPUs."""

import math
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.training.conftest import AfterStep, refused, stored, tiny_llama
from tests.training.lies import cells, folder_of, loaded, loaded_adapter, scores, spans
from tests.training.test_resume import weights_of
from torch.optim import AdamW

from klamp.cli import main
from klamp.errors import ConfigError, KLWarning, TrainingStopped
from klamp.lab import checkpoint
from klamp.lab.backends import launch, train_run
from klamp.lab.config import TrainConfig
from klamp.lab.models import load_model, shape_of
from klamp.lab.sizing import GB, Load, Shape, reasons, sizes_of
from klamp.lab.updates import MASTERS, MasterAdamW, adamw, schedule_of

FULL = {"dtype": "bfloat16", "lr_scheduler_type": "constant", "warmup_steps": 0}
SHORT = {"max_steps": 2, "eval_every": 0, "eval_size": 1}


def factor(name: str, step: int, warmup: int, total: int) -> float:
    if step < warmup:
        return step / warmup
    done = (step - warmup) / (total - warmup)
    return {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}[name]


@pytest.mark.parametrize("name", ["constant", "linear", "cosine"])
def test_learning_rates_follow_the_schedule(config_of, name):
    config = config_of(lr_scheduler_type=name, warmup_steps=3, max_steps=11, learning_rate=0.02)
    optimizer = adamw(torch.nn.Linear(1, 1), config)
    schedule = schedule_of(optimizer, config)
    seen = []
    for _ in range(11):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert seen == pytest.approx([0.02 * factor(name, step, 3, 11) for step in range(11)])


def test_at_a_small_rate_the_copies_of_all_weights_move(config_of, tmp_path, llama):
    """At 1e-6, in bfloat16 alone, a few in a hundred move: those nearest to 0."""
    train_run(config_of(**FULL, **SHORT, learning_rate=1e-6))
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
    config = {"dtype": dtype, "lora_r": 2, **SHORT}
    with pytest.raises(TrainingStopped):
        train_run(config_of(**config), [AfterStep(1)])
    for context in (context_of(**config), context_of(resume=True, **config)):
        assert {p.dtype for p in context.policy.parameters() if p.requires_grad} == {torch.float32}
        assert type(adamw(context.policy, context.config)) is AdamW


def test_float16_is_for_adapters_only():
    with refused(ConfigError, "float16"):
        TrainConfig.from_flat({"dtype": "float16"})
    assert TrainConfig.from_flat({"dtype": "float16", "lora_r": 4}).model.dtype == "float16"


@pytest.mark.parametrize("changes", [{}, {"dtype": "bfloat16", "lora_r": 4}])
def test_copies_of_nothing_are_not_left_out_in_silence(changes):
    with pytest.warns(KLWarning, match="master_weights='none' has no effect"):
        TrainConfig.from_flat({"master_weights": "none", **changes})


STEPS = SHORT | {"save_every": 1, "beta": 0.1, "learning_rate": 2e-2}


@pytest.fixture
def run(config_of: Callable[..., TrainConfig], tmp_path: Path) -> Callable[..., Path]:
    def make(backend: str, **changes: object) -> Path:
        config = config_of(**(STEPS | {"backend": backend, "warmup_steps": 0} | changes))
        if backend == "local":
            train_run(config)
        else:
            launch(config, [])
        return tmp_path / "run"

    return make


@pytest.mark.parametrize("backend", ["local", pytest.param("trl", marks=pytest.mark.slow)])
def test_a_model_lies_where_the_page_says_and_every_line_does_what_it_says(
    backend: str, run: Callable[..., Path], llama: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run(backend)
    model, begun = loaded(folder, backend), load_model(llama)
    assert (scores(model) - scores(begun)).abs().max() > 1e-2, "it is the trained one"
    evaluate, option = spans(cells(backend)["evaluate it, or train on from it"])
    assert main(shlex.split(evaluate.replace("RUN", str(folder)))[1:]) == 0
    assert str(folder) in capsys.readouterr().out
    given = shlex.split(option.replace("FOLDER", str(folder_of(folder, backend))))
    assert given[0] == "--model" and torch.equal(scores(load_model(given[1])), scores(model))
    (resume,) = spans(cells(backend)["go on"])
    assert "--resume RUN" in resume
    words = ["train", "--resume", str(folder), "--max_steps", "3"]
    assert main(words) == 0
    assert (scores(loaded(folder, backend)) - scores(model)).abs().max() > 1e-4, "it went on"


@pytest.mark.parametrize("backend", ["local", "trl"])
def test_an_adapter_lies_where_the_page_says(backend: str, run: Callable[..., Path], llama: str) -> None:
    folder = run(backend, lora_r=4, learning_rate=0.2)
    model = loaded_adapter(folder, backend)
    assert (scores(model) - scores(load_model(llama))).abs().max() > 1e-3
    assert any("lora_" in name for name, _ in model.named_parameters())


SMALL = Shape(494_032_768, 24, 896, 151_936, 14)  # Qwen2.5-0.5B
SEVEN = Shape(7_615_616_512, 28, 3584, 152_064, 28)  # Qwen2.5-7B
LARGE32 = Shape(32_763_876_352, 64, 5120, 152_064, 40)  # Qwen2.5-32B
LARGE = Shape(72_706_203_648, 80, 8192, 152_064, 64)  # Qwen2.5-72B


def load(shape: Shape = SEVEN, **changes) -> Load:
    """128 x 8 completions of 512 + 1,024 tokens on eight GPUs of 80 GB, which train and sample in turn."""
    given = {"gpus": 8, "together": 8, "memory": 80.0, "tokens": 1536, "share": 128, "frozen": shape.parameters}
    return Load(**{"shape": shape, "adapter": False, "apart": False, **given, **changes})


def test_a_model_of_7b_has_room_on_eight_gpus() -> None:
    sizes = sizes_of(load())
    assert sizes.checkpointing and sizes.fits and not sizes.offload
    assert sizes.micro == 4, "the whole share of 128 would take 420 GB"
    assert (sizes.engine_share, sizes.tensor_parallel) == (0.6, 1)
    assert sizes.state == pytest.approx(16 * SEVEN.parameters / 8 / GB)


@pytest.mark.parametrize("shape", [SMALL, SEVEN, LARGE], ids=["0.5B", "7B", "72B"])
@pytest.mark.parametrize("memory", [24.0, 80.0])
@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize("apart", [False, True])
def test_whatever_is_said_to_fit_does(shape: Shape, memory: float, adapter: bool, apart: bool) -> None:
    given = load(shape, memory=memory, adapter=adapter, frozen=0 if adapter else shape.parameters, apart=apart)
    sizes = sizes_of(given)
    assert given.share % sizes.micro == 0 and shape.heads % sizes.tensor_parallel == 0
    assert not (apart and sizes.offload), "nothing has to make room"
    state = 0 if sizes.offload else sizes.state
    if sizes.fits:
        assert sizes.micro == 1 or sizes.micro * sizes.completion <= sizes.left / 2
        assert apart or state + sizes.engine_share * memory <= memory
    told = dict(reasons(given, sizes))
    assert ("this is likely out of memory" in told) is not sizes.fits


@pytest.mark.parametrize(
    ("shape", "changes", "said"),
    [
        (LARGE, {}, "this is likely out of memory"),
        (LARGE, {"gpus": 32}, ""),
        (LARGE, {"adapter": True, "frozen": 0}, ""),
        (LARGE32, {"gpus": 8}, "this is likely out of memory"),
        (LARGE32, {"gpus": 10}, "this is tight"),
        (LARGE32, {"gpus": 16}, ""),
    ],
)
def test_what_is_too_large_or_tight_is_said(shape: Shape, changes: dict[str, Any], said: str) -> None:
    given = load(shape, **changes)
    told = dict(reasons(given, sizes_of(given)))
    assert said == next((words for words in ("this is tight", "this is likely out of memory") if words in told), "")


def test_new_weights_reach_an_engine_beside_what_trains() -> None:
    """Its own share, what is not offloaded (an offloaded shard comes back for it), one matrix whole, a buffer."""
    shard, matrix = LARGE32.parameters / 16 / GB, 4 * 152_064 * 5120 / GB
    sizes = sizes_of(load(LARGE32, gpus=16))
    engine = 2 * LARGE32.parameters / sizes.tensor_parallel / GB
    assert sizes.offload and sizes.sync == pytest.approx(engine + 4 * shard + matrix + 2.2)
    assert sizes.machine == pytest.approx(8 * (12 + 4) * shard)
    small = sizes_of(load(SMALL))
    assert small.sync == pytest.approx((2 + 12 / 8) * SMALL.parameters / GB + 4 * 151_936 * 896 / GB + 2.2)
    asleep = sizes_of(load(adapter=True, frozen=0)).machine
    assert asleep == pytest.approx(8 * 2 * SEVEN.parameters / GB), "beside an adapter it keeps its weights there"


def test_the_reasons_have_the_amounts() -> None:
    told = dict(reasons(load(), sizes_of(load())))
    numbers = re.findall(r"[\d,.]*\d", told["4 of 128 completions at once"])
    assert numbers[:7] == ["3.3", "1,536", "80", "15.2", "7.5", "2", "8"] and "3.8 GB" in told["reference offloaded"]
    assert len(dict(reasons(load(apart=True), sizes_of(load(apart=True))))) == 2


def test_the_shape_is_read_from_the_configuration_alone(tmp_path: Path) -> None:
    model = tiny_llama()
    folder = stored(model, tmp_path / "model")
    for file in Path(folder).glob("*.safetensors"):
        file.unlink()
    parameters, config = sum(each.numel() for each in model.parameters()), model.config
    expected = (parameters, config.num_hidden_layers, config.hidden_size, config.vocab_size, config.num_attention_heads)
    assert shape_of(folder) == expected
    assert shape_of("builtin") is None, "it may have to be taught first, and is small"
