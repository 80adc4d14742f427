"""Uploaded losses: the same value and gradient as on this machine, and nothing but the operations that are known."""

from __future__ import annotations

import pytest
import tinker
import torch
from tests.waiting import SECONDS
from tinker import types

from klamp_standin.custom import CustomLoss
from klamp_standin.protocol import Refused

pytestmark = pytest.mark.skipif(
    not hasattr(tinker.ServiceClient, "create_custom_loss"), reason="custom losses came with SDK 0.36"
)


def loss(logprobs, advantages, scale):
    kept = torch.where(advantages != 0, logprobs, torch.zeros_like(logprobs))
    total = -(scale * advantages * kept.exp()).sum() + kept[1:].square().mean()
    return total, {"custom/mean:mean": kept.mean(), "custom/count:sum": (advantages != 0).sum()}


def datums():
    rows = [([1, 2, 3], [0.0, 1.0, -1.0], 2.0), ([4, 5], [0.5, 0.0], -1.0)]
    return [
        types.Datum(
            model_input=types.ModelInput.from_ints(tokens),
            loss_fn_inputs={
                "target_tokens": torch.tensor(tokens) + 1,
                "advantages": torch.tensor(advantages),
                "scale": torch.tensor(scale),
            },
        )
        for tokens, advantages, scale in rows
    ]


def test_the_server_runs_it_in_one_pass_with_the_same_gradient(standin, service, trainer):
    handle = service.create_custom_loss(loss, {"logprobs": 1, "advantages": 1, "scale": 0}).result(timeout=SECONDS)
    before = standin.requests["forward_backward"]
    result = trainer.forward_backward_custom(datums(), handle).result(timeout=SECONDS)
    assert standin.requests["forward_backward"] == before + 1
    found = {name: tensor.grad.clone() for name, tensor in standin.weights().items()}
    trainer.optim_step(types.AdamParams(learning_rate=0.0)).result(timeout=SECONDS)

    def here(data, logprobs_list):
        rows = [d.loss_fn_inputs for d in data]
        parts = [
            loss(x, row["advantages"].to_torch(), row["scale"].to_torch())
            for x, row in zip(logprobs_list, rows, strict=True)
        ]
        return sum(part for part, _ in parts), {"mean": sum(float(m["custom/mean:mean"]) for _, m in parts) / 2}

    local = trainer.forward_backward_custom(datums(), here).result(timeout=SECONDS)
    assert result.metrics["loss:sum"] == pytest.approx(local.metrics["loss:sum"], rel=1e-6)
    assert result.metrics["custom/mean:mean"] == pytest.approx(local.metrics["mean"], rel=1e-6)
    assert result.metrics["custom/count:sum"] == 3.0
    for name, tensor in standin.weights().items():
        torch.testing.assert_close(found[name], tensor.grad, rtol=1e-5, atol=1e-8)


def test_data_without_what_it_reads_are_refused(service, trainer):
    handle = service.create_custom_loss(
        lambda logprobs, advantages: ((logprobs * advantages).sum(), {}), {"logprobs": 1, "advantages": 1}
    ).result(timeout=SECONDS)
    bare = [
        types.Datum(model_input=types.ModelInput.from_ints([1]), loss_fn_inputs={"target_tokens": torch.tensor([2])})
    ]
    with pytest.raises(tinker.BadRequestError, match=r"'advantages'\] of rank 1 is missing"):
        trainer.forward_backward(bare, "custom", {"loss_id": handle.loss_id}).result(timeout=SECONDS)
    with pytest.raises(tinker.NotFoundError, match="no custom loss 'x'"):
        trainer.forward_backward(bare, "custom", {"loss_id": "x"}).result(timeout=SECONDS)


NODES = [
    {"op": "call_function", "target": "torch.load", "name": "a"},
    {"op": "call_function", "target": "os.system", "name": "a"},
    {"op": "call_function", "target": "torch.utils.data.Dataset", "name": "a"},
    {"op": "call_function", "target": "operator.__getitem__", "name": "a"},
    {"op": "call_method", "target": "numpy", "name": "a"},
    {"op": "call_module", "target": "linear", "name": "a"},
    {"op": "call_function", "target": "builtins.getattr", "name": "a", "args": [{"ref": "x"}, "__class__"]},
    {"op": "call_function", "target": "torch.exp", "name": "a", "args": [{"code": "1"}]},
]


@pytest.mark.parametrize("node", NODES, ids=lambda node: node["target"])
def test_an_operation_that_is_not_known_is_not_carried_out(node):
    first = {"op": "placeholder", "target": "logprobs", "name": "x"}
    with pytest.raises(Refused, match="may not"):
        CustomLoss(name="bad", inputs=(), nodes=[first, node])(torch.zeros(2), {})
