"""`klamp.tinker.check` inside a custom loss, through the real SDK over real HTTP."""

from __future__ import annotations

from importlib import metadata

import pytest
import torch
from packaging.version import Version
from tests.hosts.tinker.wire import datums, move, over_the_wire

from klamp.tinker import check, compute_grpo_kl_loss

BETA = 0.3

OLD = Version(metadata.version("tinker")) < Version("0.26")
pytestmark = pytest.mark.skipif(OLD, reason="this SDK passes only targets and weights to a custom loss")


def custom(kind, verdicts):
    """A custom loss: PPO's ratio and a KL that is k2 times the ratio (sound), k3 differentiated, or subtracted."""

    def loss(data, logprobs_list):
        total = torch.zeros(())
        for datum, policy in zip(data, logprobs_list, strict=True):
            x = {name: row.to_torch() for name, row in datum.loss_fn_inputs.items()}
            delta, ratio = policy - x["ref_logprobs"], (policy - x["logprobs"]).exp()
            k3 = torch.expm1(-delta) + delta
            kl = {"sound": ratio * k3, "forward": k3, "away": -ratio * k3}[kind]
            total = total + ((BETA * kl - ratio * x["advantages"]) * x["mask"]).sum()
        if verdicts is not None:
            verdicts.append(check(total / 10, data, logprobs_list, beta=BETA, once=False))
        return total / 10, {}

    return loss


@pytest.mark.filterwarnings("ignore::klamp.KLWarning")
@pytest.mark.parametrize(
    ("kind", "ok", "kl"), [("sound", True, "reverse"), ("forward", False, "forward"), ("away", False, "away")]
)
def test_a_custom_loss_over_the_wire(kind, ok, kl, trainer, reference, standin):
    data, verdicts = datums(reference), []
    move(trainer, data)
    trainer.forward_backward_custom(data, custom(kind, verdicts)).result()
    (verdict,) = verdicts
    assert (verdict.ok, verdict.kl) == (ok, kl), str(verdict)
    assert abs(verdict.beta) == pytest.approx(BETA, rel=1e-3)
    found = over_the_wire(standin)
    for tensor in standin.weights().values():
        tensor.grad.zero_()
    trainer.forward_backward_custom(data, custom(kind, None)).result()
    again = over_the_wire(standin)
    assert all(torch.equal(x, again[name]) for name, x in found.items())


def test_klamps_own_loss_is_sound(trainer, reference):
    data, verdicts = datums(reference), []
    move(trainer, data)

    def loss(data, logprobs_list):
        value, metrics = compute_grpo_kl_loss(data, logprobs_list, BETA)
        verdicts.append(check(value, data, logprobs_list, beta=BETA, clip=(0.2, 0.2), once=False))
        return value, metrics

    trainer.forward_backward_custom(data, loss).result()
    assert (verdicts[0].ok, verdicts[0].kl) == (True, "reverse"), str(verdicts[0])
