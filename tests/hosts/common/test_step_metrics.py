"""The metrics of a step against plain loops over its tokens, whatever stands in the masked places."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from tests.batches import flat_batch, read

from klamp.core.estimators import kl_estimate
from klamp.core.term import KLTerm, measure
from klamp.core.types import Batch
from klamp.doctor.metrics import METRICS
from klamp.hosts.common.rollout import Alone
from klamp.hosts.common.step_metrics import StepRecord, Window, repeated_pairs, reward_length_correlation, step_metrics

ROWS, TOKENS, GROUP = 12, 7, 4


def record_of(seed: int = 0) -> StepRecord:
    """A step with completions of all lengths, one of them without any trained token, and some tokens without a KL."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    lengths = torch.randint(1, TOKENS + 1, (ROWS,), generator=generator)
    mask = torch.arange(TOKENS) < lengths[:, None]
    mask[3] = False
    policy = -drawn(ROWS, TOKENS).abs()
    rewards = drawn(ROWS)
    rewards[4:8] = 0.5
    return StepRecord(
        mask=mask,
        kl_mask=mask & (torch.rand(ROWS, TOKENS, generator=generator) > 0.2),
        policy=policy,
        sampler=policy + 0.01 * drawn(ROWS, TOKENS),
        entropy=drawn(ROWS, TOKENS).abs(),
        rewards=rewards,
        ended=torch.rand(ROWS, generator=generator) > 0.4,
        lengths=lengths,
        ref=policy + 0.4 * drawn(ROWS, TOKENS),
        original=policy + 0.7 * drawn(ROWS, TOKENS),
        exact=drawn(ROWS, TOKENS).abs(),
        exact_forward=drawn(ROWS, TOKENS).abs(),
        exact_rows=torch.arange(ROWS) % GROUP < 2,
        repeated=torch.arange(ROWS) % 3,
    )


def plainly(record: StepRecord) -> dict[str, float]:
    """The same numbers, token by token in Python floats."""
    rows = range(len(record.rewards))

    trained = [(i, t) for i in rows for t in range(TOKENS) if record.mask[i, t]]
    carried = [(i, t) for i in rows for t in range(TOKENS) if record.kl_mask[i, t]]
    measured = [i for i in rows if record.exact_rows[i]]
    exact = [(i, t) for i, t in carried if i in measured]

    def mean(values) -> float:
        values = list(values)
        return sum(values) / len(values)

    def k3(delta: float) -> float:
        return math.exp(-delta) - 1 + delta

    def over(what: torch.Tensor, places) -> float:
        return mean(float(what[p]) for p in places)

    def delta(other: torch.Tensor, place) -> float:
        return float(record.policy[place]) - float(other[place])

    def grouped(what: torch.Tensor) -> list[list[float]]:
        return what.float().view(-1, GROUP).tolist()

    groups, lengths = grouped(record.rewards), grouped(record.lengths)
    spreads = [math.sqrt(sum((x - mean(g)) ** 2 for x in g) / (GROUP - 1)) for g in groups]
    mismatch = [float(record.sampler[p]) - float(record.policy[p]) for p in trained]
    sizes = sorted(abs(delta(record.ref, p)) for p in carried)
    pairs = [
        (r - mean(a), n - mean(b)) for a, b in zip(groups, lengths, strict=True) for r, n in zip(a, b, strict=True)
    ]
    correlation = sum(r * n for r, n in pairs) / math.sqrt(sum(r * r for r, _ in pairs) * sum(n * n for _, n in pairs))
    return {
        "reward": mean(x for g in groups for x in g),
        "reward_std": mean(spreads),
        "groups/saturated": mean(float(len(set(g)) == 1) for g in groups),
        "length/mean": mean(float(n) for n in record.lengths),
        "length/repeated": float(sum(record.repeated)) / float(sum(record.lengths)),
        "length/truncated": mean(float(not ended) for ended in record.ended),
        "length/reward_correlation": correlation,
        "policy/entropy": over(record.entropy, trained),
        "policy/logp_mean": over(record.policy, trained),
        "ref/logp_mean": over(record.ref, trained),
        "sampler/k1": mean(mismatch),
        "sampler/k3": mean(k3(x) for x in mismatch),
        "kl/k1": mean(delta(record.ref, p) for p in carried),
        "kl/k3": mean(k3(delta(record.ref, p)) for p in carried),
        "kl/k1_sequence": sum(delta(record.ref, p) for p in carried) / len(rows),
        "kl/k3_sequence": sum(k3(delta(record.ref, p)) for p in carried) / len(rows),
        "kl/k1_original": mean(delta(record.original, p) for p in carried),
        "kl/k3_original": mean(k3(delta(record.original, p)) for p in carried),
        "kl/log_ratio_max": sizes[-1],
        "kl/log_ratio_p99": sizes[min(len(sizes) - 1, int(0.99 * len(sizes)))],
        "kl/exact": over(record.exact, exact),
        "kl/exact_forward": over(record.exact_forward, exact),
        "kl/exact_sequence": sum(float(record.exact[p]) for p in exact) / len(measured),
    }


