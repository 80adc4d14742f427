"""The model of the stand-in: losses and gradients over the wire are plain autograd, AdamW is torch's, checkpoints."""

import pytest
import tinker
import torch
from peft import LoraConfig, get_peft_model
from tests.standin import opened, ready
from tests.waiting import SECONDS
from tinker import types

from klamp_standin import losses, serve, tiny_model
from klamp_standin.protocol import Refused, TrainingRequest

SEQUENCES = [[1, 2, 3, 4, 5, 6], [7, 8, 9], [10, 11, 12, 13]]


@pytest.fixture(scope="module")
def double():
    with serve(tiny_model().double()) as standin:
        yield standin


@pytest.fixture(scope="module")
def service_of_double(double):
    return opened(double)


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
def client(double, service_of_double):
    made = service_of_double.create_lora_training_client(double.base_model, rank=4, seed=2, train_unembed=False)
    client = ready(made)
    with torch.no_grad():  # B is zero at the start, and then A has no gradient
        for name, tensor in double.weights().items():
            if "lora_B" in name:
                tensor.normal_(0, 0.05, generator=torch.Generator().manual_seed(len(name)))
    return client


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
    value, expected = reference_gradient(double, loss)
    if name == "custom":  # whose value the SDK's own process has
        client.forward_backward_custom(
            datums(), lambda data, rows: (sum(loss(i, x) for i, x in enumerate(rows)), {})
        ).result(timeout=SECONDS)
    else:
        result = client.forward_backward(datums(**inputs), name, loss_fn_config=config).result(timeout=SECONDS)
        assert result.metrics["loss:sum"] == pytest.approx(value, rel=1e-6)
    gradients = {name: tensor.grad for name, tensor in double.weights().items()}
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient.norm() > 1e-4, name
        assert (gradients[name] - gradient).norm() <= 1e-6 * gradient.norm(), name


def test_an_optimizer_step_is_that_of_torch(double, client):
    before = {name: tensor.detach().clone() for name, tensor in double.weights().items()}
    params = types.AdamParams(learning_rate=0.01, beta1=0.8, beta2=0.9, eps=1e-8, weight_decay=0.1, grad_clip_norm=1.0)
    plain = {name: tensor.clone().requires_grad_(True) for name, tensor in before.items()}
    optimizer = torch.optim.AdamW(plain.values(), lr=0.01, betas=(0.8, 0.9), eps=1e-8, weight_decay=0.1)
    for _ in range(2):
        client.forward_backward(datums(weights=noise(1.0)), "cross_entropy").result(timeout=SECONDS)
        gradients = {name: tensor.grad.clone() for name, tensor in double.weights().items()}
        norm = torch.cat([g.flatten() for g in gradients.values()]).norm()
        answer = client.optim_step(params).result(timeout=SECONDS)
        assert answer.metrics["grad_norm:mean"] == pytest.approx(float(norm), rel=1e-6)
        for name, tensor in plain.items():
            tensor.grad = gradients[name] / (norm + 1e-6)
        optimizer.step()
    assert norm > 1.0
    for name, tensor in double.weights().items():
        assert not tensor.equal(before[name])
        assert tensor.grad is None
        torch.testing.assert_close(tensor, plain[name], rtol=1e-9, atol=1e-12)


TOKENS, TARGETS = types.ModelInput.from_ints([1, 2, 3]), torch.tensor([2, 3, 4])
DATA = [types.Datum(model_input=TOKENS, loss_fn_inputs={"target_tokens": TARGETS, "weights": torch.ones(3)})]


def train(client, steps=1):
    for _ in range(steps):
        client.forward_backward(DATA, "cross_entropy").result(timeout=SECONDS)
        client.optim_step(types.AdamParams(learning_rate=0.01)).result(timeout=SECONDS)


def loss(client):
    return client.forward(DATA, "cross_entropy").result(timeout=SECONDS).metrics["loss:sum"]


def test_a_run_goes_on_from_its_checkpoint_in_another_server(tmp_path):
    with serve(folder=tmp_path) as standin:
        client = ready(opened(standin).create_lora_training_client(standin.base_model, rank=2, seed=0))
        train(client, 2)
        path = client.save_state("two").result(timeout=SECONDS).path
        saved = loss(client)
        train(client)
        expected = loss(client)
    assert path.startswith("tinker://") and path.endswith("/weights/two")
    with serve(folder=tmp_path) as standin:
        service = opened(standin)
        whole = ready(service.create_training_client_from_state_with_optimizer(path))
        weights_only = ready(service.create_training_client_from_state(path))
        assert loss(whole) == loss(weights_only) == saved
        train(whole)
        train(weights_only)
        assert loss(whole) == expected != loss(weights_only)
        with pytest.raises(tinker.NotFoundError, match="no checkpoint"):
            ready(service.create_training_client_from_state(path + "x"))


