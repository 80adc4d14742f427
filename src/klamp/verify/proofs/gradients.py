"""Checks of the gradients: which divergence each penalty follows, at one position and over completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import get_args

import torch
from torch import Tensor

from klamp.core.estimators import exact_kl
from klamp.core.gradients import exact_penalty, kl_penalty, log_weights
from klamp.core.types import Estimator, Gradient, Horizon
from klamp.verify.oracle import NOTHING_KNOWN, Loss, Truths, expected_gradient, truths
from klamp.verify.proofs.check import Check, follows, is_true
from klamp.verify.worlds import Chain, Outcomes, Sampler, one_position, random_chain, random_positions

VALUES: tuple[Estimator, ...] = get_args(Estimator)
OWN: Mapping[Estimator, str] = {"k1": "zero", "k2": "reverse", "k3": "forward", "abs": "L1 distance"}
"""What each estimator's own gradient is, tokens sampled from the policy."""

SAMPLED: dict[Sampler, str] = {"policy": "tokens of the policy", "other": "tokens of another sampler, weighted"}
"""Who sampled, and how the claims say it."""


def prove_gradients() -> list[Check]:
    """Checks the gradients of `kl_penalty` at one position, for tokens of the policy and of another sampler."""
    checks = [_check(f"{name} as a loss (its own gradient)", [penalty(name, "own")], OWN[name]) for name in VALUES]
    named: tuple[tuple[Gradient, str], ...] = (("reverse", "reverse"), ("forward", "forward"), ("none", "zero"))
    for sampler, where in SAMPLED.items():
        for gradient, followed in named:
            losses = [penalty(name, gradient, sampler=sampler) for name in VALUES]
            checks.append(_check(f"gradient {gradient}, whichever the value; {where}", losses, followed, sampler))
    return checks


def prove_formulas() -> list[Check]:
    """Checks the gradients of plain formulas that are differentiated as they are written, without klamp."""
    rows: tuple[tuple[str, Loss, str, Sampler], ...] = (
        ("k1 as a loss, tokens of the policy", lambda y: y.log_ratio, "zero", "policy"),
        ("k1 as a loss, tokens of another sampler", lambda y: y.log_ratio, NOTHING_KNOWN, "other"),
        ("w k1 differentiated", lambda y: y.weight * y.log_ratio, "reverse", "other"),
        ("sg(w) k2", lambda y: y.weight.detach() * _k2(y), "reverse", "other"),
        ("w k2 differentiated: that of E[k2]", lambda y: y.weight * _k2(y), "E[k2]", "other"),
        ("w k3 differentiated (DeepSeek-V3.2, RPG)", lambda y: y.weight * _k3(y), "reverse", "other"),
        ("sg(w) k3", lambda y: y.weight.detach() * _k3(y), "forward", "other"),
        ("k1 in the reward", lambda y: y.log_ratio.detach() * y.policy_logprobs, "reverse", "policy"),
        ("k3 in the reward", lambda y: _k3(y).detach() * y.policy_logprobs, "reverse - forward", "policy"),
        ("k2 in the reward", lambda y: _k2(y).detach() * y.policy_logprobs, NOTHING_KNOWN, "policy"),
    )
    checks = [_check(claim, [loss], followed, sampler) for claim, loss, followed, sampler in rows]
    size = _size_near_the_reference()
    text = f"{100 * size:.2g} % of the gradient of KL(policy||ref)"
    return [*checks, is_true("k3 in the reward, near the reference: cancels", size < 0.05, text, expected="below 5 %")]


def penalty(value: Estimator, gradient: Gradient, horizon: Horizon = "token", *, sampler: Sampler = "policy") -> Loss:
    """klamp's penalty as a loss of enumerated completions."""

    def loss(y: Outcomes) -> Tensor:
        behavior = y.sampler_logprobs if sampler == "other" else None
        choices = {"value": value, "gradient": gradient, "horizon": horizon, "behavior_logprobs": behavior}
        return kl_penalty(y.policy_logprobs, y.ref_logprobs, y.mask, **choices)  # pyright: ignore[reportArgumentType]

    return loss


def _check(claim: str, losses: Sequence[Loss], name: str, sampler: Sampler = "policy") -> Check:
    chains = random_positions(2, vocab=4, sampler=sampler)
    gradients = [expected_gradient(chain, loss) for loss in losses for chain in chains]
    return follows(claim, gradients, [_known(chain) for _ in losses for chain in chains], name)


