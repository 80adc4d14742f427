"""The methods of TRL's GRPOTrainer that klamp overrides, and no others.

While TRL computes its loss, its `beta` is a `Coefficient`: TRL's own line `beta * per_token_kl` then adds klamp's
penalty, and TRL masks and normalises it with the policy loss, whatever the loss type.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from klamp.config import TRL_LOSS_TYPES
from klamp.core.advantages import Baseline
from klamp.core.types import Reduction
from klamp.errors import KLWarning
from klamp.hosts.common.coefficient import KL_SCALE, TEACHER, Coefficient, batch_of, check_once, gated_penalty
from klamp.hosts.common.control import NEVER_ZERO, go_on_from
from klamp.hosts.common.rollout import Generation, needs_old_logprobs, prepared
from klamp.hosts.trl import fast_scoring, measure, reference, teacher
from klamp.hosts.trl.session import Scoring, Session, load_state, only_scoring, save_state

if TYPE_CHECKING:
    from trl import GRPOTrainer as Host
else:
    Host = object


class KLMixin(Host):
    """klamp's KL, for a class that derives from it first and from `trl.GRPOTrainer` second."""

    _klamp: Session
    _host: str = "TRL"
    """Whose loss it is."""
    _loss_types: Mapping[str, Reduction | None] = TRL_LOSS_TYPES
    """How the host's loss types make tokens a number."""
    _baseline: Baseline = "mean"
    """What rewards are compared with; TRL's own is the mean of the group."""
    _never_exact: str = ""
    """Why no trainer of this class can have the exact KL; empty where one can."""

    def _caution(self, text: str) -> None:
        warnings.warn(text[0].upper() + text[1:], KLWarning, stacklevel=3)

    def _refresh_beta(self) -> float:
        """Set TRL's beta to the one in force; never to 0 while the reference is needed."""
        control = self._klamp.control
        if control is None:
            return float(self.beta)
        step, total = self.state.global_step, max(self.state.max_steps, 1)
        self.beta = control.host_beta(step, total)
        return control.beta(step, total)

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        session = self._klamp
        wanted = session.needs_hidden
        fast = fast_scoring.scored(self, (model, *args), kwargs, hidden=wanted)
        if fast is None:
            with reference.hidden_states(self, model, wanted=wanted) as kept:
                result = super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
            hidden = reference.of_completions(kept, result[0])
        else:
            result, hidden = (*fast[:2], None), fast[2]
        if session.seen is not None:
            session.seen.append(Scoring(result[0], hidden, args, kwargs))
        return result

    def _host_class(self, method: str) -> type:
        """The class whose method comes after klamp's."""
        line = type(self).__mro__
        return next(each for each in line[line.index(KLMixin) + 1 :] if method in vars(each))

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Any:
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        measure.after_rewards(self, completion_ids_list, rewards)
        return rewards

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        before = getattr(self, "_buffered_inputs", None)
        inputs = super()._prepare_inputs(generation_batch)
        args, buffered = cast(Any, self.args), cast(Any, self._buffered_inputs)
        if buffered is before or not fast_scoring.cuts_anew(self):
            return inputs
        anew = fast_scoring.cut(buffered, args.gradient_accumulation_steps)
        self._buffered_inputs = cast(Any, anew)
        return anew[self._step % args.steps_per_generation]

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        session, beta = self._klamp, self._refresh_beta()
        fast_scoring.settle(self)
        with session.listening() as seen, fast_scoring.prompts_once(self):
            output = super()._generate_and_score_completions(inputs)
        measure.watch_sampler(self, output)
        if session.teacher is not None:
            teacher.keep_scores(self, inputs, output)
        referred = session.control is not None and output.get("ref_per_token_logps") is not None
        if not referred and session.teacher is None:
            return output
        old = self._old_scoring(output, seen)
        old_logprobs = None if old is None else old.logprobs
        if session.control is not None and referred:
            reference.keep_reference(self, output, seen[-1].hidden)  # TRL scores the reference last
            whole = None
            if old is not None and session.term.value == "exact":
                whole = reference.exact_kl_of(self, output, old.hidden)
            generation = Generation(
                inputs=output,
                old_logprobs=old_logprobs,
                exact_kl=None if whole is None else whole[0],
                rows=inputs,
                lengths=torch.tensor(session.lengths, device=output["completion_ids"].device),
                group_size=measure.group_size(self),
                accelerator=self.accelerator,
                scorable=session.scorable,
            )
            reduction = self._loss_types[self.loss_type]
            output = prepared(generation, session.control, self._tokenizer, beta=beta, reduction=reduction)
        if session.teacher is not None:
            output["advantages"] = teacher.in_advantages(self, output, old_logprobs)
        return output

    def _old_scoring(self, output: Any, seen: list[Scoring]) -> Scoring | None:
        """The policy's scores before the batch's first update, from TRL if it made them."""
        session = self._klamp
        if output.get("old_per_token_logps") is not None:
            made = [scored for scored in seen if scored.logprobs is output["old_per_token_logps"]]
            return made[0] if made else Scoring(output["old_per_token_logps"])
        terms = [session.term] * (output.get("ref_per_token_logps") is not None)
        terms += [] if session.teacher is None else [session.teacher.term]
        if not any(map(needs_old_logprobs, terms)):
            return None
        # the same tokens that the reference was asked for, or where there is none the teacher
        given = (seen[-1].positional, seen[-1].options) if seen else ((), teacher.scoring_call(self, output))
        with torch.no_grad(), session.listening() as again:
            self._get_per_token_logps_and_entropies(self.model, *given[0], **given[1])
        return again[-1]

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """TRL's loss; an error where TRL's loss does not use klamp's hook."""
        before = self._klamp.losses
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        if self._klamp.control is not None:
            check_once(self._klamp.losses - before, "calls of klamp's hook")
        return loss

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        session = self._klamp
        session.losses += 1
        beta = self._refresh_beta()
        with session.listening(fast_scoring.learning_rows(self, inputs, beta)) as seen:
            controlled = session.control is not None and session.control.kl.needs_reference
            if controlled or (session.teacher is not None and session.teacher.term.placement == "loss"):
                loss = self._loss_with_penalty(model, inputs, seen, beta)
            else:
                loss = super()._compute_loss(model, inputs)
        if session.record is not None and len(seen) == 1:
            session.record.take(inputs, seen[0].logprobs.detach())
        if inputs.get("ref_per_token_logps") is not None and (session.control is not None or len(seen) == 1):
            measure.after_loss(self, inputs, only_scoring(seen), beta)
        if session.teacher is not None:
            teacher.after_loss(self, inputs, only_scoring(seen).logprobs)
        return loss

    def _loss_with_penalty(self, model: Any, inputs: Any, seen: list[Scoring], beta: float) -> Any:
        term, outer = self._klamp.term, float(self.beta)
        referred = inputs.get("ref_per_token_logps") is not None
        # TRL multiplies beta with a KL where it has a reference's numbers; without one the teacher's stand in for them
        given = inputs if referred else {**inputs, "ref_per_token_logps": inputs[TEACHER]}

        def penalty() -> Tensor:
            scored = only_scoring(seen)
            taught = teacher.penalty(self, inputs, scored.logprobs, scored.hidden)
            if not referred or beta == 0 or term.placement != "loss":
                return torch.zeros_like(scored.logprobs) + taught
            batch = reference.with_exact(self, batch_of(inputs, scored.logprobs), inputs, scored.hidden)
            return beta * gated_penalty(batch, term, inputs.get(KL_SCALE)) + taught

        coefficient = Coefficient(outer or NEVER_ZERO, penalty)
        self.beta = coefficient
        try:
            loss = super()._compute_loss(model, given)
        finally:
            self.beta = outer
        check_once(coefficient.uses, "products of beta with a KL")
        if not referred:  # what TRL logs as its KL to a reference
            self._metrics["train" if model.training else "eval"]["kl"].pop()
        return loss

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        save_state(self, trial)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Moments and step are the checkpoint's, the learning rate the one asked for, unless groups have their own."""
        schedule = self.lr_scheduler
        rates = {*getattr(schedule, "base_lrs", ())}
        super()._load_optimizer_and_scheduler(checkpoint)
        if isinstance(schedule, LambdaLR) and len(rates) == 1:
            go_on_from(schedule, schedule.last_epoch, *rates)
        load_state(self, checkpoint)
