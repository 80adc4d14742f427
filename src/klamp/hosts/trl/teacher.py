"""The teacher of a TRL trainer: its model, its scores of a generation batch, its KL in advantage or loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AutoTokenizer
from trl.trainer import grpo_trainer

from klamp.config.teacher import TeacherConfig
from klamp.core.penalty import shifted_advantages, token_penalty
from klamp.core.term import KLTerm, prepare
from klamp.core.types import Batch
from klamp.errors import ConfigError
from klamp.hosts.common.coefficient import TEACHER, batch_of
from klamp.hosts.common.effective import EffectiveTerm
from klamp.hosts.common.step_metrics import Window
from klamp.hosts.common.teachers import check_tokens, no_prompt, prefix_kl
from klamp.hosts.trl.fast_scoring import Call
from klamp.hosts.trl.reference import check_folder, no_sum, plain_model, predicted, prepared_model, why_no_head
from klamp.scoring.model_parts import Predictions, PrefixKL, Told, check_same_vocabulary, prefix_divergence
from klamp.scoring.vllm_reference import PROBES, VLLMReference, connect

PREDICTED = "klamp_teacher_predictions"
"""In a batch: what the teacher predicts with, [B, T, ...]: its hidden states, or what a server told."""


@dataclass
class Teacher:
    """What a trainer keeps of its teacher."""

    config: TeacherConfig
    term: KLTerm
    model: Any
    """None: the policy itself (with its adapter off), or a server."""
    server: VLLMReference | None = None
    """The server that scores; None: a model does."""
    windows: dict[str, Window] = field(default_factory=lambda: {mode: Window() for mode in ("train", "eval")})
    """The measurements of the present step in each mode."""
    measured: tuple[Tensor, dict[str, Tensor]] | None = None
    """Of the last micro-batch the KL at each prefix, [B, T], and what was seen of it, detached."""

    @property
    def how(self) -> PrefixKL | None:
        """The KL that is summed at each prefix; None: the sampled token's log-ratio is all."""
        return prefix_kl(self.config)

    def coefficient(self, trainer: Any) -> float:
        """The coefficient in force."""
        return self.config.coefficient(trainer.state.global_step, max(trainer.state.max_steps, 1))


def join(trainer: Any, config: TeacherConfig, given: Any) -> Teacher:
    """Load the teacher, or take the one that is given, and prepare it as TRL prepares a reference."""
    policy = trainer.accelerator.unwrap_model(trainer.model)
    if config.kind == "adapter_off" and not hasattr(policy, "peft_config"):
        raise ConfigError(
            "teacher_kind='adapter_off' needs a model with a PEFT adapter",
            why="without an adapter there is nothing to switch off",
            fix="pass peft_config, or name teacher_model",
        )
    made = Teacher(config, config.build_term(), None)
    if config.kind == "remote":
        made.server = _server(trainer, config)
    elif config.kind == "frozen":
        model = given
        if model is None:
            check_folder(config.teacher_model)
            options: dict[str, Any] = {"dtype": next(policy.parameters()).dtype}
            model = grpo_trainer.create_model_from_path(cast(str, config.teacher_model), **options)
            check_tokens(tokenizer_of(config.teacher_model), trainer._tokenizer, name=str(config.teacher_model))
        check_same_vocabulary(model, policy, who="teacher", larger=True)
        made.model = prepared_model(trainer, model)
    _check_prefixes(trainer, made)
    return made


def tokenizer_of(name: str | None) -> Any:
    """The tokenizer beside a model; None: there is none."""
    with suppress(OSError, ValueError):  # as transformers says that there is none
        return AutoTokenizer.from_pretrained(name)
    return None


def _check_prefixes(trainer: Any, teacher: Teacher) -> None:
    """Refuse a KL at each prefix of models whose hidden states and head cannot be had."""
    models = [trainer.model] if teacher.model is None else [trainer.model, teacher.model]
    reasons = [why_no_head(trainer, model) for model in models if teacher.how is not None]
    if reason := next(filter(None, reasons), ""):
        raise no_sum("teacher_estimator", teacher.config.teacher_estimator, trainer, reason)


