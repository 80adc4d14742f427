"""The enumerable worlds: probabilities that sum to one, tables that line up with prefixes, top-p as defined."""

import itertools

import pytest
import torch

from klamp.errors import ConfigError, ShapeError
from klamp.verify.worlds import (
    Chain,
    Outcomes,
    count_prefixes,
    enumerate_outcomes,
    list_prefixes,
    one_position,
    prefix_probs,
    random_chain,
    truncate_top_p,
)


@pytest.mark.parametrize("eos", [None, 0, 2])
@pytest.mark.parametrize("sampler", ["policy", "other"])
def test_the_probabilities_of_all_completions_sum_to_one(eos, sampler):
    outcomes = enumerate_outcomes(random_chain(1, vocab=3, length=4, eos=eos, sampler=sampler))
    assert outcomes.probs.sum().item() == pytest.approx(1.0, abs=1e-14)
    assert (outcomes.probs > 0).all()


def completions(outcomes: Outcomes) -> list[tuple[int, ...]]:
    return [tuple(token for token in row if token >= 0) for row in outcomes.tokens.tolist()]


def test_completions_are_all_words_that_end_at_eos_or_at_the_last_position():
    words = {w[: w.index(1) + 1] if 1 in w else w for w in itertools.product(range(3), repeat=3)}
    assert sorted(completions(enumerate_outcomes(random_chain(0, vocab=3, length=3, eos=1)))) == sorted(words)


def test_padding_holds_zero_logprobs_in_every_column():
    outcomes = enumerate_outcomes(random_chain(0, vocab=3, length=3, sampler="other"))
    padding = ~outcomes.mask
    assert padding.any()
    for field in (outcomes.policy_logprobs, outcomes.ref_logprobs, outcomes.sampler_logprobs):
        assert (field[padding] == 0).all()
        assert (field[outcomes.mask] < 0).all()


def test_each_logprob_is_read_from_the_row_of_its_own_prefix():
    chain = random_chain(3, vocab=3, length=3, eos=0, sampler="other")
    rows = {prefix: i for i, prefix in enumerate(list_prefixes(3, 3, eos=0))}
    outcomes = enumerate_outcomes(chain)
    for n, completion in enumerate(completions(outcomes)):
        for t, token in enumerate(completion):
            row = rows[completion[:t]]
            for who in ("policy", "ref", "sampler"):
                expected = torch.log_softmax(chain.logits(who)[row], dim=-1)[token].item()
                assert getattr(outcomes, f"{who}_logprobs")[n, t].item() == pytest.approx(expected, abs=1e-14)
            assert torch.equal(outcomes.policy_logits[n, t], chain.policy_logits[row])
            assert torch.equal(outcomes.ref_logits[n, t], chain.ref_logits[row])


def test_on_policy_the_sampler_is_the_detached_policy():
    outcomes = enumerate_outcomes(random_chain(2))
    assert torch.equal(outcomes.sampler_logprobs, outcomes.policy_logprobs.detach())
    assert outcomes.policy_logprobs.requires_grad
    assert not outcomes.sampler_logprobs.requires_grad
    assert not outcomes.probs.requires_grad


def test_prefix_probabilities_are_sums_over_the_completions_that_pass_through():
    chain = random_chain(4, vocab=3, length=3, sampler="other")
    outcomes = enumerate_outcomes(chain)
    words = completions(outcomes)
    for prefix, prob in zip(list_prefixes(3, 3, eos=0), prefix_probs(chain, "sampler"), strict=True):
        through = [i for i, c in enumerate(words) if len(c) > len(prefix) and c[: len(prefix)] == prefix]
        assert prob.item() == pytest.approx(outcomes.probs[through].sum().item(), abs=1e-14)


def test_prefixes_are_counted_as_they_are_listed():
    for vocab, length, eos in itertools.product((2, 3, 4), (1, 2, 4), (None, 1)):
        assert count_prefixes(vocab, length, eos=eos) == len(list_prefixes(vocab, length, eos=eos))


def test_top_p_keeps_the_smallest_set_that_reaches_the_mass():
    logits = torch.tensor([0.1, 0.5, 0.15, 0.25]).log()
    assert torch.isfinite(truncate_top_p(logits, 0.7)).tolist() == [False, True, False, True]
    assert torch.isfinite(truncate_top_p(logits, 0.76)).tolist() == [False, True, True, True]
    assert torch.isfinite(truncate_top_p(logits, 0.01)).tolist() == [False, True, False, False]
    assert torch.equal(truncate_top_p(logits, 1.0), logits)


def test_completions_that_the_sampler_cannot_produce_are_left_out():
    sampler = truncate_top_p(torch.tensor([0.6, 0.3, 0.1]).log(), 0.8)
    chain = one_position(torch.zeros(3), torch.zeros(3), sampler)
    assert enumerate_outcomes(chain).tokens.flatten().tolist() == [0, 1]
    assert enumerate_outcomes(chain).probs.tolist() == pytest.approx([2 / 3, 1 / 3])
    assert enumerate_outcomes(chain, unreachable=True).tokens.flatten().tolist() == [0, 1, 2]


def test_what_is_no_world_or_cannot_be_enumerated_is_refused():
    with pytest.raises(ShapeError, match="prefixes"):
        Chain(policy_logits=torch.zeros(3, 3), ref_logits=torch.zeros(3, 3), length=3, eos=0)
    with pytest.raises(ConfigError, match="enumerated"):
        random_chain(0, vocab=50, length=6)
    for top_p in (0.0, 1.1):
        with pytest.raises(ConfigError, match="top_p"):
            truncate_top_p(torch.zeros(3), top_p)
