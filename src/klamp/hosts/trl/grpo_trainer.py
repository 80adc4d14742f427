"""klamp's GRPOTrainer, the function that gives klamp's KL to a trainer that exists already, and what is in force."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from typing import Any

import torch
import trl

from klamp.config import KLConfig
from klamp.config.describe import DIVERGENCES, PLACEMENTS, describe_average, describe_clip, describe_price
from klamp.config.teacher import TeacherConfig
from klamp.core.term import Placement
from klamp.errors import ConfigError, KLWarning, Refusal, refuse
from klamp.hosts.common.anchors import check_apart
from klamp.hosts.common.control import NEVER_ZERO, warn_few_prompts
from klamp.hosts.common.effective import Effective, EffectiveTerm, that_apply
from klamp.hosts.common.kl_fields import PASSED, read_again, touched, warn_without_kl
from klamp.hosts.common.rollout import excluded_ids
from klamp.hosts.common.versions import caution_beside, host_version
from klamp.hosts.trl import fast_scoring, grpo_config, reference, teacher
from klamp.hosts.trl.callbacks import DoctorCallback, report_of
from klamp.hosts.trl.hooks import KLMixin
from klamp.hosts.trl.measure import group_size, has_one_reward, price_in
from klamp.hosts.trl.session import FastScoring, ReferenceFacts, Session, TRLTrainer, Warned, progress, session_of
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
        ModelError: a reference or a teacher shares weights with the policy, has another tokenizer, or lacks weights.
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
        grpo_config.refuse_classes()
        for folder in (model, ref_model):
            reference.check_folder(folder)
        kl, config, _ = (None, None, None) if args is None else read_again(args)
        check_teacher(config, teacher_model)
        peft = options.get("peft_config") is not None or hasattr(model, "peft_config")
        wanted = args is not None and (args.beta != 0 if kl is None else kl.needs_reference)
        if ref_model is not None and not wanted:
            warnings.warn("ref_model is passed and beta is 0: it is not used.", KLWarning, stacklevel=2)
        off = kl is not None and kl.reference == "adapter_off"  # where TRL is to make no copy of the adapter
        if kl is not None:
            adapters = {*getattr(model, "peft_config", ()), *(["default"] if peft else [])}
            grpo_config.check_reference(kl, args, adapters=adapters, chosen=ref_model is not None)
        own = reference.own_reference(model, ref_model, args, peft=peft) if wanted else None
        asked, args = args, copy.copy(args)
        if asked is not None:
            loads = wanted and own is None and not off  # TRL loads a reference if beta is not 0
            args.beta = (float(args.beta) or NEVER_ZERO) if loads else 0.0
            args.sync_ref_model = args.sync_ref_model and loads
        super().__init__(model, reward_funcs, args, *positional, **options)
        if asked is not None:
            args.beta, args.sync_ref_model = asked.beta, asked.sync_ref_model
        join(self, kl, own, chosen=ref_model is not None, apart=off and hasattr(model, "peft_config"))
        if config is not None and config.there:
            self._klamp = replace(self._klamp, teacher=teacher.join(self, config, teacher_model))
        fast_scoring.settle(self)


def check_teacher(config: TeacherConfig | None, teacher_model: Any) -> None:
    """Refuse a teacher that is named twice, or not at all."""
    nobody = config is not None and config.teacher_model == PASSED
    refuse([
        Refusal(
            teacher_model is not None and not nobody,
            f"teacher_model is passed, and the arguments {'have no teacher' if config is None else 'name one'}",
            got="no teacher_coef" if config is None else f"teacher_kind {config.kind!r} in the arguments",
            why="the trainer's arguments say what a teacher is for, and only one place may say who it is",
            fix="set teacher_coef (and teacher_placement) in klamp.trl.GRPOConfig, and nothing that names a teacher",
        ),
        Refusal(
            teacher_model is None and nobody,
            "fields of a teacher are set and none is named",
            why="there is nobody to be held to",
            fix="set teacher_model (a folder or a hub id), or pass the trainer teacher_model=MODEL",
        ),
    ])  # fmt: skip


def join(trainer: TRLTrainer, kl: KLConfig | None, own: Any, *, chosen: bool, apart: bool = False) -> None:
    """Set up a trainer; its reference is `chosen` by the caller, or `apart`: the model below a trained adapter."""
    if getattr(trainer, "vllm_generation", None) is not None:
        caution_beside("vllm")
    args, trainer.args.taken = trainer.args, True
    if kl is not None:
        excluded_ids(kl.kl_exclude_tokens, trainer._tokenizer)
    ref_model = trainer.ref_model if own is None else own
    if ref_model is not None and (own is not None or kl is not None):
        model, policy = map(trainer.accelerator.unwrap_model, (ref_model, trainer.model))
        check_same_vocabulary(model, policy, larger=True)
        check_apart(model, policy)
        wider = output_size(model) != output_size(policy)  # padded further, or another family's
        if wider or model.config._name_or_path != policy.config._name_or_path:
            teacher.check_tokenizer(trainer, model, who="reference", name="that was passed" if wider else "")
    trainer.beta = float(args.beta)
    if ref_model is not None and kl is not None and kl.reference_dtype is not None:
        ref_model.to(getattr(torch, kl.reference_dtype))
    if own is not None:
        trainer.ref_model = reference.prepared_model(trainer, own)
    if trainer.ref_model is not None:
        reference.follow_policy(trainer)
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, DoctorCallback):
            callback.other_reference = callback.other_reference or chosen or apart
    source = "the model passed as ref_model" if chosen else "a frozen copy in memory" if own is not None else ""
    trainer._klamp = Session.of(
        kl,
        reference=ReferenceFacts(source, not (chosen or apart), reference.exact_rows(trainer, kl)),
        fast=FastScoring() if getattr(args, "fast_scoring", False) else None,
        trust=read_again(args)[2],
        record=report_of(trainer, default=isinstance(trainer, GRPOTrainer)),
        warned=Warned(step_zero=apart),
    )
    trainer._refresh_beta()


def attach_to(trainer: Any, kl: KLConfig, hook: type[KLMixin], *, ref_model: Any) -> Any:
    """See `klamp.trl.attach`; `hook` is the class that has to come before the trainer's own."""
    if not isinstance(trainer, trl.GRPOTrainer) or isinstance(trainer, KLMixin):
        what = "attach takes a trl.GRPOTrainer that klamp is not attached to yet"
        why = "the hooks are methods of that class"
        fix = "build a trl.GRPOTrainer (or a subclass), or set the fields of klamp.trl.GRPOConfig"
        raise ConfigError(what, got=" <- ".join(c.__name__ for c in type(trainer).__mro__[:3]), why=why, fix=fix)
    if trainer.state.global_step > 0:
        got = f"step {trainer.state.global_step}"
        why = "the copy of the policy that serves as reference would not be the starting policy"
        fix = "attach right after building the trainer"
        raise ConfigError("attach must be called before train", got=got, why=why, fix=fix)
    adapters = getattr(trainer.accelerator.unwrap_model(trainer.model), "peft_config", {})
    args: Any = trainer.args
    twice = Refusal(
        bool(touched(args)),
        "the trainer's arguments have KL fields of their own",
        got=", ".join(touched(args)),
        why="the KL that is attached takes the place of all of them",
        fix="build the trainer with trl.GRPOConfig, or with none of these fields set",
    )
    grpo_config.check_arguments(kl, args, host=grpo_config.host_of(trainer), more=[twice])
    warn_without_kl(kl)
    warn_few_prompts(kl, args.generation_batch_size / args.num_generations)
    grpo_config.settle_reference(kl, args)
    grpo_config.check_reference(kl, args, adapters=adapters, chosen=ref_model is not None)
    args.beta = kl.beta
    own = ref_model
    if own is None and kl.needs_reference and trainer.ref_model is None and not adapters:
        own = reference.frozen_copy(trainer.accelerator.unwrap_model(trainer.model))
    trainer.__class__ = type(f"KL{type(trainer).__name__}", (hook, type(trainer)), {})
    attached: Any = trainer
    join(attached, kl, own, chosen=ref_model is not None, apart=kl.reference == "adapter_off")
    fast_scoring.settle(attached)
    return attached


