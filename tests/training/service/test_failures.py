"""What can go wrong in a whole run over real HTTP: it stops with its state saved, and goes on to the same numbers.

A server that dies is waited for as long as the SDK goes on trying, so these take their time. They are slow for another
reason too: a service that answers too late is told from one that answers by `service_timeout`, here 5 s, which every
request before it has to keep.
"""

from __future__ import annotations

import pytest
from tests.ports import kept_port
from tests.standin import saved_step, tiny_run
from tests.training import rewards
from tests.training.conftest import steps_of, tiny_llama

from klamp.errors import ModelError, NonFiniteError, RewardError
from klamp.tasks import arithmetic_tokenizer
from klamp.tinker.testing import Fault, serve
from klamp.training.backends import train_run

pytestmark = pytest.mark.slow

FAST = {
    "max_steps": 3,
    "prompts_per_step": 2,
    "num_generations": 3,
    "eval_size": 1,
    "eval_every": 0,
    "save_every": 1,
    "keep_checkpoints": 1,
}
"""Requests to `asample`: 3 for the evaluation, then per step 2 for completions and 6 for the reference."""


@pytest.fixture(scope="module")
def undisturbed(shared_tiny, tmp_path_factory):
    """Metrics of the run that the faults strike."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in shared_tiny.environment.items():
            patch.setenv(name, value)
        train_run(tiny_run(**FAST, output_dir=str(folder / "run")))
    return steps_of(folder / "run")


STOPS = {
    "the reference leaves a token out": (
        Fault(kind="none", route="asample", scoring=True, after=8),
        NonFiniteError,
        "no log-probability for a token",
    ),
    "NaN from the trainer": (Fault(kind="nan", route="forward_backward", after=2), NonFiniteError, "NaN"),
    "NaN from the sampler": (Fault(kind="nan", route="asample", scoring=False, after=5), NonFiniteError, "sampler"),
    "the service is too slow": (
        Fault(kind="slow", route="asample", scoring=True, after=8, times=None, seconds=60),
        ModelError,
        "did not answer in time",
    ),
    "a snapshot fails": (
        Fault(kind="fail", route="save_weights_for_sampler", after=1),
        ModelError,
        "a fault was asked",
    ),
}


@pytest.mark.parametrize("name", STOPS)
def test_a_run_that_cannot_go_on_stops_with_its_state_saved(tiny, run_of, tmp_path, undisturbed, name):
    fault, error, words = STOPS[name]
    tiny.inject(fault)
    late = {"service_timeout": 5.0} if fault.kind == "slow" else {}
    with pytest.raises(error) as caught:
        train_run(run_of(**FAST, **late))
    assert words in str(caught.value)
    tiny.inject()
    assert saved_step(tmp_path / "run") == 1
    assert any("the state after step 1 is saved in" in note for note in caught.value.__notes__)
    train_run(run_of(**FAST, resume=True))
    assert steps_of(tmp_path / "run") == undisturbed


def test_an_update_that_breaks_goes_back_to_the_newest_checkpoint(tiny, run_of, tmp_path):
    """Whether the weights moved before the answer was lost is not known, so that they belong to no step."""
    tiny.inject(Fault(kind="fail", route="optim_step", after=3))
    with pytest.raises(ModelError, match="asked to take an optimizer step") as caught:
        train_run(run_of(**FAST | {"max_steps": 4, "save_every": 2}))
    assert saved_step(tmp_path / "run") == 2
    assert "the state after step 2 is saved" in caught.value.__notes__[0]


def test_a_reward_that_breaks_stops_with_the_last_step_saved(tiny, run_of, tmp_path, monkeypatch):
    monkeypatch.setattr(rewards, "STATE", {"calls": 0, "break_at": 3 + 2 * 6 + 4})
    with pytest.raises(RewardError):
        train_run(run_of(**FAST | {"save_every": 0}, reward="tests.training.rewards:breaks"))
    assert saved_step(tmp_path / "run") == 2


def test_what_passes_changes_nothing(tiny, run_of, tmp_path, undisturbed):
    tiny.inject(
        Fault(kind="drop", route="asample", scoring=True, after=7),
        Fault(kind="status", route="asample", scoring=True, after=11, times=2, status=503),
        Fault(kind="short", route="asample", scoring=True, times=None),
        Fault(kind="slow", route="asample", scoring=False, after=4, seconds=1.0),
        Fault(kind="drop", route="forward_backward", after=3),
        Fault(kind="drop", route="optim_step", after=1),
        Fault(kind="drop", route="save_weights"),
    )
    train_run(run_of(**FAST))
    assert steps_of(tmp_path / "run") == undisturbed


@pytest.mark.parametrize(("route", "after"), [("asample", 13), ("optim_step", 1)])
def test_a_server_that_dies_stops_the_run_and_another_takes_it_up(
    run_of, tmp_path, undisturbed, monkeypatch, route, after
):
    model, kept = tiny_llama(), {"name": "klamp/tiny", "folder": tmp_path / "kept"}
    with serve(model, arithmetic_tokenizer(), **kept, faults=[Fault(kind="die", route=route, after=after)]) as standin:
        for name, value in standin.environment.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(ModelError, match="did not answer in time|refused or failed") as caught:
            train_run(run_of(**FAST, service_timeout=5.0))
    assert saved_step(tmp_path / "run") == 1
    assert "the state after step 1 is saved" in caught.value.__notes__[0]
    with serve(model, arithmetic_tokenizer(), **kept) as standin:
        for name, value in standin.environment.items():
            monkeypatch.setenv(name, value)
        train_run(run_of(**FAST, resume=True))
    assert steps_of(tmp_path / "run") == undisturbed


def test_a_server_that_is_not_there(run_of, tmp_path, monkeypatch):
    monkeypatch.setenv("TINKER_API_KEY", "tml-x")
    where = f"http://127.0.0.1:{kept_port()}"
    monkeypatch.setenv("TINKER_BASE_URL", where)
    with pytest.raises(ModelError, match="asked to open a session|asked to train an adapter") as caught:
        train_run(run_of(service_timeout=1.5))
    assert where in caught.value.text
    assert not (tmp_path / "run" / "config.yaml").exists()
