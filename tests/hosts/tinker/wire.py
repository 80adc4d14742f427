"""Gradients over the wire and by plain autograd, of the same datums and weights."""

import asyncio
import functools

import tinker
import torch

from klamp.tinker import build_datum, compute_reference_logprobs
from klamp.tinker.testing import tiny_model
from klamp_standin.model import BaseModel, LoraShape, Weights

PROMPTS = [[1, 2, 3], [1, 2, 3], [4, 5], [4, 5]]
RESPONSES = [[10, 11, 12], [13], [14, 15, 16, 17], [18, 19]]
ADVANTAGES = [1.0, -0.5, 0.7, -1.2]


@functools.cache
def scored(reference):
    return asyncio.run(compute_reference_logprobs(reference, PROMPTS, RESPONSES))


def datums(reference, **changes):
    """Datums whose sampler is a little away from the reference, so that ratios and KL are not trivial."""
    ref, generator = scored(reference), torch.Generator().manual_seed(0)
    sampler = [[x + 0.3 * (float(torch.rand((), generator=generator)) - 0.5) for x in row] for row in ref]
    rows = zip(PROMPTS, RESPONSES, ADVANTAGES, sampler, ref, strict=True)
    return [build_datum(*row, **changes) for row in rows]


def move(trainer, data):
    taught = []
    for datum in data[:2]:
        inputs = {"target_tokens": datum.loss_fn_inputs["target_tokens"], "weights": datum.loss_fn_inputs["mask"]}
        taught.append(tinker.Datum(model_input=datum.model_input, loss_fn_inputs=inputs))
    trainer.forward_backward(taught, "cross_entropy").result()
    trainer.optim_step(tinker.AdamParams(learning_rate=3e-2)).result()


@functools.cache
def base_model():
    return BaseModel(tiny_model())


def over_the_wire(standin):
    """The gradient that the newest training run has gathered."""
    return {name: tensor.grad.clone() for name, tensor in standin.weights().items()}


def by_autograd(standin, data, loss):
    """Value and gradient of `loss(data, logprobs_list)`, backward straight through a model with the same weights."""
    tensors = {name: x.detach().clone().requires_grad_(True) for name, x in standin.weights().items()}
    weights = Weights(shape=LoraShape(rank=4), tensors=tensors)
    tokens = [datum.model_input.to_ints() for datum in data]
    targets = [datum.loss_fn_inputs["target_tokens"].to_torch() for datum in data]
    value, _ = loss(data, base_model().logprobs(weights, tokens, targets))
    value.backward()
    return value.item(), {name: x.grad for name, x in tensors.items()}


def assert_same_gradient(found, expected, *, times=1.0, within=1e-6):
    """Equal to 1e-6 of the gradient's norm, and not trivially so."""
    norm = torch.stack([x.norm() for x in expected.values()]).norm() * times
    difference = torch.stack([(found[name] - times * expected[name]).norm() for name in expected]).norm()
    assert found.keys() == expected.keys()
    assert norm > 1e-3
    assert difference <= within * norm
