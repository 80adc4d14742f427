"""`klamp.check` around verl's actor loss."""
# pyright: reportMissingImports=false

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable
from typing import Any

from klamp.audit.micro_batch import check
from klamp.audit.verdict import Verdict
from klamp.hosts.verl.driver import BETA

AT = (1, 10, 100, 1000)
"""The micro-batches of a process that are checked: in the first one the policy is the reference."""
VERDICTS: list[Verdict] = []


def checked(ppo_loss: Callable[..., Any]) -> Callable[..., Any]:
    """verl's actor loss, which checks some micro-batches on rank 0: warns of what is wrong, and logs each verdict."""
    losses: Any = importlib.import_module("verl.workers.utils.losses")
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
    return check(loss, policy_logprobs=policy, clip=clip, once=False, host="verl", **given, **more)
