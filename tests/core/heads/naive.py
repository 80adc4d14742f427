"""Small heads with their naive counterparts, for the tests of `klamp.core.heads`."""

import math

import torch
from torch.nn.functional import linear

from klamp.core.estimators import exact_kl

DIRECTIONS = ("reverse", "forward", "js")
OPTIONS = [
    {},
    {"temperature": 0.7},
    {"softcap": 3.0},
    {"softcap": 2.0, "temperature": 1.3},
]
LOW = (torch.bfloat16, torch.float16)


def head(n=10, h=6, v=23, *, dtype=torch.float64, seed=0, scale=1.0):
    random = torch.Generator().manual_seed(seed)
    hidden, weight, bias = (
        (torch.randn(*shape, generator=random, dtype=torch.float64) * scale).to(dtype).requires_grad_(True)
        for shape in ((n, h), (v, h), (v,))
    )
    return hidden, weight, bias, torch.randint(v, (n,), generator=random)


def coefficients(n, dtype=torch.float64):
    return torch.randn(n, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(dtype)


def naive_logits(hidden, weight, bias=None, temperature=1.0, softcap=None):
    raw = linear(hidden, weight, bias)
    raw = raw if raw.dtype == torch.float64 else raw.float()
    return (raw if softcap is None else softcap * torch.tanh(raw / softcap)) / temperature


def naive_logprobs(hidden, weight, targets, **options):
    return naive_logits(hidden, weight, **options).log_softmax(-1).gather(1, targets[:, None])[:, 0]


def close(a, b, atol=1e-12):
    return a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=atol)


def agree(ours, naive, inputs, atol=1e-12):
    """Whether two functions of the same inputs have the same values, and gradients by a random weight of each row."""
    factor = coefficients(len(ours), ours.dtype)
    both = [(x, *torch.autograd.grad(x @ factor, inputs, retain_graph=True)) for x in (ours, naive)]
    return all(close(a, b, atol) for a, b in zip(*both, strict=True))


def copies(tensors, dtype=torch.float64):
    return [x.detach().to(dtype).requires_grad_(x.requires_grad) for x in tensors]


def kl_inputs(dtype=torch.float64, *, n=10, h=6, v=23, scale=1.0):
    hidden, weight, *_ = head(n, h, v, dtype=dtype, scale=scale)
    ref_hidden, ref_weight, *_ = head(n, 4, v, dtype=dtype, seed=1, scale=scale)
    return hidden, weight, ref_hidden.detach(), ref_weight.detach()


def naive_kl(hidden, weight, ref_hidden, ref_weight, direction="reverse", policy_bias=None, ref_bias=None, **scale):
    logits = (naive_logits(*x, **scale) for x in ((hidden, weight, policy_bias), (ref_hidden, ref_weight, ref_bias)))
    return exact_kl(*logits, direction=direction)


def poisoned(hidden, row):
    hidden = hidden.detach().clone()
    hidden[row] = math.nan
    return hidden.requires_grad_(True)
