"""A reference over real HTTP on the loopback: the same numbers, and clear errors."""

from __future__ import annotations

import copy
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import torch
from tests.training.conftest import disturb, steps_of

from klamp.errors import ConfigError, ModelError
from klamp.training import remote
from klamp.training.remote import RemoteReference, serve
from klamp.training.rollouts import collect
from klamp.training.trainer import train_run


@contextmanager
def answering(*answers: tuple[int, object]):
    """A server that gives these answers, one after the other, and then the last one for good."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            status, content = answers[min(len(asked), len(answers)) - 1]
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/", asked
    finally:
        server.shutdown()
        server.server_close()


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
    here, away = steps_of(tmp_path / "frozen"), steps_of(tmp_path / "away")
    assert len(here) == len(away) == 4
    assert here[-1]["kl/k3"] > 1e-6
    for a, b in zip(here, away, strict=True):
        for name in ("reward", "train/loss", "train/grad_norm", "kl/k1", "kl/k3", "train/kl_penalty"):
            assert a[name] == pytest.approx(b[name], rel=1e-3, abs=1e-5), name
        assert "kl/exact" not in b


def test_a_server_that_fails_for_a_moment_is_asked_again(rollout):
    sampled, _ = rollout
    lengths = sampled.completions.mask.sum(-1).tolist()
    right = {"logprobs": [[-1.0] * n for n in lengths]}
    with answering((503, {}), (500, {}), (200, right)) as (url, asked):
        scores = RemoteReference(url).score(sampled.completions, temperature=1.0)
    assert len(asked) == 3
    assert scores.logprobs[sampled.completions.mask].unique().tolist() == [-1.0]


def test_a_request_that_the_server_refuses_is_not_repeated(rollout):
    sampled, _ = rollout
    with answering((400, {"error": "no"})) as (url, asked), pytest.raises(ModelError, match="remote reference"):
        RemoteReference(url).score(sampled.completions, temperature=1.0)
    assert len(asked) == 1


def test_an_answer_of_other_lengths_is_refused(rollout):
    sampled, _ = rollout
    with answering((200, {"logprobs": [[-1.0]]})) as (url, _), pytest.raises(ModelError, match="other lengths"):
        RemoteReference(url).score(sampled.completions, temperature=1.0)


def test_a_server_that_is_not_there_gives_a_clear_error(rollout, monkeypatch):
    sampled, _ = rollout
    monkeypatch.setattr(remote.time, "sleep", lambda _: None)
    with pytest.raises(ModelError, match="remote reference"):
        RemoteReference("http://127.0.0.1:9/").score(sampled.completions, temperature=1.0)


def test_what_a_remote_reference_cannot_do_is_refused_before_the_run(config_of):
    with pytest.raises(ConfigError, match="reference_url"):
        config_of(reference="remote")
    with pytest.raises(ConfigError, match="exact"):
        config_of(reference="remote", reference_url="http://127.0.0.1:9/", kl_estimator="exact")
