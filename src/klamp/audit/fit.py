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
from typing import NamedTuple, TypeAlias

import numpy as np

from klamp.audit.forms import FARTHEST, Array, Form, Tokens, advantage_forms, distinct, kl_forms, policy_forms

Stage: TypeAlias = str
Mean: TypeAlias = str
MEANS: tuple[Mean, ...] = ("token", "sequence")

ACCEPTED = 25.0
"""The largest residual per token, in units of the rounding noise, squared, that explains a gradient."""
CLOSE = 8.0
"""Forms are accepted beside the best one if their residual is within this factor of its own."""
MARGIN = 2.0
"""How much larger than just visible a KL has to be before its absence is called so."""
FREE_TOKENS = 8
"""Tokens beyond the number of free parameters that the fit with a factor of each completion needs."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """One explanation that was accepted, or the best one that was not.

    Attributes:
        b_error: How far b may be off because of rounding.
        on: The share of tokens that carry the policy loss.
        bounds: The log-ratios beyond which the KL has no gradient, or a constant one.
        signs: In the fit with a factor of each completion: the sign of the policy loss and of the KL.
    """

    policy: Form | None
    kl: Form | None
    a: float = 0.0
    b: float = 0.0
    chi2: float = np.inf
    w: Mean | None = None
    u: Mean | None = None
    b_error: float = 0.0
    on: float = 1.0
    bounds: tuple[float, float] | None = None
    signs: tuple[int, int] = (0, 0)


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What a gradient is made of.

    Attributes:
        fits: The accepted ones, the best first; at stage `unknown` the best one that was not accepted, if any.
        b_seen: The smallest |b| that would have stood out of the rounding.
        same_means: Whether the two means are one on this batch: completions of one length, or a single one.
        used: Tokens of the fit.
    """

    stage: Stage
    fits: tuple[Fit, ...]
    b_seen: float = np.inf
    same_means: bool = False
    used: int = 0

    @property
    def kinds(self) -> tuple[str, ...]:
        """The classes of KL that the accepted fits leave open; a rare one only where no common one is among them."""
        kinds = tuple(dict.fromkeys(kind for fit in self.fits if fit.kl is not None for kind in fit.kl.kinds))
        return tuple(kind for kind in kinds if kind not in RARE) or kinds


class _Problem(NamedTuple):
    """Target and tokens of the fit, and the noise without a KL."""

    target: Array
    noise: Array
    tokens: Tokens
    used: Array  # the indices that are fitted


def explain(tokens: Tokens, *, simple: bool = False) -> Explanation:
    """Find the simplest explanation of a gradient.

    Args:
        tokens: the trained tokens.
        simple: leave out the stages with a gate, a bound or a free factor.
    """
    g = tokens.gradient
    target = g if tokens.policy_part is None else g - tokens.policy_part
    size = np.abs(g) if tokens.policy_part is None else np.abs(g) + np.abs(tokens.policy_part)
    used = np.flatnonzero(np.abs(tokens.log_r) <= FARTHEST)
    looked_at = size[used] if used.size else size
    typical = max(float(np.median(looked_at)), 0.01 * float(np.sqrt(np.square(looked_at).mean())), 1e-100)
    noise = 1.5 * tokens.eps * (size + typical)
    problem = _Problem(target, noise, tokens, used)
    weights = {mean: tokens.weights(mean) for mean in MEANS}
    same = bool(np.abs(weights["token"] - weights["sequence"]).max() < 1e-10)
    means = MEANS[:1] if same else MEANS
    policies = [] if tokens.policy_part is not None else policy_forms(tokens)
    kls = kl_forms(tokens)
    stages = _stages(problem, policies, kls, means, weights, simple=simple)
    found, fits = next(((stage, kept) for stage, each in stages if (kept := _accepted(each))), ("unknown", []))
    if not fits:
        fits = sorted(_alone(problem, policies, means, weights), key=_by_chi2)[:1]
    seen = _visible(problem, fits, kls, means, weights)
    return Explanation(stage=found, fits=tuple(fits), b_seen=seen, same_means=same, used=used.size)


def _stages(
    problem: _Problem,
    policies: list[Form],
    kls: list[Form],
    means: tuple[Mean, ...],
    weights: dict[Mean, Array],
    *,
    simple: bool,
) -> Iterator[tuple[Stage, Iterable[Fit]]]:
    """The fits of each stage, the simplest stage first; computed only as far as they are asked for."""
    yield "no KL", _alone(problem, policies, means, weights)
    same = [(mean, mean) for mean in means]
    if policies:
        yield "KL alone", _pairs(problem, [], kls, same, weights)
    yield "one mean", _pairs(problem, policies, kls, same, weights)
    crossed = [(w, u) for w in means for u in means if w != u]
    if policies and crossed:
        yield "two means", _pairs(problem, policies, kls, crossed, weights)
    if simple:
        return
    yield "gated", _gated(problem, policies, kls, [*same, *crossed], weights)
    yield "bounded", _bounded(problem, policies, kls, [*same, *crossed], weights)
    yield "free", _free(problem, kls)


