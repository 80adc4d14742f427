"""Explains the gradient that a loss gives to each token as a policy loss and a KL. NumPy only.

    g_t = a w_t (-A_t s_t) + b u_t c(d_t)

w and u are means over trained tokens or over completions, s a policy loss and c a KL of `klamp.audit.forms`. Weighted
least squares fits a and b for each pair; a pair is accepted where the residual is rounding noise:

    sigma_t = 1.5 eps (|g_t| + median |g|) + 2 eps |b u_t|,    chi2 per token < 25

Simple explanations come first, from a policy loss without a KL to a free factor of each completion (`_stages`). The
first stage that accepts anything answers with all the pairs that it accepts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from klamp.audit.capture import Array, Tokens
from klamp.audit.forms import FARTHEST, Form, advantage_forms, distinct, kl_forms, policy_forms

MEANS = ("token", "sequence")

ACCEPTED = 25.0  # the largest residual per token, in units of the rounding noise, squared, that explains a gradient
CLOSE = 8.0  # forms are accepted beside the best one if their residual is within this factor of its own
BLOCK = 2**16  # numbers of the candidates' columns that are looked at in one pass
MARGIN = 2.0  # how much larger than just visible a KL has to be before its absence is called so
FREE_TOKENS = 8  # tokens beyond the number of free parameters that the fit with a factor of each completion needs


@dataclass(frozen=True, kw_only=True)
class Fit:
    """One explanation that was accepted, or the best one that was not."""

    policy: Form | None
    kl: Form | None
    a: float = 0.0
    b: float = 0.0
    chi2: float = np.inf
    w: str | None = None
    u: str | None = None
    b_error: float = 0.0  # how far b may be off because of rounding
    on: float = 1.0  # the share of tokens that carry the policy loss
    bounds: tuple[float, float] | None = None  # the log-ratios beyond which the KL has no gradient, or a constant one
    signs: tuple[int, int] = (0, 0)  # at stage `free`: the sign of the policy loss and of the KL


@dataclass(frozen=True, kw_only=True)
class Decomposition:
    """What a gradient is made of."""

    stage: str
    fits: tuple[Fit, ...]  # the accepted ones, the best first; at stage `unknown` the best of the others, if any
    b_seen: float = np.inf  # the smallest |b| that would have stood out of the rounding
    same_means: bool = False  # whether the two means are one on this batch: completions of one length, or a single one

    @property
    def best(self) -> Fit | None:
        """The best one; None: nothing was accepted."""
        return self.fits[0] if self.fits and self.stage != "unknown" else None

    @property
    def kinds(self) -> tuple[str, ...]:
        """The classes of KL that the accepted fits leave open; a rare one only where no common one is among them."""
        kinds = tuple(dict.fromkeys(kind for fit in self.fits if fit.kl is not None for kind in fit.kl.kinds))
        return tuple(kind for kind in kinds if kind not in RARE) or kinds


class _Problem(NamedTuple):
    """The gradient to explain and the candidates."""

    target: Array
    noise: Array  # without a KL's noise
    tokens: Tokens
    used: Array  # the indices that are fitted
    policies: list[Form]
    kls: list[Form]
    weights: dict[str | None, Array]

    def column(self, form: Form | None, mean: str | None) -> Array:
        """The gradient that a form gives each token under a mean."""
        return np.zeros_like(self.target) if form is None else form.values * self.weights[mean]

    def scaled(self, x: Array) -> Array:
        """A gradient of the fitted tokens, in units of the noise."""
        return (x / self.noise)[self.used]


def explain(tokens: Tokens, *, simple: bool = False) -> Decomposition:
    """Find the simplest explanation of a gradient; `simple` leaves out a gate, a bound and a free factor."""
    part = np.zeros_like(tokens.gradient) if tokens.policy_part is None else tokens.policy_part
    size = np.abs(tokens.gradient) + np.abs(part)
    used = np.flatnonzero(np.abs(tokens.log_r) <= FARTHEST)
    near = size[used] if used.size else size
    typical = max(float(np.median(near)), 0.01 * float(np.sqrt(np.square(near).mean())), 1e-100)
    noise = 1.5 * tokens.eps * (size + typical)
    weights: dict[str | None, Array] = {mean: tokens.weights(mean) for mean in MEANS}
    policies = [] if tokens.policy_part is not None else policy_forms(tokens)
    problem = _Problem(tokens.gradient - part, noise, tokens, used, policies, kl_forms(tokens), weights)
    same = bool(np.abs(weights["token"] - weights["sequence"]).max() < 1e-10)
    means = MEANS[:1] if same else MEANS
    accepted = ((stage, _accepted(fits)) for stage, fits in _stages(problem, means, simple=simple))
    stage, fits = next(((stage, fits) for stage, fits in accepted if fits), ("unknown", []))
    fits = fits or sorted(_alone(problem, means), key=attrgetter("chi2"))[:1]
    return Decomposition(stage=stage, fits=tuple(fits), b_seen=_visible(problem, fits, means), same_means=same)


def _stages(problem: _Problem, means: tuple[str, ...], *, simple: bool) -> Iterator[tuple[str, Iterable[Fit]]]:
    """The fits of each stage, the simplest stage first; computed lazily."""
    same, crossed = [(x, x) for x in means], [(w, u) for w in means for u in means if w != u]
    yield "no KL", _alone(problem, means)
    if problem.policies:
        yield "KL alone", _pairs(problem._replace(policies=[]), same)
    yield "one mean", _pairs(problem, same)
    if problem.policies and crossed:
        yield "two means", _pairs(problem, crossed)
    if not simple:
        yield "gated", _gated(problem, [*same, *crossed])
        yield "bounded", _bounded(problem, [*same, *crossed])
        yield "free", _free(problem)


def _accepted(fits: Iterable[Fit]) -> list[Fit]:
    good = sorted((fit for fit in fits if fit.chi2 < ACCEPTED), key=attrgetter("chi2"))
    return [fit for fit in good if fit.chi2 <= max(1.0, CLOSE * good[0].chi2)]


def _alone(problem: _Problem, means: tuple[str, ...]) -> list[Fit]:
    """A policy loss without a KL; without advantages, no gradient at all."""
    pairs = [*product(means, problem.policies)] or [(None, None)]
    return [_refined(problem, form, None, (mean, None)) for mean, form in pairs]


def _pairs(problem: _Problem, means: list[tuple[str, str]]) -> Iterator[Fit]:
    """Each policy loss (or none) with each KL: all KLs of a policy loss in one pass, the likely ones refined."""
    y, rows = problem.scaled(problem.target), max(8, BLOCK // max(problem.used.size, 1))
    for w, u in means if problem.kls else ():
        plain = np.stack([problem.scaled(problem.column(form, u)) for form in problem.kls])
        for policy in problem.policies or [None]:
            x = None if policy is None else problem.scaled(problem.column(policy, w))
            rest = y if x is None else _without(y, x)
            inside = [] if policy is None else advantage_forms(problem.tokens, policy)
            blocks = [plain[i : i + rows] for i in range(0, len(plain), rows)]
            blocks += [np.stack([problem.scaled(problem.column(form, u)) for form in inside])] if inside else []
            slopes = [_slopes(block, x, rest, problem.tokens.eps) for block in blocks]
            b, chi2, growth = (np.concatenate(parts) for parts in zip(*slopes, strict=True))
            hopeful = np.argsort(chi2)[: 6 if problem.policies else None]
            for i in (i for i in hopeful if chi2[i] < ACCEPTED * growth[i]):
                yield _refined(problem, policy, [*problem.kls, *inside][i], (w, u), float(b[i]))


def _slopes(columns: Array, x: Array | None, rest: Array, eps: float) -> tuple[Array, Array, Array]:
    """Of each column, beside the policy loss x: its coefficient, its chi2, and by how much the noise grows with it."""
    left = columns if x is None else _without(columns, x)
    power, size = np.square(left).sum(1), np.square(columns).sum(1)
    apart = power > 1e-14 * size
    b = np.where(apart, left @ rest / np.where(apart, power, 1), 0.0)
    chi2 = np.square(rest[None] - b[:, None] * left).sum(1) / rest.size
    # The noise grows with b, so a pair that looks poor at first may pass.
    growth = np.square(1 + 2 * eps * np.abs(b[:, None] * columns)).max(1)
    return b, chi2, np.where(apart, growth, 0.0)


def _without(y: Array, x: Array) -> Array:
    return y - np.multiply.outer(y @ x, x) / max(x @ x, 1e-300)


def _refined(
    problem: _Problem, policy: Form | None, kl: Form | None, means: tuple[str | None, str | None], b: float = 0.0
) -> Fit:
    """A pair fitted under the noise that its own KL brings along."""
    used, push, pull = problem.used, problem.column(policy, means[0]), problem.column(kl, means[1])
    sigma, a, error = problem.noise + 2 * problem.tokens.eps * np.abs(b * pull), 0.0, 0.0
    for _ in range(1 if kl is None else 2):
        y, x, p = ((column / sigma)[used] for column in (problem.target, pull, push))
        x_alone = _without(x, p)
        size = max(x_alone @ x_alone, 1e-300)
        b, error = float(x_alone @ y / size), float(np.sqrt(ACCEPTED * used.size / size))
        a = float(p @ (y - b * x) / max(p @ p, 1e-300))
        sigma = problem.noise + 2 * problem.tokens.eps * np.abs(b * pull)
    chi2 = np.square(((problem.target - a * push - b * pull) / sigma)[used]).sum() / max(used.size, 1)
    return Fit(policy=policy, kl=kl, a=a, b=b, w=means[0], u=means[1], b_error=error, chi2=float(chi2))


def _visible(problem: _Problem, fits: list[Fit], means: tuple[str, ...]) -> float:
    """The |b| from which on any reverse or forward KL would have stood out, beside the fitted policy loss."""
    plain = [form for form in problem.kls if form.kind in ("reverse", "forward") and not form.coupled][:4]
    if not plain or not fits:
        return np.inf
    push = problem.scaled(problem.column(fits[0].policy, fits[0].w))
    alone = [_without(problem.scaled(problem.column(form, mean)), push) for form in plain for mean in means]
    return MARGIN * max(float(np.sqrt(ACCEPTED * problem.used.size / max(x @ x, 1e-300))) for x in alone)


RARE = ("neither", "old", "squared")
BASES = ("plain policy loss", "ratio", "sequence ratio", "whole ratio")


def _gated(problem: _Problem, means: list[tuple[str, str]]) -> Iterator[Fit]:
    """A policy loss that some tokens do not carry: a clip, a mask. Pairs of tokens propose a and b, the rest votes."""
    used = problem.used
    if used.size < 12:
        return
    used = used[:: max(1, used.size // 512)]
    problem = problem._replace(used=used)
    order = used[np.argsort(np.abs(problem.tokens.log_r[used]), kind="stable")]
    pick = order[np.linspace(0, used.size - 1, min(used.size, 16)).astype(int)]
    pairs = np.stack([pick[i] for i in np.triu_indices(pick.size, 1)])
    plain = [form for form in problem.kls if form.kind not in RARE and "sampler" not in form.name]
    bases = [x for x in problem.policies if x.name.partition(" x ")[0] in BASES and not re.search("min|up to", x.name)]
    for policy in bases:
        choices = [(None, False), *((kl, joint) for kl in plain for joint in (False, True))]
        choices += [(kl, True) for kl in advantage_forms(problem.tokens, policy)]
        fits = (_voted(problem, policy, kl, pair, pairs, joint=joint) for pair in means for kl, joint in choices)
        yield from (fit for fit in fits if fit is not None)


def _voted(
    problem: _Problem, policy: Form, kl: Form | None, means: tuple[str, str], pairs: Array, *, joint: bool
) -> Fit | None:
    """A gate that nearly all tokens agree with, for the a and b that one of the pairs of tokens proposes."""
    g, used, (i, j) = problem.target, problem.used, pairs
    p, k = problem.column(policy, means[0]), problem.column(kl, means[1])
    if kl is None:
        a, b = np.divide(g[i], p[i], out=np.zeros_like(p[i]), where=p[i] != 0), np.zeros(i.size)
    else:
        det = p[i] * k[j] - p[j] * k[i]
        det = np.where(np.abs(det) > 1e-9 * np.abs(p[i] * k[j]), det, np.inf)
        a, b = (g[i] * k[j] - g[j] * k[i]) / det, (p[i] * g[j] - p[j] * g[i]) / det
    pull = b[:, None] * k[used]
    sigma = 20 * problem.noise[used] + 40 * problem.tokens.eps * np.abs(pull)
    carries = np.abs(g[used] - a[:, None] * p[used] - pull) < sigma
    votes = carries | (np.abs(g[used] - (0.0 if joint else pull)) < sigma)
    best = int(np.where(carries.mean(1) > 0.1, votes.mean(1) + 1e-3 * carries.mean(1), 0).argmax())
    if votes[best].mean() < 0.98 or carries[best].sum() < 8 or not np.isfinite(a[best]):
        return None
    gate = np.zeros_like(p)
    gate[used] = carries[best]
    gated = policy._replace(factor=policy.factor * gate)
    pulled = kl._replace(factor=kl.factor * gate) if kl is not None and joint else kl
    fit = _refined(problem, gated, pulled, (means[0], None if kl is None else means[1]), float(b[best]))
    return replace(fit, on=float(gate[used].mean()))


def _bounded(problem: _Problem, means: list[tuple[str, str]]) -> Iterator[Fit]:
    """A KL that has no gradient, or a constant one, beyond some log-ratio: fitted near the reference, then extended."""
    t, used = problem.tokens, problem.used
    if t.ref is None or used.size < 16:
        return
    far, plain = np.abs(t.d), [x for x in problem.kls if not x.coupled and x.kind not in RARE]
    shares = [share for share in (0.5, 0.25, 0.1) if share * used.size >= 7]
    inner = [problem._replace(used=used[far[used] <= np.quantile(far[used], x)], kls=plain) for x in shares]
    for fit in (fit for near in inner for fit in sorted(_pairs(near, means), key=attrgetter("chi2"))):
        if fit.chi2 >= ACCEPTED or fit.kl is None or fit.u is None:
            continue
        push = fit.a * problem.column(fit.policy, fit.w)
        unit, c = fit.b * problem.weights[fit.u], fit.kl.values
        pull = np.divide(problem.target - push, unit, out=np.zeros_like(unit), where=unit != 0)
        sigma = 20 * problem.noise + 40 * t.eps * np.abs(unit * c)
        alive = np.abs(unit * (pull - c)) < sigma
        low, high = (side * (side * t.d[used[alive[used]]]).max(initial=0.0) for side in (-1, 1))
        beyond = (t.d < low) | (t.d > high)
        if beyond[used].sum() < 2 or not alive[used][~beyond[used]].all():
            continue
        held = np.zeros_like(c)  # what the coefficient keeps beyond its bound, on each side
        for side in (x & beyond for x in (t.d < 0, t.d > 0)):
            held[side] = np.median(pull[side]) if side.any() else 0.0
        cut = np.where(beyond, np.where(np.abs(unit * pull) < sigma, 0.0, held), c)
        whole = _refined(problem, fit.policy, fit.kl._replace(factor=cut), (fit.w or "token", fit.u), fit.b)
        yield replace(whole, bounds=(float(low), float(high)))


def _free(problem: _Problem) -> Iterator[Fit]:
    """A free factor of each completion: names a KL by its course within completions, never by its size."""
    t, used = problem.tokens, problem.used
    usable = np.bincount(t.row[used], minlength=t.lengths.size) >= 4
    keep = used[usable[t.row[used]]]
    spare = keep.size - 2 * int(usable.sum())
    if spare < max(FREE_TOKENS, keep.size // 3) or keep.size < 0.7 * used.size:
        return
    push = -np.ones_like(t.policy) if t.advantage is None else -t.advantage
    bases = [np.zeros_like(push)] if t.policy_part is not None else [push, push * t.r]
    forms = [form for form in problem.kls if not form.coupled and form.kind not in ("zero", "old")]
    if t.policy_part is None and np.allclose(t.r, 1):  # a constant of each completion is the policy loss's
        courses = distinct(form._replace(factor=form.factor - t.average(form.factor)) for form in forms)
        forms = [form._replace(kinds=x.kinds) for x in courses for form in forms if form.name == x.name]
    for form in forms:
        for base in bases[: 1 if np.allclose(t.r, 1) else 2]:
            if (fit := _by_row(problem, form, base, keep, spare)) is not None:
                yield fit


def _by_row(problem: _Problem, kl: Form, base: Array, keep: Array, spare: int) -> Fit | None:
    t, total = problem.tokens, 0.0
    signs: list[set[int]] = [set(), set()]
    for row in np.unique(t.row[keep]):
        index = keep[t.row[keep] == row]
        y, sigma = problem.target[index], problem.noise[index]
        basis = np.stack([x for x in (base[index], kl.values[index]) if np.any(x)])
        x, cover = np.zeros(len(basis)), np.zeros(len(basis))
        for _ in range(2):
            scaled = (basis / sigma).T
            x = np.linalg.lstsq(scaled, y / sigma, rcond=1e-12)[0]
            cover = np.sqrt(ACCEPTED * np.diag(np.linalg.pinv(scaled.T @ scaled)) * index.size)
            sigma = problem.noise[index] + 2 * t.eps * np.abs(x[-1] * kl.values[index])
        total += float(np.square((y - x @ basis) / sigma).sum())
        if np.ptp(kl.values[index]) > 1e-6 * np.abs(kl.values[index]).max():
            for side, i in ((0, 0), (1, -1)):
                if abs(x[i]) > cover[i] and (side or len(basis) > 1):
                    signs[side].add(int(np.sign(x[i])))
    if total / spare >= ACCEPTED or len(signs[1]) != 1:
        return None
    push = signs[0].pop() if len(signs[0]) == 1 else 0
    return Fit(policy=None, kl=kl, chi2=total / spare, signs=(push, signs[1].pop()))


def at_zero(t: Tokens, mean: str) -> tuple[float, float] | None:
    """What the derivatives say where the policy is the reference: b c'(0), and c''(0) / c'(0), NaN if c'(0) is 0.

    None: they do not tell a KL from the policy loss beside it. A ratio gives -a A w to both derivatives, a fixed weight
    nothing. Any other policy loss (sapo) is fitted apart for positive and negative advantages.
    """
    if t.second is None or t.third is None:
        return None
    u, a = t.weights(mean), np.zeros_like(t.policy) if t.advantage is None else t.advantage * t.r
    targets = np.stack([t.second, t.third], axis=1)
    for pushes in ([-a * u], [-a * u * (a > 0), -a * u * (a < 0)]):
        basis = np.stack([u, *(x for x in pushes if np.any(x))], axis=1)
        if np.linalg.cond(basis / np.linalg.norm(basis, axis=0)) > 1e4:
            return None
        solved = np.linalg.lstsq(basis, targets, rcond=1e-12)[0]
        (first, second), off = solved[0], np.abs(targets - basis @ solved).max()
        blur = 100 * t.eps * (np.abs(t.second).max() + np.abs(t.gradient).max()) + 1e-300
        push = np.zeros(2) if len(solved) == 1 else solved[1] * np.abs(basis[:, 1]).max()
        plain = len(solved) == 1 or abs(push[1] - push[0]) < blur + 0.02 * abs(push[0])
        if off < blur + 0.02 * abs(first) * u.max() and (plain or len(solved) > 2):
            return float(first), float(second / first) if abs(first) * u.max() > 3 * blur else np.nan
    return None
