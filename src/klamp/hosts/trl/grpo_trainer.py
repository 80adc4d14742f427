"""klamp's GRPOTrainer, and the function that gives klamp's KL to a trainer that exists already."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
import trl

from klamp.config import KLConfig
from klamp.config.teacher import TeacherConfig
from klamp.errors import ConfigError, KLWarning, Refusal, refuse
from klamp.hosts.common.control import NEVER_ZERO
from klamp.hosts.common.kl_fields import PASSED, read_again, touched, warn_without_kl
from klamp.hosts.common.rollout import excluded_ids
from klamp.hosts.common.teachers import check_tokens
from klamp.hosts.common.versions import caution_beside
from klamp.hosts.trl import fast_scoring, teacher
from klamp.hosts.trl.callbacks import DoctorCallback, ReportCallback
from klamp.hosts.trl.grpo_config import check_arguments, check_reference, refuse_classes, settle_reference
from klamp.hosts.trl.hooks import KLMixin
from klamp.hosts.trl.reference import (
    check_folder,
    exact_rows,
    follow_policy,
    frozen_copy,
    own_reference,
    prepared_model,
)
from klamp.hosts.trl.session import Session
from klamp.scoring.model_parts import check_same_vocabulary, output_size


class GRPOTrainer(KLMixin, trl.GRPOTrainer):
    """`trl.GRPOTrainer` with klamp's KL; takes the same arguments, and `ref_model`.

    With a stock `trl.GRPOConfig`, or with no KL field set, loss and gradients are TRL's own; klamp's metrics are logged
    where there is a KL. A model that lives in memory only is copied for the reference, which TRL would load by a name.

    Args:
        model, reward_funcs, args, positional, options: as in TRL; `args` may be a `klamp.trl.GRPOConfig`.
        ref_model: the reference: a model, or a name or folder to load; None: TRL's own choice. It is frozen, and
            prepared as TRL prepares its own.
        teacher_model: the teacher, as a model; None: the one that the arguments name, if they do.

    Raises:
        ConfigError: a KL option that cannot work in TRL, with the reason.
        ModelError: the reference is the policy itself, or a folder lacks some of its model's weights.
        UnsupportedVersion: while training: TRL's loss does not take the KL where klamp puts it.
    """

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: Any = None,
        *positional: Any,
        ref_model: Any = None,
        teacher_model: Any = None,
        **options: Any,
    ) -> None:
        refuse_classes()
        for each in (model, ref_model):
            check_folder(each)
        kl, config = (None, None) if args is None else read_again(args)
        taught = _taught(config, teacher_model)
        peft = options.get("peft_config") is not None or hasattr(model, "peft_config")
        wanted = args is not None and (args.beta != 0 if kl is None else kl.needs_reference)
        if ref_model is not None and not wanted:
            warnings.warn("ref_model is passed and beta is 0: it is not used.", KLWarning, stacklevel=2)
        off = kl is not None and kl.reference == "adapter_off"  # where TRL is to make no copy of the adapter
        if kl is not None:
            adapters = {*getattr(model, "peft_config", ()), *(["default"] if peft else [])}
            check_reference(kl, args, adapters=adapters, chosen=ref_model is not None)
        own = own_reference(model, ref_model, args, peft=peft) if wanted else None
        self._klamp = Session.of(kl)
        asked, args = args, copy.copy(args)
        if asked is not None:
            loads = wanted and own is None and not off  # TRL loads a reference if beta is not 0
            args.beta = (float(args.beta) or NEVER_ZERO) if loads else 0.0
            args.sync_ref_model = args.sync_ref_model and loads
        super().__init__(model, reward_funcs, args, *positional, **options)
        if asked is not None:
            args.beta, args.sync_ref_model = asked.beta, asked.sync_ref_model
        apart = off and hasattr(model, "peft_config")
        _join(self, kl, own, chosen=ref_model is not None, apart=apart, taught=(taught, teacher_model))


def _taught(config: TeacherConfig | None, given: Any) -> TeacherConfig | None:
    nobody = config is not None and config.teacher_model == PASSED
    refuse([
        Refusal(
            given is not None and not nobody,
            "teacher_model is passed, and the arguments do not leave the teacher to it",
            got="no field of a teacher" if config is None else config.kind,
            why="what is to be done with it are fields of klamp.trl.GRPOConfig, and only one of the two names it",
            fix="set teacher_coef (and teacher_placement) there, and nothing that names a teacher",
        ),
        Refusal(
            given is None and nobody,
            "fields of a teacher are set and none is named",
            why="there is nobody to be held to",
            fix="set teacher_model (a folder or a hub id), or pass the trainer teacher_model=MODEL",
        ),
    ])  # fmt: skip
    return config if config is not None and config.there else None


def _join(
    trainer: Any,
    kl: KLConfig | None,
    own: Any,
    *,
    chosen: bool,
    apart: bool = False,
    taught: tuple[TeacherConfig | None, Any] = (None, None),
) -> None:
    """Set up a trainer; its reference is `chosen` by the caller, or `apart`: the model below a trained adapter."""
    if getattr(trainer, "vllm_generation", None) is not None:
        caution_beside("vllm")
    trainer.args.taken = True
    trainer._klamp = session = Session.of(kl)
    wanted = getattr(trainer.args, "fast_scoring", False)
    session.fast = fast_scoring.FastScoring(required=wanted == "require") if wanted else None
    policy = trainer.accelerator.unwrap_model(trainer.model)
    if kl is not None:
        excluded_ids(kl.kl_exclude_tokens, trainer._tokenizer)
    reference = trainer.ref_model if own is None else own
    if reference is not None and (own is not None or kl is not None):
        model = trainer.accelerator.unwrap_model(reference)
        check_same_vocabulary(model, policy, larger=True)
        if output_size(model) != output_size(policy):  # padded further, or another family's
            name = model.config._name_or_path or "that was passed"
            check_tokens(teacher.tokenizer_of(name), trainer._tokenizer, name=name, who="reference")
    trainer.beta = float(trainer.args.beta)
    if reference is not None and kl is not None and kl.reference_dtype is not None:
        reference.to(getattr(torch, kl.reference_dtype))
    if own is not None:
        trainer.ref_model = prepared_model(trainer, own)
    if trainer.ref_model is not None:
        follow_policy(trainer)
    session.expected_zero, session.starts_at_reference = not apart, not (chosen or apart)
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, DoctorCallback):
            callback.other_reference = callback.other_reference or chosen or apart
        if isinstance(callback, ReportCallback):
            callback.trainer, session.record = trainer, callback
    session.reference = (
        "the model passed as ref_model" if chosen else "a frozen copy in memory" if own is not None else ""
    )
    session.exact_rows = exact_rows(trainer, kl)
    session.teacher = None if taught[0] is None else teacher.join(trainer, taught[0], taught[1])
    fast_scoring.settle(trainer)
    trainer._refresh_beta()


def attach_to(trainer: Any, kl: KLConfig, hook: type[KLMixin], *, ref_model: Any) -> Any:
    """See `klamp.trl.attach`; `hook` is the class that has to come before the trainer's own."""
    if not isinstance(trainer, trl.GRPOTrainer) or isinstance(trainer, KLMixin):
        raise ConfigError(
            "attach takes a trl.GRPOTrainer that klamp is not attached to yet",
            got=" <- ".join(c.__name__ for c in type(trainer).__mro__[:3]),
            why="the hooks are methods of that class",
            fix="build a trl.GRPOTrainer (or a subclass), or set the fields of klamp.trl.GRPOConfig",
        )
    if trainer.state.global_step > 0:
        raise ConfigError(
            "attach must be called before train",
            got=f"step {trainer.state.global_step}",
            why="the copy of the policy that serves as reference would not be the starting policy",
            fix="attach right after building the trainer",
        )
    adapters = getattr(trainer.accelerator.unwrap_model(trainer.model), "peft_config", {})
    args: Any = trainer.args
    twice = Refusal(
        bool(touched(args)),
        "the trainer's arguments have KL fields of their own",
        got=", ".join(touched(args)),
        why="the KL that is attached takes the place of all of them",
        fix="build the trainer with trl.GRPOConfig, or with none of these fields set",
    )
    check_arguments(kl, args, host=hook._host, loss_types=hook._loss_types, more=[twice])
    warn_without_kl(kl)
    settle_reference(kl, args)
    check_reference(kl, args, adapters=adapters, chosen=ref_model is not None)
    args.beta = kl.beta
    own = ref_model
    if own is None and kl.needs_reference and trainer.ref_model is None and not adapters:
        own = frozen_copy(trainer.accelerator.unwrap_model(trainer.model))
    trainer.__class__ = type(f"KL{type(trainer).__name__}", (hook, type(trainer)), {})
    _join(trainer, kl, own, chosen=ref_model is not None, apart=kl.reference == "adapter_off")
    return trainer