K3_STOPS = "Unsloth's own k3 stops at 10 nats per token: past a log-ratio of -2.61 and +11.00 it has no gradient"
"""Measured with each version that was tried."""


def read_effective(trainer: Any) -> Effective:
    """See `klamp.trl.effective`."""
    host, session = grpo_config.host_of(trainer), session_of(trainer)
    kl = None if session is None else session.kl
    term = _stock(trainer, host) if kl is None else _klamp(trainer, kl)
    source = "" if session is None else session.reference.source
    beside = f"{host_version('unsloth')}, " if host == "Unsloth" else ""
    return Effective(
        host=f"{beside}{host_version('trl', trainer)}",
        terms=tuple(filter(None, (term, teacher.effective_term(trainer)))),
        normalizer=f"{_average(trainer.loss_type, host)} ({host}'s own, loss_type={trainer.loss_type!r})",
        reference=reference.describe_reference(trainer, source or f"loaded by {host}"),
        notes=_notes(trainer, session, host),
    )


def _average(loss_type: str, host: str) -> str:
    if loss_type not in grpo_config.LOSS_TYPES[host]:
        return "unknown"
    reduction = grpo_config.LOSS_TYPES[host][loss_type]
    return describe_average("token_mean", over="each micro-batch") if reduction is None else describe_average(reduction)


