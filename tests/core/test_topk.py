"""The KL over a head of k tokens and a sampled tail: enumerated over the sampled token, and its failures elsewhere."""

import math

import pytest
import torch

from klamp.core.estimators import exact_kl
from klamp.core.topk import TAILS, asked_tokens, distinct, server_head, topk_kl
from klamp.errors import ConfigError, ShapeError, UnknownNameError

DIRECTIONS = ("reverse", "forward", "js")


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


POLICY, ANCHOR, SAMPLER = (1.5 * numbers(7, seed=seed) for seed in range(3))

A = ((1.0, 0.4, -0.2, -0.6, -1.0), (0.2, 0.9, -0.1, 0.3, -0.7))
C = ((math.log(0.5), math.log(0.3), math.log(0.2)), (math.log(0.75), math.log(0.15), math.log(0.1)))


def samples(policy, anchor, head, *, sampler=None, **options):
    """Value and gradient in the policy's logits of every sample y, [V] and [V, V], and the sampler's probabilities."""
    v = len(policy)
    rows = policy.expand(v, v).clone().requires_grad_(True)
    p, q, y = rows.log_softmax(-1), anchor.log_softmax(-1).expand(v, v), torch.arange(v)
    ids = torch.tensor(head, dtype=torch.long).expand(v, len(head))
    mu = (policy if sampler is None else sampler).log_softmax(-1)
    target, other = p.gather(1, y[:, None])[:, 0], q.gather(1, y[:, None])[:, 0]
    weight = None if sampler is None else (target - mu).detach()
    outside = (ids != y[:, None]).all(1)
    value = topk_kl(p.gather(1, ids), q.gather(1, ids), target, other, outside, log_weight=weight, **options)
    value.sum().backward()
    return value.detach(), rows.grad, mu.exp()


def mean(policy, anchor, head, **options):
    value, gradient, mu = samples(policy, anchor, head, **options)
    drawn = mu > 0
    return mu[drawn] @ value[drawn], mu[drawn] @ gradient[drawn]


def exact(policy, anchor, direction="reverse"):
    policy = policy.clone().requires_grad_(True)
    value = exact_kl(policy, anchor, direction=direction)
    value.backward()
    return value.detach(), policy.grad


def heads(k):
    of_policy, of_anchor = (logits.topk(k).indices.tolist() for logits in (POLICY, ANCHOR))
    return {"policy": of_policy, "anchor": of_anchor, "union": list(dict.fromkeys(of_policy + of_anchor))}


