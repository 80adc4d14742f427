"""Checks losses on logits: distillation, an exact KL, and whether log-probabilities follow from logits.

A divergence D(s, t) of s = softmax(z / T) has the gradient s (h - sum s h) / T in z, with h = dD/ds. Each candidate is
its h. A head of k tokens is found from the gradient itself, which outside the head is -s times a constant.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from klamp.audit.capture import Array, Tokens, roundoff
from klamp.audit.conclude import judge_kinds, off_mask
from klamp.audit.fit import explain
from klamp.audit.inputs import proportional
from klamp.audit.verdict import CheckFinding, Verdict, finding
from klamp.errors import ConfigError, ShapeError, TensorError

POSITIONS = 64  # positions that are looked at
HEATS = (1.0, 2.0, 0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.2, 1.5, 3.0, 4.0, 5.0)  # temperatures that are tried
ACCEPTED = 3e-4  # the largest residual of an accepted divergence, as a share of the gradient, in float32
DIVERGENCES = ("reverse", "forward", "js")
BETAS = (0.5, 0.1, 0.9, 0.25, 0.75)
REVERSE, FORWARD = "KL(student||teacher)", "KL(teacher||student)"


def check_logits(
    loss: Tensor, logits: Tensor | None, teacher_logits: Tensor | None, *, means: str, ids: Any, **options: Any
) -> Verdict:
    """The verdict on a loss of logits [.., V], against a teacher's logits; mask, beta, temperature as in `check`."""
    if not isinstance(logits, Tensor) or not logits.requires_grad:
        what, why = "a check needs policy_logprobs or logits with a gradient", "the verdict follows from that gradient"
        fix = "pass the tensor that the loss comes from, or compute the loss from klamp.tap(logp)"
        raise TensorError(what, got=f"logits: {type(logits).__name__}", why=why, fix=fix)
    if teacher_logits is None:
        why, fix = "the loss is compared with divergences from a teacher", "pass teacher_logits=, or ref_logits="
        raise ConfigError("a loss on logits needs the teacher's", got="teacher_logits=None", why=why, fix=fix)
    (gradient,) = torch.autograd.grad(loss, logits, retain_graph=True, allow_unused=True)
    if gradient is None:
        raise not_computed_from("these logits", "logits / T, logits.float(), logits[:, :-1]")
    positions = Positions.of(gradient, logits, teacher_logits, ids=ids, **options)
    trained, sizes = positions.trained, gradient.detach().double().norm(dim=-1).cpu().numpy()
    findings = list(off_mask(sizes, trained, 1e-6 * max(sizes[trained].max(), 1e-30)))
    forms = explain_logits(positions)
    kl, judged = _judged(forms, positions, means)
    for shift, where in ((-1, "next"), (1, "previous")) if kl == "unknown" and logits.ndim == 3 else ():
        shifted = explain_logits(Positions.of(gradient, logits, teacher_logits, ids=ids, shift=shift, **options))
        if any(x.kind in DIVERGENCES and x.head == "full" for x in shifted):
            judged = [finding("shift", what=f"the student is compared with the teacher's {where} position")]
    if kl == "unknown" and (who := _double_softmax(positions)):
        judged = [finding("double-softmax", who=who)]
    count, width = positions.student.shape
    not_checked = {"other micro-batches": ""} | ({} if ids is not None else {"sampled terms": "pass ids"})
    return Verdict.of(
        [*findings, *judged],
        summary=f"{int(trained.sum())} trained positions, {count} looked at, vocabulary {width}",
        found=_described(forms[0]) if forms else "",
        kl=kl,
        mean=mean_of(forms[0], positions) if forms else None,
        not_checked=not_checked,
    )


def not_computed_from(tensor: str, copies: str, fix: str = "") -> TensorError:
    """The error for a tensor that a loss does not depend on."""
    what, why = f"the loss was not computed from {tensor}", f"a copy ({copies}) is not the tensor in the loss"
    fix = "pass the tensor that the loss was computed from, before any slice, cast or product" + fix
    return TensorError(what, got="no gradient reaches it", why=why, fix=fix)


