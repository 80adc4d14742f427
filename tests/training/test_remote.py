"""A reference over real HTTP on the loopback: the same numbers, and clear errors."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.training.answering import in_turn
from tests.training.conftest import assert_same_course, disturb

from klamp.errors import ConfigError, ModelError
from klamp.training import asking, remote
from klamp.training.remote import RemoteReference, serve
from klamp.training.rollouts import collect
from klamp.training.trainer import train_run


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
        RemoteReference("http://127.0.0.1:9/").score(sampled.completions, temperature=1.0)


def test_what_a_remote_reference_cannot_do_is_refused_before_the_run(config_of):
    with pytest.raises(ConfigError, match="reference_url"):
        config_of(reference="remote")
    with pytest.raises(ConfigError, match="exact"):
        config_of(reference="remote", reference_url="http://127.0.0.1:9/", kl_estimator="exact")
