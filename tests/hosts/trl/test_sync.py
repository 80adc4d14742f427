"""A sampler that TRL is told the log-probabilities of: looked into where they drift off, and told of once."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trl
from tests.hosts.trl.hosts import generated, klamp_trainer, model, plain_logits, plain_logprobs

from klamp.diagnostics.sync import START, WEIGHTS
from klamp.errors import KLWarning
from klamp.hosts.trl.sync import look, watch


def logprobs(made: Any, output: Any) -> torch.Tensor:
    with torch.no_grad():
        return plain_logprobs(plain_logits(copy.deepcopy(made).eval(), output), output)


@pytest.fixture
def watched(trainer: Any, base: Any, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A trainer that has trained, a batch as an engine in sync would have written it, and what is said."""
    said: list[str] = []
    session = trainer._klamp
    for name, value in {"starts_at_reference": True, "sync_gap": 0.0, "out_of_sync": False}.items():
        monkeypatch.setattr(session, name, value)
    monkeypatch.setattr(trainer, "_caution", said.append)
    monkeypatch.setattr(trainer.state, "global_step", 3)
    output = generated(trainer)
    own = logprobs(trainer.model, output)
    output |= {"old_per_token_logps": own, "sampling_per_token_logps": own + 1e-6}
    return SimpleNamespace(trainer=trainer, output=output, said=said, start=logprobs(base, output), own=own)


def test_nothing_is_said_and_nothing_scored_while_the_sampler_follows(
    watched: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("klamp.hosts.trl.sync.look", pytest.fail)
    watch(watched.trainer, watched.output)
    del watched.output["sampling_per_token_logps"]
    watch(watched.trainer, watched.output)
    assert watched.said == []


def test_a_sampler_that_stayed_at_the_start_is_named_once(watched: SimpleNamespace) -> None:
    watched.output["sampling_per_token_logps"] = watched.start
    for _ in range(2):
        watch(watched.trainer, watched.output)
    assert len(watched.said) == 1
    assert "out of sync at step 4" in watched.said[0]
    assert START in watched.said[0] and "not synced" in watched.said[0]
    report = look(watched.trainer, watched.output)
    assert report.sides[0].gaps[START] < 1e-5
    assert report.sides[1].gaps[WEIGHTS] < 1e-5


def test_another_data_type_is_looked_into_once_and_not_called_a_fault(
    watched: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = []
    monkeypatch.setattr("klamp.hosts.trl.sync.look", lambda *given: looks.append(1) or look(*given))
    torch.manual_seed(3)
    watched.output["sampling_per_token_logps"] = watched.own + 0.04 * torch.randn_like(watched.own)
    for _ in range(3):
        watch(watched.trainer, watched.output)
    assert looks == [1]
    assert watched.said == []
    watched.output["sampling_per_token_logps"] = watched.start  # later the weights are not synced
    watch(watched.trainer, watched.output)
    assert len(watched.said) == 1


def test_the_reference_is_no_start_where_it_is_another_model_or_moves(watched: SimpleNamespace) -> None:
    watched.output["sampling_per_token_logps"] = watched.start
    watched.trainer._klamp.starts_at_reference = False
    assert START not in look(watched.trainer, watched.output).sides[0].gaps


def test_split_weights_are_not_looked_into(watched: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    watched.output["sampling_per_token_logps"] = watched.start
    monkeypatch.setattr(watched.trainer, "is_fsdp_enabled", True)
    watch(watched.trainer, watched.output)
    assert watched.said == []


def test_a_run_whose_engine_is_never_synced_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner, start = trl.GRPOTrainer._generate_and_score_completions, model()

    def told(self: Any, inputs: Any) -> Any:
        output = inner(self, inputs)
        return output | {
            "old_per_token_logps": logprobs(self.model, output),
            "sampling_per_token_logps": logprobs(start, output),
        }

    monkeypatch.setattr(trl.GRPOTrainer, "_generate_and_score_completions", told)
    trainer = klamp_trainer(model(), tmp_path, beta=0.1, max_steps=3, learning_rate=3e-2)
    with pytest.warns(KLWarning, match=r"Sampler and trainer are out of sync at step [23]: .*weights of the start"):
        trainer.train()
