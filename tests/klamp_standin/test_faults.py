"""Faults on purpose, as the SDK sees them."""

from __future__ import annotations

import math
import threading
from types import SimpleNamespace

import pytest
import tinker
import torch
from tests.waiting import SECONDS
from tinker import types

from klamp_standin import futures, serve
from klamp_standin.faults import Fault, FaultPlan

PROMPT = types.ModelInput.from_ints([1, 2, 3, 4])


def test_a_fault_strikes_after_so_many_and_so_often():
    plan = FaultPlan([Fault(kind="drop", route="asample", after=1, times=2), Fault(kind="nan", route="optim_step")])
    assert [bool(plan.strike("asample")) for _ in range(5)] == [False, True, True, False, False]
    assert [bool(plan.strike("optim_step")) for _ in range(2)] == [True, False]
    forever = FaultPlan([Fault(kind="drop", route="asample", times=None, scoring=True)])
    assert [bool(forever.strike("asample", scoring=s)) for s in (True, False, True)] == [True, False, True]


def test_a_dropped_request_is_sent_again_and_carried_out_once(standin, reference):
    standin.inject(Fault(kind="drop", route="asample"))
    before = standin.tokens["prompt"]
    assert len(reference.compute_logprobs(PROMPT).result(timeout=SECONDS)) == 4
    assert standin.tokens["prompt"] == before + 4


def test_a_server_error_is_tried_again_by_the_sdk(standin, trainer):
    standin.inject(Fault(kind="status", route="optim_step", status=503))
    assert trainer.optim_step(types.AdamParams()).result(timeout=SECONDS).metrics is not None


def test_none_and_nan_arrive_where_they_were_put(standin, reference):
    standin.inject(Fault(kind="none", route="asample", scoring=True))
    assert [x is None for x in reference.compute_logprobs(PROMPT).result(timeout=SECONDS)] == [True, False, False, True]
    standin.inject(Fault(kind="short", route="asample", scoring=True))
    assert [x is None for x in reference.compute_logprobs(PROMPT).result(timeout=SECONDS)] == [False, False, False]
    standin.inject(Fault(kind="nan", route="asample", scoring=False))
    (row,) = reference.sample(PROMPT, 1, types.SamplingParams(max_tokens=3)).result(timeout=SECONDS).sequences
    assert [math.isnan(x) for x in row.logprobs] == [False, False, True]


def test_nan_from_the_trainer(standin, trainer):
    datum = types.Datum(
        model_input=PROMPT,
        loss_fn_inputs={"target_tokens": torch.tensor([2, 3, 4, 5]), "weights": torch.ones(4)},
    )
    standin.inject(Fault(kind="nan", route="forward_backward"))
    outputs = trainer.forward_backward([datum], "cross_entropy").result(timeout=SECONDS).loss_fn_outputs
    assert [math.isnan(x) for x in outputs[0]["logprobs"].data] == [False, False, False, True]
    assert all(torch.isfinite(x.grad).all() for x in standin.weights().values())


def test_a_failed_request_says_so(standin, trainer):
    standin.inject(Fault(kind="fail", route="optim_step"))
    with pytest.raises(tinker.RequestFailedError, match="a fault was asked for"):
        trainer.optim_step(types.AdamParams()).result(timeout=SECONDS)


def test_a_slow_request_is_late_and_a_dead_server_answers_nobody(monkeypatch):
    """The server's clock stands still until it is let go on, so that the answer is late however slow the machine is."""
    on = threading.Event()
    clock = SimpleNamespace(monotonic=lambda: 0.0, sleep=lambda seconds: seconds and on.wait(SECONDS))
    monkeypatch.setattr(futures, "time", clock)
    with serve(faults=[Fault(kind="slow", route="asample", seconds=2.0)]) as standin:
        service = tinker.ServiceClient(base_url=standin.url, api_key=standin.api_key)
        client = service.create_sampling_client(base_model=standin.base_model)
        client = client.result() if hasattr(client, "result") else client
        slow = client.compute_logprobs(PROMPT)
        with pytest.raises(TimeoutError):
            slow.result(timeout=0.5)
        assert len(client.compute_logprobs(PROMPT).result(timeout=SECONDS)) == 4
        on.set()
        assert len(slow.result(timeout=SECONDS)) == 4
        standin.die()
        with pytest.raises(TimeoutError):
            client.compute_logprobs(PROMPT).result(timeout=1.5)
