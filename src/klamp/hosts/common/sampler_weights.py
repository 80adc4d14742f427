"""Whether a sampler has the weights that a model has: its tokens scored again, in the right way and in the wrong ones.

A reading is one way to score the tokens: as one should, without the prompt, with the head of the start, ... The reading
with the same numbers says whose log-probabilities a sampler or a trainer reports.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from klamp.core.arguments import POSITIVE, check_number
from klamp.doctor.alarm import number
from klamp.errors import DataError, ShapeError

WEIGHTS = "weights"
"""The reading that is right: these weights, the prompt, the sampling temperature."""
RAW, TRUNCATED, HIDDEN = "temperature 1", "truncated", "prompt hidden"
NO_ADAPTER, START, START_HEAD = "adapter off", "weights of the start", "head of the start"

SAME = 1e-3
"""Largest mean difference (nats per token) that counts as equal; float32 kernels differ by 1e-6."""
COARSE = 0.1
"""Nats per token, mean size, that data types may explain; bfloat16 against float32 was .02 to .07."""
NEARER = 3.0
"""How many times nearer another reading has to be than the right one, to be named."""

MEANINGS: Mapping[str, tuple[str, str]] = {
    RAW: ("it reports log-probabilities at temperature 1, and draws at another one: ask it for the processed ones",
          "it scores at temperature 1, and the tokens are drawn at another one"),
    TRUNCATED: ("it reports the truncated distribution (top-k, top-p): the trainer's is the whole one",
                "it scores under the truncated distribution"),
    HIDDEN: ("it did not see the prompt",
             "it does not see the prompt, as where the attention mask hides it: nothing learned depends on it"),
    NO_ADAPTER: ("it has the weights without the adapter: load or merge the adapter before each rollout",
                 "it scores without the adapter"),
    START: ("it has the weights that training started from: they are not synced",
            "it scores with the weights that training started from"),
    START_HEAD: ("it has the new weights and the output head of the start: a tied head that a reload leaves stale",
                 "it scores with the output head of the start"),
}  # fmt: skip
"""Reading -> its meaning if the sampler's log-probabilities match it, or the trainer's do."""


@dataclass(frozen=True, kw_only=True)
class Reported:
    """What one side reports, held against every reading."""

    side: str  # whose: sampler or trainer
    gaps: Mapping[str, float]  # reading -> mean size of the difference, in nats per token

    @property
    def nearest(self) -> str:
        """The reading that explains the numbers: another one than the right one only where it is clearly nearer."""
        best = min(self.gaps, key=lambda name: self.gaps[name])
        right = self.gaps[WEIGHTS]
        return best if right > SAME and self.gaps[best] * NEARER < right else WEIGHTS

    @property
    def is_right(self) -> bool:
        """Whether the numbers match the weights, as far as data types and kernels allow."""
        return self.nearest == WEIGHTS and self.gaps[WEIGHTS] <= COARSE

    @property
    def text(self) -> str:
        """One sentence about this side."""
        gap, nearest = self.gaps[WEIGHTS], self.nearest
        if nearest != WEIGHTS:
            meaning = MEANINGS[nearest][self.side != "sampler"]
            near = number(self.gaps[nearest])
            return f"the {self.side} is {number(gap)} nats per token off, and {near} with '{nearest}': {meaning}"
        if gap <= SAME:
            return f"the {self.side} has the weights' log-probabilities ({number(gap)} nats per token)"
        if gap <= COARSE:
            return f"the {self.side} has them to {number(gap)} nats per token, as other data types or kernels do"
        return f"the {self.side} is {number(gap)} nats per token off, and no reading that was tried explains it"


@dataclass(frozen=True, kw_only=True)
class SyncReport:
    """What sampler and trainer report of the same tokens."""

    tokens: int  # how many tokens were compared
    sides: tuple[Reported, ...]  # the sampler, and the trainer where its numbers are there

    @property
    def in_sync(self) -> bool:
        """Whether every side has the log-probabilities of the weights."""
        return all(side.is_right for side in self.sides)

    def __str__(self) -> str:
        return "; ".join(side.text for side in self.sides)


def compare(reported: Mapping[str, Tensor], readings: Mapping[str, Tensor]) -> SyncReport:
    """Hold what each side reported [N] against every reading [N] of the weights, in nats; NaN: no number."""
    gaps = {
        side: {name: _gap(values, reading) for name, reading in readings.items()} for side, values in reported.items()
    }
    for side, of_side in gaps.items():
        if math.isinf(of_side[WEIGHTS]):
            got = f"{len(reported[side])} tokens, none of them with a finite number"
            why, fix = "there is nothing to compare", "let it report the log-probability of each token that it drew"
            raise DataError(f"the {side} reports no log-probability", got=got, why=why, fix=fix)
    sides = tuple(Reported(side=side, gaps=of_side) for side, of_side in gaps.items())
    return SyncReport(tokens=len(readings[WEIGHTS]), sides=sides)


def _gap(reported: Tensor, reading: Tensor) -> float:
    both = reported.isfinite() & reading.isfinite()
    return float((reported - reading)[both].abs().mean()) if bool(both.any()) else math.inf


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
    """Whether sampler and trainer use the model's weights, in nats per token; and if not, which weights they use.

    The tokens are scored again, as one should and in the ways that go wrong: at temperature 1, without the prompt or
    the adapter, with the weights or the head of the start, truncated. Each side is held against every such reading.

    Equation: gap(reading) = mean over tokens of |log p_reported - log p_reading|.

    Shapes: B lists of token ids, and B lists of as many numbers as the completion has tokens.

    Args:
        model: a causal LM with the weights that sampled, or should have; wrapped by PEFT or not. Nothing is changed.
        prompts, completions: token ids that the sampler read and drew.
        sampler_logprobs: its log-probabilities; NaN (or None) for tokens without one.
        trainer_logprobs: the trainer's, for these tokens and weights, before any update.
        temperature, top_k, top_p: of the sampler; top_k 0 and top_p 1: no limit.
        start: the model that training started from, once the policy has been updated; None: it is not at hand.

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
    from klamp.scoring.probe import in_mode

    with in_mode(model, training=False):
        raw, hidden = _forward(model, prompt, completion, states=start is not None)
        logits = {WEIGHTS: raw, HIDDEN: _forward(model, prompt, completion, hidden_prompt=True)[0]}
        if hasattr(model, "disable_adapter"):
            with model.disable_adapter():
                logits[NO_ADAPTER] = _forward(model, prompt, completion)[0]
        if start is not None:
            logits[START] = _forward(start, prompt, completion)[0]
            stale = _with_head_of(start, model, raw, hidden)
            logits |= {} if stale is None else {START_HEAD: stale}
    scaled = {name: values / temperature for name, values in logits.items()}
    scaled |= {RAW: raw} if temperature != 1 else {}
    scaled |= {TRUNCATED: cuts(None, scaled[WEIGHTS])} if cuts else {}
    ids = torch.tensor(list(completion), device=raw.device)
    chosen = {name: x.log_softmax(-1).gather(-1, ids[:, None])[:, 0].cpu() for name, x in scaled.items()}
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


def _flat(completions: Sequence[Sequence[int]], values: Sequence[Sequence[Any]], side: str) -> Tensor:
    lengths = [len(ids) for ids in completions], [len(row) for row in values]
    if lengths[0] != lengths[1] or not sum(lengths[0]):
        got, why = f"{lengths[1][:8]} numbers for {lengths[0][:8]} tokens", "each token that was drawn has one"
        fix = "pass one list per completion, with NaN where a token has no number"
        raise ShapeError(f"the log-probabilities of the {side} do not fit the completions", got=got, why=why, fix=fix)
    return torch.tensor([math.nan if value is None else float(value) for row in values for value in row])


def pack_nothing() -> None:
    """Have vLLM's engines on a CPU compute without packed copies of the weights, which later weights do not reach."""
    import vllm._custom_ops as operations
    import vllm.model_executor.layers.utils as layers

    operations._supports_onednn = False
    layers.check_cpu_sgl_kernel = lambda _rows, _columns, _dtype: False
