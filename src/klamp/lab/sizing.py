"""Estimates of how much a GPU computes and keeps at once, each with its reason; none of them changes a loss."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import NamedTuple

from klamp.errors import ConfigError
from klamp.lab.config import TrainConfig, reference_kind

GB = 1e9
MIXED, ALONE, ENGINE = 16, 4, 2
"""Bytes of a trained parameter (float32 weight, gradient, two moments of Adam), of a frozen one, of an engine's."""
LAYER, LOGIT = 34, 12
"""Bytes for backward of a token in a layer, per hidden unit (bfloat16, attention never held); of a logit, its float32
copy and gradient. The first: Korthikanti et al. 2022, section 4.1, without the scores of attention."""
SPARE = 0.1  # of a GPU's memory: CUDA itself, buffers of communication, fragments
ASLEEP, BUFFER = 2.0, 2.2
"""GB that verl's vLLM keeps while it sleeps (graphs and context), and of the buffer that new weights come through."""


class Shape(NamedTuple):
    """What of a model decides its memory."""

    parameters: int
    layers: int
    hidden: int
    vocabulary: int
    heads: int


class Load(NamedTuple):
    """What a run asks of its GPUs."""

    shape: Shape
    gpus: int  # that the weights are divided over
    together: int  # GPUs of one machine, over which an engine can be divided
    memory: float  # GB of a GPU
    tokens: int  # of the longest completion with its prompt
    share: int  # completions of a step on each GPU
    adapter: bool
    frozen: int  # parameters of a reference and a teacher beside
    apart: bool  # whether the engine has GPUs of its own


class Sizes(NamedTuple):
    """What was chosen, whether it fits, and the amounts in GB that decided it."""

    micro: int  # completions at once
    checkpointing: bool
    offload: bool  # whether what is trained waits in the machine's memory while an engine samples
    engine_share: float  # of a GPU's memory
    tensor_parallel: int  # GPUs that hold an engine's weights together
    fits: bool
    state: float  # weights, gradients and moments on a GPU
    left: float  # of a GPU for completions
    completion: float  # of one of them
    spared: float  # of a completion by checkpointing
    gathered: float  # what FSDP holds whole
    sync: float  # of a GPU while new weights travel
    machine: float  # of a machine's memory


