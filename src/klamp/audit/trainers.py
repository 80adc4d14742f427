"""The losses of installed trainers, computed by the trainers' own code on a drawn batch: one function per host.

A host's loss at beta 1 less the loss at beta 0, advantages 0, is its KL part. `stand_in` makes TRL's trainers without
models: it has what the loss reads, and answers for logits and log-probabilities.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import inspect
import pkgutil
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from klamp.audit.examine import PROMPT, AuditedLoss, Sequences, Subject, of_beta


def _marked(option: str, value: object, default: object) -> str:
    """An option with its value, marked where that is the default: `loss_type=dapo (default)`."""
    return f"{option}={value}" + " (default)" * (value == default)


def _defaults(config: type) -> dict[str, Any]:
    return {name: x.default for name, x in inspect.signature(config).parameters.items()}


def _grpo_losses(loss: Callable[..., Tensor], defaults: Mapping[str, Any]) -> list[AuditedLoss]:
    """A loss of (beta, policy, ref, old, mask) with the options of TRL's GRPO: one for each that changes the KL."""

    def kl_part(*inputs: Tensor, **options: Any) -> Tensor:
        return loss(1.0, *inputs, loss_type="grpo", **options) - loss(0.0, *inputs, loss_type="grpo", **options)

    option, default = "use_bias_correction_kl", bool(defaults["use_bias_correction_kl"])
    rows: dict[str, dict[str, Any]] = {_marked(option, x, default): {option: x} for x in (default, not default)}
    rows["sequence-level ratio, bias correction"] = {option: True, "importance_sampling_level": "sequence"}
    return [AuditedLoss(name=name, compute=partial(kl_part, **options)) for name, options in rows.items()]


def trl() -> Subject:
    """`GRPOTrainer`, and the trainers for distillation."""
    import trl

    defaults = _defaults(trl.GRPOConfig)
    beta = f"beta is {defaults['beta']:g} by default: without beta= there is no KL and no reference."
    losses = _grpo_losses(_trl_grpo, defaults)
    losses += [_trl_distillation(path, options) for path, choices in CHOICES.items() for options in choices]
    return Subject(title=f"trl {trl.__version__}, GRPOTrainer", losses=tuple(losses), notes=(beta,))


def stand_in(path: str, **options: Any) -> Any:
    """The trainer at `module:start of its name` without models; an attribute that it lacks is that of its arguments."""
    kind = pkgutil.resolve_name(f"{path}Trainer")
    args = SimpleNamespace(**_defaults(pkgutil.resolve_name(f"{path}Config")) | options)
    trainer: Any = object.__new__(type(kind.__name__, (kind,), {"__getattr__": lambda _, name: getattr(args, name)}))
    same = {name: lambda x, *_, **__: x for name in ("unwrap_model", "gather", "gather_for_metrics", "reduce")}
    vars(trainer).update(
        args=args,
        epsilon_low=getattr(args, "epsilon", None),
        epsilon_high=getattr(args, "epsilon_high", None) or getattr(args, "epsilon", None),
        accelerator=SimpleNamespace(num_processes=1, is_main_process=False, **same),
        state=SimpleNamespace(global_step=0),
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        model_kwarg_keys=set(),
        _forward_redirection=lambda wrapper, original, method, *args, **options: method(*args, **options),
        _metrics={"train": defaultdict(list)},
        **dict.fromkeys(("aux_loss_enabled", "_is_vlm", "_entropy_bonus_enabled"), False),
    )
    return trainer


def _trl_grpo(beta: float, policy: Tensor, ref: Tensor, old: Tensor, mask: Tensor, **options: Any) -> Tensor:
    tokens, prompt = mask.long(), torch.ones(len(mask), 1, dtype=torch.long)
    inputs = {
        **dict.fromkeys(("prompt_ids", "prompt_mask"), prompt),
        **dict.fromkeys(("completion_ids", "completion_mask"), tokens),
        "advantages": torch.zeros(len(policy), dtype=policy.dtype),
        "old_per_token_logps": old,
        "ref_per_token_logps": ref,
        "num_items_in_batch": tokens.sum(),
    }
    trainer = stand_in("trl:GRPO", beta=beta, **options)
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (policy, torch.zeros_like(policy), None)
    return trainer._compute_loss(trainer.model, inputs)


TOP = 3  # the teacher's likeliest tokens that a server gives, of the audit's twenty
CHOICES: dict[str, Sequence[dict[str, Any]]] = {
    "trl:Distillation": ({"beta": 1.0}, {"beta": 0.5}, {"beta": 0.0}, {"beta": 1.0, "temperature": 2.0}),
    "trl.experimental.gkd:GKD": ({"beta": 0.5}, {"beta": 0.0}, {"beta": 1.0}),
    "trl.experimental.server_distillation:ServerDistillation": (
        {"beta": 1.0},
        {"beta": 1.0, "loss_add_tail": False},
        {"beta": 0.5},
        {"beta": 0.0, "loss_top_k": TOP},
        {"beta": 0.0, "loss_top_k": TOP, "loss_add_tail": False},
    ),
}
"""Trainer -> the options that are audited; each trainer's default first."""


