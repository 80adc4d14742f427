"""The enumeration oracle: what a KL term is and where its gradient points, with no sampling error.

For a sampler mu and a per-completion loss l(y), a trainer that averages over samples follows

    E[value]    = sum_y mu(y) l(y)
    E[gradient] = sum_y sg(mu(y)) grad l(y)          (the samples are data: nothing flows through mu)

Both sums are finite on a `Chain`, so both are exact. They are compared with the gradients that follow from the
definitions of both KLs (`truths`): of whole completions, and of single positions with the prefixes held fixed, which is
all that a token horizon can reach.

Example:
    >>> from klamp.verify.worlds import random_chain
    >>> examine(random_chain(0), lambda y: y.policy_logprobs - y.ref_logprobs).follows.name
    'zero'
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from klamp.errors import ShapeError
from klamp.verify.worlds import Chain, Outcomes, Table, Who, enumerate_outcomes, prefix_probs

Loss: TypeAlias = Callable[[Outcomes], Tensor]
Truths: TypeAlias = dict[str, Tensor]

TOLERANCE = 1e-9

NOTHING_KNOWN = "none of these"

IN_WORDS: Mapping[str, str] = {
    "zero": "zero",
    "reverse": "KL(policy||ref)",
    "forward": "KL(ref||policy)",
    "local": "KL(policy||ref), prefixes held fixed",
    "local_forward": "KL(ref||policy), prefixes held fixed",
    "local_sampled": "KL(policy||ref) at the sampler's prefixes, held fixed",
    "local_sampled_forward": "KL(ref||policy) at the sampler's prefixes, held fixed",
    "js": "JS(policy, ref)",
    "reverse - forward": "KL(policy||ref) minus KL(ref||policy)",
    NOTHING_KNOWN: "neither KL",
}
"""Name of a known gradient -> the divergence whose gradient it is; those at the sampler's prefixes off-policy only."""


def say_of(who: str, text: str) -> str:
    """A sentence about the reference, reworded for another anchor."""
    return re.sub(r"\bref(?=\b|_)", who, text)


class Report(NamedTuple):
    """The expected value and gradient of a loss on one chain, with their variances; values in nats per completion."""

    value: float
    value_bias: float  # the value minus KL(policy || ref)
    gradient: Table  # with respect to the policy's logits
    gradient_variance: float  # the trace of the gradient's covariance over completions
    follows: Followed


def examine(chain: Chain, loss: Loss) -> Report:
    """Compares the expected value and gradient of `loss` on `chain` with every truth.

    Args:
        chain: the world.
        loss: maps the outcomes to `[outcomes, tokens]` (summed over tokens) or `[outcomes]`. It sees what a
            trainer sees and must treat each row on its own.
    """
    outcomes = enumerate_outcomes(chain)
    return report(chain, outcomes.probs, per_outcome(loss, outcomes))


def report(
    chain: Chain, probs: Float[Tensor, " draws"], losses: Float[Tensor, " draws"], *, anchor: Who = "ref"
) -> Report:
    """Compares losses, one for each draw of these probabilities, with the `truths` about a KL to `anchor`."""
    measured = chain.towards(anchor)
    value = (probs * losses.detach()).sum()
    gradients = _gradients(losses, chain)
    gradient = torch.einsum("n,npv->pv", probs, gradients)
    return Report(
        value=value.item(),
        value_bias=(value - reverse_kl(measured)).item(),
        gradient=gradient,
        gradient_variance=(probs * (gradients - gradient).square().sum(dim=(-2, -1))).sum().item(),
        follows=name_gradient([gradient], [truths(measured)], tolerance=TOLERANCE),
    )


def expected(chain: Chain, loss: Loss) -> Float[Tensor, ""]:
    """The exact mean of a loss, sum_y mu(y) loss(y), without gradient."""
    outcomes = enumerate_outcomes(chain)
    return (outcomes.probs * per_outcome(loss, outcomes)).sum().detach()


def variance(chain: Chain, loss: Loss) -> Float[Tensor, ""]:
    """The exact variance of a loss over completions, without gradient."""
    outcomes = enumerate_outcomes(chain)
    values = per_outcome(loss, outcomes).detach()
    return (outcomes.probs * (values - (outcomes.probs * values).sum()) ** 2).sum()


def expected_gradient(chain: Chain, loss: Loss) -> Table:
    """The exact mean of a loss's gradient with respect to the policy's logits."""
    outcomes = enumerate_outcomes(chain)
    return gradient_of((outcomes.probs * per_outcome(loss, outcomes)).sum(), chain)


def in_reward(loss: Loss) -> Loss:
    """A number taken from the reward: its sum over the completion, detached, times the completion's log-probability."""
    return lambda y: per_outcome(loss, y).detach() * y.policy_logprobs.sum(-1)


