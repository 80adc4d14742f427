"""The teacher of a TRL trainer: its model, its scores of a generation batch, its KL in advantage or loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from itertools import islice
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AutoTokenizer
from trl.trainer import grpo_trainer

from klamp.config.teacher import TeacherConfig
from klamp.core.penalty import token_penalty
from klamp.core.term import prepare
from klamp.core.types import BOUND_IT, FORBIDDEN, Batch, check_logprobs
from klamp.errors import DataError, refuse
from klamp.hosts.common.anchors import check_apart, check_room, check_tokens, no_prompt
from klamp.hosts.common.coefficient import TEACHER, batch_of, loss_mask
from klamp.hosts.common.effective import EffectiveTerm
from klamp.hosts.common.step_metrics import Window
from klamp.hosts.trl import reference
from klamp.hosts.trl.fast_scoring import ScoringCall
from klamp.hosts.trl.grpo_config import needs_adapter
from klamp.hosts.trl.session import Scoring, Teacher, TRLTrainer, session_of
from klamp.scoring.model_parts import Predictions, PrefixKL, Told, check_same_vocabulary, prefix_divergence
from klamp.scoring.vllm_reference import PROBES, VLLMReference, Who, connect

PREDICTED = "klamp_teacher_predictions"
"""In a batch: the teacher's predictions, [B, T, ...]: its hidden states, or a server's numbers."""


def join(trainer: TRLTrainer, config: TeacherConfig, model: Any) -> Teacher:
    """Load the teacher, or take the model that is passed, and prepare it as TRL prepares a reference."""
    policy = trainer.accelerator.unwrap_model(trainer.model)
    refuse([needs_adapter("teacher_kind", config.kind, hasattr(policy, "peft_config"), instead="name teacher_model")])
    if config.kind == "remote":
        teacher = Teacher(config, server=_server(trainer, config))
    elif config.kind == "frozen":
        if model is None:
            reference.check_folder(config.teacher_model)
            options: dict[str, Any] = {"dtype": next(policy.parameters()).dtype}
            model = grpo_trainer.create_model_from_path(cast(str, config.teacher_model), **options)
        check_apart(model, policy, who="teacher")
        check_tokenizer(trainer, model, who="teacher")
        check_same_vocabulary(model, policy, who="teacher", larger=True)
        teacher = Teacher(config, reference.prepared_model(trainer, model))
    else:
        teacher = Teacher(config)
    for scoring_model in [trainer.model, teacher.model] if teacher.prefixes is not None else []:
        if scoring_model is not None and (reason := reference.why_no_head(trainer, scoring_model)):
            raise reference.no_sum("teacher_estimator", config.teacher_estimator, trainer, reason)
    return teacher


def check_tokenizer(trainer: TRLTrainer, model: Any, *, who: Who, name: str = "") -> None:
    """Compare the tokenizer beside an anchor with the trainer's, by `check_tokens`; a model without a name has none."""
    theirs, name = None, model.config._name_or_path or name
    if not name:
        return
    with suppress(OSError, ValueError):  # raised by transformers if there is no tokenizer
        theirs = AutoTokenizer.from_pretrained(name)
    options = getattr(trainer, "chat_template_kwargs", None)
    check_tokens(theirs, trainer._tokenizer, name=name, who=who, template_options=options)


def _server(trainer: TRLTrainer, config: TeacherConfig) -> VLLMReference:
    """The server that teaches, which has to fit the first prompts that the teacher sees."""
    rows = list(islice(iter(trainer.train_dataset), PROBES))
    prompts = _ids(trainer, rows, config.teacher_prompt or "prompt")
    return connect(
        str(config.teacher_url),
        config.teacher_name,
        top_k=config.head_size,
        temperature=trainer.temperature,
        longest=(max(map(len, prompts)), trainer.args.max_completion_length),
        prompts=[trainer._tokenizer.decode(ids) for ids in prompts],
        tokenizer=trainer._tokenizer,
        who="teacher",
    )