@dataclass(frozen=True, kw_only=True)
class Positions:
    """At most `POSITIONS` trained positions of a batch, spread evenly: N positions, V entries."""

    gradient: Array  # d loss / d student logits, [N, V]
    student: Array  # logits, [N, V]
    teacher: Array  # logits, [N, V]
    ids: Array | None  # the sampled tokens, [N]
    eps: float  # unit roundoff of the logits
    trained: Array  # the mask of the whole batch
    where: tuple[Array, ...]  # the indices of the positions in it, [N] each
    temperature: float  # what the trainer divides the logits by
    beta: float | None = None  # the mixture of a JS divergence, if the trainer has one

    @classmethod
    def of(
        cls, gradient: Tensor, logits: Tensor, teacher: Tensor, *, mask: Any, ids: Any, shift: int = 0, **facts: Any
    ) -> Positions:
        """The positions of a batch; `shift`: the teacher's logits are moved to later positions."""
        shape = tuple(logits.shape[:-1])
        trained = np.ones(shape, bool) if mask is None else np.asarray(torch.as_tensor(mask).detach().cpu()) > 0
        if trained.shape != shape or not trained.any():
            got = f"mask {trained.shape} with {int(trained.sum())} trained, logits {tuple(logits.shape)}"
            why, fix = "it has one value per position", "pass the mask of the positions of the logits, [..]"
            raise ShapeError("mask does not fit the logits", got=got, why=why, fix=fix)
        where = of_teacher = tuple(_spread(np.argwhere(trained), POSITIONS).T)
        if shift:
            inside = (where[1] - shift >= 0) & (where[1] - shift < teacher.shape[1])
            where = tuple(x[inside] for x in where)
            of_teacher = where[0], where[1] - shift
        width = min(logits.shape[-1], teacher.shape[-1])
        sources = {"gradient": (gradient, where), "student": (logits, where), "teacher": (teacher, of_teacher)}
        arrays = {name: _array(x, at)[:, :width] for name, (x, at) in sources.items()}
        tokens = None if ids is None else _array(torch.as_tensor(ids), where).astype(int).clip(0, width - 1)
        facts["eps"] = roundoff(torch.finfo(logits.dtype).eps)
        return cls(**arrays, ids=tokens, trained=trained, where=where, **facts)


def _spread(places: Array, count: int) -> Array:
    return places[np.unique(np.linspace(0, len(places) - 1, count).astype(int))]


def _array(x: Tensor, where: tuple[Any, ...]) -> Array:
    return x.detach()[tuple(torch.as_tensor(i, device=x.device) for i in where)].double().cpu().numpy()


def _judged(forms: Sequence[Divergence], p: Positions, means: str) -> tuple[str, list[CheckFinding]]:
    """The class of the divergence, and what is wrong with it."""
    if not forms:
        return "unknown", [finding("unknown", what="no known divergence explains the gradient in the logits")]
    best = forms[0]
    if best.kind in ("none", "entropy"):
        return "none", [finding("kl-absent", seen=": the teacher has no part in the gradient")]
    if best.kind == "sampled":
        return _sampled(best, p, means)
    kind, findings = best.kind, []
    if (best.scale < 0).mean() > 0.9:
        kind = "away"
        findings.append(finding("kl-away"))
    elif means not in {x.kind for x in forms}:
        what = f"the gradient follows {best.name}, not the {means} divergence that was meant"
        fix = f'swap the arguments (F.kl_div(input, target) is KL(target||input)), or pass means="{kind}"'
        findings.append(replace(finding(f"kl-{kind}", means=means, name=best.name), what=what, fix=fix))
    findings += [] if best.head == "full" else _head(forms, p)
    student, teacher = best.temperatures
    if student != teacher:
        what = f"student at temperature {student:g}, teacher at {teacher:g}: the student ends at a power of the teacher"
        findings.append(finding("temperature", what=what))
    elif student != p.temperature:
        findings.append(finding("other-temperature", heat=student, passed=p.temperature))
    if best.beside:
        findings.append(finding("second-term", name=best.beside))
    log_s, log_t = log_softmax(p.student / student), log_softmax(p.teacher / teacher)
    size, dead = (np.exp(log_s) * (log_s - log_t)).sum(1), np.abs(best.scale) < 1e-6 * np.abs(best.scale).max()
    if dead.any() and size[dead].min() >= size[~dead].max():
        findings.append(finding("kl-bounded", count=int(dead.sum()), size=dead.size))
    return kind, findings


CONSTANTS = {("reverse", "no tail"): 1, ("reverse", "generalised"): 0, ("forward", "no tail"): 0}
"""What the gradient of a head adds to its log-ratios, or to -teacher / student; else 1."""


