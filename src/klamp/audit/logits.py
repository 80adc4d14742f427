"""Checks losses on logits: distillation, an exact KL, and whether log-probabilities follow from logits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from klamp.audit.conclude import KINDS, RIGHT
from klamp.audit.divergences import Divergence, Positions, explain_logits, log_softmax
from klamp.audit.fit import explain
from klamp.audit.forms import Array, Tokens
from klamp.audit.verdict import Finding, Verdict, cannot_tell, note, warning, wrong
from klamp.errors import ConfigError, ShapeError, TensorError

POSITIONS = 64
"""Positions that are looked at."""
HEADS = {
    "no tail": "the sum over the head lacks its tail: it is made small by pushing probability out of the head",
    "renormalised": "both heads are renormalised: the rest of the vocabulary gets no gradient, and top-1 none at all",
    "teacher renormalised": "the teacher's head is renormalised: it claims mass that the teacher gives to other tokens",
    "bucket": "the tail is one bucket: a lower bound of the KL, right only where the tails have one shape",
    "generalised": "the head has its own mass term and no tail: right only at the teacher",
}
TAIL = "use klamp.topk_kl with the sampled tail, or klamp.linear_head_kl over the whole vocabulary"


def check_logits(
    loss: Tensor,
    logits: Tensor | None,
    teacher_logits: Tensor | None,
    *,
    mask: Any,
    ids: Tensor | None,
    means: str,
    beta: float | None,
    temperature: float,
) -> Verdict:
    """The verdict on a loss that was computed from logits [.., V], against those of a teacher."""
    if logits is None or not isinstance(logits, Tensor) or not logits.requires_grad:
        raise TensorError(
            "the logits have no gradient", got=type(logits).__name__, fix="pass the tensor that the loss comes from"
        )
    if teacher_logits is None:
        raise ConfigError(
            "a loss on logits needs the teacher's",
            got="teacher_logits=None",
            fix="pass teacher_logits=, or ref_logits=",
        )
    (gradient,) = torch.autograd.grad(loss, logits, retain_graph=True, allow_unused=True)
    if gradient is None:
        raise TensorError(
            "the loss was not computed from these logits",
            got="no gradient reaches them",
            why="a copy (logits / T, logits.float(), logits[:, :-1]) is another tensor than the one in the loss",
            fix="pass the tensor that the loss was computed from",
        )
    trained, where = _places(mask, logits)
    findings = list(_off_mask(gradient, trained))
    positions = _positions(gradient, logits, teacher_logits, ids, where, temperature)
    found = explain_logits(positions)
    if not found and (shifted := _shifted(gradient, logits, teacher_logits, ids, where, temperature)):
        findings.append(
            wrong("shift", f"the student is compared with the teacher's {shifted} position", fix="cut both alike")
        )
        return Verdict.of(findings, kl="unknown", summary=_summary(trained, positions))
    findings += _judged(found, positions, means)
    best = found[0] if found else None
    return Verdict.of(
        findings,
        summary=_summary(trained, positions),
        found=_described(best),
        kl=_class(found, positions),
        mean=_mean(best, trained, where),
        not_checked={
            "other micro-batches": "",
            **({} if ids is not None else {"sampled terms": "pass ids"}),
        },
    )


def _places(mask: Any, logits: Tensor) -> tuple[Any, tuple[Any, ...]]:
    """The trained positions as a boolean array, and the indices of at most `POSITIONS` of them, spread evenly."""
    shape = tuple(logits.shape[:-1])
    trained = np.ones(shape, bool) if mask is None else np.asarray(mask.detach().cpu()) > 0
    if trained.shape != shape:
        raise ShapeError(
            "mask does not fit the logits",
            got=f"mask {trained.shape}, logits {tuple(logits.shape)}",
            fix="pass the mask of the positions of the logits, without the last dimension",
        )
    places = np.argwhere(trained)
    if not len(places):
        raise ShapeError("no position is trained", got="a mask that is False everywhere", fix="pass the trained tokens")
    picked = places[np.unique(np.linspace(0, len(places) - 1, POSITIONS).astype(int))]
    return trained, tuple(picked.T)


def _array(x: Tensor, where: tuple[Any, ...], width: int | None = None) -> Array:
    index = tuple(torch.as_tensor(i, device=x.device) for i in where)
    return x.detach()[index][..., :width].double().cpu().numpy()


def _positions(
    gradient: Tensor, logits: Tensor, teacher: Tensor, ids: Any, where: tuple[Any, ...], temperature: float
) -> Positions:
    width = min(logits.shape[-1], teacher.shape[-1])
    tokens = None if ids is None else np.asarray(ids.detach().cpu())[where].astype(int)
    return Positions(
        gradient=_array(gradient, where, width),
        student=_array(logits, where, width),
        teacher=_array(teacher, where, width),
        ids=None if tokens is None else np.clip(tokens, 0, width - 1),
        eps=max(torch.finfo(logits.dtype).eps, 1.19e-7) / 2,
        temperature=temperature,
    )


def _off_mask(gradient: Tensor, trained: Any) -> Iterator[Finding]:
    size = gradient.detach().float().norm(dim=-1).cpu().numpy()
    outside, inside = size[~trained], size[trained]
    reached = ~(outside <= 1e-6 * max(inside.max(initial=0), 1e-30))
    if reached.any():
        yield wrong(
            "off-mask-gradient",
            f"{int(reached.sum())} of {outside.size} positions outside the mask carry gradient",
            fix="mask the loss before the mean, and divide by mask.sum()",
            count=int(reached.sum()),
        )


def _shifted(gradient: Tensor, logits: Tensor, teacher: Tensor, ids: Any, where: Any, temperature: float) -> str:
    if teacher.ndim != 3:
        return ""
    for shift, name in ((-1, "next"), (1, "previous")):
        at = where[1] - shift
        fine = (at >= 0) & (at < teacher.shape[1])
        kept = (where[0][fine], where[1][fine])
        p = _positions(gradient, logits, torch.roll(teacher, shift, 1), ids, kept, temperature)
        if any(x.kind not in ("sampled", "entropy", "none") for x in explain_logits(p)):
            return name
    return ""


def _judged(found: Sequence[Divergence], p: Positions, means: str) -> Iterator[Finding]:
    if not found:
        yield cannot_tell(
            "unknown",
            "no known divergence explains the gradient in the logits",
            fix="pass ids and temperature, or the loss without its other terms",
        )
        return
    best = found[0]
    if best.kind == "none" or best.kind == "entropy":
        yield wrong(
            "kl-absent",
            "the teacher has no part in the gradient" + ": only an entropy term is there" * (best.kind == "entropy"),
            fix="compute the divergence with gradients on, and add it to the loss",
        )
        return
    if best.kind == "sampled":
        yield from _sampled(best, p, means)
        return
    if (best.scale < 0).mean() > 0.9:
        yield wrong(
            "kl-away", "the divergence is subtracted: it drives student and teacher apart", fix="add it to the loss"
        )
    kinds = {x.kind for x in found if x.kind not in ("sampled", "entropy")}
    if means not in kinds:
        yield wrong(
            f"kl-{best.kind}",
            f"the gradient follows {best.name}, not the {means} divergence that was meant",
            fix=f'pass means="{best.kind}" if that is meant; else swap the arguments of the divergence '
            "(F.kl_div(input, target) is KL(target||input))",
        )
    if best.head in HEADS and best.head not in ("bucket", "generalised"):
        yield wrong(f"head-{best.head.replace(' ', '-')}", f"top-{best.size}: {HEADS[best.head]}", fix=TAIL)
    elif best.head in HEADS:
        yield warning(f"head-{best.head}", f"top-{best.size}: {HEADS[best.head]}", fix=TAIL)
    student, teacher = best.temperatures
    if student != teacher:
        yield wrong(
            "temperature",
            f"student at temperature {student:g}, teacher at {teacher:g}: the student ends at a power of the teacher",
            fix="divide both logits by one temperature",
        )
    elif student != p.temperature:
        yield warning("temperature", f"both logits are divided by {student:g}; {p.temperature:g} was passed")
    if best.beside:
        yield note("second-term", f"beside it: {best.beside}")


def _sampled(best: Divergence, p: Positions, means: str) -> Iterator[Finding]:
    """A gradient through the sampled token alone: name its coefficient as that of a sampled KL."""
    t = _as_tokens(best, p)
    prefix = _prefix_kl(best, p)
    if prefix:
        yield wrong(
            "kl-zero",
            f"the {prefix} of each position is a factor of the score, the same whatever token was sampled: its "
            "expected gradient is 0",
            fix="put it into the loss with its gradient, or use the sampled log-ratio as the advantage",
        )
        return
    explained = explain(t)
    if explained.stage == "unknown":
        yield cannot_tell(
            "unknown", "the sampled tokens have a factor that no known KL explains", fix="pass advantages"
        )
        return
    kinds = explained.kinds
    if kinds == ("zero",) and explained.fits[0].b < 0:
        yield wrong("kl-absent", "the loss is cross-entropy: the teacher has no part in it", fix="add the divergence")
        return
    right = {"reverse": "reverse", "forward": "forward"}.get(means, means)
    if right in kinds and explained.fits[0].b < 0:
        yield wrong("kl-away", "the sampled KL is subtracted", fix="add it to the loss")
    elif right in kinds:
        yield note("sampled", f"a sampled KL, gradient {explained.fits[0].kl.name if explained.fits[0].kl else ''}")
    else:
        row = KINDS.get(kinds[0], KINDS["neither"])
        yield wrong(row.code, row.what, fix=row.fix or RIGHT)


def _as_tokens(best: Divergence, p: Positions) -> Tokens:
    ids = p.ids if p.ids is not None else np.zeros(len(p.student), int)
    rows = np.arange(len(ids))
    student, teacher = (
        log_softmax(x / t)[rows, ids] for x, t in zip((p.student, p.teacher), best.temperatures, strict=True)
    )
    return Tokens(gradient=best.scale, policy=student, ref=teacher, row=np.zeros(len(ids), int), eps=max(p.eps, 1e-6))


def _prefix_kl(best: Divergence, p: Positions) -> str:
    log_s, log_t = log_softmax(p.student), log_softmax(p.teacher)
    s, t = np.exp(log_s), np.exp(log_t)
    for name, terms in (("reverse KL", s * (log_s - log_t)), ("forward KL", t * (log_t - log_s))):
        for order, whose in ((None, ""), (-log_t, " over the teacher's head"), (-log_s, " over the student's head")):
            columns = [terms] if order is None else []
            if order is not None:
                ranked = np.take_along_axis(terms, np.argsort(order, axis=1), axis=1)
                columns = [ranked[:, :k] for k in (1, 2, 3, 4, 5, 8, 10, 16, 20, 32, 50, 64, 100) if k < terms.shape[1]]
            for column in columns:
                x = column.sum(1)
                slope = (x @ best.scale) / max(x @ x, 1e-300)
                if (
                    np.ptp(x) > 1e-3 * np.abs(x).max()
                    and np.abs(best.scale - slope * x).max() < 1e-3 * np.abs(best.scale).max()
                ):
                    return name + whose
    return ""


def _class(found: Sequence[Divergence], p: Positions) -> str:
    if not found:
        return "unknown"
    if found[0].kind == "sampled":
        kinds = explain(_as_tokens(found[0], p)).kinds
        return " or ".join(kinds) or "unknown"
    if found[0].kind == "entropy":
        return "none"
    return "away" if (found[0].scale < 0).mean() > 0.9 else found[0].kind


def _described(best: Divergence | None) -> str:
    if best is None:
        return ""
    student, teacher = best.temperatures
    heat = "" if student == teacher == 1 else f", temperatures {student:g} and {teacher:g}"
    head = "" if best.head == "full" else f", {best.head}" + f", chosen by {best.chosen}" * bool(best.chosen)
    return best.name + head + heat + f", and {best.beside}" * bool(best.beside)


def _mean(best: Divergence | None, trained: Any, where: tuple[Any, ...]) -> str | None:
    """Whether the coefficient of a position is the same everywhere, or that of its sequence's mean."""
    if best is None or best.kind in ("none", "sampled") or trained.ndim != 2:
        return None
    length = trained.sum(1)[where[0]]
    for name, each in (("token", best.scale), ("sequence", best.scale * length)):
        if np.ptp(each) <= 0.01 * np.abs(each).max():
            return name
    return None


