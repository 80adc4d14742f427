"""TRL's arguments with klamp's fields."""

from __future__ import annotations

from dataclasses import dataclass, field

import trl

from klamp.config import KLConfig
from klamp.hosts.common.fields import KLFields, kl_config, settle_fields
from klamp.hosts.common.refusals import warn_without_kl
from klamp.hosts.trl.fast_scoring import check_choice
from klamp.hosts.trl.patched import refuse_classes
from klamp.hosts.trl.refusals import check_arguments, settle_reference


@dataclass
class GRPOConfig(KLFields, trl.GRPOConfig):
    """`trl.GRPOConfig` with every field of `klamp.KLConfig`.

    All of TRL's fields and defaults stay, `beta=0.0` included. klamp's fields are None until they are set. While all
    are None, the loss is TRL's own, KL included; once one is set (whichever, `beta` and its other names aside), TRL's
    KL is replaced by klamp's term, in which the fields that are still None have klamp's defaults.

    Raises:
        UnknownNameError, ConfigError: a choice that klamp refuses, or that cannot work in TRL; with the reason.
    """

    exact_kl_completions: int | None = field(
        default=None,
        metadata={
            "help": "Completions per group whose exact KL is measured, besides k1 and k3 of all. Unset: 1 where a KL "
            "field is set, else 0; with kl_estimator=exact always all. Changes no loss."
        },
    )

    fast_scoring: bool | str = field(
        default=False,
        metadata={
            "help": "Score completions by klamp: each distinct prompt is run once, padding never reaches the output "
            "head, logits are never held. The numbers are TRL's up to rounding; where it cannot be done, that is said "
            "once and TRL's own scoring is used. 'require' refuses instead."
        },
    )

    def __post_init__(self) -> None:
        refuse_classes()
        check_choice(self.fast_scoring)
        settle_fields(self)
        kl = self.kl_config()
        if kl is not None:
            warn_without_kl(kl)
            settle_reference(kl, self)
            check_arguments(kl, self)
        super().__post_init__()

    def kl_config(self) -> KLConfig | None:
        """The KL term that these arguments describe; None while TRL's own is left alone."""
        return kl_config(self)
