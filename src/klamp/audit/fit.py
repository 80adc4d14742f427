"""Explains the gradient that a loss gives to each token as a policy loss and a KL. NumPy only.

    g_t = a w_t (-A_t s_t) + b u_t c(d_t)

w and u are means over trained tokens or over completions, s a policy loss and c a KL of `klamp.audit.forms`. Weighted
least squares fits a and b for each pair; a pair is accepted where the residual is rounding noise:

    sigma_t = 1.5 eps (|g_t| + median |g|) + 2 eps |b u_t|,    chi2 per token < 25

Simple explanations come first: a policy loss without a KL; a KL alone; both, under one mean; under two means; a policy
loss that some tokens do not carry; a KL that ends at a bound; last a free factor of each completion. The first stage
that accepts anything answers with all the pairs that it accepts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import NamedTuple, TypeAlias

import numpy as np

from klamp.audit.forms import FARTHEST, Array, Form, Tokens, advantage_forms, distinct, kl_forms, policy_forms

Mean: TypeAlias = str
MEANS: tuple[Mean, ...] = ("token", "sequence")

ACCEPTED = 25.0  # the largest residual per token, in units of the rounding noise, squared, that explains a gradient
CLOSE = 8.0  # forms are accepted beside the best one if their residual is within this factor of its own
MARGIN = 2.0  # how much larger than just visible a KL has to be before its absence is called so
BLOCK = 2**16  # numbers of the candidates' columns that are looked at in one pass
FREE_TOKENS = 8  # tokens beyond the number of free parameters that the fit with a factor of each completion needs


@dataclass(frozen=True, kw_only=True)
class Fit:
    """One explanation that was accepted, or the best one that was not."""

    policy: Form | None
    kl: Form | None
    a: float = 0.0
    b: float = 0.0
    chi2: float = np.inf
    w: Mean | None = None
    u: Mean | None = None
    b_error: float = 0.0  # how far b may be off because of rounding
    on: float = 1.0  # the share of tokens that carry the policy loss
    bounds: tuple[float, float] | None = None  # the log-ratios beyond which the KL has no gradient, or a constant one
    signs: tuple[int, int] = (0, 0)  # at stage `free`: the sign of the policy loss and of the KL


@dataclass(frozen=True, kw_only=True)
class Explanation:
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
    """Target and tokens of the fit, the indices that are fitted, the noise without a KL, and the candidates."""

    target: Array
    noise: Array
    tokens: Tokens
    used: Array
    policies: list[Form]
    kls: list[Form]
    weights: dict[Mean, Array]

    def column(self, form: Form, mean: Mean) -> Array:
        """The gradient that a form gives each token under a mean."""
        return form.values * self.weights[mean]

    def scaled(self, form: Form, mean: Mean) -> Array:
        """The same for the fitted tokens, in units of the noise."""
        return (self.column(form, mean) / self.noise)[self.used]

    def chi2(self, explained: Array | float, b_part: Array | float = 0.0) -> float:
        """The residual per token, in units of the noise, squared."""
        sigma = self.noise + 2 * self.tokens.eps * np.abs(b_part)
        residual = ((self.target - explained) / sigma)[self.used]
        return float(np.square(residual).sum() / max(self.used.size, 1))

    def slope(self, column: Array) -> float:
        x, y = (column / self.noise)[self.used], (self.target / self.noise)[self.used]
        return float(x @ y / max(x @ x, 1e-300))


def explain(tokens: Tokens, *, simple: bool = False) -> Explanation:
    """Find the simplest explanation of a gradient; `simple` leaves out a gate, a bound and a free factor."""
    part = np.zeros_like(tokens.gradient) if tokens.policy_part is None else tokens.policy_part
    size = np.abs(tokens.gradient) + np.abs(part)
    used = np.flatnonzero(np.abs(tokens.log_r) <= FARTHEST)
    looked_at = size[used] if used.size else size
    typical = max(float(np.median(looked_at)), 0.01 * float(np.sqrt(np.square(looked_at).mean())), 1e-100)
    weights = {mean: tokens.weights(mean) for mean in MEANS}
    policies = [] if tokens.policy_part is not None else policy_forms(tokens)
    noise = 1.5 * tokens.eps * (size + typical)
    problem = _Problem(tokens.gradient - part, noise, tokens, used, policies, kl_forms(tokens), weights)
    same = bool(np.abs(weights["token"] - weights["sequence"]).max() < 1e-10)
    means = MEANS[:1] if same else MEANS
    stages = _stages(problem, means, simple=simple)
    found, fits = next(((stage, kept) for stage, each in stages if (kept := _accepted(each))), ("unknown", []))
    if not fits:
        fits = sorted(_alone(problem, means), key=attrgetter("chi2"))[:1]
    seen = _visible(problem, fits, means)
    return Explanation(stage=found, fits=tuple(fits), b_seen=seen, same_means=same)


def _stages(problem: _Problem, means: tuple[Mean, ...], *, simple: bool) -> Iterator[tuple[str, Iterable[Fit]]]:
    """The fits of each stage, the simplest stage first; computed only as far as they are asked for."""
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
    found = sorted((fit for fit in fits if fit.chi2 < ACCEPTED), key=attrgetter("chi2"))
    return [fit for fit in found if fit.chi2 <= max(1.0, CLOSE * found[0].chi2)]


def _alone(problem: _Problem, means: tuple[Mean, ...]) -> Iterator[Fit]:
    """A policy loss without a KL; where there are no advantages, no gradient at all."""
    if not problem.policies:
        yield Fit(policy=None, kl=None, chi2=problem.chi2(0.0))
    for mean in means:
        for form in problem.policies:
            column = problem.column(form, mean)
            a = problem.slope(column)
            yield Fit(policy=form, kl=None, a=a, w=mean, chi2=problem.chi2(a * column))


def _pairs(problem: _Problem, means: list[tuple[Mean, Mean]]) -> Iterator[Fit]:
    """Each policy loss (or none) with each KL: all KLs of a policy loss in one pass, the likely ones refined."""
    used, kls = problem.used, problem.kls
    y, rows = (problem.target / problem.noise)[used], max(8, BLOCK // max(used.size, 1))
    for w, u in means if kls else ():
        plain = np.empty((len(kls), used.size))
        for row, form in zip(plain, kls, strict=True):
            row[:] = problem.scaled(form, u)
        for policy in problem.policies or [None]:
            x = None if policy is None else problem.scaled(policy, w)
            rest = y if x is None else _without(y, x)
            inside = [] if policy is None else advantage_forms(problem.tokens, policy)
            blocks = [plain[i : i + rows] for i in range(0, len(plain), rows)]
            blocks += [np.stack([problem.scaled(form, u) for form in inside])] if inside else []
            slopes = [_slopes(block, x, rest, problem.tokens.eps) for block in blocks]
            b, chi2, growth = (np.concatenate(each) for each in zip(*slopes, strict=True))
            hopeful = np.argsort(chi2)[: 6 if problem.policies else None]
            for i in (i for i in hopeful if chi2[i] < ACCEPTED * growth[i]):
                yield _refined(problem, policy, [*kls, *inside][i], (w, u), float(b[i]))


def _slopes(columns: Array, x: Array | None, rest: Array, eps: float) -> tuple[Array, Array, Array]:
    """Of each column, beside the policy loss x: its coefficient, its chi2, and by how much the noise grows with it."""
    left = columns if x is None else _without(columns, x)
    power, size = np.square(left).sum(1), np.square(columns).sum(1)
    known = power > 1e-14 * size
    b = np.where(known, left @ rest / np.where(known, power, 1), 0.0)
    chi2 = np.square(rest[None] - b[:, None] * left).sum(1) / rest.size
    # The noise grows with b, so a pair that looks poor at first may pass.
    growth = np.square(1 + 2 * eps * np.abs(b[:, None] * columns)).max(1)
    return b, chi2, np.where(known, growth, 0.0)


def _without(y: Array, x: Array) -> Array:
    return y - np.multiply.outer(y @ x, x) / max(x @ x, 1e-300) if y.ndim > 1 else y - (y @ x) / max(x @ x, 1e-300) * x


def _refined(problem: _Problem, policy: Form | None, kl: Form, means: tuple[Mean, Mean], b: float) -> Fit:
    """A pair fitted under the noise that its own KL brings along."""
    used, pull = problem.used, problem.column(kl, means[1])
    push = np.zeros_like(pull) if policy is None else problem.column(policy, means[0])
    a, error = 0.0, 0.0
    for _ in range(2):
        sigma = (problem.noise + 2 * problem.tokens.eps * np.abs(b * pull))[used]
        y, x, p = problem.target[used] / sigma, pull[used] / sigma, push[used] / sigma
        x_alone = _without(x, p)
        size = max(x_alone @ x_alone, 1e-300)
        b, error = float(x_alone @ y / size), float(np.sqrt(ACCEPTED * used.size / size))
        a = float(p @ (y - b * x) / max(p @ p, 1e-300))
    chi2 = problem.chi2(a * push + b * pull, b * pull)
    return Fit(policy=policy, kl=kl, a=a, b=b, w=means[0], u=means[1], b_error=error, chi2=chi2)


def _visible(problem: _Problem, fits: list[Fit], means: tuple[Mean, ...]) -> float:
    """The |b| from which on any reverse or forward KL would have stood out, beside the fitted policy loss."""
    plain = [form for form in problem.kls if form.kind in ("reverse", "forward") and not form.coupled][:4]
    seen = 0.0 if plain and fits else np.inf
    for column in (problem.scaled(form, mean) for form in plain for mean in means if fits):
        if fits[0].policy is not None and fits[0].w is not None:
            column = _without(column, problem.scaled(fits[0].policy, fits[0].w))  # noqa: PLW2901
        seen = max(seen, float(np.sqrt(ACCEPTED * problem.used.size / max(column @ column, 1e-300))))
    return MARGIN * seen


RARE = ("neither", "old", "squared")
BASES = ("1", "ratio", "sequence ratio", "whole ratio")


def _gated(problem: _Problem, means: list[tuple[Mean, Mean]]) -> Iterator[Fit]:
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
        fits = (_voted(problem, policy, kl, each, pairs, joint=joint) for each in means for kl, joint in choices)
        yield from (fit for fit in fits if fit is not None)


def _voted(
    problem: _Problem, policy: Form, kl: Form | None, means: tuple[Mean, Mean], pairs: Array, *, joint: bool
) -> Fit | None:
    """A gate that nearly all tokens agree with, for the a and b that one of the pairs of tokens proposes."""
    g, used, p, (i, j) = problem.target, problem.used, problem.column(policy, means[0]), pairs
    k = np.zeros_like(p) if kl is None else problem.column(kl, means[1])
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
    gated, on = policy._replace(factor=policy.factor * gate), float(gate[used].mean())
    if kl is None:
        push = problem.column(gated, means[0])
        slope = problem.slope(push)
        return Fit(policy=gated, kl=None, a=slope, w=means[0], chi2=problem.chi2(slope * push), on=on)
    pulled = kl._replace(factor=kl.factor * gate) if joint else kl
    return replace(_refined(problem, gated, pulled, means, float(b[best])), on=on)


def _bounded(problem: _Problem, means: list[tuple[Mean, Mean]]) -> Iterator[Fit]:
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
        push = 0.0 if fit.policy is None or fit.w is None else fit.a * problem.column(fit.policy, fit.w)
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


class AtZero(NamedTuple):
    """What the second and third derivative say where the policy is the reference."""

    first: float  # c' times the coefficient b
    ratio: float  # c'' / c'; NaN where c' is 0
    visible: bool  # whether `first` stands out of the rounding


def at_zero(t: Tokens, second: Array, third: Array, mean: Mean) -> AtZero | None:
    """Read c'(0) and c''(0) off the derivatives, beside the policy loss; None: the two cannot be told apart.

    A ratio gives -a A w to both derivatives, a fixed weight nothing. Any other policy loss (sapo) is fitted apart for
    positive and negative advantages, if they have values enough.
    """
    u = t.weights(mean)
    a = np.zeros_like(u) if t.advantage is None else t.advantage
    a = a * t.r
    for pushes in ([-a * u], [-a * u * (a > 0), -a * u * (a < 0)]):
        basis = np.stack([u, *(x for x in pushes if np.any(x))])
        if np.linalg.cond((basis / np.linalg.norm(basis, axis=1, keepdims=True)).T) > 1e4:
            return None
        (x, x_off), (y, y_off) = (_solved(basis, each) for each in (second, third))
        blur = 100 * t.eps * (np.abs(second).max() + np.abs(t.gradient).max()) + 1e-300
        plain = (
            len(basis) == 1 or abs(y[1] - x[1]) * np.abs(basis[1]).max() < blur + 0.02 * np.abs(x[1] * basis[1]).max()
        )
        tolerance = blur + 0.02 * abs(x[0]) * u.max()
        if max(x_off, y_off) < tolerance and (plain or len(basis) > 2):
            visible = bool(abs(x[0]) * u.max() > 3 * blur)
            return AtZero(float(x[0]), float(y[0] / x[0]) if visible else np.nan, visible)
    return None


def _solved(basis: Array, y: Array) -> tuple[Array, float]:
    coefficients = np.linalg.lstsq(basis.T, y, rcond=1e-12)[0]
    return coefficients, float(np.abs(y - coefficients @ basis).max())
