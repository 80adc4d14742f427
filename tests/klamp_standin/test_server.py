"""The stand-in's HTTP side: what it refuses, counts and draws, its order of work, its faults on purpose."""

import inspect
import json
import math
import socket
import urllib.error
import urllib.request
from types import SimpleNamespace

import pytest
import torch
from tests.standin import opened, ready
from tests.waiting import SECONDS
from tinker import types

from klamp.lab.tasks import arithmetic_tokenizer
from klamp_standin import futures, sampling, serve, tiny_model
from klamp_standin.faults import Fault, FaultPlan
from klamp_standin.futures import Lane, Worker
from klamp_standin.protocol import Refused

PROMPT = types.ModelInput.from_ints([1, 2, 3, 4])
DATUM = types.Datum(
    model_input=PROMPT, loss_fn_inputs={"target_tokens": torch.tensor([2, 3, 4, 5]), "weights": torch.ones(4)}
)
DRAWN = types.SamplingParams(max_tokens=4)


def post(standin, path, body, **headers):
    request = urllib.request.Request(
        f"{standin.url}/api/v1/{path}",
        data=body if isinstance(body, bytes) else json.dumps(body).encode(),
        headers={"X-API-Key": "tml-x", "Content-Type": "application/json"} | headers,
    )
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


FRESH = {"session_id": "s", "model_seq_id": 0, "base_model": "klamp/standin"}


@pytest.mark.parametrize(
    ("path", "body", "headers", "status", "words"),
    [
        ("create_session", {}, {"X-API-Key": "nothing"}, 401, "tml-"),
        ("nonsense", {}, {}, 404, "no POST nonsense"),
        ("create_model", FRESH | {"base_model": "gpt"}, {}, 404, "no base model 'gpt'"),
        ("create_model", {"session_id": "s"}, {}, 400, "does not fit create_model"),
        ("create_model", FRESH | {"optimizer_config": {"type": "muon"}}, {}, 400, "no optimizer 'muon'"),
        ("create_sampling_session", {"session_id": "s", "sampling_session_seq_id": 0}, {}, 404, "no base model None"),
        ("optim_step", {"model_id": "m", "seq_id": 1, "adam_params": {}}, {}, 404, "no training run 'm'"),
        ("forward_backward", b"{}", {}, 415, "x-protobuf"),
        ("forward_backward", b"\xff", {"Content-Type": "application/x-protobuf"}, 400, "ForwardBackwardRequest"),
        ("asample", {"sampling_session_id": "s", "prompt": {}}, {}, 404, "no sampler 's'"),
        ("retrieve_future", {"request_id": "r"}, {}, 404, "no request 'r'"),
    ],
)
def test_what_does_not_fit_is_an_http_error_with_the_reason(standin, path, body, headers, status, words):
    found, answer = post(standin, path, body, **headers)
    assert (found, words in answer["error"]) == (status, True), answer


def raw(standin, lines, body=b""):
    """The status of a request as it is written, once the connection is closed after it."""
    with socket.create_connection(standin._server.server_address, timeout=SECONDS) as client:
        client.sendall("\r\n".join(("POST /api/v1/create_session HTTP/1.1", *lines, "", "")).encode() + body)
        found = b"".join(iter(lambda: client.recv(1 << 16), b""))
        return int(found.split(maxsplit=2)[1]) if found else 0


HOST, KEY = "Host: 127.0.0.1", "X-API-Key: tml-x"


@pytest.mark.parametrize(
    ("line", "status"),
    [
        *((f"Host: {name}", 403) for name in ("evil.example", "127.0.0.1.evil.example:80", "x:127.0.0.1", "", "[::1")),
        *((f"Content-Length: {length}", 411) for length in ("-1", "1e3", "9" * 5000, "2, 2")),
        *((f"Content-Length: {2**40}", 413), ("Transfer-Encoding: chunked", 411)),
    ],
)
def test_another_name_and_a_body_without_an_end_are_refused_at_once(standin, line, status):
    asked = standin.requests.copy()
    assert raw(standin, [line, *(each for each in (HOST, KEY, "Content-Length: 2") if each[:6] != line[:6])]) == status
    assert standin.requests == asked


