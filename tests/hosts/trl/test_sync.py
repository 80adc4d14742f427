"""A sampler that TRL is told the log-probabilities of: looked into where they drift off, and told of once."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trl
from tests.hosts.common.fake_vllm import put_in_place
from tests.hosts.trl.hosts import generated, klamp_trainer, model, plain_logits, plain_logprobs, saved, stock_trainer

from klamp.config import KLConfig
from klamp.errors import ConfigError, KLWarning
from klamp.hosts.common.sampler_weights import pack_nothing
from klamp.hosts.common.sync import START, WEIGHTS
from klamp.hosts.trl.grpo_trainer import _check_engine
from klamp.hosts.trl.measure import sync_report, watch_sampler
from klamp.trl import attach


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
    monkeypatch.setattr("klamp.hosts.trl.measure.sync_report", pytest.fail)
    watch_sampler(watched.trainer, watched.output)
    del watched.output["sampling_per_token_logps"]
    watch_sampler(watched.trainer, watched.output)
    assert watched.said == []


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


def test_another_data_type_is_looked_into_once_and_not_called_a_fault(
    watched: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = []
    monkeypatch.setattr(
        "klamp.hosts.trl.measure.sync_report", lambda *given, **more: looks.append(1) or sync_report(*given, **more)
    )
    torch.manual_seed(3)
    watched.output["sampling_per_token_logps"] = watched.own + 0.04 * torch.randn_like(watched.own)
    for _ in range(3):
        watch_sampler(watched.trainer, watched.output)
    assert looks == [1]
    assert watched.said == []
    watched.output["sampling_per_token_logps"] = watched.start  # later the weights are not synced
    watch_sampler(watched.trainer, watched.output)
    assert len(watched.said) == 1


def test_the_reference_is_no_start_where_it_is_another_model_or_moves(watched: SimpleNamespace) -> None:
    watched.output["sampling_per_token_logps"] = watched.start
    assert START in sync_report(watched.trainer, watched.output).sides[0].gaps
    watched.trainer._klamp.starts_at_reference = False
    assert START not in sync_report(watched.trainer, watched.output).sides[0].gaps


def test_split_weights_are_not_looked_into(watched: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    watched.output["sampling_per_token_logps"] = watched.start
    monkeypatch.setattr(watched.trainer, "is_fsdp_enabled", True)
    watch_sampler(watched.trainer, watched.output)
    assert watched.said == []


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


def with_engine(trainer: Any, dtype: torch.dtype) -> Any:
    """A trainer with what stands for vLLM in its own process."""
    config = SimpleNamespace(dtype=dtype)
    trainer.vllm_generation = SimpleNamespace(llm=SimpleNamespace(llm_engine=SimpleNamespace(model_config=config)))
    return trainer


@pytest.mark.parametrize("amx", [False, True])
def test_an_engine_that_packs_weights_is_refused_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, amx: bool
) -> None:
    init = trl.GRPOTrainer.__init__

    def made(self: Any, *given: Any, **options: Any) -> None:
        init(self, *given, **options)
        with_engine(self, torch.bfloat16)

    attached = with_engine(stock_trainer(saved(model(), tmp_path / "base"), tmp_path, trainer=None), torch.bfloat16)
    vllm = put_in_place(monkeypatch, amx=amx)
    monkeypatch.setattr(trl.GRPOTrainer, "__init__", made)
    refusal = "vLLM packs the model's weights on this CPU"
    with pytest.raises(ConfigError, match=refusal):
        klamp_trainer(model(), tmp_path)
    with pytest.raises(ConfigError, match=refusal):
        attach(attached, KLConfig(beta=0.1))
    vllm._custom_ops._supports_onednn = False
    if amx:
        with pytest.raises(ConfigError, match=f"{refusal}\n.*AMX"):
            klamp_trainer(model(), tmp_path)
    pack_nothing()
    klamp_trainer(model(), tmp_path)


def test_a_server_of_vllm_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_in_place(monkeypatch, amx=True)
    trainer = klamp_trainer(model(), tmp_path)
    trainer.vllm_generation = SimpleNamespace(mode="server")
    _check_engine(trainer)
