"""Two questions about the k3 formula, answered with exact expectations, with samples, and in words.

A bug report (docs/sources.md) asks whether `exp(ref - policy) - (ref - policy) - 1` has the wrong direction, and
whether the reversed formula would be right, since the tokens are samples. Each number stands three times: the exact
expectation by enumeration, a seeded Monte Carlo mean with its standard error, and the same for the reversed formula.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from klamp.core.estimators import exact_kl, kl_estimate
from klamp.core.gradients import kl_penalty
from klamp.core.types import Estimator, Gradient
from klamp.errors import ShapeError
from klamp.verify.oracle import (
    NOTHING_KNOWN,
    Followed,
    Loss,
    cosine,
    expected,
    expected_gradient,
    forward_kl,
    name_gradient,
    reverse_kl,
    truths,
    variance,
)
from klamp.verify.proofs.check import Check, is_equal, is_true
from klamp.verify.worlds import Chain, Outcomes, enumerate_outcomes, one_position, random_chain

SAMPLES = 100_000
ALLOWED_ERRORS = 5.0
"""Standard errors that a seeded sample mean may be off; more is a wrong formula, not bad luck."""

PRINTED = "exp(ref - policy) - (ref - policy) - 1"
REVERSED = "exp(policy - ref) - (policy - ref) - 1"


@dataclass(frozen=True, kw_only=True)
class TextTable:
    """A table of texts, ready to be printed."""

    title: str
    """What the table shows."""
    columns: tuple[str, ...]
    """The headings of the columns."""
    rows: tuple[tuple[str, ...], ...]
    """The cells, row by row."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A question about a formula, with numbers, checks and an explanation."""

    question: str
    """The question."""
    tables: tuple[TextTable, ...]
    """The tables of numbers."""
    checks: tuple[Check, ...]
    """What the answer rests on, each passed or failed."""
    words: tuple[str, ...]
    """The answer in words, one paragraph each."""

    @property
    def passed(self) -> bool:
        """Whether every check passed; only then may the words be believed."""
        return all(check.passed for check in self.checks)


@dataclass(frozen=True, kw_only=True)
class SampleMean:
    """The mean of a formula over drawn completions, with its standard error."""

    mean: float
    """The mean over the drawn completions."""
    error: float
    """Standard error of the mean, from the exact variance: samples that miss a rare token do not know of it."""

    @property
    def text(self) -> str:
        """The mean and its standard error as text: `0.0452 +- 0.0002`."""
        return f"{self.mean:.4g} +- {self.error:.1g}"

    def fits(self, value: float) -> bool:
        """Whether the mean agrees with this value, up to `ALLOWED_ERRORS` standard errors."""
        return abs(self.mean - value) <= ALLOWED_ERRORS * self.error + 1e-12


def printed_form(y: Outcomes) -> Tensor:
    """The k3 formula as TRL and others print it, written out."""
    return torch.exp(y.ref_logprobs - y.policy_logprobs) - (y.ref_logprobs - y.policy_logprobs) - 1


def reversed_form(y: Outcomes) -> Tensor:
    """The formula with policy and reference exchanged, which the bug report first thought right."""
    return torch.exp(y.policy_logprobs - y.ref_logprobs) - (y.policy_logprobs - y.ref_logprobs) - 1


def klamps_k3(y: Outcomes) -> Tensor:
    """The k3 estimator of klamp, per token."""
    return kl_estimate(y.policy_logprobs, y.ref_logprobs, estimator="k3")


def klamps_penalty(y: Outcomes) -> Tensor:
    """The penalty that klamp uses by default: the value k3 with the gradient of KL(policy||ref)."""
    behavior = y.sampler_logprobs
    return kl_penalty(y.policy_logprobs, y.ref_logprobs, y.mask, value="k3", behavior_logprobs=behavior)


def draw(chain: Chain, loss: Loss, *, samples: int, seed: int) -> SampleMean:
    """Mean of a formula (summed over tokens) over completions drawn from the chain's sampler.

    Args:
        chain: the world.
        loss: the formula, per token.
        samples: completions to draw.
        seed: of the draws; the same seed gives the same completions.
    """
    outcomes = enumerate_outcomes(chain)
    values = torch.where(outcomes.mask, loss(outcomes).detach(), 0.0).sum(-1)
    generator = torch.Generator().manual_seed(seed)
    drawn = values[torch.multinomial(outcomes.probs, samples, replacement=True, generator=generator)]
    return SampleMean(mean=drawn.mean().item(), error=math.sqrt(variance(chain, loss).item() / samples))


