"""Tiny real models, a tokenizer trained in place, and trainers of both kinds around them."""

import atexit
import copy
import gc
from functools import cache
from pathlib import Path
from typing import Any

import peft
import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from klamp.config import KLConfig
from klamp.hosts.trl.grpo_trainer import join
from klamp.trl import GRPOConfig, GRPOTrainer

LORA = {"peft_config": peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)}
# accelerate collects garbage at the end of every `train`; without this it would walk through all of torch each time.
gc.collect()
gc.freeze()
atexit.register(gc.unfreeze)

PROMPTS = ["2 + 3 =", "what is seven", "count the days", "1 1 1", "say it again", "9 - 4 ="]
PROMPTS += ["seven", "the days", "it is 2", "5 + 5"]
LENGTH = 8


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level pairs, trained on a few words."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=96, special_tokens=["<pad>", "<eos>"], show_progress=False)
    made.train_from_iterator(PROMPTS * 4, trainer)
    return PreTrainedTokenizerFast(
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
        return GPT2LMHeadModel(GPT2Config(**sizes, **ids, initializer_range=0.3, **options)).to(torch.float32)
    config, build = {"qwen2": (Qwen2Config, Qwen2ForCausalLM), "llama": (LlamaConfig, LlamaForCausalLM)}[kind]
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
    return kind(**(defaults | options))


def build(kind: type, made: Any, args: Any, **options: Any) -> Any:
    given: dict[str, Any] = {"reward_funcs": reward, "train_dataset": dataset(), "processing_class": tokenizer()}
    return kind(model=made, args=args, **(given | options))


def klamp_trainer(made: Any, folder: Any = "unused", *, trainer: dict[str, Any] | None = None, **options: Any) -> Any:
    return build(GRPOTrainer, made, arguments(folder=folder, **options), **(trainer or {}))


def stock_trainer(made: Any, folder: Any = "unused", *, trainer: dict[str, Any] | None = None, **options: Any) -> Any:
    return build(trl.GRPOTrainer, made, arguments(trl.GRPOConfig, folder=folder, **options), **(trainer or {}))


def run(make: Any, folder: Path, path: str, base: Any, **options: Any) -> tuple[list[float], Any]:
    extra = {"eval_dataset": dataset()} if "eval_strategy" in options else {}
    given = {**options.pop("trainer", {}), **extra}
    policy = copy.deepcopy(base)
    policy.config._name_or_path = path
    torch.manual_seed(7)  # TRL 1.10 draws an adapter's weights before it sets its seed
    trainer = make(policy, folder, trainer=given, **({"beta": 0.3, "max_steps": 3} | options))
    inner, losses = trainer.compute_loss, []

    def noting(*args: Any, **kwargs: Any) -> Any:
        losses.append(inner(*args, **kwargs))
        return losses[-1]

    trainer.compute_loss = noting
    torch.manual_seed(11)
    trainer.train()
    return [loss.item() for loss in losses], trainer


def with_kl(trainer: Any, kl: KLConfig | None, **args: Any) -> Any:
    """A klamp trainer given another KL (None: TRL's own), as if it had been built with it; its reference stays."""
    for name, value in args.items():
        setattr(trainer.args, name, value)
        if hasattr(trainer, name):
            setattr(trainer, name, value)
    trainer.args.beta = trainer.args.beta if kl is None else kl.beta
    join(trainer, kl, None, chosen=True)
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return trainer


def rows_of(prompts: int = 2, generations: int = 2, **columns: Any) -> list[dict[str, Any]]:
    """Data rows as TRL's sampler hands them out."""
    return [row for row in dataset(**columns).to_list()[:prompts] for _ in range(generations)]


def generated(trainer: Any, seed: int = 5, rows: Any = None) -> dict[str, Any]:
    torch.manual_seed(seed)
    return trainer._generate_and_score_completions(rows or rows_of())


def gradient_of(trainer: Any, loss: torch.Tensor) -> torch.Tensor:
    trainer.model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten().clone() for p in trainer.model.parameters() if p.grad is not None])


def plain_logits(made: Any, inputs: dict[str, Any]) -> torch.Tensor:
    """The logits that the completions were predicted from, by a forward of the model alone. [B, T, V]"""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    length = inputs["completion_ids"].shape[1]
    return made(input_ids=ids, attention_mask=mask).logits[:, -length - 1 : -1].float()


def plain_logprobs(logits: torch.Tensor, inputs: dict[str, Any]) -> torch.Tensor:
    return logits.log_softmax(-1).gather(-1, inputs["completion_ids"].unsqueeze(-1)).squeeze(-1)
