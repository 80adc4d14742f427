"""Sequences without a gradient: exactly those that autograd finds none in, and leaving them out changes nothing."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from tests.batches import changed, objective_of, read
from tests.core.test_objective import random_batch

from klamp.core.estimators import exact_kl
from klamp.core.objective import grpo_loss, without_gradient
from klamp.core.term import KLTerm, measure, sequence_gate_kl

PLACEMENTS = ("loss", "reward", "advantage")
CLIPS = ("none", "hard", "soft")
SURROGATES = ("ppo_clip", "cispo", "score_function")
VALUES = (("k3", "reverse"), ("k3", "forward"), ("k2", "own"), ("k3", "none"), ("exact", "reverse"), ("exact", "none"))


def some_batch(seed: int, term: KLTerm, *, excluded: bool = False):
    """Eight sequences: every combination of a zero advantage, no token with a KL, and no token at all or some."""
    parts = [random_batch(seed=seed + i) for i in range(2)]
    columns = {
        name: torch.cat([getattr(p, name).detach() for p in parts])
        for name in ("policy_logprobs", "mask", "advantages")
    }
    columns |= {name: torch.cat([read(p, name) for p in parts]) for name in ("ref_logprobs", "sampler_logprobs")}
    rows = torch.arange(8)
    columns["mask"][rows == 7] = False
    columns["advantages"] = torch.where(rows % 2 == 0, 0.0, columns["advantages"])
    if excluded:
        columns["kl_mask"] = columns["mask"] & (rows % 4 >= 2)[:, None]
    batch = changed(parts[0], old_logprobs=None, gate_kl=None, reference_length=3.0, **columns)
    if term.value == "exact":
        generator = torch.Generator().manual_seed(seed)
        policy, ref = (torch.randn(8, 5, 6, generator=generator, dtype=torch.float64) for _ in range(2))
        policy.requires_grad_(True)
        logprobs = policy.log_softmax(-1)[..., 0]
        batch = changed(batch, policy_logprobs=logprobs, exact_kl=exact_kl(policy, ref))
        inputs = policy
    else:
        inputs = batch.policy_logprobs.requires_grad_(True)
    if term.clip_method != "none":
        gate = sequence_gate_kl(measure(changed(batch, exact_kl=None), term)).detach()
        batch = changed(batch, gate_kl=gate * torch.where(rows < 4, 1.0, 0.01))
    return batch, inputs


def terms():
    for placement, clip, (value, gradient) in product(PLACEMENTS, CLIPS, VALUES):
        if placement != "loss" and (value, gradient) != ("k3", "reverse"):
            continue
        kind = "k1" if placement != "loss" else value
        yield KLTerm(value=kind, gradient=gradient, placement=placement, clip_method=clip, clip_threshold=0.2)


@pytest.mark.parametrize("surrogate", SURROGATES)
@pytest.mark.parametrize("excluded", [False, True])
def test_a_sequence_is_left_out_exactly_where_autograd_finds_no_gradient(surrogate, excluded):
    checked = {True: 0, False: 0}
    for seed, (term, beta) in enumerate(product(terms(), (0.0, 0.3))):
        batch, inputs = some_batch(seed, term, excluded=excluded)
        objective = objective_of(surrogate=surrogate, beta=beta, kl=term)
        skipped = without_gradient(batch, objective)
        (slope,) = torch.autograd.grad(grpo_loss(batch, objective).loss, inputs)
        zero = (slope.flatten(1) == 0).all(-1)
        assert torch.equal(skipped, zero), (term, beta)
        for flag in (True, False):
            checked[flag] += int((skipped == flag).sum())
    assert min(checked.values()) > 100


def test_a_gradient_per_token_and_nan_are_not_overlooked():
    batch = replace(random_batch(), advantages=torch.zeros(4, 5, dtype=torch.float64))
    assert without_gradient(batch, objective_of()).all()
    one = batch.advantages.clone()
    one[2, 0] = 1e-300
    assert without_gradient(replace(batch, advantages=one), objective_of()).tolist() == [True, True, False, True]
    one[2, 0] = float("nan")
    assert not without_gradient(replace(batch, advantages=one), objective_of())[2]
