"""References: bit for bit what they were, without a gradient, and not there at all at beta 0."""

import gc

import pytest
import torch
from tests.training.conftest import disturb, rollout_of, steps_of
from tests.training.test_sampling import sample
from torch.optim import SGD
from transformers import LlamaForCausalLM

from klamp.lab.anchors import LocalReference
from klamp.lab.backends import train_run
from klamp.lab.observers import Observer
from klamp.lab.updates import update
from klamp.scoring.scorer import score


def copied(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: x.clone() for name, x in module.state_dict().items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def trained(context, *, updates: int = 3) -> None:
    optimizer = SGD([p for p in context.policy.parameters() if p.requires_grad], lr=0.5)
    for step in range(updates):
        update(context, optimizer, rollout_of(context, step=step, beta=0.1), context.objective)


def test_a_frozen_copy_stays_bit_identical_while_the_policy_trains(context_of):
    context = context_of()
    start = copied(context.policy)
    assert isinstance(context.reference, LocalReference)
    assert same(start, copied(context.reference.model)), "it starts as the policy"
    trained(context)
    assert same(start, copied(context.reference.model))
    assert not same(start, copied(context.policy))
    assert context.reference.model is not context.policy
    assert not any(p.requires_grad or p.grad is not None for p in context.reference.model.parameters())
    with context.reference.sampling_model() as model:
        assert model is context.reference.model


def test_a_frozen_reference_scores_as_its_model_does_and_without_gradient(context_of):
    context = context_of()
    model = context.reference.model
    completions = sample(model)
    keep = torch.tensor([False, True, True, False, False, False, False, True])
    scores = context.reference.score(completions, temperature=0.7, keep=keep)
    assert not scores.logprobs.requires_grad and not scores.predictions.values.requires_grad
    expected, mask = score(model, completions, temperature=0.7), completions.mask
    torch.testing.assert_close(scores.logprobs[mask], expected.logprobs[mask], rtol=0, atol=1e-5)
    logprobs = (scores.predictions.logits() / 0.7).log_softmax(-1)
    torch.testing.assert_close(
        logprobs[mask[keep]], expected.logits.log_softmax(-1)[keep][mask[keep]], rtol=0, atol=1e-5
    )


def test_with_the_adapter_off_the_policy_is_its_base_model(context_of):
    context = context_of(lora_r=4)
    assert context.reference.adapter_off
    trained(context)
    disturb(context.policy, size=0.1)
    base = context_of().policy  # the model's folder, loaded anew
    completions = sample(base)
    before = copied(context.policy)
    scores = context.reference.score(completions, temperature=1.0)
    with torch.no_grad():
        expected = LocalReference(base).score(completions, temperature=1.0)
        policy = score(context.policy, completions, temperature=1.0)
    assert torch.equal(scores.logprobs, expected.logprobs)
    assert (policy.logprobs - expected.logprobs)[completions.mask].abs().max() > 0.1, "the adapter is on again"
    assert not scores.logprobs.requires_grad
    assert same(before, copied(context.policy))


class Models(Observer):
    def __init__(self) -> None:
        gc.collect()
        self.before = self._count()
        self.models = 0

    @staticmethod
    def _count() -> int:
        return sum(type(thing) is LlamaForCausalLM for thing in gc.get_objects())

    def on_step(self, step, metrics) -> None:
        if step == 1:
            self.models = self._count() - self.before


@pytest.mark.parametrize(
    ("changes", "models"),
    [({"beta": 0.0}, 1), ({"beta": 0.02}, 2), ({"beta": 0.0, "lora_r": 2}, 1), ({"beta": 0.02, "lora_r": 2}, 1)],
)
def test_a_reference_is_held_only_where_it_is_needed(config_of, tmp_path, changes, models):
    counter, is_held = Models(), changes["beta"] > 0
    train_run(config_of(max_steps=1, eval_size=1, **changes), [counter])
    assert counter.models == models
    (row,) = steps_of(tmp_path / "run")
    about_kl = [name for name in row if name.startswith(("kl/", "ref/"))]
    assert bool(about_kl) == is_held, "without a reference there is no KL to report"
    assert row["train/kl_penalty"] == 0.0 or is_held
