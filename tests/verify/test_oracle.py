"""The enumerated worlds, the oracle against independent mathematics, and the names that it gives to gradients."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from klamp.errors import ConfigError, ShapeError
from klamp.verify.oracle import (
    NOTHING_KNOWN,
    Followed,
    cosine,
    examine,
    expected,
    expected_gradient,
    forward_kl,
    local_kl,
    name_gradient,
    pull_of,
    reverse_kl,
    truths,
    variance,
)
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


def close(actual, target, tolerance=1e-12):
    return torch.allclose(actual, target, rtol=0.0, atol=tolerance)


def log_ratio(y):
    return y.policy_logprobs - y.ref_logprobs


def test_the_kl_of_a_coin_is_the_textbook_formula():
    p, q = 0.3, 0.8
    coin = one_position(*torch.tensor([[p, 1 - p], [q, 1 - q]], dtype=torch.float64).log())
    reverse = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
    forward = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
    assert reverse_kl(coin).item() == pytest.approx(reverse, abs=1e-14)
    assert forward_kl(coin).item() == pytest.approx(forward, abs=1e-14)


def test_sequence_kl_obeys_the_chain_rule():
    chain = random_chain(1, vocab=3, length=4)
    assert close(local_kl(chain), reverse_kl(chain))
    forward_at_ref = local_kl(chain, direction="forward", prefixes="ref")
    assert close(forward_at_ref, forward_kl(chain))


@pytest.mark.parametrize(("name", "divergence"), [("reverse", reverse_kl), ("forward", forward_kl)])
def test_truths_match_finite_differences(name, divergence):
    chain, step = random_chain(2, vocab=3, length=3), 1e-5
    table = chain.policy_logits.detach()
    for index, slope in enumerate(truths(chain)[name].flatten()):
        bump = torch.zeros_like(table)
        bump.flatten()[index] = step
        up, down = (divergence(replace(chain, policy_logits=table + x)) for x in (bump, -bump))
        assert slope.item() == pytest.approx((up - down).item() / (2 * step), abs=1e-9, rel=0)


def test_the_local_truth_is_each_prefix_gradient_weighed_by_how_often_the_prefix_is_met():
    chain = random_chain(4, vocab=3, length=3)
    p, q = (torch.softmax(chain.logits(w).detach(), dim=-1) for w in ("policy", "ref"))
    delta = (p / q).log()
    met = torch.zeros(len(p), dtype=torch.float64)
    for i, prefix in enumerate(list_prefixes(3, 3, eos=0)):
        rows = [list_prefixes(3, 3, eos=0).index(prefix[:t]) for t in range(len(prefix))]
        met[i] = math.prod(p[r, token].item() for r, token in zip(rows, prefix, strict=True))
    per_prefix = p * (delta - (p * delta).sum(dim=-1, keepdim=True))
    assert close(truths(chain)["local"], met[:, None] * per_prefix)
    assert close(truths(chain)["local_forward"], met[:, None] * (p - q))


def test_off_policy_the_sampled_local_truth_weighs_prefixes_by_the_sampler():
    chain = random_chain(7, sampler="other")
    exact = truths(chain)
    assert (exact["local"] - exact["local_sampled"]).norm() > 0.05 * exact["local"].norm()
    assert close(exact["local"][0], exact["local_sampled"][0])
    assert "local_sampled" not in truths(random_chain(7))


def test_expectation_and_variance_match_a_long_simulation():
    chain = random_chain(8, sampler="other")
    y = enumerate_outcomes(chain)
    values = log_ratio(y).sum(dim=-1).detach()
    drawn = values[torch.multinomial(y.probs, 400_000, True, generator=torch.Generator().manual_seed(0))]
    assert expected(chain, log_ratio).item() == pytest.approx(drawn.mean().item(), abs=0.01)
    assert variance(chain, log_ratio).item() == pytest.approx(drawn.var().item(), rel=0.01)


def test_the_expected_gradient_does_not_flow_through_the_sampler_and_is_the_average_of_the_outcomes():
    chain = random_chain(9)
    constant = expected_gradient(chain, lambda y: log_ratio(y).detach())
    assert torch.equal(constant, torch.zeros_like(constant))
    chain = random_chain(11, sampler="other")  # row by row and then weighted, or weighted and then one backward pass
    assert close(examine(chain, log_ratio).gradient, expected_gradient(chain, log_ratio))


def test_per_token_losses_are_summed_over_unmasked_tokens_only():
    chain = random_chain(10, vocab=3, length=3)
    poisoned = expected(chain, lambda y: torch.where(y.mask, log_ratio(y), torch.nan))
    assert close(poisoned, expected(chain, lambda y: log_ratio(y).sum(dim=-1)))


def test_the_gradient_variance_of_a_coin_flip_is_known():
    # For two equally likely outcomes and loss log policy, the gradient is +-(1/2, -1/2): variance 1/2, mean zero.
    coin = one_position(torch.zeros(2), torch.zeros(2))
    assert examine(coin, lambda y: y.policy_logprobs).gradient_variance == pytest.approx(0.5, abs=1e-14)


def test_a_report_names_the_divergence_whose_gradient_a_loss_follows():
    chain = random_chain(12, vocab=3, length=3)
    losses = {
        "zero": log_ratio,
        "local": lambda y: log_ratio(y) ** 2 / 2,
        "reverse": lambda y: log_ratio(y).sum(dim=-1) ** 2 / 2,
        "local_forward": lambda y: (-log_ratio(y)).exp() - 1,
        "forward": lambda y: (-log_ratio(y).sum(dim=-1)).exp(),
        NOTHING_KNOWN: lambda y: y.policy_logprobs.abs() ** 1.5,
    }
    for name, loss in losses.items():
        assert examine(chain, loss).follows.is_exactly(name)
    assert examine(chain, lambda y: losses["local_forward"](y) + log_ratio(y)).follows.is_exactly("local_forward")
    for factor in (0.04, -1.0):
        scaled = examine(chain, lambda y, factor=factor: factor * losses["reverse"](y))
        assert scaled.follows == ("reverse", pytest.approx(factor, abs=1e-12))


def test_a_report_gives_bias_against_the_reverse_kl_and_nothing_but_its_value_of_a_constant():
    chain = random_chain(14)
    assert examine(chain, log_ratio).value_bias == pytest.approx(0.0, abs=1e-12)
    assert examine(chain, lambda y: 3 * log_ratio(y)).value_bias == pytest.approx(2 * reverse_kl(chain).item())
    still = examine(chain, lambda y: torch.ones_like(y.probs))
    assert (still.value, still.follows.name, still.gradient_variance) == (pytest.approx(1.0, abs=1e-14), "zero", 0.0)


def test_truths_ignore_who_samples_and_reach_past_a_truncated_sampler():
    full = random_chain(16, length=2)
    cut = replace(full, sampler_logits=truncate_top_p(full.policy_logits, 0.6))
    assert len(enumerate_outcomes(cut).probs) < len(enumerate_outcomes(full).probs)
    assert torch.equal(truths(cut)["reverse"], truths(full)["reverse"])


def test_a_policy_without_support_everywhere_has_a_finite_kl():
    policy = truncate_top_p(torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log(), 0.7)
    chain = one_position(policy, torch.zeros(3))
    closed_form = 0.625 * math.log(0.625 * 3) + 0.375 * math.log(0.375 * 3)
    assert reverse_kl(chain).item() == pytest.approx(closed_form, abs=1e-12)
    assert torch.isfinite(truths(chain)["reverse"]).all()


def test_a_loss_averaged_over_the_batch_is_refused():
    with pytest.raises(ShapeError, match="per completion"):
        expected(random_chain(17), lambda y: log_ratio(y).mean())


CHAINS = [random_chain(seed, vocab=4, length=1, eos=None) for seed in range(2)]
KNOWN = [truths(chain) for chain in CHAINS]


def scaled(name: str, *factors: float) -> list[torch.Tensor]:
    return [factor * known[name] for factor, known in zip(factors, KNOWN, strict=True)]


def test_a_multiple_has_one_factor_in_all_worlds_zero_is_measured_and_the_tolerance_decides_what_is_the_same() -> None:
    assert name_gradient(scaled("reverse", 1.0, 1.01), KNOWN).name == NOTHING_KNOWN
    assert name_gradient(scaled("reverse", 1e-9, 1e-9), KNOWN) == Followed("zero", 0.0)
    assert name_gradient(scaled("reverse", 1e-5, 1e-5), KNOWN).name == "reverse"
    near = [known["forward"] + 1e-6 * known["reverse"] for known in KNOWN]
    assert name_gradient(near, KNOWN).name == NOTHING_KNOWN
    assert name_gradient(near, KNOWN, tolerance=1e-5).name == "forward"


def test_a_turned_sign_is_not_the_same_and_is_told_in_words() -> None:
    assert Followed("forward", -1.0).in_words == "minus KL(ref||policy)"
    assert Followed("L1 distance", 1.0).in_words == "L1 distance"
    assert not Followed("reverse", -1.0).is_exactly("reverse")
    assert Followed("reverse", -1.0).is_exactly("reverse", factor=-1.0)
    assert not Followed("forward", 1.0).is_exactly("reverse")
    assert not Followed("zero", 0.0).is_exactly(NOTHING_KNOWN)


def test_a_pull_has_angle_and_share_over_all_worlds() -> None:
    known = [{"reverse": torch.tensor([1.0]), "forward": torch.tensor([0.0])} for _ in range(2)]
    known[0]["forward"] = torch.tensor([3.0])
    pull = pull_of([torch.tensor([2.0]), torch.tensor([0.0])], known)
    assert pull.follows == ("forward", pytest.approx(2 / 3))
    assert pull.cosine_reverse == pytest.approx(0.5**0.5)
    assert pull.share == pytest.approx(1.0)
    still = pull_of([torch.zeros(1)] * 2, known)
    assert (still.follows.name, still.cosine_reverse, still.share) == ("zero", 0.0, 0.0)
    assert cosine(torch.zeros(2), torch.ones(2)) == 0.0


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
