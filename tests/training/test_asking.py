"""Questions over real HTTP: asked again or not, with a key that is seen nowhere, never without an end."""

from __future__ import annotations

import json
import socket
from urllib.error import HTTPError

import pytest
from tests.ports import kept_port
from tests.training.answering import answering, in_turn

from klamp.errors import ConfigError
from klamp.training import vllm_reference
from klamp.training.vllm_reference import FAILURES, KEY, ask, reason, status


@pytest.fixture(autouse=True)
def waits(monkeypatch):
    """The seconds between the tries, which are not waited for."""
    found: list[float] = []
    monkeypatch.setattr(vllm_reference.time, "sleep", found.append)
    return found


@pytest.mark.parametrize("failure", [(503, {}), (500, {}), (429, {}), (200, b"no JSON"), (200, b"\xff\xfe\xff")])
def test_a_failure_of_a_moment_is_asked_again(failure, waits):
    with in_turn(failure, failure, (200, {"a": 1})) as (url, asked):
        assert ask(url, {"b": 2}) == {"a": 1}
    assert asked == [{"b": 2}] * 3
    assert waits == [0.1, 0.2]


@pytest.mark.parametrize("code", [400, 401, 404, 501])
def test_a_refusal_is_not(code):
    with (
        in_turn((code, {"error": {"message": "not   that\nmodel"}})) as (url, asked),
        pytest.raises(HTTPError) as error,
    ):
        ask(url, {})
    assert len(asked) == 1
    assert status(error.value) == code
    assert "not that" in reason(error.value)


def test_a_server_that_keeps_failing_is_given_up():
    with in_turn((503, {})) as (url, asked), pytest.raises(HTTPError):
        ask(url)
    assert len(asked) == vllm_reference.TRIES
    assert asked[0] is None, "nothing to say: a GET"


def test_no_server_no_json_and_silence_are_failures(monkeypatch):
    with pytest.raises(FAILURES) as error:
        ask(f"http://127.0.0.1:{kept_port()}/")
    assert status(error.value) is None
    with in_turn((200, b"<html>")) as (url, _), pytest.raises(json.JSONDecodeError):
        ask(url)
    monkeypatch.setattr(vllm_reference, "TIMEOUT_SECONDS", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(TimeoutError):
        ask(f"http://127.0.0.1:{silent.getsockname()[1]}/")


def test_the_key_is_sent_and_seen_nowhere_else(monkeypatch):
    seen = []

    def answer(_, __, headers):
        seen.append(headers.get("Authorization"))
        return 401, {}

    with answering(answer) as url:
        for key in ("", "secret\n"):
            monkeypatch.setenv(KEY, key)
            with pytest.raises(HTTPError) as error:
                ask(url)
            assert "secret" not in reason(error.value)
        monkeypatch.setenv(KEY, "secret\nof two lines")
        with pytest.raises(ConfigError, match=f"{KEY} is no key") as refusal:
            ask(url)
    assert "secret" not in str(refusal.value)
    assert seen == [None, "Bearer secret"]


def test_the_key_goes_to_no_other_server(monkeypatch):
    monkeypatch.setenv(KEY, "secret")
    seen = []

    def elsewhere(_, __, headers):
        seen.append(headers.get("Authorization"))
        return 200, {}

    with answering(elsewhere) as other, in_turn((302, other)) as (url, asked):
        assert ask(url) == {}
    assert asked == seen == [None]
