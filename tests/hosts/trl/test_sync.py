"""A sampler that TRL is told the log-probabilities of: looked into where they drift off, and told of once."""

import copy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trl
from tests.hosts.trl.hosts import generated, klamp_trainer, model, plain_logits, plain_logprobs

from klamp.errors import KLWarning
from klamp.hosts.common.sampler_weights import START, WEIGHTS
from klamp.hosts.trl.measure import sync_report, watch_sampler
from klamp.hosts.trl.session import Warned


def logprobs(made: Any, output: Any) -> torch.Tensor:
    with torch.no_grad():
        return plain_logprobs(plain_logits(copy.deepcopy(made).eval(), output), output)


@pytest.fixture
def watched(trainer: Any, base: Any, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A trainer that has trained, a batch as an engine in sync would have written it, and what is said."""
    said: list[str] = []
    session = trainer._klamp
    facts = session.reference._replace(is_start=True)
    monkeypatch.setattr(trainer, "_klamp", replace(session, reference=facts, warned=Warned()))
    monkeypatch.setattr(trainer, "_caution", said.append)
    monkeypatch.setattr(trainer.state, "global_step", 3)
    output = generated(trainer)
    own = logprobs(trainer.model, output)
    output |= {"old_per_token_logps": own, "sampling_per_token_logps": own + 1e-6}
    return SimpleNamespace(trainer=trainer, output=output, said=said, start=logprobs(base, output), own=own)


def test_a_sampler_that_stayed_at_the_start_is_named_once(watched: SimpleNamespace) -> None:
    watched.output["sampling_per_token_logps"] = watched.start
    for _ in range(2):
        watch_sampler(watched.trainer, watched.output)
    assert len(watched.said) == 1
    assert "out of sync at step 4" in watched.said[0]
    assert START in watched.said[0] and "not synced" in watched.said[0]
    report = sync_report(watched.trainer, watched.output)
    assert report.sides[0].gaps[START] < 1e-5
    assert report.sides[1].gaps[WEIGHTS] < 1e-5


def test_the_reference_is_no_start_where_it_is_another_model_or_moves(watched: SimpleNamespace) -> None:
    watched.output["sampling_per_token_logps"] = watched.start
    assert START in sync_report(watched.trainer, watched.output).sides[0].gaps
    session = watched.trainer._klamp
    watched.trainer._klamp = replace(session, reference=session.reference._replace(is_start=False))
    assert START not in sync_report(watched.trainer, watched.output).sides[0].gaps


def test_a_run_whose_engine_is_never_synced_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner, start = trl.GRPOTrainer._generate_and_score_completions, model()

    def told(self: Any, inputs: Any) -> Any:
        output = inner(self, inputs)
        own, stale = logprobs(self.model, output), logprobs(start, output)
        return output | {"old_per_token_logps": own, "sampling_per_token_logps": stale}

    monkeypatch.setattr(trl.GRPOTrainer, "_generate_and_score_completions", told)
    trainer = klamp_trainer(model(), tmp_path, beta=0.1, max_steps=3, learning_rate=3e-2)
    with pytest.warns(KLWarning, match=r"Sampler and trainer are out of sync at step [23]: .*weights of the start"):
        trainer.train()
