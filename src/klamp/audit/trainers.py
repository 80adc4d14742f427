"""The losses of installed trainers, computed by the trainers' own code on a drawn batch: one function per host.

Coefficients are 1; the options of each row are in `trainers.yaml`.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import inspect
import pkgutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import yaml
from torch import Tensor

from klamp.audit.examine import AuditedLoss, Subject, of_beta
from klamp.verify.sequences import PROMPT, Sequences, logprobs_of


def _defaults(config: type) -> dict[str, Any]:
    return {name: x.default for name, x in inspect.signature(config).parameters.items()}


def _table() -> dict[str, list[dict[str, Any]]]:
    return yaml.safe_load((Path(__file__).parent / "trainers.yaml").read_text(encoding="utf-8"))


def _rows(name: str, defaults: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The name and the options of each row of a trainer in `trainers.yaml`."""
    for options in _table()[name]:
        is_default = all(defaults.get(name) == x for name, x in options.items())
        yield ", ".join(f"{name}={x}" for name, x in options.items()) + " (default)" * is_default, options


def trl() -> Subject:
    """`GRPOTrainer`, and the trainers for distillation."""
    import trl

    defaults = _defaults(trl.GRPOConfig)
    losses = [AuditedLoss(name=name, compute=partial(_trl_grpo, **x)) for name, x in _rows("GRPO", defaults)]
    note = f"beta is {defaults['beta']:g} by default: without beta= there is no KL and no reference."
    losses += [loss for path in _table() if path.startswith("trl") for loss in _trl_distillation(path)]
    return Subject(title=f"trl {trl.__version__}, GRPOTrainer", losses=tuple(losses), notes=(note,))


def stand_in(path: str, **options: Any) -> Any:
    """The trainer at `module:start of its name` without models; an attribute that it lacks comes from its arguments."""
    kind = pkgutil.resolve_name(f"{path}Trainer")
    args = SimpleNamespace(**_defaults(pkgutil.resolve_name(f"{path}Config")) | options)
    trainer: Any = object.__new__(type(kind.__name__, (kind,), {"__getattr__": lambda _, name: getattr(args, name)}))
    same = {name: lambda x, *_, **__: x for name in ("unwrap_model", "gather", "gather_for_metrics", "reduce")}
    vars(trainer).update(
        args=args,
        state=SimpleNamespace(global_step=0),
        epsilon_low=getattr(args, "epsilon", None),
        epsilon_high=getattr(args, "epsilon_high", None) or getattr(args, "epsilon", None),
        accelerator=SimpleNamespace(num_processes=1, is_main_process=False, **same),
        model=torch.nn.Module(),
        current_gradient_accumulation_steps=1,
        model_kwarg_keys=set(),
        _forward_redirection=lambda wrapper, original, method, *args, **options: method(*args, **options),
        _metrics={"train": defaultdict(list)},
        _raise_if_local_teacher_tokenizer_mismatch=lambda: None,
        **dict.fromkeys(("aux_loss_enabled", "_is_vlm", "_entropy_bonus_enabled"), False),
    )
    return trainer


def _trl_grpo(policy: Tensor, ref: Tensor, old: Tensor, mask: Tensor, advantages: Tensor, **options: Any) -> Tensor:
    tokens, prompt = mask.long(), torch.ones(len(mask), 1, dtype=torch.long)
    inputs = {"advantages": advantages, "old_per_token_logps": old, "ref_per_token_logps": ref}
    inputs |= dict.fromkeys(("prompt_ids", "prompt_mask"), prompt)
    inputs |= dict.fromkeys(("completion_ids", "completion_mask"), tokens) | {"num_items_in_batch": tokens.sum()}
    trainer = stand_in("trl:GRPO", beta=1.0, steps_per_generation=1, **options)
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (policy, torch.zeros_like(policy), None)
    return trainer._compute_loss(trainer.model, inputs)


