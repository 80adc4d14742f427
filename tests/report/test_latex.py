"""LaTeX: every equation is translated whole, is read by a parser of LaTeX, and is the formula that klamp computes."""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Iterator
from typing import get_args

import pytest
import torch

from klamp.config import KLConfig, LossConfig
from klamp.config.loss import LossType
from klamp.core.advantages import Baseline, group_advantages
from klamp.core.masking import reduce_tokens
from klamp.core.objective import SurrogateName
from klamp.core.types import Reduction
from klamp.errors import ConfigError
from klamp.report.latex import BASELINES, REDUCTIONS, SURROGATES, equation, to_math, to_text

COMMANDS = {
    *(
        "begin",
        "end",
        "mathcal",
        "mathrm",
        "mathbf",
        "theta",
        "pi",
        "delta",
        "rho",
        "beta",
        "ell",
        "sum",
        "prod",
        "frac",
    ),
    *("min", "left", "right", "log", "nabla", "qquad", "leq", "geq", "leftarrow", "sigma"),
}
WORDS = {"equation", "aligned", "clip", "ref", "old", "sampler", "sg", "sign"}


def config(**choices: object) -> KLConfig:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return KLConfig(**choices)


def every_kl() -> Iterator[dict[str, object]]:
    """Every combination of the choices that stand in the equation and that is not refused."""
    choices = {
        "kl_estimator": ("k1", "k2", "k3", "abs", "exact"),
        "kl_gradient": ("reverse", "forward", "own", "none"),
        "kl_horizon": ("token", "sequence"),
        "kl_placement": ("loss", "reward", "advantage"),
        "kl_off_policy": ("none", "token", "sequence"),
        "kl_clip_method": ("none", "hard", "soft"),
    }
    for values in itertools.product(*choices.values()):
        found = dict(zip(choices, values, strict=True))
        try:
            config(**found)
        except ConfigError:
            continue
        yield found


EVERY = list(every_kl())


def test_every_equation_is_translated_whole() -> None:
    assert len(EVERY) > 100
    for choices in EVERY:
        text = equation(config(**choices), LossConfig())
        assert set(re.findall(r"\\([a-zA-Z]+)", text)) <= COMMANDS, choices
        assert set(re.findall(r"(?<![\\a-zA-Z])[a-zA-Z]{2,}", text)) <= WORDS, (choices, text)
        assert text.count("{") == text.count("}") and len(re.findall(r"\\left\b", text)) == len(
            re.findall(r"\\right\b", text)
        )


def test_a_parser_of_latex_reads_every_line() -> None:
    mathtext = pytest.importorskip("matplotlib.mathtext")
    parser = mathtext.MathTextParser("agg")
    lines = {line for choices in EVERY for line in equation(config(**choices), LossConfig()).splitlines()[2:-2]}
    for line in sorted(lines):
        parser.parse(f"${line.replace('&', '').removesuffix(chr(92) * 2)}$")


@pytest.mark.parametrize("field", ["kl_estimator", "kl_gradient", "kl_horizon", "kl_placement", "kl_off_policy"])
def test_a_choice_that_changes_the_mathematics_changes_the_equation(field: str) -> None:
    """Two combinations that differ in one field have one equation only where klamp computes the same."""
    others = [each for each in EVERY if each["kl_clip_method"] == "none"]
    for one, other in itertools.combinations(others, 2):
        differing = {name for name in one if one[name] != other[name]}
        if differing == {field} and equation(config(**one), LossConfig()) == equation(config(**other), LossConfig()):
            assert _same_mathematics(one, other), (one, other)


def _same_mathematics(one: dict[str, object], other: dict[str, object]) -> bool:
    """Names of one term: k2's own gradient is the reverse one, k3's the forward one, the exact KL's likewise; without a
    gradient no horizon counts, and an exact KL needs no weight of the token itself."""
    values, gradients = {one["kl_estimator"], other["kl_estimator"]}, {one["kl_gradient"], other["kl_gradient"]}
    if gradients in ({"own", "reverse"}, {"own", "forward"}):
        return True
    if gradients == {"none"} or gradients == {"own"}:
        return True
    return values == {"exact"} or one["kl_placement"] != "loss"


@pytest.mark.parametrize("method", ["hard", "soft"])
@pytest.mark.parametrize("placement", ["loss", "reward", "advantage"])
def test_a_clip_shows_wherever_the_kl_enters(method: str, placement: str) -> None:
    choices = {"kl_placement": placement}
    if placement != "loss":
        choices |= {"kl_estimator": "k1", "kl_horizon": "sequence"}
    plain, clipped = (equation(config(kl_clip_method=name, **choices), LossConfig()) for name in ("none", method))
    gate = {"hard": r"\mathbf{1}[m > b]", "soft": r"\sigma\left( (m - b) / 1 \right)"}[method]
    assert gate in clipped and gate not in plain


