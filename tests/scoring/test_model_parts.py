"""The parts of a model against the whole: head, log-probabilities, exact KL, cache; and what a probe finds out."""

from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tests.training.conftest import tiny_gpt2, tiny_llama
from torch import nn
from transformers import DynamicCache, LlamaModel, MambaConfig, MambaForCausalLM
from transformers.cache_utils import DynamicLayer

from klamp.core.estimators import exact_kl
from klamp.core.topk import topk_kl
from klamp.scoring.model_parts import (
    OpenedModel,
    OutputHead,
    Predictions,
    PrefixKL,
    RoomyLayer,
    Traits,
    cache_rows,
    divergence,
    head_kl,
    head_of,
    mass_beyond,
    steady_length,
    token_logprobs,
    top_ids,
)
from klamp.scoring.probe import probe

N, H, V = 6, 5, 11


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def head(**changes: object) -> OutputHead:
    return OutputHead(numbers(V, H, seed=1), numbers(V, seed=2), 2.0, 0.5)._replace(**changes)


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("given", [head(), head(softcap=None, bias=None, scale=1.0)], ids=["capped", "plain"])
def test_log_probabilities_are_the_same_from_hidden_states_and_from_logits(given: OutputHead, entropy: bool) -> None:
    hidden, targets = numbers(N, H).requires_grad_(True), torch.arange(N) % V
    ways = []
    for found in (Predictions(values=hidden, head=given), Predictions(values=given.logits(hidden), head=None)):
        scored = token_logprobs(found, targets[:, None], temperature=0.7, entropy=entropy, top_k=3)
        assert torch.equal(scored.ids, torch.cat((given.logits(hidden).topk(3).indices, targets[:, None]), 1))
        logprobs, spread = scored.logprobs[:, -1], scored.entropy
        ways.append((logprobs, spread, torch.autograd.grad(logprobs.sum(), hidden, retain_graph=True)[0]))
    log_p = (given.logits(hidden) / 0.7).log_softmax(-1)
    for logprobs, spread, gradient in ways:
        assert torch.allclose(logprobs, log_p.gather(1, targets[:, None])[:, 0], atol=1e-6)
        assert torch.allclose(gradient, ways[0][2], atol=1e-5)
        assert (spread is not None) == entropy
        assert spread is None or (torch.allclose(spread, -(log_p.exp() * log_p).sum(-1), atol=1e-6))
        assert spread is None or not spread.requires_grad


@pytest.mark.parametrize("which", ["student", "teacher", "union"])
@pytest.mark.parametrize("hidden", [True, False], ids=["from hidden states", "from logits"])
def test_the_head_of_a_teacher_with_more_entries_holds_the_shared_ones_once(which, hidden) -> None:
    k, ours, theirs = 3, numbers(N, H).requires_grad_(True), numbers(N, H, seed=3)
    larger = head(weight=numbers(V + 4, H, seed=5), bias=None, softcap=None)
    policy, teacher = Predictions(values=ours, head=head()), Predictions(values=theirs, head=larger)
    if not hidden:
        policy, teacher = (Predictions(values=each.logits(), head=None) for each in (policy, teacher))
    targets = torch.arange(N)[:, None] % V
    likeliest = top_ids(teacher, k, V) if which != "student" else targets[:, :0]
    asked = torch.cat((torch.where(likeliest < 0, targets, likeliest), targets), 1)
    scored = token_logprobs(policy, asked, temperature=0.7, top_k=k)
    found, seen = head_kl(scored, teacher, likeliest, PrefixKL(top_k=k, head=which), temperature=0.7)
    p, q = ((each.logits() / 0.7).log_softmax(-1) for each in (policy, teacher))
    assert which == "student" or bool((likeliest < 0).any())
    for row in range(N):
        tops = {"student": p[row].topk(k).indices, "teacher": q[row].topk(k).indices}
        ids = torch.cat([tops[each] for each in tops if which in (each, "union")]).unique()
        ids, y = ids[ids < V], targets[row]
        expected = topk_kl(p[row, ids], q[row, ids], p[row, y][0], q[row, y][0], ~(ids == y).any())
        assert float(found[row]) == pytest.approx(float(expected), abs=1e-5)
        assert float(seen["teacher_mass"][row]) == pytest.approx(float(q[row, ids].exp().sum()), abs=1e-5)
        shared = torch.isin(tops["student"], tops["teacher"]).float().mean()
        assert float(seen["overlap_ratio"][row]) == pytest.approx(float(shared))
    assert torch.autograd.grad(found.sum(), ours)[0].any()


