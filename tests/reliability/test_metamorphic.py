"""What may not change the loss, or changes it in a known way: padding, order, micro-batches, masked tokens, beta.

The objective is drawn as a whole: surrogate, reduction, estimator, gradient, horizon, placement, off-policy weights,
clip, tokens without a KL, weights of sequences. What is padded in is NaN.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, get_args

import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.batches import changed, flat_batch, mapped, objective_of, read, rows_of
from tests.reliability.drawn import examples
from torch import Tensor

from klamp.core.masking import Totals, masked_sum
from klamp.core.objective import Objective, SurrogateName, grpo_loss
from klamp.core.term import KLTerm, carries_kl, measure, sequence_gate_kl
from klamp.core.types import Batch, Reduction
from klamp.errors import ConfigError
from klamp.hosts.common.coefficient import KL_MASK, batch_of, gated_penalty

GROUP = 2
LENGTH = 9

terms = st.fixed_dictionaries(
    {
        "value": st.sampled_from(["k1", "k2", "k3", "abs", "exact"]),
        "gradient": st.sampled_from(["reverse", "forward", "own", "none"]),
        "horizon": st.sampled_from(["token", "sequence"]),
        "placement": st.sampled_from(["loss", "loss", "advantage", "reward"]),
        "off_policy": st.sampled_from(["none", "token", "sequence"]),
        "max_weight": st.sampled_from([None, 2.0]),
        "max_log_ratio": st.sampled_from([None, 0.5]),
        "clip_method": st.sampled_from(["none", "hard", "soft"]),
        "clip_level": st.sampled_from(["group", "batch"]),
        "clip_unit": st.sampled_from(["token", "sequence"]),
        "clip_threshold": st.sampled_from([0.0, 0.1, 2.0]),
        "normalizer": st.sampled_from([None, *get_args(Reduction)]),
    }
)
objectives = st.builds(
    lambda term, **rest: (term, rest),
    terms,
    surrogate=st.sampled_from(get_args(SurrogateName)),
    reduction=st.sampled_from(get_args(Reduction)),
    beta=st.sampled_from([0.04, 1.0, 30.0]),
)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Batch, Objective]:
    """A batch of whole groups with everything in it, and an objective that can be computed of it."""
    term, rest = draw(objectives)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    shape = (GROUP * draw(st.integers(1, 3)), draw(st.integers(1, 5)))

    def uniform(*size: int) -> Tensor:
        return torch.rand(*size, generator=generator, dtype=torch.float64)

    mask = uniform(*shape) > draw(st.sampled_from([0.0, 0.3, 0.7]))
    mask[0, -1] = True
    columns: dict[str, Any] = {
        name: -0.05 - 2 * uniform(*shape)
        for name in ("policy_logprobs", "old_logprobs", "ref_logprobs", "sampler_logprobs")
    }
    columns |= {name: uniform(*shape) for name in ("exact_kl", "exact_kl_forward")}
    columns["advantages"] = uniform(*shape) - 0.5 if draw(st.booleans()) else uniform(shape[0]) - 0.5
    if draw(st.booleans()):
        columns["kl_mask"] = (uniform(*shape) > 0.3) | ~mask
    if draw(st.booleans()):
        columns["kl_weight"] = 4 * uniform(shape[0])
    batch = flat_batch(mask=mask, reference_length=1 + uniform(shape[0]), group_size=GROUP, **columns)
    try:
        objective = objective_of(kl=KLTerm(**term), max_length=LENGTH, **rest)
        grpo_loss(batch, objective)
    except ConfigError:
        assume(False)
    return batch, objective


def measured(batch: Batch, objective: Objective, totals: Totals | None = None) -> tuple[Tensor, Tensor]:
    """The loss, and its gradient by the policy's log-probabilities and by the exact KL: [B, T, 3]."""
    names = ("policy_logprobs", "exact_kl", "exact_kl_forward")
    values = (batch.policy_logprobs, read(batch, "exact_kl"), read(batch, "exact_kl_forward"))
    leaves = {name: x.detach().requires_grad_(True) for name, x in zip(names, values, strict=True)}
    loss = grpo_loss(changed(batch, **leaves), objective, totals=totals).loss
    slopes = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return loss.detach(), torch.stack(slopes, -1)


def close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-9, atol=1e-12)


def each(batch: Batch, per_row: Any, per_token: Any) -> Batch:
    """A batch with each of its tensors changed: those of tokens by one function, those of sequences by another."""
    return mapped(batch, lambda x: per_token(x) if x.ndim == 2 else per_row(x))


def spread(x: Tensor, columns: Sequence[int], width: int) -> Tensor:
    """The columns of a tensor at other places of a wider one; what is between them is NaN, or False."""
    found = torch.full((x.shape[0], width), math.nan if x.is_floating_point() else 0, dtype=x.dtype)
    found[:, columns] = x
    return found


