"""`klamp train --prepare`: how a run is divided over its GPUs and why, and the commands to type where they are."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Sequence
from urllib.parse import urlsplit

from klamp.cli.text import WIDTH
from klamp.errors import ConfigError
from klamp.lab.config import TrainConfig
from klamp.lab.folders import run_folder
from klamp.lab.sizing import GB, Load, Shape, load_of, reasons, sizes_of, spread

HOST, PORT = "127.0.0.1", 8001
"""The address of TRL's vLLM server: 8000 may be a teacher's."""
INSTALL = {
    "trl": "pip install '.[train,trl]' 'trl[vllm]' deepspeed   # once; TRL 1.16 names vLLM 0.22 to 0.31",
    "verl": "pip install '.[train,verl]' 'verl[vllm]'   # once, apart from others; verl 0.9.1 names vLLM 0.24.0",
}
"""Backend -> what brings it with its engine, in a clone of klamp; which vLLM that is."""


def prepared_text(argv: Sequence[str], config: TrainConfig) -> str:
    """What `--prepare` prints for the arguments of `klamp train`; the inputs are opened, nothing is written."""
    from klamp.lab.engines.verl import load_in_verl
    from klamp.lab.models import shape_of
    from klamp.lab.setup import open_inputs

    backend = config.run.backend
    words = [word for word in argv if word != "--prepare"]
    if backend not in INSTALL:
        why = "klamp's own loop is for one machine"
        fix = "set backend to trl or verl, and gpus; or leave --prepare out and start the run"
        what = "--prepare is for a run that is launched on several GPUs"
        raise ConfigError(what, got=f"{backend=}", why=why, fix=fix)
    longest, shape = open_inputs(config).longest, shape_of(config.model.model)
    if backend == "verl":
        load = None if shape is None else load_in_verl(config, shape)
        commands = [shlex.join(["klamp", "train", *words])]
    else:
        load, commands = _trl(words, config, shape, longest)
    looks = [["report"]]
    if backend != "verl" or not config.model.lora_r:  # verl keeps an adapter in shards of its own
        looks.append(["evaluate", "--checkpoint"])
    ends = [shlex.join(["klamp", *look, str(run_folder(config))]) for look in looks]
    lines = [INSTALL[backend], *_teachers_server(config, longest), *commands, *ends]
    return "\n\n".join([
        "klamp train --prepare: model, prompts and reward are opened; nothing is started or written",
        *([] if load is None else [_sizes(config, load)]),
        "next, where the GPUs are\n\n" + "\n".join(f"  {line}" for line in lines),
    ])  # fmt: skip


def _sizes(config: TrainConfig, load: Load) -> str:
    facts = [f"{what}: {why}" for what, why in reasons(load, sizes_of(load))]
    teacher, gpus = config.teacher, config.run.gpus
    if teacher.there and config.run.backend == "verl":
        facts.append(f"{len(teacher.models)} more than these {gpus} GPUs for the teacher: a vLLM of its own on each")
    elif teacher.there and teacher.teacher_url:
        facts.append("the teacher is a server of its own: on none of these GPUs, started before the run")
    if load.apart:
        served = spread(load.shape, gpus // 2)[-1]
        facts.append(f"{load.gpus} GPUs to train, {served} for vLLM: half each, if prompts and heads divide so")
        facts.append("computed in bfloat16: DeepSpeed (ZeRO-2) has float32 copies of all weights, dtype stays float32")
    count = load.shape.parameters / GB
    size = f"{count:.2g} billion" if count > 0.1 else f"{1000 * count:.2g} million"
    title = f"{config.model.model}, {size} parameters, divided over {load.gpus} GPUs"
    filled = [textwrap.fill(fact, WIDTH, initial_indent="  ", subsequent_indent=" " * 6) for fact in facts]
    return "\n".join([f"{title} (estimates; none of them changes a loss)\n", *filled])


def _teachers_server(config: TrainConfig, longest: int) -> list[str]:
    """The command that starts the server of a teacher, in the data type that the policy computes in."""
    from klamp.lab.models import model_path

    c, dtype = config.teacher, "bfloat16" if config.run.gpus > 1 else config.model.dtype
    if not c.there or c.teacher_url is None:
        return []
    limit = "" if c.teacher_prompt else f" --max-model-len {longest + config.rollout.max_completion_length + 1}"
    name = c.teacher_name or ""
    model = f"{shlex.quote(model_path(name))} --served-model-name {shlex.quote(name)}" if name else "MODEL"
    port, head = urlsplit(c.teacher_url).port or 80, max(20, c.head_size or 0)
    server = f"vllm serve {model} --port {port} --dtype {dtype}{limit} --max-logprobs {head}"
    return [f"{server} &   # on GPUs of its own, at {c.teacher_url}"]


def _trl(words: list[str], config: TrainConfig, shape: Shape | None, longest: int) -> tuple[Load | None, list[str]]:
    """Half of the GPUs train, by DeepSpeed, the other half serve vLLM; one alone does both."""
    from klamp.lab.models import model_path, shape_of

    gpus, prompts = config.run.gpus, config.rollout.prompts_per_step
    training = max((n for n in range(1, gpus // 2 + 1) if prompts % n == 0), default=1)
    teacher_shape = shape_of(config.teacher.teacher_model) if config.teacher.teacher_model else None
    load = None
    if shape is not None:
        other = 0 if teacher_shape is None else teacher_shape.parameters
        load = load_of(config, shape, gpus=training, prompt=longest, apart=gpus > 1, teacher=other)
        sizes = sizes_of(load)
        parts = config.optim.gradient_accumulation_steps * load.share // sizes.micro
        words += ["--gradient_accumulation_steps", str(parts)]
        words += ["--gradient_checkpointing", str(config.model.gradient_checkpointing or sizes.checkpointing).lower()]
    if gpus == 1:
        return load, [shlex.join(["klamp", "train", *words, "--sampler", "vllm"])]
    if config.model.dtype == "bfloat16" and not config.model.lora_r:
        words += ["--dtype", "float32"]  # DeepSpeed keeps float32 copies itself, and computes in bfloat16
    serving = 1 if shape is None else spread(shape, gpus // 2)[-1]  # vLLM has several copies of experts' models alone
    server = f"--host {HOST} --port {PORT} --tensor_parallel_size {serving} --data_parallel_size 1"
    launch = f"--num_processes {training} --num_machines 1 --use_deepspeed --zero_stage 2 --mixed_precision bf16"
    first, last = (",".join(map(str, indices)) for indices in (range(training), range(gpus - serving, gpus)))
    return load, [
        f"CUDA_VISIBLE_DEVICES={last} trl vllm-serve --model {shlex.quote(model_path(config.model.model))} {server} "
        f"--max_model_len {longest + config.rollout.max_completion_length} &",
        f"CUDA_VISIBLE_DEVICES={first} accelerate launch {launch} -m klamp.cli train {shlex.join(words)} "
        f"--sampler_url http://{HOST}:{PORT}",
    ]
