"""verl as it was before each test: what `register` changes is put back."""

from collections.abc import Iterator

import pytest
import torch.optim.optimizer as optimizers
import verl.trainer.distillation.losses as distillation
from verl.workers.utils import losses

from klamp.verl import register

HOOKED = ((losses, "kl_penalty"), (losses, "ppo_loss"), (distillation, "ppo_loss"))
REGISTRIES = ("DISTILLATION_LOSS_REGISTRY", "DISTILLATION_SETTINGS_REGISTRY")


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever is registered in the test is gone after it."""
    for module, name in HOOKED:
        monkeypatch.setattr(module, name, getattr(module, name))
    for name in REGISTRIES:
        monkeypatch.setattr(distillation, name, dict(getattr(distillation, name)))
    of_steps = [optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks]
    before = [dict(hooks) for hooks in of_steps]
    yield
    for hooks, kept in zip(of_steps, before, strict=True):
        hooks.clear()
        hooks.update(kept)


@pytest.fixture
def registered(untouched: None) -> None:
    """klamp's names mean something for the length of the test."""
    register()
