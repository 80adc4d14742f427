"""The same few losses under other numbers: coarse types, step zero, few tokens, packed rows, compiled losses."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from tests.audit.bench.losses import exact_kl, k2, k3, live_k3, plus, ppo, ratio_k3, score
from tests.audit.bench.worlds import BETA, Case, Score, World, made_cases, make_world, pick, verdict_of, worth_of, wrong
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import klamp

SLOW = pytest.mark.slow
RIGHT = [
    Case("ratio x k3", plus(ppo, ratio_k3)),
    Case("sequence mean, ratio x k3", plus(ppo, ratio_k3, World.sequence)),
    Case("reinforce, k2", plus(lambda w: -w.a * w.logp, k2)),
]
WRONG = [
    wrong("k3 differentiated", plus(ppo, lambda w: k3(w.d)), "kl-forward"),
    wrong("k1", plus(ppo, lambda w: w.d), "kl-zero"),
    wrong("away", plus(ppo, lambda w: -ratio_k3(w)), "kl-away"),
]


def packed(loss: Callable[[World], Any], w: World) -> Any:
    """All completions in one row, without padding, with the completion of each place."""
    of = torch.arange(len(w.logp))[:, None].expand_as(w.logp)[w.mask]
    row, ref, old = (x[w.mask][None] for x in (w.logp, w.ref, w.old))
    one = w.of(row, mask=torch.ones_like(row, dtype=torch.bool), advantages=w.advantages[of][None], ref=ref, old=old)
    return loss(one), one.passed() | {"sampler_logprobs": None, "segments": of[None]}


def as_lists(loss: Callable[[World], Any], w: World) -> Any:
    """Completions as a list of 1-D tensors, each a leaf, as a service returns them."""

    def cut(x: Tensor) -> list[Tensor]:
        return [row[m].detach() for row, m in zip(x, w.mask, strict=True)]

    pieces = [x.requires_grad_() for x in cut(w.logp)]
    padded = torch.nn.utils.rnn.pad_sequence([*pieces, w.logp[0].detach()], batch_first=True)[:-1]
    given = {"policy_logprobs": pieces, "mask": None, "sampler_logprobs": None}
    return loss(w.of(padded)), given | {"ref_logprobs": cut(w.ref), "old_logprobs": cut(w.old)}


def checkpointed(loss: Callable[[World], Any], w: World, reentrant: bool) -> Any:
    logits = checkpoint(lambda x: 2 * (x / 2), w.logits, use_reentrant=reentrant)
    assert isinstance(logits, Tensor)
    world = w.of(pick(logits, w.ids))
    return loss(world), {"policy_logprobs": world.logp}


LAYOUTS: dict[str, Callable[[Callable[[World], Any], World], Any]] = {
    "packed": packed,
    "lists": as_lists,
    "scaled": lambda loss, w: (65536 * loss(w), {"loss_scale": 65536.0}),
    "float mask": lambda loss, w: (loss(w), {"mask": w.mask.float()}),
    "checkpointed": lambda loss, w: checkpointed(loss, w, False),
    "checkpointed, reentrant": lambda loss, w: checkpointed(loss, w, True),
}


def layouts() -> Iterator[tuple[Case, World]]:
    """Each layout; 16 tokens; a completion of one token; tokens whose policy left the old policy by many nats."""
    world = make_world(11)
    mask, old = world.mask.clone(), world.old.clone()
    mask[3, 1:] = False
    old[0, 1], old[4, 2] = old[0, 1] - 7, old[4, 2] - 4.5
    few = make_world(12, shape=(2, 8), group=2, longest=True)
    for case in RIGHT + WRONG:
        for name, layout in LAYOUTS.items():
            if "sequence" not in case.name or name not in ("packed", "lists"):
                changed = lambda w, x=layout, loss=case.loss: x(loss, w)  # noqa: E731
                yield case._replace(name=f"{case.name}, {name}", loss=changed), world
        for name, w in (("16 tokens", few), ("empty", replace(world, mask=mask)), ("far", replace(world, old=old))):
            yield case._replace(name=f"{case.name}, {name}"), w


def small(beta: float) -> Case:
    made = lambda w: (w.token(ppo(w) + beta * ratio_k3(w)), {"beta": beta, "kl_in": "loss"})  # noqa: E731
    return Case(f"beta {beta:g}", made, kl=(), beta=None)


def coarse() -> Iterator[tuple[Case, World]]:
    """bf16 and float16 log-probabilities, and coefficients too small to be seen."""
    for dtype, seed in product((torch.bfloat16, torch.float16), range(4)):
        world = make_world(20 + seed, dtype=dtype)
        for case in (*(x._replace(kl=(), beta=None) for x in RIGHT), *map(small, (0.1, 0.01, 0.001))):
            yield case, world
    for beta, drift in ((1e-7, 0.3), (1e-6, 0.1), (1e-5, 0.03), (1e-3, 0.003)):
        yield small(beta), make_world(30, drift=drift)


def near_zero() -> Iterator[tuple[Case, World]]:
    """Sound losses of the first steps: three means, lengths that differ by one token, a policy that hardly moved."""
    total: Callable[[World, Tensor], Tensor] = lambda w, x: (x * w.m).sum() / (len(x) * 64)  # noqa: E731
    for number, (drift, lag) in enumerate(((0, 0), (0, 1e-3), (1e-4, 0), (1e-3, 1e-3), (5e-3, 1e-3), (2e-2, 0))):
        world = make_world(80 + number, drift=drift, lag=lag)
        alike = replace(world, mask=torch.ones_like(world.mask))
        alike.mask[0, -1] = alike.mask[3, -2:] = False
        for w, mean, kl in product((world, alike), (World.token, World.sequence, total), (ratio_k3, live_k3, k2)):
            yield Case(f"{kl.__name__}, {mean.__name__}, drift {drift:g}, lag {lag:g}", plus(ppo, kl, mean)), w


def at_zero() -> Iterator[tuple[Case, World]]:
    """KLs where the policy is the reference, by their class and whether they are sound; None: cannot tell."""
    w = make_world(40, drift=0, lag=0)
    kls: dict[tuple[str, bool | None], tuple[Tensor, ...]] = {
        ("reverse", True): (live_k3(w), k2(w), w.live * w.d),
        ("forward", False): (k3(w.d),),
        ("swapped", False): (k3(-w.d),),
        ("zero", False): (w.d,),
        ("away", False): (-k3(w.d), -live_k3(w)),
        ("", None): (exact_kl(w), score(w, w.d), w.d.abs(), k3(w.d.detach()), 0 * w.d.detach()),
    }
    for (kind, ok), tensors in kls.items():
        made: dict[str, Any] = {}
        for i, kl in enumerate(tensors):
            made |= {f"{i}; {name}": w.token(x + BETA * kl) for name, x in (("ppo", ppo(w)), ("1", -w.a * w.logp))}
            made |= {f"{i}; alone": (BETA * w.token(kl), {"advantages": None})} if kind else {}
        yield from product(made_cases(made, kl=(kind,) if kind else (), ok=ok, beta=None), [w])


BENCHES: dict[str, tuple[Callable[[], Iterator[tuple[Case, World]]], int, float, bool]] = {
    "coarse numbers": (coarse, 4, 0.0, True),
    "layouts": (layouts, 5, 0.95, True),
    "the first steps": (near_zero, 10, 0.6, False),
    "step zero": (at_zero, 1, 1.0, False),
}
"""The cases; the gate takes each n-th of them; the share that is named right; whether a wrong name is allowed."""


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=SLOW)])
@pytest.mark.parametrize("name", BENCHES)
def test_no_numbers_change_a_verdict(name: str, whole: bool) -> None:
    cases, step, share, misnamed = BENCHES[name]
    Score([*cases()][:: 1 if whole else step]).demand(share, misnamed=misnamed)


def loss_by(backend: str) -> Case:
    """A loss that torch compiles, or one that is differentiable once."""
    if backend == "once":
        return Case("once", plus(ppo, lambda w: klamp.kl_penalty(w.logp, w.ref, w.mask)))

    def loss(logp: Tensor, ref: Tensor, old: Tensor, a: Tensor, m: Tensor) -> Tensor:
        r, d = (logp - old).exp(), logp - ref
        tokens = torch.maximum(-a * r, -a * r.clamp(0.8, 1.2)) + BETA * r * (torch.expm1(-d) + d)
        return (tokens * m).sum() / m.sum()

    function = torch.compile(loss, backend=backend, dynamic=False)
    return Case("compiled", lambda w: function(w.logp, w.ref, w.old, w.a, w.m))


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("backend", ["once", "aot_eager", pytest.param("inductor", marks=SLOW)])
def test_where_a_second_derivative_is_refused_the_verdict_is_cannot_tell(backend: str, watched: bool) -> None:
    near, far = (w.watch() if watched else w for w in (make_world(42, drift=0, lag=0), make_world(43)))
    case = loss_by(backend)
    verdict = verdict_of(case, near)
    assert verdict.ok is None, str(verdict)
    assert backend != "once" or "no-second-derivative" in verdict.codes(), str(verdict)
    assert worth_of(case, verdict_of(case, far)) in ("right", "cannot tell" if watched else "right")
