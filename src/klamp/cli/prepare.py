"""`klamp train --prepare`: how a run is divided over its GPUs and why, and the commands to type where they are."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from klamp.cli.flags import TRUE_WORDS
from klamp.cli.text import WIDTH
from klamp.errors import ConfigError
from klamp.training.config import TrainConfig
from klamp.training.folders import run_folder
from klamp.training.sizing import GB, Load, count, load_of, reasons, sizes_of, spread

if TYPE_CHECKING:  # imported by the command only
    from klamp.training.sizing import Shape

SERVER = "http://127.0.0.1:8000"
"""Where TRL's server of vLLM listens if nobody says another."""
INSTALL = {
    "trl": ("pip install '.[train,trl]' 'trl[vllm]' deepspeed", "TRL 1.16 names vLLM 0.22 to 0.31"),
    "verl": ("pip install '.[train,verl]' 'verl[vllm]'", "verl 0.9.1 names vLLM 0.24.0; an environment of its own"),
}
"""Backend -> what brings it with its engine, in a clone of klamp; which vLLM that is."""
LIES = {
    "trl": "checkpoints/checkpoint-N: the model as transformers loads it (with lora_r the adapter), and TRL's state",
    "verl": "checkpoints/global_step_N/actor/huggingface: the model as transformers loads it; beside it verl's shards",
}


def prepared_text(argv: Sequence[str], config: TrainConfig) -> str:
    """What `--prepare` prints; the inputs are opened, nothing is started or written.

    Args:
        argv: the arguments of `klamp train`.
        config: what they say.

    Raises:
        ConfigError: a backend that is not launched elsewhere.
        ModelError, DataError, RewardError: what would stop the run before its first step.
    """
    from klamp.training.models import shape_of
    from klamp.training.setup import open_inputs

    backend, words = config.run.backend, _without_prepare(argv)
    if backend not in INSTALL:
        raise ConfigError(
            "--prepare is for a run that is launched on several GPUs",
            got=f"backend={backend!r}",
            why="klamp's own loop is for one machine, and a service has its own",
            fix="set backend to trl or verl, and gpus; or leave --prepare out and start the run",
        )
    inputs, shape = open_inputs(config), shape_of(config.model.model)
    longest = 0 if isinstance(inputs, str) else inputs.longest
    if backend == "verl":
        load, commands = _verl(words, config, shape)
    else:
        load, commands = _trl(words, config, shape, longest)
    parts = ["klamp train --prepare: model, prompts and reward are opened; nothing is started or written"]
    if load is not None:
        parts += [_sizes(config, load)]
    pip, which = INSTALL[backend]
    folder = run_folder(config)
    lines = [f"{pip}   # once, where the GPUs are: {which}", *commands, f"klamp report {folder}"]
    where = f"in {folder}: {LIES[backend]}; klamp evaluate --checkpoint {folder}"
    return "\n\n".join([*parts, "next\n\n" + "\n".join(f"  {line}" for line in lines), f"what lies where\n\n  {where}"])


def _without_prepare(argv: Sequence[str]) -> list[str]:
    words = list(argv)
    at = words.index("--prepare")
    return words[:at] + words[at + (2 if words[at + 1 : at + 2] and words[at + 1] in TRUE_WORDS else 1) :]


def _sizes(config: TrainConfig, load: Load) -> str:
    title = f"{config.model.model}, {load.shape.parameters / GB:.2g} billion parameters, divided over {load.gpus} GPUs"
    told: Iterable[str] = (
        textwrap.fill(f"{what}: {why}", WIDTH, initial_indent="  ", subsequent_indent=" " * 6)
        for what, why in [*reasons(load, sizes_of(load)), *(_of_trl(config, load) if load.apart else ())]
    )
    return "\n".join([f"{title} (estimates; none of them changes a loss)\n", *told])