def follow(chains: list[Chain], loss: Loss) -> tuple[Followed, float]:
    """Which divergence's gradient a formula follows as a loss, and its cosine with that of KL(policy||ref)."""
    gradients = [expected_gradient(chain, loss) for chain in chains]
    known = [truths(chain) for chain in chains]
    found = name_gradient(gradients, known)
    angle = 0.0 if found.name == "zero" else cosine(gradients, [each["reverse"] for each in known])
    return found, angle


def answer_direction(*, samples: int = SAMPLES, seed: int = 0) -> Answer:
    """Answers whether the k3 formula is backwards, with exact numbers and with samples.

    Args:
        samples: draws per number.
        seed: of the draws.
    """
    rows: list[tuple[str, ...]] = []
    checks: list[Check] = []
    for index, (name, chain) in enumerate(direction_worlds().items()):
        target, other = reverse_kl(chain).item(), forward_kl(chain).item()
        exact, back = expected(chain, klamps_k3).item(), expected(chain, reversed_form).item()
        drawn = draw(chain, printed_form, samples=samples, seed=seed + index)
        drawn_back = draw(chain, reversed_form, samples=samples, seed=seed + index)
        rows.append((name, f"{target:.4g}", f"{other:.4g}", f"{exact:.4g}", drawn.text, f"{back:.4g}", drawn_back.text))
        checks += [
            is_equal(f"{name}: E[printed] = KL(policy||ref)", exact, target),
            is_equal(f"{name}: klamp's k3 is the printed formula", _difference(chain), 0.0),
            is_true(
                f"{name}: the samples agree",
                drawn.fits(target),
                f"{abs(drawn.mean - target) / drawn.error:.1f} standard errors off",
                expected=f"at most {ALLOWED_ERRORS:g}",
            ),
            is_true(
                f"{name}: the reversed formula is something else",
                abs(back - target) > 0.01 * target,
                f"{100 * (back / target - 1):+.0f} %",
                expected="not KL(policy||ref)",
            ),
        ]
    gradients, gradient_checks = _gradient_table()
    columns = ("world", "KL(p||r)", "KL(r||p)", "printed: exact", "sampled", "reversed: exact", "sampled")
    title = f"printed: {PRINTED}; reversed: {REVERSED}; p policy, r reference, tokens of the policy"
    return Answer(
        question="Is the k3 formula, exp(ref - policy) - (ref - policy) - 1, backwards?",
        tables=(TextTable(title=title, columns=columns, rows=tuple(rows)), gradients),
        checks=(*checks, *gradient_checks),
        words=(
            "As a value it is right: with tokens of the policy its mean is KL(policy||ref), without bias. The reversed "
            "formula estimates neither KL: its mean is the chi-squared divergence minus KL(policy||ref).",
            "As a loss it is not what its value says: differentiated, its expected gradient is that of "
            "KL(ref||policy), the other direction. It does pull towards the reference, but not along what is logged.",
            "klamp's default keeps the value and follows KL(policy||ref): kl_estimator='k3', kl_gradient='reverse'. "
            "The printed form, gradient and all, is kl_gradient='own' (or, by its name, 'forward').",
        ),
    )


def direction_worlds() -> dict[str, Chain]:
    """Pairs of policy and reference: near each other, a tutorial's example, far apart, and whole completions."""
    near = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log()
    return {
        "near": one_position(near, near + torch.tensor([0.1, -0.1, 0.05], dtype=torch.float64)),
        ".7 .2 .1 | .8 .1 .1": one_position(
            torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64).log(),
            torch.tensor([0.8, 0.1, 0.1], dtype=torch.float64).log(),
        ),
        "far": random_chain(0, vocab=5, length=1, eos=None),
        "whole completions": random_chain(1, vocab=3, length=3),
    }


def _difference(chain: Chain) -> float:
    outcomes = enumerate_outcomes(chain)
    gap = (klamps_k3(outcomes) - printed_form(outcomes))[outcomes.mask]
    return gap.abs().max().item()


