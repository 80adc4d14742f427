"""The places in which verl looks up a KL by its name, klamp's losses there, and `klamp.check` of the actor's loss.

verl gives `kl_penalty` log-probabilities alone; `_batch` holds the rest while the actor's loss is computed.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from klamp.audit.micro_batch import check as check_loss
from klamp.audit.verdict import Verdict
from klamp.config.teacher import Tail, TeacherConfig
from klamp.core.masking import repeated_share
from klamp.core.penalty import kl_metrics, token_penalty
from klamp.core.term import Weighted, prepare
from klamp.core.topk import topk_kl
from klamp.core.types import Batch, Scored, check_logprobs
from klamp.errors import ConfigError
from klamp.hosts.common.coefficient import KL_SCALE, advantages_less_kl, batch_of, gated_penalty, replaced
from klamp.hosts.common.versions import check_version, out_of_range
from klamp.hosts.verl.driver import BETA, NAMES, PER_ROW, PER_TOKEN, SAMPLER, nested
from klamp.hosts.verl.overrides import is_ours, loss_kl, named, needs_driver, teacher_of

LOSSES, ALGORITHMS = "verl.workers.utils.losses", "verl.trainer.ppo.core_algos"
DISTILLATION = "verl.trainer.distillation.losses"
PADDING, METRIC = "verl.workers.utils.padding", "verl.utils.metric"
ARGUMENTS = ("logprob", "ref_logprob", "kl_penalty")
MASK, OLD, REF, ADVANTAGES = "response_mask", "old_log_probs", "ref_log_prob", "advantages"
IN_LOSS = (MASK, OLD, REF, ADVANTAGES, *PER_ROW, *PER_TOKEN)
"""What the KL in the loss may need of the actor's batch."""
AT = (1, 10, 100, 1000)
"""The micro-batches of a process that are checked: in the first one the policy is the reference."""
VERDICTS: list[Verdict] = []

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
        check: check verl's actor loss with `klamp.check`, for any KL: micro-batch 1, 10, 100 and 1000 of rank 0.
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
    parameters = tuple(inspect.signature(algorithms.kl_penalty).parameters)
    if parameters != ARGUMENTS or losses.kl_penalty is not algorithms.kl_penalty:
        raise out_of_range("verl", got=f"verl {installed}, whose kl_penalty takes {', '.join(parameters)}")
    losses.kl_penalty = _by_name(losses.kl_penalty)
    distillation: Any = importlib.import_module(DISTILLATION)
    loss = _with_batch(losses.ppo_loss)
    distillation.ppo_loss = losses.ppo_loss = checked(loss) if check else loss
    for head in (True, False):
        names = [name for name, teacher in named().items() if bool(teacher.head_size) == head]
        settings = distillation.DistillationLossSettings(names=names, use_topk=head, use_estimator=not head)
        distillation.register_distillation_loss(settings)(logged_kl_to_teacher)


def penalty_in_loss(logprob: Tensor, ref_logprob: Tensor, name: str) -> Tensor:
    """klamp's per-token penalty in nats, without coefficient; verl masks, averages and weighs it. [B, T]"""
    kl = loss_kl(name)
    term = kl.build_term()
    if not _batch:
        raise ConfigError(
            "klamp's KL was asked for outside of verl's actor loss",
            got=f"kl_loss_type={name!r}",
            why="which tokens are trained on, and how likely they were when they were sampled, is known in there only",
            fix="set VERL_USE_EXTERNAL_MODULES=klamp.verl.registered: then klamp is there before verl's workers are",
        )
    if needs_driver(kl) and BETA not in _batch:
        raise ConfigError(
            "this KL needs klamp's part in verl's trainer",
            got=f"kl_loss_type={name!r}, and a batch without {BETA}",
            why="the groups, the tokens and the step are known there only; what follows from them travels with the "
            "batch",
            fix="set ++trainer.checkpoint_callback_class=klamp.verl.Driver, with the v1 trainer of verl 0.9.1 or newer",
        )
    if term.placement != "loss":
        return torch.zeros_like(logprob)
    return gated_penalty(_scored_batch(logprob, ref_logprob), term, _batch.get(KL_SCALE))