def _trl_distillation(path: str) -> Iterator[AuditedLoss]:
    defaults, trainer = _defaults(pkgutil.resolve_name(f"{path}Config")), path.partition(":")[2]
    for name, options in _rows(path, defaults):
        alpha = 1.0 if "=iw_opd" in name else defaults.get("beta")
        own: dict[str, Any] = {"distillation_alpha": alpha} | defaults | options
        yield AuditedLoss(
            name=f"{trainer}, {name.replace('distillation_', '')}",
            compute=lambda batch, options=options: _trl_loss(stand_in(path, **options), batch),
            takes="sequences",
            means=of_beta(options.get("beta", own["distillation_alpha"])),
            temperature=1.0 if trainer == "GKD" else own["temperature"],  # GKD's is for sampling alone
        )


def _trl_loss(trainer: Any, batch: Sequences) -> Tensor:
    """What a trainer for distillation computes from its own form of a batch; padding follows the completions."""
    prompt, completion = batch.tokens.split([PROMPT, batch.tokens.shape[1] - PROMPT], dim=1)
    old = logprobs_of(batch.aligned.old / trainer.temperature, batch.aligned.tokens)
    real = torch.cat([torch.ones_like(prompt), batch.mask[:, PROMPT:]], 1)
    inputs = {"prompt_ids": prompt, "prompt_mask": torch.ones_like(prompt)}
    inputs |= {"completion_ids": completion, "completion_mask": batch.mask[:, PROMPT:].long()}
    inputs |= dict.fromkeys(("input_ids", "teacher_input_ids"), batch.tokens)
    inputs |= dict.fromkeys(("attention_mask", "teacher_attention_mask"), real.long())
    inputs |= {"labels": batch.tokens.masked_fill(~batch.mask, -100), "old_per_token_logps": old[:, PROMPT - 1 :]}
    inputs["rollout_logprobs"] = torch.nn.functional.pad(old, (1, 0))
    trainer.teacher_model = FixedLogits(batch.teacher)
    trainer.teacher_client = SimpleNamespace(get_sequence_logprobs=partial(_served, batch.teacher))
    loss = trainer.compute_loss(FixedLogits(batch.student), inputs, num_items_in_batch=batch.mask.sum())
    return loss[0] if isinstance(loss, tuple) else loss


def _served(
    teacher: Tensor, sequences: Sequence[Any], prompt_lengths: Sequence[int], top_logprobs: int, temperature: float
) -> Mapping[str, Any]:
    """The answer of a teacher's server: of each token of the completions, and of the likeliest tokens at its place."""
    rows = list[Any]()
    for logits, tokens, start in zip(teacher.detach(), sequences, prompt_lengths, strict=True):
        logprobs = (logits[start - 1 : len(tokens) - 1] / temperature).log_softmax(-1)
        sampled, best = torch.tensor(tokens[start:])[:, None], logprobs.topk(top_logprobs)
        rows.append([x.tolist() for x in (*best, logprobs.gather(-1, sampled), sampled)])
    names = ("logprobs", "logprob_token_ids", "actual_logprobs", "actual_token_ids")
    return dict(zip(names, zip(*rows, strict=True), strict=True))


class FixedLogits(torch.nn.Module):
    """A model that returns these logits: they are its last hidden states, and its head is the identity."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        head = SimpleNamespace(weight=torch.eye(logits.shape[-1], dtype=logits.dtype), bias=None)
        self.logits, self.config = logits, SimpleNamespace()  # which scales and caps nothing
        self.config.get_text_config, self.get_output_embeddings = lambda: self.config, lambda: head
        self.base_model = lambda **_: SimpleNamespace(last_hidden_state=logits)

    def forward(self, **_: Any) -> Any:
        return SimpleNamespace(logits=self.logits)


def liger() -> Subject:
    """The chunked GRPO loss, which has the options of TRL's, and the fused JSD."""
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss, LigerFusedLinearJSDLoss

    defaults, jsd = _defaults(LigerFusedLinearGRPOLoss), _defaults(LigerFusedLinearJSDLoss)
    losses = [AuditedLoss(name=name, compute=partial(_liger_grpo, **x)) for name, x in _rows("GRPO", defaults)]
    for name, x in _rows("JSD", jsd):
        compute, means = partial(_liger_jsd, **x), of_beta(x["beta"])
        losses.append(AuditedLoss(name=f"JSDLoss, {name}", compute=compute, takes="sequences", means=means))
    note = f"beta is {defaults['beta']:g} by default; without a reference model it compares the policy with itself."
    notes = note, "Its Triton kernels of the same losses need a GPU and are not audited."
    title = f"liger-kernel {version('liger-kernel')}, LigerFusedLinearGRPOLoss"
    return Subject(title=title, losses=tuple(losses), notes=notes)