def test_requests_are_counted_by_route_and_tokens_by_use(standin, reference, trainer):
    asked, spent = standin.requests.copy(), standin.tokens.copy()
    reference.compute_logprobs(PROMPT).result(timeout=SECONDS)
    rows = reference.sample(PROMPT, 2, DRAWN).result(timeout=SECONDS).sequences
    trainer.forward([DATUM], "cross_entropy").result(timeout=SECONDS)
    trainer.forward_backward([DATUM], "cross_entropy").result(timeout=SECONDS)
    assert (standin.requests - asked)["asample"] == 2 and (standin.requests - asked)["retrieve_future"] >= 4
    drawn = sum(len(row.tokens) for row in rows)
    assert standin.tokens - spent == {"prompt": 8, "sampled": drawn, "forward": 4, "forward_backward": 4}


def test_draws_depend_on_the_number_of_the_request_and_not_on_the_server():
    drawn = []
    for _ in range(2):
        with serve(seed=3) as standin:
            client = ready(opened(standin).create_sampling_client(base_model=standin.base_model))
            found = [client.sample(PROMPT, 4, DRAWN).result(timeout=SECONDS).sequences for _ in range(2)]
            drawn.append([[row.tokens for row in rows] for rows in found])
    assert drawn[0] == drawn[1] and drawn[0][0] != drawn[0][1]


def test_it_serves_a_model_and_tokenizer_of_ones_own():
    tokenizer = arithmetic_tokenizer()
    model = tiny_model(len(tokenizer), seed=3)
    with serve(model, tokenizer, name="me/mine") as standin:
        service = opened(standin)
        client = ready(service.create_lora_training_client("me/mine", rank=2))
        assert client.get_tokenizer().get_vocab() == tokenizer.get_vocab()
        sampler = ready(service.create_sampling_client(base_model="me/mine"))
        prompt = types.ModelInput.from_ints(tokenizer("1+2=", add_special_tokens=False)["input_ids"])
        asked = sampler.sample(prompt, 1, types.SamplingParams(max_tokens=30, seed=1))
        (row,) = asked.result(timeout=SECONDS).sequences
        assert (row.stop_reason == "stop") == (row.tokens[-1] == tokenizer.eos_token_id)
        standin.die()
        with pytest.raises(TimeoutError):
            sampler.compute_logprobs(prompt).result(timeout=1.5)


def test_a_fault_strikes_after_so_many_and_so_often():
    """tests/hosts/tinker/test_reference.py has further faults."""
    plan = FaultPlan([Fault(kind="drop", route="asample", after=1, times=2), Fault(kind="nan", route="optim_step")])
    assert [bool(plan.strike("asample")) for _ in range(5)] == [False, True, True, False, False]
    assert [bool(plan.strike("optim_step")) for _ in range(2)] == [True, False]
    forever = FaultPlan([Fault(kind="drop", route="asample", times=None, scoring=True)])
    assert [bool(forever.strike("asample", scoring=s)) for s in (True, False, True)] == [True, False, True]


def test_none_and_nan_arrive_where_they_were_put(standin, reference, trainer):
    standin.inject(Fault(kind="none", route="asample", scoring=True))
    assert [x is None for x in reference.compute_logprobs(PROMPT).result(timeout=SECONDS)] == [True, False, False, True]
    standin.inject(Fault(kind="short", route="asample", scoring=True))
    assert [x is None for x in reference.compute_logprobs(PROMPT).result(timeout=SECONDS)] == [False, False, False]
    standin.inject(Fault(kind="nan", route="asample", scoring=False), Fault(kind="nan", route="forward_backward"))
    (row,) = reference.sample(PROMPT, 1, DRAWN).result(timeout=SECONDS).sequences
    assert [math.isnan(x) for x in row.logprobs] == [False] * (len(row.logprobs) - 1) + [True]
    outputs = trainer.forward_backward([DATUM], "cross_entropy").result(timeout=SECONDS).loss_fn_outputs
    assert [math.isnan(x) for x in outputs[0]["logprobs"].data] == [False, False, False, True]
    assert all(torch.isfinite(x.grad).all() for x in standin.weights().values())


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
    assert worker.wait("3", SECONDS) == {"n": 3} and done == [0, 1, 2, 3]


def test_the_same_request_is_carried_out_once(worker):
    done = []
    for _ in range(3):
        worker.submit("a", lambda: done.append(1) or {"times": len(done)})
    assert [worker.wait("a", SECONDS) for _ in range(2)] == [{"times": 1}] * 2 and done == [1]


