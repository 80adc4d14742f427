"""The choices of a KL, each with what it does; which combinations are refused, and which are allowed with a caution.

`KLConfig` checks them and builds from them. Addresses are shown and kept: without user, password and query.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias
from urllib.parse import urlsplit

from klamp.core.arguments import AT_LEAST_0, AT_LEAST_1, FROM_0_TO_1, INSIDE_0_1, POSITIVE, Numbers, check_number
from klamp.core.clipping import ClipLevel
from klamp.core.controllers import CONTROLLER_NUMBERS, HoldController, ProportionalController, Schedule, StepController
from klamp.core.term import TERM_NUMBERS, KLTerm, OffPolicy, Placement, gates_on_itself
from klamp.core.types import ClipMethod, Gradient, Horizon, Reduction, Value
from klamp.errors import ConfigError, Refusal

ControllerName: TypeAlias = Literal["fixed", "hold", "step", "proportional"]
ReferenceName: TypeAlias = Literal["auto", "frozen", "adapter_off", "ema", "periodic", "remote", "sampler"]
DType: TypeAlias = Literal["float32", "bfloat16", "float16"]

SMALL_VOCABULARY = 4096
"""Entries up to which the exact KL of every completion is measured; its logits are small beside the activations."""


BETA = AT_LEAST_0.but("a negative coefficient rewards leaving the reference", "use beta=0 to train without KL")

NUMBERS: Mapping[str, Numbers] = {
    **{f"kl_{name}": numbers for name, numbers in TERM_NUMBERS.items()},
    "beta": BETA,
    **{name: BETA.but(BETA.why, f"leave {name} out for its default") for name in ("beta_min", "beta_max")},
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


CONTROLLER_FIELDS: Mapping[ControllerName, tuple[str, ...]] = {
    "hold": ("gain", "lead"),
    "step": ("factors",),
    "proportional": ("horizon", "clip"),
}
"""Name of a controller -> the fields kl_controller_* that it alone reads."""
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

        A rule that multiplies needs a lower one above 0: it does not return from a beta of 0. The upper one is some ten
        times what advantages of variance 1 ask for.
        """
        name = self.controller_name
        share = {"fixed": 0.0, "hold": 0.1}.get(name, 0.01)
        low = share * self.beta if self.beta_min is None else self.beta_min
        if self.beta_max is not None or name == "fixed" or self.target_kl is None:
            return low, self.beta_max
        return low, max(3 / math.sqrt(self.target_kl), 10 * self.beta)


def check_server(url: str | None, field: str, *, key: str) -> None:
    """Refuse what is no address of a server, and one with a user, a password or a query; its key comes from `key`."""
    if url is None:
        return
    if set(url) & {"@", "?"}:
        raise ConfigError(
            f"{field} holds more than the address of a server",
            got="a text with an @ or a question mark, which is not shown",
            why="a configuration is shown, and written into the run's folder",
            fix=f"write http://HOST:PORT; what the server wants to know of you comes from {key}",
        )
    if not _is_sound(url):
        raise ConfigError(f"{field}={url!r} is no address", why="it is asked over HTTP", fix="write http://HOST:PORT")


def _is_sound(url: str) -> bool:
    plain = url.isascii() and url.isprintable() and not set(url) & set(" \\<>\"'")
    try:
        parts = urlsplit(url)
        return plain and parts.port != 0 and parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:  # what urlsplit says of ports and of IPv6
        return False


def check_cluster(address: str | None, field: str) -> None:
    """Refuse a user, a password or a query in the address of a Ray cluster: Ray takes none, klamp would show them."""
    if address is not None and set(address) & {"@", "?"}:
        raise ConfigError(
            f"{field} holds more than the address of a cluster",
            got="a text with an @ or a question mark, which is not shown",
            why="Ray takes no user, no password and no query there",
            fix="write ray://HOST:10001, HOST:6379, auto or local; a cluster that asks for a token gets it from "
            "RAY_AUTH_MODE=token and RAY_AUTH_TOKEN",
        )


