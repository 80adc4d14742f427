"""The remote reference's server over real HTTP: every request is answered, and none that it should refuse is done."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tests.training.conftest import tiny_llama
from tests.waiting import SECONDS

from klamp.errors import ConfigError, ModelError
from klamp.training import asking, remote_server
from klamp.training.asking import KEY
from klamp.training.remote import RemoteReference, serve
from klamp.training.remote_server import listening

GOOD = {"prompts": [[1, 2], [3]], "completions": [[4], []], "temperature": 0.7}
BODY = json.dumps(GOOD).encode()
QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serve(tiny_llama(vocab_size=20, max_position_embeddings=32)) as found:
        yield found


def sent(url: str, request: bytes) -> tuple[int, Any]:
    """The status and the JSON with which a server answers some bytes, after which nothing more is sent."""
    with socket.create_connection((urlsplit(url).hostname, urlsplit(url).port), timeout=SECONDS) as connection:
        connection.sendall(request)
        connection.shutdown(socket.SHUT_WR)
        head, _, body = b"".join(iter(lambda: connection.recv(2**16), b"")).partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


def posted(url: str, body: bytes, **headers: str) -> tuple[int, Any]:
    """What is answered to a POST; headers replace those that it would have."""
    given = {"Content-Length": str(len(body)), **{name.replace("_", "-"): value for name, value in headers.items()}}
    lines = "".join(f"{name}: {value}\r\n" for name, value in given.items() if value)
    return sent(url, f"POST / HTTP/1.1\r\n{lines}\r\n".encode("latin-1") + body)


def assert_refused(answer: tuple[int, Any], *statuses: int) -> None:
    status, content = answer
    assert status in statuses if statuses else 400 <= status < 500, answer
    assert list(content) == ["error"] and content["error"] and "Traceback" not in content["error"]


def test_a_question_is_answered(url: str) -> None:
    status, content = posted(url, BODY)
    assert (status, [len(row) for row in content["logprobs"]]) == (200, [1, 0])
    assert posted(url, b'{"prompts": [], "completions": []}') == (200, {"logprobs": []})


ids = st.one_of(st.integers(-2, 21), st.booleans(), st.none(), st.floats(), st.text(max_size=2), st.integers())
rows = st.one_of(st.lists(st.one_of(st.lists(ids, max_size=3), ids), max_size=3), ids)
anything = st.recursive(ids, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner))


@QUICK
@given(
    st.fixed_dictionaries({}, optional={"prompts": rows, "completions": rows, "temperature": ids, "x": ids}) | anything
)
def test_whatever_json_is_asked_it_is_answered_or_refused_with_a_reason(url: str, asked: Any) -> None:
    answer = posted(url, json.dumps(asked).encode())
    if answer[0] == 200:
        assert [len(row) for row in answer[1]["logprobs"]] == [len(row) for row in asked["completions"]]
    else:
        assert_refused(answer, 400)


@QUICK
@given(st.binary(max_size=40))
@example(b"")
@example(b"\xff\xfe")
@example(b"[" * 100_000)
@example(b"1" * 10_000)
@example(b'{"prompts": [[1]], "completions": [[1]], "temperature": NaN}')
@example(b'{"prompts": [[1]], "completions": [[1]], "temperature": 1e999}')
def test_whatever_bytes_are_posted_are_refused_with_a_reason(url: str, body: bytes) -> None:
    assert_refused(posted(url, body), 400)


@QUICK
@given(
    st.binary(min_size=1, max_size=40), st.sampled_from([b"", b"POST / HTTP/1.1\r\n", b"POST / HTTP/1.0\r\nContent-"])
)
@example(b"\xa0", b"")
def test_whatever_is_sent_is_answered_or_was_no_request(url: str, content: bytes, start: bytes) -> None:
    with socket.create_connection((urlsplit(url).hostname, urlsplit(url).port), timeout=SECONDS) as connection:
        connection.sendall(start + content + b"\r\n\r\n")
        connection.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: connection.recv(2**16), b""))
    first_line = (start + content).split(b"\n")[0].decode("latin-1")  # as a server reads it, to which \xa0 is a space
    assert b'{"error": "' in answer or not first_line.strip()
    assert posted(url, BODY)[0] == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Content_Length": ""}, 411),
        ({"Transfer_Encoding": "chunked"}, 411),
        *(({"Content_Length": wrong}, 400) for wrong in ("-1", "x", "1.5", "²", "1_0", "99")),
        *(({"Content_Length": large}, 413) for large in (str(2**26 + 1), "9" * 5000)),
    ],
)
def test_a_length_that_is_none_is_refused(url: str, headers: dict[str, str], status: int) -> None:
    assert_refused(posted(url, BODY, **headers), status)


@pytest.mark.parametrize("method", ["GET", "PUT", "OPTIONS"])
def test_other_methods_are_refused(url: str, method: str) -> None:
    assert_refused(sent(url, f"{method} /v1/models HTTP/1.1\r\n\r\n".encode()), 501)


def test_a_body_that_is_too_large_is_refused_and_its_client_told(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_server, "LARGEST_QUESTION", 2**20)
    assert_refused(posted(url, b" " * 2**23), 413)
    with pytest.raises(ModelError, match="413.*larger than 1048576 bytes"):
        RemoteReference(url).logprobs([[1] * 2**20], [[1]], temperature=1.0)


def test_a_client_that_falls_silent_is_told(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_server._Handler, "timeout", 0.1)
    with socket.create_connection((urlsplit(url).hostname, urlsplit(url).port), timeout=SECONDS) as connection:
        connection.sendall(b"POST / HTTP/1.1\r\nContent-Length: 10\r\n\r\n{")
        assert b"408" in connection.recv(2**16)


def test_what_the_model_cannot_do_is_told() -> None:
    def broken(_: object) -> dict[str, Any]:
        raise RuntimeError("no memory, says http://me:secret@host")

    with listening(broken, host="127.0.0.1", port=0, token=None) as url:
        assert posted(url, BODY) == (500, {"error": "RuntimeError: no memory, says http://host"})


def test_numbers_that_are_not_finite_are_no_answer() -> None:
    model = tiny_llama(vocab_size=20)
    model.lm_head.weight.data.fill_(float("nan"))
    with serve(model) as url:
        status, content = posted(url, BODY)
    assert status == 500 and "not finite" in content["error"]


@contextmanager
def guarded() -> Iterator[str]:
    with serve(tiny_llama(vocab_size=20), host="0.0.0.0", token="secret") as url:
        yield url.replace("0.0.0.0", "127.0.0.1")


def test_a_token_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking.time, "sleep", lambda _: None)
    with guarded() as url:
        for wrong in ("", "Bearer", "Bearer ", "Bearer other", "secret", "Basic secret", "Bearer s\xe9cret"):
            assert_refused(posted(url, BODY, Authorization=wrong), 401)
        assert posted(url, BODY, Authorization="Bearer secret")[0] == 200
        monkeypatch.setenv(KEY, "other")
        with pytest.raises(ModelError, match="401.*bearer token"):
            RemoteReference(url).logprobs([[1]], [[2]], temperature=1.0)
        monkeypatch.setenv(KEY, "secret")
        assert len(RemoteReference(url).logprobs([[1]], [[2]], temperature=1.0)[0]) == 1


@pytest.mark.parametrize("host", ["0.0.0.0", "", "192.0.2.7", "no.such.host.invalid"])
def test_without_a_token_it_listens_to_this_machine_only(host: str) -> None:
    with (
        pytest.raises(ConfigError, match="that other machines reach asks for a token") as caught,
        serve(torch.nn.Identity(), host=host),
    ):
        pass
    assert caught.value.why and caught.value.fix


@pytest.mark.parametrize("token", ["", " ", "a\nb", "é", " secret"])
def test_a_token_that_cannot_be_sent_is_refused(token: str) -> None:
    with pytest.raises(ConfigError, match="the token .* is none") as caught, serve(torch.nn.Identity(), token=token):
        pass
    assert "a\nb" not in str(caught.value) and "secret'" not in str(caught.value)
