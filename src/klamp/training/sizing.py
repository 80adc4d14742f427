"""How much a GPU computes and keeps at once: a part of a step, checkpointing, offloading, the engine's share of memory.

Estimates by arithmetic, for whoever has to begin somewhere; none of them changes a loss. Each is told with its reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from klamp.training.config import TrainConfig, reference_kind

GB = 1e9
MIXED, ALONE, REFERENCE = 16, 4, 4
"""Bytes of a trained parameter (float32 weight, gradient, two moments of Adam), of a frozen one, of a reference's."""
ENGINE = 2
"""Bytes of a parameter in the engine that samples, bfloat16."""
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
    """Of attention; an engine divides them over its GPUs evenly."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """What a run asks of its GPUs."""

    shape: Shape
    gpus: int
    """That share the weights."""
    together: int
    """GPUs of one machine, over which an engine may be spread."""
    memory: float
    """Of a GPU, in GB."""
    tokens: int
    """Of the longest prompt with the longest completion."""
    share: int
    """Completions of a step, or of a part of it that was asked for, for each GPU."""
    adapter: bool
    reference: bool
    """Whether the reference is a model of its own."""
    apart: bool
    """Whether the engine has GPUs of its own, so that nothing makes room for it."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What was chosen, and the amounts in GB of one GPU that decided it."""

    micro: int
    """Completions at once."""
    checkpointing: bool
    offload: bool
    """Whether weights and optimizer wait in the machine's memory while the engine samples."""
    offload_reference: bool
    engine_share: float
    tensor_parallel: int
    """GPUs that hold one engine's weights together."""
    state: float
    reference: float
    left: float
    """For the passes of an update."""
    each: float
    """Of a completion, in them."""
    engine: float
    """Weights of an engine."""
    spared: float
    """Of a completion, by checkpointing."""
    fits: bool
    """Whether one completion has room, and an engine with its weights."""


def load_of(config: TrainConfig, shape: Shape, *, gpus: int, prompt: int, apart: bool) -> Load:
    """The load of a run.

    Args:
        config: of the run.
        shape: of its model.
        gpus: that train it, on all machines.
        prompt: tokens of the longest prompt that there has to be room for.
        apart: whether the engine has GPUs of its own.
    """
    completions = config.rollout.prompts_per_step * config.rollout.num_generations
    return Load(
        shape=shape,
        gpus=gpus,
        together=config.run.gpus,
        memory=config.run.gpu_memory,
        tokens=prompt + config.rollout.max_completion_length,
        share=max(1, completions // (gpus * config.optim.gradient_accumulation_steps)),
        adapter=config.model.lora_r > 0,
        reference=reference_kind(config) == "frozen",
        apart=apart,
    )


def sizes_of(load: Load) -> Sizes:
    """Choose sizes for a load.

    Args:
        load: the model, its lengths and its GPUs.
    """
    shape, room = load.shape, load.memory * (1 - SPARE)
    state = shape.parameters * (ALONE if load.adapter else MIXED) / load.gpus / GB
    reference = shape.parameters * REFERENCE / load.gpus / GB if load.reference else 0.0
    offload, away = (not load.apart and x > load.memory / n for x, n in ((state, 3), (reference, 50)))
    left = room - state - (0.0 if away else reference)
    logits = load.tokens * LOGIT * shape.vocabulary / GB
    kept = load.tokens * LAYER * shape.layers * shape.hidden / GB + logits
    thin = load.tokens * (2 * shape.layers + LAYER) * shape.hidden / GB + logits
    checkpointing = kept > left / 8
    each = thin if checkpointing else kept
    free = left + (state if offload else 0.0)
    share = max(0.2, min(0.6, int(20 * free / load.memory) / 20))
    weights = ENGINE * shape.parameters / GB
    able = spread(shape, load.together)
    parallel = next((n for n in able if weights / n <= share * load.memory / 2), able[-1])
    return Sizes(
        micro=max((n for n in divisors(load.share) if n * each <= left / 2), default=1),
        checkpointing=checkpointing,
        offload=offload,
        offload_reference=away,
        engine_share=share,
        tensor_parallel=parallel,
        state=state,
        reference=reference,
        left=left,
        each=each,
        engine=weights / parallel,
        spared=kept - thin,
        fits=each <= left and (load.apart or weights / parallel < share * load.memory),
    )


def reasons(load: Load, sizes: Sizes) -> Iterator[tuple[str, str]]:
    """Each choice, and why, in words."""
    kept = load.memory * (1 - SPARE) - sizes.left
    yield (
        f"{sizes.micro} of {load.share} completions at once",
        f"one takes {sizes.each:.1f} GB ({load.tokens:,} tokens); {sizes.left:.0f} of {load.memory:g} GB are left "
        f"beside {kept:.0f} GB of weights and optimizer, and half of that is planned with",
    )
    yield (
        f"gradient checkpointing {'on' if sizes.checkpointing else 'off'}",
        f"it spares {sizes.spared:.1f} GB a completion, and computes each layer twice",
    )
    if not load.apart:
        yield from _shared(load, sizes)
    if not sizes.fits:
        yield "this is likely out of memory", "take more GPUs, an adapter (lora_r), or shorter completions"


def _shared(load: Load, sizes: Sizes) -> Iterator[tuple[str, str]]:
    """What makes room for an engine on the same GPUs."""
    yield (
        f"weights and optimizer {'offloaded' if sizes.offload else 'on the GPU'} while sampling",
        f"{sizes.state:.0f} GB are {'more' if sizes.offload else 'less'} than a third of the memory",
    )
    if load.reference:
        where = "offloaded" if sizes.offload_reference else "on the GPU"
        yield f"reference {where}", f"{sizes.reference:.1f} GB, needed once a step"
    yield (
        f"{sizes.engine_share:g} of the memory for vLLM, each engine on {count(sizes.tensor_parallel, 'GPU')}",
        f"its weights take {sizes.engine:.1f} GB of a GPU, and at least as much is to be left for its cache",
    )


def count(number: int, noun: str) -> str:
    """A number with its noun."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def spread(shape: Shape, gpus: int) -> list[int]:
    """Over how many of some GPUs an engine can divide a model, the fewest first."""
    return [n for n in divisors(gpus) if shape.heads % n == 0]


def divisors(number: int) -> list[int]:
    """The divisors of a number, the smallest first."""
    return [n for n in range(1, number + 1) if number % n == 0]
