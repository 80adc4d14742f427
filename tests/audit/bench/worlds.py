"""Batches with known numbers, and the score of a verdict: what the benches of `klamp.check` share.

A world has logits as leaves, so that its log-probabilities, its exact KL and its entropy are those of distributions.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

import klamp
from klamp.audit.verdict import Verdict

BETA = 0.05


@dataclass(frozen=True)
class World:
    """One micro-batch. Shapes: B completions of at most T tokens, vocabulary V; two completions have no padding."""

    logits: Tensor
    """The policy's, a leaf, [B, T, V]."""
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
    names: tuple[str, ...] = ("ref", "old", "sampler", "advantages")
    """Which of the optional inputs are passed."""
    watched: Any = None

    @cached_property
    def logp(self) -> Tensor:
        """The policy's log-probabilities, not a leaf."""
        return pick(self.logits, self.ids)

    @cached_property
    def m(self) -> Tensor:
        """The mask as numbers."""
        return self.mask.to(self.logits.dtype)

    # log-ratios to the reference and to the old policy, the ratio, 1 with the gradient of log policy, advantages [B, 1]
    d = property(lambda self: self.logp - self.ref)
    log_r = property(lambda self: self.logp - self.old)
    r = property(lambda self: self.log_r.exp())
    live = property(lambda self: (self.logp - self.logp.detach()).exp())
    a = property(lambda self: self.advantages if self.advantages.ndim == 2 else self.advantages[:, None])

    def sums(self, x: Tensor) -> Tensor:
        """The sum of each completion."""
        return (x * self.m).sum(1)

    def each(self, x: Tensor) -> Tensor:
        """The mean of each completion."""
        return self.sums(x) / self.m.sum(1)

    def token(self, x: Tensor) -> Tensor:
        """The mean over trained tokens."""
        return (x * self.m).sum() / self.m.sum()

    def sequence(self, x: Tensor) -> Tensor:
        """The mean of each completion's mean."""
        return self.each(x).mean()

    def arguments(self) -> dict[str, Any]:
        """What is passed to `klamp.check` beside the loss."""
        known = {
            "ref_logprobs": self.ref,
            "old_logprobs": self.old,
            "sampler_logprobs": self.sampler,
            "advantages": self.advantages,
        }
        left_out = {"ref", "old", "sampler", "advantages"} - set(self.names)
        passed = {k: x for k, x in known.items() if k.removesuffix("_logprobs") not in left_out}
        return {"policy_logprobs": self.logp, "mask": self.mask, "watched": self.watched, **passed}

    def watch(self) -> World:
        """The same batch, with recording tensors."""
        w = klamp.watch(ref_logprobs=self.ref, advantages=self.advantages)
        assert w.ref_logprobs is not None and w.advantages is not None
        return replace(self, ref=w.ref_logprobs, advantages=w.advantages, watched=w)


