"""A vLLM server as the reference: a local reference's numbers, and every mismatch refused before any work."""

import copy
from contextlib import suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from time import sleep

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tests.ports import kept_port
from tests.training.answering import VLLMServer, answering, in_turn, serving
from tests.training.conftest import disturb, refused, rollout_of, steps_of

from klamp.errors import ConfigError, KlampError, KLWarning, ModelError
from klamp.lab.anchors import connect
from klamp.lab.backends import train_run
from klamp.lab.models import load_model
from klamp.lab.rollouts import measure_reference_length
from klamp.lab.tasks.arithmetic import arithmetic_tokenizer
from klamp.scoring import vllm_reference
from klamp.scoring.scorer import score
from klamp.scoring.vllm_reference import KEY, VLLMReference, ask

NAMES = st.sampled_from(["", "4", "id", "index", "data"])


@pytest.fixture(autouse=True)
def waits(monkeypatch):
    """The seconds between the tries, which are not waited for."""
    seconds: list[float] = []
    monkeypatch.setattr(vllm_reference.time, "sleep", seconds.append)
    return seconds


@pytest.fixture
def server_of(context):
    return lambda **changes: VLLMServer(**{"model": context.policy, "tokenizer": context.tokenizer} | changes)


@pytest.fixture
def connected_to(context, config_of):
    def connect_to(server, path="", **changes):
        with answering(server.answer) as url:
            config = config_of(reference="remote", reference_url=url + path, **changes)
            return connect(config, context.task, context.tokenizer)

    return connect_to


@pytest.mark.parametrize("at_once", [5, 32])
def test_the_numbers_are_those_of_a_local_model(context, server_of, monkeypatch, at_once):
    monkeypatch.setattr(vllm_reference, "AT_ONCE", at_once)
    completions = rollout_of(context, beta=0.01).completions
    other = copy.deepcopy(context.policy)
    disturb(other)
    local = score(other, completions, temperature=1.0).logprobs
    server = server_of(model=other)
    with answering(server.answer) as url:
        scores = VLLMReference(url, "start").score(completions, temperature=1.0)
    assert scores.logits is None
    assert torch.allclose(scores.logprobs[completions.mask], local[completions.mask], atol=1e-5)
    assert scores.logprobs[~completions.mask].eq(0).all()
    assert not torch.allclose(scores.logprobs, completions.sampler_logprobs, atol=1e-2)
    assert len(server.asked) == -(-len(completions.ids) // at_once)
    assert all(row["temperature"] == 1.0 and row["prompt_logprobs"] == 0 for row in server.asked)


def test_a_run_equals_the_run_with_a_frozen_reference(config_of, tmp_path):
    fields = {"beta": 0.1, "max_steps": 3, "eval_every": 0, "eval_size": 1}
    frozen = config_of(output_dir=str(tmp_path / "frozen"), **fields)
    train_run(frozen)
    server = VLLMServer(load_model(frozen.model.model), arithmetic_tokenizer())
    with answering(server.answer) as url:
        asked = {"reference": "remote", "reference_url": f"{url}/v1"}
        train_run(config_of(output_dir=str(tmp_path / "away"), **fields, **asked))
    here, there = steps_of(tmp_path / "frozen"), steps_of(tmp_path / "away")
    assert len(here) == len(there) == 3 and here[-1]["kl/k3"] > 1e-6
    for a, b in zip(here, there, strict=True):
        assert "kl/exact" not in b
        for name in ("reward", "train/loss", "train/grad_norm", "kl/k1", "kl/k3", "train/kl_penalty"):
            assert a[name] == pytest.approx(b[name], rel=1e-3, abs=1e-5), name


def test_a_remote_reference_measures_no_reference_length(context_of):
    context = replace(context_of(kl_clip_method="hard"), reference=VLLMReference("http://h", "start"))
    with refused(ConfigError, "(?s)cannot be measured.*kl_reference_length"):
        measure_reference_length(context)


def test_another_temperature_is_refused_before_anything_is_scored(connected_to, server_of, context):
    server = server_of()
    with refused(ConfigError, "(?s)temperature 1 only.*temperature=0.6"):
        connected_to(server, temperature=0.6)
    assert server.asked == []
    completions = rollout_of(context, prompts=1, beta=0.01).completions
    with pytest.raises(ConfigError, match="temperature 1 only"):
        VLLMReference(f"http://127.0.0.1:{kept_port()}", "start").score(completions, temperature=0.6)


def test_a_server_for_shorter_sequences_is_refused(connected_to, server_of, context):
    lengths = [len(context.tokenizer(example.prompt)["input_ids"]) for example in context.task.train]
    enough = max(lengths) + context.config.rollout.max_completion_length + 1
    assert connected_to(server_of(longest=enough))
    with pytest.raises(ModelError, match=f"maximum context length is {enough - 1} tokens"):
        connected_to(server_of(longest=enough - 1))


class Shifted:
    """A tokenizer with another number for the last token but one."""

    def __call__(self, text, **_):
        ids = arithmetic_tokenizer()(text, add_special_tokens=False)["input_ids"]
        return {"input_ids": [*ids[:-2], ids[-2] ^ 1, ids[-1]]}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"without": True}, "it has to know prompt_logprobs"),
        ({"scale": -1.0}, "raw_logits"),
        ({"tokenizer": Shifted()}, "another tokenizer than the policy"),
    ],
)
def test_a_server_with_other_numbers_is_refused(connected_to, server_of, changes, words):
    with pytest.raises(ModelError, match=words):
        connected_to(server_of(**changes))


