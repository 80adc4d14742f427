"""Models that are made in a moment: a Llama, a GPT-2 with absolute positions, adapters; and runs of a few steps."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.utils import logging

from klamp.errors import KlampError
from klamp.lab.backends import train_run
from klamp.lab.config import RolloutConfig, TrainConfig
from klamp.lab.loop import Trainer
from klamp.lab.models import end_tokens
from klamp.lab.observers import Observer, RunInfo
from klamp.lab.rollouts import Rollout, collect
from klamp.lab.sampling import encode_prompts, generate, uniform_numbers
from klamp.lab.setup import Context, build
from klamp.lab.tasks.arithmetic import arithmetic_tokenizer
from klamp.scoring.completions import Completions

logging.disable_progress_bar()

TINY: dict[str, Any] = {
    "reward": "tests.training.rewards:digits",
    "prompts_per_step": 3,
    "num_generations": 4,
    "max_completion_length": 6,
    "train_size": 10,
    "eval_size": 4,
    "max_steps": 4,
    "eval_every": 2,
    "save_every": 2,
    "warmup_steps": 1,
    "learning_rate": 5e-3,
    "report_to": (),
    "cpu": True,
}
"""A run of a fraction of a second: three groups of four completions of at most six tokens."""

IN_REWARD: dict[str, Any] = {"kl_placement": "reward", "kl_estimator": "k1", "kl_horizon": "sequence"}
"""The KL in the reward, as every backend that has it takes it."""
IN_ADVANTAGE = IN_REWARD | {"kl_placement": "advantage"}
CPU = torch.device("cpu")
PROMPTS = ["1+1=", "rev abcde=", "123+456=", "7-2=", "q", "rev zz=", "99-98=", "100+999="]
LENGTH = 8


def sample(model, prompts=PROMPTS, rows=None, *, extra_padding=0, seed=0, greedy=False, **rollout) -> Completions:
    tokenizer = arithmetic_tokenizer()
    settings = RolloutConfig(max_completion_length=LENGTH, **rollout)
    rows = list(range(len(prompts))) if rows is None else rows
    ids, mask = encode_prompts([prompts[i] for i in rows], tokenizer, CPU)
    ids = torch.nn.functional.pad(ids, (extra_padding, 0), value=tokenizer.pad_token_id)
    mask = torch.nn.functional.pad(mask, (extra_padding, 0), value=0)
    uniforms = None if greedy else uniform_numbers(seed, 0, len(prompts), LENGTH)[rows]
    stop = end_tokens(model, tokenizer)
    return generate(model, ids, mask, rollout=settings, stop=stop, pad=tokenizer.pad_token_id, uniforms=uniforms)


def tiny_llama(**changes: Any) -> LlamaForCausalLM:
    """Random weights, far enough from uniform for a KL to show; several tokens end a completion, so lengths vary."""
    settings = {
        **shared_settings(),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
    }
    torch.manual_seed(0)
    return _ready(LlamaForCausalLM(LlamaConfig(**settings | changes)))


def tiny_gpt2() -> GPT2LMHeadModel:
    """Absolute positions, and the dropout of 0.1 that GPT-2 comes with."""
    torch.manual_seed(0)
    return _ready(GPT2LMHeadModel(GPT2Config(n_positions=64, n_embd=32, n_layer=2, n_head=2, **shared_settings())))


def shared_settings() -> dict[str, Any]:
    tokenizer = arithmetic_tokenizer()
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    return {"vocab_size": len(tokenizer), "initializer_range": 0.2, **ids}


def _ready(model: PreTrainedModel) -> Any:
    tokenizer = arithmetic_tokenizer()
    ends = tokenizer.convert_tokens_to_ids(["x", "y", "z", "-", "="])
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, *ends]
    return model.eval()


def stored(model: PreTrainedModel, folder: Path) -> str:
    model.save_pretrained(folder)
    arithmetic_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return stored(tiny_llama(), tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of another Llama, some tenths of a nat away."""
    model = tiny_llama()
    disturb(model, size=0.1)
    return stored(model, tmp_path_factory.mktemp("teacher"))


@pytest.fixture(scope="session")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> str:
    return stored(tiny_gpt2(), tmp_path_factory.mktemp("gpt2"))


@pytest.fixture
def config_of(llama: str, tmp_path: Path) -> Callable[..., TrainConfig]:
    """The configuration of a tiny run in tmp_path/run, with some values changed."""

    def make(**changes: Any) -> TrainConfig:
        return TrainConfig.from_flat({"model": llama, "output_dir": str(tmp_path / "run"), **TINY, **changes})

    return make


