"""The output heads that are compared: each gives the gradients of sum_t factor_t log p(target_t), or of the KL.

`row_chunks` is what a user would write in twenty lines; other packages' heads are called as their users call them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

CHUNK_ROWS = 128
SEQUENCES = 8
TILE = 4096

TOP_K = 64

RIVALS = ("TRL", "Liger, log-probabilities", "Liger, GRPO loss", "cut-cross-entropy")
KL_RIVALS = ("TRL kl", "Liger kl")
LOGPROB_CASES = ("naive", "row chunks", *RIVALS, "linear_logprobs")
FROZEN_CASES = ("TRL, frozen head", "linear_logprobs, frozen head", "linear_kl, frozen head")
KL_CASES = ("naive kl", *KL_RIVALS, "linear_kl")
TOP_K_CASES = (f"naive kl, top {TOP_K}", f"linear_kl, top {TOP_K}")
FLOORS = ("products", "products, frozen head")
MODULES = {
    "TRL kl": "trl.kernels.chunked_divergence",
    "TRL": "trl.kernels.chunked_logprob",
    "Liger": "liger_kernel.chunked_loss",
    "cut-cross-entropy": "cut_cross_entropy",
}
"""How the cases of another package begin -> the module that they need."""


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
    return _all_logprobs(hidden, weight).gather(1, targets[:, None])[:, 0]


def _all_logprobs(hidden: Any, weight: Any) -> Any:
    """The whole matrix of log-probabilities, in float32 at least."""
    import torch

    logits = hidden @ weight.t()
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)


def naive_kl(inputs: Inputs) -> Any:
    """KL(policy||ref) from two whole matrices of log-probabilities."""
    import torch

    policy = _all_logprobs(inputs.hidden, inputs.weight)
    with torch.no_grad():
        ref = _all_logprobs(inputs.ref_hidden, inputs.ref_weight)
    return (policy.exp() * (policy - ref)).sum(-1)


def naive_topk_kl(inputs: Inputs) -> Any:
    """The KL over the policy's likeliest tokens and the sampled one, from two whole matrices of log-probabilities."""
    import torch

    from klamp import topk_kl

    targets = inputs.targets[:, None]
    policy = _all_logprobs(inputs.hidden, inputs.weight)
    ids = policy.detach().topk(TOP_K, -1).indices
    with torch.no_grad():
        ref = _all_logprobs(inputs.ref_hidden, inputs.ref_weight)
    outside = (ids != targets).all(-1)
    heads = (x.gather(-1, ids) for x in (policy, ref))
    return topk_kl(*heads, *(x.gather(-1, targets)[:, 0] for x in (policy, ref)), outside)


def row_chunks(inputs: Inputs) -> None:
    """Log-probabilities a few rows at a time, each chunk's logits thrown away and formed again in the backward pass."""
    import torch
    from torch.utils.checkpoint import checkpoint

    rows = [slice(i, i + CHUNK_ROWS) for i in range(0, len(inputs.targets), CHUNK_ROWS)]
    logprobs = [
        checkpoint(naive, inputs.hidden[part], inputs.weight, inputs.targets[part], use_reentrant=False)
        for part in rows
    ]
    torch.cat(logprobs).backward(inputs.factor)


def trl_head(inputs: Inputs) -> None:
    """TRL's chunked head with what its GRPO trainer passes, but without the entropy that it also computes there."""
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE as CHUNK

    arguments = (inputs.hidden, inputs.weight, None, inputs.targets, 1.0, CHUNK, None, 1.0, ("log_probs",))
    ChunkedLogProbFunction.apply(*arguments)[0].backward(inputs.factor)


def liger_logprobs(inputs: Inputs) -> None:
    """The log-probabilities inside Liger's PPO losses, with their own backward pass."""
    from liger_kernel.chunked_loss.fused_linear_ppo import LigerFusedLinearPPOBase

    shape = (SEQUENCES, len(inputs.targets) // SEQUENCES)
    logprobs = LigerFusedLinearPPOBase.chunk_forward(
        inputs.hidden.view(*shape, -1), inputs.weight, inputs.targets.view(shape), temperature=1.0
    )
    logprobs.backward(inputs.factor.view(shape))


def liger_loss(inputs: Inputs) -> None:
    """Liger's fused GRPO loss, gradients formed sequence by sequence in its forward pass; not compiled.

    At ratio 1 the gradient of its loss is that of -sum_t advantage_t log p_t / N, so advantage = -N factor.
    """
    import torch
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    n = len(inputs.targets)
    shape = (SEQUENCES, n // SEQUENCES)
    loss_of = LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False, loss_type="bnpo", compiled=False)
    loss, *_ = loss_of(
        inputs.hidden.view(*shape, -1),
        inputs.weight,
        inputs.targets.view(shape),
        torch.ones(shape, device=inputs.hidden.device),
        -n * inputs.factor.view(shape)[:, 0],
    )
    loss.backward()


def trl_kl(inputs: Inputs) -> None:
    """TRL's chunked divergence, which its distillation trainer uses: KL(policy || ref) at each row."""
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    arguments = (inputs.hidden, inputs.weight, None, inputs.ref_hidden, inputs.ref_weight, None, 1.0)
    ChunkedDivergenceFunction.apply(*arguments)[0].backward(inputs.factor)


def liger_kl(inputs: Inputs) -> None:
    """Liger's fused JSD loss at its reverse KL; not compiled. Its loss is a mean over rows: every factor is 1."""
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    loss_of = LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=1.0, compiled=False)
    mean = loss_of(inputs.hidden, inputs.weight, inputs.ref_hidden, inputs.ref_weight, inputs.targets)
    (len(inputs.targets) * mean).backward()


