"""The places in which verl looks up a KL by its name, and klamp's functions for klamp's names there.

verl gives `kl_penalty` log-probabilities alone. What else a KL needs, the mask, the old log-probabilities and the
columns of klamp's driver, is in the batch of the actor's loss around it, which is kept at hand while that is computed.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import copy
import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from klamp.core.gradients import masked_log_ratio
from klamp.core.types import Batch
from klamp.errors import ConfigError
from klamp.hosts.common.coefficient import GATE_KL, KL_MASK, KL_SCALE, REFERENCE_LENGTH, gated_penalty
from klamp.hosts.common.control import KLControl, check_kl
from klamp.hosts.common.versions import check_version, out_of_range
from klamp.hosts.verl.checking import checked
from klamp.hosts.verl.driver import BETA, PER_ROW, PER_TOKEN
from klamp.hosts.verl.fields_in_verl import controlled, is_ours, loss_kl, needs_driver, reward_kl
from klamp.hosts.verl.teacher import LOSSES as DISTILLATION
from klamp.hosts.verl.teacher import register_losses

LOSSES, ALGORITHMS = "verl.workers.utils.losses", "verl.trainer.ppo.core_algos"
ARGUMENTS = ("logprob", "ref_logprob", "kl_penalty")
"""The arguments of verl's `kl_penalty`."""
MASK, OLD = "response_mask", "old_log_probs"
IN_LOSS = (MASK, OLD, *PER_ROW, *PER_TOKEN)
"""What the KL in the loss may need of the actor's batch."""
Penalty: TypeAlias = Callable[[Tensor, Tensor, str], Tensor]


_batch: dict[str, Tensor] = {}
"""The batch of the actor's loss that is being computed, padded."""


def register(*, check: bool = False) -> None:
    """Make klamp's KL known to verl in this process: in its losses, its reward, its controllers.

    From then on verl's configuration takes `klamp` or `klamp:FIELD=VALUE,...` as

    - `actor.kl_loss_type`: the KL in the loss, per token in nats, value and gradient as `kl_penalty`'s of klamp;
    - `algorithm.kl_penalty`: k1, for a KL in the reward;
    - `algorithm.kl_ctrl.type`: a controller of the KL in the reward, from `kl_coef` towards `target_kl`;
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
    losses.kl_penalty = _by_name(losses.kl_penalty, penalty_in_loss)
    algorithms.kl_penalty = _by_name(algorithms.kl_penalty, penalty_in_reward)
    algorithms.get_kl_controller = _controller_by_name(algorithms.get_kl_controller)
    distillation: Any = importlib.import_module(DISTILLATION)
    loss = _with_batch(losses.ppo_loss)
    distillation.ppo_loss = losses.ppo_loss = checked(loss) if check else loss
    register_losses()


def penalty_in_loss(logprob: Tensor, ref_logprob: Tensor, name: str) -> Tensor:
    """klamp's per-token penalty in nats, without coefficient; verl masks, averages and weighs it. [B, T]

    Raises:
        ConfigError: a name that cannot be read, or one that needs klamp's driver, which is not there; another loss than
            the actor's.
    """
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
        ref_logprobs=ref_logprob,
        sampler_logprobs=known[OLD],
        kl_mask=known.get(KL_MASK),
        gate_kl=known.get(GATE_KL),
        reference_length=known.get(REFERENCE_LENGTH),
    )
    return gated_penalty(batch, term, known.get(KL_SCALE))


def penalty_in_reward(logprob: Tensor, ref_logprob: Tensor, name: str) -> Tensor:
    """k1 of each token in nats; verl masks it, weighs it and takes it from the reward. [B, T]

    Raises:
        ConfigError: a name that cannot be read, or that asks for anything but k1; log-probabilities with a gradient.
    """
    bound = reward_kl(name).kl_max_log_ratio
    if logprob.requires_grad:
        raise ConfigError(
            "klamp's KL in the reward was asked for a gradient",
            got=f"the name {name!r}",
            why="a part of verl that klamp does not know uses it in a loss, where it would do nothing",
            fix="use klamp's names in actor.kl_loss_type and algorithm only",
        )
    everywhere = torch.ones_like(logprob, dtype=torch.bool)
    return masked_log_ratio(logprob, ref_logprob, everywhere, max_log_ratio=bound)


class RewardController:
    """A controller of klamp's for a KL in the reward, as verl's `apply_kl_penalty` calls it.

    verl measures k1, a mean over tokens, then over completions. Where noise makes it negative, it counts as 0.

    Args:
        name: of the controller.
        kl_ctrl: verl's `algorithm.kl_ctrl`, for `kl_coef` and `target_kl`.

    Raises:
        ConfigError: a name that cannot be read, or numbers that the controller refuses.
    """

    def __init__(self, name: str, kl_ctrl: Any) -> None:
        kl = controlled(name, beta=kl_ctrl.kl_coef, target_kl=kl_ctrl.target_kl)
        self.control = KLControl(kl)

    @property
    def value(self) -> float:
        """The beta in force."""
        return self.control.controller.value

    def update(self, current_kl: float, n_steps: int) -> None:
        """Adjust beta to the KL of a step; verl's `n_steps` (a number of completions) is not used.

        Raises:
            NonFiniteError: a KL that is NaN or infinite, as in every host: see `klamp.hosts.common.control.check_kl`.
        """
        check_kl(current_kl)
        self.control.update(max(current_kl, 0.0))


def _by_name(original: Penalty, ours: Penalty) -> Penalty:
    def kl_penalty(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:
        chosen = ours if is_ours(kl_penalty) else original
        return chosen(logprob, ref_logprob, kl_penalty)

    return kl_penalty


def _controller_by_name(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def get_kl_controller(kl_ctrl: Any) -> Any:
        ours = is_ours(kl_ctrl.type)
        return RewardController(kl_ctrl.type, kl_ctrl) if ours else original(kl_ctrl)

    return get_kl_controller


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
                config = _with_coefficient(config, float(padded[BETA][0]))
            return original(config, model_output, data, dp_group)
        finally:
            _batch.clear()

    return ppo_loss


def _with_coefficient(config: Any, beta: float) -> Any:
    """verl's settings of the actor with another coefficient; they share everything else, and cannot be written to."""
    changed = copy.copy(config)
    object.__setattr__(changed, "kl_loss_coef", beta)
    return changed
