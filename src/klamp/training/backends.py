"""Who trains: what each backend refuses, and the class that carries a run out; their libraries are not loaded here.

A field that a backend cannot honour is a row of its table: why, and what to do. A choice that is refused for what it
stands together with is a `Refusal` below its table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from klamp.config import LOSS_TYPES, KLConfig, LossConfig
from klamp.config.loss import kl_reduction
from klamp.errors import Refusal, refuse
from klamp.hosts.common.kl_fields import host_refusals, one_teacher_refusals
from klamp.hosts.verl.overrides import verl_refusals as of_verl_s_hooks
from klamp.hosts.verl.teacher import teacher_refusals
from klamp.tasks.base import NO_REWARD
from klamp.training.config import Backend, TrainConfig
from klamp.training.observers import Observer, RunSummary

if TYPE_CHECKING:
    from klamp.training.run import Training

Runner: TypeAlias = Callable[[TrainConfig, Sequence[Observer]], RunSummary]


def run_of(backend: Backend) -> type[Training]:
    """The class that carries a run out with a backend; the libraries of the others are not loaded."""
    if backend == "trl":
        from klamp.training.in_trl.run import TRLRun

        return TRLRun
    if backend == "verl":
        from klamp.training.in_verl.run import VerlRun

        return VerlRun
    from klamp.training.trainer import Trainer

    return Trainer


def train_run(config: TrainConfig, observers: Sequence[Observer] = ()) -> RunSummary:
    """Run a configuration with its backend, from its first step (or its newest checkpoint) to its last.

    Args:
        config: what to run.
        observers: told what happens; the run's folder and trackers are served besides.

    Raises:
        ConfigError: what the backend cannot honour, before any work.
        KlampError: bad input before any work, or an error in the run with its state saved; see `klamp.errors`.
    """
    check_backend(config)
    return run_of(config.run.backend).train(config, observers)


def check_backend(config: TrainConfig) -> None:
    """Refuse options that the backend of a run cannot honour, or would ignore; before any work.

    Args:
        config: of the run.

    Raises:
        ConfigError: the first field that has no meaning there.
    """
    refuse([*_anchors_elsewhere(config), *REFUSALS[config.run.backend](config)])


def _anchors_elsewhere(config: TrainConfig) -> list[Refusal]:
    """The anchor that klamp's own loop alone has so far."""
    backend = config.run.backend
    return [
        Refusal(
            backend != "local" and config.kl.reference == "sampler",
            f"backend={backend!r} has no KL of klamp's to the sampler",
            got="reference='sampler'",
            why="klamp scores it in its own loop",
            fix="use backend='local', or a reference that is a model",
        ),
    ]


class Row(NamedTuple):
    """A field of which a backend cannot honour every value."""

    why: str
    """Why it cannot."""
    fix: str = ""
    """What to do; empty: leave the field out."""
    values: tuple[object, ...] | None = None
    """What is refused; None: everything but the default."""


def refused(config: TrainConfig, table: Mapping[str, Row]) -> list[Refusal]:
    """The refusals of the fields in a table.

    Args:
        config: of the run.
        table: field -> what is refused of it.
    """
    given, defaults = config.flat(), TrainConfig().flat()
    return [
        Refusal(
            given[field] != defaults[field] if row.values is None else given[field] in row.values,
            what=f"backend={config.run.backend!r} cannot do this",
            got=f"{field}={given[field]!r}",
            why=row.why,
            fix=row.fix or f"leave {field} out",
        )
        for field, row in table.items()
    ]


OF_VERL = ("max_prompt_length", "machines", "ray_address", "stall_timeout", "verl_args")
"""Fields that say how verl is started, and mean nothing elsewhere."""
NO_VERL = dict.fromkeys(
    OF_VERL, Row("it says how verl is started, and verl is not who trains", "leave it out, or set backend to verl")
)
OWN_LOOP = NO_VERL | {
    **dict.fromkeys(
        ("gpus", "gpu_memory"), Row("nothing is divided there", "leave it out, or set backend to trl or verl")
    ),
    **dict.fromkeys(("sampler", "sampler_url"), Row("it samples itself", "leave it out, or set backend to trl")),
}


def local_refusals(config: TrainConfig) -> list[Refusal]:
    """What klamp's own loop cannot do."""
    return [*refused(config, OWN_LOOP), *_no_reference(config)]


