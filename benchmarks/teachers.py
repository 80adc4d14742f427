"""The KL to a teacher, forward and backward: the matrix products alone, Liger, TRL, klamp exact and over a head."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.head_cases import WARM, Inputs, make_inputs
from benchmarks.measure import isolated, middle, pooled, rounds, spread, timed
from benchmarks.records import Benchmark, table, verdict

DIRECTIONS = {"reverse": 1.0, "forward": 0.0, "js": 0.5}
"""Each with its `beta` in Liger and TRL."""
K = 64
SIZES = {True: (64, 64, 8000), False: (384, 896, 151_936)}
ROUNDS, REPEATS = 2, 1
TARGET = 1.25
TILE = 4096


def liger(given: Inputs, direction: str) -> None:
    """Liger's chunked JSD loss, not compiled. Its fused JSD and `LigerFusedLinearJSD` are Triton: no CPU runs them.

    Gradients of the mean over rows, formed in its forward pass; the cross entropy that it also computes weighs 0.
    """
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    loss = LigerFusedLinearJSDLoss(
        weight_hard_loss=0.0, weight_soft_loss=1.0, beta=DIRECTIONS[direction], compiled=False
    )
    loss(given.hidden, given.weight, given.ref_hidden, given.ref_weight, given.targets).backward()


def trl_divergence(given: Inputs, direction: str) -> None:
    """TRL's chunked divergence, row by row."""
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    arguments = (given.hidden, given.weight, None, given.ref_hidden, given.ref_weight, None, DIRECTIONS[direction])
    ChunkedDivergenceFunction.apply(*arguments)[0].mean().backward()


def trl_loss(given: Inputs, direction: str) -> None:
    """The loss of TRL's DistillationTrainer, as its `_compute_loss` calls it."""
    from trl.trainer.distillation_trainer import _chunked_divergence_loss

    hidden, ref_hidden, mask = given.hidden[None], given.ref_hidden[None], given.targets[None] >= 0
    _chunked_divergence_loss(hidden, ref_hidden, given.weight, given.ref_weight, mask, beta=DIRECTIONS[direction])[
        0
    ].backward()


def klamp(given: Inputs, direction: Any, top_k: int | None = None) -> None:
    """`klamp.linear_kl`."""
    from klamp import linear_kl

    models = given.hidden, given.weight, given.ref_hidden, given.ref_weight
    linear_kl(*models, direction=direction, top_k=top_k, targets=given.targets).mean().backward()


def products(given: Inputs, direction: str) -> None:
    """The products alone, tile by tile: logits of both models, the gradients of hidden and, where it learns, weight."""
    import torch

    hidden, weight, learns = given.hidden.detach(), given.weight.detach(), given.weight.requires_grad
    d_hidden, d_weight = torch.zeros_like(hidden), torch.empty_like(weight) if learns else None
    tile = hidden.new_ones(len(hidden), min(TILE, len(weight)))
    for start in range(0, len(weight), TILE):
        some, logits = weight[start : start + TILE], tile[:, : len(weight) - start]
        torch.mm(hidden, some.t())
        torch.mm(given.ref_hidden, given.ref_weight[start : start + TILE].t())
        d_hidden.addmm_(logits, some)
        if d_weight is not None:
            torch.mm(logits.t(), hidden, out=d_weight[start : start + TILE])
    given.hidden.grad, given.weight.grad = d_hidden, d_weight


WAYS: dict[str, Callable[[Inputs, str], None]] = {
    "products": products,
    "Liger": liger,
    "TRL, divergence": trl_divergence,
    "TRL, trainer's loss": trl_loss,
    "linear_kl": klamp,
    f"linear_kl, k = {K}": partial(klamp, top_k=K),
}
RIVALS = ("Liger", "TRL, divergence", "TRL, trainer's loss")


def cases() -> list[tuple[str, str, bool]]:
    """(way, direction, whether the head learns); the products are the same in every direction."""
    found = [(way, direction, True) for direction in DIRECTIONS for way in WAYS]
    found += [(way, "reverse", False) for way in WAYS if way != "Liger"]
    return [case for case in found if case[0] != "products" or case[1] == "reverse"]


