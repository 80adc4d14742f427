"""`klamp.trl.check` and `CheckCallback`: real trainers, sound and broken, and what a check leaves as it was."""

import copy
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trl
from tests.hosts.trl.hosts import arguments, build, distiller, klamp_trainer, saved

from klamp.audit.capture import Capture
from klamp.audit.conclude import conclude
from klamp.audit.verdict import WrongKL
from klamp.config import TRL_LOSS_TYPES
from klamp.errors import ConfigError, KLWarning
from klamp.trl import CheckCallback, check

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
BETA = 0.05
ROOMY = {"per_device_train_batch_size": 8, "num_generations": 4}


@pytest.fixture(scope="module")
def policy(base: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    kept = copy.deepcopy(base)
    kept.config._name_or_path = saved(base, tmp_path_factory.mktemp("base"))
    return kept


def stock(policy: Any, folder: Path, kind: Any = trl.GRPOTrainer, **options: Any) -> Any:
    return build(kind, copy.deepcopy(policy), arguments(trl.GRPOConfig, folder, **{"beta": BETA, **ROOMY, **options}))


LOSSES = sorted(TRL_LOSS_TYPES)


@pytest.mark.parametrize(
    ("loss_type", "bias"), [*((name, True) for name in LOSSES), *((name, False) for name in LOSSES[::3])]
)
def test_stock_trl_before_training(loss_type: str, bias: bool, policy: Any, tmp_path: Path) -> None:
    trainer = stock(policy, tmp_path, loss_type=loss_type, use_bias_correction_kl=bias, epsilon_high=3.0)
    verdict = check(trainer)
    assert (verdict.ok, verdict.kl) == ((True, "reverse") if bias else (False, "forward")), str(verdict)
    assert verdict.beta == pytest.approx(BETA, rel=1e-3) and "reference-moved" in verdict.codes()
    assert bias or check(trainer, means="forward").ok


LAGGING = [{"num_iterations": 1}, {"delta": 4.0}, *({"loss_type": x} for x in LOSSES)]


@pytest.mark.filterwarnings("ignore::klamp.KLWarning")
@pytest.mark.parametrize("bias", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("options", [LAGGING[0], *(pytest.param(x, marks=pytest.mark.slow) for x in LAGGING[1:])])
def test_stock_trl_with_a_lagging_policy(options: Any, bias: bool, policy: Any, tmp_path: Path) -> None:
    callback = CheckCallback((4,))
    given = {"use_bias_correction_kl": bias, "epsilon_high": 3.0, "temperature": 0.7, "max_steps": 4, **options}
    followed(policy, tmp_path, callback, **given)
    (verdict,) = callback.verdicts.values()
    assert (verdict.ok, verdict.kl) == ((True, "reverse") if bias else (False, "forward")), str(verdict)


def with_input(name: str, change: Any) -> Any:
    def loss(self: Any, model: Any, inputs: Any) -> Any:
        return trl.GRPOTrainer._compute_loss(self, model, {**inputs, name: change(inputs[name])})

    return type("Changed", (trl.GRPOTrainer,), {"_compute_loss": loss})


SUBCLASSES = {
    "policy-reversed": with_input("advantages", torch.neg),
    "shift": with_input("ref_per_token_logps", lambda x: x.roll(1, 1)),
    "off-mask-gradient": with_input("completion_mask", torch.ones_like),
    "check-failed": with_input("completion_mask", lambda _: 1 / 0),
}


@pytest.mark.parametrize("code", SUBCLASSES)
def test_a_subclass(code: str, policy: Any, tmp_path: Path) -> None:
    verdict = check(stock(policy, tmp_path, SUBCLASSES[code]))
    assert verdict.ok is (None if code == "check-failed" else False) and code in verdict.codes(), str(verdict)


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
def test_klamps_own_trainer(options: Any, ok: bool | None, kl: str, policy: Any, tmp_path: Path) -> None:
    verdict = check(klamp_trainer(copy.deepcopy(policy), tmp_path, beta=BETA, **ROOMY, **options))
    assert (verdict.ok, verdict.kl) == (ok, kl), str(verdict)


@pytest.mark.parametrize(("beta", "kl"), [(1.0, "reverse"), (0.5, "js"), (0.0, "forward")])
def test_distillation(beta: float, kl: str, base: Any, teacher: Any, tmp_path: Path) -> None:
    trainer = distiller(base, teacher, tmp_path, kind=trl.DistillationTrainer, beta=beta)
    other = check(trainer, means="forward" if kl == "reverse" else "reverse")
    assert [(x.ok, x.kl) for x in (check(trainer), other)] == [(True, kl), (False, kl)]


def test_klamps_own_distillation(base: Any, teacher: Any, tmp_path: Path) -> None:
    verdict = check(distiller(base, teacher, tmp_path, teacher_estimator="k1"))
    assert (verdict.ok, verdict.kl) == (True, "reverse"), str(verdict)


def state(trainer: Any) -> dict[str, Any]:
    """What a check could change: fields, counts, random numbers, weights, gradients."""
    tensors = dict(trainer.model.state_dict()) | {f"{n}.grad": x.grad for n, x in trainer.model.named_parameters()}
    drawn = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())  # type: ignore[index]
    counts = (str(trainer.state), str(trainer._metrics), str(trainer._klamp), len(trainer.accelerator._dataloaders))
    return {"drawn": drawn, "counts": counts, **vars(trainer), **{n: x.tolist() for n, x in tensors.items()}}


def test_a_check_leaves_everything_as_it_was(policy: Any, tmp_path: Path) -> None:
    trained: list[list[float]] = []
    for look in (False, True):
        trainer = klamp_trainer(copy.deepcopy(policy), tmp_path, beta=BETA, **ROOMY)
        torch.manual_seed(3)
        if look:
            for parameter in trainer.model.parameters():
                parameter.grad = torch.full_like(parameter, 0.5)
            before = state(trainer)
            assert check(trainer).ok and state(trainer) == before
            trainer.model.zero_grad()
        trainer.train()
        trained.append([x.double().sum().item() for x in trainer.model.parameters()])
    assert trained[0] == trained[1]


def test_it_takes_a_trainer_and_a_loss_without_a_kl(policy: Any, tmp_path: Path) -> None:
    assert check(stock(policy, tmp_path, beta=0.0)).ok
    with pytest.raises(ConfigError, match="trainer"):
        check(object())


def followed(policy: Any, folder: Path, *callbacks: CheckCallback, **options: Any) -> Any:
    steps = {"num_iterations": 2, "max_steps": 2, "gradient_accumulation_steps": 2, "learning_rate": 3e-3}
    trainer = stock(policy, folder, **{**steps, **options})
    for callback in callbacks:
        trainer.add_callback(callback)
    torch.manual_seed(1)
    trainer.train()
    return trainer


def test_during_training(policy: Any, tmp_path: Path) -> None:
    callback = CheckCallback((1, 2), save=True)
    watched, bare = followed(policy, tmp_path, callback), followed(policy, tmp_path)
    assert [(step, x.ok, x.kl) for step, x in callback.verdicts.items()] == [(1, True, "reverse"), (2, True, "reverse")]
    assert callback.verdicts[2].beta == pytest.approx(BETA, rel=1e-3)
    assert json.loads((tmp_path / "check-2.json").read_text())["kl"] == "reverse"
    assert conclude(Capture.load(tmp_path / "check-2.safetensors")).kl == "reverse"
    assert "compute_loss" not in vars(watched)
    assert all(map(torch.equal, watched.model.parameters(), bare.model.parameters()))


def test_a_wrong_kl_is_warned_of_once_or_stops_the_run(policy: Any, tmp_path: Path) -> None:
    callback = CheckCallback((1, 2))
    with pytest.warns(KLWarning, match="kl|KL") as warned:
        followed(policy, tmp_path, callback, use_bias_correction_kl=False)
    findings = {x.codes("wrong") for x in callback.verdicts.values()}
    assert sum("klamp check" in str(x.message) for x in warned) == len(findings)
    with pytest.warns(KLWarning), pytest.raises(WrongKL):
        followed(policy, tmp_path, CheckCallback((1,), raise_if_wrong=True), use_bias_correction_kl=False)


def test_an_error_of_the_check_stops_no_training(policy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("klamp.hosts.trl.checking.check_loss", lambda *_, **__: 1 / 0)
    callback = CheckCallback((1,))
    followed(policy, tmp_path, callback)
    assert callback.verdicts[1].codes() == ("check-failed",)
