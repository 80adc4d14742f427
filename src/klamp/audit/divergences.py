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

from klamp.audit.capture import Array

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


def log_softmax(x: Array) -> Array:
    """Logarithms of softmax over the last dimension."""
    y = x - x.max(-1, keepdims=True)
    return y - np.log(np.exp(y).sum(-1, keepdims=True))


def explain_logits(p: Positions) -> list[Divergence]:
    """The divergences that explain the gradient, the best first; empty where none does."""
    size = np.linalg.norm(p.gradient, axis=1)
    if not np.any(size > 0):
        return [Divergence("none", "no gradient", "full", (1.0, 1.0), size, "", 0.0)]
    t, tolerance = p.temperature, max(ACCEPTED, 16 * p.eps)  # of what rounding explains
    others = (x for h in TEMPERATURES for x in ((h, h), (h, 1.0), (1.0, h)))
    temperatures = dict.fromkeys(((t, t), (t, 1.0), (1.0, 1.0), (1.0, t), *others))
    for second, heats in product((False, True), temperatures):  # one term at any temperature, before two terms
        forms = sorted(_candidates(p, heats, second=second), key=lambda x: x.residual)
        limit = min(tolerance, max(20 * forms[0].residual, tolerance / 10))
        if good := [x for x in forms if x.residual < tolerance and x.residual <= limit]:
            return sorted(good, key=lambda x: not is_mean(x.scale, p.length))
    return []


def is_mean(scale: Array, length: Array | None) -> str:
    """Whether the coefficients of positions are those of a mean over tokens, or over sequences; "" for neither."""
    means = {"token": scale, "sequence": scale * (1.0 if length is None else length)}
    return next((name for name, x in means.items() if np.ptp(x) <= 0.01 * np.abs(x).max()), "")


def _candidates(p: Positions, heats: tuple[float, float], *, second: bool) -> Iterator[Divergence]:
    """Each divergence, over the vocabulary and over the head that the gradient shows; or each with a second term."""
    log_s, log_t = log_softmax(p.student / heats[0]), log_softmax(p.teacher / heats[1])
    s, simple = np.exp(log_s), _simple(p, log_s)
    terms = [(kind, name, "full", column) for kind, name, column in _whole(log_s, log_t, p.beta)]
    heads, size = head_of(p.gradient, s), 0
    if heads is not None:
        counts = heads.sum(1)
        size = int(counts.max())
        if not second or size > 3:  # two free numbers explain any small head
            terms += _headed(heads, log_s, log_t)
        if second and size > 3 and p.ids is not None:  # the sampled token shows in the head without belonging to it
            for log_p, k in product((log_t, log_s), {int(counts.min()), size - 1} - {0, 1}):
                terms += _headed(np.argsort(np.argsort(-log_p)) < k, log_s, log_t)
    for kind, name, column in () if second else simple:
        yield _fitted(p, Divergence(kind, name, "full", heats, column, "", 0.0), column)
    for (kind, name, head, column), (_, other, *extra) in product(terms, simple if second else [("", "")]):
        form = Divergence(kind, name, head, heats, column, other, 0.0, 0 if head == "full" else size)
        yield _fitted(p, form, column, *extra)


def _centred(s: Array, h: Array) -> Array:
    return s * (h - (s * h).sum(-1, keepdims=True))


def _whole(log_s: Array, log_t: Array, beta: float | None) -> Iterator[tuple[str, str, Array]]:
    s, t = np.exp(log_s), np.exp(log_t)
    yield "reverse", "KL(student||teacher)", _centred(s, log_s - log_t)
    yield "forward", "KL(teacher||student)", s - t
    mixtures = (beta, *BETAS) if beta is not None and 0 < beta < 1 else BETAS
    for b in dict.fromkeys(mixtures):
        log_m = np.logaddexp(np.log1p(-b) + log_s, np.log(b) + log_t)
        yield "js", f"JS({b:g})", _centred(s, (1 - b) * (log_s - log_m))


def _simple(p: Positions, log_s: Array) -> list[tuple[str, str, Array]]:
    s = np.exp(log_s)
    terms = [("entropy", "entropy", _centred(s, log_s))]
    if p.ids is not None:
        score = -s
        score[np.arange(len(s)), p.ids] += 1
        terms.append(("sampled", "a factor of each sampled token", score))
    return terms


def head_of(gradient: Array, s: Array) -> Array | None:
    """The entries whose gradient is not -s times one constant: the head; None where that is most of the vocabulary."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(s > 0, gradient / s, 0.0)
    middle = np.median(ratio, axis=1, keepdims=True)
    off = np.abs(ratio - middle) * s > 1e-4 * np.abs(gradient).max(1, keepdims=True)
    return off if 1 < off.sum(1).max() <= s.shape[1] // 2 else None


def _headed(heads: Array, log_s: Array, log_t: Array) -> Iterator[tuple[str, str, str, Array]]:
    s, t, inside = np.exp(log_s), np.exp(log_t), heads.astype(float)
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


def _fitted(p: Positions, form: Divergence, *columns: Array) -> Divergence:
    """Fit one coefficient per position and column."""
    x = np.stack(columns, axis=-1)
    to_columns = x.swapaxes(1, 2)
    scales = np.linalg.pinv(to_columns @ x, rcond=1e-9, hermitian=True) @ to_columns @ p.gradient[..., None]
    residual = p.gradient - (x @ scales)[..., 0]
    off = float(np.sqrt((residual**2).sum() / max((p.gradient**2).sum(), 1e-300)))
    return form._replace(scale=scales[:, 0, 0], residual=off)