def _gradient_table() -> tuple[TextTable, tuple[Check, ...]]:
    chains = [random_chain(seed, vocab=5, length=1, eos=None) for seed in range(3)]
    wanted = {
        "printed, as a loss": (printed_form, "forward"),
        "reversed, as a loss": (reversed_form, "none of these"),
        "klamp's default: value k3, gradient reverse": (klamps_penalty, "reverse"),
    }
    rows: list[tuple[str, ...]] = []
    checks: list[Check] = []
    for name, (loss, truth) in wanted.items():
        found, angle = follow(chains, loss)
        rows.append((name, found.in_words, f"{angle:.4f}"))
        checks.append(is_true(f"gradient of {name}", found.is_exactly(truth), found.in_words, expected=truth))
    title = "expected gradient, tokens of the policy"
    columns = ("formula", "is the gradient of", "cosine with KL(p||r)")
    return TextTable(title=title, columns=columns, rows=tuple(rows)), tuple(checks)


@dataclass(frozen=True, kw_only=True)
class _Row:
    """One row of the table: who drew the tokens, which formula is averaged, which value and gradient are expected."""

    sampler: str
    formula: str
    loss: Loss
    value: str
    """What the mean should be: KL(p||r), KL(r||p), or "-" for neither."""
    gradient: str
    """The name of the known gradient that the expected gradient should be."""


def _weight(y: Outcomes) -> Tensor:
    return (y.policy_logprobs - y.sampler_logprobs).exp()


ROWS = (
    _Row(sampler="policy", formula="printed (k3)", loss=printed_form, value="KL(p||r)", gradient="forward"),
    _Row(sampler="policy", formula="reversed", loss=reversed_form, value="-", gradient=NOTHING_KNOWN),
    _Row(sampler="policy", formula="klamp's default", loss=klamps_penalty, value="KL(p||r)", gradient="reverse"),
    _Row(sampler="reference", formula="printed (k3)", loss=printed_form, value="-", gradient=NOTHING_KNOWN),
    _Row(sampler="reference", formula="reversed", loss=reversed_form, value="KL(r||p)", gradient="forward"),
    _Row(sampler="older policy", formula="printed (k3)", loss=printed_form, value="-", gradient=NOTHING_KNOWN),
    _Row(
        sampler="older policy",
        formula="w x printed, differentiated",
        loss=lambda y: _weight(y) * printed_form(y),
        value="KL(p||r)",
        gradient="reverse",
    ),
    _Row(
        sampler="older policy",
        formula="sg(w) x printed",
        loss=lambda y: _weight(y).detach() * printed_form(y),
        value="KL(p||r)",
        gradient="forward",
    ),
    _Row(sampler="older policy", formula="klamp, weighted", loss=klamps_penalty, value="KL(p||r)", gradient="reverse"),
)


def answer_importance_sampling(*, samples: int = SAMPLES, seed: int = 0) -> Answer:
    """Answers what the k3 formula gives when the tokens come from the policy, or from another model.

    Args:
        samples: draws per number.
        seed: of the draws.
    """
    worlds = sampling_worlds()
    target, other = reverse_kl(worlds["policy"]).item(), forward_kl(worlds["policy"]).item()
    known = {"KL(p||r)": target, "KL(r||p)": other}
    rows: list[tuple[str, ...]] = []
    checks: list[Check] = []
    for index, row in enumerate(ROWS):
        chain = worlds[row.sampler]
        exact = expected(chain, row.loss).item()
        drawn = draw(chain, row.loss, samples=samples, seed=seed + index)
        name = next((name for name, value in known.items() if abs(exact - value) < 1e-9), "-")
        found, angle = follow([chain], row.loss)
        rows.append((row.sampler, row.formula, f"{exact:.4g}", drawn.text, name, found.in_words, f"{angle:.3f}"))
        claim = f"tokens of the {row.sampler}, {row.formula}"
        measured = f"{exact:.6g}, {name}; gradient of {found.in_words}; sampled {drawn.text}"
        right = name == row.value and found.is_exactly(row.gradient) and drawn.fits(exact)
        checks.append(is_true(claim, right, measured, expected=f"{row.value}; {row.gradient}"))
    back = expected(worlds["policy"], reversed_form).item()
    return Answer(
        question="Does it matter that the tokens are samples, and whose they are?",
        tables=(
            TextTable(
                title=f"KL(p||r) = {target:.4f}, KL(r||p) = {other:.4f}; p policy, r reference, w = policy/sampler",
                columns=("tokens from", "formula", "exact", "sampled", "which is", "as a loss, gradient of", "cos"),
                rows=tuple(rows),
            ),
        ),
        checks=tuple(checks),
        words=(
            f"Tokens of the policy: the printed formula gives KL(policy||ref). The reversed one gives {back:.4g}, "
            f"{abs(back - target):.4g} off: it answers another question, and with tokens of the reference it would "
            "estimate KL(ref||policy), value and gradient.",
            "Tokens of an older policy (the second update of a rollout, or a sampler that lags behind): the printed "
            "formula is biased until it is weighted by w = policy/sampler. Differentiated together with w it follows "
            "KL(policy||ref); with w detached, KL(ref||policy).",
            "In klamp: kl_off_policy='token' weighs value and gradient; over whole completions only 'sequence', the "
            "ratio of the whole prefix, is exact.",
        ),
    )