def _summary(trained: Any, p: Positions) -> str:
    return f"{int(trained.sum())} trained positions, {len(p.student)} looked at, vocabulary {p.student.shape[1]}"


def reproduce(arrays: Mapping[str, Any], logits: Tensor, other: Tensor | None, temperature: float) -> Iterator[Finding]:
    """Whether the log-probabilities of policy, reference and sampler are those of the logits at the ids."""
    mask, ids = arrays["mask"], arrays["ids"]
    if tuple(logits.shape[:-1]) != mask.shape:
        yield wrong(
            "logits-shape",
            f"the logits have {tuple(logits.shape[:-1])} places, the tokens {mask.shape}: a gather would read other places",
            fix="cut the logits to the places whose next token is in ids: logits[:, -T - 1 : -1]",
        )
        return
    scores = {"policy_logprobs": logits, "sampler_logprobs": logits, "ref_logprobs": other}
    for name, source in scores.items():
        if name not in arrays or source is None or tuple(source.shape[:-1]) != mask.shape:
            continue
        yield from _reproduced(name, arrays[name], source, ids, mask, temperature)


HEATS = (1.0, 0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.2, 1.5, 2.0)


def _reproduced(name: str, x: Array, logits: Tensor, ids: Any, mask: Any, temperature: float) -> Iterator[Finding]:
    places = np.argwhere(mask)
    places = places[np.unique(np.linspace(0, len(places) - 1, 4 * POSITIONS).astype(int))]
    best: tuple[float, float, int] | None = None
    for shift in (0, 1, -1):
        at = places[:, 1] + shift
        fine = (at >= 0) & (at < mask.shape[1])
        rows, here, there = places[fine, 0], places[fine, 1], at[fine]
        if not len(rows):
            continue
        raw = _array(logits, (rows, there))
        for heat in dict.fromkeys((temperature, *HEATS)):
            expected = log_softmax(raw / heat)[np.arange(len(rows)), np.clip(ids[rows, here], 0, raw.shape[1] - 1)]
            gap = float(np.median(np.abs(expected - x[rows, here])))
            if best is None or gap < 0.5 * best[0]:
                best = (gap, heat, shift)
    if best is None:
        return
    gap, heat, shift = best
    close = gap < (0.02 if logits.dtype in (torch.float32, torch.float64) else 0.1)
    if not close:
        return
    if shift:
        side = "next" if shift > 0 else "previous"
        yield wrong(
            "shift",
            f"{name} is read from the logits of the {side} place",
            fix="the logits at position t are of token t + 1: logits[:, :-1] with ids[:, 1:]",
            shift=shift,
        )
    if heat != temperature:
        yield wrong(
            "temperature",
            f"{name} is that of logits divided by {heat:g}, not by {temperature:g}",
            fix="divide the logits of policy, reference and sampler by one temperature",
            heat=heat,
        )


