"""From a capture to a verdict: which explanation of the gradient holds, and what it means. NumPy only.

A class of KL is wrong if it is not the divergence that was meant. Nothing is accused that rounding, a second path
around the log-probabilities, or a KL inside the advantages could explain.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from klamp.audit.capture import Capture, trained_tokens
from klamp.audit.fit import MEANS, AtZero, Explanation, Fit, at_zero, explain
from klamp.audit.forms import Array, Tokens, k3
from klamp.audit.inputs import advantage_form, examine_inputs, group_sums
from klamp.audit.verdict import Finding, Verdict, cannot_tell, note, warning, wrong


class Kind(NamedTuple):
    """What a class of KL means for somebody who wants the reverse KL: a code, a sentence, a way out."""

    code: str
    what: str
    fix: str


RIGHT = "use klamp.kl_penalty(policy, ref, mask), or log_ratio**2 / 2 on tokens of the present policy"
KINDS = {
    "forward": Kind(
        "kl-forward",
        "the gradient follows KL(ref||policy), not KL(policy||ref): k3 is differentiated, as DeepSeekMath's formula is",
        "multiply k3 by the live ratio exp(logp - logp.detach()) (TRL: use_bias_correction_kl=True), or use "
        'klamp.kl_penalty; if KL(ref||policy) is meant, pass means="forward"',
    ),
    "reverse": Kind(
        "kl-reverse",
        "the gradient follows KL(policy||ref), not the KL(ref||policy) that was meant",
        'pass means="reverse", or use klamp.kl_penalty(..., gradient="forward")',
    ),
    "zero": Kind(
        "kl-zero",
        "the KL's gradient is the same for each token, whatever the reference says: it is zero on average "
        "(k1 differentiated)",
        RIGHT,
    ),
    "swapped": Kind(
        "kl-swapped",
        "policy and reference are swapped in k3: the gradient is exp(log-ratio) - 1, which follows neither KL and "
        "explodes where the policy is far above the reference",
        "k3 = exp(ref - policy) - (ref - policy) - 1, times the live ratio exp(logp - logp.detach())",
    ),
    "sign": Kind("kl-sign", "the KL's gradient is only the sign of the log-ratio: it follows no KL (abs)", RIGHT),
    "step": Kind("kl-step", "the KL's gradient is a step: the same for all tokens above the reference, else 0", RIGHT),
    "neither": Kind("kl-neither", "the KL's gradient follows neither KL(policy||ref) nor KL(ref||policy)", RIGHT),
    "old": Kind(
        "kl-other-anchor",
        "the KL is one to the old policy, not to the reference that was passed",
        "compute it from the reference's log-probabilities",
    ),
    "k3": Kind(
        "kl-k3-in-advantage",
        "the advantages hold k3: as a factor of the score its gradient is that of the reverse KL minus the forward KL, "
        "which cancels near the reference",
        "put k1 (log policy - log ref) into the reward or the advantage",
    ),
}
AWAY = Kind(
    "kl-away",
    "the KL pushes the policy away from the reference: its sign is wrong",
    "loss = policy_loss + beta * kl, with log_ratio = log policy - log ref",
)
PLAUSIBLE = {"reverse": ("reverse", "squared"), "forward": ("forward",)}
"""What was meant -> the classes that are right."""
BETA_OFF, BETA_AGREE = 0.05, 0.02
"""From which share on a beta is another one; within which all accepted forms must agree."""
ENOUGH = 30
"""Trained tokens below which the verdict asks for more."""
NEAR_ZERO = 0.02
"""RMS log-ratio below which the derivatives at the reference are read."""


def conclude(capture: Capture) -> Verdict:
    """The verdict on a captured micro-batch."""
    arrays, facts = capture.arrays, capture.facts
    findings = [Finding(**each) for each in facts.get("findings", ())]
    findings += examine_inputs(arrays, facts)
    mask = arrays["mask"]
    if not mask.any():
        findings.append(wrong("empty-mask", "no token is under the mask", fix="pass the mask of completion tokens"))
        return Verdict.of(findings, not_checked=_not_checked(arrays, facts))
    findings += _outside(arrays)
    gradient = arrays["gradient"][mask]
    if not np.isfinite(gradient).all():
        bad = int((~np.isfinite(gradient)).sum())
        findings.append(
            wrong(
                "gradient-not-finite",
                f"{bad} of {gradient.size} trained tokens have a gradient that is not finite",
                fix="mask before exp: torch.where(mask, log_ratio, 0)",
                count=bad,
            )
        )
    unusable = {"not-finite", "gradient-not-finite", "not-log-probabilities"}
    if unusable & {finding.code for finding in findings}:
        return Verdict.of(
            findings, summary=_summary(capture.tokens, facts, None), not_checked=_not_checked(arrays, facts)
        )
    return _Reading(capture, findings).verdict()


def _outside(arrays: Mapping[str, Any]) -> Iterator[Finding]:
    g, mask = arrays["gradient"], arrays["mask"]
    inside = np.sqrt(np.square(np.nan_to_num(g[mask])).mean())
    outside = np.nan_to_num(g[~mask], nan=np.inf)
    reached = np.abs(outside) > 1e-7 * inside
    if reached.any() and inside > 0:
        size = np.sqrt(np.square(outside[reached]).mean())
        moved = _mask_shift(g != 0, mask)
        what = f"{int(reached.sum())} of {outside.size} tokens outside the mask carry gradient"
        yield wrong(
            "off-mask-gradient",
            f"{what} (RMS {size:.2g}; inside {inside:.2g})" + f"; the loss's mask is {moved}" * bool(moved),
            fix="(kl * mask).sum() / mask.sum(), with the mask of the policy loss"
            if not moved
            else "shift the mask as the log-probabilities are: mask[:, 1:] beside logits[:, :-1]",
            count=int(reached.sum()),
            inside=float(inside),
        )


def _mask_shift(support: Any, mask: Any) -> str:
    for shift, name in ((-1, "one token early"), (1, "one token late")):
        if (np.roll(mask, shift, axis=1) == support).mean() > 0.98 and not (mask == support).all():
            return name
    return ""


def _summary(t: Tokens, facts: Mapping[str, Any], seen: float | None) -> str:
    rms = np.sqrt(np.square(t.d).mean()) if t.ref is not None else None
    parts = [f"{t.policy.size} trained tokens of {int(t.row.max()) + 1} completions, {facts.get('dtype', 'float32')}"]
    parts += [] if rms is None else [f"|log-ratio| {rms:.2g} nats RMS"]
    line = ", ".join(parts)
    return line if seen is None or not np.isfinite(seen) else f"{line}; a KL with beta above {seen:.1g} would be seen"


NOT_CHECKED = {
    "the KL": ("ref_logprobs", "pass ref_logprobs"),
    "the policy loss": ("advantages", "pass advantages"),
    "the ratio and its clip": ("old_logprobs", "pass old_logprobs"),
    "sampler against policy": ("sampler_logprobs", "pass sampler_logprobs"),
    "tokens after the end": ("ids", "pass ids, eos and pad"),
}


def _not_checked(arrays: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, str]:
    left = {what: how for what, (name, how) in NOT_CHECKED.items() if name not in arrays}
    if facts.get("beta") is None and "ref_logprobs" in arrays:
        left["the size of the KL"] = "pass beta"
    if not facts.get("logits_seen"):
        left["temperature and alignment with the logits"] = "pass logits and ids"
    left["whether the reference is the right model, other micro-batches, scaling over ranks"] = ""
    return left


class _Reading:
    """One capture, its explanation, and the findings that follow."""

    def __init__(self, capture: Capture, findings: list[Finding]) -> None:
        self.arrays, self.facts, self.findings = capture.arrays, capture.facts, findings
        self.means: str = self.facts.get("means", "reverse")
        self.beta: float | None = self.facts.get("beta")
        self.t = self._trained(capture)
        self.explained = explain(self.t)
        if self.explained.stage == "unknown":
            self._try_shifts()
        self.form = advantage_form(self.t, self.arrays.get("rewards"))
        self.kl: str | None = None
        self.seen_beta: float | None = None

    def _trained(self, capture: Capture) -> Tokens:
        """The trained tokens without completions that a loss leaves out: all of their gradients are 0."""
        t = capture.tokens
        if t.advantage is None:
            return t
        moved = np.bincount(t.row, weights=np.abs(t.gradient)) > 0
        owed = np.bincount(t.row, weights=np.abs(t.advantage)) > 0
        left_out = ~moved & owed
        if not left_out.any() or not moved.any():
            return t
        self.findings.append(
            note("completions-left-out", f"{int(left_out.sum())} of {moved.size} completions get no gradient")
        )
        rows = np.unique(np.argwhere(self.arrays["mask"])[:, 0]) if "segments" not in self.arrays else None
        if rows is None:
            return t
        kept = self.arrays["mask"].copy()
        kept[rows[left_out]] = False
        self.arrays = {**self.arrays, "mask": kept}
        return trained_tokens(self.arrays, self.facts)

    def _try_shifts(self) -> None:
        """Look for a loss that compares a token with the reference or the old policy of its neighbour."""
        for name in ("ref_logprobs", "old_logprobs", "advantages"):
            x = self.arrays.get(name)
            if x is None or x.ndim != 2:
                continue
            for shift in (-1, 1):
                mask = self.arrays["mask"].copy()
                mask[:, -1 if shift < 0 else 0] = False
                moved = {**self.arrays, name: np.roll(x, shift, axis=1), "mask": mask}
                t = trained_tokens(moved, self.facts)
                if t.policy.size < 12:
                    continue
                found = explain(t)
                if found.stage in ("one mean", "two means") and all(fit.kl is not None for fit in found.fits):
                    where = "next" if shift < 0 else "previous"
                    self.findings.append(
                        wrong(
                            "shift",
                            f"the loss compares each token with {name} of the {where} token",
                            fix="cut logits and ids alike for both models: logits[:, :-1] with ids[:, 1:]",
                            tensor=name,
                            shift=-shift,
                        )
                    )
                    self.t, self.explained = t, found
                    return

    @property
    def fit(self) -> Fit | None:
        """The best accepted explanation."""
        return self.explained.fits[0] if self.explained.stage != "unknown" and self.explained.fits else None

    def verdict(self) -> Verdict:
        fit = self.fit
        self._policy_loss()
        self._divergence()
        self._advantages()
        self._size()
        if self.t.policy.size < ENOUGH:
            self.findings.append(
                note("few-tokens", f"only {self.t.policy.size} trained tokens: {ENOUGH} make the verdict firm")
            )
        beta = self._beta()
        return Verdict.of(
            self.findings,
            summary=_summary(self.t, self.facts, self.seen_beta),
            found=self._found(beta),
            kl=self.kl,
            beta=beta,
            surrogate=_agreed(x.policy.name if x.policy else None for x in self.explained.fits) if fit else None,
            mean=self._mean(),
            beta_seen=self.seen_beta,
            not_checked=_not_checked(self.arrays, self.facts),
        )

    # the policy loss

    def _policy_loss(self) -> None:
        fit, t = self.fit, self.t
        asked = t.advantage is not None and bool(np.any(t.advantage))
        if fit is None or not asked:
            return
        if t.policy_part is not None:
            push = float(t.policy_part @ -t.advantage) if t.advantage is not None else 0.0
            size = np.linalg.norm(t.policy_part) * np.linalg.norm(t.advantage)
            sign = 0 if size == 0 else np.sign(push)
        elif self.explained.stage == "free":
            sign = fit.signs[0] or 1
        elif fit.policy is None:
            sign = 0
        else:
            sign = np.sign(fit.a)
        if sign == 0:
            self.findings.append(
                wrong(
                    "policy-absent",
                    "the policy loss has no gradient although advantages were passed: only the KL trains",
                    fix="do not detach the ratio: exp(logp - old) or exp(logp - logp.detach()), times the advantage",
                )
            )
        elif sign < 0:
            self.findings.append(
                wrong(
                    "policy-reversed",
                    "the policy loss is reversed: it lowers the probability of tokens with a positive advantage",
                    fix="loss = -(ratio * advantages), and negate it only once",
                )
            )
        if fit.on < 1 and fit.policy is not None:
            self.findings.append(
                note(
                    "policy-gated", f"{1 - fit.on:.0%} of the tokens carry no policy loss (a clip or a mask)", on=fit.on
                )
            )

    # which KL

    def _divergence(self) -> None:
        t, fit = self.t, self.fit
        if t.ref is None and not (fit is not None and fit.kl is not None):
            self.kl = "unknown" if fit is None else None
            if fit is None:
                self._unknown()
            return
        if fit is None:
            if not self._at_the_reference():
                self._unknown()
            return
        if fit.kl is None:
            if not self._at_the_reference():
                self._no_kl(fit)
            return
        kinds = self.explained.kinds
        if "reverse" in kinds and "zero" in kinds and np.ptp(t.d) <= 1e-6 * np.abs(t.d).max(initial=0):
            kinds = tuple(dict.fromkeys((*kinds, "forward")))
        self._judge(kinds, self._direction(fit), fit)

    def _direction(self, fit: Fit) -> int:
        """+1 if the KL is added to the loss as its coefficient says, -1 if it is subtracted."""
        sign = fit.signs[1] if self.explained.stage == "free" else np.sign(fit.b)
        return int(sign) * (-1 if (self.beta or 0) < 0 else 1)

    def _judge(self, kinds: tuple[str, ...], direction: int, fit: Fit | None) -> None:
        self.kl, findings = judge_kinds(kinds, direction, self.means)
        self.findings += findings
        if not findings:
            self._cautions(fit, kinds)

    def _cautions(self, fit: Fit | None, kinds: tuple[str, ...]) -> None:
        if fit is None or fit.kl is None:
            return
        t = self.t
        drift = float(np.sqrt(np.square(t.r - 1).mean()))
        weighted = any("ratio" in name.replace("log-ratio", "") for name in (fit.kl.name, *fit.kl.aliases))
        if drift > 1e-3 and not weighted and "reverse" in kinds and fit.kl.kind == "reverse":
            self.findings.append(
                warning(
                    "no-ratio",
                    f"the KL has no ratio policy / old: for tokens of the old policy it is off by about {drift:.1%}",
                    fix="multiply it by the detached ratio, or use klamp.kl_penalty(..., behavior_logprobs=old)",
                    drift=drift,
                )
            )
        if kinds == ("squared",):
            self.findings.append(
                warning(
                    "kl-squared", "the gradient is that of the expected k2, near KL(policy||ref) only for small KLs"
                )
            )
        if fit.kl.coupled:
            self.findings.append(
                note("kl-coupled", f"the KL couples the tokens of a completion: {fit.kl.name}", form=fit.kl.name)
            )
        if fit.bounds is not None:
            low, high = fit.bounds
            self.findings.append(
                warning(
                    "kl-clamped",
                    f"the KL is bounded: outside of log-ratios from {low:.3g} to {high:.3g} its gradient ends or stays "
                    "constant",
                    fix="use a straight-through bound and count the tokens beyond it (klamp: max_log_ratio)",
                    low=low,
                    high=high,
                )
            )

    def _at_the_reference(self) -> bool:
        """Read the second and third derivative where the policy is (nearly) the reference; whether they answered."""
        t = self.t
        if t.ref is None or "second" not in self.arrays or np.sqrt(np.square(t.d).mean()) > NEAR_ZERO:
            return False
        mask, order = self.arrays["mask"], self._order()
        second, third = (self.arrays[name][mask][order] for name in ("second", "third"))
        readings = [x for mean in MEANS if (x := at_zero(t, second, third, mean)) is not None]
        seen = next((x for x in readings if x.visible), None)
        if seen is None:
            return False
        self._judge(_kinds_at_zero(seen, t), 1 if seen.first * (self.beta or 1) > 0 else -1, None)
        return True

    def _order(self) -> Any:
        from klamp.audit.capture import rows_of

        return np.argsort(rows_of(self.arrays)[self.arrays["mask"]], kind="stable")

    def _no_kl(self, fit: Fit) -> None:
        """The gradient holds no KL: say whether one would have shown, and where it may be instead."""
        t, beta = self.t, self.beta
        self.kl = "none"
        scale = abs(fit.a) if fit.policy is not None else self._scale_of_policy_part()
        self.seen_beta = self.explained.b_seen / scale if scale else None
        if beta == 0:
            return
        if self.form.kl:
            self._judge((self.form.kind,), 1 if (self.form.beta or 0) * (beta or 1) >= 0 else -1, None)
            self.findings.append(
                note("kl-in-advantages", f"the KL is in the advantages: {self.form.name}", beta=self.form.beta)
            )
            return
        rms = float(np.sqrt(np.square(t.d).mean()))
        detached = self._detached(fit)
        if detached:
            self.findings.append(detached)
        elif rms < 1e-6:
            self.kl = "unknown"
            self.findings.append(
                cannot_tell(
                    "step-zero",
                    "the policy is the reference here: a KL whose coefficient is detached has no gradient yet",
                    fix="check again after some updates, or pass the loss as a function",
                )
            )
        elif self.seen_beta is None or (beta is not None and abs(beta) < self.seen_beta):
            self.kl = "unknown"
            shown = "none" if self.seen_beta is None else f"{self.seen_beta:.1g}"
            self.findings.append(
                cannot_tell(
                    "no-power",
                    f"a KL with beta below {shown} would not stand out of the rounding of {self.facts.get('dtype')}",
                    fix="check again when the policy has moved, or with float32 log-probabilities",
                    rms_log_ratio=rms,
                )
            )
        elif self.facts.get("around"):
            self.kl = "unknown"
            self.findings.append(
                cannot_tell(
                    "path-around",
                    "no KL passes through policy_logprobs, but the loss reaches the parameters by another path",
                    fix="pass logits (and teacher_logits): an exact KL is computed from them",
                )
            )
        elif self.form.kl is False or self.facts.get("kl_in") == "loss":
            self.findings.append(
                wrong(
                    "kl-absent",
                    f"no KL reaches the policy: one with beta above {self.seen_beta:.1g} would have been seen",
                    fix="compute the KL with gradients on (no torch.no_grad, no detach), and add beta * kl to the loss",
                    beta_seen=self.seen_beta,
                )
            )
        else:
            self.kl = "unknown"
            self.findings.append(
                cannot_tell(
                    "kl-in-advantages-or-absent",
                    "the loss itself holds no KL; the advantages that were passed may hold it",
                    fix='pass rewards, or the advantages before the KL with kl_in="loss"',
                    beta_seen=self.seen_beta,
                )
            )

    def _scale_of_policy_part(self) -> float:
        t = self.t
        if t.policy_part is None or t.advantage is None:
            return 1.0 if self.beta is None or t.advantage is None else 0.0
        column = t.advantage * t.weights("token") * t.r
        return float(abs(column @ t.policy_part) / max(column @ column, 1e-300))

    def _detached(self, fit: Fit) -> Finding | None:
        """A KL that is in the loss's value and not in its gradient: found by subtracting the policy loss's value."""
        t, loss = self.t, self.facts.get("loss")
        if loss is None or t.ref is None:
            return None
        if self.facts.get("ref_detached"):
            return _detached(None)
        if fit.policy is None or t.advantage is None:
            scales: list[tuple[float, float]] = [(0.0, abs(self.beta or 1.0))]
        else:
            w = t.weights(fit.w or "token")
            parts = (
                t.r,
                np.ones_like(t.r),
                t.policy,
                -(fit.policy.values / np.where(t.advantage == 0, 1, -t.advantage)),
            )
            scales = [(fit.a * float(w @ (-t.advantage * s)), abs(fit.a)) for s in parts]
            low, high = t.clip or (0.2, 0.2)
            clipped = np.maximum(-t.advantage * t.r, -t.advantage * np.clip(t.r, 1 - low, 1 + high))
            scales.append((fit.a * float(w @ clipped), abs(fit.a)))
        for value, scale in scales:
            if fit.policy is None and self.beta is None:
                continue
            rest = loss - value
            for mean in MEANS:
                u = t.weights(mean)
                for values in (t.d, t.d**2 / 2, k3(t.d), k3(-t.d), np.abs(t.d), t.r * k3(t.d), t.total(t.d)):
                    kl = float(u @ values)
                    noise = 8 * t.eps * (abs(value) + abs(loss))
                    if self.beta is None or abs(rest) < 1e3 * noise:
                        continue
                    beta = rest / (scale * kl) if kl else 0.0
                    if abs(beta / self.beta - 1) < 1e-5 + 4 * noise / abs(rest):
                        return _detached(beta)
        return None

    def _unknown(self) -> None:
        self.kl = "unknown"
        t = self.t
        bins = _bins(t, self.explained)
        what = "no known policy loss and KL explain this gradient"
        if t.eps > 1e-4:
            what = "the log-probabilities are too coarse to explain the gradient"
        self.findings.append(
            cannot_tell(
                "unknown",
                what,
                fix="pass what is missing (see not checked), watch the loss with klamp.watch, or pass it as a function",
                bins=bins,
            )
        )

    # how large

    def _beta(self) -> float | None:
        """The coefficient relative to the policy loss, if all accepted forms agree on it."""
        if self.form.kl and self.fit is not None and self.fit.kl is None:
            return self.form.beta
        if self.fit is None or self.fit.kl is None or self.explained.stage == "free":
            return None
        found = [b for fit in self.explained.fits if (b := self._ratio(fit)) is not None]
        if not found or any(fit.kl is not None and fit.kl.scaled for fit in self.explained.fits):
            return None
        low, high = min(found), max(found)
        return found[0] if abs(high - low) <= BETA_AGREE * abs(found[0]) else None

    def _ratio(self, fit: Fit) -> float | None:
        if fit.kl is None:
            return None
        if fit.policy is not None:
            return fit.b / abs(fit.a) if fit.a else None
        if self.t.policy_part is not None:
            scale = self._scale_of_policy_part()
            return fit.b / scale if scale else None
        return None

    def _blur(self) -> float:
        fit = self.fit
        return 0.0 if fit is None or not fit.b else fit.b_error / abs(fit.b)

    def _size(self) -> None:
        beta, asked = self._beta(), self.beta
        fit = self.fit
        if fit is not None and fit.kl is not None:
            scale = abs(fit.a) if fit.policy is not None else self._scale_of_policy_part()
            self.seen_beta = self.explained.b_seen / scale if scale and np.isfinite(self.explained.b_seen) else None
        if fit is None or fit.kl is None or fit.kl.kind == "old" or self.kl in ("unknown",):
            return
        if beta is None:
            if self.t.advantage is None or not np.any(self.t.advantage):
                self.findings.append(
                    note("beta-scale", "beta is known only up to the scale of the loss: no policy loss")
                )
            return
        if asked is None:
            return
        if asked == 0:
            self.findings.append(
                wrong(
                    "beta-off", f"a KL acts with {abs(beta):.3g} although beta is 0", fix="leave the KL out", seen=beta
                )
            )
            return
        if abs(abs(beta) / abs(asked) - 1) > BETA_OFF + self._blur():
            cause, fix = self._cause(abs(beta) / abs(asked))
            self.findings.append(
                wrong(
                    "beta-off",
                    f"the KL acts with {abs(beta):.3g} instead of {abs(asked):.3g}" + f": {cause}" * bool(cause),
                    fix=fix,
                    seen=beta,
                    passed=asked,
                )
            )

    def _cause(self, factor: float) -> tuple[str, str]:
        """What may have multiplied beta by this factor."""
        mask, t = self.arrays["mask"], self.t
        share = mask.sum() / mask.size
        lengths = t.lengths
        causes = {
            f"it is a mean over all {mask.size} places, the policy loss over {mask.sum()} tokens": share,
            f"the policy loss is a mean over all {mask.size} places, the KL over {mask.sum()} tokens": 1 / share,
            "the KL is summed over each completion, the policy loss is a mean over tokens": lengths.mean(),
            "the KL is a mean over tokens, the policy loss is summed over each completion": 1 / lengths.mean(),
            "a factor 1/2 is missing (k2 = log_ratio**2 / 2)": 2.0,
            "a factor 1/2 too many": 0.5,
            f"it is divided by the number of completions ({lengths.size})": 1 / lengths.size,
            f"it is not divided by the number of completions ({lengths.size})": float(lengths.size),
            f"it is divided by the number of tokens ({t.policy.size}) twice": 1 / t.policy.size,
            f"it is not divided by the number of tokens ({t.policy.size})": float(t.policy.size),
            "beta is squared": abs(self.beta or 0),
        }
        cause = next((name for name, x in causes.items() if x and abs(factor / x - 1) < 0.01), "")
        return cause, "divide the KL and the policy loss by the same number: (kl * mask).sum() / mask.sum()"

    def _mean(self) -> str | None:
        fit = self.fit
        if fit is None or self.explained.stage == "free":
            return None
        name = {(x.w, x.u) for x in self.explained.fits}
        if self.explained.same_means:
            return "token or sequence (equal lengths)"
        if len(name) != 1:
            return None
        w, u = name.pop()
        if w and u and w != u and fit.policy is not None:
            self.findings.append(
                warning(
                    "two-means",
                    f"the policy loss is a {w} mean and the KL a {u} mean: beta's price depends on the lengths",
                    fix="use one mean for both",
                )
            )
            return f"{w}; KL {u}"
        return w if fit.policy is not None else u

    def _advantages(self) -> None:
        form = self.form
        if form.name:
            self.findings.append(note("advantages", f"advantages: {form.name}", beta=form.beta))
        if self.t.group is not None and self.t.advantage is not None and "rewards" not in self.arrays:
            first = np.concatenate([[0], np.cumsum(self.t.lengths)[:-1]]).astype(int)
            odd = group_sums(self.t.advantage[first], self.t.group) if np.any(self.t.advantage) else None
            self.findings += [] if odd is None else [odd]

    def _found(self, beta: float | None) -> str:
        fit = self.fit
        if fit is None:
            return ""
        policy = "no policy loss" if fit.policy is None else fit.policy.name
        if self.t.policy_part is not None:
            policy = "the policy loss (watched)"
        if self.explained.stage == "free":
            policy = "a policy loss with a factor of each completion"
        parts = [policy + (f", mean over {fit.w}s" if fit.w and fit.policy else "")]
        if fit.kl is not None:
            names = " = ".join((fit.kl.name, *fit.kl.aliases[:2]))
            size = "" if beta is None else f" with beta {beta:.3g}"
            parts.append(f"KL{size}, gradient {names}")
        elif self.t.ref is not None:
            parts.append("no KL")
        return "; ".join(parts)


def judge_kinds(kinds: tuple[str, ...], direction: int, means: str) -> tuple[str, list[Finding]]:
    """The class of a KL in one word, and what is wrong with it.

    Args:
        kinds: the classes that the numbers leave open.
        direction: -1 if the KL is subtracted from the loss.
        means: the divergence that is meant.
    """
    right, names = PLAUSIBLE.get(means, ()), " or ".join(kinds)
    if direction < 0 and not set(kinds) & {"zero", "old"}:
        return "away", [wrong(AWAY.code, AWAY.what, fix=AWAY.fix, kinds=kinds)]
    if all(kind in right for kind in kinds):
        return "reverse" if kinds == ("squared",) else kinds[0], []
    if set(kinds) & set(right):
        what = f"these numbers fit several KLs alike: {names}"
        fix = "check again after some updates, or pass completions of other lengths"
        return names, [cannot_tell("kl-ambiguous", what, fix=fix, kinds=kinds)]
    rows = [KINDS.get(kind, KINDS["neither"]) for kind in kinds]
    upward = "; it raises each sampled token alike" if kinds == ("zero",) and direction < 0 else ""
    what = rows[0].what + upward if len(rows) == 1 else "; or ".join(row.what for row in rows)
    return names, [wrong(rows[0].code, what, fix=rows[0].fix, kinds=kinds)]


def _detached(beta: float | None) -> Finding:
    what = "the loss's value holds a KL that its gradient does not: the KL is detached"
    return wrong(
        "kl-detached",
        what + ("" if beta is None else f" (it is added with beta {beta:.3g})"),
        fix="compute the KL from log-probabilities with gradients on: no torch.no_grad, no detach",
        beta=beta,
    )


AT_ZERO = {
    0.0: "reverse",
    -1.0: "forward",
    1.0: "swapped",
    2.0: "reverse",
    3.0: "squared",
    1.5: "reverse",
    -3.0: "neither",
}
"""c'' / c' at the reference -> the class."""