def reverse_kl(chain: Chain) -> Float[Tensor, ""]:
    """KL(policy || ref) = sum_y policy(y) log(policy(y) / ref(y)) over whole completions; differentiable."""
    return divergence(*_completion_logprobs(chain))


def forward_kl(chain: Chain) -> Float[Tensor, ""]:
    """KL(ref || policy) = sum_y ref(y) log(ref(y) / policy(y)) over whole completions; differentiable."""
    policy, ref = _completion_logprobs(chain)
    return divergence(ref, policy)


def local_kl(
    chain: Chain, *, direction: Literal["reverse", "forward", "js"] = "reverse", prefixes: Who = "policy"
) -> Float[Tensor, ""]:
    """The mean KL of single positions, sum_s P(s) KL_s, with the probabilities of prefixes held fixed.

    `js` is half the KL of each to their mean. At the policy's own prefixes `reverse` has the value of whole
    completions (chain rule), but its gradient lacks the future terms.
    """
    policy, ref = chain.logprobs("policy"), chain.logprobs("ref")
    if direction == "js":
        mean = torch.logaddexp(policy, ref) - math.log(2)
        per_prefix = (divergence(policy, mean) + divergence(ref, mean)) / 2
    else:
        per_prefix = divergence(*((policy, ref) if direction == "reverse" else (ref, policy)))
    return (prefix_probs(chain, prefixes).detach() * per_prefix).sum()


def truths(chain: Chain) -> Truths:
    """The gradients that a KL term may be meant to follow, by the names of `IN_WORDS`."""
    values = {
        "reverse": reverse_kl(chain),
        "forward": forward_kl(chain),
        "local": local_kl(chain),
        "local_forward": local_kl(chain, direction="forward"),
        "js": local_kl(chain, direction="js"),
    }
    if not chain.on_policy:
        values["local_sampled"] = local_kl(chain, prefixes="sampler")
        values["local_sampled_forward"] = local_kl(chain, direction="forward", prefixes="sampler")
    exact = {name: gradient_of(value, chain) for name, value in values.items()}
    exact["reverse - forward"] = exact["reverse"] - exact["forward"]
    return exact | {"zero": torch.zeros_like(chain.policy_logits)}


def per_outcome(loss: Loss, outcomes: Outcomes) -> Float[Tensor, " outcomes"]:
    """The loss of each completion, summed over its tokens where `loss` returns one value per token."""
    values = loss(outcomes)
    count = len(outcomes.probs)
    if values.shape == (count,):
        return values
    if values.shape == outcomes.mask.shape:
        return torch.where(outcomes.mask, values, 0.0).sum(dim=-1)
    got, why = tuple(values.shape), f"there are {count} completions of at most {outcomes.mask.shape[1]} tokens"
    fix = "do not average over the batch; the oracle weighs the completions itself"
    raise ShapeError("a loss must give one value per completion or per token", got=got, why=why, fix=fix)


def _completion_logprobs(chain: Chain) -> tuple[Tensor, Tensor]:
    everything = enumerate_outcomes(chain, unreachable=True)
    return everything.policy_logprobs.sum(dim=-1), everything.ref_logprobs.sum(dim=-1)


def divergence(first: Float[Tensor, "*rows n"], second: Float[Tensor, "*rows n"]) -> Float[Tensor, "*rows"]:
    """sum exp(first) (first - second) of each row, with 0 log 0 = 0 and a gradient of 0 there."""
    possible = first > -torch.inf
    first, second = (torch.where(possible, x, 0.0) for x in (first, second))
    return torch.where(possible, first.exp() * (first - second), 0.0).sum(-1)


def gradient_of(scalar: Tensor, chain: Chain) -> Table:
    """The gradient of a number with respect to the policy's logits; 0 where it does not depend on them."""
    if not scalar.requires_grad:
        return torch.zeros_like(chain.policy_logits)
    return torch.autograd.grad(scalar, chain.policy_logits, retain_graph=True, materialize_grads=True)[0]


def _gradients(losses: Float[Tensor, " draws"], chain: Chain) -> Float[Tensor, "draws prefixes vocab"]:
    """The gradient of each loss; in one batched pass, where the losses' own autograd functions allow it."""
    rows, leaf = torch.eye(len(losses), dtype=losses.dtype), chain.policy_logits
    try:
        grad = functools.partial(torch.autograd.grad, retain_graph=True, materialize_grads=True, is_grads_batched=True)
        (gradients,) = grad(losses, leaf, rows)
    except RuntimeError:
        return torch.stack([gradient_of(loss, chain) for loss in losses])
    return gradients.expand(len(losses), *leaf.shape)