def one(way: str, direction: str, learns: bool, dtype: str, size: tuple[int, int, int], repeats: int) -> dict[str, Any]:
    """One case in this process: its times and its extra peak memory, after a small run that loads what it needs."""
    for shape, count in ((WARM, 1), (tuple(size), repeats)):
        given = make_inputs(shape, dtype, reference=True)  # pyright: ignore[reportArgumentType]
        seen = timed(prepared(way, direction, learns, given), count)
    return {"rows": size[0]} | seen


def prepared(way: str, direction: str, learns: bool, given: Inputs) -> Callable[[], None]:
    """A function that does one forward and backward pass of a case; gradients are then in hidden and weight."""
    given.hidden.requires_grad_(True)
    given.weight.requires_grad_(learns)

    def run() -> None:
        given.hidden.grad = given.weight.grad = None
        WAYS[way](replace(given), direction)

    return run


def run(quick: bool) -> dict[str, Any]:
    """Measure every case in both types; the quick run does so once."""
    found: dict[str, Any] = {}
    for dtype in ("float32", "bfloat16"):
        fixed = {"dtype": dtype, "size": SIZES[quick], "repeats": 1 if quick else REPEATS}
        runs = {
            f"{way}|{direction}|{learns}": partial(
                isolated, "benchmarks.teachers:one", {"way": way, "direction": direction, "learns": learns} | fixed
            )
            for way, direction, learns in cases()
        }
        found[dtype] = {case: pooled(seen) for case, seen in rounds(runs, 1 if quick else ROUNDS).items()}
    return {"size": dict(zip(("rows", "width", "vocab"), SIZES[quick], strict=True)), "teachers": found}


def text(results: Mapping[str, Any]) -> str:
    """The table, and the targets."""
    rows, lines = [], []
    for dtype, measured in results["teachers"].items():
        for name, seen in measured.items():
            way, direction, learns = name.split("|")
            over = middle(seen["seconds"]) / middle(measured[f"products|reverse|{learns}"]["seconds"])
            times = spread(seen["seconds"]), f"{middle(seen['cpu_seconds']):.2f}"
            kind = "" if way == "products" else direction
            shown = f"`linear_kl`{way.removeprefix('linear_kl')}" if way.startswith("linear") else way
            head = "learns" if learns == "True" else "frozen"
            rows.append((dtype, head, kind, shown, *times, f"{over:.2f}×", f"{seen['extra_mib']:.0f}"))
            if way.startswith("linear_kl,"):
                lines.append(verdict(f"{dtype}, {head}, {kind}: {shown} over the products alone", over, TARGET))
                rivals = (measured.get(f"{rival}|{direction}|{learns}") for rival in RIVALS)
                least = min(rival["extra_mib"] for rival in rivals if rival)
                share = seen["extra_mib"] / max(1.0, least)
                lines.append(verdict(f"{dtype}, {head}, {kind}: its memory over the least of the others", share, 1.0))
    size = results["size"]
    headings = ("type", "head", "KL", "way", "seconds, median (range)", "CPU seconds", "over products", "extra MiB")
    where = f"N = {size['rows']}, H = {size['width']}, V = {size['vocab']:,}"
    aims = lines if tuple(size.values()) == SIZES[False] else ["The targets are for the full size."]
    return "\n\n".join([f"{where}:", table(headings, rows), "\n".join(aims)])


BENCHMARK = Benchmark(
    name="teachers",
    title="The KL to a teacher, from hidden states",
    about="Forward and backward of the mean KL over the rows, with gradients of hidden states and weight (of hidden "
    "states alone where the head is frozen). Over products: against the four matrix products without which there is no "
    "gradient (frozen: three). Extra memory is what the process held at most above its inputs, gradients included. "
    "Liger's chunked loss forms the weight's gradient always; its fused kernels run on a GPU only.",
    run=run,
    text=text,
)