def _server(trainer: Any, config: TeacherConfig) -> VLLMReference:
    """The server that teaches, found to fit the first prompts, those that the teacher sees."""
    rows = list(islice(iter(trainer.train_dataset), PROBES))
    found = _ids(trainer, rows, config.teacher_prompt or "prompt")
    return connect(
        str(config.teacher_url),
        config.teacher_name,
        top_k=config.head_size,
        temperature=trainer.temperature,
        longest=(max(map(len, found)), trainer.max_completion_length),
        prompts=[trainer._tokenizer.decode(ids) for ids in found],
        tokenizer=trainer._tokenizer,
        who="teacher",
    )


@torch.no_grad()
def keep_scores(trainer: Any, rows: Sequence[Mapping[str, Any]], output: dict[str, Any]) -> None:
    """Score a generation batch with the teacher, behind the prompts that it sees; the scores travel with the batch."""
    teacher: Teacher = trainer._klamp.teacher
    column = teacher.config.teacher_prompt
    prompts = _told(trainer, rows, column, output["prompt_ids"].device) if column else None
    call = scoring_call(trainer, output, prompts)
    if teacher.server is not None:
        given = Call(**call).completions(slice(None))
        scores = teacher.server.score(given, temperature=trainer.temperature)
        output[TEACHER], told = scores.logprobs, scores.predictions
        if told is not None:
            output[PREDICTED] = told.values
        return
    policy, off = trainer.accelerator.unwrap_model(trainer.model), teacher.config.kind == "adapter_off"
    model = trainer.model if teacher.model is None else teacher.model
    with policy.disable_adapter() if off else nullcontext(), trainer._klamp.listening() as seen:
        scored = trainer._get_per_token_logps_and_entropies(model, **call)
    output[TEACHER] = scored[0].detach()
    if teacher.how is not None:
        output[PREDICTED] = cast(Tensor, seen[-1].hidden).clone()


def scoring_call(
    trainer: Any, output: Mapping[str, Any], prompts: tuple[Tensor, Tensor] | None = None
) -> dict[str, Any]:
    """What TRL's scoring method is asked for a generation batch, behind `prompts` (ids and mask) or its own."""
    prompt, mask = (output["prompt_ids"], output["prompt_mask"]) if prompts is None else prompts
    return {
        "input_ids": torch.cat([prompt, output["completion_ids"]], dim=1),
        "attention_mask": torch.cat([mask, output["completion_mask"]], dim=1),
        "logits_to_keep": output["completion_ids"].shape[1],
        "batch_size": trainer.args.per_device_train_batch_size,
    }


def _ids(trainer: Any, rows: Sequence[Mapping[str, Any]], column: str) -> list[list[int]]:
    for row in rows:
        if not row.get(column):
            raise no_prompt(column, row)
    found, *_ = trainer._tokenize_prompts([row[column] for row in rows])
    return found