def _scored_batch(policy: Tensor, ref: Tensor) -> Batch:
    """The batch of the actor's loss in klamp's words, under a policy."""
    inputs = {NAMES.get(name, name): values for name, values in _batch.items()}
    return batch_of({ADVANTAGES: torch.zeros_like(policy), **inputs, NAMES[REF]: ref}, policy)


def _by_name(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
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
            _batch.update({name: x.bool() if name in (MASK, *PER_TOKEN) else x for name, x in padded.items()})
            if BETA in _batch:
                config = copy.copy(config)  # verl's settings cannot be written to
                object.__setattr__(config, "kl_loss_coef", float(padded[BETA][0]))
                data = _of_this_policy(
                    data, model_output, Weighted(config.kl_loss_coef, loss_kl(config.kl_loss_type).build_term())
                )
            return original(config, model_output, data, dp_group)
        finally:
            _batch.clear()

    return ppo_loss


def _of_this_policy(data: Any, model_output: Mapping[str, Any], weighted: Weighted) -> Any:
    """The micro-batch with the KL of the policy that is trained now in its advantages; the driver put the old one's."""
    if weighted.term.placement != "advantage":
        return data
    policy = importlib.import_module(PADDING).no_padding_2_padding(model_output["log_probs"], data).detach()
    now, before = (advantages_less_kl(_scored_batch(x, _batch[REF]), [weighted]) for x in (policy, _batch[OLD]))
    shifted = {ADVANTAGES: (_batch[ADVANTAGES] + now - before) * _batch[MASK]}
    return data.copy().update(nested(shifted, data[MASK]) if data[MASK].is_nested else shifted)


def kl_to_teacher(
    *, config: Any, distillation_config: Any, model_output: Mapping[str, Any], data: Any
) -> tuple[Tensor, dict[str, Any]]:
    """klamp's KL to the teacher per token, in nats, [B, T], and metrics; verl masks, averages and weighs it."""
    options = distillation_config.distillation_loss
    if options.use_policy_gradient:
        raise ConfigError(
            "klamp's KL to a teacher was asked for as an advantage of verl's",
            got=f"loss_mode={options.loss_mode!r}, use_policy_gradient=True",
            why="it has its own gradient, which verl would drop",
            fix="set distillation.distillation_loss.use_policy_gradient=False",
        )
    teacher = teacher_of(options.loss_mode)
    batch, coefficient = _distilled(teacher, model_output, data), options.distillation_loss_coef
    prepared = prepare(batch, teacher.build_term())
    penalty, means = token_penalty(prepared), kl_metrics(prepared)
    names = ["teacher/kl"] if prepared.scored.kl is not None else ["teacher/k1", "teacher/kl"]
    metrics = _parts({name: means[name] for name in names}, batch.mask, data) | {"teacher/coef": coefficient}
    # where verl trains on the teacher alone, its own weight is 1
    return penalty if options.use_task_rewards else penalty * coefficient, metrics


def _parts(means: Mapping[str, Tensor], mask: Tensor, data: Any) -> dict[str, Any]:
    """What a micro-batch's means over tokens add to the means of verl's mini-batch."""
    share = data["dp_size"] * mask.sum() / (data["batch_num_tokens"] or mask.sum())
    metric: Any = importlib.import_module(METRIC).Metric
    return {name: metric("sum", mean * share) for name, mean in means.items()}


def logged_kl_to_teacher(*, model_output: Mapping[str, Any], data: Any, **rest: Any) -> tuple[Tensor, dict[str, Any]]:
    """`kl_to_teacher`, and the share of the teacher's numbers (of a head, its likeliest's) that are the one before."""
    penalty, metrics = kl_to_teacher(model_output=model_output, data=data, **rest)
    policy, scores = map(_responses(data), (model_output["log_probs"], data["teacher_logprobs"]))
    mask = _padded(data[MASK]).bool()
    repeated = repeated_share(policy, scores.flatten(2)[..., 0], mask)
    return penalty, metrics | _parts({"teacher/repeated": repeated}, mask, data)


def _responses(data: Any) -> Callable[[Any], Tensor]:
    """verl's function that selects the responses' values from all tokens', [B, T, ...]."""
    return functools.partial(importlib.import_module(PADDING).no_padding_2_padding, data=data)


def _padded(x: Tensor) -> Tensor:
    return x.to_padded_tensor(0) if x.is_nested else x


def _distilled(teacher: TeacherConfig, model_output: Mapping[str, Any], data: Any) -> Batch:
    """What verl hands to a loss of distillation, in klamp's words."""
    responses, mask, old = _responses(data), _padded(data[MASK]), _padded(data[OLD])
    kl: Tensor | None = None
    if teacher.head_size:
        plain, policy_mass, teacher_mass = (
            responses(model_output[name]) for name in ("distillation_losses", "student_mass", "teacher_mass")
        )
        kl = _with_tail(teacher.teacher_tail, plain, policy_mass, teacher_mass)
        policy, scored = torch.zeros_like(kl), torch.zeros_like(kl)  # read by no KL over a head
    else:
        policy, scored = responses(model_output["log_probs"]), responses(data["teacher_logprobs"]).squeeze(-1)
        check_logprobs("teacher_logprobs", scored, mask.bool())
        if teacher.teacher_estimator == "topk":  # a head of no tokens: from the sampled one alone
            weight, no_head = policy.detach() - old, policy.unsqueeze(-1)[..., :0]
            options: Any = {"log_weight": None if teacher.teacher_off_policy == "none" else weight}
            options["direction"] = teacher.teacher_direction
            kl = topk_kl(no_head, no_head, policy, scored.to(policy), mask.bool(), **options)
    return Batch(
        policy_logprobs=policy,
        mask=mask.bool(),
        advantages=torch.zeros_like(policy.detach()),
        old_logprobs=old,
        anchors={"teacher": Scored(scored, kl=kl), "sampler": Scored(old)},
    )


def _with_tail(tail: Tail, plain: Tensor, policy_mass: Tensor, teacher_mass: Tensor) -> Tensor:
    """The forward KL with a tail, from verl's plain sum of q log(q/p) over the head and its two masses. [B, T]"""
    if tail == "none":
        return plain
    if tail == "generalised":
        return plain - teacher_mass + policy_mass
    least = torch.finfo(plain.dtype).eps
    policy, teacher = ((1 - mass).clamp(min=least) for mass in (policy_mass, teacher_mass))
    return plain + teacher * (teacher.log() - policy.log())


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
        with replaced(losses, "no_padding_2_padding", lambda *values: scores.append(padded(*values)) or scores[-1]):
            result = ppo_loss(config, model_output, data, dp_group)
        try:
            VERDICTS.append(_verdict(config, result[0], scores[0], data))
            logging.getLogger("klamp").info("micro-batch %d: %s", calls, VERDICTS[-1])
        except Exception:  # a check stops no training
            logging.getLogger("klamp").warning("the check of micro-batch %d failed", calls, exc_info=True)
        return result

    return with_check


def _verdict(config: Any, loss: Any, policy: Any, data: Any) -> Verdict:
    names = {MASK: "mask", OLD: "old_logprobs", SAMPLER: "sampler_logprobs", "advantages": "advantages"}
    names |= {"responses": "ids"} | ({"ref_log_prob": "ref_logprobs"} if config.use_kl_loss else {})
    columns = data.select(*names, BETA, strict=False).to_padded_tensor()
    beta = float(columns[BETA][0]) if BETA in columns else config.kl_loss_coef
    options: dict[str, Any] = {name: columns[column] for column, name in names.items() if column in columns}
    options |= {"beta": beta, "kl_in": "loss"} if config.use_kl_loss else {}
    clip = (config.clip_ratio_low, config.clip_ratio_high)
    return check_loss(loss, policy_logprobs=policy, clip=clip, once=False, host="verl", **options)
