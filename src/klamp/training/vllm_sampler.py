"""Completions by a vLLM engine in the training process, whose weights are the policy's before each of them.

The engine is made from the policy's configuration alone and starts with made-up weights. Before it writes anything it
is handed those of the policy, a LoRA adapter merged into copies of its matrices, so that an engine that does not take
them is found out before the first step. Each completion has a seed of its own, made of its first uniform number: what
it draws depends on the run's seed, the step and the weights, and on its neighbours by rounding alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from klamp.core.masking import masked_mean
from klamp.errors import MissingLibrary, ModelError
from klamp.hosts.common.packing import check_packing, pack_nothing
from klamp.scoring.completions import Completions
from klamp.scoring.scores import score
from klamp.training.config import RolloutConfig, TrainConfig
from klamp.training.context import Context, Sampler
from klamp.training.sampling import encode_prompts, uniform_numbers
from klamp.training.setup import check_alone

SHARE = 0.3
"""Of a GPU's memory, what the engine takes; the training has the rest."""
CPU_CACHE = 2**30
"""Bytes of its cache on a CPU, where VLLM_CPU_KVCACHE_SPACE does not say another number (in GiB)."""
PROBES = 8
"""Prompts that the engine answers before the first step."""
FAR = 0.2
"""Nats per token between engine and policy that no rounding explains: bfloat16 brings less than a tenth."""


def check_installed(*, why: str, install: str) -> None:
    """Refuse a run that vLLM is to sample for where it is not installed.

    Args:
        why: what it is needed for.
        install: a command that brings it.

    Raises:
        MissingLibrary: it is missing.
    """
    if find_spec("vllm") is None:
        raise MissingLibrary(
            "sampler='vllm' needs vLLM, which is not installed",
            got="no module vllm",
            why=why,
            fix=f"{install}, or in a checkout of klamp make an environment that has it for CPUs: "
            "scripts/environment.sh vllm; or leave sampler and sampler_url out",
        )


def check_sampler(config: TrainConfig) -> None:
    """Refuse an engine that is missing, or that several processes would have to share.

    Raises:
        MissingLibrary: vLLM is not installed.
        ConfigError: several processes.
    """
    if config.rollout.sampler == "own":
        return
    check_installed(why="the completions are written by it in the training process", install="pip install vllm")
    check_alone(config, why="vLLM is inside the process that trains; sampler='own' and backend='trl' take several")


@contextmanager
def sampler_of(context: Context) -> Iterator[Sampler | None]:
    """Who writes the completions of a run, as long as it lasts; None: the policy, by klamp's own decoding.

    Raises:
        ModelError: vLLM cannot run the model, or does not take its weights.
        ConfigError: a vLLM that packs weights on this CPU whatever klamp says.
    """
    if context.config.rollout.sampler == "own":
        yield None
        return
    check_adapter(context.policy)
    with _engine(context) as engine:
        whole = replace(context.config.rollout, top_p=1.0, top_k=0)
        check_engine(context, partial(sample, engine, context, whole))
        yield partial(sample, engine, context, context.config.rollout)


def sample(
    engine: Any, context: Context, rollout: RolloutConfig, prompt_ids: Tensor, prompt_mask: Tensor, uniforms: Tensor
) -> Completions:
    """One completion for each prompt, by an engine that is given the policy's weights first.

    Args:
        engine: vLLM's `LLM`.
        context: the run.
        rollout: length limit, temperature, truncation.
        prompt_ids, prompt_mask: left-padded prompts, [B, P].
        uniforms: [B, T] numbers in [0, 1); the first of each row is the seed of its completion.

    Raises:
        ModelError: vLLM fails.
    """
    rows = zip(prompt_ids, prompt_mask, strict=True)
    prompts = [{"prompt_token_ids": ids[mask.bool()].tolist()} for ids, mask in rows]
    settings = settings_of(rollout, context.stop, uniforms)
    with _refusals(context):
        engine.collective_rpc("reload_weights", kwargs={"weights_iterator": weights_of(context.policy)})
        engine.reset_prefix_cache()
        outputs = engine.generate(prompts, settings, use_tqdm=False)
    return completions_of([each.outputs[0] for each in outputs], prompt_ids, prompt_mask, pad=context.pad)


def settings_of(rollout: RolloutConfig, stop: Sequence[int], uniforms: Tensor) -> list[Any]:
    """What vLLM is told of each completion: nothing of the model's own generation settings counts.

    Args:
        rollout: length limit, temperature, truncation.
        stop: ids that end a completion.
        uniforms: [B, T] the numbers of each completion; the first of them is its seed.
    """
    from vllm import SamplingParams

    seeds = (uniforms[:, 0] * 2**53).long().tolist()  # as many bits as the number has
    return [
        SamplingParams(
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            max_tokens=rollout.max_completion_length,
            stop_token_ids=list(stop),
            ignore_eos=True,
            seed=seed,
            logprobs=0,
            detokenize=False,
        )
        for seed in seeds
    ]


def completions_of(answers: Sequence[Any], prompt_ids: Tensor, prompt_mask: Tensor, *, pad: int) -> Completions:
    """vLLM's answers as completions.

    Args:
        answers: B of vLLM's `CompletionOutput`.
        prompt_ids, prompt_mask: left-padded prompts, [B, P].
        pad: id of the padding token.
    """
    device = prompt_ids.device
    ids = [torch.tensor(each.token_ids, device=device) for each in answers]
    told = [
        [entry[token].logprob for entry, token in zip(each.logprobs, each.token_ids, strict=True)] for each in answers
    ]
    logprobs = [torch.tensor(each, device=device) for each in told]
    return Completions(
        prompt_ids=prompt_ids,
        prompt_mask=prompt_mask,
        ids=pad_sequence(ids, batch_first=True, padding_value=pad),
        mask=pad_sequence([torch.ones_like(each, dtype=torch.bool) for each in ids], batch_first=True),
        sampler_logprobs=pad_sequence(logprobs, batch_first=True),
        ended=torch.tensor([each.finish_reason == "stop" for each in answers], device=device),
    )


