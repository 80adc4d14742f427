"""The reference models of a run: frozen, moving, or the policy with its adapter off.

frozen        a model of its own that never changes
adapter_off   the policy with its LoRA adapter switched off: no weights of its own
ema           a copy that follows the policy slowly
periodic      a copy that becomes the policy every so many steps
remote        a vLLM server, see `klamp.scoring.vllm_reference`
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from klamp.scoring import vllm_reference
from klamp.scoring.completions import Completions, select
from klamp.scoring.model_parts import Predictions, Traits
from klamp.scoring.probe import probe
from klamp.scoring.scorer import Ask, Scorer, Scores, pad_tokens
from klamp.tasks import check_prompts
from klamp.tasks.base import Task
from klamp.training.config import TrainConfig


class Reference(Protocol):
    """A model that scores completions without gradient."""

    def score(self, completions: Completions, *, temperature: float) -> Scores:
        """The log-probabilities (and predictions) of the reference for the completions."""
        ...

    def after_step(self, policy: nn.Module, step: int) -> None:
        """Called after every step, with the number of steps done; a moving reference moves."""

    def weights(self) -> nn.Module | None:
        """The weights that a checkpoint must hold of the reference; None where it can be loaded again."""
        return None

    def describe(self) -> str:
        """Where the reference comes from, in words."""
        ...


@runtime_checkable
class LocalReference(Reference, Protocol):
    """A reference with its weights on this machine: it can give whole distributions, for the exact KL, and generate."""

    scorer: Scorer
    """The module that scores the completions."""

    def sampling_model(self) -> AbstractContextManager[nn.Module]:
        """A context in which the reference is a model that can generate."""
        ...

    def score(self, completions: Completions, *, temperature: float, keep: Tensor | None = None) -> Scores:
        """As `Reference.score`, with predictions for the rows `keep`, [B] bool."""
        ...


class FrozenReference(LocalReference):
    """A second model that never changes.

    It may live on another device or in another data type than the policy; a lower precision shows up as a KL that is
    not 0 at the first step.
    """

    def __init__(
        self, model: nn.Module, *, name: str = "a frozen copy of the starting policy", traits: Traits | None = None
    ) -> None:
        self.model = model.requires_grad_(False).eval()
        self.scorer = Scorer(self.model, probe(self.model) if traits is None else traits)
        self.name = name

    @torch.no_grad()
    def score(self, completions: Completions, *, temperature: float, keep: Tensor | None = None) -> Scores:
        """The model's scores of the completions, on their device, with predictions for the rows `keep`."""
        home, away = completions.ids.device, next(self.model.parameters()).device
        kept = None if keep is None else keep.to(away)
        scores = self.scorer(completions.to(away), Ask(temperature=temperature, keep=kept))
        found = None if scores.predictions is None else scores.predictions.to(home)
        return replace(scores, logprobs=scores.logprobs.to(home), predictions=found)

    @contextmanager
    def sampling_model(self) -> Iterator[nn.Module]:
        """A context with the model itself."""
        yield self.model

    def describe(self) -> str:
        """Where the model comes from, in words."""
        return self.name


