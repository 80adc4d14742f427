"""The worker: order by number, each request once, errors as results, results that are late."""

from types import SimpleNamespace

import pytest
from tests.waiting import SECONDS

from klamp_standin import futures
from klamp_standin.futures import Lane, Worker
from klamp_standin.protocol import Refused


@pytest.fixture
def worker():
    worker = Worker()
    worker.lanes["run"] = Lane(0)
    yield worker
    worker.close()


def test_requests_of_a_run_are_carried_out_by_number(worker):
    done = []
    for number in (2, 1, 3, 0):
        worker.submit(str(number), lambda n=number: done.append(n) or {"n": n}, lane="run", number=number)
    assert worker.wait("3", SECONDS) == {"n": 3}
    assert done == [0, 1, 2, 3]


def test_the_same_request_is_carried_out_once(worker):
    done = []
    for _ in range(3):
        worker.submit("a", lambda: done.append(1) or {"times": len(done)})
    assert worker.wait("a", SECONDS) == {"times": 1}
    assert worker.wait("a", SECONDS) == {"times": 1}
    assert done == [1]


def test_an_error_is_a_result_and_the_worker_goes_on(worker):
    def refuse():
        raise Refused("no")

    worker.submit("a", refuse)
    worker.submit("b", lambda: 1 / 0)
    worker.submit("c", lambda: {"fine": True})
    assert worker.wait("a", SECONDS) == {"error": "no", "category": "user"}
    assert worker.wait("b", SECONDS) == {"error": "ZeroDivisionError: division by zero", "category": "server"}
    assert worker.wait("c", SECONDS) == {"fine": True}


def test_a_late_result_is_held_back_and_holds_up_nobody(worker, monkeypatch):
    """Only what is slept moves the worker's clock, which begins at 100 s."""
    clock = [100.0]
    time = SimpleNamespace(monotonic=lambda: clock[-1], sleep=lambda seconds: clock.append(clock[-1] + seconds))
    monkeypatch.setattr(futures, "time", time)
    worker.submit("late", dict, late=0.5)
    worker.submit("other", dict)
    assert worker.wait("other", SECONDS) == {} and clock[-1] == 100.0
    assert worker.wait("late", 0.125) is None and clock[-1] == 100.125
    assert worker.wait("late", SECONDS) == {} and clock[-1] == 100.5
