"""A sampler that is not the policy: where the threshold lies, and what its course and its places say of why."""

from __future__ import annotations

import pytest
from tests.diagnostics.histories import completion, history_of, look

from klamp.diagnostics.history import History


@pytest.mark.parametrize(
    ("curves", "alarmed"),
    [
        ({"sampler__k1": [0.002], "sampler__k3": [0.002]}, False),
        ({"sampler__k1": [0.011], "sampler__k3": [0.002]}, True),
        ({"sampler__k1": [-0.011], "sampler__k3": [0.002]}, True),
        ({"sampler__k1": [0.003], "sampler__k3": [1635.0]}, True),
        ({"sampler__abs": [0.02]}, False),
        ({"sampler__abs": [0.15]}, True),  # E|d| = .15 means E[d^2]/2 >= .011
        ({"sampler__abs": [0.13]}, False),
        ({"reward": [1.0]}, False),
    ],
)
def test_sampler_mismatch(curves: dict, alarmed: bool) -> None:
    assert (look("sampler-mismatch", history_of(**curves)) is not None) is alarmed


def test_a_mismatch_names_the_tokens_by_the_sampler() -> None:
    history = history_of(sampler__k3=[0.5])
    history.add_completions([completion(sampler=(-1.0, -0.5, -0.5))])
    found = look("sampler-mismatch", history)
    assert found is not None
    assert [(token.position, token.other_logprob, token.share) for token in found.tokens] == [(1, -0.5, 1.0)]


def cause(history: History) -> str:
    found = look("sampler-mismatch", history)
    assert found is not None
    return found.causes[0] if found.causes else ""


def test_what_came_with_the_updates_is_a_sync_that_is_missing() -> None:
    text = cause(history_of(sampler__k3=[0.001, 0.02, 0.4]))
    assert text.startswith("it came with the updates (sampler/k3 was 0.001 before the first one)")


def test_a_small_difference_from_the_start_is_arithmetic() -> None:
    text = cause(history_of(sampler__k3=[0.02, 0.02]))
    assert "no sync is missing: other data types or kernels" in text


def test_first_tokens_further_apart_than_later_ones_are_a_prompt_that_was_not_seen() -> None:
    policy = (-5.0, -3.0, -2.0, -1.0, -1.0, -1.0)
    history = history_of(sampler__k3=[2.0])
    tokens = {"tokens": "abcdef", "ref": None}
    history.add_completions([completion(policy=policy, sampler=(-1.0, -1.0, -1.0, -1.0, -0.5, -0.5), **tokens)])
    assert "first tokens are 8.0 times as far apart as later ones: the trainer does not see the prompt" in cause(
        history
    )


def test_a_large_difference_everywhere_is_another_temperature_or_input() -> None:
    history = history_of(sampler__k3=[2.0])
    history.add_completions([completion(policy=(-2.0,) * 6, sampler=(-1.0,) * 6, tokens="abcdef", ref=None)])
    assert "scores with another temperature, another prompt" in cause(history)
    assert "scores with another temperature" in cause(history_of(sampler__k3=[2.0])), "without completions too"


def test_a_record_without_its_first_step_names_no_cause() -> None:
    history = history_of(sampler__k3=[0.5, 0.5])
    del history.rows[0]
    assert cause(history) == ""
    assert cause(history_of(sampler__abs=[0.9])) == ""