def _told(trainer: Any, rows: Sequence[Mapping[str, Any]], column: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """The prompts of a column, padded on the left: ids and mask, [B, P]."""
    ids = [torch.tensor(each, device=device) for each in _ids(trainer, rows, column)]
    mask = grpo_trainer.pad([torch.ones_like(each) for each in ids], padding_value=0, padding_side="left")
    return grpo_trainer.pad(ids, padding_value=trainer._tokenizer.pad_token_id, padding_side="left"), mask


def in_advantages(trainer: Any, inputs: Mapping[str, Any], old_logprobs: Tensor | None) -> Tensor:
    """The advantages of a generation batch, with the KL to the teacher where it enters there. [B] or [B, T]"""
    teacher: Teacher = trainer._klamp.teacher
    coefficient = teacher.coefficient(trainer)
    if teacher.term.placement != "advantage" or coefficient == 0:
        return inputs["advantages"]
    assert old_logprobs is not None
    prepared = prepare(batch_of(inputs, old_logprobs), teacher.term)
    return shifted_advantages(inputs["advantages"], prepared, beta=coefficient)


def penalty(trainer: Any, inputs: Mapping[str, Any], policy_logprobs: Tensor, hidden: Tensor | None) -> Tensor | float:
    """The coefficient times the per-token KL to the teacher, [B, T]; 0 where it is not in the loss."""
    teacher: Teacher | None = trainer._klamp.teacher
    if teacher is None or teacher.term.placement != "loss":
        return 0.0
    batch = batch_of(inputs, policy_logprobs)
    if teacher.how is not None:
        kl, seen = _prefixes(trainer, inputs, batch, hidden)
        batch, teacher.measured = batch.with_anchor("teacher", kl=kl), (kl.detach(), seen)
    return teacher.coefficient(trainer) * token_penalty(prepare(batch, teacher.term))


def _prefixes(
    trainer: Any, inputs: Mapping[str, Any], batch: Batch, hidden: Tensor | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """The KL to the teacher at each prefix that is trained on, 0 elsewhere, and what was seen of it. [B, T] each"""
    teacher: Teacher = trainer._klamp.teacher
    where, values, ids = batch.mask, inputs[PREDICTED], inputs["completion_ids"]
    policy_model = plain_model(trainer, trainer.model)
    policy = predicted(policy_model, cast(Tensor, hidden)[where])
    if teacher.server is not None:
        anchor: Predictions = Told(values=values[where], head=None)
    else:
        anchor = predicted(
            policy_model if teacher.model is None else plain_model(trainer, teacher.model), values[where]
        )
    weight = None
    if teacher.config.teacher_off_policy != "none":
        weight = (batch.policy_logprobs.detach() - cast(Tensor, batch.logprobs_of("sampler")))[where]
    how = cast(PrefixKL, teacher.how)
    options = {"temperature": trainer.temperature, "log_weight": weight}
    kl, seen = prefix_divergence(policy, anchor, ids[where], how, **options)
    blank = torch.zeros(where.shape, dtype=kl.dtype, device=kl.device)
    whole = {name: blank.masked_scatter(where, each.to(kl.dtype)) for name, each in {"": kl, **seen}.items()}
    return whole.pop(""), whole


def after_loss(trainer: Any, inputs: Mapping[str, Any], policy_logprobs: Tensor) -> None:
    """Add a micro-batch to the measurements; at the end of an optimizer step log them."""
    teacher: Teacher = trainer._klamp.teacher
    mode = "train" if trainer.model.training else "eval"
    window, batch = teacher.windows[mode], batch_of(inputs, policy_logprobs.detach())
    if teacher.measured is not None:
        kl, seen = teacher.measured
        batch = batch.with_anchor("teacher", kl=kl)
        for name, values in seen.items():
            window.add_values(f"teacher/{name}", values, batch.mask)
    window.add(prepare(batch, teacher.term))
    if mode == "train" and not trainer.accelerator.sync_gradients:
        return
    found = window.emit(trainer.accelerator) | {"teacher/coef": teacher.coefficient(trainer)}
    for name, value in found.items():
        trainer._metrics[mode][name].append(value)


def effective_term(trainer: Any) -> EffectiveTerm | None:
    """The KL to the teacher in words; None where there is none."""
    teacher: Teacher | None = getattr(getattr(trainer, "_klamp", None), "teacher", None)
    if teacher is None:
        return None
    kind = teacher.config.kind
    who = {"adapter_off": "the policy with its adapter off", "live": "the policy itself"}.get(kind)
    who = who or (teacher.config.teacher_model or "" if teacher.server is None else teacher.server.describe())
    seen = f", behind the column {teacher.config.teacher_prompt}" if teacher.config.teacher_prompt else ""
    return EffectiveTerm.to_teacher(teacher.config, who=who + seen, coefficient=teacher.coefficient(trainer))
