"""The door to TRL: a trainer that is built already gets klamp's KL, and whose trainer it is decides how."""

from pathlib import Path
from typing import Any

import pytest
import trl
from tests.hosts.trl.hosts import arguments, build, klamp_trainer, model, saved, stock_trainer
from tests.hosts.trl.losses import run

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
    path, clip = saved(base, tmp_path / "base"), {"kl_clip_method": "hard", "kl_reference_length": 4}

    def attaching(policy: Any, folder: Path, *, trainer: dict[str, Any], **options: Any) -> Any:
        args = arguments(trl.GRPOConfig, folder, **options | {"beta": beta})
        return attach(build(Subclass, policy, args), KLConfig(beta=0.3, **clip))

    expected, _ = run(klamp_trainer, tmp_path / "b", path, base, max_steps=2, **clip)
    losses, attached = run(attaching, tmp_path, path, base, max_steps=2)
    assert [loss - 1.0 for loss in losses] == pytest.approx(expected, abs=1e-6)
    assert isinstance(attached, Subclass) and type(attached).__name__ == "KLSubclass"
    assert attached.args.beta == 0.3


def test_attach_refuses_what_it_cannot_upgrade(tmp_path: Path) -> None:
    for taken in (klamp_trainer(model(), tmp_path, beta=0.1), object()):
        with pytest.raises(ConfigError, match="not attached to yet"):
            attach(taken, KLConfig())
    stock = stock_trainer(model(), tmp_path)
    stock.train()
    with pytest.raises(ConfigError, match="before train"):
        attach(stock, KLConfig())
    fresh = stock_trainer(model(), tmp_path)
    with pytest.raises(ConfigError, match="kl_early_stop"):
        attach(fresh, KLConfig(kl_early_stop=0.1))
    assert type(fresh) is trl.GRPOTrainer


def test_the_host_decides_who_attaches_and_who_reads(monkeypatch: pytest.MonkeyPatch) -> None:
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
