"""The output heads that are compared: each gives the gradients of sum_t factor_t log p(target_t), or of the KL.

`row_chunks` is what a user would write in twenty lines; TRL's and Liger's heads are called as their trainers call them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

CHUNK_ROWS = 128
SEQUENCES = 8
TILE = 4096

LOGPROB_CASES = ("naive", "row chunks", "TRL", "Liger, log-probabilities", "Liger, GRPO loss", "linear_logprobs")
FROZEN_CASES = ("TRL, frozen head", "linear_logprobs, frozen head", "linear_kl, frozen head")
KL_CASES = ("naive kl", "linear_kl")
FLOORS = ("products", "products, frozen head")


@dataclass(frozen=True)
class Inputs:
    """Hidden states [N, H], a head [V, H], targets and factors [N]; a second model's for the KL."""

    hidden: Any
    weight: Any
    targets: Any
    factor: Any
    """Equal within each of `SEQUENCES` runs of rows, so that a loss with one advantage per sequence can form it."""
    ref_hidden: Any = None
    ref_weight: Any = None


def make_inputs(size: tuple[int, int, int], dtype: str, *, reference: bool = False) -> Inputs:
    """Random ones of the sizes N, H, V; logits have a variance of 1, as in a young model."""
    import torch

    n, h, v = size
    torch.manual_seed(0)
    kind, device = getattr(torch, dtype), "cuda" if torch.cuda.is_available() else "cpu"
    hidden = torch.randn(n, h, device=device).to(kind)
    weight = torch.randn(v, h, dtype=kind, device=device).mul_(h**-0.5)
    factor = torch.randn(SEQUENCES, device=device).repeat_interleave(n // SEQUENCES)
    targets = torch.randint(v, (n,), device=device)
    if not reference:
        return Inputs(hidden, weight, targets, factor)
    ref_hidden = hidden + 0.1 * torch.randn(n, h, device=device).to(kind)
    return Inputs(hidden, weight, targets, factor, ref_hidden, weight.clone())


def naive(hidden: Any, weight: Any, targets: Any) -> Any:
    """All logits at once."""
    return (hidden @ weight.t()).float().log_softmax(-1).gather(1, targets[:, None])[:, 0]


def naive_kl(given: Inputs) -> Any:
    """KL(policy||ref) from two whole matrices of log-probabilities."""
    import torch

    policy = (given.hidden @ given.weight.t()).float().log_softmax(-1)
    with torch.no_grad():
        ref = (given.ref_hidden @ given.ref_weight.t()).float().log_softmax(-1)
    return (policy.exp() * (policy - ref)).sum(-1)


def row_chunks(given: Inputs) -> None:
    """Log-probabilities a few rows at a time, each chunk's logits thrown away and formed again in the backward pass."""
    import torch
    from torch.utils.checkpoint import checkpoint

    rows = [slice(i, i + CHUNK_ROWS) for i in range(0, len(given.targets), CHUNK_ROWS)]
    found = [
        checkpoint(naive, given.hidden[part], given.weight, given.targets[part], use_reentrant=False) for part in rows
    ]
    torch.cat(found).backward(given.factor)


def trl_head(given: Inputs) -> None:
    """TRL's chunked head with what its GRPO trainer passes, but without the entropy that it also computes there."""
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE as CHUNK

    arguments = (given.hidden, given.weight, None, given.targets, 1.0, CHUNK, None, 1.0, ("log_probs",))
    ChunkedLogProbFunction.apply(*arguments)[0].backward(given.factor)


def liger_logprobs(given: Inputs) -> None:
    """The log-probabilities inside Liger's PPO losses, with their own backward pass."""
    from liger_kernel.chunked_loss.fused_linear_ppo import LigerFusedLinearPPOBase

    shape = (SEQUENCES, len(given.targets) // SEQUENCES)
    found = LigerFusedLinearPPOBase.chunk_forward(
        given.hidden.view(*shape, -1), given.weight, given.targets.view(shape), temperature=1.0
    )
    found.backward(given.factor.view(shape))


def liger_loss(given: Inputs) -> None:
    """Liger's fused GRPO loss, gradients formed sequence by sequence in its forward pass; not compiled.

    At ratio 1 the gradient of its loss is that of -sum_t advantage_t log p_t / N, so advantage = -N factor.
    """
    import torch
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    n = len(given.targets)
    shape = (SEQUENCES, n // SEQUENCES)
    loss = LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False, loss_type="bnpo", compiled=False)
    found = loss(
        given.hidden.view(*shape, -1),
        given.weight,
        given.targets.view(shape),
        torch.ones(shape, device=given.hidden.device),
        -n * given.factor.view(shape)[:, 0],
    )
    found[0].backward()


def klamp_head(given: Inputs) -> None:
    """`klamp.linear_logprobs`."""
    from klamp import linear_logprobs

    linear_logprobs(given.hidden, given.weight, given.targets).backward(given.factor)


def klamp_kl(given: Inputs) -> None:
    """`klamp.linear_kl`."""
    from klamp import linear_kl

    linear_kl(given.hidden, given.weight, given.ref_hidden, given.ref_weight).backward(given.factor)


def products(given: Inputs) -> None:
    """The matrix products alone, tile by tile: logits, the gradient of hidden, that of weight where it learns.

    Products that fit into memory are formed like this whatever stands between them; nothing stands between them here.
    """
    import torch

    hidden, weight = given.hidden.detach(), given.weight.detach()
    n, v = len(hidden), len(weight)
    learns = given.weight.requires_grad
    tile = hidden.new_ones(n, min(TILE, v))
    logits = torch.empty_like(tile)
    d_hidden = torch.zeros_like(hidden)
    d_weight = torch.empty_like(weight) if learns else None
    for start in range(0, v, TILE):
        some = weight[start : start + TILE]
        d = tile[:, : len(some)]
        torch.mm(hidden, some.t(), out=logits[:, : len(some)])
        d_hidden.addmm_(d, some)
        if d_weight is not None:
            torch.mm(d.t(), hidden, out=d_weight[start : start + TILE])
    given.hidden.grad, given.weight.grad = d_hidden, d_weight


CASES: dict[str, Callable[[Inputs], None]] = {
    "products": products,
    "naive": lambda given: naive(given.hidden, given.weight, given.targets).backward(given.factor),
    "row chunks": row_chunks,
    "TRL": trl_head,
    "Liger, log-probabilities": liger_logprobs,
    "Liger, GRPO loss": liger_loss,
    "linear_logprobs": klamp_head,
    "products, frozen head": products,
    "TRL, frozen head": trl_head,
    "linear_logprobs, frozen head": klamp_head,
    "naive kl": lambda given: naive_kl(given).backward(given.factor),
    "linear_kl": klamp_kl,
    "linear_kl, frozen head": klamp_kl,
}


def prepared(case: str, given: Inputs) -> Callable[[], None]:
    """A function that does one forward and backward pass of the case; gradients are then in hidden and weight."""
    given.hidden.requires_grad_(True)
    given.weight.requires_grad_("frozen" not in case)

    def run() -> None:
        given.hidden.grad = given.weight.grad = None
        CASES[case](given)

    return run


WARM = (SEQUENCES, 8, 16)


def one(case: str, dtype: str, size: tuple[int, int, int], repeats: int) -> dict[str, Any]:
    """One case in this process: its times and its extra peak memory, after a small run that loads what it needs."""
    from benchmarks.measure import timed

    prepared(case, make_inputs(WARM, dtype, reference="kl" in case))()
    given = make_inputs(tuple(size), dtype, reference="kl" in case)  # pyright: ignore[reportArgumentType]
    return {"rows": size[0]} | timed(prepared(case, given), repeats)
