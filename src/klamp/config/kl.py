"""`KLConfig`, the one KL configuration for every trainer: its choices, which choices go together, what they build."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import InitVar, dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from klamp.config import anchor
from klamp.config.anchor import TINKER, choice
from klamp.config.fields import Need, accepts_aliases, aliases_of, check_server, like, one_of, setting, without_effect
from klamp.core.arguments import AT_LEAST_0, AT_LEAST_1, COEFFICIENT, POSITIVE, check_fields, check_number
from klamp.core.clipping import ClipLevel
from klamp.core.controllers import FixedController, HoldController, ProportionalController, Schedule, StepController
from klamp.core.estimators import ESTIMATORS
from klamp.core.gradients import check_gradient_choice
from klamp.core.term import KLTerm, OffPolicy, Placement, Weighted, gates_on_itself
from klamp.core.types import ClipMethod, Gradient, Horizon, Reduction, Value
from klamp.errors import KLWarning, Refusal, refuse

ControllerName: TypeAlias = Literal["fixed", "hold", "step", "proportional"]
ReferenceName: TypeAlias = Literal["auto", "frozen", "adapter_off", "ema", "periodic", "remote", "sampler"]
DType: TypeAlias = Literal["float32", "bfloat16", "float16"]

SMALL_VOCABULARY = 4096
"""Entries up to which the exact KL of every completion is measured; its logits are small beside the activations."""

BETA = COEFFICIENT.but(COEFFICIENT.why, "use beta=0 to train without KL")
STEP_FACTORS = (StepController.up, StepController.down, StepController.high, StepController.low)
"""What the step rule multiplies beta by, and the targets beyond which it does."""

CLIP, SOFT = one_of("kl_clip_method", "hard", "soft"), one_of("kl_clip_method", "soft")
PER_TOKEN = Need(
    f"{CLIP.text}, and use_per_token_kl_threshold=True", lambda c: CLIP.is_met(c) and c.use_per_token_kl_threshold
)
SAMPLED, IN_LOSS = one_of("kl_estimator", *ESTIMATORS), one_of("kl_placement", "loss")
A_BETA = Need("a beta above 0", lambda c: c.beta != 0)
ADAPTIVE = Need("a controller that moves beta (target_kl, and a beta above 0)", lambda c: c.controller_name != "fixed")
A_CONTROLLER = Need("kl_controller='hold' (or leave it out)", lambda c: c.kl_controller != "fixed")
A_START = Need("a beta above 0 to start from", lambda c: c.controller_name != "fixed")
STEP, PROPORTIONAL = one_of("kl_controller", "step"), one_of("kl_controller", "proportional")
A_GRADIENT = Need("kl_gradient='reverse' or 'forward'", lambda c: (c.kl_gradient, c.kl_off_policy) != ("none", "none"))
REVERSE = one_of("kl_gradient", "reverse")
NEGATIVE = Need("a beta below 0, beside a teacher", lambda c: c.beta < 0)
NOT_IN_REWARD = one_of("kl_placement", "loss", "advantage")
WEIGHTS = one_of("kl_off_policy", "token", "sequence")
NOT_SUMMED = Need(
    "kl_off_policy='sequence' (the exact KL sums over the token, not over its prefix)",
    lambda c: (c.kl_estimator, c.kl_off_policy) != ("exact", "token"),
)
OWN_WEIGHTS, REMOTE = one_of("reference", "auto", "frozen", "ema", "periodic"), one_of("reference", "remote")


@accepts_aliases
@dataclass(frozen=True, kw_only=True)
class KLConfig:
    """The KL term, in nats: what is measured, what its gradient does, where it enters, and how it is held.

    The same fields mean the same in every trainer. `beta` may be given as `kl_coef`, `kl_penalty` or `kl_beta`.

    Raises:
        UnknownNameError: an unknown field or choice; names the nearest.
        ConfigError: a combination that cannot work or would not do what its name says.
    """

    beta: float = setting(0.01, aliases=("kl_coef", "kl_penalty", "kl_beta"))
    """Coefficient of the KL, in reward (or loss) per nat. 0 trains without KL: no reference is loaded. Below 0, beside
    a larger teacher_coef, the run goes beyond the teacher."""
    kl_estimator: Value = setting("k3", limits=(anchor.NO_LOGITS,))
    """Value of the KL: k1, k2, k3, abs, or exact (over the vocabulary)."""
    kl_gradient: Gradient = choice("gradient")
    kl_horizon: Horizon = choice("horizon", needs=(A_GRADIENT,))
    kl_placement: Placement = choice("placement")
    kl_clip_method: ClipMethod = choice("clip_method")
    kl_clip_threshold: float = choice("clip_threshold", needs=(CLIP,))
    use_per_token_kl_threshold: bool = setting(KLTerm.clip_unit == "token", needs=(CLIP,))
    """Whether the threshold is per token (multiplied by the reference length)."""
    kl_clip_temperature: float = choice("clip_temperature", needs=(SOFT,))
    kl_clip_level: ClipLevel | None = setting(None, needs=(CLIP,))
    """Whose KL is held against the budget: each sequence's, its group's mean, or the batch's. None: each sequence's
    with kl_estimator='exact', kl_horizon='token', else its group's; a sampled KL leaves the sequence itself out."""
    kl_reference_length: int | None = setting(None, AT_LEAST_1, needs=(PER_TOKEN,))
    """Reference length in tokens; None: a data column if there is one, else measured once at the start and frozen."""
    kl_controller: ControllerName | None = None
    """How beta follows the KL: fixed, hold, step, proportional; None: hold with a target_kl, else fixed."""
    target_kl: float | None = setting(
        None,
        POSITIVE.but("a KL is never negative, and 0 would mean: never learn", "0.05 is a usual start"),
        needs=(A_CONTROLLER, A_START),
    )
    """KL to hold, in nats per token (the unit of the logged metric kl/k3)."""
    kl_controller_factors: tuple[float, float, float, float] = setting(STEP_FACTORS, POSITIVE, needs=(STEP,))
    """step: factors up and down, and the targets above and below which they act; PPO's are 2 0.5 1.5 0.6667."""
    kl_controller_horizon: int = like(ProportionalController, "horizon", default=100, needs=(PROPORTIONAL,))
    """Updates over which the proportional rule takes effect."""
    beta_min: float | None = setting(None, AT_LEAST_0, needs=(ADAPTIVE,))
    """Lower bound of an adaptive beta; None: beta / 10 for hold, else beta / 100."""
    beta_max: float | None = setting(None, AT_LEAST_0, needs=(ADAPTIVE,))
    """Upper bound of an adaptive beta; None: 3 / sqrt(target_kl), or 10 times beta where that is more."""
    kl_baseline: Literal["none", "exact"] = choice(
        "baseline", needs=(SAMPLED, REVERSE, NOT_IN_REWARD), limits=(anchor.NO_EXACT_BASELINE,)
    )
    kl_max_log_ratio: float | None = choice("max_log_ratio", needs=(SAMPLED,))
    kl_max_teacher_log_ratio: float | None = choice("max_teacher_log_ratio", needs=(NEGATIVE, SAMPLED, NOT_IN_REWARD))
    kl_off_policy: OffPolicy = choice("off_policy", needs=(NOT_SUMMED,))
    kl_max_weight: float | None = choice("max_weight", needs=(WEIGHTS, NOT_SUMMED))
    kl_normalizer: Reduction | None = choice("normalizer", needs=(IN_LOSS,), limits=(anchor.ONE_AVERAGE,))
    kl_exclude_tokens: tuple[int | str, ...] = ()
    """Tokens that carry no KL: ids, token strings, or `special` for all special tokens."""
    sampler_coef: float = setting(0.0, AT_LEAST_0, needs=(A_BETA,), limits=(anchor.ONE_KL,))
    """Coefficient of a second KL, to the sampler, in the loss beside the reference's: it holds each update, not the
    run (reverse, k3, per token, weighed by policy/sampler); 0: none."""
    kl_schedule: Schedule = choice("schedule", needs=(A_BETA,))
    kl_warmup_steps: int = choice("warmup_steps", needs=(A_BETA,))
    kl_early_stop: float | None = setting(None, POSITIVE, limits=(anchor.OWN_STEP,), ignored_by=TINKER)
    """Skip a rollout's remaining updates once KL(old||policy) exceeds this, in nats per token."""
    kl_monitor: bool = False
    """Load the reference and log the KL even at beta 0."""
    reference: ReferenceName = setting(
        "auto", limits=(anchor.OWN_PROCESS, anchor.ITS_REFERENCE, anchor.MADE_AT_ONCE), ignored_by=TINKER
    )
    """The reference: frozen (a copy), adapter_off, ema, periodic, remote, or the sampler (which holds each update, not
    the run); auto: adapter_off if new, else frozen."""
    reference_decay: float = choice("decay", needs=(one_of("reference", "ema"),), ignored_by=TINKER)
    reference_reset_steps: int = choice("reset_steps", needs=(one_of("reference", "periodic"),), ignored_by=TINKER)
    reference_dtype: DType | None = setting(None, needs=(OWN_WEIGHTS,), limits=(anchor.ITS_DTYPE,), ignored_by=TINKER)
    """Data type of a reference with weights of its own; None: the policy's."""
    reference_url: str | None = choice("url", needs=(REMOTE,), ignored_by=TINKER)
    reference_name: str | None = choice("name", needs=(REMOTE,), ignored_by=TINKER)

    if TYPE_CHECKING:  # at run time `accepts_aliases` takes these names
        kl_coef: InitVar[float] = 0.01
        kl_penalty: InitVar[float] = 0.01
        kl_beta: InitVar[float] = 0.01

    def __post_init__(self, *_: object) -> None:
        check_fields(self)
        check_server(self.reference_url, "reference_url", key="the environment variable KLAMP_REFERENCE_KEY")
        check_gradient_choice(self.kl_estimator, self.kl_gradient, self.kl_horizon)
        refuse(refusals(self))
        self.build_controller()
        for text in self.cautions():
            warnings.warn(text, KLWarning, stacklevel=4)

    @property
    def needs_reference(self) -> bool:
        """Whether anything asks for the reference; without it none is loaded and none is scored."""
        return self.beta != 0 or self.kl_monitor

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
        """The bounds of beta in force: as set, else the controller's defaults.

        A rule that multiplies does not return from 0; the upper bound is ten times what advantages of variance 1 need.
        """
        name = self.controller_name
        share = {"fixed": 0.0, "hold": 0.1}.get(name, 0.01)
        low = share * self.beta if self.beta_min is None else self.beta_min
        if self.beta_max is not None or name == "fixed" or self.target_kl is None:
            return low, self.beta_max
        return low, max(3 / math.sqrt(self.target_kl), 10 * self.beta)

    def cautions(self) -> list[str]:
        """What this configuration may not do although its name suggests it; each with the way out."""
        c = self
        pulls = c.kl_placement == "loss" and c.beta > 0
        own = ESTIMATORS[c.kl_estimator].caution if c.kl_gradient == "own" and c.kl_estimator in ESTIMATORS else ""
        others = "; with tokens left out it only makes the kept ones less likely" if c.excludes else ""
        inert = c.kl_gradient == "none" or (c.kl_estimator, c.kl_gradient) == ("k1", "own")
        free = c.kl_clip_threshold if PER_TOKEN.is_met(c) else 0.0
        target, hard = c.target_kl if c.controller_name != "fixed" else None, c.kl_clip_method == "hard"
        wide = wide_clip(c)
        rows = [
            (pulls and own != "" and c.reference != "sampler",
             f"kl_estimator={c.kl_estimator!r} with kl_gradient='own' {own.format(kept=others)}"),
            (pulls and c.kl_gradient == "none",
             "kl_gradient='none' with a beta above 0 adds a number to the loss and nothing to its gradient: the KL is "
             "logged, not held. Use kl_gradient='reverse', or beta=0 with kl_monitor=True to log it."),
            (c.reference == "sampler" and c.beta > 0 and not inert,
             "reference='sampler' is a proximal term: it holds each update near who sampled, and no update near the "
             "start. Without top_p and top_k the run ends where it would end without the term, and with one update per "
             "rollout its gradient is 0."),
            (target is not None and free >= target,
             f"target_kl={c.target_kl} lies within the clip's free budget of {free:g} nats per token: below the budget "
             f"the KL pulls {'not' if hard else 'less'}, so the controller raises beta "
             f"{'without' if hard else 'with less'} effect. Set kl_clip_threshold below target_kl, or leave one of the "
             "two out."),
            (wide != "", wide),
            (target is not None and c.controller_name != "hold",
             f"kl_controller={c.controller_name!r} did not hold its target on the built-in task, 'hold' did "
             "(docs/controllers.md). Leave kl_controller out for 'hold'."),
        ]  # fmt: skip
        return [text for applies, text in rows if applies] + without_effect(c)

    def build_controller(self) -> FixedController:
        """A fresh controller of beta."""
        low, high = self.beta_bounds
        if self.controller_name == "fixed":  # of the size alone, whose sign stays
            return FixedController(abs(self.beta), min_value=abs(low), max_value=high)
        shared: dict[str, Any] = {"target": self.target_kl, "min_value": low, "max_value": high}
        if self.controller_name == "hold":
            return HoldController(self.beta, **shared)
        if self.controller_name == "step":
            up, down, above, below = self.kl_controller_factors
            return StepController(self.beta, up=up, down=down, high=above, low=below, **shared)
        return ProportionalController(self.beta, horizon=self.kl_controller_horizon, **shared)

    def beside(self) -> list[Weighted]:
        """The KL to the sampler beside that to the reference, if there is one."""
        term = KLTerm(anchor="sampler", off_policy="token")
        return [Weighted(self.sampler_coef, term)] if self.sampler_coef > 0 and self.beta != 0 else []

    def build_term(self) -> KLTerm:
        """The KL term for `grpo_loss`."""
        return anchor.build_term(
            self,
            "kl",
            anchor="sampler" if self.reference == "sampler" else "reference",
            beyond="teacher" if self.beta < 0 else "",
            mean_over="trained" if self.beta < 0 else "carried",
            clip_level=self.clip_level,
            clip_unit="token" if self.use_per_token_kl_threshold else "sequence",
        )


