"""The three places in which verl looks up a KL by its name, and klamp's functions for klamp's names there.

The actor's loss comes first and is given the columns of klamp's driver; in it the policy loss comes next, with the mask
and the old log-probabilities; `kl_penalty`, which is given none of these, comes last, with the same tensor of
log-probabilities. So the former leave notes for the latter.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from klamp.core.gradients import masked_log_ratio
from klamp.core.types import Batch
from klamp.errors import ConfigError
from klamp.hosts.common.coefficient import GATE_KL, KL_MASK, KL_SCALE, REFERENCE_LENGTH, gated_penalty
from klamp.hosts.common.control import KLControl, check_kl
from klamp.hosts.common.versions import check_version, out_of_range
from klamp.hosts.verl.batch_columns import BETA, PER_ROW, PER_TOKEN, RATE
from klamp.hosts.verl.fields_in_verl import controlled, is_ours, loss_kl, needs_driver, needs_policy_loss, reward_kl

LOSSES, ALGORITHMS = "verl.workers.utils.losses", "verl.trainer.ppo.core_algos"
ARGUMENTS = ("logprob", "ref_logprob", "kl_penalty")
"""The arguments of verl's `kl_penalty`."""
Penalty: TypeAlias = Callable[[Tensor, Tensor, str], Tensor]


class _Note(NamedTuple):
    """The mask and old log-probabilities that the policy loss was called with."""

    logprobs: weakref.ref[Tensor]
    mask: Tensor
    old: Tensor


class _Notes:
    """Remembers the note of the last policy loss, the columns of the last actor loss, the factor of the next rate."""

    def __init__(self) -> None:
        self.last: _Note | None = None
        self.columns: Mapping[str, Tensor] = {}
        self.rate, self.rates = 1.0, list[float]()

    def take(self, logprobs: Tensor) -> _Note | None:
        """The note that belongs to these log-probabilities, if there is one; it is given once."""
        note, self.last = self.last, None
        return note if note is not None and note.logprobs() is logprobs else None


_notes = _Notes()


def register() -> None:
    """Make klamp's KL known to verl in this process: in its losses, its reward, its controllers.

    From then on verl's configuration takes `klamp` or `klamp:FIELD=VALUE,...` as

    - `actor.kl_loss_type`: the KL in the loss, per token in nats, value and gradient as `kl_penalty`'s of klamp;
    - `actor.policy_loss.loss_mode`: `klamp` is verl's `vanilla` and `klamp:MODE` its MODE, unchanged, and lets that KL
      have a sequence horizon and off-policy weights, for which it needs the mask and the old log-probabilities;
    - `algorithm.kl_penalty`: k1, for a KL in the reward;
    - `algorithm.kl_ctrl.type`: a controller of the KL in the reward, from `kl_coef` towards `target_kl`.

    Every other name means what it meant. To be called in every process: `klamp.verl.registered` does so on import. A
    second call changes nothing.

    Raises:
        UnsupportedVersion: verl is missing, outside the declared range, or has its hooks elsewhere.

    Source: verl's documentation of `register_policy_loss` and `VERL_USE_EXTERNAL_MODULES`
    """
    installed = check_version("verl")
    algorithms: Any = importlib.import_module(ALGORITHMS)
    losses: Any = importlib.import_module(LOSSES)
    if "klamp" in algorithms.POLICY_LOSS_REGISTRY:
        return
    found = tuple(inspect.signature(algorithms.kl_penalty).parameters)
    if found != ARGUMENTS or losses.kl_penalty is not algorithms.kl_penalty:
        got = f"verl {installed}, whose kl_penalty takes {', '.join(found)}"
        raise out_of_range("verl", got=got)
    losses.kl_penalty = _by_name(losses.kl_penalty, penalty_in_loss)
    algorithms.kl_penalty = _by_name(algorithms.kl_penalty, penalty_in_reward)
    algorithms.get_kl_controller = _controller_by_name(algorithms.get_kl_controller)
    losses.ppo_loss = _with_columns(losses.ppo_loss)
    register_optimizer_step_pre_hook(_lower_rate)
    register_optimizer_step_post_hook(_restore_rate)
    modes = dict(algorithms.POLICY_LOSS_REGISTRY)
    for name, mode in {"klamp": modes["vanilla"], **{f"klamp:{mode}": loss for mode, loss in modes.items()}}.items():
        algorithms.register_policy_loss(name)(_leaving_a_note(mode))


