"""The KL before the first update: what it is held against, and what usually makes it other than 0."""

from __future__ import annotations

from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from klamp.hosts.common.anchors import active_dropouts, likely_reasons


def test_why_the_kl_is_not_zero_at_the_start() -> None:
    plain = nn.Linear(2, 2)
    dropping = nn.Sequential(plain, nn.Dropout(0.1))
    for clean in (plain, nn.Sequential(plain, nn.Dropout(0.0))):
        assert likely_reasons(clean, None, adapter=False) == []
    assert "dropout (1 layers" in likely_reasons(dropping, plain, adapter=True)[0]
    assert likely_reasons(dropping.eval(), plain, adapter=True) == []
    assert "torch.float64" in likely_reasons(plain, nn.Linear(2, 2).double(), adapter=False)[0]
    assert "adapter that is not zero" in likely_reasons(plain, None, adapter=True)[0]


def test_dropout_that_a_layer_keeps_as_a_number_is_named() -> None:
    sizes = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 9,
    }
    policy = LlamaForCausalLM(LlamaConfig(**sizes, attention_dropout=0.1)).train()
    (reason,) = likely_reasons(policy, None, adapter=False)
    assert "attention_dropout above 0" in reason and "disable_dropout does not" in reason
    for dropout in active_dropouts(policy):
        setattr(dropout.holder, dropout.name, 0.0)
    assert (policy.model.layers[0].self_attn.attention_dropout, likely_reasons(policy, None, adapter=False)) == (0, [])


def test_weights_are_suspected_only_where_they_were_loaded() -> None:
    policy, reference = nn.Linear(2, 2), nn.Linear(2, 2)
    assert "loaded from a path" in likely_reasons(policy, reference, adapter=False)[0]
    assert likely_reasons(policy, reference, adapter=False, loaded=False) == []
    assert likely_reasons(policy, reference, adapter=True) == []
