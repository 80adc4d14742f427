"""One run of a trainer in this process: klamp's or TRL's, on the same model, prompts and settings.

A step is timed from the end of the one before to its own end, so whatever a trainer does between steps counts. What
precedes the first step (loading) and follows the last (evaluation, checkpoint) does not. Between two steps a run can be
made to wait for its turn (`benchmarks.turns`); waiting does not count.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.measure import Peak, wait_for_gpu
from benchmarks.step_model import TOKENIZER

BETA, LEARNING_RATE, GROUP, COMPLETION = 0.04, 1e-6, 8, 64
SHORT, LONG = 8, 512


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A run of one trainer."""

    trainer: str
    """`klamp`, `trl`, `unsloth`, or `fast`: klamp.trl with fast_scoring."""
    model: str
    """Folder of the model."""
    prompts: str
    """JSON lines of prompts."""
    lora_r: int = 0
    """Rank of an adapter on every linear layer; 0: all weights are trained."""
    dtype: str = "float32"
    """Data type of the weights."""
    beta: float = BETA
    """Coefficient of the KL; at 0 there is no reference."""
    group: int = GROUP
    """Completions per prompt."""
    prompts_per_step: int = 2
    """Groups per step."""
    accumulate: int = 1
    """Micro-batches of an optimizer step, in TRL's trainers."""
    completion: int = COMPLETION
    """Tokens of each completion."""
    steps: int = 5
    """Optimizer steps."""
    warmup: int = 2
    """Of those, the first ones that do not count."""
    reward: str = "benchmarks.step_model:mean_word"
    """module:function, in TRL's convention."""
    cpu: bool = False
    """Whether it stays on the CPU where there is a GPU."""

    def to_dict(self) -> dict[str, Any]:
        """As it is passed to another process."""
        return asdict(self)


@dataclass
class Seen:
    """What a run notes: seconds and CPU seconds of each step, its tokens, and peak memory."""

    turn: Callable[[], None] = lambda: None
    """Called before each step and after the last; the step begins when it returns."""
    peak: Peak = field(default_factory=Peak)
    took: list[tuple[float, float]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)
    """klamp's, of each step."""
    sampled: list[float] = field(default_factory=list)
    """Seconds of each generation, in TRL's trainers."""
    extra_mib: float = 0.0
    began: tuple[float, float] | None = None

    def start(self) -> None:
        """The first step is about to begin."""
        self.peak.start()
        self._begin()

    def end(self, tokens: float) -> None:
        """A step is done."""
        assert self.began is not None, "a step ends that never began"
        seconds, cpu = self.began
        wait_for_gpu()
        self.took.append((time.perf_counter() - seconds, time.process_time() - cpu))
        self.tokens.append(round(tokens))
        self.extra_mib = self.peak.extra_mib()
        self._begin()

    def timing(self, sample: Callable[..., Any]) -> Callable[..., Any]:
        """A trainer's method that samples, its seconds noted."""

        def timed(*arguments: Any, **options: Any) -> Any:
            start = time.perf_counter()
            completions = sample(*arguments, **options)
            self.sampled.append(time.perf_counter() - start)
            return completions

        return timed

    def _begin(self) -> None:
        self.turn()
        self.began = time.perf_counter(), time.process_time()


def run_klamp(setting: Setting, folder: str, seen: Seen) -> None:
    """`klamp.lab.backends.train_run`, with its defaults where TRL has no setting of the same meaning."""
    from klamp.lab.backends import train_run
    from klamp.lab.config import TrainConfig
    from klamp.lab.observers import Observer

    class Watch(Observer):
        def on_evaluation(self, step: int, scores: Any) -> None:
            if step == 0:
                seen.start()

        def on_step(self, step: int, metrics: Any) -> None:
            seen.end(metrics["length/mean"] * sequences)
            seen.metrics.append(dict(metrics))

    sequences = setting.prompts_per_step * setting.group
    values: dict[str, Any] = {
        "model": setting.model,
        "tokenizer": f"{setting.model}/{TOKENIZER}",
        "task": setting.prompts,
        "eval_split": setting.prompts,
        "reward": setting.reward,
        "chat_template": False,
        "lora_r": setting.lora_r,
        "dtype": setting.dtype,
        "beta": setting.beta,
        "loss_type": "dapo",
        "prompts_per_step": setting.prompts_per_step,
        "num_generations": setting.group,
        "max_completion_length": setting.completion,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "adam_beta2": 0.999,
        "max_steps": setting.steps,
        "eval_every": 0,
        "eval_size": 1,
        "save_every": 0,
        "log_completions": 0,
        "report_to": (),
        "output_dir": f"{folder}/run",
        "cpu": setting.cpu or _on_cpu(),
    }
    train_run(TrainConfig.from_flat(values), [Watch()])


