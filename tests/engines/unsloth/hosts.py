"""A tiny model, its tokenizer, trainers of Unsloth's around it, and the comparison of one loss with another."""

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import klamp.trl
from benchmarks.unsloth_cpu import with_switches
from klamp.config import KLConfig
from klamp.hosts.trl.grpo_config import host_class
from klamp.hosts.unsloth.hooks import Step
from klamp.hosts.unsloth.loss_function import Call, in_place, loss_function

PROMPTS = ("abc", "a", "hello", "1+2=")
LENGTH = 8
HOST: Any = host_class(trl.GRPOTrainer)

UNWEIGHTED: dict[str, Any] = {"use_bias_correction_kl": False}
TWICE: dict[str, Any] = {"num_iterations": 2, "max_steps": 4}
"""The second pass over a batch is off-policy."""

CASES: dict[str, dict[str, Any]] = {
    **{
        name: {"loss_type": name, "gradient_accumulation_steps": 2, **TWICE}
        for name in ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo", "luspo")
    },
    "sequence ratio": {"importance_sampling_level": "sequence", **TWICE},
    "sequence ratio, luspo": {"importance_sampling_level": "sequence", "loss_type": "luspo", **TWICE},
    "truncated rows masked": {"mask_truncated_completions": True, "loss_type": "dapo"},
    "truncated rows masked, grpo": {"mask_truncated_completions": True},
    "entropy": {"top_entropy_quantile": 0.5, "entropy_coef": 0.01},
    "off-policy mask": {"off_policy_mask_threshold": 0.01, **TWICE},
    "delta": {"delta": 1.5, **TWICE},
    "in halves": {"unsloth_grpo_mini_batch": 2},
    "several batches per generation": {"loss_type": "dapo", "steps_per_generation": 4},
    "temperature": {"temperature": 0.7},
}  # fmt: skip
"""The configurations in which klamp's KL has to be Unsloth's own, where that one is within its clamps."""


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """One token per character."""
    characters = "abcdefghijklmnopqrstuvwxyz0123456789+= "
    names = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{c: 3 + i for i, c in enumerate(characters)}}
    made = Tokenizer(models.WordLevel(names, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def model(seed: int = 0) -> Any:
    """A policy of a few thousand weights, in float32 and in memory only, with what Unsloth puts on its own models."""
    torch.manual_seed(seed)
    sizes = {"vocab_size": len(tokenizer()), "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}
    ids = {"eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None}
    made = LlamaForCausalLM(LlamaConfig(**sizes, **heads, **ids, initializer_range=0.2))
    return with_switches(made)


def saved(made: Any, folder: Path) -> str:
    """A folder that holds the model and its tokenizer, as Unsloth's own reference needs one."""
    made.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


@torch.no_grad()
def move(made: Any, size: float = 0.05) -> None:
    generator = torch.Generator().manual_seed(1)
    for parameter in made.parameters():
        if parameter.requires_grad:
            noise = torch.randn(parameter.shape, generator=generator).to(parameter)
            parameter.add_(size * noise)


def reward(completions: list[str], **_: Any) -> list[float]:
    """Some function of the text with a spread in every group."""
    return [float(sum(map(ord, text)) % 7) for text in completions]


def arguments(folder: Any, **options: Any) -> Any:
    """Arguments of Unsloth's that log to nobody; what is not named keeps Unsloth's default."""
    sizes = {"num_generations": 4, "per_device_train_batch_size": 4, "max_completion_length": LENGTH, "max_steps": 2}
    silent = {"output_dir": str(folder), "save_strategy": "no", "disable_tqdm": True, "report_to": "none"}
    steps = {"gradient_accumulation_steps": 1, "gradient_checkpointing": False, "optim": "adamw_torch"}
    loss = {"loss_type": "grpo", "beta": 0.0}  # a model in memory only has no path to load a reference from
    defaults = {"use_cpu": not torch.cuda.is_available(), **sizes, **silent, **steps, **loss}
    return trl.GRPOConfig(**(defaults | options))


def trainer(folder: Any, made: Any = None, *, kind: Any = None, **options: Any) -> Any:
    rows, rewarded = Dataset.from_dict({"prompt": list(PROMPTS)}), options.pop("reward", reward)
    return (kind or trl.GRPOTrainer)(
        model=model() if made is None else made,
        args=arguments(folder, **options),
        train_dataset=rows,
        eval_dataset=rows,
        reward_funcs=rewarded,
        processing_class=tokenizer(),
    )


def attached(folder: Any, kl: KLConfig, made: Any = None, *, ref_model: Any = None, **options: Any) -> Any:
    return klamp.trl.attach(trainer(folder, made, **options), kl, ref_model=ref_model)


class Seen(NamedTuple):
    """One loss."""

    loss: Tensor
    by_logprobs: Tensor  # its gradient with respect to the policy's log-probabilities, in Unsloth's columns
    by_weights: Tensor  # and with respect to the policy's weights
    call: Call  # what Unsloth's loss function was called with
    logged_kl: float  # what Unsloth logged as `kl`


class Recorder:
    """Unsloth's loss function, which keeps what it is first called with."""

    def __init__(self, original: Any) -> None:
        self.original, self.forward, self.call = original, original.forward, None

    def apply(self, *args: Any) -> Any:
        self.call = self.call or Call(*args)
        return self.original.apply(*args)


def measured(host: Any, compute: Any) -> Seen:
    """Run one loss of a trainer and both its gradients."""
    recorder: Any = Recorder(loss_function(HOST)[1])
    with in_place(HOST, recorder):
        loss = compute()
    weights = [p for p in host.model.parameters() if p.requires_grad]
    slopes = torch.autograd.grad(loss, [recorder.call.new, *weights], allow_unused=True, retain_graph=True)
    flat = torch.cat([slope.flatten().float() for slope in slopes[1:] if slope is not None])
    return Seen(loss, slopes[0], flat, recorder.call, host._metrics["train"]["kl"][-1])


def compared(host: Any) -> list[tuple[Seen, Seen]]:
    """Train, and on every micro-batch compute the loss twice: with klamp's KL, and as Unsloth does with its own."""
    pairs: list[tuple[Seen, Seen]] = []
    with_klamp, beta = type(host).compute_loss, host.args.beta

    def both(self: Any, policy: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        mine = measured(self, lambda: with_klamp(self, policy, inputs, *args, **kwargs))
        self.beta = beta
        stock = measured(self, lambda: HOST.compute_loss(self, policy, Step(self, inputs, beta).as_scored()))
        pairs.append((mine, stock))
        return mine.loss

    type(host).compute_loss = both  # the class that attach made, which no other trainer has
    host.train()
    return pairs


def assert_same(pairs: list[tuple[Seen, Seen]], *, steps: int, weights: float = 1e-6) -> None:
    """Loss and gradients of every micro-batch, klamp's and stock; and that the KL was there at all."""
    assert len(pairs) >= steps
    for mine, stock in pairs:
        assert mine.call.beta == 0.0 < stock.call.beta
        for name, bound in (("loss", 1e-6), ("by_logprobs", 1e-6), ("by_weights", weights)):
            ours, theirs = getattr(mine, name), getattr(stock, name)
            assert (ours - theirs).abs().max() <= bound * max(1.0, float(theirs.abs().max())), name
        assert abs(mine.logged_kl - stock.logged_kl) <= 1e-6 or stock.call.extra_kwargs["use_bias_correction_kl"]
        assert mine.call.new.shape[1] >= LENGTH
    assert max(stock.logged_kl for _, stock in pairs) > 1e-3
