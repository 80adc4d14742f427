"""The KL term: whose KL decides its clip, over which sequences, within which bounds."""

from dataclasses import replace

import pytest
import torch
from tests.batches import changed, read
from tests.core.test_objective import random_batch

from klamp.core.clipping import gate_kl
from klamp.core.estimators import ESTIMATORS
from klamp.core.term import KLTerm, gates_on_itself, measure, prepare, sequence_gate_kl


def k3_of(batch):
    """k3 of each sequence."""
    return (ESTIMATORS["k3"].value((batch.policy_logprobs - read(batch, "ref_logprobs")).detach()) * batch.mask).sum(-1)


def of_other(kl):
    """The KL of the other member of each pair."""
    return kl.view(2, 2).flip(-1).reshape(-1)


def test_only_the_gradient_of_the_exact_kl_at_held_prefixes_may_be_gated_by_that_kl_itself():
    assert gates_on_itself("exact", "reverse", "token", "none")
    assert not gates_on_itself("k3", "reverse", "token", "none")
    assert not gates_on_itself("exact", "forward", "token", "none")
    assert not gates_on_itself("exact", "reverse", "sequence", "none")
    assert not gates_on_itself("exact", "reverse", "token", "sequence")


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("level", ["sequence", "group", "batch"])
def test_the_gate_takes_the_exact_kl_at_its_level_and_k3_of_the_others(exact, level):
    batch, term = random_batch(), KLTerm(clip_level=level)
    per_sequence = k3_of(batch)
    if exact:
        batch, term = changed(batch, exact_kl=batch.policy_logprobs**2), replace(term, value="exact")
        per_sequence = (read(batch, "exact_kl").detach() * batch.mask).sum(-1)
        expected = {"sequence": per_sequence, "batch": per_sequence.mean().expand(4)}
        expected["group"] = per_sequence.view(2, 2).mean(-1).repeat_interleave(2)
    else:
        other = of_other(per_sequence)
        expected = {"sequence": other, "group": other, "batch": (per_sequence.sum() - per_sequence) / 3}
    torch.testing.assert_close(sequence_gate_kl(measure(batch, term)), expected[level])
    both = sequence_gate_kl(measure(batch, term), gather=lambda x: torch.cat([x + 5, x]), rank=1)
    assert torch.equal(both, sequence_gate_kl(measure(batch, term))) == (level != "batch")


def test_a_sequences_own_kl_decides_only_where_it_is_exact_and_so_is_the_gradient():
    """A sampled gradient beside a measured exact KL, or an exact term without one: the others decide."""
    batch = random_batch()
    exact = batch.policy_logprobs**2
    measured = (exact.detach() * batch.mask).sum(-1)
    for given, value, own in ((changed(batch, exact_kl=exact), "k3", measured), (batch, "exact", k3_of(batch))):
        torch.testing.assert_close(sequence_gate_kl(measure(given, KLTerm(value=value))), of_other(own))


def test_sequences_whose_kl_was_not_measured_count_in_no_gate():
    """Without a token: a padded row, a truncated completion that is masked."""
    batch = random_batch()
    k3 = k3_of(batch)
    mask = batch.mask & torch.tensor([True, False, True, False])[:, None]
    part = replace(batch, mask=mask, group_size=4)
    found = sequence_gate_kl(measure(part, KLTerm()))
    torch.testing.assert_close(found, torch.stack([k3[2], (k3[0] + k3[2]) / 2, k3[0], (k3[0] + k3[2]) / 2]))
    assert sequence_gate_kl(measure(replace(part, group_size=2), KLTerm()))[0] == 0, "none of the others was measured"


def test_an_infinite_kl_of_ones_own_is_not_in_the_gate():
    infinite = torch.tensor([float("inf"), 1.0, 3.0])
    found = gate_kl(infinite, level="group", group_size=3, own=False)
    assert found.tolist() == [2.0, float("inf"), float("inf")]


def test_the_gate_bounds_the_log_ratio_as_the_penalty_does():
    batch = random_batch()
    batch = changed(batch, ref_logprobs=batch.policy_logprobs.detach() - 9)
    term = KLTerm(clip_method="hard", clip_threshold=0.1, clip_unit="sequence", max_log_ratio=2.0)
    k3 = ESTIMATORS["k3"].value(torch.tensor(2.0, dtype=torch.float64))
    torch.testing.assert_close(sequence_gate_kl(measure(batch, term)), k3 * of_other(batch.mask.sum(-1)).double())


def test_a_kl_that_is_just_the_budget_is_not_over_it():
    kl = torch.tensor([0.1, 0.5, 0.6, 0.7], dtype=torch.float64)
    term = KLTerm(clip_method="hard", clip_threshold=0.5, clip_unit="sequence")
    gate = prepare(random_batch(gate_kl=kl), term).gate
    assert gate is not None
    assert gate.metrics()["kl/over_budget"] == 2 / 4
    assert (gate.factor > 0).tolist() == [False, False, True, True]