class MovingReference(FrozenReference):
    """A copy of the policy that follows it: by averaging (`decay`), or by copying it every `reset_steps`.

    Equation: ema ref <- decay ref + (1 - decay) policy after every step; periodic ref <- policy.
    The average is kept in float32 beside a model in 16 bits, which is its rounding: in bfloat16 a hundredth of a small
    distance is rounded away at every step, and most of the distance would stay.
    A KL to a moving reference does not bound the distance from the start; the trainer logs that one as well.

    Source: EMA-PG arXiv:2602.04417 (ema)
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        decay: float | None = None,
        reset_steps: int | None = None,
        traits: Traits | None = None,
    ) -> None:
        learned = [p for p in model.parameters() if p.requires_grad] or list(model.parameters())
        wide = decay is None or all(p.dtype in (torch.float32, torch.float64) for p in learned)
        words = f"with decay {decay:g}" if decay is not None else f"reset to it every {reset_steps} steps"
        super().__init__(model, name=f"a copy that follows the policy, {words}", traits=traits)
        self.decay, self.reset_steps = decay, reset_steps
        self.average = self.model if wide else copy.deepcopy(self.model).float()
        self.average.register_load_state_dict_post_hook(lambda *_: self._round())  # a checkpoint holds the average

    @torch.no_grad()
    def after_step(self, policy: nn.Module, step: int) -> None:
        """Move towards the policy, or become its copy."""
        if self.decay is None and (self.reset_steps is None or step % self.reset_steps):
            return
        share = 1.0 if self.decay is None else 1.0 - self.decay
        for mine, theirs in zip(self.average.parameters(), policy.parameters(), strict=True):
            mine.lerp_(theirs.to(mine), share)
        self._round()

    @torch.no_grad()
    def _round(self) -> None:
        """Give the model the average in its own data type."""
        if self.average is not self.model:
            for rounded, mine in zip(self.model.parameters(), self.average.parameters(), strict=True):
                rounded.copy_(mine)

    def weights(self) -> nn.Module | None:
        """The weights of the copy, which are nowhere else: of ema the average."""
        return self.average


class AdapterOffReference(LocalReference):
    """The policy with its LoRA adapter switched off, which needs no memory of its own."""

    def __init__(self, policy: nn.Module, *, traits: Traits | None = None) -> None:
        self.policy = policy
        self.scorer = Scorer(policy, probe(policy) if traits is None else traits)

    @torch.no_grad()
    def score(self, completions: Completions, *, temperature: float, keep: Tensor | None = None) -> Scores:
        """The base model's scores of the completions, with predictions for the rows `keep`."""
        with self.sampling_model():
            return self.scorer(completions, Ask(temperature=temperature, keep=keep))

    @contextmanager
    def sampling_model(self) -> Iterator[nn.Module]:
        """A context with the policy, its adapter switched off."""
        off: AbstractContextManager[None] = self.policy.disable_adapter()  # pyright: ignore[reportCallIssue]
        with off:
            yield self.policy

    def describe(self) -> str:
        """Where the reference comes from, in words."""
        return "the policy with its adapter off"


def score_rows(
    model: Reference,
    given: Completions,
    rows: Tensor,
    *,
    temperature: float,
    parts: Sequence[slice],
    keep: Tensor | None = None,
) -> tuple[Tensor, Predictions | None]:
    """Log-probabilities [B, T] of some completions, 0 in the others, and predictions [R, T, ...] for the kept ones.

    Args:
        model: who scores, one micro-batch after the other.
        given: all completions.
        rows: those to score, [B] bool.
        temperature: that of the sampler.
        parts: the micro-batches.
        keep: those of `rows` to keep predictions of, [B] bool; None: none.
    """
    logprobs, found = torch.zeros(given.ids.shape, device=given.ids.device), list[Predictions]()
    for part in parts:
        chosen = part.start + rows[part].nonzero()[:, 0]
        if not len(chosen):
            continue
        asked: dict[str, Any] = {}
        if keep is not None and isinstance(model, LocalReference):
            asked["keep"] = keep[chosen]
        scores = model.score(select(given, chosen), temperature=temperature, **asked)
        logprobs[chosen] = pad_tokens(scores.logprobs, given.ids.shape[1]).to(logprobs.dtype)
        if scores.predictions is not None:
            found.append(scores.predictions.padded(given.ids.shape[1]))
    if not found:
        return logprobs, None
    return logprobs, replace(found[-1], values=torch.cat([each.values for each in found]))


def connect(
    config: TrainConfig, task: Task, tokenizer: PreTrainedTokenizerBase, *, who: vllm_reference.Who = "reference"
) -> vllm_reference.VLLMReference:
    """The reference that answers at `reference_url`, or the teacher at `teacher_url`, found to fit the run.

    Args:
        config: of the run.
        task: its prompts, or those that the teacher sees.
        tokenizer: of its policy.
        who: which of the two.

    Raises:
        ModelError, ConfigError: it does not fit; see `klamp.scoring.vllm_reference`.
    """
    given, rollout = config.flat(), config.rollout
    longest = check_prompts(task.train, tokenizer, None, rollout.max_completion_length)
    asked = vllm_reference.Asked(
        top_k=config.teacher.head_size if who == "teacher" else None,
        temperature=rollout.temperature,
        longest=(longest, rollout.max_completion_length),
    )
    prompts = [example.prompt for example in task.train[: vllm_reference.PROBES]]
    url, name = str(given[f"{who}_url"] or ""), given[f"{who}_name"]
    return vllm_reference.connect(url, name, asked, prompts=prompts, tokenizer=tokenizer, who=who)
