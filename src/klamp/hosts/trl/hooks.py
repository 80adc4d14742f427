"""The methods of TRL's GRPOTrainer that klamp overrides, and no others.

While TRL computes its loss, its `beta` is a `Coefficient`: TRL's own line `beta * per_token_kl` then adds klamp's
penalty, and TRL masks and normalises it with the policy loss, for every loss type.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from klamp.core.masking import masked_log_ratio
from klamp.core.surrogates import Trusted
from klamp.core.types import Advantages, Batch
from klamp.errors import KLWarning
from klamp.hosts.common.anchors import check_room
from klamp.hosts.common.coefficient import (
    KL_SCALE,
    TEACHER,
    Coefficient,
    ShiftedInputs,
    advantages_less_kl,
    batch_of,
    check_once,
    gated_penalty,
    replaced,
)
from klamp.hosts.common.control import NEVER_ZERO, go_on_from
from klamp.hosts.common.rollout import Generation, prepared
from klamp.hosts.trl import fast_scoring, measure, reference, teacher
from klamp.hosts.trl.grpo_config import LOSS_TYPES, host_of
from klamp.hosts.trl.session import Scoring, Session, TRLTrainer, load_state, mode_of, progress, save_state

HostTrainer = cast(Any, object)
"""The class of the trainer that comes after a mixin, so that `super()` is the host's."""
REF = "ref_per_token_logps"