def _liger_grpo(policy: Tensor, ref: Tensor, old: Tensor, mask: Tensor, advantages: Tensor, **options: Any) -> Tensor:
    from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOFunction

    scores = {"per_token_logps": policy, "ref_per_token_logps": ref, "old_per_token_logps": old}
    masks = dict.fromkeys(("attention_mask", "full_attention_mask"), mask.to(policy.dtype))
    options |= {"beta": 1.0, "max_completion_length": 256, "advantages": advantages}
    return LigerFusedLinearGRPOFunction.ppo_loss_fn(**scores, **masks, **options)[0]


def _liger_jsd(batch: Sequences, beta: float) -> Tensor:
    """Liger's fused JSD without its loss on labels (half of the whole by default)."""
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    student, teacher, tokens, mask, _ = batch.aligned
    heads = [torch.eye(x.shape[-1], dtype=x.dtype) for x in (student, teacher)]
    labels = tokens.masked_fill(~mask, -100).flatten()
    fused = LigerFusedLinearJSDLoss(beta=beta, weight_hard_loss=0.0, weight_soft_loss=1.0, compiled=False)
    return fused(student.flatten(0, 1), heads[0], teacher.flatten(0, 1), heads[1], labels)


def torchrl() -> Subject:
    """`GRPOLoss`, the k3 estimate that it publishes, and `DistillationLoss`."""
    from torchrl.objectives.llm import GRPOLoss, k3_kl_token_estimate

    losses = (
        AuditedLoss(name="GRPOLoss, kl_to_ref_coeff", compute=torchrl_kl),
        AuditedLoss(name="k3_kl_token_estimate", takes="function", compute=lambda p, q: k3_kl_token_estimate(q, p)),
        AuditedLoss(name="DistillationLoss, kl_direction=reverse (default)", takes="sequences", compute=_torchrl_kd),
    )
    note = f"kl_to_ref_coeff is {GRPOLoss(None).kl_to_ref_coeff} by default: without it there is no KL in the loss."
    return Subject(title=f"torchrl {version('torchrl')}, GRPOLoss", losses=losses, notes=(note,))


def torchrl_kl(policy: Tensor, ref: Tensor, old: Tensor, mask: Tensor, advantages: Tensor) -> Tensor:
    """torchrl's whole loss, in which the actor's log-probabilities are `policy`."""
    from tensordict import TensorDict
    from torchrl.objectives.llm import GRPOLoss

    loss = GRPOLoss(None, kl_to_ref_coeff=1.0, entropy_bonus=False)
    loss._get_cur_log_prob = lambda tensordict: (policy, SimpleNamespace(mask=mask), False)  # pyright: ignore
    keys, pushes = loss.tensor_keys, advantages[:, None, None].expand(*policy.shape, 1)
    columns = {"advantage": pushes, keys.action: mask.long(), keys.sample_log_prob: old, keys.ref_log_probs: ref}
    parts = loss(TensorDict(columns, batch_size=[len(policy)]))
    return parts.loss_kl_to_ref + parts.loss_objective


def _torchrl_kd(batch: Sequences) -> Tensor:
    from tensordict import TensorDict, lazy_stack
    from tensordict.nn import TensorDictModule
    from torchrl.objectives.llm import DistillationLoss

    student, teacher, tokens, mask, _ = batch.aligned
    scores, theirs = (logprobs_of(x, tokens) for x in (student, teacher))
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


