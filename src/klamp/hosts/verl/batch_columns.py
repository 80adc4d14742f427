"""What klamp's driver adds to a batch of verl's for the loss in its workers: settled once, over the whole batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from klamp.config.loss import Price
from klamp.core.term import Gate
from klamp.core.types import Reduction
from klamp.errors import ConfigError
from klamp.hosts.common.coefficient import GATE_KL, KL_MASK, KL_SCALE, REFERENCE_LENGTH
from klamp.hosts.common.control import KLControl, held_kl, mean_spread
from klamp.hosts.common.rollout import Alone, Generation, prepared
from klamp.hosts.common.window import Window

BETA, RATE = "klamp_beta", "klamp_rate_factor"
"""The coefficient in force, and what the learning rate of the step is multiplied by; a number in every row."""

PER_ROW = (BETA, RATE, KL_SCALE, GATE_KL, REFERENCE_LENGTH)
PER_TOKEN = (KL_MASK,)

REDUCTIONS: Mapping[str, Reduction] = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum": "sequence_sum",
    "seq-mean-token-sum-norm": "fixed_length",
    "token-sum": "sequence_sum",
}
"""verl's loss_agg_mode -> how klamp calls that average; of a sum, the tokens that carry the KL change nothing."""


SAMPLER = "rollout_log_probs"
"""verl's column of what the engine reported; not every engine does."""


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """How verl's configuration makes a loss of it.

    Attributes:
        loss_agg_mode: verl's average over tokens.
        group_size: completions per prompt.
        beta: the coefficient in force.
        price: at that coefficient; None: not known for these advantages.
        leave_one_out: whether a completion's advantage leaves its own reward out of what it is compared with.
    """

    loss_agg_mode: str
    group_size: int
    beta: float
    price: Price | None
    leave_one_out: bool


def columns(
    sampled: Mapping[str, Tensor], prompts: Sequence[str], control: KLControl, tokenizer: Any, settings: StepSettings
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """(columns, metrics): what is added to the batch in the order of its rows, and what was measured, klamp's names.

    The advantages are among the columns where the KL shifts them. The controller takes in the KL of the step.

    Args:
        sampled: verl's columns of the whole batch by verl's names, tokens at the left, padded at the right, [B, T]; of
            the rewards (`rm_scores`) one number for each completion [B], or for each token.
        prompts: verl's uid of each row: which prompt a completion belongs to.
        control: of the run.
        tokenizer: finds the excluded tokens.
        settings: of the run and the step.

    Raises:
        ConfigError: a prompt with more or fewer completions than the others; see `prepared`.
        NonFiniteError: a KL that is NaN or infinite, see `klamp.hosts.common.control.check_kl`.
    """
    order = by_prompt(prompts, settings.group_size)
    generation = _generation(sampled, order, settings.group_size)
    reduction = REDUCTIONS.get(settings.loss_agg_mode)
    found = prepared(generation, control, tokenizer, beta=_taken(control, settings), reduction=reduction)
    metrics = _measured(generation, found, control)
    scores = sampled["rm_scores"][order]
    rewards = (scores.sum(-1) if scores.ndim == 2 else scores).view(-1, settings.group_size)
    metrics |= control.metrics(settings.price or Price(beta=settings.beta), mean_spread(rewards.double()))
    if settings.price is None:
        metrics.pop("beta/price")
    kl = held_kl(metrics, exact_everywhere=False)
    if kl is not None:
        control.update(kl, metrics, rewards)
    back = torch.argsort(order)
    added = {name: found[name][back] for name in (*PER_ROW, *PER_TOKEN) if name in found}
    if control.kl.kl_placement != "loss":
        added["advantages"] = _per_token(found["advantages"], generation.inputs["completion_mask"])[back]
    number = torch.ones(len(order), dtype=torch.float64)
    return added | {BETA: settings.beta * number, RATE: control.rate_factor * number}, metrics


def by_prompt(prompts: Sequence[str], group_size: int) -> Tensor:
    """The order of the rows in which the completions of a prompt stand next to each other. [B]

    Raises:
        ConfigError: some prompt has more or fewer completions than `group_size`.
    """
    order = sorted(range(len(prompts)), key=lambda row: prompts[row])
    sizes = {prompts.count(each) for each in set(prompts)}
    if sizes != {group_size}:
        raise ConfigError(
            "the completions of a prompt are not all in verl's batch",
            got=f"groups of {', '.join(map(str, sorted(sizes)))}",
            why=f"a group of rollout.n={group_size} decides together what its KL is clipped at, and is compared with",
            fix="use a trainer_mode that trains on whole groups (sync), and agent loops with one output per completion",
        )
    return torch.tensor(order)


def _taken(control: KLControl, settings: StepSettings) -> float:
    """What `prepared` takes a completion's KL times: it compares with the mean of the group, own KL included."""
    if control.kl.kl_placement == "reward" and settings.leave_one_out:
        return settings.beta * settings.group_size / (settings.group_size - 1)
    return settings.beta


def for_all_rows(added: Mapping[str, Tensor], real: Tensor, original: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The columns of a batch to which verl has added rows that only fill it up; those carry no KL.

    Args:
        added: columns of the rows that are real.
        real: which rows they are, [B] bool.
        original: columns of all rows that were there before.
    """
    found = {}
    for name, column in added.items():
        everywhere = torch.zeros_like(column[:1]) if name in PER_TOKEN else column[:1]
        whole = original.get(name, everywhere.expand(len(real), *column.shape[1:])).clone()
        whole[real] = column.to(whole.dtype)
        found[name] = whole
    return found


def _generation(sampled: Mapping[str, Tensor], order: Tensor, group_size: int) -> Generation:
    mask, old = sampled["response_mask"][order].bool(), sampled["old_log_probs"][order]
    reported = sampled.get(SAMPLER)
    inputs = {
        "completion_ids": sampled["responses"][order],
        "completion_mask": mask,
        "ref_per_token_logps": sampled["ref_log_prob"][order],
        "old_per_token_logps": old,
        "sampling_per_token_logps": None if reported is None else reported[order],
        "advantages": sampled["advantages"][order],
    }
    return Generation(
        inputs=inputs,
        old_logprobs=old,
        rows=[{}] * len(order),
        lengths=mask.sum(-1),
        group_size=group_size,
        accelerator=Alone(),
    )


def _measured(generation: Generation, found: Mapping[str, Any], control: KLControl) -> dict[str, float]:
    batch = replace(generation, inputs=found).batch()
    term = control.kl.build_term()
    window = Window()
    window.add(batch, term, Gate.of(batch, term))
    return window.emit(Alone())


def _per_token(advantages: Tensor, mask: Tensor) -> Tensor:
    return (advantages if advantages.ndim == 2 else advantages.unsqueeze(-1)) * mask
