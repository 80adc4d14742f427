"""Explanations: the sentences follow from what is measured, the equations are what the configuration computes."""

import dataclasses
import functools
import itertools
import math
import warnings

import pytest
import torch

from klamp.config import KLConfig, LossConfig
from klamp.core.estimators import ESTIMATORS
from klamp.core.gradients import kl_penalty
from klamp.verify import convergence
from klamp.verify.explain import Setting, equations, explain_config, measure_trust
from klamp.verify.judge import Explanation
from klamp.verify.proofs.values import measure_estimators


@pytest.fixture(autouse=True)
def not_followed_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a configuration ends is for test_convergence.py; what has no pull would be followed for seconds."""
    monkeypatch.setattr(convergence, "UPDATES", 10)


@functools.cache
def explain(loss: LossConfig | None = None, setting: Setting | None = None, **choices: object) -> Explanation:
    return explain_config(KLConfig(**choices), loss or LossConfig(), name="mine", setting=setting)


def line(explanation: Explanation, label: str) -> str:
    return dict(explanation.lines)[label]


@pytest.mark.filterwarnings("ignore::klamp.errors.KLWarning")
@pytest.mark.parametrize(
    ("choices", "verdict"),
    [
        ({}, "Pulls the policy along the gradient of KL(policy||ref), token by token."),
        ({"kl_horizon": "sequence"}, "Pulls the policy along the gradient of KL(policy||ref), over whole completions."),
        ({"kl_gradient": "own"}, "Pulls the policy along the gradient of KL(ref||policy), token by token."),
        (
            {"kl_estimator": "k1", "kl_gradient": "own"},
            "Regularises nothing: its expected gradient, summed over tokens, is zero.",
        ),
        ({"kl_gradient": "none"}, "Regularises nothing: its expected gradient, summed over tokens, is zero."),
        ({"beta": 0.0}, "No KL: beta is 0, no reference is loaded, and it costs nothing."),
        ({"beta": 0.0, "kl_monitor": True}, "No pull: beta is 0; the KL is only measured and logged."),
    ],
)
def test_the_verdict(choices: dict, verdict: str) -> None:
    assert explain(**choices).verdict == verdict


def test_the_verdict_is_measured_not_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the reverse coefficient's sign turned, the same configuration is called what it then is."""
    import klamp.core.gradients as gradients

    turned = lambda value, log_w, delta: -log_w.exp() * delta  # noqa: E731
    monkeypatch.setitem(gradients.COEFFICIENTS, ("token", "reverse"), turned)
    found = explain_config(KLConfig(), LossConfig(), name="mine")
    assert "neither KL: cosine -1.000" in found.verdict
    assert "pushes away" in line(found, "at 30 nats")


def test_the_price_is_that_of_the_reduction_the_baseline_the_scale_and_the_group() -> None:
    exact = LossConfig(loss_type="dr_grpo", advantage_baseline="leave_one_out")
    assert line(explain(exact, beta=0.04), "price") == "0.04 reward per nat of a whole completion"
    summed = explain(exact, beta=0.04, kl_normalizer="sequence_sum", setting=Setting(length=50))
    assert line(summed, "price").startswith("2 reward per nat of a whole completion = beta 0.04 x 50 ")
    mean = explain(LossConfig(advantage_baseline="mean"), beta=0.04, setting=Setting(group_size=5))
    assert line(mean, "price").startswith("0.05 reward per nat of a whole completion = beta 0.04 x 1.25 ")
    assert "no single number" in line(explain(LossConfig(scale_rewards="std"), beta=0.04), "price")


def test_the_numbers_of_limits_and_control() -> None:
    clip = {"kl_clip_method": "hard", "kl_clip_threshold": 0.1, "kl_reference_length": 50}
    found = line(explain(**clip, kl_max_log_ratio=10.0, kl_off_policy="token", kl_max_weight=2.0), "limits")
    for words in ("= 5 nats per completion", "0 % at 0.5", "100 % at 2", "+-10 nats", "cut at 2"):
        assert words in found
    assert "half open at a KL of 0" in line(explain(kl_clip_method="soft", kl_clip_threshold=0.0), "limits")
    assert line(explain(), "control") == "beta fixed at 0.01"


