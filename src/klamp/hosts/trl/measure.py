"""What klamp measures in a TRL trainer: metrics, the step of beta, the KL of step 0, completions, the sampler."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from klamp.config.loss import Price, price_of
from klamp.core.penalty import kl_metrics, mix_metrics
from klamp.core.term import Placement, prepare, prepare_terms
from klamp.errors import KLWarning
from klamp.hosts.common.anchors import STEP_ZERO_KL, likely_reasons, step_zero_text
from klamp.hosts.common.coefficient import batch_of, loss_mask
from klamp.hosts.common.control import beta_metrics, held_kl, mean_spread
from klamp.hosts.common.sampler_weights import COARSE, SAME, SyncReport, check_sync
from klamp.hosts.common.step_metrics import repeated_pairs, reward_length_correlation
from klamp.hosts.trl import fast_scoring, teacher
from klamp.hosts.trl.grpo_config import reward_scale
from klamp.hosts.trl.reference import exact_kl_of, weights_are_split
from klamp.hosts.trl.session import Scoring, TRLTrainer, log, mode_of
from klamp.scoring.probe import in_mode

ROWS = 4
"""Completions that are scored again, where the sampler's log-probabilities drift off the policy's."""
FURTHER = 2.0
"""How many times further off than at the last look the sampler has to be for another one."""


def group_size(trainer: TRLTrainer) -> int:
    """The number of completions per prompt in the trainer's present mode (training or evaluation)."""
    evaluating = getattr(trainer, "num_generations_eval", None) or trainer.num_generations
    return trainer.num_generations if trainer.model.training else evaluating


def after_loss(trainer: TRLTrainer, inputs: Mapping[str, Any], scored: Scoring, beta: float) -> None:
    """Measure a micro-batch; at the end of an optimizer step log, check, and adjust beta."""
    session, mode = trainer._klamp, mode_of(trainer)
    batch, window = batch_of(inputs, scored.logprobs.detach()), session.windows[mode]
    has_reference = inputs.get("ref_per_token_logps") is not None
    if session.record is not None:
        session.record.take(inputs, batch.policy_logprobs)
    if has_reference:
        prepared = prepare(batch, session.term)
        window.add(prepared)
        with torch.no_grad():
            exact = exact_kl_of(trainer, inputs, scored.hidden)
        if exact is not None:
            window.add_values("kl/exact", exact[0], exact[1] & prepared.carried)
        terms = prepare_terms(batch, session.terms(trainer, beta))
        beside = {name: kl for _, one in terms if one.is_beside for name, kl in kl_metrics(one).items()}
        for name, kl in (beside | mix_metrics(terms)).items():
            window.add_values(name, kl.expand(batch.mask.shape), prepared.carried)
    if session.teacher is not None:
        teacher.add_to(window, trainer, batch)
    if not window.sums or (mode == "train" and not trainer.accelerator.sync_gradients):
        return
    metrics = window.emit(trainer.accelerator)
    metrics |= {} if session.teacher is None else {"teacher/coef": session.teacher.coefficient(trainer)}
    if has_reference:
        _settle_beta(trainer, metrics, beta)
    log(trainer, metrics)


def _settle_beta(trainer: TRLTrainer, metrics: dict[str, float], beta: float) -> None:
    """Add what there is to log of beta to a step's metrics; in training check its KL, and adjust beta."""
    session = trainer._klamp
    price = price_in(trainer, beta, "loss" if session.kl is None else session.kl.kl_placement)
    metrics |= (beta_metrics if session.control is None else session.control.metrics)(price, session.rollout.spread)
    kl = held_kl(metrics, exact_everywhere=session.term.value == "exact")
    if mode_of(trainer) == "train" and kl is not None:
        _check_step_zero(trainer, metrics["kl/k3"])
        if session.control is not None:
            session.control.update(kl, metrics, session.rollout.rewards)


def price_in(trainer: TRLTrainer, beta: float, placement: Placement) -> Price:
    """The price of a coefficient in a trainer like TRL's, which divides policy loss and KL by one number."""
    return price_of(
        beta,
        placement=placement,
        baseline="mean",
        scale="none" if reward_scale(trainer.args) == "none" else "std",
        group_size=max(group_size(trainer), 2),
    )


def after_rewards(trainer: TRLTrainer, completion_ids: list[Any], rewards: Tensor) -> None:
    """Keep the rewards of all processes, [B, functions]; log repetition, and whether longer completions earn more."""
    groups = (rewards * trainer.reward_weights.to(rewards.device)).nansum(-1).view(-1, group_size(trainer))
    rollout = trainer._klamp.rollout
    rollout.lengths = [len(ids) for ids in completion_ids]
    rollout.scorable = ~torch.isnan(rewards).all(dim=1)
    divided = groups.view(1, -1) if reward_scale(trainer.args) == "batch" else groups
    rollout.rewards, rollout.spread = (groups, mean_spread(divided)) if has_one_reward(trainer) else (None, None)
    rows = [torch.as_tensor(ids, dtype=torch.long) for ids in completion_ids]
    ids, lengths = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), torch.tensor(rollout.lengths)
    repeated = repeated_pairs(ids, torch.arange(ids.shape[1]) < lengths[:, None])
    lengths, repeated = trainer.accelerator.gather(torch.stack([lengths.float(), repeated]).T.to(groups.device)).T
    metrics = {"length/repeated": float(repeated.sum() / lengths.sum().clamp(min=1))}
    correlation = reward_length_correlation(groups.flatten(), lengths, groups.shape[1])
    log(trainer, metrics if correlation is None else metrics | {"length/reward_correlation": float(correlation)})


