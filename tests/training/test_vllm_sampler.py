"""vLLM as the sampler of klamp's own loop, with a stand-in for its engine that runs the policy's own architecture."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from tests.hosts.common.fake_vllm import put_in_place
from tests.training.conftest import TINY, disturb, steps_of, tiny_llama
from tests.training.test_controls import StopAfter
from transformers import AutoConfig, AutoModelForCausalLM

from klamp.config import KLConfig
from klamp.errors import ConfigError, MissingLibrary, ModelError, TrainingStopped
from klamp.hosts.common.packing import packing
from klamp.training import vllm_sampler
from klamp.training.config import ModelConfig, TrainConfig
from klamp.training.models import with_adapter
from klamp.training.rollouts import collect
from klamp.training.trainer import train_run
from klamp.training.vllm_sampler import check_adapter, completions_of, sampler_of, weights_of


@dataclass(kw_only=True)
class Settings:
    """What vLLM's SamplingParams hold of those that klamp gives."""

    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    stop_token_ids: list[int]
    ignore_eos: bool
    seed: int
    logprobs: int
    detokenize: bool


class Engine:
    """vLLM's LLM: a model of its own, made from a configuration alone, that draws with a seed for each completion.

    Args:
        model: a folder with a configuration.
        options: those of vLLM that klamp gives.
    """

    made: ClassVar[list[Engine]] = []
    takes = 1_000
    """How many times it takes the weights that it is given."""

    def __init__(self, model: str, **options: Any) -> None:
        self.options, self.asked, self.running = options, [], True
        torch.manual_seed(17)
        self.model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).eval()
        self.llm_engine = SimpleNamespace(engine_core=SimpleNamespace(shutdown=self.end))
        self.calls: list[str] = []
        self.made.append(self)

    def end(self) -> None:
        self.running = False

    def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> None:
        self.calls.append(method)
        held = dict(self.model.named_parameters())
        given = dict(kwargs["weights_iterator"])
        assert given.keys() == held.keys()
        if self.calls.count(method) <= self.takes:
            with torch.no_grad():
                for name, weight in given.items():
                    held[name].copy_(weight)

    def reset_prefix_cache(self) -> None:
        self.calls.append("reset_prefix_cache")

    def generate(self, prompts: list[Any], settings: list[Settings], *, use_tqdm: bool) -> list[Any]:
        assert not use_tqdm
        self.calls.append("generate")
        self.asked = settings
        return [
            SimpleNamespace(outputs=[self._answer(each["prompt_token_ids"], setting)])
            for each, setting in zip(prompts, settings, strict=True)
        ]

    @torch.no_grad()
    def _answer(self, prompt: list[int], setting: Settings) -> Any:
        generator, ids, told = torch.Generator().manual_seed(setting.seed), [], []
        while len(ids) < setting.max_tokens and not (ids and ids[-1] in setting.stop_token_ids):
            logits = self.model(torch.tensor([[*prompt, *ids]])).logits[0, -1] / setting.temperature
            token = int(torch.multinomial(logits.softmax(-1), 1, generator=generator))
            ids.append(token)
            told.append({token: SimpleNamespace(logprob=float(logits.log_softmax(-1)[token]))})
        reason = "stop" if ids[-1] in setting.stop_token_ids else "length"
        return SimpleNamespace(token_ids=tuple(ids), logprobs=told, finish_reason=reason)


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> type[Engine]:
    """The stand-in in the place of vLLM; the names of vLLM's that klamp's code uses."""
    module = put_in_place(monkeypatch, amx=True)
    module.LLM, module.SamplingParams = Engine, Settings
    monkeypatch.setattr(vllm_sampler, "find_spec", lambda name: object())
    monkeypatch.setattr(Engine, "made", [])
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_LOGGING_LEVEL"):
        monkeypatch.setenv(name, "")
    return Engine


RUN = {"sampler": "vllm", "beta": 0.05, "kl_off_policy": "token", "log_completions": 12, "log_completions_every": 1}


def test_the_engine_has_the_policys_weights_at_every_step(config_of, tmp_path):
    train_run(config_of(**RUN))
    (engine,) = Engine.made
    steps = ["reload_weights", "reset_prefix_cache", "generate"]
    assert engine.calls == steps * (1 + TINY["max_steps"]), "once to be looked at, then at every step"
    assert not engine.running
    rows = steps_of(tmp_path / "run")
    assert rows[0]["kl/k3"] == pytest.approx(0, abs=1e-9)
    assert rows[-1]["kl/k3"] > 1e-4, "the policy has moved"
    assert all(abs(row["sampler/k1"]) < 1e-5 and row["sampler/k3"] < 1e-9 for row in rows)