def fingerprint(trainer: TRLTrainer) -> dict[str, list[float]]:
    """A teacher's scores of the first tokens of a few prompts; empty: the teacher has no weights of its own."""
    teacher, scores = trainer._klamp.teacher, list[float]()
    if teacher is None or (teacher.model is None and teacher.server is None):
        return {}
    for row in islice(iter(trainer.train_dataset), PROBES):
        tokens = [*_ids(trainer, [row], "prompt")[0][:PROBES], trainer._tokenizer.eos_token_id]
        ids = torch.tensor([tokens], device=trainer.accelerator.device)
        batch = {"prompt_ids": ids[:, :1], "completion_ids": ids[:, 1:]}
        batch |= {"prompt_mask": ids[:, :1] >= 0, "completion_mask": ids[:, 1:] >= 0}
        with suppress(DataError):  # a token that the teacher rules out
            keep_scores(trainer, [row], batch)
            scores += batch[TEACHER][0].tolist()
    return {"teacher": scores}


@torch.no_grad()
def keep_scores(trainer: TRLTrainer, rows: Sequence[Mapping[str, Any]], output: dict[str, Any]) -> None:
    """Score a generation batch with the teacher, behind the prompts that it sees; the scores travel with the batch."""
    teacher = trainer._klamp.teacher
    call = scoring_call(trainer, output, _own_prompts(trainer, rows, output["prompt_ids"].device))
    if teacher.server is not None:
        scores = teacher.server.score(ScoringCall(**call).completions(), temperature=trainer.temperature)
        logprobs, predictions = scores.logprobs, None if scores.predictions is None else scores.predictions.values
    else:
        model = trainer.model if teacher.model is None else teacher.model
        check_room(trainer.accelerator.unwrap_model(model), call["attention_mask"], who="teacher")
        policy, off = trainer.accelerator.unwrap_model(trainer.model), teacher.config.kind == "adapter_off"
        with policy.disable_adapter() if off else nullcontext(), trainer._klamp.calls.collected() as scorings:
            logprobs = trainer._get_per_token_logps_and_entropies(model, **call)[0].detach()
        predictions = None if teacher.prefixes is None else cast(Tensor, scorings[-1].hidden).clone()
    is_bounded = (logprobs <= FORBIDDEN) & (teacher.term.max_log_ratio is not None)
    check_logprobs("teacher_logprobs", logprobs, loss_mask(output) & ~is_bounded, fix=BOUND_IT)
    output |= {TEACHER: logprobs} | ({} if predictions is None else {PREDICTED: predictions})


def scoring_call(
    trainer: TRLTrainer, output: Mapping[str, Any], prompts: tuple[Tensor, Tensor] | None = None
) -> dict[str, Any]:
    """What TRL's scoring method is asked for a generation batch, behind `prompts` (ids and mask) or its own."""
    prompt, mask = (output["prompt_ids"], output["prompt_mask"]) if prompts is None else prompts
    return {
        "input_ids": torch.cat([prompt, output["completion_ids"]], dim=1),
        "attention_mask": torch.cat([mask, output["completion_mask"]], dim=1),
        "logits_to_keep": output["completion_ids"].shape[1],
        "batch_size": trainer.args.per_device_train_batch_size,
    }


def _ids(trainer: TRLTrainer, rows: Sequence[Mapping[str, Any]], column: str) -> list[list[int]]:
    for row in rows:
        if not row.get(column):
            raise no_prompt(column, row)
    return trainer._tokenize_prompts([row[column] for row in rows])[0]


