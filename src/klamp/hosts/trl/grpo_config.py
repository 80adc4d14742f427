"""`trl.GRPOConfig` with klamp's fields, and the fields that TRL cannot honour, each with reason and way out."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import trl

from klamp.config import TRL_LOSS_TYPES, KLConfig, LossConfig
from klamp.config.beyond import baseline_cautions, baseline_refusal, beyond_cautions, check_beyond
from klamp.config.fields import host_refusals
from klamp.config.teacher import TeacherConfig
from klamp.core.types import Reduction
from klamp.errors import ConfigError, KLWarning, Refusal, check_name, refuse
from klamp.hosts.common import kl_fields
from klamp.hosts.common.control import warn_few_prompts


class OwnBeta(float):
    """A beta by which no tensor can be multiplied: a trainer that is not klamp's stops there."""

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        raise not_klamps_trainer()


def not_klamps_trainer(kind: str = "GRPO", config: str = "KLConfig") -> ConfigError:
    """The error for klamp's arguments in the hands of another trainer: of this kind; the configuration to attach."""
    return ConfigError(
        "klamp's fields are set, and the trainer is not klamp's",
        why="TRL's own trainer ignores all of them: it would train with its own KL, or without a KL",
        fix=f"from klamp.trl import {kind}Trainer, and build that (or derive from it) instead of "
        f"trl.{kind}Trainer; or build yours with trl.{kind}Config, and then klamp.trl.attach(trainer, {config}(...))",
    )


@dataclass
class GRPOConfig(kl_fields.KLFields, trl.GRPOConfig):
    """`trl.GRPOConfig` with all fields of `klamp.KLConfig` and `klamp.TeacherConfig`, and the masks of `LossConfig`.

    All of TRL's fields and defaults stay, `beta=0.0` included. While klamp's fields are all None, the loss is TRL's
    own, KL included; once one is set (`beta` and its other names aside), TRL's KL is replaced by klamp's term, in which
    None means klamp's default. TRL's own trainer then raises a ConfigError.

    Raises:
        UnknownNameError, ConfigError: a choice that klamp refuses, or that cannot work in TRL; with the reason.
    """

    taken = False
    """Whether these are the arguments of a trainer of klamp's."""

    fast_scoring: bool = field(
        default=False,
        metadata={
            "help": "Score completions by klamp: each distinct prompt is run once, padding never reaches the output "
            "head, logits are never held. The numbers are TRL's up to rounding; where it cannot be done, that is said "
            "once and TRL's own scoring is used."
        },
    )

    def __post_init__(self) -> None:
        refuse_classes()
        kl_fields.settle_fields(self)
        kl, teacher = kl_fields.kl_config(self), kl_fields.teacher_config(self)
        if kl is not None:
            if teacher is None:
                kl_fields.warn_without_kl(kl)
            settle_reference(kl, self)
            check_arguments(kl, self, teacher=teacher)
        if teacher is not None and teacher.there:
            option, shifted = "teacher_placement='advantage'", teacher.teacher_placement == "advantage"
            refuse([*kl_fields.one_teacher_refusals(teacher), *advantage_refusals(option, shifted, self)])
            _warn_of_sampler("teacher_estimator", teacher.teacher_estimator, self)
        loss = LossConfig(**kl_fields.touched(self, LossConfig))
        refuse([*host_refusals(loss, "TRL"), *advantage_refusals("dppo_mask and rollout_rs", loss.trust.is_set, self)])
        super().__post_init__()
        if kl is not None:
            warn_few_prompts(kl, (self.generation_batch_size or 1) / (self.num_generations or 1))
        self.beta = OwnBeta(self.beta) if self._asks else float(self.beta)

    @property
    def _asks(self) -> bool:
        set_here = (kl_fields.touched(self, config) for config in (KLConfig, TeacherConfig, LossConfig))
        return any(set_here) or bool(self.fast_scoring)

    def get_warmup_steps(self, num_training_steps: int) -> int:
        """As in TRL, whose trainer asks for it before its first step, and is refused here."""
        if self._asks and not self.taken:
            raise not_klamps_trainer()
        return super().get_warmup_steps(num_training_steps)

    def to_dict(self) -> dict[str, Any]:
        """As in TRL, with plain numbers."""
        return {**super().to_dict(), "beta": float(self.beta)}