def pick(logits: Tensor, ids: Tensor) -> Tensor:
    """Log-probabilities of the tokens."""
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

    Args:
        seed: of all its numbers.
        shape: B and T.
        drift: spread of the reference's logits around the policy's.
        lag: spread of the old policy's logits around the policy's; 0: the policy itself.
        group: completions per prompt.
        scaled: divide the advantages by the deviation of their prompt.
        dtype: of the log-probabilities.
        longest: all completions have T tokens.
    """
    g = torch.Generator().manual_seed(seed)
    rows, width = shape
    wide = torch.float64
    logits = 1.5 * torch.randn(rows, width, 20, generator=g, dtype=wide)
    ref_logits = logits + drift * torch.randn(logits.shape, generator=g, dtype=wide)
    old_logits = logits + lag * torch.randn(logits.shape, generator=g, dtype=wide)
    drawn = torch.multinomial(old_logits.softmax(-1).flatten(0, 1), 1, generator=g).reshape(rows, width)
    lengths = torch.randint(width // 3, width + 1, (rows,), generator=g)
    lengths[:2] = width
    mask = torch.arange(width)[None] < (torch.full_like(lengths, width) if longest else lengths)[:, None]
    rewards = torch.rand(rows, generator=g, dtype=wide)
    groups = rewards.reshape(-1, group)
    centred = groups - groups.mean(1, keepdim=True)
    advantages = (centred / (groups.std(1, keepdim=True) + 1e-4) if scaled else centred).flatten()
    leaf = logits.to(dtype).requires_grad_()
    exact = leaf.detach().to(wide)
    old = pick(exact if lag == 0 else old_logits, drawn)
    sampler = old + 0.02 * torch.randn(old.shape, generator=g, dtype=wide)
    return World(
        logits=leaf,
        ref_logits=(exact if drift == 0 else ref_logits).to(dtype),
        old_logits=old_logits.to(dtype),
        ids=drawn,
        mask=mask,
        advantages=advantages.to(dtype),
        rewards=rewards.to(dtype),
        group=group,
        ref=pick(leaf.detach() if drift == 0 else ref_logits.to(dtype), drawn),
        old=pick(leaf.detach(), drawn) if lag == 0 else old.to(dtype),
        sampler=sampler.clamp(max=0).to(dtype),
    )


def three_worlds() -> list[World]:
    """Near, off-policy with another length, and far on-policy with many short completions."""
    return [
        make_world(1),
        make_world(2, shape=(6, 24), drift=0.12, lag=0.3, group=3, scaled=False),
        make_world(3, shape=(16, 9), drift=0.7, lag=0, group=4),
    ]


Loss = Callable[[World], Any]  # a loss, or a loss and what else is passed


class Case(NamedTuple):
    """A loss and what is right about it.

    Attributes:
        name: in words.
        loss: from a world to the loss, and what else is passed.
        kl: the accepted classes; () if the class is not judged.
        ok: whether it is sound; None: one micro-batch cannot show it, and the verdict has to say so.
        codes: one of these codes is among the wrong findings of a faulty loss.
        beta: the coefficient that acts, if one is stated; None: not judged.
        surrogate: the base name of the policy loss, part of the one that is stated.
        mean: token or sequence, if one is stated.
    """

    name: str
    loss: Loss
    kl: tuple[str, ...] = ("reverse",)
    ok: bool | None = True
    codes: tuple[str, ...] = ()
    beta: float | None = BETA
    surrogate: str = ""
    mean: str = ""


@dataclass
class Score:
    """The verdicts of a bench by their worth: right, cannot tell, wrong name, accused."""

    title: str
    rows: list[tuple[str, str, Verdict]] = field(default_factory=list)

    def add(self, name: str, worth: str, verdict: Verdict) -> str:
        """Take up one verdict."""
        self.rows.append((name, worth, verdict))
        return worth

    @property
    def counts(self) -> Counter[str]:
        """How many verdicts have each worth."""
        return Counter(worth for _, worth, _ in self.rows)

    def share(self, worth: str = "right") -> float:
        """The share of the verdicts that have this worth."""
        return self.counts[worth] / max(len(self.rows), 1)

    def __str__(self) -> str:
        bad = [f"\n--- {worth}: {name}\n{verdict}" for name, worth, verdict in self.rows if worth != "right"]
        return f"{self.title}: {len(self.rows)} cases, {dict(self.counts)}" + "".join(bad)


def verdict_of(case: Case, world: World, **more: Any) -> Verdict:
    """`klamp.check` on a case in a world."""
    made = case.loss(world)
    loss, extra = made if isinstance(made, tuple) else (made, {})
    arguments = {"beta": BETA, **world.arguments(), **extra, **more}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return klamp.check(loss, once=False, **arguments)


def worth_of(case: Case, verdict: Verdict) -> str:
    """Whether a verdict is right about a case; "cannot tell" about a faulty loss is a miss like any other."""
    if case.ok is not False and verdict.ok is False:
        return "accused"
    if case.ok is None:
        return "right" if verdict.ok is None else "wrong name"
    if verdict.ok is None:
        return "cannot tell"
    if verdict.ok is not case.ok:
        return "wrong name"
    if case.codes and not set(case.codes) & set(verdict.codes("wrong")):
        return "wrong name"
    if case.kl and (verdict.kl or "none") not in case.kl:
        return "wrong name"
    if case.beta is not None and verdict.beta is not None and abs(verdict.beta / case.beta - 1) > 0.02:
        return "wrong name"
    if case.surrogate and verdict.surrogate and case.surrogate not in verdict.surrogate:
        return "wrong name"
    if case.mean and verdict.mean and case.mean not in verdict.mean:
        return "wrong name"
    return "right"


def run(title: str, cases: Iterable[Case], worlds: Iterable[World], **more: Any) -> Score:
    """All cases in all worlds."""
    score = Score(title)
    worlds = list(worlds)
    for case in cases:
        for number, world in enumerate(worlds):
            verdict = verdict_of(case, world, **more)
            score.add(f"{case.name} [world {number}]", worth_of(case, verdict), verdict)
    return score