def test_a_sampler_that_lags_is_logged_and_weighed_in_the_kl(config_of, tmp_path, monkeypatch):
    monkeypatch.setattr(Engine, "takes", 1)  # before the first step, and no more
    penalties = {}
    for weight in ("none", "token"):
        given = RUN | {"kl_off_policy": weight, "output_dir": str(tmp_path / weight), "warmup_steps": 0, "max_steps": 2}
        train_run(config_of(**given))
        rows = steps_of(tmp_path / weight)
        assert rows[0]["sampler/k3"] < 1e-9 < 1e-4 < rows[1]["sampler/k3"]
        penalties[weight] = [row["train/kl_penalty"] for row in rows]
    assert penalties["none"][0] == pytest.approx(penalties["token"][0], abs=1e-7)
    assert penalties["none"][1] != pytest.approx(penalties["token"][1], rel=1e-3)


def test_a_run_that_goes_on_has_the_numbers_of_the_whole_one(config_of, tmp_path):
    given = {**RUN, "lora_r": 2}
    train_run(config_of(**given, output_dir=str(tmp_path / "whole")))
    with pytest.raises(TrainingStopped):
        train_run(config_of(**given, output_dir=str(tmp_path / "parts")), [StopAfter(2)])
    train_run(config_of(**given, output_dir=str(tmp_path / "parts"), resume=True))
    whole, parts = (steps_of(tmp_path / name) for name in ("whole", "parts"))
    assert [row["kl/k3"] for row in whole] == [row["kl/k3"] for row in parts]
    assert len(Engine.made) == 3


def test_what_vllm_is_told(context_of):
    context = context_of(**RUN, temperature=0.7, top_p=0.9, top_k=5, seed=3)
    with sampler_of(context) as context.sampler:
        (engine,) = Engine.made
        assert {setting.top_p for setting in engine.asked} == {1.0}, "it is looked at without truncation"
        first = collect(context, context.task.train[:3], step=1, beta=0.0)
        told = engine.asked
        again = collect(context, context.task.train[:3], step=1, beta=0.0)
        other = collect(context, context.task.train[:3], step=2, beta=0.0)
    longest = max(len(context.tokenizer(each.prompt)["input_ids"]) for each in context.task.train)
    assert engine.options["max_model_len"] == longest + TINY["max_completion_length"]
    assert engine.options["logprobs_mode"] == "processed_logprobs"
    assert engine.options["dtype"] == "float32"
    setting = told[0]
    assert (setting.temperature, setting.top_p, setting.top_k, setting.max_tokens) == (0.7, 0.9, 5, 6)
    assert setting.stop_token_ids == context.stop
    assert setting.ignore_eos, "the ids of the run end a completion, and no others"
    assert len({each.seed for each in told}) == 12
    assert torch.equal(first.completions.ids, again.completions.ids)
    assert not torch.equal(first.completions.ids, other.completions.ids)
    assert first.completions.mask.sum(-1).unique().numel() > 1
    ends = torch.isin(first.completions.ids, torch.tensor(context.stop)) & first.completions.mask
    assert torch.equal(ends.any(-1), first.completions.ended)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packed_weights_are_not_asked_for(context_of, dtype):
    assert packing(getattr(torch, dtype))
    with sampler_of(context_of(**RUN, dtype=dtype)):
        assert packing(getattr(torch, dtype)) == []


def test_a_vllm_that_packs_whatever_it_is_told_is_refused_before_it_is_made(config_of, monkeypatch, tmp_path):
    monkeypatch.setattr(vllm_sampler, "pack_nothing", lambda: None)
    with pytest.raises(ConfigError, match="vLLM packs the model's weights on this CPU"):
        train_run(config_of(**RUN))
    assert not Engine.made
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_answers_become_padded_completions():
    def answer(ids: tuple[int, ...], reason: str) -> Any:
        told = [{token: SimpleNamespace(logprob=-float(token)), 99: SimpleNamespace(logprob=0.0)} for token in ids]
        return SimpleNamespace(token_ids=ids, logprobs=told, finish_reason=reason)

    prompts = torch.tensor([[0, 4], [5, 6]])
    found = completions_of([answer((7, 8, 2), "stop"), answer((9,), "length")], prompts, prompts.bool().long(), pad=0)
    assert found.ids.tolist() == [[7, 8, 2], [9, 0, 0]]
    assert found.mask.tolist() == [[True] * 3, [True, False, False]]
    assert found.sampler_logprobs.tolist() == [[-7.0, -8.0, -2.0], [-9.0, 0.0, 0.0]]
    assert found.ended.tolist() == [True, False]


