"""Explains the gradient in the logits of a few positions by a divergence between student and teacher. NumPy only.

A divergence D(s, t) of s = softmax(z / T) has the gradient s (h - sum s h) / T in z, with h = dD/ds. Each candidate is
its h; a head of k tokens is found from the gradient itself, which is -s times a constant outside of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np

from klamp.audit.forms import Array

ACCEPTED = 3e-4  # the largest residual of an accepted divergence, as a share of the gradient, in float32
BETAS = (0.5, 0.1, 0.9, 0.25, 0.75)
TEMPERATURES = (2.0, 0.5, 0.6, 0.7, 0.8, 0.9, 1.5, 3.0, 4.0, 5.0)


class Divergence(NamedTuple):
    """What the gradient of some positions follows."""

    kind: str  # reverse, forward, js, sampled, cross-entropy, entropy, none, unknown
    name: str  # in words
    head: str  # full, no tail, bucket, generalised, renormalised, teacher renormalised
    temperatures: tuple[float, float]  # of student and teacher
    scale: Array  # the coefficient of each position, [N]
    beside: str  # the second term: "", cross-entropy or entropy
    residual: float  # the share of the gradient that is not explained
    size: int = 0  # the largest number of tokens in a head; 0: the whole vocabulary


@dataclass(frozen=True, kw_only=True)
class Positions:
    """Trained positions of a batch.

    Shapes: N positions, V entries.
    """

    gradient: Array  # d loss / d student logits, [N, V]
    student: Array  # logits, [N, V]
    teacher: Array  # logits, [N, V]
    ids: Array | None = None  # the sampled tokens, [N]
    eps: float = 6e-8  # unit roundoff of the logits
    temperature: float = 1.0  # what the trainer divides the logits by
    row: Array | None = None  # the sequence of each position, [N]
    length: Array | None = None  # the number of trained positions of each position's sequence, [N]
    beta: float | None = None  # the mixture of a JS divergence, if the trainer has one

    @property
    def tolerance(self) -> float:
        """The residual that rounding explains."""
        return max(ACCEPTED, 16 * self.eps)


def log_softmax(x: Array) -> Array:
    """Logarithms of softmax over the last dimension."""
    y = x - x.max(-1, keepdims=True)
    return y - np.log(np.exp(y).sum(-1, keepdims=True))


def explain_logits(p: Positions) -> list[Divergence]:
    """The divergences that explain the gradient, the best first; empty where none does."""
    size = np.linalg.norm(p.gradient, axis=1)
    if not np.any(size > 0):
        return [Divergence("none", "no gradient", "full", (1.0, 1.0), size, "", 0.0)]
    for second, heats in product((False, True), _temperatures(p)):  # one term at any temperature, before two terms
        found = sorted(_candidates(p, heats, second=second), key=lambda x: x.residual)
        good = [x for x in found if x.residual < p.tolerance]
        if good:
            near = [x for x in good if x.residual <= max(20 * good[0].residual, p.tolerance / 10)]
            return sorted(near, key=lambda x: not is_mean(x.scale, p.length))
    return []


def is_mean(scale: Array, length: Array | None) -> str:
    """Whether the coefficients of positions are those of a mean over tokens, or over sequences; "" for neither."""
    means = {"token": scale, "sequence": scale * (1.0 if length is None else length)}
    return next((name for name, x in means.items() if np.ptp(x) <= 0.01 * np.abs(x).max()), "")


def _temperatures(p: Positions) -> list[tuple[float, float]]:
    t = p.temperature
    others = ((t, t), (t, 1.0), (1.0, 1.0), (1.0, t), *(x for h in TEMPERATURES for x in ((h, h), (h, 1.0), (1.0, h))))
    return list(dict.fromkeys(others))


def _candidates(p: Positions, heats: tuple[float, float], *, second: bool) -> Iterator[Divergence]:
    """Each divergence, over the vocabulary and over the head that the gradient shows; or each with a second term."""
    log_s, log_t = log_softmax(p.student / heats[0]), log_softmax(p.teacher / heats[1])
    s, t = np.exp(log_s), np.exp(log_t)
    simple = _simple(p, log_s, s)
    beside = [(name, column) for name, _, column in simple] if second else [("", None)]
    terms = [(kind, name, "full", column) for kind, name, column in _whole(log_s, log_t, s, t, p.beta)]
    heads = head_of(p.gradient, s)
    if heads is not None and not (second and heads.sum(1).max() < 4):  # two free numbers explain any small head
        terms += _headed(heads, log_s, log_t, s, t)
        if second and p.ids is not None:  # the sampled token shows in the head without belonging to it
            for ranked in (np.argsort(np.argsort(-log_t)), np.argsort(np.argsort(-log_s))):
                for k in {int(heads.sum(1).min()), int(heads.sum(1).max()) - 1}:
                    terms += _headed(ranked < k, log_s, log_t, s, t) if k > 1 else []
    size = 0 if heads is None else int(heads.sum(1).max())
    for kind, name, column in () if second else simple:
        yield _fitted(p, Divergence(kind, name, "full", heats, column, "", 0.0), column, None)
    for kind, name, head, column in terms:
        for other, extra in beside:
            form = Divergence(kind, name, head, heats, column, other, 0.0, 0 if head == "full" else size)
            yield _fitted(p, form, column, extra)


def _centred(s: Array, h: Array) -> Array:
    return s * (h - (s * h).sum(-1, keepdims=True))


def _whole(log_s: Array, log_t: Array, s: Array, t: Array, beta: float | None) -> Iterator[tuple[str, str, Array]]:
    yield "reverse", "KL(student||teacher)", _centred(s, log_s - log_t)
    yield "forward", "KL(teacher||student)", s - t
    mixtures = (beta, *BETAS) if beta is not None and 0 < beta < 1 else BETAS
    for b in dict.fromkeys(mixtures):
        log_m = np.logaddexp(np.log1p(-b) + log_s, np.log(b) + log_t)
        yield "js", f"JS({b:g})", _centred(s, (1 - b) * (log_s - log_m))


def _simple(p: Positions, log_s: Array, s: Array) -> list[tuple[str, str, Array]]:
    terms = [("entropy", "entropy", _centred(s, log_s))]
    if p.ids is not None:
        score = -s.copy()
        score[np.arange(len(s)), p.ids] += 1
        terms.append(("sampled", "a factor of each sampled token", score))
    return terms


def head_of(gradient: Array, s: Array) -> Array | None:
    """The entries whose gradient is not -s times one constant: the head; None where that is most of the vocabulary."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(s > 0, gradient / s, 0.0)
    middle = np.median(ratio, axis=1, keepdims=True)
    off = np.abs(ratio - middle) * s > 1e-4 * np.abs(gradient).max(1, keepdims=True)
    counts = off.sum(1)
    vocabulary = s.shape[1]
    return off if 1 < counts.max() <= vocabulary // 2 else None


