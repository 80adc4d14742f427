"""Audits TRL: the KL in the loss of a real `GRPOTrainer`, and the losses of its trainers for distillation.

GRPOTrainer's KL is a few lines in the middle of `GRPOTrainer._compute_loss`. So that method is called as it is, on a
trainer built by TRL's own constructor around a model of two thousand weights, with the log-probabilities of the audit
in the place of the model's. The loss at beta 1 less the loss at beta 0, advantages 0, is the KL part.

A trainer for distillation is made without its constructor, which would load two models: its student and teacher are
stand-ins whose last hidden states are the logits of the audit and whose head is the identity. The teacher of a server
is answered for in the form that TRL's own client reads.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import dataclasses
import functools
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from klamp.audit.examine import PROMPT, Distillation, Sequences, Subject, Term, marked, of_beta


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
    return dataclasses.replace(subject, losses=(*subject.losses, *distillations()))


def subject_of_loss(
    title: str, loss: Callable[..., Tensor], defaults: Mapping[str, Any], *, notes: tuple[str, ...]
) -> Subject:
    """The subject of a `HostLoss` that takes the options of TRL's GRPO as keywords: one term per option."""
    option, default = "use_bias_correction_kl", bool(defaults["use_bias_correction_kl"])
    terms: dict[str, dict[str, Any]] = {
        marked(option, each, default): {option: each} for each in (default, not default)
    }
    terms["sequence-level ratio, bias correction"] = {"importance_sampling_level": "sequence", option: True}
    return Subject(
        title=title,
        losses=tuple(
            Term(name=name, loss=functools.partial(loss, loss_type="grpo", **options))
            for name, options in terms.items()
        ),
        notes=notes,
    )


def build_trainer() -> Any:
    """A real GRPOTrainer of TRL with a tiny model (one layer, eight dimensions, four words), on the CPU, offline."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    with tempfile.TemporaryDirectory() as folder:
        sizes: dict[str, Any] = {"num_generations": 2, "per_device_train_batch_size": 2}
        config = GRPOConfig(output_dir=folder, beta=0.0, use_cpu=True, bf16=False, report_to="none", **sizes)
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
    """The KL part of TRL's loss, as a `HostLoss`; `options` are fields of GRPOConfig to set meanwhile."""
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

    sizes: dict[str, Any] = {"vocab_size": 4, "hidden_size": 8, "intermediate_size": 8, "max_position_embeddings": 16}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, num_attention_heads=1, **sizes)).train()


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


TOP = 3  # the teacher's likeliest tokens that a server gives, of the audit's twenty


def distillations() -> tuple[Distillation, ...]:
    """One for each trainer and choice of the divergence; the default of each trainer first."""
    betas = tuple({"beta": beta} for beta in (1.0, 0.5, 0.0))
    server = ({"beta": 1.0}, {"beta": 1.0, "loss_add_tail": False}, {"beta": 0.5}, {"beta": 0.0, "loss_top_k": TOP})
    trainers: dict[str, tuple[Callable[[Any, Sequences], Tensor], tuple[dict[str, Any], ...]]] = {
        "trl.Distillation": (_stable, (*betas, {"beta": 1.0, "temperature": 2.0})),
        "trl.experimental.gkd.GKD": (_gkd, betas[1:] + betas[:1]),
        "trl.experimental.server_distillation.ServerDistillation": (
            _server,
            (*server, {"beta": 0.0, "loss_top_k": TOP, "loss_add_tail": False}),
        ),
    }
    return tuple(_distillation(name, loss, each) for name, (loss, choices) in trainers.items() for each in choices)


def _distillation(name: str, loss: Callable[[Any, Sequences], Tensor], choice: dict[str, Any]) -> Distillation:
    defaults = {each.name: each.default for each in dataclasses.fields(_named(f"{name}Config"))}
    changed = {name: value for name, value in choice.items() if name == "beta" or value != defaults[name]}
    options = ", ".join(f"{name}={value}" for name, value in changed.items())
    options += " (default)" * all(value == defaults[name] for name, value in choice.items())
    settings = {**defaults, **choice}
    settings["temperature"] = choice.get("temperature", 1.0)
    return Distillation(
        name=f"{name.rpartition('.')[2]}Trainer, {options}",
        loss=lambda batch: loss(_without_models(_named(f"{name}Trainer"), settings), batch),
        means=of_beta(choice["beta"]),
        temperature=settings["temperature"],
    )