def _verl(words: list[str], config: TrainConfig, shape: Shape | None) -> tuple[Load | None, list[str]]:
    from klamp.training.in_verl.overrides import load_in_verl

    run = config.run
    ray = [
        "ray start --head --port 6379   # on the first machine",
        f"ray start --address FIRST:6379   # on the other {count(run.machines - 1, 'machine')}",
    ]
    address = ["--ray_address", "auto"] if run.machines > 1 and run.ray_address is None else []
    start = shlex.join(["klamp", "train", *words, *address])
    return None if shape is None else load_in_verl(config, shape), [*(ray if address else []), start]


def _trl(words: list[str], config: TrainConfig, shape: Shape | None, longest: int) -> tuple[Load | None, list[str]]:
    """Half of the GPUs train, the other half serve vLLM; one alone does both."""
    gpus, prompts, rollout = config.run.gpus, config.rollout.prompts_per_step, config.rollout
    training = max((n for n in range(1, gpus // 2 + 1) if prompts % n == 0), default=1)
    load = None if shape is None else load_of(config, shape, gpus=training, prompt=longest, apart=gpus > 1)
    flags = _flags(config, load)
    if gpus == 1:
        return load, [shlex.join(["klamp", "train", *words, *flags, "--sampler", "vllm"])]
    from klamp.training.in_verl.overrides import model_path

    serving, length = gpus // 2, longest + rollout.max_completion_length
    devices = [",".join(map(str, each)) for each in (range(training), range(gpus - serving, gpus))]
    over = 1 if shape is None else spread(shape, serving)[-1]
    server = ["trl", "vllm-serve", "--model", model_path(config), "--host", "127.0.0.1"]
    server += ["--tensor_parallel_size", str(over), "--data_parallel_size", str(serving // over)]
    server += ["--max_model_len", str(length)]
    launch = ["accelerate", "launch", "--num_processes", str(training), "--num_machines", "1", "--use_deepspeed"]
    launch += ["--zero_stage", str(_stage(load)), "--mixed_precision", "bf16", "-m", "klamp.cli", "train", *words]
    return load, [
        f"CUDA_VISIBLE_DEVICES={devices[1]} {shlex.join(server)} &",
        f"CUDA_VISIBLE_DEVICES={devices[0]} {shlex.join([*launch, *flags, '--sampler_url', SERVER])}",
    ]


def _of_trl(config: TrainConfig, load: Load) -> Iterator[tuple[str, str]]:
    """What DeepSpeed and the server are told, and why."""
    split = f"{count(load.gpus, 'GPU')} to train, {config.run.gpus // 2} for vLLM"
    yield split, "half each, as far as the prompts of a step divide over those that train"
    yield (
        f"ZeRO-{_stage(load)}",
        f"ZeRO-2 keeps {_whole(load):.0f} GB on each GPU, weights and reference whole; up to a third of it is taken",
    )
    yield "computed in bfloat16", "DeepSpeed has float32 copies of all trained weights: dtype stays float32 for it"


def _whole(load: Load) -> float:
    """GB of each GPU where DeepSpeed divides gradients and optimizer alone: ZeRO-2."""
    return load.shape.parameters * (2 + 2 * load.reference + (0 if load.adapter else 14 / load.gpus)) / GB


def _stage(load: Load | None) -> int:
    return 2 if load is None or _whole(load) < load.memory / 3 else 3


def _flags(config: TrainConfig, load: Load | None) -> list[str]:
    """The fields that the sizes set, and the data type of DeepSpeed's own copies."""
    given: dict[str, str] = {}
    if load is not None:
        sizes = sizes_of(load)
        parts = config.optim.gradient_accumulation_steps * load.share // sizes.micro
        given["gradient_accumulation_steps"] = str(parts)
        given["gradient_checkpointing"] = str(config.model.gradient_checkpointing or sizes.checkpointing).lower()
    if config.model.dtype == "bfloat16" and not config.model.lora_r and config.run.gpus > 1:
        given["dtype"] = "float32"  # DeepSpeed keeps float32 copies itself, and computes in bfloat16
    return [word for name, value in given.items() for word in (f"--{name}", value)]
