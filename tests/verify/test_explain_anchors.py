"""What is said of a teacher, the sampler, a trust region: each sentence where it is measured, and only there."""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from klamp.config import KLConfig, LossConfig
from klamp.verify import convergence, one_step
from klamp.verify.config_facts import measure_config
from klamp.verify.convergence import follow, worlds
from klamp.verify.explain import Setting, explain_config
from klamp.verify.explain_anchors import toll, trust_region
from klamp.verify.mixes import FIXED
from klamp.verify.oracle import reverse_kl
from klamp.verify.proofs.anchors import taught_by

pytestmark = [
    pytest.mark.usefixtures("shapes_unchecked"),  # checked in tests/core; here they would cost minutes
    pytest.mark.filterwarnings("ignore::klamp.errors.KLWarning"),
]
SEQUENCE, NO_KL = {"horizon": "sequence"}, (("beta", 0.0),)
STD, MEAN, OWN_LENGTH = (
    replace(FIXED, **{name: value})
    for name, value in (("scale_rewards", "std"), ("advantage_baseline", "mean"), ("loss_type", "grpo"))
)
SILENT = Setting(rewarded=False, group_size=1)


@pytest.fixture
def briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is followed to its end."""
    monkeypatch.setattr(convergence, "UPDATES", 3)


@functools.cache
def told(
    kl: tuple, teacher: tuple | None, loss: LossConfig, setting: Setting, _: int
) -> tuple[str, dict[str, str], str]:
    config = KLConfig(**dict(kl))
    found = explain_config(
        config, loss, name="x", setting=setting, teacher=None if teacher is None else taught_by(**dict(teacher))
    )
    return found.verdict, dict(found.lines), " ".join(text for _, text in found.lines)


def tell(kl: Any = NO_KL, teacher: dict | None = None, loss: LossConfig = FIXED, setting: Setting = Setting()):  # noqa: B008
    return told(tuple(kl), None if teacher is None else tuple(teacher.items()), loss, setting, convergence.UPDATES)


BOTH = (("beta", 0.02), ("kl_horizon", "sequence"))
LOCAL = (("beta", 0.02),)


@pytest.mark.parametrize(
    ("kl", "teacher", "loss", "setting", "start"),
    [
        (NO_KL, {}, FIXED, SILENT, "at the teacher ("),
        (NO_KL, {"direction": "js", "estimator": "topk"}, FIXED, SILENT, "at the teacher ("),
        (NO_KL, SEQUENCE, FIXED, Setting(), "at the optimum of E[reward] - price KL(policy||teacher): teacher exp("),
        (NO_KL, {}, FIXED, Setting(), "0.12 nats from the optimum teacher exp(reward / price), at that of each prefix"),
        (BOTH, SEQUENCE, FIXED, Setting(), "at the optimum of E[reward] - price KL(policy||mix): mix exp("),
        (BOTH, SEQUENCE, FIXED, SILENT, "at the mix ("),
        (LOCAL, {}, FIXED, SILENT, r"\S+ nats from the mix \("),
        (LOCAL, {}, FIXED, Setting(), r"\S+ nats from the optimum mix \S+ / price\), at that of each prefix"),
        (LOCAL, SEQUENCE, FIXED, Setting(), r"\S+ nats from the optimum mix exp\(reward / price\): KL"),
        (NO_KL, SEQUENCE, OWN_LENGTH, Setting(), r"\S+ nats from the optimum teacher exp\(reward / price\): KL"),
        (NO_KL, SEQUENCE, STD, Setting(), r"\S+ nats from the nearest optimum teacher exp\S+ / price\), price"),
        (NO_KL, {"estimator": "topk", "tail": "none"}, FIXED, SILENT, "nowhere: .* from the teacher it is still"),
        (NO_KL, {"schedule": "cosine"}, FIXED, Setting(), "not known: a coefficient moves"),
        ((*LOCAL, ("reference", "ema")), {}, FIXED, Setting(), "not known: a coefficient moves"),
        ((*LOCAL, ("kl_clip_method", "hard")), {}, FIXED, Setting(), ""),
    ],
)
def test_where_it_ends(kl, teacher, loss, setting, start) -> None:
    lines = tell(kl, teacher, loss, setting)[1]
    pattern = start if "\\" in start or ".*" in start else re.escape(start).replace(r"0\.12", r"\S+")
    assert re.match(pattern, lines.get("ends", ""))
    assert bool(start) == ("ends" in lines)
    assert ("each prefix" in lines.get("ends", "")) == ("each prefix" in start)


def test_prices_and_the_mix(briefly: None) -> None:
    _, lines, text = tell(BOTH, {"coef": 0.3, **SEQUENCE}, MEAN)
    assert "to the teacher: 0.343 reward per nat of a whole completion = teacher_coef 0.3 x 1.14" in lines["price"]
    assert "0.0229 reward per nat of a whole completion = beta 0.02 x 1.14" in text
    assert lines["mix"].startswith("ref^0.0625 teacher^0.938, normalised") and lines["mix"].endswith("costs 0.366")
    assert "deviation" in tell(BOTH, {"coef": 0.3}, STD)[1]["mix"] and "deviation" not in text
    silent = tell(BOTH, {"coef": 0.3, **SEQUENCE}, MEAN, SILENT)
    assert silent[1]["price"].startswith("none") and "reward per nat" not in silent[2]
    assert silent[1]["mix"].endswith("costs 0.32"), "without a reward nothing is compared with a group's mean"
    for kl, teacher in ((NO_KL, {}), (LOCAL, {"direction": "forward", "estimator": "exact"})):
        assert not {"mix", "toll"} & tell(kl, teacher)[1].keys()
    assert "mix" not in tell((*LOCAL, ("kl_gradient", "forward")), {})[1]


def test_the_toll_is_what_the_mix_pays_and_nobody_pays_less() -> None:
    chain = worlds()[-1].chain
    least = toll(worlds()[-1], 0.02, 0.3)
    assert f": {least:.2g} in a world of 6 tokens" in tell(BOTH, {"coef": 0.3, **SEQUENCE})[1]["toll"]
    ended = follow(
        KLConfig(beta=0.02, kl_horizon="sequence"),
        FIXED,
        replace(worlds()[-1], rewards=torch.zeros(1).double()),
        taught_by(coef=0.3, **SEQUENCE),
    ).ended.chain

    def pays(logits: torch.Tensor) -> float:
        policy = replace(chain, policy_logits=logits)
        return float(0.02 * reverse_kl(policy).detach() + 0.3 * reverse_kl(policy.towards("teacher")).detach())

    assert pays(ended.policy_logits) == pytest.approx(least, abs=1e-6)
    for other in (chain.ref_logits, chain.logits("teacher"), 0.9 * ended.policy_logits):
        assert pays(other) > least + 1e-6


def test_the_success_to_expect() -> None:
    rates = {coef: tell(NO_KL, {"coef": coef, **SEQUENCE}, setting=Setting(success=0.0392)) for coef in (1.0, 0.1)}
    assert rates[1.0][1]["success"].endswith("teacher exp(reward / 1) does: 0.0392 -> 0.0998")
    assert rates[0.1][1]["success"].endswith("0.0392 -> 0.999")
    token = tell(LOCAL, {})[1]["success"]
    assert "0.04 -> " in token and ", 0.5 -> " in token and "the mix solves" in token
    assert token.endswith("this run ends elsewhere")
    forward = {"direction": "forward", "estimator": "exact"}
    for teacher, loss, setting in (({}, STD, Setting()), ({}, FIXED, SILENT), (forward, FIXED, Setting())):
        assert "success" not in tell(NO_KL, teacher, loss, setting)[1]


@pytest.mark.parametrize(
    ("teacher", "named", "still"),
    [
        ({}, "KL(policy||teacher), token by token", True),
        ({"placement": "advantage", **SEQUENCE}, "KL(policy||teacher), over whole completions", True),
        ({"direction": "forward", "estimator": "exact"}, "KL(teacher||policy), token by token", True),
        ({"direction": "js", "estimator": "topk"}, "JS(policy, teacher), token by token", True),
        ({"estimator": "topk", "tail": "none"}, "neither KL", False),
        ({"estimator": "topk", "tail": "generalised"}, "neither KL", True),
    ],
)
def test_the_gradient_to_the_teacher_is_named_as_it_is_measured(teacher, named, still, monkeypatch, briefly) -> None:
    verdict, lines, text = tell(NO_KL, teacher, setting=SILENT)
    assert named in verdict and "ref" not in verdict and "ref)" not in text
    assert lines["at teacher"].startswith("the gradient is exactly 0") == still
    assert ("% off" in lines["value"]) == (teacher.get("tail") is not None)
    if teacher.get("direction") == "forward":
        turned = one_step.exact_kl
        monkeypatch.setattr(one_step, "exact_kl", lambda *models, direction: turned(*models, direction="reverse"))
        facts = measure_config(KLConfig(beta=0.0), FIXED, length=1, teacher=taught_by(**teacher))
        assert facts.position.follows.name == "reverse" and abs(facts.value_bias) > 0.01


def test_the_sampler_has_no_fixed_point_and_no_price() -> None:
    sampler = (("beta", 0.5), ("reference", "sampler"))
    for kl, updates, start in (
        (sampler, 1, "Does nothing: with one update per batch"),
        (sampler, 2, "A proximal term that follows neither KL"),
        ((*sampler, ("kl_off_policy", "token")), 2, "A proximal term: holds the later updates"),
        ((*sampler, ("kl_estimator", "k1"), ("kl_gradient", "own")), 1, "A proximal term that follows neither"),
    ):
        verdict, lines, text = tell(kl, setting=Setting(updates=updates))
        still = ("kl_gradient", "own") not in kl
        assert verdict.startswith(start) and "price" not in lines and "ref exp" not in text and "ref_t" not in text
        assert ("first update of a batch: exactly 0 in every sample" in text) == still
        assert ("at the reward's maximum within the support" in lines.get("ends", "")) == still == ("ends" in lines)
    taught = tell(sampler, SEQUENCE)[1]
    assert "teacher exp(reward / price)" in taught["ends"] and "mix" not in taught


def test_trust_regions(briefly: None) -> None:
    def cut(**choices: Any) -> str:
        found = trust_region(LossConfig(**choices))
        return found[0][1] if found else ""

    mode = "vllm_importance_sampling_mode"
    assert cut() == cut(vllm_importance_sampling_clip_max=2.0) == ""
    truncated = cut(**{mode: "token_truncate"})
    assert "of each token, in [0, 3], bounded by it" in truncated and "dropped" not in truncated
    masked = cut(**{mode: "sequence_mask", "vllm_importance_sampling_clip_min": 0.5})
    assert "whole completion (a product over tokens), in [0.5, 3], dropped" in masked and "negative" not in masked
    both = cut(**{mode: "token_mask"}, off_policy_mask_threshold=0.2)
    assert "; completions of negative advantage whose mean log(sampler/policy) exceeds 0.2 nats" in both
    assert "trust" in tell(NO_KL, None, replace(FIXED, off_policy_mask_threshold=0.2))[1]


def test_a_reduction_bends_or_does_not_in_each_world(briefly: None) -> None:
    token, own = (measure_config(KLConfig(), replace(FIXED, loss_type=each), length=9) for each in ("dapo", "grpo"))
    assert token.kept == pytest.approx((1.0, 1.0)) and 0.9 < own.kept[0] < own.kept[1] - 0.01 < 0.99
    verdict, _, text = tell((("beta", 0.1),), None, replace(FIXED, loss_type="dapo"))
    assert "bent" not in verdict and "by world" not in text and "longer" not in text
    verdict, lines, _ = tell((("beta", 0.1),), None, OWN_LENGTH)
    assert (
        "(cosine 0.930 to 0.969 with the sum over tokens, by world)" in verdict and "0.930 to" in lines["in the loss"]
    )


def test_advice_of_weights_is_taken_and_helps(briefly: None) -> None:
    for value, gradient, horizon, advised in (
        ("k3", "own", "token", True),
        ("k3", "reverse", "sequence", True),
        ("abs", "own", "token", False),
        ("exact", "reverse", "sequence", False),
    ):
        choices = {"kl_estimator": value, "kl_gradient": gradient, "kl_horizon": horizon}
        found = re.search(r"kl_off_policy='(\w+)' corrects", tell(choices.items())[1]["off-policy"])
        assert bool(found) == advised
        if found:
            facts = measure_config(KLConfig(**choices, kl_off_policy=found[1]), FIXED, length=9)
            assert facts.off_policy.follows.name in ("reverse", "forward")
    assert "teacher_off_policy='sequence' corrects" in tell(NO_KL, SEQUENCE)[1]["off-policy"]
