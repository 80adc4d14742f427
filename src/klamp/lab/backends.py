"""What each backend of `klamp train` refuses. No backend's library is loaded here.

A field is translated into the engine's own arguments, or it is refused: nothing that a user sets is ignored. A field
that some backends alone have is in `ONLY`; a value that a backend cannot honour is a row of its table; a choice that is
refused for what it is combined with is a `Refusal`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

from klamp.config import LOSS_TYPES
from klamp.config.fields import host_refusals
from klamp.errors import ConfigError, Refusal, refuse
from klamp.hosts.common.kl_fields import one_teacher_refusals
from klamp.hosts.verl.teacher import teacher_refusals
from klamp.lab.config import Backend, TrainConfig
from klamp.lab.observers import Observer, RunSummary
from klamp.lab.tasks.base import NO_REWARD

Runner: TypeAlias = Callable[[TrainConfig, Sequence[Observer]], RunSummary]

ONLY: Mapping[str, tuple[Backend, ...]] = {
    **dict.fromkeys(("max_prompt_length", "machines", "ray_address", "verl_args"), ("verl",)),
    **dict.fromkeys(("gpus", "gpu_memory", "sampler"), ("trl", "verl")),
    "sampler_url": ("trl",),
}
"""Field -> the backends that it has a meaning for."""


def train_run(config: TrainConfig, observers: Sequence[Observer] = ()) -> RunSummary:
    """Run a configuration by klamp's own loop, from its first step (or its newest checkpoint) to its last.

    The observers receive what happens; the run's folder and trackers are served besides.

    Raises:
        ConfigError: what the loop cannot honour, before any work.
        KlampError: bad input before any work, or an error in the run with its state saved; see `klamp.errors`.
    """
    from klamp.lab.trainer import Trainer

    if config.run.backend != "local":
        raise ConfigError(
            "train_run trains by klamp's own loop",
            got=f"backend={config.run.backend!r}",
            fix="start it by klamp train, or by klamp.lab.engines.launch.launch",
        )
    check_backend(config)
    return Trainer.train(config, observers)


class Row(NamedTuple):
    """A field of which a backend cannot honour every value."""

    why: str
    """Why it cannot."""
    fix: str = ""
    """What to do; empty: leave the field out."""
    values: tuple[object, ...] | None = None
    """What is refused; None: everything but the default."""


def check_backend(config: TrainConfig) -> None:
    """Refuse options that the backend of a run cannot honour, or would ignore; before any work."""
    backend, given, defaults = config.run.backend, config.flat(), TrainConfig().flat()
    table, own = BACKENDS[backend]
    for name, who in ONLY.items():
        if backend not in who:
            there = Row(f"it is an option of {' and '.join(who)}", f"leave it out, or set backend to {who[0]}")
            table = table | {name: there}
    refuse(
        Refusal(
            given[field] != defaults[field] if row.values is None else given[field] in row.values,
            what=f"backend={backend!r} cannot do this",
            got=f"{field}={given[field]!r}",
            why=row.why,
            fix=row.fix or f"leave {field} out",
        )
        for field, row in table.items()
    )
    refuse(own(config))


TRUST = (
    *("vllm_importance_sampling_mode", "vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min"),
    "off_policy_mask_threshold",
)
"""Fields of the trust region to the sampler."""
SHARED = {
    "reference": Row("klamp scores the sampler in its own loop", "use a reference that is a model", ("sampler",)),
    "surrogate": Row(
        "the engine has no such loss",
        "use surrogate='ppo_clip': at the first update of a rollout its gradient is the same",
        ("score_function",),
    ),
    "exact_kl_completions": Row("the exact KL beside another estimator is measured in klamp's own loop"),
    "max_steps": Row("the engine has no run without a step", "set max_steps to 1 or more", (0,)),
}
VERL = SHARED | {
    "ref_model": Row("verl's reference is the model itself, as it was before training"),
    "dtype": Row("how verl scales a float16 loss was not tried with klamp's KL", "use dtype='bfloat16'", ("float16",)),
    "cpu": Row("verl runs on GPUs and NPUs", "leave cpu out, or use another backend"),
    "mask_truncated_completions": Row("verl trains on every completion that its engine returns"),
    "stop_on": Row("verl takes no callback that could stop it", "leave it out; `klamp doctor RUN` reads the log"),
    "log_completions_every": Row("verl writes the completions of every step"),
    "lr_scheduler_type": Row("verl's schedules are constant and cosine", "use cosine or constant", ("linear",)),
    **dict.fromkeys(
        TRUST, Row("verl has a correction of its own", "leave it out; verl_args takes algorithm.rollout_correction")
    ),
}


def local_refusals(config: TrainConfig) -> list[Refusal]:
    """References that do not fit the model, for klamp's own loop and for TRL."""
    kl, model = config.kl, config.model
    return [
        Refusal(
            kl.needs_reference and kl.reference == "adapter_off" and not model.lora_r,
            "reference='adapter_off' needs an adapter",
            got="lora_r=0",
            why="the reference is the policy with its LoRA adapter switched off",
            fix="set lora_r (16 is usual), or reference='frozen'",
        ),
        Refusal(
            kl.needs_reference and kl.reference not in ("auto", "frozen") and model.ref_model is not None,
            f"reference={kl.reference!r} does not use ref_model",
            got=f"ref_model={model.ref_model!r}",
            why="only a frozen reference is loaded from a folder of its own",
            fix="leave ref_model out, or set reference='frozen'",
        ),
    ]