def _trl_distillation(path: str, options: dict[str, Any]) -> AuditedLoss:
    defaults = _defaults(pkgutil.resolve_name(f"{path}Config"))
    text = ", ".join(f"{name}={value}" for name, value in options.items())
    text += " (default)" * all(value == defaults[name] for name, value in options.items())
    options = {"temperature": 1.0, **options}
    return AuditedLoss(
        name=f"{path.partition(':')[2]}Trainer, {text}",
        compute=lambda batch: _trl_loss(stand_in(path, **options), batch),
        takes="sequences",
        means=of_beta(options["beta"]),
        temperature=options["temperature"],
    )


def _trl_loss(trainer: Any, batch: Sequences) -> Tensor:
    """What a trainer for distillation computes from its own form of a batch; padding stands after the completions."""
    prompt, completion = batch.tokens.split([PROMPT, batch.tokens.shape[1] - PROMPT], dim=1)
    inputs = {
        "prompt_ids": prompt,
        "prompt_mask": torch.ones_like(prompt),
        "completion_ids": completion,
        "completion_mask": batch.mask[:, PROMPT:].long(),
        "input_ids": batch.tokens,
        "attention_mask": torch.ones_like(batch.tokens),
        "labels": batch.tokens.masked_fill(~batch.mask, -100),
    }
    trainer.teacher_model = FixedLogits(batch.teacher)
    trainer.teacher_client = SimpleNamespace(get_sequence_logprobs=partial(_served, batch.teacher))
    loss = trainer.compute_loss(FixedLogits(batch.student), inputs, num_items_in_batch=batch.mask.sum())
    return loss[0] if isinstance(loss, tuple) else loss


def _served(
    teacher: Tensor, sequences: Sequence[Any], prompt_lengths: Sequence[int], top_logprobs: int, temperature: float
) -> Mapping[str, list[Any]]:
    """The answer of a teacher's server: of each token of the completions, and of the likeliest tokens at its place."""
    answer = defaultdict[str, list[Any]](list)
    for logits, tokens, start in zip(teacher.detach(), sequences, prompt_lengths, strict=True):
        logprobs = (logits[start - 1 : len(tokens) - 1] / temperature).log_softmax(-1)
        sampled, best = torch.tensor(tokens[start:])[:, None], logprobs.topk(top_logprobs)
        answer["logprobs"].append(best.values.tolist())
        answer["logprob_token_ids"].append(best.indices.tolist())
        answer["actual_logprobs"].append(logprobs.gather(-1, sampled).tolist())
        answer["actual_token_ids"].append(sampled.tolist())
    return answer


class FixedLogits(torch.nn.Module):
    """A model that returns these logits: they are its last hidden states, and its head is the identity."""

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


def liger() -> Subject:
    """The chunked GRPO loss, which has the options of TRL's, and the fused JSD."""
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss, LigerFusedLinearJSDLoss

    defaults, jsd = _defaults(LigerFusedLinearGRPOLoss), _defaults(LigerFusedLinearJSDLoss)
    losses = _grpo_losses(_liger_grpo, defaults)
    for beta in (0.5, 0.0, 1.0):
        name, compute = f"LigerFusedLinearJSDLoss, {_marked('beta', beta, jsd['beta'])}", partial(_liger_jsd, beta=beta)
        losses.append(AuditedLoss(name=name, compute=compute, takes="sequences", means=of_beta(beta)))
    title = f"liger-kernel {version('liger-kernel')}, LigerFusedLinearGRPOLoss"
    note = f"beta is {defaults['beta']:g} by default; without a reference model it compares the policy with itself."
    triton = "Its Triton kernels of the same losses need a GPU and are not audited."
    return Subject(title=title, losses=tuple(losses), notes=(note, triton))


def _liger_grpo(beta: float, policy: Tensor, ref: Tensor, old: Tensor, mask: Tensor, **options: Any) -> Tensor:
    """What Liger's chunked loss computes from the log-probabilities of a chunk."""
    from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOFunction

    scores = {"per_token_logps": policy, "ref_per_token_logps": ref, "old_per_token_logps": old}
    masks = dict.fromkeys(("attention_mask", "full_attention_mask"), mask.to(policy.dtype))
    advantages = torch.zeros(len(policy), dtype=policy.dtype)
    options |= {"beta": beta, "max_completion_length": 256, "advantages": advantages}
    return LigerFusedLinearGRPOFunction.ppo_loss_fn(**scores, **masks, **options)[0]


