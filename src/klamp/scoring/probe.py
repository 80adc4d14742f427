"""Finds out before a run, by trying on a few tokens, whether a model's head and cache can be used separately.

A model is run both ways on a tiny input, and what does not give the same numbers is not used. Nothing is drawn from
the run's random numbers, and nothing of the model is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from klamp.scoring.completions import Completions, PassPlan, run_rows
from klamp.scoring.model_parts import OpenedModel, Traits, head_of, token_logprobs

SMALL_PARAMETERS = 8
"""So many of the smallest trained tensors have their gradient compared; norms and biases of the first layers."""

APART = PassPlan(shared=False, buckets=[[0, 2], [1, 3]])
TOGETHER = PassPlan(shared=False, buckets=[[0, 1, 2, 3]])
SHARED = PassPlan(shared=True, buckets=[[0, 2], [1, 3]])
"""The plans in which the example's rows are run with their prompts, in two passes or in one, and on their cache."""
LOW_GRADIENT = 0.03
"""Share of its largest entry by which a gradient in bfloat16 may be off, besides the noise that is measured: 0.024 was
seen in all with 28 layers; without the gradient that goes through the cache, 0.21 and more."""


def probe(model: nn.Module) -> Traits:
    """Try out a model and say what it allows; one that raises at any of it is used the plain way.

    The head: whether the last hidden states through it give the model's own log-probabilities. Its cache: whether
    completions of unequal length on the keys and values of left-padded prompts score the same as in one row, and give
    the same gradient in a few small weights; and whether it is made in training mode. What counts as the same is judged
    by how far the plain way moves when its rows are run in one pass instead of two.
    """
    completions, plain = example(model), Traits()
    expected, also = (_logprobs(model, completions, plain, plan) for plan in (APART, TOGETHER))
    close = _bound(model, expected, also)
    head = head_of(OpenedModel(model, plain).causal) is not None
    head = head and _agrees(lambda: _logprobs(model, completions, Traits(head=True), APART), expected, close)
    traits = Traits(head=head)
    with in_mode(model, training=False):
        values = _agrees(lambda: _logprobs(model, completions, traits, SHARED), expected, close)
    trained: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
    weights = sorted(trained, key=Tensor.numel)[:SMALL_PARAMETERS]
    if not values or not weights:
        return replace(traits, sharing="gradient" if values else "no")
    expected, also = (_gradient(model, completions, traits, weights, plan) for plan in (APART, TOGETHER))
    close = _bound(model, expected, also, low=LOW_GRADIENT)
    same = _agrees(lambda: _gradient(model, completions, traits, weights, SHARED), expected, close)
    return replace(traits, sharing="gradient" if same and _caches_in_training(model, completions) else "values")


def example(model: nn.Module) -> Completions:
    """Two prompts of different length with two completions each, the same for every model."""
    device = next(model.parameters()).device
    size = int(model.get_input_embeddings().weight.shape[0])  # pyright: ignore[reportCallIssue]
    drawn = torch.randint(size, (6, 5), generator=torch.Generator().manual_seed(0)).to(device)
    lengths = torch.tensor([4, 2, 3, 1], device=device)
    mask = torch.arange(4, device=device) < lengths[:, None]
    prompt_mask = torch.ones(2, 5, dtype=torch.long, device=device)
    prompt_mask[1, :2] = 0
    return Completions(
        prompt_ids=drawn[:2].repeat_interleave(2, 0),
        prompt_mask=prompt_mask.repeat_interleave(2, 0),
        ids=drawn[2:, :4],
        mask=mask,
        sampler_logprobs=torch.zeros(mask.shape, device=device),
        ended=torch.ones(4, dtype=torch.bool, device=device),
    )


def _scored(model: nn.Module, completions: Completions, traits: Traits, plan: PassPlan) -> Tensor:
    """The log-probabilities of all tokens, in an order that does not depend on the plan."""
    opened = OpenedModel(model, traits)
    rows = torch.arange(len(completions.ids), device=completions.ids.device)
    values, places = run_rows(opened, completions, rows, can_share=plan.shared, plan=plan)
    targets = completions.ids.flatten()[places, None]
    scores = token_logprobs(opened.predictions(values), targets, temperature=1.0)
    return scores.logprobs[places.argsort(), 0]


_logprobs = torch.no_grad()(_scored)


def _gradient(
    model: nn.Module, completions: Completions, traits: Traits, weights: list[Tensor], plan: PassPlan
) -> Tensor:
    with torch.enable_grad():
        total = _scored(model, completions, traits, plan).sum()
        gradients = torch.autograd.grad(total, weights, allow_unused=True)
    pairs = zip(gradients, weights, strict=True)
    return torch.cat([(torch.zeros_like(w) if g is None else g).flatten().float() for g, w in pairs])


def _bound(model: nn.Module, expected: Tensor, also: Tensor, *, low: float = 1e-2) -> float:
    """The largest difference between two results that rounding can explain; below 32 bits `low` of the largest."""
    weight = next(model.parameters())
    whole = weight.dtype in (torch.float32, torch.float64) and not torch.is_autocast_enabled(weight.device.type)
    scale, noise = float(expected.abs().max()), float((also - expected).abs().max())
    return 8 * noise + (1e-5 if whole else low) * scale


def _agrees(attempt: Callable[[], Tensor], expected: Tensor, close: float) -> bool:
    try:
        return bool(((attempt() - expected).abs() <= close).all())
    except Exception:  # models refuse in a dozen ways: unknown arguments, missing caches, other shapes
        return False


@torch.no_grad()
def _caches_in_training(model: nn.Module, completions: Completions) -> bool:
    """Whether a model keeps keys and values in training mode too, which some do in evaluation only."""
    device = completions.ids.device
    opened = OpenedModel(model, Traits())
    with torch.random.fork_rng([device] if device.type == "cuda" else []), in_mode(model, training=True):
        try:
            return opened.run(completions.prompt_ids, completions.prompt_mask, keep=1, use_cache=True)[1] is not None
        except Exception:  # as in _agrees
            return False


@contextmanager
def in_mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """A context in which a model is in training or in evaluation mode."""
    before = model.training
    model.train(training)
    try:
        yield
    finally:
        model.train(before)
