"""How rows are put together: the cheapest way, by trying them all; and every token in exactly one pass."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from klamp.scoring.passes import PASS_TOKENS, bucketed, plan_of


def cost_of(buckets: list[list[int]], lengths: list[int], ahead: int, overhead: int) -> int:
    return sum(len(rows) * (ahead + max(lengths[i] for i in rows)) + overhead for rows in buckets)


def every_cut(lengths: list[int]):
    """All ways to cut the rows, longest first, into neighbours."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    for chosen in range(2 ** (len(order) - 1)):
        cuts = [0, *(i + 1 for i in range(len(order) - 1) if chosen >> i & 1), len(order)]
        yield [order[a:b] for a, b in pairwise(cuts)]


@given(st.lists(st.integers(0, 30), min_size=1, max_size=8), st.integers(0, 20), st.integers(0, 40))
def test_the_buckets_are_the_cheapest_of_all(lengths, ahead, overhead):
    buckets, cost = bucketed(lengths, ahead=ahead, overhead=overhead)
    assert sorted(i for rows in buckets for i in rows) == list(range(len(lengths)))
    assert cost == cost_of(buckets, lengths, ahead, overhead)
    assert cost == min(cost_of(cut, lengths, ahead, overhead) for cut in every_cut(lengths))


def test_equal_lengths_and_small_batches_are_one_pass():
    assert bucketed([64] * 16, ahead=8, overhead=PASS_TOKENS)[0] == [list(range(16))]
    assert len(bucketed([1, 2, 3, 40], ahead=5, overhead=PASS_TOKENS)[0]) == 1, "less is saved than a pass costs"


def test_a_few_long_rows_are_run_by_themselves():
    lengths = [100] * 60 + [2000] * 4
    buckets, cost = bucketed(lengths, ahead=50, overhead=PASS_TOKENS)
    assert buckets == [[60, 61, 62, 63], list(range(60))]
    assert cost == 4 * 2050 + 60 * 150 + 2 * PASS_TOKENS


def test_prompts_are_shared_where_that_is_less_work():
    long = plan_of([64] * 16, prompts=2, prompt_length=512, can_share=True)
    assert long.shared and long.tokens == 2 * 512 + 16 * 63 + 2 * PASS_TOKENS
    short = plan_of([64] * 16, prompts=2, prompt_length=8, can_share=True)
    assert not short.shared and short.tokens == 16 * 71 + PASS_TOKENS
    assert not plan_of([64] * 16, prompts=16, prompt_length=512, can_share=True).shared, "groups of one share nothing"
    assert not plan_of([64] * 16, prompts=2, prompt_length=512, can_share=False).shared
    assert plan_of([0, 1], prompts=1, prompt_length=4, can_share=True).buckets == [[0, 1]], "empty completions too"
