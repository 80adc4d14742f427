"""compute_reference_logprobs: in order, bounded, refused, over fakes and over real HTTP."""

import asyncio
import concurrent.futures
import functools
import math
from types import SimpleNamespace

import httpx
import pytest
import torch
from tests.hosts.tinker.fakes import FakeSampler, score, skipping

from klamp.errors import ConfigError, DataError, ModelError, NonFiniteError, ShapeError
from klamp.tinker import compute_reference_logprobs
from klamp.tinker.testing import Fault, tiny_model

tinker = pytest.importorskip("tinker")

PROMPTS = [[1, 2, 3], [1, 2, 3], [4, 5], [4, 5]]
RESPONSES = [[10], [11, 12], [13, 14, 15], [16, 17]]


def compute(client, prompts=PROMPTS, responses=RESPONSES, *, run=skipping, **options):
    return run(compute_reference_logprobs(client, prompts, responses, **options))


def expected(prompts=PROMPTS, responses=RESPONSES):
    return [score([*p, *r])[len(p) :] for p, r in zip(prompts, responses, strict=True)]


def test_the_order_is_that_of_the_responses_whichever_answers_first():
    client = FakeSampler(delays={10: 0.03, 12: 0.02, 15: 0.01})
    assert compute(client) == expected()
    assert client.asked == [[*p, *r] for p, r in zip(PROMPTS, RESPONSES, strict=True)]


@pytest.mark.parametrize("concurrency", [1, 2, 64])
def test_no_more_requests_at_a_time_than_asked_for(concurrency):
    client = FakeSampler(delays=dict.fromkeys((10, 12, 15, 17), 0.005))
    compute(client, concurrency=concurrency)
    assert client.most == min(concurrency, 4)


def test_an_empty_response_costs_no_request():
    client = FakeSampler()
    assert compute(client, [[1], [2]], [[], [3]]) == [[], expected([[2]], [[3]])[0]]
    assert len(client.asked) == 1


def test_answers_without_the_first_none_are_understood():
    answers = {10: [score([1, 2, 3, 10])[1:]], 15: [[None, None, *score([4, 5, 13, 14, 15])[2:]]]}
    assert compute(FakeSampler(faults=answers)) == expected()


@pytest.mark.parametrize("bad", [None, math.nan, -math.inf, -9999.0])
def test_a_response_with_a_hole_is_refused_and_the_sequence_named(bad):
    answer = score([4, 5, 13, 14, 15])
    answer[3] = bad
    with pytest.raises(NonFiniteError, match=r"sequence 2: .*\n  got: (None|nan|-inf|-9999.0) at token 1"):
        compute(FakeSampler(faults={15: [answer]}))


@pytest.mark.parametrize("count", [0, 3, 6])
def test_answers_of_another_length_are_refused(count):
    with pytest.raises(ShapeError, match="sequence 2: "):
        compute(FakeSampler(faults={15: [[-1.0] * count]}))


def status(code):
    request = httpx.Request("POST", "http://127.0.0.1/asample")
    return tinker.APIStatusError("status", response=httpx.Response(code, request=request), body=None)


@pytest.mark.parametrize("error", [status(503), ValueError("bug")], ids=repr)
def test_what_the_sdk_gives_up_ends_it(error):
    with pytest.raises(ModelError, match="sequence 2: the reference refuses") as caught:
        compute(FakeSampler(faults={15: [error]}))
    assert caught.value.__cause__ is error and caught.value.why and caught.value.fix


def test_it_ends_at_once_and_leaves_nothing_behind():
    client = FakeSampler(faults={10: [status(400)]}, delays={12: 30, 15: 30, 17: 30})
    with pytest.raises(ModelError, match="sequence 0: the reference refuses .*\n  got: APIStatusError: status"):
        compute(client)
    assert client.now == 0 and sorted(client.cancelled) == [12, 15, 17], "nobody waited for the others' answers"


def test_a_client_that_never_answers_runs_into_the_timeout():
    client = FakeSampler(delays={15: 3600})
    with pytest.raises(ModelError, match="sequence 2: the reference did not answer in time\n  got: nothing within 2 s"):
        compute(client, timeout=2)
    assert client.now == 0


class _Suffix(FakeSampler):
    """The newer form: an awaitable, and a suffix on request."""

    suffixes = ()

    async def compute_logprobs(self, prompt, prompt_logprobs_last_n=None):
        self.suffixes = (*self.suffixes, prompt_logprobs_last_n)
        answer = await self.answer(prompt)
        return [None] * (len(answer) - prompt_logprobs_last_n) + answer[-prompt_logprobs_last_n:]


def test_only_the_response_is_scored_where_the_client_can():
    client = _Suffix()
    assert compute(client) == expected()
    assert client.suffixes == (1, 2, 3, 2)


def test_a_client_of_plain_futures():
    """The form before awaitable futures: a plain concurrent future, and no suffix."""

    def compute_logprobs(prompt):
        future = concurrent.futures.Future()
        future.set_result(score(prompt.to_ints()))
        return future

    assert compute(SimpleNamespace(compute_logprobs=compute_logprobs)) == expected()


def test_refusals():
    for prompts in (PROMPTS[:-1], None, 7):
        with pytest.raises(DataError, match="must hold one list of token ids per response") as caught:
            compute(FakeSampler(), prompts)
        assert caught.value.got and caught.value.why and caught.value.fix
    with pytest.raises(DataError, match="sequence 1: the prompt is empty"):
        compute(FakeSampler(), [[1], []], [[2], [3]])
    with pytest.raises(ConfigError, match="concurrency must be a whole number >= 1"):
        compute(FakeSampler(), concurrency=0)
    with pytest.raises(ConfigError, match="timeout must be a number > 0"):
        compute(FakeSampler(), timeout=0)


@functools.cache
def of_the_model():
    """What the base model says, by a plain forward pass."""
    model, rows = tiny_model().eval(), []
    for prompt, response in zip(PROMPTS, RESPONSES, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *response]])).logits[0].log_softmax(-1)
        row = [float(logits[len(prompt) - 1 + t, token]) for t, token in enumerate(response)]
        rows.append(pytest.approx(row, abs=1e-5))
    return rows


@pytest.mark.filterwarnings("error::FutureWarning", "error::DeprecationWarning")
def test_over_http_without_a_warning(reference):
    assert compute(reference, run=asyncio.run) == of_the_model()


TROUBLE = {"status": {"status": 503}, "drop": {}, "short": {"times": None}, "slow": {"seconds": 0.2}}


@pytest.mark.parametrize("kind", TROUBLE)
def test_over_http_with_one_of_many_requests_in_trouble(reference, standin, kind):
    standin.inject(Fault(kind=kind, route="asample", scoring=True, after=2, **TROUBLE[kind]))
    assert compute(reference, run=asyncio.run) == of_the_model()


@pytest.mark.filterwarnings("error::FutureWarning")
def test_a_client_that_nobody_has_awaited_is_awaited(service, standin, caplog):
    """Newer SDKs hand out a future of a client; used as one in async code, it blocks the loop and logs a stack."""

    async def scenario():
        client = service.create_sampling_client(base_model=standin.base_model)
        return await compute_reference_logprobs(client, PROMPTS, RESPONSES)

    assert asyncio.run(scenario()) == of_the_model()
    assert "async context" not in caplog.text and "Stack for calling sync" not in caplog.text