@pytest.fixture
def context_of(config_of: Callable[..., TrainConfig]) -> Callable[..., Context]:
    def make(**changes: Any) -> Context:
        return build(config_of(**changes))

    return make


@pytest.fixture(scope="session")
def context(llama: str) -> Context:
    """The context of a tiny run, whose models no test changes."""
    return build(TrainConfig.from_flat({"model": llama, **TINY}))


@pytest.fixture
def context_with(config_of: Callable[..., TrainConfig], context: Context) -> Callable[..., Context]:
    """The shared models with another configuration, which must need no others."""

    def make(**changes: Any) -> Context:
        config = config_of(**changes)
        return replace(context, config=config, reference=context.reference if config.kl.needs_reference else None)

    return make


@pytest.fixture(scope="session")
def run_once(llama: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The folder of a tiny run with some values changed, which is only to be read: each is trained once."""
    folders: dict[str, Path] = {}

    def folder_of(**changes: Any) -> Path:
        key = json.dumps(changes, sort_keys=True)
        if key not in folders:
            folder = tmp_path_factory.mktemp("once") / "run"
            train_run(TrainConfig.from_flat({"model": llama, **TINY, **changes, "output_dir": str(folder)}))
            folders[key] = folder
        return folders[key]

    return folder_of


def rollout_of(context: Context, *, beta: float, prompts: int = 3, step: int = 0) -> Rollout:
    return collect(context, context.task.train[:prompts], step=step, terms=context.objective.weighted(beta).terms)


def steps_taken(context: Context, count: int) -> list[dict[str, float]]:
    """The metrics of the first steps of a run, without the wall times, which no seed fixes."""
    trainer = Trainer(context, [])
    rows = [trainer.train_step() for _ in range(count)]
    return [{name: x for name, x in row.items() if not name.startswith("speed/")} for row in rows]


def in_parts(context: Context, parts: int) -> Context:
    optim = replace(context.config.optim, gradient_accumulation_steps=parts)
    return replace(context, config=replace(context.config, optim=optim))


def ctrl_c() -> None:
    raise KeyboardInterrupt


class AfterStep(Observer):
    """Does something once a step is done: by default what Ctrl-C does."""

    def __init__(self, step: int, act: Callable[[], object] = ctrl_c) -> None:
        self.step, self.act = step, act

    def on_step(self, step: int, metrics: object) -> None:
        if step == self.step:
            self.act()


def info_of(folder: Path, start_step: int, config: TrainConfig | None = None) -> RunInfo:
    sizes: dict[str, Any] = {"parameters": 1, "trainable_parameters": 1, "device": "cpu"}
    return RunInfo(config=config or TrainConfig(), output_dir=folder, start_step=start_step, **sizes)


@contextmanager
def refused(kind: type[KlampError], words: str) -> Iterator[pytest.ExceptionInfo[KlampError]]:
    """An error of this kind with these words is raised here, and it has all four parts."""
    with pytest.raises(kind, match=words) as caught:
        yield caught
    error = caught.value
    assert error.what and error.got is not None and error.why and error.fix, str(error)


def json_rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def rows_of(folder: Path | str, *, keep_speed: bool = False) -> list[dict[str, float]]:
    """The lines of metrics.jsonl; without the wall times, which no seed fixes."""
    rows = json_rows(Path(folder) / "metrics.jsonl")
    return [{k: v for k, v in row.items() if keep_speed or not k.startswith("speed/")} for row in rows]


def scores_of(row: dict[str, float]) -> dict[str, float]:
    """Skill -> score in the row of an evaluation; empty for that of a step."""
    return {name.removeprefix("eval/"): score for name, score in row.items() if name.startswith("eval/")}


def steps_of(folder: Path | str) -> list[dict[str, float]]:
    return [row for row in rows_of(folder) if "reward" in row]


def disturb(model: torch.nn.Module, *, seed: int = 1, size: float = 0.05) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(size * torch.randn(parameter.shape, generator=generator))


def full_disk(*_: object, **__: object) -> None:
    """Stands in the place of whatever writes."""
    raise OSError(28, "No space left on device")


def greedy(context: Context, model: Any, prompt: str) -> str:
    """What transformers' own greedy decoding answers."""
    ids = context.tokenizer(prompt, return_tensors="pt")["input_ids"]
    settings = GenerationConfig(do_sample=False, max_new_tokens=6, eos_token_id=context.stop, pad_token_id=context.pad)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
    return context.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
