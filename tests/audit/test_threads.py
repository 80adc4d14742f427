"""Public threads about a wrong KL, mask or shift, replayed: the fault is named with the fix that ended the thread."""

from __future__ import annotations

from typing import Any

import pytest
from tests.audit.bench.threads import FAULTS, REWARDS, SOUND, is_named, verdict_of


@pytest.fixture(scope="module")
def verdicts() -> dict[str, Any]:
    return {name: verdict_of(thread) for name, thread in {**FAULTS, **REWARDS}.items()}


def test_at_least_25_of_the_27_faults_are_named_with_the_fix_of_their_thread(verdicts: dict[str, Any]) -> None:
    missed = [name for name, thread in FAULTS.items() if not is_named(thread, verdicts[name])]
    assert len(FAULTS) == 27
    assert len(missed) <= 2, "".join(f"\n--- {name}\n{verdicts[name]}" for name in missed)


def test_a_kl_that_the_reward_should_hold_is_missed_from_the_rewards(verdicts: dict[str, Any]) -> None:
    assert all(is_named(thread, verdicts[name]) for name, thread in REWARDS.items())


@pytest.mark.parametrize("name", FAULTS | REWARDS)
def test_the_fix_of_a_thread_ends_its_finding(name: str) -> None:
    thread = (FAULTS | REWARDS)[name]
    verdict = verdict_of(thread, fixed=True)
    assert not set(thread.codes) & set(verdict.codes("wrong")), str(verdict)
    if thread.mended:
        assert verdict.ok is not False, str(verdict)


@pytest.mark.parametrize("name", SOUND)
def test_threads_without_a_fault_are_not_accused(name: str) -> None:
    for seed in (1, 2):
        verdict = verdict_of(SOUND[name], seed=seed)
        assert verdict.ok is not False, str(verdict)