@torch.no_grad()
@pytest.mark.parametrize("targets", [("all-linear",), ("q_proj", "embed_tokens")])
def test_an_adapter_is_merged_into_copies(targets):
    tied = targets == ("all-linear",)
    plain = tiny_llama(tie_word_embeddings=tied)
    policy = with_adapter(copy.deepcopy(plain), ModelConfig(lora_r=3, lora_target_modules=targets))
    disturb(policy, size=0.1)
    before = {name: weight.clone() for name, weight in policy.named_parameters()}
    merged = dict(weights_of(policy))
    assert merged.keys() == dict(plain.named_parameters()).keys()
    ids = torch.arange(3, 14)[None]
    expected = policy(ids).logits
    assert float((plain(ids).logits - expected).abs().max()) > 0.1
    plain.load_state_dict(merged, strict=False)
    torch.testing.assert_close(plain(ids).logits, expected, rtol=0, atol=1e-5)
    assert all(torch.equal(weight, before[name]) for name, weight in policy.named_parameters())


def test_an_adapter_on_a_head_that_is_the_embedding_is_refused():
    config = ModelConfig(lora_r=2, lora_target_modules=("lm_head",))
    with pytest.raises(ModelError, match="vLLM cannot hold this LoRA adapter"):
        check_adapter(with_adapter(tiny_llama(), config))
    check_adapter(with_adapter(tiny_llama(tie_word_embeddings=False), config))
    check_adapter(tiny_llama())


def test_an_engine_that_keeps_its_own_weights_is_refused(config_of, monkeypatch, tmp_path):
    monkeypatch.setattr(Engine, "takes", 0)
    with pytest.raises(ModelError, match="vLLM does not have the policy's weights"):
        train_run(config_of(**RUN))
    assert not Engine.made[0].running
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize("where", ["__init__", "collective_rpc", "generate"])
def test_what_vllm_raises_before_the_first_step_is_one_error(config_of, monkeypatch, where):
    def fails(*_: Any, **__: Any) -> None:
        raise ValueError("Model architectures ['X'] are not supported for now")

    monkeypatch.setattr(Engine, where, fails)
    with pytest.raises(ModelError, match="vLLM cannot run this model") as error:
        train_run(config_of(**RUN))
    assert "ValueError: Model architectures" in str(error.value)
    assert "sampler='own'" in str(error.value)


def test_an_engine_that_breaks_leaves_the_state_before(config_of, monkeypatch):
    generate = Engine.generate

    def breaks(engine: Engine, *given: Any, **options: Any) -> Any:
        if engine.calls.count("generate") == 3:
            raise RuntimeError("out of memory")
        return generate(engine, *given, **options)

    monkeypatch.setattr(Engine, "generate", breaks)
    with pytest.raises(ModelError, match="out of memory") as error:
        train_run(config_of(**RUN))
    assert "the state after step 2 is saved" in error.value.__notes__[0]


def test_a_missing_vllm_is_said_before_any_work(config_of, monkeypatch, tmp_path):
    monkeypatch.setattr(vllm_sampler, "find_spec", lambda name: None)
    with pytest.raises(MissingLibrary, match="vLLM, which is not installed") as missing:
        train_run(config_of(**RUN))
    assert "scripts/environment.sh vllm" in str(missing.value)
    assert not (tmp_path / "run").exists()
    train_run(config_of(**RUN | {"sampler": "own", "max_steps": 0}))


def test_several_processes_are_refused_before_any_work(config_of, monkeypatch, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="runs in one process") as error:
        train_run(config_of(**RUN))
    assert "backend='trl' take several" in str(error.value)
    assert not (tmp_path / "run").exists()


def test_a_temperature_that_vllm_would_raise_is_refused():
    with pytest.raises(ConfigError, match="temperature=0.005"):
        TrainConfig.from_flat({**RUN, "temperature": 0.005})
    assert TrainConfig.from_flat({**RUN, "temperature": 0.01}).kl == KLConfig(beta=0.05, kl_off_policy="token")
