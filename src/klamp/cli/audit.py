"""`klamp audit NAME`: what the KL of an installed trainer, or of any function, really does; one table.

It runs where the trainer is installed, and asks for nothing beyond klamp's base dependencies.
"""

from __future__ import annotations

from collections.abc import Sequence

from klamp.audit import load_function, load_subject
from klamp.audit.distillation import Against, DistillationFinding
from klamp.audit.examine import Audit, Reach, TermFinding, audit
from klamp.audit.function import check_function
from klamp.audit.verdict import EXIT_CODES
from klamp.cli.commands import AuditOptions, read_command
from klamp.cli.text import MISSING, say, show_caution, show_table
from klamp.verify.judge import FAR, Judgement
from klamp.verify.oracle import NOTHING_KNOWN, Followed


def run(argv: Sequence[str]) -> int:
    """Audit what is named: hosts, or `module:function`. Returns the exit code, as `klamp check` does.

    Raises:
        KlampError: a host that is not there, a function that cannot be had.
    """
    options: AuditOptions = read_command("audit", argv)[0]
    legends: dict[str, None] = {}
    codes = {EXIT_CODES[True]}
    for name in options.names:
        subject = load_subject(name, means=options.means)
        for caution in subject.cautions:
            show_caution(caution)
        result = audit(subject)
        show_audit(result)
        if ":" in name and subject.terms:
            verdict = check_function(load_function(name), means=options.means)
            say(f"{verdict}\n")
            codes.add(verdict.exit_code)
        else:
            codes |= exit_codes(result)
        legends |= dict.fromkeys([LEGEND] * bool(subject.terms) + [DISTILLATION_LEGEND] * bool(subject.distillations))
    say("\n\n".join(legends))
    return next(code for code in EXIT_CODES.values() if code in codes)


def exit_codes(result: Audit) -> set[int]:
    """0: a KL follows the divergence that it names; 1: it does not; 3: it could not be computed."""
    rows = [(gradient_of(x)[0], "reverse", x.error) for x in result.findings]
    rows += [(distillation_gradient_of(x)[0], x.term.means, x.error) for x in result.distillations]
    return {EXIT_CODES[None if error else SHORT.get(x.name) == means and x.factor > 0] for x, means, error in rows}


def show_audit(result: Audit) -> None:
    """Print an audit."""
    if result.findings:
        show_table(result.subject.title, HEADINGS, [row(finding) for finding in result.findings])
    if result.distillations:
        title = result.subject.title.partition(",")[0] + ", distillation" * bool(result.findings)
        show_table(title, OF_DISTILLATION, [distillation_row(finding) for finding in result.distillations])
    told = [s for finding in result.findings for s in sentences(finding)]
    told += [s for finding in result.distillations for s in distillation_sentences(finding)]
    for sentence in (*told, *result.subject.notes):
        say(f"- {sentence}")
    say()


HEADINGS = ("KL term", "value", "gradient", "off-policy", "stops at", "fp32", "bf16", "fp16")
LEGEND = """\
value       expected value against KL(policy||ref), tokens sampled from the policy, at a KL of 0.9 nats per token
gradient    whose gradient descent on the term follows: reverse = KL(policy||ref), forward = KL(ref||policy), zero,
            neither; "near" where only tokens close to the reference do
off-policy  the same when an older policy sampled the tokens, and the trainer was told its log-probabilities
stops at    log policy - log ref, in nats, from which on a clamp leaves no gradient
fp32 ...    log-ratios up to which the gradient is right to 10 % in this type, and what happens beyond:
            inf, nan, zero, off (rounding has eaten it)"""

OF_DISTILLATION = ("distillation loss", "means", "value", "gradient", "far", "noise", "padding", "mean over", "larger")
DISTILLATION_LEGEND = """\
means       the divergence between student and teacher that its name or its options promise
value       the divergence that its expected value is, tokens sampled from the student; else how far off the one meant
gradient    the same of its expected gradient in the student's logits; "near": only where both are close to each other
far         the same where they differ by many nats
noise       gradient of a completion where the student is the teacher, of that between strangers: 0 is right
padding     what the loss is multiplied by where two thirds of the positions are prompt or padding
mean over   what a batch is the mean of: tokens, or the means of sequences
larger      three entries without mass that only the teacher has: what they change in the value"""

SHORT = {
    "js": "js",
    "zero": "zero",
    "reverse": "reverse",
    "local": "reverse",
    "local_sampled": "reverse",
    "forward": "forward",
    "local_forward": "forward",
    "local_sampled_forward": "forward",
    "reverse - forward": "reverse - forward",
}
UNBIASED = 1e-5


NOTHING = Followed(NOTHING_KNOWN, 0.0)


def gradient_of(finding: TermFinding) -> tuple[Followed, str]:
    """Whose gradient a term follows, and " near" where only tokens close to the reference follow it."""
    if finding.judgement is None:
        return NOTHING, ""
    whole, near = finding.judgement.gradient.follows, finding.near
    if not finding.token_by_token:
        return finding.on_policy or NOTHING, ""
    return (near, " near") if near and near.name in SHORT and whole.name not in SHORT else (whole, "")


