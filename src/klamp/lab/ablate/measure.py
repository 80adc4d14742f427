"""Measures how far a trained policy is from the model that it started from, by exact KLs.

Every run is measured against its own starting model, whatever its reference was. Prompts and draws are the same in
every run, so that arms differ by their policies and not by luck.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch

from klamp.core.masking import masked_sum
from klamp.core.types import Direction
from klamp.lab.ablate.plan import KL_PROMPTS
from klamp.lab.ablate.results import Outcome
from klamp.lab.anchors import AdapterOffReference, LocalReference
from klamp.lab.config import TrainConfig
from klamp.lab.evaluation import evaluate as scores_in
from klamp.lab.folders import newest_policy
from klamp.lab.models import device_of, load_model, load_tokenizer, max_length, with_adapter
from klamp.lab.rollouts import completed
from klamp.lab.sampling import uniform_numbers
from klamp.lab.setup import Context, load_prompts
from klamp.lab.tasks.base import Example
from klamp.scoring.completions import select
from klamp.scoring.model_parts import check_same_vocabulary
from klamp.scoring.probe import probe
from klamp.scoring.scorer import Ask, ExactKL, Scorer

COMPLETIONS = 2
"""Completions per held-out prompt and direction."""
SEED = 20_240_213
"""Seed of the draws, whatever the seed of the run."""


def measure(config: TrainConfig, folder: Path, *, prompts: int | None = None) -> dict[str, float]:
    """The numbers of the newest checkpoint in a run's folder (without one, of the starting model); see `numbers_of`."""
    return numbers_of(measured(config, newest_policy(folder)), prompts=prompts)


@torch.no_grad()
def numbers_of(context: Context, *, prompts: int | None = None) -> dict[str, float]:
    """The exact KL in both directions, per token and per completion, with reward, length and entropy of the policy.

    Equation, with d_t the exact KL over the vocabulary at the t-th prefix (source: arXiv:2504.10637)::

        reverse   per sequence E_{y ~ policy} sum_t d_t(policy || start), per token that over E_{y ~ policy} |y|
        forward   per sequence E_{y ~ start}  sum_t d_t(start || policy), per token that over E_{y ~ start}  |y|

    Unbiased per sequence, up to max_completion_length at the temperature of training, on at most `prompts` held-out
    prompts of the trained skill (None: all). `context`: see `measured`.
    """
    held_out = context.task.evaluation[context.task.rl_skill][:prompts]
    reverse, forward = (_sums(context, held_out, direction) for direction in ("reverse", "forward"))
    return {
        "reward": reverse["reward"] / reverse["sequences"],
        "length": reverse["tokens"] / reverse["sequences"],
        "entropy": reverse["entropy"] / reverse["tokens"],
        "kl/reverse": reverse["kl"] / reverse["tokens"],
        "kl/reverse_sequence": reverse["kl"] / reverse["sequences"],
        "kl/forward": forward["kl"] / forward["tokens"],
        "kl/forward_sequence": forward["kl"] / forward["sequences"],
    }


def _sums(context: Context, prompts: Sequence[Example], direction: Direction) -> Mapping[str, float]:
    """Sums over the completions of some prompts, in batches of the size of training; KL and entropy in nats."""
    policy, start = context.scorer, cast(LocalReference, context.reference)
    config, every = context.config, [example for example in prompts for _ in range(COMPLETIONS)]
    temperature, length = config.rollout.temperature, config.rollout.max_completion_length
    uniforms = uniform_numbers(SEED, int(direction == "forward"), len(every), length)
    size = config.rollout.prompts_per_step * config.rollout.num_generations // config.optim.gradient_accumulation_steps
    sums: defaultdict[str, float] = defaultdict(float)
    for first in range(0, len(every), max(1, size)):
        rows = slice(first, first + max(1, size))
        texts, sampler = [e.prompt for e in every[rows]], None if direction == "reverse" else start
        completions = select(completed(context, texts, uniforms=uniforms[rows], reference=sampler), slice(None))
        keep = torch.ones(len(texts), dtype=torch.bool, device=context.device)
        theirs = start.score(completions, temperature=temperature, keep=keep).predictions
        assert theirs is not None, "it was asked to keep them"
        exact = ExactKL(rows=keep, ref=theirs, directions=(direction,))
        ours = policy(completions, Ask(temperature=temperature, entropy=True, exact=exact))
        sums["sequences"] += len(texts)
        sums["tokens"] += int(completions.mask.sum())
        for name, nats in (("kl", ours.exact), ("kl", ours.exact_forward), ("entropy", ours.entropy)):
            sums[name] += 0.0 if nats is None else float(masked_sum(nats.double(), completions.mask))
        if direction == "reverse":
            answers = zip(every[rows], completions.texts(context.tokenizer), strict=True)
            sums["reward"] += sum(context.task.score(example, text) for example, text in answers)
    return sums


def measured(config: TrainConfig, weights: str | Path | None) -> Context:
    """A context whose policy is a trained one, and whose reference is the model that its training started from.

    Temperature and length are those of training; the support is not cut. `weights` are the policy's or its adapter's;
    None: the policy is the starting model. With an adapter the start is the policy with it switched off.
    """
    device, model = device_of(config), config.model
    start: Any = load_model(model.model, model.dtype).to(device)  # pyright: ignore[reportArgumentType]
    policy = start
    if model.lora_r:
        policy = with_adapter(start, model, None if weights is None else Path(weights)).to(device).eval()
    elif weights is not None:
        policy = load_model(str(weights), model.dtype).to(device)  # pyright: ignore[reportArgumentType]
        check_same_vocabulary(start, policy, larger=True)  # padding that a run cut
    traits = probe(policy)
    reference = AdapterOffReference(policy, traits=traits) if model.lora_r else LocalReference(start)
    tokenizer = load_tokenizer(model.tokenizer or model.model)
    return Context(
        config=replace(config, rollout=replace(config.rollout, top_p=1.0, top_k=0)),
        scorer=Scorer(policy, traits),
        reference=reference,
        tokenizer=tokenizer,
        task=load_prompts(config, tokenizer, longest=max_length(start)),
    )


def evaluate(
    config: TrainConfig, weights: str | Path | None, *, start: bool = True, prompts: int = KL_PROMPTS
) -> Outcome:
    """Score and measure a policy as its run did; see `measured` and `numbers_of`.

    `start`: whether the configuration's model is what the policy started from; without it, no KL and no `before`.
    """
    context = measured(config, weights)
    before, numbers = dict[str, float](), dict[str, float]()
    after = scores_in(context).scores
    if start:
        reference = cast(LocalReference, context.reference)
        with reference.sampling_model():  # switches an adapter off
            before = scores_in(replace(context, scorer=reference.scorer)).scores
        numbers = numbers_of(context, prompts=prompts)
    name, skill, seed = str(weights or config.model.model), context.task.rl_skill, config.run.seed
    return Outcome(run=name, arm=name, seed=seed, rl_skill=skill, before=before, after=after, numbers=numbers)
