"""One update of the policy at the service: klamp's loss on the log-probabilities that it sends, then AdamW there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from klamp.core.objective import Objective, grpo_loss
from klamp.diagnostics.statistics import pad_tokens
from klamp.errors import KlampError
from klamp.scoring.scores import Scores
from klamp.training.context import Context
from klamp.training.rollouts import Rollout
from klamp.training.service.connection import Connection
from klamp.training.service.rollout import token_lists
from klamp.training.updates import (
    UpdateOutput,
    added_parts,
    batch_of,
    check_held,
    kl_from_old,
    named_losses,
    not_finite,
)

EPS = 1e-8
"""AdamW's epsilon, that of klamp's own trainer; the SDK's default is 1e-12."""


class PartLoss:
    """The loss of some completions, in the form that `forward_backward_custom` calls on a thread of its own.

    An error in here would leave the client of newer SDKs unusable, and the state could not be saved any more: it is
    kept for `raise_error`, and the gradient is zero.
    """

    def __init__(self, context: Context, rollout: Rollout, part: slice, objective: Objective) -> None:
        self.context, self.rollout, self.part, self.objective = context, rollout, part, objective
        self.prompts, self.responses = (rows[part] for rows in token_lists(rollout.completions))
        self.logprobs = torch.zeros(len(self.prompts), rollout.mask.shape[1])
        self.metrics: dict[str, float] = {}
        self.error: KlampError | None = None

    @property
    def rows(self) -> list[int]:
        """The completions that hold a token; empty ones cannot be sent, and nothing is trained on them."""
        return [i for i, response in enumerate(self.responses) if response]

    def datums(self, tinker: Any) -> list[Any]:
        """What is sent to the service: input and target tokens; the loss has all else here."""
        found = []
        for i in self.rows:
            full = [*self.prompts[i], *self.responses[i]]
            inputs = {"target_tokens": torch.tensor(full[1:])}
            found.append(tinker.Datum(model_input=tinker.ModelInput.from_ints(full[:-1]), loss_fn_inputs=inputs))
        return found

    def __call__(self, data: Sequence[Any], logprobs_list: Sequence[Tensor]) -> tuple[Tensor, dict[str, float]]:
        """The loss, with its gradient in the log-probabilities, and no metrics."""
        try:
            policy = self._response_part(logprobs_list)
            self.logprobs = policy.detach()
            batch = batch_of(
                self.context, self.rollout, self.part, Scores(logits=None, logprobs=policy), self.objective
            )
            loss, metrics = grpo_loss(batch, self.objective, totals=self.rollout.totals)
            metrics["train/loss"] = loss.detach()
            self.metrics = {name: float(value) for name, value in metrics.items()}
            if not torch.isfinite(loss):
                raise not_finite("the loss is not finite", f"loss {float(loss.detach())}")
        except KlampError as error:
            self.error = error
            loss = torch.stack([torch.where(torch.zeros_like(x).bool(), x, 0.0).sum() for x in logprobs_list]).sum()
        return loss, {}

    def _response_part(self, logprobs_list: Sequence[Tensor]) -> Tensor:
        """The log-probabilities of the responses out of those of whole sequences, [b, T], with gradient."""
        length = self.logprobs.shape[1]
        found = [torch.zeros(length) for _ in self.prompts]
        for i, row in zip(self.rows, logprobs_list, strict=True):
            found[i] = pad_tokens(row[None, len(self.prompts[i]) - 1 :], length)[0]
        return torch.stack(found)


def update(
    connection: Connection,
    client: Any,
    context: Context,
    rollout: Rollout,
    objective: Objective,
    *,
    rate: float,
    before_step: Callable[[], None],
) -> UpdateOutput:
    """Do one optimizer step with a rollout, in `gradient_accumulation_steps` calls whose gradients add up.

    Args:
        connection: the session.
        client: the training client.
        context: the run.
        rollout: rated completions.
        objective: the loss, with the beta in force.
        rate: learning rate.
        before_step: called when the gradients are there and the weights are about to move.

    Raises:
        NonFiniteError: the loss, the KL or the log-probabilities are NaN or infinite; the weights are as before.
        ModelError: the service fails.
    """
    seen: list[Tensor] = []
    sums: dict[str, float] = {}
    for part in context.parts(len(rollout.texts)):
        loss = PartLoss(context, rollout, part, objective)
        if loss.rows:
            data = loss.datums(connection.tinker)
            connection.ask("compute gradients", lambda d=data, f=loss: client.forward_backward_custom(d, f))
        if loss.error is not None:
            raise loss.error
        seen.append(loss.logprobs)
        for name, value in added_parts(loss.metrics, rollout, part).items():
            sums[name] = sums.get(name, 0.0) + float(value)
    policy = torch.cat(seen)
    check_held(context, sums)
    before_step()
    return UpdateOutput(
        policy_logprobs=policy,
        entropy=None,
        exact=None,
        exact_forward=None,
        losses=named_losses(sums),
        grad_norm=_step(connection, client, context, rate),
        kl_old=kl_from_old(context, rollout, policy),
        stopped=False,
    )


def _step(connection: Connection, client: Any, context: Context, rate: float) -> float | None:
    """Do one AdamW step at the service; returns the norm of the gradient, if the service tells it."""
    optim = context.config.optim
    params = connection.tinker.AdamParams(
        learning_rate=rate,
        beta1=optim.adam_beta1,
        beta2=optim.adam_beta2,
        eps=EPS,
        weight_decay=optim.weight_decay,
        grad_clip_norm=optim.max_grad_norm,
    )
    answer = connection.ask("take an optimizer step", lambda: client.optim_step(params))
    norms = [value for name, value in (answer.metrics or {}).items() if "grad_norm" in name]
    return norms[0] if norms else None