@pytest.mark.parametrize("direction", ["reverse", "forward", "js"])
def test_the_exact_kl_of_two_heads_of_one_form_and_of_different_ones(direction) -> None:
    ours, theirs = numbers(N, H).requires_grad_(True), numbers(N, H, seed=3)
    policy, ref = Predictions(values=ours, head=head()), Predictions(values=theirs, head=head())
    uncapped = Predictions(values=theirs, head=head(softcap=None))
    for other in (ref, uncapped, Predictions(values=head().logits(theirs), head=None)):
        found = divergence(policy, other, temperature=0.7, direction=direction)
        expected = exact_kl(policy.logits() / 0.7, other.logits() / 0.7, direction=direction)
        assert torch.allclose(found, expected, atol=1e-5) and found.min() > 0
        slopes = [torch.autograd.grad(x.sum(), ours, retain_graph=True)[0] for x in (found, expected)]
        assert torch.allclose(*slopes, atol=1e-5)


@pytest.mark.parametrize("direction", ["reverse", "forward", "js"])
def test_of_a_teacher_with_more_entries_the_shared_ones_count_from_logits_as_from_hidden_states(direction) -> None:
    """Case: from logits the shared part was renormalised: another number, and with `forward` another gradient."""
    ours, theirs = numbers(N, H).requires_grad_(True), numbers(N, H, seed=3)
    larger = Predictions(values=theirs, head=head(weight=numbers(V + 4, H, seed=5), bias=None))
    fused, whole = (
        divergence(Predictions(values=ours, head=head()), other, temperature=0.7, direction=direction)
        for other in (larger, Predictions(values=larger.logits(), head=None))
    )
    assert torch.allclose(fused, whole, atol=1e-5)
    first, second = (torch.autograd.grad(each.sum(), ours, retain_graph=True)[0] for each in (fused, whole))
    assert torch.allclose(first, second, atol=1e-5)
    beyond = (larger.logits() / 0.7).softmax(-1)[:, V:].sum(-1)
    assert beyond.min() > 1e-3
    for teacher in (larger, Predictions(values=larger.logits(), head=None)):
        assert torch.allclose(mass_beyond(teacher, V, temperature=0.7), beyond, atol=1e-6)


def test_the_head_of_a_model_is_a_plain_linear_layer_or_none() -> None:
    model = tiny_llama(tie_word_embeddings=False)
    found = head_of(model)
    assert found is not None and found.weight is model.lm_head.weight
    assert (found.bias, found.softcap, found.scale) == (None, None, 1.0)

    class Adapted(nn.Linear):
        """A linear layer that does something more."""

    model.set_output_embeddings(Adapted(32, 11))
    assert head_of(model) is None


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({"rope_parameters": None}, None),
        ({"rope_parameters": {"rope_type": "default"}}, None),
        ({"rope_parameters": {"rope_type": "dynamic"}}, 64),
        ({"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 32}}, 32),
        ({"rope_parameters": {"full": {"rope_type": "default"}, "window": {"rope_type": "dynamic"}}}, 64),
    ],
)
def test_how_long_a_sequence_may_be_before_later_tokens_change_earlier_ones(config: dict, length: int | None) -> None:
    assert steady_length(SimpleNamespace(max_position_embeddings=64, **config)) == length


@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2])
@torch.no_grad()
def test_an_opened_model_on_a_cache_gives_what_the_whole_model_gives(make) -> None:
    model = make()
    traits = Traits(head=True, sharing="gradient")
    opened = OpenedModel(model, traits)
    ids = torch.randint(1, 10, (2, 7), generator=torch.Generator().manual_seed(0))
    prompt_mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
    whole = model(
        input_ids=ids,
        attention_mask=nn.functional.pad(prompt_mask, (0, 4), value=1),
        position_ids=(torch.arange(7) - (3 - prompt_mask.sum(-1, keepdim=True))).clamp(min=0),
    ).logits
    _, cache = opened.run(ids[:, :3], prompt_mask, keep=1, use_cache=True)
    values, _ = opened.run(ids[:, 3:], prompt_mask, keep=4, cache=cache)
    assert torch.allclose(opened.predictions(values).logits(), whole[:, 3:].float(), atol=1e-4)
    closed, _ = OpenedModel(model, Traits()).run(ids, prompt_mask, keep=4)
    assert torch.allclose(closed.float(), whole[:, 3:].float(), atol=1e-4)