def test_the_loss_around_it() -> None:
    kl = config()
    every = [
        LossConfig(loss_type=kind, surrogate=surrogate, scale_rewards=scale, advantage_baseline=baseline)
        for kind, surrogate, scale, baseline in itertools.product(
            ("grpo", "dapo", "dr_grpo"), get_args(SurrogateName), ("std", "none"), get_args(Baseline)
        )
    ]
    assert len({equation(kl, loss) for loss in every}) == len(every)
    assert "clip(r_t, 0.8, 1.28)" in equation(kl, LossConfig(epsilon_high=0.28)).replace(r"\mathrm{clip}", "clip")
    own = equation(config(kl_normalizer="sequence_sum"), LossConfig())
    assert rf"\beta\, {REDUCTIONS['sequence_sum']} k_t" in own and REDUCTIONS["fixed_length"] in own
    assert {*get_args(Reduction)} == set(REDUCTIONS) and {*get_args(SurrogateName)} == set(SURROGATES)
    assert {*get_args(Baseline)} == set(BASELINES) and get_args(LossType)


def test_without_a_kl_there_is_none_in_it() -> None:
    for kl in (config(beta=0.0), config(beta=0.0, kl_monitor=True)):
        text = equation(kl, LossConfig())
        assert r"\beta" not in text and "k_t" not in text
    assert r"\beta" in equation(config(beta=0.0, kl_controller="dual", target_kl=0.1), LossConfig())


def test_the_reductions_are_those_that_are_computed() -> None:
    x, n, longest = torch.tensor([[1.0, 2.0, 0.0], [5.0, 7.0, 11.0]]), [2, 3], 4
    mask = torch.tensor([[True, True, False], [True, True, True]])
    sums = [3.0, 23.0]
    by_hand = {
        r"\frac{1}{\sum_i n_i} \sum_i \sum_t": sum(sums) / sum(n),
        r"\frac{1}{B} \sum_i \frac{1}{n_i} \sum_t": sum(s / k for s, k in zip(sums, n, strict=True)) / 2,
        r"\frac{1}{B} \sum_i \sum_t": sum(sums) / 2,
        r"\frac{1}{B L} \sum_i \sum_t": sum(sums) / (2 * longest),
    }
    for name, text in REDUCTIONS.items():
        assert reduce_tokens(x, mask, name, length=longest).item() == pytest.approx(by_hand[text])


def test_the_baselines_are_those_that_are_computed() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.5])
    others = [1.0 - (0.0 + 0.0 + 0.5) / 3, 1.0 - 1.5 / 4]
    for name, expected in zip(("leave_one_out", "mean"), others, strict=True):
        found = group_advantages(rewards, 4, scale="none", baseline=name)  # type: ignore[arg-type]
        assert found[0].item() == pytest.approx(expected)
    assert "G - 1" in BASELINES["leave_one_out"] and "G - 1" not in BASELINES["mean"]


@pytest.mark.parametrize(
    ("text", "latex"),
    [
        ("exp(-delta_t) - 1 + delta_t", r"e^{-\delta_t} - 1 + \delta_t"),
        ("(1 - ref_t/policy_t) grad log policy_t",
         r"(1 - \frac{\pi^{\mathrm{ref}}_t}{\pi_t}) \nabla_\theta \log \pi_t"),
        ("1 grad log policy_t", r"\nabla_\theta \log \pi_t"),
        ("(w_t 1) grad log policy_t", r"w_t \nabla_\theta \log \pi_t"),
        ("sum_v policy_v (log policy_v - log ref_v)",
         r"\sum_v \pi_{t,v} (\log \pi_{t,v} - \log \pi^{\mathrm{ref}}_{t,v})"),
    ],
)  # fmt: skip
def test_formulas(text: str, latex: str) -> None:
    assert to_math(text) == latex


def test_words_are_escaped() -> None:
    assert to_text("5% of a_b & <x> {y}") == r"5\% of a\_b \& \textless{}x\textgreater{} \{y\}"
    assert to_text("beta 0.1 x 1.14, +-10") == r"$\beta$ 0.1 $\times$ 1.14, $\pm$10"
    assert to_text("the KL(policy||ref).") == r"the $\mathrm{KL}(\pi \,\|\, \pi^{\mathrm{ref}})$."
    assert to_text("kl_beta is beta_min") == r"kl\_beta is beta\_min"