def test_a_server_that_takes_no_texts_is_used_with_a_caution(connected_to, server_of):
    with pytest.warns(KLWarning, match="whether its tokenizer is the policy's is not known"):
        assert isinstance(connected_to(server_of(texts=False)), VLLMReference)


def test_a_server_that_fails_or_is_not_there_is_refused_before_the_run(context, config_of):
    with in_turn((503, {"error": "loading"})) as (url, asked), pytest.raises(ModelError, match="loading"):
        connect(config_of(reference="remote", reference_url=url), context.task, context.tokenizer)
    assert len(asked) == vllm_reference.TRIES
    nobody = f"http://127.0.0.1:{kept_port()}"
    with pytest.raises(ModelError, match="remote model does not answer"):
        connect(config_of(reference="remote", reference_url=nobody), context.task, context.tokenizer)


@pytest.fixture(scope="module")
def told():
    """A server, and what it answers to a question, and to a GET."""
    answers = {}
    with answering(lambda _, asked, __: (200, answers[asked is not None])) as url:
        yield url, answers


junk = st.one_of(
    st.none(), st.booleans(), st.integers(-1, 2), st.just(10**400), st.floats(), st.sampled_from(["", "4"])
)
anything = st.recursive(junk, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NAMES, inner), max_leaves=6)
cards = st.lists(st.fixed_dictionaries({}, optional={"id": anything, "max_model_len": anything, "parent": anything}))
entries = st.lists(
    st.none() | st.dictionaries(st.just("4"), st.fixed_dictionaries({"logprob": junk})) | anything, max_size=3
)
choices = st.lists(
    st.fixed_dictionaries({}, optional={"index": junk, "prompt_logprobs": entries | anything}), max_size=2
)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(listed=cards | anything, said=st.one_of(st.fixed_dictionaries({"choices": choices | anything}), anything))
@example(listed=[{"id": []}], said=None)
@example(listed=[{"id": "a"}], said=[])
@example(listed=[{"id": "a"}], said={"choices": [{"index": 0}]})
@example(listed=[{"id": "a", "max_model_len": float("inf")}], said=None)
@example(listed=[{"id": "a"}, {"id": 3}], said=None)
@example(listed=[{"id": "a", "max_model_len": 50, "parent": {}}], said=None)
def test_whatever_a_server_answers_it_is_connected_or_refused(context, config_of, told, listed, said):
    url, answers = told
    answers.update({False: {"data": listed}, True: said})
    for act in (
        lambda: connect(config_of(reference="remote", reference_url=url), context.task, context.tokenizer),
        lambda: VLLMReference(url, "a").score_tokens([[3]], [[4]], temperature=1.0),
    ):
        with suppress(KlampError):
            act()


@pytest.mark.parametrize("failure", [(503, {}), (500, {}), (429, {}), (200, b"no JSON"), (200, b"\xff\xfe\xff")])
def test_a_failure_of_a_moment_is_asked_again(failure, waits):
    with in_turn(failure, failure, (200, {"a": 1})) as (url, asked):
        assert ask(url, {"b": 2}) == {"a": 1}
    assert asked == [{"b": 2}] * 3
    assert waits == [0.1, 0.2]