class LossHook:
    """klamp's part of one micro-batch's loss: it replaces TRL's `beta` while TRL computes the loss."""

    def __init__(self, trainer: TRLTrainer, inputs: Mapping[str, Any], beta: float) -> None:
        self.trainer, self.inputs, self.beta = trainer, inputs, beta
        self.terms, self.has_reference = trainer._klamp.terms(trainer, beta), inputs.get(REF) is not None
        self.scored: Scoring | None = None
        """The policy's log-probabilities in this loss; None: the loss has no KL, and made more or less than one."""

    @contextmanager
    def in_place(self) -> Iterator[Any]:
        """A context in which the host's loss has klamp's KL; gives the inputs for that loss."""
        session = self.trainer._klamp
        collected = session.calls.collected(fast_scoring.learning_rows(self.trainer, self.inputs, self.beta))
        with collected as scorings, self._with_shift(scorings) as inputs, self._as_coefficient(scorings):
            yield inputs
        if (self.has_reference and session.control is not None) or session.teacher is not None or len(scorings) == 1:
            self.scored = _only(scorings)

    @contextmanager
    def _with_shift(self, scorings: list[Scoring]) -> Iterator[dict[str, Any]]:
        """A context with the inputs of the loss; a KL in the advantage uses the policy scored in the loss."""

        def advantages() -> Advantages:
            scored = _only(scorings)
            batch = teacher.with_kl(self.trainer, self.inputs, scored)
            batch = reference.with_exact(self.trainer, batch, self.inputs, scored.hidden)
            return self._shift(self.trainer, shifted, batch, threshold)

        # TRL multiplies beta with a KL if it has a reference's numbers; without them it gets the teacher's
        stand_in = {} if self.has_reference or TEACHER not in self.inputs else {REF: self.inputs[TEACHER]}
        inputs = {**self.inputs, **stand_in}
        if not (self.trainer._klamp.trust.is_set or any(term.placement == "advantage" for _, term in self.terms)):
            yield inputs
            return
        shifted, threshold = ShiftedInputs(inputs, advantages), self.trainer.off_policy_mask_threshold
        with replaced(self.trainer, "off_policy_mask_threshold", None):
            yield shifted
        check_once(shifted.uses, "reads of the advantages")

    def _shift(self, trainer: Any, inputs: dict[str, Any], batch: Batch, threshold: float | None) -> Advantages:
        """The advantages less the KL. What TRL masks loses its reward, and keeps the KL with its own token's weight."""
        ratio = inputs.get("importance_sampling_ratio")
        masks = ratio is not None and trainer.vllm_importance_sampling_mode.endswith("mask")
        policy, rewards = batch.policy_logprobs.detach(), batch.advantages
        rewards, old = rewards.view(len(rewards), -1), policy if batch.old_logprobs is None else batch.old_logprobs
        ratio = torch.ones_like(policy) if ratio is None else ratio
        own = masked_log_ratio(old, cast(Tensor, batch.logprobs_of("sampler")), batch.mask).exp() if masks else ratio
        keeps = ratio > 0
        if threshold is not None:
            sampler = self.inputs.get("sampling_per_token_logps", old)
            keeps = keeps & trainer.get_off_policy_mask(rewards, policy, sampler, batch.mask, threshold)
        if (region := trainer._klamp.trust).is_set:
            trusted = Trusted.of(batch, region)
            keeps = keeps & (trusted.weights > 0)
            cut = {name: x for name, x in trusted.metrics.items() if name.endswith("_cut")}
            trainer._klamp.windows[mode_of(trainer)].add_means(cut, batch.mask, batch.mask)
        inputs["importance_sampling_ratio"] = torch.where(keeps, ratio, own)  # TRL's factor of both
        less = advantages_less_kl(replace(batch, advantages=torch.zeros_like(batch.advantages)), self.terms)
        return torch.where(keeps, rewards, 0.0) + less.view(len(rewards), -1) * torch.where(keeps, own / ratio, 1.0)

    @contextmanager
    def _as_coefficient(self, scorings: list[Scoring]) -> Iterator[None]:
        trainer, session = self.trainer, self.trainer._klamp
        if not session.has_kl and (session.teacher is None or session.teacher.term.placement != "loss"):
            yield
            return
        coefficient = Coefficient(float(trainer.beta) or NEVER_ZERO, lambda: self._penalty(_only(scorings)))
        with replaced(trainer, "beta", coefficient):
            yield
        check_once(coefficient.uses, "products of beta with a KL")
        if not self.has_reference:  # what TRL logs as its KL to a reference
            trainer._metrics[mode_of(trainer)]["kl"].pop()

    def _penalty(self, scored: Scoring) -> Tensor:
        trainer, term, inputs = self.trainer, self.trainer._klamp.term, self.inputs
        others = torch.zeros_like(scored.logprobs) + teacher.penalty(trainer, inputs, scored)
        batch, scale = batch_of(inputs, scored.logprobs), inputs.get(KL_SCALE)
        for coefficient, beside in () if self.trainer._klamp.kl is None else self.trainer._klamp.kl.beside():
            others = others + coefficient * gated_penalty(batch, beside, scale)
        if not self.has_reference or self.beta == 0 or term.placement != "loss":
            return others
        batch = reference.with_exact(trainer, batch, inputs, scored.hidden)
        return self.beta * gated_penalty(batch, term, scale) + others


def _only(scorings: list[Scoring]) -> Scoring:
    """The single call of TRL's scoring method inside a loss; the KL uses its log-probabilities."""
    check_once(len(scorings), "calls of _get_per_token_logps_and_entropies")
    return scorings[0]


