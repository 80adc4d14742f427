"""Losses inside torch.compile, in a process as a user has it: `python -m tests.reliability.compiled BACKEND`.

The tests' own process checks every annotation of the core at run time, in wrappers that torch.compile cannot trace.
Prints a JSON object: what was compiled -> the largest difference to the same without torch.compile, or the error.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import torch
from tests.reliability.objectives import OBJECTIVES, inputs, loss_and_slopes
from torch import Tensor

from klamp.core.clipping import clip_kl
from klamp.core.estimators import exact_kl, kl_estimate
from klamp.core.gradients import kl_penalty
from klamp.core.objective import Objective, grpo_loss

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
    """The largest difference, relative to 1 or to the number."""
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
