"""Batches with known numbers, and the score of a verdict: what the benches of `klamp.check` share."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

import klamp
from klamp.audit.verdict import Verdict

BETA = 0.05


@dataclass(frozen=True)
class World:
    """One micro-batch: B completions of at most T tokens, of which the first two have no padding; vocabulary V."""

    logits: Tensor
    ref_logits: Tensor
    old_logits: Tensor
    ids: Tensor
    mask: Tensor
    advantages: Tensor
    rewards: Tensor
    group: int
    ref: Tensor
    old: Tensor
    sampler: Tensor
    watched: Any = None

    @cached_property
    def logp(self) -> Tensor:
        return pick(self.logits, self.ids)

    # mask as numbers, log-ratios to the reference and to the old policy, the ratio, 1 with the gradient of log policy
    m = property(lambda self: self.mask.to(self.logits.dtype))
    d = property(lambda self: self.logp - self.ref)
    log_r = property(lambda self: self.logp - self.old)
    r = property(lambda self: self.log_r.exp())
    live = property(lambda self: (self.logp - self.logp.detach()).exp())
    a = property(lambda self: self.advantages if self.advantages.ndim == 2 else self.advantages[:, None])
    places = property(lambda self: torch.arange(self.ids.shape[1]).to(self.logits))

    def sums(self, x: Tensor) -> Tensor:
        return (x * self.m).sum(1)

    def each(self, x: Tensor) -> Tensor:
        return self.sums(x) / self.m.sum(1)

    def token(self, x: Tensor) -> Tensor:
        return (x * self.m).sum() / self.m.sum()

    def sequence(self, x: Tensor) -> Tensor:
        return self.each(x).mean()

    def passed(self) -> dict[str, Any]:
        given = {"policy_logprobs": self.logp, "mask": self.mask, "watched": self.watched, "ref_logprobs": self.ref}
        return given | {"old_logprobs": self.old, "sampler_logprobs": self.sampler, "advantages": self.advantages}

    def logits_passed(self) -> dict[str, Any]:
        """What shows a KL beside the log-probabilities."""
        return {"logits": self.logits, "ref_logits": self.ref_logits, "ids": self.ids}

    def teacher_passed(self, **more: Any) -> dict[str, Any]:
        """What is passed beside a distillation loss on logits, and nothing else."""
        given = {"logits": self.logits, "teacher_logits": self.ref_logits, "mask": self.mask, "ids": self.ids}
        return dict.fromkeys((*self.passed(), "beta")) | given | more

    def watch(self) -> World:
        w = klamp.watch(ref_logprobs=self.ref, advantages=self.advantages)
        assert w.ref_logprobs is not None and w.advantages is not None
        return replace(self, ref=w.ref_logprobs, advantages=w.advantages, watched=w)

    def of(self, logp: Tensor, **more: Any) -> World:
        world = replace(self, **more)
        world.__dict__["logp"] = logp
        return world


def pick(logits: Tensor, ids: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]


def make_world(
    seed: int = 0,
    *,
    shape: tuple[int, int] = (8, 14),
    drift: float = 0.3,
    lag: float = 0.1,
    group: int = 4,
    scaled: bool = True,
    dtype: torch.dtype = torch.float32,
    longest: bool = False,
) -> World:
    """A batch from a seed.

    `drift` and `lag` are the spreads of the reference's and the old policy's logits around the policy's; 0: the same.
    `scaled`: advantages are divided by the deviation of their prompt. `longest`: all completions have T tokens.
    """
    g, wide = torch.Generator().manual_seed(seed), torch.float64
    rows, width = shape
    logits = 1.5 * torch.randn(rows, width, 20, generator=g, dtype=wide)
    ref_logits, old_logits = (logits + x * torch.randn(logits.shape, generator=g, dtype=wide) for x in (drift, lag))
    ids = torch.multinomial(old_logits.softmax(-1).flatten(0, 1), 1, generator=g).reshape(rows, width)
    lengths = torch.randint(width // 3, width + 1, (rows,), generator=g)
    lengths[: rows if longest else 2] = width
    rewards = torch.rand(rows, generator=g, dtype=wide)
    groups = rewards.reshape(-1, group)
    centred = groups - groups.mean(1, keepdim=True)
    advantages = (centred / (groups.std(1, keepdim=True) + 1e-4) if scaled else centred).flatten()
    leaf = logits.to(dtype).requires_grad_()
    ref_logits = ref_logits.to(dtype) if drift else leaf.detach()
    old = pick(old_logits if lag else leaf.detach().to(wide), ids)
    sampler = (old + 0.02 * torch.randn(old.shape, generator=g, dtype=wide)).clamp(max=0).to(dtype)
    mask, ref = torch.arange(width)[None] < lengths[:, None], pick(ref_logits, ids)
    old = old.to(dtype) if lag else pick(leaf.detach(), ids)
    numbers = (leaf, ref_logits, old_logits.to(dtype), ids, mask, advantages.to(dtype), rewards.to(dtype))
    return World(*numbers, group, ref, old, sampler)


def three_worlds() -> list[World]:
    """Near, off-policy with another length, and far on-policy with many short completions."""
    second = make_world(2, shape=(6, 24), drift=0.12, lag=0.3, group=3, scaled=False)
    return [make_world(1), second, make_world(3, shape=(16, 9), drift=0.7, lag=0, group=4)]


class Case(NamedTuple):
    """A loss and what is right about it: a verdict need not state beta, surrogate and mean, but not others."""

    name: str
    loss: Callable[[World], Any]  # the loss, or the loss and what else is passed
    kl: tuple[str, ...] = ("reverse",)  # the accepted classes; () if the class is not judged
    ok: bool | None = True  # None: one micro-batch cannot show it, and the verdict has to say so
    codes: tuple[str, ...] = ()  # one of these is among the findings; of a faulty loss, among those called wrong
    beta: float | None = BETA  # the coefficient that acts; None: not judged
    surrogate: str = ""  # part of the policy loss's name
    mean: str = ""


def wrong(name: str, loss: Callable[[World], Any], codes: str, kl: str = "") -> Case:
    """A faulty loss; codes and classes are separated by spaces."""
    return Case(name, loss, tuple(kl.replace("_", " ").split()), ok=False, codes=tuple(codes.split()), beta=None)


def made_cases(made: dict[str, Any], **right: Any) -> list[Case]:
    return [Case(name, lambda _, x=loss: x, **right) for name, loss in made.items()]


def verdict_of(case: Case, world: World, **more: Any) -> Verdict:
    made = case.loss(world)
    loss, extra = made if isinstance(made, tuple) else (made, {})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return klamp.check(loss, once=False, **{"beta": BETA, **world.passed(), **extra, **more})


def worth_of(case: Case, verdict: Verdict) -> str:
    """Whether a verdict is right about a case; "cannot tell" about a faulty loss is a miss like any other."""
    if case.ok is not False and verdict.ok is False:
        return "accused"
    if case.ok is None:
        return "right" if verdict.ok is None else "wrong name"
    if verdict.ok is None:
        return "cannot tell"
    right = verdict.ok is case.ok
    right &= not case.codes or bool(set(case.codes) & set(verdict.codes(*["wrong"] if case.ok is False else [])))
    right &= not case.kl or (verdict.kl or "none") in case.kl
    right &= case.beta is None or verdict.beta is None or abs(verdict.beta / case.beta - 1) <= 0.02
    right &= case.surrogate in (verdict.surrogate or case.surrogate) and case.mean in (verdict.mean or case.mean)
    return "right" if right else "wrong name"


class Score:
    """The verdicts of a bench by their worth: right, cannot tell, wrong name, accused."""

    def __init__(self, pairs: Iterable[tuple[Case, World]] = (), **more: Any) -> None:
        self.rows: list[tuple[str, str, Verdict]] = []
        for case, world in pairs:
            verdict = verdict_of(case, world, **more)
            self.rows.append((worth_of(case, verdict), case.name, verdict))

    def demand(self, share: float = 0.0, *, misnamed: bool = True) -> None:
        """None is accused, or none misnamed either, and a share is named right."""
        counts = Counter(worth for worth, *_ in self.rows)
        bad = "".join(f"\n--- {worth}: {name}\n{verdict}" for worth, name, verdict in self.rows if worth != "right")
        assert counts["accused"] == 0 and (misnamed or counts["wrong name"] == 0), f"{counts}{bad}"
        assert self.rows and counts["right"] >= share * len(self.rows), f"{counts}{bad}"