class KLMixin(HostTrainer):
    """klamp's KL, for a class that derives from it first and from `trl.GRPOTrainer` second."""

    _klamp: Session
    _loss_hook: ClassVar[type[LossHook]] = LossHook
    """How the KL gets into that loss."""
    _never_exact: str = ""

    def _caution(self, text: str) -> None:
        warnings.warn(text[0].upper() + text[1:], KLWarning, stacklevel=3)

    def _refresh_beta(self) -> float:
        """Set TRL's beta to the one in force; never to 0 while the reference is needed."""
        control = self._klamp.control
        if control is None:
            return float(self.beta)
        beta = control.beta(*progress(self))
        self.beta = beta or NEVER_ZERO if control.kl.needs_reference else beta
        return beta

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        session: Session = self._klamp
        wanted = session.needs_hidden
        if model is self.ref_model and len(args) > 1:
            check_room(self.accelerator.unwrap_model(model), args[1], who="reference")
        fast = fast_scoring.scored(self, (model, *args), kwargs, hidden=wanted)
        if fast is None:
            with reference.hidden_states(self, model, wanted=wanted) as states:
                result = super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
            has_states = states and result[0] is not None  # Unsloth scores elsewhere
            hidden = torch.cat(states)[:, -result[0].shape[1] - 1 : -1] if has_states else None
        else:
            result, hidden = (fast["logprobs"], fast.get("entropy"), None), fast.get("hidden")
        if session.calls.scorings is not None:
            session.calls.scorings.append(Scoring(result[0], hidden, args, kwargs))
        return result

    def _host_class(self, method: str) -> type:
        """The class whose method comes after klamp's."""
        line = type(self).__mro__
        return next(cls for cls in line[line.index(KLMixin) + 1 :] if method in vars(cls))

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Any:
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        measure.after_rewards(self, completion_ids_list, rewards)
        return rewards

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        session, beta = self._klamp, self._refresh_beta()
        fast_scoring.settle(self)
        with session.calls.collected() as scorings, fast_scoring.prompts_once(self):
            output = super()._generate_and_score_completions(inputs)
        measure.watch_sampler(self, output)
        if host_of(self) == "TRL":
            measure.watch_positions(self, output)
        if session.teacher is not None:
            teacher.keep_scores(self, inputs, output)
        if session.control is None or output.get(REF) is None:
            return output
        old = self._old_scoring(output, scorings)
        reference.keep_reference(self, output, scorings[-1].hidden)  # TRL scores the reference last
        exact = None
        if old is not None and session.term.value == "exact":
            exact = reference.exact_kl_of(self, output, old.hidden)
        generation = Generation(
            inputs=output,
            old_logprobs=None if old is None else old.logprobs,
            exact_kl=None if exact is None else exact[0],
            rows=inputs,
            lengths=torch.tensor(session.rollout.lengths, device=output["completion_ids"].device),
            group_size=measure.group_size(self),
            accelerator=self.accelerator,
            scorable=session.rollout.scorable,
        )
        reduction = LOSS_TYPES[host_of(self)][self.loss_type]
        return prepared(generation, session.control, self._tokenizer, beta=beta, reduction=reduction)

    def _old_scoring(self, output: Any, scorings: list[Scoring]) -> Scoring | None:
        """The policy's scores before the batch's first update, from TRL if it made them."""
        session, old = self._klamp, output.get("old_per_token_logps")
        if old is not None:
            return next((scoring for scoring in scorings if scoring.logprobs is old), Scoring(old))
        if session.term.clip_method == "none" and session.term.placement != "reward":  # nothing needs them
            return None
        last = scorings[-1]  # the same tokens that the reference was asked for
        with torch.no_grad(), session.calls.collected() as again:
            self._get_per_token_logps_and_entropies(self.model, *last.positional, **last.options)
        return again[-1]

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """The host's loss with klamp's KL; an error if the host's loss does not use klamp's hook."""
        hook = self._loss_hook(self, inputs, self._refresh_beta())
        with hook.in_place() as host_inputs:
            loss = super().compute_loss(model, host_inputs, *args, **kwargs)
        if hook.scored is not None:
            measure.after_loss(self, hook.inputs, hook.scored, hook.beta)
        return loss

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        save_state(self, trial, teacher.fingerprint(self))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Moments and step are the checkpoint's, the learning rate the one asked for, unless groups have their own."""
        schedule = self.lr_scheduler
        rates = {*getattr(schedule, "base_lrs", ())}
        super()._load_optimizer_and_scheduler(checkpoint)
        if isinstance(schedule, LambdaLR) and len(rates) == 1:
            go_on_from(schedule, schedule.last_epoch, *rates)
        load_state(self, checkpoint, teacher.fingerprint(self))