def _accepted(fits: Iterable[Fit]) -> list[Fit]:
    found = sorted((fit for fit in fits if fit.chi2 < ACCEPTED), key=lambda x: x.chi2)
    return [fit for fit in found if fit.chi2 <= max(1.0, CLOSE * found[0].chi2)]


def _chi2(problem: _Problem, explained: Array, b_part: Array | float, count: int = 0) -> float:
    used = problem.used
    sigma = problem.noise + 2 * problem.tokens.eps * np.abs(b_part)
    residual = ((problem.target - explained) / sigma)[used]
    return float(np.square(residual).sum() / max(used.size - count, 1))


def _alone(
    problem: _Problem, policies: list[Form], means: tuple[Mean, ...], weights: dict[Mean, Array]
) -> Iterator[Fit]:
    """A policy loss without a KL; where there are no advantages, no gradient at all."""
    if not policies:
        yield Fit(policy=None, kl=None, chi2=_chi2(problem, np.zeros_like(problem.target), 0.0))
        return
    for mean in means:
        for form in policies:
            column = form.values * weights[mean]
            a = _slope(problem, problem.target, column)
            yield Fit(policy=form, kl=None, a=a, w=mean, chi2=_chi2(problem, a * column, 0.0))


def _slope(problem: _Problem, target: Array, column: Array, where: Array | None = None) -> float:
    index = problem.used if where is None else where
    x, y = (column / problem.noise)[index], (target / problem.noise)[index]
    return float(x @ y / max(x @ x, 1e-300))


def _pairs(
    problem: _Problem,
    policies: list[Form],
    kls: list[Form],
    means: list[tuple[Mean, Mean]],
    weights: dict[Mean, Array],
) -> Iterator[Fit]:
    """Each policy loss (or none) with each KL: all KLs of a policy loss in one pass, the likely ones refined."""
    if not kls:
        return
    used, noise = problem.used, problem.noise
    y = (problem.target / noise)[used]
    for w, u in means:
        plain = np.stack([(form.values * weights[u] / noise)[used] for form in kls])
        for policy in policies or [None]:
            forms, columns, x = kls, plain, None
            if policy is not None:
                x = (policy.values * weights[w] / noise)[used]
                inside = advantage_forms(problem.tokens, policy)
                forms = [*kls, *inside]
                columns = np.concatenate([plain, *[(f.values * weights[u] / noise)[used][None] for f in inside]])
            rest, left = (y, columns) if x is None else (_without(y, x), _without(columns, x))
            power, size = np.square(left).sum(1), np.square(columns).sum(1)
            known = power > 1e-14 * size
            b = np.where(known, left @ rest / np.where(known, power, 1), 0.0)
            chi2 = np.square(rest[None] - b[:, None] * left).sum(1) / used.size
            # The noise grows with b, so a pair that looks poor at first may pass.
            growth = np.square(1 + 2 * problem.tokens.eps * np.abs(b[:, None] * columns)).max(1)
            hopeful = np.argsort(chi2)[: len(forms) if policy is None and not policies else 6]
            for i in (i for i in hopeful if known[i] and chi2[i] < ACCEPTED * growth[i]):
                yield _refined(problem, policy, forms[i], w, u, weights, float(b[i]))


def _without(y: Array, x: Array) -> Array:
    return y - np.multiply.outer(y @ x, x) / max(x @ x, 1e-300) if y.ndim > 1 else y - (y @ x) / max(x @ x, 1e-300) * x


def _refined(
    problem: _Problem,
    policy: Form | None,
    kl: Form,
    w: Mean,
    u: Mean,
    weights: dict[Mean, Array],
    b: float,
    where: Array | None = None,
    gate: Array | float = 1.0,
) -> Fit:
    """A pair fitted under the noise that its own KL brings along."""
    used = problem.used if where is None else where
    pull = kl.values * weights[u]
    a, error, push = 0.0, 0.0, np.zeros_like(pull) if policy is None else policy.values * weights[w] * gate
    for _ in range(2):
        sigma = (problem.noise + 2 * problem.tokens.eps * np.abs(b * pull))[used]
        y, x = (problem.target[used] / sigma), (pull[used] / sigma)
        if policy is not None:
            p = push[used] / sigma
            x_alone = _without(x, p)
        else:
            p, x_alone = None, x
        size = max(x_alone @ x_alone, 1e-300)
        b = float(x_alone @ y / size)
        error = float(np.sqrt(ACCEPTED * used.size / size))
        a = 0.0 if p is None else float(p @ (y - b * x) / max(p @ p, 1e-300))
    sub = problem._replace(used=used)
    return Fit(policy=policy, kl=kl, a=a, b=b, w=w, u=u, b_error=error, chi2=_chi2(sub, a * push + b * pull, b * pull))


