"""A reference over real HTTP on the loopback: the same numbers, and clear errors."""

from __future__ import annotations

import copy
import json
from base64 import b64encode

import pytest
import torch
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tests.ports import kept_port
from tests.training.answering import answering, in_turn
from tests.training.conftest import assert_same_course, disturb

from klamp.errors import ConfigError, KlampError, ModelError
from klamp.training import asking, remote
from klamp.training.remote import RemoteReference, serve
from klamp.training.rollouts import collect
from klamp.training.trainer import train_run
from klamp.training.vllm_reference import connect


@pytest.fixture
def rollout(context_of):
    context = context_of()
    return collect(context, list(context.task.train[:3]), step=0, beta=0.01), context


def test_the_remote_reference_gives_the_same_log_probabilities(rollout):
    sampled, context = rollout
    other = copy.deepcopy(context.policy)
    disturb(other)
    local = remote.score(other, sampled.completions, temperature=0.7).logprobs
    with serve(other) as url:
        away = RemoteReference(url).score(sampled.completions, temperature=0.7)
    mask = sampled.completions.mask
    assert away.logits is None
    assert torch.allclose(away.logprobs[mask], local[mask], atol=1e-5)
    assert not torch.allclose(away.logprobs[mask], sampled.completions.sampler_logprobs[mask], atol=1e-2)


def test_a_run_with_a_remote_reference_equals_the_run_with_a_frozen_one(config_of, tmp_path):
    frozen = config_of(output_dir=str(tmp_path / "frozen"), beta=0.1)
    train_run(frozen)
    from klamp.training.models import load_model

    with serve(load_model(frozen.model.model)) as url:
        train_run(config_of(output_dir=str(tmp_path / "away"), beta=0.1, reference="remote", reference_url=url))
    away = assert_same_course(tmp_path / "frozen", tmp_path / "away")
    assert all("kl/exact" not in row for row in away)


def test_a_server_that_fails_for_a_moment_is_asked_again(rollout):
    sampled, _ = rollout
    lengths = sampled.completions.mask.sum(-1).tolist()
    right = {"logprobs": [[-1.0] * n for n in lengths]}
    with in_turn((503, {}), (500, {}), (200, right)) as (url, asked):
        scores = RemoteReference(url).score(sampled.completions, temperature=1.0)
    assert len(asked) == 3
    assert scores.logprobs[sampled.completions.mask].unique().tolist() == [-1.0]


def test_a_request_that_the_server_refuses_is_not_repeated(rollout):
    sampled, _ = rollout
    with in_turn((400, {"error": "no"})) as (url, asked), pytest.raises(ModelError, match="remote reference"):
        RemoteReference(url).score(sampled.completions, temperature=1.0)
    assert len(asked) == 1


def test_an_answer_of_other_lengths_is_refused(rollout):
    sampled, _ = rollout
    with in_turn((200, {"logprobs": [[-1.0]]})) as (url, _), pytest.raises(ModelError, match="other lengths"):
        RemoteReference(url).score(sampled.completions, temperature=1.0)


def test_a_server_that_is_not_there_gives_a_clear_error(rollout, monkeypatch):
    sampled, _ = rollout
    monkeypatch.setattr(asking.time, "sleep", lambda _: None)
    with pytest.raises(ModelError, match="remote reference"):
        RemoteReference(f"http://127.0.0.1:{kept_port()}/").score(sampled.completions, temperature=1.0)


def test_what_a_remote_reference_cannot_do_is_refused_before_the_run(config_of):
    with pytest.raises(ConfigError, match="reference_url"):
        config_of(reference="remote")
    with pytest.raises(ConfigError, match="exact"):
        config_of(reference="remote", reference_url=f"http://127.0.0.1:{kept_port()}/", kl_estimator="exact")


@pytest.fixture(scope="module")
def told():
    """A server, and the list whose first answer it gives."""
    answers = [(200, {})]
    with answering(lambda *_: answers[0]) as url:
        yield url, answers