def test_positions_by_columns_count_the_padding_that_was_cut_off() -> None:
    model = tiny_gpt2().eval()
    ids = torch.tensor([[0, 0, 5, 6, 7], [0, 3, 4, 5, 6]])
    mask = (ids > 0).long()
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=mask, position_ids=torch.arange(5)[None]).logits[:, -1]
        opened = OpenedModel(model, Traits(positions="columns"), prompt_width=5)
        found = opened.run(ids[:, 1:], mask[:, 1:], keep=1)[0][:, 0]
        by_tokens = OpenedModel(model, Traits(), prompt_width=5).run(ids[:, 1:], mask[:, 1:], keep=1)[0][:, 0]
    assert torch.allclose(found, expected, atol=1e-5)
    assert not torch.allclose(by_tokens, expected, atol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("room", [0, 1, 5])
def test_rows_of_a_cache_are_a_copy(room: int) -> None:
    opened = OpenedModel(tiny_llama(), Traits(head=True, sharing="values"))
    mask = torch.ones(2, 3, dtype=torch.long)
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    _, cache = opened.run(ids, mask, keep=1, use_cache=True)
    before = cache.layers[0].keys.clone()
    rows = cache_rows(cache, torch.tensor([1, 1, 0]), room=room)
    assert torch.equal(rows.layers[0].keys, before[[1, 1, 0]])
    opened.run(torch.tensor([[7], [8], [9]]), mask[[0, 0, 0]], keep=1, cache=rows)
    assert torch.equal(cache.layers[0].keys, before), "the cache that was given is as it was"


def states(rows: int, tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys of 2 heads of 3 numbers, and values of 4."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(rows, 2, tokens, width, generator=generator) for width in (3, 4))  # pyright: ignore


@pytest.mark.parametrize("room", [1, 4, 100])
def test_appending_in_place_is_appending(room: int) -> None:
    """Also past the room that was asked for, and after rows have been dropped."""
    cache, rows = DynamicCache(), torch.tensor([0, 0, 1])
    cache.update(*states(2, 5, seed=0), layer_idx=0)
    plain, roomy = cache_rows(cache, rows), cache_rows(cache, rows, room=room)
    assert type(plain.layers[0]) is not RoomyLayer is type(roomy.layers[0])
    for step, tokens in enumerate((1, 2, 1, 1)):
        if step == 2:
            for each in (plain, roomy):
                each.reorder_cache(torch.tensor([2, 0]))
        more = states(len(plain.layers[0].keys), tokens, seed=1 + step)
        expected, found = plain.update(*more, layer_idx=0), roomy.update(*more, layer_idx=0)
        assert all(map(torch.equal, expected, found))
        assert roomy.get_seq_length() == plain.get_seq_length()


FULL = Traits(head=True, sharing="gradient")


def test_models_with_a_cache_of_keys_and_values_share_it():
    adapter = get_peft_model(tiny_llama(), LoraConfig(r=2, target_modules="all-linear"))
    for model in (tiny_llama(), tiny_llama().requires_grad_(False), adapter, without_dropout(tiny_gpt2())):
        assert probe(model) == FULL


def without_dropout(model):
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def test_recurrent_states_are_not_shared():
    torch.manual_seed(0)
    config = MambaConfig(vocab_size=40, hidden_size=16, num_hidden_layers=2, state_size=4)
    assert probe(MambaForCausalLM(config).eval()) == Traits(head=True, sharing="no")


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


@pytest.mark.parametrize(("layers", "dtype"), [(32, torch.bfloat16), (2, torch.float16)])
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
    torch.manual_seed(5)
    expected = torch.rand(3)
    for model, training in ((tiny_llama().train(), True), (tiny_gpt2(), False)):  # GPT-2 has dropout
        before = {name: x.clone() for name, x in model.state_dict().items()}
        torch.manual_seed(5)
        probe(model)
        assert torch.equal(torch.rand(3), expected)
        assert model.training == training and all(p.grad is None for p in model.parameters())
        assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
