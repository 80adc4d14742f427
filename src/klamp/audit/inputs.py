"""Looks at the numbers that a loss was computed from, before its gradient is explained. NumPy only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from klamp.audit.capture import Array, Tokens
from klamp.audit.forms import k3
from klamp.audit.verdict import CheckFinding, finding

ROUNDING = 1e-5  # a log-probability this far above 0 is still rounding
MISMATCH = 0.1  # the median difference between sampler and trainer, in nats, that is more than rounding
EXPLAINED = 1e-3  # the largest residual, as a share of the advantages, for an accepted form
KINDS = {"k1": "reverse", "k3": "k3", "abs": "sign"}  # what the advantages hold -> the class of the KL
LOGPROBS = ("policy_logprobs", "ref_logprobs", "old_logprobs", "sampler_logprobs")


def examine_inputs(arrays: Mapping[str, Any], facts: Mapping[str, Any]) -> Iterator[CheckFinding]:
    """What is wrong with the inputs themselves."""
    mask, policy, sampler = arrays["mask"], arrays["policy_logprobs"], arrays.get("sampler_logprobs")
    for name in (name for name in LOGPROBS if name in arrays):
        x = arrays[name][mask]
        if bad := int((~np.isfinite(x)).sum()):
            yield finding("not-finite", tensor=name, count=bad)
        elif x.size and x.max() > ROUNDING:
            yield finding("not-log-probabilities", tensor=name, largest=float(x.max()))
        elif name != "policy_logprobs":
            yield from _shifted(name, arrays[name], policy, mask)
    if sampler is not None and mask.any():
        gap, moved = ((x - sampler)[mask] for x in (arrays.get("old_logprobs", policy), policy))
        median, since = (float(np.median(np.abs(x))) for x in (gap, moved))
        if median > MISMATCH:
            yield finding("sampler-mismatch", median=median, mean=float(gap.mean()))
        if "old_logprobs" in arrays and not gap.any() and since > 1e-4:
            yield finding("old-is-sampler", median=since)
    if "ids" in arrays:
        yield from _ends(arrays["ids"], mask, facts)


def _shifted(name: str, x: Array, policy: Array, mask: Any) -> Iterator[CheckFinding]:
    """A tensor whose neighbours fit the policy far better than its own places do."""
    here, early, late = (_gap(x, policy, mask, shift) for shift in (0, -1, 1))
    shift, where, near = (1, "next", late) if late[0] < early[0] else (-1, "previous", early)
    if near[2] >= 12 and near[0] < 0.5 * here[0] and near[1] > max(0.8, here[1] + 0.3):
        what = f"{name} is one token off: the value of a token is at the {where} token's place (correlation "
        what += f"{near[1]:.2f} there, {here[1]:.2f} in place)"
        yield finding("shift", what=what, tensor=name, shift=shift)


def _gap(x: Array, policy: Array, mask: Any, shift: int) -> tuple[float, float, int]:
    """The median distance to the policy at a shift, the correlation, and the number of tokens."""
    moved, trained = np.roll(x, -shift, axis=1), np.roll(mask, -shift, axis=1)
    if shift:
        trained[:, -1 if shift > 0 else 0] = False
    both = mask & trained & np.isfinite(moved) & np.isfinite(policy)
    a, b = policy[both], moved[both]
    if a.size < 3 or a.std() == 0 or b.std() == 0:
        return np.inf, 0.0, int(a.size)
    return float(np.median(np.abs(a - b))), float(np.corrcoef(a, b)[0, 1]), int(a.size)


def _ends(ids: Any, mask: Any, facts: Mapping[str, Any]) -> Iterator[CheckFinding]:
    pad, ends = facts.get("pad"), facts.get("eos")
    is_end = np.isin(ids, [] if ends is None else ends) & mask
    if after := int(((np.cumsum(is_end, axis=1) > is_end) & mask).sum()):
        yield finding("after-end-trained", count=after)
    elif pad is not None:
        trailing = np.cumsum((mask & (ids != pad))[:, ::-1], axis=1)[:, ::-1] == 0
        count = (trailing & mask & (ids == pad)).sum(axis=1)
        if trained := int(count[count >= 2].sum()):
            yield finding("padding-trained", count=trained)


class AdvantageForm(NamedTuple):
    """How the advantages were formed."""

    name: str = ""  # in words; "" where nothing fits
    kl: bool | None = None  # whether a KL is in them; None: it may be
    beta: float | None = None  # its coefficient, in the advantages' unit (a z-score: the rewards'); None: not known
    kind: str = "reverse"  # the class of the KL that is in them: reverse (k1), k3, sign
    sum: float | None = None  # the sum over a prompt's completions, where it is not 0 and no rewards were passed


def advantage_form(t: Tokens, rewards: Array | None) -> AdvantageForm:
    """Explain the advantages by the rewards and by the log-ratios."""
    a = t.advantage
    if a is None or not np.any(a):
        return AdvantageForm("" if a is None else "all 0", None if a is None else False)
    if np.abs(a - t.average(a)).max() > 1e-4 * np.abs(a).max():
        return _per_token(t, a)
    group = np.zeros(t.first.size, int) if t.group is None else t.group
    if rewards is not None and rewards.size == t.first.size:
        return _per_completion(t, a[t.first], rewards, group)
    sums = np.bincount(group, weights=a[t.first])
    total = float(sums[np.abs(sums).argmax()])
    odd = t.group is not None and abs(total) > 1e-3 * np.abs(a).max()
    return AdvantageForm(kl=False if _without_kl(t, a[t.first]) else None, sum=total if odd else None)


def _per_token(t: Tokens, a: Array) -> AdvantageForm:
    """Advantages that differ within a completion: a KL per token, of this token alone or with the later ones."""
    if t.ref is None:
        return AdvantageForm("one per token")
    forms: dict[str, Array] = {"k1 per token, of the present policy": t.d, "abs per token": np.abs(t.d)}
    for whose, d in (("", t.d), (", of the old policy", t.d_old)):
        forms |= {f"k1 per token{whose}": d, f"k1 of this and later tokens{whose}": t.to_go(d)}
        forms[f"k3 per token{whose}"] = k3(d)
    y = a - t.average(a)
    for name, kl in forms.items():
        if slope := proportional(y, kl - t.average(kl)):
            return AdvantageForm(name, True, -slope, KINDS[name.partition(" ")[0]])
    return AdvantageForm("one per token")


def proportional(y: Array, x: Array) -> float:
    """The factor between two series; 0 where they are not proportional, or x is constant."""
    slope = float(x @ y / max(x @ x, 1e-300))
    varies = np.ptp(x) > max(1e-12, 1e-3 * np.abs(x).max())
    return slope if varies and np.abs(y - slope * x).max() <= EXPLAINED * np.abs(y).max() else 0.0


def _per_completion(t: Tokens, a: Array, rewards: Array, group: Any) -> AdvantageForm:
    """One advantage per completion: a form of the rewards, or of the rewards minus a KL."""
    groupings = {" per prompt": group, "": np.zeros_like(group)} if np.ptp(group) else {"": group}
    for where, rows in groupings.items():
        if (name := _form_of(a, rewards, None, rows)[0]) is not None:
            return AdvantageForm(f"{name}{where} of the rewards", False)
    anchors = {"": t.d, " of the old policy": t.d_old} if t.ref is not None else {}
    sizes = {"summed": t.total, "mean": t.average}
    forms: list[AdvantageForm] = []
    for whose, size, which, where in product(anchors, sizes, ("k1", "k3"), groupings):
        kl = sizes[size](k3(anchors[whose]) if which == "k3" else anchors[whose])[t.first]
        name, beta = _form_of(a, rewards, kl, groupings[where])
        if name is not None and beta:
            text = f"{name}{where} of the rewards minus {which}{whose}, {size}"
            forms.append(AdvantageForm(text, True, beta, KINDS[which]))
    if not forms:
        return AdvantageForm()
    agreed = all(abs((form.beta or 0) / (forms[0].beta or 1) - 1) < 0.02 for form in forms)
    return forms[0] if agreed else forms[0]._replace(beta=None)


def _form_of(a: Array, rewards: Array, kl: Array | None, rows: Any) -> tuple[str | None, float | None]:
    """The form of advantages that are rewards (minus a KL), centred in each row and scaled; and the KL's one beta."""
    count, named = np.bincount(rows), (a, rewards) if kl is None else (a, rewards, -kl)
    y, *columns = (x - (np.bincount(rows, weights=x) / count)[rows] for x in named)
    each_row = [rows == row for row in np.unique(rows)]
    for name, groups in (("mean removed", [rows >= 0]), ("z-score", each_row)):
        parts = [at for at in groups if at.sum() > len(columns) and all(np.ptp(x[at]) > 1e-9 for x in columns)]
        means = len(each_row) if name == "mean removed" else len(parts)
        if sum(at.sum() for at in parts) - means <= len(parts) + len(columns) - 1:
            continue  # as many free numbers as advantages
        fits = [np.linalg.lstsq(np.stack(columns)[:, at].T, y[at], rcond=1e-9)[0] for at in parts]
        off = [np.abs(y[at] - x @ np.stack(columns)[:, at]).max() for at, x in zip(parts, fits, strict=True)]
        betas = [0.0 if kl is None or not x[0] else x[1] / x[0] for x in fits]
        if max(off) <= EXPLAINED * np.abs(y).max() and np.ptp(betas) <= 1e-3 * np.abs(betas).max() + 1e-12:
            return name, float(np.median(betas))
    return None, None


def _without_kl(t: Tokens, a: Array) -> bool:
    """Whether advantages cannot hold a KL: completions with other KLs share all values, or values are round numbers."""
    values, counts = np.unique(np.round(a / np.abs(a).max(), 6), return_counts=True)
    # ranks may hold a KL: they are evenly spaced, each as often as any other
    uneven = values.size > 2 and np.ptp(np.diff(values)) > 1e-4 and np.abs(a).max() > 0.01
    if uneven and np.abs(a - np.round(a, 3)).max() < 2e-7 * max(1.0, np.abs(a).max()):
        return True
    return bool(t.ref is not None and np.any(t.d) and counts.min() >= 2 and np.ptp(counts))
