"""The choices of a configuration: what each field takes, its default, and what follows from the fields alone."""

import dataclasses
from typing import Any, get_args

import pytest
from tests.batches import objective_of

from klamp.config import LOSS_TYPES, KLConfig, LossConfig
from klamp.config.loss import LossType
from klamp.core.estimators import DIRECTIONS, ESTIMATORS
from klamp.core.gradients import COEFFICIENTS
from klamp.core.objective import SURROGATES, SurrogateName
from klamp.core.term import KLTerm
from klamp.core.types import Direction, Estimator, Gradient, Horizon
from klamp.errors import KLWarning


@pytest.mark.parametrize(
    ("table", "literal"),
    [
        (ESTIMATORS, Estimator),
        (DIRECTIONS, Direction),
        (SURROGATES, SurrogateName),
        ({horizon for horizon, _ in COEFFICIENTS}, Horizon),
        (LOSS_TYPES, LossType),
        ([gradient for horizon, gradient in COEFFICIENTS if horizon == "token"], Gradient),
    ],
    ids=["estimators", "directions", "surrogates", "horizons", "loss types", "gradients"],
)
def test_what_a_table_holds_is_what_its_type_says(table: Any, literal: Any) -> None:
    assert set(table) == set(get_args(literal))


def test_a_term_without_a_configuration_is_the_term_of_the_default_configuration() -> None:
    assert KLConfig().build_term() == KLTerm()
    assert (LossConfig().surrogate, LossConfig().epsilon) == (objective_of().surrogate, objective_of().clip_low)


def test_every_field_of_the_term_is_the_configurations() -> None:
    """A configuration in which every choice differs from its default gives a term in which every field does."""
    kl = KLConfig(
        kl_estimator="k2",
        kl_gradient="forward",
        kl_horizon="sequence",
        kl_off_policy="sequence",
        kl_max_weight=3.0,
        kl_max_log_ratio=4.0,
        kl_clip_method="hard",
        kl_clip_threshold=0.25,
        kl_clip_temperature=0.125,
        kl_clip_level="batch",
        use_per_token_kl_threshold=False,
        kl_normalizer="token_mean",
    )
    term = kl.build_term()
    same = {f.name for f in dataclasses.fields(KLTerm) if getattr(term, f.name) == getattr(KLTerm(), f.name)}
    beyond = {"beyond", "max_teacher_log_ratio", "baseline"}
    assert same == {"placement", "anchor", "mean_over"} | beyond, "the other placements take no other choices"
    further = KLConfig(beta=-0.1, kl_max_teacher_log_ratio=5.0, kl_baseline="exact").build_term()
    assert further.baseline == "exact"
    assert (further.beyond, further.max_teacher_log_ratio, further.mean_over) == ("teacher", 5.0, "trained")
    with pytest.warns(KLWarning, match="proximal"):
        assert KLConfig(reference="sampler").build_term().anchor == "sampler"
    elsewhere = KLConfig(kl_placement="advantage", kl_estimator="k1", kl_horizon="sequence").build_term()
    assert elsewhere.placement == "advantage"


DEFAULTS = {
    "dppo_mask_high": 0.2,
    "dppo_mask_low": 0.2,
    "vllm_importance_sampling_clip_max": 3.0,
    "beta": 0.01,
    "sampler_coef": 0.0,
    "kl_clip_threshold": 0.5,
    "kl_clip_temperature": 1.0,
    "kl_controller_factors": (1.5, 0.75, 1.5, 0.5),
    "kl_controller_horizon": 100,
    "kl_warmup_steps": 0,
    "reference_decay": 0.99,
    "reference_reset_steps": 100,
    "epsilon": 0.2,
}


def test_the_numbers_that_nobody_sets_change_only_on_purpose() -> None:
    """Another default is another run for everyone who left it out."""
    found = {
        field.name: field.default
        for cls in (KLConfig, LossConfig)
        for field in dataclasses.fields(cls)
        if isinstance(field.default, int | float | tuple)
        and not isinstance(field.default, bool)
        and field.default != ()
    }
    assert found == DEFAULTS