def _head(forms: Sequence[Divergence], p: Positions) -> list[CheckFinding]:
    """What a head leaves out: nothing, if the sampled token adds the tail with the head's constant."""
    best, ids = forms[0], np.asarray(p.ids)
    for x in (x for x in forms if x.rest is not None and x.kind == best.kind and x.head in ("no tail", "generalised")):
        ell = log_softmax(p.student / x.temperatures[0]) - log_softmax(p.teacher / x.temperatures[1])
        ell, ours, tail = ell[np.arange(len(ids)), ids], CONSTANTS.get((x.kind, x.head), 1), x.rest / x.scale
        added = (tail - (ell if x.kind == "reverse" else -np.exp(-ell)))[np.abs(tail) > 1e-3]
        if added.size and np.ptp(added) < 0.02:
            theirs = round(float(added.mean()), 2)
            return [] if theirs == ours else [finding("head-mass", size=x.size, ours=ours, theirs=theirs)]
    if any(_is_centered(x, p) for x in forms):
        return [finding("head-centered", size=best.size)]
    return [finding(f"head-{best.head.replace(' ', '-')}", size=best.size)]


def _is_centered(x: Divergence, p: Positions) -> bool:
    """Whether head and sampled tail both have the constant -log(P/Q), P and Q the masses outside the head."""
    if x.rest is None or (x.kind, x.head) != ("reverse", "bucket"):
        return False
    logs = log_softmax(p.student / x.temperatures[0]), log_softmax(p.teacher / x.temperatures[1])
    rest = x.rest / x.scale
    ell, shown = np.subtract(*logs)[np.arange(len(rest)), np.asarray(p.ids)], np.abs(rest) > 1e-3
    outside = (np.argsort(np.argsort(-y)) >= k for y, k in product(logs, (x.size - 1, x.size)))
    masses = (np.subtract(*(np.log((np.exp(y) * out).sum(1)) for y in logs)) for out in outside)
    return bool(shown.any()) and any(np.abs(ell - rest - mass)[shown].max() < 0.02 for mass in masses)


def _double_softmax(p: Positions) -> str:
    """Whose probabilities are taken for logits, if that explains the gradient."""
    logits = p.student / p.temperature, p.teacher / p.temperature
    s, t = (np.exp(log_softmax(x)) for x in logits)
    sides = {"the teacher": (logits[0], t), "the student": (s, logits[1]), "both": (s, t)}
    for who, (student, teacher) in sides.items():
        for term in _whole(log_softmax(student), log_softmax(teacher), p.beta):
            column = term.column if student is logits[0] else _centred(s, term.column)
            fitted = _fitted(p, [term._replace(column=column)], (p.temperature, p.temperature), 0)
            if fitted.residual < max(ACCEPTED, 16 * p.eps):
                return who
    return ""


def _sampled(best: Divergence, p: Positions, means: str) -> tuple[str, list[CheckFinding]]:
    """Names the KL whose coefficient a gradient through the sampled token alone has."""
    ids = p.ids if p.ids is not None else np.zeros(len(p.student), int)
    log_s, log_t = (log_softmax(x / t) for x, t in zip((p.student, p.teacher), best.temperatures, strict=True))
    rows = np.arange(len(ids))
    policy, teacher = log_s[rows, ids], log_t[rows, ids]
    sequences = np.unique(p.where[0], return_inverse=True)[1]
    prefix = (np.exp(log_s) * (log_s - log_t)).sum(1)  # a baseline
    t = Tokens(gradient=best.scale, policy=policy, ref=teacher, row=sequences, eps=max(p.eps, 1e-6), baseline=prefix)
    explained = explain(t)
    if explained.stage in ("unknown", "free"):
        s, tail = np.exp(policy), np.log1p(-np.minimum(np.exp(policy), 1 - 1e-12))
        bucket = s * (policy - teacher - tail + np.log1p(-np.minimum(np.exp(teacher), 1 - 1e-12)))
        if proportional(best.scale, bucket) > 0:
            return "reverse", [finding("head-bucket", size=1)]
        if name := _prefix_kl(best.scale, log_s, log_t):
            what = f"the {name} of a position is a factor of the score, one for every sampled token"
            return "zero", [finding("kl-zero", what=what)]
        return "unknown", [finding("unknown", what="the sampled tokens have a factor that no known KL explains")]
    kinds, sign = explained.kinds, int(np.sign(explained.fits[0].b))
    if kinds[0] == "zero" and sign < 0:
        return "none", [finding("kl-absent", seen=": the loss is cross-entropy")]
    kl, findings = judge_kinds(kinds, sign, means)
    named = explained.fits[0].kl is not None and "baseline" in explained.fits[0].kl.name
    return kl, findings + [finding("kl-baseline")] * named