@pytest.mark.parametrize("seed", range(2))
def test_repeated_pairs_are_counted_as_one_would_by_hand(seed):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 3, (6, 9), generator=generator)
    mask = torch.arange(9) < torch.tensor([9, 5, 2, 1, 0, 7])[:, None]
    rows = [list(pairwise(row[on].tolist())) for row, on in zip(ids, mask, strict=True)]
    expected = [sum(pair in pairs[:i] for i, pair in enumerate(pairs)) for pairs in rows]
    assert repeated_pairs(ids, mask).tolist() == expected
    assert repeated_pairs(ids[:, :1], mask[:, :1]).tolist() == [0] * 6


def test_a_correlation_needs_a_spread_within_groups():
    rewards, lengths = torch.tensor([0.0, 0, 1, 1]), torch.tensor([3, 4, 5, 6])
    assert reward_length_correlation(rewards, lengths, 2) is None, "between groups alone"
    assert float(reward_length_correlation(rewards, lengths, 4)) == pytest.approx(2 / math.sqrt(5))
    assert reward_length_correlation(torch.rand(4), torch.ones(4), 4) is None


@pytest.mark.parametrize("seed", [0, 1])
def test_the_metrics_are_those_of_plain_loops(seed):
    record = record_of(seed)
    expected = plainly(record)
    assert expected["groups/saturated"] == pytest.approx(1 / 3) and expected["kl/k1"] != expected["kl/k1_sequence"]
    found = step_metrics(record, group_size=GROUP)
    assert found.keys() == expected.keys() <= METRICS.keys()
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e30])
def test_what_stands_in_masked_places_changes_nothing(poison):
    record = record_of()
    tokens = ("policy", "sampler", "entropy", "ref", "original", "exact", "exact_forward")
    spoiled = {name: torch.where(record.mask, getattr(record, name), poison) for name in tokens}
    assert step_metrics(replace(record, **spoiled), group_size=GROUP) == step_metrics(record, group_size=GROUP)


@pytest.mark.parametrize(
    ("changes", "absent", "kept"),
    [
        (dict.fromkeys(("ref", "original", "exact", "exact_forward", "exact_rows")), ("kl/", "ref/"), "reward"),
        # a KL of 0 would be a measurement: a controller would lower beta for it
        ({"kl_mask": torch.zeros(ROWS, TOKENS, dtype=torch.bool)}, ("kl/",), "ref/logp_mean"),
        ({"exact_rows": torch.zeros(ROWS, dtype=torch.bool)}, ("kl/exact",), "kl/k3"),
    ],
    ids=["no reference", "no token carries a KL", "the exact KL was measured nowhere"],
)
def test_what_was_not_measured_is_left_out_and_nothing_is_nan(changes, absent, kept):
    found = step_metrics(replace(record_of(), **changes), group_size=GROUP)
    assert not [name for name in found if name.startswith(absent)]
    assert kept in found and all(math.isfinite(value) for value in found.values())


def micro_batch(rows: slice) -> Batch:
    generator = torch.Generator().manual_seed(1)
    policy, ref = (-torch.rand(6, 16, generator=generator) for _ in range(2))
    mask = torch.rand(6, 16, generator=generator) < 0.7
    return flat_batch(
        policy_logprobs=policy[rows], ref_logprobs=ref[rows], mask=mask[rows], advantages=torch.zeros(6)[rows]
    )


def test_uneven_parts_add_up_to_the_whole() -> None:
    window, whole = Window(), micro_batch(slice(0, 6))
    for part in (slice(0, 1), slice(1, 4), slice(4, 6)):
        window.add(measure(micro_batch(part), KLTerm(max_log_ratio=0.3)))
    found = window.emit(Alone())
    delta = (whole.policy_logprobs - read(whole, "ref_logprobs"))[whole.mask]
    k3 = kl_estimate(whole.policy_logprobs, read(whole, "ref_logprobs"), estimator="k3")
    expected = {
        "kl/k1": delta.mean(),
        "kl/k3": k3[whole.mask].mean(),
        "kl/k3_sequence": (k3 * whole.mask).sum(-1).mean(),
        "kl/log_ratio_max": delta.abs().max(),
        "kl/log_ratio_p99": delta.abs().sort().values[int(0.99 * len(delta))],
        "kl/log_ratio_clamped": (delta.abs() > 0.3).float().mean(),
        "length/mean": whole.mask.sum(-1).float().mean(),
    }
    for name, value in expected.items():
        assert found[name] == pytest.approx(float(value)), name
    assert window.emit(Alone()) == {}
