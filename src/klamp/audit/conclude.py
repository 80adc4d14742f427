"""From a capture to a verdict: which explanation of the gradient holds, and what it means. NumPy only.

A class of KL is wrong if it is not the divergence that was meant. Nothing is accused that rounding, a path around the
log-probabilities, or a KL inside the advantages could explain.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

from klamp.audit.capture import Array, Capture, Tokens
from klamp.audit.fit import MEANS, Fit, at_zero, explain
from klamp.audit.forms import Form, k3, masks
from klamp.audit.inputs import advantage_form, examine_inputs
from klamp.audit.verdict import CheckFinding, Verdict, finding

RIGHT = {"reverse": ("reverse", "squared"), "forward": ("forward",)}  # what was meant -> the classes that are right
CODES = {"old": "kl-other-anchor", "k3": "kl-k3-in-advantage"}  # class -> the finding, where it is not `kl-CLASS`
CONSTANT = "it is one number for each token, with any reference (k1 differentiated)"
UNREADABLE = {"empty-mask", "not-finite", "gradient-not-finite", "not-log-probabilities"}  # findings that end a check
BETA_OFF = 0.05  # from which share on a beta is another one
BETA_AGREE = 0.02  # within which share all accepted forms have to agree on it
ENOUGH = 30  # trained tokens below which the verdict asks for more
NEAR_ZERO = 0.02  # RMS log-ratio below which the derivatives at the reference are read
AT_ZERO = {0: "reverse", -1: "forward", 1: "swapped", 2: "reverse", 3: "squared", 1.5: "reverse", -3: "neither"}
"""c'' / c' at the reference -> the class."""
SHOWN_BY = {
    "the KL": ("ref_logprobs", "pass ref_logprobs"),
    "the policy loss": ("advantages", "pass advantages"),
    "the ratio and its clip": ("old_logprobs", "pass old_logprobs"),
    "sampler against policy": ("sampler_logprobs", "pass sampler_logprobs"),
    "tokens after the end": ("ids", "pass ids, eos and pad"),
}
"""What stays open -> the input that would show it."""


def conclude(capture: Capture) -> Verdict:
    """The verdict on a captured micro-batch."""
    arrays, facts = capture.arrays, capture.facts
    g, mask = arrays["gradient"], arrays["mask"]
    findings = [CheckFinding(**fields) for fields in facts.get("findings", ())]
    findings += examine_inputs(arrays, facts)
    if mask.any():
        inside, moved = np.sqrt(np.square(np.nan_to_num(g[mask])).mean()), ""
        for shift, where in ((-1, "early"), (1, "late")) if ((g != 0) != mask).any() else ():
            if ((g != 0) == np.roll(mask, shift, axis=1)).mean() > 0.98:
                moved = f"; the loss's mask is one token {where}"
        findings += off_mask(np.abs(g), mask, 1e-7 * inside, moved=moved)
    else:
        findings.append(finding("empty-mask"))
    if bad := int((~np.isfinite(g[mask])).sum()):
        findings.append(finding("gradient-not-finite", count=bad, size=int(mask.sum())))
    if UNREADABLE & {x.code for x in findings}:
        return Verdict.of(findings, not_checked=_not_checked(arrays, facts))
    return Reading(capture, findings).verdict()


def off_mask(sizes: Array, mask: Any, threshold: float, *, moved: str = "") -> Iterator[CheckFinding]:
    """Gradients outside of the mask, of which the sizes are given, beyond a threshold."""
    outside = np.nan_to_num(sizes[~mask], nan=np.inf)
    reached = outside[outside > threshold]
    if reached.size and threshold > 0:
        inside, size = (float(np.sqrt(np.square(np.nan_to_num(x)).mean())) for x in (sizes[mask], reached))
        count = reached.size
        yield finding("off-mask-gradient", count=count, size=outside.size, inside=inside, outside=size, moved=moved)


def _not_checked(arrays: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, str]:
    left = {what: how for what, (name, how) in SHOWN_BY.items() if name not in arrays}
    if facts.get("beta") is None and "ref_logprobs" in arrays:
        left["the size of the KL"] = "pass beta"
    if not facts.get("logits_seen") or any(x["code"] == "logits-mismatch" for x in facts.get("findings", ())):
        left["temperature and alignment with the logits"] = "pass logits and ids"
    if facts.get("around") and not facts.get("beside"):
        left["what reaches the parameters past policy_logprobs (value head, entropy, exact KL)"] = "pass logits"
    return left | {"whether the reference is the right model, other micro-batches, scaling over ranks": ""}