def _named(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(__import__(module, fromlist=[name]), name)


def _without_models(kind: type, settings: dict[str, Any]) -> Any:
    """A trainer of this class, with the attributes that its loss reads."""
    trainer: Any = object.__new__(kind)
    vars(trainer).update(
        {name: settings[name] for name in ("beta", "temperature", "loss_top_k", "loss_add_tail") if name in settings},
        reverse_kl_top_1_mode=settings.get("reverse_kl_top_1_mode"),
        args=SimpleNamespace(**settings),
        accelerator=SimpleNamespace(
            num_processes=1, is_main_process=False, unwrap_model=lambda model: model, gather_for_metrics=lambda x: x
        ),
        state=SimpleNamespace(global_step=0),
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        model_kwarg_keys=set(),
        _is_vlm=False,
        _forward_redirection=lambda wrapper, original, method, *given, **named: method(*given, **named),
        _metrics={"train": defaultdict(list)},
    )
    return trainer


def _stable(trainer: Any, batch: Sequences) -> Tensor:
    trainer.teacher_model = GivenLogits(batch.teacher)
    loss, *_ = trainer._compute_loss(GivenLogits(batch.student), _on_policy(batch), batch.mask.sum())
    return loss


def _gkd(trainer: Any, batch: Sequences) -> Tensor:
    trainer.teacher_model = GivenLogits(batch.teacher)
    inputs = {
        "input_ids": batch.tokens,
        "attention_mask": torch.ones_like(batch.tokens),
        "labels": batch.tokens.masked_fill(~batch.mask, -100),
    }
    return trainer.compute_loss(GivenLogits(batch.student), inputs, num_items_in_batch=batch.mask.sum())


def _server(trainer: Any, batch: Sequences) -> Tensor:
    trainer.teacher_client = SimpleNamespace(get_sequence_logprobs=functools.partial(_server_scores, batch.teacher))
    return trainer.compute_loss(GivenLogits(batch.student), _on_policy(batch))


def _on_policy(batch: Sequences) -> dict[str, Tensor]:
    """A batch as the trainers that sample by themselves have it; padding stands after the completions."""
    prompt, completion = batch.tokens.split([PROMPT, batch.tokens.shape[1] - PROMPT], dim=1)
    return {
        "prompt_ids": prompt,
        "prompt_mask": torch.ones_like(prompt),
        "completion_ids": completion,
        "completion_mask": batch.mask[:, PROMPT:].long(),
    }


def _of_server(logps: Tensor, tokens: Tensor, top: int) -> list[dict[str, dict[str, float]]]:
    """What vLLM says of each token [L] but the first: the `top` likeliest there, by rank, and the token itself."""
    places = []
    for row, token in zip(logps.detach(), tokens[1:].tolist(), strict=False):
        order = row.argsort(descending=True).tolist()
        known = order[:top] + [token] * (token not in order[:top])
        places.append({str(v): {"logprob": row[v].item(), "rank": order.index(v) + 1} for v in known})
    return places


def _server_scores(
    teacher: Tensor,
    sequences: Sequence[list[int]],
    prompt_lengths: Sequence[int],
    top_logprobs: int,
    temperature: float,
) -> dict[str, list[Any]]:
    """The answer of TRL's client, by the client's own reading of what vLLM says."""
    from trl.generation.vllm_client import VLLMClient

    answers = []
    for row, sequence, length in zip(teacher, sequences, prompt_lengths, strict=True):
        said = [None, *_of_server((row / temperature).log_softmax(-1), torch.tensor(sequence), top_logprobs)]
        answers.append(VLLMClient._format_sequence_logprobs({"prompt_logprobs": said}, sequence, length, top_logprobs))
    return {name: [each[name] for each in answers] for name in answers[0]}


class GivenLogits(torch.nn.Module):
    """A model whose logits are given: they are its last hidden states, and its head is the identity."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits, self.config = logits, SimpleNamespace()  # which scales and caps nothing
        self.config.get_text_config = lambda: self.config

    def base_model(self, **_: Any) -> Any:
        return SimpleNamespace(last_hidden_state=self.logits)

    def forward(self, **_: Any) -> Any:
        return SimpleNamespace(logits=self.logits)

    def get_output_embeddings(self) -> Any:
        return SimpleNamespace(weight=torch.eye(self.logits.shape[-1], dtype=self.logits.dtype), bias=None)
