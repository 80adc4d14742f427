"""The second question about the k3 formula: what becomes of it when somebody else drew the tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from klamp.verify.answers import (
    SAMPLES,
    Answer,
    TextTable,
    draw,
    follow,
    klamps_penalty,
    printed_form,
    reversed_form,
)
from klamp.verify.gradient_names import NOTHING_KNOWN
from klamp.verify.oracle import Loss, expected, forward_kl, reverse_kl
from klamp.verify.proofs.check import Check, is_true
from klamp.verify.worlds import Chain, Outcomes, one_position


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