def _liger_jsd(batch: Sequences, beta: float) -> Tensor:
    """Liger's fused JSD without its loss on labels (half of the whole by default)."""
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    student, teacher, tokens, mask = batch.aligned
    heads = [torch.eye(x.shape[-1], dtype=x.dtype) for x in (student, teacher)]
    labels = tokens.masked_fill(~mask, -100).flatten()
    fused = LigerFusedLinearJSDLoss(beta=beta, weight_hard_loss=0.0, weight_soft_loss=1.0, compiled=False)
    return fused(student.flatten(0, 1), heads[0], teacher.flatten(0, 1), heads[1], labels)


def torchrl() -> Subject:
    """`GRPOLoss`, the k3 estimate that it publishes, and `DistillationLoss`."""
    from torchrl.objectives.llm import GRPOLoss, k3_kl_token_estimate

    rows: tuple[tuple[str, Any, Callable[..., Tensor]], ...] = (
        ("GRPOLoss, kl_to_ref_coeff", "logprobs", torchrl_kl),
        ("k3_kl_token_estimate(ref, policy)", "function", lambda policy, ref: k3_kl_token_estimate(ref, policy)),
        ("DistillationLoss, kl_direction=reverse (default)", "sequences", _torchrl_distillation),
    )
    losses = tuple(AuditedLoss(name=name, takes=takes, compute=compute) for name, takes, compute in rows)
    note = f"kl_to_ref_coeff is {GRPOLoss(None).kl_to_ref_coeff} by default: without it there is no KL in the loss."
    return Subject(title=f"torchrl {version('torchrl')}, GRPOLoss", losses=losses, notes=(note,))


def torchrl_kl(policy: Tensor, ref: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    """The KL part of torchrl's loss; in it the actor's log-probabilities are `policy`."""
    from tensordict import TensorDict
    from torchrl.objectives.llm import GRPOLoss

    loss = GRPOLoss(None, kl_to_ref_coeff=1.0, entropy_bonus=False)
    loss._get_cur_log_prob = lambda tensordict: (policy, SimpleNamespace(mask=mask), False)  # pyright: ignore
    batch = TensorDict({"advantage": torch.zeros_like(policy)[..., None]}, batch_size=[len(policy)])
    batch[loss.tensor_keys.action] = torch.zeros_like(mask, dtype=torch.long)
    batch[loss.tensor_keys.sample_log_prob] = old
    batch[loss.tensor_keys.ref_log_probs] = ref
    return loss(batch).loss_kl_to_ref


def _torchrl_distillation(batch: Sequences) -> Tensor:
    from tensordict import TensorDict, lazy_stack
    from tensordict.nn import TensorDictModule
    from torchrl.objectives.llm import DistillationLoss

    student, teacher, tokens, mask = batch.aligned
    scores, theirs = (x.log_softmax(-1).gather(-1, tokens[..., None])[..., 0] for x in (student, teacher))
    actor = TensorDictModule(lambda _: scores, in_keys=["tokens"], out_keys=[("log_probs", "full")])
    loss = DistillationLoss(actor)
    loss.set_keys(history="tokens")
    columns = {
        "tokens": tokens,
        ("masks", "all_assistant_mask"): mask,
        ("masks", "all_attention_mask"): torch.ones_like(mask),
        ("next", "teacher_log_probs", "full"): theirs,
    }
    rows = [TensorDict({name: x[row] for name, x in columns.items()}) for row in range(len(tokens))]
    return loss(lazy_stack(rows)).loss_distill


VERL_LOSSES = ("low_var_kl (k3)", "kl (k1)", "abs", "mse (k2)", "low_var_kl+ (k3+)", "kl+ (k1+)", "abs+", "full")
VERL_REWARDS = ("kl (k1)", "abs", "mse (k2)", "low_var_kl (k3)")  # each type with its other name


def verl() -> Subject:
    """Every type of `kl_penalty`, which `ppo_loss` calls for a loss and `apply_kl_penalty` for a reward."""
    from verl.workers.config import ActorConfig
    from verl.workers.utils import losses

    def kl(policy: Tensor, ref: Tensor, *, kind: str) -> Tensor:
        return losses.kl_penalty(logprob=policy, ref_logprob=ref, kl_penalty=kind.partition(" ")[0])

    options = _defaults(ActorConfig)
    default = next(name for name in VERL_LOSSES if name.split()[0] == options["kl_loss_type"])
    rows: list[tuple[str, Any, str]] = [(_marked("kl_loss_type", x, default), "function", x) for x in VERL_LOSSES]
    rows += [(f"in the reward, kl_penalty={x}", "reward", x) for x in VERL_REWARDS]
    audited = tuple(AuditedLoss(name=name, takes=takes, compute=partial(kl, kind=x)) for name, takes, x in rows)
    note = f"use_kl_loss is {options['use_kl_loss']} by default: without it there is no KL in the loss."
    return Subject(title=f"verl {version('verl')}, ppo_loss and apply_kl_penalty", losses=audited, notes=(note,))
