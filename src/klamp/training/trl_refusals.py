"""Refusals of options that `backend='trl'` cannot honour, before any work is done."""

from __future__ import annotations

from functools import partial

from klamp.config import LOSS_TYPES, KLConfig, LossConfig
from klamp.config.loss import kl_reduction
from klamp.errors import Refusal
from klamp.hosts.common.kl_fields import host_refusals
from klamp.training.sections import ModelConfig, OptimConfig, RolloutConfig, RunConfig

_Refused = partial(Refusal, what="backend='trl' cannot do this")


def trl_refusals(
    kl: KLConfig, loss: LossConfig, model: ModelConfig, rollout: RolloutConfig, optim: OptimConfig, run: RunConfig
) -> list[Refusal]:
    """What TRL's loop cannot do, one row for each."""
    return [
        *host_refusals(kl, "TRL"),
        *_loss(kl, loss),
        *_reference(kl, model, run),
        *_steps(kl, rollout, optim),
    ]


def _loss(kl: KLConfig, loss: LossConfig) -> list[Refusal]:
    own = LOSS_TYPES[loss.loss_type].reduction
    bounded = loss.epsilon != 1
    used = kl.beta > 0 or kl.controller_name != "fixed"
    return [
        _Refused(
            loss.surrogate == "score_function",
            got="surrogate='score_function'",
            why="TRL has no such loss",
            fix="use surrogate='ppo_clip': at the first update of a rollout its gradient is the same",
        ),
        _Refused(
            loss.surrogate == "cispo" and (bounded or own != "token_mean"),
            got=f"surrogate='cispo', epsilon={loss.epsilon:g}, loss_type={loss.loss_type!r}",
            why="TRL's cispo has no lower bound of the ratio, and takes the mean over all tokens of the step",
            fix="set epsilon=1 and loss_type='dapo'",
        ),
        _Refused(
            kl.needs_reference and kl_reduction(kl, loss) != own,
            got=f"kl_normalizer={kl.kl_normalizer!r}, loss_type={loss.loss_type!r}",
            why="TRL divides the policy loss and the KL by the same",
            fix="leave kl_normalizer out, or choose the loss_type that divides so",
        ),
        _Refused(
            used and kl.kl_placement == "reward" and loss.advantage_baseline == "leave_one_out",
            got="kl_placement='reward', advantage_baseline='leave_one_out'",
            why="klamp puts the KL into TRL's advantages once they are formed, less its mean over the whole group",
            fix="set advantage_baseline='mean', or kl_placement='advantage'",
        ),
    ]


def _reference(kl: KLConfig, model: ModelConfig, run: RunConfig) -> list[Refusal]:
    moves = kl.reference in ("ema", "periodic")
    return [
        _Refused(
            moves and model.lora_r > 0,
            got=f"reference={kl.reference!r}, lora_r={model.lora_r}",
            why="TRL moves the reference's weights towards the policy's one by one, and an adapter is not among them",
            fix="leave reference out, or set lora_r=0",
        ),
        _Refused(
            moves and run.resume,
            got=f"reference={kl.reference!r}, resume=True",
            why="TRL's checkpoints do not hold a reference that moves, so that it would start again from the model",
            fix="start the run again in another folder, or use backend='local', whose checkpoints hold it",
        ),
        _Refused(
            kl.reference_dtype is not None and model.lora_r > 0 and model.ref_model is None,
            got=f"reference_dtype={kl.reference_dtype!r}, lora_r={model.lora_r}",
            why="the reference is the policy itself with its adapter off, in the policy's data type",
            fix="leave reference_dtype out, or set ref_model",
        ),
    ]


def _steps(kl: KLConfig, rollout: RolloutConfig, optim: OptimConfig) -> list[Refusal]:
    completions, parts = rollout.prompts_per_step * rollout.num_generations, optim.gradient_accumulation_steps
    counted = {
        "kl_controller": kl.controller_name != "fixed",
        "kl_schedule": kl.kl_schedule != "constant",
        "kl_warmup_steps": kl.kl_warmup_steps > 0,
        "kl_lr_guard": kl.kl_lr_guard is not None,
        "reference": kl.reference in ("ema", "periodic"),
    }
    return [
        _Refused(
            completions % parts != 0,
            got=f"{completions} completions per step, gradient_accumulation_steps={parts}",
            why="TRL computes a step in parts of equal size",
            fix="choose gradient_accumulation_steps that divides prompts_per_step * num_generations",
        ),
        *(
            _Refused(
                asked and optim.num_iterations > 1,
                got=f"{field} together with num_iterations={optim.num_iterations}",
                why="TRL counts every update as a step: it would move that many times as often as in klamp's loop",
                fix=f"set num_iterations=1, or leave {field} out",
            )
            for field, asked in counted.items()
        ),
    ]
