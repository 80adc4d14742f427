"""TRL's GRPO and distillation with klamp's KL: these classes take the place of TRL's of the same name.

    from klamp.trl import GRPOConfig, GRPOTrainer

`attach` and `effective` know TRL's own trainers and those that Unsloth has written in their place.
Needs trl>=1.10; an older one raises UnsupportedVersion on import, one that is newer than those tried is warned of.
"""

from __future__ import annotations

from typing import Any, TypeVar, cast

from klamp.hosts.common.versions import caution_beside, check_version

check_version("trl")
caution_beside("transformers")

import trl  # noqa: E402

from klamp.config import KLConfig  # noqa: E402  (the version is checked before TRL is opened up)
from klamp.config.teacher import TeacherConfig  # noqa: E402
from klamp.core.arguments import check_instance, describe  # noqa: E402
from klamp.errors import ConfigError  # noqa: E402
from klamp.hosts.common.effective import Effective, EffectiveTerm  # noqa: E402
from klamp.hosts.trl.callbacks import DoctorCallback, ReportCallback  # noqa: E402
from klamp.hosts.trl.checking import CheckCallback, check  # noqa: E402
from klamp.hosts.trl.distillation import DistillationConfig, DistillationTrainer, attached, in_force  # noqa: E402
from klamp.hosts.trl.grpo_config import GRPOConfig, host_of  # noqa: E402
from klamp.hosts.trl.grpo_trainer import GRPOTrainer, attach_to, read_effective  # noqa: E402
from klamp.hosts.trl.hooks import KLMixin  # noqa: E402
from klamp.hosts.unsloth.hooks import unsloth_hook  # noqa: E402

__all__ = [
    "CheckCallback",
    "DistillationConfig",
    "DistillationTrainer",
    "DoctorCallback",
    "Effective",
    "EffectiveTerm",
    "GRPOConfig",
    "GRPOTrainer",
    "ReportCallback",
    "attach",
    "check",
    "effective",
]

AnyTrainer = TypeVar("AnyTrainer")


def attach(trainer: AnyTrainer, kl: KLConfig | TeacherConfig, *, ref_model: Any = None) -> AnyTrainer:
    """Give a TRL trainer that is built already, of any subclass, the KL of a configuration. Returns the trainer.

    Call it before `train`. The trainer's class becomes a subclass that has klamp's hooks; nothing else changes.

    Args:
        trainer: a `trl.GRPOTrainer` (Unsloth's too) or a `trl.DistillationTrainer`, or an instance of a subclass.
        kl: the whole KL term; its beta takes the place of the trainer's. For distillation a `TeacherConfig`, whose
            teacher_model names the teacher that the trainer has.
        ref_model: the reference; None: the trainer's own, or without one (built with beta 0) a copy of the policy now.

    Raises:
        ConfigError: no TRL trainer, one that has trained already, or an option that cannot work in it.
        UnsupportedVersion: an Unsloth that was not tried, or whose loss is not where it was.
    """
    if isinstance(trainer, trl.DistillationTrainer):
        check_instance("kl", kl, TeacherConfig)
        return attached(trainer, cast(TeacherConfig, kl))
    check_instance("kl", kl, KLConfig)
    hook = KLMixin if host_of(trainer) == "TRL" else unsloth_hook(trainer)
    return attach_to(trainer, cast(KLConfig, kl), hook, ref_model=ref_model)


def effective(trainer: Any) -> Effective:
    """What the KL of a TRL trainer will really do, read from the trainer: klamp's, an attached or a stock one.

    Raises:
        ConfigError: no trainer of TRL's GRPO or distillation.
    """
    if isinstance(trainer, trl.DistillationTrainer):
        return in_force(trainer)
    if not isinstance(trainer, trl.GRPOTrainer) and host_of(trainer) == "TRL":
        raise ConfigError(
            "effective takes a trl.GRPOTrainer or trl.DistillationTrainer, built already",
            got=describe(trainer),
            why="what is in force is read from the trainer itself: its arguments, its reference, an attached KL",
            fix="effective(trainer), with trainer = klamp.trl.GRPOTrainer(...)",
        )
    return read_effective(trainer)
