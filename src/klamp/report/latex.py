r"""The objective of a configuration as one LaTeX equation, and klamp's words as LaTeX.

What the KL adds is the text of `klamp.verify.equations` in other signs: no formula of it stands here a second time.

>>> to_math("delta_t^2 / 2")
'\\frac{1}{2} \\delta_t^2'
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from klamp.config import KLConfig, LossConfig
from klamp.config.loss import LOSS_TYPES, kl_reduction
from klamp.core.advantages import Baseline
from klamp.core.objective import SurrogateName
from klamp.core.types import Reduction
from klamp.verify.equations import equations

REDUCTIONS: Mapping[Reduction, str] = {
    "token_mean": r"\frac{1}{\sum_i n_i} \sum_i \sum_t",
    "sequence_mean": r"\frac{1}{B} \sum_i \frac{1}{n_i} \sum_t",
    "sequence_sum": r"\frac{1}{B} \sum_i \sum_t",
    "fixed_length": r"\frac{1}{B L} \sum_i \sum_t",
}
"""What stands before the tokens, as in `reduce_tokens`: B completions of n_i tokens, at most L."""

SURROGATES: Mapping[SurrogateName, str] = {
    "ppo_clip": r"-\min\left( r_t A, \mathrm{clip}(r_t, LOW, HIGH) A \right)",
    "cispo": r"-\mathrm{sg}\left[ \mathrm{clip}(r_t, LOW, HIGH) \right] A \log \pi_t",
    "score_function": r"-A \log \pi_t",
}
"""The policy loss of a token, as in `klamp.core.surrogates`; LOW and HIGH bound the ratio r_t."""

BASELINES: Mapping[Baseline, str] = {
    "mean": r"R - \frac{1}{G} \sum_{j} R_j",
    "leave_one_out": r"R - \frac{1}{G - 1} \sum_{j} R_j",
}
"""What a reward is compared with, as in `group_advantages`: j runs over the group, or over the others of it."""

_WHO = {"policy": r"\pi", "ref": r"\pi^{\mathrm{ref}}", "sampler": r"\pi^{\mathrm{sampler}}"}
_SIGNS = (
    (r"^1 (?=grad)", ""),
    (r"\((w|rho)_t 1\)", r"\1_t"),
    (r"rho_t 1 -", r"rho_t -"),
    (r"exp\(-delta_t\)", r"e^{-delta_t}"),
    (r"delta_t\^2 / 2", r"\\frac{1}{2} delta_t^2"),
    (r"\bk3_j", r"(e^{-delta_j} - 1 + delta_j)"),
    (r"product of policy/sampler up to t", r"\\prod_{j \\leq t} policy_j/sampler_j"),
    (r"product over j <= t of ", r"\\prod_{j \\leq t} "),
    (r"sum over j >= t of ", r"\\sum_{j \\geq t} "),
    (r", and sum over later j of exact_j times grad", r" + \\left( \\sum_{j > t} k_j \\right) grad"),
    (r"sum over later j of ", r"\\sum_{j > t} "),
    (r"\bsum_(\w) ", r"\\sum_\1 "),
    (r"\bsign\(", r"\\mathrm{sign}("),
    (r"1 where the completion's KL is above the budget, 0 below", r"\\mathbf{1}[m > b]"),
    (r"sigmoid\(\(KL of the completion - budget\) / ([^)]*)\)", r"\\sigma\\left( (m - b) / \1 \\right)"),
    (r"\b(delta|rho|beta)(?![a-z])", r"\\\1"),
    (r"\bgrad ", r"\\nabla_\\theta "),
    (r"\blog ", r"\\log "),
    (r"\badvantage_t\b|\badvantage\b", r"A"),
    (r"\breward\b", r"R"),
    (r" \* ", r" "),
    (r"\b((?:policy|ref)_\w)/((?:policy|sampler)_\w)\b", r"\\frac{\1}{\2}"),
)
"""Patterns in the printed equations -> LaTeX, one after the other."""

_LETTERS = str.maketrans(
    {
        **{letter: f"\\{letter}" for letter in "{}$&#%_"},
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "|": r"\textbar{}",
        "‖": r"$\|$",
    }
)
_DIVERGENCE = re.compile(r"KL\((policy|ref)\|\|(policy|ref)\)")


def to_math(text: str) -> str:
    """A formula of `klamp.verify.equations` in LaTeX, without the dollars around it.

    Args:
        text: the formula, such as `delta_t^2 / 2`.
    """
    for pattern, sign in _SIGNS:
        text = re.sub(pattern, sign, text)
    text = re.sub(r"\b(policy|ref|sampler)_v\b", lambda found: f"{_WHO[found[1]]}_{{t,v}}", text)
    return re.sub(r"\b(policy|ref|sampler)_(\w)\b", lambda found: f"{_WHO[found[1]]}_{found[2]}", text).strip()


def to_text(words: str) -> str:
    """Words of klamp as LaTeX text: divergences and signs in mathematics, all else escaped.

    Args:
        words: plain text, such as "beta fixed at 0.01".
    """
    parts = _DIVERGENCE.split(words)
    return "".join(
        rf"{_plain(text)}$\mathrm{{KL}}({_WHO[one]} \,\|\, {_WHO[other]})$" if one else _plain(text)
        for text, one, other in zip(parts[::3], [*parts[1::3], ""], [*parts[2::3], ""], strict=True)
    )


def escaped(text: str) -> str:
    """Text in which LaTeX finds nothing but letters."""
    return text.translate(_LETTERS)


def _plain(text: str) -> str:
    found = re.sub(r"(?<![\w\\])beta(?![\w\\])", r"$\\beta$", escaped(text))
    found = re.sub(r"(?<=[\w)]) x (?=[\w(])", r" $\\times$ ", found)
    return found.replace(" * ", r" $\cdot$ ").replace("+-", r"$\pm$")


def equation(kl: KLConfig, loss: LossConfig) -> str:
    """The loss of a configuration as one numbered equation for `amsmath`.

    Args:
        kl: the KL.
        loss: the policy loss around it.
    """
    whole = rf"\mathcal{{L}}(\theta) &= {REDUCTIONS[LOSS_TYPES[loss.loss_type].reduction]} \ell_t"
    bounds = {"LOW": f"{1 - loss.epsilon:g}", "HIGH": f"{1 + loss.clip_high:g}"}
    surrogate = re.sub("LOW|HIGH", lambda found: bounds[found[0]], SURROGATES[loss.surrogate])
    lines = [rf"\ell_t &= {surrogate}"]
    if uses_ratio(loss):
        lines[0] += r", \qquad r_t = \pi_t / \pi^{\mathrm{old}}_t"
    advantage = BASELINES[loss.advantage_baseline]
    lines.append(rf"A &= \frac{{1}}{{s}} \left( {advantage} \right)" if loss.scale == "std" else rf"A &= {advantage}")
    if is_used(kl):
        if kl.kl_placement == "loss":
            whole += rf" + \beta\, {REDUCTIONS[kl_reduction(kl, loss)]} k_t"
        lines += _of_kl(kl, loss)
    body = " \\\\\n".join([whole, *lines])
    return f"\\begin{{equation}}\n\\begin{{aligned}}\n{body}\n\\end{{aligned}}\n\\end{{equation}}"


def uses_ratio(loss: LossConfig) -> bool:
    """Whether the policy loss holds the ratio to the policy that sampled."""
    return loss.surrogate != "score_function"


def is_used(kl: KLConfig) -> bool:
    """Whether the KL is more than logged: beta is above 0, or something may raise it."""
    return kl.beta > 0 or kl.controller_name != "fixed"


def _of_kl(kl: KLConfig, loss: LossConfig) -> list[str]:
    """What the KL adds to the lines of the equation."""
    first, *others = equations(kl, loss)
    gates = [to_math(line.partition(" multiplied by ")[2]) for line in others if " multiplied by " in line]
    if kl.kl_placement != "loss":
        changed, _, formula = first.partition(", ")[0].partition(" = ")
        return [
            rf"{to_math(changed)} &\leftarrow {to_math(formula)}",
            *(rf"\beta &\leftarrow \beta\, {gate}" for gate in gates),
        ]
    value, gradient = (line.partition(" = ")[2] for line in others[:2])
    formula, _, weight = value.partition(", ")
    lines = [rf"k_t &= {to_math(formula)}" + (rf", \qquad {to_math(weight)}" if weight else "")]
    flows = to_math(gradient)
    return [*lines, *([rf"\nabla_\theta k_t &:= {gate} \left( {flows} \right)" for gate in gates] or [_flow(flows)])]


def _flow(gradient: str) -> str:
    return rf"\nabla_\theta k_t &:= {gradient}"
