"""The heads of real architectures in terms of `linear_logprobs`: bias, soft cap, and the factors that they scale by."""

import pytest
import torch

from klamp.core.heads.kl import linear_kl
from klamp.core.heads.logprobs import linear_logprobs

transformers = pytest.importorskip("transformers")

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
