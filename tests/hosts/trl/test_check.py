"""`klamp.trl.check` and `CheckCallback`: real trainers, sound and broken, and what a check leaves as it was."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import trl
from tests.hosts.trl.hosts import arguments, build, klamp_trainer, noisy, saved, stock_trainer
from tests.hosts.trl.test_distillation import made

from klamp.audit.capture import Capture
from klamp.audit.conclude import conclude
from klamp.audit.verdict import Verdict, WrongKL
from klamp.config import TRL_LOSS_TYPES
from klamp.errors import ConfigError, KLWarning
from klamp.hosts.trl.checking import Listener
from klamp.hosts.trl.grpo_config import UNSLOTH
from klamp.trl import CheckCallback, check

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
BETA = 0.05
ROOMY = {"per_device_train_batch_size": 8, "num_generations": 4}


@pytest.fixture(scope="module")
def path(base: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved(base, tmp_path_factory.mktemp("base"))


def policy(base: Any, path: str) -> Any:
    made = copy.deepcopy(base)
    made.config._name_or_path = path
    return made


def stock(base: Any, path: str, folder: Path, kind: Any = None, **options: Any) -> Any:
    given = {"beta": BETA, **ROOMY, **options}
    if kind is None:
        return stock_trainer(policy(base, path), folder, **given)
    return build(kind, policy(base, path), arguments(trl.GRPOConfig, folder, **given))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("loss_type", sorted(TRL_LOSS_TYPES))
def test_stock_trl_before_training(loss_type: str, bias: bool, base: Any, path: str, tmp_path: Path) -> None:
    trainer = stock(base, path, tmp_path, loss_type=loss_type, use_bias_correction_kl=bias, epsilon_high=3.0)
    verdict = check(trainer)
    assert (verdict.ok, verdict.kl) == ((True, "reverse") if bias else (False, "forward")), str(verdict)
    assert verdict.beta == pytest.approx(BETA, rel=1e-3) and "reference-moved" in verdict.codes()
    if not bias:
        assert check(trainer, means="forward").ok


def test_without_a_kl(base: Any, path: str, tmp_path: Path) -> None:
    assert check(stock(base, path, tmp_path, beta=0.0)).ok


class Negated(trl.GRPOTrainer):
    def compute_loss(self, *given: Any, **named: Any) -> Any:
        return -super().compute_loss(*given, **named)


class Shifted(trl.GRPOTrainer):
    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        name = "ref_per_token_logps"
        return super()._compute_loss(model, {**inputs, name: inputs[name].roll(1, 1)})


class Unmasked(trl.GRPOTrainer):
    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        name = "completion_mask"
        return super()._compute_loss(model, {**inputs, name: torch.ones_like(inputs[name])})


class Failing(trl.GRPOTrainer):
    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        raise ValueError("no loss today")


@pytest.mark.parametrize(
    ("kind", "ok", "code"),
    [
        (Negated, False, "policy-reversed"),
        (Shifted, False, "shift"),
        (Unmasked, False, "off-mask-gradient"),
        (Failing, None, "check-failed"),
    ],
)
def test_a_subclass(kind: Any, ok: bool | None, code: str, base: Any, path: str, tmp_path: Path) -> None:
    verdict = check(stock(base, path, tmp_path, kind))
    assert verdict.ok is ok and code in verdict.codes(), str(verdict)


@pytest.mark.parametrize(
    ("options", "ok", "kl"),
    [
        ({}, True, "reverse"),
        ({"kl_gradient": "forward"}, True, "forward"),
        ({"kl_gradient": "own"}, False, "forward"),
        ({"kl_placement": "advantage", "kl_estimator": "k1"}, None, "unknown"),
        ({"kl_estimator": "exact"}, None, "unknown"),
    ],
)
def test_klamps_own_trainer(options: Any, ok: bool | None, kl: str, base: Any, path: str, tmp_path: Path) -> None:
    verdict = check(klamp_trainer(policy(base, path), tmp_path, beta=BETA, **ROOMY, **options))
    assert (verdict.ok, verdict.kl) == (ok, kl), str(verdict)


@pytest.mark.parametrize(("beta", "kl"), [(1.0, "reverse"), (0.5, "js"), (0.0, "forward")])
def test_distillation(beta: float, kl: str, base: Any, tmp_path: Path) -> None:
    trainer = made(base, noisy(base, 0.3, 9), tmp_path, kind=trl.DistillationTrainer, beta=beta)
    verdict = check(trainer)
    assert (verdict.ok, verdict.kl) == (True, kl), str(verdict)
    wrong = check(trainer, means="forward" if kl == "reverse" else "reverse")
    assert (wrong.ok, wrong.kl) == (False, kl)


def test_klamps_own_distillation(base: Any, tmp_path: Path) -> None:
    verdict = check(made(base, noisy(base, 0.3, 9), tmp_path, teacher_estimator="k1"))
    assert (verdict.ok, verdict.kl) == (True, "reverse"), str(verdict)


def test_a_check_leaves_everything_as_it_was(base: Any, path: str, tmp_path: Path) -> None:
    trained: list[list[float]] = []
    for look in (False, True):
        trainer = klamp_trainer(policy(base, path), tmp_path, beta=BETA, **ROOMY)
        torch.manual_seed(3)
        if look:
            for parameter in trainer.model.parameters():
                parameter.grad = torch.full_like(parameter, 0.5)
            weights, before = copy.deepcopy(trainer.model.state_dict()), dict(vars(trainer))
            drawn = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # type: ignore[index]
            counts = str(trainer.state), str(trainer._metrics), str(trainer._klamp)
            assert check(trainer).ok
            assert vars(trainer) == before and counts == (
                str(trainer.state),
                str(trainer._metrics),
                str(trainer._klamp),
            )
            assert (random.getstate(), np.random.get_state()[1].tolist()) == drawn[:2]  # type: ignore[index]
            assert torch.equal(torch.get_rng_state(), drawn[2]) and not trainer.accelerator._dataloaders
            assert all(torch.equal(x, weights[name]) for name, x in trainer.model.state_dict().items())
            assert all((x.grad == 0.5).all() for x in trainer.model.parameters())
            trainer.model.zero_grad()
        trainer.train()
        trained.append([x.double().sum().item() for x in trainer.model.parameters()])
    assert trained[0] == trained[1]


def test_it_takes_a_trainer() -> None:
    with pytest.raises(ConfigError, match="trainer"):
        check(object())


def followed(base: Any, path: str, folder: Path, callback: CheckCallback | None, **options: Any) -> Any:
    trainer = stock(
        base, path, folder, num_iterations=2, max_steps=4, gradient_accumulation_steps=2, learning_rate=3e-3, **options
    )
    if callback is not None:
        trainer.add_callback(callback)
    torch.manual_seed(1)
    trainer.train()
    return trainer


def test_during_training(base: Any, path: str, tmp_path: Path) -> None:
    callback = CheckCallback((1, 4), save=True)
    watched = followed(base, path, tmp_path, callback)
    assert [(step, x.ok, x.kl) for step, x in callback.verdicts.items()] == [(1, True, "reverse"), (4, True, "reverse")]
    assert callback.verdicts[4].beta == pytest.approx(BETA, rel=1e-3)
    assert json.loads((tmp_path / "check-4.json").read_text())["kl"] == "reverse"
    assert conclude(Capture.load(tmp_path / "check-4.safetensors")).kl == "reverse"
    bare = followed(base, path, tmp_path, None)
    assert "compute_loss" not in vars(watched)
    for one, two in zip(watched.model.parameters(), bare.model.parameters(), strict=True):
        assert torch.equal(one, two)


def test_a_wrong_kl_is_warned_of_once_or_stops_the_run(base: Any, path: str, tmp_path: Path) -> None:
    callback = CheckCallback((3, 4))
    with pytest.warns(KLWarning, match="kl|KL") as warned:
        followed(base, path, tmp_path, callback, use_bias_correction_kl=False)
    assert sum("klamp check" in str(x.message) for x in warned) == len(
        {x.codes("wrong") for x in callback.verdicts.values()}
    )
    trainer = stock(base, path, tmp_path, use_bias_correction_kl=False)
    trainer.add_callback(CheckCallback((1,), raise_if_wrong=True))
    with pytest.warns(KLWarning), pytest.raises(WrongKL):
        trainer.train()
    assert trainer.state.global_step == 0


def test_an_error_of_the_check_stops_no_training(
    base: Any, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("klamp.hosts.trl.checking.check_loss", lambda *_, **__: 1 / 0)
    callback = CheckCallback((1,))
    followed(base, path, tmp_path, callback)
    assert callback.verdicts[1].codes() == ("check-failed",)


FAKE = """
class UnslothEfficientGRPO(torch.autograd.Function):
    @staticmethod
    def forward(ctx, new_logps, old_logps, ref_logps, sampling_per_token_logps, lm_head, _input_ids, _mask,
                _advantages, beta, scaler, n_chunks, extra_kwargs, upstream_scale):
        pass
    @staticmethod
    def apply(new, old, ref, sampling, head, ids, mask, advantages, beta, *rest):
        delta = new - ref
        each = -(new - new.detach()).exp() * advantages[:, None] + beta * (delta**2 / 2)
        return (each * mask).sum() / mask.sum(), 0, 0