def _prefix_kl(scale: Array, log_s: Array, log_t: Array) -> str:
    """The KL of a prefix, over the vocabulary or over a head, that a coefficient of the score is proportional to."""
    for name, log_p, log_q in (("reverse KL", log_s, log_t), ("forward KL", log_t, log_s)):
        terms = np.exp(log_p) * (log_p - log_q)
        if proportional(scale, terms.sum(1)):
            return name
        for log_head, whose in ((log_t, "teacher's"), (log_s, "student's")):
            best = np.argsort(-log_head, axis=1)[:, :128]
            part, p, q = (np.take_along_axis(x, best, 1).cumsum(1) for x in (terms, np.exp(log_p), np.exp(log_q)))
            # the plain sum; with renormalised weights; with both sides renormalised
            forms = (part, part / p, part / p - np.log(p / q))
            if any(proportional(scale, x[:, k]) for x in forms for k in range(x.shape[1] - 1)):
                return f"{name} over the {whose} head"
    return ""


def _described(best: Divergence) -> str:
    student, teacher = best.temperatures
    heat = "" if student == teacher == 1 else f", temperatures {student:g} and {teacher:g}"
    head = "" if best.head == "full" else f", top-{best.size}, {best.head}"
    return best.name + head + heat + f", and {best.beside}" * bool(best.beside)


def reproduce(
    arrays: Mapping[str, Any], logits: Tensor, other: Tensor | None, temperature: float
) -> Iterator[CheckFinding]:
    """Whether the log-probabilities of policy, reference and sampler follow from the logits at the ids."""
    mask, ids = arrays["mask"], arrays["ids"]
    if tuple(logits.shape[:-1]) != mask.shape:
        yield finding("logits-shape", logits=tuple(logits.shape[:-1]), tokens=mask.shape)
        return
    scores = {"policy_logprobs": logits, "sampler_logprobs": logits, "ref_logprobs": other}
    for name, source in scores.items():
        if name in arrays and source is not None and tuple(source.shape[:-1]) == mask.shape and mask.any():
            yield from _reproduced(name, arrays[name], source, ids, mask, temperature)


def _reproduced(name: str, x: Array, logits: Tensor, ids: Any, mask: Any, temperature: float) -> Iterator[CheckFinding]:
    """Compare log-probabilities with logits at other places, other tokens and other temperatures."""
    places = _spread(np.argwhere(mask), 4 * POSITIONS)
    gap, heat, of_logits, of_ids = np.inf, temperature, 0, 0
    for moved, other in ((0, 0), (1, 0), (-1, 0), (0, 1), (0, -1)):
        at, token = places[:, 1] + moved, places[:, 1] + other
        inside = (np.minimum(at, token) >= 0) & (np.maximum(at, token) < mask.shape[1])
        rows = places[inside, 0]
        if not rows.size:
            continue
        raw = _array(logits, (rows, at[inside]))
        picked = np.clip(ids[rows, token[inside]], 0, raw.shape[1] - 1)
        for t in dict.fromkeys((temperature, *HEATS)):
            expected = log_softmax(raw / t)[np.arange(len(rows)), picked]
            typical = float(np.median(np.abs(expected - x[rows, places[inside, 1]])))
            if typical < 0.5 * gap:
                gap, heat, of_logits, of_ids = typical, t, moved, other
    if gap > (0.02 if logits.dtype in (torch.float32, torch.float64) else 0.1):
        if name != "sampler_logprobs":
            yield finding("logits-mismatch", tensor=name, gap=gap)
        return
    if shift := of_logits + of_ids:
        side = "next" if shift > 0 else "previous"
        what = f"{name} is read from the logits of the {side} place"
        if of_ids:
            what = f"{name} at each place belongs to the {side} token in ids (or ids was passed unshifted)"
        yield finding("shift", what=what, tensor=name, shift=shift)
    if heat != temperature:
        what = f"{name} follows from logits divided by {heat:g}, not by {temperature:g}"
        yield finding("temperature", what=what, tensor=name, heat=heat)