def _no_reference(config: TrainConfig) -> list[Refusal]:
    """References that do not fit the model, where klamp loads both."""
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


def _no_exact_kl(config: TrainConfig, why: str) -> Refusal:
    """The exact KL, where nobody tells the log-probabilities of the whole vocabulary; none asked for is none."""
    asked = config.run.exact_kl_completions
    return Refusal(
        bool(asked),
        f"backend={config.run.backend!r} cannot do this",
        got=f"exact_kl_completions={asked}",
        why=why,
        fix="leave exact_kl_completions out",
    )


TRUST = (
    *("vllm_importance_sampling_mode", "vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min"),
    "off_policy_mask_threshold",
)
"""Fields of the trust region to the sampler."""
SCORE_FUNCTION = "use surrogate='ppo_clip': at the first update of a rollout its gradient is the same"
VERL = {
    "surrogate": Row("verl has no such loss", SCORE_FUNCTION, ("score_function",)),
    "ref_model": Row("verl's reference is the model itself, as it was before training"),
    "dtype": Row(
        "how verl scales a loss in float16 was not tried with klamp's KL", "use dtype='bfloat16'", ("float16",)
    ),
    "cpu": Row("verl runs on GPUs and NPUs", "leave cpu out, or use another backend"),
    "sampler_url": Row("verl starts its own engines, vLLM, beside the workers that train"),
    "mask_truncated_completions": Row(
        "verl trains on every completion that its engine returns",
        "leave mask_truncated_completions out, and give max_completion_length room",
    ),
    "max_steps": Row("verl has no run without a step", "set max_steps to 1 or more", (0,)),
    **dict.fromkeys(
        TRUST, Row("verl has a correction of its own", "leave it out; verl_args takes algorithm.rollout_correction")
    ),
    "lr_scheduler_type": Row("verl's schedules are constant and cosine", "use cosine or constant", ("linear",)),
}


_verl_cannot = partial(Refusal, what="backend='verl' cannot do this")


def _verl_teacher(config: TrainConfig) -> list[Refusal]:
    """What verl cannot do with a teacher, and with a teacher alone."""
    silent = config.task.reward == NO_REWARD
    return [
        *teacher_refusals(config.teacher),
        _verl_cannot(
            config.teacher.there and config.rollout.temperature != 1,
            got=f"temperature={config.rollout.temperature:g} with a teacher",
            why="its teacher's engine scores at temperature 1, whatever the policy is sampled and scored at",
            fix="set temperature=1",
        ),
        _verl_cannot(
            silent and config.kl.needs_reference,
            got=f"reward={NO_REWARD!r}, beta={config.kl.beta:g}, kl_monitor={config.kl.kl_monitor}",
            why="where it trains without rewards it leaves out its policy loss, and the KL to the reference with it",
            fix="set beta=0, or name a reward",
        ),
    ]


def verl_refusals(config: TrainConfig) -> list[Refusal]:
    """What verl cannot do."""
    loss, rollout, optim, run = config.loss, config.rollout, config.optim, config.run
    completions = rollout.prompts_per_step * rollout.num_generations
    shares = run.gpus * run.machines * optim.gradient_accumulation_steps
    return [
        *of_verl_s_hooks(config.kl),
        *_verl_teacher(config),
        *refused(config, VERL),
        _no_exact_kl(config, "verl's workers give the log-probabilities of the sampled tokens alone"),
        _verl_cannot(
            loss.advantage_baseline == "leave_one_out" and loss.scale == "std",
            got=f"advantage_baseline='leave_one_out', loss_type={loss.loss_type!r}, scale_rewards='std'",
            why="verl divides by the group's standard deviation where the baseline is the mean of all (grpo), and not "
            "where it is that of the others (rloo)",
            fix="set advantage_baseline='mean', or scale_rewards='none'",
        ),
        _verl_cannot(
            completions % shares != 0,
            got=f"{completions} completions per step, {run.gpus} GPUs on each of {run.machines} machines, "
            f"gradient_accumulation_steps={optim.gradient_accumulation_steps}",
            why="verl gives every GPU the same number of parts of the same size",
            fix=f"make prompts_per_step * num_generations a multiple of {shares}",
        ),
        *(
            _verl_cannot(
                "=" not in text and not text.startswith("~"),
                got=f"verl_args has {text!r}",
                why="an argument of verl is KEY=VALUE, +KEY=VALUE for a key that is not there yet, or ~KEY to delete "
                "one",
                fix="write it so, one word for each",
            )
            for text in run.verl_args
        ),
    ]


