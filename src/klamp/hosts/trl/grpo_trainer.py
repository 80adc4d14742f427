"""klamp's GRPOTrainer, and the function that gives klamp's KL to a trainer that exists already."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import trl
from trl.trainer import grpo_trainer

from klamp.config import KLConfig
from klamp.config.teacher import TeacherConfig
from klamp.errors import ConfigError, KLWarning, Refusal, refuse
from klamp.hosts.common.control import NEVER_ZERO
from klamp.hosts.common.kl_fields import PASSED, kl_config, teacher_config, touched, warn_without_kl
from klamp.hosts.common.rollout import excluded_ids
from klamp.hosts.common.sampler_weights import check_packing
from klamp.hosts.common.teachers import check_tokens
from klamp.hosts.common.versions import caution_beside
from klamp.hosts.trl import fast_scoring, teacher
from klamp.hosts.trl.callbacks import DoctorCallback
from klamp.hosts.trl.exact import check_exact, why_not_exact
from klamp.hosts.trl.grpo_config import check_arguments, check_reference, refuse_classes, settle_reference
from klamp.hosts.trl.hooks import KLMixin
from klamp.hosts.trl.record import ReportCallback
from klamp.hosts.trl.reference import (
    check_folder,
    follow_policy,
    fresh_copy,
    install_reference,
    own_reference,
    without_a_model,
)
from klamp.hosts.trl.session import Session
from klamp.scoring.model_parts import check_same_vocabulary, output_size


class GRPOTrainer(KLMixin, trl.GRPOTrainer):
    """`trl.GRPOTrainer` with klamp's KL; takes the same arguments, and `ref_model`.

    With a stock `trl.GRPOConfig`, or with no KL field set, loss and gradients are TRL's own; klamp's metrics are logged
    where there is a KL.

    Args:
        model: as in TRL. One that lives in memory only is copied for the reference, where TRL would load it again from
            a path that does not exist.
        reward_funcs: as in TRL.
        args: `klamp.trl.GRPOConfig` (or TRL's own).
        positional: TRL's further arguments.
        ref_model: the reference: a model, or a name or folder to load; None: TRL's own choice. It is frozen, and
            prepared as TRL prepares its own.
        teacher_model: the teacher, as a model; None: the one that the arguments name, if they do.
        options: TRL's further arguments by name.

    Raises:
        ConfigError: a KL option that cannot work in TRL, or a vLLM in this process that packs its weights (on a CPU);
            with the reason.
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
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", KLWarning)  # said when the arguments were made
            kl = None if args is None else kl_config(args)
            taught = _taught(args, teacher_model)
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
        with _built_with(args, reference=wanted and own is None and not off):
            super().__init__(model, reward_funcs, args, *positional, **options)
        apart = off and hasattr(model, "peft_config")
        _join(self, kl, own, chosen=ref_model is not None, apart=apart, taught=(taught, teacher_model))


def _taught(args: Any, given: Any) -> TeacherConfig | None:
    """The KL to a teacher that a trainer is built with; None: there is none.

    Raises:
        ConfigError: a teacher without a field that says what is to be done with it, or the other way round.
    """
    config = None if args is None else teacher_config(args)
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


@contextmanager
def _built_with(args: Any, *, reference: bool) -> Iterator[None]:
    """A context for building a TRL trainer: beta has the value that makes TRL load a reference, or none."""
    if args is None:
        yield
        return
    before = args.beta, args.sync_ref_model
    args.beta = (float(args.beta) or NEVER_ZERO) if reference else 0.0
    args.sync_ref_model = args.sync_ref_model and reference
    try:
        yield
    finally:
        args.beta, args.sync_ref_model = before


def _join(
    trainer: Any,
    kl: KLConfig | None,
    own: Any,
    *,
    chosen: bool,
    apart: bool = False,
    taught: tuple[TeacherConfig | None, Any] = (None, None),
) -> None:
    """Give a trainer its session, its teacher, and the reference where klamp supplies one.

    That may be another model than the one that training starts from: the caller's (`chosen`), or the one below an
    adapter that is trained already (`apart`).
    """
    _check_engine(trainer)
    trainer._klamp = session = Session.of(kl)
    session.fast = fast_scoring.asked_for(trainer.args)
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
    if own is not None:
        install_reference(trainer, own, dtype=None if kl is None else kl.reference_dtype)
    elif kl is not None and kl.reference_dtype is not None and trainer.ref_model is not None:
        trainer.ref_model.to(getattr(grpo_trainer.torch, kl.reference_dtype))
    if trainer.ref_model is not None:
        follow_policy(trainer)
    session.expected_zero, session.starts_at_reference = not apart, not (chosen or apart)
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, DoctorCallback):
            callback.other_reference = callback.other_reference or chosen or apart
        if isinstance(callback, ReportCallback):
            callback.trainer, session.record = trainer, callback
    session.reference = _described(trainer, policy, copied=own is not None, chosen=chosen)
    _choose_exact(trainer, kl)
    session.teacher = None if taught[0] is None else teacher.join(trainer, taught[0], taught[1])
    fast_scoring.settle(trainer)
    trainer._refresh_beta()