def test_a_snapshot_stays_when_the_weights_move(trainer, service):
    prompt = types.ModelInput.from_ints([1, 2, 3, 4])
    snapshot = ready(trainer.save_weights_and_get_sampling_client())
    path = trainer.save_weights_for_sampler("named").result(timeout=SECONDS).path
    before = snapshot.compute_logprobs(prompt).result(timeout=SECONDS)
    train(trainer, 2)
    for still in (snapshot, ready(service.create_sampling_client(model_path=path))):
        assert still.compute_logprobs(prompt).result(timeout=SECONDS) == before
    moved = ready(trainer.save_weights_and_get_sampling_client())
    assert moved.compute_logprobs(prompt).result(timeout=SECONDS) != before


LOGPROBS = [torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64), torch.tensor([-0.1, -3.0], dtype=torch.float64)]
RECORDED = [torch.tensor([-1.5, -2.0, -0.1]), torch.tensor([-0.1, -2.0])]
ADVANTAGES = [torch.tensor([1.0, -1.0, -2.0]), torch.tensor([0.5, -1.0])]
INPUTS = [{"logprobs": q, "advantages": a} for q, a in zip(RECORDED, ADVANTAGES, strict=True)]


RATIOS = [(1.6487212707, 1.0), (1.0, -1.0), (0.6703200460, -2.0), (1.0, 0.5), (0.3678794412, -1.0)]


def test_importance_sampling_is_minus_the_sum_of_ratio_times_advantage():
    expected = -sum(r * a for r, a in RATIOS)
    assert float(losses.summed("importance_sampling", LOGPROBS, INPUTS, {})) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("low", "high"), [(0.8, 1.2), (0.5, 1.3)])
def test_ppo_takes_the_smaller_of_clipped_and_unclipped(low, high):
    expected = -sum(min(r * a, min(max(r, low), high) * a) for r, a in RATIOS)
    config = {} if low == 0.8 else {"clip_low_threshold": low, "clip_high_threshold": high}
    assert float(losses.summed("ppo", LOGPROBS, INPUTS, config)) == pytest.approx(expected, rel=1e-6)


def request(loss_fn="ppo", *, tokens=(1, 2, 3), config=None, forward_only=False, **inputs):
    given = {
        "target_tokens": TARGETS,
        "logprobs": torch.tensor([-1.0, -1.0, -1.0]),
        "advantages": torch.tensor([0.0, 1.0, 1.0]),
    } | inputs
    return TrainingRequest(
        model_id="m",
        seq_id=1,
        tokens=[list(tokens)],
        inputs=[{name: value for name, value in given.items() if value is not None}],
        loss_fn=loss_fn,
        loss_fn_config=config or {},
        forward_only=forward_only,
    )


def supervised(targets, weights=None):
    return request("cross_entropy", logprobs=None, advantages=None, target_tokens=targets, weights=weights)


ONES = torch.ones(3, 2)
REFUSED = {
    "mask": (request(mask=torch.ones(3)), r"not known to this loss \['mask'\]"),
    "missing": (request(advantages=None), r"missing \['advantages'\]"),
    "length": (request(advantages=torch.ones(2)), r"shape \(2,\); model_input has 3 tokens"),
    "dtype": (request(advantages=torch.ones(3).long()), "torch.int64; torch.float32 is needed"),
    "targets": (request(target_tokens=torch.ones(3)), "torch.float32; torch.int64 is needed"),
    "nan": (request(logprobs=torch.tensor([torch.nan, 0, 0])), "holds NaN"),
    "vocabulary": (request(target_tokens=torch.tensor([2, 3, 64])), "outside the vocabulary of 64"),
    "too long": (request(tokens=range(9)), "9 tokens; the model takes 8"),
    "loss": (request("dpo"), "unknown loss_fn 'dpo'"),
    "setting": (request(config={"cliprange": 0.2}), r"'cliprange'\] is no setting of ppo"),
    "a weight for some": (supervised(ONES.long(), RECORDED[0]), r"'weights'\] has shape \(3,\)"),
    "candidates of others": (supervised(ONES[:2].long(), ONES), r"shape \(2, 2\); model_input has 3 tokens"),
    "a candidate": (supervised(64 * ONES.long(), ONES), "outside the vocabulary"),
    "weights": (supervised(TARGETS), r"missing \['weights'\]"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_by_name(name):
    asked, message = REFUSED[name]
    with pytest.raises(Refused, match=message):
        losses.check(asked, 64, 8)


def test_a_refusal_is_an_http_error_and_holds_up_nothing(trainer):
    bare = types.Datum(model_input=TOKENS, loss_fn_inputs={"target_tokens": TARGETS})
    with pytest.raises(tinker.BadRequestError, match="missing .*'advantages', 'logprobs'"):
        trainer.forward_backward([bare], "ppo").result(timeout=SECONDS)
    assert len(trainer.forward([bare], "cross_entropy").result(timeout=SECONDS).loss_fn_outputs) == 1
