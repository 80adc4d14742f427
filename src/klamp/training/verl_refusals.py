"""Refusals of options that `backend='verl'` cannot honour, before any work is done."""

from __future__ import annotations

from functools import partial

from klamp.config import KLConfig, LossConfig
from klamp.errors import Refusal
from klamp.hosts.verl.fields_in_verl import verl_refusals as of_the_host
from klamp.training.sections import ModelConfig, OptimConfig, RolloutConfig, RunConfig

OF_VERL = ("max_prompt_length", "gpus", "machines", "ray_address", "stall_timeout", "verl_args")
"""Fields that say how verl is started, and mean nothing elsewhere."""

_Refused = partial(Refusal, what="backend='verl' cannot do this")


def verl_refusals(
    kl: KLConfig, loss: LossConfig, model: ModelConfig, rollout: RolloutConfig, optim: OptimConfig, run: RunConfig
) -> list[Refusal]:
    """What verl cannot do, one row for each."""
    return [
        *of_the_host(kl),
        *_loss(loss),
        *_model(model, run),
        *_rollout(rollout),
        *_steps(rollout, optim, run),
    ]


def _loss(loss: LossConfig) -> list[Refusal]:
    return [
        _Refused(
            loss.surrogate == "score_function",
            got="surrogate='score_function'",
            why="verl has no such loss",
            fix="use surrogate='ppo_clip': at the first update of a rollout its gradient is the same",
        ),
        _Refused(
            loss.advantage_baseline == "leave_one_out" and loss.scale == "std",
            got=f"advantage_baseline='leave_one_out', loss_type={loss.loss_type!r}, scale_rewards='std'",
            why="verl divides by the group's standard deviation where the baseline is the mean of all (grpo), and not "
            "where it is that of the others (rloo)",
            fix="set advantage_baseline='mean', or scale_rewards='none'",
        ),
    ]


def _model(model: ModelConfig, run: RunConfig) -> list[Refusal]:
    return [
        _Refused(
            model.ref_model is not None,
            got=f"ref_model={model.ref_model!r}",
            why="verl's reference is the model itself, as it was before training",
            fix="leave ref_model out",
        ),
        _Refused(
            model.dtype == "float16",
            got="dtype='float16'",
            why="how verl scales a loss in float16 was not tried with klamp's KL",
            fix="use dtype='bfloat16'",
        ),
        _Refused(
            run.cpu,
            got="cpu=True",
            why="verl runs on GPUs and NPUs",
            fix="leave cpu out, or use another backend",
        ),
        _Refused(
            bool(run.exact_kl_completions),
            got=f"exact_kl_completions={run.exact_kl_completions}",
            why="verl's workers give the log-probabilities of the sampled tokens alone",
            fix="leave exact_kl_completions out",
        ),
    ]


def _rollout(rollout: RolloutConfig) -> list[Refusal]:
    return [
        _Refused(
            rollout.sampler_url is not None,
            got=f"sampler_url={rollout.sampler_url!r}",
            why="verl starts its own engines, vLLM, beside the workers that train",
            fix="leave sampler_url out",
        ),
        _Refused(
            rollout.mask_truncated_completions,
            got="mask_truncated_completions=True",
            why="verl trains on every completion that its engine returns",
            fix="leave mask_truncated_completions out, and give max_completion_length room",
        ),
    ]


def _steps(rollout: RolloutConfig, optim: OptimConfig, run: RunConfig) -> list[Refusal]:
    completions = rollout.prompts_per_step * rollout.num_generations
    shares = run.gpus * run.machines * optim.gradient_accumulation_steps
    return [
        _Refused(
            run.max_steps == 0,
            got="max_steps=0",
            why="verl has no run without a step",
            fix="set max_steps to 1 or more",
        ),
        _Refused(
            optim.lr_scheduler_type == "linear",
            got="lr_scheduler_type='linear'",
            why="verl's schedules are constant and cosine",
            fix="use cosine or constant",
        ),
        _Refused(
            completions % shares != 0,
            got=f"{completions} completions per step, {run.gpus} GPUs on each of {run.machines} machines, "
            f"gradient_accumulation_steps={optim.gradient_accumulation_steps}",
            why="verl gives every GPU the same number of parts of the same size",
            fix=f"make prompts_per_step * num_generations a multiple of {shares}",
        ),
        *_arguments(run),
    ]


def _arguments(run: RunConfig) -> list[Refusal]:
    return [
        _Refused(
            "=" not in text and not text.startswith("~"),
            got=f"verl_args has {text!r}",
            why="an argument of verl is KEY=VALUE, +KEY=VALUE for a key that is not there yet, or ~KEY to delete one",
            fix="write it so, one word for each",
        )
        for text in run.verl_args
    ]
