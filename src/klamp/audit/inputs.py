"""Looks at the numbers that a loss was computed from, before its gradient is explained. NumPy only.

Finds log-probabilities that are none, a reference or sampler that is one token off, padding and tokens after the end
that are trained, and how advantages were formed from rewards, with a KL in them or without.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from klamp.audit.forms import Array, Tokens, k3
from klamp.audit.verdict import Finding, note, warning, wrong

ROUNDING = 1e-5
"""A log-probability this far above 0 is still rounding."""


def examine_inputs(arrays: Mapping[str, Any], facts: Mapping[str, Any]) -> Iterator[Finding]:
    """What is wrong with the inputs themselves."""
    mask = arrays["mask"]
    for name in ("policy_logprobs", "ref_logprobs", "old_logprobs", "sampler_logprobs"):
        if name in arrays:
            yield from _log_probabilities(name, arrays[name][mask])
    for name in ("ref_logprobs", "old_logprobs", "sampler_logprobs"):
        if name in arrays:
            yield from _shifted(name, arrays[name], arrays["policy_logprobs"], mask)
    if "sampler_logprobs" in arrays:
        yield from _mismatch(arrays, mask)
    if "ids" in arrays:
        yield from _ends(arrays["ids"], mask, facts)


def _log_probabilities(name: str, x: Array) -> Iterator[Finding]:
    if not np.isfinite(x).all():
        bad = int((~np.isfinite(x)).sum())
        yield wrong(
            "not-finite",
            f"{name} has {bad} values under the mask that are not finite",
            fix="mask these tokens, or bound the value by name: one infinite log-ratio makes the whole mean infinite",
            count=bad,
        )
    elif x.size and x.max() > ROUNDING:
        yield wrong(
            "not-log-probabilities",
            f"{name} holds values above 0, up to {x.max():.3g}: these are no log-probabilities",
            fix="pass log_softmax(logits)[ids], not logits, losses or probabilities",
            largest=float(x.max()),
        )


def _shifted(name: str, x: Array, policy: Array, mask: Any) -> Iterator[Finding]:
    """A tensor whose neighbours fit the policy far better than its own places do."""
    gaps = {shift: _gap(x, policy, mask, shift) for shift in (0, -1, 1)}
    here = gaps[0]
    best = min((-1, 1), key=lambda shift: gaps[shift].distance)
    there = gaps[best]
    if there.count >= 12 and there.distance < 0.5 * here.distance and there.likeness > max(0.8, here.likeness + 0.3):
        where = "next" if best == 1 else "previous"
        yield wrong(
            "shift",
            f"{name} is one token off: the value of a token stands at the {where} token's place "
            f"(correlation {there.likeness:.2f} there, {here.likeness:.2f} in place)",
            fix="the logits at position t are of token t + 1: use logits[:, :-1] with ids[:, 1:] for both models",
            tensor=name,
            shift=best,
        )


class _Gap(NamedTuple):
    distance: float
    likeness: float
    count: int


def _gap(x: Array, policy: Array, mask: Any, shift: int) -> _Gap:
    moved, there = np.roll(x, -shift, axis=1), np.roll(mask, -shift, axis=1)
    if shift:
        there[:, -1 if shift > 0 else 0] = False
    both = mask & there & np.isfinite(moved) & np.isfinite(policy)
    a, b = policy[both], moved[both]
    if a.size < 3 or a.std() == 0 or b.std() == 0:
        return _Gap(np.inf, 0.0, int(a.size))
    return _Gap(float(np.median(np.abs(a - b))), float(np.corrcoef(a, b)[0, 1]), int(a.size))


MISMATCH = 0.1
"""The median difference between sampler and trainer, in nats, from which on they disagree about more than rounding."""


def _mismatch(arrays: Mapping[str, Any], mask: Any) -> Iterator[Finding]:
    trainer = arrays.get("old_logprobs", arrays["policy_logprobs"])[mask]
    gap = trainer - arrays["sampler_logprobs"][mask]
    typical = float(np.median(np.abs(gap))) if gap.size else 0.0
    if typical > MISMATCH:
        yield warning(
            "sampler-mismatch",
            f"sampler and trainer differ by {typical:.2g} nats at the median token (mean {gap.mean():+.2g})",
            fix="divide the trainer's logits by the sampling temperature, sample without top_p and top_k, "
            "and compare the weights that both use",
            median=typical,
            mean=float(gap.mean()),
        )


def _ends(ids: Any, mask: Any, facts: Mapping[str, Any]) -> Iterator[Finding]:
    pad, ends = facts.get("pad"), facts.get("eos")
    after = 0
    if ends is not None:
        is_end = np.isin(ids, np.atleast_1d(ends)) & mask
        later = (np.cumsum(is_end, axis=1) - is_end) > 0
        after = int((later & mask).sum())
        if after:
            yield wrong(
                "after-end-trained",
                f"{after} tokens after the end-of-sequence token are under the mask",
                fix="let the mask end with the first end-of-sequence token",
                count=after,
            )
    if pad is not None and not after:
        trailing = np.cumsum(((ids != pad) | ~mask)[:, ::-1] & mask[:, ::-1], axis=1)[:, ::-1] == 0
        count = (trailing & mask & (ids == pad)).sum(axis=1)
        trained = int(count[count >= 2].sum())
        if trained:
            yield wrong(
                "padding-trained",
                f"{trained} padding tokens are under the mask",
                fix="mask = ids != pad, up to and including the first end-of-sequence token",
                count=trained,
            )


class AdvantageForm(NamedTuple):
    """How the advantages were formed.

    Attributes:
        name: in words; "" where nothing fits.
        kl: whether a KL is in them; None: it may be.
        beta: its coefficient, in the unit of the advantages; None: none, or not known.
        kind: the class of the KL that is in them: reverse (k1), k3, ...
    """

    name: str = ""
    kl: bool | None = None
    beta: float | None = None
    kind: str = "reverse"


EXPLAINED = 1e-4
"""The largest residual, as a share of the advantages, at which a form of them is accepted."""


def advantage_form(t: Tokens, rewards: Array | None) -> AdvantageForm:
    """Explain the advantages by the rewards and by the log-ratios."""
    a = t.advantage
    if a is None or not np.any(a):
        return AdvantageForm("all 0", False) if a is not None else AdvantageForm()
    spread = np.abs(a - t.average(a)).max()
    if spread > EXPLAINED * np.abs(a).max():
        return _per_token(t, a, rewards)
    first = np.concatenate([[0], np.cumsum(t.lengths)[:-1]]).astype(int)
    return _per_completion(t, a[first], rewards)


def _per_token(t: Tokens, a: Array, rewards: Array | None) -> AdvantageForm:
    """Advantages that differ within a completion: a KL per token, of this token or of it and the later ones."""
    if t.ref is None:
        return AdvantageForm("one per token")
    old = t.d - t.log_r
    courses = {
        "k1 per token, of the present policy": (t.d, "reverse"),
        "k1 per token, of the old policy": (old, "reverse"),
        "k1 of this and later tokens": (t.to_go(t.d), "reverse"),
        "k1 of this and later tokens, of the old policy": (t.to_go(old), "reverse"),
        "k3 per token": (k3(t.d), "k3"),
        "abs per token": (np.abs(t.d), "sign"),
    }
    y = a - t.average(a)
    for name, (course, kind) in courses.items():
        x = course - t.average(course)
        if not np.any(np.abs(x) > 1e-12):
            continue
        slope = float(x @ y / (x @ x))
        if np.abs(y - slope * x).max() <= 1e-3 * np.abs(y).max():
            return AdvantageForm(name, True, -slope, kind)
    return AdvantageForm("one per token")


def _per_completion(t: Tokens, a: Array, rewards: Array | None) -> AdvantageForm:
    count = a.size
    group = np.zeros(count, int) if t.group is None else t.group
    if rewards is not None and rewards.size == count:
        for name, form in _forms(group):
            if _explains(a, [form(rewards)]) is not None:
                return AdvantageForm(f"{name} of the rewards", False)
        return _with_kl(t, a, rewards, group)
    return AdvantageForm("", False) if _without_kl(t, a) else AdvantageForm()


def _with_kl(t: Tokens, a: Array, rewards: Array, group: Any) -> AdvantageForm:
    if t.ref is None:
        return AdvantageForm()
    first = np.concatenate([[0], np.cumsum(t.lengths)[:-1]]).astype(int)
    for whose, d in (("", t.d), (" of the old policy", t.d - t.log_r)):
        for size, total in (("summed", t.total), ("mean", t.average)):
            for kind, values in (("reverse", d), ("k3", k3(d))):
                kl = total(values)[first]
                for name, form in _forms(group)[1:]:
                    if name == "z-score":
                        beta = _scored(a, rewards, kl, form)
                    else:
                        slopes = _explains(a, [form(rewards), form(kl)])
                        beta = None if slopes is None else -slopes[1] / slopes[0]
                    if beta is not None:
                        which = "k1" if kind == "reverse" else "k3"
                        return AdvantageForm(f"{name} of the rewards minus {which}{whose}, {size}", True, beta, kind)
    return AdvantageForm()


def _scored(a: Array, rewards: Array, kl: Array, form: Any) -> float | None:
    """The beta of a KL that was in the rewards before they were divided by their deviation, found by a scan."""
    if np.ptp(kl) == 0:
        return None
    x = np.stack([rewards, kl, np.ones_like(kl)])
    slopes = np.linalg.lstsq(x.T, a, rcond=None)[0]
    start = -slopes[1] / slopes[0] if slopes[0] else 0.0
    for beta in (start, *(10.0**k for k in np.arange(-4, 1.01, 0.02))):
        if _explains(a, [form(rewards - beta * kl)]) is not None:
            return float(beta)
    return None


def _explains(a: Array, columns: list[Array]) -> Array | None:
    x = np.stack(columns)
    if a.size <= len(columns) + 1 or not np.any(x):
        return None
    slopes = np.linalg.lstsq(x.T, a, rcond=1e-9)[0]
    return slopes if np.abs(a - slopes @ x).max() <= 1e-3 * np.abs(a).max() else None


def _forms(group: Any) -> list[tuple[str, Any]]:
    def centred(x: Array) -> Array:
        return x - (np.bincount(group, weights=x) / np.bincount(group))[group]

    def scored(x: Array) -> Array:
        y = centred(x)
        deviation = np.sqrt(np.bincount(group, weights=y**2) / np.bincount(group))[group]
        return y / (deviation + 1e-12)

    return [("a multiple", lambda x: x), ("mean removed", centred), ("z-score", scored)]


def _without_kl(t: Tokens, a: Array) -> bool:
    """Whether advantages cannot hold a KL: two completions with other KLs have one value, or all are round numbers."""
    if np.abs(a).max() > 0.01 and np.abs(a - np.round(a, 3)).max() < 2e-7 * max(1.0, np.abs(a).max()):
        return True
    if t.ref is None or not np.any(t.d):
        return False
    first = np.concatenate([[0], np.cumsum(t.lengths)[:-1]]).astype(int)
    kl = t.total(t.d)[first]
    order = np.argsort(a)
    equal = np.diff(a[order]) < 1e-7 * np.abs(a).max()
    return bool((equal & (np.abs(np.diff(kl[order])) > 1e-3 * np.abs(kl).max())).any())


def group_sums(a: Array, group: Any) -> Finding | None:
    """A note where the advantages of a prompt do not sum to 0."""
    sums = np.bincount(group, weights=a)
    if np.abs(sums).max() > 1e-3 * np.abs(a).max():
        return note(
            "advantages-not-centred",
            f"the advantages of a prompt's completions sum to {sums[np.abs(sums).argmax()]:.3g}, not to 0",
            sums=[float(x) for x in sums],
        )
    return None