def beside(
    loss: Tensor, policy: Tensor, logits: Tensor, other: Tensor, arrays: Mapping[str, Any], temperature: float
) -> dict[str, Any] | None:
    """The divergence that passes beside the sampled log-probabilities: the rest of the gradient in the logits."""
    whole, part = torch.autograd.grad(loss, [logits, policy], retain_graph=True, allow_unused=True)
    mask = arrays["mask"]
    if whole is None or tuple(logits.shape[:-1]) != mask.shape:
        return None
    p = Positions.of(whole, logits, other, mask=mask, ids=arrays["ids"], temperature=temperature)
    score = _score(np.exp(log_softmax(p.student / temperature)), np.asarray(p.ids))
    factor = np.zeros(len(score)) if part is None else _array(part, p.where)
    rest = p.gradient - factor[:, None] * score / temperature
    forms = explain_logits(replace(p, gradient=rest)) if np.abs(rest).max() >= 1e-5 * np.abs(p.gradient).max() else []
    forms = [x for x in forms if x.kind in DIVERGENCES]
    if not forms:
        return None
    best, mean = forms[0], mean_of(forms[0], p)
    rows = mask.sum(1)[p.where[0]] * np.count_nonzero(mask.any(1)) if mean == "sequence" else int(mask.sum())
    shown = {name: getattr(best, name) for name in ("kind", "name", "head", "size")}
    return shown | {"mean": mean, "coefficient": float(np.median(best.scale * rows))}


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
    rest: Array | None = None  # the coefficients of a second term that is the sampled token, [N]


def log_softmax(x: Array) -> Array:
    y = x - x.max(-1, keepdims=True)
    return y - np.log(np.exp(y).sum(-1, keepdims=True))


def explain_logits(p: Positions) -> list[Divergence]:
    """The divergences that explain the gradient, the best first; empty where none does."""
    size = np.linalg.norm(p.gradient, axis=1)
    if not np.any(size > 0):
        return [Divergence("none", "no gradient", "full", (1.0, 1.0), size, "", 0.0)]
    t, tolerance = p.temperature, max(ACCEPTED, 16 * p.eps)  # of what rounding explains
    others = (x for h in HEATS for x in ((h, h), (h, 1.0), (1.0, h)))
    temperatures = dict.fromkeys(((t, t), (t, 1.0), (1.0, 1.0), (1.0, t), *others))
    for second, heats in product((False, True), temperatures):  # one term at any temperature, before two terms
        forms = sorted(_candidates(p, heats, second=second), key=lambda x: x.residual)
        limit = min(tolerance, max(20 * forms[0].residual, tolerance / 10))
        if good := [x for x in forms if x.residual < tolerance and x.residual <= limit]:
            return sorted(good, key=lambda x: mean_of(x, p) is None)
    return []


def mean_of(best: Divergence, p: Positions) -> str | None:
    """Whether the coefficients of the positions are a mean over tokens or over sequences; None: neither."""
    if best.kind in ("none", "sampled") or len(p.where) != 2:
        return None
    means = {"token": best.scale, "sequence": best.scale * p.trained.sum(1)[p.where[0]]}
    return next((name for name, x in means.items() if np.ptp(x) <= 0.01 * np.abs(x).max()), None)


class _Term(NamedTuple):
    """A divergence and its gradient in the logits, per unit of coefficient, [N, V]."""

    kind: str
    name: str
    column: Array
    head: str = "full"


def _candidates(p: Positions, heats: tuple[float, float], *, second: bool) -> Iterator[Divergence]:
    """Each divergence, over the vocabulary and over the head that the gradient shows; or each with a second term."""
    log_s, log_t = log_softmax(p.student / heats[0]), log_softmax(p.teacher / heats[1])
    s, terms = np.exp(log_s), [*_whole(log_s, log_t, p.beta)]
    simple = [_Term("entropy", "entropy", _centred(s, log_s))]
    simple += [] if p.ids is None else [_Term("sampled", "a factor of each sampled token", _score(s, p.ids))]
    heads, size = head_of(p.gradient, s), 0
    if heads is not None:
        counts = heads.sum(1)
        size = int(counts.max())
        if not second or size > 3:  # two free numbers explain any small head
            terms += _headed(heads, log_s, log_t)
        if second and size > 3 and p.ids is not None:  # the sampled token shows in the head without belonging to it
            for log_p, k in product((log_t, log_s), {int(counts.min()), size - 1} - {0, 1}):
                terms += _headed(np.argsort(np.argsort(-log_p)) < k, log_s, log_t)
    for pair in product(terms, simple) if second else ((x,) for x in (*simple, *terms)):
        yield _fitted(p, pair, heats, size)


