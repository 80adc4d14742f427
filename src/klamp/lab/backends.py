"""The backends of `klamp train`: what each one refuses, and how a run starts: in klamp's own loop, by TRL or by verl.

A field is translated into the engine's own arguments, or it is refused: nothing that a user sets is ignored.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from klamp.config import LOSS_TYPES, KLConfig
from klamp.config.fields import host_refusals
from klamp.config.loss import TRUST
from klamp.errors import ConfigError, Refusal, TrainingStopped, refuse
from klamp.hosts.common.kl_fields import one_teacher_refusals
from klamp.hosts.common.versions import caution_beside, check_version
from klamp.hosts.verl.overrides import teacher_refusals
from klamp.lab import folders
from klamp.lab.config import Backend, TrainConfig
from klamp.lab.folders import run_folder, write_whole
from klamp.lab.observers import Observer, RunSummary, versions
from klamp.lab.tasks.base import NO_REWARD
from klamp.names import CONFIG, IDENTITY, VERSIONS

ONLY: Mapping[str, tuple[Backend, ...]] = {
    **dict.fromkeys(("max_prompt_length", "machines", "ray_address", "verl_args"), ("verl",)),
    **dict.fromkeys(("gpus", "gpu_memory", "sampler"), ("trl", "verl")),
    "sampler_url": ("trl",),
}
"""Field -> the backends that it has a meaning for."""
MOVING = ("ema", "periodic")  # references that move during a run


def train_run(config: TrainConfig, observers: Sequence[Observer] = ()) -> RunSummary:
    """Run a configuration by klamp's own loop, from its first step (or its newest checkpoint) to its last.

    Raises:
        ConfigError: what the loop cannot honour, before any work.
        KlampError: bad input before any work, or an error in the run with its state saved; see `klamp.errors`.
    """
    from klamp.lab.loop import Trainer

    if config.run.backend != "local":
        got, fix = f"backend={config.run.backend!r}", "start it by klamp train, or by klamp.lab.backends.launch"
        why = "TRL and verl run their own programs, and observers receive nothing from them"
        raise ConfigError("train_run trains by klamp's own loop", got=got, why=why, fix=fix)
    check_backend(config)
    return Trainer.train(config, observers)


def _beta_moves(kl: KLConfig) -> bool:
    return kl.controller_name != "fixed" or kl.kl_schedule != "constant" or kl.kl_warmup_steps > 0


class Rule(NamedTuple):
    """A choice that a backend cannot honour: the fields that make it (names with spaces), why, and what to do."""

    fields: str
    why: str
    fix: str = ""  # empty: leave the field out
    applies: Callable[[TrainConfig], bool] | None = None
    """Whether it is refused; None: every value of these fields but the default is."""


LOCAL = (
    Rule(
        "reference lora_r",
        "'adapter_off' needs an adapter: the reference is the policy with its LoRA adapter switched off",
        "set lora_r (16 is usual), or reference='frozen'",
        lambda c: c.kl.needs_reference and c.kl.reference == "adapter_off" and not c.model.lora_r,
    ),
    Rule(
        "reference ref_model",
        "this reference does not use ref_model: only a frozen reference is loaded from a folder of its own",
        "leave ref_model out, or set reference='frozen'",
        lambda c: c.kl.needs_reference and c.kl.reference not in ("auto", "frozen") and c.model.ref_model is not None,
    ),
)
"""References that do not fit the model, in klamp's own loop and in TRL's."""
ENGINES = (
    Rule("reference", "klamp scores the sampler in its own loop", applies=lambda c: c.kl.reference == "sampler"),
    Rule(
        "surrogate",
        "the engine has no such loss",
        "use surrogate='ppo_clip': at the first update of a rollout both gradients are equal",
        lambda c: c.loss.surrogate == "score_function",
    ),
    Rule("exact_kl_completions", "the exact KL beside another estimator is measured in klamp's own loop"),
    Rule("max_steps", "the engine has no run without a step", "set 1 or more", lambda c: c.run.max_steps == 0),
)
TRL = (
    *ENGINES,
    *LOCAL,
    Rule(
        "surrogate epsilon loss_type",
        "TRL's cispo has no lower bound of the ratio, and takes the mean over all tokens of the step",
        "set epsilon=1 and loss_type='dapo'",
        lambda c: (
            c.loss.surrogate == "cispo"
            and (c.loss.epsilon != 1 or LOSS_TYPES[c.loss.loss_type].reduction != "token_mean")
        ),
    ),
    Rule(
        "kl_placement advantage_baseline",
        "klamp puts the KL into TRL's advantages once they are formed, less its mean over the whole group",
        "set advantage_baseline='mean', or kl_placement='advantage'",
        lambda c: c.kl.beta != 0 and c.kl.kl_placement == "reward" and c.loss.advantage_baseline == "leave_one_out",
    ),
    Rule(
        "reference lora_r resume",
        "TRL moves weights, and an adapter is not among them; its checkpoints do not hold the moved reference",
        "leave reference out, or use backend='local'",
        lambda c: c.kl.reference in MOVING and (c.model.lora_r > 0 or c.run.resume),
    ),
    Rule(
        "num_iterations kl_controller kl_schedule kl_warmup_steps reference",
        "TRL counts every update as a step: beta or the reference would move more often than in klamp's loop",
        "set num_iterations=1, or a fixed beta and reference",
        lambda c: c.optim.num_iterations > 1 and (c.kl.reference in MOVING or _beta_moves(c.kl)),
    ),
    Rule(
        "num_generations",
        "TRL compares the completions of a prompt with each other, be it without a reward",
        "set num_generations to 2 or more",
        lambda c: c.rollout.num_generations < 2,
    ),
)
VERL = (
    *ENGINES,
    Rule("ref_model", "verl's reference is the model itself, as it was before training"),
    Rule(
        "dtype",
        "how verl scales a float16 loss was not tried with klamp's KL",
        "use dtype='bfloat16'",
        lambda c: c.model.dtype == "float16",
    ),
    Rule("cpu", "verl runs on GPUs and NPUs", "leave cpu out, or use another backend"),
    Rule("mask_truncated_completions", "verl trains on every completion that its engine returns"),
    Rule("stop_on", "verl takes no callback that could stop it", "leave it out; `klamp doctor RUN` reads the log"),
    Rule("log_completions_every", "verl writes the completions of every step"),
    Rule(
        "lr_scheduler_type",
        "verl's schedules are constant and cosine",
        applies=lambda c: c.optim.lr_scheduler_type == "linear",
    ),
    Rule(" ".join(TRUST), "verl has its own", "leave it out; verl_args takes algorithm.rollout_correction, loss_mode"),
    Rule(
        "temperature",
        "verl's teacher engine scores at temperature 1, at any temperature of the policy",
        "set temperature=1",
        lambda c: c.teacher.there and c.rollout.temperature != 1,
    ),
    Rule(
        "reward beta kl_monitor",
        "without rewards verl leaves out its policy loss, and the KL to the reference with it",
        "set beta=0, or name a reward",
        lambda c: c.task.reward == NO_REWARD and c.kl.needs_reference,
    ),
    Rule(
        "advantage_baseline loss_type scale_rewards",
        "verl divides by the group's standard deviation with the mean of all as the baseline (grpo), and not with the "
        "mean of the others (rloo)",
        "set advantage_baseline='mean', or scale_rewards='none'",
        lambda c: c.loss.advantage_baseline == "leave_one_out" and c.loss.scale == "std",
    ),
)
BACKENDS: Mapping[Backend, tuple[tuple[Rule, ...], Callable[[TrainConfig], list[Refusal]]]] = {
    "local": (LOCAL, lambda c: []),
    "trl": (TRL, lambda c: [*host_refusals(c.kl, "TRL"), *one_teacher_refusals(c.teacher)]),
    "verl": (VERL, lambda c: [*host_refusals(c.kl, "verl"), *teacher_refusals(c.teacher)]),
}
"""Backend -> its rules, and the refusals of klamp's KL inside it."""