def sampling_worlds() -> dict[str, Chain]:
    """One policy, one reference and three samplers; one token is likely under the policy only."""
    policy = torch.tensor([0.60, 0.25, 0.10, 0.05], dtype=torch.float64).log()
    ref = torch.tensor([0.70, 0.2699, 0.0001, 0.03], dtype=torch.float64).log()
    older = torch.tensor([0.50, 0.30, 0.15, 0.05], dtype=torch.float64).log()
    return {
        "policy": one_position(policy, ref),
        "reference": one_position(policy, ref, ref),
        "older policy": one_position(policy, ref, older),
    }


VocabRows = Float[Tensor, "prefixes vocab"]
TokenLoss = Callable[[Tensor, Tensor], Tensor]

RELATIVE = 1e-8
"""Relative error up to which numbers are equal; sums over a large vocabulary round."""


def verify_logits(
    policy_logits: VocabRows, ref_logits: VocabRows, tokens: Int[Tensor, " prefixes"], *, names: tuple[str, str]
) -> Answer:
    """Measures the estimators and their gradients on the distributions of a real model.

    Args:
        policy_logits: the policy's row at each sampled prefix; any floating-point type, computed in float64.
        ref_logits: the reference's row at the same prefixes.
        tokens: the token that the policy sampled there.
        names: what to call the policy and the reference.

    Raises:
        ShapeError: rows that do not belong together.
    """
    if policy_logits.shape != ref_logits.shape or tokens.shape != policy_logits.shape[:1]:
        raise ShapeError(
            "policy, reference and tokens do not belong together",
            got=f"{tuple(policy_logits.shape)}, {tuple(ref_logits.shape)}, {tuple(tokens.shape)}",
            why="each prefix has a row of both models over one vocabulary, and a sampled token",
            fix="use two models with the same tokenizer",
        )
    policy, ref = policy_logits.detach().double(), ref_logits.detach().double()
    reverse = exact_kl(policy, ref).mean().item()
    forward = exact_kl(policy, ref, direction="forward").mean().item()
    values, value_checks = _values(policy, ref, tokens, reverse)
    gradients, gradient_checks = _gradients(policy, ref)
    prefixes, vocab = policy.shape
    title = (
        f"{prefixes} sampled prefixes, {vocab:,} tokens; KL(policy||ref) = {reverse:.4g}, "
        f"KL(ref||policy) = {forward:.4g} nats per token"
    )
    return Answer(
        question=f"What do the estimators do on {names[0]} against {names[1]}?",
        tables=(
            TextTable(title=title, columns=("value", "exact", "against KL(policy||ref)", "sampled"), rows=values),
            gradients,
        ),
        checks=(
            is_true("the two models differ", reverse > 1e-12, f"{reverse:.3g} nats", expected="more than 0"),
            *value_checks,
            *gradient_checks,
        ),
        words=(
            "exact: summed over the whole vocabulary at each prefix; sampled: what the drawn tokens alone say, with "
            "the standard error that so few of them have. A value may be unbiased and its gradient that of another "
            "divergence.",
        ),
    )


