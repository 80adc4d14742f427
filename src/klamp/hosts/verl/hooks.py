"""The places in which verl looks up a KL by its name, klamp's functions there, and `klamp.check` of the actor's loss.

verl gives `kl_penalty` log-probabilities alone. What else a KL needs, the mask, the old log-probabilities and the
columns of klamp's driver, is in the batch of the actor's loss around it, which is kept at hand while that is computed.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import logging
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from klamp.audit.micro_batch import check as check_loss
from klamp.audit.verdict import Verdict
from klamp.core.types import Batch, held_anchors
from klamp.errors import ConfigError
from klamp.hosts.common.coefficient import GATE_KL, KL_MASK, KL_SCALE, REFERENCE_LENGTH, gated_penalty
from klamp.hosts.common.versions import check_version, out_of_range
from klamp.hosts.verl.driver import BETA, PER_ROW, PER_TOKEN
from klamp.hosts.verl.fields_in_verl import is_ours, loss_kl, needs_driver
from klamp.hosts.verl.teacher import LOSSES as DISTILLATION
from klamp.hosts.verl.teacher import register_losses

LOSSES, ALGORITHMS = "verl.workers.utils.losses", "verl.trainer.ppo.core_algos"
ARGUMENTS = ("logprob", "ref_logprob", "kl_penalty")
MASK, OLD = "response_mask", "old_log_probs"
IN_LOSS = (MASK, OLD, *PER_ROW, *PER_TOKEN)
"""What the KL in the loss may need of the actor's batch."""
AT = (1, 10, 100, 1000)
"""The micro-batches of a process that are checked: in the first one the policy is the reference."""
VERDICTS: list[Verdict] = []
Penalty: TypeAlias = Callable[[Tensor, Tensor, str], Tensor]

_batch: dict[str, Tensor] = {}
"""The batch of the actor's loss that is being computed, padded."""


def register(*, check: bool = False) -> None:
    """Make klamp's KL known to verl's losses in this process.

    From then on verl's configuration takes `klamp` or `klamp:FIELD=VALUE,...` as

    - `actor.kl_loss_type`: the KL in the loss, per token in nats, value and gradient as `kl_penalty`'s of klamp;
    - `distillation.distillation_loss.loss_mode`: the KL to a teacher, with names of `TeacherConfig`'s fields.

    Every other name means what it meant. To be called in every process, before verl's workers are imported:
    `klamp.verl.registered` does so on import. A second call changes nothing.

    Args:
        check: check verl's actor loss with `klamp.check`, whatever its KL: micro-batch 1, 10, 100 and 1000 of rank 0.
            `klamp.verl.checked` does so on import.

    Raises:
        UnsupportedVersion: verl is missing, outside the declared range, or has its hooks elsewhere.

    Source: verl's documentation of `VERL_USE_EXTERNAL_MODULES`
    """
    installed = check_version("verl")
    algorithms: Any = importlib.import_module(ALGORITHMS)
    losses: Any = importlib.import_module(LOSSES)
    if losses.kl_penalty.__module__ == __name__:
        return
    found = tuple(inspect.signature(algorithms.kl_penalty).parameters)
    if found != ARGUMENTS or losses.kl_penalty is not algorithms.kl_penalty:
        got = f"verl {installed}, whose kl_penalty takes {', '.join(found)}"
        raise out_of_range("verl", got=got)
    losses.kl_penalty = _by_name(losses.kl_penalty)
    distillation: Any = importlib.import_module(DISTILLATION)
    loss = _with_batch(losses.ppo_loss)
    distillation.ppo_loss = losses.ppo_loss = checked(loss) if check else loss
    register_losses()


