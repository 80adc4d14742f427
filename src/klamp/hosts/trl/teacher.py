"""The teacher of a TRL trainer: its model, its scores of a generation batch, its KL in advantage or loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from trl.trainer import grpo_trainer

from klamp.config.teacher import TeacherConfig
from klamp.core.penalty import shifted_advantages, token_penalty
from klamp.core.term import KLTerm
from klamp.errors import ConfigError, DataError, Refusal
from klamp.hosts.common.coefficient import TEACHER, batch_of
from klamp.hosts.common.effective import EffectiveTerm
from klamp.hosts.common.window import Window
from klamp.hosts.trl.reference import check_folder, prepared_model
from klamp.scoring.model_parts import check_same_vocabulary


@dataclass
class Teacher:
    """What a trainer keeps of its teacher."""

    config: TeacherConfig
    term: KLTerm
    model: Any
    """None: the policy with its adapter off."""
    windows: dict[str, Window] = field(default_factory=lambda: {mode: Window() for mode in ("train", "eval")})
    """The measurements of the present step in each mode."""

    def coefficient(self, trainer: Any) -> float:
        """The coefficient in force."""
        return self.config.coefficient(trainer.state.global_step, max(trainer.state.max_steps, 1))


def refusals(teacher: TeacherConfig) -> list[Refusal]:
    """What TRL's trainer cannot do with a teacher."""
    return [
        Refusal(
            teacher.kind not in ("frozen", "adapter_off") or bool(teacher.teacher_models),
            f"teacher_kind={teacher.kind!r} cannot be honoured by TRL",
            got=f"teacher_url={teacher.teacher_url!r}, teacher_models={teacher.teacher_models}",
            why="klamp scores a whole batch with one model of the trainer's process, which stays what it is",
            fix="name one teacher_model, or set teacher_kind='adapter_off'; klamp train has the others",
        ),
        Refusal(
            teacher.teacher_estimator not in ("k1", "k3"),
            f"teacher_estimator={teacher.teacher_estimator!r} cannot be honoured by TRL",
            why="of the teacher the log-probabilities of the sampled tokens are kept",
            fix="use teacher_estimator='k3', or 'k1' (also as an advantage); klamp train has the rest",
        ),
        Refusal(
            teacher.teacher_placement == "reward",
            "teacher_placement='reward' cannot be honoured by TRL",
            why="its advantages are formed before the teacher has scored",
            fix="set teacher_placement='advantage': the KL enters after the division by the deviation",
        ),
    ]


def join(trainer: Any, config: TeacherConfig, given: Any) -> Teacher:
    """Load the teacher, or take the one that is given, and prepare it as TRL prepares a reference.

    Raises:
        ModelError: a teacher with other entries than the policy, or a folder that lacks weights.
        ConfigError: a teacher made by switching off an adapter that is not there.
    """
    policy = trainer.accelerator.unwrap_model(trainer.model)
    if config.kind == "adapter_off":
        if not hasattr(policy, "peft_config"):
            raise ConfigError(
                "teacher_kind='adapter_off' needs a model with a PEFT adapter",
                why="without an adapter there is nothing to switch off",
                fix="pass peft_config, or name teacher_model",
            )
        return Teacher(config, config.build_term(), None)
    model = given
    if model is None:
        check_folder(config.teacher_model)
        options: dict[str, Any] = {"dtype": next(policy.parameters()).dtype}
        model = grpo_trainer.create_model_from_path(cast(str, config.teacher_model), **options)
    check_same_vocabulary(model, policy, who="teacher", larger=True)
    return Teacher(config, config.build_term(), prepared_model(trainer, model))


@torch.no_grad()
def keep_scores(trainer: Any, rows: Sequence[Mapping[str, Any]], output: dict[str, Any]) -> None:
    """Score a generation batch with the teacher, behind the prompts that it sees; the scores travel with the batch."""
    teacher: Teacher = trainer._klamp.teacher
    column = teacher.config.teacher_prompt
    prompts = _told(trainer, rows, column, output["prompt_ids"].device) if column else None
    call = scoring_call(trainer, output, prompts)
    policy, model = trainer.accelerator.unwrap_model(trainer.model), teacher.model
    with policy.disable_adapter() if model is None else nullcontext():
        scored = trainer._get_per_token_logps_and_entropies(trainer.model if model is None else model, **call)
    output[TEACHER] = scored[0].detach()


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


def _told(trainer: Any, rows: Sequence[Mapping[str, Any]], column: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """The prompts of a column, tokenized as TRL tokenizes its own, padded on the left: ids and mask, [B, P]."""
    missing = [i for i, row in enumerate(rows) if not row.get(column)]
    if missing:
        raise DataError(
            f"a prompt has no {column!r} for the teacher",
            got=f"the columns {', '.join(sorted(rows[missing[0]]))}",
            why="teacher_prompt names the column with the prompt that the teacher sees",
            fix="name a column of the dataset (and set remove_unused_columns=False), or leave teacher_prompt out",
        )
    found, *_ = trainer._tokenize_prompts([row[column] for row in rows])
    ids = [torch.tensor(each, device=device).flip(0) for each in found]
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(each) for each in ids], batch_first=True)
    padded = nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=trainer._tokenizer.pad_token_id)
    return padded.flip(1), mask.flip(1)


def in_advantages(trainer: Any, inputs: Mapping[str, Any], old_logprobs: Tensor | None) -> Tensor:
    """The advantages of a generation batch, with the KL to the teacher where it enters there. [B] or [B, T]"""
    teacher: Teacher = trainer._klamp.teacher
    coefficient = teacher.coefficient(trainer)
    if teacher.term.placement != "advantage" or coefficient == 0:
        return inputs["advantages"]
    assert old_logprobs is not None
    return shifted_advantages(batch_of(inputs, old_logprobs), teacher.term, beta=coefficient, gate=None)


def penalty(trainer: Any, inputs: Mapping[str, Any], policy_logprobs: Tensor) -> Tensor | float:
    """The coefficient times the per-token KL to the teacher, [B, T]; 0 where it is not in the loss."""
    teacher: Teacher | None = trainer._klamp.teacher
    if teacher is None or teacher.term.placement != "loss":
        return 0.0
    return teacher.coefficient(trainer) * token_penalty(batch_of(inputs, policy_logprobs), teacher.term, None)


def after_loss(trainer: Any, inputs: Mapping[str, Any], policy_logprobs: Tensor) -> None:
    """Add a micro-batch to the measurements; at the end of an optimizer step log them."""
    teacher: Teacher = trainer._klamp.teacher
    mode = "train" if trainer.model.training else "eval"
    window = teacher.windows[mode]
    window.add(batch_of(inputs, policy_logprobs.detach()), teacher.term, None)
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
    who = "the policy with its adapter off" if teacher.model is None else teacher.config.teacher_model or ""
    seen = f", behind the column {teacher.config.teacher_prompt}" if teacher.config.teacher_prompt else ""
    return EffectiveTerm.to_teacher(teacher.config, who=who + seen, coefficient=teacher.coefficient(trainer))