def check_backend(config: TrainConfig) -> None:
    """Refuse options that the backend of a run cannot honour, or would ignore; before any work."""
    backend, values, defaults = config.run.backend, config.flat(), TrainConfig().flat()
    rules, hosted = BACKENDS[backend]
    refuse(host_refusals(config.loss, "klamp train"))
    elsewhere = (
        Rule(field, f"it is an option of {' and '.join(owners)}", f"leave it out, or set backend to {owners[0]}")
        for field, owners in ONLY.items()
        if backend not in owners
    )
    refuse(
        Refusal(
            rule.applies(config) if rule.applies else any(values[n] != defaults[n] for n in rule.fields.split()),
            what=f"backend={backend!r} cannot do this",
            got=", ".join(f"{name}={values[name]!r}" for name in rule.fields.split()),
            why=rule.why,
            fix=rule.fix or f"leave {rule.fields} out",
        )
        for rule in (*elsewhere, *rules)
    )
    refuse(hosted(config))


def launch(config: TrainConfig, argv: Sequence[str]) -> None:
    """Run the configuration that the arguments `argv` of `klamp train` made; returns if TRL trained in this process.

    The engine's program takes the place of this process, or, for TRL in one process, runs in it.

    Raises:
        KlampError: what does not fit, before any work.
        TrainingStopped: TRL was interrupted, or an alarm of stop_on ended the run.
    """
    if config.run.backend == "verl":
        check_version("verl")
        caution_beside("vllm")
        from klamp.lab.engines import verl

        folder = opened(config)
        verl.write_inputs(config, verl.Layout(folder))
        record(config, folder)
        replace_process(verl.command(config, folder, sys.executable))
    elif command := accelerate_command(config, argv, sys.executable):
        replace_process(command)
    else:
        check_version("trl")
        from klamp.lab.engines import trl_program

        folder = opened(config)
        try:
            trl_program.train(config, folder, begin=lambda: record(config, folder))
        except KeyboardInterrupt as stop:
            why, fix = "the run has steps left", f"continue from its newest checkpoint: --resume {folder}"
            raise TrainingStopped("TRL was interrupted", got="Ctrl-C", why=why, fix=fix) from stop


