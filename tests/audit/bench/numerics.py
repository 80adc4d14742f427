"""The same few losses under other numbers: coarse types, tiny coefficients, step zero, few tokens, other layouts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from tests.audit.bench.sound import exact_kl, k3, ppo
from tests.audit.bench.variants import live_k3, plus, ratio_k3, score_k1
from tests.audit.bench.worlds import BETA, Case, World, make_world, pick
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import klamp

Loss = Callable[[World], Any]

RIGHT: dict[str, Loss] = {
    "ratio x k3": plus(ppo, ratio_k3),
    "k2": plus(ppo, lambda w: w.d.square() / 2),
    "sequence mean, ratio x k3": lambda w: w.sequence(ppo(w) + BETA * ratio_k3(w)),
    "reinforce, k2": plus(lambda w: -w.a * w.logp, lambda w: w.d.square() / 2),
}
WRONG: dict[str, tuple[Loss, str]] = {
    "k3 differentiated": (plus(ppo, lambda w: k3(w.d)), "kl-forward"),
    "k1": (plus(ppo, lambda w: w.d), "kl-zero"),
    "away": (plus(ppo, lambda w: -ratio_k3(w)), "kl-away"),
    "swapped": (plus(ppo, lambda w: k3(-w.d)), "kl-swapped"),
    "policy reversed": (plus(lambda w: w.a * w.r, ratio_k3), "policy-reversed"),
}


def everything() -> Iterator[Case]:
    """The right and the wrong ones."""
    for name, loss in RIGHT.items():
        yield Case(name, loss)
    for name, (loss, code) in WRONG.items():
        yield Case(name, loss, kl=(), ok=False, codes=(code,), beta=None)


def changed(case: Case, name: str, change: Callable[[World, Any, dict[str, Any]], Any]) -> Case:
    """A case whose loss and arguments are changed after they are made."""

    def loss(w: World) -> Any:
        made = case.loss(w)
        value, extra = made if isinstance(made, tuple) else (made, {})
        return change(w, value, extra)

    return case._replace(name=f"{case.name}, {name}", loss=loss)


def packed(case: Case) -> Case:
    """All completions in one row, without padding, with the completion of each place."""

    def loss(w: World) -> Any:
        row = w.logp[w.mask][None]
        of = torch.arange(len(w.logp))[:, None].expand_as(w.logp)[w.mask]
        world = replace(
            w,
            mask=torch.ones_like(row, dtype=torch.bool),
            advantages=w.advantages[of][None],
            ref=w.ref[w.mask][None],
            old=w.old[w.mask][None],
        )
        world.__dict__["logp"] = row
        return case.loss(world), {
            "policy_logprobs": row,
            "mask": world.mask,
            "ref_logprobs": world.ref,
            "old_logprobs": world.old,
            "sampler_logprobs": None,
            "advantages": world.advantages,
            "segments": of[None],
        }

    return case._replace(name=f"{case.name}, packed", loss=loss)


def as_lists(name: str, kl: Callable[[Tensor, Tensor], Tensor], *, ok: bool, codes: tuple[str, ...] = ()) -> Case:
    """Completions as a list of 1-D tensors, each a leaf, as a service returns them."""

    def loss(w: World) -> Any:
        def cut(x: Tensor) -> list[Tensor]:
            return [row[m].detach() for row, m in zip(x, w.mask, strict=True)]

        pieces, refs, olds = [x.requires_grad_() for x in cut(w.logp)], cut(w.ref), cut(w.old)
        total = torch.zeros(())
        for piece, ref, old, a in zip(pieces, refs, olds, w.advantages, strict=True):
            total = total + (-a * (piece - old).exp() + BETA * kl(piece, ref)).sum()
        return total, {
            "policy_logprobs": pieces,
            "mask": None,
            "ref_logprobs": refs,
            "old_logprobs": olds,
            "sampler_logprobs": None,
            "advantages": w.advantages,
        }

    return Case(f"{name}, lists", loss, kl=(), ok=ok, codes=codes, beta=BETA if ok else None)


def layouts() -> Iterator[tuple[Case, World]]:
    """Packed rows, lists, scaled losses, few tokens, checkpointed logits, masks of other types, an empty completion."""
    world, few = make_world(11), make_world(12, shape=(2, 8), group=2, longest=True)
    for case in everything():
        if "sequence" not in case.name:
            yield packed(case), world
        yield changed(case, "scaled", lambda w, x, extra: (x * 65536, {**extra, "loss_scale": 65536.0})), world
        yield changed(case, "float mask", lambda w, x, extra: (x, {**extra, "mask": w.mask.float()})), world
        yield case._replace(name=f"{case.name}, 16 tokens"), few
        for reentrant in (True, False):
            yield checkpointed(case, reentrant), world
        yield case._replace(name=f"{case.name}, one empty completion"), emptied(world)
        yield case._replace(name=f"{case.name}, far tokens"), with_far_tokens(world)
    yield as_lists("k2", lambda p, q: (p - q).square() / 2, ok=True), world
    yield as_lists("k3", lambda p, q: k3(p - q), ok=False, codes=("kl-forward",)), world


def checkpointed(case: Case, reentrant: bool) -> Case:
    """The logits come out of a checkpointed block."""

    def loss(w: World) -> Any:
        logits = checkpoint(lambda x: 2 * (x / 2), w.logits, use_reentrant=reentrant)
        assert isinstance(logits, Tensor)
        world = replace(w)
        world.__dict__["logp"] = pick(logits, w.ids)
        made = case.loss(world)
        return made, {"policy_logprobs": world.logp}

    return case._replace(name=f"{case.name}, checkpointed, reentrant={reentrant}", loss=loss)


def emptied(w: World) -> World:
    mask = w.mask.clone()
    mask[3] = False
    mask[3, 0] = True
    return replace(w, mask=mask)


def with_far_tokens(w: World) -> World:
    """Two tokens whose policy left the old policy by many nats."""
    old = w.old.clone()
    old[0, 1], old[4, 2] = old[0, 1] - 7, old[4, 2] - 4.5
    return replace(w, old=old)


# coarse numbers: none may be accused, nothing may be called absent


def coarse() -> Iterator[tuple[Case, World]]:
    """bf16 and float16 log-probabilities, and coefficients too small to be seen: sound, and never accused."""
    for dtype in (torch.bfloat16, torch.float16):
        for seed in range(4):
            world = make_world(20 + seed, dtype=dtype)
            for name, loss in RIGHT.items():
                yield Case(f"{name}, {dtype}, seed {seed}", loss, kl=(), beta=None), world
            for beta in (0.1, 0.01, 0.001):
                yield small(beta), world
    for beta, drift in ((1e-7, 0.3), (1e-6, 0.1), (1e-5, 0.03), (1e-3, 0.003)):
        yield small(beta), make_world(30, drift=drift)


def small(beta: float) -> Case:
    """A right KL with a small coefficient."""
    return Case(
        f"beta {beta:g}",
        lambda w: (w.token(ppo(w) + beta * ratio_k3(w)), {"beta": beta, "kl_in": "loss"}),
        kl=(),
        beta=None,
    )


def near_zero() -> Iterator[tuple[Case, World]]:
    """Sound losses of the first steps: every mean, lengths that differ by one token, a policy that has hardly moved."""
    means: dict[str, Callable[[World, Tensor], Tensor]] = {
        "token": World.token,
        "sequence": World.sequence,
        "sum": lambda w, x: (x * w.m).sum() / (len(x) * 64),
    }
    for number, (drift, lag) in enumerate(((0, 0), (0, 1e-3), (1e-4, 0), (1e-3, 1e-3), (5e-3, 1e-3), (2e-2, 0))):
        world = make_world(80 + number, drift=drift, lag=lag)
        alike = replace(world, mask=torch.ones_like(world.mask))
        alike.mask[0, -1] = alike.mask[3, -2:] = False
        for lengths, w in (("", world), (", lengths alike", alike)):
            for mean_name, mean in means.items():
                for name, kl in {"ratio x k3": ratio_k3, "live ratio x k3": live_k3, "k2": _k2}.items():
                    yield (
                        Case(
                            f"{name}, {mean_name}, drift {drift:g}, lag {lag:g}{lengths}",
                            lambda w, m=mean, k=kl: m(w, ppo(w) + BETA * k(w)),
                        ),
                        w,
                    )


def _k2(w: World) -> Tensor:
    return w.d.square() / 2


# step zero: the policy is the reference

AT_ZERO: dict[str, tuple[Callable[[World], Tensor], bool | None, str]] = {
    "live ratio x k3": (live_k3, True, "reverse"),
    "k2": (lambda w: w.d.square() / 2, True, "reverse"),
    "k3 differentiated": (lambda w: k3(w.d), False, "forward"),
    "swapped": (lambda w: k3(-w.d), False, "swapped"),
    "k1": (lambda w: w.d, False, "zero"),
    "k3 subtracted": (lambda w: -k3(w.d), False, "away"),
    "live ratio x k3 subtracted": (lambda w: -live_k3(w), False, "away"),
    "live ratio x k1": (lambda w: w.live * w.d, True, "reverse"),
    "exact, beside it": (exact_kl, None, ""),
    "k1 as a score": (score_k1, None, ""),
    "absolute log-ratio": (lambda w: w.d.abs(), None, ""),
    "klamp.kl_penalty": (lambda w: klamp.kl_penalty(w.logp, w.ref, w.mask), None, ""),
    "KL of the detached policy": (lambda w: k3(w.d.detach()), None, ""),
    "no KL": (lambda w: 0 * w.d.detach(), None, ""),
}
"""Name -> KL, the right `ok` (None: cannot tell), the class."""


def at_zero() -> Iterator[Case]:
    """Each beside three policy losses."""
    policies: dict[str, Callable[[World], Tensor]] = {
        "ppo": ppo,
        "reinforce": lambda w: -w.a * w.logp,
        "none": lambda w: torch.zeros_like(w.logp),
    }
    for policy_name, policy in policies.items():
        for name, (kl, ok, kind) in AT_ZERO.items():
            if policy_name == "none" and ok is None:
                continue
            extra = {"advantages": None} if policy_name == "none" else {}
            yield Case(
                f"{name}; {policy_name}",
                lambda w, p=policy, k=kl, e=extra: (w.token(p(w) + BETA * k(w)), e),
                kl=(kind,) if kind else (),
                ok=ok,
                beta=None,
            )