def _price(trainer: TRLTrainer, beta: float, placement: Placement) -> str:
    if trainer.loss_type not in grpo_config.LOSS_TYPES[grpo_config.host_of(trainer)]:
        return f"unknown: nothing is known of loss_type={trainer.loss_type!r}"
    scale = grpo_config.reward_scale(trainer.args)
    if scale != "none" and not has_one_reward(trainer):
        return "unknown: each reward function is divided by a standard deviation of its own"
    price = price_in(trainer, beta, placement)
    return describe_price(price, group_size=group_size(trainer), of_batch=scale == "batch")


def _klamp(trainer: TRLTrainer, kl: KLConfig) -> EffectiveTerm | None:
    control: Any = trainer._klamp.control
    if not kl.needs_reference:
        return None
    clip = describe_clip(kl, length=control.reference_length)
    if kl.use_per_token_kl_threshold and control.reference_length is None and kl.kl_clip_method != "none":
        clip += " (the data's column, or measured at the start)"
    beta = control.beta(*progress(trainer))
    return EffectiveTerm.of(kl, beta=beta, price=_price(trainer, beta, kl.kl_placement), clip=clip)


def _stock(trainer: TRLTrainer, host: str) -> EffectiveTerm | None:
    if trainer.beta == 0:
        return None
    weighted = bool(getattr(trainer.args, "use_bias_correction_kl", False))
    of_k3 = f"forward: {DIVERGENCES['forward']}"
    return EffectiveTerm(
        term=f"{host}'s own",
        beta=float(trainer.beta),
        price=_price(trainer, float(trainer.beta), "loss"),
        value="k3 times the policy ratio" if weighted else "k3",
        gradient="reverse, on-policy equal to k2's (ratio not detached)" if weighted else of_k3,
        placement=PLACEMENTS["loss"],
    )


def _notes(trainer: Any, session: Session | None, host: str) -> tuple[str, ...]:
    args, used = trainer.args, trainer.beta != 0
    stock, fast = used and (session is None or session.kl is None), None if session is None else session.fast
    liger = getattr(args, "use_liger_kernel", False) and grpo_config.liger_bypasses()
    clamps = ", and nothing says so" if stock else "; klamp's KL has none of these clamps"
    split = grpo_config.LOSS_TYPES[host].get(trainer.loss_type, "unknown") is None
    return that_apply([
        (stock and trainer.importance_sampling_level == "sequence", f"{host} broadcasts the sequence's ratio onto "
         "every token's KL: its gradient then follows no divergence"),
        (stock and liger, "the loss, KL included, is computed in Liger's kernel"),
        (used and args.sync_ref_model, f"the reference moves, and checkpoints of {host} do not hold it: on resume it "
         "starts from where it was loaded"),
        (used and split, "each micro-batch is divided by its own tokens, so that the KL depends on how the batch is "
         "split"),
        (fast is not None, str(fast)),
        (session is not None and session.trust.is_set, "" if session is None else f"trust region: {session.trust}"),
        (0 < trainer.beta <= NEVER_ZERO, f"beta is 0 for the loss; {host} sees the smallest number so that it scores "
         "the reference"),
        (host == "Unsloth", f"{K3_STOPS}{clamps}"),
    ])  # fmt: skip