MEASURED: Mapping[str, str] = {
    "step": "lowers beta before anything was learnt and then overshoots: towards 0.05, without bounds, it took beta "
    "from 8e-4 to 547 and the reward from 0.88 to 0.60",
    "proportional": "is too slow at its defaults: towards 0.05 the KL stayed above 0.11 for 90 steps",
}
"""Name of a controller -> what it did with a target of 0.05 nats per token on the built-in task."""

OWN_GRADIENT: Mapping[str, str] = {
    "k1": "has an expected gradient of exactly zero on the policy's own tokens, summed over them or over a fixed "
    "length: it regularises nothing (a mean over each completion's own length leaves a pull on the length, and nothing "
    "else{kept}). Use kl_gradient='reverse'.",
    "k3": "follows the gradient of KL(ref||policy) at each position, not that of the KL(policy||ref) that its value "
    "estimates. Use kl_gradient='reverse', or name it: 'forward'.",
    "abs": "pulls down the L1 distance, not a KL. Use kl_gradient='reverse'.",
}
"""Estimator -> what its own gradient does, where that is not the gradient of KL(policy || ref)."""

SHORT = 100
"""Tokens of a short completion: a soft clip whose reference length nobody says is judged at it; klamp's choice."""


def check_beta(beta: float, *, name: str = "beta", fix: str = "") -> None:
    """Refuse a coefficient of the KL that is negative, not finite, or no number; without a `fix`, 0 is the way out."""
    check_number(name, beta, BETA.but(BETA.why, fix or f"use {name}=0 to train without KL"))


def refusals(c: KLChoices) -> list[Refusal]:
    """Every combination that cannot work or would not do what its name says."""
    return [*_placement(c), *_gradient(c), *_control(c), *_reference_and_tokens(c)]


def _placement(c: KLChoices) -> list[Refusal]:
    in_loss = c.kl_placement == "loss"
    return [
        Refusal(
            not in_loss and c.kl_estimator != "k1",
            f"kl_placement={c.kl_placement!r} takes kl_estimator='k1' only, not {c.kl_estimator!r}",
            why="through the score function k1 gives the gradient of KL(policy||ref); k3 gives the reverse minus the "
            "forward gradient, which cancels near the reference, and k2 is biased",
            fix="set kl_estimator='k1' (k3 and exact are logged all the same)",
        ),
        Refusal(
            not in_loss and c.kl_gradient != "reverse",
            f"kl_gradient={c.kl_gradient!r} has no meaning with kl_placement={c.kl_placement!r}",
            why="in the reward or the advantage the gradient is that of the score function: reverse",
            fix="leave kl_gradient='reverse', or set kl_placement='loss'",
        ),
        *placement_refusals("kl", c.kl_placement, c.kl_horizon, c.kl_off_policy),
    ]


def placement_refusals(anchor: str, placement: Placement, horizon: Horizon, off_policy: OffPolicy) -> list[Refusal]:
    """What place, horizon and weights of a KL do not allow together; `kl` or `teacher` is how its fields begin."""
    return [
        Refusal(
            placement == "reward" and horizon == "token",
            f"{anchor}_placement='reward' has {anchor}_horizon='sequence'",
            why="a reward belongs to the whole completion, so its KL is the sum over the sequence",
            fix=f"set {anchor}_horizon='sequence', or {anchor}_placement='advantage' for the per-token shift",
        ),
        Refusal(
            placement != "loss" and off_policy != "none",
            f"{anchor}_off_policy has no meaning with {anchor}_placement={placement!r}",
            why="the surrogate's own importance ratio already weighs what is in the advantage",
            fix=f"set {anchor}_off_policy='none'",
        ),
        Refusal(
            horizon == "sequence" and off_policy == "token",
            f"{anchor}_horizon='sequence' needs {anchor}_off_policy='sequence' (or 'none')",
            why="the token ratio does not correct the prefix that a later token was sampled from",
            fix=f"set {anchor}_off_policy='sequence'",
        ),
    ]


