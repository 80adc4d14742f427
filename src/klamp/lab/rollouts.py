"""The data of one step: sampled completions, rewards, the reference's scores, advantages; the reference's length."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from klamp.core.advantages import group_advantages
from klamp.core.masking import Totals
from klamp.core.penalty import advantages_with_kl
from klamp.core.term import Weighted, measure, prepare, sequence_gate_kl
from klamp.core.types import Batch, Direction, Scored, held_anchors
from klamp.errors import ConfigError
from klamp.hosts.common.rollout import kl_tokens
from klamp.lab.anchors import LocalReference, Reference, RowPredictions, TeacherScores, score_rows
from klamp.lab.sampling import encode_prompts, generate, uniform_numbers
from klamp.lab.setup import Context
from klamp.lab.tasks.base import NO_REWARD, Example
from klamp.scoring.completions import Completions, select
from klamp.scoring.scorer import Ask, ExactKL, Scores, joined

LENGTH_PROMPTS = 64  # prompts by whose completions the reference's length is measured


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """The data of a step: B completions, ordered by prompt."""

    examples: Sequence[Example]  # [B] the prompts, each repeated for its group
    texts: Sequence[str]  # [B] the completions as text
    completions: Completions  # the tokens of prompts and completions
    mask: Tensor  # [B, T] bool: tokens to train on
    kl_mask: Tensor  # [B, T] bool: tokens that carry the KL
    rewards: Tensor  # [B] rewards of the task, without any KL
    advantages: Tensor  # [B] advantages
    totals: Totals  # the counts of the whole step
    ref_logprobs: Tensor | None = None  # [B, T] log-probabilities under the reference; None where none is loaded
    original_logprobs: Tensor | None = None  # [B, T] under the model that a moving reference started from
    ref_predictions: RowPredictions | None = None  # for the completions whose exact KL is measured
    teacher_scores: TeacherScores | None = None  # None without a teacher
    gate_kl: Tensor | None = None  # [B] KL (nats per sequence) that decides the clip
    reference_length: Tensor | None = None  # [B] reference lengths in tokens
    old_logprobs: Tensor | None = None  # [B, T] log-probabilities before the first update; None until then
    before: Scores | None = None  # the policy's before the first update, if a clip or a KL in the reward needs them


def collect(context: Context, examples: Sequence[Example], *, step: int, terms: Sequence[Weighted]) -> Rollout:
    """Sample completions for the prompts of a step, score and reward them; `terms`: for a KL in the reward."""
    config = context.config.rollout
    chosen = [example for example in examples for _ in range(config.num_generations)]
    uniforms = uniform_numbers(context.config.run.seed, step, len(chosen), config.max_completion_length)
    completions = completed(context, [example.prompt for example in chosen], uniforms=uniforms)
    texts, mask = completions.texts(context.tokenizer), completions.mask
    rewards = [context.task.score(example, text) for example, text in zip(chosen, texts, strict=True)]
    if config.mask_truncated_completions:
        mask = mask & completions.ended[:, None]
    kl_mask = kl_tokens(completions.ids, mask, context.excluded)
    lengths = context.control.reference_lengths([example.reference_length for example in chosen])
    rollout = Rollout(
        examples=chosen,
        texts=texts,
        completions=completions,
        mask=mask,
        kl_mask=kl_mask,
        rewards=torch.tensor(rewards, dtype=torch.float32, device=context.device),
        advantages=torch.zeros(len(chosen), device=context.device),
        totals=Totals(*(max(1.0, float(x)) for x in (len(chosen), mask.sum(), kl_mask.sum()))),
        reference_length=None if None in lengths else torch.tensor(lengths, dtype=torch.float32, device=context.device),
    )
    how: dict[str, Any] = {"temperature": config.temperature, "parts": context.parts(len(texts))}
    if context.reference is not None:
        rollout = _with_reference(context, rollout, context.reference, how)
    if context.teachers is not None:
        rollout = replace(rollout, teacher_scores=context.teachers.score(chosen, completions, **how))
    terms = [term for term in terms if term.coefficient != 0]
    return _with_advantages(context, _with_policy_pass(context, rollout, terms), terms)


def completed(
    context: Context, prompts: Sequence[str], *, uniforms: Tensor | None, reference: LocalReference | None = None
) -> Completions:
    """One completion of each prompt by the policy, or by the reference; `uniforms` as in `generate`."""
    ids, mask = encode_prompts(prompts, context.tokenizer, context.device)
    options: dict[str, Any] = {"rollout": context.config.rollout, "stop": context.stop, "pad": context.pad}
    traits = (context if reference is None else reference).scorer.traits
    with nullcontext(context.policy) if reference is None else reference.sampling_model() as model:
        return generate(model, ids, mask, uniforms=uniforms, traits=traits, **options)


def _with_reference(context: Context, rollout: Rollout, reference: Reference, how: dict[str, Any]) -> Rollout:
    everyone = torch.ones_like(rollout.completions.ended)
    places = torch.arange(len(everyone), device=context.device) % context.config.rollout.num_generations
    rows = places < context.exact_completions  # the first of each group, however the step is divided
    logprobs, predictions = score_rows(reference, rollout.completions, everyone, keep=rows, **how)
    if context.original is not None:
        original, _ = score_rows(context.original, rollout.completions, everyone, **how)
        rollout = replace(rollout, original_logprobs=original)
    return replace(rollout, ref_logprobs=logprobs, ref_predictions=predictions)


def exact_of(context: Context, rollout: Rollout, part: slice, *, learns: tuple[Direction, ...] = ()) -> ExactKL | None:
    """What a scorer needs to measure the exact KL of a part of the rollout; None where it is measured in no row."""
    if rollout.ref_predictions is None or (ref := rollout.ref_predictions.part(part)) is None:
        return None
    return ExactKL(rows=ref.rows, ref=ref.predictions, directions=context.exact_directions, learns=learns)


@torch.no_grad()
def _with_policy_pass(context: Context, rollout: Rollout, terms: Sequence[Weighted]) -> Rollout:
    """Score the rollout with the policy before its update, if a clip or a KL in the reward needs it."""
    term = next((t for _, t in terms if t.clip_method != "none" or t.placement == "reward"), None)
    if term is None:
        return rollout
    scores: list[Scores] = []
    for part in context.parts(len(rollout.texts)):
        ask = Ask(temperature=context.config.rollout.temperature, entropy=True, exact=exact_of(context, rollout, part))
        scores.append(context.scorer(select(rollout.completions, part), ask))
    before = joined(scores, rollout.mask.shape[1])
    rollout = replace(rollout, old_logprobs=before.logprobs, before=before)
    if term.clip_method == "none":
        return rollout
    exact, size = before.exact if context.exact_everywhere else None, context.config.rollout.num_generations
    batch = replace(batch_of(context, rollout, before.logprobs), group_size=size)
    batch = batch if exact is None else batch.with_anchor("reference", kl=exact)
    return replace(rollout, gate_kl=sequence_gate_kl(measure(batch, term)))


def batch_of(context: Context, rollout: Rollout, logprobs: Tensor, part: slice = slice(None)) -> Batch:
    """A part of the rollout as a batch, with the policy's log-probabilities [b, t], t <= T."""
    length = logprobs.shape[1]

    def cut(x: Tensor | None) -> Tensor | None:
        return None if x is None else x[part, :length] if x.ndim == 2 else x[part]

    carried = rollout.kl_mask[part, :length] if context.config.kl.excludes else None
    sampler, gate = cut(rollout.completions.sampler_logprobs), cut(rollout.gate_kl)
    anchors = held_anchors(cut(rollout.ref_logprobs), sampler, mask=carried, gate=gate)
    if rollout.teacher_scores is not None:
        anchors["teacher"] = Scored(rollout.teacher_scores.logprobs[part, :length])
    return Batch(
        policy_logprobs=logprobs,
        mask=rollout.mask[part, :length],
        advantages=rollout.advantages[part],
        old_logprobs=cut(rollout.old_logprobs),
        anchors=anchors,
        reference_length=cut(rollout.reference_length),
    )


