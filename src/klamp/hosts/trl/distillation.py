"""TRL's distillation trainer with klamp's penalty, from hidden states of TRL's passes, instead of its divergence."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import torch
import trl
from torch import Tensor

from klamp.config.describe import PLACEMENTS, TAUGHT, describe_average
from klamp.config.teacher import UNBIASED, TeacherConfig
from klamp.core.types import Direction
from klamp.errors import ConfigError, Refusal, refuse
from klamp.hosts.common.anchors import check_apart, check_room
from klamp.hosts.common.coefficient import TEACHER, check_once, loss_mask
from klamp.hosts.common.control import check_kl
from klamp.hosts.common.effective import Effective, EffectiveTerm
from klamp.hosts.common.kl_fields import PASSED, TeacherFields, read_again, teacher_config
from klamp.hosts.common.versions import host_version
from klamp.hosts.trl import measure, teacher
from klamp.hosts.trl.callbacks import report_of
from klamp.hosts.trl.grpo_config import not_klamps_trainer, sampler_changes
from klamp.hosts.trl.reference import check_folder, own_reference, placed, plain_model, predicted, weights_are_split
from klamp.hosts.trl.session import Scoring, Session, Teacher, TRLTrainer, mode_of
from klamp.scoring.model_parts import check_same_vocabulary, token_logprobs
from klamp.scoring.probe import probe

DIRECTIONS: dict[float, Direction] = {0.0: "forward", 0.5: "js", 1.0: "reverse"}
"""TRL's beta -> its direction; values between them have no direction in klamp."""


class OwnDivergence(float):
    """TRL's beta beside fields of klamp's. A trainer that is not klamp's stops where it asks which divergence it is."""

    __hash__ = float.__hash__

    def __eq__(self, other: object) -> bool:
        raise not_klamps_trainer("Distillation", "TeacherConfig")


@dataclass
class DistillationConfig(TeacherFields, trl.DistillationConfig):
    """`trl.DistillationConfig` with every field of `klamp.TeacherConfig`.

    While none of them is set the loss is TRL's own. Once any of them is set, klamp's KL to the teacher replaces TRL's
    divergence: fields that are still None have klamp's defaults (k1 of the sampled token), and TRL's `beta` sets the
    direction. TRL's own trainer then raises a ConfigError.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if teacher_config(self) is not None:
            self.teacher_direction = self.teacher_direction or DIRECTIONS.get(self.beta)
            refuse(refusals(teacher_config(self) or TeacherConfig(), self))
            self.beta = OwnDivergence(self.beta)


def refusals(c: TeacherConfig, args: Any) -> list[Refusal]:
    """What TRL's distillation cannot do with a teacher, beside its own arguments."""
    drawn = sampler_changes(args)
    own = (c.kind, c.teacher_prompt, c.teacher_models, c.teacher_placement, c.teacher_off_policy)
    return [
        Refusal(
            own != ("frozen", "", (), "loss", "none"),
            "TRL's distillation has one frozen teacher, behind the student's own prompts, in its loss",
            got=f"kind, prompt, models, placement and off_policy of the teacher are {', '.join(map(repr, own))}",
            why="its loss runs both models on the same rows; it has no reward, and no log-probabilities of the sampler",
            fix="name the teacher, with teacher_coef above 0, and leave the rest out; klamp.trl.GRPOTrainer has others",
        ),
        Refusal(
            args.beta != 1.0 and DIRECTIONS.get(args.beta) != c.teacher_direction,
            f"beta={args.beta:g} and teacher_direction={c.teacher_direction!r} name two divergences",
            why="TRL's beta is 0 for the forward KL, 1 (its default) for the reverse and 0.5 for js",
            fix="leave one of them out; another beta is a divergence of TRL's alone, without fields of klamp's",
        ),
        Refusal(
            bool(drawn) and c.teacher_estimator != "exact" and c.teacher_tail in UNBIASED,
            f"teacher_estimator={c.teacher_estimator!r} cannot be combined with {', '.join(drawn)}",
            why="tokens are then drawn from another policy than the one that is trained, for whose own they stand",
            fix="leave it out, or use teacher_estimator='exact', which needs no sample",
        ),
    ]