def _centred(s: Array, h: Array) -> Array:
    return s * (h - (s * h).sum(-1, keepdims=True))


def _whole(log_s: Array, log_t: Array, beta: float | None) -> Iterator[_Term]:
    s, t = np.exp(log_s), np.exp(log_t)
    yield _Term("reverse", REVERSE, _centred(s, log_s - log_t))
    yield _Term("forward", FORWARD, s - t)
    for b in dict.fromkeys((beta, *BETAS) if beta is not None and 0 < beta < 1 else BETAS):
        log_m = np.logaddexp(np.log1p(-b) + log_s, np.log(b) + log_t)
        yield _Term("js", f"JS({b:g})", _centred(s, (1 - b) * (log_s - log_m)))


def _score(s: Array, ids: Array) -> Array:
    """The gradient of each sampled token's log-probability in the logits."""
    score = -s
    score[np.arange(len(s)), ids] += 1
    return score


def head_of(gradient: Array, s: Array) -> Array | None:
    """The entries whose gradient is not -s times one constant: the head; None where that is most of the vocabulary."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(s > 0, gradient / s, 0.0)
    middle = np.median(ratio, axis=1, keepdims=True)
    off = np.abs(ratio - middle) * s > 1e-4 * np.abs(gradient).max(1, keepdims=True)
    return off if 1 < off.sum(1).max() <= s.shape[1] // 2 else None


def _headed(heads: Array, log_s: Array, log_t: Array) -> Iterator[_Term]:
    s, t, inside = np.exp(log_s), np.exp(log_t), heads.astype(float)
    s_out, t_out = (np.maximum(1 - (x * inside).sum(1, keepdims=True), 1e-30) for x in (s, t))
    ell = log_s - log_t
    yield _Term("reverse", REVERSE, _centred(s, inside * (ell + 1)), "no tail")
    yield _Term("reverse", REVERSE, _centred(s, inside * ell), "generalised")
    yield _Term("reverse", REVERSE, _centred(s, np.where(heads, ell, np.log(s_out / t_out))), "bucket")
    yield _Term("forward", FORWARD, s * (t * inside).sum(1, keepdims=True) - t * inside, "no tail")
    yield _Term("forward", FORWARD, _centred(s, inside * -np.expm1(-ell)), "generalised")
    yield _Term("forward", FORWARD, _centred(s, np.where(heads, -np.exp(-ell), -t_out / s_out)), "bucket")
    hs, ht = (np.where(heads, x, -np.inf) for x in (log_s, log_t))
    with np.errstate(invalid="ignore"):  # a position without a head
        hs, ht = (x - np.logaddexp.reduce(x, axis=1, keepdims=True) for x in (hs, ht))
        log_m = np.where(heads, np.logaddexp(hs, ht) - np.log(2), 0.0)
    ps, pt = np.exp(hs), np.exp(ht)
    gap, half = np.where(heads, hs - np.where(heads, ht, 0), 0.0), np.where(heads, (hs - log_m) / 2, 0.0)
    yield _Term("reverse", REVERSE, _centred(ps, gap), "renormalised")
    yield _Term("forward", FORWARD, ps - pt, "renormalised")
    yield _Term("forward", FORWARD, s - pt, "teacher renormalised")
    yield _Term("js", "JS(0.5)", _centred(ps, half), "renormalised")


def _fitted(p: Positions, terms: Sequence[_Term], heats: tuple[float, float], size: int) -> Divergence:
    (kind, name, _, head), *second = terms
    x = np.stack([term.column for term in terms], axis=-1)
    to_columns = x.swapaxes(1, 2)
    scales = np.linalg.pinv(to_columns @ x, rcond=1e-9, hermitian=True) @ to_columns @ p.gradient[..., None]
    residual = p.gradient - (x @ scales)[..., 0]
    off = float(np.sqrt((residual**2).sum() / max((p.gradient**2).sum(), 1e-300)))
    other = "".join(term.name for term in second)
    rest = scales[:, 1, 0] if second and second[0].kind == "sampled" else None
    return Divergence(kind, name, head, heats, scales[:, 0, 0], other, off, 0 if head == "full" else size, rest)