def run_trl(setting: Setting, folder: str, seen: Seen) -> None:
    """`trl.GRPOTrainer`, without gradient checkpointing, mixed precision, logging and bars: its fastest way."""
    from trl import GRPOConfig, GRPOTrainer

    _in_trl((GRPOConfig, GRPOTrainer), setting, folder, seen)


def run_fast(setting: Setting, folder: str, seen: Seen) -> None:
    """`klamp.trl.GRPOTrainer` with `fast_scoring` and TRL's own KL, otherwise as `run_trl`."""
    from klamp.trl import GRPOConfig, GRPOTrainer

    _in_trl((GRPOConfig, GRPOTrainer), setting, folder, seen, fast_scoring="require")


def run_unsloth(setting: Setting, folder: str, seen: Seen) -> None:
    """Unsloth's `GRPOTrainer` on a plain model, which is what a CPU leaves of it; otherwise as `run_trl`."""
    import torch

    from benchmarks.unsloth_cpu import patch, with_switches

    patch(gpu=torch.cuda.is_available())
    from transformers import AutoModelForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    dtype = getattr(torch, setting.dtype)
    policy = with_switches(AutoModelForCausalLM.from_pretrained(setting.model, dtype=dtype))
    _in_trl((GRPOConfig, GRPOTrainer), setting, folder, seen, policy=policy, optim="adamw_torch")


def _in_trl(
    classes: tuple[Any, Any], setting: Setting, folder: str, seen: Seen, *, policy: Any = None, **options: Any
) -> None:
    import importlib

    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback

    class Watch(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            if seen.began is None:
                seen.start()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            lengths = trainer._metrics["train"]["completions/mean_length"]
            seen.end(lengths[-1] * sequences)

    sequences = setting.prompts_per_step * setting.group
    module, _, name = setting.reward.partition(":")
    make_arguments, make_trainer = classes
    args = make_arguments(
        output_dir=f"{folder}/run",
        model_init_kwargs={"dtype": setting.dtype} if policy is None else None,
        per_device_train_batch_size=sequences // setting.accumulate,
        gradient_accumulation_steps=setting.accumulate,
        num_generations=setting.group,
        max_completion_length=setting.completion,
        max_steps=setting.steps,
        num_iterations=1,
        beta=setting.beta,
        loss_type="dapo",
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        warmup_steps=0,
        max_grad_norm=1.0,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=setting.cpu or _on_cpu(),
        dataloader_num_workers=0,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **options,
    )
    trainer = make_trainer(
        model=setting.model if policy is None else policy,
        reward_funcs=getattr(importlib.import_module(module), name),
        args=args,
        train_dataset=Dataset.from_json(setting.prompts, cache_dir=f"{folder}/data"),
        processing_class=AutoTokenizer.from_pretrained(f"{setting.model}/{TOKENIZER}"),
        peft_config=_adapter(setting.lora_r) if setting.lora_r else None,
        callbacks=[Watch()],
    )
    if hasattr(trainer, "_generate"):
        trainer._generate = seen.timing(trainer._generate)
    trainer.train()


def _adapter(rank: int) -> Any:
    from peft import LoraConfig

    return LoraConfig(r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")


TRAINERS: dict[str, Callable[[Setting, str, Seen], None]] = {
    "klamp": run_klamp,
    "trl": run_trl,
    "fast": run_fast,
    "unsloth": run_unsloth,
}


def _on_cpu() -> bool:
    import torch

    return not torch.cuda.is_available()


def one(setting: dict[str, Any], turn: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """A run in this process: seconds and CPU seconds of each step after the warm-up, its tokens, extra peak memory.

    Args:
        setting: that of the run.
        turn: see `Seen`.

    Raises:
        RuntimeError: a completion ended early, so that the steps are not comparable.
    """
    given = Setting(**setting)
    seen = Seen(turn)
    with tempfile.TemporaryDirectory() as folder:
        TRAINERS[given.trainer](given, folder, seen)
    whole = given.prompts_per_step * given.group * given.completion
    if seen.tokens != [whole] * given.steps:
        raise RuntimeError(f"{given.trainer} processed {seen.tokens} completion tokens, not {whole} in each step")
    took = seen.took[given.warmup :]
    return {
        "tokens": whole,
        "seconds": [s for s, _ in took],
        "cpu_seconds": [c for _, c in took],
        "sampling_seconds": seen.sampled[given.warmup :],
        "extra_mib": seen.extra_mib,
    }


def write_setting(folder: Path, size: str, length: int, *, count: int = 64, dtype: str = "float32") -> tuple[str, str]:
    """A model folder and a file of prompts for `Setting`."""
    from benchmarks.step_model import SIZES, make_model, write_prompts

    model, file = folder / size, folder / f"prompts_{size}_{length}.jsonl"
    if not model.exists():
        make_model(model, size, dtype=dtype)
    write_prompts(file, count=count, length=length, vocab_size=SIZES[size]["vocab_size"])
    return str(model), str(file)
