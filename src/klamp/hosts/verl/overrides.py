"""klamp's KL as arguments of verl's command line, and what no hook of verl can carry."""

from __future__ import annotations

from klamp.config import KLConfig
from klamp.config.teacher import TeacherConfig
from klamp.errors import Refusal, refuse
from klamp.hosts.common.kl_fields import host_refusals
from klamp.hosts.verl.fields_in_verl import LOSS_FIELDS, is_driven, name_of, needs_driver, written
from klamp.hosts.verl.teacher import teacher_refusals, teacher_values

ACTOR = "actor_rollout_ref.actor"
IMPORTED = "+ray_kwargs.ray_init.runtime_env.env_vars.VERL_USE_EXTERNAL_MODULES=klamp.verl.registered"
"""Has klamp's names registered in every process of verl's."""
DRIVEN = "++trainer.checkpoint_callback_class=klamp.verl.Driver"


def overrides(kl: KLConfig, teacher: TeacherConfig | None = None) -> list[str]:
    """The arguments of `python -m verl.trainer.main_ppo` that give a run this KL, and this teacher, one per element.

    A plain KL in the reward is verl's own `kl`, which is k1. With a KL in the reward they also set
    `algorithm.norm_adv_by_std_in_grpo=False`: in a group whose rewards are all equal the division by the standard
    deviation cancels beta, so that every beta > 0 would be the same.

    A KL that needs whole groups, the tokens, or a coefficient that moves is settled in verl's trainer, by
    `klamp.verl.Driver`, and travels with the batch to the workers' loss: then `kl_loss_type` names it wherever it
    enters, also in the reward.

    A teacher gets one GPU of its own (each of several); arguments that come later win.

    Args:
        kl: the KL. beta 0 gives a run without one, and without a reference.
        teacher: the KL to a teacher besides; None: none.

    Raises:
        ConfigError: verl has no place for what is asked for; with the reason.

    Source: the fields: verl's `ppo_trainer.yaml`; the cancelling: docs/which-kl.md, question 4
    """
    taught = teacher if teacher is not None and teacher.there else None
    refuse([*verl_refusals(kl), *(teacher_refusals(taught) if taught else ())])
    shifts_reward = kl.needs_reference and kl.kl_placement == "reward"
    by_verl = shifts_reward and not needs_driver(kl) and kl.kl_max_log_ratio is None
    in_loss = kl.needs_reference and not by_verl
    found = [f"{ACTOR}.use_kl_loss={in_loss}", f"algorithm.use_kl_in_reward={by_verl}"]
    if in_loss:
        name = name_of(kl, LOSS_FIELDS)
        found += [f"{ACTOR}.kl_loss_coef={kl.beta!r}", f"{ACTOR}.kl_loss_type={written(name)}"]
    if by_verl:
        found += ["algorithm.kl_penalty=kl", "algorithm.kl_ctrl.type=fixed", f"algorithm.kl_ctrl.kl_coef={kl.beta!r}"]
    if shifts_reward:
        found.append("algorithm.norm_adv_by_std_in_grpo=False")
    if in_loss and is_driven(kl):
        found.append(DRIVEN)
    if taught is not None:
        found += [f"{key}={written(value)}" for key, value in teacher_values(taught).items()]
    return [*found, IMPORTED] if in_loss or taught is not None else found


def verl_refusals(kl: KLConfig) -> list[Refusal]:
    """What no hook of verl can carry, one row for each."""
    return [
        *host_refusals(kl, "verl"),
        Refusal(
            kl.kl_estimator == "exact",
            "kl_estimator='exact' cannot be honoured by verl",
            why="its loss is given the log-probabilities of the sampled tokens alone, and the reference's come from "
            "another process, which returns those and no logits",
            fix="use kl_estimator='k3'",
        ),
        Refusal(
            kl.kl_normalizer is not None,
            f"kl_normalizer={kl.kl_normalizer!r} cannot be honoured by verl",
            why="its loss_agg_mode averages the policy loss and the KL alike",
            fix="leave kl_normalizer unset, and set actor_rollout_ref.actor.loss_agg_mode",
        ),
        Refusal(
            kl.reference != "auto",
            f"reference={kl.reference!r} cannot be honoured by verl",
            why="it decides itself: the policy without its adapter where lora_rank is set, else a frozen copy",
            fix="leave reference unset",
        ),
        Refusal(
            kl.reference_dtype is not None,
            "reference_dtype cannot be honoured by verl",
            why="its own engine loads the reference",
            fix="leave reference_dtype unset",
        ),
    ]
