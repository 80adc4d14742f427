"""One question to a sampling client: in whichever form the client has, again where that may help, never for ever."""

from __future__ import annotations

import asyncio
import concurrent.futures
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from klamp.errors import ModelError
from klamp.hosts.tinker import retrying
from klamp.hosts.tinker.retrying import LONGEST_WAIT, Asker, is_transient, resolve

tinker = pytest.importorskip("tinker")

REQUEST = httpx.Request("POST", "http://127.0.0.1/asample")


class Client:
    """Answers with one number per token, after the faults that it is given."""

    def __init__(self, *faults: Exception) -> None:
        self.faults, self.asked = list(faults), 0

    async def compute_logprobs_async(self, prompt: Any) -> list[float | None]:
        self.asked += 1
        if self.faults:
            raise self.faults.pop(0)
        return [None, *(-float(token) for token in prompt.to_ints()[1:])]


class NewClient(Client):
    """Scores a suffix only, where its server can."""

    suffixes: list[int | None]

    def __init__(self, *faults: Exception) -> None:
        super().__init__(*faults)
        self.suffixes = []

    async def compute_logprobs(self, prompt: Any, prompt_logprobs_last_n: int | None = None) -> list[float | None]:
        self.suffixes.append(prompt_logprobs_last_n)
        return await self.compute_logprobs_async(prompt)


def asker(client: Any, *, retries: int = 2, timeout: float = 5.0) -> Asker:
    return Asker(client, retries=retries, backoff=0.0, timeout=timeout)


def ask(asking: Asker) -> Any:
    return asyncio.run(asking.ask(3, [5, 6, 7], 2))


def status(code: int) -> Exception:
    return tinker.APIStatusError("status", response=httpx.Response(code, request=REQUEST), body=None)


def failed(category: str) -> Exception:
    return tinker.RequestFailedError("failed", "id", getattr(tinker.types.RequestErrorCategory, category))


def test_the_answer_is_the_clients() -> None:
    assert ask(asker(Client())) == [None, -6.0, -7.0]


def test_a_suffix_is_asked_for_where_the_client_can_and_no_more_once_the_server_cannot() -> None:
    client = NewClient()
    asking = asker(client)
    assert asking.suffix and not asker(Client()).suffix
    ask(asking)
    client.faults.append(RuntimeError("prompt_logprobs_last_n=2 was requested but the server returned 3"))
    assert ask(asking) == [None, -6.0, -7.0]
    assert not asking.suffix
    ask(asking)
    assert client.suffixes == [2, 2, None, None]


def test_another_runtime_error_stays_what_it_is() -> None:
    with pytest.raises(ModelError, match=r"sequence 3: the reference refuses[\s\S]*RuntimeError: out of memory"):
        ask(asker(NewClient(RuntimeError("out of memory"))))


def test_what_may_pass_is_tried_again_as_often_as_allowed() -> None:
    client = Client(ConnectionResetError("reset"), status(503))
    assert ask(asker(client)) == [None, -6.0, -7.0]
    assert client.asked == 3
    with pytest.raises(ModelError, match=r"sequence 3: the reference did not answer in 3 attempts") as caught:
        ask(asker(Client(*(TimeoutError() for _ in range(3)))))
    assert caught.value.got and caught.value.why and caught.value.fix
    assert isinstance(caught.value.__cause__, TimeoutError)


def test_what_will_not_pass_ends_it_at_once() -> None:
    client = Client(status(400))
    with pytest.raises(ModelError, match="sequence 3: the reference refuses"):
        ask(asker(client))
    assert client.asked == 1


def test_a_client_that_never_answers_runs_into_the_timeout() -> None:
    class Silent(Client):
        async def compute_logprobs_async(self, prompt: Any) -> Any:
            self.asked += 1
            await asyncio.sleep(3600)

    client = Silent()
    with pytest.raises(ModelError, match="did not answer in 2 attempts"):
        ask(asker(client, retries=1, timeout=0.02))
    assert client.asked == 2


def test_waits_double_to_a_longest_one(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    async def note(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(retrying, "asyncio", SimpleNamespace(**vars(asyncio) | {"sleep": note}))
    ask(Asker(Client(*(TimeoutError() for _ in range(8))), retries=8, backoff=1.0, timeout=5.0))
    longest = [min(2.0**attempt, LONGEST_WAIT) for attempt in range(8)]
    assert all(most / 2 <= wait <= most for wait, most in zip(waits, longest, strict=True))


@pytest.mark.parametrize(
    ("error", "may_pass"),
    [
        *((status(code), True) for code in (408, 409, 429, 500, 502, 503)),
        *((status(code), False) for code in (400, 401, 403, 404, 422)),
        (tinker.APIConnectionError(request=REQUEST), True),
        (tinker.APITimeoutError(request=REQUEST), True),
        (ConnectionResetError("reset"), True),
        (TimeoutError(), True),
        (failed("Server"), True),
        (failed("Unknown"), True),
        (failed("User"), False),
        (ValueError("bug"), False),
    ],
    ids=repr,
)
def test_which_errors_may_pass(error: Exception, may_pass: bool) -> None:
    assert is_transient(error) is may_pass


def test_the_value_out_of_whatever_holds_it() -> None:
    async def later() -> int:
        return 1

    done: concurrent.futures.Future[int] = concurrent.futures.Future()
    done.set_result(2)
    assert asyncio.run(resolve(later())) == 1
    assert asyncio.run(resolve(done)) == 2
    assert asyncio.run(resolve([None, -1.0])) == [None, -1.0]
