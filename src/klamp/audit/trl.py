"""Audits TRL: the KL in the loss of a real `GRPOTrainer`, and the losses of its trainers for distillation.

Its KL is a few lines in the middle of `GRPOTrainer._compute_loss`. So that method is called as it is, on a trainer
built by TRL's own constructor around a model of two thousand weights, with the log-probabilities of the audit in the
place of the model's. The loss at beta 1 less the loss at beta 0, advantages 0, is the KL part, with its gradient.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import dataclasses
import functools
import tempfile
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from klamp.audit.examine import Subject, Term, marked
from klamp.audit.trl_distillation import distillations


def subject() -> Subject:
    """Prepare the KL of the installed TRL for an audit."""
    import trl

    defaults = {each.name: each.default for each in dataclasses.fields(trl.GRPOConfig)}
    subject = subject_of_loss(
        f"trl {trl.__version__}, GRPOTrainer",
        functools.partial(kl_loss, build_trainer()),
        defaults,
        notes=(
            f"beta is {defaults['beta']:g} by default: without beta= there is no KL and no reference.",
            "Log-probabilities reach the KL in float32, whatever the model's type.",
        ),
    )
    return dataclasses.replace(subject, distillations=distillations())


def subject_of_loss(
    title: str, loss: Callable[..., Tensor], defaults: Mapping[str, Any], *, notes: tuple[str, ...]
) -> Subject:
    """The subject of a loss that has the options of TRL's GRPO: one term per option.

    Args:
        title: the name of the package and its version.
        loss: a `HostLoss` that takes those options as keywords.
        defaults: the option -> the host's default.
        notes: for the reader.
    """
    option, default = "use_bias_correction_kl", bool(defaults["use_bias_correction_kl"])
    terms: dict[str, dict[str, Any]] = {
        marked(option, each, default): {option: each} for each in (default, not default)
    }
    terms["sequence-level ratio, bias correction"] = {"importance_sampling_level": "sequence", option: True}
    return Subject(
        title=title,
        terms=tuple(
            Term.of_mean(name, functools.partial(loss, loss_type="grpo", **options)) for name, options in terms.items()
        ),
        notes=notes,
    )


def build_trainer() -> Any:
    """A real GRPOTrainer of TRL with a tiny model (one layer, eight dimensions, four words), on the CPU, offline."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            beta=0.0,
            use_cpu=True,
            bf16=False,
            report_to="none",
            num_generations=2,
            per_device_train_batch_size=2,
        )
        trainer = GRPOTrainer(
            model=_tiny_model(),
            args=config,
            processing_class=_tiny_tokenizer(),
            reward_funcs=_no_reward,  # pyright: ignore[reportArgumentType]
            train_dataset=Dataset.from_dict({"prompt": ["a", "a"]}),
        )
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def kl_loss(trainer: Any, policy: Tensor, ref: Tensor, old: Tensor, mask: Tensor, **options: Any) -> Tensor:
    """The KL part of TRL's loss, as a `HostLoss`.

    Args:
        trainer: from `build_trainer`.
        policy: log-probabilities of the policy.
        ref: of the reference.
        old: of the policy that sampled.
        mask: True on the tokens of the completions.
        options: fields of GRPOConfig to set meanwhile.
    """
    tokens = mask.long()
    inputs = {
        "prompt_ids": torch.ones_like(tokens[:, :1]),
        "prompt_mask": torch.ones_like(tokens[:, :1]),
        "completion_ids": tokens,
        "completion_mask": tokens,
        "advantages": torch.zeros(len(policy), dtype=policy.dtype),
        "old_per_token_logps": old,
        "ref_per_token_logps": ref,
        "num_items_in_batch": tokens.sum(),
    }
    scored = (policy, torch.zeros_like(policy), None)
    with _set(trainer, _get_per_token_logps_and_entropies=lambda *_, **__: scored, **options):
        losses = []
        for beta in (1.0, 0.0):
            trainer.beta = beta
            losses.append(trainer._compute_loss(trainer.model, inputs))
    return losses[0] - losses[1]


def _tiny_model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=4,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        max_position_embeddings=16,
    )
    return LlamaForCausalLM(config).train()


def _tiny_tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2, "a": 3}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def _no_reward(completions: list[Any], **_: Any) -> list[float]:
    return [0.0] * len(completions)


@contextmanager
def _set(trainer: Any, **values: Any):
    """A context in which attributes of the trainer (and of its arguments, where they have them) have other values."""
    owners = [(owner, name) for name in values for owner in (trainer, trainer.args) if hasattr(owner, name)]
    before = [(owner, name, getattr(owner, name)) for owner, name in owners]
    try:
        for owner, name in owners:
            setattr(owner, name, values[name])
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
