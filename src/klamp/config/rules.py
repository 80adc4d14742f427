"""Which combinations of KL choices are refused, and which are allowed with a caution; each with the way out. Addresses
of servers and clusters are shown and kept: without user, password and query.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from urllib.parse import urlsplit

from klamp.config.choices import BETA, KLChoices
from klamp.core.arguments import check_number
from klamp.core.term import OffPolicy, Placement, gates_on_itself
from klamp.core.types import Horizon
from klamp.errors import ConfigError, Refusal


def check_server(url: str | None, field: str, *, key: str) -> None:
    """Refuse what is no address of a server, and one with a user, a password or a query.

    Args:
        url: the address; None: there is none.
        field: the name of the field that it stands in.
        key: where the server's client takes a key from.

    Raises:
        ConfigError: it is no http or https URL, or more than one.
    """
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
        raise ConfigError(
            f"{field}={url!r} is no address",
            why="the server is asked over HTTP",
            fix="write http://HOST:PORT",
        )


def _is_sound(url: str) -> bool:
    try:
        parts = urlsplit(url)
        in_range = parts.port is None or parts.port > 0
    except ValueError:  # what urlsplit says of ports and of IPv6
        return False
    plain = url.isascii() and url.isprintable() and not set(url) & set(" \\<>\"'")
    return plain and in_range and parts.scheme in ("http", "https") and bool(parts.hostname)


def check_cluster(address: str | None, field: str) -> None:
    """Refuse a user, a password or a query in the address of a Ray cluster: Ray takes none, and klamp would show them.

    Args:
        address: as Ray has it; None: there is none.
        field: the name of the field that it stands in.

    Raises:
        ConfigError: there is one.
    """
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

SHORT = 100
"""Tokens of a short completion: a soft clip whose reference length nobody says is judged at it; klamp's choice."""


def check_beta(beta: float, *, name: str = "beta", fix: str = "") -> None:
    """Refuse a coefficient of the KL that is negative, not finite, or no number.

    Args:
        beta: the coefficient.
        name: what it is called there.
        fix: the way out; "": 0, for no KL.

    Raises:
        ConfigError: it is none.
    """
    check_number(name, beta, BETA.but(BETA.why, fix or f"use {name}=0 to train without KL"))


def refusals(c: KLChoices) -> list[Refusal]:
    """Every combination that cannot work or would not do what its name says."""
    return [*_placement(c), *_gradient(c), *_control(c), *_reference(c), *_tokens(c)]


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


def _reference(c: KLChoices) -> list[Refusal]:
    of_sampler = c.reference == "sampler"
    return [
        Refusal(
            of_sampler and c.kl_estimator == "exact",
            "kl_estimator='exact' cannot use the sampler",
            why="it left the log-probabilities of its tokens, not whole rows",
            fix="use kl_estimator='k3'",
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
            c.reference == "remote" and c.kl_estimator == "exact",
            "kl_estimator='exact' cannot use a remote reference",
            why="a server returns log-probabilities of the sampled tokens, not whole rows of logits",
            fix="use kl_estimator='k3', or a reference on this machine",
        ),
    ]


def _tokens(c: KLChoices) -> list[Refusal]:
    return [
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
    if in_loss and own and c.kl_estimator == "k1":
        found.append(
            "kl_estimator='k1' with kl_gradient='own' has an expected gradient of exactly zero on the policy's own "
            "tokens, summed over them or over a fixed length: it regularises nothing (a mean over each completion's "
            "own length leaves a pull on the length, and nothing else"
            + ("; with tokens left out it only makes the kept ones less likely" if c.excludes else "")
            + "). Use kl_gradient='reverse'."
        )
    if in_loss and own and c.kl_estimator == "k3":
        found.append(
            "kl_estimator='k3' with kl_gradient='own' follows the gradient of KL(ref||policy) at each position, not "
            "that of the KL(policy||ref) that its value estimates. Use kl_gradient='reverse', or name it: 'forward'."
        )
    if in_loss and own and c.kl_estimator == "abs":
        found.append(
            "kl_estimator='abs' with kl_gradient='own' pulls down the L1 distance, not a KL. Use kl_gradient='reverse'."
        )
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

    A budget per token is that of the reference length. Where nobody says that, it is measured when the run starts, and
    the clip is judged then, and before that at `SHORT` tokens.

    Args:
        c: the KL.
        measured_length: the reference length in tokens, where the configuration names none.
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
        "kl_clip_threshold": (no_clip, clip),
        "kl_clip_level": (no_clip, clip),
        "kl_clip_temperature": (c.kl_clip_method != "soft", "kl_clip_method='soft'"),
        "use_per_token_kl_threshold": (no_clip, clip),
        "kl_reference_length": (
            no_clip or not c.use_per_token_kl_threshold,
            f"{clip}, and use_per_token_kl_threshold=True",
        ),
        "kl_max_log_ratio": (c.kl_estimator == "exact", "kl_estimator='k1', 'k2', 'k3' or 'abs'"),
        "kl_horizon": ((c.kl_gradient, c.kl_off_policy) == ("none", "none"), "kl_gradient='reverse' or 'forward'"),
        "kl_max_weight": (c.kl_off_policy == "none" or summed, "kl_off_policy='token' or 'sequence'"),
        "kl_off_policy": (
            summed,
            "kl_off_policy='sequence' (the exact KL sums over the token; only its prefix was sampled)",
        ),
        "kl_normalizer": (c.kl_placement != "loss", "kl_placement='loss'"),
        "kl_schedule": (c.beta == 0, "a beta above 0"),
        "kl_warmup_steps": (c.beta == 0, "a beta above 0"),
        "kl_schedule_end": (c.kl_schedule == "constant", "kl_schedule='linear' or 'cosine'"),
        "target_kl": (
            fixed,
            "kl_controller='hold' (or leave it out)" if c.kl_controller == "fixed" else "a beta above 0 to start from",
        ),
        "kl_controller_gain": (c.controller_name != "hold", "kl_controller='hold'"),
        "kl_controller_lead": (c.controller_name != "hold", "kl_controller='hold'"),
        "kl_controller_factors": (c.controller_name != "step", "kl_controller='step'"),
        "kl_controller_horizon": (c.controller_name != "proportional", "kl_controller='proportional'"),
        "kl_controller_clip": (c.controller_name != "proportional", "kl_controller='proportional'"),
        "beta_min": (fixed, adaptive),
        "beta_max": (fixed, adaptive),
        "reference_decay": (c.reference != "ema", "reference='ema'"),
        "reference_reset_steps": (c.reference != "periodic", "reference='periodic'"),
        "reference_url": (c.reference != "remote", "reference='remote'"),
        "reference_name": (c.reference != "remote", "reference='remote'"),
        "reference_device": (no_weights, own_weights),
        "reference_dtype": (no_weights, own_weights),
    }
    return [
        f"{name}={getattr(c, name)!r} has no effect: it needs {needed}."
        for name, (off, needed) in needs.items()
        if off and getattr(c, name) != type(c).__dataclass_fields__[name].default
    ]