@pytest.mark.filterwarnings("ignore::klamp.errors.KLWarning")
def test_what_is_said_of_one_configuration_is_not_said_of_another() -> None:
    """Lines that were printed under too wide a condition."""
    assert dict(explain(beta=0.0, kl_monitor=True).lines).keys() == {"value", "control"}, "it is only measured"
    assert line(explain(reference="ema"), "ends").startswith("not known"), "the reference follows the policy"
    assert line(explain(target_kl=0.1), "ends").startswith("not known"), "beta moves"
    assert "reward" not in line(explain(setting=Setting(rewarded=False)), "ends")
    assert "price" not in dict(explain(kl_gradient="none").lines), "nothing is paid"
    assert line(explain(target_kl=0.05), "price").startswith("moves with beta; at its start 0.01 reward")
    assert {"ends", "price"}.isdisjoint(dict(explain(reference="sampler").lines)), "a sampler has neither"
    clipped = explain(kl_clip_method="hard", kl_reference_length=9)
    assert "ends" not in dict(clipped.lines) and line(clipped, "price").endswith("above the budget")
    assert "measured here" in line(explain(kl_exclude_tokens=("special", 5)), "limits")
    kl = KLConfig(kl_gradient="own")
    assert explain_config(kl, LossConfig(), name="x").cautions == tuple(kl.cautions())


def test_a_soft_clip_is_judged_at_the_length_of_the_explanation() -> None:
    soft = {"kl_clip_method": "soft", "kl_clip_threshold": 0.5}
    found = explain(setting=Setting(length=2), **soft)
    assert "26.9 % at 0," in line(found, "limits")
    assert any("passes 27 % of the pull at a KL of 0" in text for text in found.cautions)
    assert explain(setting=Setting(length=100), **soft).cautions == ()


def lines(**choices: object) -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return equations(KLConfig(**choices), LossConfig())


def evaluate(formula: str, policy: float, ref: float) -> float:
    """A printed coefficient (or value) of one token, as arithmetic."""
    words = {"ref_t/policy_t": str(math.exp(ref - policy)), "delta_t": f"({policy - ref})", "^": "**", "|": ""}
    if formula.startswith("|"):
        return abs(policy - ref)
    for word, number in words.items():
        formula = formula.replace(word, number)
    return eval(formula, {"exp": math.exp, "sign": lambda x: math.copysign(1, x)})


@pytest.mark.parametrize(("value", "gradient"), list(itertools.product(ESTIMATORS, ("reverse", "forward", "own"))))
def test_value_and_coefficient_of_one_token_are_what_kl_penalty_computes(value: str, gradient: str) -> None:
    for policy, ref in ((-0.5, -1.5), (-2.0, -0.25)):
        leaf = torch.tensor([[policy]], dtype=torch.float64, requires_grad=True)
        reference, mask = torch.tensor([[ref]], dtype=torch.float64), torch.tensor([[True]])
        result = kl_penalty(leaf, reference, mask, value=value, gradient=gradient)  # type: ignore[arg-type]
        (slope,) = torch.autograd.grad(result.sum(), leaf)
        _, printed, backward = lines(kl_estimator=value, kl_gradient=gradient)
        coefficient = backward.removeprefix("gradient of penalty_t = ").removesuffix(" grad log policy_t")
        assert evaluate(printed.removeprefix("penalty_t = "), policy, ref) == pytest.approx(result.item())
        assert evaluate(coefficient, policy, ref) == pytest.approx(slope.item())


