"""What is said of a teacher and the sampler: where a run ends, what it costs, whose gradient it follows."""

import functools
import re
from dataclasses import replace
from typing import Any

import pytest

from klamp.config import KLConfig, LossConfig
from klamp.verify import convergence, one_step
from klamp.verify.explain import Setting, explain_config, measure_config
from klamp.verify.proofs.anchors import taught_by

pytestmark = pytest.mark.filterwarnings("ignore::klamp.errors.KLWarning")
FIXED = convergence.LOSSES["fixed length"]
SEQUENCE, NO_KL = {"horizon": "sequence"}, (("beta", 0.0),)
STD, MEAN, OWN_LENGTH = (
    replace(FIXED, **{name: value})
    for name, value in (("scale_rewards", "std"), ("advantage_baseline", "mean"), ("loss_type", "grpo"))
)
SILENT = Setting(rewarded=False, group_size=1)
SLOW = pytest.mark.slow


@pytest.fixture
def briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convergence, "UPDATES", 3)


@functools.cache
def told(
    kl: tuple, teacher: tuple | None, loss: LossConfig, setting: Setting, _: int
) -> tuple[str, dict[str, str], str]:
    config = KLConfig(**dict(kl))
    explanation = explain_config(
        config, loss, name="x", setting=setting, teacher=None if teacher is None else taught_by(**dict(teacher))
    )
    return explanation.verdict, dict(explanation.lines), " ".join(text for _, text in explanation.lines)


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
        (NO_KL, {}, FIXED, Setting(), "0.12 nats from the optimum teacher exp(reward / price): KL"),
        (BOTH, SEQUENCE, FIXED, Setting(), "at the optimum of E[reward] - price KL(policy||mix): mix exp("),
        pytest.param(BOTH, SEQUENCE, FIXED, SILENT, "at the mix (", marks=SLOW),
        pytest.param(LOCAL, {}, FIXED, SILENT, r"\S+ nats from the mix \(", marks=SLOW),
        (LOCAL, {}, FIXED, Setting(), r"\S+ nats from the optimum mix \S+ / price\): KL"),
        pytest.param(
            LOCAL, SEQUENCE, FIXED, Setting(), r"\S+ nats from the optimum mix exp\(reward / price\): KL", marks=SLOW
        ),
        pytest.param(
            NO_KL,
            SEQUENCE,
            OWN_LENGTH,
            Setting(),
            r"\S+ nats from the optimum teacher exp\(reward / price\): KL",
            marks=SLOW,
        ),
        pytest.param(
            NO_KL,
            SEQUENCE,
            STD,
            Setting(),
            r"\S+ nats from the nearest optimum teacher exp\S+ / price\), price",
            marks=SLOW,
        ),
        pytest.param(
            NO_KL,
            {"estimator": "topk", "tail": "none"},
            FIXED,
            SILENT,
            "nowhere: .* from the teacher it is still",
            marks=SLOW,
        ),
        (NO_KL, {"schedule": "cosine"}, FIXED, Setting(), "not known: a coefficient moves"),
        pytest.param(
            (*LOCAL, ("reference", "ema")), {}, FIXED, Setting(), "not known: a coefficient moves", marks=SLOW
        ),
        ((*LOCAL, ("kl_clip_method", "hard")), {}, FIXED, Setting(), ""),
    ],
)
def test_where_it_ends(kl, teacher, loss, setting, start) -> None:
    lines = tell(kl, teacher, loss, setting)[1]
    pattern = start if "\\" in start or ".*" in start else re.escape(start).replace(r"0\.12", r"\S+")
    assert re.match(pattern, lines.get("ends", ""))
    assert bool(start) == ("ends" in lines)


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
        assert "mix" not in tell(kl, teacher)[1]
    assert "mix" not in tell((*LOCAL, ("kl_gradient", "forward")), {})[1]


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
        facts = measure_config(taught_by(**teacher), FIXED)
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
        assert verdict.startswith(start) and not {"price", "ends"} & lines.keys()
        assert "ref_t" not in text and "ref)" not in text
        assert ("exactly 0 in every sample" in text) == (("kl_gradient", "own") not in kl)
    taught = tell(sampler, SEQUENCE)[1]
    assert "teacher exp(reward / price)" in taught["ends"] and "mix" not in taught


def test_a_reduction_bends_or_does_not_in_each_world(briefly: None) -> None:
    token, own = (measure_config(KLConfig(), replace(FIXED, loss_type=each)) for each in ("dapo", "grpo"))
    assert token.reduced == pytest.approx((1.0, 1.0)) and 0.9 < own.reduced[0] < own.reduced[1] - 0.01 < 0.99
    verdict, _, text = tell((("beta", 0.1),), None, replace(FIXED, loss_type="dapo"))
    assert "bent" not in verdict and "by world" not in text and "longer" not in text
    verdict = tell((("beta", 0.1),), None, OWN_LENGTH)[0]
    assert "(cosine 0.930 to 0.969 with the sum over tokens, by world)" in verdict