def judge_kinds(kinds: Sequence[str], direction: int, means: str) -> tuple[str, list[CheckFinding]]:
    """The class of a KL in one word, and what is wrong with it; direction -1: the KL is subtracted from the loss."""
    right, names = RIGHT.get(means, ()), " or ".join(kinds)
    if direction < 0 and not set(kinds) & {"zero", "old"}:
        return "away", [finding("kl-away", kinds=kinds)]
    if all(kind in right for kind in kinds):
        return "reverse" if kinds[0] == "squared" else kinds[0], []
    if set(kinds) & set(right):
        return names, [finding("kl-ambiguous", names=names, kinds=kinds)]
    what = CONSTANT + "; its sign is wrong, too: it raises each sampled token alike" * (direction < 0)
    return names, [finding(CODES.get(k, f"kl-{k}"), what=what, means=means, name=k) for k in kinds]


class Reading:
    """One capture, its explanation, and the findings that follow."""

    def __init__(self, capture: Capture, findings: list[CheckFinding]) -> None:
        self.arrays, self.facts, self.findings = capture.arrays, capture.facts, findings
        self.beta: float | None = self.facts.get("beta")
        self._means: str = self.facts.get("means", "reverse")
        self.t = Tokens.of(self.arrays, self.facts)
        self._leave_out()
        self.explained = self.policy = explain(self.t)
        self.unshifted = self.t  # the tokens that the policy loss is explained on
        if (part := self.t.policy_part) is not None:  # a watched loss: the policy loss is explained alone
            self.policy = explain(replace(self.t, gradient=part, policy_part=None, ref=None))
        if self.explained.stage == "unknown":
            self._try_shifts()
        self.form = advantage_form(self.t, self.arrays.get("rewards"))
        self.kl: str | None = None
        self.visible: float | None = None  # the smallest beta that would have stood out
        self.measured: float | None = None  # a beta that does not follow from the fit
        self.open: dict[str, str] = {}

    def say(self, code: str, **evidence: Any) -> None:
        self.findings.append(finding(code, **evidence))

    def verdict(self) -> Verdict:
        """Go through policy loss, KL and size, and gather the answer."""
        self._policy_loss()
        self._divergence()
        if self.form.name:
            self.say("advantages", form=self.form.name, beta=self.form.beta)
        if self.form.sum is not None:
            self.say("advantages-not-centred", sum=self.form.sum)
        if self.t.policy.size < ENOUGH:
            self.say("few-tokens", count=self.t.policy.size)
        beta, mean = self._size(), self._mean()
        names = {" = ".join(x.policy.names[:5]) if x.policy else None for x in self.policy.fits}
        t, visible = self.t, self.visible is not None and np.isfinite(self.visible)
        summary = (
            f"{t.policy.size} trained tokens of {t.lengths.size} completions, {self.facts.get('dtype', 'float32')}"
        )
        summary += f", |log-ratio| {t.distance:.2g} nats RMS" * (t.ref is not None)
        return Verdict.of(
            self.findings,
            summary=summary + (f"; a KL with beta above {self.visible:.1g} would be seen" if visible else ""),
            found=self._found(beta),
            kl=self.kl,
            beta=beta,
            surrogate=names.pop() if len(names) == 1 and self.policy.stage not in ("unknown", "free") else None,
            mean=mean,
            beta_seen=self.visible,
            not_checked=_not_checked(self.arrays, self.facts) | self.open,
        )

    def _leave_out(self) -> None:
        """Drop completions that a loss leaves out: all of their gradients are 0, and their advantages are not."""
        t = self.t
        if t.advantage is None or "segments" in self.arrays:
            return
        moved = np.bincount(t.row, weights=np.abs(t.gradient)) > 0
        left_out = ~moved & (np.bincount(t.row, weights=np.abs(t.advantage)) > 0)
        if left_out.any() and moved.any():
            self.say("completions-left-out", count=int(left_out.sum()), size=int(moved.size))
            mask = self.arrays["mask"].copy()
            mask[np.flatnonzero(mask.any(1))[left_out]] = False
            self.arrays = {**self.arrays, "mask": mask}
            self.t = Tokens.of(self.arrays, self.facts)

    def _try_shifts(self) -> None:
        """Look for a loss that compares a token with the reference or the old policy of its neighbour."""
        names = [x for x in ("ref_logprobs", "old_logprobs", "advantages") if np.ndim(self.arrays.get(x)) == 2]
        for name, (shift, where) in product(names, ((-1, "next"), (1, "previous"))):
            mask = self.arrays["mask"].copy()
            mask[:, -1 if shift < 0 else 0] = False
            moved = np.roll(self.arrays[name], shift, axis=1)
            t = Tokens.of({**self.arrays, name: moved, "mask": mask}, self.facts)
            explained = explain(t, simple=True) if t.policy.size >= 12 else self.explained
            if explained.stage in ("KL alone", "one mean", "two means"):
                what = f"the loss compares each token with {name} of the {where} token"
                self.say("shift", what=what, tensor=name, shift=-shift)
                self.t, self.explained = t, explained
                return

    def _scale(self, *, agreed: bool = False) -> float:
        """The size of the policy loss's coefficient, which beta is relative to; 0: not known, or not agreed on."""
        fits = [x for x in self.policy.fits if x.policy is not None] if self.policy.best is not None else []
        sizes = [abs(x.a) for x in fits]
        apart = any(x.policy.scaled for x in fits if x.policy) or (sizes and np.ptp(sizes) > BETA_AGREE * sizes[0])
        return 0.0 if not sizes or (agreed and apart) else sizes[0]

    def _policy_loss(self) -> None:
        fit, t = self.policy.best, self.t
        if t.advantage is None or not np.any(t.advantage):
            return
        if fit is None:  # of no known form: a watched loss still shows its direction
            part = np.zeros_like(t.advantage) if t.policy_part is None else t.policy_part
            sign = -1 if part @ t.advantage > 0.5 * np.linalg.norm(part) * np.linalg.norm(t.advantage) else 1
        elif self.policy.stage == "free":
            sign = fit.signs[0] or 1
        else:
            sign = np.sign(fit.a)
        if sign <= 0:
            self.say("policy-absent" if sign == 0 else "policy-reversed")
        if fit is not None and fit.policy is not None and fit.on < 1:
            names = masks(self.unshifted, fit.policy.factor == 0)
            self.say("policy-gated", off=1 - fit.on, by=" or ".join(names) or "a clip or a mask")

    def _divergence(self) -> None:
        t, fit, kinds = self.t, self.explained.best, self.explained.kinds
        near = t.ref is not None and t.distance <= NEAR_ZERO
        if near and (fit is None or fit.kl is None or len(kinds) > 1) and self._at_the_reference():
            return
        if fit is None:
            self.kl = "unknown"
            coarse = "the log-probabilities are too coarse to explain the gradient"
            self.say("unknown", what=coarse if t.eps > 1e-4 else "no known policy loss and KL explain this gradient")
        elif fit.kl is None:
            self.kl = None if t.ref is None else "none"
            if t.ref is not None and not self._beside():
                self._no_kl(fit)
        elif t.ref is None and "zero" in kinds:
            self.say("no-kl-looked-for")
        elif kinds == ("zero",) and fit.policy is None and fit.b < 0 and self.beta is None:
            self.kl = "none or zero"
            self.say("kl-ambiguous", names="no KL at all (cross-entropy), or k1 subtracted", kinds=kinds)
        else:
            if {"reverse", "zero"} <= {*kinds} and np.ptp(t.d) <= 1e-6 * np.abs(t.d).max(initial=0):
                kinds = tuple(dict.fromkeys((*kinds, "forward")))  # a constant log-ratio: every KL is a constant
            self._judge(kinds, fit.signs[1] if self.explained.stage == "free" else fit.b)
            if fit.bounds is not None:
                self.say("kl-clamped", low=fit.bounds[0], high=fit.bounds[1])
            if self.kl in RIGHT.get(self._means, ()):
                self._cautions(fit.kl, kinds)

    def _judge(self, kinds: Sequence[str], coefficient: float) -> None:
        direction = int(np.sign(coefficient)) * (-1 if (self.beta or 0) < 0 else 1)
        self.kl, findings = judge_kinds(kinds, direction, self._means)
        self.findings += findings + ([finding("kl-beyond")] if direction > 0 > (self.beta or 0) else [])

    def _cautions(self, kl: Form, kinds: Sequence[str]) -> None:
        drift = float(np.sqrt(np.square(self.t.r - 1).mean()))
        if drift > 1e-3 and not any("ratio" in name.replace("log-ratio", "") for name in kl.names):
            self.say("no-ratio", drift=drift)
        if tuple(kinds) == ("squared",):
            self.say("kl-squared")
        if kl.coupled:
            self.say("kl-coupled", form=kl.name)

    def _at_the_reference(self) -> bool:
        """Read the second and third derivative where the policy is (nearly) the reference; whether they answered."""
        readings = [x for mean in MEANS if (x := at_zero(self.t, mean)) is not None]
        visible, fit = [x for x in readings if not np.isnan(x[1])], self.explained.best
        if not visible:
            answered = bool(readings) and fit is not None and fit.kl is not None and "zero" in self.explained.kinds
            if answered and fit is not None:
                self._judge(("zero",), fit.b)
            return answered
        first, ratio = visible[0]
        nearest = min(AT_ZERO, key=lambda x: abs(x - ratio))
        sure = abs(nearest - ratio) <= 0.15
        if (scale := self._scale(agreed=True)) and np.ptp([x[0] for x in visible]) <= BETA_AGREE * abs(first):
            self.measured = first / (2.0 if sure and nearest == 1.5 else 1.0) / scale
        self._judge((AT_ZERO[nearest],) if sure else ("neither", "reverse"), first)
        return True

    def _beside(self) -> bool:
        """A KL computed from the logits passes beside the log-probabilities: judge it as such."""
        beside = self.facts.get("beside")
        if not beside:
            return False
        self._judge((beside["kind"],), beside["coefficient"])
        if beside["head"] in ("no tail", "renormalised"):
            self.say(f"head-{beside['head'].replace(' ', '-')}", size=beside["size"])
        if self._scale(agreed=True) and beside["mean"]:
            self.measured = beside["coefficient"] / self._scale()
        return True

    def _no_kl(self, fit: Fit) -> None:
        """The gradient holds no KL: say whether one would have shown, and where it may be instead."""
        t, beta, form, scale = self.t, self.beta, self.form, self._scale()
        self.visible = limit = self.explained.b_seen / scale if scale else None
        if beta != 0 and form.kl:
            self._judge((form.kind,), form.beta or 0.0)
            self.say("kl-in-advantages", form=form.name, beta=form.beta)
            self.measured = form.beta
            return
        shown = "any size" if limit is None else f"{limit:.1g}"
        silent, shows = ": the loss has no gradient at all", f": one with beta above {shown} would have been seen"
        meant = form.kl is False or self.facts.get("kl_in") == "loss"
        detached = self.facts.get("ref_detached") or self._in_value_only()
        no_gradient = limit is None and fit.policy is None and not np.any(t.gradient)
        rules = (
            (beta == 0, "none", None),
            (detached, "none", finding("kl-detached")),
            (t.distance < 1e-6, "unknown", finding("step-zero")),
            (self.facts.get("around"), "unknown", finding("path-around")),
            (no_gradient, "none", finding("kl-absent", seen=silent)),
            (limit is None or abs(beta or np.inf) < limit, "unknown", finding("no-power", shown=shown, seen=limit)),
            (meant, "none", finding("kl-absent", seen=shows)),
            (True, "unknown", finding("kl-in-advantages-or-absent", seen=limit)),
        )
        self.kl, absent = next((kl, absent) for holds, kl, absent in rules if holds)
        self.findings += [] if absent is None else [absent]

    def _in_value_only(self) -> bool:
        """Whether the loss's value holds a KL of the given beta, found by subtracting the policy loss's value."""
        t, loss, best = self.t, self.facts.get("loss"), self.policy.fits[0]
        if loss is None or self.beta is None:
            return False
        values, scale = [0.0], 1.0
        if best.policy is not None and t.advantage is not None:
            w, scale, (low, high) = t.weights(best.w or "token"), abs(best.a), t.clip or (0.2, 0.2)
            clipped = np.maximum(-t.advantage * t.r, -t.advantage * np.clip(t.r, 1 - low, 1 + high))
            parts = (-t.advantage * t.r, -t.advantage, -t.advantage * t.policy, best.policy.values, clipped)
            values = [best.a * float(w @ x) for x in parts]
        estimates = (t.d, t.d**2 / 2, k3(t.d), k3(-t.d), np.abs(t.d), t.r * k3(t.d), t.total(t.d))
        kls = [scale * self.beta * float(t.weights(mean) @ x) for mean in MEANS for x in estimates]
        noise = 8 * t.eps * (abs(loss) + max(map(abs, values)))
        rests = [loss - value for value in values if abs(loss - value) > 1e3 * noise]
        return any(abs(rest - kl) < 1e-5 * abs(kl) + 4 * noise for rest in rests for kl in kls if kl)

    def _size(self) -> float | None:
        """The coefficient relative to the policy loss, if all accepted forms agree on it; is it the one passed?"""
        fit, passed, form, scale = self.explained.best, self.beta, self.form, self._scale()
        has_kl = fit is not None and fit.kl is not None
        if has_kl and scale and np.isfinite(self.explained.b_seen):
            self.visible = self.explained.b_seen / scale
        beta, blur = self.measured, 0.0
        if beta is None and fit is not None and fit.kl is not None and self.explained.stage != "free":
            betas = [x.b / (abs(x.a) if x.policy is not None else scale) for x in self.explained.fits if x.a or scale]
            scaled = any(form is not None and form.scaled for x in self.explained.fits for form in (x.kl, x.policy))
            if betas and not scaled and np.ptp(betas) <= BETA_AGREE * abs(betas[0]):
                beta, blur = betas[0], fit.b_error / abs(fit.b) if fit.b else 0.0
            elif not scale:
                self.say("beta-scale")
        if passed and beta is None and has_kl:
            self.open["the size of the KL"] = "its scale beside the policy loss is not known"
        divided = form.kl and "z-score" in form.name
        if beta is None or passed is None or self.kl is None or "old" in self.kl or divided:
            return beta
        if passed == 0:
            self.say("beta-off", seen=abs(beta), passed=0.0, cause=": a KL acts although beta is 0")
        elif abs(abs(beta / passed) - 1) > BETA_OFF + blur:
            partly = self.facts.get("around") and abs(beta) < abs(passed) and not self.facts.get("beside")
            coupled = fit is not None and fit.kl is not None and (fit.kl.coupled or (fit.w or fit.u) != fit.u)
            code = "in-advantages" if form.kl else "around" if partly else "coupled" if coupled else "off"
            self.say(f"beta-{code}", seen=abs(beta), passed=abs(passed), cause=self._cause(abs(beta / passed)))
        return beta

    def _cause(self, factor: float) -> str:
        """What may have multiplied beta by this factor."""
        mask, lengths = self.arrays["mask"], self.t.lengths
        places, count, rows = mask.size, int(mask.sum()), lengths.size
        causes = {
            f"it is a mean over all {places} places, the policy loss over {count} tokens": count / places,
            f"the policy loss is a mean over all {places} places, the KL over {count} tokens": places / count,
            "it is summed over each completion, the policy loss is a mean over tokens": lengths.mean(),
            "it is a mean over tokens, the policy loss is summed over each completion": 1 / lengths.mean(),
            "a factor 1/2 is missing (k2 = log_ratio**2 / 2)": 2.0,
            "a factor 1/2 too many": 0.5,
            f"it is divided by the number of completions ({rows})": 1 / rows,
            f"it is not divided by the number of completions ({rows})": float(rows),
            f"it is divided by the number of tokens ({count})": 1 / count,
            f"it is not divided by the number of tokens ({count})": float(count),
            "beta is squared": abs(self.beta or 0),
            "the cap of cispo scales the policy loss": 1 / self.t.clip[1] if self.t.clip else 0.0,
        }
        return next((f": {name}" for name, x in causes.items() if x and abs(factor / x - 1) < 0.01), "")

    def _mean(self) -> str | None:
        pairs = {(x.w, x.u) for x in self.explained.fits}
        if self.explained.best is None or self.explained.stage == "free" or len(pairs) != 1:
            return None
        if self.explained.same_means:
            return "token or sequence (equal lengths)"
        w, u = pairs.pop()
        if self.t.policy_part is not None and self.policy.fits:
            w = self.policy.fits[0].w if len({x.w for x in self.policy.fits}) == 1 else None
        if w and u and w != u:
            self.say("two-means", policy=w, kl=u)
            return f"{w}; KL {u}"
        return w or u

    def _found(self, beta: float | None) -> str:
        fit, first, beside = self.explained.best, self.policy.best, self.facts.get("beside")
        if fit is None:
            return ""
        policy = "a policy loss" if first is None else "no policy loss" if first.policy is None else first.policy.name
        if self.explained.stage == "free":
            policy = "a policy loss with a factor of each completion"
        policy += f", mean over {first.w}s" if first is not None and first.w and first.policy else ""
        size = "KL" if beta is None else f"KL with beta {beta:.3g}"
        if fit.kl is not None:
            names = fit.kl.names[: 3 if len(self.explained.kinds) > 1 else 1]
            return f"{policy}; {size}, gradient {' = '.join(names)}"
        if beside:
            return f"{policy}; {size.replace('KL', beside['name'], 1)}, computed from the logits"
        if self.t.ref is None:
            return policy
        if self.form.kl:
            return f"{policy}; {size} in the advantages"
        return f"{policy}; " + (f"{size} at the reference" if self.measured is not None else "no KL")