def test_the_key_is_sent_to_this_server_and_seen_nowhere_else(monkeypatch):
    authorizations = []

    def answer(_, __, headers):
        authorizations.append(headers.get("Authorization"))
        return 401, {}

    with answering(answer) as url:
        for key in ("", "secret\n"):
            monkeypatch.setenv(KEY, key)
            with pytest.raises(ModelError) as error:
                ask(url)
            assert "secret" not in str(error.value)
        with in_turn((302, url)) as (first, _), pytest.raises(ModelError, match="401"):
            ask(first)
        monkeypatch.setenv(KEY, "secret\nof two lines")
        with pytest.raises(ConfigError, match=f"{KEY} is no key") as refusal:
            ask(url)
    assert "secret" not in str(refusal.value)
    assert authorizations == [None, "Bearer secret", None]


@pytest.fixture
def head_of(monkeypatch):
    """What is made of a server's entry at the place of a token, with the two likeliest."""

    def make(token, entry):
        answer = {"choices": [{"index": 0, "prompt_logprobs": [None, entry]}]}
        monkeypatch.setattr(vllm_reference, "ask", lambda *_: answer)
        ((place,),) = VLLMReference("http://h", "x", 2, 60).score_tokens([[1]], [[token]], temperature=1.0)
        return place

    return make


def test_the_head_is_in_the_order_of_ranks_and_has_the_token_by_its_rank_alone(head_of):
    entry = {str(i): {"logprob": -float(rank), "rank": rank} for i, rank in ((4, 2), (7, 1), (2, 3))}
    assert head_of(4, entry) == [(7, -1.0), (4, -2.0), (4, -2.0)]
    padding = {"70": {"logprob": -9.0, "rank": 2}, "7": {"logprob": -0.1, "rank": 1}}
    assert head_of(7, padding) == [(7, -0.1), (70, -9.0), (7, -0.1)]


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ({"7": (-0.5, 1)}, "other tokens"),
        ({"7": (-0.5, 1), "2": (-1.0,)}, "other tokens"),
        ({"7": (-0.1, 1), "2": (-0.2, 2)}, "sum to 1.7"),
        ({"99": (-0.5, 1), "2": (-1.0, 2)}, "token 99, and the tokenizer has 60"),
        ({"5000": (-9.0, 1), "2": (-1.0, 2)}, "token 5000, and"),
        ({"-1": (-0.5, 1), "2": (-1.0, 2)}, "other tokens"),
        ({"07": (-0.5, 1), "2": (-1.0, 2)}, "other tokens"),
    ],
)
def test_a_head_that_cannot_be_is_refused(head_of, others, words):
    told = {name: dict(zip(("logprob", "rank"), row, strict=False)) for name, row in others.items()}
    with pytest.raises(ModelError, match=f"(?s)does not answer as it should.*{words}"):
        head_of(4, {"4": {"logprob": -3.0, "rank": 9}} | told)


def test_a_key_that_an_answer_quotes_is_blanked(monkeypatch):
    monkeypatch.setenv(KEY, 'se"cret')
    with answering(lambda *_: (401, {"error": "no key is 'se\"cret'"})) as url, pytest.raises(ModelError) as error:
        ask(url)
    assert "no key is '[the key]'" in str(error.value)
    assert "cret" not in str(error.value)


@pytest.mark.parametrize("pause", [0.0, 0.3])
def test_an_answer_without_end_is_refused_in_time(monkeypatch, pause):
    """Too many bytes, or too slow: neither is waited for, nor asked again."""
    monkeypatch.setattr(vllm_reference, "TIMEOUT_SECONDS", 1.0)
    starts = []

    class Endless(BaseHTTPRequestHandler):
        def do_GET(self):
            starts.append(self.path)
            self.send_response(200)
            self.end_headers()
            with suppress(OSError):
                while True:
                    self.wfile.write(b"[" * (1 if pause else 2**16))
                    sleep(pause)

        def log_message(self, *_):
            pass

    with serving(Endless) as url, pytest.raises(ModelError, match="does not end"):
        ask(url)
    assert len(starts) == 1


def test_what_a_server_caps_is_known_before_the_first_step(context, config_of, server_of):
    server = server_of(most=5)
    with answering(server.answer) as url:
        head = {"teacher_url": url, "teacher_estimator": "topk", "teacher_head": "teacher", "reward": "none"}
        with pytest.raises(ModelError, match="prompt logprobs of 6, which is greater than max allowed: 5"):
            connect(config_of(**head, teacher_top_k=6), context.task, context.tokenizer, who="teacher")
        assert connect(config_of(**head, teacher_top_k=5), context.task, context.tokenizer, who="teacher").top_k == 5