def test_an_estimator_is_explained_as_its_row_of_the_table_says(monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"formula": "delta^4", "value": lambda d: d**4, "derivative": lambda d: 4 * d**3, "slope": "4 delta^3"}
    monkeypatch.setitem(ESTIMATORS, "abs", dataclasses.replace(ESTIMATORS["abs"], **changes))
    _, value, slope = lines(kl_estimator="abs", kl_gradient="own")
    assert (value, slope) == ("penalty_t = delta_t^4", "gradient of penalty_t = (4 delta_t^3) grad log policy_t")
    assert (facts := {x.name: x for x in measure_estimators()})["abs"].formula == "delta^4" and facts["abs"].bias > 1


def test_what_is_added_and_where() -> None:
    assert lines()[1] == "penalty_t = exp(-delta_t) - 1 + delta_t"
    assert lines(kl_off_policy="token")[1].startswith("penalty_t = w_t (exp(-delta_t)")
    assert lines(kl_estimator="exact")[1] == "penalty_t = sum_v policy_v (log policy_v - log ref_v)"
    k1 = {"kl_estimator": "k1", "kl_horizon": "sequence"}
    assert lines(**k1, kl_placement="reward")[0].startswith("reward = reward - beta * sum_t delta_t")
    assert "sum over j >= t of delta_j" in lines(**k1, kl_placement="advantage")[0]
    assert lines(kl_gradient="none")[-1] == "gradient of penalty_t = 0"
    assert lines(kl_off_policy="token")[2] == "gradient of penalty_t = w_t delta_t grad log policy_t"
    prefix = lines(kl_off_policy="sequence", kl_horizon="sequence")
    assert prefix[2] == "gradient of penalty_t = (rho_t delta_t + sum over later j of rho_j k3_j) grad log policy_t"
    assert "sum over later j of exact_j" in lines(kl_estimator="exact", kl_horizon="sequence")[2]
    assert lines(kl_estimator="exact", kl_gradient="forward")[2].endswith("sum_v ref_v (log ref_v - log policy_v)")


def test_a_trust_region_is_explained_by_what_is_measured_under_its_own_bounds() -> None:
    """The token's ratio is exact at the sampler's prefixes, that of the completion everywhere; a mask is neither."""
    weight = {"surrogate": "score_function", "vllm_importance_sampling_clip_max": None}
    token, whole = (weight | {"vllm_importance_sampling_mode": f"{x}_truncate"} for x in ("token", "sequence"))
    for fields, zero in ((token, 2), (whole, 1)):
        measured = measure_trust(LossConfig(**fields), 0.5)
        assert measured[zero] < 1e-14 and measured[3] < 1e-14 and measured[4] == 0 and measured[3 - zero] > 0.2
    free = {"surrogate": "cispo", "epsilon": 1.0, "epsilon_high": 1e9}
    trm = LossConfig(**free, rollout_rs="seq_max_exact", rollout_rs_threshold=0.1)
    near, far = (measure_trust(trm, lag) for lag in (0.1, 0.5))
    assert near[2] < 1e-14 and min(far[1:]) > 0.1
    wide, narrow = (LossConfig(**free, dppo_mask="dppo_tv", dppo_mask_low=x, dppo_mask_high=x) for x in (0.2, 0.05))
    assert measure_trust(wide, 0.5)[2] < measure_trust(narrow, 0.5)[2]
    lines = [text for label, text in explain(trm, Setting(length=4096)).lines if label == "trust region"]
    assert lines[0] == "rollout_rs seq_max_exact, rollout_rs_threshold 0.1"
    assert f"{100 * far[1]:.0f} % off the policy's gradient" in lines[2]
    assert "an estimate from the prefixes drawn, no guarantee; empty" in lines[3]
    short = explain(dataclasses.replace(trm, rollout_rs_threshold=1e-4), Setting(length=20), beta=0.0)
    assert short.lines[-1][1].endswith("0.0119, an estimate from the prefixes drawn, no guarantee")
    assert "trust region" not in dict(explain().lines)
