"""The choices of a KL, each with what it does; `KLConfig` checks them and builds from them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from klamp.core.arguments import (
    AT_LEAST_0,
    AT_LEAST_1,
    FROM_0_TO_1,
    INSIDE_0_1,
    POSITIVE,
    Numbers,
)
from klamp.core.clipping import ClipLevel
from klamp.core.controllers import CONTROLLER_NUMBERS, HoldController, ProportionalController, Schedule, StepController
from klamp.core.term import TERM_NUMBERS, KLTerm, OffPolicy, Placement, gates_on_itself
from klamp.core.types import ClipMethod, Gradient, Horizon, Reduction, Value

ControllerName: TypeAlias = Literal["fixed", "hold", "step", "proportional"]
ReferenceName: TypeAlias = Literal["auto", "frozen", "adapter_off", "ema", "periodic", "remote", "sampler"]
DType: TypeAlias = Literal["float32", "bfloat16", "float16"]

SMALL_VOCABULARY = 4096
"""Entries up to which the exact KL of every completion is measured; its logits are small beside the activations."""


BETA = AT_LEAST_0.but("a negative coefficient rewards leaving the reference", "use beta=0 to train without KL")

NUMBERS: Mapping[str, Numbers] = {
    **{f"kl_{name}": numbers for name, numbers in TERM_NUMBERS.items()},
    "beta": BETA,
    "beta_min": BETA.but(BETA.why, "leave beta_min out for its default"),
    "beta_max": BETA.but(BETA.why, "leave beta_max out for its default"),
    "kl_reference_length": AT_LEAST_1.but(
        "the budget of a completion is threshold * reference length",
        "give the usual length of a completion of the reference in tokens, or None to have it measured",
    ),
    "target_kl": POSITIVE.but("a KL is never negative, and 0 would mean: never learn", "0.05 is a usual start"),
    **{f"kl_controller_{name}": CONTROLLER_NUMBERS[name] for name in ("gain", "lead", "clip", "horizon")},
    "kl_controller_factors": POSITIVE.but("they multiply beta and the target", "1.5, 0.75, 1.5, 0.5 are the defaults"),
    "kl_warmup_steps": AT_LEAST_0,
    "kl_schedule_end": FROM_0_TO_1,
    "kl_early_stop": POSITIVE.but("a KL is never negative", "use kl_early_stop=None to never stop early"),
    "reference_decay": INSIDE_0_1.but(
        "the reference keeps this share of itself at every step",
        "0.99 follows over about a hundred steps; reference='frozen' never moves",
    ),
    "reference_reset_steps": AT_LEAST_1,
}
"""Which numbers the fields of `KLConfig` take."""


STEP_FACTORS = (StepController.up, StepController.down, StepController.high, StepController.low)
"""What the step rule multiplies beta by, and the targets beyond which it does."""


@dataclass(frozen=True, kw_only=True)
class KLChoices:
    """The fields of `KLConfig`, not yet checked, and the properties that follow from them."""

    beta: float = 0.01
    """Coefficient of the KL, in reward (or loss) per nat. 0 trains without KL: no reference is loaded."""
    kl_estimator: Value = "k3"
    """Value of the KL: k1, k2, k3, abs, or exact (over the vocabulary)."""
    kl_gradient: Gradient = KLTerm.gradient
    """Whose gradient the loss follows: reverse KL(policy||ref), forward KL(ref||policy), the estimator's own, none."""
    kl_horizon: Horizon = KLTerm.horizon
    """token: each token's own KL; sequence: also the effect of a token on the KL of later tokens."""
    kl_placement: Placement = KLTerm.placement
    """In the loss, in the reward (before advantages are formed), or as a shift of the advantage (after)."""
    kl_clip_method: ClipMethod = KLTerm.clip_method
    """How the KL is clipped at its budget: none, hard (no pull below the budget), or soft."""
    kl_clip_threshold: float = KLTerm.clip_threshold
    """KL budget: nats per token of the reference length, or nats in total."""
    use_per_token_kl_threshold: bool = KLTerm.clip_unit == "token"
    """Whether the threshold is per token (multiplied by the reference length)."""
    kl_clip_temperature: float = KLTerm.clip_temperature
    """Width of the soft clip in nats of the total."""
    kl_clip_level: ClipLevel | None = None
    """Whose KL is held against the budget: each sequence's, its group's mean, or the batch's. None: each sequence's
    with kl_estimator='exact', kl_horizon='token', else its group's; a sampled KL leaves the sequence itself out."""
    kl_reference_length: int | None = None
    """Reference length in tokens; None: a data column if there is one, else measured once at the start and frozen."""
    kl_controller: ControllerName | None = None
    """How beta follows the KL: fixed, hold, step, proportional; None: hold with a target_kl, else fixed."""
    target_kl: float | None = None
    """KL to hold, in nats per token (the unit of the logged metric kl/k3)."""
    kl_controller_gain: float = HoldController.gain
    """hold: largest change of log beta in a step."""
    kl_controller_lead: float = HoldController.lead
    """hold: how many steps ahead the KL is foreseen; about its lag behind the weights."""
    kl_controller_factors: tuple[float, float, float, float] = STEP_FACTORS
    """step: factors up and down, and the targets above and below which they act; PPO's are 2 0.5 1.5 0.6667."""
    kl_controller_horizon: int = 100
    """Updates over which the proportional rule takes effect."""
    kl_controller_clip: float = ProportionalController.clip
    """proportional: largest relative error of the KL that counts, in (0, 1]."""
    beta_min: float | None = None
    """Lower bound of an adaptive beta; None: beta / 10 for hold, else beta / 100."""
    beta_max: float | None = None
    """Upper bound of an adaptive beta; None: 3 / sqrt(target_kl), or 10 times beta where that is more."""
    kl_max_log_ratio: float | None = KLTerm.max_log_ratio
    """Straight-through bound of the log-ratio in nats; how often it binds is logged."""
    kl_off_policy: OffPolicy = KLTerm.off_policy
    """Weigh the KL by policy/sampler: not at all, per token, or by the whole prefix (exact, noisier)."""
    kl_max_weight: float | None = KLTerm.max_weight
    """Upper bound of the off-policy weight policy/sampler; how often it binds is logged."""
    kl_normalizer: Reduction | None = KLTerm.normalizer
    """Reduction of the KL over tokens; None: that of the policy loss."""
    kl_exclude_tokens: tuple[int | str, ...] = ()
    """Tokens that carry no KL: ids, token strings, or `special` for all special tokens."""
    kl_schedule: Schedule = "constant"
    """Factor on beta over the run: constant, linear or cosine."""
    kl_warmup_steps: int = 0
    """Warm-up: steps over which the factor on beta grows from 0."""
    kl_schedule_end: float = 0.0
    """The factor on beta at the end of a linear or cosine schedule."""
    kl_early_stop: float | None = None
    """Skip a rollout's remaining updates once KL(old||policy) exceeds this, in nats per token."""
    kl_monitor: bool = False
    """Load the reference and log the KL even at beta 0."""
    reference: ReferenceName = "auto"
    """The reference: frozen (a copy), adapter_off, ema, periodic, remote, or the sampler (which holds each update, not
    the run); auto: adapter_off if new, else frozen."""
    reference_decay: float = 0.99
    """ema: share of the old reference's weights that every step keeps, in (0, 1)."""
    reference_reset_steps: int = 100
    """periodic: steps after which the reference becomes the policy."""
    reference_device: str | None = None
    """Device of a reference with weights of its own; None: the policy's."""
    reference_dtype: DType | None = None
    """Data type of a reference with weights of its own; None: the policy's."""
    reference_url: str | None = None
    """remote: the address of the vLLM server that the reference answers at."""
    reference_name: str | None = None
    """remote: the model's name at a vLLM server; None: the only one that it serves."""

    @property
    def needs_reference(self) -> bool:
        """Whether anything asks for the reference; without it none is loaded and none is scored."""
        return self.beta > 0 or self.kl_monitor

    @property
    def clip_level(self) -> ClipLevel:
        """The clip level in force: as named, else `sequence` where a completion's own KL may decide, else `group`."""
        own = gates_on_itself(self.kl_estimator, self.kl_gradient, self.kl_horizon, self.kl_off_policy)
        return self.kl_clip_level or ("sequence" if own else "group")

    @property
    def excludes(self) -> bool:
        """Whether some tokens carry no KL."""
        return bool(self.kl_exclude_tokens)

    @property
    def controller_name(self) -> ControllerName:
        """The controller in force: as named, else `hold` where a target is set and beta is not 0, else `fixed`."""
        return self.kl_controller or ("fixed" if self.target_kl is None or self.beta == 0 else "hold")

    @property
    def beta_bounds(self) -> tuple[float, float | None]:
        """The bounds of beta in force: as set, else the defaults of the controller.

        A rule that multiplies needs a lower one above 0, or a long stay at a KL of 0 would leave a beta from which it
        does not return. The upper one is some ten times what advantages of variance 1 ask for.
        """
        name = self.controller_name
        share = {"fixed": 0.0, "hold": 0.1}.get(name, 0.01)
        low = share * self.beta if self.beta_min is None else self.beta_min
        if self.beta_max is not None or name == "fixed" or self.target_kl is None:
            return low, self.beta_max
        return low, max(3 / math.sqrt(self.target_kl), 10 * self.beta)
