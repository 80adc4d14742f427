"""How much a GPU computes and keeps at once: a part of a step, checkpointing, offloading, the engine's share of memory.

Estimates by arithmetic, for whoever has to begin somewhere; none of them changes a loss. Each is told with its reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from klamp.training.config import TrainConfig, reference_kind

GB = 1e9
MIXED, ALONE, ENGINE = 16, 4, 2
"""Bytes of a trained parameter (float32 weight, gradient, two moments of Adam), of a frozen one, of an engine's."""
LAYER, LOGIT = 34, 12
"""Bytes for backward of a token in a layer, per hidden unit (bfloat16, attention never held); of a logit, its float32
copy and gradient. The first: Korthikanti et al. 2022, section 4.1, without the scores of attention."""
SPARE = 0.1
"""Of a GPU's memory: CUDA itself, buffers of communication, fragments."""


class Shape(NamedTuple):
    """What of a model decides its memory."""

    parameters: int
    layers: int
    hidden: int
    vocabulary: int
    heads: int


class Load(NamedTuple):
    """What a run asks of its GPUs: `share` completions of a step from each, of up to `tokens` with their prompts.

    The weights are divided over `gpus` of `memory` GB. An engine is `apart`, on GPUs of its own, or shares them, over
    up to `together` of one machine. `frozen`: parameters of a reference and a teacher beside.
    """

    shape: Shape
    gpus: int
    together: int
    memory: float
    tokens: int
    share: int
    adapter: bool
    frozen: int
    apart: bool


class Sizes(NamedTuple):
    """What was chosen: completions at once, what waits in the machine's memory while an engine samples, its share of
    the GPU's and how many hold its weights together; whether it fits; and the amounts in GB that decided it.
    """

    micro: int
    checkpointing: bool
    offload: bool
    engine_share: float
    tensor_parallel: int
    fits: bool
    state: float
    left: float
    each: float
    spared: float


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
    """Choose sizes for a load."""
    shape, billions = load.shape, load.shape.parameters / GB
    if load.apart:  # ZeRO-2: weights, reference and teacher whole, in bfloat16
        state, frozen = billions * (2 + (0 if load.adapter else 14 / load.gpus)), 2 * load.frozen / GB
    else:  # the reference is offloaded
        state, frozen = billions * (ALONE if load.adapter else MIXED) / load.gpus, 0
    offload = not load.apart and state > load.memory / 3
    left = load.memory * (1 - SPARE) - state - frozen
    logits = LOGIT * shape.vocabulary
    kept, thin = (
        load.tokens * (n * shape.hidden + logits) / GB for n in (LAYER * shape.layers, 2 * shape.layers + LAYER)
    )
    checkpointing = kept > left / 8
    each = thin if checkpointing else kept
    engine_share = max(0.2, min(0.6, int(20 * (left + state * offload) / load.memory) / 20))
    able, room = spread(shape, load.together), engine_share * load.memory
    parallel = next((n for n in able if ENGINE * billions / n <= room / 2), able[-1])
    return Sizes(
        micro=max((n for n in divisors(load.share) if n * each <= left / 2), default=1),
        checkpointing=checkpointing,
        offload=offload,
        engine_share=engine_share,
        tensor_parallel=parallel,
        fits=each <= left and (load.apart or ENGINE * billions / parallel < room),
        state=state,
        left=left,
        each=each,
        spared=kept - thin,
    )


def reasons(load: Load, sizes: Sizes) -> Iterator[tuple[str, str]]:
    """Each choice, and why, in words."""
    yield (
        f"{sizes.micro} of {load.share} completions at once",
        f"one takes {sizes.each:.1f} GB ({load.tokens:,} tokens); of {load.memory:g} GB less {sizes.state:.1f} "
        f"(weights, gradients, Adam), {load.memory * (1 - SPARE) - sizes.state - sizes.left:.1f} (frozen models), "
        f"{load.memory * SPARE:.0f} (spare), {sizes.left:.1f} are left, half of which are planned with",
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
    if not sizes.fits:
        verl = ", or verl, which divides all weights" if load.apart else ""
        yield "this is likely out of memory", f"take more GPUs, an adapter (lora_r), or shorter completions{verl}"


def divisors(number: int) -> list[int]:
    """The divisors of a number, the smallest first."""
    return [n for n in range(1, number + 1) if number % n == 0]


def spread(shape: Shape, gpus: int) -> list[int]:
    """Over how many of some GPUs an engine can divide a model's attention, the fewest first."""
    return [n for n in divisors(gpus) if shape.heads % n == 0]
