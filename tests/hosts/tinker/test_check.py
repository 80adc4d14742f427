"""`klamp.tinker.check` inside a custom loss, through the real SDK over real HTTP."""

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
    """A custom loss: PPO's ratio and a KL that is k3 times the ratio (sound), k3 differentiated, or subtracted."""

    def loss(data, logprobs_list):
        total = torch.zeros(())
        for datum, policy in zip(data, logprobs_list, strict=True):
            x = {name: row.to_torch() for name, row in datum.loss_fn_inputs.items()}
            delta, ratio = policy - x["ref_logprobs"], (policy - x["logprobs"]).exp()
            k3 = torch.expm1(-delta) + delta
            kl = {"forward": k3, "away": -ratio * k3}.get(kind, ratio * k3)
            total = total + ((BETA * kl - ratio * x["advantages"]) * x["mask"]).sum() / 10
        if kind == "klamp":
            total, _ = compute_grpo_kl_loss(data, logprobs_list, BETA)
        if verdicts is not None:
            verdicts.append(check(total, data, logprobs_list, beta=BETA, clip=(0.2, 0.2), once=False))
        return total, {}

    return loss


@pytest.mark.filterwarnings("ignore::klamp.KLWarning")
@pytest.mark.parametrize(("kind", "kl"), [("sound", "reverse"), ("forward",) * 2, ("away",) * 2, ("klamp", "reverse")])
def test_a_custom_loss_over_the_wire(kind, kl, trainer, reference, standin):
    data, verdicts = datums(reference), []
    move(trainer, data)
    trainer.forward_backward_custom(data, custom(kind, verdicts)).result()
    (verdict,) = verdicts
    assert (verdict.ok, verdict.kl) == (kl == "reverse", kl), str(verdict)
    assert abs(verdict.beta) == pytest.approx(BETA, rel=1e-3)
    with_it = over_the_wire(standin)
    for tensor in standin.weights().values():
        tensor.grad.zero_()
    trainer.forward_backward_custom(data, custom(kind, None)).result()
    assert all(torch.equal(x, with_it[name]) for name, x in over_the_wire(standin).items())