def shuffled(batch: Batch, data: st.DataObject) -> list[int]:
    """A new order of the rows: of the groups, and of the completions in each."""
    groups = data.draw(st.permutations(range(len(batch.mask) // GROUP)))
    return [GROUP * group + i for group in groups for i in data.draw(st.permutations(range(GROUP)))]


@given(case=cases(), data=st.data())
@examples(60)
def test_masked_tokens_at_any_place_change_nothing(case: tuple[Batch, Objective], data: st.DataObject) -> None:
    batch, objective = case
    tokens = batch.mask.shape[1]
    width = tokens + data.draw(st.integers(0, 4))
    columns = sorted(data.draw(st.permutations(range(width)))[:tokens])
    loss, slope = measured(batch, objective)
    wide = each(batch, lambda x: x, lambda x: spread(x, columns, width))
    again, wide_slope = measured(wide, objective)
    assert close(again, loss) and close(wide_slope[:, columns], slope)
    added = sorted(set(range(width)) - set(columns))
    assert (wide_slope[:, added] == 0).all()


@given(case=cases(), data=st.data())
@examples(50)
def test_micro_batches_add_up_to_the_whole(case: tuple[Batch, Objective], data: st.DataObject) -> None:
    batch, objective = case
    rows = len(batch.mask)
    kl_mask = batch.mask if read(batch, "kl_mask") is None else batch.mask & read(batch, "kl_mask")
    totals = Totals(rows, max(1, int(batch.mask.sum())), max(1, int(kl_mask.sum())))
    if objective.terms[0].term.clip_method != "none":
        batch = changed(batch, gate_kl=sequence_gate_kl(measure(batch, objective.terms[0].term)))
    cuts = [0, *sorted(data.draw(st.sets(st.integers(1, rows - 1), max_size=3))), rows]
    order = data.draw(st.permutations(range(rows)))
    parts = [measured(rows_of(batch, order[a:b]), objective, totals) for a, b in itertools.pairwise(cuts)]
    loss, slope = measured(batch, objective)
    assert close(torch.stack([part[0] for part in parts]).sum(), loss)
    assert close(torch.cat([part[1] for part in parts]), slope[list(order)])


@given(case=cases(), factor=st.sampled_from([0.5, 2.0, 8.0]))
@examples(30)
def test_the_kl_part_grows_with_beta_and_nothing_else_does(case: tuple[Batch, Objective], factor: float) -> None:
    batch, objective = case
    if objective.terms[0].term.placement == "advantage":  # the bounds of the ratio are not linear in the advantage
        objective = replace(objective, surrogate="score_function")
    parts = [measured(batch, objective.weighted(beta * objective.beta)) for beta in (0, 1, factor)]
    (bare, bare_slope), (one, one_slope), (more, more_slope) = parts
    assert close(more - bare, factor * (one - bare))
    assert torch.allclose(more_slope - bare_slope, factor * (one_slope - bare_slope), rtol=1e-8, atol=1e-11)


def _placed(x: Tensor, *, columns: list[int], rows: list[int], width: int) -> Tensor:
    return spread(x, columns, width)[rows]


@given(case=cases(), data=st.data())
@examples(30)
def test_the_penalty_of_hosts_is_that_of_the_objective(case: tuple[Batch, Objective], data: st.DataObject) -> None:
    """A host averages over the tokens that are trained on; klamp's penalty makes that the mean over those with a KL."""
    batch, objective = case
    term = objective.terms[0].term
    assume(term.value != "exact" and term.placement == "loss")
    tokens = batch.mask.shape[1]
    width = tokens + data.draw(st.integers(0, 3))
    columns, order = sorted(data.draw(st.permutations(range(width)))[:tokens]), shuffled(batch, data)
    gate = sequence_gate_kl(measure(changed(batch, exact_kl=None, kl_weight=None), term))
    outcomes = []
    for wide, rows in ((range(tokens), list(range(len(order)))), (columns, order)):
        place = partial(_placed, columns=list(wide), rows=rows, width=width if wide is columns else tokens)
        policy = place(batch.policy_logprobs).requires_grad_(True)
        inputs = {
            "completion_mask": place(batch.mask).long(),
            "advantages": torch.zeros(len(rows)),
            "ref_per_token_logps": place(read(batch, "ref_logprobs")),
            "old_per_token_logps": place(batch.old_logprobs),
            "sampling_per_token_logps": place(read(batch, "sampler_logprobs")),
            "klamp_gate_kl": gate[rows],
            "klamp_reference_length": batch.reference_length[rows],
            KL_MASK: None if read(batch, "kl_mask") is None else place(read(batch, "kl_mask")),
        }
        found = batch_of(inputs, policy)
        penalty = gated_penalty(found, term)
        mean = masked_sum(penalty, found.mask) / found.mask.sum()
        (slope,) = torch.autograd.grad(mean, policy)
        outcomes.append((mean.detach(), slope, found))
    (mean, slope, plain), (again, moved, _) = outcomes
    assert close(again, mean) and close(moved[:, columns], slope[order])
    own = objective_of(surrogate="score_function", reduction="token_mean", beta=1.0, kl=replace(term, normalizer=None))
    if carries_kl(plain).any():
        assert torch.allclose(grpo_loss(plain, own).loss.detach(), mean, rtol=1e-6)  # a quotient in float32
