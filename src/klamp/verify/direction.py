"""Whether the k3 formula is backwards, and whose tokens it is right for: by exact expectations, by samples, in words.

A bug report (docs/sources.md) asks whether `exp(ref - policy) - (ref - policy) - 1` has the wrong direction, and
whether the reversed formula would be right, since the tokens are samples. Each number stands twice: the exact
expectation by enumeration, and a seeded Monte Carlo mean with its standard error.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from klamp.verify.oracle import (
    NOTHING_KNOWN,
    Loss,
    expected,
    expected_pull,
    forward_kl,
    per_outcome,
    reverse_kl,
    variance,
)
from klamp.verify.proofs.check import Check, ProvenAnswer, TextTable, is_equal, is_true
from klamp.verify.proofs.gradients import penalty, printed_k3
from klamp.verify.proofs.values import estimate
from klamp.verify.worlds import Chain, Outcomes, enumerate_outcomes, one_position, random_chain

SAMPLES = 100_000
ALLOWED_ERRORS = 5.0
"""Standard errors that a seeded sample mean may be off; more is a wrong formula, not bad luck."""

klamps_k3 = estimate("k3")
klamps_penalty = penalty("k3", "reverse", sampler="other")
"""The penalty that klamp uses by default: the value k3 with the gradient of KL(policy||ref)."""


def reversed_form(y: Outcomes) -> Tensor:
    """The formula with policy and reference exchanged, which the bug report first thought right."""
    return torch.exp(y.log_ratio) - y.log_ratio - 1


def draw(chain: Chain, loss: Loss, *, samples: int, seed: int) -> tuple[float, float]:
    """Mean of a formula (summed over tokens) over so many completions drawn from the chain's sampler, and its standard
    error: from the exact variance, since samples that miss a rare token underestimate it.
    """
    outcomes, generator = enumerate_outcomes(chain), torch.Generator().manual_seed(seed)
    drawn = torch.multinomial(outcomes.probs, samples, replacement=True, generator=generator)
    mean = per_outcome(loss, outcomes).detach()[drawn].mean().item()
    return mean, math.sqrt(variance(chain, loss).item() / samples)


def _fits(drawn: tuple[float, float], value: float) -> bool:
    return abs(drawn[0] - value) <= ALLOWED_ERRORS * drawn[1] + 1e-12


def _text(drawn: tuple[float, float]) -> str:
    return f"{drawn[0]:.4g} +- {drawn[1]:.1g}"


def answer_direction(*, samples: int = SAMPLES) -> ProvenAnswer:
    """Answers whether the k3 formula is backwards, and for whose tokens, with exact numbers and so many draws each."""
    values, value_checks = _values(samples)
    uses, use_checks = _uses(samples)
    return ProvenAnswer(
        question="Is the k3 formula, exp(ref - policy) - (ref - policy) - 1, backwards?",
        tables=(values, uses),
        checks=(*value_checks, *use_checks),
        words=(
            "As a value it is right: with tokens of the policy its mean is KL(policy||ref), without bias. The reversed "
            "formula estimates neither KL: its mean is the chi-squared divergence minus KL(policy||ref). With tokens "
            "of the reference it would estimate KL(ref||policy), value and gradient.",
            "As a loss it does not follow its value: differentiated, it has the expected gradient of "
            "KL(ref||policy), the other direction. It does pull towards the reference, but not along what is logged.",
            "Tokens of an older policy (the second update of a rollout, or a sampler that lags behind): the printed "
            "formula is biased until it is weighted by w = policy/sampler. Differentiated together with w it follows "
            "KL(policy||ref); with w detached, KL(ref||policy). In klamp: kl_off_policy='token' weighs value and "
            "gradient; over whole completions only 'sequence', the ratio of the whole prefix, is exact.",
            "klamp's default keeps the value and follows KL(policy||ref): kl_estimator='k3', kl_gradient='reverse'. "
            "The printed form, gradient and all, is kl_gradient='own' (or, by its name, 'forward').",
        ),
    )


def direction_worlds() -> dict[str, Chain]:
    """Pairs of policy and reference: near each other, a tutorial's example, far apart, and whole completions."""
    near = _logs(0.5, 0.3, 0.2)
    return {
        "near": one_position(near, near + torch.tensor([0.1, -0.1, 0.05], dtype=torch.float64)),
        ".7 .2 .1 | .8 .1 .1": one_position(_logs(0.7, 0.2, 0.1), _logs(0.8, 0.1, 0.1)),
        "far": random_chain(0, vocab=5, length=1, eos=None),
        "whole completions": random_chain(1, vocab=3, length=3),
    }


def _logs(*probs: float) -> Tensor:
    return torch.tensor(probs, dtype=torch.float64).log()


