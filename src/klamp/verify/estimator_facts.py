"""The estimators side by side, each property measured: what the table of `klamp verify` and the docs show."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from torch import Tensor

from klamp.core.estimators import ESTIMATORS, exact_kl, kl_estimate
from klamp.core.types import Estimator
from klamp.verify.gradient_names import Followed, name_gradient
from klamp.verify.judge import judge
from klamp.verify.oracle import examine, reverse_kl, truths
from klamp.verify.worlds import Outcomes, random_chain

NAMES: tuple[Estimator, ...] = get_args(Estimator)


@dataclass(frozen=True, kw_only=True)
class EstimatorFacts:
    """The measured properties of one estimator, tokens of the policy, at a KL of about 0.9 nats per token."""

    name: str
    """The name of the estimator, as in every configuration."""
    formula: str
    """The value in terms of delta = log policy - log ref."""
    bias: float
    """The expected value minus KL(policy||ref), divided by KL(policy||ref)."""
    deviation: float
    """Standard deviation of one token's value, in units of the KL."""
    lowest: float
    """Lowest value of a token, in nats."""
    as_loss: Followed
    """The divergence whose gradient it follows when it is differentiated."""
    in_reward: Followed
    """The divergence whose gradient it follows when it is taken from the reward."""

    @property
    def bias_text(self) -> str:
        """The bias as text: `unbiased`, or in percent."""
        return "unbiased" if abs(self.bias) < 1e-9 else f"{100 * self.bias:+.0f} %"


def measure_estimators() -> list[EstimatorFacts]:
    """Every estimator, and the exact KL over the vocabulary, in the oracle's one-position worlds."""
    return [*(_measure(name) for name in NAMES), _measure_exact()]


def _measure(name: Estimator) -> EstimatorFacts:
    def function(policy: Tensor, ref: Tensor) -> Tensor:
        return kl_estimate(policy, ref, estimator=name)

    as_loss, in_reward = judge(function, name=name), judge(function, name=name, use="reward")
    return EstimatorFacts(
        name=name,
        formula=ESTIMATORS[name].formula,
        bias=as_loss.value.relative_bias,
        deviation=as_loss.value.standard_deviation / as_loss.value.reverse_kl,
        lowest=as_loss.value.lowest,
        as_loss=as_loss.gradient.follows,
        in_reward=in_reward.gradient.follows,
    )


def _measure_exact() -> EstimatorFacts:
    def loss(y: Outcomes) -> Tensor:
        return exact_kl(y.policy_logits, y.ref_logits)

    def reward(y: Outcomes) -> Tensor:
        return loss(y).detach() * y.policy_logprobs

    chains = [random_chain(seed, vocab=5, length=1, eos=None) for seed in range(3)]
    found = [examine(chain, loss) for chain in chains]
    target = sum(reverse_kl(chain).item() for chain in chains)
    known = [truths(chain) for chain in chains]
    return EstimatorFacts(
        name="exact",
        formula="sum_v policy_v delta_v",
        bias=sum(report.value_bias for report in found) / target,
        deviation=0.0 if max(report.value_variance for report in found) < 1e-20 else float("nan"),
        lowest=min(report.value for report in found),
        as_loss=name_gradient([report.gradient for report in found], known),
        in_reward=name_gradient([examine(chain, reward).gradient for chain in chains], known),
    )