def test_an_error_is_a_result_and_the_worker_goes_on(worker):
    def refuse():
        raise Refused("no")

    for name, work in (("a", refuse), ("b", lambda: 1 / 0), ("c", lambda: {"fine": True})):
        worker.submit(name, work)
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


READ = [1, 2, 3]


@pytest.fixture(scope="module")
def model():
    return tiny_model(8)


def params(*, end=(), longest=64, seed=0, **given):
    return sampling.SamplingParams.read({"max_tokens": 4} | given, end=end, seed=seed, longest=longest)


def draw(model, count, **given):
    out = sampling.read(model, READ)
    return sampling.sample(model, out, count, params(**given), lambda ids: "".join(chr(97 + i) for i in ids))


def distribution(model, tokens):
    return model(torch.tensor([tokens])).logits[0, -1].detach().double().log_softmax(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_draws_follow_the_distribution(model, temperature):
    count = 5_000
    rows = draw(model, count, max_tokens=1, temperature=temperature)
    expected = (distribution(model, READ) / temperature).softmax(-1)
    found = torch.bincount(torch.tensor([row[0] for row, *_ in rows]), minlength=8) / count
    assert ((found - expected).abs() < 5 * (expected * (1 - expected) / count).sqrt()).all()


def test_log_probabilities_are_those_of_the_model_at_any_temperature(model):
    for temperature in (1.0, 0.3, 0.0):
        ((tokens, logprobs, _),) = draw(model, 1, temperature=temperature)
        for i, token in enumerate(tokens):
            expected = distribution(model, [*READ, *tokens[:i]])[token]
            assert logprobs[i] == pytest.approx(float(expected), abs=1e-5)


def test_truncation_leaves_the_likeliest(model):
    likeliest = set(distribution(model, READ).topk(2).indices.tolist())
    assert {row[0] for row, *_ in draw(model, 200, max_tokens=1, top_k=2)} == likeliest
    ranked = distribution(model, READ).exp().sort(descending=True)
    nucleus = set(ranked.indices[: int((ranked.values.cumsum(0) < 0.5).sum()) + 1].tolist())
    assert {row[0] for row, *_ in draw(model, 500, max_tokens=1, top_p=0.5)} == nucleus


def test_end_tokens_and_stops_end_a_sequence(model):
    for given in ({"end": range(8)}, {"stop": list(range(8))}):
        assert all(len(tokens) == 1 and ended for tokens, _, ended in draw(model, 4, **given))
    rows = draw(model, 50, max_tokens=8, stop="a")
    assert any(ended for *_, ended in rows)
    for tokens, _, ended in rows:
        assert ended == (tokens[-1] == 0) and 0 not in tokens[:-1], "token 0 is the letter a"
        assert ended or len(tokens) == 8
    assert all(len(tokens) == 4 and not ended for tokens, _, ended in draw(model, 4, end=range(8), stop=[]))


@pytest.mark.parametrize(("k", "last"), [(1, 2), (3, None), (70, 2)])
def test_the_likeliest_tokens_at_each_place_of_a_prompt(reference, k, last):
    """As the SDK hands them out: pairs by rank, None where nothing stands before or nothing was asked for."""
    tokens, base = [1, 2, 3, 4, 5], tiny_model()
    suffix = {} if last is None else {"prompt_logprobs_last_n": last}
    if not suffix.keys() <= inspect.signature(reference.sample).parameters.keys():
        pytest.skip("this version of the SDK scores no suffix")
    options = {"include_prompt_logprobs": True, "topk_prompt_logprobs": k, **suffix}
    once = types.SamplingParams(max_tokens=1)
    answer = reference.sample(types.ModelInput.from_ints(tokens), 1, once, **options).result()
    found, first = answer.topk_prompt_logprobs, 1 if last is None else 5 - last
    assert [place is None for place in found] == [i < first for i in range(5)]
    assert [x is None for x in answer.prompt_logprobs] == [place is None for place in found]
    for i in range(first, 5):
        expected, (likeliest, logprobs) = distribution(base, tokens[:i]).topk(min(k, 64)), zip(*found[i], strict=True)
        assert list(likeliest) == expected.indices.tolist()
        assert list(logprobs) == pytest.approx(expected.values.tolist(), abs=1e-5)