def _own_prompts(
    trainer: TRLTrainer, rows: Sequence[Mapping[str, Any]], device: torch.device
) -> tuple[Tensor, Tensor] | None:
    """The teacher's prompts, padded on the left: ids and mask, [B, P]; None: they are the policy's."""
    column = trainer._klamp.teacher.config.teacher_prompt
    if not column:
        return None
    prompts = [torch.tensor(ids, device=device) for ids in _ids(trainer, rows, column)]
    mask = grpo_trainer.pad([torch.ones_like(ids) for ids in prompts], padding_value=0, padding_side="left")
    return grpo_trainer.pad(prompts, padding_value=trainer._tokenizer.pad_token_id, padding_side="left"), mask


def penalty(trainer: TRLTrainer, inputs: Mapping[str, Any], scored: Scoring) -> Tensor | float:
    """The coefficient times the per-token KL to the teacher, [B, T]; 0 if it is not in the loss."""
    teacher = trainer._klamp.teacher
    if teacher is None or teacher.term.placement != "loss":
        return 0.0
    return teacher.coefficient(trainer) * token_penalty(prepare(with_kl(trainer, inputs, scored), teacher.term))


def with_kl(trainer: TRLTrainer, inputs: Mapping[str, Any], scored: Scoring) -> Batch:
    """A micro-batch with the KL to the teacher at each prefix, if its term or baseline needs one."""
    batch, teacher = batch_of(inputs, scored.logprobs), trainer._klamp.teacher
    if teacher is None or teacher.prefixes is None:
        return batch
    kl, parts = _at_prefixes(trainer, inputs, batch, cast(Tensor, scored.hidden))
    teacher.measured = kl.detach(), parts
    return batch.with_anchor("teacher", kl=kl)


def _at_prefixes(
    trainer: TRLTrainer, inputs: Mapping[str, Any], batch: Batch, hidden: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """The KL to the teacher at each prefix that is trained on, 0 elsewhere, and its parts. [B, T] each"""
    teacher = trainer._klamp.teacher
    where, values = batch.mask, inputs[PREDICTED][batch.mask]
    policy_model = reference.plain_model(trainer, trainer.model)
    if teacher.server is not None:
        anchor: Predictions = Told(values=values, head=None)
    else:
        model = trainer.model if teacher.model is None else teacher.model
        anchor = reference.predicted(reference.plain_model(trainer, model), values)
    weight = None
    if teacher.config.teacher_off_policy != "none":
        weight = (batch.policy_logprobs.detach() - cast(Tensor, batch.logprobs_of("sampler")))[where]
    policy, ids = reference.predicted(policy_model, hidden[where]), inputs["completion_ids"][where]
    options = {"temperature": trainer.temperature, "log_weight": weight}
    kl, parts = prefix_divergence(policy, anchor, ids, cast(PrefixKL, teacher.prefixes), **options)
    blank = torch.zeros(where.shape, dtype=kl.dtype, device=kl.device)
    return blank.masked_scatter(where, kl), {
        name: blank.masked_scatter(where, part.to(kl.dtype)) for name, part in parts.items()
    }


def add_to(window: Window, trainer: TRLTrainer, batch: Batch) -> None:
    """Add the KL to the teacher of a micro-batch to the measurements."""
    teacher = trainer._klamp.teacher
    if teacher.measured is not None:
        kl, parts = teacher.measured
        batch = batch.with_anchor("teacher", kl=kl)
        for name, values in parts.items():
            window.add_values(f"teacher/{name}", values, batch.mask)
    window.add(prepare(batch, teacher.term))


def effective_term(trainer: TRLTrainer) -> EffectiveTerm | None:
    """The KL to the teacher in words; None: the trainer has no teacher."""
    session = session_of(trainer)
    teacher = None if session is None else session.teacher
    if teacher is None:
        return None
    kind, column = teacher.config.kind, teacher.config.teacher_prompt
    who = {"adapter_off": "the policy with its adapter off", "live": "the policy itself"}.get(kind)
    who = who or (teacher.config.teacher_model or "" if teacher.server is None else teacher.server.describe())
    who += f", behind the column {column}" if column else ""
    return EffectiveTerm.to_teacher(teacher.config, who=who, coefficient=teacher.coefficient(trainer))
