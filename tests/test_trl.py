"""The door to TRL: a trainer that is built already gets klamp's KL, and whose trainer it is decides how."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from tests.hosts.trl.hosts import arguments, build, klamp_trainer, model, run, saved

import klamp.trl as door
from klamp.config import KLConfig
from klamp.errors import ConfigError
from klamp.hosts.trl.grpo_config import UNSLOTH, host_of
from klamp.hosts.trl.hooks import KLMixin
from klamp.hosts.unsloth.hooks import UnslothMixin
from klamp.trl import attach


class Subclass(trl.GRPOTrainer):
    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        return super()._compute_loss(model, inputs) + 1.0


@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_attach_gives_a_built_trainer_the_same_kl(tmp_path: Path, beta: float) -> None:
    base = model()
    path = saved(base, tmp_path / "base")
    policy = copy.deepcopy(base)
    policy.config._name_or_path = path
    args = arguments(trl.GRPOConfig, tmp_path, beta=beta)
    attached = attach(build(Subclass, policy, args), KLConfig(beta=0.3, kl_clip_method="hard", kl_reference_length=4))
    options = {"kl_clip_method": "hard", "kl_reference_length": 4}
    expected, _ = run(klamp_trainer, tmp_path / "b", path, base, max_steps=2, **options)
    losses: list[float] = []
    inner = attached.compute_loss
    attached.compute_loss = lambda *a, **k: (losses.append(inner(*a, **k)), losses[-1])[1]
    torch.manual_seed(11)
    attached.train()
    assert [loss.item() - 1.0 for loss in losses] == pytest.approx(expected, abs=1e-6)
    assert isinstance(attached, Subclass)
    assert type(attached).__name__ == "KLSubclass"
    assert attached.args.beta == 0.3


def test_attach_refuses_what_it_cannot_upgrade(tmp_path: Path) -> None:
    trainer = klamp_trainer(model(), tmp_path, beta=0.1)
    with pytest.raises(ConfigError, match="not attached to yet"):
        attach(trainer, KLConfig())
    with pytest.raises(ConfigError, match="not attached to yet"):
        attach(object(), KLConfig())
    stock = build(trl.GRPOTrainer, model(), arguments(trl.GRPOConfig, tmp_path))
    stock.train()
    with pytest.raises(ConfigError, match="before train"):
        attach(stock, KLConfig())
    fresh = build(trl.GRPOTrainer, model(), arguments(trl.GRPOConfig, tmp_path))
    with pytest.raises(ConfigError, match="kl_early_stop"):
        attach(fresh, KLConfig(kl_early_stop=0.1))
    assert type(fresh) is trl.GRPOTrainer


def test_the_host_decides_who_attaches_and_who_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class of Unsloth's among the bases of a trainer; TRL's is everything else."""
    calls: list[tuple[object, object]] = []
    monkeypatch.setattr(door, "unsloth_hook", lambda trainer: UnslothMixin)
    monkeypatch.setattr(door, "attach_to", lambda trainer, kl, hook, ref_model: calls.append((hook, ref_model)))
    monkeypatch.setattr(door, "read_effective", lambda trainer: calls.append(("effective", host_of(trainer))))
    theirs = type(UNSLOTH, (), {})
    ours = type("Derived", (theirs,), {})
    for trainer in (object.__new__(trl.GRPOTrainer), theirs(), ours()):
        door.attach(trainer, KLConfig(), ref_model="given")
        door.effective(trainer)
    assert calls == [
        (KLMixin, "given"),
        ("effective", "TRL"),
        *[(UnslothMixin, "given"), ("effective", "Unsloth")] * 2,
    ]
