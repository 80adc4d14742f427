"""The state behind the stand-in: names, runs, promises, and the order in which a run's requests are done."""

from __future__ import annotations

import pytest
from tests.klamp_standin.routes import in_process, new_run, result

from klamp.tasks import arithmetic_tokenizer
from klamp_standin.faults import Fault
from klamp_standin.protocol import Refused


@pytest.fixture(scope="module")
def service():
    with in_process() as made:
        yield made


def test_one_base_model_is_served(service):
    service.check_name("base")
    for name in ("other", None):
        with pytest.raises(Refused, match="no base model") as caught:
            service.check_name(name)
        assert caught.value.status == 404


def test_a_run_is_found_by_its_id(service):
    model_id = new_run(service)
    assert service.run(model_id).weights.shape.rank > 0
    with pytest.raises(Refused, match="no training run 'x'"):
        service.run("x")


def test_stop_strings_need_a_tokenizer(service):
    with pytest.raises(Refused, match="needs a tokenizer"):
        service.decode([1, 2])
    tokenizer = arithmetic_tokenizer()
    with in_process() as other:
        other.tokenizer = tokenizer
        assert other.decode(tokenizer("12", add_special_tokens=False)["input_ids"]) == "12"


def test_a_promise_is_kept_and_a_failing_one_says_so(service):
    answer = service.promise("kept", lambda: {"found": 1}, ())
    assert result(service, answer) == {"found": 1}
    broken = service.promise("broken", lambda: {"found": 1}, [Fault(kind="fail", route="asample")])
    assert result(service, broken) == {"error": "RuntimeError: a fault was asked for", "category": "server"}


def test_a_slow_answer_is_held_back(service, clock):
    answer = service.promise("slow", lambda: {"found": 1}, [Fault(kind="slow", route="asample", seconds=0.5)])
    assert service.worker.wait(answer["request_id"], 0.125) is None
    assert result(service, answer) == {"found": 1}
    assert clock[-1] == 100.5


def test_requests_of_a_run_are_done_by_number_and_of_an_unknown_run_refused(service):
    model_id, done = new_run(service, 1), []
    for number in (2, 1):
        body = {"model_id": model_id, "seq_id": number}
        last = service.ordered(body, lambda n=number: done.append(n) or {}, ())
    result(service, last)
    result(service, {"request_id": f"{model_id}:2"})
    assert done == [1, 2]
    with pytest.raises(Refused, match="no training run 'nobody'"):
        service.ordered({"model_id": "nobody", "seq_id": 1}, dict, ())