ALIASES: Mapping[str, str] = aliases_of(KLConfig)
"""Other names of a field, as other trainers and guides call it."""

SHORT = 100
"""Tokens of a short completion; klamp's choice."""


def check_beta(beta: float, *, name: str = "beta", fix: str = "") -> None:
    """Refuse a coefficient of the KL that is negative, not finite, or no number; without a `fix`, 0 is the way out."""
    check_number(name, beta, BETA.but(BETA.why, fix or f"use {name}=0 to train without KL"))


def refusals(c: KLConfig) -> list[Refusal]:
    """Every combination that cannot work or would not do what its name says."""
    in_loss, clipped, of_sampler = c.kl_placement == "loss", c.kl_clip_method != "none", c.reference == "sampler"
    summed = c.kl_placement != "reward" and c.kl_gradient != "forward" and c.kl_estimator != "exact"
    own = gates_on_itself(c.kl_estimator, c.kl_gradient, c.kl_horizon, c.kl_off_policy)
    steered, negative, moves = c.controller_name != "fixed", c.beta < 0, ("sampler", "ema", "periodic")
    rows: list[tuple[object, str, str, str, str]] = [
        (not in_loss and c.kl_gradient != "reverse",
         f"kl_gradient={c.kl_gradient!r} has no meaning with kl_placement={c.kl_placement!r}", "",
         "in the reward or the advantage the gradient is the score function's: reverse",
         "leave kl_gradient='reverse', or set kl_placement='loss'"),
        (clipped and in_loss and (c.kl_estimator, c.kl_gradient) == ("k1", "own"),
         "a clipped k1-as-loss is refused", "", "k1's own gradient is zero in expectation; gated by a clip it becomes "
         "an unlabelled regulariser", "use kl_gradient='reverse'"),
        (clipped and c.kl_clip_level == "sequence" and not own,
         "kl_clip_level='sequence' gates sampled tokens by their own KL", "",
         "the gate is then correlated with the tokens whose gradient it multiplies: their product follows no KL",
         "leave kl_clip_level out, or set kl_estimator='exact', kl_horizon='token' (not forward, no prefix weights)"),
        (negative and not c.build_term().follows_reverse,
         "a negative beta takes no clip, and no gradient but the reverse KL's", f"beta={c.beta:g}",
         "any other form is unbounded below (k3 differentiated), or ends elsewhere",
         "set kl_gradient='reverse' and kl_clip_method='none'"),
        (negative and (c.target_kl is not None or c.kl_controller not in (None, "fixed")),
         "a negative beta takes no target_kl", f"beta={c.beta:g}",
         "the KL grows by design, and a rule drives beta past the teacher's coefficient", "leave target_kl out"),
        (negative and (c.excludes or c.kl_normalizer is not None),
         "a negative beta takes no kl_exclude_tokens and no kl_normalizer", f"beta={c.beta:g}",
         "the teacher has to outweigh beta at each token", "leave them out"),
        (negative and c.reference in moves, f"a negative beta takes no reference={c.reference!r}", f"beta={c.beta:g}",
         "the reference follows the policy, and the run then ends at the teacher", "use a frozen reference"),
        (c.kl_baseline != "none" and (c.excludes or c.kl_max_weight is not None),
         "kl_baseline takes no kl_exclude_tokens and no kl_max_weight", "",
         "its mean is 0 over all words at their full weight only", "leave one of the two out"),
        (c.kl_controller not in (None, "fixed") and (c.target_kl is None or c.beta == 0),
         f"kl_controller={c.kl_controller!r} needs target_kl and a beta above 0",
         f"target_kl={c.target_kl}, beta={c.beta:g}",
         "it multiplies beta to steer the KL towards a target, and 0 times anything is 0",
         "set target_kl (nats per token; 0.05 is a usual start) and a small beta, or kl_controller='fixed'"),
        (steered and (c.kl_schedule != "constant" or c.kl_warmup_steps > 0),
         f"a schedule of beta cannot be combined with kl_controller={c.controller_name!r}",
         f"kl_schedule={c.kl_schedule!r}, kl_warmup_steps={c.kl_warmup_steps}, target_kl={c.target_kl}",
         "both move beta: the controller raises what the schedule lowers, until its bound",
         "leave out target_kl for a schedule, or kl_schedule and kl_warmup_steps for a target"),
        (c.reference in ("sampler", "remote") and "exact" in (c.kl_estimator, c.kl_baseline),
         f"kl_estimator='exact' cannot use {'the sampler' if of_sampler else 'a remote reference'}",
         f"kl_estimator={c.kl_estimator!r}, kl_baseline={c.kl_baseline!r}",
         "it gives log-probabilities of the sampled tokens, not whole rows of logits",
         "use kl_estimator='k3' without kl_baseline, or a reference on this machine"),
        (of_sampler and (not in_loss or steered), "reference='sampler' takes a fixed beta, in the loss",
         f"kl_placement={c.kl_placement!r}, target_kl={c.target_kl}",
         "at a rollout's first update the sampler is the policy, so that there is no KL to shift by or to steer",
         "leave kl_placement and target_kl out"),
        (of_sampler and c.sampler_coef > 0, "reference='sampler' and sampler_coef name the sampler twice", "",
         "sampler_coef is for a KL to the sampler beside one to a reference", "leave one of the two out"),
        (c.reference == "remote" and c.reference_url is None, "reference='remote' needs reference_url", "",
         "the reference is asked over HTTP", "set reference_url to where a vLLM server listens"),
        (c.excludes and c.kl_horizon == "sequence" and not summed,
         "kl_exclude_tokens cannot leave tokens out of this KL over sequences",
         f"kl_estimator={c.kl_estimator!r}, kl_gradient={c.kl_gradient!r}, kl_placement={c.kl_placement!r}",
         "a weight of the whole prefix (forward), a sum over the vocabulary (exact) and a number per completion "
         "(reward) have the gradient of no KL over the tokens that are kept",
         "use kl_horizon='token', or kl_gradient='reverse' with k3 in the loss or k1 in the advantage"),
    ]  # fmt: skip
    placed = anchor.placement_refusals(c, "kl")
    return placed + [Refusal(bool(bad), what, why, fix, got or None) for bad, what, got, why, fix in rows]


def wide_clip(c: KLConfig, measured_length: float | None = None) -> str:
    """The caution of a soft clip that is too wide for its budget; empty: it is not.

    A budget per token that has no reference length yet is judged at `SHORT` tokens.
    """
    length = c.kl_reference_length or measured_length or SHORT
    budget = c.kl_clip_threshold * (length if c.use_per_token_kl_threshold else 1)
    width = c.kl_clip_temperature
    if c.kl_clip_method != "soft" or width <= budget / 10:
        return ""
    at_length = f" for {length:.4g} tokens" if c.use_per_token_kl_threshold else ""
    return (
        f"kl_clip_temperature={width:g} is wide against the budget of {budget:g} nats{at_length}: the soft clip passes "
        f"{100 / (1 + math.exp(budget / width)):.2g} % of the pull at a KL of 0 already. Use kl_clip_temperature <= "
        "budget / 10, or kl_clip_method='hard'."
    )