def trl_refusals(config: TrainConfig) -> list[Refusal]:
    """What TRL's loop cannot do."""
    no_loss = {"surrogate": Row("TRL has no such loss", SCORE_FUNCTION, ("score_function",))}
    return [
        *refused(config, NO_VERL | no_loss),
        *host_refusals(config.kl, "TRL"),
        *_trl_loss(config.kl, config.loss),
        *_trl_reference(config),
        *one_teacher_refusals(config.teacher),
        _trl_cannot(
            config.rollout.num_generations < 2,
            got=f"num_generations={config.rollout.num_generations}",
            why="TRL compares the completions of a prompt with each other, be it without a reward",
            fix="set num_generations to 2 or more",
        ),
        *_no_reference(config),
    ]


_trl_cannot = partial(Refusal, what="backend='trl' cannot do this")


def _trl_loss(kl: KLConfig, loss: LossConfig) -> list[Refusal]:
    own = LOSS_TYPES[loss.loss_type].reduction
    return [
        _trl_cannot(
            loss.surrogate == "cispo" and (loss.epsilon != 1 or own != "token_mean"),
            got=f"surrogate='cispo', epsilon={loss.epsilon:g}, loss_type={loss.loss_type!r}",
            why="TRL's cispo has no lower bound of the ratio, and takes the mean over all tokens of the step",
            fix="set epsilon=1 and loss_type='dapo'",
        ),
        _trl_cannot(
            kl.needs_reference and kl_reduction(kl, loss) != own,
            got=f"kl_normalizer={kl.kl_normalizer!r}, loss_type={loss.loss_type!r}",
            why="TRL divides the policy loss and the KL by the same",
            fix="leave kl_normalizer out, or choose the loss_type that divides so",
        ),
        _trl_cannot(
            kl.beta > 0 and kl.kl_placement == "reward" and loss.advantage_baseline == "leave_one_out",
            got="kl_placement='reward', advantage_baseline='leave_one_out'",
            why="klamp puts the KL into TRL's advantages once they are formed, less its mean over the whole group",
            fix="set advantage_baseline='mean', or kl_placement='advantage'",
        ),
    ]


def _trl_reference(config: TrainConfig) -> list[Refusal]:
    """A reference that moves, or has another data type; and what moves from step to step, where TRL counts updates."""
    kl, model = config.kl, config.model
    moves = kl.reference in ("ema", "periodic")
    counted = {
        "kl_controller": kl.controller_name != "fixed",
        "kl_schedule": kl.kl_schedule != "constant",
        "kl_warmup_steps": kl.kl_warmup_steps > 0,
        "reference": moves,
    }
    return [
        _trl_cannot(
            moves and model.lora_r > 0,
            got=f"reference={kl.reference!r}, lora_r={model.lora_r}",
            why="TRL moves the reference's weights towards the policy's one by one, and an adapter is not among them",
            fix="leave reference out, or set lora_r=0",
        ),
        _trl_cannot(
            moves and config.run.resume,
            got=f"reference={kl.reference!r}, resume=True",
            why="TRL's checkpoints do not hold a reference that moves, so that it would start again from the model",
            fix="start the run again in another folder, or use backend='local', whose checkpoints hold it",
        ),
        _trl_cannot(
            kl.reference_dtype is not None and model.lora_r > 0 and model.ref_model is None,
            got=f"reference_dtype={kl.reference_dtype!r}, lora_r={model.lora_r}",
            why="the reference is the policy itself with its adapter off, in the policy's data type",
            fix="leave reference_dtype out, or set ref_model",
        ),
        *(
            _trl_cannot(
                asked and config.optim.num_iterations > 1,
                got=f"{field} together with num_iterations={config.optim.num_iterations}",
                why="TRL counts every update as a step: it would move that many times as often as in klamp's loop",
                fix=f"set num_iterations=1, or leave {field} out",
            )
            for field, asked in counted.items()
        ),
    ]


REFUSALS: Mapping[Backend, Callable[[TrainConfig], list[Refusal]]] = {
    "local": local_refusals,
    "trl": trl_refusals,
    "verl": verl_refusals,
}
"""What each backend cannot do, one row for each."""
