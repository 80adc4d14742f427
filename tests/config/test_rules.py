"""What is refused, with the way out; what is warned of, and that nothing else is."""

import math
import warnings
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.config.drawn import FIELDS, accepted, around, other_values, unchecked

from klamp.config import KLConfig, KLWarning
from klamp.config.fields import without_effect
from klamp.config.kl import check_beta, refusals, wide_clip
from klamp.errors import ConfigError

NEEDS = [(cls, field, i) for cls, field in FIELDS for i in range(len(field.metadata.get("needs", ())))]


@pytest.mark.parametrize(("cls", "field", "index"), NEEDS, ids=[f"{f.name}-{i}" for _, f, i in NEEDS])
def test_a_field_without_what_it_needs_is_warned_of(cls: Any, field: Any, index: int) -> None:
    """The first need that is not met is named; with all of them met the configuration stands, and nothing is said."""
    need, value = field.metadata["needs"][index], other_values(cls, field)[0]
    drawn = (unchecked(cls, **{field.name: value} | other) for other in around(cls, field, index))
    lacking = next(
        c
        for c in drawn
        if not need.is_met(c)
        and all(n.is_met(c) for n in field.metadata["needs"][:index])
        and getattr(c, field.name) != field.default
    )
    text = f"{field.name}={getattr(lacking, field.name)!r} has no effect: it needs {need.text}."
    assert text in without_effect(lacking)
    assert not [text for text in without_effect(accepted(cls, field)) if text.startswith(f"{field.name}=")]
    assert without_effect(cls()) == []


PUBLISHED = r"kl_controller='{}' .*docs/controllers.md(?s:.*)Leave kl_controller out"


@pytest.mark.parametrize(
    ("fields", "text", "silent"),
    [
        *(
            ({"target_kl": 0.05, "kl_controller": name}, PUBLISHED.format(name), {"target_kl": 0.05})
            for name in ("step", "proportional")
        ),
        ({"beta_min": 0.001}, "beta_min=.* needs a controller", {"target_kl": 0.05, "beta_min": 0.001}),
        ({"beta_max": 1.0}, "beta_max=.* needs a controller", {"target_kl": 0.05, "beta_max": 1.0}),
        ({"kl_schedule": "cosine", "beta": 0.0}, "kl_schedule=.* needs a beta above 0", {"kl_schedule": "cosine"}),
        ({"kl_warmup_steps": 2, "beta": 0.0}, "kl_warmup_steps=.* needs a beta above 0", {"kl_warmup_steps": 2}),
        ({"kl_gradient": "none"}, "(?s)beta above 0.*kl_monitor", {"kl_gradient": "none", "beta": 0.0}),
    ],
)
def test_what_may_not_be_what_was_meant_is_warned_of(fields: dict[str, Any], text: str, silent: dict[str, Any]) -> None:
    """A published rule, with what it did in the measurement; a bound of a beta that does not move; no gradient."""
    with pytest.warns(KLWarning, match=text):
        KLConfig(**fields)
    with warnings.catch_warnings():
        warnings.simplefilter("error", KLWarning)
        KLConfig(**silent)


def test_a_target_that_beta_0_never_holds_is_warned_of() -> None:
    """At beta 0 there is no controller: the target would be dropped silently."""
    with pytest.warns(KLWarning, match="target_kl=0.05 has no effect: it needs a beta above 0"):
        assert KLConfig(beta=0.0, target_kl=0.05).controller_name == "fixed"
    held = KLConfig(beta=0.01, target_kl=0.05)
    assert held.controller_name == "hold" and without_effect(held) == []


IN_REWARD = {"kl_estimator": "k1", "kl_placement": "reward", "kl_horizon": "sequence"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"kl_placement": "reward", "kl_horizon": "sequence"}, "takes kl_estimator='k1' only, not 'k3'"),
    ({"kl_placement": "advantage", "kl_estimator": "k2"}, "takes kl_estimator='k1' only, not 'k2'"),
    ({"kl_placement": "advantage", "kl_estimator": "k1", "kl_gradient": "forward"}, "kl_gradient='forward' has no"),
    ({"kl_placement": "reward", "kl_estimator": "k1"}, "kl_placement='reward' has kl_horizon='sequence'"),
    ({"kl_placement": "advantage", "kl_estimator": "k1", "kl_off_policy": "token"}, "kl_off_policy has no meaning"),
    ({"kl_estimator": "k1", "kl_gradient": "own", "kl_clip_method": "hard"}, "a clipped k1-as-loss is refused"),
    ({"kl_horizon": "sequence", "kl_off_policy": "token"}, "kl_horizon='sequence' needs kl_off_policy='sequence'"),
    ({"kl_controller": "step"}, "kl_controller='step' needs target_kl"),
    ({"beta": 0.0, "kl_controller": "step", "target_kl": 0.1}, "'step' needs target_kl and a beta above 0"),
    ({"beta": 0.0, "kl_controller": "hold", "target_kl": 0.1}, "'hold' needs target_kl and a beta above 0"),
    ({"target_kl": 0.1, "kl_schedule": "linear"}, "a schedule of beta cannot be combined with kl_controller='hold'"),
    ({"target_kl": 0.1, "kl_warmup_steps": 1}, "a schedule of beta cannot be combined with kl_controller='hold'"),
    ({"reference": "sampler", "kl_estimator": "exact"}, "kl_estimator='exact' cannot use the sampler"),
    ({"reference": "sampler", "target_kl": 0.1}, "reference='sampler' takes a fixed beta"),
    ({"reference": "remote"}, "reference='remote' needs reference_url"),
    ({"reference": "remote", "reference_url": "http://h", "kl_estimator": "exact"}, "cannot use a remote reference"),
    ({"kl_exclude_tokens": (1,), "kl_gradient": "forward", "kl_horizon": "sequence"}, "cannot leave tokens out"),
    ({"beta": -0.1, "kl_gradient": "own"}, "a negative beta takes no clip, and no gradient but the reverse"),
    ({"beta": -0.1, "target_kl": 0.1}, "a negative beta takes no target_kl"),
    ({"beta": -0.1, "kl_normalizer": "token_mean"}, "a negative beta takes no kl_exclude_tokens"),
    ({"beta": -0.1, "reference": "ema"}, "a negative beta takes no reference='ema'"),
    ({"reference": "sampler", "sampler_coef": 0.1}, "name the sampler twice"),
    ({"kl_baseline": "exact", "kl_exclude_tokens": (1,)}, "kl_baseline takes no kl_exclude_tokens"),
    ({"kl_clip_method": "hard", "kl_clip_level": "sequence"}, "gates sampled tokens by their own KL"),
    *(
        ({"kl_clip_method": "hard", "kl_clip_level": "sequence", "kl_estimator": "exact", **x}, "gates sampled tokens")
        for x in ({"kl_horizon": "sequence"}, {"kl_gradient": "forward"}, {"kl_off_policy": "sequence"})
    ),
    (IN_REWARD | {"kl_exclude_tokens": (1,)}, "cannot leave tokens out"),
    ({"kl_exclude_tokens": (1,), "kl_estimator": "exact", "kl_horizon": "sequence"}, "cannot leave tokens out"),
]