def row(finding: TermFinding) -> tuple[str, ...]:
    """The cells of one term, under `HEADINGS`."""
    judgement = finding.judgement
    if judgement is None or finding.off_policy is None:
        return (finding.term.name, "raises", *[MISSING] * (len(HEADINGS) - 2))
    followed, near = gradient_of(finding)
    ends = ", ".join(f"{end:+.3g}" for end in _clamped(judgement))
    return (
        finding.term.name,
        _bias(finding.whole_bias if _moved(finding) else judgement.value.relative_bias),
        f"{_short(followed)}{near}",
        _short(finding.off_policy),
        "everywhere" if judgement.clamp.everywhere else ends or MISSING,
        *map(_reach, finding.reach),
    )


def _moved(finding: TermFinding) -> bool:
    """Whether the value of one token alone is right and that of several is not."""
    alone = finding.judgement.value.relative_bias if finding.judgement else 0.0
    return abs(alone) < UNBIASED <= abs(finding.whole_bias)


def sentences(finding: TermFinding) -> list[str]:
    """The sentences below the table: what the cells of a term's row do not say."""
    judgement, name = finding.judgement, finding.term.name
    if judgement is None:
        return [f"{name}: raises {finding.error}."]
    found: list[str] = []
    if not finding.token_by_token:
        alone = _short(judgement.gradient.follows)
        found.append(f"{name}: one token alone follows {alone}; completions of several tokens follow neither.")
    if _moved(finding):
        found.append(f"{name}: the value of one token alone is right; of several it is {_bias(finding.whole_bias)}.")
    found += [f"{name}: a token beyond {turn:+.3g} nats is pushed away from the reference." for turn in finding.turns]
    if _clamped(judgement) and abs(judgement.value.relative_bias) > UNBIASED:
        kl = judgement.value.reverse_kl
        found.append(
            f"{name}: its clamp changes the value by {judgement.value.relative_bias:+.1%} at a KL of {kl:.2g} nats per "
            f"token; near the reference the value is {_bias(finding.near_bias)}."
        )
    return found


def distillation_gradient_of(finding: DistillationFinding) -> tuple[Followed, str]:
    """Whose gradient a distillation loss follows, and " near" where only a student close to its teacher follows it."""
    whole, near = (each.follows if each else NOTHING for each in (finding.gradient, finding.near))
    return (near, " near") if near.name in SHORT and whole.name not in SHORT else (whole, "")


def distillation_row(finding: DistillationFinding) -> tuple[str, ...]:
    """The cells of one distillation loss, under `OF_DISTILLATION`."""
    term = finding.term
    if finding.error:
        return (term.name, term.means, "raises", *[MISSING] * (len(OF_DISTILLATION) - 3))
    larger = finding.larger if isinstance(finding.larger, float) else None
    followed, near = distillation_gradient_of(finding)
    return (
        term.name,
        term.means,
        _divergence(finding.value),
        f"{_short(followed)}{near}" if near else _divergence(finding.gradient),
        _divergence(finding.far) if finding.far else "not finite",
        f"{finding.noise:.0%}" if finding.noise > UNBIASED else "0",
        MISSING if abs(finding.padding - 1) < UNBIASED else f"x{finding.padding:.2g}",
        finding.mean or "neither",
        "raises" if larger is None else MISSING if abs(larger) < UNBIASED else f"{larger:+.0%}",
    )


def distillation_sentences(finding: DistillationFinding) -> list[str]:
    """The sentences below the table: what the cells of a distillation loss do not say."""
    name, found = finding.term.name, list[str]()
    if finding.error:
        return [f"{name}: raises {finding.error}."]
    if finding.elsewhere > UNBIASED:
        found.append(f"{name}: {finding.elsewhere:.0%} of its gradient falls on prompt or padding.")
    if finding.leaks:
        found.append(f"{name}: a token that the teacher forbids makes the gradient NaN, even where nothing is trained.")
    if isinstance(finding.larger, str):
        found.append(f"{name}: of a teacher with three more entries it raises {finding.larger}.")
    return found


def _divergence(found: Against | None) -> str:
    if found is None:
        return MISSING
    return f"{found.off:.0%} off" if found.follows.name not in SHORT else _short(found.follows)


def _bias(bias: float) -> str:
    return "unbiased" if abs(bias) < UNBIASED else f"{bias:+.1%}"


def _short(followed: Followed) -> str:
    factor, name = followed.factor, SHORT.get(followed.name, "neither")
    if name in ("zero", "neither") or abs(factor - 1) < 1e-4:
        return name
    return f"-{name}" if abs(factor + 1) < 1e-4 else f"{factor:.3g} {name}"


def _clamped(judgement: Judgement) -> list[float]:
    """The log-ratios at which a clamp stops the gradient, as far out as rounding lets one see."""
    ends = (judgement.clamp.below, judgement.clamp.above)
    return [end for end in ends if end is not None and abs(end) < FAR]


def _reach(reach: Reach) -> str:
    return f"±{FAR:g}" if reach.everywhere else f"{reach.low} +{reach.high} {reach.failure}"
