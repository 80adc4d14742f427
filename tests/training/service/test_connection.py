"""Every wait has an end, every failure is a klamp error, and no work is begun without a key."""

from __future__ import annotations

import concurrent.futures
import threading

import pytest
from tests.waiting import SECONDS

from klamp.errors import ConfigError, DataError, ModelError
from klamp.training.backends import train_run
from klamp.training.service.connection import Connection, check_key


@pytest.fixture
def connection(standin):
    return Connection(SECONDS)


def test_answers_come_back_futures_waited_for(connection):
    future = concurrent.futures.Future()
    threading.Timer(0.05, lambda: future.set_result(7)).start()
    assert connection.ask("x", lambda: future) == 7
    assert connection.ask("x", lambda: "as it is") == "as it is"


def test_a_wait_ends(connection):
    never = threading.Event()
    for call in (concurrent.futures.Future, lambda: never.wait(2 * SECONDS)):
        connection.seconds = 0.5
        with pytest.raises(ModelError, match="did not answer in time") as caught:
            connection.ask("take a step", call)
        assert "asked to take a step; nothing within 0.5 s" in caught.value.text
        assert connection.where in caught.value.text
        assert "service_timeout" in caught.value.fix
    never.set()


def test_what_the_sdk_raises_becomes_a_klamp_error_with_its_cause_and_one_of_klamp_s_stays(connection):
    def refuse(error):
        raise error

    with pytest.raises(ModelError, match="refused or failed") as caught:
        connection.ask("train", lambda: refuse(ValueError("no such model\nand a long story")))
    assert "ValueError: no such model (" in caught.value.text
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(DataError, match="empty"):
        connection.ask("train", lambda: refuse(DataError("empty")))


def test_a_key_is_asked_for_before_anything_is_begun(run_of, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("TINKER_CREDENTIAL_CMD", raising=False)
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    with pytest.raises(ConfigError, match="no key for the Tinker service") as caught:
        train_run(run_of())
    assert "TINKER_API_KEY" in caught.value.text
    assert not (tmp_path / "run").exists()
    monkeypatch.setenv("TINKER_API_KEY", "tml-x")
    check_key()
    monkeypatch.delenv("TINKER_API_KEY")
    monkeypatch.setenv("TINKER_CREDENTIAL_CMD", "cat key")
    check_key()
