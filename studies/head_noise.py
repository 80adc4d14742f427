"""The noise of a gradient towards a teacher at one position: score functions with baselines, heads with tails.

    python -m studies.head_noise

Every token is enumerated in float64, so nothing here is sampled: the trace of the gradient's covariance, mean over 300
pairs of a policy with logits N(0, 1.5) and a teacher whose logits differ from these by N(0, gap).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from klamp.core.topk import topk_kl

PAIRS = 300
WORLDS = [(size, k, gap) for size, k in ((6, 3), (40, 4)) for gap in (0.1, 1.0, 2.0)]
"""Vocabulary, tokens of the head, gap of the logits in nats."""


def pairs(size: int, gap: float, count: int = PAIRS) -> tuple[Tensor, Tensor]:
    """Log-probabilities of policies and teachers, [pairs, V] each."""
    logits, moved = torch.randn(2, count, size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    logits = 1.5 * logits
    return logits.log_softmax(-1), (logits + gap * moved).log_softmax(-1)


def noise(policy: Tensor, gradients: Tensor) -> float:
    """The mean trace of the covariance of gradients [V, pairs, V], one per sampled token, under the policy."""
    p = policy.exp().T[..., None]
    return float((p * (gradients - (p * gradients).sum(0)).square()).sum((0, 2)).mean())


def score(policy: Tensor, teacher: Tensor, baseline: Tensor | float) -> Tensor:
    """The gradient in the logits of (delta - baseline) log p for each sampled token, [V, pairs, V]."""
    own = torch.eye(policy.shape[-1], dtype=policy.dtype)[:, None] - policy.exp()
    return (policy - teacher - baseline).T[..., None] * own


def head(policy: Tensor, teacher: Tensor, k: int, tail: str) -> Tensor:
    """The gradient in the logits of `topk_kl` with the policy's k likeliest, for each sampled token, [V, pairs, V]."""
    ids, rows = policy.topk(k).indices, list[Tensor]()
    for y in range(policy.shape[-1]):
        logits = policy.clone().requires_grad_()
        p = logits.log_softmax(-1)
        both = (p.gather(-1, ids), teacher.gather(-1, ids), p[:, y], teacher[:, y])
        kl = topk_kl(*both, (ids != y).all(-1), tail=tail)  # pyright: ignore[reportArgumentType]
        rows.append(torch.autograd.grad(kl.sum(), logits)[0])
    return torch.stack(rows)


def bucket(policy: Tensor, teacher: Tensor, ids: Tensor) -> Tensor:
    """The KL over a head with all other tokens as one, [pairs, 1]: a baseline that a server's list allows."""
    lists = policy.gather(-1, ids), teacher.gather(-1, ids)
    none = torch.zeros_like(policy[:, 0])
    return topk_kl(*lists, none, none, none.bool(), tail="bucket")[:, None]


def measured(size: int, k: int, gap: float) -> Iterator[tuple[str, float]]:
    """The name and the noise of each form."""
    p, q = pairs(size, gap)
    exact = (p.exp() * (p - q)).sum(-1, keepdim=True)
    yield "k1, no baseline", noise(p, score(p, q, 0.0))
    yield "baseline: exact", noise(p, score(p, q, exact))
    yield "baseline: bucket", noise(p, score(p, q, bucket(p, q, p.topk(k).indices)))
    yield "baseline: bucket, the teacher's head", noise(p, score(p, q, bucket(p, q, q.topk(k).indices)))
    yield "head, tail sampled", noise(p, head(p, q, k, "sampled"))
    yield "head, tail centered", noise(p, head(p, q, k, "centered"))


def main() -> None:
    """Print the table."""
    columns = [dict(measured(*world)) for world in WORLDS]
    print(f"{'':38}" + "".join(f"{f'V {size}, k {k}, {gap:g}':>14}" for size, k, gap in WORLDS))
    for name in columns[0]:
        print(f"{name:38}" + "".join(f"{column[name]:14.3g}" for column in columns))


if __name__ == "__main__":
    main()
