"""A GRPO pipeline from scratch, in five pieces: the functions of a guide that is passed around (docs/sources.md).

That document prints kl_coef * mean(log policy - log ref) as the loss. Its value is right and is what these functions
return; differentiated as printed, its expected gradient is zero, so here the gradient that flows is that of
KL(policy || ref). `klamp.training.trainer` is the full trainer (processes, checkpoints, evaluation); this module is
what one reads to see how it works, or takes apart.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from transformers import PreTrainedTokenizerBase

from klamp.config import KLConfig, LossConfig, build_objective
from klamp.config.loss import configured_price, spread_of_group
from klamp.config.rules import check_beta
from klamp.core.advantages import group_advantages
from klamp.core.arguments import FLOATS, MASKS, check_instance, check_tensors
from klamp.core.gradients import kl_penalty
from klamp.core.masking import Totals, masked_mean
from klamp.core.objective import grpo_loss
from klamp.core.types import Batch, LogProbs, Mask, TokenValues
from klamp.diagnostics.statistics import StepRecord, repeated_pairs, step_metrics
from klamp.errors import ConfigError, DataError
from klamp.hosts.common.control import beta_metrics
from klamp.scoring.completions import Completions, select
from klamp.scoring.scores import Scores, joined, score
from klamp.tasks.base import Example, checked
from klamp.tasks.rewards import Score, guarded
from klamp.training.config import OptimConfig, RolloutConfig
from klamp.training.models import end_tokens
from klamp.training.sampling import encode_prompts, generate, uniform_numbers

RewardFunction = Callable[[str, str], float]
"""reward(prompt, completion) -> a finite number."""
PartScores = tuple[Scores, Scores | None]
"""What the policy, with its entropy, and the reference gave for a micro-batch; without gradient and logits."""

log = logging.getLogger("klamp.training.loop")


class ScalarWriter(Protocol):
    """What `log_train` needs of a TensorBoard SummaryWriter."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object:
        """Record one number."""
        ...


def compute_kl_divergence(policy_log_probs: LogProbs, ref_log_probs: LogProbs) -> TokenValues:
    """Per-token KL(policy || ref) in nats: the value of k1, the gradient of the reverse KL.

    Equation: log policy - log ref.

    Sampler: the policy.
    Value: k1, unbiased, of any sign.
    Gradient: (log policy - log ref) grad log policy, whose expectation is the gradient of KL(policy || ref) at each
    prefix; not that of the formula itself, which is zero in expectation.
    Shapes: [B, T], [B, T] -> [B, T].

    Raises:
        TensorError: no tensors of log-probabilities.
        ShapeError: the two differ in shape.

    Source: the from-scratch guide (docs/sources.md); docs/estimators
    """
    check_tensors(FLOATS, policy_log_probs=policy_log_probs, ref_log_probs=ref_log_probs)
    everywhere = torch.ones_like(policy_log_probs, dtype=torch.bool)
    return kl_penalty(policy_log_probs, ref_log_probs, everywhere, value="k1", gradient="reverse")


