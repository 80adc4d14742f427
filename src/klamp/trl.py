"""TRL's GRPO with klamp's KL: `GRPOConfig` and `GRPOTrainer` take the place of the classes of the same name.

    from klamp.trl import GRPOConfig, GRPOTrainer

`attach` and `effective` know TRL's own trainers and those that Unsloth has written in their place.
Needs trl>=1.10; an older one raises UnsupportedVersion on import, one that is newer than those tried is warned of.
"""

from __future__ import annotations

from typing import Any, TypeVar

from klamp.hosts.common.versions import check_version

check_version("trl")

import trl  # noqa: E402

from klamp.config import KLConfig  # noqa: E402  (the version is checked before TRL is opened up)
from klamp.core.arguments import check_instance, describe  # noqa: E402
from klamp.errors import ConfigError  # noqa: E402
from klamp.hosts.common.effective import Effective, EffectiveTerm  # noqa: E402
from klamp.hosts.trl.callbacks import DoctorCallback  # noqa: E402
from klamp.hosts.trl.effective_in_trl import read_effective  # noqa: E402
from klamp.hosts.trl.grpo_config import GRPOConfig, host_class  # noqa: E402
from klamp.hosts.trl.grpo_trainer import GRPOTrainer, attach_to  # noqa: E402
from klamp.hosts.trl.hooks import KLMixin  # noqa: E402
from klamp.hosts.trl.record import ReportCallback  # noqa: E402
from klamp.hosts.unsloth.hooks import read_effective_on_unsloth, unsloth_hook  # noqa: E402

__all__ = [
    "DoctorCallback",
    "Effective",
    "EffectiveTerm",
    "GRPOConfig",
    "GRPOTrainer",
    "ReportCallback",
    "attach",
    "effective",
]

Trainer = TypeVar("Trainer")


def attach(trainer: Trainer, kl: KLConfig, *, ref_model: Any = None) -> Trainer:
    """Give a TRL trainer that is built already, of any subclass, the KL of a configuration. Returns the trainer.

    Its class becomes a subclass of its own that klamp's hooks come first in; nothing else of it changes. To be called
    before `train`. A trainer that Unsloth has written gets the hooks that fit Unsloth's loss.

    Args:
        trainer: a `trl.GRPOTrainer`, or an instance of a user's subclass of it.
        kl: the whole KL term; its beta takes the place of the trainer's.
        ref_model: the reference: a model; None: the trainer's own, or where it has none (it was built with beta 0) a
            copy of the policy as it is now.

    Raises:
        ConfigError: no TRL trainer, one that has trained already, or an option that cannot work in it.
        UnsupportedVersion: an Unsloth that was not tried, or whose loss is not where it was.
    """
    check_instance("kl", kl, KLConfig)
    hook = KLMixin if host_class(type(trainer)) is None else unsloth_hook(trainer)
    return attach_to(trainer, kl, hook, ref_model=ref_model)


def effective(trainer: Any) -> Effective:
    """What the KL of a TRL trainer will really do: klamp's, an attached one, or a stock trainer; on Unsloth too.

    Read from the trainer, not from what it was asked for. Changes nothing.

    Raises:
        ConfigError: no trainer of TRL's GRPO.
    """
    if host_class(type(trainer)) is not None:
        return read_effective_on_unsloth(trainer)
    if not isinstance(trainer, trl.GRPOTrainer):
        raise ConfigError(
            "effective takes a trl.GRPOTrainer, built already",
            got=describe(trainer),
            why="what is in force is read from the trainer itself: its arguments, its reference, an attached KL",
            fix="effective(trainer), with trainer = klamp.trl.GRPOTrainer(...)",
        )
    return read_effective(trainer)
