"""Forms of advantages: is a KL in them, which one, and with which coefficient."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

from tests.audit.bench.losses import discounted, k3, ppo
from tests.audit.bench.worlds import BETA, Case, World, wrong
from torch import Tensor


def normalised(x: Tensor, group: int, form: str) -> Tensor:
    """Rewards to advantages."""
    y = x.reshape(-1, group)
    centred, above = y - y.mean(1, keepdim=True), y - y.median(1, keepdim=True).values
    return {
        "mean": centred,
        "z-score": centred / (y.std(1, keepdim=True) + 1e-4),
        "leave one out": centred * group / (group - 1),
        "batch": (y - y.mean()) / y.std(),
        "group mean, batch deviation": centred / centred.std(),
        "median": above / above.abs().mean(),
        "range": (y - y.amin(1, keepdim=True)) / (y.amax(1, keepdim=True) - y.amin(1, keepdim=True)) - 0.5,
        "rank": y.argsort(1).argsort(1).to(y) / (group - 1) - 0.5,
        "none": y,
        "clipped": (centred / (y.std(1, keepdim=True) + 1e-4)).clamp(-1.05, 1.05),
    }[form].flatten()


def trained_on(
    form: str, size: str, *, stale: bool = False, kind: str = "k1", beta: float = BETA, rewards: bool = True
) -> Callable[[World], Any]:
    """PPO's loss on advantages of this form; the KL's size: none, summed, mean, per token, to go, gae."""

    def loss(w: World) -> Any:
        d = (w.old - w.ref if stale else w.d).detach()
        kl = d if kind == "k1" else k3(d)
        if size in ("per token", "to go", "gae"):
            later = discounted(w, kl, {"per token": 0.0, "to go": 1.0, "gae": 0.95}[size])
            a = normalised(w.rewards, w.group, form)[:, None] - BETA * later
        else:
            total = {"none": 0 * w.rewards, "summed": w.sums(kl), "mean": w.each(kl)}[size]
            a = normalised(w.rewards - BETA * total, w.group, form)
        a = a.to(w.logp)
        extra = {"rewards": w.rewards, "group_size": w.group} if rewards else {}
        return w.token(ppo(w, a=a if a.ndim == 2 else a[:, None])), extra | {"advantages": a, "beta": beta}

    return loss


def cases() -> Iterator[Case]:
    """24 forms, with the rewards passed."""
    for form in ("z-score", "mean", "leave one out", "batch"):
        yield Case(f"{form}, no KL, beta 0", trained_on(form, "none", beta=0.0), ("none",), beta=None)
        for size, stale in product(("summed", "mean"), (False, True) if form != "batch" else (False,)):
            yield Case(f"{form}, KL {size}, stale {stale}", trained_on(form, size, stale=stale))
    for size, stale in product(("per token", "to go"), (False, True)):
        yield Case(f"KL {size}, stale {stale}", trained_on("z-score", size, stale=stale))
    yield wrong("z-score, no KL, beta passed", trained_on("z-score", "none"), "kl-absent", "none")
    yield wrong("mean, k3 summed", trained_on("mean", "summed", kind="k3"), "kl-k3-in-advantage")


def without_rewards() -> Iterator[Case]:
    """Advantages after the KL, of which nothing else is known."""
    for form in (
        "mean",
        "z-score",
        "batch",
        "group mean, batch deviation",
        "median",
        "range",
        "rank",
        "none",
        "clipped",
    ):
        stale, size = form in ("batch", "range"), "mean" if form in ("median", "none", "clipped") else "summed"
        yield Case(f"{form}, KL {size}", trained_on(form, size, stale=stale, rewards=False), beta=None)
    for size in ("to go", "per token", "gae"):
        yield Case(f"KL {size}", trained_on("z-score", size, rewards=False), beta=None)