def verl() -> Subject:
    """`ppo_loss`, every type of `kl_penalty` in the loss and in the reward, and the losses of distillation."""
    from verl.workers.config import ActorConfig, DistillationLossConfig
    from verl.workers.utils import losses

    options, audited = _defaults(ActorConfig), list[AuditedLoss]()
    parts: dict[str, tuple[Any, Callable[..., Tensor], Mapping[str, Any]]] = {
        "ppo_loss": ("logprobs", _verl_loss, options),
        "kl_loss": ("function", losses.kl_penalty, {"kl_penalty": options["kl_loss_type"]}),
        "reward": ("reward", losses.kl_penalty, {}),
        "distillation": ("sequences", _verl_distillation, _defaults(DistillationLossConfig)),
    }
    for where, (takes, compute, defaults) in parts.items():
        for name, x in _rows(where, defaults):
            means, call = "forward" if "forward" in name else "reverse", partial(compute, **x)
            audited.append(AuditedLoss(name=f"{where}, {name}", takes=takes, compute=call, means=means))
    note = f"use_kl_loss is {options['use_kl_loss']} by default: without it there is no KL in the loss."
    return Subject(title=f"verl {version('verl')}, ppo_loss and apply_kl_penalty", losses=tuple(audited), notes=(note,))


def _verl_batch(x: Tensor, mask: Tensor, **columns: Tensor) -> tuple[Tensor, Any]:
    """verl's layout: numbers without padding, one prompt token per row, each number one place before its token."""
    from tensordict import TensorDict

    prompt = torch.ones(len(mask), 1, dtype=torch.long)
    columns |= {"prompts": prompt, "attention_mask": torch.cat([prompt, mask.long()], 1)}
    columns |= dict.fromkeys(("responses", "response_mask"), mask.long())
    data = TensorDict(columns, batch_size=[len(mask)])
    for name, value in {"dp_size": 1, "batch_num_tokens": None, "global_batch_size": None}.items():
        data.set_non_tensor(name, value)
    rows = zip(x, mask, strict=True)
    return torch.cat([torch.cat([row[on], torch.zeros_like(row[:1])]) for row, on in rows]), data


def _verl_config(loss_mode: str = "vanilla", **options: Any) -> Any:
    from verl.workers.config import ActorConfig, PolicyLossConfig

    options |= {"strategy": "fsdp", "rollout_n": 2, "ppo_micro_batch_size_per_gpu": 1}
    return ActorConfig(**options, policy_loss=PolicyLossConfig(loss_mode=loss_mode))


def _verl_loss(policy: Tensor, ref: Tensor, old: Tensor, mask: Tensor, advantages: Tensor, **options: Any) -> Tensor:
    from verl.workers.utils.losses import ppo_loss

    pushes = advantages[:, None] * mask
    flat, data = _verl_batch(policy, mask, old_log_probs=old, ref_log_prob=ref, advantages=pushes)
    return ppo_loss(_verl_config(use_kl_loss=True, kl_loss_coef=1.0, **options), {"log_probs": flat}, data)[0]


def _verl_distillation(batch: Sequences, **options: Any) -> Tensor:
    from verl.trainer.distillation import losses
    from verl.workers.config import DistillationLossConfig

    student, teacher, tokens, mask, old = (x[:, PROMPT - 1 :] for x in batch.aligned)
    config = SimpleNamespace(distillation_loss=DistillationLossConfig(use_task_rewards=False, **options))
    flat, data = _verl_batch(logprobs_of(student, tokens), mask, old_log_probs=logprobs_of(old, tokens))
    output = {"log_probs": flat}
    if "topk" in config.distillation_loss.loss_mode:
        best = _verl_batch(teacher.log_softmax(-1), mask)[0].topk(128)
        for name, x in {"teacher_logprobs": best.values, "teacher_ids": best.indices}.items():
            data.set_non_tensor(name, torch.nested.as_nested_tensor([x], layout=torch.jagged))
        heads = losses.compute_topk_loss(_verl_config(), config, data, _verl_batch(student, mask)[0][None], "thd")
        output |= {name: x[0] for name, x in heads.items()}
    else:
        data.set_non_tensor("teacher_logprobs", _verl_batch(logprobs_of(teacher, tokens), mask)[0][:, None])
    return losses.distillation_loss(_verl_config(), config, output, data)[0]