def _known(chain: Chain) -> Truths:
    """The known gradients at one position, with those of E[k2], of the L1 distance and of reverse minus forward."""
    exact = truths(chain)
    log_p, log_q = chain.logprobs("policy")[0], chain.logprobs("ref")[0]
    mean_k2 = (log_p.exp() * (log_p - log_q) ** 2 / 2).sum()
    l1 = (log_p.exp() - log_q.exp()).abs().sum()
    (k2_gradient,) = torch.autograd.grad(mean_k2, chain.policy_logits, retain_graph=True)
    (l1_gradient,) = torch.autograd.grad(l1, chain.policy_logits)
    both = exact["reverse"] - exact["forward"]
    return exact | {"E[k2]": k2_gradient, "L1 distance": l1_gradient, "reverse - forward": both}


def _size_near_the_reference() -> float:
    policy, direction = (chain.policy_logits.detach()[0] for chain in random_positions(2, vocab=4))
    chain = one_position(policy, policy + 0.02 * direction)
    gradient = expected_gradient(chain, lambda y: _k3(y).detach() * y.policy_logprobs)
    return (gradient.norm() / truths(chain)["reverse"].norm()).item()


def _k2(y: Outcomes) -> Tensor:
    return y.log_ratio**2 / 2


def _k3(y: Outcomes) -> Tensor:
    return (-y.log_ratio).exp() - 1 + y.log_ratio


def prove_sequences() -> list[Check]:
    """Checks `kl_penalty` and the exact KL on short chains with an end token."""
    rows: list[tuple[str, Loss, str, Sampler]] = [
        ("horizon token, value k2", penalty("k2", "reverse", "token"), "local", "policy"),
        ("horizon token, value k3", penalty("k3", "reverse", "token"), "local", "policy"),
        ("horizon token, exact", _exact("token"), "local", "policy"),
        ("horizon token, gradient forward", penalty("k3", "forward", "token"), "local_forward", "policy"),
        ("off-policy, token ratio", penalty("k3", "reverse", "token", sampler="other"), "local_sampled", "other"),
    ]
    whole: dict[Sampler, str] = {"policy": "horizon sequence", "other": "off-policy, prefix ratio"}
    for sampler, where in whole.items():
        losses: list[tuple[str, Loss, str]] = [
            ("value k1", penalty("k1", "reverse", "sequence", sampler=sampler), "reverse"),
            ("value k3", penalty("k3", "reverse", "sequence", sampler=sampler), "reverse"),
            ("exact", _exact("sequence", sampler), "reverse"),
            ("gradient forward", penalty("k3", "forward", "sequence", sampler=sampler), "forward"),
        ]
        rows.extend((f"{where}, {name}", loss, follows, sampler) for name, loss, follows in losses)
    return [_check_sequences(*row) for row in rows]


def prove_sequence_formulas() -> list[Check]:
    """Checks the same for formulas that are differentiated as they are written, without klamp."""
    rows: list[tuple[str, Loss, str, Sampler]] = [
        ("half the square of the summed log-ratio", lambda y: y.log_ratio.sum(-1) ** 2 / 2, "reverse", "policy"),
        ("k1 reward-to-go (FRPO)", lambda y: _to_go(y.log_ratio).detach() * y.policy_logprobs, "reverse", "policy"),
        ("prefix-product ratio times k3, differentiated", lambda y: _prefix_ratio(y) * _k3(y), "reverse", "other"),
        ("token ratio times k3, differentiated", lambda y: y.weight * _k3(y), "local_sampled", "other"),
        ("geometric-mean ratio times k3 (GSPO's)", lambda y: _mean_ratio(y) * _k3(y), NOTHING_KNOWN, "other"),
        ("k1 as a loss, over the sequence", lambda y: y.log_ratio, "zero", "policy"),
    ]
    return [_check_sequences(*row) for row in rows]


def _check_sequences(claim: str, loss: Loss, name: str, sampler: Sampler) -> Check:
    chains = [random_chain(seed, vocab=3, length=3, sampler=sampler) for seed in (0, 1)]
    return follows(claim, [expected_gradient(chain, loss) for chain in chains], [truths(c) for c in chains], name)


def _exact(horizon: Horizon, sampler: Sampler = "policy") -> Loss:
    def loss(y: Outcomes) -> Tensor:
        behavior = y.sampler_logprobs if sampler == "other" else None
        log_w = log_weights(y.policy_logprobs, behavior, y.mask, horizon="sequence")
        exact = exact_kl(y.policy_logits, y.ref_logits)
        return exact_penalty(y.policy_logprobs, exact, log_w, y.mask, gradient="reverse", horizon=horizon)

    return loss


def _to_go(x: Tensor) -> Tensor:
    return x.flip(-1).cumsum(-1).flip(-1)


def _prefix_ratio(y: Outcomes) -> Tensor:
    return (y.policy_logprobs - y.sampler_logprobs).cumsum(-1).exp()


def _mean_ratio(y: Outcomes) -> Tensor:
    log_w = torch.where(y.mask, y.policy_logprobs - y.sampler_logprobs, 0.0).sum(-1, keepdim=True)
    return (log_w / y.mask.sum(-1, keepdim=True)).exp()