def beside(
    loss: Tensor, policy: Tensor, logits: Tensor, other: Tensor, arrays: Mapping[str, Any], temperature: float
) -> dict[str, Any] | None:
    """The divergence that passes beside the sampled log-probabilities: the rest of the gradient in the logits."""
    whole, part = torch.autograd.grad(loss, [logits, policy], retain_graph=True, allow_unused=True)
    if whole is None or tuple(logits.shape[:-1]) != arrays["mask"].shape:
        return None
    _, where = _places(torch.as_tensor(arrays["mask"]), logits)
    p = _positions(whole, logits, other, torch.as_tensor(arrays["ids"]), where, temperature)
    s = np.exp(log_softmax(p.student / temperature))
    score = -s
    score[np.arange(len(s)), p.ids] += 1
    factor = np.zeros(len(s)) if part is None else _array(part, where)
    rest = p.gradient - factor[:, None] * score / temperature
    if np.abs(rest).max() < 1e-5 * np.abs(p.gradient).max():
        return None
    found = explain_logits(Positions(**{**vars(p), "gradient": rest}))
    if not found:
        return None
    best = found[0]
    count = int(arrays["mask"].sum())
    return {
        "kind": best.kind if (best.scale > 0).mean() > 0.5 else "away",
        "name": best.name,
        "head": best.head,
        "coefficient": float(np.median(best.scale) * count),
    }
