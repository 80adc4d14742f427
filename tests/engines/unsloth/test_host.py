"""Which class is Unsloth's, which versions are taken, and where its own KL stops."""

from __future__ import annotations

import math
from importlib import metadata

import pytest
import torch
import trl
from tests.engines.unsloth.hosts import HOST

from klamp.errors import UnsupportedVersion
from klamp.hosts.trl.patched import host_class
from klamp.hosts.unsloth import host
from klamp.hosts.unsloth.host import check_version, in_place, loss_function, silent_clamps
from klamp.hosts.unsloth.loss import LossWithKL


def test_the_class_is_found_in_any_subclass_and_nowhere_else() -> None:
    class Mine(trl.GRPOTrainer):
        pass

    assert host_class(trl.GRPOTrainer) is host_class(Mine) is HOST
    assert HOST.__name__ == "_UnslothGRPOTrainer"
    assert host_class(trl.SFTTrainer) is None
    assert "trl.trainer.grpo_trainer" not in {c.__module__ for c in trl.GRPOTrainer.__mro__}


@pytest.mark.parametrize("package", ["unsloth", "unsloth_zoo"])
def test_versions_that_were_not_tried_are_refused(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert host.OLDEST <= check_version() == metadata.version("unsloth") <= host.NEWEST
    found = metadata.version
    for version in ("2025.12.1", "2027.1.1"):
        monkeypatch.setattr(metadata, "version", lambda name, v=version: v if name == package else found(name))
        with pytest.raises(UnsupportedVersion, match=rf"got: {package} {version}"):
            check_version()


def test_a_loss_function_that_is_gone_or_another_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    names, function = loss_function(HOST)

    class Other:
        @staticmethod
        def forward(ctx: object, _new_hidden_states: object, beta: float) -> None: ...

    monkeypatch.setitem(names, host.LOSS, Other)
    with pytest.raises(UnsupportedVersion, match="takes _new_hidden_states, beta"):
        loss_function(HOST)
    monkeypatch.delitem(names, host.LOSS)
    with pytest.raises(UnsupportedVersion, match="it is not there"):
        loss_function(HOST)
    monkeypatch.undo()
    assert loss_function(HOST)[1] is function


def test_the_function_is_put_back_whatever_happens() -> None:
    names, function = loss_function(HOST)
    stand_in = LossWithKL(function, lambda call: pytest.fail("not called"))
    with pytest.raises(KeyError, match="the loss failed"), in_place(HOST, stand_in):
        raise KeyError("the loss failed" if names[host.LOSS] is stand_in else "not in place")
    assert names[host.LOSS] is function


def test_where_unsloths_own_kl_stops() -> None:
    """Its value stops at 10: exp(-d) - 1 + d = 10 at d = -2.6109, and at d = 11 - exp(-11) above.

    The clamp of the log-ratio at 20 never shows in a value; without it the gradient far below would be NaN.
    """
    clamps = silent_clamps(loss_function(HOST)[1])
    assert clamps.value == 10.0
    assert clamps.below is not None and clamps.above is not None
    assert clamps.below == pytest.approx(-2.610869, abs=host.STEP)
    assert clamps.above == pytest.approx(11 - math.exp(-11), abs=host.STEP)
    for apart in (clamps.below, clamps.above):
        assert math.expm1(-apart) + apart == pytest.approx(10.0, abs=0.02)
    far = torch.tensor([[-100.0]], requires_grad=True)
    (slope,) = torch.autograd.grad(host._own_kl(loss_function(HOST)[1], far), far)
    assert slope.item() == 0.0