def _gradient(c: KLChoices) -> list[Refusal]:
    in_loss = c.kl_placement == "loss"
    clipped = c.kl_clip_method != "none"
    own = gates_on_itself(c.kl_estimator, c.kl_gradient, c.kl_horizon, c.kl_off_policy)
    return [
        Refusal(
            clipped and in_loss and (c.kl_estimator, c.kl_gradient) == ("k1", "own"),
            "a clipped k1-as-loss is refused",
            why="k1's own gradient is zero in expectation; gated by a clip it becomes an unlabelled regulariser",
            fix="use kl_gradient='reverse'",
        ),
        Refusal(
            clipped and c.kl_clip_level == "sequence" and not own,
            "kl_clip_level='sequence' gates sampled tokens by their own KL",
            why="the gate is then correlated with the tokens whose gradient it multiplies, and their product follows "
            "no KL; only the exact KL with kl_horizon='token' (no forward gradient, no prefix weights) is right",
            fix="leave kl_clip_level out or set 'group' (the other completions of the prompt decide), or set "
            "kl_estimator='exact' with kl_horizon='token'",
        ),
        Refusal(
            c.kl_estimator == "exact" and (c.kl_gradient, c.kl_horizon) == ("forward", "sequence"),
            "the exact forward KL has no sequence horizon",
            why="its prefixes would have to be sampled from the reference",
            fix="use kl_estimator='k3' with kl_gradient='forward'",
        ),
    ]


def _control(c: KLChoices) -> list[Refusal]:
    return [
        Refusal(
            c.kl_controller not in (None, "fixed") and c.target_kl is None,
            f"kl_controller={c.kl_controller!r} needs target_kl",
            why="an adaptive controller steers towards a target",
            fix="set target_kl (nats per token; 0.05 is a usual start), or kl_controller='fixed'",
        ),
        Refusal(
            c.beta == 0 and c.controller_name != "fixed",
            f"beta=0 can never grow under kl_controller={c.controller_name!r}",
            why="the rule multiplies beta, and 0 times anything is 0",
            fix="start from a small positive beta",
        ),
        Refusal(
            c.controller_name != "fixed" and (c.kl_schedule != "constant" or c.kl_warmup_steps > 0),
            f"a schedule of beta cannot be combined with kl_controller={c.controller_name!r}",
            got=f"kl_schedule={c.kl_schedule!r}, kl_warmup_steps={c.kl_warmup_steps}, target_kl={c.target_kl}",
            why="both move beta: the controller raises what the schedule lowers, until its bound",
            fix="leave out target_kl for a schedule, or kl_schedule and kl_warmup_steps for a target",
        ),
    ]


def _reference_and_tokens(c: KLChoices) -> list[Refusal]:
    of_sampler = c.reference == "sampler"
    return [
        Refusal(
            c.reference in ("sampler", "remote") and c.kl_estimator == "exact",
            f"kl_estimator='exact' cannot use {'the sampler' if of_sampler else 'a remote reference'}",
            why="it gives log-probabilities of the sampled tokens, not whole rows of logits",
            fix="use kl_estimator='k3', or a reference on this machine",
        ),
        Refusal(
            of_sampler and (c.kl_placement != "loss" or c.controller_name != "fixed"),
            "reference='sampler' takes a fixed beta, in the loss",
            got=f"kl_placement={c.kl_placement!r}, target_kl={c.target_kl}",
            why="at a rollout's first update the sampler is the policy, so that there is no KL to shift by or to steer",
            fix="leave kl_placement and target_kl out",
        ),
        Refusal(
            c.reference == "remote" and c.reference_url is None,
            "reference='remote' needs reference_url",
            why="the reference is asked over HTTP",
            fix="set reference_url to where a vLLM server listens",
        ),
        Refusal(
            c.excludes and (c.kl_gradient, c.kl_horizon) == ("forward", "sequence"),
            "the forward KL over sequences cannot leave tokens out",
            why="its weight is the reference's probability of the whole prefix",
            fix="use kl_horizon='token', kl_gradient='reverse', or no kl_exclude_tokens",
        ),
        Refusal(
            c.excludes and c.kl_placement == "reward",
            "kl_placement='reward' cannot leave tokens out",
            why="one number per completion is the gradient of no KL over the tokens that are kept",
            fix="use kl_placement='advantage' with kl_horizon='sequence'",
        ),
        Refusal(
            c.excludes and (c.kl_estimator, c.kl_horizon) == ("exact", "sequence"),
            "the exact KL over sequences cannot leave tokens out",
            why="it sums over the whole vocabulary at positions that the drawn tokens choose: the gradient of no KL "
            "over the tokens that are kept",
            fix="use kl_estimator='k3' (the generalised KL over the kept tokens)",
        ),
    ]