def _visible(
    problem: _Problem, fits: list[Fit], kls: list[Form], means: tuple[Mean, ...], weights: dict[Mean, Array]
) -> float:
    """The |b| from which on any reverse or forward KL would have stood out, beside the fitted policy loss."""
    plain = [form for form in kls if form.kind in ("reverse", "forward") and not form.coupled][:4]
    if not plain or not fits:
        return np.inf
    used, noise = problem.used, problem.noise
    best = fits[0]
    seen = 0.0
    for mean in means:
        for form in plain:
            column = (form.values * weights[mean] / noise)[used]
            if best.policy is not None and best.w is not None:
                column = _without(column, (best.policy.values * weights[best.w] / noise)[used])
            seen = max(seen, float(np.sqrt(ACCEPTED * used.size / max(column @ column, 1e-300))))
    return MARGIN * seen


RARE = ("neither", "old", "squared")
BASES = ("1", "ratio", "sequence ratio", "whole ratio")


def _gated(
    problem: _Problem,
    policies: list[Form],
    kls: list[Form],
    means: list[tuple[Mean, Mean]],
    weights: dict[Mean, Array],
) -> Iterator[Fit]:
    """A policy loss that some tokens do not carry: a clip, a mask. Pairs of tokens propose a and b, the rest votes."""
    used = problem.used
    if used.size < 12:
        return
    used = used[:: max(1, used.size // 512)]
    problem = problem._replace(used=used)
    order = used[np.argsort(np.abs(problem.tokens.log_r[used]), kind="stable")]
    pick = order[np.linspace(0, used.size - 1, min(used.size, 16)).astype(int)]
    first, second = np.triu_indices(pick.size, 1)
    plain = [form for form in kls if form.kind not in RARE and "sampler" not in form.name]
    bases = [x for x in policies if x.name.partition(" x ")[0] in BASES and not re.search("min|up to", x.name)]
    for policy in bases:
        choices = [(None, False), *((kl, joint) for kl in plain for joint in (False, True))]
        choices += [(kl, True) for kl in advantage_forms(problem.tokens, policy)]
        for w, u in means:
            for kl, joint in choices:
                fit = _voted(problem, policy, kl, w, u, pick[first], pick[second], joint, weights)
                if fit is not None:
                    yield fit


def _voted(
    problem: _Problem,
    policy: Form,
    kl: Form | None,
    w: Mean,
    u: Mean,
    i: Array,
    j: Array,
    joint: bool,
    weights: dict[Mean, Array],
) -> Fit | None:
    """A gate that nearly all tokens agree with, for the a and b that one of the pairs of tokens i, j proposes."""
    g, used, p = problem.target, problem.used, policy.values * weights[w]
    k = np.zeros_like(p) if kl is None else kl.values * weights[u]
    if kl is None:
        a, b = np.divide(g[i], p[i], out=np.zeros_like(p[i]), where=p[i] != 0), np.zeros(i.size)
    else:
        det = p[i] * k[j] - p[j] * k[i]
        fine = np.abs(det) > 1e-9 * np.abs(p[i] * k[j])
        det = np.where(fine, det, np.inf)
        a, b = (g[i] * k[j] - g[j] * k[i]) / det, (p[i] * g[j] - p[j] * g[i]) / det
    pull = b[:, None] * k[used]
    full = a[:, None] * p[used] + pull
    off = np.zeros_like(pull) if joint else pull
    sigma = 5 * problem.noise[used] + 10 * problem.tokens.eps * np.abs(pull)
    carries = np.abs(g[used] - full) < 4 * sigma
    votes = carries | (np.abs(g[used] - off) < 4 * sigma)
    score = np.where(carries.mean(1) > 0.1, votes.mean(1) + 1e-3 * carries.mean(1), 0)
    best = int(score.argmax())
    if votes[best].mean() < 0.98 or carries[best].sum() < 8 or not np.isfinite(a[best]):
        return None
    gate = np.zeros_like(p)
    gate[used] = carries[best]
    gated = replace_values(policy, policy.values * gate)
    if kl is None:
        slope = _slope(problem, g, gated.values * weights[w])
        fit = Fit(policy=gated, kl=None, a=slope, w=w, chi2=_chi2(problem, slope * gated.values * weights[w], 0.0))
    else:
        pulled = replace_values(kl, kl.values * gate) if joint else kl
        fit = _refined(problem, gated, pulled, w, u, weights, float(b[best]))
    return replace(fit, on=float(gate[used].mean()))


def replace_values(form: Form, values: Array) -> Form:
    """The same form with other numbers."""
    return form._replace(values=values)


def _bounded(
    problem: _Problem,
    policies: list[Form],
    kls: list[Form],
    means: list[tuple[Mean, Mean]],
    weights: dict[Mean, Array],
) -> Iterator[Fit]:
    """A KL that has no gradient, or a constant one, beyond some log-ratio: fitted near the reference, then extended."""
    t, used = problem.tokens, problem.used
    if t.ref is None or used.size < 16:
        return
    far, plain = np.abs(t.d), [x for x in kls if not x.coupled and x.kind not in RARE]
    shares = [share for share in (0.5, 0.25, 0.1) if share * used.size >= 7]
    inner = [problem._replace(used=used[far[used] <= np.quantile(far[used], share)]) for share in shares]
    nearby = (fit for near in inner for fit in sorted(_pairs(near, policies, plain, means, weights), key=_by_chi2))
    for fit in nearby:
        if fit.chi2 >= ACCEPTED or fit.kl is None or fit.u is None:
            continue
        push = 0.0 if fit.policy is None or fit.w is None else fit.a * fit.policy.values * weights[fit.w]
        unit = fit.b * weights[fit.u]
        pull = np.divide(problem.target - push, unit, out=np.zeros_like(unit), where=unit != 0)
        sigma = 5 * problem.noise + 10 * t.eps * np.abs(unit * fit.kl.values)
        alive = np.abs(unit * (pull - fit.kl.values)) < 4 * sigma
        low, high = (side * (side * t.d[used[alive[used]]]).max(initial=0.0) for side in (-1, 1))
        beyond = (t.d < low) | (t.d > high)
        if beyond[used].sum() < 2 or not alive[used][~beyond[used]].all():
            continue
        dead = np.where(
            beyond, np.where(np.abs(unit * pull) < 4 * sigma, 0.0, _held(t, fit.kl, pull, beyond)), fit.kl.values
        )
        cut = replace_values(fit.kl, dead)
        yield replace(
            _refined(problem, fit.policy, cut, fit.w or "token", fit.u, weights, fit.b),
            bounds=(float(low), float(high)),
        )


def _by_chi2(fit: Fit) -> float:
    return fit.chi2


def _held(t: Tokens, kl: Form, pull: Array, beyond: Array) -> Array:
    """The value that the KL's coefficient keeps beyond its bound on each side: the median of what is seen there."""
    held = np.zeros_like(pull)
    for side in (t.d < 0, t.d > 0):
        if (side & beyond).any():
            held[side] = np.median(pull[side & beyond])
    return held


def _free(problem: _Problem, kls: list[Form]) -> Iterator[Fit]:
    """A free factor of each completion: names a KL by its course within completions, never by its size."""
    t, used = problem.tokens, problem.used
    usable = np.bincount(t.row[used], minlength=t.lengths.size) >= 4
    keep = used[usable[t.row[used]]]
    spare = keep.size - 2 * int(usable.sum())
    if spare < max(FREE_TOKENS, keep.size // 3) or keep.size < 0.7 * used.size:
        return
    push = -np.ones_like(t.policy) if t.advantage is None else -t.advantage
    bases = [np.zeros_like(push)] if t.policy_part is not None else [push, push * t.r]
    forms = [form for form in kls if not form.coupled and form.kind not in ("zero", "old")]
    if t.policy_part is None and np.allclose(t.r, 1):  # a constant of each completion is the policy loss's
        courses = distinct([form._replace(values=form.values - t.average(form.values)) for form in forms])
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
    """What the second and third derivative say where the policy is the reference.

    Attributes:
        first: c' times the coefficient b.
        ratio: c'' / c'; NaN where c' is 0.
        visible: whether `first` stands out of the rounding.
    """

    first: float
    ratio: float
    visible: bool


def at_zero(t: Tokens, second: Array, third: Array, mean: Mean) -> AtZero | None:
    """Read c'(0) and c''(0) off the derivatives, beside the policy loss; None: the two cannot be told apart.

    A ratio gives -a A w to both derivatives, a fixed weight nothing. Any other policy loss (sapo) is fitted apart for
    positive and negative advantages, if they have values enough.

    Args:
        t: tokens whose log-ratio is 0.
        second: the second derivative of the loss by each log-probability.
        third: the third one.
        mean: the mean that the KL is under.
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
