"""A user's file, as strict pyright reads it beside the installed wheel."""

import warnings
from typing import assert_type

import torch
from torch import Tensor

import klamp

warnings.simplefilter("error", klamp.KLWarning)

assert_type(klamp.KLConfig(kl_coef=0.1).beta, float)
config = klamp.KLConfig(beta=0.1, kl_estimator="k3", kl_gradient="reverse")
assert_type(klamp.preset("grpo"), klamp.KLConfig)

objective = klamp.build_objective(config, klamp.LossConfig(), max_length=8)
assert_type(objective, klamp.Objective)
assert_type(klamp.Objective(terms=(klamp.Weighted(0.1, klamp.KLTerm(value="k1")),)).beta, float)


def loss_of(policy: Tensor, ref: Tensor, mask: Tensor, advantages: Tensor) -> Tensor:
    batch = klamp.Batch(policy_logprobs=policy, mask=mask, advantages=advantages, ref_logprobs=ref)
    output = klamp.grpo_loss(batch, objective, totals=klamp.Totals(sequences=2, tokens=8.0, kl_tokens=mask.sum()))
    assert_type(output, klamp.LossOutput)
    assert_type(output.loss, Tensor)
    assert_type(output.metrics, dict[str, Tensor])
    return output.loss


def of_tokens(policy: Tensor, ref: Tensor, mask: Tensor) -> list[Tensor]:
    assert_type(klamp.kl_estimate(policy, ref, estimator="k1"), Tensor)
    assert_type(klamp.exact_kl(policy, ref), Tensor)
    return [klamp.kl_penalty(policy, ref, mask, value="k3", gradient="reverse")]


def of_the_head(hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
    assert_type(klamp.linear_logprobs(hidden, weight, targets), Tensor)
    assert_type(klamp.linear_logprobs(hidden, weight, targets, return_entropy=False), Tensor)
    logprobs, entropy = klamp.linear_logprobs(hidden, weight, targets, return_entropy=True)
    assert_type((logprobs, entropy), tuple[Tensor, Tensor])
    assert_type(klamp.linear_kl(hidden, weight, hidden, weight), Tensor)


of_the_head(torch.ones(2, 3), torch.ones(4, 3), torch.tensor([0, 1]))
