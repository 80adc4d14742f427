"""The model behind the stand-in: gradients over the wire equal plain autograd, AdamW is torch's, runs do not mix."""

import pytest
import tinker
import torch
from peft import LoraConfig, get_peft_model
from tests.standin import ready
from tests.waiting import SECONDS
from tinker import types

from klamp_standin import serve, tiny_model

SEQUENCES = [[1, 2, 3, 4, 5, 6], [7, 8, 9], [10, 11, 12, 13]]


@pytest.fixture(scope="module")
def double():
    with serve(tiny_model().double()) as standin:
        yield standin


def datums(**rows):
    found = []
    for i, sequence in enumerate(SEQUENCES):
        inputs = {"target_tokens": torch.tensor(sequence[1:])}
        inputs |= {name: make(i, len(sequence) - 1) for name, make in rows.items()}
        found.append(types.Datum(model_input=types.ModelInput.from_ints(sequence[:-1]), loss_fn_inputs=inputs))
    return found


def noise(scale, shift=0.0):
    return lambda i, n: shift + scale * torch.randn(n, generator=torch.Generator().manual_seed(i))


def reference_gradient(standin, loss):
    """Loss and gradient without any of the stand-in's code: peft's own model, one sequence at a time."""
    lora = LoraConfig(r=4, lora_alpha=32, target_modules="all-linear")
    model = get_peft_model(tiny_model().double(), lora)
    tensors = standin.weights()
    total = torch.zeros((), dtype=torch.float64)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in tensors:
                parameter.copy_(tensors[name])
    for i, sequence in enumerate(SEQUENCES):
        logits = model(torch.tensor([sequence[:-1]])).logits[0]
        total = total + loss(i, logits.log_softmax(-1).gather(-1, torch.tensor(sequence[1:])[:, None])[:, 0])
    total.backward()
    return float(total.detach()), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.fixture
def client(double):
    service = tinker.ServiceClient(base_url=double.url, api_key=double.api_key)
    client = ready(service.create_lora_training_client(double.base_model, rank=4, seed=2, train_unembed=False))
    weights = double.weights()
    with torch.no_grad():  # B is zero at the start, and then A has no gradient
        for name, tensor in weights.items():
            if "lora_B" in name:
                tensor.normal_(0, 0.05, generator=torch.Generator().manual_seed(len(name)))
    return client


def assert_equal_gradients(standin, expected):
    found = {name: tensor.grad for name, tensor in standin.weights().items()}
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient.norm() > 1e-4, name
        assert (found[name] - gradient).norm() <= 1e-6 * gradient.norm(), name


OLD, FACTOR = noise(0.3, -4.2), noise(1.0)
BOUNDS = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.3}


def ppo(i, x):
    ratio, a = torch.exp(x - OLD(i, len(x))), FACTOR(i, len(x))
    return -torch.minimum(ratio * a, ratio.clamp(0.9, 1.3) * a).sum()


def squares(i, x):
    return ((x * FACTOR(i, len(x))) ** 2).sum()


LOSSES = {
    "cross_entropy": ({"weights": FACTOR}, None, lambda i, x: -(FACTOR(i, len(x)) * x).sum()),
    "ppo": ({"logprobs": OLD, "advantages": FACTOR}, BOUNDS, ppo),
    "custom": ({}, None, squares),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_over_the_wire_is_autograd(double, client, name):
    inputs, config, loss = LOSSES[name]
    if name == "custom":
        client.forward_backward_custom(
            datums(), lambda data, rows: (sum(loss(i, x) for i, x in enumerate(rows)), {})
        ).result(timeout=SECONDS)
    else:
        result = client.forward_backward(datums(**inputs), name, loss_fn_config=config).result(timeout=SECONDS)
    value, expected = reference_gradient(double, loss)
    if name != "custom":  # whose value the SDK's own process has
        assert result.metrics["loss:sum"] == pytest.approx(value, rel=1e-6)
    assert_equal_gradients(double, expected)


def test_an_optimizer_step_is_that_of_torch(double, client):
    before = {name: tensor.detach().clone() for name, tensor in double.weights().items()}
    params = {"learning_rate": 0.01, "beta1": 0.8, "beta2": 0.9, "eps": 1e-8, "weight_decay": 0.1}
    plain = {name: tensor.clone().requires_grad_(True) for name, tensor in before.items()}
    optimizer = torch.optim.AdamW(plain.values(), lr=0.01, betas=(0.8, 0.9), eps=1e-8, weight_decay=0.1)
    for _ in range(2):
        client.forward_backward(datums(weights=noise(1.0)), "cross_entropy").result(timeout=SECONDS)
        gradients = {name: tensor.grad.clone() for name, tensor in double.weights().items()}
        norm = torch.cat([g.flatten() for g in gradients.values()]).norm()
        answer = client.optim_step(types.AdamParams(**params, grad_clip_norm=1.0)).result(timeout=SECONDS)
        assert answer.metrics["grad_norm:mean"] == pytest.approx(float(norm), rel=1e-6)
        for name, tensor in plain.items():
            tensor.grad = gradients[name] / (norm + 1e-6)
        optimizer.step()
    assert norm > 1.0
    for name, tensor in double.weights().items():
        assert not tensor.equal(before[name])
        assert tensor.grad is None
        torch.testing.assert_close(tensor, plain[name], rtol=1e-9, atol=1e-12)