def cut_cross_entropy(inputs: Inputs) -> None:
    """Apple's cut cross-entropy with its defaults, which leave small gradients out."""
    from cut_cross_entropy import linear_cross_entropy

    linear_cross_entropy(inputs.hidden, inputs.weight, inputs.targets, reduction="none").backward(-inputs.factor)


def klamp_logprobs(inputs: Inputs) -> Any:
    """`klamp.linear_logprobs`."""
    from klamp import linear_logprobs

    return linear_logprobs(inputs.hidden, inputs.weight, inputs.targets)


def klamp_kl(inputs: Inputs, **options: Any) -> Any:
    """`klamp.linear_kl`."""
    from klamp import linear_kl

    return linear_kl(inputs.hidden, inputs.weight, inputs.ref_hidden, inputs.ref_weight, **options)


def klamp_topk_kl(inputs: Inputs) -> Any:
    """`klamp.linear_kl` over a head of tokens."""
    return klamp_kl(inputs, top_k=TOP_K, targets=inputs.targets)


def products(inputs: Inputs) -> None:
    """The matrix products alone, tile by tile: logits, the gradient of hidden, that of weight where it learns.

    Products that fit into memory are formed like this whatever stands between them; nothing stands between them here.
    """
    import torch

    hidden, weight = inputs.hidden.detach(), inputs.weight.detach()
    n, v = len(hidden), len(weight)
    learns = inputs.weight.requires_grad
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
    inputs.hidden.grad, inputs.weight.grad = d_hidden, d_weight


def _backward(value: Callable[[Inputs], Any], inputs: Inputs) -> None:
    value(inputs).backward(inputs.factor)


VALUES: dict[str, Callable[[Inputs], Any]] = {
    "naive": lambda inputs: naive(inputs.hidden, inputs.weight, inputs.targets),
    "linear_logprobs": klamp_logprobs,
    "linear_logprobs, frozen head": klamp_logprobs,
    "naive kl": naive_kl,
    "linear_kl": klamp_kl,
    "linear_kl, frozen head": klamp_kl,
    TOP_K_CASES[0]: naive_topk_kl,
    TOP_K_CASES[1]: klamp_topk_kl,
}
"""Case -> its value of each row, where it has one."""
CASES: dict[str, Callable[[Inputs], None]] = {
    "products": products,
    "products, frozen head": products,
    "row chunks": row_chunks,
    "TRL": trl_head,
    "TRL, frozen head": trl_head,
    "Liger, log-probabilities": liger_logprobs,
    "Liger, GRPO loss": liger_loss,
    "cut-cross-entropy": cut_cross_entropy,
    "TRL kl": trl_kl,
    "Liger kl": liger_kl,
    **{case: partial(_backward, value) for case, value in VALUES.items()},
}


def naive_of(case: str) -> str:
    """The case that computes the same from whole matrices of logits."""
    if case in TOP_K_CASES:
        return TOP_K_CASES[0]
    return "naive kl" if "kl" in case else "naive"


def exact_gradients(case: str, inputs: Inputs) -> tuple[Any, Any, Any]:
    """The weighted values of a case and the gradients of hidden and weight, by whole matrices in float64 on the CPU."""
    import torch

    tensors = {name: x if x is None else x.detach().cpu() for name, x in vars(inputs).items()}
    exact = Inputs(
        **{name: x.double() if x is not None and x.is_floating_point() else x for name, x in tensors.items()}
    )
    exact.hidden.requires_grad_(True)
    exact.weight.requires_grad_(True)
    factor = torch.ones_like(exact.factor) if case == "Liger kl" else exact.factor
    weighted = VALUES[naive_of(case)](exact) * factor
    hidden, weight = torch.autograd.grad(weighted.sum(), (exact.hidden, exact.weight))
    return weighted.detach(), hidden, weight


def unavailable(case: str) -> str:
    """Why a case cannot run on this machine; empty if it can."""
    import torch

    if case == "cut-cross-entropy" and not torch.cuda.is_available():
        return "its kernels are written in Triton and need a GPU"
    module = next((module for start, module in MODULES.items() if case.startswith(start)), None)
    return missing(module) if module else ""


def missing(module: str) -> str:
    """Why a module cannot be used; empty if it can."""
    try:
        importlib.import_module(module)
    except Exception as error:  # another package's import may fail in any way
        return f"{module} cannot be imported ({type(error).__name__}: {error})".split("\n")[0]
    return ""


def prepared(case: str, inputs: Inputs) -> Callable[[], None]:
    """A function that does one forward and backward pass of the case; gradients are then in hidden and weight."""
    inputs.hidden.requires_grad_(True)
    inputs.weight.requires_grad_("frozen" not in case)

    def run() -> None:
        inputs.hidden.grad = inputs.weight.grad = None
        CASES[case](inputs)

    return run


WARM = (SEQUENCES, 8, 2 * TOP_K)


def one(case: str, dtype: str, size: tuple[int, int, int], repeats: int) -> dict[str, Any]:
    """One case in this process: its times and its extra peak memory, after a small run that loads what it needs.

    On a GPU a run of the full size precedes it, in which kernels are compiled and tuned.
    """
    import torch

    from benchmarks.measure import timed, wait_for_gpu

    prepared(case, make_inputs(WARM, dtype, reference="kl" in case))()
    inputs = make_inputs(tuple(size), dtype, reference="kl" in case)  # pyright: ignore[reportArgumentType]
    run = prepared(case, inputs)
    if torch.cuda.is_available():
        run()
        inputs.hidden.grad = inputs.weight.grad = None
        wait_for_gpu()
    return {"rows": size[0]} | timed(run, repeats)