class DistillationTrainer(trl.DistillationTrainer):
    """`trl.DistillationTrainer` with klamp's KL to the teacher; takes the same arguments.

    With a stock `trl.DistillationConfig`, or with no field of klamp's set, everything is TRL's own. With one, the
    teacher is `teacher_model`, or whom the field of this name says; it may have more (padded) entries than the student,
    of which the shared part counts. What does not fit is a ConfigError or ModelError, with the reason.
    """

    _klamp: Any = None  # the session, with the teacher; None: the loss is TRL's own
    _batches: list[tuple[dict[str, Any], Tensor]]  # of the present loss, with the policy's detached log-probabilities

    def __init__(self, model: Any, teacher_model: Any = None, args: Any = None, *more: Any, **options: Any) -> None:
        config = None if args is None else read_again(args)[1]
        if config is None or args is None:
            super().__init__(model, teacher_model, args, *more, **options)
            return
        named = config.teacher_model if teacher_model is None else teacher_model
        loaded = _loaded(named, model, args)
        args.beta = float(args.beta)
        super().__init__(model, None, args, *more, **options)
        check_same_vocabulary(loaded, self.accelerator.unwrap_model(self.model), who="teacher", larger=True)
        join(self, config, loaded)
        self.teacher_model = placed(cast(TRLTrainer, self), loaded)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """TRL's loss; an error where it does not go through klamp's hook."""
        self._batches = []
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        if self._klamp is not None:
            check_once(len(self._batches), "calls of klamp's hook", host="TRL")
            batch, logprobs = self._batches.pop()
            trainer = cast(TRLTrainer, self)
            measure.after_loss(trainer, batch, Scoring(logprobs), 0.0)  # not in the wrapped forward: processes wait
            for kl in self._metrics[mode_of(trainer)].get("teacher/kl", [])[-1:]:
                check_kl(kl)
        return loss

    def _compute_loss(self, unwrapped_student: Any, inputs: Any, num_items_in_batch: Any) -> Any:
        if self._klamp is None:
            return super()._compute_loss(unwrapped_student, inputs, num_items_in_batch)
        own, count, model = self._klamp.teacher, loss_mask(inputs).sum(), self.teacher_model
        of_tokens = not own.term.of_prefixes or own.config.teacher_horizon == "sequence"
        hidden, logprobs, entropy = self._read(unwrapped_student, inputs, of_tokens)
        plain = self.accelerator.unwrap_model(model.eval())
        check_room(plain, torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1), who="teacher")
        with torch.no_grad():
            states, scores, _ = self._forward_redirection(model, plain, self._read, plain, inputs, False)
        batch = {**inputs, teacher.PREDICTED: states, TEACHER: scores, "advantages": torch.zeros_like(scores[:, 0])}
        total: Any = teacher.penalty(cast(TRLTrainer, self), batch, Scoring(logprobs, hidden))
        self._batches.append((batch, logprobs.detach()))
        divisor = count.clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        return total.sum() / divisor, entropy, count

    def _read(self, model: Any, inputs: Any, learns: bool) -> tuple[Tensor, Tensor, Tensor]:
        """The predicting hidden states, [B, T, H]; the log-probabilities, [B, T], 0 if masked; summed entropies."""
        ids, present = (torch.cat([inputs[f"prompt_{x}"], inputs[f"completion_{x}"]], 1) for x in ("ids", "mask"))
        parameters, mask = inspect.signature(self._get_last_hidden_state).parameters, loss_mask(inputs)
        images = {name: values for name, values in inputs.items() if name in parameters}
        hidden = self._get_last_hidden_state(model, ids, present, mask.shape[1], **images)
        with torch.set_grad_enabled(learns and torch.is_grad_enabled()):
            plain, targets = plain_model(cast(TRLTrainer, self), model), inputs["completion_ids"][mask]
            predictions = predicted(plain, hidden[mask])
            scored: Any = token_logprobs(predictions, targets[:, None], temperature=self.temperature, entropy=True)
            logprobs = scored.logprobs.new_zeros(mask.shape).masked_scatter(mask, scored.logprobs)
        return hidden, logprobs, scored.entropy.sum()