def penalty_in_loss(logprob: Tensor, ref_logprob: Tensor, name: str) -> Tensor:
    """klamp's per-token penalty in nats, without coefficient; verl masks, averages and weighs it. [B, T]"""
    kl, known = loss_kl(name), _batch
    term = kl.build_term()
    if not known:
        raise ConfigError(
            "klamp's KL was asked for outside of verl's actor loss",
            got=f"kl_loss_type={name!r}",
            why="which tokens are trained on, and how likely they were when they were sampled, is known in there only",
            fix="set VERL_USE_EXTERNAL_MODULES=klamp.verl.registered: then klamp is there before verl's workers are",
        )
    if needs_driver(kl) and BETA not in known:
        raise ConfigError(
            "this KL needs klamp's part in verl's trainer",
            got=f"kl_loss_type={name!r}, and a batch without {BETA}",
            why="the groups, the tokens and the step are known there only; what follows from them travels with the "
            "batch",
            fix="set ++trainer.checkpoint_callback_class=klamp.verl.Driver, with the v1 trainer of verl 0.9.1 or newer",
        )
    if term.placement != "loss":
        return torch.zeros_like(logprob)
    batch = Batch(
        policy_logprobs=logprob,
        mask=known[MASK],
        advantages=torch.zeros_like(logprob),
        old_logprobs=known[OLD],
        anchors=held_anchors(ref_logprob, known[OLD], mask=known.get(KL_MASK), gate=known.get(GATE_KL)),
        reference_length=known.get(REFERENCE_LENGTH),
    )
    return gated_penalty(batch, term, known.get(KL_SCALE))


def _by_name(original: Penalty) -> Penalty:
    def kl_penalty(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:
        chosen = penalty_in_loss if is_ours(kl_penalty) else original
        return chosen(logprob, ref_logprob, kl_penalty)

    return kl_penalty


def _with_batch(original: Callable[..., Any]) -> Callable[..., Any]:
    """verl's actor loss, which keeps its batch at hand for klamp's KL, and takes the coefficient that is in there."""

    @functools.wraps(original)
    def ppo_loss(config: Any, model_output: Any, data: Any, dp_group: Any = None) -> Any:
        if not (config.use_kl_loss and is_ours(config.kl_loss_type)):
            return original(config, model_output, data, dp_group)
        padded = data.select(*IN_LOSS, strict=False).to_padded_tensor()
        try:
            _batch.update({name: each.bool() if name in (MASK, *PER_TOKEN) else each for name, each in padded.items()})
            if BETA in _batch:
                config = copy.copy(config)  # verl's settings cannot be written to
                object.__setattr__(config, "kl_loss_coef", float(padded[BETA][0]))
            return original(config, model_output, data, dp_group)
        finally:
            _batch.clear()

    return ppo_loss


def checked(ppo_loss: Callable[..., Any]) -> Callable[..., Any]:
    """verl's actor loss, which checks some micro-batches on rank 0: warns of what is wrong, and logs each verdict."""
    losses: Any = importlib.import_module(LOSSES)
    calls = 0

    @functools.wraps(ppo_loss)
    def with_check(config: Any, model_output: Any, data: Any, dp_group: Any = None) -> Any:
        nonlocal calls
        calls += 1
        if calls not in AT:
            return ppo_loss(config, model_output, data, dp_group)
        padded, scores = losses.no_padding_2_padding, list[Any]()
        losses.no_padding_2_padding = lambda *given: scores.append(padded(*given)) or scores[-1]
        try:
            result = ppo_loss(config, model_output, data, dp_group)
        finally:
            losses.no_padding_2_padding = padded
        try:
            VERDICTS.append(_verdict(config, result[0], scores[0], data))
            logging.getLogger("klamp").info("micro-batch %d: %s", calls, VERDICTS[-1])
        except Exception:  # a check stops no training
            logging.getLogger("klamp").warning("the check of micro-batch %d failed", calls, exc_info=True)
        return result

    return with_check


def _verdict(config: Any, loss: Any, policy: Any, data: Any) -> Verdict:
    names = {"response_mask": "mask", "old_log_probs": "old_logprobs", "rollout_log_probs": "sampler_logprobs"}
    names |= {"advantages": "advantages", "responses": "ids"}
    names |= {"ref_log_prob": "ref_logprobs"} if config.use_kl_loss else {}
    found = data.select(*names, BETA, strict=False).to_padded_tensor()
    beta = float(found[BETA][0]) if BETA in found else config.kl_loss_coef
    more: dict[str, Any] = {"beta": beta, "kl_in": "loss"} if config.use_kl_loss else {}
    clip = (config.clip_ratio_low, config.clip_ratio_high)
    given = {ours: found[theirs] for theirs, ours in names.items() if theirs in found}
    return check_loss(loss, policy_logprobs=policy, clip=clip, once=False, host="verl", **given, **more)