def _with_advantages(context: Context, rollout: Rollout, terms: Sequence[Weighted]) -> Rollout:
    rewards, loss = rollout.rewards, context.config.loss
    if context.config.task.reward == NO_REWARD:  # the task's own score is measured, and not trained on
        return replace(rollout, advantages=torch.zeros_like(rewards))

    def advantages(rewards: Tensor) -> Tensor:
        size = context.config.rollout.num_generations
        return group_advantages(rewards, size, scale=loss.scale, baseline=loss.advantage_baseline)

    shifted = plain = advantages(rewards)
    for beta, term in terms:
        if term.placement == "reward":
            assert rollout.old_logprobs is not None
            batch = batch_of(context, rollout, rollout.old_logprobs)
            with_kl = advantages_with_kl(rewards, prepare(batch, term), beta=beta, advantages=advantages)
            shifted = with_kl if shifted is plain else shifted + with_kl - plain
    return replace(rollout, advantages=shifted)


def measure_reference_length(context: Context) -> None:
    """Measure and set the run's reference length, if a clip needs one and neither configuration nor data has it.

    Equation: mean number of tokens (with the end token) of the reference's completions of 64 training prompts.
    """
    reference = context.original or context.reference  # where a resume asks for it, a moving one has moved
    if reference is None or not context.objective.terms[0].term.needs_reference_length:
        return
    if None not in context.control.reference_lengths([e.reference_length for e in context.task.train]):
        return
    if not isinstance(reference, LocalReference):
        what, why = "the reference length cannot be measured with a remote reference", "its server only scores tokens"
        fix = "set kl_reference_length, or give it as a data column"
        raise ConfigError(what, got=reference.describe(), why=why, fix=fix)
    prompts, seed = [e.prompt for e in context.task.train[:LENGTH_PROMPTS]], context.config.run.seed
    uniforms = uniform_numbers(seed, -1, len(prompts), context.config.rollout.max_completion_length)
    completions = completed(context, prompts, uniforms=uniforms, reference=reference)
    context.control.take_length(float(completions.mask.sum(-1).to(torch.float64).mean()))