def cautions(c: KLChoices) -> list[str]:
    """Cautions: what a configuration may not do although its name suggests it; each with the way out."""
    in_loss, own = c.kl_placement == "loss" and c.beta > 0, c.kl_gradient == "own" and c.reference != "sampler"
    found: list[str] = []
    if in_loss and own and c.kl_estimator in OWN_GRADIENT:
        kept = "; with tokens left out it only makes the kept ones less likely" if c.excludes else ""
        said = OWN_GRADIENT[c.kl_estimator].format(kept=kept)
        found.append(f"kl_estimator={c.kl_estimator!r} with kl_gradient='own' {said}")
    if in_loss and c.kl_gradient == "none":
        found.append(
            "kl_gradient='none' with a beta above 0 adds a number to the loss and nothing to its gradient: the KL is "
            "logged, not held. Use kl_gradient='reverse', or beta=0 with kl_monitor=True to log it."
        )
    inert = c.kl_gradient == "none" or (c.kl_estimator, c.kl_gradient) == ("k1", "own")
    if c.reference == "sampler" and c.beta > 0 and not inert:
        found.append(
            "reference='sampler' is a proximal term: it holds each update near who sampled, and no update near the "
            "start. Without top_p and top_k the run ends where it would end without the term, and with one update per "
            "rollout its gradient is 0."
        )
    free = c.kl_clip_threshold if c.use_per_token_kl_threshold else None
    adaptive = c.kl_clip_method != "none" and c.controller_name != "fixed"
    if adaptive and free is not None and c.target_kl is not None and free >= c.target_kl:
        found.append(
            f"target_kl={c.target_kl:g} lies within the clip's free budget of {free:g} nats per token: below the "
            f"budget the KL pulls {'not' if c.kl_clip_method == 'hard' else 'less'}, so the controller raises "
            f"beta {'without' if c.kl_clip_method == 'hard' else 'with less'} effect. Set kl_clip_threshold below "
            "target_kl, or leave one of the two out."
        )
    if wide := wide_clip(c):
        found.append(wide)
    measured = MEASURED.get(c.controller_name)
    if measured is not None and c.target_kl is not None:
        found.append(
            f"kl_controller={c.controller_name!r} {measured} (docs/controllers.md). Leave kl_controller out for the "
            "rule that holds a target: 'hold'."
        )
    return found + _without_effect(c)