def check_arguments(
    kl: KLConfig, args: Any, *, host: str = "TRL", teacher: TeacherConfig | None = None, more: Sequence[Refusal] = ()
) -> None:
    """Refuse combinations that the arguments of a trainer of TRL's kind make impossible; `more`: of this host alone."""
    check_name("loss_type", args.loss_type, LOSS_TYPES[host])
    check_beyond(kl, teacher, host="" if host == "TRL" else host)
    own = LOSS_TYPES[host][args.loss_type]
    of_loss = [
        Refusal(
            kl.kl_normalizer not in (None, own),
            f"kl_normalizer={kl.kl_normalizer!r} cannot be honoured with loss_type={args.loss_type!r}",
            why=f"{host} normalises policy loss and KL together: {own or 'by the tokens of each micro-batch'}",
            fix="leave kl_normalizer unset, or choose the loss_type that normalises so",
        ),
        Refusal(
            kl.reference in ("frozen", "adapter_off") and args.sync_ref_model,
            f"reference={kl.reference!r} cannot be combined with sync_ref_model",
            why=f"{host} then moves the reference towards the policy",
            fix="leave one of the two out",
        ),
        Refusal(
            args.use_liger_kernel and liger_bypasses(),
            "Liger's fused loss cannot use klamp's KL",
            why="TRL below 1.14 hands the whole loss, KL included, to a fused kernel that never looks at klamp's term",
            fix="set use_liger_kernel=False, or use trl>=1.14, where it only swaps layers",
        ),
    ]
    weighs = getattr(args, "use_vllm", False) and getattr(args, "vllm_importance_sampling_correction", False)
    weights = args.vllm_importance_sampling_mode if weighs else None
    terms = {"kl": kl.build_term()} | ({} if teacher is None else {"teacher": teacher.build_term()})
    of_baselines = [baseline_refusal(prefix, term, own, weights) for prefix, term in terms.items()]
    refuse([*host_refusals(kl, host), *placement_refusals(kl, args), *of_loss, *of_baselines, *more])
    later, cut = args.num_iterations > 1, args.top_p < 1 or bool(args.top_k)
    texts = [text for term in terms.values() for text in baseline_cautions(term, later=later, cut=cut)]
    for text in [*beyond_cautions(kl, teacher), *texts]:
        warnings.warn(text, KLWarning, stacklevel=3)
    if (asked := getattr(args, name := "use_bias_correction_kl", None)) != getattr(type(args), name, None):
        text = f"{name}={asked} has no effect: the KL is klamp's, and its gradient the one that kl_gradient says."
        warnings.warn(text, KLWarning, stacklevel=3)
    if kl.needs_reference:
        _warn_of_sampler("kl_estimator", kl.kl_estimator, args)


PLAIN = {"do_sample": True} | dict.fromkeys(("num_beams", "top_p", "typical_p", "repetition_penalty"), 1)
PLAIN |= dict.fromkeys(("top_k", "min_p", "no_repeat_ngram_size", "min_new_tokens", "min_tokens", "bad_words_ids"), 0)
PLAIN |= dict.fromkeys(("presence_penalty", "frequency_penalty", "suppress_tokens", "logit_bias"), 0)
"""Argument of a generation -> the value at which tokens are drawn from the policy itself."""


def sampler_changes(args: Any) -> list[str]:
    """The arguments by which TRL draws tokens from another distribution than the policy that is trained."""
    plain, options = PLAIN | {"temperature": args.temperature}, vars(args) | (args.generation_kwargs or {})
    options["top_k"] = max(options["top_k"] or 0, 0)  # vLLM's -1 is no limit
    return [name for name, value in plain.items() if options.get(name, value) not in (value, None)]


def _warn_of_sampler(field: str, estimator: str, args: Any) -> None:
    if estimator != "exact" and (changes := " and ".join(sampler_changes(args))):
        text = f"With {changes} the sampler is not the policy: the KL of its tokens ({field}={estimator!r}) is biased."
        warnings.warn(f"{text} Leave {changes} out, or set {field}='exact'.", KLWarning, stacklevel=4)


def settle_reference(kl: KLConfig, args: Any) -> None:
    """Write a moving reference into TRL's arguments, where it is called `sync_ref_model`."""
    if kl.reference in ("ema", "periodic"):
        averaged = kl.reference == "ema"
        args.sync_ref_model = True
        args.ref_model_mixup_alpha = 1 - kl.reference_decay if averaged else 1.0
        args.ref_model_sync_steps = 1 if averaged else kl.reference_reset_steps


def reward_scale(args: Any) -> str:
    """What TRL divides advantages by the standard deviation of: group, batch or none."""
    return {True: "group", False: "none"}.get(args.scale_rewards) or str(args.scale_rewards)


def placement_refusals(kl: KLConfig, args: Any) -> list[Refusal]:
    """Refusals of a KL in the reward or advantage beside options that undo it."""
    placement = kl.kl_placement if kl.beta != 0 else "loss"
    scale, sums = reward_scale(args), args.multi_objective_aggregation
    divided = [
        ("scale_rewards", scale, scale != "none", "none"),
        ("multi_objective_aggregation", sums, sums == "normalize_then_sum", "sum_then_normalize"),
    ]
    of_reward = [
        Refusal(
            placement == "reward" and divides,
            f"kl_placement='reward' cannot be combined with {name}={value!r}",
            why="in a group whose rewards are all equal the division by the standard deviation cancels beta: the "
            "update is the same for every beta > 0",
            fix=f"set {name}={plain!r}, or kl_placement='advantage' (the KL enters after the division)",
        )
        for name, value, divides, plain in divided
    ]
    return [*of_reward, *advantage_refusals("kl_placement='advantage'", placement == "advantage", args)]