numbers = st.one_of(st.floats(), st.integers(), st.none(), st.booleans(), st.text(max_size=2), st.just(10**400))
rows = st.lists(st.one_of(st.lists(numbers, max_size=2), numbers), max_size=3)
anything = st.recursive(
    numbers, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner)
)
contents = st.one_of(
    st.fixed_dictionaries(
        {"logprobs": st.lists(st.lists(st.floats(-9, 0.1), min_size=1, max_size=1), max_size=3) | rows}
    ),
    anything,
).map(lambda content: json.dumps(content).encode())


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(contents | st.binary(max_size=30), st.sampled_from([200, 200, 200, 204, 302, 400, 500]))
@example(b"[" * 100_000, 200)
@example(b'{"logprobs": [[-1e999], [0]]}', 200)
@example(b'{"logprobs": [[NaN], [0]]}', 200)
def test_whatever_is_answered_is_log_probabilities_or_an_error_of_klamp(monkeypatch, told, body, status):
    monkeypatch.setattr(asking.time, "sleep", lambda _: None)
    url, answers = told
    answers[:] = [(status, body)]
    found = caught = None
    try:
        found = RemoteReference(url).logprobs([[1], [2]], [[3], [4]], temperature=1.0)
    except KlampError as error:
        caught = error
    if caught is None:
        assert torch.tensor(found).shape == (2, 1) and torch.tensor(found).isfinite().all()
    else:
        assert "does not answer as it should" in caught.what and caught.why and caught.fix
        assert all(line.isprintable() for line in str(caught).splitlines())


@pytest.mark.parametrize("where", ["http://[", "http://host:port/", "gopher://host/"])
def test_a_redirection_to_no_address_is_an_error_of_klamp(where, monkeypatch):
    monkeypatch.setattr(asking.time, "sleep", lambda _: None)
    with in_turn((302, where)) as (url, _), pytest.raises(ModelError, match="does not answer as it should"):
        RemoteReference(url).logprobs([[1]], [[2]], temperature=1.0)


def test_user_password_and_query_reach_the_server_and_no_file_of_the_run(config_of, context_of, tmp_path, capfd):
    seen = set()
    config = config_of(output_dir=str(tmp_path / "run"), beta=0.1, max_steps=1, report_to=("tensorboard",))
    policy = context_of().policy

    def answer(path, asked, headers):
        seen.add((path, headers.get("Authorization")))
        return (404, {}) if asked is None else (200, remote.answer(policy, asked))

    with answering(answer) as url:
        whole = url.replace("//", "//m%65:se%63ret@") + "/deep?token=sesame"
        changes = {"reference": "remote", "reference_url": whole, "resume": False}
        train_run(type(config).from_flat(config.flat() | changes))
    basic = "Basic " + b64encode(b"me:secret").decode()
    assert seen == {("/deep/v1/models?token=sesame", basic), ("/deep?token=sesame", basic)}
    files = [file for file in (tmp_path / "run").rglob("*") if file.is_file()]
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["reference_url"] == f"{url}/deep"
    assert any("tfevents" in file.name for file in files) and any(file.name == "metrics.jsonl" for file in files)
    written = [*(file.read_bytes() for file in files), *(text.encode() for text in capfd.readouterr())]
    assert not any(secret in text for text in written for secret in (b"se%63ret", b"secret", b"sesame", basic.encode()))


def test_a_server_that_refuses_them_is_named_without_them(config_of, context_of):
    context = context_of()
    with answering(lambda *_: (401, {"error": "who?"})) as url:
        config = config_of(reference="remote", reference_url=url.replace("//", "//me:secret@"))
        with pytest.raises(ModelError, match=f"got: {url}\n.*401.*who.*no file of a run keeps") as error:
            connect(config, context.task, context.tokenizer)
    assert "secret" not in str(error.value) and "me:" not in str(error.value)