def opened(config: TrainConfig) -> Path:
    """The folder of a run, made or taken up again; of several processes only the first one makes it."""
    from klamp.lab.checkpoint import check_resume
    from klamp.lab.setup import check_processes

    check_processes(config)
    if os.environ.get("RANK", "0") != "0":
        return Path(config.run.output_dir or "")
    folder, _ = folders.make_folder(config)
    folders.check_folder(folder, resume=config.run.resume)
    check_resume(config, folder)
    return folder


def record(config: TrainConfig, folder: Path) -> None:
    """Write the run's configuration, its versions, and which model and data it has."""
    from klamp.lab.checkpoint import identity

    if os.environ.get("RANK", "0") == "0":
        goes_on = config.run.resume and folders.newest_complete(folder) is not None
        stored = identity(config, folder if goes_on else None)
        write_whole(folder / IDENTITY, json.dumps(stored, indent=2))
        write_whole(folder / VERSIONS, json.dumps(versions(cpu=config.run.cpu), indent=2))
        write_whole(folder / CONFIG, yaml.safe_dump(folders.plain(config) | {"resume": False}, sort_keys=False))


def accelerate_command(config: TrainConfig, argv: Sequence[str], python: str) -> list[str]:
    """The command that starts this `klamp train` on each GPU; empty for one GPU, or where a launcher has done so."""
    # torchrun sets the first variable in its processes, `accelerate launch` the second
    if config.run.gpus == 1 or {"WORLD_SIZE", "ACCELERATE_MIXED_PRECISION"} & os.environ.keys():
        return []
    folder = [] if config.run.output_dir else ["--output_dir", str(run_folder(config))]
    processes = ["--multi_gpu", "--num_processes", str(config.run.gpus), "--num_machines", "1"]
    return [python, "-m", "accelerate.commands.launch", *processes, "-m", "klamp.cli", "train", *argv, *folder]


def engine_plan(config: TrainConfig, argv: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """The arguments of TRL's configuration, and the command that a run starts; for `--dry-run`."""
    from klamp.lab.engines import verl
    from klamp.lab.engines.trl_arguments import trl_arguments

    folder = run_folder(config)
    if config.run.backend == "verl":
        return {}, verl.command(config, folder, "python")
    command = accelerate_command(config, argv, "python")
    return trl_arguments(config, folder, processes=config.run.gpus if command else None), command


def replace_process(command: Sequence[str]) -> None:
    """Replace this process by a command, which then has its own exit code and signals."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(command[0], list(command))