def _headed(heads: Array, log_s: Array, log_t: Array, s: Array, t: Array) -> Iterator[tuple[str, str, str, Array]]:
    inside = heads.astype(float)
    s_out, t_out = (np.maximum(1 - (x * inside).sum(1, keepdims=True), 1e-30) for x in (s, t))
    ell = log_s - log_t
    yield "reverse", "KL(student||teacher)", "no tail", _centred(s, inside * (ell + 1))
    yield "reverse", "KL(student||teacher)", "generalised", _centred(s, inside * ell)
    yield "reverse", "KL(student||teacher)", "bucket", _centred(s, np.where(heads, ell, np.log(s_out / t_out)))
    yield "forward", "KL(teacher||student)", "no tail", s * (t * inside).sum(1, keepdims=True) - t * inside
    ratio = np.where(heads, -np.exp(-ell), -t_out / s_out)
    yield "forward", "KL(teacher||student)", "bucket", _centred(s, ratio)
    hs, ht = (np.where(heads, x, -np.inf) for x in (log_s, log_t))
    with np.errstate(invalid="ignore"):  # a position without a head
        hs, ht = (x - np.logaddexp.reduce(x, axis=1, keepdims=True) for x in (hs, ht))
    ps, pt = np.exp(hs), np.exp(ht)
    gap = np.where(heads, hs - np.where(heads, ht, 0), 0.0)
    yield "reverse", "KL(student||teacher)", "renormalised", _centred(ps, gap)
    yield "forward", "KL(teacher||student)", "renormalised", ps - pt
    yield "forward", "KL(teacher||student)", "teacher renormalised", s - pt
    for b in BETAS[:1]:
        with np.errstate(invalid="ignore"):
            log_m = np.where(heads, np.logaddexp(np.log1p(-b) + hs, np.log(b) + ht), 0.0)
        yield "js", f"JS({b:g})", "renormalised", _centred(ps, np.where(heads, (1 - b) * (hs - log_m), 0.0))


def _fitted(p: Positions, form: Divergence, first: Array, second: Array | None) -> Divergence:
    """Fit one coefficient per position, and one of the second term."""
    g, norm = p.gradient, np.maximum((first**2).sum(1), 1e-300)
    if second is None:
        scale = (g * first).sum(1) / norm
        residual = g - scale[:, None] * first
    else:
        cross, square = (first * second).sum(1), np.maximum((second**2).sum(1), 1e-300)
        det = norm * square - cross**2
        det = np.where(det > 1e-9 * norm * square, det, np.inf)
        y1, y2 = (g * first).sum(1), (g * second).sum(1)
        scale, other = (y1 * square - y2 * cross) / det, (y2 * norm - y1 * cross) / det
        residual = g - scale[:, None] * first - other[:, None] * second
    off = float(np.sqrt((residual**2).sum() / max((g**2).sum(), 1e-300)))
    return form._replace(scale=scale, residual=off)
