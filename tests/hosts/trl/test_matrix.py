"""Every loss of TRL against the stock class: bit for bit with klamp's fields untouched, to 1e-6 with klamp's k3.

The trainers are built once; recorded micro-batches go through both under every option, which TRL reads at each loss.
"""

import copy
import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import trl
from tests.hosts.trl.hosts import LENGTH, dataset, klamp_trainer, model, noisy, saved, stock_trainer

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo", "luspo")

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"current_gradient_accumulation_steps": 2, "steps_per_generation": 2},
    "misaligned accumulation": {"current_gradient_accumulation_steps": 2, "steps_per_generation": 4},
    "no bias correction": {"use_bias_correction_kl": False},
    "sequence ratio": {"importance_sampling_level": "sequence"},
    "sequence ratio, no bias correction": {"importance_sampling_level": "sequence", "use_bias_correction_kl": False},
    "entropy mask": {"top_entropy_quantile": 0.5},
    "entropy bonus": {"entropy_coef": 0.1, "_entropy_bonus_enabled": True},
    "off-policy mask": {"off_policy_mask_threshold": 0.05},
    "two-sided clip": {"delta": 1.5},
    "vllm ratios": {"use_vllm": True, "vllm_importance_sampling_correction": True},
    "narrow clip": {"epsilon_low": 0.01, "epsilon_high": 0.02},
}
INPUTS = ("first update", "later update", "truncated", "tools", "nothing to train on")
SOME = ("later update", "tools")
BETA = 0.7


@dataclass
class Three:
    """The same policy in three trainers: TRL's own, klamp's with its fields untouched, klamp's with k3 / own."""

    stock: Any
    untouched: Any
    k3: Any
    inputs: dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Three:
    folder = tmp_path_factory.mktemp("base")
    base = model()
    path = saved(base, folder / "base")
    policy = noisy(base)
    policy.config._name_or_path = path
    trainers = [
        stock_trainer(copy.deepcopy(policy), folder, beta=BETA),
        klamp_trainer(copy.deepcopy(policy), folder, beta=BETA),
        klamp_trainer(copy.deepcopy(policy), folder, beta=BETA, kl_estimator="k3", kl_gradient="own"),
    ]
    for trainer in trainers:
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = 1
    return Three(*trainers, inputs=_recorded(trainers[0]))


def _recorded(trainer: Any) -> dict[str, dict[str, Any]]:
    """One micro-batch that TRL made, and what its options would make of it."""
    torch.manual_seed(3)
    rows = [row for row in dataset().to_list()[:2] for _ in range(2)]
    first = trainer._generate_and_score_completions(rows)
    first["completion_mask"][1, LENGTH // 2 :] = 0
    first["importance_sampling_ratio"] = torch.rand(4, first["completion_ids"].shape[1]) + 0.5
    mask = first["completion_mask"]
    with torch.no_grad():
        later = trainer._get_per_token_logps_and_entropies(
            trainer.model,
            torch.cat([first["prompt_ids"], first["completion_ids"]], 1),
            torch.cat([first["prompt_mask"], mask], 1),
            mask.shape[1],
        )[0]
    old = later + 0.1 * torch.randn_like(later)
    truncated = mask.clone()
    truncated[2] = 0
    tools = torch.ones_like(mask)
    tools[:, 1:3] = 0
    return {
        "first update": first,
        "later update": first | {"old_per_token_logps": old},
        "truncated": first | {"completion_mask": truncated, "old_per_token_logps": old},
        "tools": first | {"tool_mask": tools, "old_per_token_logps": old},
        "nothing to train on": first | {"completion_mask": mask * 0, "old_per_token_logps": old},
    }


@contextmanager
def options_set(trainer: Any, options: dict[str, Any]) -> Iterator[None]:
    owners = [(owner, name) for name in options for owner in (trainer, trainer.args) if hasattr(owner, name)]
    assert {name for _, name in owners} == set(options)
    before = [(owner, name, getattr(owner, name)) for owner, name in owners]
    for owner, name in owners:
        setattr(owner, name, options[name])
    yield
    for owner, name, value in before:
        setattr(owner, name, value)


def loss_and_gradient(trainer: Any, inputs: dict[str, Any], options: dict[str, Any]) -> tuple[float, torch.Tensor]:
    trainer.model.zero_grad()
    with options_set(trainer, options):
        loss = trainer.compute_loss(trainer.model, dict(inputs))
        loss.backward()
    return loss.item(), torch.cat([p.grad.flatten().clone() for p in trainer.model.parameters() if p.requires_grad])


def test_these_are_all_losses_that_the_installed_trl_has() -> None:
    source = inspect.getsource(trl.GRPOTrainer._compute_loss)
    named = re.findall(r'self\.loss_type (?:==|in) (\[.*?\]|"\w+")', source)
    assert set(re.findall(r'"(\w+)"', " ".join(named))) == set(LOSS_TYPES)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_untouched_fields_leave_every_loss_as_it_is(three: Three, loss_type: str, option: str) -> None:
    options = {"loss_type": loss_type} | OPTIONS[option]
    for name in INPUTS if option == "plain" else SOME:
        expected, gradient = loss_and_gradient(three.stock, three.inputs[name], options)
        found, found_gradient = loss_and_gradient(three.untouched, three.inputs[name], options)
        assert found == expected, name
        assert torch.equal(found_gradient, gradient), name
        assert gradient.abs().sum() > 0 or name == "nothing to train on"


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_k3_with_its_own_gradient_is_trls_kl_without_bias_correction(three: Three, loss_type: str, option: str) -> None:
    options = {"loss_type": loss_type} | OPTIONS[option] | {"use_bias_correction_kl": False}
    for name in INPUTS if option == "plain" else SOME[:1]:
        expected, gradient = loss_and_gradient(three.stock, three.inputs[name], options)
        found, found_gradient = loss_and_gradient(three.k3, three.inputs[name], options)
        assert found == pytest.approx(expected, abs=2e-6, rel=2e-6), name
        assert (found_gradient - gradient).abs().max() <= 1e-6 * max(1.0, float(gradient.abs().max())), name


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_evaluation_is_that_of_the_stock_class(three: Three, loss_type: str) -> None:
    for trainer in (three.stock, three.untouched, three.k3):
        trainer.model.eval()
    try:
        for name in INPUTS:
            losses = []
            for trainer in (three.stock, three.untouched, three.k3):
                with torch.no_grad(), options_set(trainer, {"loss_type": loss_type, "use_bias_correction_kl": False}):
                    losses.append(trainer.compute_loss(trainer.model, dict(three.inputs[name])).item())
            assert losses[1] == losses[0]
            assert losses[2] == pytest.approx(losses[0], abs=1e-6, rel=1e-6)
    finally:
        for trainer in (three.stock, three.untouched, three.k3):
            trainer.model.train()
