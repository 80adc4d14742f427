"""The optimizer of a run: AdamW and its schedule; of weights in 16 bits, on float32 copies of them, the master weights.

A bfloat16 number has 8 bits: at a rate of 1e-6 a step is far below the last of them, and most weights would never move.
The masters add up what the model's own weights, which are their rounding, cannot show yet. All that runs the model
(sampling, scoring, the heads, the reference) sees the 16-bit weights alone, as it would without masters.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler

from klamp.core.masking import upcast
from klamp.training.config import TrainConfig

MASTERS = "masters"
"""The key of the masters in the optimizer's saved state."""


class MasterAdamW(AdamW):
    """AdamW on float32 copies of the weights; after every step the weights are the copies, rounded.

    Moments are float32 too. A weight that is float32 already is its own master.

    Args:
        weights: those that are trained, in any data type.
        options: of torch's AdamW.
    """

    def __init__(self, weights: Iterable[Tensor], **options: Any) -> None:
        self.weights = list(weights)
        self.masters = [upcast(weight.detach()) for weight in self.weights]
        super().__init__(self.masters, **options)
        self.register_step_pre_hook(lambda *_: self._take_gradients())
        self.register_step_post_hook(lambda *_: self._round())

    def _take_gradients(self) -> None:
        for weight, master in zip(self.weights, self.masters, strict=True):
            master.grad = None if weight.grad is None else upcast(weight.grad)

    @torch.no_grad()
    def _round(self) -> None:
        for weight, master in zip(self.weights, self.masters, strict=True):
            master.grad = None
            weight.copy_(master)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of the weights; the masters hold theirs during a step only."""
        for weight in self.weights:
            weight.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Moments and settings, as those of any optimizer, and the masters."""
        return {**super().state_dict(), MASTERS: self.masters}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved state; one without masters continues from the weights as they are."""
        super().load_state_dict({name: x for name, x in state_dict.items() if name != MASTERS})
        for master, weight, saved in zip(
            self.masters, self.weights, state_dict.get(MASTERS, self.weights), strict=True
        ):
            master.copy_(saved)
            weight.copy_(master)


def adamw(policy: nn.Module, config: TrainConfig) -> AdamW:
    """AdamW on the weights of a policy that are trained, or on float32 copies of them."""
    weights = [p for p in policy.parameters() if p.requires_grad]
    copies = config.model.master_weights == "float32" and any(p.dtype == torch.bfloat16 for p in weights)
    return (MasterAdamW if copies else AdamW)(
        weights,
        lr=config.optim.learning_rate,
        betas=(config.optim.adam_beta1, config.optim.adam_beta2),
        weight_decay=config.optim.weight_decay,
        fused=all(p.device.type in ("cpu", "cuda") for p in weights),  # one pass over the weights and moments
    )


def schedule_of(optimizer: Optimizer, config: TrainConfig) -> LambdaLR:
    """The schedule of the learning rate over the steps of a run; all updates of a step have one rate."""
    optim, steps = config.optim, config.run.max_steps
    name = "constant_with_warmup" if optim.lr_scheduler_type == "constant" else optim.lr_scheduler_type
    warmup = min(optim.warmup_steps, steps)
    return get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=steps)  # pyright: ignore