_trl_cannot = partial(Refusal, what="backend='trl' cannot do this")
_verl_cannot = partial(Refusal, what="backend='verl' cannot do this")


def trl_refusals(config: TrainConfig) -> list[Refusal]:
    """What TRL's loop cannot do, beside what the table says."""
    kl, loss, model = config.kl, config.loss, config.model
    own, moves = LOSS_TYPES[loss.loss_type].reduction, kl.reference in ("ema", "periodic")
    moving = kl.controller_name != "fixed" or kl.kl_schedule != "constant" or kl.kl_warmup_steps > 0 or moves
    return [
        *host_refusals(kl, "TRL"),
        *one_teacher_refusals(config.teacher),
        *local_refusals(config),
        _trl_cannot(
            loss.surrogate == "cispo" and (loss.epsilon != 1 or own != "token_mean"),
            got=f"surrogate='cispo', epsilon={loss.epsilon:g}, loss_type={loss.loss_type!r}",
            why="TRL's cispo has no lower bound of the ratio, and takes the mean over all tokens of the step",
            fix="set epsilon=1 and loss_type='dapo'",
        ),
        _trl_cannot(
            kl.beta > 0 and kl.kl_placement == "reward" and loss.advantage_baseline == "leave_one_out",
            got="kl_placement='reward', advantage_baseline='leave_one_out'",
            why="klamp puts the KL into TRL's advantages once they are formed, less its mean over the whole group",
            fix="set advantage_baseline='mean', or kl_placement='advantage'",
        ),
        _trl_cannot(
            moves and (model.lora_r > 0 or config.run.resume),
            got=f"reference={kl.reference!r}, lora_r={model.lora_r}, resume={config.run.resume}",
            why="TRL moves weights, and an adapter is not among them; its checkpoints do not hold the moved reference",
            fix="leave reference out, or use backend='local'",
        ),
        _trl_cannot(
            moving and config.optim.num_iterations > 1,
            got=f"num_iterations={config.optim.num_iterations}, and a controller, a schedule or a moving reference",
            why="TRL counts every update as a step: it would move that many times as often as in klamp's loop",
            fix="set num_iterations=1, or a fixed beta and reference",
        ),
        _trl_cannot(
            config.rollout.num_generations < 2,
            got=f"num_generations={config.rollout.num_generations}",
            why="TRL compares the completions of a prompt with each other, be it without a reward",
            fix="set num_generations to 2 or more",
        ),
    ]


def verl_refusals(config: TrainConfig) -> list[Refusal]:
    """What verl cannot do, beside what the table says."""
    kl, loss = config.kl, config.loss
    return [
        *host_refusals(kl, "verl"),
        *teacher_refusals(config.teacher),
        _verl_cannot(
            config.teacher.there and config.rollout.temperature != 1,
            got=f"temperature={config.rollout.temperature:g} with a teacher",
            why="its teacher's engine scores at temperature 1, whatever the policy is sampled and scored at",
            fix="set temperature=1",
        ),
        _verl_cannot(
            config.task.reward == NO_REWARD and kl.needs_reference,
            got=f"reward={NO_REWARD!r}, beta={kl.beta:g}, kl_monitor={kl.kl_monitor}",
            why="where it trains without rewards it leaves out its policy loss, and the KL to the reference with it",
            fix="set beta=0, or name a reward",
        ),
        _verl_cannot(
            loss.advantage_baseline == "leave_one_out" and loss.scale == "std",
            got=f"advantage_baseline='leave_one_out', loss_type={loss.loss_type!r}, scale_rewards='std'",
            why="verl divides by the group's standard deviation where the baseline is the mean of all (grpo), and not "
            "where it is that of the others (rloo)",
            fix="set advantage_baseline='mean', or scale_rewards='none'",
        ),
    ]


BACKENDS: Mapping[Backend, tuple[dict[str, Row], Callable[[TrainConfig], list[Refusal]]]] = {
    "local": ({}, local_refusals),
    "trl": (SHARED, trl_refusals),
    "verl": (VERL, verl_refusals),
}
"""Backend -> its table, and its refusals of combinations."""
