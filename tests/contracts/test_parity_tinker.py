"""One configuration, three trainers: the same tokens and weights give the same loss and gradient to 1e-6.

Tinker: the real SDK, over HTTP to the stand-in, gradient as the server gathers it. klamp: its trainer's own scoring and
loss. TRL: `GRPOTrainer._compute_loss`, stock where TRL has the same KL, with `klamp.trl` where it has not. All three
hold a LoRA adapter that has moved away from the reference, and datums whose sampler is neither.
"""

import pytest
import tinker
import torch
from tests.batches import flat_batch
from tests.hosts.tinker.wire import ADVANTAGES, PROMPTS, RESPONSES, datums, move
from tests.hosts.trl.hosts import stock_trainer
from torch.nn.utils.rnn import pad_sequence

from klamp import KLConfig
from klamp.config.loss import LossConfig, build_objective
from klamp.core.objective import grpo_loss
from klamp.lab.sampling import Completions
from klamp.scoring.scorer import score
from klamp.tinker import forward_backward_kl
from klamp.tinker.testing import serve, tiny_model
from klamp.trl import attach
from klamp_standin.model import BaseModel, LoraShape

BETA, LENGTH = 0.3, 8
STOCK = {
    "k3 as it stands": ({"beta": BETA, "kl_gradient": "own"}, {"use_bias_correction_kl": False}),
    "k3 times the ratio": ({"beta": BETA, "kl_off_policy": "token"}, {"use_bias_correction_kl": True}),
    "no KL": ({"beta": 0.0}, {}),
}
KLAMP = {
    "default": KLConfig(beta=BETA),
    "k2": KLConfig(beta=BETA, kl_estimator="k2", kl_gradient="own"),
    "sequence": KLConfig(beta=BETA, kl_horizon="sequence"),
    "bounded, weighted": KLConfig(beta=BETA, kl_off_policy="token", kl_max_weight=1.05, kl_max_log_ratio=0.5),
}
pytestmark = pytest.mark.filterwarnings("ignore::klamp.errors.KLWarning")


@pytest.fixture(scope="module")
def standin():
    with serve() as running, pytest.MonkeyPatch.context() as environment:
        for name, value in running.environment.items():
            environment.setenv(name, value)
        yield running


class Step:
    """Datums, and a training run that has taken one step away from the reference; over the wire and as a local copy."""

    def __init__(self, standin):
        self.standin, service = standin, tinker.ServiceClient()
        self.client = service.create_lora_training_client(
            base_model=standin.base_model, rank=4, seed=1, train_unembed=False
        ).result()
        self.data = datums(service.create_sampling_client(base_model=standin.base_model).result())
        move(self.client, self.data)
        self.completions = Completions(**padded_tokens())

    def local_model(self):
        """A model with the weights of the training run, apart from every other."""
        model = BaseModel(tiny_model()).template(LoraShape(rank=4, train_unembed=False))
        with torch.no_grad():
            for name, tensor in self.standin.weights().items():
                model.get_parameter(name).copy_(tensor)
        return model

    def rows(self, name):
        """One row of the datums as klamp's and TRL's trainers hold it: the response only, padded on the right."""
        pairs = zip(self.data, PROMPTS, strict=True)
        rows = [datum.loss_fn_inputs[name].to_torch()[len(prompt) - 1 :] for datum, prompt in pairs]
        return pad_sequence(rows, batch_first=True)

    def through_tinker(self, kl, loss_type):
        loss = LossConfig(loss_type=loss_type, scale_rewards="none")
        result = forward_backward_kl(self.client, self.data, kl=kl, loss=loss, max_length=LENGTH).result()
        return result.metrics["train/loss"], {name: x.grad for name, x in self.standin.weights().items()}

    def through_klamp(self, kl, loss_type):
        model = self.local_model()
        logprobs = score(model, self.completions, temperature=1.0).logprobs
        batch = flat_batch(
            policy_logprobs=logprobs,
            mask=self.completions.mask,
            advantages=torch.tensor(ADVANTAGES),
            old_logprobs=self.rows("logprobs"),
            sampler_logprobs=self.rows("logprobs"),
            ref_logprobs=self.rows("ref_logprobs"),
        )
        objective = build_objective(kl, LossConfig(loss_type=loss_type, scale_rewards="none"), max_length=LENGTH)
        return self.backward(model, grpo_loss(batch, objective).loss)

    def through_trl(self, trainer, loss_type):
        completions = self.completions
        trainer.loss_type, trainer.max_completion_length = loss_type, LENGTH
        inputs = {
            "prompt_ids": completions.prompt_ids,
            "prompt_mask": completions.prompt_mask,
            "completion_ids": completions.ids,
            "completion_mask": completions.mask.long(),
            "advantages": torch.tensor(ADVANTAGES),
            "old_per_token_logps": self.rows("logprobs"),
            "ref_per_token_logps": self.rows("ref_logprobs"),
            "num_items_in_batch": completions.mask.sum(),
        }
        return self.backward(trainer.model, trainer.compute_loss(trainer.model, inputs))

    def backward(self, model, loss):
        loss.backward()
        return loss.item(), {name: model.get_parameter(name).grad for name in self.standin.weights()}


def padded_tokens():
    pairs = ((PROMPTS, "left"), (RESPONSES, "right"))
    prompt_ids, ids = (pad_sequence([*map(torch.tensor, x)], batch_first=True, padding_side=side) for x, side in pairs)
    prompts = {"prompt_ids": prompt_ids, "prompt_mask": (prompt_ids > 0).long()}
    ended = torch.ones(len(ids), dtype=torch.bool)
    return prompts | {"ids": ids, "mask": ids > 0, "sampler_logprobs": torch.zeros(ids.shape), "ended": ended}


@pytest.fixture
def step(standin):
    return Step(standin)


def assert_same(found, expected):
    assert found[0] == pytest.approx(expected[0], abs=1e-6)
    norm = torch.stack([x.norm() for x in expected[1].values()]).norm()
    difference = torch.stack([(found[1][name] - expected[1][name]).norm() for name in expected[1]]).norm()
    assert found[1].keys() == expected[1].keys()
    assert norm > 1e-2
    assert difference < 1e-6 * max(1, norm)


@pytest.mark.parametrize(
    ("name", "loss_type"),
    [*((name, "bnpo") for name in STOCK), ("k3 as it stands", "grpo"), ("k3 times the ratio", "dr_grpo")],
)
def test_tinker_klamp_and_stock_trl(step, name, loss_type):
    fields, options = STOCK[name]
    kl, trainer = KLConfig(**fields), stock_trainer(step.local_model())
    trainer.beta = kl.beta
    vars(trainer.args).update(options)
    expected = step.through_klamp(kl, loss_type)
    assert_same(step.through_trl(trainer, loss_type), expected)
    assert_same(step.through_tinker(kl, loss_type), expected)


@pytest.mark.parametrize("name", KLAMP)
def test_tinker_klamp_and_trl_with_klamp(step, name):
    kl = KLAMP[name]
    trainer = attach(stock_trainer(step.local_model()), kl)
    expected = step.through_klamp(kl, "bnpo")
    assert_same(step.through_trl(trainer, "bnpo"), expected)
    assert_same(step.through_tinker(kl, "bnpo"), expected)