def penalty_in_loss(logprob: Tensor, ref_logprob: Tensor, name: str) -> Tensor:
    """klamp's per-token penalty in nats, without coefficient; verl masks, averages and weighs it. [B, T]

    Raises:
        ConfigError: a name that cannot be read, or one that needs the mask where no policy loss of klamp's ran.
    """
    kl, note, columns = loss_kl(name), _notes.take(logprob), _notes.columns
    term = kl.build_term()
    if needs_driver(kl) and BETA not in columns:
        raise ConfigError(
            "this KL needs klamp's part in verl's trainer",
            got=f"kl_loss_type={name!r}, and a batch without {BETA}",
            why="the groups, the tokens and the step are known there only; what follows from them travels with the "
            "batch",
            fix="set ++trainer.checkpoint_callback_class=klamp.verl.Driver, with the v1 trainer of verl 0.9.1 or newer",
        )
    if term.placement != "loss":
        return torch.zeros_like(logprob)
    if note is None and (needs_policy_loss(term) or columns):
        raise ConfigError(
            "this KL needs klamp's policy loss",
            got=f"kl_loss_type={name!r}",
            why="for a sequence horizon, off-policy weights or a clip it has to know which tokens are trained on, and "
            "how likely they were when they were sampled, which verl tells the policy loss only",
            fix="set actor_rollout_ref.actor.policy_loss.loss_mode=klamp (verl's vanilla), or klamp:MODE for another",
        )
    old = None if note is None else note.old
    batch = Batch(
        policy_logprobs=logprob,
        mask=torch.ones_like(logprob, dtype=torch.bool) if note is None else note.mask.bool(),
        advantages=torch.zeros_like(logprob),
        old_logprobs=old,
        ref_logprobs=ref_logprob,
        sampler_logprobs=old,
        kl_mask=columns.get(KL_MASK),
        gate_kl=columns.get(GATE_KL),
        reference_length=columns.get(REFERENCE_LENGTH),
    )
    return gated_penalty(batch, term, columns.get(KL_SCALE))


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
            fix="use klamp's names in actor.kl_loss_type, actor.policy_loss and algorithm only",
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


def _with_columns(original: Callable[..., Any]) -> Callable[..., Any]:
    """verl's actor loss, which takes the coefficient of the batch where it has one, and keeps its columns at hand."""

    @functools.wraps(original)
    def ppo_loss(config: Any, model_output: Any, data: Any, dp_group: Any = None) -> Any:
        found = [name for name in (*PER_ROW, *PER_TOKEN) if name in set(data.keys())]
        if BETA not in found:
            return original(config, model_output, data, dp_group)
        padded = data.select(*found, "response_mask").to_padded_tensor()
        _notes.columns = {name: padded[name].bool() if name in PER_TOKEN else padded[name] for name in found}
        _notes.rate = float(padded[RATE][0])
        try:
            return original(_with_coefficient(config, float(padded[BETA][0])), model_output, data, dp_group)
        finally:
            _notes.columns = {}

    return ppo_loss


def _with_coefficient(config: Any, beta: float) -> Any:
    """verl's settings of the actor with another coefficient; they share everything else, and cannot be written to."""
    changed = copy.copy(config)
    object.__setattr__(changed, "kl_loss_coef", beta)
    return changed


def _lower_rate(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """kl_lr_guard: the step that follows an actor loss is taken at a part of its rate."""
    _notes.rates = [group["lr"] for group in optimizer.param_groups]
    if _notes.rate < 1:
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * _notes.rate


def _restore_rate(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Put the rate back before verl's schedule looks at it."""
    if _notes.rate < 1:
        for group, rate in zip(optimizer.param_groups, _notes.rates, strict=True):
            group["lr"] = rate
    _notes.rate = 1.0


def _leaving_a_note(original: Callable[..., Any]) -> Callable[..., Any]:
    def policy_loss(old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, response_mask: Tensor, **more: Any):
        _notes.last = _Note(weakref.ref(log_prob), response_mask, old_log_prob)
        return original(
            old_log_prob=old_log_prob, log_prob=log_prob, advantages=advantages, response_mask=response_mask, **more
        )

    return policy_loss
