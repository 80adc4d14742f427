"""Checks over whole completions: which penalties include what a token does to the KL of later tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from klamp.core.estimators import exact_kl
from klamp.core.gradients import exact_penalty, kl_penalty, log_weights
from klamp.core.types import Estimator, Gradient, Horizon
from klamp.verify.gradient_names import NOTHING_KNOWN
from klamp.verify.oracle import Loss, expected_gradient, truths
from klamp.verify.proofs.check import Check, follows
from klamp.verify.worlds import Outcomes, Sampler, random_chain


def prove_sequences() -> list[Check]:
    """Checks `kl_penalty` and the exact KL on short chains with an end token."""
    rows: list[tuple[str, Loss, str, Sampler]] = [
        ("horizon token, value k2", _penalty("k2", "reverse", "token"), "local", "policy"),
        ("horizon token, value k3", _penalty("k3", "reverse", "token"), "local", "policy"),
        ("horizon token, exact", _exact("token"), "local", "policy"),
        ("horizon token, gradient forward", _penalty("k3", "forward", "token"), "local_forward", "policy"),
        ("horizon sequence, value k1", _penalty("k1", "reverse", "sequence"), "reverse", "policy"),
        ("horizon sequence, value k3", _penalty("k3", "reverse", "sequence"), "reverse", "policy"),
        ("horizon sequence, exact", _exact("sequence"), "reverse", "policy"),
        ("horizon sequence, gradient forward", _penalty("k3", "forward", "sequence"), "forward", "policy"),
        ("off-policy, prefix ratio, value k1", _penalty("k1", "reverse", "sequence", "other"), "reverse", "other"),
        ("off-policy, prefix ratio, value k3", _penalty("k3", "reverse", "sequence", "other"), "reverse", "other"),
        ("off-policy, prefix ratio, exact", _exact("sequence", "other"), "reverse", "other"),
        ("off-policy, prefix ratio, forward", _penalty("k3", "forward", "sequence", "other"), "forward", "other"),
        ("off-policy, token ratio", _penalty("k3", "reverse", "token", "other"), "local_sampled", "other"),
    ]
    return [_check(*row) for row in rows]


def prove_sequence_formulas() -> list[Check]:
    """Checks the same for formulas that are differentiated as they are written, without klamp."""
    rows: list[tuple[str, Loss, str, Sampler]] = [
        ("half the square of the summed log-ratio", lambda y: _delta(y).sum(-1) ** 2 / 2, "reverse", "policy"),
        ("k1 reward-to-go (FRPO)", lambda y: _to_go(_delta(y)).detach() * y.policy_logprobs, "reverse", "policy"),
        ("prefix-product ratio times k3, differentiated", lambda y: _prefix_ratio(y) * _k3(y), "reverse", "other"),
        ("token ratio times k3, differentiated", lambda y: _ratio(y) * _k3(y), "local_sampled", "other"),
        ("geometric-mean ratio times k3 (GSPO's)", lambda y: _mean_ratio(y) * _k3(y), NOTHING_KNOWN, "other"),
        ("k1 as a loss, over the sequence", _delta, "zero", "policy"),
    ]
    return [_check(*row) for row in rows]


def _check(claim: str, loss: Loss, name: str, sampler: Sampler) -> Check:
    chains = [random_chain(seed, vocab=3, length=3, sampler=sampler) for seed in (0, 1)]
    return follows(claim, [expected_gradient(chain, loss) for chain in chains], [truths(c) for c in chains], name)


def _penalty(value: Estimator, gradient: Gradient, horizon: Horizon, sampler: Sampler = "policy") -> Loss:
    def loss(y: Outcomes) -> Tensor:
        behavior = y.sampler_logprobs if sampler == "other" else None
        choices = {"value": value, "gradient": gradient, "horizon": horizon, "behavior_logprobs": behavior}
        return kl_penalty(y.policy_logprobs, y.ref_logprobs, y.mask, **choices)  # pyright: ignore[reportArgumentType]

    return loss


def _exact(horizon: Horizon, sampler: Sampler = "policy") -> Loss:
    def loss(y: Outcomes) -> Tensor:
        behavior = y.sampler_logprobs if sampler == "other" else None
        log_w = log_weights(y.policy_logprobs, behavior, y.mask, horizon="sequence")
        exact = exact_kl(y.policy_logits, y.ref_logits)
        return exact_penalty(y.policy_logprobs, exact, log_w, y.mask, gradient="reverse", horizon=horizon)

    return loss


def _delta(y: Outcomes) -> Tensor:
    return y.policy_logprobs - y.ref_logprobs


def _k3(y: Outcomes) -> Tensor:
    return (-_delta(y)).exp() - 1 + _delta(y)


def _to_go(x: Tensor) -> Tensor:
    return x.flip(-1).cumsum(-1).flip(-1)


def _ratio(y: Outcomes) -> Tensor:
    return (y.policy_logprobs - y.sampler_logprobs).exp()


def _prefix_ratio(y: Outcomes) -> Tensor:
    return (y.policy_logprobs - y.sampler_logprobs).cumsum(-1).exp()


def _mean_ratio(y: Outcomes) -> Tensor:
    log_w = torch.where(y.mask, y.policy_logprobs - y.sampler_logprobs, 0.0).sum(-1, keepdim=True)
    return (log_w / y.mask.sum(-1, keepdim=True)).exp()
