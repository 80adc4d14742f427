"""What klamp remembers between a trainer's calls: scorings while somebody listens, lengths, rewards."""

from __future__ import annotations

import pytest
import torch

from klamp.config import KLConfig
from klamp.core.term import KLTerm
from klamp.errors import UnsupportedVersion
from klamp.hosts.trl.session import Scoring, Session, only_scoring


def scoring(value: float) -> Scoring:
    return Scoring(model=None, positional=(), options={}, logprobs=torch.tensor([[value]]))


def test_without_a_kl_of_klamps_there_is_nothing_to_control() -> None:
    session = Session.of(None, max_length=8)
    assert (session.kl, session.control, session.term) == (None, None, KLTerm())
    assert set(session.windows) == {"train", "eval"}


def test_a_kl_brings_its_term_and_its_control() -> None:
    kl = KLConfig(beta=0.3, kl_horizon="sequence")
    session = Session.of(kl, max_length=8)
    assert session.term == kl.build_term()
    assert session.control is not None
    assert session.control.beta(0, 10) == 0.3


def test_calls_are_collected_by_the_innermost_listener_only() -> None:
    session = Session.of(None, max_length=8)
    assert session.seen is None, "nobody listens"
    with session.listening() as outer:
        assert session.seen is outer
        session.seen.append(scoring(1.0))
        with session.listening() as inner:
            session.seen.append(scoring(2.0))
        assert session.seen is outer
    assert session.seen is None
    assert [[float(each.logprobs) for each in found] for found in (outer, inner)] == [[1.0], [2.0]]


def test_an_error_ends_the_listening() -> None:
    session = Session.of(None, max_length=8)
    with pytest.raises(RuntimeError), session.listening():
        raise RuntimeError
    assert session.seen is None


def test_completions_without_any_reward_are_told_apart() -> None:
    session, nan = Session.of(None, max_length=8), float("nan")
    session.note_rewards([[1, 2, 3], [4], []], torch.tensor([[1.0, nan], [nan, nan], [nan, 0.0]]))
    assert session.lengths == [3, 1, 0]
    assert session.scorable is not None
    assert session.scorable.tolist() == [True, False, True]


def test_a_loss_scores_the_policy_once() -> None:
    one = scoring(1.0)
    assert only_scoring([one]) is one
    for seen in ([], [one, one]):
        with pytest.raises(UnsupportedVersion, match=f"{len(seen)} calls of _get_per_token_logps_and_entropies"):
            only_scoring(seen)


def test_who_learns_is_known_within_one_loss_only() -> None:
    session = Session.of(None, max_length=8)
    with session.learning(torch.tensor([True, False])):
        assert session.learns is not None
    assert session.learns is None