class Followed(NamedTuple):
    """A known gradient (a name of `IN_WORDS`) and a factor: what a measured gradient turned out to be.

    The factor is -1 for the same gradient with the wrong sign, 0 for "zero" and for "none of these".
    """

    name: str
    factor: float

    def is_exactly(self, name: str, *, factor: float = 1.0, tolerance: float = TOLERANCE) -> bool:
        """Whether it is this known gradient times this factor; the opposite sign is not."""
        factor = 0.0 if name in ("zero", NOTHING_KNOWN) else factor
        return self.name == name and abs(self.factor - factor) <= tolerance

    @property
    def in_words(self) -> str:
        """The name as text: `KL(policy||ref)`, `minus KL(policy||ref)`, `0.5 x KL(policy||ref)` or `zero`."""
        words = IN_WORDS.get(self.name, self.name)
        if self.name in ("zero", NOTHING_KNOWN) or abs(self.factor - 1) < 1e-6:
            return words
        return f"minus {words}" if abs(self.factor + 1) < 1e-6 else f"{self.factor:.4g} x {words}"


def name_gradient(gradients: Sequence[Tensor], worlds: Sequence[Truths], *, tolerance: float = 1e-7) -> Followed:
    """Finds the known gradient that the measured ones are a multiple of, with the same factor in all worlds.

    Args:
        gradients: the measured gradient of each world.
        worlds: the known gradients of each world, under the same names; "reverse" must be among them.
        tolerance: largest relative distance that still counts as equal.
    """
    measured = _joined(gradients)
    if measured.norm() <= tolerance * _joined([known["reverse"] for known in worlds]).norm():
        return Followed("zero", 0.0)
    for name in worlds[0]:
        if name == "zero":
            continue
        exact = _joined([known[name] for known in worlds])
        factor = (measured @ exact) / (exact @ exact)
        if (measured - factor * exact).norm() <= tolerance * measured.norm():
            return Followed(name, factor.item())
    return Followed(NOTHING_KNOWN, 0.0)


class Pull(NamedTuple):
    """Where an expected gradient points, over several worlds together."""

    follows: Followed
    cosine_reverse: float  # with the gradient of KL(policy||ref) of whole completions; 0 for a gradient of zero
    share: float  # the nearest multiple of that gradient: 1 all of it, 0 none, -1 the opposite
    cosines: tuple[float, float]  # least and largest cosine with that gradient, by world

    def in_words(self, bounds: str = "") -> str:
        """Which divergence's gradient is followed, within these bounds; with its cosines if no whole divergence's."""
        if self.follows.name == "zero":
            return "an expected gradient of exactly zero"
        if not self.follows.factor:
            return f"the gradient of neither KL: {self.direction}"
        partial = "" if self.follows.name in ("reverse", "forward", "js") else f"; {self.direction}"
        return f"exactly the gradient of {self.follows.in_words}{bounds}{partial}"

    @property
    def direction(self) -> str:
        """How well the gradient points along the gradient of KL(policy||ref), in each measured world."""
        low, high = (f"{cosine:.3f}" for cosine in self.cosines)
        return f"cosine {low if low == high else f'{low} to {high}'} with KL(policy||ref) in the worlds measured"


def pull_of(gradients: Sequence[Tensor], worlds: Sequence[Truths], *, tolerance: float = 1e-7) -> Pull:
    """Compares measured gradients, one per world, with both KLs' gradients; arguments as in `name_gradient`."""
    follows = name_gradient(gradients, worlds, tolerance=tolerance)
    if follows.name == "zero":
        gradients = [torch.zeros_like(gradient) for gradient in gradients]
    targets = [known["reverse"] for known in worlds]
    measured, reverse = _joined(gradients), _joined(targets)
    cosines = [cosine(gradient, target) for gradient, target in zip(gradients, targets, strict=True)]
    return Pull(
        follows=follows,
        cosine_reverse=cosine(measured, reverse),
        share=((measured @ reverse) / (reverse @ reverse)).item(),
        cosines=(min(cosines), max(cosines)),
    )


def expected_pull(chains: Sequence[Chain], loss: Loss, *, tolerance: float = 1e-7) -> Pull:
    """Where the expected gradient of a loss (see `examine`) points, over these worlds; see `pull_of`."""
    gradients = [expected_gradient(chain, loss) for chain in chains]
    return pull_of(gradients, [truths(chain) for chain in chains], tolerance=tolerance)


def cosine(first: Tensor, second: Tensor) -> float:
    """The cosine of the angle between two gradients; 0 where either is zero."""
    size = first.norm() * second.norm()
    return ((first * second).sum() / size).item() if size > 0 else 0.0


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])
