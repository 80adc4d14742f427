"""What is found out about a model: by trying, against models that lie about themselves."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tests.training.conftest import tiny_gpt2, tiny_llama
from transformers import LlamaModel, MambaConfig, MambaForCausalLM
from transformers.cache_utils import DynamicLayer

from klamp.scoring.model_parts import Traits
from klamp.scoring.probe import probe

FULL = Traits(head=True, sharing="gradient")


def mamba() -> MambaForCausalLM:
    torch.manual_seed(0)
    return MambaForCausalLM(MambaConfig(vocab_size=40, hidden_size=16, num_hidden_layers=2, state_size=4)).eval()


def test_models_with_a_cache_of_keys_and_values_share_it():
    assert probe(tiny_llama()) == FULL
    assert probe(tiny_llama().requires_grad_(False)) == FULL
    assert probe(get_peft_model(tiny_llama(), LoraConfig(r=2, target_modules="all-linear"))) == FULL
    gpt2 = tiny_gpt2()
    for module in gpt2.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    assert probe(gpt2) == FULL


def test_recurrent_states_are_not_shared():
    assert probe(mamba()) == Traits(head=True, sharing="no")


def test_a_model_that_does_something_to_its_logits_is_not_opened(monkeypatch):
    model = tiny_llama()
    usual = model.forward

    def louder(*args, **kwargs):
        out = usual(*args, **kwargs)
        out.logits = out.logits * 1.01
        return out

    monkeypatch.setattr(model, "forward", louder)
    # its forward no longer says which arguments it takes, which must not matter
    assert not probe(model).head


def test_a_cache_without_gradient_serves_values_only(monkeypatch):
    keeps_no_gradient(monkeypatch)
    assert probe(tiny_llama()) == Traits(head=True, sharing="values")


@pytest.mark.parametrize("raises", [False, True])
def test_a_cache_that_is_made_in_evaluation_only_serves_values_only(monkeypatch, raises):
    """As Cohere2 has it in older transformers; a model is tried out before a trainer puts it into training mode."""
    usual = LlamaModel.forward

    def forward(self, *args, use_cache=None, **kwargs):
        if use_cache and self.training and raises:
            raise ValueError("no cache while training")
        return usual(self, *args, use_cache=use_cache and not self.training, **kwargs)

    monkeypatch.setattr(LlamaModel, "forward", forward)
    for training in (False, True):
        model = tiny_llama().train(training)
        assert probe(model).sharing == "values"
        assert model.training == training


def keeps_no_gradient(monkeypatch):
    usual = DynamicLayer.update

    def detached(self, keys, values, *args, **kwargs):
        old = self.keys
        found = usual(self, keys, values, *args, **kwargs)
        if old is None:
            self.keys, self.values = self.keys.detach(), self.values.detach()
        return found

    monkeypatch.setattr(DynamicLayer, "update", detached)


@pytest.mark.parametrize("layers", [2, 16, 32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_rounding_of_many_layers_is_no_wrong_cache(monkeypatch, layers, dtype):
    model = tiny_llama(num_hidden_layers=layers, initializer_range=0.05).to(dtype)
    assert probe(model) == FULL
    keeps_no_gradient(monkeypatch)
    assert probe(model) == Traits(head=True, sharing="values")


@pytest.mark.parametrize("kind", ["forgets", "changes what it was given"])
def test_a_cache_that_is_wrong_is_not_used(monkeypatch, kind):
    usual = DynamicLayer.update

    def wrong(self, keys, values, *args, **kwargs):
        if self.is_initialized and self.keys.numel() and kind == "forgets":
            self.keys = self.keys * torch.cat([torch.zeros_like(self.keys[:, :, :1]), self.keys[:, :, 1:] * 0 + 1], 2)
        found = usual(self, keys, values, *args, **kwargs)
        if kind != "forgets" and found[0].shape[2] > keys.shape[2]:
            SEEN[0].mul_(1.5)
        elif kind != "forgets":
            SEEN[0] = self.values
        return found

    SEEN: list[torch.Tensor] = [torch.zeros(1)]
    monkeypatch.setattr(DynamicLayer, "update", wrong)
    assert probe(tiny_llama()).sharing == "no"


def test_a_probe_leaves_the_model_and_the_random_numbers_as_they_were():
    model = tiny_llama().train()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    probe(model)
    assert torch.equal(torch.rand(3), expected)
    assert model.training and all(p.grad is None for p in model.parameters())
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    dropping = tiny_gpt2().eval()  # tried out in training mode too
    torch.manual_seed(5)
    probe(dropping)
    assert torch.equal(torch.rand(3), expected)