def _loaded(named: Any, student: Any, args: Any) -> Any:
    """The teacher; one that is named is loaded with TRL's arguments for it."""
    if named == PASSED:
        raise ConfigError("no teacher is named", why="there is nobody to learn from", fix="pass teacher_model=MODEL")
    check_folder(named)
    options = {"dtype": None, "device_map": None, "revision": args.teacher_model_revision}
    options |= args.teacher_model_init_kwargs or {}
    load = SimpleNamespace(trust_remote_code=args.trust_remote_code, model_init_kwargs=options)
    return own_reference(student, named, load, peft=True)


def join(trainer: Any, config: TeacherConfig, model: Any) -> None:
    """Give a trainer klamp's KL to a teacher, unless hidden states and output head of the two cannot be had."""
    models = [trainer.accelerator.unwrap_model(wrapped) for wrapped in (trainer.model, model)]
    check_apart(models[1], models[0], who="teacher")
    teacher.check_tokenizer(trainer, models[1], who="teacher")
    if weights_are_split(trainer) or not all(probe(plain).head for plain in models):
        got = " and ".join(type(plain).__name__ for plain in models)
        why = "it is made from hidden states and a whole output head, which together have to give a model's numbers"
        fix = "use DDP or ZeRO-2, and no adapter on the output head; or TRL's own divergence"
        raise ConfigError("klamp's KL to a teacher cannot be had for these models", got=got, why=why, fix=fix)
    record = report_of(trainer, default=isinstance(trainer, DistillationTrainer))
    trainer._klamp, trainer._batches = Session.of(None, teacher=Teacher(config, model), record=record), []


def attached(trainer: Any, config: TeacherConfig) -> Any:
    """Give a distillation trainer that is built already klamp's KL to its teacher. Returns the trainer."""
    if _has_own_loss(trainer) or isinstance(trainer, DistillationTrainer) or trainer.teacher_model is None:
        what = "attach takes a trl.DistillationTrainer with a teacher and with TRL's loss"
        why = "the hook is that loss; klamp's own trainer has it already"
        fix = "build a trl.DistillationTrainer, or set the fields of klamp.trl.DistillationConfig"
        raise ConfigError(what, got=type(trainer).__name__, why=why, fix=fix)
    refuse(refusals(config, trainer.args))
    join(trainer, config, trainer.teacher_model)
    trainer.__class__ = type(f"KL{type(trainer).__name__}", (DistillationTrainer, type(trainer)), {})
    return trainer


def _has_own_loss(trainer: Any) -> bool:
    classes, methods = (trl.DistillationTrainer, DistillationTrainer), ("compute_loss", "_compute_loss")
    return any(getattr(type(trainer), name) not in [getattr(cls, name) for cls in classes] for name in methods)


def in_force(trainer: Any) -> Effective:
    """What the divergence of a distillation trainer will really do: klamp's, an attached one, or TRL's own."""
    beta, unknown = trainer.beta, "unknown: the trainer has a loss of its own" if _has_own_loss(trainer) else ""
    mixed = f"{beta:g} KL(teacher||m) + {1 - beta:g} KL(policy||m), m = {1 - beta:g} policy + {beta:g} teacher"
    stock = EffectiveTerm(
        term="TRL's own, to the teacher",
        beta=1.0,
        price="",
        value=unknown or "exact",
        gradient=unknown or f"own, per token: {TAUGHT[DIRECTIONS[beta]] if beta in DIRECTIONS else mixed}",
        placement=PLACEMENTS["loss"],
    )
    return Effective(
        host=host_version("trl", trainer),
        terms=(replace(teacher.effective_term(trainer) or stock, price="there is no reward to weigh it against"),),
        normalizer=f"{describe_average('token_mean')} (TRL's own)",
        reference="none: TRL's distillation has no reference",
    )
