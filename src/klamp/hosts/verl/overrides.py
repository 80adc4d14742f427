"""Writes a KLConfig as command-line arguments of verl."""

from __future__ import annotations

from klamp.config import KLConfig
from klamp.hosts.verl import names
from klamp.hosts.verl.hydra import written
from klamp.hosts.verl.refusals import check

ACTOR = "actor_rollout_ref.actor"
IMPORTED = "+ray_kwargs.ray_init.runtime_env.env_vars.VERL_USE_EXTERNAL_MODULES=klamp.verl.registered"
"""Has klamp's names registered in every process of verl's."""
DRIVEN = "++trainer.checkpoint_callback_class=klamp.verl.Driver"
"""Has klamp's part in verl's trainer made there: see `klamp.hosts.verl.driver`."""


def overrides(kl: KLConfig) -> list[str]:
    """The arguments of `python -m verl.trainer.main_ppo` that give a run this KL, one per element.

    With a KL in the reward they also set `algorithm.norm_adv_by_std_in_grpo=False`: in a group whose rewards are all
    equal the division by the standard deviation cancels beta, so that every beta > 0 would be the same.

    A KL that needs whole groups, the tokens, or a coefficient that moves is settled in verl's trainer, by
    `klamp.verl.Driver`, and travels with the batch to the workers' loss: then `kl_loss_type` names it wherever it
    enters, also in the reward.

    Args:
        kl: the KL. beta 0 gives a run without one, and without a reference.

    Raises:
        ConfigError: verl has no place for what is asked for; with the reason.

    Source: the fields: verl's `ppo_trainer.yaml`; the cancelling: docs/which-kl.md, question 4
    """
    check(kl)
    driven = names.needs_driver(kl)
    in_reward = kl.needs_reference and kl.kl_placement == "reward" and not driven
    in_loss = kl.needs_reference and not in_reward
    found = [f"{ACTOR}.use_kl_loss={in_loss}", f"algorithm.use_kl_in_reward={in_reward}"]
    if in_loss:
        name = names.name_of(kl, names.LOSS_FIELDS)
        found += [f"{ACTOR}.kl_loss_coef={kl.beta!r}", f"{ACTOR}.kl_loss_type={written(name)}"]
        found += [f"{ACTOR}.policy_loss.loss_mode=klamp"]
    if in_reward:
        name = names.name_of(kl, [field for field in names.TERM_FIELDS if field not in names.IN_REWARD])
        found += [f"algorithm.kl_penalty={written(name)}"]
        found += ["algorithm.kl_ctrl.type=fixed", f"algorithm.kl_ctrl.kl_coef={kl.beta!r}"]
    if kl.needs_reference and kl.kl_placement == "reward":
        found.append("algorithm.norm_adv_by_std_in_grpo=False")
    if kl.needs_reference and driven:
        found.append(DRIVEN)
    return [*found, IMPORTED] if kl.needs_reference else found
