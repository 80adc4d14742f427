"""The losses of TRL, Liger, torchrl, verl and OpenRLHF, of their distillation trainers, and of four documents."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
from tests.audit.bench import distilled, hosts, trl_loss
from tests.audit.bench.worlds import Score, make_world, run, verdict_of, worth_of


def needs(package: str) -> Any:
    """A mark that skips a test, visibly, where a package is not installed."""
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"NOT RUN: {package} is not installed")


HOSTS = {
    "documents": (hosts.documents, ()),
    "Liger": (hosts.liger, needs("liger_kernel")),
    "torchrl": (hosts.torchrl, needs("torchrl")),
    "verl": (hosts.verl, needs("verl")),
    "OpenRLHF": (hosts.openrlhf, needs("openrlhf")),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=mark) for name, (_, mark) in HOSTS.items()])
def test_losses_of_other_trainers_are_named(name: str) -> None:
    score = run(name, HOSTS[name][0](), [make_world(70, shape=(8, 12), lag=0.25)])
    assert score.counts["accused"] == 0, str(score)
    assert score.share() >= 0.829, str(score)


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(name, marks=mark) for name, (_, mark) in HOSTS.items()])
def test_losses_of_other_trainers_are_named_where_they_are_watched(name: str) -> None:
    score = run(name, HOSTS[name][0](), [make_world(71, shape=(8, 12), lag=0.25).watch()])
    assert score.counts["accused"] == 0, str(score)
    assert score.share() >= 0.889, str(score)


@needs("trl")
@pytest.mark.parametrize("batches", [slice(1), pytest.param(slice(None), marks=pytest.mark.slow)])
@pytest.mark.parametrize("watched", [False, True])
def test_the_loss_of_trls_trainer_is_named(batches: slice, watched: bool) -> None:
    score = Score(f"TRL, watched={watched}")
    assert len([*trl_loss.settings()]) == 29
    for case, world in trl_loss.cases(batches):
        verdict = verdict_of(case, world.watch() if watched else world)
        score.add(case.name, worth_of(case, verdict), verdict)
    assert score.counts["accused"] == 0, str(score)
    assert score.share() >= (0.837 if watched else 0.813), str(score)


@needs("trl")
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_distillation_losses_are_named_by_their_logits(seed: int) -> None:
    score, batch = Score("distillation"), distilled.make_sequences(seed)
    for loss, expected in distilled.losses():
        verdict = distilled.verdict_of(loss, batch)
        score.add(loss.name, distilled.worth_of(expected, verdict), verdict)
    assert len(score.rows) == 18
    assert score.counts["accused"] == 0, str(score)
    assert score.share() >= 0.894, str(score)