@pytest.mark.filterwarnings("ignore::klamp.KLWarning")
@pytest.mark.parametrize(("fields", "what"), REFUSED, ids=[what for _, what in REFUSED])
def test_what_cannot_work_is_refused_with_the_reason_and_the_way_out(fields: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError) as caught:
        KLConfig(**fields)
    assert what in caught.value.what and caught.value.why and caught.value.fix


def test_every_row_of_the_table_is_among_these() -> None:
    """A row that is added is told to add its case; one whose condition can never hold has none."""
    reached = set()
    for fields, _ in REFUSED:
        choices = unchecked(KLConfig, **fields)
        reached |= {i for i, row in enumerate(refusals(choices)) if row.applies}
    assert reached == set(range(len(refusals(unchecked(KLConfig)))))


@pytest.mark.parametrize("fields", [fields for fields, _ in REFUSED], ids=[what for _, what in REFUSED])
def test_without_one_of_its_fields_it_is_another_combination(fields: dict[str, Any]) -> None:
    """Some field of each refused combination decides: changed back to its default, that row no longer applies."""
    row = next(i for i, row in enumerate(refusals(unchecked(KLConfig, **fields))) if row.applies)
    fewer = [{name: value for name, value in fields.items() if name != dropped} for dropped in fields]
    assert not all(refusals(unchecked(KLConfig, **each))[row].applies for each in fewer)


def soft(**fields: Any) -> KLConfig:
    return unchecked(KLConfig, kl_clip_method="soft", **fields)


@given(threshold=st.floats(0.01, 2), length=st.integers(1, 200), temperature=st.floats(0.001, 5))
def test_a_soft_clip_is_warned_of_from_a_tenth_of_the_budget(threshold: float, length: int, temperature: float) -> None:
    clip = {"kl_clip_threshold": threshold, "kl_reference_length": length, "kl_clip_temperature": temperature}
    warned = any("is wide against" in text for text in soft(**clip).cautions())
    assert warned == (temperature > threshold * length / 10)
    assert not any("is wide" in text for text in unchecked(KLConfig, kl_clip_method="hard", **clip).cautions())


def test_a_soft_clip_of_a_length_that_is_measured_is_judged_at_short_completions() -> None:
    """Nobody says how long completions are before the run has begun; every door would let such a clip through."""
    (caution,) = soft(kl_clip_threshold=0.05).cautions()
    assert "the budget of 5 nats for 100 tokens: the soft clip passes 0.67 % of the pull" in caution
    assert soft(kl_clip_threshold=0.05, kl_clip_temperature=0.5).cautions() == [], "a tenth of 5 nats"
    assert soft(kl_clip_threshold=0.05, kl_clip_temperature=0.501).cautions() != []
    assert "passes 50 %" in soft(kl_clip_threshold=0.0).cautions()[0]
    large = soft(kl_clip_threshold=0.5)
    assert "the budget of 1.2 nats for 2.4 tokens: the soft clip passes 23 % of the pull" in wide_clip(large, 2.4)
    assert wide_clip(large, 20.0) == ""
    assert "budget of 4.5 nats for 9 tokens" in wide_clip(soft(kl_clip_threshold=0.5, kl_reference_length=9), 2.4)


@pytest.mark.parametrize("beta", [-0.1, math.nan, math.inf])
def test_a_coefficient_that_is_none_is_refused(beta: float) -> None:
    with pytest.raises(ConfigError, match="beta must be a number >= 0(?s:.*)fix: mine"):
        check_beta(beta, fix="mine")
    check_beta(0.0)
    check_beta(3)


@pytest.mark.parametrize("estimator", ["k1", "k3", "abs"])
def test_a_gradient_that_is_not_the_kls_is_no_matter_at_beta_0(estimator: Any) -> None:
    assert unchecked(KLConfig, kl_estimator=estimator, kl_gradient="own", beta=0.0).cautions() == []
    assert unchecked(KLConfig, kl_estimator="k2", kl_gradient="own").cautions() == [], "k2's own gradient is the KL's"