def _values(
    policy: VocabRows, ref: VocabRows, tokens: Tensor, target: float
) -> tuple[tuple[tuple[str, ...], ...], tuple[Check, ...]]:
    log_policy, log_ref = policy.log_softmax(-1), ref.log_softmax(-1)
    probs = log_policy.exp()
    rows: list[tuple[str, ...]] = []
    checks: list[Check] = []
    for name in get_args(Estimator):
        each = kl_estimate(log_policy, log_ref, estimator=name)
        each = torch.where(probs > 0, each, 0.0)
        mean = (probs * each).sum(-1)
        noise = (probs * (each - mean[:, None]).square()).sum(-1)
        drawn = SampleMean(
            mean=each.gather(-1, tokens[:, None]).mean().item(), error=math.sqrt(noise.sum().item()) / len(tokens)
        )
        exact = mean.mean().item()
        relative = exact / target - 1 if target else 0.0
        off = "unbiased" if abs(relative) < RELATIVE else f"{100 * relative:+.2g} %"
        rows.append((name, f"{exact:.5g}", off, drawn.text))
        if name in ("k1", "k3"):
            checks.append(is_equal(f"{name} is unbiased (relative)", relative, 0.0, tolerance=RELATIVE))
    return tuple(rows), tuple(checks)


def _gradients(policy: VocabRows, ref: VocabRows) -> tuple[TextTable, tuple[Check, ...]]:
    known = _known(policy, ref)
    rows: list[tuple[str, ...]] = []
    checks: list[Check] = []
    for (value, gradient), truth in FOLLOWED.items():
        found, angles = _follow_over_vocabulary(policy, ref, _penalty(value, gradient), known)
        claim = f"{value}, gradient {gradient}"
        rows.append((claim, found.in_words, f"{angles[0]:.4f}", f"{angles[1]:.4f}"))
        checks.append(is_true(f"{claim} as a loss", found.is_exactly(truth), found.in_words, expected=truth))
    columns = ("as a loss", "is the gradient of", "cosine KL(policy||ref)", "cosine KL(ref||policy)")
    title = "expected gradient with respect to the logits, all prefixes together"
    return TextTable(title=title, columns=columns, rows=tuple(rows)), tuple(checks)


FOLLOWED: Mapping[tuple[Estimator, Gradient], str] = {
    ("k1", "own"): "zero",
    ("k2", "own"): "reverse",
    ("k3", "own"): "forward",
    ("k3", "reverse"): "reverse",
    ("abs", "own"): NOTHING_KNOWN,
}
"""(value, gradient) -> the name of the known gradient that it should follow at every position."""


def _penalty(value: Estimator, gradient: Gradient) -> TokenLoss:
    def loss(log_policy: Tensor, log_ref: Tensor) -> Tensor:
        mask = log_policy > -torch.inf
        return kl_penalty(log_policy, log_ref, mask, value=value, gradient=gradient)

    return loss


def _known(policy: VocabRows, ref: VocabRows) -> dict[str, Tensor]:
    """The known gradients with respect to the logits, from their formulas: those of both KLs, and zero."""
    log_p, log_q = policy.log_softmax(-1), ref.log_softmax(-1)
    p, q = log_p.exp(), log_q.exp()
    delta = torch.where(p > 0, log_p - log_q, 0.0)
    reverse = p * (delta - (p * delta).sum(-1, keepdim=True))
    return {"zero": torch.zeros_like(p), "reverse": reverse, "forward": p - q}


def _follow_over_vocabulary(
    policy: VocabRows, ref: VocabRows, loss: TokenLoss, known: dict[str, Tensor]
) -> tuple[Followed, tuple[float, float]]:
    """Names the expected gradient sum_v sg(policy_v) grad loss_v over every token v of the vocabulary."""
    logits = policy.clone().requires_grad_(True)
    log_policy = logits.log_softmax(-1)
    per_token = loss(log_policy, ref.log_softmax(-1))
    (gradient,) = torch.autograd.grad((log_policy.detach().exp() * per_token).sum(), logits)
    found = name_gradient([gradient], [known], tolerance=1e-7)
    if found.name == "zero":
        return found, (0.0, 0.0)
    return found, (cosine([gradient], [known["reverse"]]), cosine([gradient], [known["forward"]]))