def _values(samples: int) -> tuple[TextTable, list[Check]]:
    rows, checks = list[tuple[str, ...]](), list[Check]()
    for index, (name, chain) in enumerate(direction_worlds().items()):
        target, other = reverse_kl(chain).item(), forward_kl(chain).item()
        exact, back = expected(chain, klamps_k3).item(), expected(chain, reversed_form).item()
        drawn, drawn_back = (draw(chain, form, samples=samples, seed=index) for form in (printed_k3, reversed_form))
        numbers = (f"{x:.4g}" for x in (target, other, exact))
        rows.append((name, *numbers, _text(drawn), f"{back:.4g}", _text(drawn_back)))
        y = enumerate_outcomes(chain)
        gap = (klamps_k3(y) - printed_k3(y))[y.mask].abs().max()
        off, most = f"{abs(drawn[0] - target) / drawn[1]:.1f} standard errors off", f"at most {ALLOWED_ERRORS:g}"
        apart, error = abs(back - target) > 0.01 * target, f"{100 * (back / target - 1):+.0f} %"
        checks += [
            is_equal(f"{name}: E[printed] = KL(policy||ref)", exact, target),
            is_equal(f"{name}: klamp's k3 is the printed formula", gap, 0.0),
            is_true(f"{name}: the samples agree", _fits(drawn, target), off, expected=most),
            is_true(f"{name}: the reversed formula is something else", apart, error, expected="not KL(policy||ref)"),
        ]
    columns = ("world", "KL(p||r)", "KL(r||p)", "printed: exact", "sampled", "reversed: exact", "sampled")
    title = (
        "printed: exp(ref - policy) - (ref - policy) - 1; reversed: exp(policy - ref) - (policy - ref) - 1; p policy, "
        "r reference, tokens of the policy"
    )
    return TextTable(title=title, columns=columns, rows=tuple(rows)), checks


USES: tuple[tuple[str, str, Loss, str, str], ...] = (
    ("policy", "printed (k3)", printed_k3, "KL(p||r)", "forward"),
    ("policy", "reversed", reversed_form, "-", NOTHING_KNOWN),
    ("policy", "klamp's default", klamps_penalty, "KL(p||r)", "reverse"),
    ("reference", "printed (k3)", printed_k3, "-", NOTHING_KNOWN),
    ("reference", "reversed", reversed_form, "KL(r||p)", "forward"),
    ("older policy", "printed (k3)", printed_k3, "-", NOTHING_KNOWN),
    ("older policy", "w x printed, differentiated", lambda y: y.weight * printed_k3(y), "KL(p||r)", "reverse"),
    ("older policy", "sg(w) x printed", lambda y: y.weight.detach() * printed_k3(y), "KL(p||r)", "forward"),
    ("older policy", "klamp, weighted", klamps_penalty, "KL(p||r)", "reverse"),
)
"""Who drew the tokens, which formula is averaged, what its mean and its expected gradient should be ("-": neither)."""


def sampling_worlds() -> dict[str, Chain]:
    """One policy, one reference and three samplers; one token is likely under the policy only."""
    policy, ref = _logs(0.60, 0.25, 0.10, 0.05), _logs(0.70, 0.2699, 0.0001, 0.03)
    older = _logs(0.50, 0.30, 0.15, 0.05)
    return {
        "policy": one_position(policy, ref),
        "reference": one_position(policy, ref, ref),
        "older policy": one_position(policy, ref, older),
    }


def _uses(samples: int) -> tuple[TextTable, list[Check]]:
    """Each formula as a value and as a loss, with tokens of the policy, of the reference and of an older policy."""
    worlds = sampling_worlds()
    target, other = reverse_kl(worlds["policy"]).item(), forward_kl(worlds["policy"]).item()
    divergences = {"KL(p||r)": target, "KL(r||p)": other}
    rows, checks = list[tuple[str, ...]](), list[Check]()
    for index, (sampler, formula, loss, value, gradient) in enumerate(USES):
        chain = worlds[sampler]
        exact, drawn = expected(chain, loss).item(), draw(chain, loss, samples=samples, seed=index)
        name = next((name for name, kl in divergences.items() if abs(exact - kl) < 1e-9), "-")
        pull = expected_pull([chain], loss)
        words, angle = pull.follows.in_words, f"{pull.cosine_reverse:.3f}"
        rows.append((sampler, formula, f"{exact:.4g}", _text(drawn), name, words, angle))
        measured = f"{exact:.6g}, {name}; gradient of {words}; sampled {_text(drawn)}"
        right = name == value and pull.follows.is_exactly(gradient) and _fits(drawn, exact)
        checks.append(is_true(f"tokens of the {sampler}, {formula}", right, measured, expected=f"{value}; {gradient}"))
    title = f"KL(p||r) = {target:.4f}, KL(r||p) = {other:.4f}; p policy, r reference, w = policy/sampler"
    columns = ("tokens from", "formula", "exact", "sampled", "which is", "as a loss, gradient of", "cos")
    return TextTable(title=title, columns=columns, rows=tuple(rows)), checks
