"""The overrides, through Hydra and verl's own configuration, back to the KL that was asked for."""

from pathlib import Path
from typing import Any

import pytest
import verl
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf
from tests.batches import objective_of
from tests.engines.verl.actor import Step, actor_loss, gradient
from verl.trainer.ppo.utils import need_reference_policy
from verl.utils.config import omega_conf_to_dataclass

from klamp.config import KLConfig
from klamp.core.objective import grpo_loss
from klamp.hosts.verl.overrides import loss_kl, written
from klamp.verl import effective, overrides

REQUIRED = ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",)
pytestmark = pytest.mark.filterwarnings("ignore::klamp.errors.KLWarning")


def composed(arguments: list[str], required: tuple[str, ...] = REQUIRED) -> DictConfig:
    """What verl's `main_ppo` gets from a command line."""
    folder = Path(verl.__file__).parent / "trainer" / "config"
    with initialize_config_dir(config_dir=str(folder), version_base=None):
        return compose(config_name="ppo_trainer", overrides=[*required, *arguments])


IN_LOSS = [
    KLConfig(beta=0.04),
    KLConfig(beta=1e-5, kl_estimator="k1", kl_gradient="forward"),
    KLConfig(beta=0.02, kl_horizon="sequence", kl_off_policy="sequence", kl_max_weight=2.5),
    KLConfig(beta=0.02, kl_estimator="k2", kl_gradient="own", kl_max_log_ratio=0.5),
    KLConfig(beta=0, kl_monitor=True),
]


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("kl", IN_LOSS)
def test_a_kl_in_the_loss_comes_back(kl: KLConfig) -> None:
    config = composed(overrides(kl))
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    assert loss_kl(actor.kl_loss_type).build_term() == kl.build_term() and actor.kl_loss_coef == kl.beta
    assert need_reference_policy(config) and not config.algorithm.use_kl_in_reward
    step = Step.random()
    mode, average = actor.policy_loss.loss_mode, actor.loss_agg_mode
    options = {"kl_loss_type": actor.kl_loss_type, "kl_loss_coef": actor.kl_loss_coef, "loss_agg_mode": average}
    found, _ = actor_loss(step, loss_mode=mode, use_kl_loss=True, **options)
    expected = grpo_loss(step.batch(), objective_of(reduction="token_mean", beta=kl.beta, kl=kl.build_term())).loss
    assert abs(found.item() - expected.item()) < 1e-9
    assert (gradient(found, step) - gradient(expected, step)).abs().max() < 1e-9


IN_REWARD = {"kl_placement": "reward", "kl_estimator": "k1", "kl_horizon": "sequence"}


def test_a_plain_kl_in_the_reward_comes_back() -> None:
    kl = KLConfig(beta=0.1, **IN_REWARD)
    config = composed(overrides(kl))
    assert need_reference_policy(config) and not config.actor_rollout_ref.actor.use_kl_loss
    assert config.algorithm.norm_adv_by_std_in_grpo is False, "beta would cancel"
    (term,) = effective(config).terms
    assert (term.beta, term.value, term.controller) == (0.1, "k1", "fixed")


@pytest.mark.parametrize(
    "fields",
    [
        {**IN_REWARD, "kl_max_log_ratio": 3.0},
        {"target_kl": 0.05, "kl_controller": "step", "kl_controller_factors": (2.0, 0.5, 1.5, 0.5)},
        {**IN_REWARD, "target_kl": 0.05, "kl_controller": "proportional", "kl_controller_horizon": 20},
        {"kl_exclude_tokens": ("</s>", 7, "a, (b"), "kl_schedule": "cosine"},
    ],
)
def test_what_the_driver_settles_comes_back(fields: dict) -> None:
    kl = KLConfig(beta=0.1, **fields)
    config = composed(overrides(kl))
    actor = config.actor_rollout_ref.actor
    assert loss_kl(actor.kl_loss_type, actor.kl_loss_coef) == kl
    assert config.trainer.checkpoint_callback_class == "klamp.verl.Driver"
    assert need_reference_policy(config) and not config.algorithm.use_kl_in_reward
    (term,) = effective(config).terms
    assert kl.kl_placement in term.placement and not any("Driver" in note for note in effective(config).notes)


def test_without_a_kl_no_reference_is_loaded() -> None:
    config = composed(overrides(KLConfig(beta=0)))
    effect = effective(config)
    assert not need_reference_policy(config) and not effect.terms and effect.reference.startswith("none")
    assert "VERL_USE_EXTERNAL_MODULES" not in OmegaConf.to_yaml(config), "nothing of klamp's has to run"


def read(text: str) -> Any:
    return OverridesParser.create().parse_override(f"key={text}").value()


@pytest.mark.parametrize(
    "value", [None, True, 1e-6, float("inf"), "null", "True", "1.5", "/a/b", ["a", "b=c", 1], {"a": "b"}], ids=repr
)
def test_what_was_written_is_read_back(value: Any) -> None:
    assert read(written(value)) == value


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="ab'\\\"=,[]{}()$%: /.-1\t"))
def test_any_text_is_read_back(text: str) -> None:
    assert read(written(text)) == text
