"""`klamp.trl.check` on Unsloth's trainer, whose log-probabilities are arguments of its loss function."""

from pathlib import Path

import pytest
from tests.engines.unsloth.hosts import model, move, saved, trainer

from klamp.trl import check


@pytest.mark.parametrize(("bias", "kl"), [(True, "reverse"), (False, "forward")])
def test_unsloths_own_kl_is_named(bias: bool, kl: str, tmp_path: Path) -> None:
    made = model()
    made.config._name_or_path = saved(made, tmp_path / "base")
    host = trainer(tmp_path, made, beta=0.3, use_bias_correction_kl=bias, per_device_train_batch_size=8)
    move(host.model)
    verdict = check(host)
    assert (verdict.ok, verdict.kl) == (bias, kl), str(verdict)
    assert verdict.beta == pytest.approx(0.3, rel=1e-3)