@torch.no_grad()
def weights_of(policy: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The weights of a policy under the names of the model, one at a time, a LoRA adapter merged into copies.

    Equation: W + scale B A, added in float32 and rounded to the type of W.
    """
    base: nn.Module = getattr(policy, "get_base_model", lambda: policy)()
    for name, weight in base.named_parameters():
        owner, _, leaf = name.rpartition(".")
        if any(part.startswith("lora_") for part in name.split(".")):
            continue
        if not owner.endswith(".base_layer"):
            yield name, weight.detach()
            continue
        owner = owner.removesuffix(".base_layer")
        layer: Any = base.get_submodule(owner)
        merged = weight.detach()
        if leaf == "weight":
            for adapter in layer.active_adapters:
                merged = (merged.float() + layer.get_delta_weight(adapter).float()).to(weight.dtype)
        yield f"{owner}.{leaf}", merged


def check_adapter(policy: nn.Module) -> None:
    """Refuse an adapter on a matrix that embeds the tokens as well as gives their logits.

    Raises:
        ModelError: there is one.
    """
    names: dict[int, list[str]] = {}
    for name, weight in policy.named_parameters(remove_duplicate=False):
        names.setdefault(id(weight), []).append(name)
    shared = [each for each in names.values() if len(each) > 1 and any(".base_layer." in name for name in each)]
    if shared:
        raise ModelError(
            "vLLM cannot hold this LoRA adapter",
            got=f"an adapter on {' = '.join(shared[0])}",
            why="embedding and output head are one matrix there, which would be adapted in both places",
            fix="leave the head and the embedding out of lora_target_modules, or set sampler='own'",
        )


def check_engine(context: Context, sampler: Sampler) -> None:
    """Refuse an engine that cannot run, or gives other log-probabilities than the policy: it kept other weights.

    Raises:
        ModelError: it does.
    """
    rollout = context.config.rollout
    prompts = [example.prompt for example in context.task.train[:PROBES]]
    prompt_ids, prompt_mask = encode_prompts(prompts, context.tokenizer, context.device)
    uniforms = uniform_numbers(context.config.run.seed, 0, len(prompts), rollout.max_completion_length)
    completions = sampler(prompt_ids, prompt_mask, uniforms)
    with torch.no_grad():
        ours = score(context.policy, completions, temperature=rollout.temperature).logprobs
    gap = float(masked_mean((completions.sampler_logprobs - ours).abs(), completions.mask))
    if not gap <= FAR:
        raise ModelError(
            "vLLM does not have the policy's weights",
            got=f"log-probabilities {gap:.3g} nats per token apart, after it was given them",
            why="it keeps some of its own (packed copies on a CPU), or knows them by other names than transformers",
            fix="set sampler='own', or use a version of vLLM that was tried: docs/scale.md",
        )


@contextmanager
def _engine(context: Context) -> Iterator[Any]:
    """A vLLM engine for the policy's architecture, with made-up weights."""
    config, on_cpu = context.config, context.device.type == "cpu"
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the weights are handed over in memory
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # it tells of every reload, and of heads that are embeddings
    with TemporaryDirectory() as folder:
        from vllm import LLM

        if on_cpu:
            pack_nothing()
            check_packing(getattr(torch, config.model.dtype))
        memory = {"kv_cache_memory_bytes": CPU_CACHE} if on_cpu else {"gpu_memory_utilization": SHARE}
        _describe(context.policy, Path(folder))
        with _refusals(context):
            engine = LLM(
                model=folder,
                load_format="dummy",
                model_impl="vllm",  # its way around transformers' own classes changes those in this process
                skip_tokenizer_init=True,
                generation_config="vllm",
                dtype=config.model.dtype,
                max_model_len=longest_sequence(context),
                logprobs_mode="processed_logprobs",
                seed=config.run.seed,
                enforce_eager=on_cpu,
                **memory,
            )
        try:
            yield engine
        finally:
            engine.llm_engine.engine_core.shutdown()


@contextmanager
def _refusals(context: Context) -> Iterator[None]:
    """A context in which whatever vLLM raises is one error of klamp."""
    try:
        yield
    except Exception as error:  # it raises a dozen types; all mean the same to the user
        raise ModelError(
            "vLLM cannot run this model",
            got=f"{context.config.model.model} ({type(context.policy).__name__}, {context.config.model.dtype})",
            why=f"{type(error).__name__}: {str(error)[:500]}",
            fix="set sampler='own', or use an architecture that vLLM has on this device",
        ) from error


def _describe(policy: nn.Module, folder: Path) -> None:
    """Write the configuration that vLLM builds the model from."""
    base: Any = getattr(policy, "get_base_model", lambda: policy)()
    named = base.config.architectures
    base.config.architectures = [type(base).__name__]
    base.config.save_pretrained(folder)
    base.config.architectures = named


def longest_sequence(context: Context) -> int:
    """The most tokens that a prompt of the task and its completion have together."""
    ids: Any = context.tokenizer([example.prompt for example in context.task.train], add_special_tokens=False)
    return max(map(len, ids["input_ids"])) + context.config.rollout.max_completion_length
