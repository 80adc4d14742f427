"""Forms of advantages, with the rewards passed: is a KL in them, which one, and with which coefficient."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tests.audit.bench.sound import discounted, k3, normalised, ppo
from tests.audit.bench.worlds import BETA, Case, World
from torch import Tensor

NORMS = ("z-score", "mean", "leave one out", "batch")


def advantages_of(form: str, size: str, teacher: str, estimator: str = "k1") -> Callable[[World], Tensor]:
    """Advantages from the rewards of a world."""

    def advantages(w: World) -> Tensor:
        d = (w.d if teacher == "fresh" else w.old - w.ref).detach()
        kl = d if estimator == "k1" else k3(d)
        if size in ("per token", "to go"):
            base = normalised(w.rewards, w.group, form)[:, None]
            return base - BETA * (discounted(w, kl, 1.0) if size == "to go" else kl)
        total = {"none": 0 * w.rewards, "summed": w.sums(kl), "mean": w.each(kl)}[size]
        x = normalised(w.rewards - BETA * total, w.group, form)
        return x

    return advantages


def trained_on(advantages: Callable[[World], Tensor], beta: float = BETA) -> Callable[[World], Any]:
    """PPO's loss on these advantages."""

    def loss(w: World) -> Any:
        a = advantages(w).to(w.logp)
        extra = {"advantages": a, "rewards": w.rewards, "group_size": w.group, "beta": beta}
        return w.token(ppo(w, a=a if a.ndim == 2 else a[:, None])), extra

    return loss


def cases() -> Iterator[Case]:
    """24 forms."""
    for form in NORMS:
        plain = trained_on(advantages_of(form, "none", "fresh"), beta=0.0)
        yield Case(f"{form}, no KL, beta 0", plain, kl=("none",), beta=None)
        for size in ("summed", "mean"):
            yield Case(f"{form}, KL {size}", trained_on(advantages_of(form, size, "fresh")))
    for form in NORMS[:3]:
        for size in ("summed", "mean"):
            yield Case(f"{form}, stale KL {size}", trained_on(advantages_of(form, size, "stale")))
    for size in ("per token", "to go"):
        for teacher in ("fresh", "stale"):
            yield Case(f"KL {size}, {teacher}", trained_on(advantages_of("z-score", size, teacher)))
    yield Case(
        "z-score, no KL, beta passed",
        trained_on(advantages_of("z-score", "none", "fresh")),
        kl=("none",),
        ok=False,
        codes=("kl-absent",),
        beta=None,
    )
    k3_form = trained_on(advantages_of("mean", "summed", "fresh", "k3"))
    yield Case("mean, k3 summed", k3_form, kl=(), ok=False, codes=("kl-k3-in-advantage",), beta=None)