def compute_loss(
    policy_log_probs: LogProbs,
    old_log_probs: LogProbs | None,
    advantages: Tensor,
    response_mask: Mask,
    *,
    ref_log_probs: LogProbs | None = None,
    kl_coef: float = 0.0,
    cliprange: float = 0.2,
    kl: KLConfig | None = None,
    totals: Totals | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped policy loss plus KL penalty, averaged over the response tokens.

    Equation: mean_t(-min(r A, clip(r) A)) + kl_coef * mean_t KL_t.

    Value: with the defaults exactly as the from-scratch guide prints it.
    Gradient: PPO's plus kl_coef times that of KL(policy || ref) at each prefix.
    Shapes: [B, T] each, advantages [B] or [B, T] -> scalar and a dictionary of detached scalars.

    Args:
        policy_log_probs: under the policy, with gradient.
        old_log_probs: under the policy at rollout time; None: the policy itself.
        advantages: one per response or per token.
        response_mask: True on response tokens.
        ref_log_probs: under the reference; needed where kl_coef > 0.
        kl_coef: coefficient of the KL.
        cliprange: ratio bound on either side of 1.
        kl: any other KL term; its beta replaces kl_coef.
        totals: size of the whole batch when this is a micro-batch of it.

    Returns:
        The loss and metadata: `kl_penalty_mean` (what the KL adds to the loss), `kl_mean` (mean k1 in nats per
        token), `policy_loss`, `clip_fraction`.

    Raises:
        ConfigError: kl_coef > 0 without ref_log_probs, both kl_coef and kl, or a number that is none.
        TensorError, ShapeError, EmptyMaskError, NonFiniteError: tensors that cannot be used.

    Source: the from-scratch guide (docs/sources.md)
    """
    check_beta(kl_coef, name="kl_coef")
    check_tensors(MASKS, response_mask=response_mask)
    if kl is not None:
        check_instance("kl", kl, KLConfig)
    if kl is not None and kl_coef:
        raise ConfigError(
            "kl_coef and kl are both given",
            got=f"kl_coef={kl_coef}, kl with beta={kl.beta}",
            why="both say how much of the KL enters",
            fix="set kl's beta, and leave kl_coef out",
        )
    term = kl if kl is not None else _printed_kl(kl_coef)
    objective = build_objective(term, _printed_loss(cliprange), max_length=1)
    batch = Batch(
        policy_logprobs=policy_log_probs,
        mask=response_mask,
        advantages=advantages,
        old_logprobs=old_log_probs,
        ref_logprobs=ref_log_probs,
    )
    output = grpo_loss(batch, objective, totals=totals)
    nothing = torch.zeros_like(output.loss.detach())
    metadata = {
        "policy_loss": output.metrics["train/policy_loss"],
        "kl_penalty_mean": output.metrics.get("train/kl_penalty", nothing),
        "kl_mean": output.metrics.get("kl/k1", nothing),
        "clip_fraction": output.metrics["policy/ratio_clipped"],
        "log_prob_mean": masked_mean(policy_log_probs.detach(), response_mask),
    }
    return output.loss, metadata


def _printed_kl(kl_coef: float) -> KLConfig:
    return KLConfig(beta=kl_coef, kl_estimator="k1", kl_gradient="reverse")


def _printed_loss(cliprange: float = 0.2) -> LossConfig:
    """A mean over all tokens; `group_advantages` as they are: less the group's mean, over its deviation."""
    return LossConfig(loss_type="dapo", advantage_baseline="mean", epsilon=cliprange)


def grpo_microbatch_step(
    model: nn.Module,
    completions: Completions,
    advantages: Tensor,
    *,
    old_log_probs: LogProbs | None = None,
    ref_model: nn.Module | None = None,
    kl_coef: float = 0.0,
    cliprange: float = 0.2,
    temperature: float = 1.0,
    totals: Totals | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Forward and backward pass of one micro-batch; the gradients are added to the model's.

    The reference is scored only if there is one and kl_coef > 0, without gradient.

    Args:
        model: the policy.
        completions: B sampled completions.
        advantages: [B] or [B, T].
        old_log_probs: under the policy at rollout time; None: the policy itself.
        ref_model: the frozen reference.
        kl_coef: coefficient of the KL.
        cliprange: ratio bound on either side of 1.
        temperature: that of the sampler.
        totals: size of the whole batch; with it, micro-batches add up exactly to the batch.

    Returns:
        The detached loss and the metadata of `compute_loss`.

    Raises:
        ConfigError: kl_coef > 0 without a reference.
    """
    loss, metadata, _ = _microbatch_step(
        model,
        completions,
        advantages,
        old_log_probs=old_log_probs,
        ref_model=ref_model,
        kl_coef=kl_coef,
        cliprange=cliprange,
        temperature=temperature,
        totals=totals,
    )
    return loss, metadata


def _microbatch_step(
    model: nn.Module,
    completions: Completions,
    advantages: Tensor,
    *,
    old_log_probs: LogProbs | None = None,
    ref_model: nn.Module | None,
    kl_coef: float,
    cliprange: float = 0.2,
    temperature: float,
    totals: Totals | None,
) -> tuple[Tensor, dict[str, Tensor], PartScores]:
    """`grpo_microbatch_step`, and what the policy and the reference gave there, without gradient."""
    check_beta(kl_coef, name="kl_coef")
    ref_log_probs = None
    if kl_coef > 0:
        if ref_model is None:
            raise ConfigError(
                "kl_coef is positive and there is no reference",
                got=f"kl_coef={kl_coef}, ref_model=None",
                why="a KL needs something to be the distance to",
                fix="pass ref_model (a frozen copy of the starting policy), or kl_coef=0",
            )
        with torch.no_grad():
            ref_log_probs = score(ref_model, completions, temperature=temperature).logprobs
    policy = score(model, completions, temperature=temperature)
    loss, metadata = compute_loss(
        policy.logprobs,
        old_log_probs,
        advantages,
        completions.mask,
        ref_log_probs=ref_log_probs,
        kl_coef=kl_coef,
        cliprange=cliprange,
        totals=totals,
    )
    seen = part_scores(policy, ref_log_probs)
    loss.backward()
    return loss.detach(), metadata, seen


def train(  # noqa: PLR0913  (a word for each choice of a loop that is read, not configured)
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    reward: RewardFunction,
    optimizer: Optimizer,
    *,
    ref_model: nn.Module | None = None,
    kl_coef: float = 0.0,
    steps: int = 100,
    rollout: RolloutConfig | None = None,
    optim: OptimConfig | None = None,
    seed: int = 0,
    writer: ScalarWriter | None = None,
    reward_timeout: float | None = None,
) -> list[dict[str, float]]:
    """The whole GRPO loop on one process, in its plainest form.

    Each step takes the next prompts, samples a group of completions for each, scores them, forms advantages, adds up
    the gradients of the micro-batches and steps the optimizer. What is recorded of it is that of its tokens before the
    update: `klamp doctor` reads the TensorBoard folder as fully as that of `klamp train`.

    Args:
        model: the policy, a causal LM; changed in place.
        tokenizer: its tokenizer.
        prompts: taken in order, over and over.
        reward: (prompt, completion) -> number.
        optimizer: over the model's parameters.
        ref_model: the frozen reference; needed where kl_coef > 0.
        kl_coef: coefficient of the KL.
        steps: optimizer steps.
        rollout: group size, lengths, temperature; the defaults of `RolloutConfig`.
        optim: micro-batches per step and the bound of the gradient's norm; the defaults of `OptimConfig`.
        seed: of the sampling.
        writer: a TensorBoard SummaryWriter.
        reward_timeout: the longest that the reward may take for one completion, in seconds; None: as long as it likes.

    Returns:
        One dictionary of numbers per step, as given to `log_train`: `loss`, `policy_loss`, `kl_penalty`, `grad_norm`,
        `learning_rate`, and under klamp's names (docs/metrics.md) what `step_metrics` finds, `beta` and `beta/price`.
        Without a reference there is no KL among them.

    Raises:
        ConfigError: kl_coef > 0 without a reference.
        DataError: no prompts.
        RewardError: the reward raised or ended the program, returned something that is not a finite number, took too
            long, or left the working directory or switched gradients.
    """
    if not prompts:
        raise DataError("there are no prompts", got="prompts=[]", why="a rollout needs one", fix="pass at least one")
    rollout, optim = rollout or RolloutConfig(), optim or OptimConfig()
    scored = checked(lambda example, text: reward(example.prompt, text), name=getattr(reward, "__name__", "reward"))
    rated = guarded(scored, seconds=reward_timeout)
    history: list[dict[str, float]] = []
    for step in range(steps):
        first = step * rollout.prompts_per_step
        chosen = [prompts[(first + i) % len(prompts)] for i in range(rollout.prompts_per_step)]
        completions, rewards = _collect(model, tokenizer, chosen, rated, rollout, seed=seed, step=step)
        advantages = group_advantages(rewards, rollout.num_generations)
        tokens = float(completions.mask.sum())
        totals = Totals(float(len(rewards)), tokens, tokens)
        optimizer.zero_grad()
        metrics = {"loss": 0.0, "kl_penalty": 0.0, "policy_loss": 0.0}
        scores: list[PartScores] = []
        parts = torch.arange(len(rewards)).tensor_split(optim.gradient_accumulation_steps)
        for rows in filter(len, parts):
            loss, seen, part = _microbatch_step(
                model,
                select(completions, rows),
                advantages[rows],
                ref_model=ref_model,
                kl_coef=kl_coef,
                temperature=rollout.temperature,
                totals=totals,
            )
            found = {"loss": loss, "kl_penalty": seen["kl_penalty_mean"], "policy_loss": seen["policy_loss"]}
            metrics = {name: value + float(found[name]) for name, value in metrics.items()}
            scores.append(part)
        metrics["learning_rate"] = float(optimizer.param_groups[0]["lr"])
        metrics["grad_norm"] = float(clip_grad_norm_(model.parameters(), optim.max_grad_norm or float("inf")))
        optimizer.step()
        term, policy_loss = _printed_kl(kl_coef), _printed_loss()
        metrics |= measure_tokens(completions, rewards, scores, rollout=rollout, kl=term, loss=policy_loss)
        log_train(step + 1, metrics, writer=writer)
        history.append(metrics)
    return history


def _collect(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    rated: Score,
    rollout: RolloutConfig,
    *,
    seed: int,
    step: int,
) -> tuple[Completions, Tensor]:
    """Sample a group of completions for every prompt, and their rewards."""
    repeated = [p for p in prompts for _ in range(rollout.num_generations)]
    device = next(model.parameters()).device
    ids, mask = encode_prompts(repeated, tokenizer, device)
    completions = generate(
        model,
        ids,
        mask,
        rollout=rollout,
        stop=end_tokens(model, tokenizer),
        pad=int(tokenizer.pad_token_id),  # pyright: ignore[reportArgumentType]
        uniforms=uniform_numbers(seed, step, len(repeated), rollout.max_completion_length),
    )
    texts = completions.texts(tokenizer)
    rewards = [rated(Example(prompt=p), t) for p, t in zip(repeated, texts, strict=True)]
    return completions, torch.tensor(rewards, device=device)


def log_train(step: int, metrics: Mapping[str, float], *, writer: ScalarWriter | None = None) -> str:
    """Record a step: TensorBoard scalars `train/NAME` and one line to the logger `klamp.training.loop`.

    Args:
        step: number of the step, from 1.
        metrics: name -> value; `loss`, `grad_norm`, `reward` and `kl_penalty` come first in the line.
        writer: a TensorBoard SummaryWriter; gets `train/loss`, `train/kl_penalty` and the rest.

    Returns:
        The line: `Step 1 | Loss: 0.1234 | Grad norm: 0.5678 | Reward: 0.5000 | KL penalty: 0.0012`.
    """
    if writer is not None:
        for name, value in metrics.items():
            writer.add_scalar(f"train/{name}", value, step)
    names = {"loss": "Loss", "grad_norm": "Grad norm", "reward": "Reward", "kl_penalty": "KL penalty"}
    rounded = {name: round(metrics[name], 4) + 0.0 for name in names if name in metrics}  # -0.0000 says nothing
    shown = [f"{names[name]}: {value:.4f}" for name, value in rounded.items()]
    line = " | ".join([f"Step {step}", *shown])
    log.info(line)
    return line


def part_scores(policy: Scores, ref_log_probs: LogProbs | None) -> PartScores:
    """Keep of a micro-batch's scores what its metrics need.

    The entropy comes from logits that are held for the gradient; a completion at a time, so that it copies few of them.

    Args:
        policy: the scores of B completions, with gradient.
        ref_log_probs: [B, T] under the reference; None: there is none.
    """
    entropy = None
    if policy.logits is not None:
        entropy = torch.stack([torch.special.entr(row.softmax(-1)).sum(-1) for row in policy.logits.detach()])
    ref = None if ref_log_probs is None else Scores(logprobs=ref_log_probs.detach())
    return Scores(logprobs=policy.logprobs.detach(), entropy=entropy), ref


def measure_tokens(
    completions: Completions,
    rewards: Tensor,
    parts: Sequence[PartScores],
    *,
    rollout: RolloutConfig,
    kl: KLConfig,
    loss: LossConfig,
) -> dict[str, float]:
    """What the tokens of a step give, under klamp's names, with beta and its price.

    Args:
        completions: all of the step, B of them.
        rewards: [B]
        parts: the scores of consecutive micro-batches, which are all of the completions together.
        rollout: how they were sampled.
        kl: the KL term of the loss.
        loss: the policy loss and the advantages.
    """
    length, group = completions.ids.shape[1], rollout.num_generations
    policy = joined([part for part, _ in parts], length)
    refs = [ref for _, ref in parts if ref is not None]
    record = StepRecord(
        mask=completions.mask,
        kl_mask=completions.mask,
        policy=policy.logprobs,
        sampler=completions.sampler_logprobs,
        rewards=rewards,
        ended=completions.ended,
        lengths=completions.mask.sum(-1),
        repeated=repeated_pairs(completions.ids, completions.mask),
        entropy=policy.entropy,
        ref=joined(refs, length).logprobs if refs else None,
    )
    metrics = step_metrics(record, group_size=group)
    price = configured_price(
        kl, loss, group_size=group, mean_length=metrics["length/mean"], max_length=rollout.max_completion_length
    )
    return metrics | beta_metrics(price, spread_of_group(metrics["reward_std"], metrics["groups/saturated"]))
