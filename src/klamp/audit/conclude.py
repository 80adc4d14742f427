"""From a capture to a verdict: which explanation of the gradient holds, and what it means. NumPy only.

A class of KL is wrong if it is not the divergence that was meant. Nothing is accused that rounding, a path around the
log-probabilities, or a KL inside the advantages could explain.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from klamp.audit.capture import Capture, in_order, trained_tokens
from klamp.audit.fit import MEANS, AtZero, Explanation, Fit, at_zero, explain
from klamp.audit.forms import Array, k3
from klamp.audit.inputs import advantage_form, examine_inputs
from klamp.audit.verdict import Finding, Verdict, finding

RIGHT = {"reverse": ("reverse", "squared"), "forward": ("forward",)}  # what was meant -> the classes that are right
CODES = {"old": "kl-other-anchor", "k3": "kl-k3-in-advantage"}
"""Class of KL -> the finding that calls it wrong, where it is not `kl-CLASS`."""
CONSTANT = "it is the same for each token, whatever the reference says (k1 differentiated)"
BETA_OFF = 0.05  # from which share on a beta is another one
BETA_AGREE = 0.02  # within which share all accepted forms have to agree on it
ENOUGH = 30  # trained tokens below which the verdict asks for more
NEAR_ZERO = 0.02  # RMS log-ratio below which the derivatives at the reference are read
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
    findings = [Finding(**each) for each in facts.get("findings", ())]
    findings += examine_inputs(arrays, facts)
    g, mask = arrays["gradient"], arrays["mask"]
    if not mask.any():
        return Verdict.of([*findings, finding("empty-mask")], not_checked=_not_checked(arrays, facts))
    findings += _outside(g, mask)
    if bad := int((~np.isfinite(g[mask])).sum()):
        findings.append(finding("gradient-not-finite", count=bad, size=int(mask.sum())))
    if {"not-finite", "gradient-not-finite", "not-log-probabilities"} & {x.code for x in findings}:
        return Verdict.of(findings, not_checked=_not_checked(arrays, facts))
    return _Reading(capture, findings).verdict()


def _outside(g: Array, mask: Any) -> Iterator[Finding]:
    inside = float(np.sqrt(np.square(np.nan_to_num(g[mask])).mean()))
    outside = np.nan_to_num(g[~mask], nan=np.inf)
    reached = np.abs(outside) > 1e-7 * inside
    if reached.any() and inside > 0:
        size = float(np.sqrt(np.square(outside[reached]).mean()))
        shifts = {-1: "one token early", 1: "one token late"}
        moved = [x for n, x in shifts.items() if ((g != 0) == np.roll(mask, n, axis=1)).mean() > 0.98]
        told = f"; the loss's mask is {moved[0]}" if moved and not ((g != 0) == mask).all() else ""
        count = int(reached.sum())
        yield finding("off-mask-gradient", count=count, size=outside.size, inside=inside, outside=size, moved=told)


def _not_checked(arrays: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, str]:
    left = {what: how for what, (name, how) in SHOWN_BY.items() if name not in arrays}
    if facts.get("beta") is None and "ref_logprobs" in arrays:
        left["the size of the KL"] = "pass beta"
    if not facts.get("logits_seen") or any(x["code"] == "logits-mismatch" for x in facts.get("findings", ())):
        left["temperature and alignment with the logits"] = "pass logits and ids"
    if facts.get("around") and not facts.get("beside"):
        left["what reaches the parameters past policy_logprobs (value head, entropy, exact KL)"] = "pass logits"
    return left | {"whether the reference is the right model, other micro-batches, scaling over ranks": ""}


def judge_kinds(kinds: Sequence[str], direction: int, means: str) -> tuple[str, list[Finding]]:
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


class _Reading:
    """One capture, its explanation, and the findings that follow."""

    def __init__(self, capture: Capture, findings: list[Finding]) -> None:
        self.arrays, self.facts, self.findings = capture.arrays, capture.facts, findings
        self.beta: float | None = self.facts.get("beta")
        self._means: str = self.facts.get("means", "reverse")
        self.t = trained_tokens(self.arrays, self.facts)
        self._leave_out()
        self.explained = explain(self.t)
        self.policy = self._policy_alone()
        if self.explained.stage == "unknown":
            self._try_shifts()
        self.form = advantage_form(self.t, self.arrays.get("rewards"))
        self.kl: str | None = None
        self.seen_beta: float | None = None
        self.measured: float | None = None
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
        beta = self._size()
        mean = self._mean()
        names = {" = ".join(x.policy.names[:5]) if x.policy else None for x in self.policy.fits}
        return Verdict.of(
            self.findings,
            summary=self._summary(),
            found=self._found(beta),
            kl=self.kl,
            beta=beta,
            surrogate=names.pop() if len(names) == 1 and self.policy.stage not in ("unknown", "free") else None,
            mean=mean,
            beta_seen=self.seen_beta,
            not_checked=_not_checked(self.arrays, self.facts) | self.open,
        )

    # what is fitted

    def _leave_out(self) -> None:
        """Drop completions that a loss leaves out: all of their gradients are 0, and their advantages are not."""
        t = self.t
        if t.advantage is None or "segments" in self.arrays:
            return
        moved = np.bincount(t.row, weights=np.abs(t.gradient)) > 0
        left_out = ~moved & (np.bincount(t.row, weights=np.abs(t.advantage)) > 0)
        if left_out.any() and moved.any():
            self.say("completions-left-out", count=int(left_out.sum()), size=int(moved.size))
            kept = self.arrays["mask"].copy()
            kept[np.flatnonzero(kept.any(1))[left_out]] = False
            self.arrays = {**self.arrays, "mask": kept}
            self.t = trained_tokens(self.arrays, self.facts)

    def _policy_alone(self) -> Explanation:
        """The explanation of the policy loss: by itself, where the loss was watched."""
        part = self.t.policy_part
        if part is None:
            return self.explained
        return explain(replace(self.t, gradient=part, policy_part=None, ref=None))

    def _try_shifts(self) -> None:
        """Look for a loss that compares a token with the reference or the old policy of its neighbour."""
        for name in ("ref_logprobs", "old_logprobs", "advantages"):
            x = self.arrays.get(name)
            for shift in (-1, 1):
                if x is None or x.ndim != 2:
                    continue
                mask = self.arrays["mask"].copy()
                mask[:, -1 if shift < 0 else 0] = False
                t = trained_tokens({**self.arrays, name: np.roll(x, shift, axis=1), "mask": mask}, self.facts)
                found = explain(t, simple=True) if t.policy.size >= 12 else self.explained
                if found.stage in ("KL alone", "one mean", "two means"):
                    where = "next" if shift < 0 else "previous"
                    what = f"the loss compares each token with {name} of the {where} token"
                    self.say("shift", what=what, tensor=name, shift=-shift)
                    self.t, self.explained = t, found
                    return

    def _scale(self, *, agreed: bool = False) -> float:
        """The size of the policy loss's coefficient, which beta is relative to; 0: not known, or not agreed on."""
        fits = [x for x in self.policy.fits if x.policy is not None] if self.policy.best is not None else []
        sizes = [abs(x.a) for x in fits]
        apart = any(x.policy.scaled for x in fits if x.policy) or (sizes and np.ptp(sizes) > BETA_AGREE * sizes[0])
        return 0.0 if not sizes or (agreed and apart) else sizes[0]

    # the policy loss

    def _policy_loss(self) -> None:
        fit, t = self.policy.best, self.t
        if t.advantage is None or not np.any(t.advantage):
            return
        if fit is None and t.policy_part is not None:  # of no known form: its direction shows all the same
            size = np.linalg.norm(t.policy_part) * np.linalg.norm(t.advantage)
            if t.policy_part @ t.advantage > 0.5 * size:
                self.say("policy-reversed")
        if fit is None:
            return
        sign = (fit.signs[0] or 1) if self.policy.stage == "free" else 0 if fit.policy is None else np.sign(fit.a)
        if sign <= 0:
            self.say("policy-absent" if sign == 0 else "policy-reversed")
        if fit.on < 1 and fit.policy is not None:
            self.say("policy-gated", off=1 - fit.on)

    # which KL

    def _divergence(self) -> None:
        t, fit = self.t, self.explained.best
        near = t.ref is not None and t.distance <= NEAR_ZERO
        if near and (fit is None or fit.kl is None or len(self.explained.kinds) > 1) and self._at_the_reference():
            return
        if fit is None:
            self._unknown()
        elif fit.kl is None:
            self.kl = None if t.ref is None else "none"
            if t.ref is not None and not self._beside():
                self._no_kl(fit)
        elif t.ref is None and "zero" in self.explained.kinds:
            self.say("no-kl-looked-for")
        else:
            kinds = self.explained.kinds
            if kinds == ("zero",) and fit.policy is None and fit.b < 0 and self.beta is None:
                self.kl = "none or zero"
                self.say("kl-ambiguous", names="no KL at all (cross-entropy), or k1 subtracted", kinds=kinds)
                return
            if "reverse" in kinds and "zero" in kinds and np.ptp(t.d) <= 1e-6 * np.abs(t.d).max(initial=0):
                kinds = tuple(dict.fromkeys((*kinds, "forward")))  # a constant log-ratio: every KL is a constant
            sign = fit.signs[1] if self.explained.stage == "free" else np.sign(fit.b)
            self._judge(kinds, sign)
            if self.kl in RIGHT.get(self._means, ()):
                self._cautions(fit, kinds)

    def _judge(self, kinds: Sequence[str], coefficient: float) -> None:
        """Judge a KL by the sign of its coefficient, which is right if it is that of beta."""
        direction = int(np.sign(coefficient)) * (-1 if (self.beta or 0) < 0 else 1)
        self.kl, findings = judge_kinds(kinds, direction, self._means)
        self.findings += findings

    def _cautions(self, fit: Fit, kinds: Sequence[str]) -> None:
        t, kl = self.t, fit.kl
        drift = float(np.sqrt(np.square(t.r - 1).mean()))
        names = () if kl is None else kl.names
        if drift > 1e-3 and not any("ratio" in name.replace("log-ratio", "") for name in names):
            self.say("no-ratio", drift=drift)
        if tuple(kinds) == ("squared",):
            self.say("kl-squared")
        if kl is not None and kl.coupled:
            self.say("kl-coupled", form=kl.name)
        if fit.bounds is not None:
            self.say("kl-clamped", low=fit.bounds[0], high=fit.bounds[1])

    def _at_the_reference(self) -> bool:
        """Read the second and third derivative where the policy is (nearly) the reference; whether they answered."""
        if "second" not in self.arrays:
            return False
        second, third = (in_order(self.arrays, self.arrays[name]) for name in ("second", "third"))
        readings = [x for mean in MEANS if (x := at_zero(self.t, second, third, mean)) is not None]
        visible = [x for x in readings if x.visible]
        if not visible:
            fit = self.explained.best
            if readings and fit is not None and fit.kl is not None and "zero" in self.explained.kinds:
                self._judge(("zero",), fit.b)
                return True
            return False
        seen = visible[0]
        kinds, slope = _kinds_at_zero(seen)
        if self._scale(agreed=True) and np.ptp([x.first for x in visible]) <= BETA_AGREE * abs(seen.first):
            self.measured = seen.first / slope / self._scale()
        self._judge(kinds, seen.first)
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
        t, beta, scale = self.t, self.beta, self._scale()
        self.seen_beta = self.explained.b_seen / scale if scale else None
        seen, self.kl = self.seen_beta, "unknown"
        if beta == 0:
            self.kl = "none"
        elif self.form.kl:
            self._judge((self.form.kind,), self.form.beta or 0.0)
            self.say("kl-in-advantages", form=self.form.name, beta=self.form.beta)
            self.measured = self.form.beta
        elif self.facts.get("ref_detached") or self._in_value_only():
            self.kl = "none"
            self.say("kl-detached")
        elif t.distance < 1e-6:
            self.say("step-zero")
        elif self.facts.get("around"):
            self.say("path-around")
        elif seen is None and fit.policy is None and not np.any(t.gradient):
            self.kl = "none"
            self.say("kl-absent", seen=": the loss has no gradient at all")
        elif seen is None or (beta is not None and abs(beta) < seen):
            self.say("no-power", shown="any size" if seen is None else f"{seen:.1g}", seen=seen)
        elif self.form.kl is False or self.facts.get("kl_in") == "loss":
            self.kl = "none"
            self.say("kl-absent", seen=f": one with beta above {seen:.1g} would have been seen")
        else:
            self.say("kl-in-advantages-or-absent", seen=seen)

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

    def _unknown(self) -> None:
        self.kl = "unknown"
        what = "no known policy loss and KL explain this gradient"
        if self.t.eps > 1e-4:
            what = "the log-probabilities are too coarse to explain the gradient"
        self.say("unknown", what=what)

    # how large

    def _size(self) -> float | None:
        """The coefficient relative to the policy loss, if all accepted forms agree on it; is it the one passed?"""
        fit, asked, scale = self.explained.best, self.beta, self._scale()
        if fit is not None and fit.kl is not None and scale and np.isfinite(self.explained.b_seen):
            self.seen_beta = self.explained.b_seen / scale
        beta, blur = self.measured, 0.0
        if beta is None and fit is not None and fit.kl is not None and self.explained.stage != "free":
            betas = [x.b / (abs(x.a) if x.policy is not None else scale) for x in self.explained.fits if x.a or scale]
            scaled = any(form is not None and form.scaled for x in self.explained.fits for form in (x.kl, x.policy))
            if betas and not scaled and np.ptp(betas) <= BETA_AGREE * abs(betas[0]):
                beta, blur = betas[0], fit.b_error / abs(fit.b) if fit.b else 0.0
            elif not scale:
                self.say("beta-scale")
        if asked and beta is None and fit is not None and fit.kl is not None:
            self.open["the size of the KL"] = "its scale beside the policy loss is not known"
        divided = self.form.kl and "z-score" in self.form.name
        if beta is None or asked is None or self.kl is None or "old" in self.kl or divided:
            return beta
        if asked == 0:
            self.say("beta-off", seen=abs(beta), passed=0.0, cause=": a KL acts although beta is 0")
        elif abs(abs(beta / asked) - 1) > BETA_OFF + blur:
            partly = self.facts.get("around") and abs(beta) < abs(asked) and not self.facts.get("beside")
            coupled = fit is not None and fit.kl is not None and (fit.kl.coupled or (fit.w or fit.u) != fit.u)
            code = "beta-around" if partly else "beta-coupled" if coupled else "beta-off"
            code = "beta-in-advantages" if self.form.kl else code
            self.say(code, seen=abs(beta), passed=abs(asked), cause=self._cause(abs(beta / asked)))
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
        fit = self.explained.best
        pairs = {(x.w, x.u) for x in self.explained.fits}
        if fit is None or self.explained.stage == "free" or len(pairs) != 1:
            return None
        w, u = pairs.pop()
        if self.explained.same_means:
            return "token or sequence (equal lengths)"
        if self.t.policy_part is not None and self.policy.fits:
            w = self.policy.fits[0].w if len({x.w for x in self.policy.fits}) == 1 else None
        if w and u and w != u:
            self.say("two-means", policy=w, kl=u)
            return f"{w}; KL {u}"
        return w or u

    # the text

    def _summary(self) -> str:
        t = self.t
        line = f"{t.policy.size} trained tokens of {t.lengths.size} completions, {self.facts.get('dtype', 'float32')}"
        if t.ref is not None:
            line += f", |log-ratio| {t.distance:.2g} nats RMS"
        if self.seen_beta is not None and np.isfinite(self.seen_beta):
            line += f"; a KL with beta above {self.seen_beta:.1g} would be seen"
        return line

    def _found(self, beta: float | None) -> str:
        fit = self.explained.best
        if fit is None:
            return ""
        first = self.policy.best
        policy = "a policy loss" if first is None else "no policy loss" if first.policy is None else first.policy.name
        if self.explained.stage == "free":
            policy = "a policy loss with a factor of each completion"
        parts = [policy + (f", mean over {first.w}s" if first is not None and first.w and first.policy else "")]
        size = "" if beta is None else f" with beta {beta:.3g}"
        if fit.kl is not None:
            names = fit.kl.names[: 3 if len(self.explained.kinds) > 1 else 1]
            parts.append(f"KL{size}, gradient {' = '.join(names)}")
        elif beside := self.facts.get("beside"):
            parts.append(f"{beside['name']}{size}, computed from the logits")
        elif self.t.ref is not None:
            where = f"KL{size} in the advantages" if self.form.kl else "no KL"
            parts.append(f"KL{size} at the reference" if self.measured is not None and not self.form.kl else where)
        return "; ".join(parts)


AT_ZERO = {0: "reverse", -1: "forward", 1: "swapped", 2: "reverse", 3: "squared", 1.5: "reverse", -3: "neither"}
"""c'' / c' at the reference -> the class."""


def _kinds_at_zero(seen: AtZero) -> tuple[tuple[str, ...], float]:
    """The classes that the derivatives at the reference leave open, and the c' that belongs to them."""
    nearest = min(AT_ZERO, key=lambda x: abs(x - seen.ratio))
    if abs(nearest - seen.ratio) > 0.15:
        return ("neither", "reverse"), 1.0
    return (AT_ZERO[nearest],), 2.0 if nearest == 1.5 else 1.0