def compute_loss(self, model, inputs):
    x = inputs
    return UnslothEfficientGRPO.apply(x["new"], None, x["ref"], None, None, x["ids"], x["mask"], x["advantages"],
                                      self.beta, None, 1, {}, None)[0]
"""


@pytest.mark.parametrize("known", [True, False])
def test_unsloths_loss_function_is_listened_to(known: bool) -> None:
    names: dict[str, Any] = {"torch": torch}
    exec(FAKE if known else FAKE.replace("scaler,", "what,"), names)
    host = type(UNSLOTH, (), {"compute_loss": names["compute_loss"], "beta": 0.1, "save": None})
    trainer: Any = host()
    trainer.processing_class = SimpleNamespace(pad_token_id=0, eos_token_id=1)
    trainer.state = SimpleNamespace(global_step=0, max_steps=1)
    new = (-3 * torch.rand(4, 9, generator=torch.Generator().manual_seed(0))).requires_grad_()
    inputs = {
        "new": new,
        "ref": new.detach() - 0.3 * torch.arange(36).reshape(4, 9).sin().abs(),
        "ids": torch.full((4, 9), 5),
    }
    inputs |= {"mask": torch.ones(4, 9), "advantages": torch.tensor([1.0, -1.0, 0.5, -0.5])}
    verdicts: list[Verdict] = []
    original = names["UnslothEfficientGRPO"]
    with Listener(trainer, verdicts.append, None):
        trainer.compute_loss(None, inputs)
    assert (verdicts[0].ok, verdicts[0].kl) == ((True, "reverse") if known else (None, None)), str(verdicts[0])
    assert names["UnslothEfficientGRPO"] is original and "compute_loss" not in vars(trainer)
