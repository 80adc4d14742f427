"""Heads without logits: equal to the naive ones in value and gradient, at any tile size, in bounded memory."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.core.heads.naive import OPTIONS, agree, close, coefficients, head, naive_logprobs
from torch.nn.functional import linear

from klamp.core.estimators import exact_kl
from klamp.core.heads import tiles
from klamp.core.heads.kl import linear_kl
from klamp.core.heads.logprobs import linear_logprobs


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_values_and_gradients_are_the_naive_ones(any_tiles, options, with_bias, frozen):
    hidden, weight, bias, targets = head()
    weight, bias = (x.detach().requires_grad_(not frozen) for x in (weight, bias))
    learned = [hidden] if frozen else [hidden, weight, *([bias] if with_bias else [])]
    options = {**options, "bias": bias if with_bias else None}
    ours, naive = (f(hidden, weight, targets, **options) for f in (linear_logprobs, naive_logprobs))
    assert ours.dtype == torch.float64 and agree(ours, naive, learned)


@given(st.integers(0, 9), st.integers(1, 5), st.integers(1, 17), st.integers(1, 5), st.integers(4, 200))
@example(0, 3, 5, 2, 8)
@settings(max_examples=25)
def test_any_sizes(n, h, v, tile_rows, tile_bytes):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "TILE_ROWS", tile_rows)
        patch.setattr(tiles, "TILE_BYTES", tile_bytes)
        hidden, weight, bias, targets = head(n, h, v)
        ours, entropy = linear_logprobs(hidden, weight, targets, bias=bias, return_entropy=True)
        naive = naive_logprobs(hidden, weight, targets, bias=bias)
        assert entropy.shape == (n,) and agree(ours, naive, (hidden, weight, bias))
        ref_hidden, ref_weight, *_ = head(n, h + 1, v, seed=1)
        ref_hidden, ref_weight = ref_hidden.detach(), ref_weight.detach()
        kl = linear_kl(hidden, weight, ref_hidden, ref_weight)
        truth = exact_kl(hidden @ weight.t(), ref_hidden @ ref_weight.t())
        assert agree(kl, truth, (hidden, weight))


def test_under_autocast_it_computes_what_a_linear_layer_would():
    hidden, weight, _, targets = head(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        ours = linear_logprobs(hidden, weight, targets)
        kl = linear_kl(hidden, weight, hidden.detach(), weight.detach())
        naive = linear(hidden, weight).float().log_softmax(-1).gather(1, targets[:, None])[:, 0]
    assert torch.allclose(ours, naive, atol=1e-5) and (kl == 0).all()
    gradients = [torch.autograd.grad(x.sum(), (hidden, weight)) for x in (ours, naive)]
    assert all(a.dtype == torch.float32 and torch.allclose(a, b, atol=0.1) for a, b in zip(*gradients, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_inside_torch_compile(shapes_unchecked, backend):
    hidden, weight, _, targets = head()
    factor = coefficients(10)
    factor[4] = 0

    def loss(hidden, weight):
        hidden = torch.tanh(hidden)
        logprobs, entropy = linear_logprobs(hidden, weight, targets, return_entropy=True)
        return (factor * (logprobs + linear_kl(hidden, weight, hidden * 2, weight))).sum() + entropy.mean()

    compiled, plain = torch.compile(loss, backend=backend)(hidden, weight), loss(hidden, weight)
    gradients = [torch.autograd.grad(x, (hidden, weight)) for x in (compiled, plain)]
    assert close(compiled, plain) and all(close(a, b) for a, b in zip(*gradients, strict=True))
    torch.compiler.reset()


# the heads of real architectures -------------------------------------------------------------------------------------

SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "pad_token_id": 0,
}
# model type -> (options of its config, arguments of its head)
ARCHITECTURES = {
    "qwen2": ({}, {}),
    "gemma2": ({"final_logit_softcapping": 0.5}, {"softcap": 0.5}),
    "cohere": ({"logit_scale": 0.25}, {"temperature": 1 / 0.25}),
    "granite": ({"logits_scaling": 8.0}, {"temperature": 8.0}),
    "phi": ({}, {}),  # has a bias
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_head_of(name):
    transformers = pytest.importorskip("transformers")
    config, options = ARCHITECTURES[name]
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(name, **SMALL, **config)
    ).eval()
    head = model.get_output_embeddings()
    with torch.no_grad():
        head.weight.mul_(20)
        if head.bias is not None:
            head.bias.normal_()
    tokens = torch.randint(97, (2, 9))
    logits = model(tokens).logits[:, :-1].flatten(0, 1)
    hidden = model.base_model(tokens).last_hidden_state[:, :-1].flatten(0, 1)
    targets = tokens[:, 1:].flatten()
    options = {**options, "bias": head.bias}
    truth = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    assert truth.std() > 0.05
    assert torch.allclose(linear_logprobs(hidden, head.weight, targets, **options), truth, atol=1e-5)
    options["policy_bias"] = options["ref_bias"] = options.pop("bias")
    assert (linear_kl(hidden, head.weight, hidden, head.weight, **options).abs() < 1e-6).all()