def _check_engine(trainer: Any) -> None:
    """Refuse an engine in this process that would not take the policy's weights: vLLM on a CPU, which packs them."""
    engine = getattr(getattr(trainer, "vllm_generation", None), "llm", None)
    if engine is not None:
        caution_beside("vllm")
        check_packing(engine.llm_engine.model_config.dtype)


def _choose_exact(trainer: Any, kl: KLConfig | None) -> None:
    """How many completions of a group have their exact KL measured: all if the loss needs it, else one."""
    session, asked = trainer._klamp, getattr(trainer.args, "exact_kl_completions", None)
    if kl is not None and kl.kl_estimator == "exact":
        check_exact(trainer)
        asked = trainer.num_generations
    elif asked is None:
        asked = 0 if kl is None else 1
    measured = session.control is not None or trainer.beta != 0
    session.exact_rows = 0 if not measured or why_not_exact(trainer) else min(asked, trainer.num_generations)
    session.exact_everywhere = session.exact_rows == trainer.num_generations


def _described(trainer: Any, policy: Any, *, copied: bool, chosen: bool) -> str:
    if trainer.beta == 0:
        return "none: beta is 0"
    if trainer.ref_model is None:
        return without_a_model(policy)
    loaded = f"loaded by {trainer._host}"
    source = "the model passed as ref_model" if chosen else "a frozen copy in memory" if copied else loaded
    if trainer.args.sync_ref_model:
        share, steps = trainer.args.ref_model_mixup_alpha, trainer.args.ref_model_sync_steps
        return f"{source}, moved by a share of {share:g} towards the policy every {steps} steps"
    return source


def attach_to(trainer: Any, kl: KLConfig, hook: type[KLMixin], *, ref_model: Any) -> Any:
    """Give a trainer that is built already the KL of a configuration. Returns the trainer.

    Args:
        trainer: a `trl.GRPOTrainer`, or an instance of a subclass of it.
        kl: the whole KL term.
        hook: the class that has to come before the trainer's own.
        ref_model: the reference, or None.

    Raises:
        ConfigError: no TRL trainer, one that has trained already, or an option that cannot work in it.
    """
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
    check_arguments(kl, args, host=hook._host, loss_types=hook._loss_types, more=[twice, *hook._refusals(kl)])
    warn_without_kl(kl)
    settle_reference(kl, args)
    check_reference(kl, args, adapters=adapters, chosen=ref_model is not None)
    args.beta = kl.beta
    own = ref_model
    if own is None and kl.needs_reference and trainer.ref_model is None and not adapters:
        own = fresh_copy(trainer.accelerator.unwrap_model(trainer.model))
    trainer.__class__ = type(f"KL{type(trainer).__name__}", (hook, type(trainer)), {})
    _join(trainer, kl, own, chosen=ref_model is not None, apart=kl.reference == "adapter_off")
    return trainer