def _kinds_at_zero(seen: AtZero, t: Tokens) -> tuple[str, ...]:
    nearest = min(AT_ZERO, key=lambda x: abs(x - seen.ratio))
    if abs(nearest - seen.ratio) > 0.15:
        return ("neither", "reverse")
    kind = AT_ZERO[nearest]
    return (kind,)


def _bins(t: Tokens, explained: Explanation) -> list[dict[str, float]]:
    """The part of the gradient that the policy loss does not explain, against the log-ratio, in eight bins."""
    if t.ref is None or not np.any(t.d):
        return []
    fit = explained.fits[0] if explained.fits else None
    rest: Array = t.gradient if t.policy_part is None else t.gradient - t.policy_part
    if fit is not None and fit.policy is not None and fit.w is not None and t.policy_part is None:
        rest = rest - fit.a * fit.policy.values * t.weights(fit.w)
    edges = np.quantile(t.d, np.linspace(0, 1, 9))
    place = np.clip(np.searchsorted(edges, t.d, side="right") - 1, 0, 7)
    return [
        {
            "log_ratio": float(t.d[place == i].mean()),
            "gradient": float(rest[place == i].mean()),
            "pulled_back": float((rest[place == i] * t.d[place == i] > 0).mean()),
        }
        for i in range(8)
        if (place == i).any()
    ]


def _agreed(names: Any) -> str | None:
    distinct = set(names)
    return distinct.pop() if len(distinct) == 1 else None
