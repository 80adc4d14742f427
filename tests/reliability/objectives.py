"""A batch, and objectives that together have every part that an objective can have.

`python -m tests.reliability.objectives BACKEND` tries each inside torch.compile, in a process as a user has it: the
tests' own process checks every annotation of the core at run time, in wrappers that torch.compile cannot trace.
It prints a JSON object: what was compiled -> the largest difference to the same without torch.compile, or the error.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from tests.batches import changed, flat_batch, objective_of, read
from torch import Tensor

from klamp.core.clipping import clip_kl
from klamp.core.estimators import exact_kl, kl_estimate
from klamp.core.gradients import kl_penalty
from klamp.core.objective import Objective, grpo_loss
from klamp.core.term import KLTerm
from klamp.core.types import Batch

CLIP: dict[str, Any] = {"clip_method": "soft", "clip_unit": "sequence", "clip_threshold": 0.2}
WEIGHED: dict[str, Any] = {"horizon": "sequence", "off_policy": "sequence", "max_weight": 2.0}
FORWARD: dict[str, Any] = {"gradient": "forward", "off_policy": "token", "max_log_ratio": 1.0}
FIXED: dict[str, Any] = {"surrogate": "score_function", "reduction": "fixed_length", "max_length": 8}
OBJECTIVES = {
    "no KL": objective_of(beta=0.0),
    "k3 in the loss": objective_of(beta=0.1),
    "k1 over sequences": objective_of(beta=0.1, reduction="token_mean", kl=KLTerm(value="k1", **WEIGHED)),
    "forward with token weights": objective_of(beta=0.1, surrogate="cispo", kl=KLTerm(**FORWARD)),
    "clipped": objective_of(beta=0.1, reduction="sequence_sum", kl=KLTerm(**CLIP)),
    "exact": objective_of(beta=0.1, kl=KLTerm(value="exact")),
    "in the advantage": objective_of(beta=0.1, kl=KLTerm(placement="advantage"), **FIXED),
}


def inputs() -> Batch:
    """Four completions of six tokens in float32, with everything that an objective may ask for."""
    generator = torch.Generator().manual_seed(0)
    names = ("policy_logprobs", "old_logprobs", "ref_logprobs", "sampler_logprobs", "exact_kl")
    columns = {name: -2 * torch.rand(4, 6, generator=generator) for name in names}
    columns["exact_kl"] = -columns["exact_kl"]
    mask = torch.rand(4, 6, generator=generator) > 0.3
    return flat_batch(mask=mask, advantages=torch.randn(4, generator=generator), group_size=2, **columns)


def loss_and_slopes(objective: Objective, batch: Batch, loss_of: Any = None, **changes: Any) -> tuple[Tensor, ...]:
    """The loss, and its gradients by the policy's log-probabilities and by the exact KL."""
    leaves = [
        x.detach().requires_grad_(True) for x in (batch.policy_logprobs, read(batch, "exact_kl")) if x is not None
    ]
    batch = changed(batch, policy_logprobs=leaves[0], exact_kl=leaves[1], **changes)
    loss = (loss_of or grpo_loss)(batch, objective).loss
    return loss.detach(), *torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)


# inside torch.compile ------------------------------------------------------------------------------------------------

REF = -2 * torch.rand(4, 6, generator=torch.Generator().manual_seed(1))
MASK = torch.rand(4, 6, generator=torch.Generator().manual_seed(2)) > 0.3

IN_ONE_GRAPH: dict[str, Callable[[Tensor], Tensor]] = {
    "kl_estimate": lambda x: kl_estimate(x, REF, estimator="k3"),
    "exact_kl": lambda x: exact_kl(x, REF),
    "exact_kl js": lambda x: exact_kl(x, REF, direction="js"),
    "kl_penalty": lambda x: kl_penalty(x, REF, MASK),
    "kl_penalty over sequences": lambda x: kl_penalty(x, REF, MASK, horizon="sequence", behavior_logprobs=REF - 0.1),
    "clip_kl": lambda x: clip_kl(x.abs(), 0.5, method="soft"),
}
"""Functions in which no value decides what is done, so that they are one graph."""


def difference(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> float:
    return max(float(((a - b).abs() / (1 + b.abs())).amax()) for a, b in zip(found, wanted, strict=True))


def of_function(function: Callable[[Tensor], Tensor], backend: str) -> float:
    """The difference that compiling a function in one graph makes to its value and gradient."""
    outcomes = []
    for each in (torch.compile(function, backend=backend, fullgraph=True), function):
        x = (-2 * torch.rand(4, 6, generator=torch.Generator().manual_seed(0))).requires_grad_(True)
        value = each(x)
        outcomes.append((value.detach(), *torch.autograd.grad(value.sum(), x)))
    return difference(*outcomes)


def of_loss(objective: Objective, backend: str) -> float:
    """The difference that compiling the whole loss makes; its checks look at values, which breaks the graph."""
    batch = inputs()
    compiled = loss_and_slopes(objective, batch, torch.compile(grpo_loss, backend=backend))
    return difference(compiled, loss_and_slopes(objective, batch))


def main(backend: str) -> None:
    found: dict[str, float | str] = {}
    cases = [(name, of_function, each) for name, each in IN_ONE_GRAPH.items()]
    for name, measure, each in [*cases, *((f"loss: {name}", of_loss, each) for name, each in OBJECTIVES.items())]:
        torch.compiler.reset()
        try:
            found[name] = measure(each, backend)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {str(error)[:300]}"
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])  # noqa: TID251
