"""Every loss of TRL against the stock class: exact if klamp's fields are untouched, to 1e-5 with its scoring or k3.

The trainers are built once; recorded micro-batches go through each under every option, which TRL reads at each loss.
"""

import copy
import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import trl
from tests.hosts.trl.hosts import LENGTH, dataset, klamp_trainer, noisy, saved, stock_trainer
from tests.hosts.trl.losses import gradient_of

pytestmark = pytest.mark.usefixtures("cheap_passes")

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
CASES = [
    (loss_type, option)
    for row, option in enumerate(OPTIONS)
    for column, loss_type in enumerate(LOSS_TYPES)
    if option == "plain" or (row + column) % 4 == 0
]
"""Every loss without an option, and every option with two losses: neither klamp's hook nor its scoring reads them."""
BETA = 0.7
SMALL = 1e-5
OWN = "the entropy bonus needs the entropy's gradient"
"""The only option whose loss is left to TRL's scoring."""


@pytest.fixture(scope="module")
def trainers(base: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The same policy in TRL's own trainer and in klamp's: with its fields untouched, with fast scoring, with k3."""
    folder = tmp_path_factory.mktemp("base")
    policy = noisy(base)
    policy.config._name_or_path = saved(base, folder / "base")
    made: dict[str, Any] = {"stock": stock_trainer(copy.deepcopy(policy), folder, beta=BETA)}
    kinds = {"untouched": {}, "fast": {"fast_scoring": True}, "k3": {"kl_estimator": "k3", "kl_gradient": "own"}}
    for name, fields in kinds.items():
        made[name] = klamp_trainer(copy.deepcopy(policy), folder, beta=BETA, **fields)
    return made


@pytest.fixture(scope="module")
def inputs(trainers: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """One micro-batch that TRL made, and what its options would make of it."""
    trainer = trainers["stock"]
    torch.manual_seed(3)
    rows = [row for row in dataset().to_list()[:2] for _ in range(2)]
    first = trainer._generate_and_score_completions(rows)
    first["completion_mask"][1, LENGTH // 2 :] = 0
    first["advantages"] = torch.tensor([1.0, -0.5, 0.5, -1.0])  # by another torch's draws all could be 0
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
        "half silent": first | {"old_per_token_logps": old, "advantages": torch.tensor([1.0, 0.0, 0.0, -1.0])},
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
    trainer._metrics["train"].clear()
    with options_set(trainer, options):
        loss = trainer.compute_loss(trainer.model, dict(inputs))
        return loss.item(), gradient_of(trainer, loss)


def test_these_are_all_losses_that_the_installed_trl_has() -> None:
    source = inspect.getsource(trl.GRPOTrainer._compute_loss)
    named = re.findall(r'self\.loss_type (?:==|in) (\[.*?\]|"\w+")', source)
    assert set(re.findall(r'"(\w+)"', " ".join(named))) == set(LOSS_TYPES)


@pytest.mark.parametrize(("loss_type", "option"), CASES)
@pytest.mark.parametrize("beta", [BETA, 0.0])
def test_untouched_fields_and_fast_scoring_leave_every_loss_as_it_is(
    trainers: Any, inputs: Any, loss_type: str, option: str, beta: float
) -> None:
    stock, untouched, fast = (trainers[name] for name in ("stock", "untouched", "fast"))
    fast._klamp.fast.reasons.clear()
    options = {"loss_type": loss_type, "beta": beta} | OPTIONS[option]
    some = ("half silent", "later update", "tools") if beta else ("half silent",)
    for name in inputs if option == "plain" else some:
        expected, gradient = loss_and_gradient(stock, inputs[name], options)
        found, found_gradient = loss_and_gradient(untouched, inputs[name], options)
        assert found == expected, name
        assert torch.equal(found_gradient, gradient), name
        assert gradient.any() or name == "nothing to train on"
        found, found_gradient = loss_and_gradient(fast, inputs[name], options)
        assert found == pytest.approx(expected, abs=SMALL, rel=SMALL), name
        assert (found_gradient - gradient).abs().max() <= SMALL * max(1.0, float(gradient.abs().max())), name
        for metric, values in stock._metrics["train"].items():
            assert fast._metrics["train"][metric] == pytest.approx(values, abs=SMALL, rel=SMALL, nan_ok=True), metric
    assert fast._klamp.fast.reasons == ({OWN} if option == "entropy bonus" else set()), "the scoring was klamp's"


@pytest.mark.parametrize(("loss_type", "option"), CASES)
def test_k3_with_its_own_gradient_is_trls_kl_without_bias_correction(
    trainers: Any, inputs: Any, loss_type: str, option: str
) -> None:
    options = {"loss_type": loss_type} | OPTIONS[option] | {"use_bias_correction_kl": False}
    for name in inputs if option == "plain" else ("later update",):
        expected, gradient = loss_and_gradient(trainers["stock"], inputs[name], options)
        found, found_gradient = loss_and_gradient(trainers["k3"], inputs[name], options)
        assert found == pytest.approx(expected, abs=2e-6, rel=2e-6), name
        assert (found_gradient - gradient).abs().max() <= 1e-6 * max(1.0, float(gradient.abs().max())), name


@torch.no_grad()
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_evaluation_is_that_of_the_stock_class(trainers: Any, inputs: Any, loss_type: str, monkeypatch: Any) -> None:
    for name in ("later update", "truncated"):
        losses = {}
        for kind in ("stock", "untouched", "k3"):
            monkeypatch.setattr(trainers[kind].model, "training", False)
            with options_set(trainers[kind], {"loss_type": loss_type, "use_bias_correction_kl": False}):
                losses[kind] = trainers[kind].compute_loss(trainers[kind].model, dict(inputs[name])).item()
        assert losses["untouched"] == losses["stock"] == pytest.approx(losses["k3"], abs=1e-6, rel=1e-6)