def has_one_reward(trainer: TRLTrainer) -> bool:
    """Whether advantages are formed from one weighted sum of the rewards."""
    return getattr(trainer, "multi_objective_aggregation", "sum_then_normalize") == "sum_then_normalize"


def _check_step_zero(trainer: TRLTrainer, kl: float) -> None:
    warned, chosen = trainer._klamp.warned, not trainer._klamp.reference.is_start
    first, warned.step_zero = not warned.step_zero, True
    if not first or trainer.state.global_step > 0 or not kl > STEP_ZERO_KL:
        return
    policy = trainer.accelerator.unwrap_model(trainer.model)
    new = hasattr(policy, "peft_config") and "ref" not in policy.peft_config
    reasons = likely_reasons(policy, trainer.ref_model, adapter=new, loaded=not chosen)
    if chosen:
        reasons.append("the model passed as ref_model is another one (if that is meant, nothing is wrong)")
    if trainer.is_world_process_zero():
        warnings.warn(step_zero_text(kl, reasons), KLWarning, stacklevel=2)


def watch_sampler(trainer: TRLTrainer, output: Any) -> None:
    """Warn once, with the likely cause, if the sampler's log-probabilities differ from the policy's."""
    warned = trainer._klamp.warned
    sampler, own = output.get("sampling_per_token_logps"), output.get("old_per_token_logps")
    if sampler is None or own is None or weights_are_split(trainer):
        return
    mask = loss_mask(output) & sampler.isfinite()
    gap = float((sampler - own)[mask].abs().mean()) if bool(mask.any()) else 0.0
    if gap <= max(SAME, FURTHER * warned.sync_gap):
        return
    report = sync_report(trainer, output)
    warned.sync_gap = gap if report.in_sync else math.inf
    if not report.in_sync:
        trainer._caution(f"sampler and trainer are out of sync at step {trainer.state.global_step + 1}: {report}")


@torch.no_grad()
def watch_positions(trainer: TRLTrainer, output: Any) -> None:
    """Warn once if padding in front of a prompt changes the log-probabilities that TRL gives to its completion."""
    session, padding = trainer._klamp, (output["prompt_mask"] == 0).sum(-1)
    is_fast = session.fast is not None and not session.fast.reason
    if session.warned.positions or is_fast or "pixel_values" in output or not bool(padding.any()):
        return
    session.warned.positions = True
    if weights_are_split(trainer):
        return
    row, call = int(padding.argmax()), teacher.scoring_call(trainer, output)
    mask = output["completion_mask"][row].bool()

    def scores(start: int) -> Tensor:
        tokens = {name: call[name][row : row + 1, start:] for name in ("input_ids", "attention_mask")}
        return trainer._get_per_token_logps_and_entropies(trainer.model, **{**call, **tokens})[0][0][mask].float()

    with in_mode(trainer.model, training=False):  # dropout would differ from pass to pass
        gaps = (scores(0) - scores(int(padding[row]))).abs()
    bound = COARSE if fast_scoring.is_coarse(trainer, trainer.model) else SAME
    if gaps.numel() and float(gaps.mean()) > bound:
        trainer._caution(
            f"TRL scores prompts with padding in front at other positions than generation: a completion behind "
            f"{int(padding[row])} padding tokens is up to {float(gaps.max()):.2g} nats per token off. The model has "
            "positions that it learned, and TRL passes it none. Set fast_scoring=True, which passes them (it needs a "
            "model that was loaded without dropout), or train on prompts of one length"
        )


def sync_report(trainer: TRLTrainer, output: Any) -> SyncReport:
    """Score some completions of a generation batch again, and say whose log-probabilities were reported."""
    mask, prompts, completions = loss_mask(output), output["prompt_mask"].bool(), output["completion_mask"].bool()
    args, start = trainer.args, trainer.ref_model
    is_start = trainer._klamp.reference.is_start and not args.sync_ref_model and trainer.state.global_step > 0

    def rows(name: str, where: Tensor) -> list[list[Any]]:
        values = output[name] if name.endswith("ids") else output[name].masked_fill(~mask, torch.nan)
        return [row[keep].tolist() for row, keep in zip(values[:ROWS], where[:ROWS], strict=True)]

    return check_sync(
        trainer.accelerator.unwrap_model(trainer.model),
        rows("prompt_ids", prompts),
        rows("completion_ids", completions),
        rows("sampling_per_token_logps", completions),
        trainer_logprobs=rows("old_per_token_logps", completions),
        temperature=trainer.temperature,
        top_k=args.top_k or 0,
        top_p=args.top_p,
        start=trainer.accelerator.unwrap_model(start) if is_start and start is not None else None,
    )
