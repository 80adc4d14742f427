"""klamp's KL through verl's own `ppo_loss`."""

import itertools

import pytest
import torch
import verl.trainer.ppo.core_algos as algorithms
from tests.batches import objective_of
from tests.engines.verl.actor import Step, actor_loss, gradient
from verl import DataProto
from verl.trainer.config import KLControlConfig
from verl.trainer.ppo.ray_trainer import apply_kl_penalty
from verl.workers.utils import losses

from klamp.core.objective import grpo_loss
from klamp.errors import ConfigError, UnsupportedVersion
from klamp.hosts.verl import hooks
from klamp.verl import register

OWN_TYPES = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "kl+", "abs+", "mse+", "low_var_kl+", "k3+")
AVERAGES = {"token-mean": "token_mean", "seq-mean-token-mean": "sequence_mean", "seq-mean-token-sum": "sequence_sum"}
AVERAGES |= {"seq-mean-token-sum-norm": "fixed_length"}
TERMS = (
    "klamp",
    "klamp:kl_gradient=forward",
    "klamp:kl_gradient=own",
    "klamp:kl_gradient=none",
    "klamp:kl_estimator=k1",
    "klamp:kl_estimator=k2,kl_gradient=own",
    "klamp:kl_estimator=abs,kl_gradient=reverse",
    "klamp:kl_max_log_ratio=0.3",
    "klamp:kl_horizon=sequence",
    "klamp:kl_estimator=k1,kl_horizon=sequence",
    "klamp:kl_off_policy=token",
    "klamp:kl_off_policy=token,kl_max_weight=1.05",
    "klamp:kl_horizon=sequence,kl_off_policy=sequence",
    "klamp:kl_gradient=forward,kl_off_policy=token",
)
pytestmark = pytest.mark.filterwarnings("ignore::klamp.errors.KLWarning")


def klamp_loss(step: Step, name: str, beta: float, reduction: str) -> torch.Tensor:
    """klamp's own loss, with the KL that a name stands for."""
    term = hooks.loss_kl(name).build_term()
    length = step.mask.shape[1] if reduction == "fixed_length" else None
    objective = objective_of(reduction=reduction, max_length=length, beta=beta, kl=term)  # pyright: ignore[reportArgumentType]
    return grpo_loss(step.batch(), objective).loss


@pytest.mark.gate
@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("name", TERMS)
def test_the_loss_is_klamps_own(name: str, average: str) -> None:
    """With padding, and nested, as verl's newer trainers pass completions."""
    step = Step.random()
    options = {"use_kl_loss": True, "kl_loss_type": name, "kl_loss_coef": 0.3, "loss_agg_mode": average}
    expected = klamp_loss(step, name, 0.3, AVERAGES[average])
    slope = gradient(expected, step)
    for nested in (False, True):
        found, metrics = actor_loss(step, nested=nested, **options)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
        torch.testing.assert_close(gradient(found, step), slope, rtol=0, atol=1e-9)
        assert metrics["kl_coef"] == 0.3


def everything(step: Step) -> dict[tuple[str, str, str], tuple[torch.Tensor, torch.Tensor]]:
    """Loss and gradient of every type, in two modes and averages of verl's own."""
    found = {}
    for kind, mode, average in itertools.product(OWN_TYPES, ("vanilla", "gspo"), ("token-mean", "seq-mean-token-mean")):
        options = {"use_kl_loss": True, "kl_loss_type": kind, "kl_loss_coef": 0.3, "loss_agg_mode": average}
        loss, _ = actor_loss(step, loss_mode=mode, **options, clip_ratio_c=3.0)
        found[kind, mode, average] = loss.detach(), gradient(loss, step)
    return found


@pytest.mark.usefixtures("untouched")
def test_verls_own_names_mean_what_they_meant() -> None:
    step = Step.random(dtype=torch.float32)
    before = everything(step)
    register()
    for key, (loss, slope) in everything(step).items():
        assert torch.equal(loss, before[key][0]) and torch.equal(slope, before[key][1]), key
    with pytest.raises(NotImplementedError):
        actor_loss(step, use_kl_loss=True, kl_loss_type="full")


@pytest.mark.usefixtures("registered")
def test_a_second_call_changes_nothing() -> None:
    before = losses.kl_penalty, losses.ppo_loss
    register()
    assert (losses.kl_penalty, losses.ppo_loss) == before


@pytest.mark.usefixtures("registered")
def test_outside_of_the_actors_loss_it_raises() -> None:
    step = Step.random()
    actor_loss(step, use_kl_loss=True, kl_loss_type="klamp")
    with pytest.raises(ConfigError, match="outside of verl's actor loss"):
        losses.kl_penalty(step.policy, step.ref, "klamp:kl_horizon=sequence")


@pytest.mark.usefixtures("registered")
def test_a_plain_kl_in_the_reward_is_verls_own_k1() -> None:
    """What `overrides` names for it: beta times the log-ratio, from each token's reward."""
    step = Step.random()
    tensors = {"response_mask": step.mask.long(), "token_level_scores": torch.zeros_like(step.old)}
    tensors |= {"old_log_probs": step.old, "ref_log_prob": step.ref}
    control = algorithms.get_kl_controller(KLControlConfig(type="fixed", kl_coef=0.2))
    data, _ = apply_kl_penalty(DataProto.from_dict(tensors=tensors), control, kl_penalty="kl")
    torch.testing.assert_close(data.batch["token_level_rewards"], -0.2 * (step.old - step.ref) * step.mask)


@pytest.mark.usefixtures("untouched")
def test_a_verl_with_its_hooks_elsewhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "kl_penalty", lambda logprob, ref_logprob, kl_penalty: None)
    with pytest.raises(UnsupportedVersion, match="klamp.verl needs verl"):
        register()
    assert not hasattr(losses.ppo_loss, "__wrapped__")


def test_in_every_process_of_a_ray_cluster(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment variable that `overrides` sets is enough: verl itself imports klamp in its workers."""
    import ray

    def known() -> tuple[bool, bool]:
        import verl.workers.utils.losses as there
        from verl.workers.engine_workers import ppo_loss

        return hasattr(ppo_loss, "__wrapped__"), there.kl_penalty.__module__ == "klamp.hosts.verl.hooks"

    variables = {"VERL_USE_EXTERNAL_MODULES": "klamp.verl.registered"}
    monkeypatch.setenv("HOME", str(tmp_path))  # where Ray writes the token of its cluster
    ray.init(num_cpus=1, include_dashboard=False, runtime_env={"env_vars": variables})
    try:
        assert ray.get(ray.remote(known).remote()) == (True, True)
        bare = ray.remote(known).options(runtime_env={"env_vars": {"VERL_USE_EXTERNAL_MODULES": ""}})
        assert ray.get(bare.remote()) == (False, False)
    finally:
        ray.shutdown()
