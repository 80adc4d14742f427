"""Tiny real models, a tokenizer trained in place, and trainers of both kinds around them."""

import atexit
import copy
import gc
from functools import cache
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
import trl
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from klamp.trl import DistillationConfig, DistillationTrainer, GRPOConfig, GRPOTrainer

LORA = {"peft_config": peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)}
# accelerate collects garbage at the end of every `train`; without this it would walk through all of torch each time.
gc.collect()
gc.freeze()
atexit.register(gc.unfreeze)

PROMPTS = ["2 + 3 =", "what is seven", "count the days", "1 1 1", "say it again", "9 - 4 ="]
PROMPTS += ["seven", "the days", "it is 2", "5 + 5"]
LENGTH = 8


@cache
def tokenizer() -> transformers.PreTrainedTokenizerFast:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=96, special_tokens=["<pad>", "<eos>"], show_progress=False)
    made.train_from_iterator(PROMPTS * 4, trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", padding_side="left", model_max_length=64
    )


def model(kind: str = "qwen2", *, seed: int = 0, **options: Any) -> Any:
    """A policy of a few thousand weights, in memory only."""
    torch.manual_seed(seed)
    sizes = {"vocab_size": len(tokenizer()), "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}
    ids = {"eos_token_id": tokenizer().eos_token_id, "pad_token_id": tokenizer().pad_token_id, "bos_token_id": None}
    if kind == "gpt2":  # GPT-2 learned its positions
        sizes = {"vocab_size": len(tokenizer()), "n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 2}
        options |= dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop", "summary_first_dropout"), 0.0)
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(**sizes, **ids, initializer_range=0.3, **options)
        ).to(torch.float32)
    config, build = {
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    }[kind]
    made = build(config(**sizes, **heads, **ids, initializer_range=0.3, **options))
    return made.to(torch.float32)


def saved(made: Any, folder: Path) -> str:
    made.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


def noisy(made: Any, size: float = 0.05, seed: int = 1) -> Any:
    return move(copy.deepcopy(made), size, seed)


@torch.no_grad()
def move(made: Any, size: float = 0.02, seed: int = 2) -> Any:
    torch.manual_seed(seed)
    for parameter in made.parameters():
        parameter.add_(size * torch.randn_like(parameter))
    return made


def reward(completions: list[str], **_: Any) -> list[float]:
    """Some function of the text with a spread in every group."""
    return [float(sum(map(ord, text)) % 7) for text in completions]


def dataset(**columns: Any) -> Dataset:
    return Dataset.from_dict({"prompt": PROMPTS, **columns})


def arguments(kind: type = GRPOConfig, folder: Any = "unused", **options: Any) -> Any:
    defaults: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "num_generations": 2,
        "per_device_train_batch_size": 4,
        "max_completion_length": LENGTH,
        "gradient_checkpointing": False,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "max_steps": 2,
        "disable_tqdm": True,
    }
    if not issubclass(kind, trl.GRPOConfig):
        del defaults["num_generations"]
    return kind(**(defaults | options))


def build(kind: type, made: Any, args: Any, **options: Any) -> Any:
    """A trainer in the middle of a step, as `compute_loss` expects it."""
    given: dict[str, Any] = {"reward_funcs": reward, "train_dataset": dataset(), "processing_class": tokenizer()}
    trainer = kind(model=made, args=args, **(given | options))
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return trainer


def klamp_trainer(made: Any, folder: Any = "unused", *, trainer: dict[str, Any] | None = None, **options: Any) -> Any:
    return build(GRPOTrainer, made, arguments(folder=folder, **options), **(trainer or {}))


def stock_trainer(made: Any, folder: Any = "unused", *, trainer: dict[str, Any] | None = None, **options: Any) -> Any:
    return build(trl.GRPOTrainer, made, arguments(trl.GRPOConfig, folder=folder, **options), **(trainer or {}))


def distiller(
    student: Any, teacher: Any, folder: Path, *, kind: type = DistillationTrainer, trainer: Any = None, **options: Any
) -> Any:
    """A trainer of that class around copies of two models, in the middle of a step."""
    config = DistillationConfig if issubclass(kind, DistillationTrainer) else trl.DistillationConfig
    args = arguments(config, folder, **{"temperature": 0.7, "per_device_train_batch_size": 3, **options})
    given = {"train_dataset": dataset(), "processing_class": tokenizer(), **(trainer or {})}
    pair = (copy.deepcopy(each) if isinstance(each, torch.nn.Module) else each for each in (student, teacher))
    built = kind(*pair, args, **given)
    built.current_gradient_accumulation_steps = 1
    built.model.train()
    return built
