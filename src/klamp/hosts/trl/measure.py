"""What klamp measures in a TRL trainer: metrics, the step of beta, the KL of step 0, completions, the sampler."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import Tensor

from klamp.config.loss import Price, price_of
from klamp.core.term import Placement, prepare
from klamp.errors import KLWarning
from klamp.hosts.common.coefficient import batch_of, loss_mask
from klamp.hosts.common.control import beta_metrics, held_kl, mean_spread
from klamp.hosts.common.sampler_weights import SAME, SyncReport, check_sync
from klamp.hosts.common.step_metrics import repeated_pairs, reward_length_correlation
from klamp.hosts.common.step_zero import STEP_ZERO_KL, likely_reasons, step_zero_text
from klamp.hosts.trl.grpo_config import reward_scale
from klamp.hosts.trl.reference import exact_kl_of, weights_are_split
from klamp.hosts.trl.session import Scoring

ROWS = 4
"""Completions that are scored again, where the sampler's log-probabilities drift off the policy's."""
FURTHER = 2.0
"""How many times further off than at the last look the sampler has to be for another one."""


def group_size(trainer: Any) -> int:
    """The number of completions per prompt in the trainer's present mode (training or evaluation)."""
    evaluating = getattr(trainer, "num_generations_eval", None) or trainer.num_generations
    return trainer.num_generations if trainer.model.training else evaluating


def after_loss(trainer: Any, inputs: Any, scored: Scoring, beta: float) -> None:
    """Add a micro-batch to the measurements; at the end of an optimizer step log, check, and adjust beta."""
    session, mode = trainer._klamp, "train" if trainer.model.training else "eval"
    batch, window = batch_of(inputs, scored.logprobs.detach()), session.windows[mode]
    prepared = prepare(batch, session.term)
    window.add(prepared)
    with torch.no_grad():
        exact = exact_kl_of(trainer, inputs, scored.hidden)
    if exact is not None:
        window.add_values("kl/exact", exact[0], exact[1] & prepared.carried)
    if mode == "train" and not trainer.accelerator.sync_gradients:
        return
    found = window.emit(trainer.accelerator)
    price = price_in(trainer, beta, "loss" if session.kl is None else session.kl.kl_placement)
    found |= (beta_metrics if session.control is None else session.control.metrics)(price, session.spread)
    kl = held_kl(found, exact_everywhere=session.term.value == "exact")
    if mode == "train" and kl is not None:
        _check_step_zero(trainer, found["kl/k3"])
        if session.control is not None:
            session.control.update(kl, found, session.rewards)
    for name, value in found.items():
        trainer._metrics[mode][name].append(value)


def price_in(trainer: Any, beta: float, placement: Placement) -> Price:
    """The price of a coefficient in a trainer of TRL's kind, which divides its policy loss and its KL by the same."""
    return price_of(
        beta,
        placement=placement,
        baseline=getattr(trainer, "_baseline", "mean"),
        scale="none" if reward_scale(trainer.args) == "none" else "std",
        group_size=max(group_size(trainer), 2),
    )


def after_rewards(trainer: Any, completion_ids: list[Any], rewards: Tensor) -> None:
    """Keep the rewards of all processes, [B, functions]; log repetition, and whether longer completions earn more."""
    session = trainer._klamp
    groups = (rewards * trainer.reward_weights.to(rewards.device)).nansum(-1).view(-1, group_size(trainer))
    session.lengths = [len(ids) for ids in completion_ids]
    session.scorable = ~torch.isnan(rewards).all(dim=1)
    one = getattr(trainer, "multi_objective_aggregation", "sum_then_normalize") == "sum_then_normalize"
    divided = groups.view(1, -1) if reward_scale(trainer.args) == "batch" else groups
    session.rewards, session.spread = (groups, mean_spread(divided)) if one else (None, None)
    rows = [torch.as_tensor(ids, dtype=torch.long) for ids in completion_ids]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    lengths = torch.tensor(session.lengths)
    repeated = repeated_pairs(ids, torch.arange(ids.shape[1]) < lengths[:, None])
    lengths, repeated = trainer.accelerator.gather(torch.stack([lengths.float(), repeated]).T.to(groups.device)).T
    found = {"length/repeated": repeated.sum() / lengths.sum().clamp(min=1)}
    correlation = reward_length_correlation(groups.flatten(), lengths, groups.shape[1])
    if correlation is not None:
        found["length/reward_correlation"] = correlation
    metrics = trainer._metrics["train" if trainer.model.training else "eval"]
    for name, value in found.items():
        metrics[name].append(float(value))


def _check_step_zero(trainer: Any, kl: float) -> None:
    session = trainer._klamp
    first, session.expected_zero = session.expected_zero, False
    if not first or trainer.state.global_step > 0 or not kl > STEP_ZERO_KL:
        return
    policy, chosen = trainer.accelerator.unwrap_model(trainer.model), not session.starts_at_reference
    new = hasattr(policy, "peft_config") and "ref" not in policy.peft_config
    reasons = likely_reasons(policy, trainer.ref_model, adapter=new, loaded=not chosen)
    if chosen:
        reasons.append("the model passed as ref_model is another one (if that is meant, nothing is wrong)")
    if trainer.is_world_process_zero():
        warnings.warn(step_zero_text(kl, reasons), KLWarning, stacklevel=2)


def watch_sampler(trainer: Any, output: Any) -> None:
    """Warn once, with the likely cause, where the sampler's log-probabilities are not those of the policy."""
    session = trainer._klamp
    told, own = output.get("sampling_per_token_logps"), output.get("old_per_token_logps")
    if told is None or own is None or weights_are_split(trainer):
        return
    mask = loss_mask(output) & told.isfinite()
    gap = float((told - own)[mask].abs().mean()) if bool(mask.any()) else 0.0
    if gap <= max(SAME, FURTHER * session.sync_gap):
        return
    report = sync_report(trainer, output)
    session.sync_gap = gap if report.in_sync else math.inf
    if not report.in_sync:
        trainer._caution(f"sampler and trainer are out of sync at step {trainer.state.global_step + 1}: {report}")


def sync_report(trainer: Any, output: Any) -> SyncReport:
    """Score some completions of a generation batch again, and say whose log-probabilities were reported."""
    mask = loss_mask(output)
    told = output["sampling_per_token_logps"].masked_fill(~mask, torch.nan)
    own = output["old_per_token_logps"].masked_fill(~mask, torch.nan)
    written = output["completion_mask"].bool()
    rows = range(min(ROWS, len(written)))
    args, start = trainer.args, trainer.ref_model
    if start is None or args.sync_ref_model or not trainer._klamp.starts_at_reference or not trainer.state.global_step:
        start = None
    return check_sync(
        trainer.accelerator.unwrap_model(trainer.model),
        [output["prompt_ids"][i][output["prompt_mask"][i].bool()].tolist() for i in rows],
        [output["completion_ids"][i][written[i]].tolist() for i in rows],
        [told[i][written[i]].tolist() for i in rows],
        trainer_logprobs=[own[i][written[i]].tolist() for i in rows],
        temperature=trainer.temperature,
        top_k=args.top_k or 0,
        top_p=args.top_p,
        start=None if start is None else trainer.accelerator.unwrap_model(start),
    )