def advantage_refusals(options: str, shifted: bool, args: Any) -> list[Refusal]:
    """The refusal of a loss that goes by the sign of a completion's advantage, where each token has its own."""
    return [
        Refusal(
            shifted and args.loss_type == "vespo",
            f"{options} cannot be combined with loss_type='vespo'",
            why="TRL weighs a whole completion by the sign of its advantage, and its KL with it",
            fix=f"use another loss_type, or leave {options} out",
        )
    ]


def liger_bypasses() -> bool:
    """Whether the installed TRL computes its loss in Liger's kernel when `use_liger_kernel` is set."""
    return hasattr(trl.GRPOTrainer, "compute_liger_loss")


def needs_adapter(field: str, kind: str, has_adapter: bool, *, instead: str) -> Refusal:
    """The refusal of an anchor that is the policy with its adapter off, if the policy has no adapter."""
    return Refusal(
        kind == "adapter_off" and not has_adapter,
        f"{field}='adapter_off' needs a model with a PEFT adapter",
        why="without an adapter there is nothing to switch off",
        fix=f"pass peft_config, or {instead}",
    )


def check_reference(kl: KLConfig, args: Any, *, adapters: Collection[str], chosen: bool) -> None:
    """Refuse a reference that TRL cannot have for a policy with these adapters; before TRL is asked for it."""
    off, moving = kl.reference == "adapter_off", kl.reference in ("ema", "periodic")
    refuse([
        needs_adapter("reference", kl.reference, bool(adapters), instead="leave reference unset"),
        Refusal(
            off and chosen,
            "reference='adapter_off' cannot be combined with ref_model",
            why="the reference is either the policy without its adapter, or the model that is passed",
            fix="leave one of the two out",
        ),
        Refusal(
            off and "ref" in adapters,
            "reference='adapter_off' cannot be had for a policy with an adapter named 'ref'",
            why="TRL scores the reference with that adapter, a frozen copy that it makes of a trained one for beta > 0",
            fix="build TRL's trainer with beta=0 and attach then, use klamp.trl.GRPOTrainer, or give the adapter "
            "another name; leave reference unset for the copy",
        ),
        Refusal(
            kl.reference_dtype is not None and bool(adapters) and not chosen,
            "reference_dtype cannot be honoured with an adapter",
            why="the reference is the policy itself with its adapter off, in the policy's data type",
            fix="leave reference_dtype unset, or pass ref_model",
        ),
        Refusal(
            args.sync_ref_model and bool(adapters),
            f"{f'reference={kl.reference!r}' if moving else 'sync_ref_model'} cannot be combined with a PEFT adapter",
            why="TRL moves the reference's weights towards the policy's one by one, and an adapter is not among them",
            fix="leave reference and sync_ref_model unset",
        ),
    ])  # fmt: skip


LOSS_TYPES: Mapping[str, Mapping[str, Reduction | None]] = {
    "TRL": TRL_LOSS_TYPES,
    "Unsloth": {**TRL_LOSS_TYPES, "bnpo": "token_mean"},
}
"""Host -> how its loss types average tokens; None: over each micro-batch."""
UNSLOTH = "_UnslothGRPOTrainer"
"""The class that Unsloth derives from nothing of TRL's."""


def host_class(cls: type) -> type | None:
    """Unsloth's GRPO trainer among a class and its bases, or None."""
    return next((c for c in cls.__mro__ if c.__name__ == UNSLOTH), None)


def host_of(trainer: object) -> str:
    """Whose loss a GRPO trainer has: TRL or Unsloth."""
    return "TRL" if host_class(type(trainer)) is None else "Unsloth"


def refuse_classes() -> None:
    """Refuse klamp's own config and trainer classes while TRL's are Unsloth's."""
    if host_class(trl.GRPOTrainer) is not None:
        raise ConfigError(
            "klamp.trl.GRPOConfig and klamp.trl.GRPOTrainer cannot be used once Unsloth has patched TRL",
            got=f"trl.GRPOTrainer is {trl.GRPOTrainer.__name__}",
            why="Unsloth's trainer never calls the TRL method that a subclass of TRL's overrides, so the KL would be "
            "missing; and a subclass of its config would bring back TRL's defaults in place of Unsloth's",
            fix="build trl.GRPOConfig and trl.GRPOTrainer as Unsloth patched them, and then "
            "klamp.trl.attach(trainer, KLConfig(...))",
        )
