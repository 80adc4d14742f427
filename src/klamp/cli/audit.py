"""`klamp audit NAME`: what the KL of an installed trainer, or of any function, really does; one table.

It runs where the trainer is installed, and asks for nothing beyond klamp's base dependencies.
"""

from __future__ import annotations

from collections.abc import Sequence

from klamp.audit import load_subject
from klamp.audit.examine import Audit, Reach, TermFinding, audit
from klamp.cli.flags import read_options
from klamp.cli.options import AuditOptions
from klamp.cli.text import MISSING, say, show_caution, show_table
from klamp.verify.judge import FAR, Judgement
from klamp.verify.oracle import Followed


def run(argv: Sequence[str]) -> int:
    """Audit what is named: hosts, or `module:function`.

    Raises:
        KlampError: a host that is not there, a function that cannot be had.
    """
    for name in read_options(AuditOptions, argv, command="klamp audit").names:
        subject = load_subject(name)
        for caution in subject.cautions:
            show_caution(caution)
        show_audit(audit(subject))
    say(LEGEND)
    return 0


def show_audit(result: Audit) -> None:
    """Print an audit."""
    show_table(result.subject.title, HEADINGS, [row(finding) for finding in result.findings])
    for sentence in (*(s for finding in result.findings for s in sentences(finding)), *result.subject.notes):
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

SHORT = {
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


def row(finding: TermFinding) -> tuple[str, ...]:
    """The cells of one term, under `HEADINGS`."""
    judgement = finding.judgement
    if judgement is None or finding.off_policy is None:
        return (finding.term.name, "raises", *[MISSING] * (len(HEADINGS) - 2))
    return (
        finding.term.name,
        _bias(judgement.value.relative_bias),
        _gradient(finding, judgement),
        _short(finding.off_policy),
        _stops(judgement),
        *map(_reach, finding.reach),
    )


def sentences(finding: TermFinding) -> list[str]:
    """The sentences below the table: what the cells of a term's row do not say."""
    judgement, name = finding.judgement, finding.term.name
    if judgement is None:
        return [f"{name}: raises {finding.error}."]
    found: list[str] = []
    if not finding.token_by_token:
        alone = _short(judgement.gradient.follows)
        found.append(f"{name}: one token alone follows {alone}; completions of several tokens follow neither.")
    if _clamped(judgement) and abs(judgement.value.relative_bias) > UNBIASED:
        kl = judgement.value.reverse_kl
        found.append(
            f"{name}: its clamp changes the value by {judgement.value.relative_bias:+.1%} at a KL of {kl:.2g} nats per "
            f"token; near the reference the value is {_bias(finding.near_bias)}."
        )
    return found


def _bias(bias: float) -> str:
    return "unbiased" if abs(bias) < UNBIASED else f"{bias:+.1%}"


def _gradient(finding: TermFinding, judgement: Judgement) -> str:
    if not finding.token_by_token:
        return _short(finding.on_policy)
    whole, near = _short(judgement.gradient.follows), _short(finding.near)
    return f"{near} near" if whole == "neither" and near != "neither" else whole


def _short(followed: Followed | None) -> str:
    if followed is None or followed.name not in SHORT:
        return "neither"
    factor, name = followed.factor, SHORT[followed.name]
    if name == "zero" or abs(factor - 1) < 1e-4:
        return name
    return f"-{name}" if abs(factor + 1) < 1e-4 else f"{factor:.3g} {name}"


def _clamped(judgement: Judgement) -> list[float]:
    """The log-ratios at which a clamp stops the gradient, as far out as rounding lets one see."""
    ends = (judgement.clamp.below, judgement.clamp.above)
    return [end for end in ends if end is not None and abs(end) < FAR]


def _stops(judgement: Judgement) -> str:
    if judgement.clamp.everywhere:
        return "everywhere"
    return ", ".join(f"{end:+.3g}" for end in _clamped(judgement)) or MISSING


def _reach(reach: Reach) -> str:
    if reach.everywhere:
        return f"±{FAR:g}"
    low = f"{reach.low}" if reach.low else "0"
    return f"{low} +{reach.high} {reach.failure}"