@pytest.mark.parametrize("sampler", [None, SAMPLER], ids=["on-policy", "off-policy"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_value_and_gradient_have_the_mean_of_the_exact_kl_for_every_head(direction, sampler):
    truth = exact(POLICY, ANCHOR, direction)
    for head in (head for k in range(8) for head in heads(k).values()):
        value, gradient = mean(POLICY, ANCHOR, head, direction=direction, sampler=sampler)
        assert torch.allclose(value, truth[0], rtol=0, atol=1e-14)
        assert torch.allclose(gradient, truth[1], rtol=0, atol=1e-14)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("tail", TAILS[:3])
def test_no_value_is_negative_and_a_whole_vocabulary_needs_no_sample(direction, tail):
    for k in range(8):
        value, gradient, _ = samples(POLICY, ANCHOR, heads(k)["policy"], direction=direction, tail=tail)
        assert (value >= 0).all()
    truth = exact(POLICY, ANCHOR, direction)
    assert torch.allclose(value, truth[0], rtol=0, atol=1e-14)
    assert torch.allclose(gradient, truth[1].expand_as(gradient), rtol=0, atol=1e-14)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tail", TAILS[:3])
def test_the_gradient_of_every_sample_is_exactly_zero_at_the_anchor(direction, dtype, tail):
    for k in range(8):
        same = POLICY.to(dtype)
        found = samples(same, same.clone(), heads(k)["policy"], direction=direction, tail=tail, sampler=SAMPLER)
        assert (found[1] == 0).all() and (found[0].abs() <= 1e-13).all()


def test_the_other_tails_follow_what_their_names_say():
    policy, anchor = torch.tensor(C, dtype=torch.float64)
    coarse = [torch.stack((x.softmax(-1)[0], 1 - x.softmax(-1)[0])).log() for x in (policy, anchor)]
    for direction in DIRECTIONS:
        bucket = samples(policy, anchor, [0], tail="bucket", direction=direction)
        assert torch.allclose(bucket[0], exact(*coarse, direction)[0], rtol=0, atol=1e-14)
        assert torch.allclose(bucket[0], exact(policy, anchor, direction)[0], atol=1e-14), "tails of one shape"
        others = torch.tensor(A, dtype=torch.float64)
        assert samples(*others, [0], tail="bucket", direction=direction)[0][0] < exact(*others, direction)[0]
        assert torch.allclose(bucket[1].sum(-1), torch.zeros(3, dtype=torch.float64), atol=1e-15)


@pytest.mark.parametrize("tail", ["bucket", "generalised", "none"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_other_tails_are_biased_and_have_the_gradient_of_their_own_value(tail, direction):
    rows = POLICY.clone().requires_grad_(True)
    head = torch.tensor(heads(3)["policy"])
    q = ANCHOR.log_softmax(-1)

    def value(x):
        p = x.log_softmax(-1)
        return topk_kl(p[head], q[head], p[0], q[0], torch.tensor(True), direction=direction, tail=tail)

    assert torch.autograd.gradcheck(value, rows)
    assert (value(POLICY) - exact(POLICY, ANCHOR, direction)[0]).abs() > 0.005


def test_what_does_not_count_reaches_nothing():
    p, q = (x.log_softmax(-1) for x in (POLICY, ANCHOR))
    head = torch.cat((p[:3], torch.tensor([math.nan, math.inf, -math.inf]).double())).requires_grad_(True)
    kept = torch.arange(6) < 3
    nan = torch.tensor(math.nan, dtype=torch.float64, requires_grad=True)
    for tail in TAILS:
        inside = torch.tensor(False)
        value = topk_kl(head, torch.cat((q[:3], head[3:].detach())), nan, nan.detach(), inside, kept=kept, tail=tail)
        assert torch.equal(value.detach(), topk_kl(p[:3], q[:3], p[0], q[0], inside, tail=tail))
        assert all(x is None or x.isfinite().all() for x in torch.autograd.grad(value, (head, nan), allow_unused=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_far_from_the_anchor_value_and_gradient_stay_finite(dtype):
    p, q = torch.tensor([-0.01, -90.0], dtype=dtype), torch.tensor([-120.0, -0.01], dtype=dtype)
    for direction in DIRECTIONS:
        for head, y in (([0, 1], 0), ([], 0), ([], 1)):
            policy = p.clone().requires_grad_(True)
            value = topk_kl(policy[head], q[head], policy[y], q[y], torch.tensor(not head), direction=direction)
            gradient = torch.autograd.grad(value, policy)[0]
            assert value >= 0 and value.dtype == torch.float32
            assert gradient.isfinite().all() == value.isfinite()
            assert value.isfinite() or (direction, y) == ("forward", 1)  # q / mu is past the type there


def test_an_empty_head_and_no_position():
    for shape, k in (((0,), 3), ((2, 0), 0), ((4,), 0)):
        single = numbers(*shape)
        value = topk_kl(numbers(*shape, k), numbers(*shape, k), single, single, single > 0)
        assert value.shape == shape and (value == 0).all()


def test_entries_that_are_padding_duplicates_or_one_too_many():
    ids, kept = torch.tensor([[4, 4, 2, 9], [7, 9, 9, 1]]), torch.tensor([[True] * 4, [True, False, True, True]])
    assert distinct(ids, kept).tolist() == [[True, False, True, True], [True, False, True, True]]
    assert server_head(ids, torch.tensor([2, 5]), 3, kept).sum() == 6
    assert server_head(ids, torch.tensor([9, 1]), 2, kept).tolist() == [[True, False, True, False]] * 2
    assert server_head(ids, torch.tensor([0, 0]), 2, kept).sum(1).tolist() == [2, 2]
    few, whole = torch.tensor([[1, 2, 3]]), torch.ones(1, 3, dtype=torch.bool)
    assert server_head(few, torch.tensor([1]), 2, whole).tolist() == [[False, True, True]], "it came one too many"
    assert server_head(few, torch.tensor([1]), 4, whole).all(), "it is among the likeliest"


@pytest.mark.usefixtures("shapes_unchecked")
def test_what_makes_no_sense_is_refused():
    p, q = POLICY.clone().requires_grad_(True), ANCHOR
    out = torch.tensor(True)
    for options in ({"direction": "backward"}, {"tail": "renormalised"}):
        with pytest.raises(UnknownNameError):
            topk_kl(p[:3], q[:3], p[0], q[0], out, **options)
    with pytest.raises(ShapeError, match="does not fit the values"):
        topk_kl(p[:3], q[:2], p[0], q[0], out)
    with pytest.raises(ShapeError, match="does not fit the positions"):
        topk_kl(p[:3], q[:3], p[0], q[0], out[None])
    with pytest.raises(ConfigError, match="has a gradient"):
        topk_kl(q[:3], p[:3], q[0], p[0], out)


def test_the_tokens_to_score_are_the_head_with_the_target_in_its_gaps_and_the_target() -> None:
    asked = asked_tokens(torch.tensor([5, 6]), torch.tensor([[1, -1], [-1, 2]]))
    assert asked.tolist() == [[1, 5, 5], [6, 2, 6]]