def wide_clip(c: KLChoices, measured_length: float | None = None) -> str:
    """The caution of a soft clip that is too wide for its budget; empty: it is not.

    A budget per token is that of the reference length. Where the configuration names none, it is measured when the run
    starts (`measured_length`), and the clip is judged then, and before that at `SHORT` tokens.
    """
    threshold, width = c.kl_clip_threshold, c.kl_clip_temperature
    length = c.kl_reference_length or measured_length
    measured = c.use_per_token_kl_threshold and length is None
    budget = threshold * (length or SHORT) if c.use_per_token_kl_threshold else threshold
    if c.kl_clip_method != "soft" or width <= budget / 10:
        return ""
    wide, fix = f"kl_clip_temperature={width:g} is wide against", "Use kl_clip_temperature <= budget / 10, or"
    if measured:
        fits = f"fits completions of {10 * width / threshold:.4g} tokens or more" if threshold > 0 else "fits none"
        return (
            f"{wide} a budget of {threshold:g} nats per token: it {fits}, and in shorter ones the soft clip passes "
            f"a part of the pull at a KL of 0 already, half of it at most. {fix} kl_clip_method='hard'; or set "
            "kl_reference_length, if they are that long."
        )
    return (
        f"{wide} the budget of {budget:g} nats: the soft clip passes {100 / (1 + math.exp(budget / width)):.2g} % of "
        f"the pull at a KL of 0 already. {fix} kl_clip_method='hard'."
    )


def _without_effect(c: KLChoices) -> list[str]:
    """Fields that were changed and that nothing reads, since another field switches them off."""
    no_clip, clip = c.kl_clip_method == "none", "kl_clip_method='hard' or 'soft'"
    fixed, adaptive = c.controller_name == "fixed", "a controller that moves beta (target_kl, and a beta above 0)"
    own_weights = "a reference with weights of its own (reference='frozen', 'ema' or 'periodic')"
    no_weights = c.reference in ("adapter_off", "remote", "sampler")
    summed = c.kl_estimator == "exact" and c.kl_off_policy == "token"
    needs = {
        **dict.fromkeys(("kl_clip_threshold", "kl_clip_level", "use_per_token_kl_threshold"), (no_clip, clip)),
        "kl_clip_temperature": (c.kl_clip_method != "soft", "kl_clip_method='soft'"),
        "kl_reference_length": (
            no_clip or not c.use_per_token_kl_threshold,
            f"{clip}, and use_per_token_kl_threshold=True",
        ),
        "kl_max_log_ratio": (c.kl_estimator == "exact", "kl_estimator='k1', 'k2', 'k3' or 'abs'"),
        "kl_horizon": ((c.kl_gradient, c.kl_off_policy) == ("none", "none"), "kl_gradient='reverse' or 'forward'"),
        "kl_max_weight": (c.kl_off_policy == "none" or summed, "kl_off_policy='token' or 'sequence'"),
        "kl_off_policy": (summed, "kl_off_policy='sequence' (the exact KL sums over the token, not over its prefix)"),
        "kl_normalizer": (c.kl_placement != "loss", "kl_placement='loss'"),
        **dict.fromkeys(("kl_schedule", "kl_warmup_steps"), (c.beta == 0, "a beta above 0")),
        "kl_schedule_end": (c.kl_schedule == "constant", "kl_schedule='linear' or 'cosine'"),
        "target_kl": (
            fixed,
            "kl_controller='hold' (or leave it out)" if c.kl_controller == "fixed" else "a beta above 0 to start from",
        ),
        **{
            f"kl_controller_{field}": (c.controller_name != rule, f"kl_controller={rule!r}")
            for rule, fields in CONTROLLER_FIELDS.items()
            for field in fields
        },
        **dict.fromkeys(("beta_min", "beta_max"), (fixed, adaptive)),
        "reference_decay": (c.reference != "ema", "reference='ema'"),
        "reference_reset_steps": (c.reference != "periodic", "reference='periodic'"),
        **dict.fromkeys(("reference_url", "reference_name"), (c.reference != "remote", "reference='remote'")),
        **dict.fromkeys(("reference_device", "reference_dtype"), (no_weights, own_weights)),
    }
    return unread(c, {name: needed for name, (off, needed) in needs.items() if off})


def unread(config: Any, needs: Mapping[str, str]) -> list[str]:
    """A caution for each field that was changed and that nothing reads; `needs`: such a field -> what it needs."""
    changed = {field.name for field in fields(config) if getattr(config, field.name) != field.default}
    return [
        f"{name}={getattr(config, name)!r} has no effect: it needs {needed}."
        for name, needed in needs.items()
        if name in changed
    ]