def started_processes() -> int:
    """The processes that a launcher has started; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def part_size(config: TrainConfig, processes: int) -> int:
    """Completions that a process of TRL or verl computes at once."""
    completions = config.rollout.prompts_per_step * config.rollout.num_generations
    parts = config.optim.gradient_accumulation_steps
    if completions % (processes * parts):
        raise ConfigError(
            "the completions of a step do not divide over processes and micro-batches",
            got=f"{completions} completions, {processes} processes, gradient_accumulation_steps={parts}",
            why="every process has the same number of micro-batches of the same size",
            fix=f"make prompts_per_step * num_generations a multiple of {processes * parts}",
        )
    return completions // (processes * parts)


def load_of(config: TrainConfig, shape: Shape, *, gpus: int, prompt: int, apart: bool, teacher: int = 0) -> Load:
    """The load of a run on the GPUs that train it, with room for prompts of so many tokens."""
    completions = config.rollout.prompts_per_step * config.rollout.num_generations
    return Load(
        shape=shape,
        gpus=gpus,
        together=config.run.gpus,
        memory=config.run.gpu_memory,
        tokens=prompt + config.rollout.max_completion_length,
        share=max(1, completions // (gpus * config.optim.gradient_accumulation_steps)),
        adapter=config.model.lora_r > 0,
        frozen=shape.parameters * (reference_kind(config) == "frozen") + teacher,
        apart=apart,
    )


def sizes_of(load: Load) -> Sizes:
    shape, billions = load.shape, load.shape.parameters / GB
    if load.apart:  # ZeRO-2: weights, reference and teacher whole, in bfloat16
        state, frozen = billions * (2 + (0 if load.adapter else 14 / load.gpus)), 2 * load.frozen / GB
    else:  # the reference is offloaded
        state, frozen = billions * (ALONE if load.adapter else MIXED) / load.gpus, 0
    offload, usable = not load.apart and state > load.memory / 3, load.memory * (1 - SPARE)
    ends, gathered = 2 * shape.vocabulary * shape.hidden / GB, 0.0
    if not load.apart:  # embedding, head and two layers in bfloat16, and the float32 gradient of the largest
        layer = max(0.0, billions - ends) / shape.layers
        gathered = 2 * (ends + 2 * layer) + (0 if load.adapter else 4 * max(ends, layer))
    left = usable - state - frozen - gathered - (0 if load.apart else ASLEEP)
    awake = usable - state * (not offload)
    logits = LOGIT * shape.vocabulary
    whole, thin = (
        load.tokens * (n * shape.hidden + logits) / GB for n in (LAYER * shape.layers, 2 * shape.layers + LAYER)
    )
    checkpointing = whole > left / 8
    completion = thin if checkpointing else whole
    engine_share = max(0.2, min(0.6, int(20 * awake / load.memory) / 20))
    able, room = spread(shape, load.together), engine_share * load.memory
    parallel = next((n for n in able if ENGINE * billions / n <= room / 2), able[-1])
    shard, engine = billions / load.gpus, ENGINE * billions / parallel
    sync = engine + shard * (ALONE if offload or load.adapter else 12) + 2 * ends + BUFFER
    waits = (ALONE if load.adapter else 12) * shard * offload + ALONE * load.frozen / GB / load.gpus
    return Sizes(
        micro=max(
            (n for n in range(1, load.share + 1) if load.share % n == 0 and n * completion <= left / 2), default=1
        ),
        checkpointing=checkpointing,
        offload=offload,
        engine_share=engine_share,
        tensor_parallel=parallel,
        fits=completion <= left and (load.apart or (engine < room <= awake and sync <= usable)),
        state=state,
        left=left,
        completion=completion,
        spared=whole - thin,
        gathered=gathered,
        sync=sync,
        machine=load.together * (waits + engine * load.adapter),  # beside an adapter vLLM sleeps with its weights there
    )


def reasons(load: Load, sizes: Sizes) -> Iterator[tuple[str, str]]:
    """Each choice, and why, in words."""
    if load.apart:
        beside = f"{load.memory * (1 - SPARE) - sizes.state - sizes.left:.1f} (frozen models)"
    else:
        beside = f"{sizes.gathered:.1f} (what FSDP gathers), {ASLEEP:g} (vLLM asleep: no weights, no cache)"
    yield (
        f"{sizes.micro} of {load.share} completions at once",
        f"one takes {sizes.completion:.1f} GB ({load.tokens:,} tokens); of {load.memory:g} GB less {sizes.state:.1f} "
        f"(weights, gradients, Adam), {beside}, {load.memory * SPARE:.0f} (spare), {sizes.left:.1f} are left, half of "
        "which are planned with",
    )
    on = "on" if sizes.checkpointing else "off"
    yield f"gradient checkpointing {on}", f"it spares {sizes.spared:.1f} GB a completion, and computes layers twice"
    if not load.apart:
        where = "offloaded" if sizes.offload else "on the GPU"
        yield f"weights and optimizer {where} while sampling", f"{sizes.state:.0f} GB of each GPU"
        if load.frozen:
            yield "reference offloaded", f"{ALONE * load.frozen / load.gpus / GB:.1f} GB, needed once a step"
        engine = ENGINE * load.shape.parameters / sizes.tensor_parallel / GB
        spent = f"{sizes.engine_share:g} of the memory for vLLM, an engine's weights divided by {sizes.tensor_parallel}"
        yield spent, f"{engine:.1f} GB, and at least as much is to be left for its cache"
        yield "new weights for vLLM", f"{sizes.sync:.0f} GB of a GPU at the peak, with what trains beside it"
        if sizes.machine:
            yield f"{sizes.machine:.1f} GB of each machine's own memory", "for all that is offloaded"
    if sizes.fits and sizes.completion > sizes.left / 2:
        yield "this is tight", "one completion takes more than half of what is left: try two steps before the run"
    if not sizes.fits:
        yield "this is likely out of memory", f"take {_way_out(load)}"


def _way_out(load: Load) -> str:
    others = "an adapter (lora_r), or shorter completions"
    if load.apart:
        return f"more GPUs, {others}, or verl, which divides all weights"
    enough = next((n for n in range(2, 17) if sizes_of(load._replace(gpus=n * load.gpus)).fits), 0)
    more = f"{enough * load.gpus} GPUs in all (gpus, machines)" if enough else "more memory in each"
    return f"{more}, {others}. Not tried: verl's offload_policy (strategy fsdp2) trains from the machine's memory"


def spread(shape: Shape, gpus: int) -> list[int]:
    """Over how many of some GPUs an engine can divide a model's attention, the fewest first."""
    return [n for n in range(1, gpus + 1) if gpus % n == shape.heads % n == 0]
