"""What tests do with a trainer: runs, batches, losses, gradients, and a model's own numbers beside them."""

import copy
from pathlib import Path
from typing import Any

import torch
from tests.hosts.trl.hosts import dataset, klamp_trainer

from klamp.config import KLConfig
from klamp.hosts.trl.grpo_trainer import join


def trained(made: Any, folder: Any, *, resume: Any = None, **options: Any) -> Any:
    """A klamp trainer that has trained a copy of the model."""
    trainer = klamp_trainer(copy.deepcopy(made), folder, **options)
    trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    return trainer


def run(make: Any, folder: Path, path: str, base: Any, **options: Any) -> tuple[list[float], Any]:
    extra = {"eval_dataset": dataset()} if "eval_strategy" in options else {}
    given = {**options.pop("trainer", {}), **extra}
    policy = copy.deepcopy(base)
    policy.config._name_or_path = path
    torch.manual_seed(7)  # TRL 1.10 draws an adapter's weights before it sets its seed
    trainer = make(policy, folder, trainer=given, **({"beta": 0.3, "max_steps": 3} | options))
    inner, losses = trainer.compute_loss, []

    def noting(*args: Any, **kwargs: Any) -> Any:
        losses.append(inner(*args, **kwargs))
        return losses[-1]

    trainer.compute_loss = noting
    torch.manual_seed(11)
    trainer.train()
    return [loss.item() for loss in losses], trainer


def with_kl(trainer: Any, kl: KLConfig | None, **args: Any) -> Any:
    """A klamp trainer given another KL (None: TRL's own), as if it had been built with it; its reference stays."""
    for name, value in args.items():
        setattr(trainer.args, name, value)
        if hasattr(trainer, name):
            setattr(trainer, name, value)
    trainer.args.beta = trainer.args.beta if kl is None else kl.beta
    join(trainer, kl, None, chosen=True)
    return trainer


def rows_of(prompts: int = 2, generations: int = 2, **columns: Any) -> list[dict[str, Any]]:
    """Data rows as TRL's sampler hands them out."""
    return [row for row in dataset(**columns).to_list()[:prompts] for _ in range(generations)]


def generated(trainer: Any, seed: int = 5, rows: Any = None) -> dict[str, Any]:
    torch.manual_seed(seed)
    return trainer._generate_and_score_completions(rows or rows_of())


def loss_of(trainer: Any, inputs: dict[str, Any]) -> torch.Tensor:
    return trainer.compute_loss(trainer.model, inputs)


def gradient_of(trainer: Any, loss: torch.Tensor) -> torch.Tensor:
    trainer.model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten().clone() for p in trainer.model.parameters() if p.grad is not None])


def plain_logits(made: Any, inputs: dict[str, Any]) -> torch.Tensor:
    """The logits that the completions were predicted from, by a forward of the model alone. [B, T, V]"""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    length = inputs["completion_ids"].shape[1]
    return made(input_ids=ids, attention_mask=mask).logits[:, -length - 1 : -1]


def plain_logprobs(logits: torch.Tensor, inputs: dict[str, Any]) -> torch.Tensor:
    return logits.log_softmax(-1).gather(-1, inputs["completion_ids"].unsqueeze(-1)).squeeze(-1)
