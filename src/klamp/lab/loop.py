"""GRPO from scratch in five functions, as a guide describes them (docs/sources.md).

    compute_kl_divergence   the KL of each token
    compute_loss            clipped policy loss plus KL
    grpo_microbatch_step    forward and backward pass of one micro-batch
    train                   the whole loop, for a model and a reward function
    log_train               a line and TensorBoard scalars per step

The guide prints kl_coef * mean(log policy - log ref) as the loss. These functions return that value. Differentiated as
printed, its expected gradient is zero, so the gradient here is that of KL(policy || ref). A test compares each of them
with `klamp.lab.trainer`, bit by bit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PreTrainedTokenizerBase

from klamp.config import KLConfig, LossConfig, build_objective
from klamp.config.kl import check_beta
from klamp.core.arguments import FLOATS, MASKS, check_instance, check_tensors
from klamp.core.gradients import kl_penalty
from klamp.core.masking import Totals, masked_mean
from klamp.core.objective import grpo_loss
from klamp.core.types import Batch, LogProbs, Mask, TokenValues
from klamp.errors import ConfigError, DataError
from klamp.lab.anchors import FrozenReference
from klamp.lab.config import OptimConfig, RolloutConfig, RunConfig, TrainConfig
from klamp.lab.setup import Context
from klamp.lab.tasks.base import Example, Task, checked
from klamp.lab.trainer import take_step
from klamp.scoring.completions import Completions
from klamp.scoring.probe import probe
from klamp.scoring.scorer import Ask, Scorer, score

__all__ = ["compute_kl_divergence", "compute_loss", "grpo_microbatch_step", "log_train", "train"]

RewardFunction = Callable[[str, str], float]
"""reward(prompt, completion) -> a finite number."""

log = logging.getLogger("klamp.training.loop")


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
    term = kl if kl is not None else printed_kl(kl_coef)
    objective = build_objective(term, printed_loss(cliprange), max_length=1)
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


def printed_kl(kl_coef: float) -> KLConfig:
    """The guide's KL: k1, with the gradient of the reverse KL."""
    return KLConfig(beta=kl_coef, kl_estimator="k1", kl_gradient="reverse")


def printed_loss(cliprange: float = 0.2) -> LossConfig:
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
        model: the policy; or its `Scorer`, which `Trainer` uses: the same numbers, for less memory and time.
        advantages: [B] or [B, T].
        old_log_probs: under the policy at rollout time; None: the policy itself.
        temperature: that of the sampler.
        totals: size of the whole batch; with it, micro-batches add up exactly to the batch.

    Returns:
        The detached loss and the metadata of `compute_loss`.

    Raises:
        ConfigError: kl_coef > 0 without a reference.
    """
    check_beta(kl_coef, name="kl_coef")
    ref_log_probs = None
    if kl_coef > 0:
        with torch.no_grad():
            ref_log_probs = _log_probs(needed_reference(ref_model, kl_coef), completions, temperature)
    loss, metadata = compute_loss(
        _log_probs(model, completions, temperature),
        old_log_probs,
        advantages,
        completions.mask,
        ref_log_probs=ref_log_probs,
        kl_coef=kl_coef,
        cliprange=cliprange,
        totals=totals,
    )
    loss.backward()
    return loss.detach(), metadata


def needed_reference(ref_model: nn.Module | None, kl_coef: float) -> nn.Module:
    """The reference, refused if it is missing."""
    if ref_model is None:
        raise ConfigError(
            "kl_coef is positive and there is no reference",
            got=f"kl_coef={kl_coef}, ref_model=None",
            why="a KL needs something to be the distance to",
            fix="pass ref_model (a frozen copy of the starting policy), or kl_coef=0",
        )
    return ref_model


def _log_probs(model: nn.Module, completions: Completions, temperature: float) -> LogProbs:
    if isinstance(model, Scorer):
        return model(completions, Ask(temperature=temperature)).logprobs
    return score(model, completions, temperature=temperature).logprobs


class ScalarWriter(Protocol):
    """What `log_train` needs of a TensorBoard SummaryWriter."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object:
        """Record one number."""
        ...


def train(
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
) -> list[dict[str, float]]:
    """The whole GRPO loop on one process, in its plainest form.

    Each step takes the next prompts, samples a group of completions for each, scores them, forms advantages, adds up
    the gradients of the micro-batches and steps the optimizer. What is recorded of it is that of its tokens before the
    update: `klamp doctor` reads the TensorBoard folder as fully as that of `klamp train`.

    Args:
        model: the policy, a causal LM; changed in place.
        prompts: taken in order, over and over.
        reward: (prompt, completion) -> number.
        ref_model: the frozen reference; needed where kl_coef > 0.
        rollout: group size, lengths, temperature; the defaults of `RolloutConfig`.
        optim: micro-batches per step and the bound of the gradient's norm; the defaults of `OptimConfig`.

    Returns:
        One dictionary of numbers per step, as given to `log_train`: `loss`, `policy_loss`, `kl_penalty`, `grad_norm`,
        `learning_rate`, and under klamp's names (docs/metrics.md) what `step_metrics` finds, `beta` and `beta/price`.
        Without a reference there is no KL among them.

    Raises:
        ConfigError: kl_coef > 0 without a reference.
        DataError: no prompts.
        RewardError: the reward raised or ended the program, or returned something that is not a finite number.
    """
    if not prompts:
        raise DataError("there are no prompts", got="prompts=[]", why="a rollout needs one", fix="pass at least one")
    check_beta(kl_coef, name="kl_coef")
    scored = checked(lambda example, text: reward(example.prompt, text), name=getattr(reward, "__name__", "reward"))
    rows = [Example(prompt=prompt) for prompt in prompts]
    config = TrainConfig(
        kl=printed_kl(kl_coef),
        loss=printed_loss(),
        rollout=rollout or RolloutConfig(),
        optim=optim or OptimConfig(),
        run=RunConfig(seed=seed, exact_kl_completions=0),
    )
    context = Context(
        config=config,
        output_dir=Path(),
        scorer=Scorer(model, probe(model)),
        reference=FrozenReference(needed_reference(ref_model, kl_coef)) if kl_coef > 0 else None,
        tokenizer=tokenizer,
        task=Task(name="", train=rows, evaluation={}, rl_skill="", score=scored),
    )
    history: list[dict[str, float]] = []
    for step in range(steps):
        first = step * config.rollout.prompts_per_step
        chosen = [rows[(first + i) % len(rows)] for i in range(config.rollout.prompts_per_step)]
        taken = take_step(context, optimizer, chosen, step=step, total_steps=steps)
        metrics = {name.removeprefix("train/"): value for name, value in taken.metrics.items()}
        log_train(step + 1, metrics, writer=writer)
        history.append(metrics)
    return history


def log_train(step: int, metrics: Mapping[str, float], *, writer: ScalarWriter | None = None) -> str:
    """Record a step: TensorBoard scalars `train/NAME` and one line to the logger `klamp.lab.loop`.

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
